"""The worker's verbs: take, finish, hand back, recover, report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from batchq import wire
from batchq.commands.base import Call, cost_suffix, evalsha, executed, first, number, pack, transaction
from batchq.config import REPLY_TTL_MS
from batchq.errors import DeadlineExceededError
from batchq.keys import Keys

MAX_XADD_BYTES: Final = 1024 * 1024
DEAD_LETTERS: Final = 1000
DEAD_TTL_S: Final = 7 * 86_400
MAX_SOLO_DEATHS: Final = 2


class Place(NamedTuple):
    """Where a request waits, and what it counts in a batch there; ``group`` '' for none, ``cost`` None for 1."""

    lane: str
    group: str
    cost: float | None

    def field(self) -> bytes:
        """Return it as it stands in a head."""
        name = f"{self.lane}:{self.group}" if self.group else self.lane
        return name.encode() + (b"" if self.cost is None else cost_suffix(self.cost))


class Head(NamedTuple):
    """What Redis knows of a request: times in microseconds of its clock; ``group`` '' for none, ``cost`` None where none is known."""

    enqueued: int
    timeout: int
    size: int
    attempts: int
    lane: str
    ttl_ms: int
    id: bytes
    group: str = ""
    cost: float | None = None


def parse_head(head: bytes) -> Head | None:
    """Return the head, or None where it is not to be run, or no head at all."""
    try:
        enqueued, timeout, size, attempts, field, ttl, id = head.split(b";", 7)[:7]
        place, _, cost = field.decode().partition("@")
        return Head(
            int(enqueued),
            int(timeout),
            int(size),
            int(attempts),
            place[:1],
            int(ttl),
            bytes.fromhex(id.decode()),
            place[2:],
            float(cost) if cost else None,
        )
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Taken:
    """What take came to.

    ``outcome``: ``batch``; ``idle``; ``wait``: not due for ``left`` seconds; ``no``: nothing to prefetch; ``bulk``: take again in the
    native form. ``kind``: ``batch``, ``solo``, ``again``. A head that is None stands for a request that is not to be run; ``requests``
    are None where the caller has to fetch them (``fetch_batch``). ``dropped``: how many were too late, where no batch came of it.
    """

    outcome: str
    now: int
    left: float = 0.0
    kind: str = ""
    pending: int = 0
    raw_heads: tuple[bytes, ...] = ()
    requests: list[bytes] | None = None
    dropped: int = 0

    @property
    def heads(self) -> tuple[Head | None, ...]:
        """The heads, parsed; a worker that only runs the batch can do without."""
        return tuple(map(parse_head, self.raw_heads))

    @property
    def oldest(self) -> int:
        """When the oldest of the requests to be run was enqueued, ``now`` if there is none."""
        # stamps have one length, so the smallest text is the smallest number
        first = min(filter(None, self.raw_heads), default=b"").partition(b";")[0]
        return int(first) if first else self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOptions:
    """What a worker's takes have in common; times in microseconds."""

    worker: str
    max_batch_size: int
    max_delay_us: int
    lease_us: int
    max_batch_cost: int = 0
    """0 for no budget."""
    padded: bool = False


_DEADLINE_REPLY = wire.encode_error(
    b"\0" * 16, DeadlineExceededError("the job's deadline passed before a worker could run it")
)
_DEADLINE_PARTS = _DEADLINE_REPLY.split(b"\0" * 16)


def take(
    keys: Keys,
    options: TakeOptions,
    batch: str,
    *,
    limit: int,
    run_us: int,
    form: str = "light",
    solo_first: bool = True,
    prefetch: bool = False,
    regroups: str = "",
    regroup_us: int = 0,
) -> Call[Taken]:
    """Move a due batch into ``batch:<b>`` and lease it.

    ``form`` is ``light``, ``force`` or ``native``, ``regroups`` '', ``first``, ``full`` or ``last``: see lua/take.lua.
    """
    take = evalsha(
        "take", keys, batch.encode(), number(options.max_batch_size), number(limit), number(options.max_delay_us),
        number(options.lease_us), number(run_us), form.encode(), b"solo" if solo_first else b"batch", b"1" if prefetch else b"",
        options.worker.encode(), *_DEADLINE_PARTS, number(options.max_batch_cost), b"1" if options.padded else b"", regroups.encode(),
        number(regroup_us),
    )  # fmt: skip
    if form != "native":
        fetch = pack(b"LRANGE", keys.batch(batch), b"0", b"-1")
        return Call(take + fetch, 2, lambda answers: _taken(first(answers), answers[1]))
    move = pack(b"LMOVE", keys.prefix + b"due", keys.batch(batch), b"LEFT", b"RIGHT")
    payload, count = transaction([take, *[move] * limit, evalsha("settle", keys, batch.encode())])

    def parse(answers: list[Any]) -> Taken:
        results = executed(answers)
        moved = [request for request in results[1:-1] if request is not None]
        return _taken(results[0], moved[: max(0, len(results[0]) - 4)])  # settle has put back what is more

    return Call(payload, count, parse)


