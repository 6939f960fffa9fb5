"""How many CPUs this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may keep busy, at least 1: its affinity, or what its container may use if that is less.

    Two threads of one core count once, as torch counts them: a model that computes gains little from the second.
    """
    quotas = _quotas(root)
    return max(1, int(min([_cores(root), *quotas])))


def _cores(root: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):  # not on macOS
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        place = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(place.read_text())
        except OSError:
            return len(cpus)
    return len(cores)


def _quotas(root: Path) -> list[float]:
    """Return the limits, in CPUs, of this process' control groups (cgroup v2 and v1) and of all that hold them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            tops = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup/cpu"]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for top in tops:
            group = top
            found += _quota(group)
            # inside a container the path may be the one outside of it: what does not exist sets no limit
            for part in () if ".." in parts else parts:
                group /= part
                found += _quota(group)
    return found


def _quota(group: Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return [int(quota) / int(period)] if quota != "max" else []
    with contextlib.suppress(OSError, ValueError):
        micros = int((group / "cpu.cfs_quota_us").read_text())
        return [micros / int((group / "cpu.cfs_period_us").read_text())] if micros > 0 else []
    return []
