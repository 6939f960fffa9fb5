"""A worker joins a queue: whether it may, and whose settings hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from batchq import commands
from batchq.config import BatchPolicy
from batchq.errors import BackendAuthError, BackendUnavailableError, BatchqError
from batchq.keys import Keys
from batchq.store import Link
from batchq_workers.config import WorkerConfig
from batchq_workers.report import model_of

log = logging.getLogger("batchq.worker")

_NOT_YET: Final = {"max_batch_cost": 0, "padded": 0}
"""What holds where the queue's settings are those of a worker that knew nothing of these."""


class RefusedStartError(BatchqError):
    """The worker must not start; the message says why."""

    code = "config.start"


def queue_config(policy: BatchPolicy) -> dict[str, int]:
    """Return the settings as Redis keeps them: whole numbers, times in microseconds, 0 for no budget."""
    return {
        "max_batch_size": policy.max_batch_size,
        "max_delay_us": int(policy.max_delay * 1e6),
        "capacity": policy.capacity,
        "capacity_bytes": policy.capacity_bytes,
        "max_batch_cost": policy.max_batch_cost or 0,
        "padded": int(policy.padded),
    }


def policy_that_holds(queue: str, wanted: BatchPolicy, config: Mapping[str, int]) -> BatchPolicy:
    """Return the queue's settings, and warn of those that are not as wanted; ``config`` is what Redis keeps of them."""
    mine = queue_config(wanted)
    holds = {
        name: config.get(name, _NOT_YET.get(name, value) if config else value) for name, value in mine.items()
    }
    if holds == mine:
        return wanted
    for name, value in mine.items():
        if holds[name] != value:
            log.warning(
                "%s holds for queue %s, set by a worker that is alive; not %s as given here",
                _shown(name, holds[name]),
                queue,
                _shown(name, value),
            )
    return BatchPolicy(
        max_batch_size=holds["max_batch_size"],
        max_delay=holds["max_delay_us"] / 1e6,
        capacity=holds["capacity"],
        capacity_bytes=holds["capacity_bytes"],
        max_batch_cost=holds["max_batch_cost"] or None,
        padded=bool(holds["padded"] and holds["max_batch_cost"]),
    )


def _shown(name: str, value: int) -> str:
    return f"no {name}" if name == "max_batch_cost" and not value else f"{name}={value}"


def check_models(config: WorkerConfig, others: Mapping[str, str]) -> None:
    """Raise RefusedStartError where one of the queue's live workers, name -> report, runs another model and that is not allowed."""
    if config.allow_mixed:
        return
    for name, report in others.items():
        other = model_of(report)
        if other is not None and other != config.model:
            raise RefusedStartError(
                f"worker {name} serves queue {config.queue!r} with --model {other}, this one has {config.model}: callers would get "
                f"either's answers. Use another --queue, or --allow-mixed if they are the same to callers"
            )


def check_eviction(link: Link, redis_name: str) -> None:
    """Raise RefusedStartError where Redis may evict requests; warn where that cannot be found out."""
    try:
        info = link.call(commands.call(b"INFO", b"memory"))
    except (BackendAuthError, BackendUnavailableError) as error:
        if link.broken:
            raise
        log.warning(
            "cannot check that Redis does not evict keys (maxmemory-policy must be noeviction): %s", error
        )
        return
    fields = dict(line.split(":", 1) for line in info.decode().split("\r\n") if ":" in line)
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise RefusedStartError(
            f"Redis at {redis_name} has maxmemory-policy {policy} and may evict requests: set it to noeviction"
        )


def join(link: Link, keys: Keys, config: WorkerConfig, report: str, redis_name: str) -> BatchPolicy:
    """Register a worker with its first report; return the settings that hold. Raises RefusedStartError."""
    check_eviction(link, redis_name)
    reported = link.call(commands.report(keys, config.name, report, queue_config(config.policy)))
    try:
        check_models(config, reported.others)
    except RefusedStartError:
        link.call(commands.report(keys, config.name, ""))
        raise
    return policy_that_holds(config.queue, config.policy, reported.config)
