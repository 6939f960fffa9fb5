"""Whether a request costs more CPU when more of them are outstanding."""

from __future__ import annotations

import argparse
import os
import statistics

from batchq_cli.bench import Rig, Sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outstanding", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    value = os.urandom(1024)
    samples: dict[int, list[Sample]] = {n: [] for n in options.outstanding}
    with Rig(None) as rig:
        # a caller asks again before Redis has heard of all the places that have become free
        worker = rig.start_worker("echo", "echo", "--capacity", str(2 * max(options.outstanding)))
        for _ in range(options.rounds):
            for n in options.outstanding:
                samples[n].append(
                    rig.run_queue(worker, value=value, outstanding=n, seconds=options.seconds, warm_up=0.5)
                )
    print("CPU us a request\noutstanding   caller  worker   redis     all   requests/s")
    for n, found in samples.items():
        parts = [
            statistics.median(read(sample) for sample in found) * 1e6
            for read in (
                lambda s: s.caller_cpu,
                lambda s: s.worker_cpu,
                lambda s: s.redis_cpu,
                lambda s: s.cpu,
            )
        ]
        rate = statistics.median(sample.rate for sample in found)
        print(f"{n:>11}  " + "".join(f"{part:>8.1f}" for part in parts) + f"{rate:>13,.0f}")


if __name__ == "__main__":
    main()
