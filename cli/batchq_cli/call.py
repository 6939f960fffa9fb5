"""``batchq call``: one request from the shell."""

from __future__ import annotations

import base64
import datetime
import json
import math
import sys
from typing import Any, Literal

import click

from batchq.config import DEFAULT_TIMEOUT
from batchq.sync import Client
from batchq_cli.common import (
    DURATION,
    EXIT_NO_ANSWER,
    EXIT_OK,
    EXIT_REDIS_AUTH,
    EXIT_REDIS_DOWN,
    EXIT_REQUEST_FAILED,
    EXIT_USAGE,
    Described,
    parse_json,
    queue_option,
    redis_option,
    show_duration,
)


@click.command(
    cls=Described,
    examples=[
        "batchq call '\"what a day\"'",
        'batchq call \'{"text": "what a day", "top": 3}\' --queue sentiment --timeout 2s',
        "batchq call --bytes-file cat.jpg | jq .label",
        "echo '[0.1, 0.2]' | batchq call -",
        "batchq call -- -5",
    ],
    exit_codes=[
        EXIT_OK,
        EXIT_USAGE,
        EXIT_REDIS_AUTH,
        EXIT_REDIS_DOWN,
        EXIT_NO_ANSWER,
        EXIT_REQUEST_FAILED,
    ],
)
@click.argument("text", metavar="[JSON]", required=False)
@click.option("--file", type=click.File("rb"), help="Read the JSON from a file; - is standard input.")
@click.option(
    "--bytes-file", type=click.File("rb"), help="Send a file's content, as bytes; - is standard input."
)
@click.option(
    "--timeout",
    type=DURATION,
    default=show_duration(DEFAULT_TIMEOUT),
    show_default=True,
    help="From the call to its answer, at most 1d.",
)
@click.option(
    "--priority",
    type=click.Choice(["high", "normal", "low"]),
    default="normal",
    show_default=True,
    help="Which requests go first.",
)
@click.option("--fail-fast", is_flag=True, help="Fail at once where no worker of the queue is alive.")
@redis_option
@queue_option
def call(
    text: str | None,
    file: Any,
    bytes_file: Any,
    timeout: float,
    priority: Literal["high", "normal", "low"],
    fail_fast: bool,
    redis_url: str,
    queue: str,
) -> None:
    """Send one request and print its answer as a line of JSON.

    The value is JSON: an argument, a file's content, or standard input where the argument is -. What is not
    JSON, such as an image, is sent as bytes with --bytes-file.

    What JSON lacks is printed so: bytes as {"base64": "…"}, arrays as lists, a datetime as ISO 8601 text, a
    complex number as [real, imaginary], and NaN and infinities as null.
    """
    if sum(source is not None for source in (text, file, bytes_file)) != 1:
        raise click.UsageError("one of JSON, -, --file and --bytes-file is needed")
    value: Any
    if bytes_file is not None:
        value = bytes_file.read()
    elif file is not None:
        value = parse_json(file.read(), getattr(file, "name", "standard input"))
    elif text == "-":
        value = parse_json(sys.stdin.read(), "standard input")
    else:
        value = parse_json(text or "", "the argument")
    with Client(redis_url, queue=queue, fail_fast=fail_fast) as client:
        answer = client.predict(value, timeout=timeout, priority=priority)
    click.echo(json.dumps(to_json(answer), ensure_ascii=False, allow_nan=False))


def to_json(value: Any) -> Any:
    """Return an answer as JSON can hold it; see the command's help."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, complex):
        return [to_json(value.real), to_json(value.imag)]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return to_json(value.tolist()) if hasattr(value, "tolist") else value  # an array, which numpy made
