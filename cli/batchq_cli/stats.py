"""``batchq stats``: how a queue is doing, once or again and again."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import click

from batchq.config import check_number
from batchq.errors import BackendAuthError, BackendUnavailableError
from batchq.stats import QueueStats, WorkerStats
from batchq.sync import Client
from batchq_cli.common import (
    DURATION,
    EXIT_OK,
    EXIT_REDIS_AUTH,
    EXIT_REDIS_DOWN,
    EXIT_USAGE,
    Described,
    json_option,
    one_line,
    queue_option,
    redis_option,
    show_duration,
    table,
)

Rates = dict[str, float]
_MANY: Final = 4
"""Devices of a worker that are named one by one."""
_RATES = {"in": "accepted", "out": "completed", "full": "rejected", "expired": "expired", "failed": "failed"}


@click.command(
    cls=Described,
    shown={
        "pending": "requests that wait, by lane, and for how long the oldest has",
        "in flight": "batches that workers hold; requests whose worker died, to be run alone",
        "rates": "in: accepted; out: answered, with --watch from one look to the next, else as reported",
        "refused": "full: got QueueFullError; expired: their time was up; dead letters: kept aside",
        "workers": "how many of its processes are ready, where, and what ails the others; means of the last seconds: "
        "requests in a batch, its wait, and the model's time for it",
    },
    examples=[
        "batchq stats",
        "batchq stats --queue sentiment --watch 1",
        "batchq stats --json | jq '.depth, .workers[].state'",
    ],
    exit_codes=[EXIT_OK, EXIT_USAGE, EXIT_REDIS_AUTH, EXIT_REDIS_DOWN],
)
@redis_option
@queue_option
@click.option(
    "--watch",
    type=DURATION,
    metavar="SECONDS",
    help="Again and again until Ctrl-C: in place on a terminal, else line by line.",
)
@click.option("--timeout", type=DURATION, default="5s", show_default=True, help="How long Redis may take.")
@json_option
def stats(redis_url: str, queue: str, watch: float | None, timeout: float, as_json: bool) -> None:
    """Show a queue's depth, rates and workers.

    Totals count since the queue was made, and are approximate.
    """
    if watch is not None:
        check_number("watch", watch, 0.1, 3600, "none", " s")
    with Client(redis_url, queue=queue, timeout=timeout) as client:
        now = client.stats()
        show = _json_line if as_json and watch is not None else _json if as_json else _text
        if watch is None:
            click.echo(show(now, None))
            return
        try:
            _watch(client, now, watch, as_json)
        except KeyboardInterrupt:
            return


def _watch(client: Client, now: QueueStats, interval: float, as_json: bool) -> None:
    """Print at once and then each ``interval`` seconds; an outage of Redis is a line, not the end."""
    in_place = sys.stdout.isatty() and not as_json
    show = _json_line if as_json else _text if in_place else _line
    seen = time.monotonic()
    rates: Rates | None = None
    while True:
        if in_place:
            click.clear()
        click.echo(show(now, rates))
        before, since, now = now, seen, _next_look(client, seen, interval)
        seen = time.monotonic()
        rates = rates_between(before, now, seen - since)


def _next_look(client: Client, seen: float, interval: float) -> QueueStats:
    """Wait until the interval is over, and then until Redis answers."""
    while True:
        time.sleep(max(0.0, seen + interval - time.monotonic()))
        try:
            return client.stats()
        except BackendAuthError:
            raise
        except BackendUnavailableError as error:
            click.echo(f"error: {one_line(str(error))}", err=True)
            seen = time.monotonic()


def rates_between(before: QueueStats, now: QueueStats, seconds: float) -> Rates | None:
    """Return events a second from two looks; None where the counters began anew (Redis has lost them)."""
    deltas = {name: getattr(now, total) - getattr(before, total) for name, total in _RATES.items()}
    if seconds <= 0 or min(deltas.values()) < 0:
        return None
    return {name: delta / seconds for name, delta in deltas.items()}


def _fields(stats: QueueStats, rates: Rates | None) -> dict[str, Any]:
    return {"time": round(time.time(), 3), **dataclasses.asdict(stats), "rates": rates}


def _json(stats: QueueStats, rates: Rates | None) -> str:
    return json.dumps(_fields(stats, rates), indent=2)


def _json_line(stats: QueueStats, rates: Rates | None) -> str:
    return json.dumps(_fields(stats, rates))


def _rate(rates: Rates | None, name: str) -> str:
    return f"{rates[name]:,.4g}/s" if rates is not None else "-"


def _line(stats: QueueStats, rates: Rates | None) -> str:
    """Return one line, for a log."""
    pending = sum(stats.depth.values())
    out = _rate(rates, "out") if rates is not None else f"{stats.drain_rate:,.4g}/s"
    fields = {
        "pending": pending,
        "oldest": show_duration(stats.oldest_age),
        "in": _rate(rates, "in"),
        "out": out,
        "batch": f"{stats.mean_batch_size:.3g}",
        "full": stats.rejected,
        "expired": stats.expired,
        "failed": stats.failed,
        "workers": len(stats.workers),
    }
    return time.strftime("%H:%M:%S ") + " ".join(f"{name}={value}" for name, value in fields.items())


def _text(stats: QueueStats, rates: Rates | None) -> str:
    """Return a page for the eye."""
    return "\n".join(_rows(stats, rates))


def _rows(stats: QueueStats, rates: Rates | None) -> Iterator[str]:
    pending = sum(stats.depth.values())
    lanes = ", ".join(f"{count:,} {lane}" for lane, count in stats.depth.items())
    out = _rate(rates, "out") if rates is not None else f"{stats.drain_rate:,.4g}/s"
    yield f"queue       {stats.queue}"
    groups = f" in {stats.groups:,} groups" if stats.groups else ""
    oldest = show_duration(stats.oldest_age)
    yield f"pending     {pending:,} of {stats.capacity:,}: {lanes}{groups}; oldest {oldest}"
    yield f"in flight   {stats.in_flight:,} batches; {stats.solo:,} requests to run alone"
    yield f"rates       in {_rate(rates, 'in')}, out {out}; batches of {stats.mean_batch_size:.3g}"
    answered = f"{stats.completed:,} answered, {stats.failed:,} of them with an error"
    yield f"totals      {stats.accepted:,} accepted, {answered}"
    yield f"refused     {stats.rejected:,} full, {stats.expired:,} expired; {stats.dead:,} dead letters"
    if not stats.workers:
        yield "workers     none is alive"
        return
    yield f"workers     {len(stats.workers):,}"
    yield ""
    yield from table(
        ("WORKER", "MODEL", "STATE", "DEVICE", "BATCH", "WAIT", "MODEL TIME", "OUT", "SEEN"),
        [
            (
                worker.id,
                worker.model,
                _state(worker),
                _devices(worker),
                f"{worker.batch_size:.3g}",
                show_duration(worker.wait_seconds),
                show_duration(worker.run_seconds),
                f"{worker.rate:,.4g}/s",
                f"{show_duration(worker.age)} ago",
            )
            for worker in stats.workers
        ],
        numbers=(4, 5, 6, 7, 8),
    )


def _state(worker: WorkerStats) -> str:
    """Return a worker's state, and where it has several processes, how many of them are ready: ``ready 3/4``."""
    if len(worker.children) < 2:
        return worker.state
    ready = sum(child.state == "ready" for child in worker.children)
    return f"{worker.state} {ready}/{len(worker.children)}"


def _devices(worker: WorkerStats) -> str:
    """Return the devices of its processes, and what keeps some of them: ``cuda:0 x2, cuda:1 x2 (1 loading)``; many are counted."""
    states: dict[str, list[str]] = {}
    for child in worker.children:
        states.setdefault(child.device, []).append(child.state)
    ailing = {
        device: Counter(each for each in found if each != worker.state) for device, found in states.items()
    }
    shown = (
        states if len(states) <= _MANY else {device: states[device] for device in states if ailing[device]}
    )
    parts = [] if shown is states else [f"{len(states)} devices"]
    for device in list(shown)[:_MANY]:
        times = f" x{len(states[device])}" if len(states[device]) > 1 else ""
        what = " and ".join(f"{count} {state}" for state, count in ailing[device].items())
        parts.append(f"{device}{times}" + (f" ({what})" if what else ""))
    return ", ".join(parts) + (", …" if len(shown) > _MANY else "") or "-"
