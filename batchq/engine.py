"""The engine of a client in one process: the pending requests, the thread that runs the model, and the jobs.

It batches by the policy and calls the model by the contract that a worker on Redis follows. Callers meet it in three places: ``admit``
takes requests in, a request's boxes get the request once it has an outcome, and ``expire``, ``cancel`` and ``abandon`` give one up.
"""

from __future__ import annotations

import heapq
import logging
import os
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

from batchq import codec
from batchq.boxes import Box, Options, Request, deliver, fresh
from batchq.config import LANES, BatchPolicy
from batchq.errors import (
    BatchqError,
    ClientClosedError,
    DeadlineExceededError,
    JobCancelledError,
    ModelError,
    PayloadTooLargeError,
    QueueFullError,
    RequestError,
)
from batchq.model import Model
from batchq.policy import Cap, Pending, RunTime
from batchq.requests import Ids, new_name
from batchq.runner import Runner
from batchq.stats import QueueStats, WorkerStats

QUEUE: Final = "local"
"""The queue's name in the stats of a client without Redis."""

_MEAN_WEIGHT: Final = 0.2
_LOOK: Final = 60.0
"""Seconds after which an idle thread looks whether its client was dropped: ``release`` may fail to wake it."""
_PONG: Final = codec.pack(None)

log = logging.getLogger("batchq.local")


