"""The runs of the chaos suite: each takes a seed and a length in seconds, checks its ledger, and returns it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from tests.chaos.harness import Ledger, Stack

AOF = ("--appendonly", "yes", "--appendfsync", "always", "--aof-load-truncated", "yes")


class Scenario(Protocol):
    def __call__(self, *, seed: int, seconds: float) -> Awaitable[Ledger]: ...


async def _run(stack: Stack, seconds: float, *faults: str, every: float = 1.0, poison: int = 0) -> Ledger:
    async with stack:
        ledger = await stack.run(
            seconds, *[getattr(stack, fault) for fault in faults], every=every, poison=poison
        )
        ledger.check(poison=poison)
        await stack.assert_nothing_left()
        return ledger


async def workers_die(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed), seconds, "kill_child", "kill_worker", "kill_worker_and_child")


async def workers_stall(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed), seconds, "stop_child", "stop_worker")


async def workers_are_replaced(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed, workers=3), seconds, "restart_worker", every=0.7)


async def connections_break(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed), seconds, "cut_connections", "drop_replies", every=0.5)


async def redis_restarts_with_aof(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed, *AOF), seconds, "restart_redis")


async def redis_loses_its_last_writes(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed, *AOF), seconds, "restart_redis_with_cut_aof")


async def redis_loses_everything(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed), seconds, "restart_redis")


async def redis_fails_over(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed), seconds, "fail_over_to_a_lagging_replica")


async def redis_refuses(*, seed: int, seconds: float) -> Ledger:
    faults = (
        "fill_memory",
        "become_read_only",
        "lack_replicas",
        "be_slow",
        "forget_scripts",
        "be_unreachable",
    )
    return await _run(Stack(seed), seconds, *faults, every=0.6)


async def bytes_are_broken(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed), seconds, "break_bytes", every=0.2)


async def two_requests_are_poison(*, seed: int, seconds: float) -> Ledger:
    return await _run(Stack(seed), seconds, poison=2)


async def groups_lose_their_workers(*, seed: int, seconds: float) -> Ledger:
    faults = ("kill_child", "kill_worker_and_child", "stop_worker", "restart_worker", "cut_connections")
    return await _run(Stack(seed, groups="callers"), seconds, *faults, poison=1)


async def groups_lose_their_redis(*, seed: int, seconds: float) -> Ledger:
    faults = (
        "restart_redis",
        "restart_redis_with_cut_aof",
        "cut_connections",
        "drop_replies",
        "fill_memory",
        "kill_child",
    )
    return await _run(Stack(seed, *AOF, groups="model"), seconds, *faults)


async def all_of_it_happens_together(*, seed: int, seconds: float) -> Ledger:
    faults = (
        "kill_child",
        "kill_worker_and_child",
        "stop_worker",
        "restart_worker",
        "cut_connections",
        "drop_replies",
        "restart_redis",
    )
    return await _run(Stack(seed, *AOF, workers=3), seconds, *faults, poison=2)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        workers_die,
        workers_stall,
        workers_are_replaced,
        connections_break,
        redis_restarts_with_aof,
        redis_loses_its_last_writes,
        redis_loses_everything,
        redis_fails_over,
        redis_refuses,
        bytes_are_broken,
        two_requests_are_poison,
        groups_lose_their_workers,
        groups_lose_their_redis,
        all_of_it_happens_together,
    )
}
