"""What one call of a ``Client`` does, in the caller's thread: push, wait, and mend what breaks on the way."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

from batchq import commands, wire
from batchq.chain import Position
from batchq.commands import Call, Outgoing, Pushed
from batchq.config import DAY, REPLY_TTL_MS
from batchq.errors import BackendAuthError, BackendUnavailableError, BatchqError
from batchq.keys import place_of
from batchq.requests import MAX_PUSH_BYTES, MAX_PUSH_REQUESTS, out_of_memory, outcome, refused, too_late
from batchq.slots import SILENCE, Pool
from batchq.store import SLOWEST, LinkLostError, OutOfMemory, retry_delay

T = TypeVar("T")

LOOK: Final = 1.0
"""Seconds from one look at the chain and the workers to the next, while a call waits."""
PAUSE: Final = 0.05
_LARGE: Final = 64 * 1024
"""Replies of more bytes are removed from Redis at once, not with the slot's next push."""
_GATHER: Final = 0.005
"""Seconds after which a slow source's values are pushed, however few they are."""
_LONG_PAUSE: Final = 45.0
"""Replies in a stream expire after 60 s without a new one: who reads it after a longer pause than this may have missed some."""


class Request:
    """A request on its way."""

    __slots__ = ("cost", "data", "deadline", "id", "number", "place", "timeout", "ttl_ms")

    def __init__(
        self,
        id: bytes,
        data: bytes,
        place: str,
        timeout: float,
        deadline: float,
        ttl_ms: int,
        cost: float | None,
    ) -> None:
        self.id = id
        self.data = data
        self.place = place
        self.cost = cost
        self.timeout = timeout
        self.deadline = deadline
        self.ttl_ms = ttl_ms
        self.number = 0
        """The push that it left with; 0 while it has not left."""

    def left(self, now: float) -> float:
        """Return the seconds within which it may be run: all of them for a job, whose caller waits only until it is in the queue."""
        return self.timeout if self.ttl_ms else max(0.0, self.deadline - now)


class Group:
    """Requests that leave in one push."""

    __slots__ = ("force", "jobs", "position", "requests", "whole")

    def __init__(
        self, requests: list[Request], *, whole: bool = False, jobs: bool = False, force: bool = False
    ) -> None:
        self.requests = requests
        self.whole = whole
        self.jobs = jobs
        self.force = force
        self.position: Position | None = None
        """Its place in the chain, kept while nobody knows whether Redis has run it."""


class Extras(NamedTuple):
    """What requests carry beside their values."""

    batch_key: str | int | None
    cost: float | None
    meta: dict[str, Any] | None


Result = wire.Reply | BatchqError | None
"""What became of a request: its reply, its error, or None for a job that is in the queue."""
Settled = list[tuple[Request, Result]]


