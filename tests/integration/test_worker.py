"""The worker: its batches, its children, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import redis as redis_py

from batchq import AsyncClient, ModelError, WorkerLostError
from batchq_cli.embedded import EmbeddedRedis
from tests.conftest import StartWorker, is_gone, until

QUEUE = "batchq:{default}:"


async def test_while_the_model_runs_the_next_full_batch_is_fetched(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "open").touch()
    start_worker(
        "tests.models:gate", "--model-arg", f"path={tmp_path}", "--max-batch-size", "4", "--max-delay", "1ms"
    )
    async with AsyncClient(redis_url) as client:
        with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
            await asyncio.gather(
                *[client.predict(n) for n in range(40)]
            )  # slow enough by now that overlapping pays
            (tmp_path / "open").unlink()
            calls = asyncio.gather(*[client.predict(n) for n in range(100, 120)])
            # the one that runs, and the one behind it
            await until(lambda: raw.zcard(QUEUE + "leases") == 2, what="the second batch")
            assert len((tmp_path / "started").read_text().split()) == 44
            (tmp_path / "open").touch()
            assert await calls == list(range(100, 120))
            await until(lambda: raw.zcard(QUEUE + "leases") == 0)


async def test_sigterm_finishes_what_runs_and_hands_back_what_was_fetched(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "open").touch()
    worker = start_worker(
        "tests.models:gate", "--model-arg", f"path={tmp_path}", "--max-batch-size", "4", "--max-delay", "1ms"
    )
    async with AsyncClient(redis_url) as client:
        with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
            await asyncio.gather(*[client.predict(n) for n in range(40)])
            (tmp_path / "open").unlink()
            calls = asyncio.gather(*[client.predict(n, timeout=60) for n in range(100, 112)])
            await until(lambda: raw.zcard(QUEUE + "leases") == 2)
            worker.process.send_signal(signal.SIGTERM)
            await until(lambda: "draining" in worker.log)
            (tmp_path / "open").touch()
            assert await asyncio.to_thread(worker.process.wait, 30) == 0
            started = (tmp_path / "started").read_text().split()
            assert len(started) == len(set(started)) == 44  # nothing was run twice that had not started
            assert raw.llen(QUEUE + "requests") == raw.llen(QUEUE + "heads") == 8
            assert raw.zcard(QUEUE + "leases") == 0
            start_worker("tests.models:echo")
            assert await calls == list(range(100, 112))


async def test_a_second_signal_hands_the_running_batch_back_at_once(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker("tests.models:gate", "--model-arg", f"path={tmp_path}")
    async with AsyncClient(redis_url) as client:
        call = asyncio.ensure_future(client.predict("x", timeout=60))
        await until((tmp_path / "started").exists)
        worker.process.send_signal(signal.SIGINT)
        await until(lambda: "draining" in worker.log)
        worker.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(worker.process.wait, 30) == 0
        with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
            assert raw.llen(QUEUE + "requests") == 1
            assert raw.exists(QUEUE + "solo") == 0
        start_worker("tests.models:echo")
        assert await call == "x"


async def test_a_batch_that_runs_too_long_is_ended_and_its_neighbours_are_answered(
    redis_url: str, start_worker: StartWorker
) -> None:
    worker = start_worker("tests.models:hangs", "--batch-timeout", "1", "--max-delay", "50ms")
    async with AsyncClient(redis_url) as client:
        answers = await client.predict_many(["a", "hang", "b"], timeout=60, return_exceptions=True)
        assert [answers[0], type(answers[1]), answers[2]] == ["a", WorkerLostError, "b"]
    assert "runs for more than 1 s" in worker.log


async def test_a_child_that_is_killed_is_replaced_and_its_requests_are_run_again(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker(
        "tests.models:gate", "--model-arg", f"path={tmp_path}", "--max-delay", "50ms", "--lease", "600"
    )
    async with AsyncClient(redis_url) as client:
        calls = asyncio.gather(*[client.predict(n, timeout=60) for n in range(8)])
        await until((tmp_path / "started").exists)
        [child] = worker.children
        os.kill(child, signal.SIGKILL)
        (tmp_path / "open").touch()
        assert await calls == list(range(8))  # long before the lease is over: the parent knows
    assert "signal 9" in worker.log


async def test_a_child_dies_with_its_parent(
    redis_url: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker("tests.models:gate", "--model-arg", f"path={tmp_path}")
    async with AsyncClient(redis_url) as client:
        call = asyncio.ensure_future(client.predict(1, timeout=60))
        await until((tmp_path / "started").exists)
        [child] = worker.children
        worker.process.kill()
        worker.process.wait()
        await until(lambda: is_gone(child))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_large_and_small_payloads_of_all_lanes_come_back_to_their_callers(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker(
        "tests.models:slow", "--model-arg", "seconds=0.01", "--max-batch-size", "8", "--max-delay", "1ms"
    )
    async with AsyncClient(redis_url, timeout=60) as client:
        sizes = [10, 5_000, 300_000]
        lanes = ("high", "normal", "low")
        calls = [(n, sizes[n % 3], lanes[n // 3 % 3]) for n in range(180)]
        answers = await asyncio.gather(
            *[client.predict(b"%06d" % n + bytes(size), priority=lane) for n, size, lane in calls]
        )
        assert [answer[:6] for answer in answers] == [b"%06d" % n for n, _, _ in calls]
        assert [len(answer) for answer in answers] == [size + 6 for _, size, _ in calls]
        with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
            assert int(raw.hget(QUEUE + "counters", "pending_bytes")) == 0
            assert raw.hget(QUEUE + "counters", "repaired") is None


async def test_an_idle_worker_asks_redis_about_four_times_a_second(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo")
    with redis_py.Redis.from_url(redis_url, protocol=2) as raw:

        def looks() -> int:
            return sum(
                stats["calls"] for name, stats in raw.info("commandstats").items() if name == "cmdstat_blpop"
            )

        raw.config_resetstat()
        await until(lambda: looks() >= 3)
        commands = {name.split("_")[1]: stats["calls"] for name, stats in raw.info("commandstats").items()}
        assert commands["evalsha"] <= 3 * (looks() + 1)  # takes, reports, renewals


async def test_a_worker_waits_for_redis_and_goes_on_when_it_comes_back(start_worker: StartWorker) -> None:
    with EmbeddedRedis() as server:
        url = server.url
        server.stop()
        worker = start_worker("tests.models:echo", url=url, wait=False)
        await until(lambda: "waiting for Redis" in worker.log)
        server.start()
        async with AsyncClient(url) as client:
            assert await client.predict(1, timeout=60) == 1
            server.stop()
            await until(lambda: "is not available" in worker.log)
            server.start()
            assert await client.predict(2, timeout=60) == 2
        assert worker.stop() == 0


async def test_a_redis_that_may_evict_requests_is_refused(start_worker: StartWorker) -> None:
    with EmbeddedRedis("--maxmemory-policy", "allkeys-lru") as server:
        worker = start_worker("tests.models:echo", url=server.url, wait=False)
        assert await asyncio.to_thread(worker.process.wait, 30) == 5
        assert "set it to noeviction" in worker.log


async def test_the_settings_of_the_first_live_worker_hold_and_a_different_one_warns(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:sizes", "--max-batch-size", "3", "--max-delay", "60s")
    second = start_worker("tests.models:sizes", "--max-batch-size", "30", "--max-delay", "0")
    assert "max_batch_size=3 holds" in second.log
    async with AsyncClient(redis_url) as client:
        assert await asyncio.gather(*[client.predict(n) for n in range(12)]) == [3] * 12


async def test_requests_of_a_newer_protocol_are_told_so(redis_url: str, start_worker: StartWorker) -> None:
    start_worker("tests.models:echo")
    request = (
        b"\x96\x63\xc4\x10" + bytes(range(16)) + b"\xce\x00\x00\xea\x60\xce\x00\x00\x27\x10\xa5hello\xc0"
    )
    with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
        now = int(raw.time()[0]) * 1_000_000
        raw.rpush(QUEUE + "heads", f"{now};60000000;37;0;n;0;{bytes(range(16)).hex()}")
        raw.rpush(QUEUE + "requests", request)
        key = f"{QUEUE}reply:{bytes(range(16)).hex()}"
        reply = await asyncio.to_thread(raw.blmove, key, key, 30, "LEFT", "LEFT")
        assert b"request.version" in reply
        assert b"upgrade the workers first" in reply


async def test_a_model_that_answers_with_exceptions_fails_those_items_alone(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:exception_for_odd", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await client.predict_many(range(6), return_exceptions=True)
        assert answers[::2] == [0, 2, 4]
        assert all(
            isinstance(answer, ModelError) and answer.error_type == "KeyError" for answer in answers[1::2]
        )


async def test_an_answer_that_cannot_be_sent_fails_its_item_alone(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:set_for_odd", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await client.predict_many(range(4), return_exceptions=True)
        assert answers[::2] == [0, 2]
        assert all(
            isinstance(answer, ModelError) and "cannot be sent" in answer.message for answer in answers[1::2]
        )


async def test_a_model_may_overwrite_its_answers_with_the_next_batch(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:reuses_its_output", "--max-batch-size", "8", "--max-delay", "1ms")
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(*[client.predict(n) for n in range(800)])
        assert [answer.tolist() for answer in answers] == [[n] * 4 for n in range(800)]
        # and in the halves of a batch that failed
        answers = await client.predict_many([1, 2, "bad", 4, 5, 6], return_exceptions=True)
        assert [answer.tolist() for n, answer in enumerate(answers) if n != 2] == [
            [n] * 4 for n in (1, 2, 4, 5, 6)
        ]


async def test_a_model_may_change_its_inputs_before_it_fails(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:changes_its_inputs", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await client.predict_many([{"n": 1}, {"n": -1}, {"n": 3}, {"n": 4}], return_exceptions=True)
        assert [answers[0], type(answers[1]), *answers[2:]] == [2, ModelError, 6, 8]
