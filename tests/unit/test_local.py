"""What a user of LocalClient, AsyncLocalClient and @batched may rely on."""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from batchq.boxes import Request
from batchq.decorator import batched
from batchq.device import PlainDevice
from batchq.errors import (
    ClientClosedError,
    ConfigError,
    DeadlineExceededError,
    EncodeError,
    JobCancelledError,
    JobNotFoundError,
    ModelError,
    PayloadTooLargeError,
    QueueFullError,
    RequestError,
)
from batchq.local import AsyncLocalClient, LocalClient

PATIENCE = 30.0
"""Seconds after which a test that waits for an event gives up."""


class Gate:
    """A model that doubles, notes its batches, and runs each only when it is let."""

    def __init__(self, *, closed: bool = True) -> None:
        self.batches: list[list[object]] = []
        self._closed = closed
        self._started = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def load(self):
        return self.predict

    def predict(self, inputs):
        self.batches.append(inputs)
        self._started.release()
        if self._closed:
            assert self._go.acquire(timeout=PATIENCE)
        return [self.answer(x) for x in inputs]

    def answer(self, value):
        return ValueError("no") if value == "bad" else {1, 2} if value == "set" else value * 2

    def await_batch(self) -> None:
        assert self._started.acquire(timeout=PATIENCE)

    def let(self, batches: int) -> None:
        self._go.release(batches)

    def open(self) -> None:
        self._closed = False
        self._go.release(1000)


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.open()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def double():
    return lambda inputs: [2 * x for x in inputs]


def echo():
    return lambda inputs: inputs


@pytest.fixture
def client() -> Iterator[LocalClient]:
    with LocalClient(double, max_delay=0) as found:
        yield found


def occupied(gate: Gate, **settings) -> LocalClient:
    """Return a client whose model is busy with one request, so that all that follow wait."""
    client = LocalClient(gate.load, **{"max_delay": 0, **settings})
    client.submit(0, id="first")
    gate.await_batch()
    return client


# one request, many requests


def test_one_value_gets_one_answer(client):
    assert client.predict(21) == 42
    assert client.predict([1]) == [1, 1]


def test_many_threads_each_get_their_own_answer():
    with LocalClient(double) as client, ThreadPoolExecutor(16) as threads:
        assert list(threads.map(client.predict, range(1000))) == [2 * n for n in range(1000)]
        assert client.stats().batches < 1000


async def test_many_tasks_each_get_their_own_answer_from_full_batches(gate):
    gate.open()
    async with AsyncLocalClient(gate.load, max_batch_size=32, max_delay=60) as client:
        answers = await asyncio.gather(*(client.predict(n) for n in range(320)))
    assert answers == [2 * n for n in range(320)]
    assert [len(batch) for batch in gate.batches] == [32] * 10


def test_a_full_batch_does_not_wait_for_max_delay(gate):
    gate.open()
    with LocalClient(gate.load, max_batch_size=4, max_delay=60) as client:
        assert client.predict_many([1, 2, 3, 4]) == [2, 4, 6, 8]
    assert gate.batches == [[1, 2, 3, 4]]


def test_what_came_while_the_model_ran_is_the_next_batch_high_lane_first(gate):
    with occupied(gate, max_batch_size=4) as client:
        for priority, value in [("low", 1), ("normal", 2), ("high", 3), ("normal", 4), ("low", 5)]:
            client.submit(value, id=str(value), priority=priority)
        gate.open()
        assert [client.job(str(n)).result() for n in range(1, 6)] == [2, 4, 6, 8, 10]
    assert gate.batches == [[0], [3, 2, 4, 1], [5]]


async def test_a_batch_is_handed_to_an_event_loop_in_one_call(gate, monkeypatch):
    calls = []
    async with AsyncLocalClient(gate.load, max_batch_size=100, max_delay=60) as client:
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *args, **kw: calls.append(args) or original(*args, **kw)
        )
        gate.open()
        await asyncio.gather(*(client.predict(n) for n in range(100)))
        assert len(calls) == 1


def test_one_async_client_serves_one_event_loop_after_another():
    client = AsyncLocalClient(double, max_delay=0)
    assert asyncio.run(client.predict(1)) == 2
    assert asyncio.run(client.predict(2)) == 4
    asyncio.run(client.aclose())


def test_one_async_client_serves_two_live_event_loops(gate):
    client = AsyncLocalClient(gate.load, max_batch_size=2, max_delay=60)
    gate.open()
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(lambda n: asyncio.run(client.predict(n)), [1, 2])
        assert list(answers) == [2, 4]
    assert len(gate.batches) == 1
    asyncio.run(client.aclose())


# values travel as they do over Redis


def test_values_arrive_as_they_would_over_redis():
    with LocalClient(echo, max_delay=0) as client:
        value = {"tuple": (1, 2), "bytes": b"x", "nested": [None, True, 1.5]}
        assert client.predict(value) == {"tuple": [1, 2], "bytes": b"x", "nested": [None, True, 1.5]}


def test_arrays_are_copied_so_neither_side_sees_what_the_other_writes():
    seen = []

    def load():
        def predict(inputs):
            seen.extend(inputs)
            return inputs

        return predict

    with LocalClient(load, max_delay=0) as client:
        value = np.zeros(3, dtype="f4")
        answer = client.predict(value)
        value += 1
        seen[0] += 2
        answer += 4
    assert (value.tolist(), seen[0].tolist(), answer.tolist()) == ([1] * 3, [2] * 3, [4] * 3)


def test_a_value_that_redis_could_not_carry_is_refused_here_too(client):
    with pytest.raises(EncodeError, match=r"value\.ids: set; call list"):
        client.predict({"ids": {1}})
    with pytest.raises(EncodeError):
        client.predict(1, meta={"f": object()})


def test_an_answer_that_cannot_be_carried_fails_its_own_item(gate):
    gate.open()
    with LocalClient(gate.load, max_batch_size=2, max_delay=60) as client:
        good, bad = client.predict_many([1, "set"], return_exceptions=True)
    assert good == 2
    assert isinstance(bad, ModelError)
    assert bad.error_type == "EncodeError"
    assert "the model's answer" in str(bad)


