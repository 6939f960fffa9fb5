"""``batchq bench``: how fast batchq is here, beside plain redis-py clients that only move the same bytes.

What is compared is measured in turns, several times over, and the ratios are those of neighbours in time:
machines are noisy, and a ratio of two figures taken a minute apart says little.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from batchq_cli.common import (
    DURATION,
    EXIT_INTERRUPTED,
    EXIT_NO_REDIS_SERVER,
    EXIT_OK,
    EXIT_REDIS_DOWN,
    EXIT_TERMINATED,
    EXIT_UNEXPECTED,
    EXIT_USAGE,
    SIZE,
    CliError,
    Described,
    json_option,
    parse_json,
    show_duration,
    show_size,
)
from batchq_cli.embedded import EmbeddedRedis, bound_to_parent

WARM_UP: Final = 0.25
START_TIMEOUT: Final = 120.0
STOP_TIMEOUT: Final = 10.0
LOG_LINES: Final = 40
SLEEPER_OUTSTANDING: Final = 512


class BenchError(click.ClickException):
    """The bench cannot go on; the message says why and quotes the worker."""

    exit_code = EXIT_UNEXPECTED


# --- what is measured ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run: rate a second, latencies in seconds, CPU in seconds a request; NaN where not measured.

    ``busy``: the share of the time (0..1) that the model ran.
    """

    requests: int
    rate: float
    p50: float
    p99: float
    caller_cpu: float
    worker_cpu: float
    redis_cpu: float
    batch: float = math.nan
    busy: float = math.nan

    @property
    def cpu(self) -> float:
        """CPU of all processes, in seconds a request."""
        return self.caller_cpu + self.worker_cpu + self.redis_cpu


