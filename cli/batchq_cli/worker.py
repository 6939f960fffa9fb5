"""``batchq worker``: run a model on the requests of a queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from batchq.config import (
    DEFAULT_BATCH_TIMEOUT,
    DEFAULT_CAPACITY,
    DEFAULT_CAPACITY_BYTES,
    DEFAULT_DRAIN_TIMEOUT,
    DEFAULT_LEASE,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_DELAY,
    DEFAULT_MAX_PAYLOAD,
    BatchPolicy,
    resolve_queue,
    resolve_url,
)
from batchq_cli.common import (
    DURATION,
    EXIT_MODEL,
    EXIT_OK,
    EXIT_REDIS_AUTH,
    EXIT_REFUSED,
    EXIT_USAGE,
    SIZE,
    Described,
    queue_option,
    redis_option,
    show_duration,
    show_size,
)
from batchq_workers import logs
from batchq_workers.config import WorkerConfig
from batchq_workers.devices import DEFAULT_DEVICE
from batchq_workers.parent import Parent

if TYPE_CHECKING:
    PairType = click.ParamType[tuple[str, Any]]
else:
    PairType = click.ParamType  # generic only in recent versions of click

F = TypeVar("F", bound=Callable[..., Any])


class ModelArgument(PairType):
    """``name=value``; the value is read as JSON where it is JSON, else it is the text itself."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """Return the name and the value."""
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r}: allowed is name=value, such as threshold=0.5", param, ctx)
        try:
            return name, json.loads(text)
        except ValueError:
            return name, text

    def split_envvar_value(self, rv: str) -> list[str]:
        """Split what the environment holds: a JSON object, or name=value pairs with spaces between them."""
        if not rv.lstrip().startswith("{"):
            return rv.split()
        try:
            fields = json.loads(rv)
        except ValueError as error:
            raise click.BadParameter(f"BATCHQ_MODEL_ARGS is no JSON object: {error}") from None
        return [f"{name}={json.dumps(value)}" for name, value in fields.items()]


def _variable(flag: str) -> str:
    return "BATCHQ_" + flag.removeprefix("--").replace("-", "_").upper()


def _setting(flag: str, *, type: Any, default: Any, help: str) -> Callable[[F], F]:
    return click.option(
        flag,
        type=type,
        default=default,
        envvar=_variable(flag),
        show_envvar=True,
        show_default=True,
        help=help,
    )


def _flag(flag: str, *, help: str) -> Callable[[F], F]:
    return click.option(flag, is_flag=True, envvar=_variable(flag), show_envvar=True, help=help)


@click.command(
    cls=Described,
    examples=[
        "batchq worker --model mymodel:load",
        "batchq worker --model mymodel:load --device auto --max-batch-size 64 --max-delay 10ms",
        "batchq worker --model mymodel:load --device cuda:0,cuda:1 --processes-per-device 2",
        "batchq worker --model mymodel:load --model-arg size=large --model-arg threshold=0.5",
        "batchq worker --model mymodel:load --check --sample '\"what a day\"'",
        "BATCHQ_REDIS_URL=rediss://:secret@redis:6379/0 batchq worker --model mymodel:load",
    ],
    exit_codes=[EXIT_OK, EXIT_USAGE, EXIT_MODEL, EXIT_REDIS_AUTH, EXIT_REFUSED],
)
@click.option(
    "--model",
    required=True,
    metavar="MODULE:FUNCTION",
    envvar="BATCHQ_MODEL",
    show_envvar=True,
    help="The function that loads the model and returns predict(inputs).",
)
@click.option(
    "--model-arg",
    "model_args",
    type=ModelArgument(),
    multiple=True,
    envvar="BATCHQ_MODEL_ARGS",
    show_envvar=True,
    help="An argument for that function; may be repeated. The value is read as JSON where it is JSON. "
    "The variable holds a JSON object, or name=value pairs with spaces between them.",
)
@_setting(
    "--app-dir",
    type=click.Path(exists=True, file_okay=False),
    default=".",
    help="The folder to import the model from.",
)
@_setting(
    "--device",
    type=str,
    default=DEFAULT_DEVICE,
    help="Where the model runs, one process on each: cpu, mps, or GPUs: cuda:0,cuda:1. auto: all GPUs that torch "
    "finds, else mps, else cpu. A process sees only its GPU, and the function, if it takes `device`, is given "
    "that one's name there, cuda:0. cuda: one process that sees all GPUs.",
)
@_setting(
    "--processes-per-device",
    type=int,
    default=1,
    help="Processes on each device, 1 to 64, each with a model of its own.",
)
@redis_option
@queue_option
@_setting(
    "--max-batch-size",
    type=int,
    default=DEFAULT_MAX_BATCH_SIZE,
    help="Requests in a batch at most, 1 to 4,096.",
)
@_setting(
    "--max-batch-cost",
    type=int,
    default=None,
    help="The sum of the requests' costs in a batch at most, such as tokens, 1 to 1,000,000,000. A request costs "
    "what its caller says, else what the model says, else 1. Default: no such limit.",
)
@_flag(
    "--padded",
    help="A batch costs its largest request's cost times its size: for models that pad all to the longest.",
)
@_setting(
    "--max-delay",
    type=DURATION,
    default=show_duration(DEFAULT_MAX_DELAY),
    help="How long the oldest request waits for others, 0 to 60s. Seconds, or with a unit: 5ms, 0.5s.",
)
@_setting(
    "--capacity",
    type=int,
    default=DEFAULT_CAPACITY,
    help="Requests that may be pending, 1 to 1,000,000; more get QueueFullError.",
)
@_setting(
    "--capacity-bytes",
    type=SIZE,
    default=show_size(DEFAULT_CAPACITY_BYTES),
    help="Bytes that may be pending, 1KiB to 1TiB. Bytes, or with a unit: 256MiB.",
)
@_setting(
    "--max-payload",
    type=SIZE,
    default=show_size(DEFAULT_MAX_PAYLOAD),
    help="Bytes of one request or answer, 1KiB to 512MiB.",
)
@_setting(
    "--batch-timeout",
    type=DURATION,
    default=show_duration(DEFAULT_BATCH_TIMEOUT),
    help="A batch that runs longer is ended, and its requests run alone; 1s to 1d.",
)
@_setting(
    "--drain-timeout",
    type=DURATION,
    default=show_duration(DEFAULT_DRAIN_TIMEOUT),
    help="How long a batch may still run after SIGTERM, 0 to 1h. Kubernetes kills after 30s.",
)
@_setting(
    "--lease",
    type=DURATION,
    default=show_duration(DEFAULT_LEASE),
    help="After which others take over the batches of a machine that has vanished, 1s to 10m.",
)
@_flag(
    "--allow-mixed",
    help="Start even where a live worker of the queue runs another --model.",
)
@_setting(
    "--log-format", type=str, default="auto", help="text, json, or auto: text on a terminal, else JSON."
)
@_setting("--log-level", type=str, default="info", help="debug, info, warning or error.")
@click.option(
    "--check",
    is_flag=True,
    help="Load the model, run a batch of one and of two on a sample, report, exit. Needs no Redis.",
)
@click.option(
    "--sample",
    metavar="JSON",
    help="For --check: one value, as a caller would send it. Default: the attribute `sample` of the function "
    "or of its module, else null.",
)
@click.pass_context
def worker(
    ctx: click.Context,
    *,
    model: str,
    model_args: tuple[tuple[str, Any], ...],
    app_dir: str,
    device: str,
    processes_per_device: int,
    redis_url: str,
    queue: str,
    max_batch_size: int,
    max_batch_cost: int | None,
    padded: bool,
    max_delay: float,
    capacity: int,
    capacity_bytes: int,
    max_payload: int,
    batch_timeout: float,
    drain_timeout: float,
    lease: float,
    allow_mixed: bool,
    log_format: str,
    log_level: str,
    check: bool,
    sample: str | None,
) -> None:
    """Run a model on the requests of a queue.

    MODULE:FUNCTION names a function that is called once in each process that runs the model. It returns another,
    predict(inputs), which takes a list of n values and returns a list of n answers.

    The batch's size, cost and delay and both capacities belong to the queue: what its first live worker was
    given holds, and a later worker says where it was given something else.
    """
    if sample is not None and not check:
        raise click.UsageError("--sample goes with --check")
    config = WorkerConfig(
        url=resolve_url(redis_url),
        queue=resolve_queue(queue),
        model=model,
        model_args=dict(model_args),
        app_dir=app_dir,
        device=device,
        processes_per_device=processes_per_device,
        policy=BatchPolicy(
            max_batch_size=max_batch_size,
            max_delay=max_delay,
            capacity=capacity,
            capacity_bytes=capacity_bytes,
            max_batch_cost=max_batch_cost,
            padded=padded,
        ),
        lease=lease,
        batch_timeout=batch_timeout,
        drain_timeout=drain_timeout,
        max_payload=max_payload,
        allow_mixed=allow_mixed,
        log_format=log_format,
        log_level=log_level,
    )
    if check:
        from batchq_cli.check import check_model  # a worker has no use for it

        check_model(config, sample)
        return
    logs.set_up(config.log_format, config.log_level)
    ctx.exit(Parent(config).run())
