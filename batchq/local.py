"""The whole of batchq in one process, with no Redis: LocalClient, AsyncLocalClient and ``@batched``.

One daemon thread runs the model, on the same policy (when a batch is due, what goes in it) and the same model
contract as a worker on Redis, and values travel as they do over Redis: each is packed and unpacked (about 2
us for a small one), so that tuples arrive as lists, arrays are copies, and a set is an EncodeError here
already. Moving to Redis is one line.

How it is made: ``_Engine`` holds the requests and runs the model. ``_Calls`` says what a call does, once for
threads and asyncio: each call is a generator that yields for how many seconds it wants to wait and is sent
what arrived in its box. The two clients only drive these generators, one by blocking a thread, the other by
awaiting.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import inspect
import itertools
import logging
import math
import os
import queue
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from batchq import codec
from batchq.config import (
    DAY,
    DEFAULT_CAPACITY,
    DEFAULT_CAPACITY_BYTES,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_DELAY,
    DEFAULT_MAX_PAYLOAD,
    DEFAULT_RESULT_TTL,
    DEFAULT_TIMEOUT,
    KIB,
    LANES,
    MAX_RESULT_TTL,
    MIB,
    BatchPolicy,
    Priority,
    check_extras,
    check_int,
    check_lane,
    check_number,
    check_timeout,
)
from batchq.errors import (
    BatchqError,
    ClientClosedError,
    ConfigError,
    DeadlineExceededError,
    EncodeError,
    JobCancelledError,
    JobNotFoundError,
    ModelError,
    PayloadTooLargeError,
    QueueFullError,
    from_wire,
)
from batchq.model import Model, bind_load, call_load
from batchq.policy import Cap, Pending, RunTime
from batchq.stats import QueueStats, WorkerStats

QUEUE: Final = "local"
"""The queue's name in the stats of a client without Redis."""
DEFAULT_RESULT_TIMEOUT: Final = 10.0
CLOSE_SECONDS: Final = 5.0
"""How long ``close`` waits for a batch that runs."""

_MEAN_WEIGHT: Final = 0.2
_IDS_IN_LOG: Final = 8
_PULLS_A_TURN: Final = 64
_AWAKE, _IDLE, _FILLING = range(3)

T = TypeVar("T")
V = TypeVar("V")
A = TypeVar("A")

log = logging.getLogger("batchq.local")


class _ThreadBox:
    """Where what a blocking call waits for arrives."""

    __slots__ = ("_arrived", "put")

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = self._arrived.put

    def get(self, seconds: float) -> Any:
        """Return the next arrival, None after ``seconds``."""
        try:
            return self._arrived.get(timeout=min(max(0.0, seconds), DAY))
        except queue.Empty:
            return None

    def empty(self) -> bool:
        return self._arrived.empty()


class _LoopBox:
    """The same for a coroutine; ``put`` is called in its loop."""

    __slots__ = ("_arrived", "_waiter", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self._arrived.append(item)
        self.wake()

    def wake(self, _: object = None) -> None:
        """End the wait, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self, seconds: float) -> Any:
        """Return the next arrival, None after ``seconds`` or a ``wake``."""
        if not self._arrived:
            self._waiter = self.loop.create_future()
            timer = self.loop.call_later(min(max(0.0, seconds), DAY), self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        return self._arrived.popleft() if self._arrived else None

    def empty(self) -> bool:
        return not self._arrived


_Box = _ThreadBox | _LoopBox
_Post = tuple[_Box, Any]


def _post(posts: list[_Post]) -> None:
    """Put each item into its box: one call a loop, however many items."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Post]] = {}
    for box, item in posts:
        if isinstance(box, _LoopBox):
            by_loop.setdefault(box.loop, []).append((box, item))
        else:
            box.put(item)
    for loop, found in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, found)
        except RuntimeError:  # the loop is closed, and with it everybody who waited there
            continue


def _put_all(posts: list[_Post]) -> None:
    for box, item in posts:
        box.put(item)


class _Request:
    """One request; ``outcome`` is the packed answer or an error, and the first one stays."""

    __slots__ = (
        "box",
        "deadline",
        "enqueued",
        "job",
        "lane",
        "number",
        "outcome",
        "payload",
        "pending",
        "size",
    )

    def __init__(
        self, number: int, payload: bytes, lane: str, enqueued: float, deadline: float, box: _Box | None
    ) -> None:
        self.number = number
        self.payload = payload
        self.size = len(payload)
        self.lane = lane
        self.enqueued = enqueued
        self.deadline = deadline
        self.box = box
        self.job: _JobRecord | None = None
        self.pending = False
        self.outcome: bytes | BatchqError | None = None


class _JobRecord:
    """A submitted request and who waits for it."""

    __slots__ = ("id", "request", "ttl", "watchers")

    def __init__(self, id: str, request: _Request, ttl: float) -> None:
        self.id = id
        self.request = request
        self.ttl = ttl
        self.watchers: set[_Box] = set()


_WITHDRAWN: Final = b""
_ROOM: Final = object()
_PONG: Final = object()


