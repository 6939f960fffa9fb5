"""A worker on several devices: what its children see, and that one's troubles are not the others'.

The GPUs are made up: CUDA_VISIBLE_DEVICES names two, and a module called torch, which the looking for devices imports, counts them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from batchq import AsyncClient, WorkerLostError
from batchq_workers.cpus import usable_cpus
from tests.conftest import StartWorker, is_gone, until

QUEUE = "batchq:{default}:"
needs_torch = pytest.mark.skipif(
    not os.environ.get("CI") and importlib.util.find_spec("torch") is None, reason="needs torch"
)
BOTH = ("--device", "cuda:0,cuda:1", "--max-batch-size", "1", "--max-delay", "0")

FAKE_TORCH = """
import os

with open({log!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
_visible = os.environ.get("CUDA_VISIBLE_DEVICES")


class cuda:
    device_count = staticmethod(lambda: {gpus} if _visible is None else min({gpus}, len(_visible.split(","))))
    is_available = staticmethod(lambda: cuda.device_count() > 0)


class backends:
    class mps:
        is_available = staticmethod(lambda: False)
"""


def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> Path:
    """Put a torch before the real one that finds so many GPUs; return the file in which it notes who imports it."""
    folder = tmp_path / "fake"
    folder.mkdir()
    log = folder / "imported"
    (folder / "torch.py").write_text(FAKE_TORCH.format(gpus=gpus, log=str(log)))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return log


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs, called left and right; the file in which torch notes who imports it."""
    log = fake_torch(tmp_path, monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "left, right")
    return log


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(redis_url, protocol=2) as client:
        yield client


def report(raw: redis_py.Redis) -> dict[str, Any]:
    """What the one worker has reported."""
    reports = raw.hvals(QUEUE + "workers")
    return json.loads(reports[0].split(b";", 2)[2]) if reports else {}


def states(raw: redis_py.Redis) -> list[str]:
    """The states of its children."""
    return [child["state"] for child in report(raw).get("children", ())]


async def all_ready(raw: redis_py.Redis, count: int = 2) -> None:
    await until(lambda: states(raw) == ["ready"] * count, what="that all children are ready")


async def from_everyone(client: AsyncClient, count: int) -> dict[int, dict[str, Any]]:
    """Ask until so many children have answered; return their answers by process id."""
    found: dict[int, dict[str, Any]] = {}

    async def ask() -> None:
        while len(found) < count:
            for answer in await client.predict_many([None] * (4 * count)):
                found[answer["pid"]] = answer

    await asyncio.wait_for(ask(), 30)
    return found


async def from_both(client: AsyncClient) -> None:
    """Ask until both GPUs have answered."""
    answers: set[str] = set()
    while answers != {"left", "right"}:
        answers |= set(await client.predict_many(range(8)))


def ping(redis_url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "batchq_cli", "ping", "--worker", "--redis", redis_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# --- what a child sees ---


async def test_each_device_has_a_child_that_sees_it_alone_and_calls_it_cuda_0(
    redis_url: str, start_worker: StartWorker, gpus: Path, raw: redis_py.Redis
) -> None:
    worker = start_worker("tests.device_models:tells", *BOTH)
    async with AsyncClient(redis_url) as client:
        found = await from_everyone(client, 2)
        assert {answer["visible"] for answer in found.values()} == {"left", "right"}
        assert {answer["device"] for answer in found.values()} == {"cuda:0"}
        assert set(found) == set(worker.children)
        await all_ready(raw)
        [stats] = (await client.stats()).workers
    # what others get to see is what the user calls them
    assert [(child.device, child.state) for child in stats.children] == [
        ("cuda:0", "ready"),
        ("cuda:1", "ready"),
    ]
    assert len({child.child for child in stats.children}) == 2
    assert "device=cuda:1" in worker.log


async def test_processes_per_device_share_it_and_the_cpus(
    redis_url: str, start_worker: StartWorker, gpus: Path
) -> None:
    start_worker("tests.device_models:tells", *BOTH, "--processes-per-device", "2")
    async with AsyncClient(redis_url) as client:
        found = await from_everyone(client, 4)
    assert sorted(answer["visible"] for answer in found.values()) == ["left", "left", "right", "right"]
    assert {answer["threads"] for answer in found.values()} == {str(max(1, usable_cpus() // 4))}


async def test_threads_that_the_user_has_set_stay(
    redis_url: str, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    start_worker("tests.device_models:tells")
    async with AsyncClient(redis_url) as client:
        answer = await client.predict(None)
    # and a worker on the CPU has its GPUs left alone: its model may know better than its options
    assert (answer["device"], answer["threads"], answer["visible"]) == ("cpu", "7", "3")


async def test_auto_takes_all_gpus_that_torch_finds_and_the_parent_imports_no_torch(
    redis_url: str, start_worker: StartWorker, gpus: Path
) -> None:
    worker = start_worker("tests.device_models:tells", *BOTH, "--device", "auto")
    async with AsyncClient(redis_url) as client:
        found = await from_everyone(client, 2)
    assert {answer["visible"] for answer in found.values()} == {"left", "right"}
    [looked] = gpus.read_text().split()
    assert int(looked) not in (worker.process.pid, *found)
    assert is_gone(int(looked))


async def test_auto_without_a_gpu_is_the_cpu(
    redis_url: str, start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(tmp_path, monkeypatch, 0)
    start_worker("tests.device_models:tells", "--device", "auto")
    async with AsyncClient(redis_url) as client:
        assert (await client.predict(None))["device"] == "cpu"


@pytest.mark.parametrize(
    ("devices", "visible", "parts"),
    [
        ("cuda:99", None, ("cuda:99 does not exist", "there are 2 GPUs, cuda:0 to cuda:1")),
        ("cuda:1", "5", ("cuda:1 does not exist", "there is one GPU, cuda:0")),
        ("cpu,cuda:0", "-1", ("cuda:0 does not exist", "no GPU that this process may use")),
        ("cuda", "", ("cuda does not exist", "no GPU that this process may use")),
    ],
)
def test_a_device_that_does_not_exist_ends_the_worker_at_once_and_is_named(
    start_worker: StartWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: str,
    visible: str | None,
    parts: tuple[str, ...],
) -> None:
    fake_torch(tmp_path, monkeypatch, 2)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    worker = start_worker("tests.device_models:tells", "--device", devices, wait=False)
    assert worker.process.wait(30) == 2
    assert all(part in worker.log for part in parts), worker.log


@needs_torch
async def test_children_have_torch_their_parent_has_none_and_their_threads_fit_the_machine(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis
) -> None:
    worker = start_worker(
        "tests.device_models:torch_threads", "--processes-per-device", "2", "--max-batch-size", "1"
    )
    await all_ready(raw)
    async with AsyncClient(redis_url) as client:
        [threads, pid] = await client.predict(None)
    assert threads == max(1, usable_cpus() // 2)
    assert "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{worker.process.pid}/maps").read_text()


# --- one's troubles are not the others' ---


async def test_while_a_killed_child_is_replaced_the_others_answer(
    redis_url: str, start_worker: StartWorker, gpus: Path, raw: redis_py.Redis, tmp_path: Path
) -> None:
    worker = start_worker("tests.device_models:scripted", "--model-arg", f"path={tmp_path}", *BOTH)
    await all_ready(raw)
    loads = dict(line.split() for line in (tmp_path / "loads").read_text().splitlines())
    (tmp_path / "hold-left").touch()
    os.kill(int(loads["left"]), signal.SIGKILL)
    await until(lambda: states(raw) == ["loading", "ready"], what="the new child")
    assert report(raw)["state"] == "ready"
    async with AsyncClient(redis_url) as client:
        assert set(await client.predict_many(range(8), timeout=30)) == {"right"}
        (tmp_path / "hold-left").unlink()
        await all_ready(raw)
        await asyncio.wait_for(from_both(client), 30)
    assert "signal 9" in worker.log
    children = [child["child"] for child in report(raw)["children"]]
    assert sorted(children) == [2, 3]  # numbers are given once
    assert [line.split()[0] for line in (tmp_path / "loads").read_text().splitlines()].count("left") == 2


async def test_a_child_that_runs_for_too_long_is_ended_alone(
    redis_url: str, start_worker: StartWorker, gpus: Path, raw: redis_py.Redis, tmp_path: Path
) -> None:
    worker = start_worker(
        "tests.device_models:scripted", "--model-arg", f"path={tmp_path}", *BOTH, "--batch-timeout", "1"
    )
    await all_ready(raw)
    before = set(worker.children)
    async with AsyncClient(redis_url) as client:
        call = asyncio.ensure_future(client.predict("wait", timeout=60))
        await until((tmp_path / "waits").exists)
        assert len(await client.predict_many(range(8), timeout=30)) == 8
        with pytest.raises(WorkerLostError):
            await call
    assert worker.log.count("runs for more than 1 s") == 2
    assert len(before & set(worker.children)) <= 1


async def test_a_slot_whose_model_cannot_be_loaded_any_more_is_tried_again_while_the_others_work(
    redis_url: str, start_worker: StartWorker, gpus: Path, raw: redis_py.Redis, tmp_path: Path
) -> None:
    worker = start_worker("tests.device_models:scripted", "--model-arg", f"path={tmp_path}", *BOTH)
    await all_ready(raw)
    loads = dict(line.split() for line in (tmp_path / "loads").read_text().splitlines())
    (tmp_path / "broken-left").touch()
    os.kill(int(loads["left"]), signal.SIGKILL)
    await until(lambda: worker.log.count("no weights for left") >= 2, what="a second try")
    async with AsyncClient(redis_url) as client:
        assert await client.predict(1, timeout=30) == "right"
    assert report(raw)["state"] == "ready"
    assert states(raw)[0] in ("restarting", "loading")
    (tmp_path / "broken-left").unlink()
    await all_ready(raw)


async def test_a_worker_none_of_whose_children_can_load_the_model_any_more_gives_up(
    redis_url: str, start_worker: StartWorker, gpus: Path, raw: redis_py.Redis, tmp_path: Path
) -> None:
    worker = start_worker("tests.device_models:scripted", "--model-arg", f"path={tmp_path}", *BOTH)
    await all_ready(raw)
    for gpu in ("left", "right"):
        (tmp_path / f"broken-{gpu}").touch()
    for child in worker.children:
        os.kill(child, signal.SIGKILL)
    assert await asyncio.to_thread(worker.process.wait, 60) == 3
    assert "has failed 5 times in a row" in worker.log
    assert raw.exists(QUEUE + "workers") == 0  # it has said goodbye


def test_a_model_that_cannot_be_loaded_on_one_device_ends_the_worker_before_any_was_ready(
    start_worker: StartWorker, gpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "hold-left").touch()
    (tmp_path / "broken-right").touch()
    worker = start_worker(
        "tests.device_models:scripted", "--model-arg", f"path={tmp_path}", *BOTH, wait=False
    )
    assert worker.process.wait(30) == 3
    assert "no weights for right" in worker.log
    pids = [int(line.split()[1]) for line in (tmp_path / "loads").read_text().splitlines()]
    assert all(map(is_gone, pids))


# --- a lost device ---


@needs_torch
async def test_a_lost_device_costs_one_child_whose_requests_are_run_again_and_the_worker_is_not_ready_meanwhile(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis, tmp_path: Path
) -> None:
    worker = start_worker(
        "tests.device_models:scripted",
        "--model-arg",
        f"path={tmp_path}",
        "--model-arg",
        "torch=true",
        "--max-delay",
        "20ms",
    )
    assert (await asyncio.to_thread(ping, redis_url)).returncode == 0
    (tmp_path / "hold-cpu").touch()
    async with AsyncClient(redis_url) as client:
        calls = asyncio.gather(*[client.predict(value, timeout=60) for value in ("a", "lose", "b")])
        await until(
            lambda: states(raw) == ["loading"] and report(raw)["state"] == "loading", what="the new child"
        )
        refused = await asyncio.to_thread(ping, redis_url)
        assert (refused.returncode, "none is ready" in refused.stdout) == (8, True)
        (tmp_path / "hold-cpu").unlink()
        assert await calls == ["cpu"] * 3
    assert (await asyncio.to_thread(ping, redis_url)).returncode == 0
    assert "the child has lost its device (exit code 13)" in worker.log
    assert "illegal memory access" in worker.log
    assert len((tmp_path / "loads").read_text().splitlines()) == 2


# --- before the first batch, and after the last ---


async def test_a_worker_takes_work_only_once_its_model_is_warm(
    redis_url: str, start_worker: StartWorker, raw: redis_py.Redis, tmp_path: Path
) -> None:
    worker = start_worker("tests.device_models:warms_up", "--model-arg", f"path={tmp_path}", wait=False)
    await until((tmp_path / "warming").exists)
    assert report(raw)["state"] == "loading"
    async with AsyncClient(redis_url) as client:
        call = asyncio.ensure_future(client.predict(1, timeout=60))
        await until(lambda: raw.llen(QUEUE + "requests") == 1)
        (tmp_path / "warm").touch()
        assert await call is True
    worker.wait_ready()


def test_a_warm_up_that_fails_is_told_like_a_load_that_fails(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker(
        "tests.device_models:warms_up",
        "--model-arg",
        f"path={tmp_path}",
        "--model-arg",
        "fails=true",
        wait=False,
    )
    assert worker.process.wait(30) == 3
    assert "too cold" in worker.log


async def test_a_drained_worker_of_several_children_exits_with_0_and_leaves_no_process(
    redis_url: str, start_worker: StartWorker, gpus: Path, raw: redis_py.Redis, tmp_path: Path
) -> None:
    worker = start_worker("tests.device_models:scripted", "--model-arg", f"path={tmp_path}", *BOTH)
    await all_ready(raw)
    children = worker.children
    async with AsyncClient(redis_url) as client:
        call = asyncio.ensure_future(client.predict("wait", timeout=60))
        await until((tmp_path / "waits").exists)
        worker.process.send_signal(signal.SIGTERM)
        # the idle one is gone, the busy one is waited for
        await until(lambda: [child["state"] for child in report(raw)["children"]].count("ended") == 1)
        assert report(raw)["state"] == "draining"
        (tmp_path / "open").touch()
        assert await call in ("left", "right")
    assert await asyncio.to_thread(worker.process.wait, 30) == 0
    assert len(children) == 2
    assert all(map(is_gone, children))
    assert raw.zcard(QUEUE + "leases") == 0


async def test_a_second_signal_ends_all_children_and_hands_their_batches_back(
    redis_url: str, start_worker: StartWorker, gpus: Path, raw: redis_py.Redis, tmp_path: Path
) -> None:
    worker = start_worker("tests.device_models:scripted", "--model-arg", f"path={tmp_path}", *BOTH)
    await all_ready(raw)
    async with AsyncClient(redis_url) as client:
        calls = asyncio.gather(*[client.predict("wait", timeout=60) for _ in range(2)])
        await until(lambda: raw.zcard(QUEUE + "leases") == 2)
        worker.process.send_signal(signal.SIGTERM)
        await until(lambda: "draining" in worker.log)
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, 30) == 0
        assert raw.llen(QUEUE + "requests") == 2
        assert raw.exists(QUEUE + "solo") == 0
        start_worker("tests.models:echo", "--allow-mixed")
        assert await calls == ["wait"] * 2


@pytest.mark.parametrize("hangs", [False, True])
def test_a_model_is_closed_at_the_end_and_one_that_hangs_in_it_keeps_no_worker_alive(
    start_worker: StartWorker, tmp_path: Path, hangs: bool
) -> None:
    worker = start_worker(
        "tests.device_models:closes", "--model-arg", f"path={tmp_path}", "--model-arg", f"hangs={json.dumps(hangs)}",
        "--drain-timeout", "1s" if hangs else "1h",
    )  # fmt: skip
    [child] = worker.children
    assert worker.stop() == 0
    assert (tmp_path / "closed").exists()
    assert is_gone(child)


# --- what others know of it ---


def test_a_report_of_another_version_keeps_no_worker_from_starting(
    start_worker: StartWorker, raw: redis_py.Redis
) -> None:
    now = int(raw.time()[0]) * 1_000_000
    for number, text in enumerate(("", "not json", "[1]", "{}", "null", '{"model": null}')):
        raw.hset(QUEUE + "workers", f"w{number}", f"{now};w{number};{text}")
    start_worker("tests.models:echo")


def test_the_batch_budget_belongs_to_the_queue(start_worker: StartWorker, raw: redis_py.Redis) -> None:
    start_worker("tests.models:echo", "--max-batch-cost", "100", "--padded")
    config = raw.hgetall(QUEUE + "config")
    assert (config[b"max_batch_cost"], config[b"padded"]) == (b"100", b"1")
    second = start_worker("tests.models:echo")
    assert "max_batch_cost=100 holds" in second.log
    assert "padded=1 holds" in second.log


def test_a_worker_that_knows_no_budget_holds_none(start_worker: StartWorker, raw: redis_py.Redis) -> None:
    start_worker("tests.models:echo")
    raw.hdel(QUEUE + "config", "max_batch_cost", "padded")  # as an older version leaves it
    second = start_worker("tests.models:echo", "--max-batch-cost", "100", "--padded")
    assert "no max_batch_cost holds" in second.log
