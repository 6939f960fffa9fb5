"""Failures that users of other queues have reported, each as a kind: here they do not happen.

In brackets behind the first words of each docstring: where it was reported.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis as redis_py

from batchq import AsyncClient, ClientClosedError, DeadlineExceededError, commands
from batchq.commands import Outgoing, TakeOptions
from batchq.keys import Keys
from batchq.requests import Ids
from batchq.store import Endpoint
from batchq.sync import Client
from tests.chaos.proxy import Proxy
from tests.conftest import ROOT, StartWorker, Worker, until

QUEUE = "batchq:{default}:"
PATIENCE = 30.0
"""Seconds after which a test that waits for an event gives up."""

TRANSACTION = b"+QUEUED"
"""What the reply to a transaction holds: of a client's to a push, of a worker's to the answers to a batch, and to nothing else."""
TOKEN = b":wake\r\n"
"""What the reply holds that ends a worker's wait; that of the take is right behind it."""


class FaultyProxy(Proxy):
    """Swallows ``swallow`` replies that hold ``mark``, and no others, and cuts their connections; while it is ``mute``, nothing passes."""

    def __init__(self, target_port: int) -> None:
        self.swallow = 0
        self.swallowed = 0
        self.mark = TRANSACTION
        self.mute = False
        self._watched: list[_Watched] = []
        super().__init__(target_port, seed=1)

        self._watched: list[_Watched] = []

    async def _pump(self, reader: Any, writer: Any, *, replies: bool) -> None:
        watched = _Watched(reader, self, replies)
        self._watched.append(watched)
        await super()._pump(watched, writer, replies=replies)

    def silence(self) -> None:
        """Let nothing pass on the connections that are open now, ever again."""
        for watched in list(self._watched):
            watched.silent = True


class _Watched:
    def __init__(self, reader: asyncio.StreamReader, proxy: FaultyProxy, replies: bool) -> None:
        self._reader, self._proxy, self._replies = reader, proxy, replies
        self.silent = False

    async def read(self, size: int) -> bytes:
        data = await self._reader.read(size)
        while self._proxy.mute or self.silent:
            await asyncio.sleep(0.01)
        if self._replies and self._proxy.swallow and self._proxy.mark in data:
            self._proxy.swallow -= 1
            self._proxy.swallowed += 1
            return b""
        return data


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def proxy(redis_url: str) -> Iterator[FaultyProxy]:
    found = FaultyProxy(int(redis_url.rpartition(":")[2].partition("/")[0]))
    yield found
    found.mute = False
    found.close()


def through(proxy: Proxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}/0"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(200) as pool:
        yield pool


def until_sync(condition: Callable[[], object], what: str = "the condition") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.005)


def connections(raw: redis_py.Redis, command: str = "") -> list[dict[str, str]]:
    """Redis' view of the connections other than our own, optionally those that last sent one command."""
    own = raw.client_id()
    return [c for c in raw.client_list() if int(c["id"]) != own and c["cmd"].startswith(command)]


def pending(raw: redis_py.Redis) -> int:
    return sum(raw.llen(QUEUE + f"heads{lane}") for lane in ("", ":high", ":low", ":solo"))


def counter(raw: redis_py.Redis, name: str) -> int:
    return int(raw.hget(QUEUE + "counters", name) or 0)


def started(folder: Path) -> list[str]:
    """What the ``gate`` model has begun to run."""
    path = folder / "started"
    return path.read_text().split() if path.exists() else []


def session_of(client: AsyncClient) -> Any:
    assert client._current is not None
    return client._current


async def taken_while_the_child_is_stopped(
    client: AsyncClient, raw: redis_py.Redis, worker: Worker, value: object
) -> tuple[asyncio.Task[Any], int]:
    """Stop a waiting worker's child, then send a request: Redis hands it a batch that it cannot even read about."""
    (child,) = worker.children
    for _ in range(20):
        await until(lambda: connections(raw, "blpop"), what="the worker's wait")
        os.kill(child, signal.SIGSTOP)
        call = asyncio.create_task(client.predict(value, timeout=60))
        await until(lambda: raw.zcard(QUEUE + "leases") or not connections(raw, "blpop"), what="the take")
        if raw.zcard(QUEUE + "leases"):
            return call, child
        os.kill(child, signal.SIGCONT)  # it was between two waits
        await call
    raise AssertionError("the child was never caught while it waited")


