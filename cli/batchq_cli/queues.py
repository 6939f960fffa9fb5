"""``batchq queues``: which queues a Redis holds."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from batchq import commands
from batchq.keys import QUEUES, Keys
from batchq.stats import from_answers
from batchq.store import AsyncLink
from batchq_cli.common import (
    DURATION,
    EXIT_OK,
    EXIT_REDIS_AUTH,
    EXIT_REDIS_DOWN,
    EXIT_USAGE,
    Described,
    json_option,
    redis_option,
    show_duration,
    table,
)
from batchq_cli.redis_link import DEFAULT_WAIT, ask


@click.command(
    cls=Described,
    examples=[
        "batchq queues",
        "batchq queues --json | jq -r '.[] | select(.workers == 0) | .queue'",
    ],
    exit_codes=[EXIT_OK, EXIT_USAGE, EXIT_REDIS_AUTH, EXIT_REDIS_DOWN],
)
@redis_option
@click.option(
    "--timeout", type=DURATION, default=show_duration(DEFAULT_WAIT), show_default=True, help="For all of it."
)
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="The most queues to list."
)
@json_option
def queues(redis_url: str, timeout: float, limit: int, as_json: bool) -> None:
    """List the queues of a Redis, the last used first.

    A queue is known for as long as a client or a worker has used it; `depth` is how many requests wait in it.
    The time of the last use is noted about once a minute.
    """

    async def read(link: AsyncLink) -> list[dict[str, Any]]:
        last = str(limit - 1).encode()
        used = await link.call(commands.call(b"ZREVRANGE", QUEUES, b"0", last, b"WITHSCORES"))
        rows = []
        for name, score in zip(used[::2], used[1::2], strict=True):
            queue = name.decode()
            stats = from_answers(queue, await link.call(commands.stats(Keys(queue))))
            depth = sum(stats.depth.values()) + stats.solo
            rows.append(
                {"queue": queue, "workers": len(stats.workers), "depth": depth, "last_used": float(score)}
            )
        return rows

    rows = ask(redis_url, timeout, read)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not rows:
        click.echo("no queue has been used on this Redis", err=True)
    else:
        now = time.time()
        cells = [
            (row["queue"], f"{row['workers']:,}", f"{row['depth']:,}", _ago(now - row["last_used"]))
            for row in rows
        ]
        click.echo("\n".join(table(("QUEUE", "WORKERS", "DEPTH", "LAST USED"), cells, numbers=(1, 2))))


def _ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{show_duration(round(seconds))} ago"
