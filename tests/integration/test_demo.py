"""``batchq demo``: one command, real answers, honest figures, nothing left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchq_cli import demo
from batchq_cli.common import EXIT_INTERRUPTED, EXIT_REDIS_DOWN, EXIT_TERMINATED, EXIT_UNEXPECTED
from batchq_cli.embedded import EmbeddedRedis, free_port
from batchq_cli.main import main

needs_the_demo_extra = pytest.mark.skipif(
    not os.environ.get("CI")
    and any(importlib.util.find_spec(name) is None for name in ("numpy", "sklearn", "torch")),
    reason="needs the demo extra",
)
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below one."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def watch(pids: list[int]) -> list[int]:
    """Return handles on processes, whoever's children they are."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def all_end(handles: list[int]) -> bool:
    """Wait until the processes have ended; close their handles. False if one has not within a minute."""
    ended = [bool(select.select([handle], [], [], 60)[0]) for handle in handles]
    for handle in handles:
        os.close(handle)
    return all(ended)


def start_demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "batchq_cli", "demo", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return what the demo wrote to stderr up to the line with these words."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if words in line:
            return seen
    pytest.fail(f"the demo ended with {process.wait()} and never said {words!r}:\n{seen}")


# the model and its data ------------------------------------------------------------------------------------


@needs_the_demo_extra
def test_no_held_out_image_is_among_the_training_images() -> None:
    from batchq_cli.digits.data import held_out, training

    seen = {image.tobytes() for image in training()[0]}
    assert len(training()[0]) == 1437
    assert len(held_out()[0]) == 360
    assert not seen & {image.tobytes() for image in held_out()[0]}


@needs_the_demo_extra
def test_the_shipped_model_reads_97_of_100_digits_that_it_has_never_seen() -> None:
    from batchq_cli.digits.data import held_out
    from batchq_cli.digits.model import load

    images, labels = held_out()
    answers = load()(list(images))
    assert len(answers) == len(images)
    assert sum(answer["label"] == label for answer, label in zip(answers, labels, strict=True)) >= 0.97 * 360
    assert all(0.1 <= answer["confidence"] <= 1 and answer["batch"] == 360 for answer in answers)


@needs_the_demo_extra
def test_an_image_gets_the_same_answer_alone_and_in_a_batch() -> None:
    from batchq_cli.digits.data import held_out
    from batchq_cli.digits.model import load

    predict, images = load(), held_out()[0][:16]
    together = predict(list(images))
    for image, answer in zip(images, together, strict=True):
        (alone,) = predict([image])
        assert alone["label"] == answer["label"]
        assert alone["confidence"] == pytest.approx(answer["confidence"], abs=1e-4)


# the figures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)]
)
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(
    share: float, expected: float
) -> None:
    assert demo.percentile([float(n) for n in range(100, 0, -1)], share) == expected


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert demo.percentile([3.0], 0.5) == demo.percentile([3.0], 0.99) == 3.0


def test_the_report_counts_batches_and_not_requests() -> None:
    tally = demo.Tally(elapsed=2.0)
    for _ in range(3):  # three batches of four, 8 ms each
        for _ in range(4):
            tally.add({"label": 7, "confidence": 1.0, "batch": 4, "model_seconds": 0.008}, 7, 0.010)
    tally.add({"label": 1, "confidence": 1.0, "batch": 1, "model_seconds": 0.002}, 7, 0.020)
    assert tally.report() == {
        "requests": 13,
        "elapsed_seconds": 2.0,
        "requests_per_second": 6.5,
        "p50_ms": 10.0,
        "p99_ms": 20.0,
        "model_ms_per_image": 2.0,
        "mean_batch": 3.2,
        "accuracy": 0.9231,
        "batch_sizes": {1: 1, 4: 3},
    }


