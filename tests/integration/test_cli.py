"""What a user of the command line may rely on with a real Redis and real workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from batchq_cli.embedded import EmbeddedRedis
from batchq_cli.main import main
from batchq_cli.ping import RIGHTS
from tests.conftest import StartWorker

NOWHERE = "redis://127.0.0.1:1/0"

USERS_MODEL = """
import datetime
import numpy as np

sample = [1.0, 2.0]

def load(device="cpu", scale=1.0):
    answers = {
        "array": lambda: np.full((2, 2), scale, "f4"),
        "bytes": lambda: b"\\x00\\x01",
        "datetime": lambda: datetime.datetime(2026, 1, 2, 3, 4, 5),
        "device": lambda: device,
    }

    def predict(inputs):
        return [answers[x]() if isinstance(x, str) else x for x in inputs]

    return predict
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the tests holds, a test begins without settings."""
    for name in list(os.environ):
        if name.startswith("BATCHQ_") and name != "BATCHQ_REDIS_SERVER":
            monkeypatch.delenv(name)


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, args, prog_name="batchq", input=stdin)


def answer_of(result: Result) -> Any:
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def assert_error(result: Result, code: int, *parts: str) -> None:
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]


def command(*args: str, **options: Any) -> subprocess.Popen[str]:
    """Start the command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "batchq_cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


# --- call ---


