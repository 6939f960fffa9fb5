"""Stand-ins for the clients in a user's own unit tests: no Redis, no thread, no batches.

>>> queue = StubClient(lambda value: 2 * value)
>>> queue.predict(21, priority="high")
42
>>> queue.calls[0].value, queue.calls[0].kwargs["priority"]
(21, 'high')
>>> StubClient(lambda value: value, raises=QueueFullError("full")).predict(1)
Traceback (most recent call last):
    ...
batchq.errors.QueueFullError: full

Arguments are checked and values cross msgpack as they do for the real clients, so a wrong timeout or a value
that cannot be sent fails the test and not production. To test against real batches use LocalClient.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple, cast

from batchq import codec
from batchq.calls import check_options
from batchq.config import (
    DAY,
    DEFAULT_CAPACITY,
    DEFAULT_RESULT_TTL,
    DEFAULT_TIMEOUT,
    MAX_RESULT_TTL,
    Priority,
    check_int,
    check_number,
    check_timeout,
)
from batchq.errors import (
    BatchqError,
    ClientClosedError,
    ConfigError,
    JobNotFoundError,
    ModelError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from batchq.requests import check_job_id
from batchq.stats import QueueStats

QUEUE: Final = "stub"

Raises = BaseException | type[BaseException] | Callable[[Any], BaseException | None]


class Call(NamedTuple):
    """One value that a stub was called with: the method's name, the value, and all options by name."""

    method: str
    value: Any
    kwargs: dict[str, Any]


