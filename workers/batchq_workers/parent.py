"""The parent: supervises the child that runs the model, and speaks for it to Redis.

It renews the leases of the child's batches, so that a model that holds the GIL cannot lose them; reports that the worker is alive; ends a
batch that runs too long; hands a dead child's batches on at once, and those of machines that have vanished once their leases are over.
It imports no model and no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

from batchq import commands, wire
from batchq.commands import Answers
from batchq.config import BatchPolicy
from batchq.errors import BackendAuthError, BackendUnavailableError, BatchqError, WorkerLostError
from batchq.keys import Keys
from batchq.store import Endpoint, Link, OutOfMemory, retry_delay
from batchq_workers.batches import dead_letter
from batchq_workers.board import Board, held, worker_of
from batchq_workers.child import EXIT_MODEL
from batchq_workers.config import WorkerConfig

log = logging.getLogger("batchq.worker")

EXIT_OK: Final = 0
EXIT_REDIS: Final = 4
"""Redis refuses the password or the user."""
EXIT_REFUSED: Final = 5
"""This worker must not join: another model on the queue, or a Redis that may evict keys."""

# Not -m: that would put the working directory first on sys.path, and a user's redis.py in place of ours.
_CHILD: Final = "import sys; sys.path[:] = [p for p in sys.path if p]; from batchq_workers.child import main; sys.exit(main())"

REPORT_EVERY: Final = 1.0
_STALLED: Final = 60.0
"""A child that neither runs a batch nor makes a round for this many seconds is killed."""


class RefusedStartError(BatchqError):
    """The worker must not start; the message says why."""

    code = "config.start"


class _Child:
    """One child process and the board that it shares."""

    def __init__(self, config: WorkerConfig, number: int) -> None:
        self.number = number
        self.started = time.monotonic()
        self.board, fd = Board.create()
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-c", _CHILD],
                stdin=subprocess.PIPE,
                pass_fds=[fd],
            )
        finally:
            os.close(fd)
        stdin = self.process.stdin
        if stdin is not None:
            line = json.dumps({"config": config.dump(), "child": number, "board": fd})
            with contextlib.suppress(BrokenPipeError):  # it died at once: its exit code says more
                stdin.write(line.encode() + b"\n")
                stdin.flush()
        self.round = -1.0
        self.round_seen = self.started

    def stalled(self, now: float) -> bool:
        """Tell whether it makes no progress though no batch runs."""
        current = self.board.get("round")
        if current != self.round or self.board.get("run_started") or not self.board.get("ready"):
            self.round, self.round_seen = current, now
        return now - self.round_seen > _STALLED

    def close(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.board.close()


class Parent:
    """Runs ``batchq worker``."""

    def __init__(self, config: WorkerConfig) -> None:
        self._wanted = config
        self._config = config
        self._keys = Keys(config.queue)
        self._endpoint = Endpoint(config.url)
        self._link: Link | None = None
        self._child: _Child | None = None
        self._children = 0
        self._restart_at = 0.0
        self._failures = 0
        self._was_ready = False
        self._signals = 0
        self._kill_at: float | None = None
        self._expired: dict[str, str] = {}
        self._orphans: dict[str, bool] = {}
        """Batches whose child is dead -> whether they go back unharmed (True) or to be run alone."""
        self._down_since: float | None = None
        self._attempt = 0
        self._next_try = 0.0
        self._next_report = 0.0
        self._last = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._means = (0.0, 0.0, 0.0, 0.0)

    # --- the loop ---

    def run(self) -> int:
        """Work until told to stop; return the exit code."""
        with self._wake_up_on_signals() as wake:
            code = self._start(wake)
            if code is not None:
                return code
            next_renewal = 0.0
            while True:
                now = time.monotonic()
                code = self._look_after_child(now)
                if code is not None:
                    self._say_goodbye()
                    return code
                due = self._orphans or now >= min(self._next_report, next_renewal)
                if due and now >= self._next_try:  # not a word to Redis says nothing about it
                    with self._redis():
                        if now >= next_renewal:
                            next_renewal = now + self._config.lease / 3
                            self._renew()
                        if now >= self._next_report:
                            self._next_report = now + REPORT_EVERY
                            self._report()
                        if (
                            self._orphans
                        ):  # last: at maxmemory it may fail for a while, and the others must not wait for it
                            self._hand_on()
                soon = (
                    self._kill_at is not None
                    or self._orphans
                    or (self._child is not None and not self._child.board.get("ready"))
                )
                timeout = 0.05 if soon else min(self._next_report, next_renewal) - time.monotonic()
                select.select([wake], [], [], max(0.01, min(timeout, REPORT_EVERY)))
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 512)

    @contextlib.contextmanager
    def _wake_up_on_signals(self) -> Iterator[int]:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

        def stop(number: int, _: object) -> None:
            self._signals += 1

        previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, stop),
            signal.SIGINT: signal.signal(signal.SIGINT, stop),
            signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None),
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it is
            previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, stop)
        try:
            yield read_fd
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(read_fd)
            os.close(write_fd)

    @contextlib.contextmanager
    def _redis(self) -> Iterator[None]:
        """Whatever Redis does, the parent goes on; an outage is logged once."""
        try:
            yield
        except BackendUnavailableError as error:
            if self._down_since is None:
                self._down_since = time.monotonic()
                log.warning("Redis is not available, trying again: %s", error)
            self._attempt += 1
            self._next_try = time.monotonic() + retry_delay(self._attempt, random.random)
        else:
            if self._down_since is not None:
                log.info("Redis is back", extra={"seconds": round(time.monotonic() - self._down_since, 1)})
            self._down_since, self._attempt = None, 0

    def _connected(self) -> Link:
        if self._link is None or self._link.broken:
            self._link = self._endpoint.link()
        return self._link

    # --- the start ---

    def _start(self, wake: int) -> int | None:
        """Register with the queue; an exit code if that ends it."""
        waiting = False
        attempt = 0
        while True:
            try:
                self._register()
            except BackendAuthError as error:
                log.error("%s", error)
                return EXIT_REDIS
            except RefusedStartError as error:
                log.error("%s", error)
                return EXIT_REFUSED
            except BackendUnavailableError as error:
                if not waiting:
                    log.warning("waiting for Redis: %s", error)
                waiting = True
                attempt += 1
                select.select([wake], [], [], retry_delay(attempt, random.random))
                if self._signals:
                    return EXIT_OK
            else:
                break
        policy = self._config.policy
        log.info(
            "worker %s serves queue %s of %s", self._config.name, self._config.queue, self._config.shown_url,
            extra={"model": self._config.model, "max_batch_size": policy.max_batch_size, "max_delay": policy.max_delay},
        )  # fmt: skip
        return None

    def _register(self) -> None:
        link = self._connected()
        self._check_eviction(link)
        policy = self._wanted.policy
        wanted = {
            "max_batch_size": policy.max_batch_size,
            "max_delay_us": int(policy.max_delay * 1e6),
            "capacity": policy.capacity,
            "capacity_bytes": policy.capacity_bytes,
        }
        reported = link.call(
            commands.report(self._keys, self._config.name, self._report_text("loading"), wanted)
        )
        for name, text in reported.others.items():
            other = json.loads(text).get("model")
            if other != self._config.model and not self._config.allow_mixed:
                link.call(commands.report(self._keys, self._config.name, ""))
                raise RefusedStartError(
                    f"worker {name} serves queue {self._config.queue!r} with --model {other}, this one has {self._config.model}: callers "
                    f"would get either's answers. Use another --queue, or --allow-mixed if they are the same to callers"
                )
        different = {
            name: (value, reported.config[name])
            for name, value in wanted.items()
            if reported.config.get(name, value) != value
        }
        for name, (mine, holds) in different.items():
            log.warning(
                "%s=%d holds for queue %s, set by a worker that is alive; not %d as given here",
                name,
                holds,
                self._keys.queue,
                mine,
            )
        if different:
            config = reported.config
            self._adopt(
                BatchPolicy(
                    max_batch_size=config["max_batch_size"],
                    max_delay=config["max_delay_us"] / 1e6,
                    capacity=config["capacity"],
                    capacity_bytes=config["capacity_bytes"],
                )
            )
        link.call(commands.touch_queue(self._keys, time.time()))

    def _adopt(self, policy: BatchPolicy) -> None:
        fields = WorkerConfig.load(self._wanted.dump())
        self._config = type(fields)(
            **{name: getattr(fields, name) for name in fields.__slots__} | {"policy": policy}
        )

    def _check_eviction(self, link: Link) -> None:
        try:
            info = link.call(commands.call(b"INFO", b"memory"))
        except (BackendAuthError, BackendUnavailableError) as error:
            if link.broken:
                raise
            log.warning(
                "cannot check that Redis does not evict keys (maxmemory-policy must be noeviction): %s", error
            )
            return
        fields = dict(line.split(":", 1) for line in info.decode().split("\r\n") if ":" in line)
        policy = fields.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise RefusedStartError(
                f"Redis at {self._endpoint.name} has maxmemory-policy {policy} and may evict requests: set it to noeviction"
            )

    # --- the child ---

    def _look_after_child(self, now: float) -> int | None:
        """Start, watch and end the child; an exit code once all is over."""
        child = self._child
        if child is None:
            if self._signals:
                return EXIT_OK if not self._orphans or self._down_since is not None else None
            if now >= self._restart_at:
                self._children += 1
                self._child = _Child(self._config, self._children)
            return None
        code = child.process.poll()
        if code is not None:
            return self._child_ended(child, code, now)
        if child.board.get("ready") and not self._was_ready:
            self._was_ready = True
            self._next_report = now  # whoever waits for this worker need not wait for a second
            log.info("ready")
        if self._signals and self._kill_at is None:
            log.info(
                "draining: no new batches, at most %g s for the one that runs", self._config.drain_timeout
            )
            self._kill_at = now + self._config.drain_timeout
            child.process.send_signal(signal.SIGTERM)
        elif self._kill_at is not None and (self._signals > 1 or now >= self._kill_at):
            log.warning("not done in time: the batch goes back to the queue")
            child.process.kill()
        running_since = child.board.get("run_started")
        if running_since and now - running_since > self._config.batch_timeout:
            log.error("a batch runs for more than %g s: the child is killed", self._config.batch_timeout)
            child.process.kill()
        elif child.stalled(now):
            log.error("the child makes no progress for %g s: it is killed", _STALLED)
            child.process.kill()
        return None

    def _child_ended(self, child: _Child, code: int, now: float) -> int | None:
        unharmed = self._kill_at is not None
        was_ready = bool(child.board.get("ready"))
        self._orphans.update(dict.fromkeys(held(child.board, self._config.name, child.number), unharmed))
        self._collect(child)
        child.close()
        self._child = None
        self._last = (0.0, 0.0, 0.0, 0.0, 0.0)
        if self._signals:
            return None
        if code == EXIT_MODEL and not self._was_ready:
            return EXIT_MODEL
        lived = now - child.started
        # One whose model was loaded has died of a request, or was killed: others wait behind it, and loading itself takes its time.
        self._failures = 0 if was_ready else self._failures + 1
        delay = 0.0 if self._failures <= 1 else min(30.0, 0.5 * 2 ** (self._failures - 2))
        self._restart_at = now + delay
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        log.error(
            "the child died (%s) after %.1f s; its batches are handed on, it is restarted in %g s",
            how,
            lived,
            delay,
        )
        return None

    # --- what it says to Redis ---

    def _renew(self) -> None:
        child = self._child
        mine = held(child.board, self._config.name, child.number) if child is not None else []
        expired = self._connected().call(commands.renew(self._keys, mine, int(self._config.lease * 1e6)))
        for batch, end in expired.items():
            if self._expired.get(batch) == end:  # seen at the last look as well
                log.warning("batch %s was left behind by a worker that has vanished", batch)
                self._recover(batch, end)
        self._expired = expired

    def _hand_on(self) -> None:
        """Hand on the batches of a child that is dead."""
        for batch, unharmed in list(self._orphans.items()):
            if unharmed:
                count = self._connected().call(commands.release(self._keys, batch))
                if count:
                    log.info("%d requests went back to the queue", count, extra={"batch": batch})
            else:
                self._recover(batch, "")
            del self._orphans[batch]

    def _recover(self, batch: str, seen_end: str) -> None:
        link = self._connected()
        recovered = link.call(
            commands.recover(
                self._keys,
                batch,
                seen_end=seen_end,
                dead_worker=worker_of(batch),
                lease_us=int(self._config.lease * 1e6),
            )
        )
        if recovered.outcome == "moved":
            log.warning(
                "%d requests are run again, one at a time", recovered.requests, extra={"batch": batch}
            )
        elif recovered.outcome == "dead":
            self._bury(link, batch, recovered)

    def _bury(self, link: Link, batch: str, recovered: commands.Recovered) -> None:
        """Answer a request that has killed its workers, and keep it as a dead letter."""
        reason = f"killed its worker {commands.MAX_SOLO_DEATHS} times while it ran alone"
        streams: dict[str, list[bytes]] = {}
        own: list[tuple[bytes, int, bytes]] = []
        letters = []
        for data in link.call(commands.fetch_batch(self._keys, batch)):
            letters.append(dead_letter(reason, data, recovered.head))
            try:
                request_id, reply = wire.read_address(data)
            except wire.BadRequestError:
                continue
            error = wire.encode_error(
                request_id, WorkerLostError(f"the request {reason}; it is in the dead letters")
            )
            if isinstance(reply, str):
                streams.setdefault(reply, []).append(error)
            else:
                own.append((request_id, reply, error))
            log.error("request %s is dead: it %s", request_id.hex(), reason)
        answers = Answers(streams, own, len(letters), len(letters))
        try:
            link.call(commands.bury(self._keys, batch, letters, answers))
        except OutOfMemory:  # the caller's answer before the letter
            link.call(commands.finish_at_maxmemory(self._keys, batch, answers))
            log.error("Redis is at maxmemory: no dead letter is kept", extra={"batch": batch})

    def _collect(self, child: _Child) -> None:
        """Bring the means that are reported up to date."""
        board = child.board
        current = (
            time.monotonic(),
            board.get("batches"),
            board.get("requests"),
            board.get("run_seconds"),
            board.get("wait_seconds"),
        )
        seconds, batches, requests, run, wait = (
            new - old for new, old in zip(current, self._last, strict=True)
        )
        if not self._last[0]:
            seconds = time.monotonic() - child.started
        if seconds >= REPORT_EVERY / 2:
            self._last = current
            size, mean_run, mean_wait, _ = self._means
            if batches:
                size, mean_run, mean_wait = requests / batches, run / batches, wait / batches
            self._means = (size, mean_run, mean_wait, requests / seconds)

    def _report_text(self, state: str) -> str:
        size, run, wait, rate = self._means
        return json.dumps(
            {
                "model": self._config.model,
                "host": self._config.name.rsplit("-", 2)[0],
                "state": state,
                "batch_size": round(size, 2),
                "run_seconds": round(run, 6),
                "wait_seconds": round(wait, 6),
                "rate": round(rate, 2),
            }
        )

    def _report(self) -> None:
        if self._child is not None:
            self._collect(self._child)
        state = (
            "draining"
            if self._signals
            else ("ready" if self._child and self._child.board.get("ready") else "loading")
        )
        link = self._connected()
        reported = link.call(commands.report(self._keys, self._config.name, self._report_text(state)))
        if not reported.config:  # Redis has lost it
            policy = self._config.policy
            config = {
                "max_batch_size": policy.max_batch_size,
                "max_delay_us": int(policy.max_delay * 1e6),
                "capacity": policy.capacity,
                "capacity_bytes": policy.capacity_bytes,
            }
            link.call(commands.report(self._keys, self._config.name, self._report_text(state), config))
            link.call(commands.touch_queue(self._keys, time.time()))

    def _say_goodbye(self) -> None:
        if self._down_since is not None:
            log.info("stopped, while Redis is not available")
            return
        with contextlib.suppress(BackendUnavailableError):
            link = self._connected()
            link.call(commands.report(self._keys, self._config.name, ""))
            link.call(commands.nudge(self._keys))
            link.close()
        log.info("stopped")
