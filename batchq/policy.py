"""When is a batch due, and what goes into it: pure, the clock is an argument.

The rules are those of the Redis scripts, so that a LocalClient batches as a queue on Redis does:

- A batch is **due** when ``max_batch_size`` requests are pending, or the oldest of them has waited
  ``max_delay``.
- What can no longer be answered in time, **deadline < now + 1.25 x the recent run time of a batch**, is
  dropped on the way and its place goes to the next. Without this a queue that is over its capacity serves
  only what is about to expire.
- **Lanes**: high before normal before low, first in first out in each. But the oldest request of a lane that
  has waited more than a second is granted a place, so that no lane starves.
- **Capacity**: so many requests, and bytes, may be pending; the low lane fills at most half of the requests.

All times are float seconds of one clock; which one does not matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, Protocol, TypeVar

from batchq.config import BatchPolicy

LANE_ORDER: Final = ("h", "n", "l")
AGED: Final = 1.0
"""Seconds after which the oldest request of a lane is granted a place."""
DEADLINE_MARGIN: Final = 1.25
"""How many recent run times must be left for a request that goes into a batch."""
CAP_SECONDS: Final = 60.0
"""Seconds for which batches stay smaller after the device ran out of memory."""

_RUN_TIME_WEIGHT: Final = 0.2
_TOMBSTONES: Final = 64


class Waiting(Protocol):
    """What the policy has to know about a request.

    ``enqueued``, ``deadline``: seconds. ``size``: bytes. ``lane``: 'h', 'n' or 'l'. ``pending`` is written by
    ``Pending`` alone.
    """

    enqueued: float
    deadline: float
    size: int
    lane: str
    pending: bool


R = TypeVar("R", bound=Waiting)


class RunTime:
    """The recent run time of a batch: a moving mean, in seconds; 0 until one has run."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def ran(self, seconds: float) -> None:
        """Note that a batch took ``seconds``."""
        self.seconds += (seconds - self.seconds) * (_RUN_TIME_WEIGHT if self.seconds else 1.0)

    def all_dropped(self) -> None:
        """Note that requests were dropped and nothing was left to run: halve it.

        Without this one slow run (the first, which warms the model up) would make each later request look
        hopeless for ever, because nothing would run that could show otherwise.
        """
        self.seconds /= 2


class Cap:
    """A lower limit of the batch size for a while, after a batch did not fit into the device's memory."""

    __slots__ = ("_limit", "_until")

    def __init__(self) -> None:
        self._limit: int | None = None
        self._until = 0.0

    def out_of_memory(self, size: int, now: float) -> None:
        """Note that a batch of ``size`` did not fit: no more than half of it for the next 60 s."""
        half = max(1, size // 2)
        self._limit = half if self._limit is None or now >= self._until else min(half, self._limit)
        self._until = now + CAP_SECONDS

    def limit(self, now: float) -> int | None:
        """Return how many requests a batch may hold now; None for no limit of its own."""
        return self._limit if now < self._until else None


class Pending(Generic[R]):
    """The requests that wait for a batch. Not thread-safe. Each call costs O(batch), amortized."""

    __slots__ = ("_counts", "_lanes", "bytes", "count", "policy")

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.count = 0
        self.bytes = 0
        self._counts = dict.fromkeys(LANE_ORDER, 0)
        # what was discarded stays in its deque as a tombstone (not pending any more) until it is met or swept
        # out
        self._lanes: dict[str, deque[R]] = {lane: deque() for lane in LANE_ORDER}

    def __len__(self) -> int:
        return self.count

    def depth(self, lane: str) -> int:
        """Return how many requests of a lane are pending."""
        return self._counts[lane]

    def capacity(self, lane: str) -> int:
        """Return how many requests of a lane may be pending: half of all for the low one, at least 1."""
        capacity = self.policy.capacity
        return max(1, capacity // 2) if lane == "l" else capacity

    def fits(self, lane: str, count: int, size: int) -> bool:
        """Tell whether ``count`` more requests of together ``size`` bytes may be added to a lane."""
        return (
            self.count + count <= self.policy.capacity
            and self.bytes + size <= self.policy.capacity_bytes
            and self._counts[lane] + count <= self.capacity(lane)
        )

    def add(self, requests: Iterable[R]) -> None:
        """Append requests to their lanes; the caller has asked ``fits``."""
        for request in requests:
            request.pending = True
            self._lanes[request.lane].append(request)
            self._counts[request.lane] += 1
            self.count += 1
            self.bytes += request.size

    def discard(self, request: R) -> None:
        """Remove a request wherever it stands; one that is not pending is left alone."""
        if not request.pending:
            return
        self._remove(request)
        lane = request.lane
        waiting = self._lanes[lane]
        # a sweep for every len(waiting) / 2 discards: O(1) each, and callers who give up cannot fill the
        # memory
        if len(waiting) > 2 * self._counts[lane] + _TOMBSTONES:
            self._lanes[lane] = deque(request for request in waiting if request.pending)

    def clear(self) -> list[R]:
        """Remove and return everything."""
        found = [request for lane in LANE_ORDER for request in self._lanes[lane] if request.pending]
        for request in found:
            self._remove(request)
        for waiting in self._lanes.values():
            waiting.clear()
        return found

    def oldest(self) -> float | None:
        """Return when the oldest pending request was enqueued; None where nothing is pending."""
        heads = [self._head(lane) for lane in LANE_ORDER]
        return min((head.enqueued for head in heads if head is not None), default=None)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until a batch is due: 0 for now, at most ``max_delay``; None if empty."""
        oldest = self.oldest()
        if oldest is None:
            return None
        delay = self.policy.max_delay
        # a stamp far ahead of the clock: the clock stepped back, and waiting for it to catch up could take
        # hours
        if self.count >= self.policy.max_batch_size or oldest - now > delay:
            return 0.0
        return min(max(0.0, oldest + delay - now), delay)

    def take(self, now: float, run_time: float = 0.0, limit: int | None = None) -> tuple[list[R], list[R]]:
        """Remove and return the next batch, due or not, high lane first; and what was dropped on the way.

        ``run_time`` is the recent run time of a batch in seconds; ``limit`` lowers ``max_batch_size``, 1 at
        least.
        """
        cutoff = now + DEADLINE_MARGIN * run_time
        expired: list[R] = []
        batch: list[R] = []
        free = self.policy.max_batch_size
        if limit is not None:
            free = max(1, min(free, limit))
        aged = []
        for lane in LANE_ORDER:
            head = self._live_head(lane, cutoff, expired)
            if head is not None and now - head.enqueued > AGED:
                aged.append((head.enqueued, lane))
        granted = {lane for _, lane in sorted(aged, key=lambda found: found[0])[:free]}
        free -= len(granted)
        for lane in LANE_ORDER:
            places = free + (lane in granted)
            waiting = self._lanes[lane]
            while places and self._live_head(lane, cutoff, expired) is not None:
                request = waiting.popleft()
                self._remove(request)
                batch.append(request)
                places -= 1
            free = places  # a granted place is always used: its request is still the lane's head
        return batch, expired

    def _remove(self, request: R) -> None:
        request.pending = False
        self._counts[request.lane] -= 1
        self.count -= 1
        self.bytes -= request.size

    def _head(self, lane: str) -> R | None:
        waiting = self._lanes[lane]
        while waiting:
            if waiting[0].pending:
                return waiting[0]
            waiting.popleft()
        return None

    def _live_head(self, lane: str, cutoff: float, expired: list[R]) -> R | None:
        while (head := self._head(lane)) is not None and head.deadline < cutoff:
            self._remove(head)
            expired.append(head)
        return head
