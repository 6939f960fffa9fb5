"""Real processes under faults, and a ledger of every request: what was lost, wrong, or answered twice, how often each was run."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import redis as redis_py

from batchq import AsyncClient, QueueFullError, WorkerLostError, wire
from batchq_cli.embedded import EmbeddedRedis
from tests.chaos.chaos_model import BUDGET, cost_of, group_of
from tests.chaos.proxy import Proxy

TIMEOUT = 60.0
"""Seconds a request may take under faults before it counts as lost."""


@dataclass
class Ledger:
    """What became of the requests."""

    asked: int = 0
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    poisoned: int = 0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    executions: collections.Counter[int] = field(default_factory=collections.Counter)

    def check(self, *, poison: int = 0) -> None:
        """Raise AssertionError unless everything was answered, rightly and once."""
        assert not self.lost, f"lost {len(self.lost)} of {self.asked}: {self.lost[:5]}"
        assert not self.wrong, f"wrong {len(self.wrong)}: {self.wrong[:5]}"
        assert self.answered == self.asked > 0
        assert self.poisoned == poison
        assert set(self.executions) >= set(range(self.asked)), "answered without a run"

    def __str__(self) -> str:
        again = sum(count - 1 for count in self.executions.values())
        most = max(self.executions.values(), default=0)
        return (
            f"asked {self.asked}, answered {self.answered}, lost {len(self.lost)}, wrong {len(self.wrong)}, dead letters "
            f"{self.poisoned}, run again {again} (one request at most {most} times); faults {dict(self.faults)}"
        )


class Stack:
    """Redis, a proxy before it, workers and a client, with the faults that a run may do to them."""

    def __init__(
        self,
        seed: int,
        *redis_arguments: str,
        workers: int = 2,
        lease: float = 1.5,
        run_ms: float = 3,
        groups: str = "",
    ) -> None:
        self.random = random.Random(seed)
        self.redis = EmbeddedRedis(*redis_arguments)
        self.ledger = Ledger()
        self.lease = lease
        self.run_ms = run_ms
        self.groups = groups
        """Who tells a request's group and cost: '' nobody, ``callers`` or the ``model``."""
        self._count = workers
        self._directory = tempfile.TemporaryDirectory(prefix="batchq-chaos-")
        self._log = Path(self._directory.name) / "workers.log"
        self._runs = Path(self._directory.name) / "runs"
        self._seed = seed
        self.workers: list[subprocess.Popen[bytes]] = []

    async def __aenter__(self) -> Stack:
        self.redis.start()
        self.proxy = Proxy(self.redis.port, self._seed)
        self.url = f"redis://127.0.0.1:{self.proxy.port}/0"
        self.raw = redis_py.Redis(port=self.redis.port, protocol=2)
        self.client = AsyncClient(self.url, timeout=TIMEOUT)
        for _ in range(self._count):
            self.start_worker()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.aclose()
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.terminate()
        for worker in self.workers:
            try:
                await asyncio.to_thread(worker.wait, 20)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.proxy.close()
        self.raw.close()
        self.redis.close()
        if exc[0] is not None:
            sys.stderr.write(self.worker_log()[-6000:])
        self._directory.cleanup()

    def worker_log(self) -> str:
        """Return what the workers have logged."""
        return self._log.read_text() if self._log.exists() else ""

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start one worker more."""
        load = "load_grouping" if self.groups == "model" else "load"
        grouping = ["--max-batch-cost", str(BUDGET)] if self.groups else []
        if self.groups == "callers":
            grouping += ["--model-arg", "groups=callers"]
        command = [
            sys.executable, "-m", "batchq_cli", "worker", "--redis", self.url, "--model", f"tests.chaos.chaos_model:{load}", *grouping,
            "--model-arg", f"ledger={self._runs}", "--model-arg", f"run_ms={self.run_ms}", "--app-dir", str(Path(__file__).parents[2]),
            "--lease", str(self.lease), "--max-delay", "0.002", "--log-format", "text", "--drain-timeout", "5",
        ]  # fmt: skip
        with open(self._log, "ab") as log:
            worker = subprocess.Popen(command, stderr=log)
        self.workers.append(worker)
        return worker

    def alive(self) -> list[subprocess.Popen[bytes]]:
        """Return the workers whose parents run."""
        return [worker for worker in self.workers if worker.poll() is None]

    @staticmethod
    def children(worker: subprocess.Popen[bytes]) -> list[int]:
        """Return the process ids of a worker's children."""
        found = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
        try:
            return [int(pid) for pid in found.read_text().split()]
        except OSError:
            return []

    # --- load ---

    async def ask(self, number: int) -> None:
        """Send one request and write down what became of it."""
        deadline = time.monotonic() + TIMEOUT
        self.ledger.asked += 1
        while True:
            try:
                extras = (
                    {"batch_key": group_of(number), "cost": cost_of(number)}
                    if self.groups == "callers"
                    else {}
                )
                answer = await self.client.predict(
                    number, timeout=max(0.1, deadline - time.monotonic()), **extras
                )
            except QueueFullError:
                await asyncio.sleep(0.05)
                continue
            except Exception as error:
                self.ledger.lost.append(f"{number}: {type(error).__name__}: {error}")
                return
            if answer == 2 * number:
                self.ledger.answered += 1
            else:
                self.ledger.wrong.append(f"{number}: {answer!r}")
            return

    async def load(self, seconds: float, callers: int = 48) -> None:
        """Keep that many requests outstanding for that long."""
        end = time.monotonic() + seconds
        numbers = iter(range(10**9))

        async def caller() -> None:
            while time.monotonic() < end:
                await self.ask(next(numbers))

        await asyncio.gather(*(caller() for _ in range(callers)))

    async def poison(self) -> None:
        """Send a request that kills each worker that runs it."""
        try:
            await self.client.predict("poison", timeout=TIMEOUT)
        except WorkerLostError:
            self.ledger.poisoned += 1

    async def run(
        self, seconds: float, *faults: Callable[[], Awaitable[None]], every: float = 1.0, poison: int = 0
    ) -> Ledger:
        """Load the stack while faults, chosen by the seed, happen about ``every`` so many seconds."""
        await self.client.predict(0, timeout=TIMEOUT)  # the stack is up
        if self._runs.exists():
            os.truncate(self._runs, 0)
        load = asyncio.ensure_future(self.load(seconds))
        poisons = [asyncio.ensure_future(self.poison()) for _ in range(poison)]
        started = time.monotonic()
        while faults and time.monotonic() - started < seconds - every:
            await asyncio.sleep(every * (0.5 + self.random.random()))
            fault = self.random.choice(faults)
            self.ledger.faults[fault.__name__] += 1
            await fault()
        self.proxy.drop, self.proxy.delay, self.proxy.refuse = 0.0, 0.0, False
        await asyncio.gather(load, *poisons)
        # below zero: what broken bytes happened to ask for
        self.ledger.executions.update(n for line in self._runs.read_text().split() if (n := int(line)) >= 0)
        return self.ledger

    # --- faults ---

    async def kill_child(self) -> None:
        """SIGKILL the child of a worker."""
        workers = self.alive()
        if workers:
            for pid in self.children(self.random.choice(workers)):
                os.kill(pid, signal.SIGKILL)

    async def kill_worker(self) -> None:
        """SIGKILL a worker's parent (its child dies with it), and start another."""
        workers = self.alive()
        if workers:
            self.random.choice(workers).kill()
            self.start_worker()

    async def kill_worker_and_child(self) -> None:
        """SIGKILL both at once, as when a machine vanishes."""
        workers = self.alive()
        if workers:
            worker = self.random.choice(workers)
            pids = self.children(worker)
            worker.kill()
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.start_worker()

    async def stop_child(self) -> None:
        """SIGSTOP a child past its lease, then SIGCONT: its parent lives, so that nobody may take over."""
        workers = self.alive()
        pids = self.children(self.random.choice(workers)) if workers else []
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self.lease * 2)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass

    async def stop_worker(self) -> None:
        """SIGSTOP parent and child past the lease, then SIGCONT: others take over, and two may answer."""
        workers = self.alive()
        if not workers:
            return
        worker = self.random.choice(workers)
        pids = [worker.pid, *self.children(worker)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self.lease * 2.5)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass

    async def restart_worker(self) -> None:
        """SIGTERM a worker and start another."""
        workers = self.alive()
        if workers:
            self.random.choice(workers).terminate()
            self.start_worker()

    async def cut_connections(self) -> None:
        """Cut half of all connections."""
        self.proxy.cut(0.5)

    async def drop_replies(self) -> None:
        """For a second, swallow one reply in a hundred."""
        self.proxy.drop = 0.01
        await asyncio.sleep(1)
        self.proxy.drop = 0.0

    async def restart_redis(self) -> None:
        """SIGKILL Redis and start it again, with what it has on disk."""
        self.redis.stop()
        await asyncio.sleep(self.random.random() * 0.3)
        self.redis.start()

    async def restart_redis_with_cut_aof(self) -> None:
        """SIGKILL Redis, cut its append-only file at a random byte, and start it again: it has lost its last writes."""
        self.redis.stop()
        files = sorted(self.redis.directory.rglob("*.aof"), key=lambda path: path.stat().st_size)
        for path in files[-1:]:
            size = path.stat().st_size
            keep = size - int(size * 0.2 * self.random.random()) - 1
            os.truncate(path, max(0, keep))
        self.redis.start()

    async def fail_over_to_a_lagging_replica(self) -> None:
        """The primary dies, and a replica that has missed its last 0.3 s takes over."""
        replica = EmbeddedRedis("--replicaof", "127.0.0.1", str(self.redis.port))
        replica.start()
        with redis_py.Redis(port=replica.port, protocol=2) as other:
            deadline = time.monotonic() + 10
            while other.info("replication")["master_link_status"] != "up":
                assert time.monotonic() < deadline, "the replica does not come up"
                await asyncio.sleep(0.02)
            other.execute_command("REPLICAOF", "NO", "ONE")
        await asyncio.sleep(0.3)  # what the primary confirms from here on, the replica never sees
        self.redis.close()
        self.raw.close()
        self.redis = replica
        self.raw = redis_py.Redis(port=replica.port, protocol=2)
        self.proxy.target_port = replica.port
        self.proxy.cut()

    async def fill_memory(self) -> None:
        """Redis is at maxmemory for half a second."""
        self.raw.config_set("maxmemory", 1)
        await asyncio.sleep(0.5)
        self.raw.config_set("maxmemory", 0)

    async def become_read_only(self) -> None:
        """Redis is a replica without a primary for half a second: READONLY."""
        self.raw.execute_command("REPLICAOF", "127.0.0.1", "1")
        await asyncio.sleep(0.5)
        self.raw.execute_command("REPLICAOF", "NO", "ONE")

    async def lack_replicas(self) -> None:
        """Redis wants a replica that is not there for half a second: NOREPLICAS."""
        self.raw.config_set("min-replicas-to-write", 1)
        await asyncio.sleep(0.5)
        self.raw.config_set("min-replicas-to-write", 0)

    async def be_slow(self) -> None:
        """Each reply takes up to 50 ms for a second."""
        self.proxy.delay = 0.05
        await asyncio.sleep(1)
        self.proxy.delay = 0.0

    async def forget_scripts(self) -> None:
        """SCRIPT FLUSH, as after a failover."""
        self.raw.script_flush()

    def _mutate(self, data: bytes) -> bytes:
        """Flip, insert, remove and cut bytes."""
        broken = bytearray(data)
        for _ in range(self.random.randint(1, 6)):
            at = self.random.randrange(len(broken) + 1)
            how = self.random.randrange(4)
            if how == 0 and at < len(broken):
                broken[at] = self.random.randrange(256)
            elif how == 1:
                broken[at:at] = self.random.randbytes(self.random.randint(1, 9))
            elif how == 2:
                del broken[at : at + self.random.randint(1, 9)]
            elif self.random.random() < 0.3:
                del broken[at:]
        return bytes(broken)

    async def break_bytes(self) -> None:
        """Put broken requests, heads and replies where whole ones are expected."""
        queue = "batchq:{default}:"
        now = int(time.time() * 1e6)
        for _ in range(40):
            request_id = self.random.randbytes(16)
            request = self._mutate(
                wire.encode_request(request_id, "z" * 20, 60_000, self.random.randint(-(10**9), -1))
            )
            head = f"{now};60000000;{len(request)};0;n;0;{request_id.hex()}".encode()
            if self.random.random() < 0.3:
                head = self._mutate(head)
            lane = self.random.choice(["", ":high", ":low"])
            with self.raw.pipeline(transaction=True) as pipeline:
                pipeline.rpush(f"{queue}requests{lane}", request).rpush(f"{queue}heads{lane}", head)
                pipeline.execute()
            session = self.client._current
            if session is not None:
                reply = self._mutate(wire.encode_reply(request_id, "never asked for"))
                self.raw.xadd(f"{queue}replies:{session.name}", {self.random.choice(["r", "x"]): reply})

    async def be_unreachable(self) -> None:
        """All connections are cut, and new ones refused, for half a second."""
        self.proxy.refuse = True
        self.proxy.cut()
        await asyncio.sleep(0.5)
        self.proxy.refuse = False

    # --- what is left ---

    def keys(self) -> dict[str, str]:
        """Return the keys that are left, and their types."""
        return {key.decode(): self.raw.type(key).decode() for key in self.raw.scan_iter(count=1000)}

    async def assert_nothing_left(self) -> None:
        """Wait until nothing is pending, leased, or held back; raise AssertionError if that does not come."""
        queue = "batchq:{default}:"
        deadline = time.monotonic() + 15
        while True:
            lists = [
                "requests",
                "requests:high",
                "requests:low",
                "heads",
                "heads:high",
                "heads:low",
                "solo",
                "heads:solo",
                "due",
                "leases",
                "groups",
                "groups:high",
                "groups:low",
                "full",
                "costs",
            ]
            left = [name for name in lists if self.raw.exists(queue + name)] + [
                k for k in self.keys() if ":batch:" in k or "@" in k
            ]
            if not left:
                break
            assert time.monotonic() < deadline, f"left behind: {left}; {json.dumps(self.keys())}"
            await asyncio.sleep(0.1)
        for name, kind in self.keys().items():
            ttl = self.raw.pttl(name)
            assert ttl > 0 or name == "batchq:queues", f"{name} ({kind}) never expires"
        assert int(self.raw.hget(queue + "counters", "pending_bytes") or 0) == 0