class _Engine:
    """The pending requests, the model's thread, the jobs: all that the two clients share.

    Every attribute is guarded by ``_lock``, which is never held while the model runs. In a forked child
    everything starts afresh: the parent's requests, jobs and model stay with the parent.
    """

    def __init__(
        self,
        open_model: Callable[[], Callable[[list[Any]], Any]],
        policy: BatchPolicy,
        max_payload: int,
        clock: Callable[[], float],
    ) -> None:
        self._open_model = open_model
        self.policy = policy
        self.max_payload = max_payload
        self.clock = clock
        self.closed = False
        self._released = False
        self.reset()
        _engines.add(self)

    def reset(self) -> None:
        """Start afresh, as in a forked child."""
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._sleep = _AWAKE
        self._thread: threading.Thread | None = None
        self._loaded = False
        self._broken: BatchqError | None = None
        self._pending: Pending[_Request] = Pending(self.policy)
        self._running: list[_Request] = []
        self._since = 0.0
        self._run_time = RunTime()
        self._cap = Cap()
        self._pings: list[_Box] = []
        self._room: list[_Box] = []
        self._jobs: dict[str, _JobRecord] = {}
        self._expiries: list[tuple[float, int, _JobRecord]] = []
        self._numbers = itertools.count(1)
        self._prefix = os.urandom(8).hex()
        self._batch_size = self._wait_seconds = 0.0
        self._accepted = self._rejected = self._completed = self._expired = self._failed = self._batches = 0

    # -- what calls do ---------------------------------------------------------------------------------------

    def request_id(self, request: _Request) -> str:
        """Return the id, 32 hex digits, that errors and the log show."""
        return f"{self._prefix}{request.number:016x}"

    def check_open(self) -> None:
        """Raise ClientClosedError after ``stop``, and what ``load`` raised."""
        if self.closed:
            raise ClientClosedError("this client is closed; make a new one")
        if self._broken is not None:
            raise _copy(self._broken)

    def pack(self, value: object) -> bytes:
        """Return the packed value; raise EncodeError or PayloadTooLargeError."""
        payload = codec.pack(value)
        if len(payload) > self.max_payload:
            raise PayloadTooLargeError(
                f"the value takes {len(payload):,} bytes; max_payload is {self.max_payload:,}. "
                "Send less, or raise max_payload"
            )
        return payload

    def admit(self, payloads: list[bytes], lane: str, deadline: float, box: _Box) -> list[_Request]:
        """Add requests, all or none; raise QueueFullError for none."""
        with self._lock:
            found = self._admit(payloads, lane, deadline, box)
            if found is None:
                self._rejected += len(payloads)
                raise self._full(lane)
            return found

    def try_admit(self, payload: bytes, lane: str, deadline: float, box: _Box) -> _Request | None:
        """Add one request; None where the queue is full."""
        with self._lock:
            found = self._admit([payload], lane, deadline, box)
            return found[0] if found else None

    def await_room(self, payload: bytes, lane: str, box: _Box) -> bool:
        """Put ``_ROOM`` into the box when there may be room again; False if there is room now."""
        with self._lock:
            self.check_open()
            if self._pending.fits(lane, 1, len(payload)):
                return False
            if box not in self._room:
                self._room.append(box)
            return True

    def withdraw(self, requests: Iterable[_Request]) -> None:
        """Forget requests whose caller has gone: what waits is not run, and what runs answers nobody."""
        with self._lock:
            for request in requests:
                if request.outcome is None:
                    self._pending.discard(request)
                    request.outcome = _WITHDRAWN
                request.payload = b""
                request.box = None
            posts = self._take_room()
        _post(posts)

    def leave(self, box: _Box) -> None:
        """Forget a box that waited for room or a ping."""
        with self._lock:
            self._room = [other for other in self._room if other is not box]
            self._pings = [other for other in self._pings if other is not box]

    def ping(self, box: _Box) -> None:
        """Put ``_PONG`` into the box from the model's thread, once the model is loaded and no batch runs."""
        with self._lock:
            self.check_open()
            self._pings.append(box)
            self._start()
            self._wake.notify()

    def loading(self) -> bool:
        """Tell whether the model is still being loaded."""
        return not self._loaded and self._broken is None

    def why_late(self) -> str:
        """Say what the model's thread does, for the message of a DeadlineExceededError."""
        with self._lock:
            since = max(0.0, self.clock() - self._since)
            if self.loading():
                return f"the model is being loaded, for {since:.1f} s now (call ping() first to wait for it)"
            if self._running:
                return f"a batch of {len(self._running)} has run for {since:.3g} s, {len(self._pending)} wait"
            return f"{len(self._pending)} wait"

    def submit(self, payload: bytes, lane: str, deadline: float, id: str, ttl: float) -> None:
        """Add a job, unless there is one of this id."""
        with self._lock:
            self._prune()
            self.check_open()
            if id in self._jobs:
                return
            found = self._admit([payload], lane, deadline, None)
            if found is None:
                self._rejected += 1
                raise self._full(lane)
            job = _JobRecord(id, found[0], ttl)
            found[0].job = job
            self._jobs[id] = job

    def job(self, id: str) -> _JobRecord | None:
        """Return the job of this id, if there is one."""
        with self._lock:
            self.check_open()
            self._prune()
            return self._jobs.get(id)

    def watch(self, job: _JobRecord, box: _Box) -> None:
        """Put the job's request into the box once it has an outcome."""
        with self._lock:
            if job.request.outcome is None:
                job.watchers.add(box)

    def unwatch(self, job: _JobRecord, box: _Box) -> None:
        """Undo ``watch``."""
        with self._lock:
            job.watchers.discard(box)

    def cancel(self, job: _JobRecord) -> bool:
        """Give a job without an outcome the outcome that it was cancelled."""
        with self._lock:
            if job.request.outcome is not None:
                return False
            posts: list[_Post] = []
            self._pending.discard(job.request)
            error = JobCancelledError(
                f"job {job.id!r} was cancelled", request_id=self.request_id(job.request)
            )
            self._settle(job.request, error, posts)
            posts += self._take_room()
        _post(posts)
        return True

    def stats(self) -> QueueStats:
        """Return the figures of this moment."""
        with self._lock:
            self.check_open()
            self._prune()
            now = self.clock()
            oldest = self._pending.oldest()
            if self._running:
                state = "running"
            elif self._loaded:
                state = "idle"
            else:
                state = "loading" if self._thread is not None else "not started"
            rate = self._rate()
            return QueueStats(
                queue=QUEUE,
                depth={name: self._pending.depth(lane) for name, lane in LANES.items()},
                oldest_age=max(0.0, now - oldest) if oldest is not None else 0.0,
                solo=0,
                in_flight=len(self._running),
                capacity=self.policy.capacity,
                accepted=self._accepted,
                rejected=self._rejected,
                completed=self._completed,
                expired=self._expired,
                failed=self._failed,
                batches=self._batches,
                dead=0,
                drain_rate=rate,
                mean_batch_size=self._batch_size,
                workers=(
                    WorkerStats(
                        id=self._prefix,
                        model=getattr(self._open_model, "label", "local"),
                        host=socket.gethostname(),
                        age=0.0,
                        state=state,
                        batch_size=self._batch_size,
                        run_seconds=self._run_time.seconds,
                        wait_seconds=self._wait_seconds,
                        rate=rate,
                    ),
                ),
            )

    def stop(self) -> None:
        """Take nothing more and fail what waits; ends the thread after the batch that runs."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            posts = self._fail_pending(ClientClosedError("the client was closed before this request ran"))
            self._wake.notify()
        _post(posts)

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread to end, then fail what still runs."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        posts: list[_Post] = []
        with self._lock:
            for request in self._running:
                self._settle(
                    request, ClientClosedError("the client was closed while this request ran"), posts
                )
        _post(posts)

    def release(self) -> None:
        """End the thread of a client that was dropped without ``close``.

        The garbage collector calls this, maybe in the middle of our own code: it must not wait for the lock.
        """
        self._released = True
        if self._lock.acquire(blocking=False):
            try:
                self._wake.notify()
            finally:
                self._lock.release()

    # -- under the lock --------------------------------------------------------------------------------------

    def _admit(
        self, payloads: list[bytes], lane: str, deadline: float, box: _Box | None
    ) -> list[_Request] | None:
        self.check_open()
        size = sum(map(len, payloads))
        if size > self.policy.capacity_bytes:
            raise PayloadTooLargeError(
                f"the values take {size:,} bytes together; capacity_bytes is {self.policy.capacity_bytes:,}"
            )
        if not self._pending.fits(lane, len(payloads), size):
            return None
        now = self.clock()
        found = [_Request(next(self._numbers), payload, lane, now, deadline, box) for payload in payloads]
        self._pending.add(found)
        self._accepted += len(found)
        self._start()
        if self._sleep == _IDLE or (
            self._sleep == _FILLING and len(self._pending) >= self.policy.max_batch_size
        ):
            self._sleep = _AWAKE
            self._wake.notify()
        return found

    def _full(self, lane: str) -> QueueFullError:
        rate = self._rate()
        waiting = len(self._pending)
        what = (
            f"{self._pending.depth('l')} low-priority requests wait"
            if lane == "l"
            else f"{waiting} requests wait"
        )
        return QueueFullError(
            f"the queue is full: {what}, {self._pending.bytes:,} bytes in all; the capacity is "
            f"{self._pending.capacity(lane)} requests and {self.policy.capacity_bytes:,} bytes",
            retry_after=waiting / rate if rate else 60.0,
        )

    def _rate(self) -> float:
        """Return the answers a second that the model gives while it is busy."""
        return self._batch_size / self._run_time.seconds if self._run_time.seconds else 0.0

    def _start(self) -> None:
        if self._thread is None:
            self._since = self.clock()
            self._thread = threading.Thread(target=self._serve, name="batchq-local", daemon=True)
            self._thread.start()

    def _settle(self, request: _Request, outcome: bytes | BatchqError, posts: list[_Post]) -> bool:
        """Give a request its outcome, unless it has one."""
        if request.outcome is not None:
            return False
        request.outcome = outcome
        request.payload = b""
        if isinstance(outcome, BatchqError):
            outcome.request_id = self.request_id(request)
        if request.box is not None:
            posts.append((request.box, request))
            request.box = None
        job = request.job
        if job is not None:
            posts.extend((box, request) for box in job.watchers)
            job.watchers.clear()
            request.job = None  # no cycle: a result that has expired is freed at once
            heapq.heappush(self._expiries, (self.clock() + job.ttl, request.number, job))
        return True

    def _fail_pending(self, error: BatchqError) -> list[_Post]:
        posts: list[_Post] = []
        for request in self._pending.clear():
            self._settle(request, _copy(error), posts)
        posts += [(box, _PONG) for box in self._pings]
        self._pings = []
        return posts + self._take_room()

    def _take_room(self) -> list[_Post]:
        posts: list[_Post] = [(box, _ROOM) for box in self._room]
        self._room = []
        return posts

    def _prune(self) -> None:
        now = self.clock()
        while self._expiries and self._expiries[0][0] <= now:
            del self._jobs[heapq.heappop(self._expiries)[2].id]

    # -- the model's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            model = Model(self._open_model(), on_error=self._log_error, on_out_of_memory=self._lower_cap)
        except BaseException as error:
            log.error("the model could not be loaded", exc_info=error)
            if not isinstance(error, BatchqError):
                error = ModelError(repr(error), error_type=type(error).__name__)
            with self._lock:
                self._broken = _copy(error)
                posts = self._fail_pending(self._broken)
            _post(posts)
            return
        with self._lock:
            self._loaded = True
        while True:
            batch = self._next()
            if batch is None:
                return
            self._run(model, batch)
            del batch  # else the last answers would stay in memory while the thread waits

    def _next(self) -> list[_Request] | None:
        """Wait until a batch is due and return it; None after ``stop``."""
        while True:
            posts: list[_Post] = []
            with self._lock:
                batch = self._wait(posts)
            _post(posts)
            if batch is None or batch:
                return batch

    def _wait(self, posts: list[_Post]) -> list[_Request] | None:
        """Return a due batch, or an empty one where there is something to post first."""
        while True:
            if self.closed or self._released:
                return None
            if self._pings:
                posts += [(box, _PONG) for box in self._pings]
                self._pings = []
                return []
            now = self.clock()
            left = self._pending.due_in(now)
            if left == 0:
                break
            self._sleep = _IDLE if left is None else _FILLING
            self._wake.wait(left)
            self._sleep = _AWAKE
        batch, expired = self._pending.take(now, self._run_time.seconds, self._cap.limit(now))
        if expired and not batch:
            self._run_time.all_dropped()
        for request in expired:
            self._expired += 1
            left = max(0.0, request.deadline - now)
            text = f"not run: {left:.3g} s were left, and a batch takes about {self._run_time.seconds:.3g} s"
            self._settle(request, DeadlineExceededError(text), posts)
        if batch:
            self._running = batch
            self._since = now
            self._wait_seconds += (now - min(r.enqueued for r in batch) - self._wait_seconds) * _MEAN_WEIGHT
        posts += self._take_room()
        return batch

    def _run(self, model: Model, batch: list[_Request]) -> None:
        requests: list[_Request] = []
        values: list[Any] = []
        outcomes: list[tuple[_Request, bytes | BatchqError]] = []
        for request in batch:
            payload = request.payload
            if not payload:  # withdrawn since it was taken
                continue
            try:
                values.append(codec.unpack(payload))
            except codec.DecodeError as error:
                outcomes.append((request, EncodeError(f"the value cannot be carried: {error}")))
            else:
                requests.append(request)
                request.payload = b""  # a large value need not be there twice while the model runs
        self._running = requests
        started = self.clock()
        try:
            answers = model.run(values)
        except BaseException as error:
            log.error("the model ended with %s", type(error).__name__, exc_info=error)
            kind = type(error).__name__
            answers = [ModelError(f"the model ended with {error!r}", error_type=kind) for _ in requests]
        seconds = self.clock() - started
        outcomes += [
            (request, self._packed(answer)) for request, answer in zip(requests, answers, strict=True)
        ]
        posts: list[_Post] = []
        with self._lock:
            self._running = []
            if requests:
                self._batches += 1
                self._run_time.ran(seconds)
                self._batch_size += (len(requests) - self._batch_size) * (
                    _MEAN_WEIGHT if self._batch_size else 1.0
                )
            for request, outcome in outcomes:
                if self._settle(request, outcome, posts):
                    if isinstance(outcome, BatchqError):
                        self._failed += 1
                    else:
                        self._completed += 1
            self._prune()
        _post(posts)

    def _packed(self, answer: Any) -> bytes | BatchqError:
        if isinstance(answer, BatchqError):
            return answer
        try:
            payload = codec.pack(answer)
        except EncodeError as error:
            return EncodeError(f"the model's answer cannot be carried: {error.message}")
        if len(payload) > self.max_payload:
            return PayloadTooLargeError(
                f"the answer takes {len(payload):,} bytes; max_payload is {self.max_payload:,}"
            )
        return payload

    def _log_error(self, error: Exception, indices: list[int]) -> None:
        ids = [self.request_id(self._running[index]) for index in indices[:_IDS_IN_LOG]]
        more = f" and {len(indices) - len(ids)} more" if len(indices) > len(ids) else ""
        log.error("the model failed for request %s%s", ", ".join(ids), more, exc_info=error)

    def _lower_cap(self, size: int) -> None:
        log.warning("a batch of %d did not fit into the device's memory; smaller ones for a while", size)
        self._cap.out_of_memory(size, self.clock())


_engines: weakref.WeakSet[_Engine] = weakref.WeakSet()


def _reset_after_fork() -> None:
    for engine in list(_engines):
        engine.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def _copy(error: BatchqError) -> BatchqError:
    """Return the same error afresh: one instance raised in many callers would collect their tracebacks."""
    return from_wire(error.code, error.message, error.request_id, getattr(error, "error_type", ""))


# -- what a call does: once, for both clients
# ------------------------------------------------------------------


class _Value(NamedTuple):
    """From the driver of a map: the next value of the source."""

    value: Any


class _Emit(NamedTuple):
    """To the driver of a map: the next answer for the caller."""

    value: Any


class _Pull(NamedTuple):
    """To the driver of a map: pull a value from the source, unless something arrives or time ends first."""

    seconds: float


_END: Final = object()
_Steps = Generator[float, Any, T]
_MapSteps = Generator[float | _Emit | _Pull, Any, None]


def _drive(steps: _Steps[T], box: _ThreadBox) -> T:
    try:
        seconds = next(steps)
        while True:
            seconds = steps.send(box.get(seconds))
    except StopIteration as stop:
        return cast("T", stop.value)
    finally:
        steps.close()  # on KeyboardInterrupt too: the request is withdrawn


async def _drive_async(steps: _Steps[T], box: _LoopBox) -> T:
    try:
        seconds = next(steps)
        while True:
            seconds = steps.send(await box.get(seconds))
    except StopIteration as stop:
        return cast("T", stop.value)
    finally:
        steps.close()  # on cancellation too: the request is withdrawn


def _drive_map(steps: _MapSteps, box: _ThreadBox, source: Iterator[Any]) -> Iterator[Any]:
    try:
        got: Any = None
        while True:
            command = steps.send(got)
            got = None
            if isinstance(command, _Emit):
                yield command.value
            elif isinstance(command, _Pull) and box.empty():
                got = _pull(source)
            else:
                got = box.get(command.seconds if isinstance(command, _Pull) else command)
    except StopIteration:
        return
    finally:
        steps.close()


async def _drive_map_async(
    steps: _MapSteps, box: _LoopBox, values: Iterable[Any] | AsyncIterable[Any]
) -> AsyncIterator[Any]:
    later = values.__aiter__() if isinstance(values, AsyncIterable) else None
    source = iter(()) if isinstance(values, AsyncIterable) else iter(values)
    pull: asyncio.Future[Any] | None = None
    pulls = 0
    try:
        got: Any = None
        while True:
            command = steps.send(got)
            got = None
            if isinstance(command, _Emit):
                yield command.value
            elif not isinstance(command, _Pull):
                got = await box.get(command)
            elif later is None:
                pulls += 1
                if pulls % _PULLS_A_TURN == 0:
                    await asyncio.sleep(0)  # a long window must not hold up the loop while it fills
                got = _pull(source) if box.empty() else await box.get(0)
            else:  # a slow source must not hold up the answers: wait for whichever comes first
                if pull is None:
                    pull = asyncio.ensure_future(_pull_async(later))
                    pull.add_done_callback(box.wake)
                if not pull.done() or not box.empty():
                    got = await box.get(command.seconds)
                if got is None and pull.done():
                    got, pull = pull.result(), None
    except StopIteration:
        return
    finally:
        steps.close()
        if pull is not None and not pull.cancel() and not pull.cancelled():
            pull.exception()  # look at it, else asyncio complains that nobody did


def _pull(source: Iterator[Any]) -> Any:
    # not next(source, default): a StopIteration must not reach the drivers, who take it for the end of the
    # steps
    for value in source:
        return _Value(value)
    return _END


async def _pull_async(source: AsyncIterator[Any]) -> Any:
    async for value in source:
        return _Value(value)
    return _END


class _Calls:
    """The calls as generators of waits, and their settings. The engine ends when this is dropped."""

    def __init__(self, engine: _Engine, timeout: float) -> None:
        self.engine = engine
        self.timeout = timeout
        weakref.finalize(self, engine.release).atexit = False

    def predict(self, box: _Box, value: object, timeout: float | None, *extras: Any) -> _Steps[Any]:
        engine = self.engine
        engine.check_open()
        seconds = check_timeout(timeout, self.timeout)
        deadline = engine.clock() + seconds
        lane = check_options(*extras)
        (request,) = engine.admit([engine.pack(value)], lane, deadline, box)
        try:
            while request.outcome is None:
                yield deadline - engine.clock()
                if request.outcome is None and engine.clock() >= deadline:
                    raise self._late(request, seconds)
        finally:
            if request.outcome is None:
                engine.withdraw([request])
        return _answer(request)

    def predict_many(
        self,
        box: _Box,
        values: Iterable[object],
        timeout: float | None,
        return_exceptions: bool,
        *extras: Any,
    ) -> _Steps[list[Any]]:
        engine = self.engine
        engine.check_open()
        seconds = check_timeout(timeout, self.timeout)
        deadline = engine.clock() + seconds
        lane = check_options(*extras)
        payloads = [engine.pack(value) for value in values]
        if not payloads:
            return []
        most = engine.policy.capacity if lane != "l" else max(1, engine.policy.capacity // 2)
        if len(payloads) > most:
            of_lane = " (the low lane may fill half of the capacity)" if lane == "l" else ""
            raise ConfigError(
                f"{len(payloads):,} values: allowed are at most {most:,}, the queue's capacity{of_lane}; "
                "use map(), which sends them as room comes"
            )
        requests = engine.admit(payloads, lane, deadline, box)
        left = len(requests)
        try:
            while left:
                got = yield deadline - engine.clock()
                if got is not None:
                    left -= 1
                    if not return_exceptions:
                        _answer(got, unpack=False)
                elif engine.clock() >= deadline:
                    late = [request for request in requests if request.outcome is None]
                    if late and not return_exceptions:
                        raise self._late(late[0], seconds)
                    break
        finally:
            if left:
                engine.withdraw(request for request in requests if request.outcome is None)
        for request in requests:
            if request.outcome is _WITHDRAWN:
                request.outcome = self._late(request, seconds)
        return [_outcome(request) if return_exceptions else _answer(request) for request in requests]

    def map(
        self,
        box: _Box,
        concurrency: int,
        ordered: bool,
        timeout: float | None,
        return_exceptions: bool,
        *extras: Any,
    ) -> _MapSteps:
        self.engine.check_open()
        check_int("concurrency", concurrency, 1, 100_000, 256, " requests")
        seconds = check_timeout(timeout, DAY)
        return self._map(box, concurrency, ordered, seconds, return_exceptions, check_options(*extras))

    def _map(
        self, box: _Box, concurrency: int, ordered: bool, seconds: float, return_exceptions: bool, lane: str
    ) -> _MapSteps:
        engine = self.engine
        emit = _outcome if return_exceptions else _answer
        live: dict[_Request, None] = {}  # admitted, no outcome yet
        ready: deque[_Request] = deque()  # for the caller: in the source's order, or as they come
        waiting: bytes | None = None  # pulled and packed, and there was no room
        exhausted = False
        # all have the same timeout, so no deadline comes before that of the first one looked at
        alarm = math.inf
        try:
            while True:
                while ready and ready[0].outcome is not None:
                    yield _Emit(emit(ready.popleft()))
                if waiting is not None:
                    deadline = engine.clock() + seconds
                    request = engine.try_admit(waiting, lane, deadline, box)
                    if request is not None:
                        waiting = None
                        live[request] = None
                        alarm = min(alarm, deadline)
                        if ordered:
                            ready.append(request)
                        continue
                    if not live and not engine.await_room(waiting, lane, box):
                        continue
                elif exhausted and not live and not ready:
                    return
                left = alarm - engine.clock()
                if waiting is None and not exhausted and (len(ready) if ordered else len(live)) < concurrency:
                    got = yield _Pull(left)
                else:
                    got = yield left
                if got is _END:
                    exhausted = True
                elif isinstance(got, _Value):
                    try:
                        waiting = engine.pack(got.value)
                    except BatchqError as error:
                        ready.append(_failed(error))
                elif isinstance(got, _Request):
                    if got in live:
                        del live[got]
                        if not ordered:
                            ready.append(got)
                elif got is None and engine.clock() >= alarm:
                    late = [request for request in live if request.deadline <= engine.clock()]
                    engine.withdraw(late)
                    for request in late:
                        del live[request]
                        if request.outcome is _WITHDRAWN:
                            request.outcome = self._late(request, seconds)
                        if not ordered:
                            ready.append(request)
                    alarm = min((request.deadline for request in live), default=math.inf)
        finally:
            engine.withdraw(live)
            engine.leave(box)

    def submit(
        self,
        value: object,
        id: str | None,
        deadline: float | None,
        result_ttl: float,
        *extras: Any,
    ) -> str:
        engine = self.engine
        engine.check_open()
        seconds = check_timeout(deadline, DAY, "deadline")
        ttl = check_number("result_ttl", result_ttl, 1, MAX_RESULT_TTL, DEFAULT_RESULT_TTL, " s")
        found = uuid.uuid4().hex if id is None else check_job_id(id)
        engine.submit(engine.pack(value), check_options(*extras), engine.clock() + seconds, found, ttl)
        return found

    def state(self, id: str) -> str:
        job = self.engine.job(id)
        if job is None:
            return "unknown"
        outcome = job.request.outcome
        if outcome is None:
            return "pending"
        return "failed" if isinstance(outcome, BatchqError) else "done"

    def result(self, box: _Box, id: str, timeout: float | None) -> _Steps[Any]:
        engine = self.engine
        seconds = check_timeout(timeout, DEFAULT_RESULT_TIMEOUT)
        deadline = engine.clock() + seconds
        job = self._job(id)
        engine.watch(job, box)
        try:
            while job.request.outcome is None:
                yield deadline - engine.clock()
                if job.request.outcome is None and engine.clock() >= deadline:
                    raise DeadlineExceededError(
                        f"job {id!r} has no result after {seconds:g} s: {engine.why_late()}",
                        request_id=engine.request_id(job.request),
                    )
        finally:
            engine.unwatch(job, box)
        outcome = job.request.outcome
        if isinstance(outcome, BatchqError):
            raise _copy(outcome)
        return _answer(job.request)

    def cancel(self, id: str) -> bool:
        return self.engine.cancel(self._job(id))

    def ping(self, box: _Box) -> _Steps[float]:
        engine = self.engine
        started = engine.clock()
        engine.ping(box)
        try:
            while (yield self.timeout) is not _PONG:
                if not engine.loading() and engine.clock() >= started + self.timeout:
                    raise DeadlineExceededError(
                        f"no answer to a ping within {self.timeout:g} s: {engine.why_late()}"
                    )
        finally:
            engine.leave(box)
        engine.check_open()
        return engine.clock() - started

    def _job(self, id: str) -> _JobRecord:
        job = self.engine.job(id)
        if job is None:
            raise JobNotFoundError(
                f"no job {id!r}: it was not submitted to this client, or its result has expired"
            )
        return job

    def _late(self, request: _Request, seconds: float) -> DeadlineExceededError:
        engine = self.engine
        return DeadlineExceededError(
            f"no answer within {seconds:g} s: {engine.why_late()}", request_id=engine.request_id(request)
        )


def check_job_id(id: object) -> str:
    """Return the id if it may be a job's; raise ConfigError otherwise."""
    if not isinstance(id, str) or not 1 <= len(id) <= 256:
        raise ConfigError(f"id={id!r:.80}: allowed is a str of 1 to 256 characters, or None for a random one")
    return id


