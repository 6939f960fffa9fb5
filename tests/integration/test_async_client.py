"""AsyncClient with a real Redis and real workers."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings

import pytest
import redis as redis_py

from batchq import (
    AsyncClient,
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
    WorkerLostError,
)
from batchq_cli.embedded import EmbeddedRedis
from tests.chaos.proxy import Proxy
from tests.conftest import StartWorker, until


def state_of(client: AsyncClient):
    session = client._current
    assert session is not None
    return session


def has_left(client: AsyncClient) -> bool:
    """Whether all calls that were made have been pushed."""
    session = client._current
    return (
        session is not None
        and not session.buffer
        and all(call.number for call in session.outstanding.values())
    )


async def test_each_caller_gets_the_answer_to_its_own_value(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0.002")
    async with AsyncClient(redis_url) as client:
        assert await asyncio.gather(*[client.predict({"n": n}) for n in range(2000)]) == [
            {"n": n} for n in range(2000)
        ]
        assert not state_of(client).outstanding


async def test_single_requests_are_answered_from_full_batches(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:sizes", "--max-delay", "60s", "--max-batch-size", "8")
    async with AsyncClient(redis_url) as client:
        assert await asyncio.gather(*[client.predict(n) for n in range(64)]) == [8] * 64


async def test_idle_workers_do_not_split_a_batch_between_them(
    redis_url: str, start_worker: StartWorker
) -> None:
    for _ in range(4):
        start_worker("tests.models:sizes", "--max-delay", "60s", "--max-batch-size", "6", wait=False)
    async with AsyncClient(redis_url) as client:
        calls = []
        for n in range(12):  # a trickle: each has left before the next is made
            calls.append(asyncio.ensure_future(client.predict(n)))
            await asyncio.sleep(0)
            await until(lambda: has_left(client))
        assert await asyncio.gather(*calls) == [6] * 12


async def test_calls_of_one_turn_leave_in_one_push(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        calls = [asyncio.ensure_future(client.predict(n, timeout=30)) for n in range(100)]
        await until(
            lambda: client._current and len(client._current.outstanding) == 100 and client._current.chain.last
        )
        assert {call.number for call in state_of(client).outstanding.values()} == {1}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_without_a_worker_the_deadline_comes_on_time_and_says_why(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo", queue="sentiment")
    async with (
        AsyncClient(redis_url, queue="sentiment") as other,
        AsyncClient(redis_url, queue="sentimnet") as client,
    ):
        assert await other.predict(1) == 1
        with pytest.raises(
            DeadlineExceededError,
            match=r"no live worker on 'sentimnet'; live queues: 'sentiment' \(1 worker\)",
        ) as caught:
            await client.predict(1, timeout=1.0)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.http_status == 504
        assert not state_of(client).outstanding


async def test_a_request_whose_deadline_has_passed_is_not_run(
    redis_url: str, start_worker: StartWorker
) -> None:
    async with AsyncClient(redis_url) as client:
        with pytest.raises(DeadlineExceededError):
            await client.predict("late", timeout=0.05)
        start_worker("tests.models:echo")
        assert await client.predict("in time") == "in time"
        stats = await client.stats()
        assert (stats.expired, stats.completed) == (1, 1)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(redis_url: str) -> None:
    async with AsyncClient(redis_url, capacity=3) as client:
        answers = await asyncio.gather(
            *[client.predict(n, timeout=0.5) for n in range(5)], return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [DeadlineExceededError] * 3 + [QueueFullError] * 2
        full = answers[-1]
        assert isinstance(full, QueueFullError)
        assert full.http_status == 503
        assert full.headers == {"Retry-After": "60"}


async def test_the_capacity_holds_across_clients(redis_url: str, start_worker: StartWorker) -> None:
    worker = start_worker("tests.models:echo", "--capacity", "10")
    worker.process.terminate()
    worker.process.wait()
    clients = [AsyncClient(redis_url) for _ in range(4)]
    calls = [client.predict(n, timeout=2) for n in range(5) for client in clients]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(answer, QueueFullError) for answer in answers) == 10
    for client in clients:
        await client.aclose()


async def test_fail_fast_tells_at_once_that_no_worker_lives(
    redis_url: str, start_worker: StartWorker
) -> None:
    async with AsyncClient(redis_url, fail_fast=True) as client:
        with pytest.raises(NoWorkerError):
            await client.predict(1)
        start_worker("tests.models:echo")
        assert await client.predict(1) == 1


async def test_predict_many_is_admitted_all_or_nothing_and_keeps_order(
    redis_url: str, start_worker: StartWorker
) -> None:
    async with AsyncClient(redis_url, capacity=10) as client:
        waiting = asyncio.ensure_future(client.predict_many(range(6), timeout=30))
        await until(lambda: client._current and client._current.chain.last)
        with pytest.raises(QueueFullError):
            await client.predict_many(range(5))
        assert (await client.stats()).depth["normal"] == 6
        start_worker("tests.models:echo")
        assert await waiting == list(range(6))
        with pytest.raises(ConfigError, match="use map"):
            await client.predict_many(range(11))
        assert await client.predict_many([]) == []


async def test_one_bad_item_fails_alone(redis_url: str, start_worker: StartWorker) -> None:
    worker = start_worker("tests.models:fails_for_bad", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await client.predict_many(["a", "bad", *"cdefgh"], return_exceptions=True)
        assert answers[0] == "A"
        assert answers[2:] == list("CDEFGH")
        error = answers[1]
        assert isinstance(error, ModelError)
        assert (error.error_type, error.message) == ("ValueError", "ValueError: this input is bad")
        with pytest.raises(ModelError):
            await client.predict_many(["a", "bad"])
        assert error.request_id is not None
        assert error.request_id in worker.log  # the traceback is there, under the same id
        assert "raise ValueError" in worker.log


@pytest.mark.parametrize("model", ["dict_of_lists", "too_few"])
async def test_a_wrong_answer_is_a_model_error_whatever_its_length(
    redis_url: str, start_worker: StartWorker, model: str
) -> None:
    start_worker(f"tests.models:{model}", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await client.predict_many([1, 2], return_exceptions=True)
        assert [type(answer) for answer in answers] == [ModelError, ModelError]


async def test_map_runs_any_number_of_values_through_a_small_queue(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo", "--capacity", "20")
    async with AsyncClient(redis_url) as client:

        async def values():
            for n in range(500):
                yield n

        assert [answer async for answer in client.map(values(), concurrency=100)] == list(range(500))
        assert sorted([answer async for answer in client.map(range(500), ordered=False)]) == list(range(500))


async def test_map_ends_at_the_first_error_unless_told_to_go_on(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:fails_for_bad")
    async with AsyncClient(redis_url) as client:
        with pytest.raises(ModelError):
            async for _ in client.map(["a", "bad", "c"]):
                pass
        answers = [answer async for answer in client.map(["a", "bad", "c"], return_exceptions=True)]
        assert [answers[0], type(answers[1]), answers[2]] == ["A", ModelError, "C"]
        await until(lambda: not state_of(client).outstanding)


async def test_a_job_is_read_by_any_client_any_number_of_times(
    redis_url: str, start_worker: StartWorker
) -> None:
    async with AsyncClient(redis_url) as client, AsyncClient(redis_url) as other:
        job = await client.submit("x")
        assert await job.state() == "pending"
        with pytest.raises(DeadlineExceededError):
            await job.result(timeout=0.05)
        start_worker("tests.models:echo")
        assert await other.job(job.id).result() == "x"
        assert await other.job(job.id).result() == "x"
        assert await job.state() == "done"
        assert await job.cancel() is False


async def test_a_job_submitted_twice_runs_once(redis_url: str, start_worker: StartWorker) -> None:
    async with AsyncClient(redis_url) as client:
        jobs = await asyncio.gather(*[client.submit(n, id="order-17") for n in range(3)])
        start_worker("tests.models:echo")
        assert {await job.result() for job in jobs} == {0}
        assert (await client.stats()).completed == 1


async def test_a_cancelled_job_is_not_run(redis_url: str, start_worker: StartWorker) -> None:
    async with AsyncClient(redis_url) as client:
        job = await client.submit("x")
        assert await job.cancel() is True
        with pytest.raises(JobCancelledError):
            await job.result()
        start_worker("tests.models:echo")
        assert await client.predict("y") == "y"
        assert (await client.stats()).completed == 1
        with pytest.raises(JobNotFoundError):
            await client.job("never submitted").result()
        assert await client.job("never submitted").state() == "unknown"


async def test_a_job_whose_deadline_passes_gets_that_as_its_result(
    redis_url: str, start_worker: StartWorker
) -> None:
    async with AsyncClient(redis_url) as client:
        job = await client.submit("x", deadline=0.01)
        start_worker("tests.models:echo")
        with pytest.raises(DeadlineExceededError, match="before a worker could run it"):
            await job.result()
        assert await job.state() == "failed"


async def test_cancelling_a_call_disturbs_nobody_and_leaves_nothing(
    redis_url: str, start_worker: StartWorker
) -> None:
    async with AsyncClient(redis_url) as client:
        tasks = [asyncio.ensure_future(client.predict(n)) for n in range(100)]
        await until(lambda: client._current and client._current.chain.last)
        for task in tasks[::2]:
            task.cancel()
        await until(lambda: not state_of(client).cancelled and len(state_of(client).outstanding) == 50)
        start_worker("tests.models:echo")
        assert (await asyncio.gather(*tasks, return_exceptions=True))[1::2] == list(range(1, 100, 2))
        assert not state_of(client).outstanding
        await until(lambda: not state_of(client).buffer)
        stats = await client.stats()
        assert stats.completed == 50  # the others were dropped where they waited


async def test_a_call_cancelled_at_any_of_its_steps_never_gives_its_answer_to_another(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0")
    async with AsyncClient(redis_url) as client:
        await client.predict("warm")
        for steps in range(40):
            victim = asyncio.ensure_future(client.predict(f"victim {steps}"))
            for _ in range(steps):
                await asyncio.sleep(0)
            victim.cancel()
            witnesses = await asyncio.gather(*[client.predict((steps, n)) for n in range(5)])
            assert witnesses == [[steps, n] for n in range(5)]
            await asyncio.gather(victim, return_exceptions=True)
        assert not state_of(client).outstanding
        assert len([link for link in state_of(client)._links if not link.broken]) <= 3


async def test_bad_input_is_refused_at_the_caller_and_harms_nobody(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo")
    async with AsyncClient(redis_url, max_payload=100_000) as client:
        good = asyncio.ensure_future(client.predict("good"))
        with pytest.raises(EncodeError, match=r"value\.user"):
            await client.predict({"user": object()})
        with pytest.raises(PayloadTooLargeError):
            await client.predict(b"x" * 100_001)
        for timeout in (0, -1, float("nan"), 90_000, "1", True):
            with pytest.raises(ValueError, match="timeout"):
                await client.predict(1, timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="priority"):
            await client.predict(1, priority="urgent")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="batch_key"):
            await client.predict(1, batch_key=1.5)  # type: ignore[arg-type]
        assert await good == "good"


async def test_values_of_ten_megabytes_pass(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo")
    async with AsyncClient(redis_url) as client:
        values = [bytes([n]) * 10_000_000 for n in range(3)]
        assert await client.predict_many(values, timeout=60) == values


async def test_poison_is_a_dead_letter_and_its_neighbours_are_answered(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:dies_of_poison", "--max-delay", "50ms")
    async with AsyncClient(redis_url) as client:
        answers = await client.predict_many([1, 2, "poison", 4], timeout=60, return_exceptions=True)
        assert [answers[0], answers[1], type(answers[2]), answers[3]] == [1, 2, WorkerLostError, 4]
        assert (await client.stats()).dead == 1


async def test_garbage_in_the_queue_becomes_dead_letters_and_the_worker_goes_on(
    redis_url: str, start_worker: StartWorker
) -> None:
    with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
        now = int(time.time() * 1e6)
        for garbage in (b"\xc1", b"", b"\x96\x01", b"\x93\x01\xc4\x10" + bytes(16) + b"\xa1a", b"junk" * 100):
            raw.rpush("batchq:{default}:requests", garbage)
            raw.rpush("batchq:{default}:heads", f"{now};60000000;{len(garbage)};0;n;0;{'0' * 32}")
        start_worker("tests.models:echo")
        async with AsyncClient(redis_url) as client:
            assert await client.predict("fine") == "fine"
            assert (await client.stats()).dead == 5
        assert b"undecodable" in raw.lindex("batchq:{default}:dead", 0)


def test_a_client_goes_from_one_closed_loop_to_the_next(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo")
    client = AsyncClient(redis_url)
    for n in range(3):
        assert asyncio.run(client.predict(n)) == n
    asyncio.run(client.aclose())
    gc.collect()


def test_two_live_loops_at_once_are_an_error_that_says_so(redis_url: str) -> None:
    client = AsyncClient(redis_url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.ping())
    with pytest.raises(ConfigError, match="another event loop"):
        asyncio.run(client.ping())
    loop.run_until_complete(client.aclose())
    loop.close()


async def test_after_close_every_call_says_so(redis_url: str) -> None:
    client = AsyncClient(redis_url)
    waiting = asyncio.ensure_future(client.predict(1))
    await until(lambda: client._current and client._current.chain.last)
    await client.aclose()
    await client.aclose()
    with pytest.raises(ClientClosedError):
        await waiting
    for call in (
        client.predict(1),
        client.predict_many([1]),
        client.submit(1),
        client.stats(),
        client.ping(),
    ):
        with pytest.raises(ClientClosedError):
            await call


async def test_a_client_that_is_dropped_without_close_warns_and_does_not_hang(redis_url: str) -> None:
    client = AsyncClient(redis_url)
    await client.ping()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del client
        gc.collect()
        await asyncio.sleep(0)
    assert any(
        issubclass(warning.category, ResourceWarning) and "was not closed" in str(warning.message)
        for warning in caught
    )


async def test_several_clients_share_a_loop(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo")
    clients = [AsyncClient(redis_url) for _ in range(5)]
    answers = await asyncio.gather(
        *[client.predict((n, m)) for n, client in enumerate(clients) for m in range(20)]
    )
    assert answers == [[n, m] for n in range(5) for m in range(20)]
    for client in clients:
        await client.aclose()


async def test_a_client_of_the_wrong_kind_fails_its_calls_at_once(redis_url: str) -> None:
    with redis_py.Redis.from_url(redis_url, protocol=2) as threaded:
        async with AsyncClient(redis=threaded) as client:
            with pytest.raises(ConfigError, match=r"redis\.asyncio\.Redis"):
                await client.predict(1, timeout=60)


async def test_a_job_is_unknown_once_its_result_has_expired(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo")
    async with AsyncClient(redis_url) as client:
        job = await client.submit("x", result_ttl=1)
        assert await job.result() == "x"
        with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
            await until(lambda: not raw.keys("batchq:{default}:job:*"), what="the end of the job")
        assert await job.state() == "unknown"
        with pytest.raises(JobNotFoundError):
            await job.result()


async def test_a_client_that_was_away_for_longer_than_replies_are_kept_asks_again(
    redis_server: EmbeddedRedis, redis_url: str, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchq.session._LONG_AWAY", 0.2)
    proxy = Proxy(redis_server.port, 1)
    try:
        async with AsyncClient(f"redis://127.0.0.1:{proxy.port}/0") as client:
            call = asyncio.ensure_future(client.predict("x", timeout=60))
            await until(lambda: client._current and client._current.chain.last)
            proxy.refuse = True
            proxy.cut()
            start_worker("tests.models:echo")
            with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
                stream = f"batchq:{{default}}:replies:{state_of(client).name}"
                await until(lambda: raw.exists(stream), what="the reply")
                raw.delete(stream)  # as after 60 s
            await asyncio.sleep(0.3)
            proxy.refuse = False
            assert await call == "x"
    finally:
        proxy.close()
