"""Client, the one for threads, with a real Redis and real workers."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import redis as redis_py

from batchq import AsyncClient, exchange
from batchq.errors import (
    BackendAuthError,
    BackendUnavailableError,
    ClientClosedError,
    ConfigError,
    DeadlineExceededError,
    EncodeError,
    JobCancelledError,
    JobNotFoundError,
    ModelError,
    NoWorkerError,
    PayloadTooLargeError,
    QueueFullError,
)
from batchq.slots import Slot, TimedLink
from batchq.store import LinkLostError
from batchq.sync import Client
from batchq_cli.embedded import EmbeddedRedis
from tests.chaos.proxy import Proxy
from tests.conftest import ROOT, StartWorker

PATIENCE = 30.0
"""Seconds after which a test that waits for an event gives up."""


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.005)


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def connections(raw: redis_py.Redis, command: str = "") -> list[dict[str, str]]:
    """Redis' view of the connections other than our own, optionally those that last sent one command."""
    own = raw.client_id()
    return [c for c in raw.client_list() if int(c["id"]) != own and c["cmd"].startswith(command)]


def pending(raw: redis_py.Redis) -> int:
    return sum(raw.llen(f"batchq:{{default}}:heads{lane}") for lane in ("", ":high", ":low"))


# predict ---------------------------------------------------------------------------------------------------


