"""The client's verbs: push, read replies, cancel; and what tells whether anybody works."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from batchq import wire
from batchq.commands.base import Call, call, cost_suffix, evalsha, executed, first, number, pack, transaction
from batchq.config import DEFAULT_CAPACITY, DEFAULT_CAPACITY_BYTES, WORKER_ALIVE
from batchq.errors import JobCancelledError
from batchq.keys import QUEUES, Keys

PRODUCER_TTL_S: Final = 3600


def _lane_order(place: str) -> int:
    return "hnl".index(place[0])


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
    costs = {request.cost for request in requests} != {None}
    flags = b"w" * whole + b"f" * force + b"j" * jobs + b"c" * costs
    args = [
        producer.encode(), previous.encode(), token.encode(), b"1" if fresh else b"0", flags,
        b"" if capacity is None else number(capacity), number(DEFAULT_CAPACITY), number(DEFAULT_CAPACITY_BYTES),
        number(WORKER_ALIVE * 1e6) if fail_fast else b"", number(len(order)),
    ]  # fmt: skip
    commands = []
    heads: list[bytes] = []
    for place in order:
        sizes = 0
        name = place.encode()
        for request in places[place]:
            size = len(request.request)
            sizes += size
            field = name if request.cost is None else name + cost_suffix(request.cost)
            heads.append(
                b"%d;%d;0;%b;%d;%b"
                % (request.timeout_us, size, field, request.ttl_ms, request.id.hex().encode())
            )
        args += (name, number(len(places[place])), number(sizes))
        commands.append(pack(b"RPUSH", keys.requests_of(place), *[r.request for r in places[place]]))
    commands.append(evalsha("admit", keys, *args, *heads))
    payload, answers = transaction(commands)

    def parse(answers: list[Any]) -> Pushed:
        result = executed(answers)[-1]
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

    return Call(pack(b"GETEX", keys.producer(producer), b"EX", number(PRODUCER_TTL_S)), 1, parse)


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
    read = pack(b"XREAD", b"COUNT", number(count), b"BLOCK", number(block_ms), b"STREAMS", stream, cursor)

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
    return Call(evalsha("cancel", keys, number(ttl_ms), *[i.hex().encode() for i in ids]), 1, first)


def cancel_job(keys: Keys, id: bytes) -> Call[int]:
    """Cancel a job: 1 if it was pending, 0 if it was answered before, -1 if there is none."""
    reply = wire.encode_error(id, JobCancelledError("the job was cancelled"))
    return Call(evalsha("cancel_job", keys, id.hex().encode(), reply), 1, first)


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
