"""Fixtures for all tests: a real Redis on a free port, and real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from batchq_cli.embedded import EmbeddedRedis, EmbeddedRedisError

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would all that they start.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]

StartWorker = Callable[..., "Worker"]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A real Redis for the whole session; without one tests are skipped, in CI they fail."""
    server = EmbeddedRedis()
    try:
        server.start()
    except EmbeddedRedisError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a real Redis that holds nothing."""
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
    return redis_server.url


class Worker:
    """A real ``batchq worker`` process."""

    def __init__(self, url: str, model: str, *options: str, queue: str = "default", log: Path) -> None:
        self.url, self.queue = url, queue
        self.log_path = log
        command = [
            sys.executable,
            "-m",
            "batchq_cli",
            "worker",
            "--redis",
            url,
            "--queue",
            queue,
            "--model",
            model,
        ]
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [*command, "--app-dir", str(ROOT), "--log-format", "text", *options],
                stderr=file,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.log_path.read_text()

    def wait_ready(self, seconds: float = 60.0) -> Worker:
        """Return once it says in Redis that it is ready."""
        deadline = time.monotonic() + seconds
        with redis.Redis.from_url(self.url, protocol=2) as client:
            while True:
                reports = client.hvals(f"batchq:{{{self.queue}}}:workers")
                if any(
                    f"-{self.process.pid}-".encode() in report and b'"ready"' in report for report in reports
                ):
                    return self
                code = self.process.poll()
                assert code is None, f"the worker ended with {code}:\n{self.log}"
                assert time.monotonic() < deadline, f"the worker is not ready:\n{self.log}"
                time.sleep(0.02)

    @property
    def children(self) -> list[int]:
        """The process ids of its children."""
        return [
            int(pid)
            for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def stop(self, seconds: float = 40.0) -> int:
        """SIGTERM it, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@pytest.fixture
def start_worker(redis_url: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Start workers: ``start_worker("tests.models:echo", "--max-delay", "0")``; at the end each must drain and exit with 0."""
    workers: list[Worker] = []

    def start(
        model: str, *options: str, queue: str = "default", wait: bool = True, url: str | None = None
    ) -> Worker:
        worker = Worker(
            url or redis_url, model, *options, queue=queue, log=tmp_path / f"worker-{len(workers)}.log"
        )
        workers.append(worker)
        return worker.wait_ready() if wait else worker

    yield start
    try:
        for worker in workers:
            if worker.process.poll() is None:
                assert worker.stop() == 0, worker.log
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not; it may do so while it is looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(condition: Callable[[], object], seconds: float = 20.0, what: str = "the condition") -> None:
    """Wait until a condition holds; fail if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        await asyncio.sleep(0.005)
