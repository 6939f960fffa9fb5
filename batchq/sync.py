"""``Client``: the client for threads. What it promises is in its docstrings; how it works, in docs/protocol.md.

A call takes a slot from a pool: one connection, with a producer's name and its chain of tokens. It pushes, waits for the replies on the
same connection, and puts the slot back. There is no thread but the caller's, so all that a call needs, it does itself, step by step.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

from batchq import commands, wire
from batchq.chain import Chain, Position
from batchq.commands import Call, Outgoing, Pushed
from batchq.config import (
    DAY,
    DEFAULT_MAX_PAYLOAD,
    DEFAULT_TIMEOUT,
    REPLY_TTL_MS,
    WORKER_ALIVE,
    ClientConfig,
    Priority,
    check_extras,
    check_int,
    check_lane,
    check_timeout,
    resolve_queue,
    resolve_url,
)
from batchq.errors import (
    BackendAuthError,
    BackendUnavailableError,
    BatchqError,
    ClientClosedError,
    DeadlineExceededError,
    JobNotFoundError,
    QueueFullError,
)
from batchq.keys import Keys
from batchq.requests import (
    Ids,
    job_wire_id,
    new_name,
    no_worker_hint,
    out_of_memory,
    outcome,
    refused,
    too_late,
    too_many,
)
from batchq.store import CONNECT_TIMEOUT, Endpoint, Link, OutOfMemory, retry_delay

T = TypeVar("T")

DEFAULT_MAX_CONNECTIONS: Final = 256
_LOOK: Final = 1.0
"""Seconds from one look at the chain and the workers to the next, while a call waits."""
_SILENCE: Final = 5.0
"""A connection that owes an answer for this many seconds counts as broken: a half-open socket says nothing."""
_LARGE: Final = 64 * 1024
"""Replies of more bytes are removed from Redis at once, not with the slot's next push."""
_GATHER: Final = 0.005
_PAUSE: Final = 0.05
_LONG_PAUSE: Final = 45.0
"""Replies in a stream expire after 60 s without a new one: whoever reads it later than this may have missed some."""


class _Request:
    """A request on its way."""

    __slots__ = ("data", "deadline", "id", "lane", "number", "timeout", "ttl_ms")

    def __init__(self, id: bytes, data: bytes, lane: str, timeout: float, deadline: float, ttl_ms: int) -> None:
        self.id = id
        self.data = data
        self.lane = lane
        self.timeout = timeout
        self.deadline = deadline
        self.ttl_ms = ttl_ms
        self.number = 0
        """The push that it left with; 0 while it has not left."""


class _Group:
    """Requests that leave in one push."""

    __slots__ = ("force", "jobs", "position", "requests", "whole")

    def __init__(
        self, requests: list[_Request], *, whole: bool = False, jobs: bool = False, force: bool = False
    ) -> None:
        self.requests = requests
        self.whole = whole
        self.jobs = jobs
        self.force = force
        self.position: Position | None = None
        """Its place in the chain, kept while nobody knows whether Redis has run it."""


class _Extras(NamedTuple):
    """What requests carry beside their values."""

    batch_key: str | int | None
    cost: float | None
    meta: dict[str, Any] | None


_Settled = list[tuple[_Request, wire.Reply | BatchqError | None]]
"""Requests that are over, each with its reply, its error, or None for a job that is in the queue."""


class _TimedLink(Link):
    """A connection on which nothing waits without end: neither the handshake, nor an answer that stops halfway."""

    @classmethod
    def connect(cls, endpoint: Endpoint, seconds: float) -> _TimedLink:
        connection = endpoint._make(False)
        limit = max(0.001, min(seconds, connection.socket_connect_timeout or CONNECT_TIMEOUT))
        connection.socket_connect_timeout = connection.socket_timeout = limit
        link = cls(connection, endpoint.name)
        link.open()
        return link

    def limit(self, until: float) -> None:
        """Have sends, and reads that get nothing, fail at this time."""
        sock = self._connection._sock
        if sock is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))