class _Stub:
    """What both stubs do; ``calls`` lists each value that came, in order."""

    def __init__(self, fn: Callable[[Any], Any], *, raises: Raises | None = None) -> None:
        if not callable(fn):
            raise ConfigError(f"fn={fn!r:.80}: a function of one value is wanted")
        if raises is not None and not isinstance(raises, BaseException) and not callable(raises):
            raise ConfigError(
                f"raises={raises!r:.80}: allowed is an exception, its class, or a function of the value"
            )
        self.calls: list[Call] = []
        self._fn = fn
        self._raises = raises
        self._results: dict[str, Any] = {}
        self._failed = 0
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("this client is closed; make a new one")

    def _error(self, value: Any) -> BaseException | None:
        raises = self._raises
        if isinstance(raises, type):
            kind = cast("type[BaseException]", raises)
            return kind(f"{kind.__name__} from a stub") if issubclass(kind, BatchqError) else kind()
        if isinstance(raises, BaseException) or raises is None:
            return raises
        return raises(value)

    def _one(self, method: str, value: Any, kwargs: dict[str, Any]) -> Any:
        self._check_open()
        check_options(kwargs["priority"], kwargs["batch_key"], kwargs["cost"], kwargs["meta"])
        arrived = codec.unpack(codec.pack(value))
        self.calls.append(Call(method, value, kwargs))
        error = self._error(value)
        # the real map waits for room and never raises it
        if error is not None and not (method == "map" and isinstance(error, QueueFullError)):
            self._failed += 1
            raise error.with_traceback(None)
        try:
            return codec.unpack(codec.pack(self._fn(arrived)))
        except BatchqError:
            self._failed += 1
            raise
        except Exception as error:
            self._failed += 1
            kind = type(error).__name__
            raise ModelError(f"{kind}: {error}", error_type=kind) from error

    def _predict(self, value: Any, kwargs: dict[str, Any]) -> Any:
        self._check_open()
        check_timeout(kwargs["timeout"], DEFAULT_TIMEOUT)
        return self._one("predict", value, kwargs)

    def _predict_many(
        self, values: Iterable[Any], return_exceptions: bool, kwargs: dict[str, Any]
    ) -> list[Any]:
        self._check_open()
        check_timeout(kwargs["timeout"], DEFAULT_TIMEOUT)
        found = list(values)
        if len(found) > DEFAULT_CAPACITY:
            raise ConfigError(f"{len(found):,} values: allowed are at most {DEFAULT_CAPACITY:,}; use map()")
        return [self._kept("predict_many", value, return_exceptions, kwargs) for value in found]

    def _kept(self, method: str, value: Any, return_exceptions: bool, kwargs: dict[str, Any]) -> Any:
        try:
            return self._one(method, value, kwargs)
        except BatchqError as error:
            if not return_exceptions:
                raise
            return error

    def _check_map(self, concurrency: int, kwargs: dict[str, Any]) -> None:
        self._check_open()
        check_int("concurrency", concurrency, 1, 100_000, 256, " requests")
        check_timeout(kwargs["timeout"], DAY)
        check_options(kwargs["priority"], kwargs["batch_key"], kwargs["cost"], kwargs["meta"])

    def _submit(self, value: Any, kwargs: dict[str, Any]) -> str:
        self._check_open()
        check_timeout(kwargs["deadline"], DAY, "deadline")
        check_number("result_ttl", kwargs["result_ttl"], 1, MAX_RESULT_TTL, DEFAULT_RESULT_TTL, " s")
        found = uuid.uuid4().hex if kwargs["id"] is None else check_job_id(kwargs["id"])
        if found not in self._results:
            try:
                self._results[found] = self._one("submit", value, kwargs)
            except (
                UnavailableError,
                RequestError,
                ConfigError,
            ):  # these come from submit itself, not from the job
                raise
            except BatchqError as error:
                self._results[found] = error
        return found

    def _job(self, id: str) -> str:
        self._check_open()
        return check_job_id(id)

    def _state(self, id: str) -> str:
        self._check_open()
        if id not in self._results:
            return "unknown"
        return "failed" if isinstance(self._results[id], BatchqError) else "done"

    def _result(self, id: str, timeout: float | None) -> Any:
        self._check_open()
        check_timeout(timeout, DEFAULT_TIMEOUT)
        result = self._find(id)
        if isinstance(result, BatchqError):
            raise result.with_traceback(None)
        return result

    def _find(self, id: str) -> Any:
        self._check_open()
        if id not in self._results:
            raise JobNotFoundError(f"no job {id!r} was submitted to this stub")
        return self._results[id]

    def _stats(self) -> QueueStats:
        self._check_open()
        return QueueStats(
            queue=QUEUE,
            depth={"high": 0, "normal": 0, "low": 0},
            oldest_age=0.0,
            solo=0,
            in_flight=0,
            capacity=DEFAULT_CAPACITY,
            accepted=len(self.calls),
            rejected=0,
            completed=len(self.calls) - self._failed,
            expired=0,
            failed=self._failed,
            batches=len(self.calls),
            dead=0,
            drain_rate=0.0,
            mean_batch_size=1.0 if self.calls else 0.0,
        )


