"""``AsyncClient``: the client for asyncio. What it promises is in its docstrings; ``session`` does the work."""

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
from typing import Any

from batchq import commands, wire
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
    BackendUnavailableError,
    BatchqError,
    ClientClosedError,
    ConfigError,
    QueueFullError,
)
from batchq.keys import place_of
from batchq.requests import (
    JOB_DEADLINE,
    check_fits,
    check_result_ttl,
    job_wire_id,
    new_name,
    no_job,
    no_result_yet,
    outcome,
    read_result,
)
from batchq.session import Call, Group, Session
from batchq.stats import QueueStats, from_answers
from batchq.store import Endpoint, OutOfMemory, retry_delay


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
        return (read_result(self._wire_id, data, session.config.copy) if data else None), exists

    async def state(self) -> str:
        """Return ``pending``, ``done``, ``failed``, or ``unknown``: never submitted, or its result has expired."""
        reply, exists = await self._read(DEFAULT_TIMEOUT)
        if reply is None:
            return "pending" if exists else "unknown"
        return "failed" if reply.code else "done"

    async def result(self, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
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
                raise no_job(self.id, self._wire_id)
            left = deadline - session.loop.time()
            if left <= 0:
                raise no_result_yet(self.id, seconds, self._wire_id)
            try:
                # a second at the most: then it looks whether the job is still known
                wait = commands.wait_reply(session.keys, self._wire_id, min(left, 1.0))
                await session.direct(wait, left, fatal=True)
            except OutOfMemory:
                await asyncio.sleep(min(left, 0.05))  # at maxmemory Redis refuses to wait this way
            except BackendUnavailableError:
                await asyncio.sleep(min(max(0.0, deadline - session.loop.time()), 0.02))

    async def cancel(self) -> bool:
        """Cancel the job; True if it was pending: then it is not run where it still waits, and ``result`` raises JobCancelledError."""
        session = self._client._session()
        cancelled = await session.direct(commands.cancel_job(session.keys, self._wire_id), DEFAULT_TIMEOUT)
        if cancelled < 0:
            raise no_job(self.id, self._wire_id)
        return cancelled == 1


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
        self._current: Session | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"AsyncClient({self._endpoint.name!r}, queue={self._config.queue!r})"

    def _session(self) -> Session:
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
        self._current = Session(self._config, self._endpoint, loop)
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
        ``normal`` or ``low``. ``batch_key``: only requests with equal keys (str or int) share a batch, such as those of one shape or one
        adapter. ``cost``: what this request counts in a batch's ``max_batch_cost``, such as its tokens; 1 where nobody says. ``meta``: a
        dict for the model, which finds it in its BatchContext.

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
        session: Session,
        value: Any,
        timeout: float | None,
        priority: Priority,
        batch_key: str | int | None,
        cost: float | None,
        meta: dict[str, Any] | None,
    ) -> Call:
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
        group = Group(whole=True)
        for value in values:
            group.add(self._make_call(session, value, timeout, priority, batch_key, cost, meta))
        if not group.calls:
            return []
        calls = list(group.calls)
        check_fits(len(calls), self._config.capacity, calls[0].place)
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
            check_fits(len(calls), capacity, calls[0].place)
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
        place = place_of(check_lane(priority), batch_key)
        call = Call(wire_id, request, place, self._config.timeout, now + seconds, loop.create_future(), cost)
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
