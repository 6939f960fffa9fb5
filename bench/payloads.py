"""Large payloads: batchq's bytes/s beside the floor's, and the Redis calls that took longest (SLOWLOG)."""

from __future__ import annotations

import argparse
import os
import statistics

from batchq_cli.bench import Rig

SLOW_US = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payload", type=int, default=1_000_000, help="bytes of a value (1,000,000)")
    parser.add_argument("--outstanding", type=int, default=64)
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    payload = os.urandom(options.payload)
    size = options.max_batch_size
    with Rig(None) as rig:
        floor = rig.start_floor("floor", size)
        worker = rig.start_worker("echo", "echo", "--max-batch-size", str(size))
        redis = rig.admin
        ratios, slow = [], {}
        for _ in range(options.rounds):
            plain = rig.run_floor(
                "floor",
                floor,
                batch=size,
                payload=payload,
                outstanding=options.outstanding,
                seconds=options.seconds,
            )
            redis.config_set("slowlog-log-slower-than", SLOW_US)
            redis.slowlog_reset()
            queue = rig.run_queue(
                worker, value=payload, outstanding=options.outstanding, seconds=options.seconds
            )
            for entry in redis.slowlog_get(128):
                name = entry["command"].split()[0].decode()
                slow.setdefault(name, []).append(entry["duration"] / 1e3)
            redis.config_set("slowlog-log-slower-than", -1)
            ratios.append(queue.rate / plain.rate)
            print(
                f"floor {plain.rate * options.payload / 1e6:6.0f} MB/s   "
                f"batchq {queue.rate * options.payload / 1e6:6.0f} MB/s, p50 {queue.p50 * 1e3:.0f} ms, "
                f"mean batch {queue.batch:.1f}   of the floor: {ratios[-1]:.2f}"
            )
    print(f"median: {statistics.median(ratios):.2f} of the floor's bytes/s")
    if not slow:
        print(f"no Redis call took more than {SLOW_US / 1e3:g} ms")
    for name, times in sorted(slow.items()):
        print(
            f"{name}: {len(times)} calls of more than {SLOW_US / 1e3:g} ms, the longest {max(times):.1f} ms"
        )


if __name__ == "__main__":
    main()