class Engine:
    """All that a client and its jobs share. Thread-safe; the lock is not held while the model runs.

    In a forked child everything starts afresh: the parent's requests, jobs and model stay with the parent.
    """

    def __init__(
        self,
        open_model: Callable[[], Model],
        label: str,
        policy: BatchPolicy,
        max_payload: int,
        clock: Callable[[], float],
    ) -> None:
        self.label = label
        self.policy = policy
        self._max_payload = max_payload
        self.clock = clock
        self._open_model = open_model
        self._refusal: BatchqError | None = None
        self.reset()
        _engines.add(self)

    def reset(self) -> None:
        """Start afresh, as in a forked child; what was closed stays closed."""
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._state = "not started"  # loading, idle, running; or failed
        self._classifies = True  # the model may tell groups and costs, until it is loaded and known not to
        self._since = 0.0
        if not isinstance(self._refusal, ClientClosedError):
            self._refusal = None
        self._pending: Pending[Request] = Pending(self.policy)
        self._running: list[Request] = []
        self._pings: list[Request] = []
        self._abandoned: deque[Request] = deque()
        self._jobs: dict[str, Request] = {}
        self._expiries: list[tuple[float, str]] = []
        self._ids = Ids()
        self._name = new_name()
        self._cap = Cap()
        self._run_time = RunTime()
        self._batch_size = self._wait_seconds = 0.0
        self._totals: Counter[str] = Counter()

    @property
    def loading(self) -> bool:
        """Whether the model is not there yet."""
        return self._state in ("not started", "loading")

    def check_open(self) -> None:
        """Raise ClientClosedError after ``stop``, and what ``load`` raised."""
        if self._refusal is not None:
            raise fresh(self._refusal)

    def pack(self, value: object, what: str = "value") -> bytes:
        """Return the packed value; raise EncodeError or PayloadTooLargeError."""
        payload = codec.pack(value)
        if len(payload) > self._max_payload:
            raise PayloadTooLargeError(
                f"the {what} takes {len(payload):,} bytes; max_payload is {self._max_payload:,}, and may be raised"
            )
        return payload

    def capacity(self, lane: str) -> int:
        """Return how many requests of a lane may be pending."""
        return self._pending.capacity(lane)

    def check_cost(self, cost: float | None) -> None:
        """Raise RequestError for a cost that no batch can hold."""
        most = self.policy.max_batch_cost
        if cost is not None and most is not None and cost > most:
            raise RequestError(f"cost={cost:g}: no batch can hold it, max_batch_cost is {most:,}")

    def admit(
        self, payloads: list[bytes], options: Options, deadline: float, box: Box, *, again: bool = False
    ) -> list[Request]:
        """Add requests, all or none; the box gets each once it has an outcome. Raises QueueFullError, not counted if asked ``again``."""
        with self._lock:
            self._enter()
            return self._admit(payloads, options, deadline, [box], again)

    def submit(self, payload: bytes, options: Options, deadline: float, job_id: str, ttl: float) -> None:
        """Add a job, unless there is one of this id; its result is kept for ``ttl`` seconds."""
        with self._lock:
            self._enter()
            if job_id not in self._jobs:
                (job,) = self._admit([payload], options, deadline, [], False)
                job.job_id, job.ttl = job_id, ttl
                self._jobs[job_id] = job

    def job(self, job_id: str) -> Request | None:
        """Return the job of this id, if there is one. Who waits for it adds a box, and then looks for the outcome."""
        with self._lock:
            self._enter()
            return self._jobs.get(job_id)

    def ping(self, box: Box) -> Request:
        """Return a request that has an outcome once the model is loaded and no batch runs."""
        with self._lock:
            self._enter()
            ping = Request(self._ids.next().hex(), b"", 0, "", self.clock(), 0.0, [box])
            self._pings = [*(other for other in self._pings if other.outcome is None), ping]
            self._start()
            self._wake.notify()
            return ping

    def expire(self, requests: Iterable[Request], seconds: float) -> None:
        """Fail those that have no outcome after ``seconds``: what waits is not run, and what runs answers nobody."""
        with self._lock:
            self._fail(
                requests, DeadlineExceededError(f"no answer within {seconds:g} s: {self.what_it_does()}")
            )

    def cancel(self, job: Request) -> bool:
        """Cancel a job; False if it has an outcome."""
        with self._lock:
            return self._fail([job], JobCancelledError(f"job {job.job_id!r} was cancelled"))

    def abandon(self, requests: Iterable[Request]) -> None:
        """Give up requests whose caller has gone.

        The garbage collector calls this when it ends a coroutine, maybe while this very thread holds the lock: only leave a note.
        """
        for request in requests:
            if request.outcome is None:
                request.boxes = []
                self._abandoned.append(request)

    def what_it_does(self) -> str:
        """Say what the model's thread does, for the message of a DeadlineExceededError."""
        since = max(0.0, self.clock() - self._since)
        if self.loading:
            return f"the model is being loaded, for {since:.1f} s now (call ping() first to wait for it)"
        if self._state == "running":
            return f"a batch of {len(self._running)} has run for {since:.3g} s, {len(self._pending)} wait"
        return f"{len(self._pending)} wait"

    def stats(self) -> QueueStats:
        """Return the figures of this moment."""
        with self._lock:
            self._enter()
            oldest = self._pending.oldest()
            return QueueStats(
                queue=QUEUE,
                depth={name: self._pending.depth(lane) for name, lane in LANES.items()},
                oldest_age=max(0.0, self.clock() - oldest) if oldest is not None else 0.0,
                solo=0,
                in_flight=int(self._state == "running"),
                capacity=self.policy.capacity,
                accepted=self._totals["accepted"],
                rejected=self._totals["rejected"],
                completed=self._totals["completed"],
                expired=self._totals["expired"],
                failed=self._totals["failed"],
                batches=self._totals["batches"],
                dead=0,
                drain_rate=self._rate(),
                mean_batch_size=self._batch_size,
                workers=(
                    WorkerStats(
                        id=self._name,
                        model=self.label,
                        host=socket.gethostname(),
                        age=0.0,
                        state=self._state,
                        batch_size=self._batch_size,
                        run_seconds=self._run_time.seconds,
                        wait_seconds=self._wait_seconds,
                        rate=self._rate(),
                    ),
                ),
            )

    def stop(self) -> None:
        """Take nothing more and fail what waits; the thread ends after the batch that runs."""
        with self._lock:
            self._refuse(_closed())

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread to end, then fail what still runs."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        with self._lock:
            self._fail(self._running, ClientClosedError("the client was closed while this request ran"))

    def release(self) -> None:
        """End the thread of a client that was dropped without ``close``; called by the garbage collector, see ``abandon``."""
        self._refusal = self._refusal or _closed()
        if self._lock.acquire(blocking=False):
            try:
                self._wake.notify()
            finally:
                self._lock.release()

    # -- under the lock --------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self.check_open()
        self._sweep()

    def _sweep(self) -> None:
        """Forget what was abandoned, and results that have expired."""
        while self._abandoned:
            self._fail([self._abandoned.popleft()], BatchqError("nobody waits for it"))
        now = self.clock()
        while self._expiries and self._expiries[0][0] <= now:
            del self._jobs[heapq.heappop(self._expiries)[1]]

    def _admit(
        self, payloads: list[bytes], options: Options, deadline: float, boxes: list[Box], again: bool
    ) -> list[Request]:
        lane, batch_key, cost, meta = options
        count, size, waiting = len(payloads), sum(map(len, payloads)), len(self._pending)
        if size > self.policy.capacity_bytes:
            raise PayloadTooLargeError(
                f"the values take {size:,} bytes together; capacity_bytes is {self.policy.capacity_bytes:,}"
            )
        if not self._pending.fits(lane, count, size):
            self._totals["rejected"] += 0 if again else count
            of_lane = f", {self._pending.depth(lane)} of them low-priority" if lane == "l" else ""
            raise QueueFullError(
                f"the queue is full: {waiting} requests wait{of_lane}, {self._pending.bytes:,} bytes in all; the "
                f"capacity is {self.capacity(lane)} requests and {self.policy.capacity_bytes:,} bytes",
                retry_after=waiting / self._rate() if self._rate() else 60.0,
            )
        now = self.clock()
        requests = []
        for payload in payloads:
            id_, mine = self._ids.next().hex(), [*boxes]
            requests.append(
                Request(id_, payload, len(payload), lane, now, deadline, mine, batch_key, cost, meta)
            )
        if self._classifies:
            self._pending.add_unsorted(requests)
            many = len(self._pending) >= self.policy.max_batch_size
            full = many or self.policy.max_batch_cost is not None  # maybe: the thread has to look
        else:
            full = self._pending.add(requests)
        self._totals["accepted"] += count
        self._start()
        # the thread sleeps without end where nothing waits, and else until a batch is due that is not full
        if waiting == 0 or full:
            self._wake.notify()
        return requests

    def _start(self) -> None:
        if self._thread is None:
            self._state, self._since = "loading", self.clock()
            self._thread = threading.Thread(target=self._serve, name="batchq-local", daemon=True)
            self._thread.start()

    def _rate(self) -> float:
        """Return the answers a second that the model gives while it is busy."""
        return self._batch_size / self._run_time.seconds if self._run_time.seconds else 0.0

    def _refuse(self, error: BatchqError) -> None:
        self._refusal = error
        self._fail([*self._pending.clear(), *self._pings], error)
        self._wake.notify()

    def _fail(self, requests: Iterable[Request], error: BatchqError) -> bool:
        """Give requests this error that have no outcome; False where there is no such request."""
        found = [request for request in requests if request.outcome is None]
        for request in found:
            self._pending.discard(request)
        self._settle((request, fresh(error)) for request in found)
        return bool(found)

    def _settle(self, outcomes: Iterable[tuple[Request, bytes | BatchqError]]) -> list[Request]:
        """Give each request its outcome, unless it has one, and tell who waits for it; return those that had none."""
        settled = []
        posts: list[tuple[Box, Request]] = []
        for request, outcome in outcomes:
            if request.outcome is not None:
                continue
            if isinstance(outcome, BatchqError):
                outcome.request_id = request.id
            request.outcome = outcome
            request.payload = b""
            # the outcome first: who adds a box now sees it
            boxes, request.boxes = request.boxes, []
            posts += [(box, request) for box in tuple(boxes)]
            if request.job_id:
                heapq.heappush(self._expiries, (self.clock() + request.ttl, request.job_id))
            settled.append(request)
        deliver(posts)
        return settled

    # -- the model's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        runner = None
        try:
            model = self._open_model()
            runner = Runner(model, self.pack, self.clock, self._lower_cap)
            model.warm_up()
        except BaseException as error:
            log.error("the model could not be loaded", exc_info=error)
            if not isinstance(error, BatchqError):
                error = ModelError(repr(error), error_type=type(error).__name__)
            self._give_up(error)
        else:
            self._begin(runner)
            while self._turn(runner):
                pass  # no batch in a variable here: its answers would stay in memory while the thread waits
        if runner is not None:
            runner.close()

    def _begin(self, runner: Runner) -> None:
        with self._lock:
            self._state = "idle"
            self._classifies = runner.classifies
            if not runner.classifies:
                for request in self._pending.unsorted(self.policy.capacity):
                    self._pending.sort(request)

    def _give_up(self, error: BatchqError) -> None:
        with self._lock:
            self._state = "failed"
            self._refuse(self._refusal or error)

    def _turn(self, runner: Runner) -> bool:
        """Wait for a batch and run it; False where it is time to end."""
        batch = self._next(runner)
        if not batch:
            return False
        outcomes, count, seconds = runner.run(batch)
        with self._lock:
            self._state, self._running = "idle", []
            if count:
                self._run_time.ran(seconds)
                self._batch_size = _moved(self._batch_size, count)
                self._totals["batches"] += 1
            for request in self._settle(outcomes):
                self._totals["failed" if isinstance(request.outcome, BatchqError) else "completed"] += 1
        if runner.lost is not None:
            self._give_up(runner.lost)
        return runner.lost is None

    def _next(self, runner: Runner) -> list[Request]:
        """Wait until a batch is due and return it; an empty one where it is time to end."""
        looked = False
        while True:
            with self._lock:
                if self._refusal is not None:
                    return []
                self._sweep()
                self._settle((ping, _PONG) for ping in self._pings)
                self._pings = []
                now = self.clock()
                left = self._pending.due_in(now)
                # a few before each batch, so that what is new is not kept waiting by what is due; all before a wait
                new = []
                if self._classifies and (left != 0 or not looked):
                    new = self._pending.unsorted(self.policy.max_batch_size)
                    looked = True
                if not new:
                    if left != 0:
                        self._wake.wait(_LOOK if left is None else left)
                    elif batch := self._take(now):
                        return batch
                    continue
            self._sort(runner, new)

    def _sort(self, runner: Runner, requests: list[Request]) -> None:
        """Put requests into their groups; the lock is free while the model says which these are."""
        found: list[tuple[Request, str | int | None, float | None]] = []
        for request in requests:
            try:
                batch_key, cost = runner.classify(request)
                self.check_cost(cost)
                found.append((request, batch_key, cost))
            except BatchqError as error:
                with self._lock:
                    self._totals["failed"] += self._fail([request], error)
        with self._lock:
            for request, batch_key, cost in found:
                request.group, request.cost = batch_key, cost
                self._pending.sort(request)

    def _take(self, now: float) -> list[Request]:
        run_time = self._run_time.seconds
        batch, expired = self._pending.take(now, run_time, self._cap.limit(now))
        if batch:
            self._state, self._since, self._running = "running", now, batch
            self._wait_seconds = _moved(self._wait_seconds, now - min(request.enqueued for request in batch))
        elif expired:
            self._run_time.all_dropped()
        self._totals["expired"] += len(expired)
        text = "not run: {:.3g} s were left, and a batch takes about {:.3g} s"
        self._settle(
            (request, DeadlineExceededError(text.format(max(0.0, request.deadline - now), run_time)))
            for request in expired
        )
        return batch

    def _lower_cap(self, size: int) -> None:
        log.warning("a batch of %d did not fit into the device's memory; smaller ones for a while", size)
        self._cap.out_of_memory(size, self.clock())


def _closed() -> ClientClosedError:
    return ClientClosedError("this client was closed; make a new one")


def _moved(mean: float, value: float) -> float:
    return mean + (value - mean) * (_MEAN_WEIGHT if mean else 1.0)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _reset_after_fork() -> None:
    for engine in list(_engines):
        engine.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
