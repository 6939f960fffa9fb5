"""Twice the worker's capacity: how many answers still come in time.

The sleeping model answers 4,848 requests/s at most. First its real capacity is measured, with 512 callers that wait for their answers;
then requests arrive at twice that rate whatever becomes of them, each with a timeout. An answer is useful if it comes within it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter

from batchq import AsyncClient, BatchqError
from batchq_cli.bench import Rig, wait_until_ready

TURN = 0.005


async def flood(
    rig: Rig, worker: object, rate: float, seconds: float, warm_up: float, timeout: float
) -> Counter[str]:
    """Send ``rate`` requests a second; return how many of those sent after the warm-up ended in which way."""
    value = os.urandom(1024)
    ends: Counter[str] = Counter()
    tasks: set[asyncio.Task[None]] = set()
    async with AsyncClient(rig.url, queue=worker.queue) as client:
        await wait_until_ready(client, worker, value)

        async def one(counts: bool) -> None:
            try:
                await client.predict(value, timeout=timeout)
                end = "useful"
            except BatchqError as error:
                end = type(error).__name__
            if counts:
                ends[end] += 1

        started = time.perf_counter()
        sent = 0
        while (now := time.perf_counter() - started) < warm_up + seconds:
            due = int(now * rate)
            for _ in range(due - sent):
                task = asyncio.ensure_future(one(now >= warm_up))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            sent = due
            await asyncio.sleep(TURN)
        await asyncio.gather(*tasks)
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--timeouts", type=float, nargs="+", default=[0.2, 0.5, 2.0], help="seconds")
    parser.add_argument("--times", type=float, default=2.0, help="of the capacity (2)")
    options = parser.parse_args()
    with Rig(None) as rig:
        worker = rig.start_worker("sleeper", "sleeper")
        for timeout in options.timeouts:
            capacity = rig.run_queue(worker, value=os.urandom(1024), outstanding=512, seconds=2.0).rate
            ends = asyncio.run(
                flood(rig, worker, options.times * capacity, options.seconds, 2 * timeout + 1, timeout)
            )
            useful = ends["useful"] / options.seconds
            rest = ", ".join(f"{name} {count:,}" for name, count in ends.most_common() if name != "useful")
            print(
                f"capacity {capacity:,.0f}/s; offered {options.times:g} times that, timeout {timeout:g} s: "
                f"{useful:,.0f} useful answers/s, {useful / capacity:.1%} of capacity ({rest})"
            )


if __name__ == "__main__":
    main()