def test_too_large_values_and_answers_are_refused():
    with LocalClient(double, max_delay=0, max_payload=1024) as client:
        with pytest.raises(PayloadTooLargeError, match="max_payload is 1,024"):
            client.predict("x" * 1100)
        with pytest.raises(PayloadTooLargeError, match="the answer"):
            client.predict("x" * 800)
    with LocalClient(double, max_delay=0, capacity_bytes=1024) as client, pytest.raises(PayloadTooLargeError):
        client.predict("x" * 1100)


# what the caller gives beside the value


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": 86_401},
        {"timeout": True},
        {"priority": "urgent"},
        {"batch_key": 1.5},
        {"batch_key": True},
        {"cost": -1},
        {"cost": math.nan},
        {"cost": math.inf},
        {"cost": 1_000_000_001},
        {"cost": "3"},
        {"meta": "text"},
    ],
)
async def test_an_option_out_of_range_is_a_config_error_everywhere(client, options):
    later = AsyncLocalClient(double)
    job_options = {"deadline" if name == "timeout" else name: value for name, value in options.items()}
    for call in [
        lambda: client.predict(1, **options),
        lambda: client.predict_many([1], **options),
        lambda: client.map([1], **options),
        lambda: client.submit(1, **job_options),
        lambda: later.map([1], **options),
    ]:
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(ConfigError):
        await later.predict(1, **options)
    with pytest.raises(ConfigError):
        await later.submit(1, **job_options)
    await later.aclose()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_size": 0},
        {"max_delay": -1},
        {"capacity": 0},
        {"timeout": 0},
        {"max_payload": 1},
        {"load": None},
        {"max_batch_cost": 0},
        {"max_batch_cost": 1.5},
        {"padded": True},
    ],
)
def test_a_setting_out_of_range_is_a_config_error_when_the_client_is_built(settings):
    with pytest.raises(ConfigError):
        LocalClient(settings.pop("load", double), **settings)


def test_a_batch_key_that_redis_could_not_carry_is_refused_here_too(client):
    for key in (2**70, "\ud800"):
        with pytest.raises(EncodeError):
            client.predict(1, batch_key=key)


# groups and costs


def test_only_requests_of_equal_keys_share_a_batch(gate):
    with occupied(gate, max_batch_size=8) as client:
        jobs = [client.submit(n, batch_key=key) for n, key in enumerate([1, "1", None, 1, "1", None])]
        gate.open()
        assert [job.result() for job in jobs] == [0, 2, 4, 6, 8, 10]
    assert sorted(gate.batches) == [[0], [0, 3], [1, 4], [2, 5]]


def test_a_group_is_full_when_its_own_requests_make_a_batch(gate):
    gate.open()
    with LocalClient(gate.load, max_batch_size=3, max_delay=60) as client:
        waiting = [client.submit(n, batch_key=n) for n in range(8)]
        assert client.predict_many([1, 2, 3], batch_key="full") == [2, 4, 6]
        assert gate.batches == [[1, 2, 3]]
        assert {job.state() for job in waiting} == {"pending"}


def test_a_group_with_a_high_request_goes_first(gate):
    with occupied(gate) as client:
        for priority, key in [("low", "l"), ("normal", "n"), ("high", "h"), ("normal", "h")]:
            last = client.submit(f"{priority}{key}", batch_key=key, priority=priority)
        gate.open()
        last.result()
        client.predict(1, priority="low")
    assert gate.batches[:3] == [[0], ["highh", "normalh"], ["normaln"]]


def test_a_batch_holds_no_more_than_its_budget_and_is_due_when_it_is_spent(gate):
    gate.open()
    with LocalClient(gate.load, max_batch_size=32, max_delay=60, max_batch_cost=10) as client:
        assert client.predict_many([1, 2], cost=5) == [2, 4]
        jobs = [client.submit(n, cost=n) for n in (6, 3, 4)]
        assert [job.result() for job in jobs[:2]] == [12, 6]
        assert jobs[2].state() == "pending"
        assert client.predict_many(["a"] * 6) == ["aa"] * 6  # without a cost a request counts 1
    assert gate.batches == [[1, 2], [6, 3], [4, *["a"] * 6]]


def test_a_padded_batch_costs_its_largest_request_times_its_size(gate):
    with occupied(gate, max_batch_cost=12, padded=True) as client:
        jobs = [client.submit(n, cost=n) for n in (4, 3, 2, 6, 1)]
        gate.open()
        assert [job.result() for job in jobs] == [8, 6, 4, 12, 2]
    assert gate.batches == [[0], [4, 3, 2], [6, 1]]


async def test_a_cost_over_the_budget_is_refused_at_once_and_harms_nobody_else(gate):
    gate.open()
    later = AsyncLocalClient(double, max_batch_cost=10)
    with LocalClient(gate.load, max_delay=60, max_batch_cost=10) as client:
        good = client.submit(1, cost=4)
        for call in [
            lambda: client.predict(1, cost=10.5),
            lambda: client.predict_many([1, 2], cost=10.5, return_exceptions=True),
            lambda: client.map([1], cost=10.5),
            lambda: client.submit(1, cost=10.5),
            lambda: later.map([1], cost=10.5),
        ]:
            with pytest.raises(RequestError, match=r"cost=10\.5.*max_batch_cost is 10") as caught:
                call()
            assert caught.value.code == "request"
        with pytest.raises(RequestError):
            await later.predict(1, cost=11)
        with pytest.raises(RequestError):
            await later.submit(1, cost=11)
        assert client.predict(2, cost=10) == 4
        assert client.stats().accepted == 2
        assert good.result() == 2
    await later.aclose()


def test_without_a_budget_any_cost_will_do(client):
    assert client.predict(1, cost=1e9) == 2


def test_a_thousand_short_lived_keys_leave_nothing_behind(gate):
    with occupied(gate, max_batch_size=4) as client:
        jobs = [client.submit(n, batch_key=f"key {n}") for n in range(1000)]
        assert all(job.cancel() for job in jobs[500:])
        gate.open()
        assert [job.result() for job in jobs[:500]] == [2 * n for n in range(500)]
        pending = client._engine._pending
        assert (pending._groups, len(pending), pending.bytes) == ({}, 0, 0)
        assert client.stats().batches == 501


