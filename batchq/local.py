"""``LocalClient`` and ``AsyncLocalClient``: the whole of batchq in one process, with no Redis. Moving to Redis is one line.

A daemon thread runs the model, on the same policy (when a batch is due, what goes in it) and the same model contract as a worker on Redis,
and values travel as they do over Redis: each is packed and unpacked (about 2 us for a small one), so that tuples arrive as lists, arrays
are copies, and a set is an EncodeError here already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from types import TracebackType
from typing import Any, Final

from batchq.boxes import LoopBox, ThreadBox, iterate, run
from batchq.calls import Calls
from batchq.config import DEFAULT_RESULT_TTL, DEFAULT_TIMEOUT, Priority
from batchq.stats import QueueStats

CLOSE_SECONDS: Final = 5.0
"""How long ``close`` waits for a batch that runs."""


class LocalClient(Calls):
    """A client that runs the model in its own process, for threads.

    >>> def load():
    ...     return lambda inputs: [2 * x for x in inputs]
    >>> with LocalClient(load, max_batch_size=32, max_delay=0.005) as queue:
    ...     queue.predict(21)
    42

    Thread-safe.

    ``load``: the function that returns the model, such as ``predict(inputs: list) -> answers``; ``batchq.protocols`` lists what else it may
    be. It is called once a process, on first use, in the thread that runs the model; so a client may be built at import time and before a
    fork. A request's timeout runs while the model is loaded and warmed up: call ``ping()`` first, which waits for it. What ``load`` raises,
    each call raises. The model's ``cost`` and ``batch_key`` are asked in that thread, too, for requests whose callers gave none.

    ``max_batch_size``: requests a batch, 1 to 4,096. ``max_delay``: seconds that the oldest request waits for others, 0 to 60.
    ``max_batch_cost``: the sum of the costs in a batch, 1 to 1,000,000,000, None for no such limit; with ``padded``, of the largest cost x
    the number of requests instead, as for a batch that is padded to its longest item.
    ``capacity``: requests that may wait, 1 to 1,000,000 (QueueFullError beyond). ``timeout``: seconds for a call that gives none, more than
    0 and at most 86,400. ``device``: passed to ``load`` if it takes one. ``model_args``: more arguments for ``load``. ``max_payload``:
    bytes of a packed value or answer, 1 KiB to 512 MiB; ``capacity_bytes``: of all that may wait. ``clock``: seconds, for tests. Raises
    ConfigError for what is out of range.
    """

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
        """Return the model's answer to one value.

        ``timeout``: seconds from the call to the answer; None means the client's. ``batch_key``: only requests of equal keys share a
        batch; None means what the model's own ``batch_key`` says, else the group of those that have none. ``cost``: what this request
        counts towards ``max_batch_cost``, 0 or more; None means what the model's ``cost`` says, else 1. ``meta``: for the model's
        ``BatchContext``.
        Raises QueueFullError, DeadlineExceededError, ModelError, EncodeError, PayloadTooLargeError, RequestError (a cost over
        ``max_batch_cost``), ClientClosedError, ConfigError.
        """
        extras = (priority, batch_key, cost, meta)
        return run(self._predict_many(ThreadBox(), [value], timeout, False, *extras))[0]

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
        """Return the answers to values, in their order: admitted all or none, one deadline for all.

        The first error is raised and withdraws the rest; with ``return_exceptions`` it stands in its value's place. More values than the
        capacity are a ConfigError: use ``map``. ``cost``: of each value.
        """
        extras = (priority, batch_key, cost, meta)
        return run(self._predict_many(ThreadBox(), values, timeout, return_exceptions, *extras))

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
        """Return an iterator over the answers to any number of values, which are pulled as they are needed.

        At most ``concurrency`` (1 to 100,000) are outstanding; where the queue is full it waits. ``ordered=False`` gives answers as they
        come. ``timeout``: seconds for each item, None means a day.
        """
        options = (concurrency, ordered, timeout, return_exceptions, priority, batch_key, cost, meta)
        return iterate(self._map(ThreadBox(), iter(values), *options))

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
    ) -> LocalJob:
        """Add a request whose result is fetched later, and return its job.

        ``id``: 1 to 256 characters, None for a random one; a second submit of the same id is the same job. ``deadline``: seconds from now
        within which it must run, None means a day. ``result_ttl``: seconds for which the result is kept, 1 to 2,592,000. Jobs live in this
        client's memory.
        """
        extras = (priority, batch_key, cost, meta)
        return LocalJob(self, self._submit(value, id, deadline, result_ttl, *extras))

    def job(self, id: str) -> LocalJob:
        """Return the job of this id, whether or not there is one."""
        return LocalJob(self, self._job_id(id))

    def stats(self) -> QueueStats:
        """Return the queue's depth, rates and totals; ``drain_rate`` is that of the busy model."""
        return self._engine.stats()

    def ping(self) -> float:
        """Load the model if that has not happened, and return the seconds until its thread answered.

        Raises what ``load`` raises, and DeadlineExceededError where a batch runs for longer than the client's timeout.
        """
        return run(self._ping(ThreadBox()))

    def close(self) -> None:
        """Fail what waits with ClientClosedError, and wait at most 5 s for the batch that runs."""
        self._engine.stop()
        self._engine.join(CLOSE_SECONDS)

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class AsyncLocalClient(Calls):
    """A client that runs the model in its own process, for asyncio.

    >>> async def main():
    ...     async with AsyncLocalClient(load, max_batch_size=32, max_delay=0.005) as queue:
    ...         return await asyncio.gather(*(queue.predict(x) for x in range(100)))

    May be used from several event loops. Cancelling a call withdraws its request and disturbs nobody else. The settings are those of
    LocalClient.
    """

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
        """Return the model's answer to one value; see ``LocalClient.predict``."""
        extras = (priority, batch_key, cost, meta)
        return (await self._predict_many(LoopBox(), [value], timeout, False, *extras))[0]

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
        """Return the answers to values, in their order; see ``LocalClient.predict_many``."""
        extras = (priority, batch_key, cost, meta)
        return await self._predict_many(LoopBox(), values, timeout, return_exceptions, *extras)

    def map(
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
        """Return an async iterator over the answers to an (async) iterable; see ``LocalClient.map``."""
        options = (concurrency, ordered, timeout, return_exceptions, priority, batch_key, cost, meta)
        return self._map(LoopBox(), values, *options)

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
    ) -> AsyncLocalJob:
        """Add a request whose result is fetched later, and return its job; see ``LocalClient.submit``."""
        extras = (priority, batch_key, cost, meta)
        return AsyncLocalJob(self, self._submit(value, id, deadline, result_ttl, *extras))

    def job(self, id: str) -> AsyncLocalJob:
        """Return the job of this id, whether or not there is one."""
        return AsyncLocalJob(self, self._job_id(id))

    async def stats(self) -> QueueStats:
        """Return the queue's depth, rates and totals."""
        return self._engine.stats()

    async def ping(self) -> float:
        """Load the model if that has not happened; see ``LocalClient.ping``."""
        return await self._ping(LoopBox())

    async def aclose(self) -> None:
        """Fail what waits with ClientClosedError, and wait at most 5 s for the batch that runs."""
        self._engine.stop()
        await asyncio.to_thread(self._engine.join, CLOSE_SECONDS)

    async def __aenter__(self) -> AsyncLocalClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()