class _Slot:
    """What one call at a time holds: a connection, a producer's name and chain, and where its reply stream was read to."""

    __slots__ = ("before", "chain", "cursor", "ids", "link", "name")

    def __init__(self) -> None:
        self.link: _TimedLink | None = None
        self.name = new_name()
        self.chain = Chain()
        self.ids = Ids()
        self.cursor = b"0-0"
        self.before: list[bytes] = []
        """Commands of one answer each, of no interest, that go in front of the next ones."""

    @property
    def connected(self) -> bool:
        return self.link is not None and not self.link.broken

    def ask(self, call: Call[T], until: float) -> T:
        """Carry a verb; without an answer by ``until`` the connection is closed, for one is on its way."""
        link = self.link
        assert link is not None  # noqa: S101 - callers connect first
        skip, payload = len(self.before), b"".join((*self.before, call.payload))
        self.before.clear()
        link.limit(until)
        link.send(payload)
        answers = self._read(link, skip + call.answers, until)
        if link.forgot_scripts(answers):
            link.limit(until)
            link.send(payload)
            answers = self._read(link, skip + call.answers, until)
        return link.parse(call, answers[skip:])

    @staticmethod
    def _read(link: _TimedLink, count: int, until: float) -> list[Any]:
        answers = link.read(count - 1)
        if answers:  # the last one may be that of a command that waits
            link.limit(until)
        return answers + link.read(1)


class _Pool:
    """A client's state in one process: its slots, and what its calls know together."""

    def __init__(self, config: ClientConfig, endpoint: Endpoint, max_connections: int) -> None:
        self.config = config
        self.keys = Keys(config.queue)
        self.endpoint = endpoint
        self.hint = ""
        self.looked_at = 0.0
        """When one of the calls last looked whether anybody works on the queue, and what there is to tell."""
        self.touched_at = 0.0
        self._max = max_connections
        self._lock = threading.Lock()
        self._idle: list[_Slot] = []
        self._used: set[_Slot] = set()
        self._waiting: deque[SimpleQueue[_Slot | None]] = deque()
        self._closed = threading.Event()

    def acquire(self, deadline: float, timeout: float) -> _Slot:
        """Return a slot, connected or not; wait for one where all are in use."""
        with self._lock:
            self.check_open()
            if self._idle or len(self._used) < self._max:
                slot = self._idle.pop() if self._idle else _Slot()
                self._used.add(slot)
                return slot
            ticket: SimpleQueue[_Slot | None] = SimpleQueue()
            self._waiting.append(ticket)
        try:
            handed = ticket.get(timeout=max(0.001, deadline - time.monotonic()))
        except Empty:
            handed = self._withdraw(ticket)
            if handed is None and not self._closed.is_set():
                raise BackendUnavailableError(
                    f"all {self._max:,} connections of this client were in use for {timeout:g} s: "
                    f"raise max_connections, or use fewer threads"
                ) from None
        except BaseException:
            slot = self._withdraw(ticket)
            if slot is not None:
                self.release(slot)
            raise
        if handed is None:
            raise ClientClosedError("the client was closed")
        return handed

    def _withdraw(self, ticket: SimpleQueue[_Slot | None]) -> _Slot | None:
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return None
        return ticket.get()  # handed over at the last moment

    def release(self, slot: _Slot) -> None:
        """Put a slot back, or hand it to the first who waits: one that only looked would always come too late."""
        with self._lock:
            self._used.discard(slot)
            if self._waiting:
                handed = slot if slot.connected else _Slot()
                self._used.add(handed)
                self._waiting.popleft().put(handed)
                return
            if slot.connected and not self._closed.is_set():
                self._idle.append(slot)
                return
        if slot.link is not None:
            slot.link.close()

    def connect(self, slot: _Slot, until: float) -> bool:
        """Connect a slot; False where it was."""
        if slot.connected:
            return False
        slot.before.clear()
        slot.cursor = b"0-0"
        slot.link = _TimedLink.connect(self.endpoint, until - time.monotonic())
        try:
            self.check_open()  # close() may have missed this connection
        except ClientClosedError:
            slot.link.close()
            raise
        return True

    def check_open(self) -> None:
        if self._closed.is_set():
            raise ClientClosedError("the client was closed")

    def pause(self, seconds: float) -> None:
        """Sleep, but not past the closing of the client."""
        self._closed.wait(max(0.0, seconds))
        self.check_open()

    def carry(self, call: Call[T], timeout: float, *, fatal: bool = False) -> T:
        """Carry one verb on any slot; tried again until ``timeout`` where the connection breaks, unless ``fatal``."""
        deadline = time.monotonic() + timeout
        slot = self.acquire(deadline, timeout)
        attempt = 0
        try:
            while True:
                try:
                    self.connect(slot, deadline)
                    return slot.ask(call, min(deadline, time.monotonic() + _SILENCE))
                except BackendUnavailableError as error:
                    self.check_open()
                    attempt += 1
                    delay = retry_delay(attempt, random.random)
                    last = fatal or isinstance(error, (BackendAuthError, OutOfMemory))
                    if last or time.monotonic() + delay >= deadline:
                        raise
                    self.pause(delay)
        finally:
            self.release(slot)

    def look(self, slot: _Slot, until: float) -> str:
        """Find out whether anybody works on the queue; return Redis' record of the slot's last push."""
        self.looked_at = time.monotonic()
        health = slot.ask(commands.health(self.keys, slot.name), until)
        hint = ""
        if health.silent > WORKER_ALIVE:
            queues = slot.ask(commands.list_queues(), until)
            others = slot.ask(commands.live_workers(queues), until) if queues else {}
            hint = no_worker_hint(self.config.queue, others)
        self.hint = hint
        return health.stored

    @property
    def is_connected(self) -> bool:
        with self._lock:
            return any(slot.connected for slot in (*self._idle, *self._used))

    def close(self) -> None:
        """Close the idle connections, and wake the threads that wait on the others; waits for nobody."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
            waiting, self._waiting = self._waiting, deque()
            used = [*self._used]
        for slot in idle:
            if slot.link is not None:
                slot.link.close()
        for ticket in waiting:
            ticket.put(None)
        for slot in used:
            if slot.link is not None:
                slot.link.abort()

    def discard(self) -> None:
        """Let go of the parent process' connections: closed here, not shut down, they live on there. Its lock may be held for ever."""
        for slot in (*self._idle, *self._used):
            if slot.link is not None:
                slot.link.close()


