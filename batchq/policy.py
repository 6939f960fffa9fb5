"""When is a batch due, and what goes into it: pure, the clock is an argument.

The rules are those of the Redis scripts, so that a LocalClient batches as a queue on Redis does:

- **Groups**: only requests of one group share a batch. A group is **due** when it is full, or its oldest request
  has waited ``max_delay``. It is full when ``max_batch_size`` requests are pending in it, or their cost reaches
  ``max_batch_cost``.
- A group that is not due never blocks one that is. Of the due ones a group in which a high request is pending goes
  first, then one with normal requests, then one with low ones only; among equals the one with the oldest request.
  But every fourth batch is that of the due group with the oldest request of all, if that has waited for more than a
  second, so that no group starves.
- What can no longer be answered in time, **deadline < now + 1.25 x the recent run time of a batch**, is
  dropped on the way and its place goes to the next. Without this a queue that is over its capacity serves
  only what is about to expire.
- **Lanes**, inside a group: high before normal before low, first in first out in each. But the oldest request of a
  lane that has waited more than a second is granted a place, so that no lane starves.
- **Cost**: a batch ends before the first request, in that order, with which it would cost more than
  ``max_batch_cost``; nothing is skipped over. Granted places count first, and a batch's first request goes whatever it
  costs. A batch costs the sum of its requests' costs, or, ``padded``, the largest of them x its size.
- **Capacity**: so many requests, and bytes, may be pending, over all groups; the low lane fills at most half of the
  requests.

All times are float seconds of one clock; which one does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, Generic

from batchq.config import BatchPolicy
from batchq.groups import AGED, LANE_ORDER, TOMBSTONES, Group, R, Waiting

__all__ = ["AGED", "CAP_SECONDS", "DEADLINE_MARGIN", "LANE_ORDER", "Cap", "Pending", "RunTime", "Waiting"]

DEADLINE_MARGIN: Final = 1.25
"""How many recent run times must be left for a request that goes into a batch."""
CAP_SECONDS: Final = 60.0
"""Seconds after which the batch size may double again that the device's memory had made smaller."""

_RUN_TIME_WEIGHT: Final = 0.2
_TURNS: Final = 4

