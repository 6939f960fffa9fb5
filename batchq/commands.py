"""Every verb that batchq says to Redis: which bytes to send, and what the answers mean. Pure; ``store`` carries them.

A ``Call`` is one or more commands, ready to send, with the number of answers to read and a function from the list of answers to the
verb's result. An answer that is an error is in the list as the exception that redis-py makes of it; a parser raises it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Generic, NamedTuple, TypeVar

from batchq import wire
from batchq.config import DEFAULT_CAPACITY, DEFAULT_CAPACITY_BYTES, REPLY_TTL_MS, WORKER_ALIVE
from batchq.errors import DeadlineExceededError, JobCancelledError
from batchq.keys import QUEUES, Keys

T = TypeVar("T")

MAX_XADD_BYTES: Final = 1024 * 1024
DEAD_LETTERS: Final = 1000
DEAD_TTL_S: Final = 7 * 86_400
MAX_SOLO_DEATHS: Final = 2
PRODUCER_TTL_S: Final = 3600


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


def _number(value: float) -> bytes:
    return b"%d" % value


def _cost(cost: float) -> bytes:
    return b"@%d" % cost if cost == int(cost) else b"@" + repr(float(cost)).encode()


def _lane_order(place: str) -> int:
    return "hnl".index(place[0])


def _evalsha(name: str, keys: Keys, *args: bytes) -> bytes:
    return pack(b"EVALSHA", script(name).sha, b"1", keys.prefix, *args)


def first(answers: list[Any]) -> Any:
    """Return the first answer, or raise it."""
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _transaction(commands: Sequence[bytes]) -> tuple[bytes, int]:
    """Wrap commands in MULTI and EXEC; the second value is the number of answers."""
    return b"".join((_MULTI, *commands, _EXEC)), len(commands) + 2


def _executed(answers: list[Any]) -> list[Any]:
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


# --- the client's verbs -----------------------------------------------------------------------------------------------------------------


class Outgoing(NamedTuple):
    """A request that is ready to be pushed; ``place`` is a lane's letter, or ``<lane>:<group>``."""

    id: bytes
    request: bytes
    place: str
    timeout_us: int
    ttl_ms: int = 0
    """Above 0 for a job: how long its result is kept."""
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Pushed:
    """What push came to.

    ``outcome``: ``ok``; ``dup``: it ran before; ``gap``: pushes before it are lost, ``stored`` is the last that Redis knows, '' for none;
    ``no_worker``. ``admitted``: for each place of the push, how many of its requests are in the queue; the others are the last ones.
    """

    outcome: str
    now: int = 0
    admitted: dict[str, int] | None = None
    pending: int = 0
    drain_rate: float = 0.0
    stored: str = ""


def push(
    keys: Keys,
    requests: Sequence[Outgoing],
    *,
    producer: str,
    previous: str,
    token: str,
    fresh: bool,
    whole: bool = False,
    force: bool = False,
    jobs: bool = False,
    capacity: int | None = None,
    fail_fast: bool = False,
) -> Call[Pushed]:
    """Append requests to the queue, as many as fit, exactly once: see the chain of tokens in docs/protocol.md."""
    places: dict[str, list[Outgoing]] = {}
    for request in requests:
        places.setdefault(request.place, []).append(request)
    order = sorted(places, key=_lane_order)
    costs = any([request.cost is not None for request in requests])
    flags = b"w" * whole + b"f" * force + b"j" * jobs + b"c" * costs
    args = [
        producer.encode(), previous.encode(), token.encode(), b"1" if fresh else b"0", flags,
        b"" if capacity is None else _number(capacity), _number(DEFAULT_CAPACITY), _number(DEFAULT_CAPACITY_BYTES),
        _number(WORKER_ALIVE * 1e6) if fail_fast else b"", _number(len(order)),
    ]  # fmt: skip
    commands = []
    heads: list[bytes] = []
    for place in order:
        sizes = 0
        name = place.encode()
        for request in places[place]:
            size = len(request.request)
            sizes += size
            field = name if request.cost is None else name + _cost(request.cost)
            heads.append(
                b"%d;%d;0;%b;%d;%b"
                % (request.timeout_us, size, field, request.ttl_ms, request.id.hex().encode())
            )
        args += (name, _number(len(places[place])), _number(sizes))
        commands.append(pack(b"RPUSH", keys.requests_of(place), *[r.request for r in places[place]]))
    commands.append(_evalsha("admit", keys, *args, *heads))
    payload, answers = _transaction(commands)

    def parse(answers: list[Any]) -> Pushed:
        result = _executed(answers)[-1]
        outcome, now = result[0].decode(), result[1]
        if outcome == "ok":
            return Pushed(
                outcome, now, dict(zip(order, result[2:-2], strict=True)), result[-2], float(result[-1])
            )
        if outcome == "dup":
            return Pushed(outcome, now, dict(zip(order, result[2:], strict=True)))
        if outcome == "gap":
            return Pushed(outcome, now, stored=result[2].decode())
        return Pushed(outcome, now)

    return Call(payload, answers, parse)


