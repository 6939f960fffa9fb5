"""How busy a model is kept while there is work, and what the other stages of a batch cost.

"model busy" is the model's own clock, in a worker with one torch thread that always has work waiting: the share of the time between the
ends of two of its calls which it spent running. What is missing to 100% is what the other stages could not hide behind it.
The stages are then run one after the other in this process: what each costs a batch, in milliseconds (medians).
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batchq import Client, commands
from batchq.config import DEFAULT_MAX_PAYLOAD
from batchq.keys import Keys
from batchq.model import Model
from batchq.store import Endpoint
from batchq_cli.bench import Rig
from batchq_cli.bench_models import Clock
from batchq_workers.batches import Decoder, encode
from examples.embeddings.embedder import Embedder
from examples.images.classifier import Classifier

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("take", "decode", "regroup", "collate", "model", "split", "encode", "publish")


class Ungrouped(Embedder):
    """The embedder without a word about lengths."""

    cost = batch_key = None


def watched(kind: type[torch.nn.Module], clock: str) -> torch.nn.Module:
    """Load a model that tells a Clock of each call."""
    module, watch = kind(), Clock(clock)
    forward = module.forward

    @functools.wraps(forward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = forward(*args, **kwargs)
        watch.ran(len(output), started, time.perf_counter())
        return output

    module.forward = timed
    return module


def images(clock: str) -> torch.nn.Module:
    return watched(Classifier, clock)


def embeddings(clock: str) -> torch.nn.Module:
    return watched(Ungrouped, clock)


def grouped(clock: str) -> torch.nn.Module:
    return watched(Embedder, clock)


class Case(NamedTuple):
    """A model, and the i-th value that is sent to it."""

    kind: type[torch.nn.Module]
    value: Callable[[int], Any]


def cases() -> dict[str, Case]:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 64).save(file, "PNG")

    def sentence(i: int) -> str:
        return f"Requests wait in Redis, not in worker {i}."

    return {
        "images": Case(Classifier, lambda i: file.getvalue()),
        "embeddings": Case(Ungrouped, sentence),
        "grouped": Case(Embedder, sentence),
    }


def stages(rig: Rig, name: str, case: Case, size: int, batches: int) -> dict[str, float]:
    """Take the worker's part in this process; return the median seconds of each stage."""
    model, queue = Model(case.kind()), f"{rig.run}-{name}-stages"
    keys, link = Keys(queue), Endpoint(rig.url).link()
    decoder = Decoder(model, DEFAULT_MAX_PAYLOAD)
    options = commands.TakeOptions(worker="bench", max_batch_size=size, max_delay_us=0, lease_us=60_000_000)
    spent: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def stage(name: str, call: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = call(*args)
        spent[name].append(time.perf_counter() - started)
        return result

    def take(batch: str) -> Any:
        regroups = "first" if model.classifies else ""
        taken = link.call(commands.take(keys, options, batch, limit=size, run_us=0, regroups=regroups))
        if taken.outcome == "bulk":
            taken = link.call(commands.take(keys, options, batch, limit=size, run_us=0, form="native"))
        return taken

    def publish(batch: str, answers: commands.Answers) -> None:
        link.call(commands.finish(keys, batch, answers))

    with Client(rig.url, queue=queue) as client, ThreadPoolExecutor(1) as caller:
        for number in range(batches):
            name = f"bench-0-{number + 1}"
            asked = caller.submit(client.predict_many, list(map(case.value, range(size))), timeout=60)
            while rig.admin.llen(keys.requests["n"]) < size:
                time.sleep(0.001)
            taken = stage("take", take, name)
            batch = stage("decode", decoder.decode, name, taken, taken.requests)
            if batch.places:
                stage("regroup", link.call, commands.regroup(keys, name, batch.places, front=False))
                taken = take(name)
                batch = decoder.decode(name, taken, taken.requests)
            prepared = stage("collate", model.prepare, batch.values)
            output = stage("model", model.predict, prepared)
            outcomes = stage("split", model.answers, output)
            answers = stage("encode", encode, batch, outcomes, DEFAULT_MAX_PAYLOAD)
            stage("publish", publish, name, answers)
            asked.result()
    link.close()
    return {stage: statistics.median(times) if times else 0.0 for stage, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(cases()), action="append", help="all, if none is named")
    parser.add_argument("--outstanding", type=int, default=512)
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one run (5)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=30, help="for the stages (30)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    torch.set_num_threads(1)
    size = options.max_batch_size
    chosen = {name: case for name, case in cases().items() if name in (options.model or cases())}
    print(f"batches of {size}, {options.outstanding} outstanding, {options.rounds} x {options.seconds:g} s\n")
    print(
        f"{'':<12}{'requests/s':>11}{'batch':>7}{'busy':>8}{'lowest':>8}  ms a batch:{''.join(f'{s:>9}' for s in STAGES)}"
    )
    with Rig(None) as rig:
        for name, case in chosen.items():
            budget = ("--max-batch-cost", "1000000", "--padded") if name == "grouped" else ()
            worker = rig.start_worker(
                name,
                "timed",  # it is the last --model that counts
                *("--app-dir", str(ROOT), "--model", f"bench.pipeline:{name}"),
                *("--max-batch-size", str(size), *budget),
            )
            runs = [
                rig.run_queue(
                    worker,
                    value=case.value(0),
                    outstanding=options.outstanding,
                    seconds=options.seconds,
                    warm_up=1.0,
                )
                for _ in range(options.rounds)
            ]
            worker.process.terminate()
            worker.process.wait()
            cost = stages(rig, name, case, size, options.batches)
            busy = [run.busy for run in runs]
            print(
                f"{name:<12}{statistics.median(run.rate for run in runs):>11,.0f}"
                f"{statistics.median(run.batch for run in runs):>7.1f}{statistics.median(busy):>8.1%}{min(busy):>8.1%}"
                f"{'':>13}{''.join(f'{cost[stage] * 1e3:>9.2f}' for stage in STAGES)}",
                flush=True,
            )
    print(
        "\nimages: examples/images, PNGs of 64 x 64; embeddings: examples/embeddings without, grouped: with cost and batch_key."
    )
    print("regroup: what is due in no group is sorted into groups, before it is taken again as a batch.")


if __name__ == "__main__":
    main()