def check_options(priority: object, batch_key: object, cost: object, meta: object) -> str:
    """Check what a call gives beside its value; return the lane."""
    check_extras(batch_key, cost, meta)
    if meta is not None:
        codec.pack(meta)
    return check_lane(priority)


def _failed(error: BatchqError) -> _Request:
    request = _Request(0, b"", "n", 0.0, 0.0, None)
    request.outcome = error
    return request


def _answer(request: _Request, *, unpack: bool = True) -> Any:
    outcome = request.outcome
    if isinstance(outcome, BatchqError):
        raise outcome
    if not unpack:
        return None
    try:
        return codec.unpack(outcome or b"")
    except codec.DecodeError as error:
        raise EncodeError(f"the model's answer cannot be carried: {error}") from None


def _outcome(request: _Request) -> Any:
    try:
        return _answer(request)
    except BatchqError as error:
        return error


# -- the clients
# -----------------------------------------------------------------------------------------------


class _OpenModel:
    """Loads the model, in the thread that will run it."""

    def __init__(self, load: Callable[..., Any], device: str | None, args: Mapping[str, Any] | None) -> None:
        bind_load(load, device=device, args=args)  # misspelt arguments are told here, not at the first call
        self.label = str(getattr(load, "__qualname__", None) or type(load).__qualname__)
        self._load = load
        self._device = device
        self._args = dict(args or {})

    def __call__(self) -> Callable[[list[Any]], Any]:
        return call_load(self._load, device=self._device, args=self._args)