def _taken(result: list[Any], requests: Any) -> Taken:
    outcome, now = result[0].decode(), result[1]
    if outcome in ("idle", "wait"):
        return Taken(outcome, now, left=result[3] / 1e6 if outcome == "wait" else 0.0, dropped=result[2])
    if outcome != "batch":
        return Taken(outcome, now)
    heads = tuple(result[4:])
    if isinstance(requests, Exception) or len(requests) != len(heads):
        requests = None
    return Taken(outcome, now, 0.0, result[2].decode(), result[3], heads, requests)


def fetch_batch(keys: Keys, batch: str) -> Call[list[bytes]]:
    """Read the requests of a batch that this worker has taken."""
    return Call(pack(b"LRANGE", keys.batch(batch), b"0", b"-1"), 1, first)


@dataclass(frozen=True, slots=True)
class Answers:
    """The replies to a batch: by asyncio client, and by own key with the milliseconds for which each is kept."""

    streams: dict[str, list[bytes]]
    own: list[tuple[bytes, int, bytes]]
    completed: int
    failed: int = 0
    reply_ttl_ms: int = REPLY_TTL_MS

    def entries(self) -> list[tuple[str, bytes]]:
        """Return the stream entries to append: each client's replies joined, at most 1 MiB an entry; a larger one goes alone."""
        found = []
        for client, replies in self.streams.items():
            part: list[bytes] = []
            size = 0
            for reply in replies:
                if part and size + len(reply) > MAX_XADD_BYTES:
                    found.append((client, b"".join(part)))
                    part, size = [], 0
                part.append(reply)
                size += len(reply)
            found.append((client, b"".join(part)))
        return found


def _publish(keys: Keys, answers: Answers) -> list[bytes]:
    """Return the commands that append the replies."""
    commands: list[bytes] = []
    ttl = number(answers.reply_ttl_ms)
    for client, replies in answers.entries():
        stream = keys.replies(client)
        commands += (pack(b"XADD", stream, b"*", b"r", replies), pack(b"PEXPIRE", stream, ttl))
    for id, ttl_ms, reply in answers.own:
        key = keys.reply(id)
        commands += (pack(b"RPUSH", key, reply), pack(b"PEXPIRE", key, number(ttl_ms)))
        commands.append(
            pack(b"PEXPIRE", keys.job(id), number(ttl_ms))
        )  # a job is known as long as its result
    return commands


def _forget_batch(keys: Keys, batch: str) -> list[bytes]:
    return [
        pack(b"UNLINK", keys.batch(batch), keys.batch_heads(batch)),
        pack(b"ZREM", keys.leases, batch.encode()),
    ]


def finish(keys: Keys, batch: str, answers: Answers) -> Call[bool]:
    """Publish the replies and forget the batch, in one MULTI; False where its lease was lost before."""
    counts = [pack(b"HINCRBY", keys.counters, b"completed", number(answers.completed))]
    if answers.failed:
        counts.append(pack(b"HINCRBY", keys.counters, b"failed", number(answers.failed)))
    # the replies first and the lease last: a torn append-only file then leaves a batch that is run again, never one without an answer
    payload, count = transaction([*_publish(keys, answers), *counts, *_forget_batch(keys, batch)])
    return Call(payload, count, lambda replies: bool(executed(replies)[-1]))


def finish_at_maxmemory(keys: Keys, batch: str, answers: Answers) -> Call[bool]:
    """Do the same in one script, which Redis runs at maxmemory because its first write frees memory."""
    args = [
        batch.encode(),
        number(answers.completed),
        number(answers.failed),
        number(answers.reply_ttl_ms),
    ]
    entries = answers.entries()
    args.append(number(len(entries)))
    for client, replies in entries:
        args += (client.encode(), replies)
    for id, ttl_ms, reply in answers.own:
        args += (id.hex().encode(), number(ttl_ms), reply)
    return Call(evalsha("finish", keys, *args), 1, lambda replies: bool(first(replies)))


def forget(keys: Keys, ids: Iterable[bytes]) -> Call[int]:
    """Take requests out of ``solo`` that were answered after all."""
    return Call(evalsha("forget", keys, *[i.hex().encode() for i in ids]), 1, first)


