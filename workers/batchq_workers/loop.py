"""A child's loop: wait, take, run the model, answer.

While the queue is quiet all of it happens on the main thread, and one send carries the answers of the last batch, the wait for a token
and the take behind it: Redis runs the take the moment that the token comes, and no hop is lost between the two. (The wait itself carries
no data, so nothing is lost where it is cut.) Once batches queue up and the model is slow enough to be worth a second thread, that one
splits, encodes and publishes the last batch, and fetches, decodes and collates the next, while the model runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from batchq import commands
from batchq.commands import Answers, Taken
from batchq.device import DeviceLostError
from batchq.errors import BackendUnavailableError
from batchq.keys import Keys
from batchq.model import Model, Output, Prepared
from batchq.policy import DEADLINE_MARGIN, Cap, RunTime
from batchq.store import Endpoint, Link, LinkLostError, OutOfMemory, retry_delay
from batchq_workers.batches import Batch, Decoder, encode
from batchq_workers.board import Board, batch_name
from batchq_workers.config import WorkerConfig

log = logging.getLogger("batchq.worker")

IDLE_POLL: Final = 1.0
_ANSWER_WITHIN: Final = 5.0
"""Seconds of silence, beyond those that were asked for, after which a connection counts as broken."""
_OVERLAP_FROM: Final = 0.001
"""Seconds a batch from which on a second thread pays: handing over to it costs about a tenth of that."""
_PREFETCH_TRIES: Final = 4
_REGROUPS_IN_A_ROW: Final = 8
"""Takes that only regroup before a batch that is overdue, but not full, has its turn."""
_UNBLOCK_AGAIN: Final = 0.001
"""Seconds after which to end a wait once more that Redis did not know of yet."""
_NATIVE_FROM: Final = 2048
"""Mean bytes a request from which on LMOVE outside of scripts is cheaper than moving inside (docs/performance.md)."""


class Stop:
    """Whether the child was told to stop, and a file descriptor that becomes readable then."""

    def __init__(self) -> None:
        self.requested = False
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)

    def request(self) -> None:
        """Tell it to stop; safe in a signal handler."""
        if not self.requested:
            self.requested = True
            os.write(self._write_fd, b"!")

    def sleep(self, seconds: float) -> None:
        """Wait; the request to stop ends it."""
        select.select([] if self.requested else [self.fd], [], [], seconds)


@dataclass(slots=True)
class _Ran:
    """A batch that has run; its replies, once they are encoded."""

    batch: Batch
    prepared: Prepared
    output: Output
    answers: Answers | None = None


_Beside = tuple[_Ran | None, Batch | None]
"""What the second thread has come to: a batch that has to be run again in parts, and the next one."""


class Loop:
    """The loop of one child process."""

    def __init__(self, config: WorkerConfig, child: int, board: Board, model: Model, stop: Stop) -> None:
        self._config = config
        self._child = child
        self._board = board
        self._stop = stop
        self._endpoint = Endpoint(config.url)
        self._keys = Keys(config.queue)
        self._model = model
        model.on_error, model.on_out_of_memory = self._log_model_error, self._out_of_memory
        policy = config.policy
        budget = policy.max_batch_cost or 0
        self._decoder = Decoder(model, config.max_payload, budget=budget, padded=policy.padded)
        self._options = commands.TakeOptions(
            worker=config.name,
            max_batch_size=policy.max_batch_size,
            max_delay_us=int(policy.max_delay * 1e6),
            lease_us=int(config.lease * 1e6),
            max_batch_cost=budget,
            padded=policy.padded,
        )
        self._run_time = RunTime()
        self._cap = Cap()
        self._main: Link | None = None
        self._main_id = 0
        self._side: Link | None = None
        self._second = ThreadPoolExecutor(1, "batchq-second")
        self._issued = 0
        self._free_name: str | None = None
        self._in_doubt: str | None = None
        self._unpublished: list[tuple[Batch, Answers]] = []
        self._of_thread = threading.local()
        """``batch``: the one for which this thread is in the user's code, so that the log can name its requests."""
        self._due_at: float | None = None
        self._solo_first = True
        self._native = False
        self._native_size = policy.max_batch_size
        self._regrouped = 0
        """How many takes in a row were regrouped."""
        self._regrouping_since = 0.0
        self._regroup_time = RunTime()

    # --- the outer loop: whatever happens to Redis, go on ---

    def run(self) -> None:
        """Work until told to stop; raise DeviceLostError when only a new process can go on."""
        attempt = 0
        try:
            while not (self._stop.requested and not self._unpublished):
                self._board.add("round", 1)
                try:
                    if self._stop.requested or self._in_doubt is not None:
                        self._publish_all()
                    if self._stop.requested:
                        break
                    batch = self._next()
                    if attempt:
                        log.info("Redis is back")
                    attempt = 0
                    if batch is not None:
                        self._work(batch)
                        batch = None  # an idle worker holds no inputs
                except BackendUnavailableError as error:
                    self._due_at = None
                    if attempt == 0:
                        log.warning("Redis is not available, trying again: %s", error)
                    attempt += 1
                    self._stop.sleep(retry_delay(attempt, random.random))
            self._leave()
        except DeviceLostError:
            self._second.shutdown()  # it may be publishing
            with contextlib.suppress(BackendUnavailableError):
                self._publish_all()
            raise
        finally:
            self._second.shutdown(wait=False, cancel_futures=True)
            for link in (self._main, self._side):
                if link is not None:
                    link.close()

    def _main_link(self) -> Link:
        if self._main is None or self._main.broken:
            link = self._endpoint.link()
            self._main_id = link.client_id()  # without it no wait can be ended in time
            self._main = link
        return self._main

    def _side_link(self) -> Link:
        if self._side is None or self._side.broken:
            self._side = self._endpoint.link()
        return self._side

    # --- taking ---

    def _new_name(self) -> str:
        """Return a name for a take. One that came to nothing is used again: the parent renews only the newest few."""
        if self._free_name is None:
            self._issued += 1
            self._board.set("issued", self._issued)  # before Redis knows of it: the parent must not miss it
            self._free_name = batch_name(self._config.name, self._child, self._issued)
        return self._free_name

    def _take(self, name: str, form: str, *, prefetch: bool = False) -> commands.Call[Taken]:
        limit = self._options.max_batch_size
        if form == "native" and self._options.max_batch_cost:
            limit = min(limit, self._native_size)
        return commands.take(
            self._keys,
            self._options,
            name,
            limit=min(limit, self._cap.limit(time.monotonic()) or limit),
            # what is fetched ahead first waits for the batch that runs
            run_us=int(self._run_time.seconds * DEADLINE_MARGIN * (2 if prefetch else 1) * 1e6),
            form=form,
            solo_first=self._solo_first,
            prefetch=prefetch,
            regroups=self._regroups(),
            regroup_us=int(self._regroup_time.seconds * DEADLINE_MARGIN * 1e6),
        )

    def _regroups(self) -> str:
        """Say when requests that stand in no group yet have their turn: after each batch once, then for a while if no batch is full."""
        if not self._model.classifies:
            return ""
        if not self._regrouped:
            return "first"
        patience = self._options.max_delay_us / 1e6
        if self._regrouped < _REGROUPS_IN_A_ROW and time.monotonic() - self._regrouping_since < patience:
            return "full"
        return "last"

    def _next(self) -> Batch | None:
        """Wait for work and take it; None if there is none yet."""
        link, side = self._main_link(), self._side_link()
        if self._in_doubt is not None:  # before any other take: it may have gone through
            name = self._in_doubt
            taken = link.call(self._take(name, "light"))
            return self._received(link, name, taken)
        while len(self._unpublished) > 1 or (self._unpublished and self._unpublished[0][0].letters):
            self._publish_first()
        name = self._new_name()
        wake = commands.wait_wake(self._keys, IDLE_POLL)
        take = self._take(name, "native" if self._native else "light")
        self._in_doubt = name
        if self._unpublished:
            batch, replies = self._unpublished[0]
            finish = commands.finish(self._keys, batch.name, replies)
            link.send(
                b"".join((finish.payload, wake.payload, take.payload)),
                finish.answers + wake.answers + take.answers,
            )
            self._published(link, side, finish, link.read(finish.answers))
        else:
            link.send(wake.payload + take.payload, wake.answers + take.answers)
        self._await_token(link, side)
        woken = link.read(wake.answers)
        answers = link.read(take.answers)
        if link.forgot_scripts(answers):
            taken = link.call(self._take(name, "light"))
        else:
            link.parse(wake, woken)
            try:
                taken = link.parse(take, answers)
            except OutOfMemory:
                taken = link.call(self._take(name, "force"))
        return self._received(link, name, taken)

    def _await_token(self, link: Link, side: Link) -> None:
        """Wait for the token, until the batch that is forming is due: then have Redis end the wait, and go on to the take."""
        patience = time.monotonic() + IDLE_POLL + _ANSWER_WITHIN
        end_at, told = self._due_at, False
        while True:
            until = patience if end_at is None else min(patience, end_at)
            if link.wait(max(0.0, until - time.monotonic()), *(() if told else (self._stop.fd,))):
                return
            if time.monotonic() >= patience:
                link.close()
                raise LinkLostError("Redis has not answered in time")
            # A timeout of Redis' own would come up to 100 ms late, see docs/protocol.md. This may overtake the BLPOP, which
            # is on another connection, and then ends nothing: say it again until it does.
            ended = side.call(commands.call(b"CLIENT", b"UNBLOCK", b"%d" % self._main_id))
            end_at, told = None if ended else time.monotonic() + _UNBLOCK_AGAIN, True
            if ended:
                patience = time.monotonic() + _ANSWER_WITHIN

    def _received(self, link: Link, name: str, taken: Taken, *, prefetch: bool = False) -> Batch | None:
        """Turn what a take came to into a batch."""
        if taken.outcome == "bulk":
            self._native = True
            try:
                taken = link.call(self._take(name, "native", prefetch=prefetch))
            except OutOfMemory:
                taken = link.call(self._take(name, "force", prefetch=prefetch))
        self._due_at = time.monotonic() + taken.left if taken.outcome == "wait" else None
        if taken.outcome != "batch":
            if taken.dropped:
                self._run_time.all_dropped()
            self._in_doubt = None
            return None
        requests = taken.requests
        if requests is None:
            requests = link.call(commands.fetch_batch(self._keys, name))
        if len(requests) != len(taken.raw_heads):
            log.error(
                "a batch has %d requests and %d heads: given back",
                len(requests),
                len(taken.raw_heads),
                extra={"batch": name},
            )
            self._give_back(link, commands.release(self._keys, name))
            return None
        self._solo_first = taken.kind != "solo"
        self._native = sum(map(len, requests)) >= _NATIVE_FROM * len(requests)
        # with a budget a batch may hold fewer than LMOVEs are sent for; what these take too much has to be moved back
        self._native_size = 2 * len(requests) if len(requests) >= self._native_size else len(requests) + 2
        if self._stop.requested:
            self._give_back(link, commands.release(self._keys, name))
            return None
        if self._model.classifies:
            started = time.perf_counter()
            with self._busy("beside_started" if prefetch else "run_started"):
                batch = self._decoder.decode(name, taken, requests)
            if batch.places:
                self._regroup_time.ran(time.perf_counter() - started)
        else:
            batch = self._decoder.decode(name, taken, requests)
        if batch.places:
            if not self._regrouped:
                self._regrouping_since = time.monotonic()
            self._regrouped += 1
            self._give_back(link, commands.regroup(self._keys, name, batch.places, front=batch.to_front))
            return None
        self._regrouped = 0
        self._free_name = None
        self._in_doubt = None
        return batch

    @contextlib.contextmanager
    def _busy(self, field: str, batch: Batch | None = None) -> Iterator[None]:
        """Be in the user's code, for this batch: the parent knows since when, and ends what takes too long."""
        self._of_thread.batch = batch
        self._board.set(field, time.monotonic())
        try:
            yield
        finally:
            self._board.set(field, 0)
            self._of_thread.batch = None

    def _give_back(self, link: Link, call: commands.Call[int]) -> None:
        """Hand back what was taken. Its name is used again, so that the parent, who renews the newest few, goes on with what runs."""
        link.call(call)
        self._in_doubt = None

    # --- running and answering ---

    def _work(self, batch: Batch) -> None:
        """Run a batch, and those behind it as long as they come in time; the last one's answers leave with the next round."""
        behind: _Ran | None = None  # its answers leave while the next one runs
        following: Batch | None = batch
        while following is not None:
            batch = following
            over = threading.Event() if self._is_worth_overlap(batch) else None
            beside: Future[_Beside] | None = None
            if over is not None or behind is not None:
                beside = self._second.submit(self._work_beside, behind, over)
            behind = None
            try:
                ran = self._run(batch)
                if over is not None:
                    over.set()
                waits = beside is not None and not beside.done()
                if waits:  # the model has to wait for its next batch, but the callers of this one need not
                    self._answer(ran)
                again, following = beside.result() if beside is not None else (None, None)
                if again is not None:
                    self._answer(again)
                stopping = self._stop.requested  # asked once: the signal may come at any time
                if not waits and following is not None and not stopping:
                    behind = ran
                elif not waits:
                    self._unpublished.append((batch, self._encoded(ran)))
            except DeviceLostError:
                if over is not None:
                    over.set()
                with contextlib.suppress(BackendUnavailableError):  # the process has to end all the same
                    self._hand_back(beside.result()[1] if beside is not None else None)
                raise
            if stopping:
                self._hand_back(following)
                following = None

    def _work_beside(self, behind: _Ran | None, over: threading.Event | None) -> _Beside:
        """On the second thread, while the model runs: answer the batch before, then fetch the next, until the run is ``over``.

        Return the batch before, if it has to be run again in parts, and the next one.
        """
        again = self._publish_behind(behind) if behind is not None else None
        return again, self._prefetch(over) if over is not None else None

    def _answer(self, ran: _Ran) -> None:
        """Answer a batch now, on the main thread; what Redis does not take is published in the next round."""
        self._unpublished.append((ran.batch, self._encoded(ran)))
        with contextlib.suppress(BackendUnavailableError):
            self._publish_all()

    def _hand_back(self, batch: Batch | None) -> None:
        """Hand a batch back that was fetched and not begun."""
        if batch is not None:
            self._side_link().call(commands.release(self._keys, batch.name))

    def _is_worth_overlap(self, batch: Batch) -> bool:
        """Tell whether to fetch while this batch runs: if as many wait as make another one, or what waits has to be regrouped."""
        if self._stop.requested or self._run_time.seconds <= _OVERLAP_FROM:
            return False
        if self._model.classifies:
            return batch.pending > 0
        enough = len(batch.requests) if self._options.max_batch_cost else self._options.max_batch_size
        return batch.pending >= enough

    def _run(self, batch: Batch) -> _Ran:
        """Run the model on a batch. Its answers are encoded at once, unless they stay as they are while the model runs again."""
        if not batch.requests:
            prepared = self._prepare(batch)
            return _Ran(batch, prepared, Output(prepared), encode(batch, [], self._config.max_payload))
        started = time.perf_counter()
        with self._busy("run_started", batch):
            prepared = batch.prepared or self._prepare(batch)
            ran = _Ran(batch, prepared, self._model.predict(prepared))
            batch.prepared = None  # the inputs' memory, as soon as it is not needed
            if not ran.output.detached:
                self._encode(ran)
        seconds = time.perf_counter() - started
        self._run_time.ran(seconds)
        self._board.add("batches", 1)
        self._board.add("requests", len(batch.requests))
        self._board.add("run_seconds", seconds)
        self._board.add("wait_seconds", batch.waited)
        return ran

    def _prepare(self, batch: Batch) -> Prepared:
        return self._model.prepare(batch.values, batch.context if self._model.wants_context else None)

    def _encoded(self, ran: _Ran) -> Answers:
        """Return the replies to a batch that has run; on the model's thread, where one that failed is run again in parts."""
        if ran.answers is None:
            with self._busy("run_started", ran.batch):
                self._encode(ran)
        return ran.answers  # type: ignore[return-value]

    def _encode(self, ran: _Ran) -> None:
        outcomes = self._model.answers(ran.output)
        if outcomes is None:
            outcomes = self._model.rescue(ran.prepared, ran.output, ran.batch.again)
        ran.answers = encode(ran.batch, outcomes, self._config.max_payload)

    def _prefetch(self, over: threading.Event) -> Batch | None:
        """On the second thread, while the model runs: take the next batch, if it is full and nobody idle waits for it."""
        tries, again = 0, False
        while tries < _PREFETCH_TRIES:
            if tries:
                over.wait(self._run_time.seconds / _PREFETCH_TRIES)
            if again and (over.is_set() or self._stop.requested):
                return None
            again = True
            name = self._new_name()
            try:
                link = self._side_link()
                self._in_doubt = name
                try:
                    taken = link.call(self._take(name, "native" if self._native else "light", prefetch=True))
                except OutOfMemory:
                    taken = link.call(self._take(name, "force", prefetch=True))
                if taken.outcome in ("batch", "bulk"):
                    before = self._regrouped
                    batch = self._received(link, name, taken, prefetch=True)
                    if batch is not None:
                        if batch.requests:
                            with self._busy("beside_started", batch):
                                batch.prepared = self._prepare(batch)
                        return batch
                    if self._regrouped != before:  # maybe a group is full now
                        continue
                self._in_doubt = None
                tries += 1
            except BackendUnavailableError:
                return None  # the main thread will see for itself
        return None

    def _publish_behind(self, ran: _Ran) -> _Ran | None:
        """On the second thread: answer a batch while the model runs the next; return it if it has to be run again."""
        if ran.answers is None:
            with self._busy("beside_started", ran.batch):
                outcomes = self._model.answers(ran.output)
                if outcomes is None:
                    return ran
                ran.answers = encode(ran.batch, outcomes, self._config.max_payload)
        try:
            self._publish(self._side_link(), ran.batch, ran.answers)
        except BackendUnavailableError:
            self._unpublished.append((ran.batch, ran.answers))
        return None

    def _published(self, link: Link, side: Link, finish: commands.Call[bool], answers: list[Any]) -> None:
        """Read what became of the replies that left in front of a take."""
        batch, replies = self._unpublished[0]
        try:
            held = link.parse(finish, answers)
        except OutOfMemory:
            held = side.call(commands.finish_at_maxmemory(self._keys, batch.name, replies))
        except BaseException:
            link.close()  # the wait and the take behind it are still to be answered
            raise
        self._unpublished.pop(0)
        if not held:
            side.call(commands.forget(self._keys, batch.ids))
        self._board.add("failed", replies.failed)

    def _publish_first(self) -> None:
        batch, answers = self._unpublished[0]
        self._publish(self._main_link(), batch, answers)
        self._unpublished.pop(0)

    def _publish_all(self) -> None:
        while self._unpublished:
            self._publish_first()

    def _publish(self, link: Link, batch: Batch, answers: Answers) -> None:
        if batch.letters:  # before the batch is forgotten
            log.error(
                "%d requests could not be decoded: see the dead letters",
                len(batch.letters),
                extra={"batch": batch.name},
            )
            with contextlib.suppress(OutOfMemory):  # the others' answers matter more
                link.call(commands.bury(self._keys, batch.name, batch.letters))
        try:
            held = link.call(commands.finish(self._keys, batch.name, answers))
        except OutOfMemory:
            held = link.call(commands.finish_at_maxmemory(self._keys, batch.name, answers))
        if not held:  # this child was stopped for so long that others have taken over
            link.call(commands.forget(self._keys, batch.ids))
        self._board.add("failed", answers.failed)

    def _leave(self) -> None:
        """Before the end: give back a take that may have gone through, and wake somebody else for what this child was waiting for."""
        with contextlib.suppress(BackendUnavailableError):  # the parent releases all that this child may hold
            link = self._main_link()
            if self._in_doubt is not None:
                link.call(commands.release(self._keys, self._in_doubt))
            link.call(commands.nudge(self._keys))

    # --- the model's troubles ---

    def _log_model_error(self, error: Exception, indices: Sequence[int]) -> None:
        batch: Batch = self._of_thread.batch
        ids = [batch.requests[index].id.hex() for index in indices]
        log.error(
            "the model failed for %d of a batch of %d",
            len(ids),
            len(batch.requests),
            exc_info=error,
            extra={"request_ids": ",".join(ids)},
        )

    def _out_of_memory(self, size: int) -> None:
        self._cap.out_of_memory(size, time.monotonic())
        log.warning("out of device memory with a batch of %d: smaller batches for a while", size)
