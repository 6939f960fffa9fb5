"""What all verbs are made of: commands in RESP, scripts, transactions, and how answers are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Generic, NamedTuple, TypeVar

from batchq.keys import Keys

T = TypeVar("T")


class Script(NamedTuple):
    """One Lua script: its source with the shared part in front, and the SHA-1 that EVALSHA wants."""

    source: bytes
    sha: bytes


@cache
def script(name: str) -> Script:
    """Return the script in ``lua/<name>.lua``."""
    folder = files("batchq") / "lua"
    source = (folder / "_common.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())


SCRIPTS: Final = (
    "admit",
    "cancel",
    "cancel_job",
    "finish",
    "forget",
    "nudge",
    "recover",
    "release",
    "renew",
    "report",
    "settle",
    "take",
)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """Commands to send in one go, and how to read the answers."""

    payload: bytes
    answers: int
    parse: Callable[[list[Any]], T]


def pack(*parts: bytes) -> bytes:
    """Return one command in RESP."""
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


_MULTI = pack(b"MULTI")
_EXEC = pack(b"EXEC")


def number(value: float) -> bytes:
    """Return a whole number as Redis reads it; a fraction is cut off."""
    return b"%d" % value


def cost_suffix(cost: float) -> bytes:
    """Return a cost as it stands in a head, behind the place."""
    return b"@%d" % cost if cost == int(cost) else b"@" + repr(float(cost)).encode()


def evalsha(name: str, keys: Keys, *args: bytes) -> bytes:
    """Return the command that runs a script on a queue."""
    return pack(b"EVALSHA", script(name).sha, b"1", keys.prefix, *args)


def first(answers: list[Any]) -> Any:
    """Return the first answer, or raise it."""
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def transaction(commands: Sequence[bytes]) -> tuple[bytes, int]:
    """Wrap commands in MULTI and EXEC; the second value is the number of answers."""
    return b"".join((_MULTI, *commands, _EXEC)), len(commands) + 2


def executed(answers: list[Any]) -> list[Any]:
    """Return what EXEC answered, one item a command; raise the error that stopped it, or the first that a command ran into."""
    results = answers[-1]
    if isinstance(results, Exception):
        # EXECABORT says nothing; the command that was refused said why
        raise next((answer for answer in answers[:-1] if isinstance(answer, Exception)), results)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results  # type: ignore[no-any-return]


def call(*parts: bytes) -> Call[Any]:
    """Return a plain command whose answer is its result."""
    return Call(pack(*parts), 1, first)


def scripts_known() -> Call[list[str]]:
    """Return the names of the scripts that this server does not know."""
    names = SCRIPTS
    query = pack(b"SCRIPT", b"EXISTS", *[script(name).sha for name in names])
    return Call(
        query,
        1,
        lambda answers: [name for name, known in zip(names, first(answers), strict=True) if not known],
    )


def load_scripts(names: Sequence[str]) -> Call[None]:
    """Load scripts into the server."""

    def parse(answers: list[Any]) -> None:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer

    return Call(b"".join(pack(b"SCRIPT", b"LOAD", script(name).source) for name in names), len(names), parse)
