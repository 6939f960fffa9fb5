"""``batchq worker --check``: whether a model loads, takes batches and answers with what can be sent."""

from __future__ import annotations

import os
import sys
import time
import traceback
import uuid
from typing import Any

import click

from batchq import codec
from batchq.answers import WrongAnswerError, describe
from batchq.device import DeviceLostError, open_device
from batchq.errors import BatchqError, EncodeError
from batchq.loading import load_model
from batchq.model import Model
from batchq.protocols import BatchContext
from batchq_cli.common import EXIT_MODEL, CliError, one_line, parse_json, show_duration
from batchq_workers.child import load
from batchq_workers.config import WorkerConfig
from batchq_workers.devices import find

_LINE = 100
"""Characters of a description of answers."""


def check_model(config: WorkerConfig, sample: str | None) -> None:
    """Load the model, run a batch of one and one of two, print how it went; raise CliError where it fails."""
    try:
        _check(config, sample)
    except SystemExit as error:  # of the model's: with code 0 it would look like success
        raise CliError(f"the model called sys.exit({error.code})", EXIT_MODEL) from error


def _check(config: WorkerConfig, sample: str | None) -> None:
    given = None if sample is None else parse_json(sample, "--sample")
    # the folder comes first, as in a worker, where `python -m` has left it in another place
    folder = os.path.abspath(config.app_dir)
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != folder]
    device = find(config.device, os.environ)[0]
    started = time.perf_counter()
    try:
        model = Model(load(config, device), device=open_device(device))
        click.echo(f"model {config.model} is loaded: {_since(started)}, device {device}")
        started = time.perf_counter()
        if model.warm_up():
            click.echo(f"warmup: {_since(started)}")
    except BatchqError as error:
        raise _failure(error.message, error.__cause__) from error
    value, origin = (given, "--sample") if sample is not None else _find_sample(config.model)
    click.echo(f"sample: {origin}, {_short(value)}")
    try:
        packed = codec.pack(value)
    except EncodeError as error:
        raise CliError(f"the sample cannot be sent: {error}", EXIT_MODEL) from error
    try:
        _classify(model, packed, config)
        for size in (1, 2):
            _run(model, packed, size, config)
    except CliError as error:
        if value is None and sample is None:
            remedy = "it was given null, for want of a sample: --sample '\"what a day\"', or `sample = …` in the model's module"
            raise CliError(f"{error}; {remedy}", EXIT_MODEL) from error
        raise
    finally:
        model.close()
    click.echo("ok: answers can be sent")


def _since(started: float) -> str:
    return show_duration(time.perf_counter() - started)


def _failure(message: str, cause: BaseException | None) -> CliError:
    if cause is not None:
        click.echo("".join(traceback.format_exception(cause)), err=True, nl=False)
    return CliError(message, EXIT_MODEL)


def _find_sample(spec: str) -> tuple[Any, str]:
    """Return a sample and where it was found."""
    module = spec.partition(":")[0]
    for place, name in ((load_model(spec), spec), (sys.modules[module], module)):
        if hasattr(place, "sample"):
            return place.sample, f"{name}.sample".replace(":", ".")
    return None, f"null (there is no --sample, and neither {spec} nor {module} has an attribute `sample`)"


def _decoded(model: Model, packed: bytes) -> Any:
    """Return the sample as a worker decodes it: a tuple arrives as a list, and no two inputs are the same object."""
    return codec.unpack(packed, copy=not model.views, tensors=True)


def _classify(model: Model, packed: bytes, config: WorkerConfig) -> None:
    """Print the sample's cost and batch_key, where the model has them."""
    try:
        batch_key, cost = model.classify(_decoded(model, packed), None, None)
    except BatchqError as error:
        raise _failure(error.message, error.__cause__) from error
    if model.costs:
        click.echo(f"cost: {cost:g}")
        limit = config.policy.max_batch_cost
        if limit is not None and cost is not None and cost > limit:
            raise CliError(
                f"a cost of {cost:g} is over --max-batch-cost {limit}: no batch can hold it", EXIT_MODEL
            )
    if model.groups:
        click.echo(f"batch_key: {one_line(repr(batch_key))[:_LINE]}")


def _run(model: Model, packed: bytes, size: int, config: WorkerConfig) -> None:
    """Run one batch and print a line about it."""
    raised: list[Exception] = []
    model.on_error = lambda error, indices: raised.append(error)
    started = time.perf_counter()
    try:
        prepared = model.prepare([_decoded(model, packed) for _ in range(size)], _context(size))
        output = model.predict(prepared)
        kind = type(output.answer).__name__
        outcomes = model.answers(output)
        cause = output.error
        if cause is not None and size > 1:
            # a worker splits such a batch: its callers get answers, but never from batches
            raise _failure(
                f"a batch of {size} fails, each value alone does not: {describe(cause)}", _traced(cause)
            )
        if outcomes is None:
            outcomes = model.rescue(prepared, output)
    except DeviceLostError as error:
        raise _failure(f"a batch of {size} fails: {error}", error.__cause__) from error
    seconds = time.perf_counter() - started
    for outcome in outcomes:
        if isinstance(outcome, BatchqError):
            raise _failure(f"a batch of {size} fails: {outcome}", _traced(cause or next(iter(raised), None)))
    sizes = []
    for outcome in outcomes:
        try:
            sizes.append(len(codec.pack(outcome)))
        except EncodeError as error:
            raise CliError(f"an answer in a batch of {size} cannot be sent: {error}", EXIT_MODEL) from error
    if max(sizes) > config.max_payload:
        raise CliError(
            f"an answer of {max(sizes):,} bytes is over --max-payload {config.max_payload:,}", EXIT_MODEL
        )
    answers = f"{kind} of {_short(outcomes[0])}"
    click.echo(f"batch of {size}: {show_duration(seconds)}, {answers}, {max(sizes):,} bytes packed")


def _context(size: int) -> BatchContext:
    ids = tuple(uuid.uuid4().hex for _ in range(size))
    return BatchContext(ids, (None,) * size, (time.time() + 60,) * size)


def _traced(error: Exception | None) -> Exception | None:
    """Return the error if its traceback leads into the user's code."""
    return (
        None if isinstance(error, WrongAnswerError) or error is None or error.__traceback__ is None else error
    )


def _short(value: object) -> str:
    """Return a value's type and shape in at most a line, never what it holds."""
    text = one_line(_describe(value, 0))
    return text if len(text) <= _LINE else text[: _LINE - 1] + "…"


def _describe(value: object, depth: int) -> str:
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return (
            f"{kind} {value.dtype} ({', '.join(map(str, shape))})" if len(shape) else f"{kind} {value.dtype}"
        )
    if isinstance(value, (str, bytes)):
        return f"{kind} of {len(value):,}"
    if isinstance(value, (list, tuple)):
        inner = f" {_describe(value[0], depth + 1)}" if value and depth < 2 else ""
        return f"{kind} of {len(value):,}{inner}"
    if isinstance(value, dict):
        fields = (
            ", ".join(f"{name}: {_describe(item, depth + 1)}" for name, item in list(value.items())[:8])
            if depth < 2
            else "…"
        )
        return f"{kind} {{{fields}{', …' if len(value) > 8 else ''}}}"
    return "None" if value is None else kind