@dataclass(frozen=True, slots=True)
class _Mark:
    """The state of all that is measured, at one moment."""

    at: float
    done: int
    caller_cpu: float
    worker_cpu: float
    redis_cpu: float
    reading: Any = None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` (0..1) of them do not exceed; NaN if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def process_cpu(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, NaN where the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            child
            for path in Path(f"/proc/{pid}/task").glob("*/children")
            for child in path.read_text().split()
        ]
    except (OSError, ValueError):
        return math.nan
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(process_cpu(int(child)) for child in children)


def _sample(first: _Mark, last: _Mark, latencies: Sequence[float]) -> Sample:
    requests = max(1, last.done - first.done)
    batch, busy = last.reading.since(first.reading) if last.reading is not None else (math.nan, math.nan)
    return Sample(
        requests=last.done - first.done,
        rate=(last.done - first.done) / (last.at - first.at),
        p50=percentile(latencies, 0.50),
        p99=percentile(latencies, 0.99),
        caller_cpu=(last.caller_cpu - first.caller_cpu) / requests,
        worker_cpu=(last.worker_cpu - first.worker_cpu) / requests,
        redis_cpu=(last.redis_cpu - first.redis_cpu) / requests,
        batch=batch,
        busy=busy,
    )


# --- what it is measured with ---


class BenchWorker:
    """A ``batchq worker`` of ours, on a queue of its own."""

    def __init__(self, process: subprocess.Popen[bytes], queue: str, log: Path, clock: Any) -> None:
        self.process = process
        self.queue = queue
        self.log = log
        self.clock = clock

    def tail(self) -> str:
        """Return the last lines of its log, indented."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  (empty)"


class Rig:
    """Redis, floor processes and workers: started on demand, all gone on exit."""

    def __init__(self, redis_url: str | None) -> None:
        self._given_url = redis_url
        self._stack = contextlib.ExitStack()
        self.admin: Any = None
        """A redis-py client for what is not measured."""
        self.url = ""
        self.run = f"bench-{secrets.token_hex(4)}"

    def __enter__(self) -> Rig:
        from batchq_cli import bench_floor

        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchq-bench-")))
            self.url = self._given_url or stack.enter_context(EmbeddedRedis()).url
            self.admin = bench_floor.connect(self.url)
            stack.callback(self.admin.close)
            stack.callback(self._forget_keys)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _forget_keys(self) -> None:
        """Remove what the runs left, in a Redis that is not ours."""
        if self._given_url is None:
            return
        for pattern in (f"batchq:{{{self.run}-*", f"{self.run}-*"):
            for key in self.admin.scan_iter(pattern, count=1000):
                self.admin.unlink(key)
        queues = [
            name for name in self.admin.zrange("batchq:queues", 0, -1) if name.decode().startswith(self.run)
        ]
        if queues:
            self.admin.zrem("batchq:queues", *queues)

    def redis_version(self) -> str:
        """Return the server's version."""
        return str(self.admin.info("server")["redis_version"])

    def redis_cpu(self) -> float:
        """Return the server's CPU seconds so far."""
        cpu = self.admin.info("cpu")
        return float(cpu["used_cpu_sys"]) + float(cpu["used_cpu_user"])

    def _start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        # nothing but what the command line says may decide how fast it is
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BATCHQ_")}
        environment["BATCHQ_REDIS_URL"] = self.url  # not an argument: `ps` would show its password
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own modules
                bound_to_parent([sys.executable, *command], signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours: everything is stopped in order
            )
        self._stack.callback(_stop, process)
        return process

    def start_floor(self, name: str, batch: int) -> int:
        """Start the floor's other side; return its process id."""
        name = f"{self.run}-{name}"
        return self._start(
            ["-m", "batchq_cli.bench_floor", name, str(batch)], self._folder / f"{name}.log"
        ).pid

    def start_worker(self, name: str, model: str, *options: str) -> BenchWorker:
        """Start a worker on a queue of its own; ``model`` is one of bench_models."""
        from batchq_cli import bench_models

        queue = f"{self.run}-{name}"
        clock = self._folder / f"{name}.clock"
        reader = bench_models.Clock(str(clock))
        self._stack.callback(reader.close)
        command = [
            "-m",
            "batchq_cli",
            "worker",
            "--queue",
            queue,
            "--model",
            f"batchq_cli.bench_models:{model}",
        ]
        command += ["--model-arg", f"clock={clock}", *options]
        log = self._folder / f"{name}.log"
        return BenchWorker(self._start(command, log), queue, log, reader)

    # --- runs ---

    def run_floor(
        self,
        name: str,
        pid: int,
        *,
        batch: int,
        payload: bytes,
        outstanding: int,
        seconds: float,
        warm_up: float = WARM_UP,
    ) -> Sample:
        """Move values with plain redis-py for ``seconds``."""
        from batchq_cli import bench_floor

        caller = bench_floor.Caller(self.url, f"{self.run}-{name}", batch, payload)
        marks: list[_Mark] = []
        try:
            latencies = caller.run(outstanding, warm_up, seconds, lambda: marks.append(self._mark(pid, 0)))
        finally:
            caller.close()
        first, last = marks
        done = len(latencies)
        return _sample(
            first, _Mark(last.at, done, last.caller_cpu, last.worker_cpu, last.redis_cpu), latencies
        )

    def _mark(self, pid: int, done: int, worker: BenchWorker | None = None) -> _Mark:
        reading = worker.clock.read() if worker is not None else None
        return _Mark(
            time.perf_counter(), done, time.process_time(), process_cpu(pid), self.redis_cpu(), reading
        )

    def run_queue(
        self, worker: BenchWorker, *, value: Any, outstanding: int, seconds: float, warm_up: float = WARM_UP
    ) -> Sample:
        """Call ``predict`` for ``seconds``: ``outstanding`` callers, each waits for its answer and asks again."""
        return asyncio.run(self._run_queue(worker, value, outstanding, seconds, warm_up))

    async def _run_queue(
        self, worker: BenchWorker, value: Any, outstanding: int, seconds: float, warm_up: float
    ) -> Sample:
        from batchq.aio import AsyncClient

        latencies: list[float] = []
        over = False
        clock = time.perf_counter
        async with AsyncClient(self.url, queue=worker.queue) as client:
            await wait_until_ready(client, worker, value)

            async def caller() -> None:
                while not over:
                    asked = clock()
                    await client.predict(value, timeout=60.0)
                    latencies.append(clock() - asked)

            callers = [asyncio.ensure_future(caller()) for _ in range(outstanding)]
            try:
                await _unless_one_fails(callers, warm_up)
                first = self._mark(worker.process.pid, len(latencies), worker)
                await _unless_one_fails(callers, seconds)
                last = self._mark(worker.process.pid, len(latencies), worker)
                over = True
                await asyncio.gather(*callers)
            finally:
                for task in callers:
                    task.cancel()
                await asyncio.gather(*callers, return_exceptions=True)
        return _sample(first, last, latencies[first.done : last.done])


async def _unless_one_fails(callers: Sequence[asyncio.Future[None]], seconds: float) -> None:
    """Wait for ``seconds``; raise the error of a caller that fails meanwhile."""
    done, _ = await asyncio.wait(callers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for caller in done:
        caller.result()


async def wait_until_ready(client: Any, worker: BenchWorker, value: Any) -> None:
    """Return once the worker answers; raise BenchError, with its log, if it ends."""
    from batchq.errors import DeadlineExceededError

    give_up = time.monotonic() + START_TIMEOUT
    while True:
        try:
            await client.predict(value, timeout=1.0)
        except DeadlineExceededError:
            if worker.process.poll() is not None:
                raise BenchError(
                    f"the worker ended with exit code {worker.process.returncode}. Its log:\n{worker.tail()}"
                ) from None
            if time.monotonic() > give_up:
                raise BenchError(
                    f"no answer from the worker within {START_TIMEOUT:g} s. Its log:\n{worker.tail()}"
                ) from None
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- the whole bench ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asks for. ``seconds``: of one run; each is repeated ``rounds`` times."""

    seconds: float
    rounds: int
    payload: int
    outstanding: tuple[int, ...]
    max_batch_size: int
    max_delay: float
    model: str | None = None
    model_args: str = "{}"
    value: Any = None


@dataclass(frozen=True, slots=True)
class _Case:
    """One line of the result: its samples, one a round, and those of the floor that it is compared with."""

    name: str
    outstanding: int
    run: Callable[[], Sample]
    floor: str = ""


def measure(rig: Rig, settings: Settings, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run everything in turns and return all figures."""
    cases = _cases(rig, settings)
    samples: dict[tuple[str, int], list[Sample]] = {(case.name, case.outstanding): [] for case in cases}
    for turn in range(settings.rounds):
        for case in cases:
            say(f"round {turn + 1} of {settings.rounds}: {case.name}, {case.outstanding} outstanding")
            samples[case.name, case.outstanding].append(case.run())
    figures = []
    for case in cases:
        found = _figures(case, samples[case.name, case.outstanding])
        if case.floor:
            floor = samples[case.floor, case.outstanding]
            mine = samples[case.name, case.outstanding]
            found["of_floor"] = {
                "requests_per_second": _median(
                    [_ratio(a.rate, b.rate) for a, b in zip(mine, floor, strict=True)], 3
                ),
                "p50": _median([_ratio(a.p50, b.p50) for a, b in zip(mine, floor, strict=True)], 3),
                "cpu": _median([_ratio(a.cpu, b.cpu) for a, b in zip(mine, floor, strict=True)], 3),
            }
        if case.name == "sleeper":
            from batchq_cli.bench_models import SLEEP_A_BATCH, SLEEP_A_REQUEST

            size = settings.max_batch_size
            found["ceiling_requests_per_second"] = round(size / (SLEEP_A_BATCH + SLEEP_A_REQUEST * size), 1)
        figures.append(found)
    return {
        "machine": {
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "python": platform.python_version(),
            "redis": rig.redis_version(),
            "redis_py": importlib.metadata.version("redis"),
            "hiredis": importlib.util.find_spec("hiredis") is not None,
        },
        "settings": {
            "payload_bytes": settings.payload if settings.value is None else None,
            "max_batch_size": settings.max_batch_size,
            "max_delay_seconds": settings.max_delay,
            "rounds": settings.rounds,
            "seconds": settings.seconds,
            "model": settings.model,
        },
        "runs": figures,
    }


def _cases(rig: Rig, settings: Settings) -> list[_Case]:
    payload = os.urandom(settings.payload)
    value = payload if settings.value is None else settings.value
    size, seconds = settings.max_batch_size, settings.seconds
    policy = ["--max-batch-size", str(size), "--max-delay"]
    delay = str(settings.max_delay)
    arguments: tuple[str, ...] = ()
    model = "echo"
    if settings.model is not None:
        model = "timed"
        arguments = (
            "--model-arg",
            f"model={json.dumps(settings.model)}",
            "--model-arg",
            f"args={settings.model_args}",
        )
    label = "echo" if settings.model is None else "model"

    # max_delay belongs to a queue: one for the runs that wait for no others, one for the rest
    workers: dict[str, BenchWorker] = {}
    floors: dict[int, int] = {}
    if 1 in settings.outstanding:
        workers["alone"] = rig.start_worker("alone", model, *policy, "0", *arguments)
        floors[1] = rig.start_floor("floor-1", 1)
    if any(n > 1 for n in settings.outstanding):
        workers["many"] = rig.start_worker("many", model, *policy, delay, *arguments)
        floors[size] = rig.start_floor(f"floor-{size}", size)
    if settings.model is None:
        workers["sleeper"] = rig.start_worker("sleeper", "sleeper", *policy, delay)

    cases = []
    for n in sorted(set(settings.outstanding), reverse=True):
        batch = 1 if n == 1 else size
        worker = workers["alone" if n == 1 else "many"]

        def floor(n: int = n, batch: int = batch) -> Sample:
            return rig.run_floor(
                f"floor-{batch}", floors[batch], batch=batch, payload=payload, outstanding=n, seconds=seconds
            )

        def queue(n: int = n, worker: BenchWorker = worker) -> Sample:
            return rig.run_queue(worker, value=value, outstanding=n, seconds=seconds)

        cases += [_Case("floor", n, floor), _Case(label, n, queue, "floor")]
    if settings.model is None:
        cases.append(
            _Case(
                "sleeper",
                SLEEPER_OUTSTANDING,
                lambda: rig.run_queue(
                    workers["sleeper"], value=value, outstanding=SLEEPER_OUTSTANDING, seconds=seconds
                ),
            )
        )
    return cases


def _ratio(mine: float, floor: float) -> float:
    return mine / floor if floor else math.nan


def _median(values: Sequence[float], digits: int) -> float | None:
    """Return the median, None (null in JSON, which has no NaN) where there is none."""
    found = statistics.median(values)
    return None if math.isnan(found) else round(found, digits)


def _figures(case: _Case, samples: Sequence[Sample]) -> dict[str, Any]:
    def median(read: Callable[[Sample], float], factor: float = 1.0, digits: int = 3) -> float | None:
        return _median([read(sample) * factor for sample in samples], digits)

    figures: dict[str, Any] = {
        "run": case.name,
        "outstanding": case.outstanding,
        "requests": sum(sample.requests for sample in samples),
        "requests_per_second": median(lambda s: s.rate, digits=1),
        "p50_ms": median(lambda s: s.p50, 1e3),
        "p99_ms": median(lambda s: s.p99, 1e3),
        "cpu_us": {
            "caller": median(lambda s: s.caller_cpu, 1e6, 1),
            "worker": median(lambda s: s.worker_cpu, 1e6, 1),
            "redis": median(lambda s: s.redis_cpu, 1e6, 1),
        },
    }
    if case.name != "floor":
        figures["mean_batch"] = median(lambda s: s.batch, digits=1)
        figures["model_busy"] = median(lambda s: s.busy, digits=4)
    return figures


def table(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the figures as lines for the eye."""
    machine, settings = figures["machine"], figures["settings"]
    size = (
        "the value given"
        if settings["payload_bytes"] is None
        else f"{show_size(settings['payload_bytes'])} payloads"
    )
    yield (
        f"{size}, batches of up to {settings['max_batch_size']}, "
        f"max_delay {show_duration(settings['max_delay_seconds'])} (0 for 1 outstanding); "
        f"{settings['rounds']} x {settings['seconds']:g} s each"
    )
    yield (
        f"{machine['cpus']} CPUs, Python {machine['python']}, Redis {machine['redis']}, "
        f"redis-py {machine['redis_py']}{' with hiredis' if machine['hiredis'] else ''}"
    )
    yield ""
    yield f"{'':<22}{'':>12}{'':>9}{'':>9}{'mean':>7}{'model':>7}   CPU us a request"
    yield (
        f"{'outstanding':<22}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'batch':>7}{'busy':>7}"
        f"{'caller':>9}{'worker':>7}{'redis':>7}   of the floor"
    )
    for run in figures["runs"]:
        cpu = run["cpu_us"]
        busy = run.get("model_busy")
        end = ""
        if "of_floor" in run:
            ratio = run["of_floor"]
            end = "p50 x" if run["outstanding"] == 1 else "x"
            end += _cell(ratio["p50" if run["outstanding"] == 1 else "requests_per_second"], 5, ".2f")
        elif "ceiling_requests_per_second" in run:
            end = f"(its own ceiling: {run['ceiling_requests_per_second']:,.0f}/s)"
        cells = [
            f"{run['outstanding']:>5} {run['run']:<16}",
            _cell(run["requests_per_second"], 12, ",.0f"),
            _cell(run["p50_ms"], 9, ".2f"),
            _cell(run["p99_ms"], 9, ".2f"),
            _cell(run.get("mean_batch"), 7, ".1f"),
            _cell(busy, 7, ".1%"),
            _cell(cpu["caller"], 9, ".1f"),
            _cell(cpu["worker"], 7, ".1f"),
            _cell(cpu["redis"], 7, ".1f"),
        ]
        yield f"{''.join(cells)}   {end}".rstrip()
    yield ""
    yield "floor: two plain redis-py processes that move the same bytes by RPUSH and LPOP, and do nothing else"
    if any(run["run"] == "sleeper" for run in figures["runs"]):
        yield "echo: a model that answers at once; sleeper: one that takes 5 ms a batch and 0.05 ms a request"


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


# --- the command ---


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that everything is stopped as after Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command(
    cls=Described,
    examples=(
        "batchq bench",
        "batchq bench --rounds 9 --json",
        "batchq bench --payload 100KiB --outstanding 64",
        "batchq bench --model mymodel:load --value '\"what a day\"' --max-batch-size 64",
    ),
    exit_codes=(
        EXIT_OK,
        EXIT_UNEXPECTED,
        EXIT_USAGE,
        EXIT_REDIS_DOWN,
        EXIT_NO_REDIS_SERVER,
        EXIT_INTERRUPTED,
        EXIT_TERMINATED,
    ),
)
@click.option(
    "--seconds", type=click.FloatRange(0.05, 600), default=1.0, show_default=True, help="Length of one run."
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="How often each run is made; medians are shown.",
)
@click.option(
    "--payload", type=SIZE, default="1KiB", show_default=True, help="Size of a value: bytes, or with a unit."
)
@click.option(
    "--outstanding",
    type=click.IntRange(1, 4096),
    multiple=True,
    default=(1, 64, 512),
    show_default=True,
    help="Requests under way at a time; may be repeated. 1 measures latency, with max_delay=0.",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="Of the workers, and of the floor.",
)
@click.option(
    "--max-delay",
    type=DURATION,
    default="5ms",
    show_default=True,
    help="Of the workers, but for 1 outstanding.",
)
@click.option(
    "--model", metavar="MODULE:FUNCTION", help="Run this model instead of ours; see `batchq worker`."
)
@click.option("--model-args", metavar="JSON", default="{}", help="An object with arguments for it.")
@click.option("--value", metavar="JSON", help="The value to send it, instead of random bytes.")
@click.option(
    "--redis",
    "redis_url",
    metavar="URL",
    help="Use this Redis.  [default: a private one, started and stopped here]",
)
@json_option
def bench(
    *,
    seconds: float,
    rounds: int,
    payload: int,
    outstanding: tuple[int, ...],
    max_batch_size: int,
    max_delay: float,
    model: str | None,
    model_args: str,
    value: str | None,
    redis_url: str | None,
    as_json: bool,
) -> None:
    """Measure batchq on this machine.

    Compares batchq with plain redis-py processes that only move the same bytes (the floor), and shows where the
    CPU time of a request goes. Each figure is the median of several runs, made in turns. What the figures mean,
    and how to improve them: docs/performance.md.
    """
    settings = Settings(
        seconds=seconds,
        rounds=rounds,
        payload=payload,
        outstanding=outstanding,
        max_batch_size=max_batch_size,
        max_delay=max_delay,
        model=model,
        model_args=json.dumps(parse_json(model_args, "--model-args")),
        value=None if value is None else parse_json(value, "--value"),
    )
    import redis

    try:
        with _sigterm_exits(), Rig(redis_url) as rig:
            figures = measure(rig, settings, lambda text: click.echo(text, err=True))
    except redis.ConnectionError as error:
        raise CliError(f"Redis: {error}", EXIT_REDIS_DOWN) from None
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        click.echo("\n" + "\n".join(table(figures)))
