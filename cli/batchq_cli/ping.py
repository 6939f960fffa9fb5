"""``batchq ping``: whether a Redis is fit for batchq, as a list of checks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar
from urllib.parse import parse_qs, urlsplit

import click

from batchq import commands
from batchq.commands import Call
from batchq.config import check_timeout, resolve_url
from batchq.errors import BackendAuthError, BackendUnavailableError
from batchq.keys import Keys
from batchq.requests import no_worker_hint
from batchq.stats import from_answers
from batchq.store import AsyncLink, Endpoint, LinkLostError
from batchq_cli.common import (
    DURATION,
    EXIT_NO_ANSWER,
    EXIT_OK,
    EXIT_REDIS_AUTH,
    EXIT_REDIS_DOWN,
    EXIT_REDIS_SETTING,
    EXIT_USAGE,
    CliError,
    Described,
    json_option,
    one_line,
    queue_option,
    redis_option,
    show_duration,
    show_size,
)
from batchq_cli.redis_link import DEFAULT_WAIT

T = TypeVar("T")

OLDEST: Final = (6, 2)
"""The oldest version of Redis that has what batchq needs."""
ROUND_TRIPS: Final = 20
RIGHTS: Final = (
    "~batchq:* +@read +@write +@scripting +@transaction +@connection +@blocking -@dangerous "
    "+time +info +client|id +client|unblock"
)
"""What a worker's user of Redis needs, and more than a client's does, as ACL SETUSER wants it."""

_WORST_FIRST: Final = (EXIT_REDIS_AUTH, EXIT_REDIS_DOWN, EXIT_REDIS_SETTING, EXIT_NO_ANSWER)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    ``state``: ``ok``, ``wrong``, ``unknown`` (it cannot be looked at), or ``info`` (neither good nor bad).
    ``remedy``: what to do where it is wrong. ``exit_code``: 0 unless it is wrong.
    """

    name: str
    state: Literal["ok", "wrong", "unknown", "info"]
    detail: str
    remedy: str = ""
    exit_code: int = EXIT_OK