def wait_wake(keys: Keys, seconds: float) -> Call[bool]:
    """Wait for a token; True where one came. The seconds are no deadline: an idle Redis looks at them ten times a second."""
    return Call(pack(b"BLPOP", keys.wake, b"%g" % seconds), 1, lambda answers: first(answers) is not None)


def nudge(keys: Keys) -> Call[int]:
    """Leave a token if anything is pending, whoever waits; the number pending."""
    return Call(evalsha("nudge", keys), 1, first)


def release(keys: Keys, batch: str) -> Call[int]:
    """Hand a batch back that was not begun; the number of its requests."""
    return Call(evalsha("release", keys, batch.encode()), 1, first)


def regroup(keys: Keys, batch: str, places: Sequence[Place | None], *, front: bool) -> Call[int]:
    """Hand a batch back to other places, now that they are known: one for each of its elements, None for one that is dropped.

    ``front``: they go to the head of these, else to the end. Requests that were recovered go back to ``solo``.
    """
    fields = [b"" if place is None else place.field() for place in places]
    end = b"front" if front else b"back"
    return Call(evalsha("release", keys, batch.encode(), end, *fields), 1, first)


class Recovered(NamedTuple):
    """What recover came to: ``none``, ``moved`` with the number of requests, or ``dead`` with the head of the one to bury."""

    outcome: str
    requests: int = 0
    head: Head | None = None


def recover(keys: Keys, batch: str, *, seen_end: str, dead_worker: str, lease_us: int) -> Call[Recovered]:
    """Put a dead worker's batch into ``solo``; ``seen_end`` is the expired lease's end, '' where the worker is known to be dead."""

    def parse(answers: list[Any]) -> Recovered:
        result = first(answers)
        outcome = result[0].decode()
        if outcome == "dead":
            return Recovered(outcome, 1, parse_head(result[1]))
        return Recovered(outcome, result[1] if len(result) > 1 else 0)

    args = (
        batch.encode(),
        seen_end.encode(),
        dead_worker.encode(),
        number(lease_us),
        number(MAX_SOLO_DEATHS),
    )
    return Call(evalsha("recover", keys, *args), 1, parse)


def bury(keys: Keys, batch: str, letters: Sequence[bytes], answers: Answers | None = None) -> Call[Any]:
    """Write dead letters, newest first; with ``answers`` also publish these and forget the batch, all in one MULTI."""
    write = [
        pack(b"LPUSH", keys.dead, *letters),
        pack(b"LTRIM", keys.dead, b"0", number(DEAD_LETTERS - 1)),
        pack(b"EXPIRE", keys.dead, number(DEAD_TTL_S)),
        pack(b"HINCRBY", keys.counters, b"dead", number(len(letters))),
    ]
    if answers is not None:
        write = [*_publish(keys, answers), *write, *_forget_batch(keys, batch)]
    payload, count = transaction(write)
    return Call(payload, count, executed)


def renew(keys: Keys, batches: Iterable[str], lease_us: int) -> Call[dict[str, str]]:
    """Lengthen leases; return the expired ones, batch -> lease end."""

    def parse(answers: list[Any]) -> dict[str, str]:
        flat = [item.decode() for item in first(answers)[1:]]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    return Call(evalsha("renew", keys, number(lease_us), *[b.encode() for b in batches]), 1, parse)


@dataclass(frozen=True, slots=True)
class Reported:
    """What report gives back: the queue's config as it holds (``was_set``: by this very report), and the other live workers' reports."""

    now: int
    was_set: bool
    config: dict[str, int]
    others: dict[str, str]


def report(keys: Keys, worker: str, text: str, config: dict[str, int] | None = None) -> Call[Reported]:
    """Say that a worker is alive ('' as text: that it ends); with the first report, what it wants the queue's config to be."""
    wanted = [str(item).encode() for pair in (config or {}).items() for item in pair]

    def parse(answers: list[Any]) -> Reported:
        now, outcome, *rest = first(answers)
        end = rest.index(b"")
        config = {name.decode(): int(value) for name, value in zip(rest[:end:2], rest[1:end:2], strict=True)}
        reports = {
            name.decode(): [*value.decode("utf-8", "replace").split(";", 2), "", ""][2]
            for name, value in zip(rest[end + 1 :: 2], rest[end + 2 :: 2], strict=True)
        }
        return Reported(now, outcome == b"set", config, reports)

    return Call(evalsha("report", keys, worker.encode(), text.encode(), *wanted), 1, parse)
