"""One short conversation with Redis, in limited time, though Redis may accept it and say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from batchq.config import check_timeout, resolve_url
from batchq.errors import BackendUnavailableError
from batchq.store import AsyncLink, Endpoint

T = TypeVar("T")

DEFAULT_WAIT = 5.0


def ask(url: str, timeout: float, work: Callable[[AsyncLink], Awaitable[T]]) -> T:
    """Open a connection, let ``work`` use it, close it; return what ``work`` returned.

    Raises BackendUnavailableError where that takes more than ``timeout`` seconds.
    """
    endpoint = Endpoint(resolve_url(url))
    seconds = check_timeout(timeout, DEFAULT_WAIT)

    async def talk() -> T:
        link = await endpoint.async_link()
        try:
            return await work(link)
        finally:
            await link.close()

    async def in_time() -> T:
        try:
            return await asyncio.wait_for(talk(), seconds)
        except asyncio.TimeoutError:
            raise BackendUnavailableError(
                f"Redis at {endpoint.name} has not answered within {seconds:g} s"
            ) from None

    return asyncio.run(in_time())