class Examination:
    """The checks of one Redis, made one after the other; ``checks`` holds those that were made."""

    def __init__(self, url: str, queue: str, *, timeout: float, need_worker: bool) -> None:
        self.endpoint = Endpoint(url)
        self.checks: list[Check] = []
        self.latency: float | None = None
        self.workers = 0
        self.ready_workers = 0
        self._url = url
        self._keys = Keys(queue)
        self._timeout = timeout
        self._need_worker = need_worker

    async def run(self) -> None:
        """Make the checks, until one makes the others pointless."""
        try:
            link = await self._in_time(self.endpoint.async_link())
        except BackendAuthError as error:
            self._add("reachable", "ok", self.endpoint.name)
            self._refused(error)
            return
        except LinkLostError as error:
            self._gone(error)
            return
        except BackendUnavailableError as error:
            self._add("reachable", "ok", self.endpoint.name)
            self._add("ready", "wrong", error.message, exit_code=EXIT_REDIS_DOWN)
            return
        self._add("reachable", "ok", self.endpoint.name)
        self._add("password", "ok", "accepted" if _has_password(self._url) else "none is needed")
        try:
            info = await self._info(link)
            self._version(info)
            self._role(info)
            self._eviction(info)
            self._memory(info)
            self._persistence(info)
            await self._scripts(link)
            await self._latency(link)
            await self._workers(link)
        except LinkLostError as error:
            self._gone(error)
        except BackendAuthError as error:
            self._refused(error)
        except BackendUnavailableError as error:
            self._add("ready", "wrong", error.message, exit_code=EXIT_REDIS_DOWN)
        finally:
            await link.close()

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(work, self._timeout)
        except asyncio.TimeoutError:
            name = self.endpoint.name
            raise LinkLostError(f"Redis at {name} has not answered within {self._timeout:g} s") from None

    async def _ask(self, link: AsyncLink, call: Call[T]) -> T:
        return await self._in_time(link.call(call))

    def _add(
        self,
        name: str,
        state: Literal["ok", "wrong", "unknown", "info"],
        detail: str,
        remedy: str = "",
        exit_code: int = EXIT_OK,
    ) -> None:
        self.checks.append(Check(name, state, detail, remedy, exit_code))

    def _gone(self, error: LinkLostError) -> None:
        self.checks = [check for check in self.checks if check.name != "reachable"]
        remedy = "is it running, and is the address right (--redis, BATCHQ_REDIS_URL)?"
        self._add("reachable", "wrong", error.message, remedy, EXIT_REDIS_DOWN)

    def _refused(self, error: BackendAuthError) -> None:
        if type(error.__cause__).__name__ == "NoPermissionError":
            remedy = f"ACL SETUSER … {RIGHTS}"
            self._add("rights", "wrong", error.message, remedy, EXIT_REDIS_AUTH)
        else:
            remedy = "redis://USER:PASSWORD@HOST:PORT/0, best in BATCHQ_REDIS_URL"
            self._add("password", "wrong", error.message, remedy, EXIT_REDIS_AUTH)

    async def _info(self, link: AsyncLink) -> dict[str, str]:
        try:
            text = await self._ask(link, commands.call(b"INFO"))
        except LinkLostError:
            raise
        except BackendUnavailableError:
            return {}  # a user without the right to INFO, or a service that hides it
        lines = text.decode("utf-8", "replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def _cannot(self, name: str) -> None:
        self._add(name, "unknown", "cannot check: INFO does not tell")

    def _version(self, info: dict[str, str]) -> None:
        text = info.get("redis_version", "")
        numbers = re.match(r"(\d+)\.(\d+)", text)
        if numbers is None:
            self._cannot("version")
            return
        shown = f"Valkey {info['valkey_version']}" if "valkey_version" in info else text
        if (int(numbers[1]), int(numbers[2])) >= OLDEST:
            self._add("version", "ok", shown)
        else:
            remedy = f"batchq needs Redis {OLDEST[0]}.{OLDEST[1]} or newer, or Valkey"
            self._add("version", "wrong", shown, remedy, EXIT_REDIS_SETTING)

    def _role(self, info: dict[str, str]) -> None:
        if info.get("role") == "slave":
            where = f"{info.get('master_host')}:{info.get('master_port')}"
            self._add("role", "wrong", "a replica: it takes no writes", f"use {where}", EXIT_REDIS_SETTING)

    def _eviction(self, info: dict[str, str]) -> None:
        policy = info.get("maxmemory_policy")
        if policy is None:
            self._cannot("eviction")
        elif policy == "noeviction":
            self._add("eviction", "ok", policy)
        else:
            detail = f"{policy}: Redis may drop requests when it is full"
            remedy = "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
            self._add("eviction", "wrong", detail, remedy, EXIT_REDIS_SETTING)

    def _memory(self, info: dict[str, str]) -> None:
        try:
            used, limit = int(info["used_memory"]), int(info["maxmemory"])
        except (KeyError, ValueError):
            return
        if not limit:
            self._add("memory", "info", f"{_mib(used)} used, no limit (maxmemory)")
        elif used < limit:
            self._add("memory", "ok", f"{_mib(used)} of {show_size(limit)} used")
        else:
            detail = f"{_mib(used)} used, and maxmemory is {show_size(limit)}: callers get QueueFullError"
            self._add(
                "memory", "wrong", detail, "raise maxmemory, or lower --capacity-bytes", EXIT_REDIS_SETTING
            )

    def _persistence(self, info: dict[str, str]) -> None:
        aof = info.get("aof_enabled")
        if aof is None:
            self._cannot("persistence")
        elif aof == "1":
            self._add("persistence", "info", "AOF is on: submitted jobs survive a restart of Redis")
        else:
            detail = "AOF is off: submitted jobs may be lost when Redis restarts; awaited requests are not"
            self._add("persistence", "info", detail)

    async def _scripts(self, link: AsyncLink) -> None:
        """Run a script by its digest: some services and users may not."""
        try:
            digest = await self._ask(link, commands.call(b"SCRIPT", b"LOAD", b"return 1"))
            await self._ask(link, commands.call(b"EVALSHA", digest, b"0"))
        except (LinkLostError, BackendAuthError):
            raise
        except BackendUnavailableError as error:
            remedy = "batchq needs EVALSHA and SCRIPT LOAD"
            self._add("scripts", "wrong", error.message, remedy, EXIT_REDIS_SETTING)
        else:
            self._add("scripts", "ok", "Lua scripts run")

    async def _latency(self, link: AsyncLink) -> None:
        times = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            await self._ask(link, commands.call(b"PING"))
            times.append(time.perf_counter() - started)
        self.latency = statistics.median(times)
        detail = f"{show_duration(self.latency)}, the median of {ROUND_TRIPS} round trips"
        self._add("latency", "ok", f"{detail}; the longest {show_duration(max(times))}")

    async def _workers(self, link: AsyncLink) -> None:
        queue = self._keys.queue
        live = from_answers(queue, await self._ask(link, commands.stats(self._keys))).workers
        self.workers = len(live)
        self.ready_workers = sum(worker.state == "ready" for worker in live)
        if live:
            states = ", ".join(f"{worker.id} {worker.state}" for worker in live[:4])
            more = f" and {len(live) - 4:,} more" if len(live) > 4 else ""
            detail = f"{len(live):,} on queue {queue!r}: {states}{more}"
            if self._need_worker and not self.ready_workers:
                remedy = "wait until one is ready, or look into its log"
                self._add("workers", "wrong", f"none is ready; {detail}", remedy, EXIT_NO_ANSWER)
            else:
                self._add("workers", "ok", detail)
            return
        queues = await self._ask(link, commands.list_queues())
        others = await self._ask(link, commands.live_workers(queues)) if queues else {}
        hint = no_worker_hint(queue, others)
        if self._need_worker:
            remedy = f"batchq worker --queue {queue} --model …"
            self._add("workers", "wrong", hint, remedy, EXIT_NO_ANSWER)
        else:
            self._add("workers", "info", hint)


def _has_password(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.password) or "password" in parse_qs(parts.query)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}MiB"


