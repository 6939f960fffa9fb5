"""What ``stats()`` answers: a queue's depth, rates and totals, and what its workers last reported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStats:
    """A worker's last report.

    ``age``: seconds since that report. ``batch_size``, ``run_seconds``, ``wait_seconds``: recent means of a
    batch's size, of the model's time for one, and of how long a batch's oldest request had waited. ``rate``:
    answers a second.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStats:
    """A queue at one moment.

    ``depth``: pending requests by lane ("high", "normal", "low"). ``oldest_age``: seconds that the oldest of
    them has waited, 0 where nothing waits. ``solo``: requests to be run alone. ``in_flight``: requests in
    batches that run now. ``accepted`` to ``dead``: totals. ``drain_rate``: answers a second.
    ``mean_batch_size``: recent.
    """

    queue: str
    depth: dict[str, int]
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