class _Exchange:
    """The requests of one call: pushes them, collects their replies, and mends what breaks on the way, one step at a time.

    With ``stream`` all replies come through the slot's stream, whole batches a read; otherwise the one reply has a key of its own.
    """

    def __init__(self, pool: _Pool, timeout: float, *, stream: bool = False) -> None:
        self.pool = pool
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.timeout = timeout
        self.stream = stream
        self.outstanding: dict[bytes, _Request] = {}
        self.down = ""
        self._groups: deque[_Group] = deque()
        self._attempt = 0
        self._left_bytes = 0
        self._stepped_at = self.started
        self._missed = False
        # an idle Redis ends a wait up to 100 ms late: a short call cannot interrupt its own to look, so one a second looks before it
        hurried = timeout < 0.5 and self.started - pool.looked_at > _LOOK
        self._look_at = self.started + (0.0 if hurried else min(_LOOK, timeout / 2))

    def __enter__(self) -> _Exchange:
        self._slot = self.pool.acquire(self.deadline, self.timeout)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
        given_up = [request.id for request in self.outstanding.values() if request.number and request.deadline > now]
        if given_up or self._left_bytes > _LARGE:
            call: Call[Any] = commands.cancel(keys, given_up, int(DAY * 1000)) if given_up else commands.call(b"PING")
            with contextlib.suppress(BackendUnavailableError):
                slot.ask(call, now + min(1.0, max(0.05, self.deadline - now)))

    def request(self, value: object, lane: str, extras: _Extras, timeout: float, deadline: float) -> _Request:
        """Return a request with one value; raise EncodeError or PayloadTooLargeError."""
        request_id = self._slot.ids.next()
        reply: str | int = self._slot.name if self.stream else REPLY_TTL_MS
        return _Request(request_id, self._encode(request_id, reply, value, extras, timeout), lane, timeout, deadline, 0)

    def job(self, wire_id: bytes, value: object, lane: str, extras: _Extras, seconds: float, ttl_ms: int) -> _Request:
        """Return a request whose reply is kept."""
        return _Request(wire_id, self._encode(wire_id, ttl_ms, value, extras, seconds), lane, seconds, self.deadline, ttl_ms)

    def _encode(self, request_id: bytes, reply: str | int, value: object, extras: _Extras, timeout: float) -> bytes:
        return wire.encode_request(
            request_id, reply, int(timeout * 1000), value, meta=extras.meta, batch_key=extras.batch_key, cost=extras.cost,
            max_payload=self.pool.config.max_payload,
        )  # fmt: skip

    def add(self, requests: list[_Request], *, whole: bool = False, jobs: bool = False) -> None:
        """Have requests leave in one push."""
        self._groups.append(_Group(requests, whole=whole, jobs=jobs))
        self.outstanding.update({request.id: request for request in requests})

    @property
    def is_pushing(self) -> bool:
        return bool(self._groups)

    def ask(self, call: Call[T]) -> T:
        """Carry a verb on this call's connection."""
        self.pool.connect(self._slot, self.deadline)
        return self._slot.ask(call, self.deadline)

    def step(self, block: float = _LOOK) -> _Settled:
        """Do what is next: push, look, or wait for replies, ``block`` seconds at most; return the requests that are over.

        Never lasts longer than until the first deadline. Raises ClientClosedError and BackendAuthError.
        """
        self.pool.check_open()
        now = time.monotonic()
        if self.stream and now - self._stepped_at > _PAUSE:
            self._resume(now - self._stepped_at)
        until = next(iter(self.outstanding.values())).deadline
        reading = False
        settled: _Settled = []
        try:
            if now < until:
                if self.pool.connect(self._slot, until) and self._slot.chain.last:
                    self._look_at = 0.0  # Redis may be another one, or have lost something
                if self._groups:
                    settled = self._push(min(until, now + _SILENCE))
                elif now >= self._look_at:
                    self._look(min(until, now + _SILENCE))
                else:
                    reading = True
                    settled = self._read(until, now, block)
                self.down, self._attempt = "", 0
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

    def _push(self, until: float) -> _Settled:
        group, slot, config = self._groups[0], self._slot, self.pool.config
        if group.position is None:
            group.requests = [request for request in group.requests if request.id in self.outstanding]
            if not group.requests:
                self._groups.popleft()
                return []
            group.position = slot.chain.next()
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
                    Outgoing(r.id, r.data, r.lane, int(max(0.0, r.deadline - now) * 1e6) if r.id in self.outstanding else 0, r.ttl_ms)
                    for r in group.requests
                ],
                producer=slot.name,
                previous=group.position.previous,
                token=group.position.token,
                fresh=len(self.outstanding) <= len(group.requests),
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

    def _pushed(self, group: _Group, pushed: Pushed) -> _Settled:
        settled: _Settled = []
        left = dict(pushed.admitted or {})
        asked = len(group.requests) if group.whole else 1
        for request in group.requests:
            admitted = left.get(request.lane, 0) > 0
            if admitted:
                left[request.lane] -= 1
            if (group.jobs or not admitted) and self.outstanding.pop(request.id, None) is not None:
                settled.append((request, None if admitted else refused(self.pool.config.queue, pushed, request.id, asked)))
        return settled

    def _fail(self, group: _Group, error: Any) -> _Settled:
        lost = [request for request in group.requests if self.outstanding.pop(request.id, None) is not None]
        return [(request, error(self.pool.config.queue, request.id)) for request in lost]

    def _lose(self, known: int) -> None:
        """Redis has lost requests, or their replies: make one push of all that left after the push of that number."""
        lost = [request for request in self.outstanding.values() if request.number > known]
        if lost:
            self._groups.appendleft(_Group(lost, force=True))
        self._slot.cursor = b"0-0"  # replies that came meanwhile may have ids below it

    def _look(self, until: float) -> None:
        stored = self.pool.look(self._slot, until)
        self._look_at = time.monotonic() + _LOOK
        if stored != self._slot.chain.last:
            self._lose(self._slot.chain.gap(stored))

    def _read(self, until: float, now: float, block: float) -> _Settled:
        keys, slot = self.pool.keys, self._slot
        # a little more than what is left: the deadline is kept by the socket's timer
        block = 0.001 if self._missed else min(block, until + 0.1 - now, self._look_at - now)
        silent = now + block + _SILENCE
        if not self.stream:
            request = next(iter(self.outstanding.values()))
            data = slot.ask(commands.wait_reply(keys, request.id, block), min(until, silent))
            settled = self._answered([data] if data else [])
            if data and not settled:
                self.pool.pause(min(_PAUSE, until - now))  # not a reply at all: whatever wrote it, do not spin
            return settled
        wait = commands.read_replies(keys, slot.name, slot.cursor, block_ms=max(1, int(block * 1000)), count=64)
        entries = slot.ask(wait, min(until, silent))
        if entries:
            slot.cursor = entries[-1][0]
        elif self._missed:
            self._missed = False
            self._lose(0)
        return self._answered([data for _, data in entries])

    def _poll(self, until: float) -> _Settled:
        """Look for the reply now and then: at maxmemory Redis refuses to wait for it."""
        request = next(iter(self.outstanding.values()))
        with contextlib.suppress(BackendUnavailableError):
            data = self._slot.ask(commands.read_reply(self.pool.keys, request.id), until)
            if data:
                return self._answered([data])
            self.pool.pause(min(_PAUSE, until - time.monotonic()))
        return []

    def _answered(self, found: list[bytes]) -> _Settled:
        settled: _Settled = []
        for data in found:
            self._left_bytes = len(data)
            for reply in wire.decode_replies(data, copy=self.pool.config.copy):
                request = self.outstanding.pop(reply.id, None)
                if request is not None:
                    settled.append((request, reply))
                    if not self.stream:
                        self._slot.before.append(commands.drop_reply(self.pool.keys, request.id).payload)
        return settled

    def _expired(self, now: float) -> _Settled:
        late = list(takewhile(lambda request: request.deadline <= now, self.outstanding.values()))  # they are in order
        for request in late:
            del self.outstanding[request.id]
        queue, hint = self.pool.config.queue, self.pool.hint
        return [(request, too_late(queue, request.timeout, request.id, hint, self.down)) for request in late]