class Sorting(Gate):
    """A model that tells groups and costs; a value is (key, cost, number), and its answer the number."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.asked: list[object] = []
        self.threads: set[int] = set()

    def load(self):
        return self

    def batch_key(self, value):
        self.asked.append(value[2])
        self.threads.add(threading.get_ident())
        if value[0] == "raise":
            raise LookupError("no key")
        if value[0] == "exit":
            sys.exit(3)
        return value[0]

    def cost(self, value):
        return value[1]

    def answer(self, value):
        return value[2]

    @property
    def numbers(self):
        return [[value[2] for value in batch] for batch in self.batches]


@pytest.fixture
def sorting() -> Iterator[Sorting]:
    found = Sorting()
    yield found
    found.open()


def test_a_model_tells_the_group_and_cost_of_requests_whose_callers_have_not(sorting):
    client = LocalClient(sorting.load, max_delay=0, max_batch_cost=10)
    with client:
        client.submit(("a", 1, 0))
        sorting.await_batch()
        jobs = [client.submit((key, cost, n)) for key, cost, n in [("a", 6, 1), ("b", 2, 2), ("a", 6, 3)]]
        jobs.append(client.submit(("a", 6, 4), batch_key="b", cost=1))
        jobs.append(client.submit((None, 6, 5), cost=1))
        sorting.open()
        assert [job.result() for job in jobs] == [1, 2, 3, 4, 5]
    assert sorted(sorting.numbers) == [[0], [1], [2, 4], [3], [5]]


def test_each_request_is_classified_once_on_the_models_thread_and_not_where_the_caller_did(sorting):
    sorting.open()
    with LocalClient(sorting.load, max_batch_size=4, max_delay=0.001) as client:
        values = [(n % 3, 1, n) for n in range(100)]
        assert list(client.map(values)) == list(range(100))
        assert client.predict((0, 1, 100), batch_key=7, cost=1) == 100
        assert client.predict((0, 1, 101), batch_key=7) == 101  # its cost is not known
        assert client._engine._thread is not None
        assert sorting.threads == {client._engine._thread.ident}
    assert sorted(sorting.asked) == list(range(100))


def test_requests_that_came_while_the_model_was_loaded_are_classified_too(sorting):
    loaded = threading.Event()

    def load():
        assert loaded.wait(PATIENCE)
        return sorting

    sorting.open()
    with LocalClient(load, max_delay=0, capacity=4) as client:
        jobs = [client.submit(("ab"[n % 2], 1, n)) for n in range(4)]
        with pytest.raises(QueueFullError):
            client.submit(("a", 1, 9))
        assert client.stats().depth["normal"] == 4
        assert jobs[3].cancel()
        loaded.set()
        assert [job.result() for job in jobs[:3]] == [0, 1, 2]
    assert sorting.numbers == [[0, 2], [1]]
    assert sorting.asked == [0, 1, 2]


def test_keys_of_callers_hold_for_requests_that_came_while_a_plain_model_was_loaded(gate):
    loaded = threading.Event()

    def load():
        assert loaded.wait(PATIENCE)
        return gate.predict

    gate.open()
    with LocalClient(load, max_delay=0) as client:
        jobs = [client.submit(n, batch_key="ab"[n % 2]) for n in range(4)]
        loaded.set()
        assert [job.result() for job in jobs] == [0, 2, 4, 6]
    assert sorted(gate.batches) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("settings", [{"max_batch_size": 3}, {"max_batch_cost": 100}])
def test_what_a_model_says_fills_a_batch_that_does_not_wait_then(sorting, settings):
    sorting.open()
    with LocalClient(sorting.load, max_delay=60, **settings) as client:
        other = client.submit(("other", 1, 9))
        first = client.submit(("a", 60, 1))
        client.ping()  # by now the thread has looked at these, and sleeps
        assert client.predict_many([("a", 20, 2), ("a", 20, 3)]) == [2, 3]
        assert first.result() == 1
        assert other.state() == "pending"


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ((1.5, 1, 0), ModelError, "batch_key"),
        (("a", -1, 0), ModelError, "cost"),
        (("a", math.nan, 0), ModelError, "cost"),
        (("a", "x", 0), ModelError, "cost"),
        (("a", 11, 0), RequestError, "cost=11.*max_batch_cost is 10"),
        (("raise", 1, 0), ModelError, "LookupError: no key"),
        (("exit", 1, 0), ModelError, "SystemExit"),
    ],
)
def test_a_bad_batch_key_or_cost_fails_its_own_request_only(sorting, value, error, says, caplog):
    sorting.open()
    with LocalClient(sorting.load, max_batch_size=2, max_delay=60, max_batch_cost=10) as client:
        answers = client.predict_many([("a", 1, 1), value, ("a", 1, 2)], return_exceptions=True)
        assert (answers[0], answers[2]) == (1, 2)
        assert type(answers[1]) is error
        with pytest.raises(error, match=says):
            raise answers[1]
        stats = client.stats()
        assert (stats.failed, stats.completed, sum(stats.depth.values())) == (1, 2, 0)
        if error is ModelError:
            assert answers[1].request_id in caplog.text
    assert sorting.numbers == [[1, 2]]


def test_batches_that_are_due_do_not_wait_until_all_that_has_come_is_classified(sorting):
    with LocalClient(sorting.load, max_batch_size=2, max_delay=0) as client:
        client.submit(("a", 1, 0))
        sorting.await_batch()
        jobs = [client.submit(("a", 1, n)) for n in range(1, 31)]
        low = client.submit(("low", 1, 99), priority="low")
        asked = []
        for _ in range(4):
            sorting.let(1)
            sorting.await_batch()
            asked.append(len(sorting.asked))
        assert asked == [4, 6, 8, 10]  # 0, and then 2 of each lane before each batch
        sorting.open()
        assert [job.result() for job in [*jobs, low]] == [*range(1, 31), 99]


def test_a_high_request_is_classified_before_those_that_came_earlier(sorting):
    with LocalClient(sorting.load, max_batch_size=2, max_delay=0) as client:
        client.submit(("a", 1, 0))
        sorting.await_batch()
        jobs = [client.submit(("a", 1, n)) for n in range(1, 9)]
        jobs.append(client.submit(("h", 1, 99), priority="high"))
        sorting.open()
        assert [job.result() for job in jobs] == [*range(1, 9), 99]
    assert sorting.numbers[:2] == [[0], [99]]


async def test_a_request_that_is_given_up_before_it_is_classified_is_not_run(sorting):
    async with AsyncLocalClient(sorting.load, max_delay=0) as client:
        running = asyncio.create_task(client.predict(("a", 1, 0)))
        await asyncio.sleep(0)
        await asyncio.to_thread(sorting.await_batch)
        waiting = [asyncio.create_task(client.predict(("a", 1, n))) for n in (1, 2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        with pytest.raises(DeadlineExceededError):
            await client.predict(("a", 1, 3), timeout=0.01)
        sorting.open()
        assert (await running, await waiting[1]) == (0, 2)
    assert sorting.numbers == [[0], [2]]


async def test_close_fails_what_is_not_classified_yet(sorting):
    client = AsyncLocalClient(sorting.load, max_delay=0)
    await client.submit(("a", 1, 0))
    await asyncio.to_thread(sorting.await_batch)
    waiting = asyncio.create_task(client.predict(("a", 1, 1)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(client.aclose())
    with pytest.raises(ClientClosedError):
        await waiting
    sorting.open()
    await closing
    assert sorting.asked == [0]


# capacity


def test_a_full_queue_refuses_at_once_and_says_when_to_try_again(gate):
    with occupied(gate, capacity=2) as client:
        client.submit(1)
        client.submit(2)
        with pytest.raises(QueueFullError, match="capacity is 2") as caught:
            client.predict(3)
        assert caught.value.retry_after == 60.0
        assert client.stats().rejected == 1
        gate.open()


def test_low_priority_requests_fill_half_of_the_capacity(gate):
    with occupied(gate, capacity=4) as client:
        for _ in range(2):
            client.submit(1, priority="low")
        with pytest.raises(QueueFullError):
            client.submit(1, priority="low")
        client.submit(1)
        assert client.stats().depth == {"high": 0, "normal": 1, "low": 2}
        gate.open()


def test_predict_many_is_admitted_all_or_not_at_all(gate):
    with occupied(gate, capacity=3) as client:
        client.submit(1)
        with pytest.raises(QueueFullError):
            client.predict_many([1, 2, 3])
        assert client.stats().depth["normal"] == 1
        gate.open()


def test_more_values_than_the_capacity_point_to_map():
    with LocalClient(double, capacity=3) as client:
        with pytest.raises(ConfigError, match=r"map\(\)"):
            client.predict_many(range(4))
        with pytest.raises(ConfigError, match="half"):
            client.predict_many(range(2), priority="low")
        assert client.predict_many([]) == []


# deadlines


def test_a_caller_does_not_wait_past_its_timeout_and_the_request_is_not_run(gate):
    with occupied(gate) as client:
        with pytest.raises(DeadlineExceededError, match="a batch of 1 has run") as caught:
            client.predict(1, timeout=0.01)
        assert isinstance(caught.value, TimeoutError)
        assert len(caught.value.request_id) == 32
        with pytest.raises(DeadlineExceededError):
            client.predict_many([2, 3], timeout=0.01)
        assert client.stats().depth["normal"] == 0
        gate.open()
        assert client.predict(4) == 8
    assert gate.batches == [[0], [4]]


async def test_a_task_does_not_wait_past_its_timeout_and_the_request_is_not_run(gate):
    async with AsyncLocalClient(gate.load, max_delay=0) as client:
        job = await client.submit(0)
        await asyncio.to_thread(gate.await_batch)
        with pytest.raises(DeadlineExceededError):
            await client.predict(1, timeout=0.01)
        outcomes = await client.predict_many([2, 3], timeout=0.01, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DeadlineExceededError] * 2
        gate.open()
        assert await job.result() == 0
    assert gate.batches == [[0]]


def test_the_message_says_that_the_model_is_still_being_loaded():
    loaded = threading.Event()

    def load():
        loaded.wait(PATIENCE)
        return list

    with LocalClient(load, max_delay=0) as client:
        with pytest.raises(DeadlineExceededError, match=r"is being loaded.*ping\(\)"):
            client.predict(1, timeout=0.01)
        loaded.set()
        assert client.ping() >= 0
        assert client.predict(1) == 1


def test_a_job_past_its_deadline_is_not_run_and_fails(gate):
    clock = Clock()
    with occupied(gate, clock=clock) as client:
        late, live = client.submit(1, deadline=5), client.submit(2, deadline=500)
        clock.now += 10
        gate.open()
        assert live.result() == 4
        with pytest.raises(DeadlineExceededError, match="not run"):
            late.result()
        assert late.state() == "failed"
        assert client.stats().expired == 1
    assert gate.batches == [[0], [2]]


def test_after_one_slow_warm_up_run_requests_are_soon_run_again():
    clock = Clock()

    def load():
        def predict(inputs):
            clock.now += 30 if "warm up" in inputs else 0
            return inputs

        return predict

    with LocalClient(load, max_delay=0, clock=clock, timeout=10) as client:
        assert client.predict("warm up", timeout=100) == "warm up"
        outcomes = []
        while not outcomes or (outcomes[-1] != 1 and len(outcomes) < 10):
            outcomes += client.predict_many([1], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceededError, DeadlineExceededError, int]


# failures


def test_a_model_that_raises_gives_its_type_and_text_and_logs_the_traceback_under_the_same_id(client, caplog):
    with pytest.raises(ModelError) as caught:
        client.predict(None)
    assert caught.value.error_type == "TypeError"
    assert str(caught.value).startswith("TypeError: unsupported operand")
    assert caught.value.request_id in caplog.text
    assert "Traceback" in caplog.text


def test_one_guilty_item_does_not_fail_the_others(gate):
    gate.open()
    with LocalClient(gate.load, max_batch_size=8, max_delay=60) as client:
        outcomes = client.predict_many([1, 2, None, 4, 5, "bad", 7, 8], return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, ModelError)] == [2, 4, 8, 10, 14, 16]
    assert [str(outcomes[n]).partition(":")[0] for n in (2, 5)] == ["TypeError", "ValueError"]


def test_the_first_error_of_predict_many_is_raised_and_the_rest_is_not_run(gate):
    with occupied(gate, max_batch_size=1) as client:
        gate.open()
        with pytest.raises(ModelError, match="ValueError: no"):
            client.predict_many(["bad"] + [1] * 1000)
        assert client.stats().depth["normal"] == 0


def test_a_model_that_exits_fails_its_batch_and_the_client_goes_on(caplog):
    def load():
        def predict(inputs):
            if "exit" in inputs:
                sys.exit(3)
            return inputs

        return predict

    with LocalClient(load, max_delay=0) as client:
        with pytest.raises(ModelError, match="SystemExit"):
            client.predict("exit")
        assert client.predict("stay") == "stay"


def test_a_load_that_fails_is_what_each_call_raises(caplog):
    def load():
        raise OSError("no weights")

    with LocalClient(load, max_delay=0) as client:
        errors = []
        for call in [
            lambda: client.predict(1),
            lambda: client.predict_many([1]),
            client.ping,
            lambda: list(client.map([1])),
        ]:
            with pytest.raises(ModelError, match="OSError: no weights") as caught:
                call()
            errors.append(caught.value)
    assert len(set(map(id, errors))) == len(errors)


def test_parts_of_a_batch_that_fails_get_their_inputs_as_they_came():
    def load():
        def predict(inputs):
            for x in inputs:
                x += 1
            if any(x[0] == 8 for x in inputs):
                raise ValueError("seven")
            return inputs

        return predict

    with LocalClient(load, max_batch_size=8, max_delay=60) as client:
        answers = client.predict_many([np.array([n]) for n in range(8)], return_exceptions=True)
    assert [answer.tolist() for answer in answers[:7]] == [[n + 1] for n in range(7)]
    assert str(answers[7]) == "ValueError: seven"


@pytest.mark.parametrize("collates", [False, True])
def test_a_model_may_write_to_its_inputs_unless_it_collates_them(collates):
    class Writing:
        def predict(self, inputs):
            return [bool(x.flags.writeable) for x in inputs]

    class Collating(Writing):
        def collate(self, inputs):
            return list(inputs)

    with LocalClient(Collating if collates else Writing, max_delay=0) as client:
        assert client.predict(np.zeros(4)) is not collates


def test_a_model_is_told_ids_meta_and_deadlines_if_it_wants_a_context(gate):
    contexts = []

    def load():
        def predict(inputs, context):
            contexts.append(context)
            if any(x is None for x in inputs):
                raise ValueError("none")
            return inputs

        return predict

    with LocalClient(load, max_batch_size=3, max_delay=60) as client:
        before = time.time()
        jobs = [client.submit(1, meta={"user": ("ann", 1)}, deadline=50), client.submit(None, deadline=500)]
        client.submit(3, id="last")
        assert (jobs[0].result(), client.job("last").result()) == (1, 3)
        with pytest.raises(ModelError) as caught:
            jobs[1].result()
        after = time.time()
    first = contexts[0]
    assert first.meta == ({"user": ["ann", 1]}, None, None)
    assert before + 50 - 1 <= first.deadlines[0] <= after + 50 + 1
    assert before + 500 - 1 <= first.deadlines[1] <= after + 500 + 1
    assert caught.value.request_id == first.ids[1]
    assert len(set(first.ids)) == 3
    assert [context.ids for context in contexts[1:]] == [
        first.ids[:1],
        first.ids[1:],
        first.ids[1:2],
        first.ids[2:],
    ]


class Staged:
    """A model that notes what it is called for, and waits in its warm-up."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go = threading.Event()

    def __call__(self):
        return self

    def warmup(self):
        assert self.go.wait(PATIENCE)
        self.calls.append("warmup")

    def predict(self, inputs):
        self.calls.append("predict")
        return inputs

    def close(self):
        self.calls.append("close")


