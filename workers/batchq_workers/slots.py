"""A slot: one place for a child on a device, which is filled again whenever its child has died."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from batchq_workers.board import Board, held
from batchq_workers.child import EXIT_DEVICE
from batchq_workers.config import WorkerConfig
from batchq_workers.report import Counts

log = logging.getLogger("batchq.worker")

# Not -m: that would put the working directory first on sys.path, and a user's redis.py in place of ours.
_CHILD: Final = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from batchq_workers.child import main; main()"
)

_STALLED: Final = 60.0
"""A child that neither runs a batch, nor asks for one, nor makes a round for this many seconds is killed."""
_LONGEST_PAUSE: Final = 30.0


def pause_after(failures: int) -> float:
    """Return how many seconds to wait after so many failures in a row: none after the first, then 0.5, 1, 2 … 30."""
    return 0.0 if failures <= 1 else min(_LONGEST_PAUSE, 0.5 * 2 ** min(failures - 2, 10))


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child has ended.

    ``code``: its exit code, negative for a signal. ``lived``: seconds. ``loaded``: whether it ever was ready. ``held``: all batches that
    it may have held. ``unharmed``: they go back to the queue as if nothing had been; else one of their requests may be what has killed it.
    """

    code: int
    lived: float
    loaded: bool
    held: list[str]
    unharmed: bool

    @property
    def how(self) -> str:
        """The code, for a log."""
        return f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"


class _Child:
    """A child process and the board that it shares."""

    def __init__(
        self, config: WorkerConfig, number: int, device: str, environment: Mapping[str, str]
    ) -> None:
        self.config = config
        self.number = number
        self.started = time.monotonic()
        self.told_to_stop = False
        self.handed_back = False
        self.counted = Counts()
        self.board, fd = Board.create()
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-c", _CHILD],
                stdin=subprocess.PIPE,
                pass_fds=[fd],
                env=environment,
            )
        finally:
            os.close(fd)
        stdin = self.process.stdin
        if stdin is not None:
            line = json.dumps({"config": config.dump(), "child": number, "board": fd, "device": device})
            with contextlib.suppress(BrokenPipeError):  # it died at once: its exit code says more
                stdin.write(line.encode() + b"\n")
                stdin.flush()
        self._progress: tuple[float, ...] = ()
        self._progress_seen = self.started

    def stalled(self, now: float) -> bool:
        """Tell whether it makes no progress though no batch runs."""
        board = self.board
        progress = tuple(map(board.get, ("round", "issued", "batches")))
        if progress != self._progress or self.busy_since() or not board.get("ready"):
            self._progress, self._progress_seen = progress, now
        return now - self._progress_seen > _STALLED

    def busy_since(self) -> float:
        """Return since when it has been busy with one batch, on either of its threads; 0 while with none."""
        return min(filter(None, map(self.board.get, ("run_started", "beside_started"))), default=0.0)

    def counts(self) -> Counts:
        """Return what it has done since the last call."""
        before, self.counted = self.counted, Counts(*map(self.board.get, Counts._fields))
        return self.counted.since(before)

    def held(self) -> list[str]:
        """Return all batches that it may hold."""
        return held(self.board, self.config.name, self.number)

    def close(self) -> None:
        """Let go of what a child that has ended has left."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.board.close()


class Slot:
    """One place for a child on ``device``, as the user calls it; ``environment`` is the child's."""

    def __init__(self, device: str, environment: Mapping[str, str]) -> None:
        self.device = device
        self.number = 0
        """Of the child that it has, or had last; 0: it never had one."""
        self.restart_at = 0.0
        self.failures = 0
        """Children in a row that have died before they were ready."""
        self._lost = 0
        """Children in a row that have lost their device before they had run one batch."""
        self._environment = environment
        self._child: _Child | None = None
        self._rest = Counts()

    @property
    def empty(self) -> bool:
        """Whether it has no child."""
        return self._child is None

    @property
    def state(self) -> str:
        """``loading`` until its first child is ready, then ``ready``, ``restarting`` while it has none, and ``draining``."""
        if self._child is None:
            return "restarting" if self.number else "loading"
        if self._child.told_to_stop:
            return "draining"
        return "ready" if self._child.board.get("ready") else "loading"

    def start(self, config: WorkerConfig, number: int) -> None:
        """Start a child; its number is unique in this worker."""
        self.number = number
        self._child = _Child(config, number, self.device, self._environment)

    def watch(self, now: float) -> Ended | None:
        """Kill a child that is past its limits; tell how it has ended once it has, and when the next may start."""
        child = self._child
        if child is None:
            return None
        code = child.process.poll()
        if code is None:
            self._enforce_limits(child, now)
            return None
        loaded = bool(child.board.get("ready"))
        batches = child.held()
        self._rest = self._rest.plus(child.counts())
        # One whose model was loaded has died of a request, or was killed: others wait behind it, and loading itself takes its time.
        self.failures = 0 if loaded else self.failures + 1
        self._lost = self._lost + 1 if code == EXIT_DEVICE and not child.counted.batches else 0
        self.restart_at = now + pause_after(self.failures + self._lost)
        child.close()
        self._child = None
        unharmed = child.handed_back or (child.told_to_stop and code in (0, -signal.SIGTERM))
        return Ended(code, now - child.started, loaded, batches, unharmed)

    def _enforce_limits(self, child: _Child, now: float) -> None:
        running_since = child.busy_since()
        if running_since and now - running_since > child.config.batch_timeout:
            log.error(
                "a batch runs for more than %g s: the child is killed",
                child.config.batch_timeout,
                extra=self.label,
            )
            child.process.kill()
        elif child.stalled(now):
            log.error("the child makes no progress for %g s: it is killed", _STALLED, extra=self.label)
            child.process.kill()

    @property
    def label(self) -> dict[str, object]:
        """What tells this slot's lines in the log from others'."""
        return {"child": self.number, "device": self.device}

    def drain(self) -> None:
        """Tell the child to take no more and to end after what it runs."""
        if self._child is not None and not self._child.told_to_stop:
            self._child.told_to_stop = True
            self._child.process.send_signal(signal.SIGTERM)

    def hand_back(self) -> bool:
        """Kill the child for no fault of its requests: they go back to the queue as they are. True if it was not being killed yet."""
        child = self._child
        if child is None or child.handed_back:
            return False
        child.handed_back = True
        child.process.kill()
        return True

    def held(self) -> list[str]:
        """Return all batches that the child may hold now."""
        return self._child.held() if self._child is not None else []

    def counts(self) -> Counts:
        """Return what its children have done since the last call."""
        counts, self._rest = self._rest, Counts()
        return counts.plus(self._child.counts()) if self._child is not None else counts
