"""What the commands share: exit codes, how an error is printed, and options with units.

This module imports nothing of batchq, so that ``batchq --help`` is quick.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from batchq.errors import BatchqError

    FloatType = click.ParamType[float]
    IntType = click.ParamType[int]
else:
    FloatType = IntType = click.ParamType  # generic only in recent versions of click

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
    EXIT_OK: "all is well; a worker ends so where it was told to stop",
    EXIT_UNEXPECTED: "an unexpected failure",
    EXIT_USAGE: "wrong usage, a setting out of its range, or a device that does not exist",
    EXIT_MODEL: "the model cannot be loaded or warmed up, or fails its check",
    EXIT_REDIS_AUTH: "Redis refuses the password or the user's rights",
    EXIT_REFUSED: "the worker must not start: another model is on the queue, or Redis may evict requests",
    EXIT_REDIS_DOWN: "Redis cannot be reached, or refuses for now",
    EXIT_REDIS_SETTING: "a setting of Redis, or its version, is wrong for batchq",
    EXIT_NO_ANSWER: "no answer: the deadline passed, the queue is full, or no worker is alive (or, for ping --worker, ready)",
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

_SECONDS: Final[dict[str, float]] = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
}
_BYTES: Final[dict[str, int]] = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

F = TypeVar("F", bound=Callable[..., Any])


class CliError(Exception):
    """A failure that the user can mend: the group prints it as one line and exits with its code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def one_line(text: str) -> str:
    """Return the text without line breaks and control characters: an error's text may come from anywhere."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


def exit_code(error: BatchqError) -> int:
    """Return the exit code that stands for an error of batchq."""
    code = error.code
    while code:
        if code in _BY_ERROR_CODE:
            return _BY_ERROR_CODE[code]
        code = code.rpartition(".")[0]
    return EXIT_UNEXPECTED


class Described(click.Command):
    """A command whose help ends with what it shows, examples, and the exit codes that it can have."""

    def __init__(
        self,
        *args: Any,
        shown: Mapping[str, str] | None = None,
        examples: Sequence[str] = (),
        exit_codes: Iterable[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.shown = dict(shown or {})
        self.examples = tuple(examples)
        self.exit_codes = tuple(exit_codes)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them."""
        if self.shown:
            with formatter.section("Shown"):
                formatter.write_dl(list(self.shown.items()))
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:  # as they are: a wrapped command line is none
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        if self.exit_codes:
            with formatter.section("Exit codes"):
                formatter.write_dl([(str(code), EXIT_CODES[code]) for code in self.exit_codes])


class Duration(FloatType):
    """A time: seconds as a number, or with a unit (500us, 5ms, 0.5s, 2m, 1h, 1d). Becomes float seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds; the range is checked where the setting is used."""
        if isinstance(value, (int, float)):
            return float(value)
        match = _QUANTITY.fullmatch(value)
        unit = _SECONDS.get(match[2].lower() or "s") if match else None
        if match is None or unit is None:
            self.fail(
                f"{value!r} is no time; allowed are seconds, or a unit: {', '.join(_SECONDS)}", param, ctx
            )
        return float(match[1]) * unit


class Size(IntType):
    """A number of bytes, plain or with a unit: 64KiB, 256MiB (powers of 1024), 10MB (powers of 1000)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes; the range is checked where the setting is used."""
        if isinstance(value, int):
            return value
        match = _QUANTITY.fullmatch(value)
        unit = _BYTES.get(match[2].lower()) if match else None
        if match is None or unit is None:
            self.fail(
                f"{value!r} is no size; allowed are bytes, or a unit: KiB, MiB, GiB, KB, MB, GB", param, ctx
            )
        size = float(match[1]) * unit
        if not size.is_integer():  # infinity is not either
            self.fail(f"{value!r} is not a whole number of bytes", param, ctx)
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
    high, low, units = (
        (whole // 60, whole % 60, "ms") if whole < 3600 else (whole // 3600, whole % 3600 // 60, "hm")
    )
    return f"{high}{units[0]}{low:02}{units[1]}" if low else f"{high}{units[0]}"


def redis_option(function: F) -> F:
    """Add ``--redis``."""
    from batchq.config import DEFAULT_URL  # only the commands need it

    return click.option(
        "--redis",
        "redis_url",
        metavar="URL",
        default=DEFAULT_URL,
        show_default=True,
        envvar="BATCHQ_REDIS_URL",
        show_envvar=True,
        help="A redis://, rediss:// or unix:// URL. One with a password is better given in the environment: "
        "`ps` shows arguments.",
    )(function)


def queue_option(function: F) -> F:
    """Add ``--queue``."""
    from batchq.config import DEFAULT_QUEUE

    return click.option(
        "--queue",
        metavar="NAME",
        default=DEFAULT_QUEUE,
        show_default=True,
        envvar="BATCHQ_QUEUE",
        show_envvar=True,
        help="The queue: 1 to 64 letters, digits, '.', '_' and '-'.",
    )(function)


json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def parse_json(text: str | bytes, what: str) -> Any:
    """Return the value of a JSON text; ``what`` names it in the error."""
    try:
        return json.loads(text)
    except ValueError as error:
        hint = ""
        if isinstance(text, str) and re.fullmatch(r"[\w ,.!?-]{1,60}", text):
            hint = f"; a string needs quotes: '{json.dumps(text)}'"
        raise CliError(f"{what} is not JSON: {error}{hint}", EXIT_USAGE) from None


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> list[str]:
    """Return lines with aligned columns; those in ``numbers`` (0 is the first) are aligned to the right."""
    right = set(numbers)
    cells = [[one_line(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
