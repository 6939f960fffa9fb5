"""Requests on their way through one process, and boxes: where they arrive once they have an outcome, in a thread or in an event loop.

A call is written once, as a coroutine that awaits nothing but its box. A LoopBox suspends it, as asyncio does; a ThreadBox blocks, so that
the coroutine never suspends, and ``run`` carries it out in the calling thread.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from batchq import codec
from batchq.errors import BatchqError, EncodeError, from_wire

T = TypeVar("T")


class ThreadBox:
    """For one thread that waits; anybody may ``put``."""

    __slots__ = ("_arrived", "empty", "put")

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = self._arrived.put
        self.empty = self._arrived.empty

    async def get(self, seconds: float) -> Any:
        """Return the next arrival, None after ``seconds``."""
        try:
            return self._arrived.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None


class LoopBox:
    """For one coroutine that waits; ``put`` is called in its event loop, ``deliver`` anywhere."""

    __slots__ = ("_arrived", "_waiter", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        """Add an arrival."""
        self._arrived.append(item)
        self._wake()

    def empty(self) -> bool:
        """Tell whether ``get`` would have to wait."""
        return not self._arrived

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self, seconds: float) -> Any:
        """Return the next arrival, None after ``seconds``."""
        if not self._arrived:
            self._waiter = self.loop.create_future()
            timer = self.loop.call_later(seconds, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        return self._arrived.popleft() if self._arrived else None


Box = ThreadBox | LoopBox


class Options(NamedTuple):
    """What a call gives beside its values. ``meta`` is packed, b'' for none."""

    lane: str
    batch_key: str | int | None = None
    cost: float | None = None
    meta: bytes = b""


@dataclass(slots=True, eq=False)
class Request:
    """One request, and a job as well, which has a ``job_id``.

    ``outcome``: the packed answer or an error; the first one stays. ``boxes``: those who wait for it. ``id``: 32 hex digits, for errors
    and the log. ``group``, ``cost``: as the caller gave them, None where the model may know better. ``meta``: packed.
    """

    id: str
    payload: bytes
    size: int
    lane: str
    enqueued: float
    deadline: float
    boxes: list[Box]
    group: str | int | None = None
    cost: float | None = None
    meta: bytes = b""
    job_id: str = ""
    ttl: float = 0.0
    pending: Any = None
    outcome: bytes | BatchqError | None = None

    def check(self) -> None:
        """Raise the outcome if it is an error, each time afresh: one instance raised by many callers would collect their tracebacks."""
        if isinstance(self.outcome, BatchqError):
            raise fresh(self.outcome)

    def answer(self, return_exceptions: bool = False) -> Any:
        """Return the answer, unpacked; raise (or return) the error. Not before there is an outcome."""
        try:
            self.check()
            try:
                return codec.unpack(self.outcome)  # type: ignore[arg-type] # check has raised all else
            except codec.DecodeError as error:
                raise EncodeError(f"the model's answer cannot be carried: {error}") from None
        except BatchqError as error:
            if return_exceptions:
                return error
            raise


def fresh(error: BatchqError) -> BatchqError:
    """Return the same error, to be raised once more."""
    return from_wire(error.code, error.message, error.request_id, getattr(error, "error_type", ""))


def deliver(posts: Iterable[tuple[Box, Any]]) -> None:
    """Put each item into its box, from any thread: one call a loop, however many items."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Box, Any]]] = {}
    for box, item in posts:
        if isinstance(box, LoopBox):
            by_loop.setdefault(box.loop, []).append((box, item))
        else:
            box.put(item)
    for loop, found in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, found)
        except RuntimeError:  # the loop is closed, and with it everybody who waited there
            continue


def _put_all(posts: list[tuple[Box, Any]]) -> None:
    for box, item in posts:
        box.put(item)


def run(call: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns whose boxes are ThreadBoxes."""
    try:
        call.send(None)
    except StopIteration as stop:
        return cast("T", stop.value)
    raise RuntimeError("a call on a ThreadBox was suspended")


def iterate(answers: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate over what an async generator yields whose boxes are ThreadBoxes."""
    try:
        while True:
            try:
                answer = run(answers.__anext__())
            except StopAsyncIteration:
                return
            yield answer
    finally:
        run(answers.aclose())
