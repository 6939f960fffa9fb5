"""What grouping by length saves: one model, the same sentences, in five ways, one after the other, in one run.

The model is that of examples/embeddings, the sentences are Python's own documentation, of 1 to 600 words. Every way has one core for
the model. "tokens run" counts the padding: 2.00 means that half of what the model computed was thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batchq import AsyncClient
from batchq_cli.bench import BenchWorker, Rig, wait_until_ready
from batchq_cli.bench_models import Clock
from examples.embeddings.embedder import Embedder
from examples.embeddings.search import passages

ROOT = Path(__file__).resolve().parents[1]


class Counted(Embedder):
    """The example's model, each of whose batches is counted: its texts in ``clock``, its tokens in ``tokens``."""

    def __init__(self, clock: str) -> None:
        super().__init__()
        self.clock = Clock(clock)
        self.tokens = Clock(clock + ".tokens")

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        """Run the batch, and count it."""
        started = time.perf_counter()
        answers = super().forward(input_ids, attention_mask)
        self.clock.ran(len(answers), started, time.perf_counter())
        self.tokens.ran(input_ids.numel(), 0, 0)
        return answers


class Ungrouped(Counted):
    """The same without a word about lengths: batches are made in the order in which the requests come."""

    cost = batch_key = None


class Way(NamedTuple):
    """One way to run all sentences, and the clocks that count its model's batches."""

    name: str
    run: Callable[[], None]
    clock: Clock
    tokens: Clock


class Figures(NamedTuple):
    """What one run came to. ``tokens``: those that ran, padding included; ``busy``: the model's share of the time."""

    seconds: float
    tokens: float
    batch: float
    busy: float


def measure(way: Way) -> Figures:
    before, tokens = way.clock.read(), way.tokens.read()
    started = time.perf_counter()
    way.run()
    seconds = time.perf_counter() - started
    now = way.clock.read()
    batch = (now.values - before.values) / (now.calls - before.calls)
    return Figures(
        seconds, way.tokens.read().values - tokens.values, batch, (now.busy - before.busy) / seconds
    )


def direct(model: Counted, texts: Sequence[str], size: int) -> None:
    with torch.inference_mode():
        for start in range(0, len(texts), size):
            model(**model.collate(list(texts[start : start + size])))


async def through(worker: BenchWorker, url: str, texts: Sequence[str], outstanding: int) -> None:
    async with AsyncClient(url, queue=worker.queue) as queue:
        async for _ in queue.map(texts, concurrency=outstanding, priority="normal"):
            pass


async def ready(worker: BenchWorker, url: str, texts: Iterable[str]) -> None:
    async with AsyncClient(url, queue=worker.queue) as queue:
        for text in texts:
            await wait_until_ready(queue, worker, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--outstanding", type=int, default=256, help="requests under way at a time (256)")
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument(
        "--max-batch-cost", type=int, default=4096, help="padded tokens a batch, with grouping"
    )
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    size, outstanding = options.max_batch_size, options.outstanding
    texts = passages(options.sentences)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    with Rig(None) as rig, tempfile.TemporaryDirectory() as folder:

        def worker(name: str, model: str, *more: str) -> Way:
            found = rig.start_worker(
                name,
                "timed",  # it is the last --model that counts
                *("--app-dir", str(ROOT), "--model", f"bench.grouping:{model}"),
                *("--max-batch-size", str(size), *more),
            )
            asyncio.run(ready(found, rig.url, (texts[0], max(texts, key=len))))
            return Way(
                f"batchq, {name}",
                lambda: asyncio.run(through(found, rig.url, texts, outstanding)),
                found.clock,
                Clock(str(found.log.with_suffix(".clock.tokens"))),
            )

        here = Counted(f"{folder}/clock")
        lengths = [here.cost(text) for text in texts]
        by_length = sorted(texts, key=here.cost)

        def directly(name: str, texts: Sequence[str], size: int) -> Way:
            return Way(f"directly, {name}", lambda: direct(here, texts, size), here.clock, here.tokens)

        ways = [
            directly("one at a time", texts, 1),
            directly("full batches as they come", texts, size),
            directly("full batches sorted by length", by_length, size),
            worker("ungrouped", "Ungrouped"),
            worker("grouped", "Counted", "--max-batch-cost", str(options.max_batch_cost), "--padded"),
        ]
        direct(here, by_length[-1:], 1)  # the first run of a shape is slow
        runs = [[measure(way) for way in ways] for _ in range(options.rounds)]

    real = sum(lengths)
    print(
        f"{len(texts)} sentences of {min(lengths)} to {max(lengths)} tokens, {real} in all; batches of up to {size}"
        f" and {options.max_batch_cost} padded tokens; {outstanding} outstanding; {options.rounds} rounds"
    )
    print(
        f"\n{'':<42}{'sentences/s':>12}{'tokens run':>12}{'mean batch':>12}{'model busy':>12}{'x alone':>9}"
    )
    for i, way in enumerate(ways):
        mine = [run[i] for run in runs]
        faster = statistics.median(run[0].seconds / run[i].seconds for run in runs)
        print(
            f"{way.name:<42}{len(texts) / statistics.median(f.seconds for f in mine):>12.1f}"
            f"{statistics.median(f.tokens for f in mine) / real:>12.2f}"
            f"{statistics.median(f.batch for f in mine):>12.1f}{statistics.median(f.busy for f in mine):>12.1%}{faster:>9.2f}"
        )
    for name, i, j in (
        ("grouped over not grouped", 3, 4),
        ("grouped through batchq over sorted directly", 2, 4),
    ):
        print(
            f"{name}: {statistics.median(run[i].seconds / run[j].seconds for run in runs):.2f} x the sentences/s"
        )
    print(
        "\ntokens run: with padding, as a multiple of the sentences' own; x alone: times as fast as one at a time"
    )


if __name__ == "__main__":
    main()
