"""Which devices the children of a worker run on: what ``--device`` says, what there is, and what each child gets to see of it.

The parent never imports torch, and never opens a GPU: a short-lived process looks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from batchq.errors import ConfigError

DEFAULT_DEVICE: Final = "cpu"
LOOK_FOR: Final = 60.0
"""Seconds that looking for devices may take: importing torch from a slow disk takes its time, a broken driver never answers."""
ALLOWED: Final = (
    "'auto', or one or more of 'cpu', 'mps', 'cuda:0', 'cuda:1' … with commas between them, or 'cuda' for a model that spreads itself "
    "over all GPUs"
)
_GPU: Final = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")
# Not -m: see slots._CHILD.
_LOOK: Final = "import sys; sys.path[:] = [p for p in sys.path if p]; from batchq_workers.devices import look; look(int(sys.argv[1]))"


# --- what --device says ---


def parse_devices(text: object) -> tuple[str, ...]:
    """Return the devices that ``--device`` names, each once; ``("auto",)`` stands for those that will be found.

    Raises ConfigError that names the bad item and what is allowed.
    """

    def bad(why: str) -> ConfigError:
        return ConfigError(f"device={text!r}: {why}; allowed are {ALLOWED} (default {DEFAULT_DEVICE!r})")

    if not isinstance(text, str):
        raise bad("not a text")
    names = tuple(name.strip() for name in text.split(","))
    for index, name in enumerate(names):
        if not name:
            raise bad("an empty name")
        if name not in ("auto", "cpu", "mps", "cuda") and _GPU.fullmatch(name) is None:
            raise bad(f"there is no device {name!r}")
        if name in names[:index]:
            raise bad(f"{name!r} is there twice (processes_per_device has several share it)")
    if "auto" in names and len(names) > 1:
        raise bad("'auto' stands alone")
    if "cuda" in names and any(map(_GPU.fullmatch, names)):
        raise bad("'cuda' are all GPUs, and those beside it are some of them")
    return names


def gpu_number(name: str) -> int | None:
    """Return N of ``cuda:N``; None for any other device."""
    match = _GPU.fullmatch(name)
    return int(match[1]) if match else None


# --- what a child gets to see ---


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return what CUDA_VISIBLE_DEVICES lets through (numbers, or UUIDs of GPUs and MIG slices); None: everything.

    As CUDA reads it: what stands behind the first empty or negative entry does not count.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    end = next((n for n, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return tuple(names[:end])


def name_inside(name: str) -> str:
    """Return what a child calls its device: the one GPU that it sees is its first."""
    return name if gpu_number(name) is None else "cuda:0"


def child_environment(
    name: str, devices: Sequence[str], threads: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a child on the device ``name``, one of ``devices``.

    A child on ``cuda:N`` sees that GPU alone: the N-th that this process sees. One beside GPUs that has none sees none. ``threads`` are for
    OpenMP, and with it torch, MKL and OpenBLAS, unless the environment says already how many.
    """
    changed = {"OMP_NUM_THREADS": str(threads)} if not environment.get("OMP_NUM_THREADS") else {}
    number = gpu_number(name)
    if number is not None:
        visible = visible_gpus(environment)
        changed["CUDA_VISIBLE_DEVICES"] = str(number) if visible is None else visible[number]
    elif name != "cuda" and any(device.startswith("cuda") for device in devices):
        changed["CUDA_VISIBLE_DEVICES"] = ""
    return {**environment, **changed}


# --- what there is ---


@dataclass(frozen=True, slots=True)
class Found:
    """What a look has found: GPUs that this process may see, whether there is Apple's mps, and why torch could not tell ('': it could)."""

    gpus: int = 0
    mps: bool = False
    trouble: str = ""


def choose(names: tuple[str, ...], found: Found) -> tuple[str, ...]:
    """Return the devices to run on; raise ConfigError where one of them does not exist."""
    if names == ("auto",):
        gpus = tuple(f"cuda:{number}" for number in range(found.gpus))
        return gpus or (("mps",) if found.mps else ("cpu",))
    for name in names:
        if gpus_needed((name,)) > found.gpus:
            there_are = (
                "there is no GPU that this process may use"
                if not found.gpus
                else "there is one GPU, cuda:0"
                if found.gpus == 1
                else f"there are {found.gpus} GPUs, cuda:0 to cuda:{found.gpus - 1}"
            )
            trouble = f" (torch cannot be imported: {found.trouble})" if found.trouble else ""
            raise ConfigError(f"device {name} does not exist: {there_are}{trouble}")
    return names


def gpus_needed(names: Sequence[str]) -> int:
    """Return how many GPUs there must be for all of these devices to exist."""
    return max((gpu_number(name) or 0) + 1 if name.startswith("cuda") else 0 for name in names)


def find(
    text: str, environment: Mapping[str, str], stopped: Callable[[], bool] = lambda: False
) -> tuple[str, ...]:
    """Return the devices to run on: those that ``text`` names, or for ``auto`` all GPUs, else mps, else the CPU.

    ``stopped`` ends the search; the answer is then ``()``. Raises ConfigError where a device does not exist, or where it cannot be found
    out within ``LOOK_FOR`` seconds.
    """
    names = parse_devices(text)
    needed = gpus_needed(names)
    if names != ("auto",) and not needed:
        return names  # the CPU exists; mps will say so itself if it does not
    visible = visible_gpus(environment)
    if visible is not None and len(visible) < needed:
        return choose(names, Found(len(visible)))
    found = _find(needed, stopped)
    if found is None:
        return ()
    return choose(names, found if visible is None else replace(found, gpus=min(found.gpus, len(visible))))


def _find(needed: int, stopped: Callable[[], bool]) -> Found | None:
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-c", _LOOK, str(needed)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # torch may have much to say about a driver
    )
    patience = time.monotonic() + LOOK_FOR
    while True:
        try:
            output, _ = process.communicate(timeout=0.1)
            break
        except subprocess.TimeoutExpired:
            late = time.monotonic() > patience
            if not late and not stopped():
                continue
            process.kill()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # what hangs in the driver survives even that
                process.communicate(timeout=1)
            if not late:
                return None
            raise _trouble(f"takes more than {LOOK_FOR:g} s") from None
    if stopped():
        return None
    try:
        return Found(**json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        code = process.returncode
        raise _trouble(f"fails with {f'signal {-code}' if code < 0 else f'exit code {code}'}") from None


def _trouble(what: str) -> ConfigError:
    return ConfigError(f"looking for GPUs {what}: is their driver well?")


# --- in the process that looks ---


def look(needed: int) -> None:
    """Print what there is, as a line of JSON. Where so many GPUs are needed and the driver knows of them, torch is not asked."""
    gpus = _gpus_of_driver() if needed else 0
    fields: dict[str, Any] = {"gpus": gpus}
    if not needed or gpus < needed:
        try:
            import torch

            if torch.cuda.is_available():
                fields["gpus"] = max(gpus, torch.cuda.device_count())
            fields["mps"] = bool(torch.backends.mps.is_available())
        except ModuleNotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever a broken installation does
            fields["trouble"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(fields))


def _gpus_of_driver() -> int:
    """Return how many GPUs NVIDIA's driver lets this process see: quick, and without torch."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0
