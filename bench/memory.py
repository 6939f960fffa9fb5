"""Whether memory comes back after a burst: the caller's, and Redis'."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tracemalloc
from pathlib import Path

from batchq import AsyncClient
from batchq_cli.bench import Rig, wait_until_ready


def resident() -> float:
    """Return this process' resident memory in MB, 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


async def run(rig: Rig, worker: object, count: int, bursts: int, payload: int) -> None:
    async with AsyncClient(rig.url, queue=worker.queue) as client:
        await wait_until_ready(client, worker, b"")
        await client.predict_many([b""] * 100, timeout=30)

        def show(when: str) -> None:
            gc.collect()
            live, peak = tracemalloc.get_traced_memory()
            used = rig.admin.info("memory")["used_memory"]
            print(
                f"{when:<24} caller: {live / 1e6:7.2f} MB of objects (peak {peak / 1e6:.1f}), "
                f"{resident():6.1f} MB resident   Redis: {used / 1e6:6.2f} MB"
            )
            tracemalloc.reset_peak()

        tracemalloc.start()
        show("before")
        for number in range(bursts):
            await asyncio.gather(*[client.predict(os.urandom(payload), timeout=60) for _ in range(count)])
            await asyncio.sleep(0.1)  # the loop itself holds what has just woken this task
            show(f"after burst {number + 1}")
        await asyncio.sleep(2.5)  # replies that were read are trimmed with the next read
        show("2.5 s later")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="requests a burst (10,000)")
    parser.add_argument("--bursts", type=int, default=3)
    parser.add_argument("--payload", type=int, default=1024)
    options = parser.parse_args()
    with Rig(None) as rig:
        worker = rig.start_worker("echo", "echo", "--capacity", str(2 * options.count))
        asyncio.run(run(rig, worker, options.count, options.bursts, options.payload))


if __name__ == "__main__":
    main()