def test_call_takes_json_a_file_bytes_or_standard_input_and_prints_json(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0")
    call = ("call", "--redis", redis_url)
    value = {"text": "what a day é", "scores": [0.5, None, True], "n": 2**62}
    (tmp_path / "value.json").write_text(json.dumps(value))
    (tmp_path / "value.bin").write_bytes(b"\x00\xff")
    assert answer_of(run(*call, json.dumps(value))) == value
    assert answer_of(run(*call, "-", stdin=json.dumps(value))) == value
    assert answer_of(run(*call, "--file", str(tmp_path / "value.json"))) == value
    assert answer_of(run(*call, "--file", "-", stdin=json.dumps(value))) == value
    assert answer_of(run(*call, "--bytes-file", str(tmp_path / "value.bin"))) == {"base64": "AP8="}
    assert answer_of(run(*call, "--bytes-file", "-", stdin=b"\x00\xff")) == {"base64": "AP8="}
    assert answer_of(run(*call, "--", "-5")) == -5
    for priority in ("high", "normal", "low"):
        assert answer_of(run(*call, "1", "--priority", priority)) == 1


def test_a_worker_serves_a_model_of_the_users_folder_with_its_arguments(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(USERS_MODEL)
    start_worker(
        "mine:load",
        "--app-dir",
        str(tmp_path),
        "--model-arg",
        "scale=0.5",
        "--device",
        "mps",
        queue="arrays",
    )
    call = ("call", "--redis", redis_url, "--queue", "arrays")
    assert answer_of(run(*call, '"array"')) == [[0.5, 0.5], [0.5, 0.5]]
    assert answer_of(run(*call, '"bytes"')) == {"base64": "AAE="}
    assert answer_of(run(*call, '"datetime"')) == "2026-01-02T03:04:05"
    assert answer_of(run(*call, '"device"')) == "mps"


def test_call_tells_by_its_exit_code_what_went_wrong(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:fails_for_bad", "--max-delay", "0")
    call = ("call", "--redis", redis_url)
    assert_error(run(*call, '"bad"'), 9, "ModelError", "ValueError: this input is bad")
    assert_error(run(*call, str(2**70)), 9, "EncodeError", "64 bits")
    none = ("--queue", "nobody", "1")
    assert_error(run(*call, *none, "--timeout", "100ms"), 8, "DeadlineExceededError", "'default' (1 worker)")
    assert_error(run(*call, *none, "--fail-fast"), 8, "NoWorkerError")
    assert_error(run("call", "1", "--redis", NOWHERE, "--timeout", "100ms"), 6, "BackendUnavailableError")


def test_call_into_a_full_queue_is_refused_at_once(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    options = ("--capacity", "1", "--max-batch-size", "1", "--model-arg", f"path={tmp_path}")
    start_worker("tests.models:gate", *options)
    callers = [command("call", "1", "--redis", redis_url, "--timeout", "30s") for _ in range(3)]
    try:
        # one runs, one waits, and there is no room for the third
        ended = next(caller for caller in _as_they_end(callers))
        assert ended.returncode == 8
        assert ended.stderr is not None
        assert ended.stderr.read().startswith("error: QueueFullError: ")
    finally:
        (tmp_path / "open").touch()
        codes = sorted(caller.wait(30) for caller in callers)
        for caller in callers:
            caller.communicate()
    assert codes == [0, 0, 8]


def _as_they_end(processes: list[subprocess.Popen[str]]) -> Iterator[subprocess.Popen[str]]:
    waiting = {process.pid: process for process in processes}
    while waiting:
        pid, status = os.waitpid(-1, 0)
        if pid in waiting:
            process = waiting.pop(pid)
            process.returncode = os.waitstatus_to_exitcode(status)
            yield process


def test_ctrl_c_ends_a_call_with_exit_code_130_and_no_traceback(redis_url: str) -> None:
    waiting = command("call", "1", "--redis", redis_url, "--queue", "nobody", "--timeout", "60s")
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        assert client.blpop(["batchq:{nobody}:wake"], 60)  # the request is in the queue
    waiting.send_signal(signal.SIGINT)
    assert waiting.communicate(timeout=30) == ("", "")
    assert waiting.returncode == 130


# --- stats and queues ---


def test_stats_shows_depth_totals_and_live_workers(redis_url: str, start_worker: StartWorker) -> None:
    started = start_worker("tests.models:echo", "--max-delay", "0", "--capacity", "100", queue="sentiment")
    for _ in range(3):
        assert answer_of(run("call", "1", "--redis", redis_url, "--queue", "sentiment")) == 1
    result = run("stats", "--redis", redis_url, "--queue", "sentiment")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert lines["queue"].split()[1] == "sentiment"
    assert "0 of 100" in lines["pending"]
    assert "3 accepted, 3 answered" in lines["totals"]
    worker = next(line for name, line in lines.items() if f"-{started.process.pid}-" in name)
    assert "tests.models:echo" in worker
    assert "ready" in worker
    fields = json.loads(run("stats", "--redis", redis_url, "--queue", "sentiment", "--json").stdout)
    assert fields["depth"] == {"high": 0, "normal": 0, "low": 0}
    assert (fields["accepted"], fields["completed"], fields["capacity"]) == (3, 3, 100)
    assert [worker["model"] for worker in fields["workers"]] == ["tests.models:echo"]
    assert fields["rates"] is None  # one look tells no rate


def test_stats_of_a_queue_that_nobody_has_used_are_zero(redis_url: str) -> None:
    result = run("stats", "--redis", redis_url, "--queue", "new")
    assert result.exit_code == 0
    assert "none is alive" in result.stdout
    assert_error(run("stats", "--redis", NOWHERE, "--timeout", "100ms"), 6, "BackendUnavailableError")


@pytest.mark.parametrize("as_json", [True, False])
def test_stats_watch_adds_lines_until_ctrl_c_and_counts_rates(redis_url: str, as_json: bool) -> None:
    watching = command("stats", "--redis", redis_url, "--watch", "100ms", *(["--json"] if as_json else []))
    assert watching.stdout is not None
    lines = [watching.stdout.readline() for _ in range(3)]
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=30)
    assert (watching.returncode, errors) == (0, "")
    if as_json:
        assert [json.loads(line)["rates"] is None for line in lines] == [True, False, False]
        assert json.loads(lines[1])["rates"]["in"] == 0
    else:
        assert all("pending=0" in line and "workers=0" in line for line in lines)
        assert ["in=0/s" in line for line in lines] == [False, True, True]


def test_stats_watch_goes_on_when_redis_is_back() -> None:
    with EmbeddedRedis() as server:
        watching = command("stats", "--redis", server.url, "--watch", "100ms", "--timeout", "100ms")
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert "pending=0" in watching.stdout.readline()
        server.stop()
        assert watching.stderr.readline().startswith("error: ")
        server.start()
        lines = [watching.stdout.readline() for _ in range(20)]  # some may be from before
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=30)
    assert watching.returncode == 0
    assert "pending=0" in lines[-1]


def test_queues_lists_the_last_used_first_with_depth_and_live_workers(
    redis_url: str, start_worker: StartWorker
) -> None:
    empty = run("queues", "--redis", redis_url)
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "no queue" in empty.stderr
    assert json.loads(run("queues", "--redis", redis_url, "--json").stdout) == []
    start_worker("tests.models:echo", queue="alive")
    # nobody answers, so it waits there
    assert run("call", "1", "--redis", redis_url, "--queue", "dead", "--timeout", "0.2").exit_code == 8
    rows = json.loads(run("queues", "--redis", redis_url, "--json").stdout)
    assert [(row["queue"], row["workers"]) for row in rows] == [("dead", 0), ("alive", 1)]
    assert rows[0]["last_used"] >= rows[1]["last_used"]
    table = run("queues", "--redis", redis_url).stdout.splitlines()
    assert table[0].split() == ["QUEUE", "WORKERS", "DEPTH", "LAST", "USED"]
    assert [line.split()[:2] for line in table[1:]] == [["dead", "0"], ["alive", "1"]]
    assert len(json.loads(run("queues", "--redis", redis_url, "--json", "--limit", "1").stdout)) == 1
    assert_error(run("queues", "--redis", NOWHERE), 6, "BackendUnavailableError")


# --- ping ---


def states(result: Result) -> dict[str, str]:
    checks = json.loads(result.stdout)["checks"]
    return {check["name"]: check["state"] for check in checks}


def test_ping_finds_nothing_wrong_with_a_redis_that_is_fit(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo", queue="sentiment")
    result = run("ping", "--redis", redis_url, "--queue", "sentiment", "--worker")
    assert (result.exit_code, result.stderr) == (0, "")
    names = [
        "reachable",
        "password",
        "version",
        "eviction",
        "memory",
        "persistence",
        "scripts",
        "latency",
        "workers",
    ]
    assert [line.split()[1] for line in result.stdout.splitlines()] == names
    result = run("ping", "--redis", redis_url, "--queue", "sentiment", "--json")
    assert {state for name, state in states(result).items() if name not in ("memory", "persistence")} == {
        "ok"
    }
    report = json.loads(result.stdout)
    assert (report["ok"], report["live_workers"]) == (True, 1)
    assert report["latency_seconds"] > 0


def test_ping_fails_without_a_live_worker_only_where_one_is_asked_for(redis_url: str) -> None:
    result = run("ping", "--redis", redis_url)
    assert result.exit_code == 0
    assert "no live worker on 'default'" in result.stdout
    assert_error(run("ping", "--redis", redis_url, "--worker"), 8, "no live worker on 'default'")


def test_ping_without_a_redis_exits_with_6() -> None:
    result = run("ping", "--redis", NOWHERE, "--json")
    assert_error(result, 6, "cannot be reached")
    assert states(result) == {"reachable": "wrong"}


def test_ping_of_a_server_that_accepts_and_says_nothing_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        for name in ("ping", "queues"):
            assert_error(run(name, "--redis", url, "--timeout", "100ms"), 6, "has not answered within 0.1 s")


def test_a_wrong_password_exits_with_4_everywhere(start_worker: StartWorker) -> None:
    with EmbeddedRedis("--requirepass", "hunter2") as server:
        good = server.url.replace("redis://", "redis://:hunter2@")
        bad = server.url.replace("redis://", "redis://:letmein@")
        for url in (bad, server.url):
            result = run("ping", "--redis", url, "--json")
            assert_error(result, 4, "refuses this user")
            assert states(result) == {"reachable": "ok", "password": "wrong"}
            for args in (("call", "1"), ("stats",), ("queues",)):
                assert_error(run(*args, "--redis", url), 4, "BackendAuthError")
            assert start_worker("tests.models:echo", url=url, wait=False).process.wait(30) == 4
        assert "letmein" not in result.output
        result = run("ping", "--redis", good)
        assert result.exit_code == 0
        assert "accepted" in result.stdout
        assert "hunter2" not in result.output


def test_a_user_without_rights_is_told_which_and_they_suffice(start_worker: StartWorker) -> None:
    with EmbeddedRedis() as server, redis.Redis(port=server.port, protocol=2) as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", ">secret", "+ping", "+select", "+client")
        url = server.url.replace("redis://", "redis://app:secret@")
        result = run("ping", "--redis", url)
        assert_error(result, 4, "no permissions")
        assert f"ACL SETUSER … {RIGHTS}" in result.stdout
        admin.execute_command("ACL", "SETUSER", "app", *RIGHTS.split())
        start_worker("tests.models:echo", url=url)
        assert run("ping", "--redis", url, "--worker").exit_code == 0
        assert answer_of(run("call", "1", "--redis", url)) == 1


def test_a_redis_that_may_evict_requests_is_not_fit(start_worker: StartWorker) -> None:
    with EmbeddedRedis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        result = run("ping", "--redis", server.url, "--json")
        assert_error(result, 7, "eviction: allkeys-lru")
        assert states(result)["eviction"] == "wrong"
        assert start_worker("tests.models:echo", url=server.url, wait=False).process.wait(30) == 5


def test_a_replica_is_not_fit_and_its_primary_is_named(redis_server: EmbeddedRedis) -> None:
    with EmbeddedRedis("--replicaof", "127.0.0.1", str(redis_server.port)) as server:
        result = run("ping", "--redis", server.url)
        assert result.exit_code in (6, 7)  # 6 while it loads its primary's data
        if result.exit_code == 7:
            assert f"use 127.0.0.1:{redis_server.port}" in result.stdout


def test_ping_says_where_it_cannot_look() -> None:
    with EmbeddedRedis() as server, redis.Redis(port=server.port, protocol=2) as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", ">secret", *RIGHTS.split(), "-info")
        url = server.url.replace("redis://", "redis://app:secret@")
        result = run("ping", "--redis", url, "--json")
        assert result.exit_code == 0
        found = states(result)
        assert [found[name] for name in ("version", "eviction", "persistence")] == ["unknown"] * 3


def test_ping_warns_that_redis_is_full() -> None:
    with EmbeddedRedis() as server:
        assert run("ping", "--redis", server.url).exit_code == 0  # the scripts are known from here on
        with redis.Redis(port=server.port, protocol=2) as admin:
            admin.config_set("maxmemory", 1024)
        assert_error(run("ping", "--redis", server.url), 7, "memory")


# --- worker ---


def test_sigterm_and_ctrl_c_end_a_worker_with_exit_code_0(redis_url: str, start_worker: StartWorker) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        started = start_worker("tests.models:echo")
        started.process.send_signal(number)
        assert started.process.wait(30) == 0


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("tests.models:ehco", "did you mean 'echo'?"),
        ("tests.modles:echo", "did you mean 'models'?"),
        ("tests.models", "module:function"),
        ("tests/models.py:echo", "did you mean 'tests.models:echo'?"),
        ("tests.models:cannot_load", "no such weights"),
        ("tests.models:gate", "path"),
    ],
)
def test_a_model_that_cannot_be_loaded_ends_the_worker_with_exit_code_3_and_a_hint(
    start_worker: StartWorker, model: str, hint: str
) -> None:
    started = start_worker(model, wait=False)
    assert started.process.wait(30) == 3
    assert hint in started.log


def test_a_second_model_on_a_queue_must_be_allowed(start_worker: StartWorker) -> None:
    start_worker("tests.models:echo", queue="shared")
    second = start_worker("tests.models:sizes", queue="shared", wait=False)
    assert second.process.wait(30) == 5
    assert "--allow-mixed" in second.log
    assert "tests.models:echo" in second.log
    start_worker("tests.models:sizes", "--allow-mixed", queue="shared")
    start_worker("tests.models:sizes", queue="other")


def test_a_file_of_the_users_never_takes_the_place_of_what_batchq_imports(
    redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(USERS_MODEL)
    for name in ("redis", "msgpack", "click", "queue", "batchq", "statistics"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the file of the user')\n")
    running = command(
        "worker", "--redis", redis_url, "--model", "mine:load", "--log-format", "text", cwd=tmp_path
    )
    try:
        answer = command("call", '"device"', "--redis", redis_url, cwd=tmp_path)
        output, errors = answer.communicate(timeout=60)
        assert (output, errors) == ('"cpu"\n', "")
        running.terminate()
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.communicate()


def test_check_needs_no_redis_and_imports_from_the_folder_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USERS_MODEL)
    (tmp_path / "statistics.py").write_text("raise RuntimeError('the file of the user')\n")
    checking = command("worker", "--redis", NOWHERE, "--model", "mine:load", "--check", cwd=tmp_path)
    output, errors = checking.communicate(timeout=60)
    assert (checking.returncode, errors) == (0, "")
    assert "sample: mine.sample, list of 2 float" in output
    assert output.splitlines()[-1].startswith("ok")
