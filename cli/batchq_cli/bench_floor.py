"""The floor that ``batchq bench`` compares with: plain redis-py that moves the same bytes, and nothing else.

No ids, no deadlines, no capacity, no leases, no msgpack: one list there, one list back, between two processes. RPUSH 32 and
LPOP 32 on either side, a command a round trip; a BLPOP where there is nothing to pop, so that nobody polls. One value at a
time it is a ping-pong of RPUSH and BLPOP.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import redis


def connect(url: str) -> Any:
    """Return a redis-py client that may wait for ever."""
    return redis.Redis.from_url(url, protocol=2, socket_timeout=None)


def exchange(client: Any, push_to: str, pop_from: str, batch: int, values: list[bytes]) -> list[bytes]:
    """Push a batch, then wait for one: up to ``batch`` values."""
    if values:
        client.rpush(push_to, *values)
    popped: list[bytes] | None = client.lpop(pop_from, batch) if batch > 1 else None
    return popped or [client.blpop(pop_from, 0)[1]]


def serve(url: str, name: str, batch: int) -> None:
    """Answer every value with itself, for ever."""
    client = connect(url)
    values: list[bytes] = []
    while True:
        values = exchange(client, f"{name}:replies", f"{name}:requests", batch, values)


class Caller:
    """Keeps a number of values outstanding against ``serve``."""

    def __init__(self, url: str, name: str, batch: int, payload: bytes) -> None:
        self._client = connect(url)
        self._name = name
        self._batch = batch
        self._payload = payload

    def run(self, outstanding: int, warm_up: float, seconds: float, mark: Callable[[], None]) -> list[float]:
        """Exchange values for ``seconds`` and return each one's latency.

        ``mark()`` is called when the time begins and when it ends.
        """
        batch = min(self._batch, outstanding)
        sent: deque[tuple[float, int]] = deque()
        requests, replies = f"{self._name}:requests", f"{self._name}:replies"
        latencies: list[float] = []
        exchange(
            self._client, requests, replies, batch, [self._payload]
        )  # the other side may still be starting
        left = outstanding - batch
        while left > 0:
            self._client.rpush(requests, *[self._payload] * min(batch, left))
            sent.append((time.perf_counter(), min(batch, left)))
            left -= batch
        values = [self._payload] * batch
        start = time.perf_counter() + warm_up
        end = start + seconds
        marked = False
        while True:
            now = time.perf_counter()
            if not marked and now >= start:
                latencies.clear()
                mark()
                marked = True
            if now >= end:
                break
            sent.append((now, len(values)))
            values = exchange(self._client, requests, replies, batch, values)
            now = time.perf_counter()
            count = len(values)
            while count:
                pushed, size = sent.popleft()
                part = min(count, size)
                latencies += [now - pushed] * part
                count -= part
                if part < size:
                    sent.appendleft((pushed, size - part))
        mark()
        left = outstanding - len(values)
        while left:
            left -= len(exchange(self._client, "", replies, batch, []))
        return latencies

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


if __name__ == "__main__":
    serve(os.environ["BATCHQ_REDIS_URL"], sys.argv[1], int(sys.argv[2]))