_Entry = tuple[float, int, Group[R]]
"""A group in a heap: when its oldest request was enqueued, and a number, so that groups are not compared. A group that is filed anew has
another entry, and this one is met or swept out."""


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
    """A lower limit of the batch size, after a batch did not fit into the device's memory, which grows back."""

    __slots__ = ("_failed", "_limit", "_since")

    def __init__(self) -> None:
        self._limit = self._failed = 0
        self._since = 0.0

    def out_of_memory(self, size: int, now: float) -> None:
        """Note that a batch of ``size`` did not fit: no more than half of it for now.

        The limit doubles with each 60 s in which nothing else fails, and is gone once it is over the largest size that
        did not fit.
        """
        half, limit = max(1, size // 2), self.limit(now)
        self._failed = size if limit is None else max(size, self._failed)
        self._limit = half if limit is None else min(half, limit)
        self._since = now

    def limit(self, now: float) -> int | None:
        """Return how many requests a batch may hold now; None for no limit of its own."""
        if not self._failed:
            return None
        doubled = max(0, int((now - self._since) / CAP_SECONDS))
        # by then it is over _failed, even from 1
        limit = self._limit << min(doubled, self._failed.bit_length())
        return limit if limit <= self._failed else None


class Pending(Generic[R]):
    """The requests that wait for a batch. Not thread-safe.

    Each call costs O(batch x log(groups)), amortized; nothing is left of a group that is empty.
    """

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.count = 0
        self.bytes = 0
        self._counts = dict.fromkeys(LANE_ORDER, 0)
        # requests without a group make one as well; it stays, and is not among the others, which cost more to look at
        self._plain: Group[R] = Group(None, policy)
        self._groups: dict[Hashable, Group[R]] = {}
        self._unsorted: Group[R] = Group(None, policy)
        # groups are filed by their oldest request: the due ones by their highest lane, too; _changed ones are to be
        # filed anew before anybody looks
        self._changed: dict[Group[R], None] = {}
        self._waiting: list[_Entry[R]] = []
        self._due: dict[str, list[_Entry[R]]] = {lane: [] for lane in LANE_ORDER}
        self._latest = float("-inf")  # no group in _waiting has an oldest request that was enqueued later
        self._filed = 0
        self._batches = 0

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

    def add(self, requests: Iterable[R]) -> bool:
        """Append requests to their groups; the caller has asked ``fits``. Tell whether a group is full now, or seems so."""
        full = False
        for request in requests:
            self._count(request)
            if self._place(request):
                full = True
        return full

    def add_unsorted(self, requests: Iterable[R]) -> None:
        """Append requests whose group and cost are not known yet; they are pending, but in no batch before ``sort``."""
        for request in requests:
            self._count(request)
            self._unsorted.append(request)

    def unsorted(self, limit: int) -> list[R]:
        """Return the requests of no group, in their order: at most ``limit`` of each lane, the high one first."""
        heads = self._unsorted.heads([])
        return [request for head in heads for request in islice(self._unsorted.requests(head.lane), limit)]

    def sort(self, request: R) -> None:
        """Append a request of no group to the one that it has now; one that is not pending any more is left alone."""
        if request.pending is self._unsorted:
            self._unsorted.count -= 1
            self._place(request)
            self._unsorted.bury()

    def discard(self, request: R) -> None:
        """Remove a request wherever it stands; one that is not pending is left alone."""
        group = request.pending
        if group:
            self._remove(group, [request])
            group.bury()
            self._note(group)

    def clear(self) -> list[R]:
        """Remove and return everything."""
        groups = [self._unsorted, self._plain, *self._groups.values()]
        found = [request for lane in LANE_ORDER for group in groups for request in group.requests(lane)]
        for request in found:
            self.discard(request)
        return found

    def oldest(self) -> float | None:
        """Return when the oldest pending request was enqueued; None where nothing is pending."""
        self._file_changed()
        times = [head.enqueued for head in self._unsorted.heads([])]
        for entry in (self._plain.entry, *map(self._top, (self._waiting, *self._due.values()))):
            if entry is not None:
                times.append(entry[0])
        return min(times, default=None)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until a group is due: 0 for now, at most ``max_delay``; None if there is none."""
        delay = self.policy.max_delay
        self._ripen(now)
        entry = self._plain.entry
        if entry is not None and self._is_due(entry, now):
            return 0.0
        if self._groups:
            if any(map(self._top, self._due.values())):
                return 0.0
            first = self._top(self._waiting)
            entry = first if entry is None or (first is not None and first < entry) else entry
        return None if entry is None else min(entry[0] + delay - now, delay)

    def take(self, now: float, run_time: float = 0.0, limit: int | None = None) -> tuple[list[R], list[R]]:
        """Remove and return the next batch, and what was dropped on the way; where no group is due, that of one which is not.

        ``run_time`` is the recent run time of a batch in seconds; ``limit`` lowers ``max_batch_size``, 1 at
        least.
        """
        cutoff = now + DEADLINE_MARGIN * run_time
        expired: list[R] = []
        batch: list[R] = []
        self._ripen(now)
        group = self._first(now)
        if group is None:
            for other in (self._plain, *self._groups.values()):
                if other.count:
                    self._file(other, due=True)
                    self._changed[other] = None
            group = self._first(now)
        while group is not None:
            late: list[R] = []
            heads = group.heads(late, cutoff)
            if not late:
                batch = group.fill(heads, late, cutoff, now, limit)
                self._remove(group, batch)
            if late:
                self._remove(group, late)
                expired += late
            if not batch and group.count:
                # its turn may have been that of a request which is gone; it counts as due until this take is over
                self._file(group, due=True)
            self._note(group)
            group = None if batch else self._first(now)
        self._batches += bool(batch)
        return batch, expired

    def _count(self, request: R) -> None:
        self.count += 1
        self.bytes += request.size
        self._counts[request.lane] += 1

    def _place(self, request: R) -> bool:
        """Append a request to its group; tell whether that is full, or seems so."""
        key = request.group
        group = self._plain if key is None else self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, self.policy)
        group.append(request)
        self._changed[group] = None
        return group.seems_full()

    def _remove(self, group: Group[R], requests: list[R]) -> None:
        for request in requests:
            self.bytes -= request.size
            self._counts[request.lane] -= 1
        self.count -= len(requests)
        group.remove(requests)

    def _note(self, group: Group[R]) -> None:
        """Have a group filed anew that requests have left; forget one that is empty."""
        if group is self._unsorted:
            return
        if group.count:
            self._changed[group] = None
            return
        self._changed.pop(group, None)
        group.entry = None
        if group is self._plain:
            return
        del self._groups[group.key]
        if self._groups:
            self._sweep(self._waiting)
        else:
            for heap in (self._waiting, *self._due.values()):
                heap.clear()

    def _file_changed(self) -> None:
        for group in self._changed:
            self._file(group)
        self._changed.clear()

    def _file(self, group: Group[R], *, due: bool = False) -> None:
        """Put a group where it belongs; with ``due`` among the due ones, until it is filed again."""
        heads = group.heads([])
        oldest, top = min([head.enqueued for head in heads]), heads[0].lane
        full = due or group.is_full()
        entry = group.entry
        if entry is not None and entry[0] == oldest and group.lane == top and group.full == full:
            return
        self._filed += 1
        entry = (oldest, self._filed, group)
        group.entry, group.lane, group.full = entry, top, full
        if group is self._plain:
            return
        if not full:
            self._latest = max(self._latest, oldest)
        heap = self._due[top] if full else self._waiting
        heappush(heap, entry)
        self._sweep(heap)

    def _ripen(self, now: float) -> None:
        """Move those among the due ones that are due by now."""
        if self._changed:
            self._file_changed()
        if not self._groups:
            return
        delay, waiting = self.policy.max_delay, self._waiting
        if self._latest - now > delay:
            # a stamp far ahead of the clock: the clock stepped back, and waiting for it to catch up could take hours
            live = [entry for entry in waiting if entry[2].entry is entry]
            for entry in live:
                if entry[0] - now > delay:
                    heappush(self._due[entry[2].lane], entry)
            waiting[:] = [entry for entry in live if entry[0] - now <= delay]
            heapify(waiting)
            self._latest = max((entry[0] for entry in waiting), default=float("-inf"))
        while (top := self._top(waiting)) is not None and top[0] + delay - now <= 0:
            heappush(self._due[top[2].lane], heappop(waiting))

    def _first(self, now: float) -> Group[R] | None:
        """Return the group whose turn it is; None where none is due."""
        plain = self._plain.entry
        due = [plain] if plain is not None and self._is_due(plain, now) else []
        if self._groups:
            due += [entry for entry in map(self._top, self._due.values()) if entry is not None]
        if len(due) < 2:
            return due[0][2] if due else None
        oldest = min(due)
        if self._batches % _TURNS == _TURNS - 1 and now - oldest[0] > AGED:
            return oldest[2]
        return min(due, key=lambda entry: (LANE_ORDER.index(entry[2].lane), entry))[2]

    def _is_due(self, entry: _Entry[R], now: float) -> bool:
        delay = self.policy.max_delay
        # a stamp far ahead of the clock: the clock stepped back, and waiting for it to catch up could take hours
        return entry[2].full or entry[0] + delay - now <= 0 or entry[0] - now > delay

    def _top(self, heap: list[_Entry[R]]) -> _Entry[R] | None:
        while heap:
            entry = heap[0]
            if entry[2].entry is entry:
                return entry
            heappop(heap)
        return None

    def _sweep(self, heap: list[_Entry[R]]) -> None:
        if len(heap) > 2 * len(self._groups) + TOMBSTONES:
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)