@click.command(
    cls=Described,
    examples=[
        "batchq ping",
        "batchq ping --redis rediss://redis.internal:6379/0 --queue sentiment",
        "batchq ping --worker --json          # as a health check",
    ],
    exit_codes=[EXIT_OK, EXIT_USAGE, EXIT_REDIS_AUTH, EXIT_REDIS_DOWN, EXIT_REDIS_SETTING, EXIT_NO_ANSWER],
)
@redis_option
@queue_option
@click.option("--worker", "need_worker", is_flag=True, help="Fail where no worker of the queue is ready.")
@click.option(
    "--timeout",
    type=DURATION,
    default=show_duration(DEFAULT_WAIT),
    show_default=True,
    help="How long each answer of Redis may take.",
)
@json_option
def ping(redis_url: str, queue: str, need_worker: bool, timeout: float, as_json: bool) -> None:
    """Check that a Redis is fit for batchq, and whether workers are alive and ready.

    Looks at: whether it can be reached, its password, version, eviction policy, memory, persistence, scripts,
    latency, and the queue's workers. Nothing is written to the queue.
    """
    url = resolve_url(redis_url)
    seconds = check_timeout(timeout, DEFAULT_WAIT)
    examination = Examination(url, queue, timeout=seconds, need_worker=need_worker)
    asyncio.run(examination.run())
    wrong = [check for check in examination.checks if check.state == "wrong"]
    if as_json:
        click.echo(json.dumps(_report(examination, queue, not wrong), indent=2))
    else:
        for check in examination.checks:
            mark = {"ok": "ok", "wrong": "WRONG", "unknown": "?", "info": "-"}[check.state]
            remedy = f" -> {check.remedy}" if check.remedy else ""
            click.echo(f"{mark:5}  {check.name:11}  {one_line(check.detail)}{remedy}")
    if wrong:
        worst = min(wrong, key=lambda check: _WORST_FIRST.index(check.exit_code))
        raise CliError(f"{worst.name}: {worst.detail}", worst.exit_code)


def _report(examination: Examination, queue: str, fit: bool) -> dict[str, Any]:
    checks = [dataclasses.asdict(check) for check in examination.checks]
    return {
        "ok": fit,
        "redis": examination.endpoint.name,
        "queue": queue,
        "latency_seconds": examination.latency,
        "live_workers": examination.workers,
        "ready_workers": examination.ready_workers,
        "checks": checks,
    }