class Exchange:
    """The requests of one call: pushes them, collects their replies, and mends what breaks on the way, one step at a time.

    With ``stream`` all replies come through the slot's stream, whole batches a read; otherwise the one reply has a key of its own.
    """

    def __init__(self, pool: Pool, timeout: float, *, stream: bool = False) -> None:
        self.pool = pool
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.timeout = timeout
        self.stream = stream
        self.outstanding: dict[bytes, Request] = {}
        self.down = ""
        self._groups: deque[Group] = deque()
        self._attempt = 0
        self._left_bytes = 0
        self._stepped_at = self._silent_at = self._heard_at = self.started
        self._missed = False
        # an idle Redis ends a wait up to 100 ms late: a short call cannot interrupt its own to look, so one a second looks before it
        hurried = timeout < 0.5 and self.started - pool.looked_at > LOOK
        self._look_at = self.started + (0.0 if hurried else min(LOOK, timeout / 2))

    def __enter__(self) -> Exchange:
        self._slot = self.pool.acquire(self.deadline, self.timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._slot.connected:
                self._clean_up()
        finally:
            self.pool.release(self._slot)

    def _clean_up(self) -> None:
        """Have take drop what nobody waits for any more, and the replies that were read removed."""
        slot, keys = self._slot, self.pool.keys
        slot.cursor = b"0-0"
        if self.stream:
            slot.before.append(commands.pack(b"UNLINK", keys.replies(slot.name)))
        now = time.monotonic()
        given_up = [
            request.id for request in self.outstanding.values() if request.number and request.deadline > now
        ]
        if given_up or self._left_bytes > _LARGE:
            call: Call[Any] = (
                commands.cancel(keys, given_up, int(DAY * 1000)) if given_up else commands.call(b"PING")
            )
            with contextlib.suppress(BackendUnavailableError):
                slot.ask(call, now + min(1.0, max(0.05, self.deadline - now)))

    def new_id(self) -> bytes:
        """Return an id for a request."""
        return self._slot.ids.next()

    def request(
        self,
        id: bytes,
        value: object,
        lane: str,
        extras: Extras,
        timeout: float,
        deadline: float,
        ttl_ms: int = 0,
    ) -> Request:
        """Return a request with one value, a job where ``ttl_ms`` is given; raise EncodeError or PayloadTooLargeError."""
        data = wire.encode_request(
            id, self._slot.name if self.stream else ttl_ms or REPLY_TTL_MS, int(timeout * 1000), value,
            meta=extras.meta, batch_key=extras.batch_key, cost=extras.cost, max_payload=self.pool.config.max_payload,
        )  # fmt: skip
        return Request(id, data, place_of(lane, extras.batch_key), timeout, deadline, ttl_ms, extras.cost)

    def add(self, requests: list[Request], *, whole: bool = False, jobs: bool = False) -> None:
        """Have requests leave in one push."""
        self._groups.append(Group(requests, whole=whole, jobs=jobs))
        self.outstanding.update({request.id: request for request in requests})

    @property
    def is_pushing(self) -> bool:
        """Whether anything waits to be pushed, or pushed again."""
        return bool(self._groups)

    def ask(self, call: Call[T]) -> T:
        """Carry a verb on this call's connection."""
        self.pool.connect(self._slot, self.deadline)
        return self._slot.ask(call, self.deadline)

    def step(self, block: float = LOOK) -> Settled:
        """Do what is next: push, look, or wait for replies, ``block`` seconds at most; return the requests that are over.

        Never lasts longer than until the first deadline. Raises ClientClosedError and BackendAuthError.
        """
        self.pool.check_open()
        now = time.monotonic()
        if self.stream and now - self._stepped_at > PAUSE:
            self._resume(now - self._stepped_at)
        until = next(iter(self.outstanding.values())).deadline
        reading, reused = False, self._slot.connected
        settled: Settled = []
        try:
            if now < until:
                if self.pool.connect(self._slot, until) and self._slot.chain.last:
                    self._look_at = 0.0  # Redis may be another one, or have lost something
                if now - self._heard_at > _LONG_PAUSE:
                    self._missed = True
                    self._slot.cursor = b"0-0"
                if self._groups:
                    size = sum(len(request.data) for request in self._groups[0].requests)
                    settled = self._push(min(until, now + SILENCE + size / SLOWEST))
                elif now >= self._look_at:
                    self._look(min(until, now + SILENCE))
                else:
                    reading = True
                    settled = self._read(until, now, block)
                self.down, self._attempt = "", 0
                self._heard_at = time.monotonic()
        except OutOfMemory:
            self.down = ""
            if reading:
                settled = self._poll(until)
            elif self._groups:
                settled = self._fail(self._groups.popleft(), out_of_memory)
        except BackendUnavailableError as error:
            self.pool.check_open()
            if isinstance(error, BackendAuthError):
                first = next(iter(self.outstanding.values()))
                raise BackendAuthError(error.message, request_id=first.id.hex()) from error
            if not (reading and time.monotonic() >= until):
                self.down = error.message
                self._attempt += 1
                if not reused or not isinstance(
                    error, LinkLostError
                ):  # a connection may have broken while it lay idle
                    self.pool.pause(min(retry_delay(self._attempt, random.random), until - time.monotonic()))
        self._stepped_at = time.monotonic()
        return settled or self._expired(self._stepped_at)

    def _resume(self, pause: float) -> None:
        """Let the time not count in which the caller, not batchq, had the turn; after a long one replies may have expired."""
        for request in self.outstanding.values():
            request.deadline += pause
        if pause > _LONG_PAUSE:
            self._missed = True
            self._slot.cursor = b"0-0"

    def _push(self, until: float) -> Settled:
        group, slot, config = self._groups[0], self._slot, self.pool.config
        if group.position is None:
            group.requests = [request for request in group.requests if request.id in self.outstanding]
            if not group.requests:
                self._groups.popleft()
                return []
            group.position = slot.chain.next(self.outstanding.values())
        now = time.monotonic()
        for request in group.requests:
            request.number = group.position.number
        if time.time() - self.pool.touched_at > 60:
            self.pool.touched_at = time.time()
            slot.before.append(commands.touch_queue(self.pool.keys, self.pool.touched_at).payload)
        pushed = slot.ask(
            commands.push(
                self.pool.keys,
                # one that is over by now leaves without time, and take drops it: a push that may have run goes again as it was
                [
                    Outgoing(
                        r.id,
                        r.data,
                        r.place,
                        int(r.left(now) * 1e6) if r.id in self.outstanding else 0,
                        r.ttl_ms,
                        r.cost,
                    )
                    for r in group.requests
                ],
                producer=slot.name,
                previous=group.position.previous,
                token=group.position.token,
                fresh=group.position.fresh,
                whole=group.whole,
                force=group.force,
                jobs=group.jobs,
                capacity=config.capacity,
                fail_fast=config.fail_fast,
            ),
            until,
        )
        if pushed.outcome == "gap":
            for request in group.requests:
                request.number = 0
            group.position = None
            self._lose(slot.chain.gap(pushed.stored))
            return []
        self._groups.popleft()
        if pushed.outcome != "no_worker":
            slot.chain.done(group.position)
        return self._pushed(group, pushed)

    def _pushed(self, group: Group, pushed: Pushed) -> Settled:
        settled: Settled = []
        left = dict(pushed.admitted or {})
        asked = len(group.requests) if group.whole else 1
        for request in group.requests:
            admitted = left.get(request.place, 0) > 0
            if admitted:
                left[request.place] -= 1
            if (group.jobs or not admitted) and self.outstanding.pop(request.id, None) is not None:
                settled.append(
                    (
                        request,
                        None if admitted else refused(self.pool.config.queue, pushed, request.id, asked),
                    )
                )
        return settled

    def _fail(self, group: Group, error: Any) -> Settled:
        lost = [request for request in group.requests if self.outstanding.pop(request.id, None) is not None]
        return [(request, error(self.pool.config.queue, request.id)) for request in lost]

    def _lose(self, known: int) -> None:
        """Redis has lost requests, or their replies: make one push of all that left after the push of that number."""
        lost = [request for request in self.outstanding.values() if request.number > known]
        if lost:
            self._groups.appendleft(Group(lost, force=True))
        self._slot.cursor = b"0-0"  # replies that came meanwhile may have ids below it

    def _look(self, until: float) -> None:
        stored = self.pool.look(self._slot, until)
        self._look_at = time.monotonic() + LOOK
        if stored != self._slot.chain.last:
            self._lose(self._slot.chain.gap(stored))

    def _block(self, now: float, until: float, block: float) -> float:
        """Return for how many seconds Redis is to wait: a little more than what is left, for the socket's timer keeps the deadline."""
        block = max(0.001, min(block, until + 0.1 - now, self._look_at - now))
        self._silent_at = now + block + SILENCE
        return block

    def _read(self, until: float, now: float, block: float) -> Settled:
        if self.stream:
            return self._read_stream(until, now, block)
        request = next(iter(self.outstanding.values()))
        wait = commands.wait_reply(self.pool.keys, request.id, self._block(now, until, block))
        data = self._slot.ask(wait, min(until, self._silent_at))
        settled = self._answered([data] if data else [])
        if not data and self._missed:
            self._missed = False
            self._lose(0)
        if data and not settled:
            self.pool.pause(min(PAUSE, until - now))  # not a reply at all: whatever wrote it, do not spin
        return settled

    def _read_stream(self, until: float, now: float, block: float) -> Settled:
        slot = self._slot
        block_ms = int(self._block(now, until, 0.0 if self._missed else block) * 1000)
        wait = commands.read_replies(
            self.pool.keys, slot.name, slot.cursor, block_ms=max(1, block_ms), count=64
        )
        entries = slot.ask(wait, min(until, self._silent_at))
        if entries:
            slot.cursor = entries[-1][0]
        elif self._missed:
            self._missed = False
            self._lose(0)
        return self._answered([data for _, data in entries])

    def _poll(self, until: float) -> Settled:
        """Look for the reply now and then: at maxmemory Redis refuses to wait for it."""
        request = next(iter(self.outstanding.values()))
        with contextlib.suppress(BackendUnavailableError):
            data = self._slot.ask(commands.read_reply(self.pool.keys, request.id), until)
            if data:
                return self._answered([data])
            self.pool.pause(min(PAUSE, until - time.monotonic()))
        return []

    def _answered(self, found: list[bytes]) -> Settled:
        settled: Settled = []
        for data in found:
            self._left_bytes = len(data)
            for reply in wire.decode_replies(data, copy=self.pool.config.copy):
                request = self.outstanding.pop(reply.id, None)
                if request is not None:
                    settled.append((request, reply))
                    if not self.stream:
                        self._slot.before.append(commands.drop_reply(self.pool.keys, request.id).payload)
        return settled

    def _expired(self, now: float) -> Settled:
        late = list(
            takewhile(lambda request: request.deadline <= now, self.outstanding.values())
        )  # they are in order
        for request in late:
            del self.outstanding[request.id]
        queue, hint = self.pool.config.queue, self.pool.hint
        return [
            (r, too_late(queue, self.timeout if r.ttl_ms else r.timeout, r.id, hint, self.down)) for r in late
        ]


def open_reply(result: Result, return_exceptions: bool = False) -> Any:
    """Return the answer, or raise (or return) the error."""
    if isinstance(result, wire.Reply):
        return outcome(result, return_exceptions)
    if result is not None and not return_exceptions:
        raise result
    return result


def only_result(exchange: Exchange) -> Result:
    """Return what becomes of an exchange's only request."""
    while True:
        for _, result in exchange.step():
            return result


def gather(
    exchange: Exchange,
    source: Iterator[Any],
    room: int,
    lane: str,
    extras: Extras,
    seconds: float,
    ready: dict[bytes, Result],
) -> tuple[list[bytes], bool]:
    """Add a push of the next values, as many as there is room for or a slow source gives; their ids, and whether there are more.

    A value that cannot be sent has its error in ``ready`` instead.
    """
    order: list[bytes] = []
    requests: list[Request] = []
    size, started, more = 0, time.monotonic(), True
    while len(order) < min(room, MAX_PUSH_REQUESTS) and size < MAX_PUSH_BYTES:
        try:
            value = next(source)
        except StopIteration:
            more = False
            break
        now = time.monotonic()
        request_id = exchange.new_id()
        order.append(request_id)
        try:
            request = exchange.request(request_id, value, lane, extras, seconds, now + seconds)
        except BatchqError as error:
            ready[request_id] = error
            continue
        requests.append(request)
        size += len(request.data)
        if now - started > _GATHER:
            break
    if requests:
        exchange.add(requests)
    return order, more