class _Client:
    """What LocalClient and AsyncLocalClient have in common: their settings."""

    def __init__(
        self,
        load: Callable[..., Any],
        *,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        max_delay: float = DEFAULT_MAX_DELAY,
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
        )
        check_int("max_payload", max_payload, KIB, 512 * MIB, DEFAULT_MAX_PAYLOAD, " bytes")
        engine = _Engine(_OpenModel(load, device, model_args), policy, max_payload, clock)
        self._calls = _Calls(engine, check_timeout(timeout, DEFAULT_TIMEOUT))

    def __repr__(self) -> str:
        policy = self._calls.engine.policy
        closed = ", closed" if self._calls.engine.closed else ""
        return (
            f"<{type(self).__name__} max_batch_size={policy.max_batch_size} max_delay={policy.max_delay} "
            f"capacity={policy.capacity}{closed}>"
        )


class LocalClient(_Client):
    """A client that runs the model in its own process, for threads.

    >>> def load():
    ...     return lambda inputs: [2 * x for x in inputs]
    >>> with LocalClient(load, max_batch_size=32, max_delay=0.005) as queue:
    ...     queue.predict(21)
    42

    Thread-safe.

    ``load``: the function that returns the model, ``predict(inputs: list) -> answers``. It is called once a
    process, on first use, in the thread that runs the model; so a client may be built at import time and
    before a fork. A request's timeout runs while the model is loaded: call ``ping()`` first, which waits for
    it. What ``load`` raises, each call raises.

    ``max_batch_size``: requests a batch, 1 to 4,096. ``max_delay``: seconds that the oldest request waits for
    others, 0 to 60. ``capacity``: requests that may wait, 1 to 1,000,000 (QueueFullError beyond).
    ``timeout``: seconds for a call that gives none, more than 0 and at most 86,400. ``device``: passed to
    ``load`` if it takes one. ``model_args``: more arguments for ``load``. ``max_payload``: bytes of a packed
    value or answer, 1 KiB to 512 MiB; ``capacity_bytes``: of all that may wait. ``clock``: seconds, for
    tests. Raises ConfigError for what is out of range.
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

        ``timeout``: seconds from the call to the answer; None means the client's. Raises QueueFullError,
        DeadlineExceededError, ModelError, EncodeError, PayloadTooLargeError, ClientClosedError, ConfigError.
        """
        box = _ThreadBox()
        return _drive(self._calls.predict(box, value, timeout, priority, batch_key, cost, meta), box)

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

        The first error is raised and withdraws the rest; with ``return_exceptions`` it stands in its value's
        place. More values than the capacity are a ConfigError: use ``map``.
        """
        box = _ThreadBox()
        steps = self._calls.predict_many(
            box, values, timeout, return_exceptions, priority, batch_key, cost, meta
        )
        return _drive(steps, box)

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

        At most ``concurrency`` (1 to 100,000) are outstanding; where the queue is full it waits.
        ``ordered=False`` gives answers as they come. ``timeout``: seconds for each item, None means a day.
        """
        box = _ThreadBox()
        steps = self._calls.map(
            box, concurrency, ordered, timeout, return_exceptions, priority, batch_key, cost, meta
        )
        return _drive_map(steps, box, iter(values))

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

        ``id``: 1 to 256 characters, None for a random one; a second submit of the same id is the same job.
        ``deadline``: seconds from now within which it must run, None means a day. ``result_ttl``: seconds for
        which the result is kept, 1 to 2,592,000. Jobs live in this client's memory.
        """
        return LocalJob(
            self._calls, self._calls.submit(value, id, deadline, result_ttl, priority, batch_key, cost, meta)
        )

    def job(self, id: str) -> LocalJob:
        """Return the job of this id, whether or not there is one."""
        self._calls.engine.check_open()
        return LocalJob(self._calls, check_job_id(id))

    def stats(self) -> QueueStats:
        """Return the queue's depth, rates and totals; ``drain_rate`` is that of the busy model."""
        return self._calls.engine.stats()

    def ping(self) -> float:
        """Load the model if that has not happened, and return the seconds until its thread answered.

        Raises what ``load`` raises, and DeadlineExceededError where a batch runs for longer than the client's
        timeout.
        """
        box = _ThreadBox()
        return _drive(self._calls.ping(box), box)

    def close(self) -> None:
        """Fail what waits with ClientClosedError, and wait at most 5 s for the batch that runs."""
        self._calls.engine.stop()
        self._calls.engine.join(CLOSE_SECONDS)

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class AsyncLocalClient(_Client):
    """A client that runs the model in its own process, for asyncio.

    >>> async def main():
    ...     async with AsyncLocalClient(load, max_batch_size=32, max_delay=0.005) as queue:
    ...         return await asyncio.gather(*(queue.predict(x) for x in range(100)))

    May be used from several event loops. Cancelling a call withdraws its request and disturbs nobody else.
    The settings are those of LocalClient.
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
        box = _LoopBox()
        return await _drive_async(
            self._calls.predict(box, value, timeout, priority, batch_key, cost, meta), box
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
        """Return the answers to values, in their order; see ``LocalClient.predict_many``."""
        box = _LoopBox()
        steps = self._calls.predict_many(
            box, values, timeout, return_exceptions, priority, batch_key, cost, meta
        )
        return await _drive_async(steps, box)

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
        box = _LoopBox()
        steps = self._calls.map(
            box, concurrency, ordered, timeout, return_exceptions, priority, batch_key, cost, meta
        )
        return _drive_map_async(steps, box, values)

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
        found = self._calls.submit(value, id, deadline, result_ttl, priority, batch_key, cost, meta)
        return AsyncLocalJob(self._calls, found)

    def job(self, id: str) -> AsyncLocalJob:
        """Return the job of this id, whether or not there is one."""
        self._calls.engine.check_open()
        return AsyncLocalJob(self._calls, check_job_id(id))

    async def stats(self) -> QueueStats:
        """Return the queue's depth, rates and totals."""
        return self._calls.engine.stats()

    async def ping(self) -> float:
        """Load the model if that has not happened; see ``LocalClient.ping``."""
        box = _LoopBox()
        return await _drive_async(self._calls.ping(box), box)

    async def aclose(self) -> None:
        """Fail what waits with ClientClosedError, and wait at most 5 s for the batch that runs."""
        self._calls.engine.stop()
        await asyncio.to_thread(self._calls.engine.join, CLOSE_SECONDS)

    async def __aenter__(self) -> AsyncLocalClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()


