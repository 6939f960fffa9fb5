"""What ``stats()`` answers: a queue's depth, rates and totals, and what its workers last reported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from batchq.config import DEFAULT_CAPACITY, WORKER_ALIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildStats:
    """A process of a worker's that runs the model.

    ``child``: its number, or that of the last one in its place. ``device``: as ``--device`` names it. ``state``: "loading", "ready",
    "restarting" (it has died), "draining" or "ended".
    """

    child: int
    device: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStats:
    """A worker's last report.

    ``age``: seconds since that report. ``state``: "loading", "ready" (one of its children is) or "draining". ``batch_size``,
    ``run_seconds``, ``wait_seconds``: recent means of a batch's size, of the model's time for one, and of how long a batch's oldest
    request had waited. ``rate``: answers a second. ``children``: () where they are not known: an older worker, or none is needed.
    """

    id: str
    model: str
    host: str
    age: float
    state: str
    batch_size: float
    run_seconds: float
    wait_seconds: float
    rate: float
    children: tuple[ChildStats, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStats:
    """A queue at one moment.

    ``depth``: pending requests by lane ("high", "normal", "low"). ``groups``: how many batch keys they have. ``oldest_age``: seconds
    that the oldest of them has waited, 0 where nothing waits. ``solo``: requests to be run alone. ``in_flight``: batches that run now.
    ``accepted`` to ``dead``: totals. ``drain_rate``: answers a second. ``mean_batch_size``: recent.
    """

    queue: str
    depth: dict[str, int]
    groups: int = 0
    oldest_age: float
    solo: int
    in_flight: int
    capacity: int
    accepted: int
    rejected: int
    completed: int
    expired: int
    failed: int
    batches: int
    dead: int
    drain_rate: float
    mean_batch_size: float
    workers: tuple[WorkerStats, ...] = ()


def from_answers(queue: str, answers: list[Any]) -> QueueStats:
    """Make Redis' answers to ``commands.stats`` readable."""
    high, normal, low, solo, *rest = answers
    oldest_heads, oldest_groups = rest[:3], rest[3:6]
    groups, leases, dead, counters, config, workers, clock = rest[6:]
    now = int(clock[0]) + int(clock[1]) / 1e6
    totals = _pairs(counters)
    settings = _pairs(config)
    ages = [now - int(head.partition(b";")[0]) / 1e6 for head in oldest_heads if head]
    ages += [now - float(first[1]) / 1e6 for first in oldest_groups if first]
    reports = [_report(name, report, now) for name, report in zip(workers[::2], workers[1::2], strict=True)]
    live = tuple(
        sorted(
            (report for report in reports if report and report.age < WORKER_ALIVE),
            key=lambda worker: worker.id,
        )
    )

    def total(name: str) -> int:
        return int(totals.get(name, "0"))

    running = [worker.batch_size for worker in live if worker.batch_size]
    batches = total("batches")
    return QueueStats(
        queue=queue,
        depth={
            "high": high + total("grouped_h"),
            "normal": normal + total("grouped_n"),
            "low": low + total("grouped_l"),
        },
        groups=len(groups),
        oldest_age=max([0.0, *ages]),
        solo=solo,
        in_flight=leases,
        capacity=int(settings.get("capacity", DEFAULT_CAPACITY)),
        accepted=total("accepted"),
        rejected=total("rejected"),
        completed=total("completed"),
        expired=total("expired"),
        failed=total("failed"),
        batches=batches,
        dead=dead,
        drain_rate=float(totals.get("drain_rate", "0")) if live else 0.0,
        mean_batch_size=sum(running) / len(running)
        if running
        else (total("taken") / batches if batches else 0.0),
        workers=live,
    )


def _pairs(flat: list[bytes]) -> dict[str, str]:
    texts = [item.decode("utf-8", "replace") for item in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _report(name: bytes, report: bytes, now: float) -> WorkerStats | None:
    try:
        reported, _, text = report.split(b";", 2)
        fields = json.loads(text)
        return WorkerStats(
            id=name.decode(),
            model=str(fields["model"]),
            host=str(fields["host"]),
            age=max(0.0, now - int(reported) / 1e6),
            state=str(fields["state"]),
            batch_size=float(fields["batch_size"]),
            run_seconds=float(fields["run_seconds"]),
            wait_seconds=float(fields["wait_seconds"]),
            rate=float(fields["rate"]),
            children=tuple(
                ChildStats(child=int(child["child"]), device=str(child["device"]), state=str(child["state"]))
                for child in fields.get("children", ())
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # a report of another version: not worth failing for
