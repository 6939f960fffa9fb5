"""The only place that talks to redis-py: connections, sync and async, and what their errors mean.

A ``Link`` is one connection that carries ``commands.Call``s. It uses redis-py's connections (URLs, TLS, sockets, credentials, handshake)
and none of what redis-py builds on them: its clients repeat commands by themselves (one RPUSH, four elements), cap their pools and time
out reads after 5 s. Nothing is repeated here but what Redis says that it has not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from batchq import commands
from batchq.commands import Call
from batchq.config import mask_url
from batchq.errors import BackendAuthError, BackendUnavailableError, BatchqError, ConfigError

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 5.0
ANSWER_TIMEOUT: Final = 5.0
SLOWEST: Final = 1_000_000
"""Bytes a second that a connection carries at least: a large payload may take longer than an answer."""


class LinkLostError(BackendUnavailableError):
    """The connection broke: whether Redis has run what was sent is not known."""


class OutOfMemory(BackendUnavailableError):  # noqa: N818 - the name of the condition
    """Redis is at maxmemory and refused a write; nothing was changed."""


class RefusedError(BackendUnavailableError):
    """Redis refused a command for now (LOADING, READONLY, NOREPLICAS, MISCONF …); nothing was changed."""


# the last is what Redis 7 says to a client that has not logged in and sends a command of many parts
_NOT_ALLOWED = ("WRONGPASS", "NOAUTH", "NOPERM", "Protocol error: unauthenticated")
_FOR_NOW = (
    "LOADING",
    "READONLY",
    "NOREPLICAS",
    "MISCONF",
    "BUSY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "UNBLOCKED",
    "ERR max number",
)


class Endpoint:
    """Where Redis is: makes connections, sync or async, from a URL or from a redis-py client of the user's own."""

    def __init__(self, url: str | None, client: Any = None) -> None:
        if client is not None:
            pool = getattr(client, "connection_pool", None)
            if pool is None:
                raise ConfigError(f"redis={client!r}: allowed is a redis.Redis or a redis.asyncio.Redis")
            self._is_async: bool | None = isinstance(pool, redis.asyncio.ConnectionPool)
            self._class: Any = pool.connection_class
            self._kwargs = dict(pool.connection_kwargs)
            host = self._kwargs.get("host") or self._kwargs.get("path") or "the given client"
            self.name = f"{host}:{self._kwargs.get('port', '')}".rstrip(":")
        else:
            self._is_async = None
            self._url = url or ""
            self.name = mask_url(self._url)
            self._parsed: dict[bool, tuple[Any, dict[str, Any]]] = {}
            for is_async, module in ((False, redis.connection), (True, redis.asyncio.connection)):
                try:
                    kwargs = module.parse_url(self._url)
                    for name in ("max_connections", "timeout"):  # of a pool, which we have none of
                        kwargs.pop(name, None)
                except ValueError as error:
                    raise ConfigError(f"url={self.name!r}: {error}") from None
                self._parsed[is_async] = (kwargs.pop("connection_class", module.Connection), kwargs)

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r})"

    def _make(self, want_async: bool) -> Any:
        if self._is_async is None:
            connection_class, kwargs = self._parsed[want_async]
        elif self._is_async is not want_async:
            need = "redis.asyncio.Redis" if want_async else "redis.Redis"
            raise ConfigError(
                f"redis=: this client needs a {need}; AsyncClient takes the asyncio kind, Client the other"
            )
        else:
            connection_class, kwargs = self._class, self._kwargs
        retry = AsyncRetry(NoBackoff(), 0) if want_async else Retry(NoBackoff(), 0)
        kwargs = {
            **kwargs,
            "retry": retry,
            "retry_on_error": [],
            "health_check_interval": 0,
            # a sync connection that owes an answer for longer is half-open; the asyncio client has a watch of its own
            "socket_timeout": None if want_async else ANSWER_TIMEOUT,
            "socket_connect_timeout": kwargs.get("socket_connect_timeout") or CONNECT_TIMEOUT,
            "protocol": 2,
            "decode_responses": False,
        }
        if not issubclass(
            connection_class, (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection)
        ):
            kwargs.setdefault("socket_keepalive", True)
        else:
            kwargs.pop("socket_keepalive", None)
        for name in (
            "maint_notifications_config",
            "maint_notifications_pool_handler",
            "oss_cluster_maint_notifications_handler",
        ):
            kwargs.pop(name, None)
        return connection_class(**kwargs)

    def link(self) -> Link:
        """Open a connection; raise BackendUnavailableError or BackendAuthError."""
        link = Link(self._make(False), self.name)
        link.open()
        return link

    async def async_link(self) -> AsyncLink:
        """Open an asyncio connection; raise BackendUnavailableError or BackendAuthError."""
        link = AsyncLink(self._make(True), self.name)
        await link.open()
        return link