class StubClient(_Stub):
    """A client whose answers come from ``fn``, a function of one value; for unit tests.

    ``raises``: an exception, an exception class, or a function of the value that returns an exception or
    None; it is raised instead of calling ``fn``. What ``fn`` raises becomes a ModelError, as it does for a
    model. ``calls`` lists each value and its options. Jobs have their result at once. Where ``raises`` gives
    a QueueFullError, ``map`` goes on: the real one waits for room.
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
        """Return ``fn(value)``."""
        options = {
            "timeout": timeout,
            "priority": priority,
            "batch_key": batch_key,
            "cost": cost,
            "meta": meta,
        }
        return self._predict(value, options)

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
        """Return ``fn(value)`` of each."""
        options = {
            "timeout": timeout,
            "priority": priority,
            "batch_key": batch_key,
            "cost": cost,
            "meta": meta,
        }
        return self._predict_many(values, return_exceptions, options)

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
        """Return an iterator over ``fn(value)`` of each, one at a time."""
        options = {
            "timeout": timeout,
            "priority": priority,
            "batch_key": batch_key,
            "cost": cost,
            "meta": meta,
        }
        self._check_map(concurrency, options)
        return (self._kept("map", value, return_exceptions, options) for value in values)

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
    ) -> StubJob:
        """Run ``fn(value)`` and return a job that has its result."""
        options = {"id": id, "deadline": deadline, "result_ttl": result_ttl, "priority": priority}
        return StubJob(
            self, self._submit(value, {**options, "batch_key": batch_key, "cost": cost, "meta": meta})
        )

    def job(self, id: str) -> StubJob:
        """Return the job of this id, whether or not there is one."""
        return StubJob(self, self._job(id))

    def stats(self) -> QueueStats:
        """Return an empty queue's figures, with the totals of the calls."""
        return self._stats()

    def ping(self) -> float:
        """Return 0."""
        self._check_open()
        return 0.0

    def close(self) -> None:
        """Make each later call raise ClientClosedError."""
        self._closed = True

    def __enter__(self) -> StubClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class AsyncStubClient(_Stub):
    """The same for asyncio; see StubClient."""

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
        """Return ``fn(value)``."""
        options = {
            "timeout": timeout,
            "priority": priority,
            "batch_key": batch_key,
            "cost": cost,
            "meta": meta,
        }
        return self._predict(value, options)

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
        """Return ``fn(value)`` of each."""
        options = {
            "timeout": timeout,
            "priority": priority,
            "batch_key": batch_key,
            "cost": cost,
            "meta": meta,
        }
        return self._predict_many(values, return_exceptions, options)

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
        """Return an async iterator over ``fn(value)`` of each, one at a time."""
        options = {
            "timeout": timeout,
            "priority": priority,
            "batch_key": batch_key,
            "cost": cost,
            "meta": meta,
        }
        self._check_map(concurrency, options)
        return self._map(values, return_exceptions, options)

    async def _map(
        self, values: Iterable[Any] | AsyncIterable[Any], return_exceptions: bool, options: dict[str, Any]
    ) -> AsyncIterator[Any]:
        if isinstance(values, AsyncIterable):
            async for value in values:
                yield self._kept("map", value, return_exceptions, options)
        else:
            for value in values:
                yield self._kept("map", value, return_exceptions, options)

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
    ) -> AsyncStubJob:
        """Run ``fn(value)`` and return a job that has its result."""
        options = {"id": id, "deadline": deadline, "result_ttl": result_ttl, "priority": priority}
        found = self._submit(value, {**options, "batch_key": batch_key, "cost": cost, "meta": meta})
        return AsyncStubJob(self, found)

    def job(self, id: str) -> AsyncStubJob:
        """Return the job of this id, whether or not there is one."""
        return AsyncStubJob(self, self._job(id))

    async def stats(self) -> QueueStats:
        """Return an empty queue's figures, with the totals of the calls."""
        return self._stats()

    async def ping(self) -> float:
        """Return 0."""
        self._check_open()
        return 0.0

    async def aclose(self) -> None:
        """Make each later call raise ClientClosedError."""
        self._closed = True

    async def __aenter__(self) -> AsyncStubClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()


class StubJob:
    """A job of a StubClient; it has its result at once."""

    def __init__(self, stub: _Stub, id: str) -> None:
        self._stub = stub
        self.id = id

    def state(self) -> str:
        """Return 'done', 'failed' or 'unknown'."""
        return self._stub._state(self.id)

    def result(self, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Return the answer, or raise the job's error, or JobNotFoundError."""
        return self._stub._result(self.id, timeout)

    def cancel(self) -> bool:
        """Return False: the job has its result already. Raises JobNotFoundError."""
        self._stub._find(self.id)
        return False


class AsyncStubJob:
    """A job of an AsyncStubClient; it has its result at once."""

    def __init__(self, stub: _Stub, id: str) -> None:
        self._stub = stub
        self.id = id

    async def state(self) -> str:
        """Return 'done', 'failed' or 'unknown'."""
        return self._stub._state(self.id)

    async def result(self, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Return the answer, or raise the job's error, or JobNotFoundError."""
        return self._stub._result(self.id, timeout)

    async def cancel(self) -> bool:
        """Return False: the job has its result already. Raises JobNotFoundError."""
        self._stub._find(self.id)
        return False