def test_a_model_is_warmed_up_before_its_first_batch_and_closed_after_its_last():
    model = Staged()
    with LocalClient(model, max_delay=0) as client:
        with pytest.raises(DeadlineExceededError, match="is being loaded"):
            client.predict(1, timeout=0.01)
        model.go.set()
        client.ping()
        assert model.calls == ["warmup"]
        assert client.predict(2) == 2
    assert model.calls == ["warmup", "predict", "close"]


def test_a_warm_up_that_fails_is_what_each_call_raises(caplog):
    class Cold(Staged):
        def warmup(self):
            raise OSError("too cold")

    model = Cold()
    with LocalClient(model, max_delay=0) as client:
        for call in (lambda: client.predict(1), client.ping):
            with pytest.raises(ModelError, match="OSError: too cold"):
                call()
        client._engine._thread.join(PATIENCE)
    assert model.calls == ["close"]


def test_an_async_model_is_called_as_any_other():
    class Later:
        async def warmup(self):
            await asyncio.sleep(0)

        async def predict(self, inputs):
            await asyncio.sleep(0)
            return [2 * x for x in inputs]

    async def load():
        return Later()

    with LocalClient(load, max_delay=0) as client:
        assert client.predict_many([1, 2]) == [2, 4]


async def test_after_a_device_is_lost_each_call_says_that_the_process_must_be_restarted(
    gate, monkeypatch, caplog
):
    class Lost(PlainDevice):
        def is_lost(self, error):
            return "sticky" in str(error)

    monkeypatch.setattr("batchq.calls.open_device", Lost)

    def load():
        def predict(inputs):
            gate.predict(inputs)
            if "bad" in inputs:
                raise RuntimeError("sticky")
            return inputs

        return predict

    client = AsyncLocalClient(load, max_batch_size=2, max_delay=60, device="cuda:7")
    running = [asyncio.create_task(client.predict(value)) for value in (1, "bad")]
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.await_batch)
    waiting = asyncio.create_task(client.predict(3))
    await asyncio.sleep(0)
    gate.let(1)
    errors = await asyncio.gather(*running, waiting, return_exceptions=True)
    for call in (lambda: client.predict(4), client.ping, client.stats):
        with pytest.raises(ModelError) as caught:
            await call()
        errors.append(caught.value)
    for error in errors:
        assert (type(error), error.error_type) == (ModelError, "RuntimeError")
        assert str(error).startswith("cuda:7")
        assert str(error).endswith("restart this process")
    assert len(set(map(id, errors))) == 6
    await client.aclose()
    assert gate.batches == [[1, "bad"]]