def explain(error: BaseException, name: str) -> BatchqError:
    """Return batchq's error for one of redis-py's or the system's."""
    text = str(error) or type(error).__name__
    if isinstance(error, (AuthenticationError, AuthorizationError, NoPermissionError)) or text.startswith(
        _NOT_ALLOWED
    ):
        return BackendAuthError(f"Redis at {name} refuses this user: {text}")
    if isinstance(error, OutOfMemoryError) or text.startswith("OOM"):
        return OutOfMemory(f"Redis at {name} is at maxmemory: {text}")
    if isinstance(error, ResponseError) or text.startswith(_FOR_NOW):
        return RefusedError(f"Redis at {name} refuses: {text}")
    return LinkLostError(f"Redis at {name} cannot be reached: {text}")


def _is_no_script(answers: list[Any]) -> bool:
    """Tell whether Redis did not know a script; it has then run nothing that counts (docs/protocol.md)."""
    return any(
        isinstance(answer, NoScriptError)
        or (isinstance(answer, list) and any(isinstance(item, NoScriptError) for item in answer))
        for answer in answers
    )


class Link:
    """One connection of a thread. After an error other than a refusal it is broken, and ``broken`` is True: open another."""

    timed = False
    """Whether a subclass limits the time of each send and read."""

    def __init__(self, connection: Any, name: str) -> None:
        self._connection = connection
        self._name = name
        self.broken = True
        self._owed = 0

    def open(self) -> None:
        """Connect and make sure that Redis knows the scripts."""
        with self._errors():
            self._connection.connect()
            self.broken = False
        try:
            self._load_missing()
        except BaseException:
            self.close()
            raise

    def _load_missing(self) -> None:
        missing = self._run(commands.scripts_known())
        if missing:
            self._run(commands.load_scripts(missing))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            self.close()
            raise explain(error, self._name) from error
        except BaseException:
            self.close()  # an answer may be on its way that nobody will read
            raise

    def client_id(self) -> int:
        """Ask Redis for the id of this connection."""
        return int(self.call(commands.call(b"CLIENT", b"ID")))

    def send(self, payload: bytes, answers: int) -> None:
        """Send packed commands, and note how many answers are to be read before anything else is sent."""
        if self._owed:  # somebody gave up between sending and reading: what comes next would be taken for an answer to this
            self.close()
        if self.broken:
            raise LinkLostError(f"the connection to Redis at {self._name} is closed")
        self._owed = answers
        with self._errors():
            # Python's limit is for the whole of a send; fakeredis' socket has none
            settimeout: Any = getattr(self._connection._sock, "settimeout", None)
            slow = len(payload) > SLOWEST and not self.timed and settimeout is not None
            if slow:
                settimeout(ANSWER_TIMEOUT + len(payload) / SLOWEST)
            self._connection.send_packed_command([payload], check_health=False)
            if slow:
                settimeout(ANSWER_TIMEOUT)

    def read(self, count: int) -> list[Any]:
        """Read that many answers; an answer that is an error is in the list."""
        answers: list[Any] = []
        read = self._connection.read_response
        with self._errors():
            for _ in range(count):
                try:
                    answers.append(read(disable_decoding=True, disconnect_on_error=False))
                except ResponseError as error:
                    answers.append(error)
                self._owed -= 1
        return answers

    def wait(self, seconds: float | None, *others: int) -> bool:
        """Wait until an answer is there, at most that long; True if it is. Readable ``others`` (file descriptors) end the waiting too."""
        if self.broken:
            return True
        with self._errors():
            if self._connection.can_read(0):
                return True
            sock = self._connection._sock
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            for fd in others:
                poll.register(fd, select.POLLIN)
            ready = poll.poll(None if seconds is None else max(0.0, seconds) * 1000)
        return any(fd == sock.fileno() for fd, _ in ready)

    def _run(self, call: Call[T]) -> T:
        self.send(call.payload, call.answers)
        return self.parse(call, self.read(call.answers))

    def parse(self, call: Call[T], answers: list[Any]) -> T:
        """Return the verb's result; raise batchq's error for Redis'."""
        try:
            return call.parse(answers)
        except (RedisError, OSError) as error:
            raise explain(error, self._name) from error

    def call(self, call: Call[T]) -> T:
        """Carry one verb. A script that Redis has forgotten is loaded, and the verb sent again."""
        self.send(call.payload, call.answers)
        answers = self.read(call.answers)
        if _is_no_script(answers):
            self._load_missing()
            self.send(call.payload, call.answers)
            answers = self.read(call.answers)
        return self.parse(call, answers)

    def forgot_scripts(self, answers: list[Any]) -> bool:
        """Load the scripts if an answer says that Redis has forgotten them; True if so."""
        if not _is_no_script(answers):
            return False
        self._load_missing()
        return True

    def close(self) -> None:
        """Close the connection, whatever was on its way."""
        self.broken = True
        with contextlib.suppress(Exception):
            self._connection.disconnect()

    def abort(self) -> None:
        """Have a thread that waits on this connection fail at once; for other threads."""
        sock = getattr(self._connection, "_sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class AsyncLink:
    """One asyncio connection; the twin of ``Link``. Its calls are not to be cancelled: cancelling one closes the connection."""

    def __init__(self, connection: Any, name: str) -> None:
        self._connection = connection
        self._name = name
        self.broken = True

    async def open(self) -> None:
        """Connect and make sure that Redis knows the scripts."""
        try:
            await asyncio.wait_for(self._open(), CONNECT_TIMEOUT)
        except asyncio.TimeoutError:
            await self.close()
            raise LinkLostError(
                f"Redis at {self._name} has not answered within {CONNECT_TIMEOUT:g} s"
            ) from None
        except (RedisError, OSError) as error:
            await self.close()
            raise explain(error, self._name) from error
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        await self._connection.connect()
        self.broken = False
        await self._load_missing()

    async def _load_missing(self) -> None:
        missing = await self._run(commands.scripts_known())
        if missing:
            await self._run(commands.load_scripts(missing))

    async def exchange(self, payload: bytes, count: int) -> list[Any]:
        """Send packed commands and read that many answers; an answer that is an error is in the list."""
        if self.broken:
            raise LinkLostError(f"the connection to Redis at {self._name} is closed")
        answers: list[Any] = []
        read = self._connection.read_response
        try:
            await self._connection.send_packed_command(payload, check_health=False)
            for _ in range(count):
                try:
                    answers.append(await read(disable_decoding=True, disconnect_on_error=False))
                except ResponseError as error:
                    answers.append(error)
        except (RedisError, OSError) as error:
            await self.close()
            raise explain(error, self._name) from error
        except BaseException:
            await self.close()  # an answer may be on its way that nobody will read
            raise
        return answers

    async def _run(self, call: Call[T]) -> T:
        return self._parse(call, await self.exchange(call.payload, call.answers))

    def _parse(self, call: Call[T], answers: list[Any]) -> T:
        try:
            return call.parse(answers)
        except (RedisError, OSError) as error:
            raise explain(error, self._name) from error

    async def call(self, call: Call[T]) -> T:
        """Carry one verb. A script that Redis has forgotten is loaded, and the verb sent again."""
        answers = await self.exchange(call.payload, call.answers)
        if _is_no_script(answers):
            await self._load_missing()
            answers = await self.exchange(call.payload, call.answers)
        return self._parse(call, answers)

    async def close(self) -> None:
        """Close the connection, whatever was on its way; does not wait for the other side."""
        self.broken = True
        with contextlib.suppress(Exception):
            await self._connection.disconnect(nowait=True)

    def discard(self) -> None:
        """Let go of a connection whose loop is closed, or that is the parent process': nothing is sent on it, and nothing warns."""
        self.broken = True
        writer = getattr(self._connection, "_writer", None)
        transport = getattr(writer, "transport", None)
        sock = getattr(transport, "_sock", None)
        self._connection._writer = self._connection._reader = None
        if transport is not None and sock is not None:
            # Not transport.abort(): in a forked child it would take the parent's socket out of the epoll set that both share.
            with contextlib.suppress(Exception):
                transport._closing = True
                transport._sock = None
                sock.close()

    def abort(self) -> None:
        """Break the connection at once, from outside its loop's tasks; the task that reads it finds out."""
        self.broken = True
        writer = getattr(self._connection, "_writer", None)
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.transport.abort()

    def drop(self) -> None:
        """Break a connection that nobody reads any more."""
        self.abort()
        self._connection._writer = self._connection._reader = None


def retry_delay(attempt: int, random: Callable[[], float]) -> float:
    """Return the seconds before the next try: 50 ms doubled each time up to 2 s, with full jitter above 20 ms."""
    return 0.02 + random() * min(2.0, 0.05 * float(2 ** min(attempt, 10)))
