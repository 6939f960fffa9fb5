"""``@batched``: makes of a function of a list a function of one value, whose concurrent calls run as batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from batchq.boxes import LoopBox
from batchq.config import (
    DEFAULT_CAPACITY,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_DELAY,
    DEFAULT_TIMEOUT,
    Priority,
)
from batchq.errors import ConfigError
from batchq.local import LocalClient
from batchq.stats import QueueStats

V = TypeVar("V")
A = TypeVar("A")


class Batched(Generic[V, A]):
    """A function of one value, made by ``@batched`` from a function of a list."""

    def __init__(self, function: Callable[[list[V]], Sequence[A]], **settings: Any) -> None:
        _check_batchable(function)

        def load() -> Callable[[list[V]], Sequence[A]]:
            return function

        self._client = LocalClient(load, **settings)
        functools.update_wrapper(self, function)

    def __call__(
        self,
        value: V,
        *,
        timeout: float | None = None,
        priority: Priority = "normal",
        batch_key: str | int | None = None,
        cost: float | None = None,
    ) -> A:
        """Return the answer to one value; blocks the calling thread. See ``LocalClient.predict``."""
        return cast(
            "A",
            self._client.predict(value, timeout=timeout, priority=priority, batch_key=batch_key, cost=cost),
        )

    async def aio(
        self,
        value: V,
        *,
        timeout: float | None = None,
        priority: Priority = "normal",
        batch_key: str | int | None = None,
        cost: float | None = None,
    ) -> A:
        """Return the answer to one value; for asyncio."""
        extras = (priority, batch_key, cost, None)
        return cast("A", (await self._client._predict_many(LoopBox(), [value], timeout, False, *extras))[0])

    def map(
        self,
        values: Iterable[V],
        *,
        concurrency: int = 256,
        priority: Priority = "low",
        batch_key: str | int | None = None,
        cost: float | None = None,
        ordered: bool = True,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> Iterator[A]:
        """Return an iterator over the answers to any number of values; see ``LocalClient.map``."""
        return self._client.map(
            values,
            concurrency=concurrency,
            priority=priority,
            batch_key=batch_key,
            cost=cost,
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
    *wrong: object,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    max_delay: float = DEFAULT_MAX_DELAY,
    max_batch_cost: int | None = None,
    padded: bool = False,
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
    if wrong:
        raise ConfigError("@batched takes its settings in parentheses, also where there are none: @batched()")
    return functools.partial(
        Batched,
        max_batch_size=max_batch_size,
        max_delay=max_delay,
        max_batch_cost=max_batch_cost,
        padded=padded,
        capacity=capacity,
        timeout=timeout,
    )


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
