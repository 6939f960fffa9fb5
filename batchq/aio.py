"""``AsyncClient``: the client for asyncio. What it promises is in its docstrings; how it works, in docs/protocol.md.

One connection pushes, one reads replies. All calls of one turn of the event loop leave in one push, one push is in flight at a time, and
one read brings the replies of whole batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
import warnings
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any, TypeVar

from batchq import commands, wire
from batchq.chain import Chain, Position
from batchq.commands import Call, Outgoing
from batchq.config import (
    DAY,
    DEFAULT_MAX_PAYLOAD,
    DEFAULT_RESULT_TTL,
    DEFAULT_TIMEOUT,
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
    ConfigError,
    DeadlineExceededError,
    JobNotFoundError,
    QueueFullError,
)
from batchq.keys import Keys
from batchq.requests import (
    JOB_DEADLINE,
    MAX_PUSH_BYTES,
    MAX_PUSH_REQUESTS,
    Ids,
    check_result_ttl,
    job_wire_id,
    new_name,
    no_worker_hint,
    out_of_memory,
    outcome,
    refused,
    too_late,
    too_many,
)
from batchq.stats import QueueStats, from_answers
from batchq.store import AsyncLink, Endpoint, LinkLostError, OutOfMemory, retry_delay

T = TypeVar("T")

_READ_BLOCK_MS = 2000
_SILENCE = 5.0
"""A connection that owes an answer for this many seconds counts as broken: a half-open socket says nothing."""


class _Call:
    """A request on its way, and the future that its caller waits for."""

    __slots__ = ("deadline", "future", "give_up", "id", "lane", "number", "request", "timeout", "timer", "ttl_ms")

    def __init__(
        self,
        id: bytes,
        request: bytes,
        lane: str,
        timeout: float,
        deadline: float,
        future: asyncio.Future[Any],
    ) -> None:
        self.id = id
        self.request = request
        self.lane = lane
        self.timeout = timeout
        self.deadline = deadline
        self.give_up = deadline
        """When its caller no longer waits: its deadline, but for a job, whose caller waits only until it is in the queue."""
        self.future = future
        self.ttl_ms = 0
        self.number = 0
        """The push that it left with; 0 while it has not left."""
        self.timer: asyncio.TimerHandle | None = None

    def outgoing(self, now: float) -> Outgoing:
        # a caller that has gone meanwhile leaves a request without time, which take drops
        left = 0.0 if self.future.done() else max(0.0, self.deadline - now)
        return Outgoing(self.id, self.request, self.lane, int(left * 1e6), self.ttl_ms)


class _Group:
    """Requests that leave in one push."""

    __slots__ = ("calls", "force", "jobs", "size", "whole")

    def __init__(self, *, whole: bool = False, jobs: bool = False, force: bool = False) -> None:
        self.calls: list[_Call] = []
        self.size = 0
        self.whole = whole
        self.jobs = jobs
        self.force = force

    def add(self, call: _Call) -> None:
        self.calls.append(call)
        self.size += len(call.request)

    @property
    def open(self) -> bool:
        return (
            not (self.whole or self.jobs or self.force)
            and len(self.calls) < MAX_PUSH_REQUESTS
            and self.size < MAX_PUSH_BYTES
        )


class _Session:
    """The client's state on one event loop: its connections, its tasks, and what is outstanding."""

    def __init__(self, config: ClientConfig, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.keys = Keys(config.queue)
        self.endpoint = endpoint
        self.loop = loop
        self.pid = os.getpid()
        self.ids = Ids()
        self.name = new_name()
        self.chain = Chain()
        self.buffer: deque[_Group] = deque()
        self.outstanding: dict[bytes, _Call] = {}
        self.cancelled: list[bytes] = []
        self.down = ""
        self.hint = ""
        self.closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._links: list[AsyncLink] = []
        self._idle: list[AsyncLink] = []
        self._push_link: AsyncLink | None = None
        self._reply_link: AsyncLink | None = None
        self._push_wake: asyncio.Future[None] | None = None
        self._reply_wake: asyncio.Future[None] | None = None
        self._busy_since: dict[AsyncLink, float] = {}
        self._tick_handle: asyncio.TimerHandle | None = None
        self._check_due = False
        self._touched = 0.0

    # --- requests ---

    def encode(
        self,
        value: object,
        timeout: float,
        lane: str,
        batch_key: str | int | None,
        cost: float | None,
        meta: dict[str, Any] | None,
    ) -> _Call:
        request_id = self.ids.next()
        request = wire.encode_request(
            request_id,
            self.name,
            int(timeout * 1000),
            value,
            meta=meta,
            batch_key=batch_key,
            cost=cost,
            max_payload=self.config.max_payload,
        )
        return _Call(
            request_id, request, lane, timeout, self.loop.time() + timeout, self.loop.create_future()
        )

    def enqueue(self, call: _Call) -> None:
        """Put one request into the push that leaves next."""
        if not self.buffer or not self.buffer[-1].open:
            self.buffer.append(_Group())
        self.buffer[-1].add(call)
        self._expect(call)
        self._kick()

    def enqueue_group(self, group: _Group) -> None:
        """Put a push of its own behind what waits."""
        self.buffer.append(group)
        for call in group.calls:
            self._expect(call)
        self._kick()

    def submit(self, call: _Call) -> None:
        """Put one job into the push of jobs that leaves next."""
        if not self.buffer or not self.buffer[-1].jobs or len(self.buffer[-1].calls) >= MAX_PUSH_REQUESTS:
            self.buffer.append(_Group(jobs=True))
        self.buffer[-1].add(call)
        self._expect(call)
        self._kick()

    def _expect(self, call: _Call) -> None:
        self.outstanding[call.id] = call
        call.timer = self.loop.call_at(call.give_up, self._expire, call)
        if self._tick_handle is None:
            self._tick_handle = self.loop.call_later(min(1.0, call.timeout / 2), self._tick)

    def _settle(self, call: _Call) -> None:
        """Forget a request that is over."""
        self.outstanding.pop(call.id, None)
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None

    def _fail(self, call: _Call, error: BatchqError) -> None:
        self._settle(call)
        if not call.future.done():
            call.future.set_exception(error)

    def _expire(self, call: _Call) -> None:
        self._fail(call, too_late(self.config.queue, call.timeout, call.id, self.hint, self.down))

    def abandon(self, call: _Call) -> None:
        """Forget a request whose caller has gone, and have it dropped where it still waits."""
        was_known = self.outstanding.get(call.id) is call
        self._settle(call)
        if not call.future.done():
            call.future.cancel()
        if was_known and call.number and not self.closed:
            self.cancelled.append(call.id)
            self._kick()

    # --- tasks ---

    def _kick(self) -> None:
        if not self._tasks:
            self._tasks = [
                self.loop.create_task(self._push_forever()),
                self.loop.create_task(self._read_forever()),
            ]
        if self._push_wake is not None and not self._push_wake.done():
            self._push_wake.set_result(None)
        if self._reply_wake is not None and not self._reply_wake.done():
            self._reply_wake.set_result(None)

    def _tick(self) -> None:
        """Once a second while anything is outstanding: break silent connections, have the chain checked."""
        self._tick_handle = None
        now = self.loop.time()
        for link, since in list(self._busy_since.items()):
            if now - since > _SILENCE:
                link.abort()
        if self.outstanding and not self.closed:
            self._check_due = True
            self._kick()
            self._tick_handle = self.loop.call_later(1.0, self._tick)

    async def _connect(self) -> AsyncLink:
        link = await self.endpoint.async_link()
        if self.closed:
            await link.close()
            raise LinkLostError("the client was closed")
        self._links = [known for known in self._links if not known.broken]
        self._links.append(link)
        return link

    async def _carry(self, link: AsyncLink, call: Call[T]) -> T:
        """Carry a verb; the tick breaks the connection if no answer comes."""
        self._busy_since[link] = self.loop.time()
        try:
            return await link.call(call)
        finally:
            self._busy_since.pop(link, None)

    async def _push_link_ready(self) -> AsyncLink:
        if self._push_link is None or self._push_link.broken:
            self._push_link = await self._connect()
            self._check_due = bool(self.chain.last) and bool(self.outstanding)
        return self._push_link

    async def _push_forever(self) -> None:
        attempt = 0
        group: _Group | None = None
        position: Position | None = None
        while not self.closed:
            if group is None and not (self.buffer or self.cancelled or self._check_due):
                self._push_wake = self.loop.create_future()
                await self._push_wake
                continue
            try:
                link = await self._push_link_ready()
                if group is None and self._check_due:
                    self._check_due = False
                    await self._check(link)
                if group is None and self.cancelled:
                    ids, self.cancelled = self.cancelled, []
                    await self._carry(link, commands.cancel(self.keys, ids, int(DAY * 1000)))
                if group is None and self.buffer:
                    group, position = self._next_group(), None
                if group is not None:
                    position = (
                        position or self.chain.next()
                    )  # a push that may have run goes again under its own token
                    await self._push(link, group, position)
                    group = None
                self.down, attempt = "", 0
            except OutOfMemory:
                self.down = ""
                for call in group.calls if group else ():
                    self._fail(call, out_of_memory(self.config.queue, call.id))
                group = None
            except BackendUnavailableError as error:
                self.down = error.message
                if isinstance(error, BackendAuthError):
                    for call in [*self.outstanding.values()]:
                        self._fail(call, BackendAuthError(error.message, request_id=call.id.hex()))
                attempt += 1
                if not self.outstanding:
                    group, self._check_due = None, False
                    self.buffer.clear()
                    self.cancelled.clear()
                    continue
                await asyncio.sleep(retry_delay(attempt, random.random))

    def _next_group(self) -> _Group | None:
        group = self.buffer.popleft()
        group.calls = [call for call in group.calls if not call.future.done()]
        return group if group.calls else None

    async def _push(self, link: AsyncLink, group: _Group, position: Position) -> None:
        """Carry one push and tell the callers that it could not take; after a gap it is put back, behind what is lost."""
        now = self.loop.time()
        for call in group.calls:
            call.number = position.number
        pushed = await self._carry(
            link,
            commands.push(
                self.keys,
                [call.outgoing(now) for call in group.calls],
                producer=self.name,
                previous=position.previous,
                token=position.token,
                fresh=len(self.outstanding) <= len(group.calls),
                whole=group.whole,
                force=group.force,
                jobs=group.jobs,
                capacity=self.config.capacity,
                fail_fast=self.config.fail_fast,
            ),
        )
        if pushed.outcome == "gap":
            for call in group.calls:
                call.number = 0
            self._repush(pushed.stored)
            self.buffer.insert(1 if self.buffer and self.buffer[0].force else 0, group)
            return
        if pushed.outcome == "no_worker":
            for call in group.calls:
                self._fail(call, refused(self.config.queue, pushed, call.id))
            return
        self.chain.done(position)
        left = dict(pushed.admitted or {})
        for call in group.calls:
            if left.get(call.lane, 0) > 0:
                left[call.lane] -= 1
            else:
                self._fail(
                    call, refused(self.config.queue, pushed, call.id, len(group.calls) if group.whole else 1)
                )
            if group.jobs:
                self._settle(call)
                if not call.future.done():
                    call.future.set_result(None)
        if time.time() - self._touched > 60:
            self._touched = time.time()
            await self._carry(link, commands.touch_queue(self.keys, self._touched))

    def _repush(self, stored: str) -> None:
        """Redis has lost pushes: make one of every outstanding request that left after the last one it knows."""
        known = self.chain.gap(stored)
        lost = _Group(force=True)
        for call in self.outstanding.values():
            if call.number > known:
                lost.add(call)
        if lost.calls:
            self.buffer.appendleft(lost)
        # replies that came meanwhile may have ids below the cursor
        if self._reply_link is not None:
            self._reply_link.abort()

    async def _check(self, link: AsyncLink) -> None:
        """Ask Redis for its record of this producer, and whether anybody works on the queue."""
        health = await self._carry(link, commands.health(self.keys, self.name))
        if (
            health.stored != self.chain.last
            and self.outstanding
            and not any(group.force for group in self.buffer)
        ):
            self._repush(health.stored)
        self.hint = ""
        if health.silent > 10:
            queues = await self._carry(link, commands.list_queues())
            others = await self._carry(link, commands.live_workers(queues)) if queues else {}
            self.hint = no_worker_hint(self.config.queue, others)

    async def _read_forever(self) -> None:
        cursor = b"0-0"
        attempt = 0
        quiet = True
        while not self.closed:
            if quiet and not self.outstanding:
                self._reply_wake = self.loop.create_future()
                await self._reply_wake
                cursor = b"0-0"  # the stream may have expired meanwhile, and a new one begin lower
                continue
            try:
                if self._reply_link is None or self._reply_link.broken:
                    self._reply_link = await self._connect()
                    cursor = b"0-0"
                    self._check_due = bool(self.chain.last)
                link = self._reply_link
                self._busy_since[link] = self.loop.time()
                try:
                    entries = await link.call(
                        commands.read_replies(self.keys, self.name, cursor, block_ms=_READ_BLOCK_MS, count=64)
                    )
                finally:
                    self._busy_since.pop(link, None)
                attempt = 0
            except BackendUnavailableError as error:
                self.down = self.down or error.message
                attempt += 1
                await asyncio.sleep(retry_delay(attempt, random.random))
                continue
            quiet = not entries
            for entry, replies in entries:
                cursor = entry
                self._answer(replies)

    def _answer(self, data: bytes) -> None:
        for reply in wire.decode_replies(data, copy=self.config.copy):
            call = self.outstanding.pop(reply.id, None)
            if call is None:
                continue
            if call.timer is not None:
                call.timer.cancel()
                call.timer = None
            if not call.future.done():
                if reply.code:
                    call.future.set_exception(reply.error())
                else:
                    call.future.set_result(reply.value)

    # --- calls outside the stream ---

    async def _once(self, call: Call[T]) -> T:
        while self._idle and self._idle[-1].broken:
            self._idle.pop()
        link = self._idle.pop() if self._idle else await self._connect()
        try:
            return await link.call(call)  # cancelled here, the connection closes itself
        finally:
            if not link.broken:
                self._idle.append(link)

    async def direct(self, call: Call[T], timeout: float, *, fatal: bool = False) -> T:
        """Carry a verb on a connection of its own; retried until ``timeout`` where the connection breaks."""
        deadline = self.loop.time() + timeout
        attempt = 0
        while True:
            try:
                return await asyncio.wait_for(self._once(call), max(0.001, deadline - self.loop.time()))
            except asyncio.TimeoutError:
                raise LinkLostError(
                    f"no answer from Redis at {self.endpoint.name} within {timeout:g} s"
                ) from None
            except BackendUnavailableError as error:
                attempt += 1
                delay = retry_delay(attempt, random.random)
                if (
                    fatal
                    or isinstance(error, (BackendAuthError, OutOfMemory))
                    or self.loop.time() + delay >= deadline
                ):
                    raise
                await asyncio.sleep(delay)

    # --- the end ---

    async def close(self) -> None:
        self.closed = True
        self._fail_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            await link.close()

    def _fail_all(self) -> None:
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for call in [*self.outstanding.values()]:
            self._fail(call, ClientClosedError("the client was closed", request_id=call.id.hex()))
        self.buffer.clear()

    def let_go(self) -> None:
        """End everything from within the loop, for a client that was dropped."""
        self.closed = True
        self._fail_all()
        for task in self._tasks:
            task.cancel()
        for link in self._links:
            link.drop()

    def discard(self) -> None:
        """Let go of a session whose loop has gone, or that belongs to the parent process."""
        self.closed = True
        for link in self._links:
            link.discard()


class AsyncJob:
    """A request that was submitted, not awaited: its result is kept in Redis and may be read by any process, any number of times."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.id = job_id
        self._client = client
        self._wire_id = job_wire_id(job_id)

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    async def _read(self, timeout: float) -> tuple[wire.Reply | None, bool]:
        session = self._client._session()
        data, exists = await session.direct(commands.job_state(session.keys, self._wire_id), timeout)
        replies = wire.decode_replies(data, copy=session.config.copy) if data else []
        return (replies[0] if replies else None), exists

    async def state(self) -> str:
        """Return ``pending``, ``done``, ``failed``, or ``unknown``: never submitted, or its result has expired."""
        reply, exists = await self._read(DEFAULT_TIMEOUT)
        if reply is None:
            return "pending" if exists else "unknown"
        return "failed" if reply.code else "done"

    async def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer and return it, or raise its error; may be called again until the result expires.

        ``timeout`` in seconds, None means 10. Raises DeadlineExceededError where there is no result yet, JobNotFoundError where there is
        no such job.
        """
        seconds = check_timeout(timeout, DEFAULT_TIMEOUT)
        session = self._client._session()
        deadline = session.loop.time() + seconds
        while True:
            left = deadline - session.loop.time()
            reply, exists = await self._read(max(0.05, left))
            if reply is not None:
                return outcome(reply)
            if not exists:
                raise JobNotFoundError(
                    f"job {self.id!r}: there is none, or its result has expired",
                    request_id=self._wire_id.hex(),
                )
            left = deadline - session.loop.time()
            if left <= 0:
                raise DeadlineExceededError(
                    f"job {self.id!r} has no result yet after {seconds:g} s", request_id=self._wire_id.hex()
                )
            try:
                await session.direct(commands.wait_reply(session.keys, self._wire_id, left), left, fatal=True)
            except OutOfMemory:
                await asyncio.sleep(min(left, 0.05))  # at maxmemory Redis refuses to wait this way
            except BackendUnavailableError:
                await asyncio.sleep(min(max(0.0, deadline - session.loop.time()), 0.02))

    async def cancel(self) -> bool:
        """Cancel the job; True if it was pending: then it is not run where it still waits, and ``result`` raises JobCancelledError."""
        session = self._client._session()
        return await session.direct(commands.cancel_job(session.keys, self._wire_id), DEFAULT_TIMEOUT) == 1


class AsyncClient:
    """Sends requests to a queue, one value each, and awaits their answers; for asyncio.

    May be built at import time: it connects on first use. One object serves any number of tasks of one event loop; one whose loop is
    closed, or that was built before a fork, starts anew on the loop that uses it next.

    ``url``: ``redis://``, ``rediss://`` or ``unix://``; default ``BATCHQ_REDIS_URL``, else ``redis://localhost:6379/0``. ``queue``: its
    name; default ``BATCHQ_QUEUE``, else ``default``. ``redis``: a ``redis.asyncio.Redis`` whose settings are used instead of ``url``.
    ``timeout``: seconds for a call that gives none (10). ``capacity``: pending requests at which this client's calls raise
    QueueFullError; it can only lower the queue's. ``max_payload``: bytes of one value (64 MiB). ``fail_fast``: raise NoWorkerError at
    once where no worker has reported for 10 s. ``copy``: whether arrays in answers are writable copies (True) or read-only views.

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
    ) -> None:
        self._config = ClientConfig(
            url="" if redis is not None else resolve_url(url),
            queue=resolve_queue(queue),
            timeout=timeout,
            capacity=capacity,
            max_payload=max_payload,
            fail_fast=fail_fast,
            copy=copy,
        )
        self._endpoint = Endpoint(self._config.url, redis)
        self._current: _Session | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"AsyncClient({self._endpoint.name!r}, queue={self._config.queue!r})"

    def _session(self) -> _Session:
        if self._closed:
            raise ClientClosedError("the client was closed")
        loop = asyncio.get_running_loop()
        session = self._current
        if session is not None and session.loop is loop and session.pid == os.getpid():
            return session
        if session is not None:
            if session.pid == os.getpid() and not session.loop.is_closed():
                raise ConfigError(
                    "this AsyncClient is in use on another event loop that is not closed: make one client for each loop"
                )
            session.discard()
        self._current = _Session(self._config, self._endpoint, loop)
        return self._current

    async def predict(
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

        Cancelling the task that awaits this cancels the request where it still waits, and disturbs nobody else.

        Raises QueueFullError, DeadlineExceededError, ModelError, WorkerLostError, BackendUnavailableError, EncodeError,
        PayloadTooLargeError, and ConfigError for an argument out of its range.
        """
        session = self._session()
        call = self._make_call(session, value, timeout, priority, batch_key, cost, meta)
        session.enqueue(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            session.abandon(call)
            raise

    def _make_call(
        self,
        session: _Session,
        value: Any,
        timeout: float | None,
        priority: Priority,
        batch_key: str | int | None,
        cost: float | None,
        meta: dict[str, Any] | None,
    ) -> _Call:
        if batch_key is not None or cost is not None or meta is not None:
            check_extras(batch_key, cost, meta)
        return session.encode(
            value, check_timeout(timeout, self._config.timeout), check_lane(priority), batch_key, cost, meta
        )

    async def predict_many(
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
        session = self._session()
        group = _Group(whole=True)
        for value in values:
            group.add(self._make_call(session, value, timeout, priority, batch_key, cost, meta))
        if not group.calls:
            return []
        calls = list(group.calls)
        if self._config.capacity is not None and len(calls) > self._config.capacity:
            raise too_many(len(calls), self._config.capacity)
        deadline = calls[0].deadline
        for call in calls:
            call.deadline = call.give_up = deadline
        session.enqueue_group(group)
        futures = [call.future for call in calls]
        try:
            if return_exceptions:
                answers = await asyncio.gather(*futures, return_exceptions=True)
            else:
                answers = await asyncio.gather(*futures)
        except QueueFullError:
            capacity = await session.direct(commands.queue_capacity(session.keys), DEFAULT_TIMEOUT)
            if len(calls) > capacity:
                raise too_many(len(calls), capacity) from None
            raise
        finally:
            for call in calls:
                if not call.future.done() or call.future.cancelled():
                    session.abandon(call)
                elif not call.future.cancelled():
                    call.future.exception()  # seen: the first error was raised, the others are not news
        return list(answers)

    async def map(
        self,
        values: Iterable[Any] | AsyncIterable[Any],
        *,
        concurrency: int = 256,
        priority: Priority = "low",
        batch_key: str | int | None = None,
        cost: float | None = None,
        meta: dict[str, Any] | None = None,
        ordered: bool = True,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> AsyncIterator[Any]:
        """Run any number of values through the queue, and iterate over the answers.

        Values are taken lazily, at most ``concurrency`` (1 to 100,000) at a time; a full queue is waited for. ``ordered=False`` gives
        answers as they come. ``timeout``: seconds for each value, None means 86,400. An error is raised, and ends the iteration, unless
        ``return_exceptions``. The other arguments are ``predict``'s.
        """
        check_int("concurrency", concurrency, 1, 100_000, 256)
        seconds = check_timeout(timeout, DAY)
        self._session()

        async def one(value: Any) -> Any:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + seconds
            attempt = 0
            while True:
                try:
                    left = max(0.001, deadline - loop.time())
                    return await self.predict(
                        value, timeout=left, priority=priority, batch_key=batch_key, cost=cost, meta=meta
                    )
                except QueueFullError as error:
                    attempt += 1
                    delay = retry_delay(attempt, random.random)
                    if loop.time() + delay >= deadline:
                        if return_exceptions:
                            return error
                        raise
                    await asyncio.sleep(delay)
                except BatchqError as error:
                    if return_exceptions:
                        return error
                    raise

        source = _aiter(values)
        tasks: deque[asyncio.Task[Any]] = deque()
        finished: deque[asyncio.Task[Any]] = deque()
        running: set[asyncio.Task[Any]] = set()
        more: asyncio.Future[None] | None = None

        def note(task: asyncio.Task[Any]) -> None:
            running.discard(task)
            finished.append(task)
            if more is not None and not more.done():
                more.set_result(None)

        exhausted = False
        try:
            while True:
                while (
                    not exhausted and (len(tasks) if ordered else len(running) + len(finished)) < concurrency
                ):
                    try:
                        value = await source.__anext__()
                    except StopAsyncIteration:
                        exhausted = True
                        break
                    task = asyncio.ensure_future(one(value))
                    if ordered:
                        tasks.append(task)
                    else:
                        running.add(task)
                        task.add_done_callback(note)
                if ordered:
                    if not tasks:
                        return
                    answer = await tasks[0]
                    tasks.popleft()
                    yield answer
                else:
                    if not finished:
                        if not running:
                            return
                        more = asyncio.get_running_loop().create_future()
                        await more
                    yield finished.popleft().result()
        finally:
            rest = [*tasks, *running, *finished]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    async def submit(
        self,
        value: Any,
        *,
        id: str | None = None,
        deadline: float | None = None,
        result_ttl: float = DEFAULT_RESULT_TTL,
        priority: Priority = "normal",
        batch_key: str | int | None = None,
        cost: float | None = None,
        meta: dict[str, Any] | None = None,
    ) -> AsyncJob:
        """Put a request into the queue and return at once; the result is fetched later, from any process.

        ``id``: 1 to 256 characters; submitting the same id again while it is known changes nothing; None means a new random one.
        ``deadline``: seconds from now within which it may be run, None means 86,400. ``result_ttl``: seconds for which the result is kept,
        1 to 2,592,000. The job is as durable as your Redis. Raises what ``predict`` raises before a request is in the queue.
        """
        session = self._session()
        job = AsyncJob(self, new_name() + new_name()[:12] if id is None else id)
        ttl_ms = check_result_ttl(result_ttl)
        check_extras(batch_key, cost, meta)
        seconds = check_timeout(deadline, JOB_DEADLINE, "deadline")
        wire_id = job_wire_id(job.id)
        request = wire.encode_request(
            wire_id, ttl_ms, int(seconds * 1000), value,
            meta=meta, batch_key=batch_key, cost=cost, max_payload=self._config.max_payload,
        )  # fmt: skip
        loop = session.loop
        now = loop.time()
        call = _Call(wire_id, request, check_lane(priority), self._config.timeout, now + seconds, loop.create_future())
        call.give_up = now + self._config.timeout
        call.ttl_ms = ttl_ms
        session.submit(call)
        try:
            await call.future
        except asyncio.CancelledError:
            session.abandon(call)
            raise
        return job

    def job(self, id: str) -> AsyncJob:
        """Return the job with this id, submitted by any process."""
        self._session()
        return AsyncJob(self, id)

    async def stats(self) -> QueueStats:
        """Return the queue's state now: depth, ages, totals, live workers."""
        session = self._session()
        return from_answers(
            self._config.queue, await session.direct(commands.stats(session.keys), self._config.timeout)
        )

    async def ping(self) -> float:
        """Return how many seconds a round trip to Redis takes; raise BackendUnavailableError where there is none."""
        session = self._session()
        await session.direct(commands.call(b"PING"), self._config.timeout, fatal=True)
        started = time.perf_counter()
        await session.direct(commands.call(b"PING"), self._config.timeout, fatal=True)
        return time.perf_counter() - started

    async def aclose(self) -> None:
        """Close the connections; calls that wait raise ClientClosedError, and so do all later ones. Does not wait for Redis."""
        self._closed = True
        session, self._current = self._current, None
        if session is None:
            return
        if session.loop is asyncio.get_running_loop() and session.pid == os.getpid():
            await session.close()
        else:
            session.discard()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        session = getattr(self, "_current", None)
        if session is None or session.closed or session.pid != os.getpid() or session.loop.is_closed():
            return
        warnings.warn(
            f"{self!r} was not closed: call `await client.aclose()`",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )
        with contextlib.suppress(RuntimeError):
            session.loop.call_soon_threadsafe(session.let_go)


async def _aiter(values: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
    else:
        for value in values:
            yield value
