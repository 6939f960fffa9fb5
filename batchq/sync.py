"""``Client``: the client for threads. What it promises is in its docstrings; how it works, in docs/protocol.md.

A call takes a slot from a pool: one connection, with a producer's name and its chain of tokens. It pushes, waits for the replies on the
same connection, and puts the slot back. There is no thread but the caller's, so all that a call needs, it does itself, step by step.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile
from types import TracebackType
from typing import Any, Final

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
    BackendAuthError,
    BackendUnavailableError,
    ClientClosedError,
    QueueFullError,
)
from batchq.exchange import LOOK, PAUSE, Exchange, Extras, Request, Result, gather, only_result, open_reply
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
from batchq.slots import SILENCE, Pool, Slot
from batchq.stats import QueueStats, from_answers
from batchq.store import Endpoint, LinkLostError, OutOfMemory, retry_delay

DEFAULT_MAX_CONNECTIONS: Final = 256


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
        if data:
            return "failed" if read_result(self._wire_id, data, pool.config.copy).code else "done"
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

    def _wait(self, pool: Pool, slot: Slot, seconds: float, deadline: float) -> wire.Reply:
        down, attempt = "", 0
        while (now := time.monotonic()) < deadline:
            waiting, reused = False, slot.connected
            try:
                pool.connect(slot, deadline)
                data, exists = slot.ask(
                    commands.job_state(pool.keys, self._wire_id), min(deadline, now + SILENCE)
                )
                down, attempt = "", 0
                if data:
                    return read_result(self._wire_id, data, pool.config.copy)
                if not exists:
                    raise no_job(self.id, self._wire_id)
                waiting = True
                block = min(LOOK, deadline + 0.1 - now)
                slot.ask(
                    commands.wait_reply(pool.keys, self._wire_id, block), min(deadline, now + block + SILENCE)
                )
            except OutOfMemory:
                pool.pause(min(PAUSE, deadline - now))  # at maxmemory Redis refuses to wait this way
            except BackendUnavailableError as error:
                pool.check_open()
                if isinstance(error, BackendAuthError):
                    raise
                if not (waiting and time.monotonic() >= deadline):
                    down, attempt = error.message, attempt + 1
                    if not reused or not isinstance(error, LinkLostError):
                        pool.pause(min(retry_delay(attempt, random.random), deadline - time.monotonic()))
        if down:
            raise BackendUnavailableError(
                f"{down}; gave up after {seconds:g} s", request_id=self._wire_id.hex()
            )
        raise no_result_yet(self.id, seconds, self._wire_id)

    def cancel(self) -> bool:
        """Cancel the job; True if it was pending: then it is not run where it still waits, and ``result`` raises JobCancelledError.

        Raises JobNotFoundError where there is no such job.
        """
        pool = self._client._pool()
        cancelled = pool.carry(commands.cancel_job(pool.keys, self._wire_id), DEFAULT_TIMEOUT)
        if cancelled < 0:
            raise no_job(self.id, self._wire_id)
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
        self._pools: dict[int, Pool] = {}
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
        self._max_connections = check_int(
            "max_connections", max_connections, 1, 10_000, DEFAULT_MAX_CONNECTIONS
        )
        self._endpoint = Endpoint(self._config.url, redis)

    def __repr__(self) -> str:
        return f"Client({self._endpoint.name!r}, queue={self._config.queue!r})"

    def _pool(self) -> Pool:
        """Return this process' state; the parent's is let go of in a child."""
        if self._closed:
            raise ClientClosedError("the client was closed")
        pid = os.getpid()
        pool = self._pools.get(pid)
        if pool is None:
            # no lock: a thread of the parent's may have held it when the process was forked
            pool = self._pools.setdefault(pid, Pool(self._config, self._endpoint, self._max_connections))
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
        ``normal`` or ``low``. ``batch_key``: only requests with equal keys (str or int) share a batch, such as those of one shape or one
        adapter. ``cost``: what this request counts in a batch's ``max_batch_cost``, such as its tokens; 1 where nobody says. ``meta``: a
        dict for the model, which finds it in its BatchContext.

        Raises QueueFullError, DeadlineExceededError, ModelError, WorkerLostError, BackendUnavailableError, EncodeError,
        PayloadTooLargeError, and ConfigError for an argument out of its range.
        """
        pool = self._pool()
        check_extras(batch_key, cost, meta)
        lane, seconds = check_lane(priority), check_timeout(timeout, self._config.timeout)
        with Exchange(pool, seconds) as exchange:
            extras = Extras(batch_key, cost, meta)
            exchange.add(
                [exchange.request(exchange.new_id(), value, lane, extras, seconds, exchange.deadline)]
            )
            return open_reply(only_result(exchange))

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
        check_fits(len(values), self._config.capacity, lane)
        with Exchange(pool, seconds, stream=True) as exchange:
            extras = Extras(batch_key, cost, meta)
            requests = [
                exchange.request(exchange.new_id(), value, lane, extras, seconds, exchange.deadline)
                for value in values
            ]
            exchange.add(requests, whole=True)
            answers: dict[bytes, Any] = {}
            while exchange.outstanding:
                for request, result in exchange.step():
                    if isinstance(result, QueueFullError):
                        with contextlib.suppress(BackendUnavailableError):
                            capacity = exchange.ask(commands.queue_capacity(pool.keys))
                            check_fits(len(values), capacity, lane)
                    answers[request.id] = open_reply(result, return_exceptions)
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
        lane, seconds, extras = (
            check_lane(priority),
            check_timeout(timeout, DAY),
            Extras(batch_key, cost, meta),
        )
        return self._map(pool, iter(values), concurrency, lane, seconds, extras, ordered, return_exceptions)

    def _map(
        self, pool: Pool, source: Iterator[Any], concurrency: int, lane: str, seconds: float, extras: Extras,
        ordered: bool, return_exceptions: bool,
    ) -> Iterator[Any]:  # fmt: skip
        order: deque[bytes] = deque()
        ready: dict[bytes, Result] = {}
        refused: list[Request] = []
        answered, attempt, retry_at, more = 0, 0, 0.0, True
        with Exchange(pool, seconds, stream=True) as exchange:
            while more or refused or exchange.outstanding or ready:
                for request_id in list(takewhile(ready.__contains__, order)) if ordered else list(ready):
                    if ordered:
                        order.popleft()
                    yield open_reply(ready.pop(request_id), return_exceptions)
                now = time.monotonic()
                if refused:
                    # as many as have left the queue, or all of them now and then
                    count = len(refused) if now >= retry_at else answered
                    if count:
                        exchange.add(refused[:count])
                        refused = refused[count:]
                elif more and not exchange.is_pushing:
                    room = concurrency - len(exchange.outstanding) - len(ready)
                    chunk, more = gather(exchange, source, room, lane, extras, seconds, ready)
                    if ordered:
                        order += chunk
                answered = 0
                if not exchange.outstanding:
                    pool.pause(retry_at - now if refused else 0.0)
                    continue
                pushing, full = exchange.is_pushing, []
                for request, result in exchange.step(retry_at - now if refused and not pushing else LOOK):
                    if isinstance(result, QueueFullError) and request.deadline > time.monotonic():
                        full.append(request)
                    else:
                        ready[request.id] = result
                        answered += 1
                if full:
                    attempt = min(attempt + 1, 4)
                    retry_at = time.monotonic() + retry_delay(attempt, random.random)
                    refused = full + refused
                elif pushing:
                    attempt = 0

    def submit(
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
    ) -> Job:
        """Put a request into the queue and return at once; the result is fetched later, from any process.

        ``id``: 1 to 256 characters; submitting the same id again while it is known changes nothing; None means a new random one.
        ``deadline``: seconds from now within which it may be run, None means 86,400. ``result_ttl``: seconds for which the result is kept,
        1 to 2,592,000. The job is as durable as your Redis. Raises what ``predict`` raises before a request is in the queue.
        """
        pool = self._pool()
        job = Job(self, new_name() + new_name()[:12] if id is None else id)
        ttl_ms = check_result_ttl(result_ttl)
        check_extras(batch_key, cost, meta)
        lane, seconds = check_lane(priority), check_timeout(deadline, JOB_DEADLINE, "deadline")
        with Exchange(pool, min(seconds, self._config.timeout)) as exchange:
            extras = Extras(batch_key, cost, meta)
            request = exchange.request(
                job_wire_id(job.id), value, lane, extras, seconds, exchange.deadline, ttl_ms
            )
            exchange.add([request], jobs=True)
            open_reply(only_result(exchange))
        return job

    def job(self, id: str) -> Job:
        """Return the job with this id, submitted by any process."""
        self._pool()
        return Job(self, id)

    def stats(self) -> QueueStats:
        """Return the queue's state now: depth, ages, totals, live workers."""
        pool = self._pool()
        return from_answers(self._config.queue, pool.carry(commands.stats(pool.keys), self._config.timeout))

    def ping(self) -> float:
        """Return how many seconds a round trip to Redis takes; raise BackendUnavailableError where there is none."""
        pool = self._pool()
        pool.carry(commands.call(b"PING"), self._config.timeout, fatal=True)
        started = time.perf_counter()
        pool.carry(commands.call(b"PING"), self._config.timeout, fatal=True)
        return time.perf_counter() - started

    def close(self) -> None:
        """Close the connections; calls that wait raise ClientClosedError, and so do all later ones. Does not wait for Redis."""
        self._closed = True
        pid = os.getpid()
        pool = self._pools.pop(pid, None)
        if pool is not None:
            pool.close()
        self._let_go_of_others(pid)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        pool = getattr(self, "_pools", {}).get(os.getpid())
        if pool is None:
            return
        if pool.is_connected:
            warnings.warn(
                f"{self!r} was not closed: call `client.close()`", ResourceWarning, source=self, stacklevel=2
            )
        pool.close()