# --- workers -----------------------------------------------------------------------------------------------


async def test_what_a_blocking_pop_had_fetched_when_it_was_cut_by_a_shutdown_goes_back(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker, tmp_path: Path
) -> None:
    """Work lost when a blocking pop is cut at shutdown (kombu 1733, celery 4354)."""
    (tmp_path / "open").touch()
    gate = ("tests.models:gate", "--model-arg", f"path={tmp_path}", "--max-delay", "0")
    worker = start_worker(*gate, "--drain-timeout", "0.2s")
    async with AsyncClient(redis_url) as client:
        call, child = await taken_while_the_child_is_stopped(client, raw, worker, "held")
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, PATIENCE) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
        assert (pending(raw), raw.zcard(QUEUE + "leases")) == (1, 0)
        start_worker(*gate)
        assert await call == "held"
        assert started(tmp_path).count("held") == 1


async def test_what_redis_has_answered_to_a_worker_just_as_the_connection_was_cut_is_not_lost_and_runs_once(
    redis_url: str, raw: redis_py.Redis, proxy: FaultyProxy, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "open").touch()
    gate = ("tests.models:gate", "--model-arg", f"path={tmp_path}", "--max-delay", "0")
    start_worker(*gate, url=through(proxy))
    async with AsyncClient(redis_url) as client:
        for n in range(12):
            await until(lambda: connections(raw, "blpop"), what="the worker's wait")
            proxy.mark = (TOKEN, TRANSACTION)[
                n % 2
            ]  # the token and the batch, or that the answers have arrived
            proxy.swallow = 1
            assert await client.predict(n, timeout=60) == n
            await until(lambda n=n: proxy.swallowed == n + 1, what="the cut")
    assert started(tmp_path) == [str(n) for n in range(12)]
    assert counter(raw, "recovered") == 0


