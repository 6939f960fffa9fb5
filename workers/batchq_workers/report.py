"""What a worker reports of itself to Redis, once a second; ``batchq.stats`` reads it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

REPORT_EVERY: Final = 1.0


class Counts(NamedTuple):
    """What children have done: the fields of their boards. Seconds are sums over the batches."""

    batches: float = 0.0
    requests: float = 0.0
    run_seconds: float = 0.0
    wait_seconds: float = 0.0

    def plus(self, other: Counts) -> Counts:
        """Return the sums."""
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def since(self, before: Counts) -> Counts:
        """Return the differences."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class Means:
    """The means over the last interval in which there was a batch, all children together; the rate is over the last interval of all."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._sums = Counts()
        self._means = (0.0, 0.0, 0.0)
        self._rate = 0.0

    def add(self, counts: Iterable[Counts], now: float) -> None:
        """Add what was done up to now; intervals much shorter than the usual would be noise, and run on."""
        for each in counts:
            self._sums = self._sums.plus(each)
        seconds = now - self._since
        if seconds < REPORT_EVERY / 2:
            return
        batches, requests, run, wait = self._sums
        if batches:
            self._means = (requests / batches, run / batches, wait / batches)
        self._rate = requests / seconds
        self._since, self._sums = now, Counts()

    def fields(self) -> dict[str, float]:
        """Return them as fields of a report."""
        size, run, wait = self._means
        return {
            "batch_size": round(size, 2),
            "run_seconds": round(run, 6),
            "wait_seconds": round(wait, 6),
            "rate": round(self._rate, 2),
        }


def report_text(
    *, model: str, host: str, state: str, means: Means, children: Sequence[tuple[int, str, str]]
) -> str:
    """Return a report; ``children`` are (number, device, state)."""
    fields: dict[str, Any] = {"model": model, "host": host, "state": state, **means.fields()}
    fields["children"] = [
        {"child": number, "device": device, "state": state} for number, device, state in children
    ]
    return json.dumps(fields, separators=(",", ":"))


def model_of(report: str) -> str | None:
    """Return the model that another worker's report names; None where it names none: it is of another version."""
    with contextlib.suppress(ValueError):
        fields = json.loads(report)
        if isinstance(fields, dict) and isinstance(fields.get("model"), str):
            return str(fields["model"])
    return None