@pytest.mark.parametrize("batches", [{1: 5}, {32: 100, 1: 1}, {7: 2, 9: 3}, {4096: 1}])
def test_the_histogram_shows_each_batch_once_and_fits_a_terminal(batches: dict[int, int]) -> None:
    lines = list(demo.histogram(batches))
    assert len(lines) <= demo.BINS
    assert max(map(len, lines)) <= 79
    assert sum(int(line.split()[-1].replace(",", "")) for line in lines) == sum(batches.values())
    assert max(Counter(line)["#"] for line in lines) == demo.BAR_WIDTH


# the command -----------------------------------------------------------------------------------------------


def test_the_callers_process_does_not_import_the_model_or_its_libraries() -> None:
    code = (
        "import sys, batchq_cli.demo\n"
        "print([name for name in ('torch', 'sklearn', 'numpy', 'redis') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_extra_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    missing = ("numpy", "sklearn", "torch")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name)
    )
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == EXIT_UNEXPECTED
    assert "numpy, sklearn, torch; run, in batchq's checkout: pip install '.[demo]'" in result.output


@needs_the_demo_extra
def test_it_answers_right_from_batches_and_says_so_in_json() -> None:
    process = start_demo("--seconds", "1", "--concurrency", "24", "--json")
    output, log = process.communicate()
    assert process.returncode == 0, log
    figures = json.loads(output)
    one, many = figures["one_at_a_time"], figures["concurrent"]
    assert figures["images"] == 360
    assert one["batch_sizes"] == {"1": one["requests"]}
    assert one["accuracy"] > 0.9
    assert many["accuracy"] > 0.9
    assert many["mean_batch"] > 1
    assert max(map(int, many["batch_sizes"])) <= 24
    # each request was in one of the batches; a batch may still have been on its way when the callers stopped
    counted = sum(int(size) * count for size, count in many["batch_sizes"].items())
    assert abs(counted - many["requests"]) <= 24


@needs_the_demo_extra
def test_it_uses_the_redis_that_it_is_given_and_leaves_it_running() -> None:
    with EmbeddedRedis() as redis:
        process = start_demo("--seconds", "0.4", "--concurrency", "4", "--redis", redis.url)
        output, log = process.communicate()
        assert process.returncode == 0, log
        assert "speed-up" in output
        assert "embedded Redis" not in log
        with socket.create_connection(("127.0.0.1", redis.port), timeout=10) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(64) == b"+PONG\r\n"


@needs_the_demo_extra
def test_a_redis_that_cannot_be_reached_is_said_before_anything_starts() -> None:
    result = CliRunner().invoke(main, ["demo", "--redis", f"redis://127.0.0.1:{free_port()}/0"])
    assert result.exit_code == EXIT_REDIS_DOWN
    assert "cannot be reached" in result.output
    assert "worker" not in result.output


@needs_the_demo_extra
def test_a_worker_that_cannot_start_is_shown_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL", "batchq_cli.digits.model:lod")
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == EXIT_UNEXPECTED
    assert "the worker ended with exit code" in result.output
    assert "lod" in result.output.partition("the worker's log:")[2]


@linux_only
@needs_the_demo_extra
@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("embedded Redis", signal.SIGINT, EXIT_INTERRUPTED),
        ("waiting for the worker", signal.SIGTERM, EXIT_TERMINATED),
        ("one at a time:", signal.SIGINT, EXIT_INTERRUPTED),
        ("one at a time:", signal.SIGTERM, EXIT_TERMINATED),
    ],
)
def test_stopped_at_any_time_it_leaves_no_process_and_no_folder(
    moment: str, number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start_demo("--seconds", "4")
    read_until(process, moment)
    below = watch(descendants(process.pid))
    assert below
    process.send_signal(number)
    output, log = process.communicate()
    assert process.returncode == code, log
    assert output == ""
    assert "Traceback" not in log
    assert all_end(below)
    assert list(tmp_path.iterdir()) == []


@linux_only
@needs_the_demo_extra
def test_killed_it_takes_its_redis_and_its_worker_along() -> None:
    process = start_demo()
    read_until(process, "one at a time:")
    below = watch(descendants(process.pid))
    assert len(below) >= 2
    process.kill()
    process.communicate()
    assert all_end(below)
