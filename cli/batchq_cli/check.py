"""``batchq worker --check``: whether a model loads, takes batches and answers with what can be sent."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import click

from batchq import codec
from batchq.errors import BatchqError, EncodeError
from batchq.model import Model, load_model
from batchq_cli.common import EXIT_MODEL, CliError, one_line, parse_json, show_duration
from batchq_workers.child import load
from batchq_workers.config import WorkerConfig

_LINE = 100
"""Characters of a description of answers."""


def check_model(config: WorkerConfig, sample: str | None) -> None:
    """Load the model, run a batch of one and one of two, print how it went; raise CliError where it fails."""
    given = None if sample is None else parse_json(sample, "--sample")
    # the folder comes first, as in a worker, where `python -m` has left it in another place
    folder = os.path.abspath(config.app_dir)
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != folder]
    started = time.perf_counter()
    try:
        predict = load(config)
    except BatchqError as error:
        raise _failure(error.message, error.__cause__) from error
    seconds = time.perf_counter() - started
    click.echo(f"model {config.model} is loaded: {show_duration(seconds)}, device {config.device}")
    value, origin = (given, "--sample") if sample is not None else _find_sample(config.model)
    click.echo(f"sample: {origin}, {describe(value)}")
    try:
        packed = codec.pack(value)
    except EncodeError as error:
        raise CliError(f"the sample cannot be sent: {error}", EXIT_MODEL) from error
    try:
        for size in (1, 2):
            # decoded for each, as in a worker: a tuple arrives as a list, and no two inputs are the same object
            _run(predict, [codec.unpack(packed) for _ in range(size)], config)
    except CliError as error:
        if value is None and sample is None:
            remedy = "it was given null, for want of a sample: --sample '\"what a day\"', or `sample = …` in the model's module"
            raise CliError(f"{error}; {remedy}", EXIT_MODEL) from error
        raise
    click.echo("ok: answers can be sent")


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


def _run(predict: Callable[[list[Any]], Any], values: list[Any], config: WorkerConfig) -> None:
    """Run one batch and print a line about it."""
    raised: list[Exception] = []
    kind = ""

    def noting(inputs: list[Any]) -> Any:
        nonlocal kind
        try:
            answer = predict(inputs)
        except Exception as error:
            raised.append(error)
            raise
        kind = type(answer).__name__
        return answer

    started = time.perf_counter()
    outcomes = Model(noting).run(values)
    seconds = time.perf_counter() - started
    cause = raised[0] if raised else None
    for outcome in outcomes:
        if isinstance(outcome, BatchqError):
            raise _failure(f"a batch of {len(values)} fails: {outcome}", cause)
    if cause is not None:  # a worker splits such a batch: its callers get answers, but never from batches
        what = f"{type(cause).__name__}: {cause}"
        raise _failure(f"a batch of {len(values)} fails, each value alone does not: {what}", cause)
    sizes = []
    for outcome in outcomes:
        try:
            sizes.append(len(codec.pack(outcome)))
        except EncodeError as error:
            raise CliError(
                f"an answer in a batch of {len(values)} cannot be sent: {error}", EXIT_MODEL
            ) from error
    if max(sizes) > config.max_payload:
        raise CliError(
            f"an answer of {max(sizes):,} bytes is over --max-payload {config.max_payload:,}", EXIT_MODEL
        )
    answers = f"{kind} of {describe(outcomes[0])}"
    click.echo(f"batch of {len(values)}: {show_duration(seconds)}, {answers}, {max(sizes):,} bytes packed")


def describe(value: object) -> str:
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
