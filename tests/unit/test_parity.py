"""The six clients are twins: moving from one to another changes one line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from batchq.aio import AsyncClient, AsyncJob
from batchq.local import AsyncLocalClient, AsyncLocalJob, LocalClient, LocalJob
from batchq.sync import Client, Job
from batchq.testing import AsyncStubClient, AsyncStubJob, StubClient, StubJob

CLIENTS = {
    Client: Job,
    AsyncClient: AsyncJob,
    LocalClient: LocalJob,
    AsyncLocalClient: AsyncLocalJob,
    StubClient: StubJob,
    AsyncStubClient: AsyncStubJob,
}
ASYNC = {AsyncClient, AsyncLocalClient, AsyncStubClient, AsyncJob, AsyncLocalJob, AsyncStubJob}
METHODS = ("predict", "predict_many", "map", "submit", "job", "stats", "ping")
JOB_METHODS = ("state", "result", "cancel")
THREADS_ONLY = {"max_connections"}
"""Settings of Client that AsyncClient does not need: it has two connections, whatever is outstanding."""

each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
each_job = pytest.mark.parametrize("job", CLIENTS.values(), ids=lambda job: job.__name__)


def signature(method: Any) -> list[tuple[str, Any, Any, str]]:
    """Names, kinds, defaults and types of the parameters; an async iterable where a sync one may stand is the same."""
    return [
        (
            p.name,
            p.kind,
            p.default,
            str(p.annotation).replace("Iterable[Any] | AsyncIterable[Any]", "Iterable[Any]"),
        )
        for p in inspect.signature(method).parameters.values()
    ]


def public(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")}


@each_client
@pytest.mark.parametrize("method", METHODS)
def test_every_client_takes_the_same_arguments_with_the_same_defaults(client: type, method: str) -> None:
    assert signature(getattr(client, method)) == signature(getattr(Client, method))


@each_job
@pytest.mark.parametrize("method", JOB_METHODS)
def test_every_job_takes_the_same_arguments_with_the_same_defaults(job: type, method: str) -> None:
    assert signature(getattr(job, method)) == signature(getattr(Job, method))


@each_client
def test_every_client_has_the_same_methods_and_no_others(client: type) -> None:
    assert public(client) == {*METHODS, "aclose" if client in ASYNC else "close"}
    manager = ("__aenter__", "__aexit__") if client in ASYNC else ("__enter__", "__exit__")
    assert all(hasattr(client, name) for name in manager)


@each_job
def test_every_job_has_the_same_methods_and_no_others(job: type) -> None:
    assert public(job) == set(JOB_METHODS)


@each_client
def test_the_async_ones_are_coroutines_and_the_others_are_not(client: type) -> None:
    for name in (*METHODS, "aclose" if client in ASYNC else "close"):
        # map is an iterator of either kind, and job() asks nobody
        expected = client in ASYNC and name not in ("map", "job")
        assert inspect.iscoroutinefunction(getattr(client, name)) is expected, name
    for name in JOB_METHODS:
        assert inspect.iscoroutinefunction(getattr(CLIENTS[client], name)) is (client in ASYNC), name


@each_client
def test_everything_public_says_what_it_does(client: type) -> None:
    for cls in (client, CLIENTS[client]):
        assert (cls.__doc__ or "").strip()
        for name in public(cls):
            assert (getattr(cls, name).__doc__ or "").strip(), f"{cls.__name__}.{name}"


def test_the_two_clients_over_redis_are_built_alike() -> None:
    threads, loop = signature(Client.__init__), signature(AsyncClient.__init__)
    assert [parameter for parameter in threads if parameter[0] not in THREADS_ONLY] == loop


@pytest.mark.parametrize("pair", [(LocalClient, AsyncLocalClient), (StubClient, AsyncStubClient)])
def test_the_other_twins_are_built_alike(pair: tuple[type, type]) -> None:
    assert signature(pair[0].__init__) == signature(pair[1].__init__)


def test_each_submit_gives_its_own_kind_of_job() -> None:
    for client, job in CLIENTS.items():
        assert inspect.signature(client.submit).return_annotation == job.__name__  # type: ignore[attr-defined]
        assert inspect.signature(client.job).return_annotation == job.__name__  # type: ignore[attr-defined]
