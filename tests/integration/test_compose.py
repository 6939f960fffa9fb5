"""docker-compose.yml, Dockerfile and the FastAPI example: what they promise, and that their commands work.

No Docker engine is needed: the services' own commands and health checks run here as plain processes. Only
names that exist in the compose network alone (the host ``redis``, the fixed ports) are replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchq_cli.embedded import EmbeddedRedis, find_server, free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fastapi"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def stages() -> dict[str, str]:
    """Return the Dockerfile's stages by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)\n", DOCKERFILE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


# the shape -------------------------------------------------------------------------------------------------


def test_there_is_a_redis_a_worker_and_an_api() -> None:
    assert set(SERVICES) == {"redis", "worker", "api"}


@pytest.mark.parametrize("name", ["redis", "worker", "api"])
def test_every_service_has_a_health_check_and_comes_back_after_a_crash(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries"} <= set(check)
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_redis_refuses_rather_than_evicts_and_keeps_its_data_over_a_restart() -> None:
    arguments = SERVICES["redis"]["command"][1:]
    settings = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert settings["--maxmemory-policy"] == "noeviction"
    assert settings["--appendonly"] == "yes"
    assert "--maxmemory" in settings
    (volume,) = SERVICES["redis"]["volumes"]
    assert volume.split(":")[0] in COMPOSE["volumes"]
    assert volume.split(":")[1] == "/data"


def test_redis_is_not_reachable_from_outside() -> None:
    assert "ports" not in SERVICES["redis"]


def test_a_worker_has_time_to_drain_when_it_is_told_to_stop() -> None:
    assert SERVICES["worker"]["stop_grace_period"] == "30s"
    assert "STOPSIGNAL" not in stages()["worker"] or "STOPSIGNAL SIGTERM" in stages()["worker"]


def test_worker_and_api_speak_about_the_same_queue_and_wait_for_redis() -> None:
    assert SERVICES["worker"]["environment"] == SERVICES["api"]["environment"]
    for name in ("worker", "api"):
        assert SERVICES[name]["depends_on"] == {"redis": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", ["worker", "api"])
def test_no_image_runs_as_root(name: str) -> None:
    assert SERVICES[name]["build"]["target"] == name
    users = re.findall(r"^USER (\S+)", stages()[name], flags=re.MULTILINE)
    assert users
    assert users[-1] not in ("root", "0")
    # nothing is installed after the switch, and the command is the compose file's
    assert "RUN" not in stages()[name].rpartition("USER ")[2]
    assert json.loads(stages()[name].rpartition("CMD ")[2]) == SERVICES[name]["command"]


def test_the_base_image_is_pinned_and_the_api_image_has_no_torch() -> None:
    assert "FROM python:3.12-slim AS base" in DOCKERFILE
    assert "torch" not in stages()["api"]


def test_the_build_context_has_what_the_dockerfile_copies() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [
        source
        for line in re.findall(r"^COPY (.+)$", DOCKERFILE, flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in allowed), source


# the commands ----------------------------------------------------------------------------------------------


class Stack:
    """The compose file's services as processes on this machine."""

    def __init__(self, redis: EmbeddedRedis, folder: Path) -> None:
        self.redis = redis
        self.api_port = free_port()
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, name: str) -> dict[str, str]:
        own: dict[str, str] = SERVICES[name].get("environment", {})
        address = f"redis://127.0.0.1:{self.redis.port}"
        return {
            **os.environ,
            **{key: value.replace("redis://redis:6379", address) for key, value in own.items()},
        }

    def here(self, command: list[str]) -> list[str]:
        """Return a service's command with this machine's programs and ports."""
        programs = {
            "batchq": [sys.executable, "-m", "batchq_cli"],
            "uvicorn": [sys.executable, "-m", "uvicorn"],
            "python": [sys.executable],
            "redis-cli": [redis_cli(), "-p", str(self.redis.port)],
        }
        words = [re.sub(r"\b8000\b", str(self.api_port), word) for word in command[1:]]
        return programs[command[0]] + [word.replace("0.0.0.0", "127.0.0.1") for word in words]

    def redis_command(self, *words: str) -> None:
        subprocess.run(
            [redis_cli(), "-e", "-p", str(self.redis.port), *words], check=True, capture_output=True
        )

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                self.here(SERVICES[name]["command"]),
                env=self.environment(name),
                cwd=EXAMPLE,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check(self, name: str) -> int:
        """Run a service's health check once, as Docker would; return its exit code."""
        command = self.here(SERVICES[name]["healthcheck"]["test"][1:])
        return subprocess.run(
            command, env=self.environment(name), cwd=EXAMPLE, capture_output=True, timeout=60
        ).returncode

    def wait_until_healthy(self, name: str) -> None:
        for _ in range(100):
            if self.check(name) == 0:
                return
            if (code := self.processes[name].poll()) is not None:
                pytest.fail(f"{name} ended with {code}:\n{self.log(name)}")
        pytest.fail(f"{name} never became healthy:\n{self.log(name)}")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self, name: str) -> int:
        """Stop a service as Docker would: SIGTERM, after the grace period SIGKILL; return its exit code."""
        process = self.processes.pop(name)
        process.terminate()
        try:
            return process.wait(timeout=30)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def ask(self, text: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """POST /predict; return the status, the body and the headers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.api_port}/predict",
            data=json.dumps({"text": text}).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error), dict(error.headers)


def redis_cli() -> str:
    beside = Path(find_server()).resolve().with_name("redis-cli")
    found = str(beside) if beside.exists() else shutil.which("redis-cli")
    if found is None:
        assert not os.environ.get("CI"), "no redis-cli here"
        pytest.skip("no redis-cli here")
    return found


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with EmbeddedRedis(*SERVICES["redis"]["command"][1:]) as redis:
        stack = Stack(redis, tmp_path)
        try:
            yield stack
        finally:
            for name in list(stack.processes):
                stack.stop(name)


def test_one_request_goes_all_the_way_and_every_health_check_passes(stack: Stack) -> None:
    assert stack.check("redis") == 0
    stack.start("worker")
    stack.start("api")
    stack.wait_until_healthy("api")
    stack.wait_until_healthy("worker")
    status, body, _ = stack.ask("what a lovely film")
    while status == 504 and stack.processes["worker"].poll() is None:  # the model is still being loaded
        status, body, _ = stack.ask("what a lovely film")
    assert (status, body["label"]) == (200, "praise"), stack.log("worker")
    assert stack.ask("the worst meal i have had")[1]["label"] == "complaint"
    assert stack.stop("worker") == 0
    assert stack.stop("api") in (0, -signal.SIGTERM)  # uvicorn shuts down in order, then dies of the signal
    assert "Application shutdown complete" in stack.log("api")


def test_health_checks_fail_and_the_api_says_503_while_redis_is_away(stack: Stack) -> None:
    stack.start("api")
    stack.wait_until_healthy("api")
    stack.redis.stop()
    for name in ("redis", "worker", "api"):
        assert stack.check(name) != 0, name
    status, body, _ = stack.ask("anything")
    assert (status, body["error"]) == (503, "unavailable.backend")
    stack.redis.start()
    stack.wait_until_healthy("api")


def test_the_api_gives_errors_the_status_and_headers_that_batchq_says(stack: Stack) -> None:
    stack.start("api")
    stack.wait_until_healthy("api")
    status, body, _ = stack.ask("is anybody there?")
    assert status == 504
    assert body["error"] == "deadline"
    assert "no live worker" in body["message"]
    assert body["request_id"]


def test_the_api_sends_retry_after_when_the_queue_is_full(stack: Stack) -> None:
    from batchq import AsyncClient

    queue = stack.environment("api")["BATCHQ_QUEUE"]
    stack.redis_command("HSET", f"batchq:{{{queue}}}:config", "capacity", "1")

    async def fill() -> None:
        async with AsyncClient(stack.redis.url, queue=queue) as client:
            await client.submit("this one fills it")

    asyncio.run(fill())
    stack.start("api")
    stack.wait_until_healthy("api")
    status, body, headers = stack.ask("one too many")
    assert (status, body["error"]) == (503, "unavailable.full")
    assert 1 <= int(headers["retry-after"]) <= 60


def test_the_example_model_judges_sentences_that_it_has_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    import mymodel

    texts = [
        "a clever and beautiful story",
        "rude staff, dirty room",
        "it is not good",
        "great value, thank you",
        "",
    ]
    answers = mymodel.load()(texts)
    assert [answer["label"] for answer in answers[:4]] == ["praise", "complaint", "complaint", "praise"]
    assert answers[4]["praise"] == pytest.approx(0.5, abs=0.05)