class LocalJob:
    """A submitted request of a LocalClient. ``id``: the id that was given, or a random one."""

    def __init__(self, calls: _Calls, id: str) -> None:
        self._calls = calls
        self.id = id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}>"

    def state(self) -> str:
        """Return 'pending', 'done', 'failed', or 'unknown' (never submitted here, or expired)."""
        return self._calls.state(self.id)

    def result(self, timeout: float | None = DEFAULT_RESULT_TIMEOUT) -> Any:
        """Wait for the answer and return it, any number of times until it expires.

        ``timeout``: seconds, more than 0 and at most 86,400; None means 10. Raises the job's error,
        DeadlineExceededError if it is not ready in time, JobNotFoundError, JobCancelledError.
        """
        box = _ThreadBox()
        return _drive(self._calls.result(box, self.id, timeout), box)

    def cancel(self) -> bool:
        """Cancel the job; False if it had a result already. Raises JobNotFoundError."""
        return self._calls.cancel(self.id)


class AsyncLocalJob:
    """A submitted request of an AsyncLocalClient; see ``LocalJob``."""

    def __init__(self, calls: _Calls, id: str) -> None:
        self._calls = calls
        self.id = id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}>"

    async def state(self) -> str:
        """Return 'pending', 'done', 'failed', or 'unknown'."""
        return self._calls.state(self.id)

    async def result(self, timeout: float | None = DEFAULT_RESULT_TIMEOUT) -> Any:
        """Wait for the answer and return it; see ``LocalJob.result``."""
        box = _LoopBox()
        return await _drive_async(self._calls.result(box, self.id, timeout), box)

    async def cancel(self) -> bool:
        """Cancel the job; False if it had a result already."""
        return self._calls.cancel(self.id)