def test_a_misspelt_model_argument_is_told_when_the_client_is_built():
    def load(device="cpu", weights=""):
        return lambda inputs: [f"{device} {weights}" for _ in inputs]

    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        LocalClient(load, model_args={"weihgts": "a"})
    with LocalClient(load, max_delay=0, device="cuda:1", model_args={"weights": "a"}) as client:
        assert client.predict(0) == "cuda:1 a"


# cancelling, and what stays in memory


async def test_cancelling_a_task_withdraws_its_request_and_disturbs_nobody_else(gate):
    async with AsyncLocalClient(gate.load, max_batch_size=4, max_delay=0) as client:
        running = asyncio.create_task(client.predict(0))
        await asyncio.sleep(0)
        await asyncio.to_thread(gate.await_batch)
        waiting = [asyncio.create_task(client.predict(n)) for n in range(1, 5)]
        many = asyncio.create_task(client.predict_many([8, 9]))
        await asyncio.sleep(0)
        for task in (running, waiting[0], waiting[2], many):
            task.cancel()
        await asyncio.wait([running, waiting[0], waiting[2], many])
        gate.open()
        assert await asyncio.gather(waiting[1], waiting[3]) == [4, 8]
        with pytest.raises(asyncio.CancelledError):
            await many
    assert gate.batches == [[0], [2, 4]]


