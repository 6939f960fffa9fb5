"""What the calls of a ``Client`` take turns with: connections with a time limit, slots, and the pool that they lie in."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from batchq import commands
from batchq.chain import Chain
from batchq.commands import Call
from batchq.config import WORKER_ALIVE, ClientConfig
from batchq.errors import BackendAuthError, BackendUnavailableError, ClientClosedError
from batchq.keys import Keys
from batchq.requests import Ids, log, new_name, no_worker_hint
from batchq.store import CONNECT_TIMEOUT, Endpoint, Link, LinkLostError, OutOfMemory, retry_delay

T = TypeVar("T")

SILENCE: Final = 5.0
"""A connection that owes an answer for this many seconds counts as broken: a half-open socket says nothing."""


class TimedLink(Link):
    """A connection on which nothing waits without end: neither the handshake, nor an answer that stops halfway."""

    timed = True

    @classmethod
    def connect(cls, endpoint: Endpoint, seconds: float) -> TimedLink:
        """Open a connection within about that many seconds, and 5 at most; raises what ``Endpoint.link`` does."""
        connection = endpoint._make(False)
        limit = max(0.001, min(seconds, connection.socket_connect_timeout or CONNECT_TIMEOUT))
        connection.socket_connect_timeout = connection.socket_timeout = limit
        link = cls(connection, endpoint.name)
        link.open()
        return link

    def limit(self, until: float) -> None:
        """Have sends, and reads that get nothing, fail at this time."""
        sock = self._connection._sock
        if sock is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))


class Slot:
    """What one call at a time holds: a connection, a producer's name and chain, and where its reply stream was read to."""

    __slots__ = ("before", "chain", "cursor", "ids", "link", "name")

    def __init__(self) -> None:
        self.link: TimedLink | None = None
        self.name = new_name()
        self.chain = Chain()
        self.ids = Ids()
        self.cursor = b"0-0"
        self.before: list[bytes] = []
        """Commands of one answer each, of no interest, that go in front of the next ones."""

    @property
    def connected(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self.link is not None and not self.link.broken

    def ask(self, call: Call[T], until: float) -> T:
        """Carry a verb; without an answer by ``until`` the connection is closed, for one is on its way."""
        link = self.link
        assert link is not None  # noqa: S101 - callers connect first
        skip, payload = len(self.before), b"".join((*self.before, call.payload))
        self.before.clear()
        link.limit(until)
        link.send(payload, skip + call.answers)
        answers = self._read(link, skip + call.answers, until)
        if link.forgot_scripts(answers):
            link.limit(until)
            link.send(payload, skip + call.answers)
            answers = self._read(link, skip + call.answers, until)
        return link.parse(call, answers[skip:])

    @staticmethod
    def _read(link: TimedLink, count: int, until: float) -> list[Any]:
        answers = link.read(count - 1)
        if answers:  # the last one may be that of a command that waits
            link.limit(until)
        return answers + link.read(1)


class Pool:
    """A client's state in one process: its slots, and what its calls know together."""

    def __init__(self, config: ClientConfig, endpoint: Endpoint, max_connections: int) -> None:
        self.config = config
        self.keys = Keys(config.queue)
        self.endpoint = endpoint
        self.hint = ""
        """What there is to tell about a queue without a live worker, as of the last look, which was at ``looked_at``."""
        self.looked_at = 0.0
        self.touched_at = 0.0
        self._max = max_connections
        self._lock = threading.Lock()
        self._idle: list[Slot] = []
        self._used: set[Slot] = set()
        self._waiting: deque[SimpleQueue[Slot | None]] = deque()
        self._closed = threading.Event()

    def acquire(self, deadline: float, timeout: float) -> Slot:
        """Return a slot, connected or not; wait for one where all are in use."""
        with self._lock:
            self.check_open()
            if self._idle or len(self._used) < self._max:
                slot = self._idle.pop() if self._idle else Slot()
                self._used.add(slot)
                return slot
            ticket: SimpleQueue[Slot | None] = SimpleQueue()
            self._waiting.append(ticket)
        try:
            handed = ticket.get(timeout=max(0.001, deadline - time.monotonic()))
        except Empty:
            handed = self._withdraw(ticket)
            if handed is None and not self._closed.is_set():
                raise BackendUnavailableError(
                    f"all {self._max:,} connections of this client were in use for {timeout:g} s: "
                    f"raise max_connections, or use fewer threads"
                ) from None
        except BaseException:
            unused = self._withdraw(ticket)
            if unused is not None:
                self.release(unused)
            raise
        if handed is None:
            raise ClientClosedError("the client was closed")
        return handed

    def _withdraw(self, ticket: SimpleQueue[Slot | None]) -> Slot | None:
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return None
        return ticket.get()  # handed over at the last moment

    def release(self, slot: Slot) -> None:
        """Put a slot back, or hand it to the first who waits: one that only looked would always come too late."""
        with self._lock:
            self._used.discard(slot)
            if self._waiting:
                handed = slot if slot.connected else Slot()
                self._used.add(handed)
                self._waiting.popleft().put(handed)
                return
            if slot.connected and not self._closed.is_set():
                self._idle.append(slot)
                return
        if slot.link is not None:
            slot.link.close()

    def connect(self, slot: Slot, until: float) -> bool:
        """Connect a slot; False where it was."""
        if slot.connected:
            return False
        slot.before.clear()
        slot.cursor = b"0-0"
        slot.link = TimedLink.connect(self.endpoint, until - time.monotonic())
        try:
            self.check_open()  # close() may have missed this connection
        except ClientClosedError:
            slot.link.close()
            raise
        return True

    def check_open(self) -> None:
        """Raise ClientClosedError after ``close``."""
        if self._closed.is_set():
            raise ClientClosedError("the client was closed")

    def pause(self, seconds: float) -> None:
        """Sleep, but not past the closing of the client."""
        self._closed.wait(max(0.0, seconds))
        self.check_open()

    def carry(self, call: Call[T], timeout: float, *, fatal: bool = False) -> T:
        """Carry one verb on any slot; tried again until ``timeout`` where the connection breaks, unless ``fatal``."""
        deadline = time.monotonic() + timeout
        slot = self.acquire(deadline, timeout)
        attempt = 0
        try:
            while True:
                reused = slot.connected
                try:
                    self.connect(slot, deadline)
                    return slot.ask(call, min(deadline, time.monotonic() + SILENCE))
                except BackendUnavailableError as error:
                    self.check_open()
                    if reused and isinstance(error, LinkLostError) and time.monotonic() < deadline:
                        continue  # it may have broken long ago, while it lay idle
                    attempt += 1
                    delay = retry_delay(attempt, random.random)
                    last = fatal or isinstance(error, (BackendAuthError, OutOfMemory))
                    if last or time.monotonic() + delay >= deadline:
                        raise
                    self.pause(delay)
        finally:
            self.release(slot)

    def look(self, slot: Slot, until: float) -> str:
        """Find out whether anybody works on the queue; return Redis' record of the slot's last push."""
        self.looked_at = time.monotonic()
        health = slot.ask(commands.health(self.keys, slot.name), until)
        hint = ""
        if health.silent > WORKER_ALIVE:
            queues = slot.ask(commands.list_queues(), until)
            others = slot.ask(commands.live_workers(queues), until) if queues else {}
            hint = no_worker_hint(self.config.queue, others)
        if hint and not self.hint:
            log.warning("calls wait: %s", hint)
        self.hint = hint
        return health.stored

    @property
    def is_connected(self) -> bool:
        """Whether any connection is open."""
        with self._lock:
            return any(slot.connected for slot in (*self._idle, *self._used))

    def close(self) -> None:
        """Close the idle connections, and wake the threads that wait on the others; waits for nobody."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
            waiting, self._waiting = self._waiting, deque()
            used = [*self._used]
        for slot in idle:
            if slot.link is not None:
                slot.link.close()
        for ticket in waiting:
            ticket.put(None)
        for slot in used:
            if slot.link is not None:
                slot.link.abort()

    def discard(self) -> None:
        """Let go of the parent process' connections: closed here, not shut down, they live on there. Its lock may be held for ever."""
        for slot in (*self._idle, *self._used):
            if slot.link is not None:
                slot.link.close()