def _open(result: wire.Reply | BatchqError | None, return_exceptions: bool = False) -> Any:
    """Return the answer, or raise (or return) the error."""
    if isinstance(result, wire.Reply):
        return outcome(result, return_exceptions)
    if result is not None and not return_exceptions:
        raise result
    return result


class Job:
    """A request that was submitted, not awaited: its result is kept in Redis and may be read by any process, any number of times.

    ``id``: the id that it was submitted with, or the random one that it got.
    """

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self._client = client
        self._wire_id = job_wire_id(job_id)

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def state(self) -> str:
        """Return ``pending``, ``done``, ``failed``, or ``unknown``: never submitted, or its result has expired."""
        pool = self._client._pool()
        data, exists = pool.carry(commands.job_state(pool.keys, self._wire_id), DEFAULT_TIMEOUT)
        replies = wire.decode_replies(data) if data else []
        if replies:
            return "failed" if replies[0].code else "done"
        return "pending" if exists else "unknown"

    def result(self, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Wait for the answer and return it, or raise its error; may be called again until the result expires.

        ``timeout`` in seconds, more than 0 and at most 86,400; None means 10. Raises DeadlineExceededError where there is no result yet,
        JobNotFoundError where there is no such job, JobCancelledError.
        """
        seconds = check_timeout(timeout, DEFAULT_TIMEOUT)
        pool = self._client._pool()
        deadline = time.monotonic() + seconds
        slot = pool.acquire(deadline, seconds)
        try:
            return outcome(self._wait(pool, slot, seconds, deadline))
        finally:
            pool.release(slot)

    def _wait(self, pool: _Pool, slot: _Slot, seconds: float, deadline: float) -> wire.Reply:
        down, attempt = "", 0
        while (now := time.monotonic()) < deadline:
            waiting = False
            try:
                pool.connect(slot, deadline)
                data, exists = slot.ask(commands.job_state(pool.keys, self._wire_id), min(deadline, now + _SILENCE))
                down, attempt = "", 0
                replies = wire.decode_replies(data, copy=pool.config.copy) if data else []
                if replies:
                    return replies[0]
                if not exists:
                    raise JobNotFoundError(
                        f"job {self.id!r}: there is none, or its result has expired", request_id=self._wire_id.hex()
                    )
                if data:
                    pool.pause(min(_PAUSE, deadline - now))
                    continue
                waiting = True
                block = min(_LOOK, deadline + 0.1 - now)
                slot.ask(commands.wait_reply(pool.keys, self._wire_id, block), min(deadline, now + block + _SILENCE))
            except OutOfMemory:
                pool.pause(min(_PAUSE, deadline - now))  # at maxmemory Redis refuses to wait this way
            except BackendUnavailableError as error:
                pool.check_open()
                if isinstance(error, BackendAuthError):
                    raise
                if not (waiting and time.monotonic() >= deadline):
                    down, attempt = error.message, attempt + 1
                    pool.pause(min(retry_delay(attempt, random.random), deadline - time.monotonic()))
        if down:
            raise BackendUnavailableError(f"{down}; gave up after {seconds:g} s", request_id=self._wire_id.hex())
        raise DeadlineExceededError(
            f"job {self.id!r} has no result yet after {seconds:g} s", request_id=self._wire_id.hex()
        )

    def cancel(self) -> bool:
        """Cancel the job; True if it was pending: then it is not run where it still waits, and ``result`` raises JobCancelledError.

        Raises JobNotFoundError where there is no such job.
        """
        pool = self._client._pool()
        cancelled = pool.carry(commands.cancel_job(pool.keys, self._wire_id), DEFAULT_TIMEOUT)
        if cancelled < 0:
            raise JobNotFoundError(f"job {self.id!r}: there is none, or its result has expired", request_id=self._wire_id.hex())
        return cancelled == 1


class Client:
    """Sends requests to a queue, one value each, and waits for their answers; for threads.

    May be built at import time and before a fork: it connects on first use, in each process anew. One object serves any number of
    threads, and has none of its own.

    ``url``: ``redis://``, ``rediss://`` or ``unix://``; default ``BATCHQ_REDIS_URL``, else ``redis://localhost:6379/0``. ``queue``: its
    name; default ``BATCHQ_QUEUE``, else ``default``. ``redis``: a ``redis.Redis`` whose settings are used instead of ``url``.
    ``timeout``: seconds for a call that gives none (10). ``capacity``: pending requests at which this client's calls raise
    QueueFullError; it can only lower the queue's. ``max_payload``: bytes of one value (64 MiB). ``fail_fast``: raise NoWorkerError at
    once where no worker has reported for 10 s. ``copy``: whether arrays in answers are writable copies (True) or read-only views.
    ``max_connections``: connections in each process, 1 to 10,000 (256). Each call holds one while it waits, a ``map`` until its end; where
    all are in use a call waits for one, and after its timeout raises BackendUnavailableError.

    Raises ConfigError for a setting out of its range.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str | None = None,
        redis: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        capacity: int | None = None,
        max_payload: int = DEFAULT_MAX_PAYLOAD,
        fail_fast: bool = False,
        copy: bool = True,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self._pools: dict[int, _Pool] = {}
        self._closed = False
        self._config = ClientConfig(
            url="" if redis is not None else resolve_url(url),
            queue=resolve_queue(queue),
            timeout=timeout,
            capacity=capacity,
            max_payload=max_payload,
            fail_fast=fail_fast,
            copy=copy,
        )
        self._max_connections = check_int("max_connections", max_connections, 1, 10_000, DEFAULT_MAX_CONNECTIONS)
        self._endpoint = Endpoint(self._config.url, redis)

    def __repr__(self) -> str:
        return f"Client({self._endpoint.name!r}, queue={self._config.queue!r})"

    def _pool(self) -> _Pool:
        """Return this process' state; the parent's is let go of in a child."""
        if self._closed:
            raise ClientClosedError("the client was closed")
        pid = os.getpid()
        pool = self._pools.get(pid)
        if pool is None:
            # no lock: a thread of the parent's may have held it when the process was forked
            pool = self._pools.setdefault(pid, _Pool(self._config, self._endpoint, self._max_connections))
            self._let_go_of_others(pid)
            if self._closed:
                pool.close()
        return pool

    def _let_go_of_others(self, pid: int) -> None:
        for other in [known for known in self._pools if known != pid]:
            foreign = self._pools.pop(other, None)
            if foreign is not None:
                foreign.discard()

    def predict(
        self,
        value: Any,
        *,
        timeout: float | None = None,
        priority: Priority = "normal",
        batch_key: str | int | None = None,
        cost: float | None = None,
        meta: dict[str, Any] | None = None,
    ) -> Any:
        """Send one value and return the model's answer to it.

        ``timeout``: seconds from this call to its answer, more than 0 and at most 86,400; None means the client's. ``priority``: ``high``,
        ``normal`` or ``low``. ``batch_key``: only requests with equal keys share a batch. ``cost``: what the request counts against the
        worker's ``--max-batch-cost``. ``meta``: a dict for the model's BatchContext.

        Raises QueueFullError, DeadlineExceededError, ModelError, WorkerLostError, BackendUnavailableError, EncodeError,
        PayloadTooLargeError, and ConfigError for an argument out of its range.
        """
        pool = self._pool()
        check_extras(batch_key, cost, meta)
        lane, seconds = check_lane(priority), check_timeout(timeout, self._config.timeout)
        with _Exchange(pool, seconds) as exchange:
            extras = _Extras(batch_key, cost, meta)
            exchange.add([exchange.request(value, lane, extras, seconds, exchange.deadline)])
            return _open(_only(exchange))

    def predict_many(
        self,
        values: Iterable[Any],
        *,
        timeout: float | None = None,
        priority: Priority = "normal",
        batch_key: str | int | None = None,
        cost: float | None = None,
        meta: dict[str, Any] | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Send several values, admitted all or none, and return their answers in order.

        One ``timeout`` holds for all. The first error cancels the rest and is raised; with ``return_exceptions`` errors stand in the list
        in place of answers. The other arguments apply to each value; see ``predict``. More values than the queue's capacity are a
        ConfigError: use ``map``.
        """
        pool = self._pool()
        check_extras(batch_key, cost, meta)
        lane, seconds = check_lane(priority), check_timeout(timeout, self._config.timeout)
        values = list(values)
        if not values:
            return []
        if self._config.capacity is not None and len(values) > self._config.capacity:
            raise too_many(len(values), self._config.capacity)
        with _Exchange(pool, seconds, stream=True) as exchange:
            extras = _Extras(batch_key, cost, meta)
            requests = [exchange.request(value, lane, extras, seconds, exchange.deadline) for value in values]
            exchange.add(requests, whole=True)
            answers: dict[bytes, Any] = {}
            while exchange.outstanding:
                for request, result in exchange.step():
                    if isinstance(result, QueueFullError):
                        with contextlib.suppress(BackendUnavailableError):
                            capacity = exchange.ask(commands.queue_capacity(pool.keys))
                            if len(values) > capacity:
                                raise too_many(len(values), capacity)
                    answers[request.id] = _open(result, return_exceptions)
            return [answers[request.id] for request in requests]

    def map(
        self,
        values: Iterable[Any],
        *,
        concurrency: int = 256,
        priority: Priority = "low",
        batch_key: str | int | None = None,
        cost: float | None = None,
        meta: dict[str, Any] | None = None,
        ordered: bool = True,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> Iterator[Any]:
        """Run any number of values through the queue, and iterate over the answers.

        Values are taken lazily, at most ``concurrency`` (1 to 100,000) at a time; a full queue is waited for. ``ordered=False`` gives
        answers as they come. ``timeout``: seconds for each value, None means 86,400; the time that the caller spends between two answers
        does not count. An error is raised, and ends the iteration, unless ``return_exceptions``. The other arguments are ``predict``'s.
        """
        pool = self._pool()
        check_int("concurrency", concurrency, 1, 100_000, 256)
        check_extras(batch_key, cost, meta)
        lane, seconds, extras = check_lane(priority), check_timeout(timeout, DAY), _Extras(batch_key, cost, meta)
        found = self._map(pool, iter(values), concurrency, lane, seconds, extras, ordered, return_exceptions)
        return (_open(result, return_exceptions) for result in found)

    def _map(
        self,
        pool: _Pool,
        source: Iterator[Any],
        concurrency: int,
        lane: str,
        seconds: float,
        extras: _Extras,
        ordered: bool,
        return_exceptions: bool,
    ) -> Iterator[wire.Reply | BatchqError | None]:
        window: deque[_Request] = deque()
        ready: dict[bytes, wire.Reply | BatchqError | None] = {}
        refused: list[_Request] = []
        attempt, retry_at, more = 0, 0.0, True
        with _Exchange(pool, seconds, stream=True) as exchange:
            while more or refused or exchange.outstanding:
                now = time.monotonic()
                if refused:
                    if now >= retry_at or not exchange.outstanding:
                        pool.pause(retry_at - now)
                        exchange.add(refused)
                        refused = []
                elif more and not exchange.is_pushing:
                    room = concurrency - len(exchange.outstanding) - len(ready)
                    chunk, more = self._gather(exchange, source, room, lane, seconds, extras, ready if return_exceptions else None)
                    window += chunk
                    if chunk:
                        exchange.add(chunk)
                if not exchange.outstanding:
                    continue
                full = False
                for request, result in exchange.step(retry_at - now if refused else _LOOK):
                    if isinstance(result, QueueFullError) and request.deadline > time.monotonic():
                        refused.append(request)
                        full = True
                    elif ordered:
                        ready[request.id] = result
                    else:
                        yield result
                attempt = attempt + 1 if full else 0