async def test_nothing_stays_in_memory_of_requests_that_were_answered_cancelled_or_late(gate):
    gc.collect()
    others = [found for found in gc.get_objects() if type(found) is Request]
    client = AsyncLocalClient(gate.load, max_batch_size=4, max_delay=0)
    tasks = [asyncio.create_task(client.predict(n)) for n in range(100)]
    await asyncio.to_thread(gate.await_batch)
    with pytest.raises(DeadlineExceededError):
        await client.predict(0, timeout=0.01)
    for task in tasks[50:]:
        task.cancel()
    gate.open()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.ping()
    del tasks, task
    gc.collect()
    assert [found for found in gc.get_objects() if type(found) is Request and found not in others] == []
    await client.aclose()


def test_the_thread_of_a_client_that_is_dropped_ends():
    client = LocalClient(double, max_delay=0)
    client.predict(1)
    thread = client._engine._thread
    del client
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_map_that_the_garbage_collector_ends_waits_for_no_lock(gate):
    with occupied(gate, max_batch_size=1) as client:
        answers = client.map([1, 2, 3])
        gate.let(2)
        assert next(answers) == 2
        with client._engine._lock:  # the collector may come in the midst of the engine's own code
            del answers
        gate.open()
        client.ping()
    assert [3] not in gate.batches


# map


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("concurrency", [1, 7, 256])
def test_map_answers_each_of_any_number_of_values(client, ordered, concurrency):
    answers = list(client.map(iter(range(500)), concurrency=concurrency, ordered=ordered))
    assert (answers if ordered else sorted(answers)) == [2 * n for n in range(500)]


@pytest.mark.parametrize("ordered", [True, False])
async def test_async_map_takes_iterables_and_async_iterables(ordered):
    async def source():
        for n in range(200):
            yield n
            if n % 10 == 0:
                await asyncio.sleep(0)

    async with AsyncLocalClient(double, max_delay=0) as client:
        for values in (source(), range(200)):
            answers = [answer async for answer in client.map(values, concurrency=9, ordered=ordered)]
            assert sorted(answers) == [2 * n for n in range(200)]


@pytest.mark.parametrize("ordered", [True, False])
async def test_map_pulls_no_more_values_than_may_be_outstanding(gate, ordered):
    pulled = []

    def source():
        for n in range(100):
            pulled.append(n)
            yield n

    async with AsyncLocalClient(gate.load, max_delay=0) as client:
        answers = client.map(source(), concurrency=10, ordered=ordered)
        first = asyncio.ensure_future(anext(answers))
        await asyncio.to_thread(gate.await_batch)
        assert len(pulled) == 10
        gate.open()
        assert await first == 0
        assert len(pulled) <= 20
        assert len([answer async for answer in answers]) == 99


async def test_a_slow_async_source_does_not_hold_up_the_answers():
    more = asyncio.Event()

    async def source():
        yield 1
        await more.wait()
        yield 2

    async with AsyncLocalClient(double, max_delay=0) as client:
        answers = client.map(source())
        assert await anext(answers) == 2
        more.set()
        assert [answer async for answer in answers] == [4]


def test_map_waits_where_the_queue_is_full_and_never_raises_that(gate):
    with occupied(gate, capacity=2, max_batch_size=1) as client:
        client.submit(1)
        client.submit(2)
        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(lambda: list(client.map(range(50), priority="normal")))
            gate.open()
            assert answers.result(PATIENCE) == [2 * n for n in range(50)]


async def test_async_map_waits_where_others_fill_the_queue(gate):
    async with AsyncLocalClient(gate.load, capacity=2, max_batch_size=1, max_delay=0) as client:
        await client.submit(0)
        await asyncio.to_thread(gate.await_batch)
        await client.predict_many([1, 2], timeout=0.01, return_exceptions=True)
        await client.submit(1)
        await client.submit(2)
        first = asyncio.create_task(anext(client.map([5])))
        await asyncio.sleep(0)
        gate.open()
        assert await first == 10


def test_map_raises_the_first_error_or_gives_errors_in_their_place(gate):
    gate.open()
    with LocalClient(gate.load, max_delay=0) as client:
        answers = client.map([1, "bad", {3}, 4], return_exceptions=True)
        first, bad, unsendable, last = answers
        assert (first, last) == (2, 8)
        assert isinstance(bad, ModelError)
        assert isinstance(unsendable, EncodeError)
        answers = client.map([1, "bad", 3])
        assert next(answers) == 2
        with pytest.raises(ModelError):
            next(answers)
        with pytest.raises(EncodeError):
            list(client.map([{3}]))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_value_too_large_for_the_queue_fails_alone_in_a_map(ordered):
    with LocalClient(echo, max_delay=0, capacity_bytes=1024) as client:
        answers = list(client.map(["a", "x" * 1100, "b"], return_exceptions=True, ordered=ordered))
    assert sorted(answer for answer in answers if isinstance(answer, str)) == ["a", "b"]
    assert [type(answer) for answer in answers].count(PayloadTooLargeError) == 1


