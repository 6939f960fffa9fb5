"""``batchq demo``: real images, a real model, many callers, and what batching did for them.

A worker process runs the digits model; this process plays the API: first one caller that waits for each
answer before it asks again, then many such callers at once. Both send single images. The callers' process
never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import click

from batchq_cli.common import (
    EXIT_INTERRUPTED,
    EXIT_NO_ANSWER,
    EXIT_NO_REDIS_SERVER,
    EXIT_OK,
    EXIT_REDIS_AUTH,
    EXIT_REDIS_DOWN,
    EXIT_TERMINATED,
    EXIT_UNEXPECTED,
    EXIT_USAGE,
    CliError,
    Described,
    json_option,
)
from batchq_cli.embedded import EmbeddedRedis, bound_to_parent

MODEL: Final = "batchq_cli.digits.model:load"
START_TIMEOUT: Final = 120.0
CALL_TIMEOUT: Final = 30.0
STOP_TIMEOUT: Final = 30.0
LOG_LINES: Final = 40
BAR_WIDTH: Final = 40
BINS: Final = 8

T = TypeVar("T")


class WorkerEndedError(Exception):
    """The worker process ended while it was needed; ``code`` is its exit status."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class Tally:
    """What came back in one phase.

    Durations are seconds. ``answers`` counts the requests by the size of the batch that they were in.
    """

    elapsed: float = 0.0
    correct: int = 0
    latencies: list[float] = field(default_factory=list)
    model_seconds: float = 0.0
    answers: Counter[int] = field(default_factory=Counter)

    def add(self, answer: dict[str, Any], label: int, latency: float) -> None:
        """Count one answer."""
        self.latencies.append(latency)
        self.correct += answer["label"] == label
        self.answers[answer["batch"]] += 1
        self.model_seconds += answer["model_seconds"] / answer["batch"]  # its share of the batch

    def report(self) -> dict[str, Any]:
        """Return the figures, all of them finite."""
        requests = len(self.latencies)
        batches = {size: round(count / size) or 1 for size, count in sorted(self.answers.items())}
        return {
            "requests": requests,
            "elapsed_seconds": round(self.elapsed, 3),
            "requests_per_second": round(requests / self.elapsed, 1),
            "p50_ms": round(1e3 * percentile(self.latencies, 0.50), 2),
            "p99_ms": round(1e3 * percentile(self.latencies, 0.99), 2),
            "model_ms_per_image": round(1e3 * self.model_seconds / requests, 3),
            "mean_batch": round(requests / sum(batches.values()), 1),
            "accuracy": round(self.correct / requests, 4),
            "batch_sizes": batches,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that at least ``share`` (0..1) of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def histogram(batches: dict[int, int]) -> Iterator[str]:
    """Yield one line for each range of batch sizes: the range, a bar, the number of batches."""
    step = max(1, math.ceil(max(batches) / BINS))
    bins: Counter[int] = Counter()
    for size, count in batches.items():
        bins[(size - 1) // step] += count
    longest = max(bins.values())
    for number in range(max(bins) + 1):
        low, high = number * step + 1, (number + 1) * step
        sizes = f"{low}" if low == high else f"{low}-{high}"
        bar = "#" * math.ceil(BAR_WIDTH * bins[number] / longest)
        yield f"  {sizes:>9}  {bar:<{BAR_WIDTH}}  {bins[number]:,}"


def summary(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the readable end of the demo, line by line."""
    one, many = figures["one_at_a_time"], figures["concurrent"]
    callers = f"{figures['concurrency']} callers"
    rows = [
        ("requests answered", "requests", ",d"),
        ("requests/s", "requests_per_second", ",.0f"),
        ("latency p50, ms", "p50_ms", ".1f"),
        ("latency p99, ms", "p99_ms", ".1f"),
        ("images a batch, mean", "mean_batch", ".1f"),
        ("model time an image, ms", "model_ms_per_image", ".2f"),
        ("digits read correctly", "accuracy", ".1%"),
    ]
    yield f"{'':<26}{'one at a time':>15}{callers:>15}"
    for name, key, form in rows:
        yield f"{name:<26}{one[key]:>15{form}}{many[key]:>15{form}}"
    yield ""
    yield f"batches by size, with {callers}"
    yield from histogram(many["batch_sizes"])
    yield ""
    yield f"speed-up: {figures['speedup']:.1f} times the requests/s; the callers still send single images"
    alone = figures["model_speedup"]
    yield f"(the model alone: {alone:.1f} times; a lone request also waits max_delay for others to join it)"


@contextlib.asynccontextmanager
async def running_worker(url: str, queue: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the worker as a process of its own, its output in ``log``; on exit drain it, or else kill it."""
    # the URL may hold a password, so it goes where `ps` does not show it
    environment = {**os.environ, "BATCHQ_REDIS_URL": url, "BATCHQ_QUEUE": queue}
    command = [sys.executable, "-m", "batchq_cli", "worker", "--model", MODEL]
    with log.open("wb") as output:
        worker = await asyncio.create_subprocess_exec(
            *bound_to_parent(command, signal.SIGTERM),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours: the worker is told when the callers have stopped
        )
    try:
        yield worker
    finally:
        if worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                worker.terminate()
            try:
                await asyncio.wait_for(worker.wait(), STOP_TIMEOUT)
            finally:
                # whatever its children are doing, none of them outlives the demo
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                await worker.wait()


async def while_running(worker: asyncio.subprocess.Process, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; raise WorkerEndedError as soon as the worker ends before it."""
    ended = asyncio.ensure_future(worker.wait())
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({ended, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise WorkerEndedError(ended.result())
        return working.result()
    finally:
        await cancel(ended, working)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_phase(
    client: Any, images: Any, labels: Sequence[int], *, name: str, callers: int, seconds: float
) -> Tally:
    """Let ``callers`` ask for one image after the other, each waiting for its answer, for ``seconds``."""
    tally = Tally()
    turns = itertools.count()
    started = time.perf_counter()

    async def caller() -> None:
        while time.perf_counter() < started + seconds:
            index = next(turns) % len(labels)
            asked = time.perf_counter()
            answer = await client.predict(images[index], timeout=CALL_TIMEOUT)
            tally.add(answer, labels[index], time.perf_counter() - asked)

    progress = asyncio.create_task(show_progress(name, seconds, tally))
    tasks = [asyncio.create_task(caller()) for _ in range(callers)]
    try:
        await asyncio.gather(*tasks)
        tally.elapsed = time.perf_counter() - started
        await progress
    finally:
        await cancel(*tasks, progress)
    return tally


async def show_progress(name: str, seconds: float, tally: Tally) -> None:
    """Draw a bar on a terminal's stderr; write a line now and then where there is none."""
    started = time.perf_counter()

    async def ticks(count: int) -> AsyncIterator[float]:
        for tick in range(1, count + 1):
            moment = seconds * tick / count
            await asyncio.sleep(max(0.0, started + moment - time.perf_counter()))
            yield moment

    if not sys.stderr.isatty():
        async for moment in ticks(max(1, round(seconds / 2))):
            click.echo(f"{name}: {moment:.1f} of {seconds:.1f} s, {len(tally.latencies):,} answers", err=True)
        return
    count = max(1, round(seconds * 10))
    with click.progressbar(
        range(count),
        label=f"{name:<14}",
        file=sys.stderr,
        item_show_func=lambda _: f"{len(tally.latencies):,} answers",
    ) as bar:
        async for _ in ticks(count):
            bar.update(1)


async def measure(url: str, log: Path, *, seconds: float, concurrency: int) -> dict[str, Any]:
    """Run both phases against a worker of our own and return all figures."""
    from batchq import AsyncClient, BatchqError

    queue = f"demo-{secrets.token_hex(4)}"
    async with AsyncClient(url, queue=queue) as client:
        await client.ping()  # a wrong URL shows at once, and not when the worker's time is up
        async with running_worker(url, queue, log) as worker:
            try:
                return await while_running(
                    worker, both_phases(client, queue, seconds=seconds, concurrency=concurrency)
                )
            except WorkerEndedError as error:
                show_log(log)
                message = f"the worker ended with exit code {error.code}; its log is above"
                raise CliError(message, EXIT_UNEXPECTED) from None
            except BatchqError:
                show_log(log)
                raise


async def both_phases(client: Any, queue: str, *, seconds: float, concurrency: int) -> dict[str, Any]:
    """Ask for the held-out images one at a time, then with ``concurrency`` callers; return all figures."""
    from batchq_cli.digits.data import held_out

    images, targets = held_out()
    labels: list[int] = targets.tolist()
    click.echo(f"{len(labels)} handwritten digits that the model has never seen, queue {queue!r}", err=True)
    click.echo("waiting for the worker to load the model ...", err=True)
    await client.predict(images[0], timeout=START_TIMEOUT)
    # the first batch of a size costs the model its preparation, which belongs to neither figure
    await client.predict_many([images[i % len(images)] for i in range(concurrency)], timeout=CALL_TIMEOUT)
    one = await run_phase(client, images, labels, name="one at a time", callers=1, seconds=seconds / 2)
    many = await run_phase(
        client, images, labels, name=f"{concurrency} callers", callers=concurrency, seconds=seconds
    )
    alone, together = one.report(), many.report()
    return {
        "images": len(labels),
        "concurrency": concurrency,
        "one_at_a_time": alone,
        "concurrent": together,
        "speedup": round(together["requests_per_second"] / alone["requests_per_second"], 1),
        "model_speedup": round(alone["model_ms_per_image"] / together["model_ms_per_image"], 1),
    }


def show_log(log: Path) -> None:
    """Print the last lines of the worker's log to stderr."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    click.echo("\n".join(["the worker's log:", *(f"  {line}" for line in lines or ["(empty)"])]), err=True)


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that everything is put away as after Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in an event loop; Ctrl-C and SIGTERM cancel it, and it puts everything away before they end us.

    asyncio's own answer to Ctrl-C raises KeyboardInterrupt in the middle of whatever runs, up to Python 3.10.
    """
    received: list[int] = []

    async def stoppable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in before:
            loop.add_signal_handler(number, stop, number)
        try:
            return await task
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    try:
        return asyncio.run(stoppable())
    except asyncio.CancelledError:
        if signal.SIGTERM in received:
            raise SystemExit(EXIT_TERMINATED) from None
        raise KeyboardInterrupt from None


def check_installed() -> None:
    """Raise CliError where a package of the ``demo`` extra is missing."""
    missing = [name for name in ("numpy", "sklearn", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "run, in batchq's checkout: pip install '.[demo]'"
        raise CliError(f"the demo needs {', '.join(missing)}; {remedy}", EXIT_UNEXPECTED)


@click.command(
    cls=Described,
    examples=[
        "batchq demo",
        "batchq demo --concurrency 256 --seconds 20",
        "BATCHQ_MAX_BATCH_SIZE=8 batchq demo --json",
    ],
    exit_codes=[
        EXIT_OK,
        EXIT_UNEXPECTED,
        EXIT_USAGE,
        EXIT_REDIS_AUTH,
        EXIT_REDIS_DOWN,
        EXIT_NO_ANSWER,
        EXIT_NO_REDIS_SERVER,
        EXIT_INTERRUPTED,
        EXIT_TERMINATED,
    ],
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.2, 600),
    default=8.0,
    show_default=True,
    help="Length of the run with many callers; the one at a time takes half as long.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=64,
    show_default=True,
    help="Callers at once; each waits for its answer before it asks again.",
)
@click.option(
    "--redis",
    "redis_url",
    metavar="URL",
    help="Use this Redis, which forgets the demo's queue after a week.  [default: a private one]",
)
@json_option
def demo(seconds: float, concurrency: int, redis_url: str | None, as_json: bool) -> None:
    """Show what batching does: many callers, one image each, one worker.

    Reads handwritten digits with a small torch model and prints accuracy, requests/s, latencies and batch
    sizes, beside the same work one request at a time. A worker that fails is shown with its log.
    """
    check_installed()
    with sigterm_exits(), contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="batchq-demo-"))
        url = redis_url
        if url is None:
            redis = stack.enter_context(EmbeddedRedis())
            click.echo(f"embedded Redis on port {redis.port}", err=True)
            url = redis.url
        figures = run(measure(url, Path(folder, "worker.log"), seconds=seconds, concurrency=concurrency))
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        click.echo("\n" + "\n".join(summary(figures)))
