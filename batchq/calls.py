"""What each call of a client in one process does, once for threads and asyncio: coroutines that wait at a box of their caller's."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
import weakref
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from functools import partial
from typing import Any, Final

from batchq import codec
from batchq.boxes import Box, Options, Request
from batchq.config import (
    DAY,
    DEFAULT_CAPACITY,
    DEFAULT_CAPACITY_BYTES,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_DELAY,
    DEFAULT_MAX_PAYLOAD,
    DEFAULT_TIMEOUT,
    KIB,
    LANES,
    MIB,
    BatchPolicy,
    check_extras,
    check_int,
    check_lane,
    check_timeout,
)
from batchq.device import open_device
from batchq.engine import Engine
from batchq.errors import (
    BatchqError,
    ConfigError,
    DeadlineExceededError,
    JobNotFoundError,
    QueueFullError,
    RequestError,
)
from batchq.model import Model, bind_load, call_load
from batchq.requests import JOB_DEADLINE, check_job_id, check_result_ttl

_FULL_PAUSE: Final = 0.01
"""Seconds after which a map looks for room again in a queue that others fill."""
_PULLS_A_TURN: Final = 64
_PLAIN: Final = {lane: Options(lane) for lane in LANES.values()}
_NOTHING: Final = object()
_END: Final = object()


class Calls:
    """The settings of a client, its engine, and its calls. The engine's thread ends when the last client or job of it is dropped."""

    def __init__(
        self,
        load: Callable[..., Any],
        *,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        max_delay: float = DEFAULT_MAX_DELAY,
        max_batch_cost: int | None = None,
        padded: bool = False,
        capacity: int = DEFAULT_CAPACITY,
        timeout: float = DEFAULT_TIMEOUT,
        device: str | None = None,
        model_args: Mapping[str, Any] | None = None,
        max_payload: int = DEFAULT_MAX_PAYLOAD,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        policy = BatchPolicy(
            max_batch_size=max_batch_size,
            max_delay=max_delay,
            capacity=capacity,
            capacity_bytes=capacity_bytes,
            max_batch_cost=max_batch_cost,
            padded=padded,
        )
        check_int("max_payload", max_payload, KIB, 512 * MIB, DEFAULT_MAX_PAYLOAD, " bytes")
        self._timeout = check_timeout(timeout, DEFAULT_TIMEOUT)
        # misspelt arguments are told here, not at the first call
        bind_load(load, device=device, args=model_args)
        label = str(getattr(load, "__qualname__", None) or type(load).__qualname__)
        open_model = partial(_open_model, load, device, dict(model_args or {}))
        self._engine = Engine(open_model, label, policy, max_payload, clock)
        weakref.finalize(self, self._engine.release).atexit = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine.label}, {self._engine.policy})"

    def _options(self, *extras: Any) -> Options:
        options = pack_options(*extras)
        if options.cost is not None:
            self._engine.check_cost(options.cost)
        return options

    async def _predict_many(
        self,
        box: Box,
        values: Iterable[object],
        timeout: float | None,
        return_exceptions: bool,
        *extras: Any,
    ) -> list[Any]:
        engine = self._engine
        engine.check_open()
        seconds = check_timeout(timeout, self._timeout)
        deadline = engine.clock() + seconds
        options = self._options(*extras)
        payloads = [engine.pack(value) for value in values]
        if not payloads:
            return []
        capacity = engine.capacity(options.lane)
        if len(payloads) > capacity:
            of_lane = " (the low lane may fill half of the capacity)" if options.lane == "l" else ""
            raise ConfigError(
                f"predict_many of {len(payloads):,} values: the queue holds {capacity:,}{of_lane}; "
                "use map(), which sends them as room comes"
            )
        requests = engine.admit(payloads, options, deadline, box)
        left = len(requests)
        try:
            while left:
                done = await box.get(deadline - engine.clock())
                if done is not None:
                    left -= 1
                    if not return_exceptions:
                        done.check()
                elif engine.clock() >= deadline:
                    engine.expire(requests, seconds)
        finally:
            engine.abandon(requests)
        return [request.answer(return_exceptions) for request in requests]

    def _map(
        self,
        box: Box,
        values: Iterable[Any] | AsyncIterable[Any],
        concurrency: int,
        ordered: bool,
        timeout: float | None,
        return_exceptions: bool,
        *extras: Any,
    ) -> AsyncGenerator[Any, None]:
        self._engine.check_open()
        check_int("concurrency", concurrency, 1, 100_000, 256, " requests")
        seconds, options = check_timeout(timeout, DAY), self._options(*extras)
        source = values.__aiter__() if isinstance(values, AsyncIterable) else iter(values)
        return self._answers(box, source, concurrency, ordered, seconds, return_exceptions, options)

    async def _answers(
        self,
        box: Box,
        source: Iterator[Any] | AsyncIterator[Any],
        concurrency: int,
        ordered: bool,
        seconds: float,
        return_exceptions: bool,
        options: Options,
    ) -> AsyncGenerator[Any, None]:
        engine = self._engine
        order: deque[Request] = deque()  # as they were pulled; what has an outcome leaves at its head
        waiting: bytes | None = None  # pulled and packed, and there was no room for it
        outstanding = 0  # pulled, and not answered to the caller
        exhausted = False
        pull: asyncio.Future[Any] | None = None
        try:
            while outstanding or not exhausted:
                pulled, done = _NOTHING, None
                wanted = not exhausted and waiting is None and outstanding < concurrency
                if wanted and isinstance(source, Iterator) and box.empty():
                    pulled = next(source, _END)
                    if outstanding % _PULLS_A_TURN == _PULLS_A_TURN - 1:
                        done = await box.get(0)  # a long window must not hold up the loop while it fills
                else:
                    # a slow source must not hold up the answers: what it gives arrives like them
                    if wanted and pull is None and isinstance(source, AsyncIterator):
                        pull = asyncio.ensure_future(_next(source))
                        pull.add_done_callback(box.put)
                    left = order[0].deadline - engine.clock() if order else DAY
                    done = await box.get(left if waiting is None else min(left, _FULL_PAUSE))
                    if pull is not None and done is pull:
                        pulled, done, pull = pull.result(), None, None
                if pulled is _END:
                    exhausted, pulled = True, _NOTHING
                now = engine.clock()
                try:
                    if pulled is not _NOTHING:
                        outstanding += 1
                        waiting = engine.pack(pulled)
                    if waiting is not None:
                        order += engine.admit([waiting], options, now + seconds, box, again=True)
                        waiting = None
                except QueueFullError:
                    pass
                except RequestError as error:
                    waiting = None
                    order.append(Request("", b"", 0, options.lane, now, now, [], outcome=error))
                    box.put(order[-1])
                # all have the same timeout, so no deadline comes before the first one's
                if done is None and order and order[0].deadline <= now:
                    engine.expire([request for request in order if request.deadline <= now], seconds)
                ready = [] if ordered or done is None else [done]
                while order and order[0].outcome is not None:
                    request = order.popleft()
                    if ordered:
                        ready.append(request)
                for request in ready:
                    outstanding -= 1
                    yield request.answer(return_exceptions)
        finally:
            engine.abandon(order)
            if pull is not None and not pull.cancel() and not pull.cancelled():
                pull.exception()  # look at it, else asyncio complains that nobody did

    def _submit(
        self, value: object, id: str | None, deadline: float | None, result_ttl: float, *extras: Any
    ) -> str:
        engine = self._engine
        engine.check_open()
        job_id = uuid.uuid4().hex if id is None else check_job_id(id)
        ttl = check_result_ttl(result_ttl) / 1000
        options = self._options(*extras)
        end = engine.clock() + check_timeout(deadline, JOB_DEADLINE, "deadline")
        engine.submit(engine.pack(value), options, end, job_id, ttl)
        return job_id

    def _job_id(self, id: str) -> str:
        self._engine.check_open()
        return check_job_id(id)

    def _state(self, id: str) -> str:
        job = self._engine.job(id)
        if job is None:
            return "unknown"
        if job.outcome is None:
            return "pending"
        return "failed" if isinstance(job.outcome, BatchqError) else "done"

    async def _result(self, box: Box, id: str, timeout: float | None) -> Any:
        engine = self._engine
        seconds = check_timeout(timeout, DEFAULT_TIMEOUT)
        deadline = engine.clock() + seconds
        job = self._find(id)
        job.boxes.append(box)
        try:
            while job.outcome is None:
                await box.get(deadline - engine.clock())
                if job.outcome is None and engine.clock() >= deadline:
                    raise DeadlineExceededError(
                        f"job {id!r} has no result after {seconds:g} s: {engine.what_it_does()}",
                        request_id=job.id,
                    )
        finally:
            with contextlib.suppress(ValueError):
                job.boxes.remove(box)
        return job.answer()

    def _cancel(self, id: str) -> bool:
        return self._engine.cancel(self._find(id))

    def _find(self, id: str) -> Request:
        job = self._engine.job(id)
        if job is None:
            raise JobNotFoundError(
                f"no job {id!r}: it was not submitted to this client, or its result has expired"
            )
        return job

    async def _ping(self, box: Box) -> float:
        engine = self._engine
        started = engine.clock()
        ping = engine.ping(box)
        try:
            while ping.outcome is None:
                await box.get(self._timeout)
                if not engine.loading and engine.clock() >= started + self._timeout:
                    engine.expire([ping], self._timeout)
        finally:
            engine.abandon([ping])
        ping.check()
        return engine.clock() - started


def pack_options(priority: object, batch_key: Any, cost: Any, meta: object) -> Options:
    """Check what a call gives beside its values, and return it."""
    lane = check_lane(priority)
    if batch_key is None and cost is None and meta is None:
        return _PLAIN[lane]
    check_extras(batch_key, cost, meta)
    if batch_key is not None:
        codec.pack(batch_key)  # what could not be carried over Redis is refused here already
    return Options(lane, batch_key, cost, codec.pack(meta) if meta is not None else b"")


def check_options(priority: object, batch_key: object, cost: object, meta: object) -> str:
    """Check what a call gives beside its value; return the lane."""
    return pack_options(priority, batch_key, cost, meta).lane


def _open_model(load: Callable[..., Any], device: str | None, args: dict[str, Any]) -> Model:
    loaded = call_load(load, device=device, args=args)
    return Model(loaded, device=open_device(device) if device is not None else None)


async def _next(source: AsyncIterator[Any]) -> Any:
    async for value in source:
        return value
    return _END