class Batched(Generic[V, A]):
    """A function of one value, made by ``@batched`` from a function of a list."""

    def __init__(self, function: Callable[[list[V]], Sequence[A]], **settings: Any) -> None:
        _check_batchable(function)

        def load() -> Callable[[list[V]], Sequence[A]]:
            return function

        self._client = LocalClient(load, **settings)
        self._calls = self._client._calls
        functools.update_wrapper(self, function)

    def __call__(self, value: V, *, timeout: float | None = None, priority: Priority = "normal") -> A:
        """Return the answer to one value; blocks the calling thread. See ``LocalClient.predict``."""
        return cast("A", self._client.predict(value, timeout=timeout, priority=priority))

    async def aio(self, value: V, *, timeout: float | None = None, priority: Priority = "normal") -> A:
        """Return the answer to one value; for asyncio."""
        box = _LoopBox()
        steps = self._calls.predict(box, value, timeout, priority, None, None, None)
        return cast("A", await _drive_async(steps, box))

    def map(
        self,
        values: Iterable[V],
        *,
        concurrency: int = 256,
        priority: Priority = "low",
        ordered: bool = True,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> Iterator[A]:
        """Return an iterator over the answers to any number of values; see ``LocalClient.map``."""
        return self._client.map(
            values,
            concurrency=concurrency,
            priority=priority,
            ordered=ordered,
            timeout=timeout,
            return_exceptions=return_exceptions,
        )

    def stats(self) -> QueueStats:
        """Return the depth, rates and totals."""
        return self._client.stats()

    def close(self) -> None:
        """End the thread; each later call raises ClientClosedError."""
        self._client.close()


def batched(
    *,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    max_delay: float = DEFAULT_MAX_DELAY,
    capacity: int = DEFAULT_CAPACITY,
    timeout: float = DEFAULT_TIMEOUT,
) -> Callable[[Callable[[list[V]], Sequence[A]]], Batched[V, A]]:
    """Make of a function of a list a function of one value, whose concurrent calls run as batches.

    >>> @batched(max_batch_size=32, max_delay=0.005)
    ... def double(inputs: list[int]) -> list[int]:
    ...     return [2 * x for x in inputs]
    >>> double(21)  # from a thread; ``await double.aio(21)`` in asyncio; ``double.map(range(1000))``
    42
    >>> double.close()

    The settings are LocalClient's, and so are the errors and the limits on what a value may be.
    """

    def decorate(function: Callable[[list[V]], Sequence[A]]) -> Batched[V, A]:
        return Batched(
            function, max_batch_size=max_batch_size, max_delay=max_delay, capacity=capacity, timeout=timeout
        )

    return decorate


def _check_batchable(function: Any) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise ConfigError(f"@batched() decorates a function, not {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"@batched: {name} is an async def; define it with def: it runs in a thread of its own"
        )
    try:
        inspect.signature(function).bind([])
    except TypeError:
        raise ConfigError(
            f"@batched: {name} must take one argument, the list of inputs "
            "(for a method, decorate a function inside __init__)"
        ) from None
    except ValueError:  # a function written in C does not tell
        return
