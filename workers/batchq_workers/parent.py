"""The parent: supervises the children that run the model, and speaks for them to Redis.

It renews the leases of their batches, so that a model that holds the GIL cannot lose them; reports that the worker is alive; ends a
batch that runs too long; hands a dead child's batches on at once, and those of machines that have vanished once their leases are over.
It imports no model and no torch, and opens no GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from batchq import commands
from batchq.errors import BackendAuthError, BackendUnavailableError, ConfigError
from batchq.keys import Keys
from batchq.store import Endpoint, Link, retry_delay
from batchq_workers import recovery
from batchq_workers.child import EXIT_DEVICE, EXIT_MODEL
from batchq_workers.config import WorkerConfig
from batchq_workers.cpus import usable_cpus
from batchq_workers.devices import child_environment, find
from batchq_workers.joining import RefusedStartError, join, queue_config
from batchq_workers.report import REPORT_EVERY, Means, report_text
from batchq_workers.slots import Ended, Slot

__all__ = ["Parent", "RefusedStartError"]

log = logging.getLogger("batchq.worker")

EXIT_OK: Final = 0
EXIT_USAGE: Final = 2
"""A device that was asked for does not exist."""
EXIT_REDIS: Final = 4
"""Redis refuses the password or the user."""
EXIT_REFUSED: Final = 5
"""This worker must not join: another model on the queue, or a Redis that may evict keys."""

LOAD_TRIES: Final = 5
"""Loads in a row that fail, in every slot, before a worker that was ready once gives up."""


class Parent:
    """Runs ``batchq worker``."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._keys = Keys(config.queue)
        self._endpoint = Endpoint(config.url)
        self._link: Link | None = None
        self._slots: list[Slot] = []
        self._states: list[str] = []
        """Of the slots, as they were last seen."""
        self._children = 0
        self._was_ready = False
        self._means = Means(time.monotonic())
        self._signals = 0
        self._code = EXIT_OK
        """Above 0: the worker ends of itself, with this exit code."""
        self._kill_at: float | None = None
        self._expired: dict[str, str] = {}
        self._orphans: dict[str, bool] = {}
        """Batches whose child is dead -> whether they go back unharmed (True) or to be run alone."""
        self._down_since: float | None = None
        self._attempt = 0
        self._next_try = 0.0
        self._next_report = 0.0
        self._next_renewal = 0.0

    # --- the loop ---

    def run(self) -> int:
        """Work until told to stop; return the exit code."""
        with self._wake_up_on_signals() as wake:
            code = self._start(wake)
            if code is not None:
                return code
            while True:
                now = time.monotonic()
                if self._look_after_children(now):
                    self._say_goodbye()
                    return self._code
                due = self._orphans or now >= min(self._next_report, self._next_renewal)
                if due and now >= self._next_try:  # not a word to Redis says nothing about it
                    with self._redis():
                        if now >= self._next_renewal:
                            self._next_renewal = now + self._config.lease / 3
                            self._renew()
                        if now >= self._next_report:
                            self._next_report = now + REPORT_EVERY
                            self._report()
                        self._hand_on()  # last: at maxmemory it may fail for a while, and the others must not wait for it
                select.select([wake], [], [], max(0.01, min(self._pause(), REPORT_EVERY)))
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 512)

    def _pause(self) -> float:
        """Return for how many seconds nothing is to be done, unless a signal comes."""
        if self._kill_at is not None or self._orphans or "loading" in self._states:
            return 0.05
        speak_at = max(self._next_try, min(self._next_report, self._next_renewal))
        return min([speak_at, *(slot.restart_at for slot in self._slots if slot.empty)]) - time.monotonic()

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
        """Find the devices and join the queue; an exit code if that ends it."""
        try:
            self._make_slots(find(self._config.device, os.environ, lambda: self._signals > 0))
            self._join(wake)
        except ConfigError as error:
            log.error("%s", error)
            return EXIT_USAGE
        except BackendAuthError as error:
            log.error("%s", error)
            return EXIT_REDIS
        except RefusedStartError as error:
            log.error("%s", error)
            return EXIT_REFUSED
        if self._signals:
            return EXIT_OK
        policy = self._config.policy
        log.info(
            "worker %s serves queue %s of %s", self._config.name, self._config.queue, self._config.shown_url,
            extra={
                "model": self._config.model, "devices": ",".join(slot.device for slot in self._slots),
                "max_batch_size": policy.max_batch_size, "max_delay": policy.max_delay,
                "max_batch_cost": policy.max_batch_cost, "padded": policy.padded,
            },
        )  # fmt: skip
        return None

    def _make_slots(self, devices: Sequence[str]) -> None:
        names = [name for name in devices for _ in range(self._config.processes_per_device)]
        threads = max(1, usable_cpus() // max(1, len(names)))  # children must not fight for the CPUs
        self._slots = [Slot(name, child_environment(name, devices, threads, os.environ)) for name in names]
        self._states = [slot.state for slot in self._slots]

    def _join(self, wake: int) -> None:
        """Join the queue as soon as Redis is there, or return once told to stop."""
        attempt = 0
        while not self._signals:
            try:
                link = self._connected()
                policy = join(link, self._keys, self._config, self._report_text(), self._endpoint.name)
                link.call(commands.touch_queue(self._keys, time.time()))
            except BackendAuthError:
                raise
            except BackendUnavailableError as error:
                if not attempt:
                    log.warning("waiting for Redis: %s", error)
                attempt += 1
                select.select([wake], [], [], retry_delay(attempt, random.random))
            else:
                self._config = replace(self._config, policy=policy)
                return

    # --- the children ---

    @property
    def _ending(self) -> bool:
        return bool(self._signals or self._code)

    def _look_after_children(self, now: float) -> bool:
        """Start, watch and end the children; True once all is over."""
        if self._ending:
            self._drain(now)
        for slot in self._slots:
            if not slot.empty:
                ended = slot.watch(now)
                if ended is not None:
                    self._child_ended(slot, ended)
            elif not self._ending and now >= slot.restart_at:
                self._children += 1
                slot.start(self._config, self._children)
        self._note_states(now)
        if not self._ending or not all(slot.empty for slot in self._slots):
            return False
        return not self._orphans or self._down_since is not None

    def _drain(self, now: float) -> None:
        if self._kill_at is None:
            if not self._code:
                log.info(
                    "draining: no new batches, at most %g s for those that run", self._config.drain_timeout
                )
            self._kill_at = now + self._config.drain_timeout
            for slot in self._slots:
                slot.drain()
        if self._code or self._signals > 1 or now >= self._kill_at:
            for slot in self._slots:
                if slot.hand_back() and not self._code:
                    log.warning("not done in time: what runs goes back to the queue", extra=slot.label)

    def _note_states(self, now: float) -> None:
        """Tell the log and Redis of what has changed: whoever waits for this worker need not wait for the next report."""
        states = [slot.state for slot in self._slots]
        if states == self._states:
            return
        for slot, before, state in zip(self._slots, self._states, states, strict=True):
            if state == "ready" and before != "ready":
                self._was_ready = True
                log.info("ready", extra=slot.label)
        self._states, self._next_report = states, now

    def _child_ended(self, slot: Slot, ended: Ended) -> None:
        self._orphans.update(dict.fromkeys(ended.held, ended.unharmed))
        self._was_ready |= ended.loaded or any(slot.state == "ready" for slot in self._slots)
        if ended.unharmed or self._code:
            return
        if ended.code == EXIT_MODEL and not self._was_ready:  # it has said why
            self._code = EXIT_MODEL
            return
        what = "the child has lost its device" if ended.code == EXIT_DEVICE else "the child died"
        pause = max(0.0, slot.restart_at - time.monotonic())
        log.error(
            "%s (%s) after %.1f s; its batches are handed on%s", what, ended.how, ended.lived,
            "" if self._signals else f", it is restarted in {pause:.2g} s", extra=slot.label,
        )  # fmt: skip
        if all(slot.failures >= LOAD_TRIES for slot in self._slots) and not self._signals:
            log.error("loading the model has failed %d times in a row: the worker ends", slot.failures)
            self._code = EXIT_MODEL

    # --- what it says to Redis ---

    def _renew(self) -> None:
        mine = [batch for slot in self._slots for batch in slot.held()]
        link = self._connected()
        expired = link.call(commands.renew(self._keys, mine, int(self._config.lease * 1e6)))
        for batch, end in expired.items():
            if self._expired.get(batch) == end:  # seen at the last look as well
                log.warning("batch %s was left behind by a worker that has vanished", batch)
                recovery.recover(link, self._keys, batch, lease=self._config.lease, seen_end=end)
        self._expired = expired

    def _hand_on(self) -> None:
        """Hand on the batches of children that are dead."""
        for batch, unharmed in list(self._orphans.items()):
            if unharmed:
                recovery.release(self._connected(), self._keys, batch)
            else:
                recovery.recover(self._connected(), self._keys, batch, lease=self._config.lease)
            del self._orphans[batch]

    def _report_text(self) -> str:
        """Return a report: the worker is ready while one child is."""
        state = "draining" if self._ending else "ready" if "ready" in self._states else "loading"
        return report_text(
            model=self._config.model,
            host=self._config.name.rsplit("-", 2)[0],
            state=state,
            means=self._means,
            children=[
                (slot.number, slot.device, "ended" if self._ending and slot.empty else slot.state)
                for slot in self._slots
            ],
        )

    def _report(self) -> None:
        self._means.add([slot.counts() for slot in self._slots], time.monotonic())
        link = self._connected()
        text = self._report_text()
        reported = link.call(commands.report(self._keys, self._config.name, text))
        if not reported.config:  # Redis has lost it
            config = queue_config(self._config.policy)
            link.call(commands.report(self._keys, self._config.name, text, config))
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
