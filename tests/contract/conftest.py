"""A queue on fakeredis, then on a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fakeredis
import pytest

from batchq import commands
from batchq.store import Endpoint, Link
from tests.contract.queues import KNOWN, Queue, count


@pytest.fixture
def fake_endpoint() -> Endpoint:
    server = fakeredis.FakeServer(version=(7,))
    return Endpoint(None, fakeredis.FakeRedis(server=server))


@pytest.fixture(params=["fakeredis", "redis"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """A connection to fakeredis, then one to a real server."""
    if request.param == "fakeredis":
        endpoint = request.getfixturevalue("fake_endpoint")
    else:
        endpoint = Endpoint(request.getfixturevalue("redis_url"))
    link = endpoint.link()
    yield link
    link.close()


@pytest.fixture
def queue(link: Link) -> Iterator[Queue]:
    """A queue that no other test uses."""
    queue = Queue(link, f"t{next(count)}")
    yield queue
    unknown = {name.partition("@")[0].partition(":")[0] for name in queue.dump()} - KNOWN
    assert not unknown, f"keys that batchq/keys.py does not list: {unknown}"


@pytest.fixture
def real_queue(redis_url: str) -> Iterator[Queue]:
    """A queue on a real server."""
    link = Endpoint(redis_url).link()
    yield Queue(link, f"t{next(count)}")
    link.close()


@pytest.fixture
def full_memory(redis_url: str) -> Iterator[Callable[[], None]]:
    """A function that puts the server at maxmemory; undone after the test."""
    admin = Endpoint(redis_url).link()

    def fill() -> None:
        admin.call(commands.call(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction"))
        admin.call(commands.call(b"CONFIG", b"SET", b"maxmemory", b"1"))

    yield fill
    admin.call(commands.call(b"CONFIG", b"SET", b"maxmemory", b"0"))
    admin.close()
