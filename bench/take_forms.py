"""What a take costs Redis, by form and size of the payloads: moved inside the script (light), or by LMOVE behind it (native).

The figure is the server's CPU time, all of it: reading the commands, running them, writing the answers. The worker chooses by the mean
size of the last batch.
"""

from __future__ import annotations

import argparse
import os
import statistics

from batchq import commands, wire
from batchq.commands import Answers, Outgoing, TakeOptions
from batchq.keys import Keys
from batchq.store import Endpoint
from batchq_cli.bench import Rig

BATCH = 32
SIZES = (128, 512, 1024, 1500, 2048, 4096, 10_240, 102_400)


class Bed:
    """A queue that is filled and emptied by hand."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.link = Endpoint(rig.url).link()
        self.keys = Keys(f"{rig.run}-forms")
        self.options = TakeOptions(
            worker="bench", max_batch_size=BATCH, max_delay_us=5000, lease_us=5_000_000
        )
        self.token = 0

    def fill(self, batches: int, payload: bytes) -> None:
        """Push so many full batches."""
        for _ in range(batches):
            requests = []
            for _ in range(BATCH):
                request_id = os.urandom(16)
                request = wire.encode_request(request_id, "a" * wire.CLIENT_NAME_LENGTH, 60_000, payload)
                requests.append(Outgoing(request_id, request, "n", 60_000_000))
            previous, self.token = self.token, self.token + 1
            self.link.call(
                commands.push(
                    self.keys,
                    requests,
                    producer="bench",
                    previous=f"t{previous}",
                    token=f"t{self.token}",
                    fresh=True,
                )
            )

    def drain(self, form: str, batches: int) -> float:
        """Take ``batches`` batches; return the Redis CPU seconds a request."""
        taken = []
        before = self.rig.redis_cpu()
        for number in range(batches):
            name = f"b{self.token}-{number}"
            result = self.link.call(
                commands.take(self.keys, self.options, name, limit=BATCH, run_us=0, form=form)
            )
            if result.outcome != "batch" or result.requests is None or len(result.requests) != BATCH:
                raise SystemExit(f"the take came to {result.outcome!r}")
            taken.append(name)
        cpu = self.rig.redis_cpu() - before
        for name in taken:
            self.link.call(commands.finish(self.keys, name, Answers({}, [], BATCH)))
        return cpu / (batches * BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("Redis CPU us a request, batches of 32\n payload    light   native")
    with Rig(None) as rig:
        bed = Bed(rig)
        for size in SIZES:
            batches = max(8, min(100, 40_000_000 // (size * BATCH)))
            found: dict[str, list[float]] = {"light": [], "native": []}
            for _ in range(options.rounds):
                for form, times in found.items():
                    bed.fill(batches + 1, os.urandom(size))  # one stays: a last batch is renamed, not moved
                    # beyond 64 KiB a batch the script leaves moving to the caller, but for this form
                    times.append(bed.drain("force" if form == "light" else form, batches) * 1e6)
                    bed.drain(form="native", batches=1)
            print(f"{size:>8,}" + "".join(f"{statistics.median(times):>9.2f}" for times in found.values()))
        bed.link.close()


if __name__ == "__main__":
    main()
