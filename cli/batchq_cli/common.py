"""What the commands share: exit codes, how an error is printed, and options with units.

This module imports nothing of batchq, so that ``batchq --help`` is quick.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from batchq.errors import BatchqError

EXIT_OK: Final = 0
EXIT_UNEXPECTED: Final = 1
EXIT_USAGE: Final = 2
EXIT_MODEL: Final = 3
EXIT_REDIS_AUTH: Final = 4
EXIT_REFUSED: Final = 5
EXIT_REDIS_DOWN: Final = 6
EXIT_REDIS_SETTING: Final = 7
EXIT_NO_ANSWER: Final = 8
EXIT_REQUEST_FAILED: Final = 9
EXIT_NO_REDIS_SERVER: Final = 69
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143

EXIT_CODES: Final[dict[int, str]] = {
    EXIT_OK: "all is well; a worker that was told to stop has drained",
    EXIT_UNEXPECTED: "an unexpected failure",
    EXIT_USAGE: "wrong usage, or a setting out of its range",
    EXIT_MODEL: "the model cannot be loaded, or fails its check",
    EXIT_REDIS_AUTH: "Redis refuses the password or the user's rights",
    EXIT_REFUSED: "the worker must not start: another model is on the queue, or Redis may evict requests",
    EXIT_REDIS_DOWN: "Redis cannot be reached, or refuses for now",
    EXIT_REDIS_SETTING: "a setting of Redis, or its version, is wrong for batchq",
    EXIT_NO_ANSWER: "no answer: the deadline passed, the queue is full, or no worker is alive",
    EXIT_REQUEST_FAILED: "the request failed: the model raised, or a value cannot be sent",
    EXIT_NO_REDIS_SERVER: "there is no redis-server to start (demo, bench)",
    EXIT_INTERRUPTED: "Ctrl-C",
    EXIT_TERMINATED: "SIGTERM (demo, bench)",
}
"""Every exit code of every command, and what it means."""

# the longest prefix of an error's wire code decides
_BY_ERROR_CODE: Final[dict[str, int]] = {
    "config": EXIT_USAGE,
    "config.start": EXIT_REFUSED,
    "unavailable": EXIT_NO_ANSWER,
    "unavailable.backend": EXIT_REDIS_DOWN,
    "unavailable.backend_auth": EXIT_REDIS_AUTH,
    "deadline": EXIT_NO_ANSWER,
    "request": EXIT_REQUEST_FAILED,
    "execution": EXIT_REQUEST_FAILED,
    "job": EXIT_REQUEST_FAILED,
}

_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

F = TypeVar("F", bound=Callable[..., Any])


class CliError(click.ClickException):
    """A failure that the user can do something about: one line on stderr, ``error: …``, and its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(f"error: {one_line(self.message)}", file=file, err=file is None)


def one_line(text: str) -> str:
    """Return the text with its line breaks and control characters replaced: an error's text may come from anywhere."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))


def exit_code(error: BatchqError) -> int:
    """Return the exit code that stands for an error of batchq."""
    code = error.code
    while code:
        if code in _BY_ERROR_CODE:
            return _BY_ERROR_CODE[code]
        code = code.rpartition(".")[0]
    return EXIT_UNEXPECTED


def exit_codes(*only: int) -> str:
    """Return the table of exit codes, or of some of them, for a command's help."""
    rows = [f"  {code:>3}  {EXIT_CODES[code]}" for code in (only or EXIT_CODES)]
    return "\b\nExit codes:\n" + "\n".join(rows)


class Duration(click.ParamType):
    """A time: seconds as a number, or with a unit: 500us, 5ms, 0.5s, 2m, 1h, 1d. Converted to float seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds; the range is checked where the setting is used."""
        if isinstance(value, (int, float)):
            return float(value)
        match = _QUANTITY.fullmatch(value)
        unit = _SECONDS.get(match[2].lower() or "s") if match else None
        if match is None or unit is None:
            self.fail(f"{value!r} is no time: allowed are seconds, or a number with us, ms, s, m, h or d, such as 5ms", param, ctx)
        # 5 * 1e-3 is 0.005; dividing would do as well, adding up would not
        return float(match[1]) * unit


class Size(click.ParamType):
    """A number of bytes, plain or with a unit: 64KiB, 256MiB, 1.5GiB (powers of 1024), 10MB (powers of 1000). Converted to int."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes; the range is checked where the setting is used."""
        if isinstance(value, int):
            return value
        match = _QUANTITY.fullmatch(value)
        unit = _BYTES.get(match[2].lower()) if match else None
        if match is None or unit is None:
            self.fail(f"{value!r} is no size: allowed are bytes, or a number with KiB, MiB, GiB, KB, MB or GB, such as 256MiB", param, ctx)
        size = float(match[1]) * unit
        if size != int(size):
            self.fail(f"{value!r} is no whole number of bytes", param, ctx)
        return int(size)


DURATION: Final = Duration()
SIZE: Final = Size()


def show_size(size: int) -> str:
    """Return a number of bytes as it may be given to an option: ``256MiB``."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def show_duration(seconds: float) -> str:
    """Return a time for the eye: ``850us``, ``5.2ms``, ``1.3s``, ``4m10s``, ``2h05m``."""
    if seconds < 0.0000005:
        return "0s"
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g}ms"
    if seconds < 99.95:
        return f"{seconds:.3g}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def redis_option(function: F) -> F:
    """Add ``--redis``."""
    return click.option(
        "--redis",
        "redis_url",
        metavar="URL",
        envvar="BATCHQ_REDIS_URL",
        show_envvar=True,
        show_default="redis://localhost:6379/0",
        help="redis://, rediss:// or unix:// URL. A password is better given in the environment: `ps` shows arguments to everybody.",
    )(function)


def queue_option(function: F) -> F:
    """Add ``--queue``."""
    return click.option(
        "--queue",
        metavar="NAME",
        envvar="BATCHQ_QUEUE",
        show_envvar=True,
        show_default="default",
        help="The queue: 1 to 64 letters, digits, '.', '_' and '-'.",
    )(function)