async def test_a_batch_that_runs_for_longer_than_its_lease_is_run_once(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    """Long work run again because its visibility was not renewed (kombu 337); here even by a model that holds the GIL."""
    model = ("tests.models:holds_the_gil", "--model-arg", "seconds=2.5", "--lease", "1", "--max-delay", "0")
    for _ in range(2):
        start_worker(*model, wait=False)
    async with AsyncClient(redis_url) as client:
        assert await client.predict("warm", timeout=60) == "warm"
        await until(lambda: len(raw.hkeys(QUEUE + "workers")) == 2, what="the second worker")
        assert await client.predict("hold", timeout=60) == "hold"
        assert await client.predict("next") == "next"
    assert (counter(raw, "recovered"), counter(raw, "batches"), counter(raw, "completed")) == (0, 3, 3)


async def test_a_batch_that_was_taken_and_not_yet_read_by_its_worker_is_swept_by_nobody(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker, tmp_path: Path
) -> None:
    """A healthy batch swept between fetch and record (saq 124, sidekiq 4611)."""
    (tmp_path / "open").touch()
    gate = ("tests.models:gate", "--model-arg", f"path={tmp_path}", "--lease", "1", "--max-delay", "0")
    worker = start_worker(*gate)
    async with AsyncClient(redis_url) as client:
        call, child = await taken_while_the_child_is_stopped(client, raw, worker, "held")
        try:
            ((batch, first_end),) = raw.zrange(QUEUE + "leases", 0, -1, withscores=True)
            start_worker(*gate)  # it looks for what others have left behind
            # longer than the lease and the two looks of a sweeper
            await until(
                lambda: (raw.zscore(QUEUE + "leases", batch) or 0) > first_end + 2e6, what="the renewals"
            )
        finally:
            os.kill(child, signal.SIGCONT)
        assert await call == "held"
        assert started(tmp_path).count("held") == 1
    assert counter(raw, "recovered") == 0


async def test_a_worker_whose_connections_were_cut_while_it_was_idle_answers_the_next_request(
    redis_url: str, raw: redis_py.Redis, proxy: FaultyProxy, start_worker: StartWorker
) -> None:
    """A worker silent after a reconnect while its health says fine (bullmq 4479, celery 8030, groupmq 16)."""
    start_worker("tests.models:echo", "--max-delay", "0", url=through(proxy))
    async with AsyncClient(redis_url) as client:
        for n in range(5):
            await until(lambda: connections(raw, "blpop"), what="the worker's wait")
            before = {connection["id"] for connection in connections(raw)}
            proxy.cut()
            if n % 2:  # it has come back by itself, and waits
                await until(
                    lambda before=before: any(c["id"] not in before for c in connections(raw, "blpop")),
                    what="the worker's new wait",
                )
            assert await client.predict(n, timeout=60) == n
            assert len((await client.stats()).workers) == 1


async def test_a_worker_whose_connections_fell_silent_opens_others_and_can_be_stopped_while_all_are_silent(
    redis_url: str, raw: redis_py.Redis, proxy: FaultyProxy, start_worker: StartWorker
) -> None:
    """The same where nothing says that a connection is gone, for a firewall has forgotten it; and bullmq 2430."""
    worker = start_worker(
        "tests.models:echo", "--max-delay", "0", "--drain-timeout", "0.5s", url=through(proxy)
    )
    async with AsyncClient(redis_url) as client:
        await until(lambda: connections(raw, "blpop"), what="the worker's wait")
        proxy.silence()  # those that are open; new ones work
        assert await client.predict("held", timeout=60) == "held"
    proxy.mute = True
    worker.process.send_signal(signal.SIGTERM)
    try:
        assert await asyncio.to_thread(worker.process.wait, PATIENCE) == 0
    finally:
        proxy.mute = False


async def test_sigterm_while_the_child_is_stuck_in_c_code_hands_the_batch_back_after_the_drain_time(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    options = (
        "stuck:once",
        "--app-dir",
        str(tmp_path),
        "--model-arg",
        f"path={tmp_path}",
        "--max-delay",
        "0",
    )
    worker = start_worker(*options, "--drain-timeout", "0.3s")
    async with AsyncClient(redis_url) as client:
        call = asyncio.create_task(client.predict("x", timeout=60))
        await until((tmp_path / "entered").exists, what="the C call")
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, PATIENCE) == 0
        assert "not done in time" in worker.log
        assert (pending(raw), raw.zcard(QUEUE + "leases"), counter(raw, "recovered")) == (1, 0, 0)
        start_worker(*options)
        assert await call == "x"


STUCK = """
import ctypes
from pathlib import Path


def once(path):
    "The first run never comes back from C, holds the GIL, and no signal ends it."
    entered = Path(path) / "entered"
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(256)

    def predict(inputs):
        if not entered.exists():
            entered.touch()
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
        return inputs

    return predict
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait_for_the_batch_that_runs(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker, tmp_path: Path, number: signal.Signals
) -> None:
    gate = (
        "tests.models:gate",
        "--model-arg",
        f"path={tmp_path}",
        "--max-delay",
        "0",
        "--max-batch-size",
        "2",
    )
    worker = start_worker(*gate, "--drain-timeout", "1h")

    def send() -> None:
        if number == signal.SIGINT:  # as a terminal does: to the child as well
            os.killpg(worker.process.pid, number)
        else:
            worker.process.send_signal(number)

    async with AsyncClient(redis_url) as client:
        calls = asyncio.gather(*[client.predict(n, timeout=60) for n in range(5)])
        await until(lambda: started(tmp_path), what="the batch")
        send()
        await until(lambda: "draining" in worker.log, what="the first signal")
        assert worker.process.poll() is None
        send()
        assert await asyncio.to_thread(worker.process.wait, PATIENCE) == 0
        assert (pending(raw), raw.zcard(QUEUE + "leases"), counter(raw, "recovered")) == (5, 0, 0)
        (tmp_path / "open").touch()
        start_worker(*gate)
        assert await calls == list(range(5))


async def test_a_worker_can_be_stopped_while_redis_refuses_and_others_take_over_what_it_held(
    redis_url: str, proxy: FaultyProxy, start_worker: StartWorker, tmp_path: Path
) -> None:
    """Close hangs when Redis is gone (bullmq 2430)."""
    gate = ("tests.models:gate", "--model-arg", f"path={tmp_path}", "--lease", "1")
    worker = start_worker(*gate, "--drain-timeout", "0.5s", url=through(proxy))
    async with AsyncClient(redis_url) as client:
        call = asyncio.create_task(client.predict("held", timeout=60))
        await until(lambda: started(tmp_path), what="the batch")
        proxy.refuse = True
        proxy.cut()
        await until(lambda: "Redis is not available" in worker.log, what="the outage")
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, PATIENCE) == 0
        assert "Redis is back" not in worker.log  # for this worker it never was
        (tmp_path / "open").touch()
        start_worker(*gate)
        assert await call == "held"


# --- what is sent twice, or cancelled ----------------------------------------------------------------------


async def test_a_push_whose_reply_was_lost_is_in_the_queue_once(
    redis_url: str, raw: redis_py.Redis, proxy: FaultyProxy, start_worker: StartWorker, tmp_path: Path
) -> None:
    """Commands sent again after a lost reply (redis-py 977, 3554)."""
    (tmp_path / "open").touch()
    async with AsyncClient(through(proxy), timeout=60) as client:
        await client.ping()
        proxy.swallow = 1
        one = asyncio.create_task(client.predict("one"))
        await until(lambda: proxy.swallowed == 1 and session_of(client).chain.last, what="the push")
        proxy.swallow = 2  # that of the second try as well
        many = asyncio.create_task(client.predict_many(["two", "three"]))
        await until(
            lambda: proxy.swallowed == 3 and session_of(client).chain.last == "2", what="the second push"
        )
        proxy.swallow = 1
        job = await client.submit("four")
        assert proxy.swallowed == 4
        assert (pending(raw), counter(raw, "accepted")) == (4, 4)
        assert raw.llen(QUEUE + "requests") == 4
        start_worker("tests.models:gate", "--model-arg", f"path={tmp_path}")
        assert [await one, *await many, await job.result(60)] == ["one", "two", "three", "four"]
        assert sorted(started(tmp_path)) == ["four", "one", "three", "two"]


def test_a_push_of_a_thread_whose_reply_was_lost_is_in_the_queue_once(
    raw: redis_py.Redis, proxy: FaultyProxy, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "open").touch()
    start_worker("tests.models:gate", "--model-arg", f"path={tmp_path}")
    calls: list[tuple[Callable[[Client], object], object]] = [
        (lambda client: client.predict("one"), "one"),
        (lambda client: client.predict_many(["two", "three"]), ["two", "three"]),
        (lambda client: list(client.map(["four", "five"])), ["four", "five"]),
        (lambda client: client.submit("six").result(60), "six"),
    ]
    with Client(through(proxy), timeout=60) as client:
        for times, (call, answer) in enumerate(calls, start=1):
            proxy.swallow, before = times, proxy.swallowed  # once, and the second try's as well, and so on
            assert call(client) == answer
            assert proxy.swallowed == before + times
    assert counter(raw, "accepted") == 6
    assert sorted(started(tmp_path)) == ["five", "four", "one", "six", "three", "two"]


async def test_after_a_cancel_no_answer_goes_to_another_call(
    redis_url: str, proxy: FaultyProxy, start_worker: StartWorker
) -> None:
    """Replies off by one after a cancel (redis-py 2624)."""
    start_worker("tests.models:echo", "--max-delay", "0")
    moments = random.Random(5)
    async with AsyncClient(through(proxy), timeout=60) as client:
        done = await client.submit("the job's")
        assert await done.result(60) == "the job's"
        proxy.delay = 0.01
        for n in range(30):
            victims = [
                asyncio.create_task(work)
                for work in (
                    client.predict(f"victim {n}"),
                    client.predict_many([f"victim {n}", n]),
                    client.stats(),
                    client.ping(),
                    done.result(60),
                    done.state(),
                )
            ]
            await asyncio.sleep(
                moments.random() * 0.04
            )  # somewhere between the first send and the last answer
            for victim in victims:
                victim.cancel()
            answers = await asyncio.gather(
                client.predict(n),
                client.predict_many([n, "a"]),
                client.stats(),
                done.result(60),
                done.state(),
            )
            assert [answers[0], answers[1], answers[3], answers[4]] == [n, [n, "a"], "the job's", "done"]
            assert (answers[2].queue, len(answers[2].workers)) == ("default", 1)
            await asyncio.gather(*victims, return_exceptions=True)
        assert not session_of(client).outstanding


async def test_cancelled_calls_leave_no_connection_behind(
    redis_url: str, raw: redis_py.Redis, proxy: FaultyProxy, start_worker: StartWorker
) -> None:
    """Pooled connections leaked by cancel (redis-py 4121)."""
    start_worker("tests.models:echo", "--max-delay", "0")
    async with AsyncClient(through(proxy), timeout=60) as client:
        assert await client.predict(1) == 1
        pending_job = await client.submit("job", id="j")
        await pending_job.result(60)
        others = len(connections(raw)) - len([link for link in session_of(client)._links if not link.broken])
        proxy.delay = 0.01
        moments = random.Random(6)
        for _ in range(40):
            victims = [
                asyncio.create_task(work) for work in (client.stats(), client.ping(), pending_job.state())
            ]
            await asyncio.sleep(moments.random() * 0.03)
            for victim in victims:
                victim.cancel()
            await asyncio.gather(*victims, return_exceptions=True)
        proxy.delay = 0.0
        session = session_of(client)
        await client.ping()
        # one that pushes, one that reads, and of those that took turns as many as were in use at once
        assert len([link for link in session._links if not link.broken]) <= 2 + 3
        assert len(session._idle) <= 3
        assert not session._busy_since.keys() - {session._reply_link}
        await until(lambda: len(connections(raw)) <= others + 2 + 3, what="the end of the connections")
        assert await client.predict(2) == 2
    await until(lambda: len(connections(raw)) <= others, what="the end of all connections")


async def test_futures_of_calls_that_timed_out_are_freed_and_the_service_goes_on(
    redis_url: str, start_worker: StartWorker
) -> None:
    """Timed-out futures never freed, and then the service locks (service-streamer 61, 73)."""
    async with AsyncClient(redis_url) as client:
        calls = [asyncio.create_task(client.predict(n, timeout=0.3)) for n in range(300)]
        await until(lambda: client._current and len(client._current.outstanding) == 300, what="the calls")
        session = session_of(client)
        futures = [weakref.ref(call.future) for call in session.outstanding.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {DeadlineExceededError}
        del answers, calls
        assert not session.outstanding
        assert not session.buffer
        start_worker("tests.models:echo", "--max-delay", "0")
        assert await asyncio.gather(*[client.predict(n) for n in range(50)]) == list(range(50))
        gc.collect()
        assert [ref for ref in futures if ref() is not None] == []
        assert (await client.stats()).completed == 50


async def test_a_call_that_is_cancelled_wherever_it_is_harms_no_other(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker, tmp_path: Path
) -> None:
    """One cancelled request kills the batcher (batched-fn 25, ray 41199)."""
    start_worker(
        "tests.models:gate", "--model-arg", f"path={tmp_path}", "--max-delay", "0", "--max-batch-size", "8"
    )
    async with AsyncClient(redis_url, timeout=60) as client:
        calls = {n: asyncio.create_task(client.predict(n)) for n in range(30)}
        calls[0].cancel()  # before it has left
        await until(lambda: started(tmp_path) and raw.zcard(QUEUE + "leases"), what="the first batch")
        running = {int(n) for n in started(tmp_path)}
        waiting = set(range(1, 30)) - running
        victims = {0, min(running), max(waiting)}
        for n in victims:
            calls[n].cancel()
        (tmp_path / "open").touch()
        for n, call in calls.items():
            if n in victims:
                with pytest.raises(asyncio.CancelledError):
                    await call
            else:
                assert await call == n
        assert await asyncio.gather(*[client.predict(n) for n in range(100, 130)]) == list(range(100, 130))
        assert not session_of(client).outstanding
    assert not {"0", str(max(waiting))} & set(started(tmp_path))  # those were dropped where they waited


async def test_a_callers_own_time_limit_around_predict_ends_it_and_disturbs_nobody(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    async def with_timeout(work: Any) -> Any:
        async with asyncio.timeout(0.2):  # new in Python 3.11
            return await work

    async def with_wait_for(work: Any) -> Any:
        return await asyncio.wait_for(work, 0.2)

    ways = [with_wait_for, *([with_timeout] if hasattr(asyncio, "timeout") else [])]
    async with AsyncClient(redis_url, timeout=60) as client:
        patient = asyncio.create_task(client.predict("patient"))
        for limited in ways:
            for work in (client.predict("hasty"), client.predict_many(["hasty", "hasty"])):
                with pytest.raises(asyncio.TimeoutError):
                    await limited(work)
        assert len(session_of(client).outstanding) == 1
        await until(lambda: raw.zcard(QUEUE + "cancelled") == 3 * len(ways), what="the cancels")
        start_worker("tests.models:echo")
        assert await patient == "patient"
        assert await client.predict("next") == "next"
        assert (await client.stats()).completed == 2


# --- numbers -----------------------------------------------------------------------------------------------


async def test_more_requests_than_lua_can_unpack_are_admitted_taken_cancelled_and_handed_back(
    redis_url: str, raw: redis_py.Redis
) -> None:
    """A Lua ``unpack`` over its limit idles the worker for ever (dramatiq 258)."""
    keys, ids = Keys("default"), Ids()
    link = Endpoint(redis_url).link()
    options = TakeOptions(worker="w", max_batch_size=4096, max_delay_us=0, lease_us=60_000_000)
    push: dict[str, Any] = {"producer": "", "previous": "", "token": "", "fresh": True, "force": True}

    def requests(count: int, timeout_us: int = 60_000_000) -> list[Outgoing]:
        return [Outgoing(ids.next(), b"%d" % n, "n", timeout_us) for n in range(count)]

    def take(name: str, form: str) -> commands.Taken:
        return link.call(commands.take(keys, options, name, limit=4096, run_us=0, form=form))

    try:
        for form in ("light", "force", "native"):
            first = requests(12_000)
            assert link.call(commands.push(keys, first, **push)).admitted == {"n": 12_000}
            taken = take("w.1.1", form)
            assert len(taken.heads) == 4096
            again = take("w.1.1", form)
            assert (again.kind, again.heads) == ("again", taken.heads)
            assert link.call(commands.release(keys, "w.1.1")) == 4096
            assert pending(raw) == 12_000
            # 9,000 of them are cancelled, and as many come that are too late
            link.call(commands.cancel(keys, [request.id for request in first[:9000]], 60_000))
            link.call(commands.push(keys, requests(9000, timeout_us=0), **push))
            found: list[bytes] = []
            while (taken := take("w.1.2", form)).outcome == "batch":
                found += [head.id for head in taken.heads if head is not None]
                link.call(commands.finish(keys, "w.1.2", commands.Answers({}, [], 0)))
            assert found == [request.id for request in first[9000:]]
            assert (pending(raw), raw.llen(QUEUE + "requests")) == (0, 0)
            raw.delete(QUEUE + "cancelled")
        # all that a dead worker held, three times over
        for n in range(3):
            link.call(commands.push(keys, requests(4096), **push))
            assert len(take(f"w.1.{n}", "light").heads) == 4096
        for n in range(3):
            recovered = link.call(
                commands.recover(keys, f"w.1.{n}", seen_end="", dead_worker="w", lease_us=1_000_000)
            )
            assert recovered.requests == 4096
        heads = [commands.parse_head(head) for head in raw.lrange(QUEUE + "heads:solo", 0, -1)]
        assert len(heads) == 3 * 4096
        assert link.call(commands.forget(keys, [head.id for head in heads if head])) == 3 * 4096
        assert raw.llen(QUEUE + "solo") == 0
        # halves of requests, as a torn append-only file may leave them
        for half in ("requests", "heads"):
            raw.rpush(QUEUE + half, *[b"half"] * 9000)
            link.call(commands.push(keys, requests(1), **push))
            assert raw.llen(QUEUE + "requests") == raw.llen(QUEUE + "heads")
        assert counter(raw, "repaired") == 2 * 9000
    finally:
        link.close()


async def test_many_thousand_calls_at_once_are_answered_and_may_be_cancelled(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    async with AsyncClient(redis_url, timeout=60) as client:
        raw.hset(QUEUE + "config", "capacity", 20_000)
        dropped = asyncio.create_task(client.predict_many(range(9000)))
        await until(lambda: pending(raw) == 9000, what="the push")
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        await until(lambda: raw.zcard(QUEUE + "cancelled") == 9000, what="the cancel")
        start_worker("tests.models:echo", "--max-batch-size", "4096", "--capacity", "20000")
        assert await client.predict_many(range(10_000)) == list(range(10_000))
        assert counter(raw, "completed") == 10_000


def test_two_hundred_threads_share_a_client(
    redis_url: str, raw: redis_py.Redis, start_worker: StartWorker, threads: ThreadPoolExecutor
) -> None:
    start_worker("tests.models:echo", "--max-delay", "0.002")
    until_sync(lambda: len(connections(raw)) == 3, "the connections of the worker's parent and child")
    others = len(connections(raw))
    for limit in (256, 8):
        with Client(redis_url, timeout=60, max_connections=limit) as client:
            together = threading.Barrier(200)

            def ask(
                thread: int, client: Client = client, together: threading.Barrier = together
            ) -> list[Any]:
                together.wait(PATIENCE)
                return [client.predict([thread, n]) for n in range(5)]

            answers = list(threads.map(ask, range(200), timeout=60))
            assert answers == [[[thread, n] for n in range(5)] for thread in range(200)]
            assert len(connections(raw)) <= others + min(limit, 200)
            assert client._pools[os.getpid()]._used == set()
        until_sync(lambda: len(connections(raw)) <= others, "the end of the connections")


# --- processes ---------------------------------------------------------------------------------------------


def script(source: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program that must end by itself; any warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source), *args],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip


FORKED = """
    import asyncio, os, sys
    from batchq import AsyncClient

    client = AsyncClient(sys.argv[1], timeout=30)

    async def ask(who):
        assert await asyncio.gather(*[client.predict([who, n]) for n in range(50)]) == [[who, n] for n in range(50)]

    def fork(n):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                async def child():
                    await ask(f"child {n}")
                    await ask(f"child {n} again")
                    await client.aclose()
                asyncio.run(child())
                code = 0
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            os._exit(code)
        return pid

    async def parent():
        links = []
        if sys.argv[2] == "after":
            await ask("parent")
            links = list(client._current._links)
        waiting = asyncio.ensure_future(ask("parent, meanwhile"))
        await asyncio.sleep(0)
        children = [fork(n) for n in range(3)]
        await waiting
        await ask("parent, still")
        for pid in children:
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status == 0, status
        links = links or list(client._current._links)
        await ask("parent, at the end")
        assert client._current._links == links
        assert not any(link.broken for link in links)  # no child has closed or disturbed them
        await client.aclose()

    asyncio.run(parent())
"""


@pytest.mark.parametrize("first_use", ["before", "after"])
def test_an_asyncio_client_answers_parent_and_children_after_a_fork(
    redis_url: str, start_worker: StartWorker, first_use: str
) -> None:
    """An async client used in a forked child (redis-py 3141)."""
    start_worker("tests.models:echo", "--max-delay", "0.001")
    ended = script(FORKED, redis_url, first_use)
    assert (ended.returncode, ended.stderr) == (0, "")


EXITS = {
    "a loop that ends": """
        async def main():
            asyncio.ensure_future(client.predict(1, timeout=3600))
            await pushed()
        asyncio.run(main())
    """,
    "a loop that is left open": """
        loop = asyncio.new_event_loop()
        async def main():
            asyncio.ensure_future(client.predict(1, timeout=3600))
            await pushed()
        loop.run_until_complete(main())
    """,
    "sys.exit in a task": """
        async def main():
            asyncio.ensure_future(client.predict_many([1, 2], timeout=3600))
            await pushed()
            sys.exit(0)
        asyncio.run(main())
    """,
    "a daemon thread": """
        threading.Thread(target=threaded.predict, args=(1,), kwargs={"timeout": 3600}, daemon=True).start()
        wait_for_push()
    """,
    "close, and a thread that waits": """
        def wait():
            try:
                threaded.predict(1, timeout=3600)
            except ClientClosedError:
                return
            os._exit(1)
        threading.Thread(target=wait).start()
        wait_for_push()
        threaded.close()
    """,
    "a map that was not read to its end": """
        answers = threaded.map(itertools.count())
        thread = threading.Thread(target=next, args=(answers,), daemon=True)
        thread.start()
        wait_for_push()
    """,
}
PREAMBLE = """
import asyncio, itertools, os, sys, threading, time
import redis
from batchq import AsyncClient, ClientClosedError
from batchq.sync import Client

client, threaded = AsyncClient(sys.argv[1]), Client(sys.argv[1])
raw = redis.Redis.from_url(sys.argv[1], protocol=2)

def is_pushed():
    return raw.llen("batchq:{default}:heads") or raw.llen("batchq:{default}:heads:low")

async def pushed():
    while not is_pushed():
        await asyncio.sleep(0.01)

def wait_for_push():
    while not is_pushed():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("how", EXITS)
def test_a_program_ends_though_requests_are_outstanding(redis_url: str, how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(EXITS[how]), redis_url],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


# --- close -------------------------------------------------------------------------------------------------


class Gone(NamedTuple):
    """A Redis that is gone from the moment that ``go`` is called; until then it may be ``reachable``."""

    url: str
    reachable: bool
    go: Callable[[], None]


@pytest.fixture(params=["refuses", "accepts and says nothing", "fell silent"])
def gone(request: pytest.FixtureRequest, proxy: FaultyProxy) -> Iterator[Gone]:
    if request.param == "fell silent":
        yield Gone(through(proxy), True, lambda: setattr(proxy, "mute", True))
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        if request.param == "refuses":
            server.close()
        yield Gone(url, False, lambda: None)


async def test_closing_an_asyncio_client_does_not_wait_for_a_redis_that_is_gone(gone: Gone) -> None:
    """Close hangs when Redis is gone (bullmq 2430)."""
    client = AsyncClient(gone.url)
    if gone.reachable:
        await client.ping()
    calls = [asyncio.create_task(client.predict(1, timeout=3600))]
    await until(lambda: client._current and client._current.outstanding, what="the call")
    gone.go()
    calls += [asyncio.create_task(work) for work in (client.predict(2, timeout=3600), client.submit(3))]
    await until(lambda: len(session_of(client).outstanding) == 3, what="the calls")
    await asyncio.wait_for(client.aclose(), PATIENCE)
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)
    assert [type(answer) for answer in answers] == [ClientClosedError] * 3


def test_closing_a_threaded_client_does_not_wait_for_a_redis_that_is_gone(
    gone: Gone, threads: ThreadPoolExecutor
) -> None:
    client = Client(gone.url + "?socket_connect_timeout=0.5")  # a thread that is connecting ends within that
    if gone.reachable:
        client.ping()
    pool = client._pool()
    calls = [threads.submit(client.predict, 1, timeout=3600)]
    until_sync(lambda: len(pool._used) == 1, "the call")
    gone.go()
    calls += [threads.submit(work, 2) for work in (client.predict, client.submit)]
    until_sync(lambda: len(pool._used) == 3, "the calls")
    client.close()
    for call in calls:
        with pytest.raises(ClientClosedError):
            call.result(PATIENCE)
