"""What a user's own unit tests may rely on from the stubs."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from batchq.errors import (
    ClientClosedError,
    ConfigError,
    EncodeError,
    JobNotFoundError,
    ModelError,
    NoWorkerError,
    QueueFullError,
)
from batchq.local import AsyncLocalClient, LocalClient
from batchq.testing import AsyncStubClient, StubClient


class Sync:
    """An AsyncStubClient with its coroutines run, so that one test serves both."""

    def __init__(self, *args, **kwargs):
        self._stub = AsyncStubClient(*args, **kwargs)
        self.calls = self._stub.calls

    def __getattr__(self, name):
        member = getattr(self._stub, "aclose" if name == "close" else name)

        def call(*args, **kwargs):
            return run(member(*args, **kwargs))

        return call


class SyncJob:
    def __init__(self, job):
        self._job = job
        self.id = job.id

    def __getattr__(self, name):
        return lambda *args, **kwargs: run(getattr(self._job, name)(*args, **kwargs))


def run(found):
    async def finish():
        if hasattr(found, "__anext__"):
            return [item async for item in found]
        return await found if inspect.isawaitable(found) else found

    done = asyncio.run(finish())
    return SyncJob(done) if type(done).__name__ == "AsyncStubJob" else done


@pytest.fixture(params=[StubClient, Sync])
def stub(request):
    return request.param


def double(value):
    return value * 2


def test_each_value_gets_the_functions_answer(stub):
    client = stub(double)
    assert client.predict(1) == 2
    assert client.predict_many([1, 2]) == [2, 4]
    assert list(client.map(iter([1, 2]))) == [2, 4]
    assert client.submit(3, id="x").result() == 6
    assert client.job("x").state() == "done"
    assert client.ping() == 0.0
    assert client.stats().completed == 6


def test_it_notes_each_value_and_its_options(stub):
    client = stub(double)
    client.predict("a", timeout=2.0, priority="high", meta={"user": 1})
    client.predict_many([1, 2], batch_key="k")
    list(client.map([3]))
    client.submit(4, id="x", deadline=5)
    assert [(call.method, call.value) for call in client.calls] == [
        ("predict", "a"),
        ("predict_many", 1),
        ("predict_many", 2),
        ("map", 3),
        ("submit", 4),
    ]
    assert client.calls[0].kwargs == {
        "timeout": 2.0,
        "priority": "high",
        "batch_key": None,
        "cost": None,
        "meta": {"user": 1},
    }
    assert client.calls[2].kwargs["batch_key"] == "k"
    assert client.calls[3].kwargs["priority"] == "low"
    assert (client.calls[4].kwargs["id"], client.calls[4].kwargs["deadline"]) == ("x", 5)


def test_it_raises_an_instance_a_class_or_what_a_function_of_the_value_returns(stub):
    error = QueueFullError("full", retry_after=7)
    with pytest.raises(QueueFullError) as caught:
        stub(double, raises=error).predict(1)
    assert caught.value.retry_after == 7
    with pytest.raises(NoWorkerError):
        stub(double, raises=NoWorkerError).predict(1)
    with pytest.raises(RuntimeError):
        stub(double, raises=RuntimeError).predict(1)
    some = stub(double, raises=lambda value: ModelError("odd") if value % 2 else None)
    assert some.predict(2) == 4
    with pytest.raises(ModelError, match="odd"):
        some.predict(1)


def test_errors_stand_in_their_place_with_return_exceptions(stub):
    client = stub(double, raises=lambda value: ModelError("odd") if value % 2 else None)
    assert [type(found) for found in client.predict_many([1, 2], return_exceptions=True)] == [ModelError, int]
    assert [type(found) for found in client.map([1, 2], return_exceptions=True)] == [ModelError, int]
    with pytest.raises(ModelError):
        client.predict_many([2, 1])


def test_map_never_raises_that_the_queue_is_full_as_the_real_one_does_not(stub):
    assert list(stub(double, raises=QueueFullError).map([1, 2])) == [2, 4]


def test_what_the_function_raises_is_a_model_error_as_it_is_for_a_model(stub):
    with pytest.raises(ModelError, match="TypeError: ") as caught:
        stub(double).predict(None)
    assert caught.value.error_type == "TypeError"


def test_a_job_fails_with_what_the_model_raises_and_submit_with_what_keeps_it_out(stub):
    job = stub(double, raises=ModelError("broken")).submit(1)
    assert job.state() == "failed"
    for _ in range(2):
        with pytest.raises(ModelError, match="broken"):
            job.result()
    assert job.cancel() is False
    with pytest.raises(QueueFullError):
        stub(double, raises=QueueFullError).submit(1)
    client = stub(double)
    client.submit(1, id="same")
    assert client.submit(9, id="same").result() == 2
    with pytest.raises(JobNotFoundError):
        client.job("nobody").result()
    assert client.job("nobody").state() == "unknown"


def test_values_and_options_are_checked_as_the_real_client_does(stub):
    client = stub(double)
    with pytest.raises(EncodeError):
        client.predict({1, 2})
    with pytest.raises(EncodeError):
        stub(lambda value: {value}).predict(1)
    assert stub(lambda value: value).predict((1, 2)) == [1, 2]
    for call in [
        lambda: client.predict(1, timeout=0),
        lambda: client.predict(1, priority="urgent"),
        lambda: client.predict_many(range(5000)),
        lambda: client.predict_many([1], timeout=-1),
        lambda: client.map([1], concurrency=0),
        lambda: client.submit(1, id=""),
        lambda: client.submit(1, deadline=0),
        lambda: client.submit(1, result_ttl=0),
        lambda: client.job(""),
        lambda: client.submit(1).result(timeout=0),
        lambda: stub(None),
        lambda: stub(double, raises=3),
    ]:
        with pytest.raises(ConfigError):
            call()


def test_after_close_each_call_raises(stub):
    client = stub(double)
    job = client.submit(1)
    client.close()
    for call in [
        lambda: client.predict(1),
        lambda: client.predict_many([]),
        lambda: client.map([]),
        lambda: client.submit(1),
        lambda: client.job("x"),
        client.stats,
        client.ping,
        job.result,
        job.state,
        job.cancel,
    ]:
        with pytest.raises(ClientClosedError):
            call()


async def test_they_are_context_managers_and_async_map_takes_async_iterables():
    async def source():
        yield 1

    with StubClient(double) as client:
        assert client.predict(1) == 2
    async with AsyncStubClient(double) as later:
        assert [answer async for answer in later.map(source())] == [2]
    with pytest.raises(ClientClosedError):
        client.predict(1)
    with pytest.raises(ClientClosedError):
        await later.predict(1)


@pytest.mark.parametrize(
    ("stub_class", "client_class"), [(StubClient, LocalClient), (AsyncStubClient, AsyncLocalClient)]
)
def test_a_stub_has_the_calls_of_the_client_that_it_stands_for(stub_class, client_class):
    names = {name for name in dir(client_class) if not name.startswith("_")}
    assert {name for name in dir(stub_class) if not name.startswith("_")} == names
    for name in names:
        real, stub = (inspect.signature(getattr(cls, name)) for cls in (client_class, stub_class))
        assert [(p.name, p.kind, p.default) for p in real.parameters.values()] == [
            (p.name, p.kind, p.default) for p in stub.parameters.values()
        ]
        assert inspect.iscoroutinefunction(getattr(client_class, name)) == inspect.iscoroutinefunction(
            getattr(stub_class, name)
        )