class _Job:
    def __init__(self, calls: Calls, id: str) -> None:
        self._calls = calls
        self.id = id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


class LocalJob(_Job):
    """A submitted request of a LocalClient. ``id``: the id that was given, or a random one."""

    def state(self) -> str:
        """Return 'pending', 'done', 'failed', or 'unknown' (never submitted here, or expired)."""
        return self._calls._state(self.id)

    def result(self, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Wait for the answer and return it, any number of times until it expires.

        ``timeout``: seconds, more than 0 and at most 86,400; None means 10. Raises the job's error, DeadlineExceededError if it is not
        ready in time, JobNotFoundError, JobCancelledError.
        """
        return run(self._calls._result(ThreadBox(), self.id, timeout))

    def cancel(self) -> bool:
        """Cancel the job; False if it had a result already. Raises JobNotFoundError."""
        return self._calls._cancel(self.id)


class AsyncLocalJob(_Job):
    """A submitted request of an AsyncLocalClient; see ``LocalJob``."""

    async def state(self) -> str:
        """Return 'pending', 'done', 'failed', or 'unknown'."""
        return self._calls._state(self.id)

    async def result(self, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Wait for the answer and return it; see ``LocalJob.result``."""
        return await self._calls._result(LoopBox(), self.id, timeout)

    async def cancel(self) -> bool:
        """Cancel the job; False if it had a result already."""
        return self._calls._cancel(self.id)