def last_push(keys: Keys, producer: str) -> Call[str]:
    """Read the token of a producer's last push, '' where Redis knows none.

    The record is kept for another hour: its requests may be outstanding for longer, and would be taken for lost without it.
    """

    def parse(answers: list[Any]) -> str:
        record = first(answers)
        return record.decode().partition(" ")[0] if record else ""

    return Call(pack(b"GETEX", keys.producer(producer), b"EX", _number(PRODUCER_TTL_S)), 1, parse)


class Health(NamedTuple):
    """How a producer's chain and its queue's workers stand; ``silent`` is the time in seconds since a worker last reported."""

    stored: str
    silent: float


def health(keys: Keys, producer: str) -> Call[Health]:
    """Read a producer's last push, and when a worker last reported."""
    record = last_push(keys, producer)

    def parse(answers: list[Any]) -> Health:
        stored = record.parse(answers[:1])
        reported, (seconds, micros) = first(answers[1:2]), first(answers[2:])
        return Health(stored, int(seconds) + int(micros) / 1e6 - int(reported or 0) / 1e6)

    return Call(record.payload + pack(b"HGET", keys.counters, b"reported_us") + pack(b"TIME"), 3, parse)


def live_workers(queues: Sequence[str]) -> Call[dict[str, int]]:
    """Count the live workers of queues; those without any are left out."""
    payload = b"".join(pack(b"HVALS", Keys(queue).workers) for queue in queues) + pack(b"TIME")

    def parse(answers: list[Any]) -> dict[str, int]:
        now = int(first(answers[-1:])[0]) * 1_000_000
        counts = {}
        for queue, reports in zip(queues, answers[:-1], strict=True):
            if isinstance(reports, list):
                counts[queue] = sum(
                    now - int(report.partition(b";")[0]) < WORKER_ALIVE * 1e6 for report in reports
                )
        return {queue: n for queue, n in counts.items() if n}

    return Call(payload, len(queues) + 1, parse)


def queue_capacity(keys: Keys) -> Call[int]:
    """Read the queue's capacity as its workers have set it."""
    return Call(
        pack(b"HGET", keys.config, b"capacity"), 1, lambda answers: int(first(answers) or DEFAULT_CAPACITY)
    )


def read_replies(
    keys: Keys, client: str, cursor: bytes, *, block_ms: int, count: int
) -> Call[list[tuple[bytes, bytes]]]:
    """Trim what was read, then wait for entries behind ``cursor``: (entry id, replies one behind the other)."""
    stream = keys.replies(client)
    read = pack(b"XREAD", b"COUNT", _number(count), b"BLOCK", _number(block_ms), b"STREAMS", stream, cursor)

    def parse(answers: list[Any]) -> list[tuple[bytes, bytes]]:
        found = answers[-1]
        if isinstance(found, Exception):
            raise found
        if not found:
            return []
        return [(entry, fields[1]) for entry, fields in found[0][1] if fields]

    if cursor == b"0-0":
        return Call(read, 1, parse)
    return Call(pack(b"XTRIM", stream, b"MINID", _after(cursor)) + read, 2, parse)


def _after(entry: bytes) -> bytes:
    milliseconds, _, sequence = entry.partition(b"-")
    return b"%b-%d" % (milliseconds, int(sequence) + 1)


def wait_reply(keys: Keys, id: bytes, block: float) -> Call[bytes | None]:
    """Wait for the reply under a request's own key without taking it away; ``block`` in seconds."""
    key = keys.reply(id)
    return Call(pack(b"BLMOVE", key, key, b"LEFT", b"LEFT", b"%.3f" % max(0.001, block)), 1, first)


def read_reply(keys: Keys, id: bytes) -> Call[bytes | None]:
    """Read the reply under a request's own key if it is there; allowed at maxmemory."""
    return Call(pack(b"LINDEX", keys.reply(id), b"0"), 1, first)


def drop_reply(keys: Keys, id: bytes) -> Call[Any]:
    """Remove the reply of a call that is over."""
    return call(b"UNLINK", keys.reply(id))


