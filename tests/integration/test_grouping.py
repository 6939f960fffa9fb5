"""Groups, costs and contexts, through a real worker: what callers may rely on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis as redis_py

from batchq import AsyncClient, BatchqError, Client, ModelError, RequestError, WorkerLostError
from tests.conftest import StartWorker, until

BATCHES = "tests.models:batch_sizes_by_key"
LENGTHS = "tests.models:lengths"


def leftovers(url: str, queue: str = "default") -> set[str]:
    with redis_py.Redis.from_url(url, protocol=2) as client:
        names = {
            key.decode().partition("}:")[2].partition(":")[0] for key in client.keys(f"batchq:{{{queue}}}:*")
        }
        return names - {"config", "workers", "counters", "producer", "wake", "want", "replies"}


async def test_only_requests_of_one_key_share_a_batch(start_worker: StartWorker, redis_url: str) -> None:
    start_worker(BATCHES, "--max-batch-size", "16", "--max-delay", "20ms")
    keys: list[Any] = ["a", "b", 1, "1", None]
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(
            *(client.predict([repr(keys[n % 5]), n], batch_key=keys[n % 5]) for n in range(200))
        )
    for n, answer in enumerate(answers):
        assert {key for key, _ in answer} == {repr(keys[n % 5])}
        assert [repr(keys[n % 5]), n] in answer
    assert max(map(len, answers)) > 1
    assert leftovers(redis_url) == set()


async def test_a_thousand_keys_are_answered_and_leave_nothing(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker(BATCHES, "--max-delay", "0")
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(*(client.predict(n, batch_key=f"user {n}") for n in range(1000)))
    assert answers == [[n] for n in range(1000)]
    assert leftovers(redis_url) == set()


async def test_a_batch_costs_no_more_than_the_budget(start_worker: StartWorker, redis_url: str) -> None:
    start_worker(BATCHES, "--max-batch-cost", "10", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(*(client.predict([n, n % 7], cost=n % 7) for n in range(200)))
    assert all(sum(cost for _, cost in answer) <= 10 for answer in answers)
    assert max(map(len, answers)) > 2


async def test_a_padded_batch_costs_its_longest_times_its_size(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker(BATCHES, "--max-batch-cost", "24", "--padded", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(*(client.predict([n, 1 + n % 8], cost=1 + n % 8) for n in range(200)))
    assert all(max(cost for _, cost in answer) * len(answer) <= 24 for answer in answers)
    assert max(map(len, answers)) > 2


async def test_a_cost_over_the_budget_fails_its_own_request_and_says_why(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker(BATCHES, "--max-batch-cost", "10", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(
            *(client.predict(n, cost=11 if n == 5 else 1) for n in range(20)), return_exceptions=True
        )
    failed = [n for n, answer in enumerate(answers) if isinstance(answer, BaseException)]
    assert failed == [5]
    assert isinstance(answers[5], RequestError)
    assert "cost 11 is over the queue's max_batch_cost of 10" in str(answers[5])


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf"), 1.7e308, "3", True])
def test_a_cost_that_is_none_is_a_value_error_at_the_caller(redis_url: str, cost: Any) -> None:
    with Client(redis_url) as client, pytest.raises(ValueError, match=r"cost=.*allowed is a number"):
        client.predict(1, cost=cost)


@pytest.mark.parametrize("key", [1.5, b"a", ["a"], True, object()])
def test_a_batch_key_that_is_no_str_or_int_is_a_value_error_at_the_caller(redis_url: str, key: Any) -> None:
    with (
        Client(redis_url) as client,
        pytest.raises(ValueError, match=r"batch_key=.*allowed is a str, an int"),
    ):
        client.predict(1, batch_key=key)


async def test_a_model_may_tell_key_and_cost_itself(start_worker: StartWorker, redis_url: str) -> None:
    start_worker(LENGTHS, "--max-batch-cost", "12", "--max-delay", "20ms")
    values = [f"{'abc-'[n % 4]}{'x' * (n % 9)}" for n in range(300)]
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(*map(client.predict, values))
    for value, answer in zip(values, answers, strict=True):
        assert value in answer
        assert {other[0] for other in answer} == {value[0]}
        assert sum(map(len, answer)) <= 12
    assert max(map(len, answers)) > 2
    assert leftovers(redis_url) == set()


async def test_under_load_batches_of_a_model_that_groups_are_full(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker(LENGTHS, "--max-batch-size", "8", "--max-delay", "2s")
    async with AsyncClient(redis_url) as client:
        # 4 groups of 64: all of them leave in full batches, and nobody waits for max_delay
        answers = await asyncio.gather(*(client.predict("abc-"[n % 4] + str(n)) for n in range(256)))
    assert {len(answer) for answer in answers} == {8}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("negative", "-1"),
        ("nan", "nan"),
        ("text", "many"),
        ("no key", "this has no key"),
        ("x" * 13, "max_batch_cost of 12"),
    ],
)
async def test_a_key_or_cost_that_the_model_cannot_tell_fails_its_own_request(
    start_worker: StartWorker, redis_url: str, value: str, text: str
) -> None:
    start_worker(LENGTHS, "--max-batch-cost", "12", "--max-delay", "20ms")
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(
            client.predict("nice"), client.predict(value), client.predict("neat"), return_exceptions=True
        )
    assert isinstance(answers[1], BatchqError)
    assert text in str(answers[1])
    assert [sorted(answers[0]), sorted(answers[2])] == [["neat", "nice"]] * 2
    assert leftovers(redis_url) == set()


async def test_a_caller_s_key_and_cost_go_before_the_model_s(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker(LENGTHS, "--max-batch-cost", "12", "--max-delay", "30ms")
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(
            client.predict("apple", batch_key="fruit", cost=1),
            client.predict("banana", batch_key="fruit", cost=1),
            client.predict("cherry", batch_key="fruit"),
        )
    assert {tuple(answer) for answer in answers} == {("apple", "banana", "cherry")}


async def test_a_request_that_cannot_be_decoded_harms_nobody_where_the_model_groups(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker(LENGTHS, "--max-delay", "20ms")
    bad = b"\x96\x01\xc4\x10" + b"b" * 16 + b"\xce\x00\x00\xea\x60\xce\x00\x00\x27\x10\xc1\xc0"
    with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
        raw.rpush("batchq:{default}:requests", bad)
        head = f"{int(time.time() * 1e6)};10000000;{len(bad)};0;n;0;{b'b'.hex() * 16}"
        raw.rpush("batchq:{default}:heads", head)
        async with AsyncClient(redis_url) as client:
            assert await client.predict("fine") == ["fine"]
        await until(lambda: raw.exists(f"batchq:{{default}}:reply:{b'b'.hex() * 16}"))


async def test_a_model_is_told_ids_meta_and_deadlines(start_worker: StartWorker, redis_url: str) -> None:
    start_worker("tests.models:shows_context")
    async with AsyncClient(redis_url) as client:
        first, second = await asyncio.gather(
            client.predict(1, meta={"user": "ada"}, timeout=50), client.predict(2, timeout=5)
        )
    assert first["meta"] == {"user": "ada"}
    assert second["meta"] is None
    assert len(first["id"]) == 32
    assert first["id"] != second["id"]
    assert 40 < first["left"] <= 50.5
    assert 0 < second["left"] <= 5.5


async def test_a_batch_whose_answers_cannot_be_split_is_run_again_in_parts(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker("tests.models:splits_badly", "--max-batch-size", "4")
    values = [f"v{n}" if n % 17 else "bad" for n in range(400)]
    async with AsyncClient(redis_url) as client:
        assert await asyncio.gather(*map(client.predict, values)) == values


@pytest.mark.parametrize("redis", ["there", "cut off"])
async def test_a_lost_device_ends_the_child_and_its_batch_is_run_by_the_next(
    start_worker: StartWorker, redis_url: str, tmp_path: Path, redis: str
) -> None:
    folder = tmp_path / "losses"
    folder.mkdir()
    (folder / "1").touch()
    options = ["--model-arg", f"path={folder}", "--max-batch-size", "4"]
    if redis == "cut off":  # just when the batch that was fetched ahead is to be handed back
        options += ["--model-arg", f"url={redis_url}"]
    worker = start_worker("tests.models:loses_its_device", *options)
    [child] = worker.children
    values = [f"v{n}" for n in range(200)]
    values[77] = "lose"
    async with AsyncClient(redis_url, timeout=60) as client:
        answers = await asyncio.gather(*map(client.predict, values))
    assert answers == values
    assert worker.children != [child]
    assert "device-side assert" in worker.log


def test_errors_of_a_lost_request_name_it(start_worker: StartWorker, redis_url: str) -> None:
    start_worker(LENGTHS)
    with Client(redis_url) as client, pytest.raises(ModelError) as caught:
        client.predict("negative")
    assert caught.value.request_id


async def test_answers_that_are_ready_do_not_wait_for_what_comes_behind_them(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    start_worker("tests.models:gated", "--model-arg", f"path={tmp_path}", "--max-batch-size", "4")
    async with AsyncClient(redis_url) as client:
        await asyncio.gather(
            *(client.predict(n) for n in range(8))
        )  # the worker knows how long a batch takes
        first = [asyncio.ensure_future(client.predict(n)) for n in range(4)]
        later = [asyncio.ensure_future(client.predict("later")) for _ in range(4)]
        assert await asyncio.gather(*first) == [0, 1, 2, 3]
        (tmp_path / "open").touch()
        assert await asyncio.gather(*later) == ["later"] * 4


@pytest.mark.parametrize("part", ["batch_key", "cost", "collate", "split"])
async def test_a_part_of_the_model_that_hangs_is_ended_by_the_batch_timeout(
    start_worker: StartWorker, redis_url: str, tmp_path: Path, part: str
) -> None:
    worker = start_worker(
        "tests.models:gated", "--model-arg", f"path={tmp_path}", "--model-arg", f"hangs={part}",
        "--max-batch-size", "4", "--batch-timeout", "1",
    )  # fmt: skip
    async with AsyncClient(redis_url, timeout=50) as client:
        values: list[Any] = [*range(10), "hang", *range(10)]
        answers = await asyncio.gather(*map(client.predict, values), return_exceptions=True)
    assert isinstance(answers.pop(10), WorkerLostError)
    assert answers == [*range(10), *range(10)]
    assert "more than 1 s" in worker.log


async def test_a_key_that_is_told_only_at_the_second_look_still_keeps_batches_apart(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker("tests.models:knows_keys_at_the_second_look", "--max-delay", "20ms")
    values = [f"{'abc'[n % 3]}{n}" for n in range(60)]
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(*map(client.predict, values))
    for value, answer in zip(values, answers, strict=True):
        assert {other[0] for other in answer} == {value[0]}


async def test_an_idle_worker_keeps_nothing_of_the_batches_that_it_has_run(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    start_worker("tests.models:tells_what_it_keeps", "--model-arg", f"path={count}", "--max-batch-size", "4")
    async with AsyncClient(redis_url) as client:
        answers = await asyncio.gather(*(client.predict(np.zeros(1000)) for _ in range(40)))
    assert set(answers) == {4}
    await until(lambda: count.read_text() == "0", what="an empty memory")
