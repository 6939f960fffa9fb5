"""The rights that docs/operations.md tells an administrator to grant suffice for all that clients and workers do, and for no more."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import pytest
import redis as redis_py
from click.testing import CliRunner

from batchq import AsyncClient, BackendAuthError, JobCancelledError, NoWorkerError, WorkerLostError
from batchq.sync import Client
from batchq_cli.embedded import EmbeddedRedis
from batchq_cli.main import main
from batchq_cli.ping import RIGHTS
from tests.conftest import ROOT, StartWorker

PASSWORD = "from the docs"  # it has to be quoted in a URL


def documented() -> dict[str, list[str]]:
    """The users of the ACL file in the documentation, and their rights."""
    text = (ROOT / "docs" / "operations.md").read_text()
    lines = re.findall(r"^user (\S+) +on +>\S+ +(.+)$", text, re.MULTILINE)
    return {user: rights.split() for user, rights in lines}


@pytest.fixture
def guarded() -> Iterator[tuple[EmbeddedRedis, redis_py.Redis]]:
    """A Redis whose users are those of the documentation; the default user has no rights."""
    with EmbeddedRedis() as server, redis_py.Redis(port=server.port, protocol=2) as admin:
        for user, rights in documented().items():
            admin.execute_command("ACL", "SETUSER", user, "on", f">{PASSWORD}", *rights)
        yield server, admin


def url_of(server: EmbeddedRedis, user: str) -> str:
    return server.url.replace("redis://", f"redis://{user}:{PASSWORD.replace(' ', '%20')}@")


def test_the_documentation_names_a_user_for_clients_and_one_for_workers() -> None:
    assert set(documented()) == {"api", "worker"}
    assert set(documented()["worker"]) == set(RIGHTS.split())  # what `batchq ping` tells


async def use_an_asyncio_client(url: str) -> None:
    async with AsyncClient(url, timeout=60) as client:
        answers = await client.predict_many([1, "poison", b"x" * 200_000], return_exceptions=True)
        assert [answers[0], type(answers[1]), answers[2]] == [1, WorkerLostError, b"x" * 200_000]
        assert [answer async for answer in client.map(range(300))] == list(range(300))
        job = await client.submit("job")
        assert await job.result(timeout=60) == "job"
        assert await job.state() == "done"
        given_up = asyncio.create_task(client.predict("given up"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert await client.ping() > 0
        assert (await client.stats()).dead == 1


def test_the_documented_rights_suffice_for_all_that_clients_and_workers_do(
    guarded: tuple[EmbeddedRedis, redis_py.Redis], start_worker: StartWorker
) -> None:
    server, admin = guarded
    api, work = url_of(server, "api"), url_of(server, "worker")
    with Client(api, fail_fast=True) as client, pytest.raises(NoWorkerError):
        client.predict(1)
    worker = start_worker("tests.models:dies_of_poison", "--max-delay", "20ms", "--lease", "1", url=work)
    asyncio.run(use_an_asyncio_client(api))
    with Client(api, timeout=60) as threaded:
        assert threaded.predict("one", priority="high") == "one"
        assert threaded.predict_many([1, 2]) == [1, 2]
        assert list(threaded.map(range(100))) == list(range(100))
        assert threaded.stats().workers
        assert worker.stop() == 0
        job = threaded.submit("cancelled")
        assert job.cancel() is True
        with pytest.raises(JobCancelledError):
            job.result()
        threaded.submit("held", id="held")
        second = start_worker("tests.models:echo", url=work)
        assert threaded.job("held").result(timeout=60) == "held"

    def run(*args: str) -> str:
        result = CliRunner().invoke(main, args, prog_name="batchq")
        assert result.exit_code == 0, result.output
        return result.stdout

    for user in ("api", "worker"):
        url = url_of(server, user)
        for command in (("stats",), ("queues",), ("dead", "list"), ("call", "1"), ("ping", "--worker")):
            run(*command, "--redis", url)
    (requeued,) = json.loads(run("dead", "requeue", "--all", "--json", "--redis", api))
    with Client(api, timeout=60) as threaded:
        assert threaded.job(requeued["job"]).result(timeout=60) == "poison"
    assert json.loads(run("dead", "drop", "--all", "--json", "--redis", api)) == []
    # What Redis has refused them is what each can do without: `batchq ping` says that it cannot look, and redis-py wants to tell its name.
    refused = {(entry[b"username"], entry[b"object"]) for entry in denials(admin)}
    assert refused <= {(b"api", b"info"), (b"api", b"client"), (b"worker", b"client")}
    assert "refuses" not in worker.log + second.log


def denials(admin: redis_py.Redis) -> list[dict[bytes, bytes]]:
    flat = admin.execute_command("ACL", "LOG")
    return [
        entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True))
        for entry in flat
    ]


def test_the_documented_rights_reach_no_other_keys_and_no_settings(
    guarded: tuple[EmbeddedRedis, redis_py.Redis],
) -> None:
    server, _ = guarded
    for user in ("api", "worker"):
        with redis_py.Redis.from_url(url_of(server, user), protocol=2) as client:
            for command in (
                ("GET", "another application's"),
                ("SET", "another application's", "1"),
                ("EVAL", "return redis.call('GET', KEYS[1])", "1", "another application's"),
                ("CONFIG", "SET", "maxmemory", "1"),
                ("FLUSHALL",),
                ("KEYS", "*"),
                ("CLIENT", "KILL", "TYPE", "normal"),
                ("SHUTDOWN",),
            ):
                with pytest.raises(redis_py.ResponseError, match=r"(?i)no permissions|can't run|NOPERM|ACL"):
                    client.execute_command(*command)
    with Client(url_of(server, "api").replace("from", "for")) as client, pytest.raises(BackendAuthError):
        client.ping()
