"""What a user of ``batchq dead`` may rely on, with a real Redis and real workers."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import redis as redis_py
from click.testing import CliRunner, Result

from batchq import WorkerLostError, commands, wire
from batchq.commands import DEAD_LETTERS, DEAD_TTL_S, Head
from batchq.keys import Keys
from batchq.store import Endpoint, LinkLostError
from batchq.sync import Client
from batchq_cli import dead
from batchq_cli.main import main
from batchq_workers.batches import dead_letter
from tests.conftest import StartWorker

DEAD = "batchq:{default}:dead"
GARBAGE = (
    b"",
    b"\xc1",
    b"\x81",
    msgpack.packb([1, 2]),
    msgpack.packb({"id": 7, "died_us": 2**63, "request": "x"}),
)
"""What somebody else, or a broken disk, may have left where letters should be."""


@pytest.fixture(autouse=True)
def the_redis(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BATCHQ_") and name != "BATCHQ_REDIS_SERVER":
            monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHQ_REDIS_URL", redis_url)


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(redis_url, protocol=2) as client:
        yield client


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ("dead", *args), prog_name="batchq")


def out(*args: str) -> str:
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def rows(*args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out(*args, "--json"))
    return found


def letter(request_id: str, value: object = "value", *, lane: str = "n", **extras: Any) -> bytes:
    """A letter as a worker writes it."""
    id = bytes.fromhex(request_id)
    request = wire.encode_request(id, 60_000, 10_000, value, **extras)
    head = Head(int((time.time() - 90) * 1e6), 10_000_000, len(request), 2, lane, 0, id)
    return dead_letter("killed its worker 2 times while it ran alone", request, head)


def bury(url: str, *letters: bytes) -> None:
    """Write letters as a worker does, the last one is the newest."""
    link = Endpoint(url).link()
    link.call(commands.bury(Keys("default"), "some batch", letters))
    link.close()


# from poison to an answer ----------------------------------------------------------------------------------


def test_a_request_that_kills_its_workers_is_kept_shown_and_run_again_once_the_model_is_mended(
    redis_url: str, start_worker: StartWorker
) -> None:
    worker = start_worker("tests.models:dies_of_poison", "--max-delay", "0")
    with Client(redis_url, timeout=60) as client:
        with pytest.raises(WorkerLostError) as caught:
            client.predict("poison", priority="high", meta={"user": "u1"})
        assert worker.stop() == 0
        request_id = caught.value.request_id
        assert request_id is not None

        (found,) = rows("list")
        assert (found["id"], found["attempts"], found["lane"]) == (request_id, 2, "high")
        assert found["reason"] == "killed its worker 2 times while it ran alone"
        assert found["enqueued"] <= found["died"] <= time.time()
        assert request_id in out("list")

        shown = json.loads(out("show", request_id[:12], "--payload", "--json"))
        assert (shown["value"], shown["meta"], shown["attempts"]) == ("poison", {"user": "u1"}, 2)

        (requeued,) = rows("requeue", request_id[:12])
        assert requeued["id"] == request_id
        assert rows("list") == []
        job = client.job(requeued["job"])
        assert job.state() == "pending"
        start_worker("tests.models:echo", "--max-delay", "0")
        assert job.result(timeout=60) == "poison"


def test_a_jobs_letter_becomes_a_job_of_its_own_though_the_first_ones_error_is_still_kept(
    redis_url: str, start_worker: StartWorker
) -> None:
    worker = start_worker("tests.models:dies_of_poison", "--max-delay", "0")
    with Client(redis_url) as client:
        first = client.submit("poison", id="order 17")
        with pytest.raises(WorkerLostError):
            first.result(timeout=60)
        assert worker.stop() == 0
        start_worker("tests.models:echo", "--max-delay", "0")
        (requeued,) = rows("requeue", "--all")
        assert client.job(requeued["job"]).result(timeout=60) == "poison"
        assert first.state() == "failed"


def test_poison_that_is_requeued_and_kills_again_is_a_new_letter(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:dies_of_poison", "--max-delay", "0")
    bury(redis_url, letter("ab" * 16, "poison"))
    (requeued,) = rows("requeue", "--all")
    with Client(redis_url) as client, pytest.raises(WorkerLostError):
        client.job(requeued["job"]).result(timeout=60)
    assert [(row["id"], row["attempts"]) for row in rows("list")] == [(requeued["job"], 2)]


# list and show ---------------------------------------------------------------------------------------------


def test_a_payload_is_shown_only_where_it_is_asked_for(redis_url: str) -> None:
    bury(redis_url, letter("ab" * 16, {"name": "secret"}, meta={"token": "secret"}))
    for args in (("list",), ("list", "--json"), ("show", "ab"), ("show", "ab", "--json"), ("drop", "ab")):
        printed = out(*args)
        assert "secret" not in printed
        assert b"secret".hex() not in printed


def test_list_has_the_newest_first_and_show_has_all_of_one(redis_url: str) -> None:
    assert run("list").stderr == "queue 'default' has no dead letters\n"
    assert rows("list") == []
    bury(redis_url, letter("ab" * 16), letter("cd" * 16, lane="l"))
    lines = out("list").splitlines()
    assert lines[0].split() == ["ID", "ATTEMPTS", "LANE", "AGE", "SIZE", "REASON"]
    assert [line.split()[:3] for line in lines[1:]] == [["cd" * 16, "2", "low"], ["ab" * 16, "2", "normal"]]
    shown = dict(line.split(maxsplit=1) for line in out("show", "ab").splitlines())
    assert list(shown) == ["id", "position", "reason", "attempts", "lane", "enqueued", "died", "size"]
    assert shown["position"] == "#1"
    assert shown["size"].endswith(" bytes")
    assert "ago" in shown["died"]
    assert rows("list", "--queue", "other") == []


def test_a_payload_is_printed_as_call_prints_answers(redis_url: str) -> None:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)
    value = {
        "array": np.eye(2, dtype="f4"),
        "bytes": b"\x00",
        "when": when,
        "nan": float("nan"),
        "é": [1, None],
    }
    bury(redis_url, letter("ab" * 16, value, batch_key="k", cost=2.5))
    shown = dict(line.split(maxsplit=1) for line in out("show", "ab", "--payload").splitlines())
    assert json.loads(shown["value"]) == {
        "array": [[1.0, 0.0], [0.0, 1.0]],
        "bytes": {"base64": "AA=="},
        "when": "2026-01-02T03:04:05",
        "nan": None,
        "é": [1, None],
    }
    assert (shown["batch_key"], shown["cost"]) == ('"k"', "2.5")
    assert "meta" not in shown


@pytest.mark.parametrize("depth", [10, 400, 510])
def test_a_deeply_nested_payload_is_shown_one_way_or_the_other(redis_url: str, depth: int) -> None:
    request = wire.encode_request(bytes(16), 60_000, 10_000, None)
    assert request.endswith(b"\xc0\xc0")
    bury(redis_url, dead_letter("deep", request[:-2] + b"\x91" * depth + b"\xc0\xc0", None))
    shown = json.loads(out("show", "#1", "--payload", "--json"))
    assert ("value" in shown) != ("hex" in shown)


def test_an_id_is_named_by_its_beginning_where_no_other_begins_so(redis_url: str) -> None:
    bury(redis_url, letter("ab" * 16), letter("abcd" * 8), letter("ef" * 16))
    assert json.loads(out("show", "abc", "--json"))["id"] == "abcd" * 8
    assert json.loads(out("show", "ABAB", "--json"))["id"] == "ab" * 16
    for command in ("show", "drop", "requeue"):
        for ref, words in {
            "ab": f"'ab' means 2 dead letters: {'ab' * 16}, {'abcd' * 8}",
            "12": "no dead letter '12'; see batchq dead list",
            "#4": "no dead letter '#4'",
            "#0": "no dead letter '#0'",
            "xyz": "'xyz': allowed are the beginning of an id, and a position",
            "": "'': allowed are",
        }.items():
            result = run(command, ref)
            assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
            assert result.stderr.startswith("error: ")
            assert words in result.stderr
    # one that is wrong stops the others before anything is done
    assert run("drop", "ef", "12").exit_code == 2
    assert len(rows("list")) == 3


def test_letters_that_share_an_id_are_named_by_their_positions(redis_url: str) -> None:
    bury(redis_url, letter("ab" * 16, 1), letter("ab" * 16, 2), letter("cd" * 16, 3))
    assert [line.split()[0] for line in out("list").splitlines()[1:]] == ["cd" * 16, "#2", "#1"]
    assert "'abab' means 2 dead letters: #1, #2" in run("show", "abab").stderr
    assert json.loads(out("show", "#2", "--payload", "--json"))["value"] == 2
    out("drop", "#1")
    assert json.loads(out("show", "ab", "--payload", "--json"))["value"] == 2


def test_a_position_means_the_same_letter_though_new_ones_come(redis_url: str) -> None:
    bury(redis_url, *[letter(f"{n:032x}", n) for n in range(25)])
    assert [row["position"] for row in rows("list")] == list(range(25, 0, -1))
    bury(redis_url, letter("ff" * 16, "new"))
    for n in (1, 10, 11, 25):
        assert json.loads(out("show", f"#{n}", "--payload", "--json"))["value"] == n - 1


# broken bytes ----------------------------------------------------------------------------------------------


def test_what_a_worker_could_not_decode_is_shown_as_hex_and_cannot_be_requeued(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    now = int(time.time() * 1e6)
    raw.rpush("batchq:{default}:requests", b"\xc1junk")
    raw.rpush("batchq:{default}:heads", f"{now};60000000;5;0;n;0;{'0' * 32}")
    start_worker("tests.models:echo", "--max-delay", "0")
    with Client(redis_url) as client:
        assert client.predict("fine") == "fine"
    (found,) = rows("list")
    assert found["reason"].startswith("undecodable: ")
    assert (found["id"], found["attempts"], found["size"]) == ("0" * 32, 0, 5)
    assert json.loads(out("show", "0000", "--payload", "--json"))["hex"] == b"\xc1junk".hex()
    result = run("requeue", "0000")
    assert (result.exit_code, result.stdout) == (9, "")
    assert result.stderr.startswith(f"error: dead letter {'0' * 32}: it cannot be requeued: not a request")
    assert len(rows("list")) == 1


def test_letters_that_are_none_are_listed_shown_and_dropped_and_stop_no_other(
    redis_url: str, start_worker: StartWorker
) -> None:
    bury(redis_url, letter("ab" * 16, "first"), *GARBAGE, letter("cd" * 16, "last"))
    found = rows("list")
    assert [row["id"] for row in found] == ["cd" * 16, *[""] * len(GARBAGE), "ab" * 16]
    assert [row["reason"] for row in found[1:-1]] == ["these bytes are no dead letter"] * len(GARBAGE)
    names = [line.split()[0] for line in out("list").splitlines()[1:]]
    assert names == ["cd" * 16, "#6", "#5", "#4", "#3", "#2", "ab" * 16]
    for position, data in enumerate(GARBAGE, start=2):
        assert json.loads(out("show", f"#{position}", "--payload", "--json"))["hex"] == data.hex()
        assert "hex" not in out("show", f"#{position}")
    result = run("requeue", "--all", "--json")
    assert result.exit_code == 9
    assert result.stderr.count("error: dead letter #") == len(GARBAGE) == result.stderr.count("\n")
    jobs = [row["job"] for row in json.loads(result.stdout)]
    assert [job is not None for job in jobs] == [True, *[False] * len(GARBAGE), True]
    start_worker("tests.models:echo")
    with Client(redis_url) as client:
        assert [client.job(job).result(60) for job in jobs if job] == ["first", "last"]
    assert len(rows("list")) == len(GARBAGE)
    assert len(out("drop", "--all").splitlines()) == len(GARBAGE)
    assert rows("list") == []


# requeue ---------------------------------------------------------------------------------------------------


def test_a_requeued_job_has_the_value_meta_batch_key_cost_and_lane_of_the_first_request(
    redis_url: str, raw: redis_py.Redis
) -> None:
    value = {"array": np.arange(6, dtype=">i2").reshape(2, 3), 1: [b"\xff", 2**64 - 1, -1.5]}
    bury(redis_url, letter("ab" * 16, value, lane="h", meta={"a": 1}, batch_key=7, cost=0.5))
    (requeued,) = rows("requeue", "ab", "--deadline", "1h", "--result-ttl", "10m")
    (data,) = raw.lrange("batchq:{default}:requests:high@i7", 0, -1)
    request = wire.decode_request(data)
    assert (request.id.hex(), request.reply, request.timeout_ms) == (requeued["job"], 600_000, 3_600_000)
    assert (request.meta, request.batch_key, request.cost) == ({"a": 1}, 7, 0.5)
    assert request.value[1] == value[1]
    assert request.value["array"].dtype == value["array"].dtype
    assert request.value["array"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_letters_are_requeued_in_the_order_in_which_they_died(redis_url: str, raw: redis_py.Redis) -> None:
    bury(redis_url, *[letter(f"{n:032x}", n) for n in range(30)])
    out("requeue", "--all")
    requests = raw.lrange("batchq:{default}:requests", 0, -1)
    assert [wire.decode_request(data).value for data in requests] == list(range(30))


def test_a_full_queue_takes_no_more_and_the_letters_that_found_no_room_stay(
    redis_url: str, raw: redis_py.Redis
) -> None:
    raw.hset("batchq:{default}:config", "capacity", 2)
    bury(redis_url, *[letter(f"{n:032x}", n) for n in range(4)])
    result = run("requeue", "--all", "--json")
    assert result.exit_code == 8
    assert result.stderr.startswith("error: QueueFullError: queue 'default' is full: 2 requests are pending")
    assert [row["id"] for row in json.loads(result.stdout)] == [f"{n:032x}" for n in range(2)]
    assert [row["id"] for row in rows("list")] == [f"{n:032x}" for n in (3, 2)]
    raw.config_set("maxmemory", 1)
    try:
        result = run("requeue", "--all")
    finally:
        raw.config_set("maxmemory", 0)
    assert (result.exit_code, "Redis is at maxmemory" in result.stderr) == (8, True)
    assert len(rows("list")) == 2


def test_a_requeue_that_is_cut_before_it_removes_the_letter_may_be_repeated_and_the_job_runs_once(
    redis_url: str, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(redis_url, letter("ab" * 16, "once"))

    class CutError(BaseException):
        pass

    async def cut(*_: object) -> bool:
        raise CutError

    with monkeypatch.context() as patch:
        patch.setattr(dead.DeadLetters, "drop", cut)
        with pytest.raises(CutError):
            CliRunner().invoke(main, ("dead", "requeue", "--all"), catch_exceptions=False)
    assert len(rows("list")) == 1  # rather twice in the queue than lost
    before, after = rows("requeue", "--all")[0]["job"], rows("list")
    assert after == []
    start_worker("tests.models:echo")
    with Client(redis_url) as client:
        assert client.job(before).result(60) == "once"
        assert client.predict("behind it") == "behind it"
        assert client.stats().completed == 2


def test_a_letter_that_cannot_be_removed_after_its_job_was_pushed_still_tells_the_jobs_id(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(redis_url, letter("ab" * 16, "once"))

    async def lost(*_: object) -> bool:
        raise LinkLostError("cut")

    monkeypatch.setattr(dead.DeadLetters, "drop", lost)
    result = run("requeue", "ab", "--json")
    (row,) = json.loads(result.stdout)
    assert result.exit_code == 9
    assert f"it is job {row['job']}, but is not removed: cut" in result.stderr
    with Client(redis_url) as client:
        assert client.job(row["job"]).state() == "pending"


def test_letters_that_several_processes_requeue_at_once_run_once(
    redis_url: str, start_worker: StartWorker, tmp_path: Any
) -> None:
    bury(redis_url, *[letter(f"{n:032x}", n) for n in range(100)])
    command = [sys.executable, "-m", "batchq_cli", "dead", "requeue", "--all", "--json"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    jobs = {row["id"]: row["job"] for output in outputs for row in json.loads(output)}
    assert len(jobs) == 100
    assert rows("list") == []
    (tmp_path / "open").touch()
    start_worker("tests.models:gate", "--model-arg", f"path={tmp_path}")
    with Client(redis_url) as client:
        assert [client.job(job).result(60) for _, job in sorted(jobs.items())] == list(range(100))
        assert client.predict("behind them") == "behind them"
    started = (tmp_path / "started").read_text().split("\n")[:-1]
    assert sorted(started) == sorted([*map(str, range(100)), "behind them"])


# drop ------------------------------------------------------------------------------------------------------


def test_drop_removes_exactly_the_letters_that_are_meant(redis_url: str, raw: redis_py.Redis) -> None:
    twins = (b"twin", letter("cd" * 16), b"twin")
    bury(redis_url, letter("ab" * 16), *twins, letter("ef" * 16), b"")
    before = raw.lrange(DEAD, 0, -1)  # the newest first: '', ef, twin, cd, twin, ab
    assert out("drop", "ab", "#6", "#2", "#2").splitlines() == [
        f"{'ab' * 16} is dropped",
        "#2 is dropped",
        "#6 is dropped",
    ]
    # of those that are alike it was the oldest
    assert raw.lrange(DEAD, 0, -1) == before[1:4]
    assert rows("drop", "cdcd") == [{"id": "cd" * 16, "position": 1, "dropped": True, "error": None}]
    assert [row["id"] for row in rows("list")] == ["ef" * 16, ""]


def test_what_comes_while_letters_are_dropped_stays_and_what_goes_is_no_error(
    redis_url: str, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(redis_url, *[letter(f"{n:032x}", n) for n in range(25)])
    drop = dead.DeadLetters.drop

    async def busy(self: dead.DeadLetters, *args: Any) -> bool:
        raw.lpush(DEAD, letter("ff" * 16, raw.llen(DEAD)))  # one more comes, and
        raw.lrem(DEAD, 0, raw.lindex(DEAD, -3))  # somebody else drops one in the middle
        return await drop(self, *args)

    monkeypatch.setattr(dead.DeadLetters, "drop", busy)
    result = run("drop", "--all")
    assert result.exit_code == 0
    assert result.stdout.count(" is dropped") + result.stderr.count(" is gone: ") == 25
    assert result.stderr.count(" is gone: ") > 0
    left = rows("list")
    assert left
    assert {row["id"] for row in left} == {"ff" * 16}


@pytest.mark.parametrize("command", ["drop", "requeue"])
def test_either_ids_or_all_must_be_given(command: str) -> None:
    for args in ((command,), (command, "ab", "--all")):
        result = run(*args)
        assert (result.exit_code, "either IDs or --all is needed" in result.stderr) == (2, True)


# the list, and Redis ---------------------------------------------------------------------------------------


def test_the_newest_thousand_are_kept_and_no_longer_than_a_week(redis_url: str, raw: redis_py.Redis) -> None:
    for start in range(0, 1020, 60):
        bury(redis_url, *[letter(f"{n:032x}", n) for n in range(start, start + 60)])
    found = rows("list")
    assert DEAD_LETTERS == 1000
    assert [row["id"] for row in found] == [f"{n:032x}" for n in range(1019, 19, -1)]
    assert DEAD_TTL_S == 7 * 86_400
    assert DEAD_TTL_S - 60 < raw.ttl(DEAD) <= DEAD_TTL_S
    assert json.loads(out("show", f"{20:032x}", "--json"))["position"] == 1
    out("drop", f"{500:032x}")
    assert raw.ttl(DEAD) > 0
    assert len(out("requeue", "--all").splitlines()) == 999


def test_the_group_alone_shows_its_help_and_redis_trouble_has_its_exit_codes() -> None:
    assert "batchq dead requeue" in out()
    nowhere = "redis://127.0.0.1:1/0"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url, words in (
            (nowhere, "cannot be reached"),
            (f"redis://127.0.0.1:{silent.getsockname()[1]}/0", "has not answered within 0.1 s"),
        ):
            for args in (("list",), ("show", "ab"), ("requeue", "--all"), ("drop", "--all")):
                result = run(*args, "--redis", url, "--timeout", "100ms")
                assert result.exit_code == 6
                assert words in result.stderr
