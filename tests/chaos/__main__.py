"""``make chaos``: the chaos runs for ten minutes, or ``--minutes``. Prints its seed, so that a failure can be run again with ``--seed``."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from tests.chaos.scenarios import SCENARIOS


def main() -> int:
    """Run the scenarios in turn until the time is over; 1 at the first failure."""
    parser = argparse.ArgumentParser(prog="make chaos ARGS=…", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one run (default 20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("scenarios", nargs="*", help=f"default: all of {', '.join(SCENARIOS)}")
    options = parser.parse_args()
    unknown = set(options.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    print(f"seed {options.seed}", flush=True)
    end = time.monotonic() + options.minutes * 60
    seed = options.seed
    while True:
        for name in options.scenarios or SCENARIOS:
            try:
                ledger = asyncio.run(SCENARIOS[name](seed=seed, seconds=options.seconds))
            except AssertionError as error:
                print(f"FAILED {name} --seed {seed}: {error}", flush=True)
                return 1
            print(f"{name.replace('_', ' ')}: {ledger}", flush=True)
            if time.monotonic() > end:
                return 0
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
