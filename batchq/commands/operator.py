"""The operator's verbs: a queue's figures and its dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchq.commands.base import Call, call, first, number, pack
from batchq.keys import Keys


def stats(keys: Keys) -> Call[list[Any]]:
    """Read all that ``QueueStats`` shows; ``batchq.stats.from_answers`` makes it readable."""
    lengths = [pack(b"LLEN", keys.heads[lane]) for lane in "hnl"] + [
        pack(b"LLEN", keys.prefix + b"heads:solo")
    ]
    oldest = [pack(b"LINDEX", keys.heads[lane], b"0") for lane in "hnl"]
    groups = [pack(b"ZRANGE", keys.groups[lane], b"0", b"0", b"WITHSCORES") for lane in "hnl"]
    rest = [
        pack(b"ZUNION", b"3", *keys.groups.values()),
        pack(b"ZCARD", keys.leases), pack(b"LLEN", keys.dead), pack(b"HGETALL", keys.counters), pack(b"HGETALL", keys.config),
        pack(b"HGETALL", keys.workers), pack(b"TIME"),
    ]  # fmt: skip
    commands = [*lengths, *oldest, *groups, *rest]

    def parse(answers: list[Any]) -> list[Any]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    return Call(b"".join(commands), len(commands), parse)


def dead_letters(keys: Keys, start: int, stop: int) -> Call[list[bytes]]:
    """Read dead letters, newest first: from ``start`` to ``stop``, both included; 0 is the newest, -1 the oldest."""
    return call(b"LRANGE", keys.dead, number(start), number(stop))


def drop_letters(keys: Keys, letters: Sequence[bytes]) -> Call[int]:
    """Remove exactly these dead letters, the oldest of those that are alike; the number that were still there."""
    payload = b"".join(pack(b"LREM", keys.dead, b"-1", letter) for letter in letters)
    return Call(payload, len(letters), lambda answers: sum(first([answer]) for answer in answers))