@pytest.mark.parametrize("ordered", [True, False])
def test_each_item_of_a_map_has_its_own_timeout(gate, ordered):
    with occupied(gate) as client:
        answers = client.map([1, 2], timeout=0.01, return_exceptions=True, ordered=ordered)
        assert [type(answer) for answer in answers] == [DeadlineExceededError] * 2
        assert client.stats().depth["low"] == 0
        gate.open()


def test_a_map_that_is_left_early_withdraws_what_is_outstanding(gate):
    gate.open()
    with LocalClient(gate.load, max_delay=0, max_batch_size=1) as client:
        answers = client.map(range(1000))
        next(answers)
        answers.close()
        assert client.stats().depth["low"] == 0


async def test_what_the_source_of_a_map_raises_is_raised(client):
    def source():
        yield 1
        raise LookupError("source")

    async def later():
        yield 1
        raise LookupError("source")

    with pytest.raises(LookupError):
        list(client.map(source()))
    async with AsyncLocalClient(double, max_delay=0) as other:
        for values in (source(), later()):
            with pytest.raises(LookupError):
                [answer async for answer in other.map(values)]


# jobs


def test_a_job_may_be_read_many_times_from_anywhere(client):
    job = client.submit(4, id="mine")
    assert job.result() == job.result() == client.job("mine").result() == 8
    assert (job.id, job.state()) == ("mine", "done")


def test_a_second_submit_of_an_id_is_the_same_job(gate):
    with occupied(gate) as client:
        client.submit(1, id="one")
        again = client.submit(99, id="one")
        gate.open()
        assert again.result() == 2
        assert client.submit(5, id="one").result() == 2


def test_jobs_without_an_id_are_all_different(client):
    first, second = client.submit(1), client.submit(2)
    assert first.id != second.id
    assert (first.result(), second.result()) == (2, 4)


def test_an_unknown_job_is_unknown(client):
    job = client.job("nobody")
    assert job.state() == "unknown"
    with pytest.raises(JobNotFoundError):
        job.result()
    with pytest.raises(JobNotFoundError):
        job.cancel()


@pytest.mark.parametrize("id", ["", "x" * 257, 3])
def test_a_job_id_out_of_range_is_a_config_error(client, id):
    with pytest.raises(ConfigError):
        client.submit(1, id=id)
    with pytest.raises(ConfigError):
        client.job(id)


def test_a_failed_job_raises_its_error_each_time_afresh(client, caplog):
    job = client.submit(None)
    errors = []
    for _ in range(2):
        with pytest.raises(ModelError, match="TypeError") as caught:
            job.result()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert errors[0].error_type == "TypeError"
    assert job.state() == "failed"


def test_a_cancelled_job_is_not_run(gate):
    with occupied(gate) as client:
        job = client.submit(1)
        assert job.state() == "pending"
        assert job.cancel() is True
        assert job.cancel() is False
        with pytest.raises(JobCancelledError):
            job.result()
        gate.open()
        assert client.predict(2) == 4
    assert gate.batches == [[0], [2]]


def test_a_job_that_is_cancelled_while_it_runs_stays_cancelled(gate):
    with occupied(gate) as client:
        job = client.job("first")
        assert job.cancel() is True
        gate.open()
        client.ping()
        with pytest.raises(JobCancelledError):
            job.result()
        assert client.stats().completed == 0


async def test_who_waits_for_a_job_hears_that_it_was_cancelled(gate):
    async with AsyncLocalClient(gate.load, max_delay=0) as client:
        await client.submit(0)
        await asyncio.to_thread(gate.await_batch)
        job = await client.submit(1)
        waiting = asyncio.create_task(job.result())
        await asyncio.sleep(0)
        assert await client.job(job.id).cancel() is True
        with pytest.raises(JobCancelledError):
            await waiting
        gate.open()


async def test_giving_up_on_a_result_does_not_cancel_the_job(gate):
    async with AsyncLocalClient(gate.load, max_delay=0) as client:
        job = await client.submit(1)
        with pytest.raises(DeadlineExceededError):
            await job.result(timeout=0.01)
        waiting = asyncio.create_task(job.result())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert client._engine._jobs[job.id].boxes == []
        gate.open()
        assert await job.result() == 2
        assert await job.state() == "done"


def test_a_result_expires():
    clock = Clock()
    with LocalClient(double, max_delay=0, clock=clock) as client:
        job = client.submit(1, result_ttl=60)
        assert job.result() == 2
        clock.now += 59
        assert job.result() == 2
        clock.now += 1
        assert job.state() == "unknown"
        assert client._engine._jobs == {}
        assert client.submit(3, id=job.id).result() == 6


# stats, ping, closing


def test_stats_tell_what_waits_what_runs_and_what_was(gate):
    clock = Clock()
    with occupied(gate, clock=clock, capacity=10) as client:
        client.submit(1, priority="high")
        client.submit("bad", priority="low", id="bad")
        clock.now += 2
        stats = client.stats()
        assert stats.depth == {"high": 1, "normal": 0, "low": 1}
        assert (stats.in_flight, stats.oldest_age, stats.capacity, stats.accepted) == (1, 2.0, 10, 3)
        assert stats.workers[0].state == "running"
        gate.open()
        with pytest.raises(ModelError):
            client.job("bad").result()
        stats = client.stats()
        assert (stats.completed, stats.failed, stats.batches, stats.in_flight) == (2, 1, 2, 0)


def test_a_batch_that_runs_is_one_in_flight_however_many_requests_it_holds(gate):
    with LocalClient(gate.load, max_batch_size=3, max_delay=60) as client:
        for value in range(3):
            client.submit(value)
        gate.await_batch()
        assert client.stats().in_flight == 1
        gate.open()


