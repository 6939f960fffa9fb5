"""What an ``AsyncClient`` holds on one event loop: its connections, its tasks, and what is outstanding. docs/protocol.md says how it works.

One connection pushes, one reads replies. All calls of one turn of the event loop leave in one push, one push is in flight at a time, and
one read brings the replies of whole batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import random
import time
from collections import deque
from typing import Any, TypeVar

from batchq import commands, wire
from batchq.chain import Chain, Position
from batchq.commands import Call as Verb
from batchq.commands import Outgoing
from batchq.config import (
    DAY,
    ClientConfig,
)
from batchq.errors import (
    BackendAuthError,
    BackendUnavailableError,
    BatchqError,
    ClientClosedError,
)
from batchq.keys import Keys, place_of
from batchq.requests import (
    MAX_PUSH_BYTES,
    MAX_PUSH_REQUESTS,
    Ids,
    log,
    new_name,
    no_worker_hint,
    out_of_memory,
    refused,
    too_late,
)
from batchq.store import SLOWEST, AsyncLink, Endpoint, LinkLostError, OutOfMemory, retry_delay

T = TypeVar("T")

_READ_BLOCK_MS = 2000
_READ_ENTRIES = 64
_LONG_AWAY = 45.0
_DIRECT_CONNECTIONS = 64
_SILENCE = 5.0
"""A connection that owes an answer for this many seconds counts as broken: a half-open socket says nothing."""


class Call:
    """A request on its way, and the future that its caller waits for."""

    __slots__ = (
        "cost",
        "deadline",
        "future",
        "give_up",
        "id",
        "number",
        "place",
        "request",
        "timeout",
        "ttl_ms",
    )

    def __init__(
        self,
        id: bytes,
        request: bytes,
        place: str,
        timeout: float,
        deadline: float,
        future: asyncio.Future[Any],
        cost: float | None = None,
    ) -> None:
        self.id = id
        self.request = request
        self.place = place
        self.cost = cost
        self.timeout = timeout
        self.deadline = deadline
        self.give_up = deadline
        """When its caller no longer waits: its deadline, but for a job, whose caller waits only until it is in the queue."""
        self.future = future
        self.ttl_ms = 0
        self.number = 0
        """The push that it left with; 0 while it has not left."""

    def outgoing(self, now: float) -> Outgoing:
        """Return the request as it is pushed now, with the time that is left."""
        # a caller that has gone meanwhile leaves a request without time, which take drops
        left = 0.0 if self.future.done() else max(0.0, self.deadline - now)
        return Outgoing(self.id, self.request, self.place, int(left * 1e6), self.ttl_ms, self.cost)


class Group:
    """Requests that leave in one push."""

    __slots__ = ("calls", "force", "jobs", "size", "whole")

    def __init__(self, *, whole: bool = False, jobs: bool = False, force: bool = False) -> None:
        self.calls: list[Call] = []
        self.size = 0
        self.whole = whole
        self.jobs = jobs
        self.force = force

    def add(self, call: Call) -> None:
        """Put one request more into this push."""
        self.calls.append(call)
        self.size += len(call.request)

    @property
    def open(self) -> bool:
        """Whether another request may join."""
        return (
            not (self.whole or self.jobs or self.force)
            and len(self.calls) < MAX_PUSH_REQUESTS
            and self.size < MAX_PUSH_BYTES
        )


class Session:
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
        self.buffer: deque[Group] = deque()
        self.outstanding: dict[bytes, Call] = {}
        self.cancelled: list[bytes] = []
        self.down = ""
        self.hint = ""
        self.closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._links: list[AsyncLink] = []
        self._idle: list[AsyncLink] = []
        self._direct = asyncio.Semaphore(_DIRECT_CONNECTIONS)
        self._push_link: AsyncLink | None = None
        self._reply_link: AsyncLink | None = None
        self._push_wake: asyncio.Future[None] | None = None
        self._reply_wake: asyncio.Future[None] | None = None
        self._busy_since: dict[AsyncLink, float] = {}
        self._tick_handle: asyncio.TimerHandle | None = None
        self._deadlines: list[tuple[float, bytes]] = []
        """A heap of (when its caller gives up, id), also of requests that are over: they are passed over.

        A timer of the loop's for each request would cost more than packing it does.
        """
        self._alarm: asyncio.TimerHandle | None = None
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
    ) -> Call:
        """Make a request of a value; raise EncodeError or PayloadTooLargeError."""
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
        place = place_of(lane, batch_key)
        deadline = self.loop.time() + timeout
        return Call(request_id, request, place, timeout, deadline, self.loop.create_future(), cost)

    def enqueue(self, call: Call) -> None:
        """Put one request into the push that leaves next."""
        if not self.buffer or not self.buffer[-1].open:
            self.buffer.append(Group())
        self.buffer[-1].add(call)
        self._expect(call)
        self._kick()

    def enqueue_group(self, group: Group) -> None:
        """Put a push of its own behind what waits."""
        self.buffer.append(group)
        for call in group.calls:
            self._expect(call)
        self._kick()

    def submit(self, call: Call) -> None:
        """Put one job into the push of jobs that leaves next."""
        if not self.buffer or not self.buffer[-1].jobs or len(self.buffer[-1].calls) >= MAX_PUSH_REQUESTS:
            self.buffer.append(Group(jobs=True))
        self.buffer[-1].add(call)
        self._expect(call)
        self._kick()

    def _expect(self, call: Call) -> None:
        self.outstanding[call.id] = call
        deadlines = self._deadlines
        if len(deadlines) > 256 + 2 * len(self.outstanding):
            deadlines[:] = [entry for entry in deadlines if entry[1] in self.outstanding]
            heapq.heapify(deadlines)
        heapq.heappush(deadlines, (call.give_up, call.id))
        if self._alarm is None or call.give_up < self._alarm.when():
            self._set_alarm()
        if self._tick_handle is None:
            self._tick_handle = self.loop.call_later(min(1.0, call.timeout / 2), self._tick)

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self.loop.call_at(self._deadlines[0][0], self._ring) if self._deadlines else None

    def _ring(self) -> None:
        """Fail the requests whose callers no longer wait."""
        self._alarm = None
        deadlines, now = self._deadlines, self.loop.time()
        # the loop rings up to its clock's resolution early; who is in the way and over is passed over
        while deadlines and (deadlines[0][0] <= now + 1e-4 or deadlines[0][1] not in self.outstanding):
            due, request_id = heapq.heappop(deadlines)
            call = self.outstanding.get(request_id)
            if call is not None and call.give_up <= due:
                self._expire(call)
        self._set_alarm()

    def _settle(self, call: Call) -> None:
        """Forget a request that is over."""
        self.outstanding.pop(call.id, None)

    def _fail(self, call: Call, error: BatchqError) -> None:
        self._settle(call)
        if not call.future.done():
            call.future.set_exception(error)

    def _expire(self, call: Call) -> None:
        self._fail(call, too_late(self.config.queue, call.timeout, call.id, self.hint, self.down))

    def abandon(self, call: Call) -> None:
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
        if not self._tasks or any(task.done() for task in self._tasks):
            for task in self._tasks:
                task.cancel()
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
        if not self.outstanding:
            self._deadlines.clear()
            self._set_alarm()
        elif not self.closed:
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

    async def _carry(self, link: AsyncLink, call: Verb[T]) -> T:
        """Carry a verb; the tick breaks the connection if no answer comes."""
        self._busy_since[link] = self.loop.time() + len(call.payload) / SLOWEST
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
        group: Group | None = None
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
                    position = position or self.chain.next(
                        self.outstanding.values()
                    )  # a push that may have run goes again under its own token
                    await self._push(link, group, position)
                    group = None
                self.down, attempt = "", 0
            except OutOfMemory:
                self.down = ""
                for call in group.calls if group else ():
                    self._fail(call, out_of_memory(self.config.queue, call.id))
                group = None
            except Exception as error:  # noqa: BLE001
                if not isinstance(
                    error, BackendUnavailableError
                ):  # a wrong setting, or a defect: nobody shall wait in vain for it
                    known = error if isinstance(error, BatchqError) else BackendUnavailableError(f"{error!r}")
                    for call in [*self.outstanding.values()]:
                        self._fail(call, known)
                    group, self._check_due = None, False
                    self.buffer.clear()
                    self.cancelled.clear()
                    continue
                if not self.down:
                    log.warning("calls wait: %s", error)
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

    def _next_group(self) -> Group | None:
        group = self.buffer.popleft()
        group.calls = [call for call in group.calls if not call.future.done()]
        return group if group.calls else None

    async def _push(self, link: AsyncLink, group: Group, position: Position) -> None:
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
                fresh=position.fresh,
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
            if left.get(call.place, 0) > 0:
                left[call.place] -= 1
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
            with contextlib.suppress(
                BackendUnavailableError
            ):  # the push is through, whatever becomes of this
                await self._carry(link, commands.touch_queue(self.keys, self._touched))

    def _repush(self, stored: str) -> None:
        """Redis has lost pushes: make one of every outstanding request that left after the last one it knows."""
        self._push_again(self.chain.gap(stored))
        # replies that came meanwhile may have ids below the cursor
        if self._reply_link is not None:
            self._reply_link.abort()

    def _push_again(self, known: int) -> None:
        """Make one push of every outstanding request that left after the push with this number."""
        lost = Group(force=True)
        for call in self.outstanding.values():
            if call.number > known:
                lost.add(call)
        if lost.calls:
            self.buffer.appendleft(lost)
            self._kick()

    async def _check(self, link: AsyncLink) -> None:
        """Ask Redis for its record of this producer, and whether anybody works on the queue."""
        health = await self._carry(link, commands.health(self.keys, self.name))
        if (
            health.stored != self.chain.last
            and self.outstanding
            and not any(group.force for group in self.buffer)
        ):
            self._repush(health.stored)
        hint = ""
        if health.silent > 10:
            queues = await self._carry(link, commands.list_queues())
            others = await self._carry(link, commands.live_workers(queues)) if queues else {}
            hint = no_worker_hint(self.config.queue, others)
        if hint and not self.hint:
            log.warning("calls wait: %s", hint)
        self.hint = hint

    async def _read_forever(self) -> None:
        cursor = b"0-0"
        attempt = 0
        quiet = True
        missed = False
        read_at = self.loop.time()
        while not self.closed:
            if quiet and not self.outstanding:
                self._reply_wake = self.loop.create_future()
                await self._reply_wake
                read_at = self.loop.time()
                cursor = b"0-0"  # the stream may have expired meanwhile, and a new one begin lower
                continue
            try:
                if self._reply_link is None or self._reply_link.broken:
                    self._reply_link = await self._connect()
                    cursor = b"0-0"
                    self._check_due = bool(self.chain.last)
                link = self._reply_link
                # not before the wait itself is over, and a large reply has come through a slow network
                self._busy_since[link] = (
                    self.loop.time() + _READ_BLOCK_MS / 1000 + self.config.max_payload / (10 * SLOWEST)
                )
                try:
                    entries = await link.call(
                        commands.read_replies(
                            self.keys, self.name, cursor, block_ms=_READ_BLOCK_MS, count=_READ_ENTRIES
                        )
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
            # Replies expire 60 s after the last one: after a longer time away some may be gone, though no push was lost.
            missed = missed or self.loop.time() - read_at > _LONG_AWAY
            read_at = self.loop.time()
            for entry, replies in entries:
                cursor = entry
                self._answer(replies)
            if missed and len(entries) < _READ_ENTRIES:  # all that is there has been read
                missed = False
                self._push_again(0)
            if entries:
                entries = []  # not to be kept while the next ones are waited for

    def _answer(self, data: bytes) -> None:
        for reply in wire.decode_replies(data, copy=self.config.copy):
            call = self.outstanding.pop(reply.id, None)
            if call is None:
                continue
            if not call.future.done():
                if reply.code:
                    call.future.set_exception(reply.error())
                else:
                    call.future.set_result(reply.value)

    # --- calls outside the stream ---

    async def _once(self, call: Verb[T]) -> T:
        async with self._direct:  # jobs that are waited for hold a connection each
            while self._idle and self._idle[-1].broken:
                self._idle.pop()
            link = self._idle.pop() if self._idle else await self._connect()
            try:
                return await link.call(call)  # cancelled here, the connection closes itself
            finally:
                if not link.broken:
                    self._idle.append(link)

    async def direct(self, call: Verb[T], timeout: float, *, fatal: bool = False) -> T:
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
        """End everything; does not wait for Redis."""
        self.closed = True
        self._fail_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            await link.close()

    def _fail_all(self) -> None:
        for handle in (self._tick_handle, self._alarm):
            if handle is not None:
                handle.cancel()
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