def test_each_of_32_threads_gets_the_answers_to_its_own_values(
    redis_url: str, start_worker: StartWorker, threads: ThreadPoolExecutor
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0.002")
    with Client(redis_url) as client:

        def ask(thread: int) -> list[object]:
            return [client.predict({"thread": thread, "n": n}) for n in range(50)]

        for thread, answers in enumerate(threads.map(ask, range(32))):
            assert answers == [{"thread": thread, "n": n} for n in range(50)]


def test_it_has_no_thread_of_its_own(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo", "--max-delay", "0")
    before = threading.enumerate()
    with Client(redis_url) as client:
        assert client.predict(1) == 1
        assert list(client.map([2, 3])) == [2, 3]
        assert threading.enumerate() == before


def test_values_of_every_kind_come_back_as_they_were(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo", "--max-delay", "0")
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    with Client(redis_url) as client:
        for value in (None, True, -1, 1.5, "ü", b"\0", [1, [2]], {"a": {1: 2}}):
            assert client.predict(value, timeout=30) == value
        answer = client.predict(array)
        assert (answer.dtype, answer.tolist()) == (array.dtype, array.tolist())
        answer[0, 0] = 7  # a copy of the caller's own
        assert len(client.predict(b"x" * 10_000_000, timeout=60)) == 10_000_000


def test_what_is_wrong_with_a_value_is_said_before_anything_is_sent(
    redis_url: str, raw: redis_py.Redis
) -> None:
    with Client(redis_url, max_payload=2048) as client:
        with pytest.raises(EncodeError, match=r"value\.a"):
            client.predict({"a": object()})
        with pytest.raises(PayloadTooLargeError):
            client.predict(b"x" * 3000)
        for wrong in (
            {"timeout": 0},
            {"timeout": 86_401},
            {"priority": "urgent"},
            {"cost": -1},
            {"meta": 3},
            {"batch_key": 1.5},
        ):
            with pytest.raises(ConfigError):
                client.predict(1, **wrong)
        assert connections(raw) == []


def test_a_model_error_reaches_the_caller_whose_value_it_was(
    redis_url: str, start_worker: StartWorker, threads: ThreadPoolExecutor
) -> None:
    start_worker("tests.models:fails_for_bad")
    with Client(redis_url) as client:
        good = threads.submit(client.predict, "good")
        with pytest.raises(ModelError, match="this input is bad") as caught:
            client.predict("bad")
        assert caught.value.error_type == "ValueError"
        assert caught.value.request_id is not None
        assert good.result() == "GOOD"


@pytest.mark.parametrize("timeout", [0.3, 1.0])
def test_without_a_worker_the_deadline_comes_and_says_why(
    redis_url: str, start_worker: StartWorker, timeout: float
) -> None:
    start_worker("tests.models:echo", queue="sentiment")
    with Client(redis_url, queue="sentiment") as other, Client(redis_url, queue="sentimnet") as client:
        assert other.predict(1) == 1
        client.ping()
        with pytest.raises(
            DeadlineExceededError,
            match=r"no live worker on 'sentimnet'; live queues: 'sentiment' \(1 worker\)",
        ):
            client.predict(1, timeout=timeout)


def test_with_fail_fast_no_worker_is_an_error_at_once(redis_url: str, raw: redis_py.Redis) -> None:
    with Client(redis_url, fail_fast=True) as client:
        with pytest.raises(NoWorkerError):
            client.predict(1, timeout=3600)
        with pytest.raises(NoWorkerError):
            client.predict_many([1, 2], timeout=3600)
        assert pending(raw) == 0


def test_a_call_that_timed_out_leaves_no_connection_and_spoils_no_later_one(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis, threads: ThreadPoolExecutor
) -> None:
    with Client(redis_url) as client:
        late = [threads.submit(client.predict, n, timeout=0.3) for n in range(8)]
        for future in late:
            with pytest.raises(DeadlineExceededError):
                future.result(PATIENCE)
        until(lambda: connections(raw) == [], "the end of the connections")
        start_worker("tests.models:echo")
        assert list(threads.map(client.predict, range(100, 140))) == list(range(100, 140))


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(redis_url: str, raw: redis_py.Redis) -> None:
    with Client(redis_url, capacity=2) as client:
        client.submit(1)
        client.submit(2)
        with pytest.raises(QueueFullError, match="2 requests are pending; nothing drains it") as caught:
            client.predict(3, timeout=3600)
        assert caught.value.headers == {"Retry-After": "60"}
        with pytest.raises(QueueFullError):
            client.submit(4)
        assert pending(raw) == 2


def test_replies_that_were_read_do_not_pile_up(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0")
    with Client(redis_url) as client:
        for n in range(20):
            client.predict(n)
        assert len(raw.keys("batchq:{default}:repl*")) <= 1
        client.predict(b"x" * 200_000)
        assert raw.keys("batchq:{default}:repl*") == []
        client.predict_many([b"x" * 200_000] * 3)
        assert list(client.map(range(500))) == list(range(500))
        client.predict(1)
        assert len(raw.keys("batchq:{default}:repl*")) <= 1


# the pool --------------------------------------------------------------------------------------------------


def test_more_threads_than_connections_take_turns(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis, threads: ThreadPoolExecutor
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0.001")
    until(lambda: len(connections(raw)) == 3, "the connections of the worker's parent and child")
    before = len(connections(raw))
    with Client(redis_url, max_connections=3) as client:
        answers = threads.map(lambda n: [client.predict(n * 100 + i) for i in range(20)], range(32))
        assert list(answers) == [[n * 100 + i for i in range(20)] for n in range(32)]
        assert len(connections(raw)) <= before + 3


def test_where_all_connections_are_in_use_a_call_waits_no_longer_than_its_timeout(
    redis_url: str, raw: redis_py.Redis, threads: ThreadPoolExecutor
) -> None:
    with Client(redis_url, max_connections=1) as client:
        first = threads.submit(client.predict, 1, timeout=60)
        until(lambda: connections(raw, "blmove"), "the first call's wait")
        with pytest.raises(BackendUnavailableError, match=r"all 1 connections .* raise max_connections"):
            client.predict(2, timeout=0.2)
        client.close()
        with pytest.raises(ClientClosedError):
            first.result(PATIENCE)


@pytest.mark.parametrize("wrong", [0, 10_001, True, 2.0])
def test_max_connections_out_of_range_is_an_error(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"max_connections=.*1 to 10,000.*256"):
        Client(max_connections=wrong)  # type: ignore[arg-type]


def test_close_wakes_the_threads_that_wait_and_ends_the_client(
    redis_url: str, raw: redis_py.Redis, threads: ThreadPoolExecutor
) -> None:
    client = Client(redis_url, max_connections=4)
    job = client.submit("x")
    waiting = [
        threads.submit(client.predict, 1, timeout=3600),
        threads.submit(client.predict_many, [1, 2], timeout=3600),
        threads.submit(lambda: list(client.map([1, 2]))),
        threads.submit(job.result, 3600),
        threads.submit(client.predict, 2, timeout=3600),  # waits for a connection
    ]
    until(lambda: len(connections(raw, "blmove")) == 2 or client._pools[os.getpid()]._waiting, "the waits")
    until(lambda: client._pools[os.getpid()]._waiting, "a wait for a connection")
    client.close()
    client.close()
    for future in waiting:
        with pytest.raises(ClientClosedError):
            future.result(PATIENCE)
    for call in (
        lambda: client.predict(1),
        lambda: client.predict_many([1]),
        lambda: client.map([1]),
        lambda: client.submit(1),
        lambda: client.job("x"),
        job.state,
        job.result,
        job.cancel,
        client.stats,
        client.ping,
    ):
        with pytest.raises(ClientClosedError):
            call()
    until(lambda: connections(raw) == [], "the end of the connections")


def test_a_client_that_is_dropped_without_close_warns_and_lets_go(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis
) -> None:
    worker = start_worker("tests.models:echo")
    client = Client(redis_url)
    client.predict(1)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del client
    gc.collect()
    worker.stop()
    until(lambda: connections(raw) == [], "the end of the connections")


def test_a_client_that_was_never_used_may_be_dropped() -> None:
    client = Client()
    del client
    gc.collect()


def test_a_redis_client_of_the_users_own_is_used_instead_of_a_url(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo")
    with redis_py.Redis.from_url(redis_url) as own, Client(redis=own) as client:
        assert client.predict(1) == 1
        assert 0 < client.ping() < 60
    with (
        Client(redis=redis_py.asyncio.Redis.from_url(redis_url)) as client,
        pytest.raises(ConfigError, match=r"redis\.Redis"),
    ):
        client.ping()


FORK = """
import os, sys
from batchq.sync import Client

client = Client(sys.argv[1])
if sys.argv[2] == "after":
    assert client.predict("parent") == "parent"
    link = client._pools[os.getpid()]._idle[0].link
children = []
for n in range(3):
    pid = os.fork()
    if pid == 0:
        try:
            answers = [client.predict(f"{n}-{i}") for i in range(20)]
            assert answers == [f"{n}-{i}" for i in range(20)], answers
            assert list(client.map(range(50))) == list(range(50))
            client.close()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(pid)
assert [client.predict(f"p-{i}") for i in range(20)] == [f"p-{i}" for i in range(20)]
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
assert client.predict("still here") == "still here"
if sys.argv[2] == "after":  # and no child has closed the parent's connection
    assert client._pools[os.getpid()]._idle == [slot for slot in client._pools[os.getpid()]._idle if slot.link is link]
client.close()
"""


@pytest.mark.parametrize("first_use", ["before", "after"])
def test_it_works_in_forked_children_whether_or_not_it_was_used(
    redis_url: str, start_worker: StartWorker, first_use: str
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0.001")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(FORK), redis_url, first_use],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


# predict_many and map --------------------------------------------------------------------------------------


def test_predict_many_keeps_the_order(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo", "--max-batch-size", "7")
    with Client(redis_url) as client:
        assert client.predict_many(n for n in range(100)) == list(range(100))
        assert client.predict_many([]) == []


def test_predict_many_is_admitted_all_or_nothing(redis_url: str, raw: redis_py.Redis) -> None:
    with Client(redis_url, capacity=10) as client:
        client.submit("in the way")
        with pytest.raises(QueueFullError, match="too many for 10 more at once"):
            client.predict_many(range(10), timeout=3600)
        assert pending(raw) == 1
        with pytest.raises(ConfigError, match=r"11 values: the queue's capacity is 10; use map\(\)"):
            client.predict_many(range(11))


def test_more_values_than_the_queues_own_capacity_point_to_map(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo", "--capacity", "5")
    with Client(redis_url) as client, pytest.raises(ConfigError, match=r"capacity is 5; use map\(\)"):
        client.predict_many(range(6))


def test_the_first_error_of_predict_many_cancels_the_rest(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis
) -> None:
    start_worker("tests.models:fails_for_bad", "--max-batch-size", "1", "--max-delay", "0")
    with Client(redis_url) as client:
        with pytest.raises(ModelError, match="this input is bad"):
            client.predict_many(["bad", *["good"] * 2000])
        until(lambda: pending(raw) == 0, "the end of the queue")
        assert client.stats().completed < 2001
        assert client.predict("good") == "GOOD"


def test_with_return_exceptions_errors_stand_in_their_places(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:fails_for_bad")
    with Client(redis_url) as client:
        for answers in (
            client.predict_many(["a", "bad", "b"], return_exceptions=True),
            list(client.map(["a", "bad", "b"], return_exceptions=True)),
        ):
            assert [type(answer) for answer in answers] == [str, ModelError, str]
        answers = list(client.map(["a", object(), "b"], return_exceptions=True))
        assert [type(answer) for answer in answers] == [str, EncodeError, str]


def test_map_keeps_the_order_and_takes_values_as_it_needs_them(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0.001")
    taken = 0

    def values() -> Iterator[int]:
        nonlocal taken
        for n in range(2000):
            taken += 1
            yield n

    with Client(redis_url) as client:
        answers = client.map(values(), concurrency=50)
        assert taken == 0
        for n, answer in enumerate(answers):
            assert answer == n
            assert taken <= n + 1 + 50
        assert taken == 2000


def test_map_without_order_gives_each_answer_once(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo", "--max-delay", "0.001")
    start_worker("tests.models:echo", "--max-delay", "0.001")
    with Client(redis_url) as client:
        assert sorted(client.map(range(2000), ordered=False)) == list(range(2000))


def test_map_waits_where_the_queue_is_full(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo", "--capacity", "6", "--max-batch-size", "2", "--max-delay", "0")
    with Client(redis_url) as client:
        assert list(client.map(range(300), concurrency=64)) == list(range(300))
        assert client.stats().rejected > 0


def test_an_error_ends_map_after_the_answers_before_it_and_cancels_the_rest(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis
) -> None:
    start_worker("tests.models:fails_for_bad", "--max-batch-size", "1", "--max-delay", "0")
    with Client(redis_url) as client:
        seen = []
        with pytest.raises(ModelError):
            for answer in client.map(["a", "b", "bad", *["c"] * 900], concurrency=1000):
                seen.append(answer)
        assert seen == ["A", "B"]
        until(lambda: pending(raw) == 0, "the end of the queue")
        assert client.stats().completed < 903
        assert client._pools[os.getpid()]._used == set()


def test_leaving_map_early_gives_its_connection_back(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo")
    with Client(redis_url, max_connections=1) as client:
        for answer in client.map(range(1000)):
            if answer == 10:
                break
        assert client.predict("next") == "next"


def test_map_ends_with_the_error_of_its_source(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo")

    def values() -> Iterator[int]:
        yield 1
        raise KeyError("mine")

    with Client(redis_url, max_connections=1) as client:
        with pytest.raises(KeyError, match="mine"):
            list(client.map(values()))
        assert client.predict("next") == "next"


def test_values_of_a_slow_source_leave_before_there_is_a_full_window(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0")
    with Client(redis_url) as client:
        completed = "batchq:{default}:counters"

        def values() -> Iterator[int]:
            for n in range(3):
                yield n
                if n:  # a value that took its time to come has left by now
                    until(lambda n=n: int(raw.hget(completed, "completed") or 0) >= n, f"the answer to {n}")
                else:
                    time.sleep(0.01)

        assert list(client.map(values())) == [0, 1, 2]


def test_a_caller_who_lets_map_wait_until_its_replies_have_expired_misses_none(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0", "--max-batch-size", "4")
    monkeypatch.setattr(exchange, "_LONG_PAUSE", 0.1)
    monkeypatch.setattr(exchange, "PAUSE", 0.01)
    with Client(redis_url) as client:
        answers = client.map(range(300), concurrency=100)
        assert next(answers) == 0
        until(
            lambda: int(raw.hget("batchq:{default}:counters", "completed") or 0) >= 100,
            "the first 100 answers",
        )
        time.sleep(0.15)  # longer than a reply is kept, as this test has it
        raw.delete(*raw.keys("batchq:{default}:replies:*"))
        assert list(answers) == list(range(1, 300))


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"concurrency": 100_001}, {"timeout": -1}, {"priority": "no"}]
)
def test_a_wrong_argument_of_map_is_an_error_at_the_call(redis_url: str, wrong: dict[str, object]) -> None:
    with Client(redis_url) as client, pytest.raises(ConfigError):
        client.map([1], **wrong)  # type: ignore[arg-type]


# jobs ------------------------------------------------------------------------------------------------------


def test_a_job_lives_from_submit_to_its_result_and_any_client_may_read_it(
    redis_url: str, start_worker: StartWorker, threads: ThreadPoolExecutor
) -> None:
    with Client(redis_url) as client, Client(redis_url) as other:
        job = client.submit("a", id="order 7", result_ttl=600)
        assert (job.id, job.state()) == ("order 7", "pending")
        assert client.submit("b", id="order 7").id == "order 7"
        with pytest.raises(DeadlineExceededError, match="'order 7' has no result yet"):
            job.result(timeout=0.05)
        waiting = threads.submit(other.job("order 7").result, 60)
        start_worker("tests.models:fails_for_bad")
        assert waiting.result(PATIENCE) == "A"
        assert other.job("order 7").result() == "A"
        assert job.state() == "done"
        assert job.cancel() is False
        failed = client.submit("bad")
        with pytest.raises(ModelError):
            failed.result()
        assert failed.state() == "failed"


def test_a_job_that_is_cancelled_is_not_run(redis_url: str, start_worker: StartWorker) -> None:
    with Client(redis_url) as client:
        job = client.submit("x")
        assert job.cancel() is True
        assert job.cancel() is False
        with pytest.raises(JobCancelledError):
            job.result()
        start_worker("tests.models:echo")
        assert client.predict("y") == "y"
        assert client.stats().completed == 1


def test_an_unknown_job_is_unknown(redis_url: str) -> None:
    with Client(redis_url) as client:
        job = client.job("nobody's")
        assert job.state() == "unknown"
        for call in (job.result, job.cancel):
            with pytest.raises(JobNotFoundError):
                call()
        for wrong in ("", "x" * 257, 5):
            with pytest.raises(ConfigError, match="id="):
                client.submit(1, id=wrong)  # type: ignore[arg-type]


# faults ----------------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_while_a_call_waits_costs_nothing(
    redis_url: str,
    start_worker: StartWorker,
    raw: redis_py.Redis,
    threads: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    start_worker("tests.models:gate", "--model-arg", f"path={tmp_path}", "--max-batch-size", "1")
    with Client(redis_url) as client:
        calls = [threads.submit(client.predict, n, timeout=60) for n in range(3)]
        many = threads.submit(client.predict_many, [3, 4], timeout=60)
        until((tmp_path / "started").exists, "the model's run")
        until(lambda: len(connections(raw, "blmove")) == 3 and connections(raw, "xread"), "the waits")
        for connection in connections(raw, "blmove") + connections(raw, "xread"):
            raw.client_kill_filter(_id=connection["id"])
        (tmp_path / "open").touch()
        assert [call.result(PATIENCE) for call in calls] == [0, 1, 2]
        assert many.result(PATIENCE) == [3, 4]
        assert sorted((tmp_path / "started").read_text().split()) == ["0", "1", "2", "3", "4"]


def test_a_request_that_redis_has_lost_is_pushed_again(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis, threads: ThreadPoolExecutor
) -> None:
    with Client(redis_url) as client:
        calls = [threads.submit(client.predict, n, timeout=60) for n in range(4)]
        many = threads.submit(client.predict_many, [10, 11], timeout=60)
        until(lambda: pending(raw) == 6 and len(connections(raw, "blmove")) == 4, "the requests")
        raw.flushall()
        raw.script_flush()
        start_worker("tests.models:echo")
        assert [call.result(PATIENCE) for call in calls] == [0, 1, 2, 3]
        assert many.result(PATIENCE) == [10, 11]


def test_a_push_whose_answer_is_lost_is_in_the_queue_once(
    redis_url: str, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start_worker("tests.models:gate", "--model-arg", f"path={tmp_path}", "--max-batch-size", "1")
    (tmp_path / "open").touch()
    read = Slot._read
    cut = []

    def cut_once(link: TimedLink, count: int, until: float) -> list[object]:
        answers = read(link, count, until)
        if count > 3 and not cut:  # a push is the only verb with so many answers
            cut.append(True)
            link.close()
            raise LinkLostError("cut")
        return answers

    monkeypatch.setattr(Slot, "_read", staticmethod(cut_once))
    with Client(redis_url) as client:
        for call, answer in (
            (lambda: client.predict("a"), "a"),
            (lambda: client.predict_many(["b", "c"]), ["b", "c"]),
            (lambda: list(client.map(["d", "e"])), ["d", "e"]),
            (lambda: client.submit("f").result(), "f"),
        ):
            cut.clear()
            assert call() == answer
            assert cut
        assert sorted((tmp_path / "started").read_text().split()) == ["a", "b", "c", "d", "e", "f"]
        assert client.stats().accepted == 6


def test_connections_that_were_closed_while_idle_are_replaced(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis, threads: ThreadPoolExecutor
) -> None:
    start_worker("tests.models:echo")
    with Client(redis_url) as client:
        assert list(threads.map(client.predict, range(8))) == list(range(8))
        for call, answer in (
            (lambda: client.predict(1), 1),
            (lambda: client.ping() > 0, True),
            (lambda: list(client.map([2])), [2]),
        ):
            raw.client_kill_filter(_type="normal", skipme=True)
            assert call() == answer


def test_an_exception_in_the_middle_of_a_call_leaves_the_client_usable(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis
) -> None:
    class InterruptedCall(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise InterruptedCall

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Client(redis_url, max_connections=1) as client:
            for call in (
                lambda: client.predict(1, timeout=60),
                lambda: client.predict_many([1, 2], timeout=60),
                lambda: list(client.map([1])),
                lambda: client.submit(1, id="j").result(60),
            ):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(InterruptedCall):
                    call()
            until(lambda: connections(raw) == [], "the end of the connections")
            start_worker("tests.models:echo")
            assert client.predict("next") == "next"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_each_item_of_map_has_a_timeout_of_its_own(redis_url: str, start_worker: StartWorker) -> None:
    with Client(redis_url) as client:
        late = list(client.map(range(3), timeout=0.2, return_exceptions=True))
        assert [type(error) for error in late] == [DeadlineExceededError] * 3
        with pytest.raises(DeadlineExceededError):
            list(client.map(range(3), timeout=0.2))
        start_worker("tests.models:slow", "--max-batch-size", "1", "--max-delay", "0")
        taken = client.map(range(60), timeout=2.5, concurrency=5)  # 3 s in all, 0.25 s each
        assert list(taken) == list(range(60))


@pytest.fixture
def own_redis(redis_server: EmbeddedRedis) -> Iterator[EmbeddedRedis]:
    """A server that a test may stop."""
    with EmbeddedRedis() as server:
        yield server


def test_a_restart_of_redis_delays_a_call_and_no_more(
    own_redis: EmbeddedRedis, start_worker: StartWorker, threads: ThreadPoolExecutor
) -> None:
    with Client(own_redis.url) as client, redis_py.Redis(port=own_redis.port, protocol=2) as admin:
        call = threads.submit(client.predict, "held", timeout=60)
        until(lambda: connections(admin, "blmove"), "the wait")
        own_redis.stop()
        late = threads.submit(client.predict, "made meanwhile", timeout=60)
        own_redis.start()  # it has lost everything
        start_worker("tests.models:echo", url=own_redis.url)
        assert call.result(PATIENCE) == "held"
        assert late.result(PATIENCE) == "made meanwhile"


def test_while_redis_does_not_answer_calls_end_at_their_timeout_and_say_so(
    own_redis: EmbeddedRedis, threads: ThreadPoolExecutor
) -> None:
    url = f"{own_redis.url}?socket_connect_timeout=3600"
    with (
        Client(url, timeout=0.3) as client,
        redis_py.Redis(port=own_redis.port, protocol=2) as admin,
    ):
        client.ping()
        job = client.submit(1)
        waits = threads.submit(client.predict, 1, timeout=0.5)
        until(lambda: connections(admin, "blmove"), "the wait")
        os.kill(own_redis.pid, signal.SIGSTOP)
        try:
            with pytest.raises((DeadlineExceededError, BackendUnavailableError)):
                waits.result(PATIENCE)
            for call in (
                lambda: client.predict(1),
                lambda: client.predict_many([1]),
                lambda: list(client.map([1], timeout=0.3)),
                lambda: client.submit(1),
                lambda: job.result(0.3),
                client.stats,
                client.ping,
            ):
                with pytest.raises(BackendUnavailableError):
                    threads.submit(call).result(PATIENCE)
            threads.submit(client.close).result(PATIENCE)
        finally:
            os.kill(own_redis.pid, signal.SIGCONT)
    own_redis.stop()
    with Client(own_redis.url) as client, pytest.raises(BackendUnavailableError, match="cannot be reached"):
        client.predict(1, timeout=0.3)


def test_a_wrong_password_is_an_error_at_once(redis_server: EmbeddedRedis) -> None:
    with EmbeddedRedis("--requirepass", "right") as server:
        with Client(server.url.replace("//", "//:wrong@")) as client:
            for call in (lambda: client.predict(1, timeout=3600), lambda: client.submit(1), client.stats):
                with pytest.raises(BackendAuthError):
                    call()
        with Client(server.url.replace("//", "//:right@")) as client:
            assert client.stats().depth["normal"] == 0
            assert "right" not in repr(client)


def test_at_maxmemory_what_waits_is_answered_and_what_comes_is_refused(
    redis_url: str,
    start_worker: StartWorker,
    raw: redis_py.Redis,
    threads: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    start_worker("tests.models:gate", "--model-arg", f"path={tmp_path}")
    with Client(redis_url) as client:
        calls = [threads.submit(client.predict, n, timeout=60) for n in range(3)]
        until((tmp_path / "started").exists, "the model's run")
        try:
            raw.config_set("maxmemory", 1)
            with pytest.raises(QueueFullError, match="maxmemory"):
                client.predict("more")
            until(
                lambda: len(connections(raw, "lindex")) == 3,
                "the calls that look, as they are not allowed to wait",
            )
            (tmp_path / "open").touch()
            assert [call.result(PATIENCE) for call in calls] == [0, 1, 2]
        finally:
            raw.config_set("maxmemory", 0)
        assert client.predict("again") == "again"


async def test_a_job_may_wait_for_as_long_as_it_was_given_whatever_the_clients_timeout(
    redis_url: str,
) -> None:
    """The client's timeout is for getting it into the queue."""
    with Client(redis_url, timeout=1) as client:
        client.submit("from a thread")
    async with AsyncClient(redis_url, timeout=1) as other:
        await other.submit("from asyncio")
    with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
        heads = raw.lrange("batchq:{default}:heads", 0, -1)
    assert [round(int(head.split(b";")[1]) / 1e6) for head in heads] == [86_400, 86_400]


@pytest.mark.parametrize("many", [False, True], ids=["own key", "stream"])
def test_a_client_that_was_away_for_longer_than_replies_are_kept_asks_again(
    redis_server: EmbeddedRedis,
    redis_url: str,
    start_worker: StartWorker,
    raw: redis_py.Redis,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    many: bool,
) -> None:
    monkeypatch.setattr("batchq.exchange._LONG_PAUSE", 0.2)
    proxy = Proxy(redis_server.port, 1)
    try:
        with Client(f"redis://127.0.0.1:{proxy.port}/0", timeout=60) as client:
            call = (
                threads.submit(client.predict_many, ["x", "y"])
                if many
                else threads.submit(client.predict, "x")
            )
            until(lambda: pending(raw) == 1 + many, "the push")
            proxy.refuse = True
            proxy.cut()
            start_worker("tests.models:echo")
            pattern = "batchq:{default}:repl*:*"
            until(lambda: raw.keys(pattern), "the reply")
            until(lambda: not raw.exists("batchq:{default}:leases"), "all of it")
            raw.delete(*raw.keys(pattern))  # as after 60 s
            time.sleep(0.3)
            proxy.refuse = False
            assert call.result(PATIENCE) == (["x", "y"] if many else "x")
    finally:
        proxy.close()