def every_call(client):
    return {
        "predict": lambda: client.predict(1),
        "predict_many": lambda: client.predict_many([]),
        "map": lambda: client.map([1]),
        "submit": lambda: client.submit(1),
        "job": lambda: client.job("x"),
        "stats": client.stats,
        "ping": client.ping,
    }


async def test_after_close_each_call_raises():
    client, later = LocalClient(double), AsyncLocalClient(double)
    job, job_later = client.submit(1), await later.submit(1)
    for _ in range(2):
        client.close()
        await later.aclose()
    calls = [*every_call(client).values(), job.state, job.result, job.cancel]
    calls_later = [*every_call(later).values(), job_later.state, job_later.result, job_later.cancel]
    for call in calls + calls_later:
        with pytest.raises(ClientClosedError):
            found = call()
            if inspect.isawaitable(found):
                await found


async def test_close_fails_what_waits_and_lets_what_runs_finish(gate):
    client = AsyncLocalClient(gate.load, max_delay=0)
    running = asyncio.create_task(client.predict(0))
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.await_batch)
    waiting = [asyncio.create_task(call) for call in (client.predict(1), client.predict(2), client.ping())]
    await asyncio.sleep(0)
    closing = asyncio.create_task(client.aclose())
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in errors] == [ClientClosedError] * 3
    assert len({error.request_id for error in errors}) == 3
    gate.open()
    assert await running == 0
    await closing


async def test_close_does_not_wait_for_a_batch_that_never_ends(gate, monkeypatch):
    monkeypatch.setattr("batchq.local.CLOSE_SECONDS", 0.01)
    client = AsyncLocalClient(gate.load, max_delay=0)
    running = asyncio.create_task(client.predict(0))
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.await_batch)
    await client.aclose()
    with pytest.raises(ClientClosedError, match="while this request ran"):
        await running


def run_script(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_interpreter_exits_while_a_batch_runs():
    script = """
import threading
from batchq.local import LocalClient
started = threading.Event()
def load():
    def predict(inputs):
        started.set()
        threading.Event().wait()
    return predict
client = LocalClient(load, max_delay=0)
client.submit(1)
started.wait()
print("bye")
"""
    assert run_script(script) == "bye\n"


@pytest.mark.skipif(not hasattr(sys, "getswitchinterval") or sys.platform == "win32", reason="needs fork")
def test_a_client_used_before_a_fork_works_in_the_child_with_a_model_of_its_own():
    script = """
import os, sys, warnings
from batchq.local import LocalClient
warnings.simplefilter("ignore", DeprecationWarning)
loads = []
def load():
    loads.append(os.getpid())
    return lambda inputs: [os.getpid() for _ in inputs]
client = LocalClient(load, max_delay=0)
assert client.predict(1) == os.getpid()
child = os.fork()
if child == 0:
    ok = client.predict(1) == os.getpid() == loads[-1] and len(loads) == 2
    client.close()
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert client.predict(1) == os.getpid() and len(loads) == 1
"""
    run_script(script)


# @batched


def test_a_batched_function_takes_one_value_and_gives_one_answer():
    sizes = []

    @batched(max_batch_size=4, max_delay=60)
    def add_one(inputs: list[int]) -> list[int]:
        """Add one."""
        sizes.append(len(inputs))
        return [x + 1 for x in inputs]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(add_one, range(8))) == list(range(1, 9))
    assert sizes == [4, 4]
    assert list(add_one.map(range(8))) == list(range(1, 9))
    assert (add_one.__name__, add_one.__doc__) == ("add_one", "Add one.")
    assert add_one.stats().completed == 16
    add_one.close()
    with pytest.raises(ClientClosedError):
        add_one(1)


async def test_a_batched_function_can_be_awaited():
    @batched(max_batch_size=4, max_delay=60)
    def add_one(inputs):
        return [x + 1 for x in inputs]

    assert await asyncio.gather(*(add_one.aio(n, priority="high") for n in range(4))) == [1, 2, 3, 4]
    add_one.close()


def test_a_batched_function_takes_keys_and_costs():
    batches = []

    @batched(max_delay=60, max_batch_cost=4, padded=True)
    def note(inputs):
        batches.append(inputs)
        return inputs

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(note, n, batch_key=n % 2, cost=2) for n in range(4)]
        assert [answer.result(PATIENCE) for answer in answers] == [0, 1, 2, 3]
    assert sorted(map(sorted, batches)) == [[0, 2], [1, 3]]
    assert list(note.map([5, 6], batch_key="k", cost=2)) == [5, 6]
    assert asyncio.run(note.aio(7, batch_key="k", cost=4)) == 7
    with pytest.raises(RequestError):
        note(8, cost=5)
    note.close()


def test_batched_says_what_it_cannot_decorate():
    async def later(inputs):
        return inputs

    def method(self, inputs):
        return inputs

    for function, says in [(later, "async def"), (method, "one argument"), (3, "a function")]:
        with pytest.raises(ConfigError, match=says):
            batched()(function)
    with pytest.raises(ConfigError, match="max_batch_size"):
        batched(max_batch_size=0)(lambda inputs: inputs)


def test_the_two_clients_have_the_same_calls_with_the_same_arguments():
    names = {name for name in dir(LocalClient) if not name.startswith("_")}
    assert names == {"predict", "predict_many", "map", "submit", "job", "stats", "ping", "close"}
    assert {
        name.replace("aclose", "close") for name in dir(AsyncLocalClient) if not name.startswith("_")
    } == names
    for name in names - {"close"}:
        sync, later = (inspect.signature(getattr(cls, name)) for cls in (LocalClient, AsyncLocalClient))
        assert [(p.name, p.kind, p.default) for p in sync.parameters.values()] == [
            (p.name, p.kind, p.default) for p in later.parameters.values()
        ]


def test_an_answer_that_cannot_be_sent_is_the_models_fault_in_the_words_of_a_worker():
    with (
        LocalClient(lambda: lambda inputs: [{value} for value in inputs], max_delay=0) as client,
        pytest.raises(ModelError) as caught,
    ):
        client.predict(1)
    assert str(caught.value) == "the model's answer cannot be sent: answer: set; call list()"
    assert (caught.value.error_type, caught.value.http_status) == ("EncodeError", 500)
