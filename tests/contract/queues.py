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
    "cancelled", "config", "workers", "counters", "dead", "groups", "full", "costs",
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
    cost: float | None = None


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

    def groups(self) -> set[str]:
        """The names of all groups that have keys of their own."""
        names = self.raw("KEYS", self.key("*@*"))
        return {name.decode().rpartition("@")[2] for name in names}

    def age(self, place: str, seconds: float) -> None:
        """Let a place's requests have come so much earlier."""
        heads = self.keys.requests_of(place).replace(b"requests", b"heads")
        rows = [row.partition(b";") for row in self.raw("LRANGE", heads, 0, -1)]
        for index, (stamp, _, rest) in enumerate(rows):
            self.raw("LSET", heads, index, b"%d;%b" % (int(stamp) - int(seconds * 1e6), rest))
        lane, _, group = place.partition(":")
        if group:
            stamp = int(rows[0][0]) - int(seconds * 1e6)
            self.raw("ZADD", self.keys.groups[lane], stamp, group)
            self.raw("ZINCRBY", self.key("full"), -int(seconds * 1e6), group)
            self.raw("ZREMRANGEBYSCORE", self.key("full"), "-inf", 0)  # it was not there

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
        total += self.check_groups()
        assert self.counter("pending_bytes") == total, "pending_bytes is not the sum of the sizes"
        self.check_traces()
        for batch in self.raw("ZRANGE", self.keys.leases, 0, -1):
            elements = self.raw("LRANGE", self.keys.batch(batch.decode()), 0, -1)
            rows = self.raw("LRANGE", self.keys.batch_heads(batch.decode()), 0, -1)
            assert [wire.read_address(e)[0] for e in elements] == [_id(row) for row in rows], (
                f"batch {batch!r}: other ids"
            )

    def check_groups(self) -> int:
        """Check each group's lists, and that the indexes say what these hold; the bytes in them."""
        total, more = 0, {}
        indexes: dict[str, dict[str, int]] = {"h": {}, "n": {}, "l": {}}
        counts = dict.fromkeys(indexes, 0)
        groups = self.groups()
        for lane, group in itertools.product(indexes, groups):
            requests = self.keys.requests_of(f"{lane}:{group}")
            elements = self.raw("LRANGE", requests, 0, -1)
            rows = self.raw("LRANGE", requests.replace(b"requests", b"heads"), 0, -1)
            assert [wire.read_address(e)[0] for e in elements] == [_id(row) for row in rows], (
                f"{lane}:{group}: other ids"
            )
            heads = [head for row in rows if (head := commands.parse_head(row))]
            assert all((head.lane, head.group) == (lane, group) for head in heads)
            assert [head.size for head in heads] == [len(e) for e in elements]
            total += sum(head.size for head in heads)
            counts[lane] += len(heads)
            more[group] = more.get(group, 0) + sum(head.cost - 1 for head in heads if head.cost is not None)
            if heads:
                indexes[lane][group] = heads[0].enqueued
        for lane, index in indexes.items():
            flat = self.raw("ZRANGE", self.keys.groups[lane], 0, -1, "WITHSCORES")
            assert {g.decode(): int(s) for g, s in zip(flat[::2], flat[1::2], strict=True)} == index, lane
            assert self.counter(f"grouped_{lane}") == counts[lane], f"grouped_{lane}"
        assert {g.decode() for g in self.raw("ZRANGE", self.key("full"), 0, -1)} <= groups
        flat = self.raw("HGETALL", self.key("costs"))
        costs = {g.decode(): float(c) for g, c in zip(flat[::2], flat[1::2], strict=True) if g[-1:] != b"^"}
        assert set(costs) - {""} <= groups
        for group in groups:
            assert abs(costs.get(group, 0) - more[group]) < 1e-6, f"costs of {group}"
        return total

    def check_traces(self) -> None:
        assert not self.raw("EXISTS", self.key("due"), self.key("due:aside"), self.key("due:home")), (
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
            lane, _, group = seed.lane.partition(":")
            place = commands.Place(lane, group, seed.cost)
            enqueued = now - int(seed.age * 1e6)
            head = (
                f"{enqueued};{int(seed.timeout * 1e6)};{len(out.request)};{seed.attempts};{place.field().decode()};"
                f"{seed.ttl_ms};{out.id.hex()}"
            )
            if seed.died is not None:
                head += f";{seed.died[0]};{now - int(seed.died[1] * 1e6)}"
            requests, heads = (
                [self.key(name) for name in LISTS["s"]]
                if seed.died is not None
                else [
                    self.keys.requests_of(seed.lane),
                    self.keys.requests_of(seed.lane).replace(b"requests", b"heads"),
                ]
            )
            self.raw("RPUSH", requests, out.request)
            self.raw("RPUSH", heads, head)
            if seed.cost is not None:
                self.raw("HINCRBYFLOAT", self.key("costs"), group, seed.cost - 1)
            if group:
                self.raw("ZADD", self.keys.groups[lane], "NX", enqueued, group)
                ranked = enqueued + "hnl".index(lane) * 2_500_000_000_000_000
                self.raw("ZADD", self.key("full"), "NX", ranked, group)  # a hint, where it is none
                self.raw("HINCRBY", self.keys.counters, f"grouped_{lane}", 1)
            self.raw("HINCRBY", self.keys.counters, "pending_bytes", len(out.request))
            made.append(out.id)
        self.check()
        return made


def _id(head: bytes) -> bytes:
    return bytes.fromhex(head.split(b";")[6].decode())


def outgoing(
    n: int = 1,
    *,
    lane: str = "n",
    size: int = 10,
    timeout_us: int = MINUTE,
    ttl_ms: int = 0,
    cost: float | None = None,
) -> list[Outgoing]:
    """Return new requests, with ids that count up; ``lane`` may be a group's, such as ``n:sa``."""
    made = []
    for _ in range(n):
        request_id = next(count).to_bytes(16, "big")
        data = wire.encode_request(request_id, ttl_ms or CLIENT, timeout_us // 1000, b"x" * size)
        made.append(Outgoing(request_id, data, lane, timeout_us, ttl_ms, cost))
    return made


def ids(requests: list[Outgoing]) -> list[bytes]:
    return [request.id for request in requests]


def taken_ids(taken: Taken) -> list[bytes]:
    """The ids of a batch's requests that are to be run."""
    return [head.id for head in taken.heads if head is not None]