def cancel(keys: Keys, ids: Iterable[bytes], ttl_ms: int) -> Call[Any]:
    """Have take drop these requests where they still wait; remembered for ``ttl_ms``."""
    return Call(_evalsha("cancel", keys, _number(ttl_ms), *[i.hex().encode() for i in ids]), 1, first)


def cancel_job(keys: Keys, id: bytes) -> Call[int]:
    """Cancel a job: 1 if it was pending, 0 if it was answered before, -1 if there is none."""
    reply = wire.encode_error(id, JobCancelledError("the job was cancelled"))
    return Call(_evalsha("cancel_job", keys, id.hex().encode(), reply), 1, first)


def job_state(keys: Keys, id: bytes) -> Call[tuple[bytes | None, bool]]:
    """Return a job's reply, if it has one, and whether it exists."""

    def parse(answers: list[Any]) -> tuple[bytes | None, bool]:
        return first(answers[:1]), bool(first(answers[1:]))

    return Call(pack(b"LINDEX", keys.reply(id), b"0") + pack(b"EXISTS", keys.job(id)), 2, parse)


def touch_queue(keys: Keys, now: float) -> Call[Any]:
    """Note that the queue is in use, so that others can be told its name."""
    return call(b"ZADD", QUEUES, b"%.3f" % now, keys.queue.encode())


def list_queues() -> Call[list[str]]:
    """Return the names of the queues, last used first."""
    return Call(
        pack(b"ZRANGE", QUEUES, b"0", b"199", b"REV"),
        1,
        lambda answers: [name.decode() for name in first(answers)],
    )


# --- the worker's verbs -----------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a request waits, and what it counts in a batch there; ``group`` '' for none, ``cost`` None for 1."""

    lane: str
    group: str
    cost: float | None

    def field(self) -> bytes:
        """Return it as it stands in a head."""
        name = f"{self.lane}:{self.group}" if self.group else self.lane
        return name.encode() + (b"" if self.cost is None else _cost(self.cost))


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
) -> Call[Taken]:
    """Move a due batch into ``batch:<b>`` and lease it.

    ``form`` is ``light``, ``force`` or ``native``, ``regroups`` '', ``first`` or ``last``: see lua/take.lua.
    """
    evalsha = _evalsha(
        "take", keys, batch.encode(), _number(options.max_batch_size), _number(limit), _number(options.max_delay_us),
        _number(options.lease_us), _number(run_us), form.encode(), b"solo" if solo_first else b"batch", b"1" if prefetch else b"",
        options.worker.encode(), *_DEADLINE_PARTS, _number(options.max_batch_cost), b"1" if options.padded else b"", regroups.encode(),
    )  # fmt: skip
    if form != "native":
        fetch = pack(b"LRANGE", keys.batch(batch), b"0", b"-1")
        return Call(evalsha + fetch, 2, lambda answers: _taken(first(answers), answers[1]))
    move = pack(b"LMOVE", keys.prefix + b"due", keys.batch(batch), b"LEFT", b"RIGHT")
    payload, count = _transaction([evalsha, *[move] * limit, _evalsha("settle", keys, batch.encode())])

    def parse(answers: list[Any]) -> Taken:
        results = _executed(answers)
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
    ttl = _number(answers.reply_ttl_ms)
    for client, replies in answers.entries():
        stream = keys.replies(client)
        commands += (pack(b"XADD", stream, b"*", b"r", replies), pack(b"PEXPIRE", stream, ttl))
    for id, ttl_ms, reply in answers.own:
        key = keys.reply(id)
        commands += (pack(b"RPUSH", key, reply), pack(b"PEXPIRE", key, _number(ttl_ms)))
        commands.append(
            pack(b"PEXPIRE", keys.job(id), _number(ttl_ms))
        )  # a job is known as long as its result
    return commands


def _forget_batch(keys: Keys, batch: str) -> list[bytes]:
    return [
        pack(b"UNLINK", keys.batch(batch), keys.batch_heads(batch)),
        pack(b"ZREM", keys.leases, batch.encode()),
    ]


def finish(keys: Keys, batch: str, answers: Answers) -> Call[bool]:
    """Publish the replies and forget the batch, in one MULTI; False where its lease was lost before."""
    counts = [pack(b"HINCRBY", keys.counters, b"completed", _number(answers.completed))]
    if answers.failed:
        counts.append(pack(b"HINCRBY", keys.counters, b"failed", _number(answers.failed)))
    # the replies first and the lease last: a torn append-only file then leaves a batch that is run again, never one without an answer
    payload, count = _transaction([*_publish(keys, answers), *counts, *_forget_batch(keys, batch)])
    return Call(payload, count, lambda replies: bool(_executed(replies)[-1]))


