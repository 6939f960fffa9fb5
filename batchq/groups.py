"""The pending requests of one group: their lanes, what they cost, and what a batch of them holds. The rules stand in ``policy``."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

from batchq.config import DEFAULT_COST, BatchPolicy

LANE_ORDER: Final = ("h", "n", "l")
AGED: Final = 1.0
"""Seconds after which the oldest request of a lane is granted a place, and every fourth batch goes to the oldest."""
TOMBSTONES: Final = 64
"""How many notes of what has gone are left where they are, beside one for each that is there."""


class Waiting(Protocol):
    """What the policy has to know about a request.

    ``enqueued``, ``deadline``: seconds. ``size``: bytes. ``lane``: 'h', 'n' or 'l'. ``group``: hashable, equal for
    those that may share a batch. ``cost``: at least 0, None counts 1. ``pending`` is written by ``Pending`` alone: true while the
    request waits.
    """

    enqueued: float
    deadline: float
    size: int
    lane: str
    group: Any
    cost: float | None
    pending: Any


R = TypeVar("R", bound=Waiting)


class Group(Generic[R]):
    """The pending requests of one group.

    A request stands in it if its ``pending`` is this group. One that has left stays in its lane as a tombstone until it is met or swept
    out. ``entry``, ``lane``, ``full`` are for ``Pending``: how it has filed this group, by its oldest request, the highest lane that is
    not empty, and whether it is full.
    """

    __slots__ = (
        "_cost",
        "_lanes",
        "_longest",
        "_policy",
        "_tombstones",
        "count",
        "entry",
        "full",
        "key",
        "lane",
    )

    def __init__(self, key: Hashable, policy: BatchPolicy) -> None:
        self.key = key
        self._policy = policy
        self._lanes: dict[str, deque[R]] = {}
        self._tombstones = 0
        self._cost = 0.0
        self._longest = 0.0  # of all that were here; not less than that of those which are
        self.count = 0
        self.entry: tuple[float, int, Group[R]] | None = None
        self.lane = ""
        self.full = False

    def append(self, request: R) -> None:
        """Add a request at the end of its lane."""
        request.pending = self
        waiting = self._lanes.get(request.lane)
        if waiting is None:
            lanes = {**self._lanes, request.lane: (waiting := deque())}
            self._lanes = {lane: lanes[lane] for lane in LANE_ORDER if lane in lanes}
        waiting.append(request)
        self.count += 1
        if self._policy.max_batch_cost is not None:
            cost = cost_of(request)
            self._cost += cost
            self._longest = max(self._longest, cost)

    def remove(self, requests: list[R]) -> None:
        """Note that these have left: out of their lanes, or as tombstones; see ``bury``."""
        for request in requests:
            request.pending = None
        self.count -= len(requests)
        if self._policy.max_batch_cost is not None:
            self._cost -= sum(map(cost_of, requests))
        if not self.count:
            self._cost = self._longest = 0.0
            if self._tombstones:
                self._lanes.clear()
                self._tombstones = 0

    def bury(self) -> None:
        """Note that a request which has left stands where it stood."""
        if not self.count:
            self._lanes.clear()
            self._tombstones = 0
            return
        self._tombstones += 1
        if self._tombstones > self.count + TOMBSTONES:
            # a sweep for every `count` that leave: O(1) each, and callers who give up cannot fill the memory
            for lane in self._lanes:
                self._lanes[lane] = deque(self.requests(lane))
            self._tombstones = 0

    def requests(self, lane: str) -> Iterable[R]:
        """Return the requests of a lane, in order."""
        return (request for request in self._lanes.get(lane, ()) if request.pending is self)

    def heads(self, late: list[R], cutoff: float = float("-inf")) -> list[R]:
        """Return the first request of each lane, the high one first; move what is too late in front of it to ``late``."""
        heads = []
        for waiting in self._lanes.values():
            while waiting:
                first = waiting[0]
                if first.pending is not self:
                    self._tombstones -= 1
                elif first.deadline < cutoff:
                    late.append(first)
                else:
                    heads.append(first)
                    break
                waiting.popleft()
        return heads

    def seems_full(self) -> bool:
        """Tell whether the requests make a full batch; maybe because of the cost of one that has left, if batches are padded."""
        budget = self._policy.max_batch_cost
        if self.count >= self._policy.max_batch_size or budget is None:
            return self.count >= self._policy.max_batch_size
        return (self.count * self._longest if self._policy.padded else self._cost) >= budget

    def is_full(self) -> bool:
        """Tell whether the requests make a full batch."""
        if self._policy.padded and self.count < self._policy.max_batch_size and self.seems_full():
            self._longest = max(cost_of(request) for lane in self._lanes for request in self.requests(lane))
        return self.seems_full()

    def fill(self, heads: list[R], late: list[R], cutoff: float, now: float, limit: int | None) -> list[R]:
        """Move a batch out of the lanes, which begin with these ``heads``; and to ``late`` what is too late on the way."""
        policy = self._policy
        batch: list[R] = []
        free = policy.max_batch_size
        if limit is not None:
            free = max(1, min(free, limit))
        bill = None if policy.max_batch_cost is None else _Bill(policy.max_batch_cost, policy.padded)
        granted: list[R] = []
        for head in sorted(heads, key=_enqueued) if len(heads) > 1 else ():
            if now - head.enqueued > AGED and len(granted) < free and (bill is None or bill.holds(head)):
                granted.append(head)
        free -= len(granted)
        for head in heads:
            places = free + (head in granted)
            waiting = self._lanes[head.lane]
            while places and waiting:
                request = waiting[0]
                if request.pending is not self:
                    self._tombstones -= 1
                elif request.deadline < cutoff:
                    late.append(request)
                elif bill is None or request in granted or bill.holds(request):
                    batch.append(request)
                    places -= 1
                else:
                    places = 0  # nothing is skipped over: now only those follow that were granted a place
                    break
                waiting.popleft()
            free = places  # a granted place is always used: its request is still the lane's head
        return batch


class _Bill:
    """What a batch costs so far."""

    __slots__ = ("_budget", "_count", "_longest", "_padded", "_spent")

    def __init__(self, budget: float, padded: bool) -> None:
        self._budget = budget
        self._padded = padded
        self._count = 0
        self._spent = self._longest = 0.0

    def holds(self, request: Waiting) -> bool:
        """Tell whether the batch may hold this one as well, and count it if so."""
        cost = cost_of(request)
        longest = max(self._longest, cost)
        spent = longest * (self._count + 1) if self._padded else self._spent + cost
        if self._count and spent > self._budget:
            return False
        self._count, self._longest, self._spent = self._count + 1, longest, spent
        return True


def cost_of(request: Waiting) -> float:
    """Return what a request counts towards ``max_batch_cost``."""
    return DEFAULT_COST if request.cost is None else request.cost


def _enqueued(request: Waiting) -> float:
    return request.enqueued
