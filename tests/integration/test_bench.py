"""``batchq bench``: figures of the right shape, and nothing left behind. How large they are is not asserted anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from batchq.model import Model
from batchq.protocols import BatchContext
from batchq_cli.bench_models import Clock, echo, timed
from batchq_cli.embedded import EmbeddedRedis
from tests.conftest import is_gone

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
QUICK = ("--rounds", "2", "--seconds", "0.1")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batchq_cli", "bench", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def test_the_json_has_every_run_beside_its_floor() -> None:
    done = bench(*QUICK, "--outstanding", "1", "--outstanding", "8", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures) == {"machine", "settings", "runs"}
    assert figures["settings"]["payload_bytes"] == 1024
    assert figures["settings"]["rounds"] == 2
    assert [(run["run"], run["outstanding"]) for run in figures["runs"]] == [
        ("floor", 8),
        ("echo", 8),
        ("floor", 1),
        ("echo", 1),
        ("sleeper", 512),
    ]
    for run in figures["runs"]:
        assert run["requests"] > 0
        assert run["requests_per_second"] > 0
        assert 0 < run["p50_ms"] <= run["p99_ms"]
        assert set(run["cpu_us"]) == {"caller", "worker", "redis"}
        if run["run"] == "echo":
            assert set(run["of_floor"]) == {"requests_per_second", "p50", "cpu"}
            assert 1 <= run["mean_batch"] <= run["outstanding"]
        if run["run"] == "sleeper":
            assert run["mean_batch"] <= 32
            assert 0 < run["model_busy"] <= 1.001
            assert run["ceiling_requests_per_second"] == pytest.approx(32 / 0.0066, rel=0.001)


def test_the_table_names_the_machine_and_what_was_run() -> None:
    done = bench("--rounds", "1", "--seconds", "0.1", "--outstanding", "4")
    assert done.returncode == 0, done.stderr
    assert "CPUs, Python" in done.stdout
    assert "4 echo" in done.stdout
    assert "512 sleeper" in done.stdout


def test_a_model_of_ones_own_is_measured_on_the_redis_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lengths.py").write_text(
        "def load(extra):\n    return lambda texts: [len(text) + extra for text in texts]\n"
    )
    monkeypatch.chdir(tmp_path)
    with EmbeddedRedis() as server:
        done = bench(
            *QUICK, "--outstanding", "4", "--redis", server.url, "--json",
            "--model", "lengths:load", "--model-args", '{"extra": 1}', "--value", '"what a day"',
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        with redis.Redis.from_url(server.url) as client:
            assert client.keys("*") == []
    runs = json.loads(done.stdout)["runs"]
    assert [run["run"] for run in runs] == ["floor", "model"]
    assert 0 <= runs[1]["model_busy"] <= 1.001


def test_a_model_that_cannot_be_loaded_is_quoted() -> None:
    done = bench(*QUICK, "--outstanding", "4", "--model", "json:nothing_like_that")
    assert done.returncode == 1
    assert "has no 'nothing_like_that'" in done.stderr


def test_a_redis_that_is_not_there_is_named() -> None:
    done = bench(*QUICK, "--redis", "redis://127.0.0.1:1/0")
    assert done.returncode == 6
    assert done.stdout == ""


@linux_only
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_leaves_no_process_behind_when_it_is_ended(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "batchq_cli", "bench", "--outstanding", "8", "--seconds", "30"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "round 1" in line:
            break
    started = descendants(process.pid)
    assert len(started) >= 3  # Redis, the floor, a worker
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not [pid for pid in started if not is_gone(pid)]


def test_a_models_clock_is_read_from_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "clock")
    reader = Clock(path)
    before = reader.read()
    predict = echo(path)
    started = time.perf_counter()
    assert predict([1, 2, 3]) == [1, 2, 3]
    assert predict([4]) == [4]
    after = reader.read()
    assert (after.calls, after.values) == (2, 4)
    assert started <= after.last_end <= time.perf_counter()
    batch, _ = after.since(before)
    assert batch == 2
    reader.close()


@pytest.mark.parametrize("model", ["lengths", "shows_context", "a_module", "echo"])
def test_models_of_all_kinds_can_be_timed(tmp_path: Path, model: str) -> None:
    clock = str(tmp_path / "clock")
    loaded = Model(timed(clock, f"tests.models:{model}", {}))
    context = BatchContext(("a", "b"), (None, None), (0.0, 0.0))
    values = [[1.0], [2.0]] if model == "a_module" else ["ab", "ac"]
    answers = loaded.run(loaded.prepare(values, context))
    assert not any(isinstance(answer, Exception) for answer in answers)
    reading = Clock(clock).read()
    assert (reading.calls, reading.values) == (1, 2)