def finish_at_maxmemory(keys: Keys, batch: str, answers: Answers) -> Call[bool]:
    """Do the same in one script, which Redis runs at maxmemory because its first write frees memory."""
    args = [
        batch.encode(),
        _number(answers.completed),
        _number(answers.failed),
        _number(answers.reply_ttl_ms),
    ]
    entries = answers.entries()
    args.append(_number(len(entries)))
    for client, replies in entries:
        args += (client.encode(), replies)
    for id, ttl_ms, reply in answers.own:
        args += (id.hex().encode(), _number(ttl_ms), reply)
    return Call(_evalsha("finish", keys, *args), 1, lambda replies: bool(first(replies)))


def forget(keys: Keys, ids: Iterable[bytes]) -> Call[int]:
    """Take requests out of ``solo`` that were answered after all."""
    return Call(_evalsha("forget", keys, *[i.hex().encode() for i in ids]), 1, first)


def wait_wake(keys: Keys, seconds: float) -> Call[bool]:
    """Wait for a token; True where one came. The seconds are no deadline: an idle Redis looks at them ten times a second."""
    return Call(pack(b"BLPOP", keys.wake, b"%g" % seconds), 1, lambda answers: first(answers) is not None)


def nudge(keys: Keys) -> Call[int]:
    """Leave a token if anything is pending, whoever waits; the number pending."""
    return Call(_evalsha("nudge", keys), 1, first)


def release(keys: Keys, batch: str) -> Call[int]:
    """Hand a batch back that was not begun; the number of its requests."""
    return Call(_evalsha("release", keys, batch.encode()), 1, first)


def regroup(keys: Keys, batch: str, places: Sequence[Place | None], *, front: bool) -> Call[int]:
    """Hand a batch back to other places, now that they are known: one for each of its elements, None for one that is dropped.

    ``front``: they go to the head of these, else to the end. Requests that were recovered go back to ``solo``.
    """
    fields = [b"" if place is None else place.field() for place in places]
    end = b"front" if front else b"back"
    return Call(_evalsha("release", keys, batch.encode(), end, *fields), 1, first)


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
        _number(lease_us),
        _number(MAX_SOLO_DEATHS),
    )
    return Call(_evalsha("recover", keys, *args), 1, parse)


def bury(keys: Keys, batch: str, letters: Sequence[bytes], answers: Answers | None = None) -> Call[Any]:
    """Write dead letters, newest first; with ``answers`` also publish these and forget the batch, all in one MULTI."""
    write = [
        pack(b"LPUSH", keys.dead, *letters),
        pack(b"LTRIM", keys.dead, b"0", _number(DEAD_LETTERS - 1)),
        pack(b"EXPIRE", keys.dead, _number(DEAD_TTL_S)),
        pack(b"HINCRBY", keys.counters, b"dead", _number(len(letters))),
    ]
    if answers is not None:
        write = [*_publish(keys, answers), *write, *_forget_batch(keys, batch)]
    payload, count = _transaction(write)
    return Call(payload, count, _executed)


def renew(keys: Keys, batches: Iterable[str], lease_us: int) -> Call[dict[str, str]]:
    """Lengthen leases; return the expired ones, batch -> lease end."""

    def parse(answers: list[Any]) -> dict[str, str]:
        flat = [item.decode() for item in first(answers)[1:]]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    return Call(_evalsha("renew", keys, _number(lease_us), *[b.encode() for b in batches]), 1, parse)


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
            name.decode(): value.decode("utf-8", "replace").split(";", 2)[2]
            for name, value in zip(rest[end + 1 :: 2], rest[end + 2 :: 2], strict=True)
        }
        return Reported(now, outcome == b"set", config, reports)

    return Call(_evalsha("report", keys, worker.encode(), text.encode(), *wanted), 1, parse)


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


# --- set-up -----------------------------------------------------------------------------------------------------------------------------


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


# --- dead letters -----------------------------------------------------------------------------------------------------------------------


def dead_letters(keys: Keys, start: int, stop: int) -> Call[list[bytes]]:
    """Read dead letters, newest first: from ``start`` to ``stop``, both included; 0 is the newest, -1 the oldest."""
    return call(b"LRANGE", keys.dead, _number(start), _number(stop))


def drop_letters(keys: Keys, letters: Sequence[bytes]) -> Call[int]:
    """Remove exactly these dead letters, the oldest of those that are alike; the number that were still there."""
    payload = b"".join(pack(b"LREM", keys.dead, b"-1", letter) for letter in letters)
    return Call(payload, len(letters), lambda answers: sum(first([answer]) for answer in answers))
