"""A queue as the contract tests see it: its verbs, its raw state, and what must hold of that after every step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, TypeVar

from batchq import commands, wire
from batchq.commands import Call, Outgoing, Pushed, Taken, TakeOptions
from batchq.keys import Keys
from batchq.store import Link

T = TypeVar("T")

CLIENT = "c" * 20
MINUTE = 60_000_000
LISTS = {
    "h": ("requests:high", "heads:high"),
    "n": ("requests", "heads"),
    "l": ("requests:low", "heads:low"),
    "s": ("solo", "heads:solo"),
}
KNOWN = {"requests", "heads", "solo", "wake", "want", "batch", "leases", "reply", "replies", "producer", "job"} | {
    "cancelled", "config", "workers", "counters", "dead",
}  # fmt: skip
count = itertools.count(1)


@dataclass(frozen=True)
class Seed:
    """A request as it is put into the raw lists; times in seconds, relative to Redis' clock."""

    lane: str = "n"
    age: float = 0.0
    timeout: float = 3600.0
    size: int = 10
    ttl_ms: int = 0
    attempts: int = 0
    died: tuple[str, float] | None = None
    """The worker that died with it, and how many seconds ago."""


class Queue:
    """One queue, seen through the verbs and through its raw keys."""

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self.keys = Keys(name)
        self.seeded_bytes = 0

    # --- raw ---

    def raw(self, *parts: bytes | str | float) -> Any:
        return self.link.call(commands.call(*(p if isinstance(p, bytes) else str(p).encode() for p in parts)))

    def key(self, name: str) -> bytes:
        return self.keys.prefix + name.encode()

    def now(self) -> int:
        seconds, micros = self.raw("TIME")
        return int(seconds) * 1_000_000 + int(micros)

    def dump(self) -> dict[str, Any]:
        """All keys of the queue with their values."""
        cursor, found = b"0", []
        while True:
            cursor, page = self.raw("SCAN", cursor, "MATCH", self.keys.prefix + b"*", "COUNT", 1000)
            found += page
            if cursor == b"0":
                break
        state = {}
        for key in sorted(set(found)):
            name = key.removeprefix(self.keys.prefix).decode()
            kind = self.raw("TYPE", key)
            if kind == b"list":
                state[name] = self.raw("LRANGE", key, 0, -1)
            elif kind == b"hash":
                flat = self.raw("HGETALL", key)
                state[name] = dict(zip(flat[::2], flat[1::2], strict=True))
            elif kind == b"zset":
                flat = self.raw("ZRANGE", key, 0, -1, "WITHSCORES")
                state[name] = dict(zip(flat[::2], flat[1::2], strict=True))
            elif kind == b"stream":
                state[name] = [fields for _, fields in self.raw("XRANGE", key, "-", "+")]
            elif kind == b"string":
                state[name] = self.raw("GET", key)
        return state

    def counters(self) -> dict[str, float]:
        flat = self.raw("HGETALL", self.keys.counters)
        return {name.decode(): float(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}

    def counter(self, name: str) -> int:
        return int(self.counters().get(name, 0))

    def ids(self, lane: str) -> list[bytes]:
        """The ids of a lane's heads, in order."""
        return [_id(head) for head in self.raw("LRANGE", self.key(LISTS[lane][1]), 0, -1)]

    def tokens(self) -> int:
        return int(self.raw("LLEN", self.keys.wake))

    def drink_token(self) -> bool:
        return bool(self.raw("DEL", self.keys.wake))

    def ttl_ms(self, name: str) -> int:
        return int(self.raw("PTTL", self.key(name)))

    # --- what must hold always ---

    def check(self) -> None:
        """Raise AssertionError unless the queue's lists and sums agree."""
        total = 0
        for lane, (requests, heads) in LISTS.items():
            elements = self.raw("LRANGE", self.key(requests), 0, -1)
            rows = self.raw("LRANGE", self.key(heads), 0, -1)
            assert len(elements) == len(rows), f"lane {lane}: {len(elements)} requests, {len(rows)} heads"
            assert [wire.read_address(e)[0] for e in elements] == [_id(row) for row in rows], (
                f"lane {lane}: other ids"
            )
            sizes = [int(row.split(b";")[2]) for row in rows]
            assert sizes == [len(e) for e in elements], f"lane {lane}: sizes"
            total += sum(sizes)
        assert self.counter("pending_bytes") == total, "pending_bytes is not the sum of the sizes"
        self.check_traces()
        for batch in self.raw("ZRANGE", self.keys.leases, 0, -1):
            elements = self.raw("LRANGE", self.keys.batch(batch.decode()), 0, -1)
            rows = self.raw("LRANGE", self.keys.batch_heads(batch.decode()), 0, -1)
            assert [wire.read_address(e)[0] for e in elements] == [_id(row) for row in rows], (
                f"batch {batch!r}: other ids"
            )

    def check_traces(self) -> None:
        assert not self.raw("EXISTS", self.key("due"), self.key("due:aside")), (
            "a take has left something behind"
        )
        assert self.tokens() <= 1, "more than one token"

    # --- verbs ---

    def call(self, verb: Call[T], *, consistent: bool = True) -> T:
        """Carry a verb, then check what must hold."""
        result = self.link.call(verb)
        if consistent:
            self.check()
        else:
            self.check_traces()
        return result

    def push(self, requests: list[Outgoing], previous: str, token: str, **options: Any) -> Pushed:
        consistent = options.pop("consistent", True)
        options = {"producer": "p", "fresh": False, **options}
        return self.call(
            commands.push(self.keys, requests, previous=previous, token=token, **options),
            consistent=consistent,
        )

    def options(self, **changes: Any) -> TakeOptions:
        return TakeOptions(
            **{"worker": "w1", "max_batch_size": 4, "max_delay_us": MINUTE, "lease_us": 5_000_000, **changes}
        )

    def take(
        self, batch: str = "b", *, consistent: bool = True, options: TakeOptions | None = None, **changes: Any
    ) -> Taken:
        """Take, and check a batch that came of it: its requests, its heads and its lease."""
        used = options or self.options()
        before = self.now()
        verb = commands.take(self.keys, used, batch, **{"limit": used.max_batch_size, "run_us": 0, **changes})
        taken = self.call(verb, consistent=consistent)
        if taken.outcome == "batch":
            elements = self.raw("LRANGE", self.keys.batch(batch), 0, -1)
            assert len(elements) == len(taken.heads)
            if taken.requests is not None:
                assert taken.requests == elements
            for head, element in zip(taken.heads, elements, strict=True):
                assert head is None or head.id == wire.read_address(element)[0] or not consistent
            lease = int(self.raw("ZSCORE", self.keys.leases, batch))
            assert before + used.lease_us <= lease <= self.now() + used.lease_us
        return taken

    def seed(self, *seeds: Seed) -> list[bytes]:
        """Put requests into the raw lists; their ids."""
        now = self.now()
        made = []
        for seed in seeds:
            [out] = outgoing(lane=seed.lane, size=seed.size, ttl_ms=seed.ttl_ms)
            lane = "s" if seed.died is not None else seed.lane
            head = (
                f"{now - int(seed.age * 1e6)};{int(seed.timeout * 1e6)};{len(out.request)};{seed.attempts};{seed.lane};"
                f"{seed.ttl_ms};{out.id.hex()}"
            )
            if seed.died is not None:
                head += f";{seed.died[0]};{now - int(seed.died[1] * 1e6)}"
            self.raw("RPUSH", self.key(LISTS[lane][0]), out.request)
            self.raw("RPUSH", self.key(LISTS[lane][1]), head)
            self.raw("HINCRBY", self.keys.counters, "pending_bytes", len(out.request))
            made.append(out.id)
        self.check()
        return made


def _id(head: bytes) -> bytes:
    return bytes.fromhex(head.split(b";")[6].decode())


def outgoing(
    n: int = 1, *, lane: str = "n", size: int = 10, timeout_us: int = MINUTE, ttl_ms: int = 0
) -> list[Outgoing]:
    """Return new requests, with ids that count up."""
    made = []
    for _ in range(n):
        request_id = next(count).to_bytes(16, "big")
        data = wire.encode_request(request_id, ttl_ms or CLIENT, timeout_us // 1000, b"x" * size)
        made.append(Outgoing(request_id, data, lane, timeout_us, ttl_ms))
    return made


def ids(requests: list[Outgoing]) -> list[bytes]:
    return [request.id for request in requests]


def taken_ids(taken: Taken) -> list[bytes]:
    """The ids of a batch's requests that are to be run."""
    return [head.id for head in taken.heads if head is not None]
