"""``batchq dead``: look at a queue's dead letters, run them again, or drop them.

A letter is found by its request's id or by its position, but acted on by its bytes: whatever happens to the list meanwhile, a letter that
was not meant is never touched. One letter at a time is held in memory, for each may be as large as a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click
import msgpack

from batchq import commands, wire
from batchq.commands import Call, Outgoing
from batchq.config import DEFAULT_RESULT_TTL, LANES, check_timeout, resolve_queue, resolve_url
from batchq.errors import BackendUnavailableError, BatchqError
from batchq.keys import Keys, place_of
from batchq.requests import JOB_DEADLINE, check_result_ttl, out_of_memory, refused
from batchq.store import AsyncLink, Endpoint, OutOfMemory
from batchq_cli.call import to_json
from batchq_cli.common import (
    DURATION,
    EXIT_NO_ANSWER,
    EXIT_OK,
    EXIT_REDIS_AUTH,
    EXIT_REDIS_DOWN,
    EXIT_REQUEST_FAILED,
    EXIT_USAGE,
    CliError,
    Described,
    json_option,
    one_line,
    queue_option,
    redis_option,
    show_duration,
    table,
)
from batchq_cli.redis_link import DEFAULT_WAIT

T = TypeVar("T")

PAGE: Final = 10
"""Letters to read at a time: a thousand of them at once may be more than this process, or Redis' output buffer, can hold."""

_LANE_NAMES: Final = {letter: name for name, letter in LANES.items()}
_ID: Final = re.compile(r"[0-9a-f]{32}")
_LATEST_US: Final = 2**52
"""A time beyond this is none: the bytes are broken, or a clock is."""


# --- letters ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """What there is to tell of a dead letter without its payload.

    ``position``: 1 is the oldest, so that letters that come meanwhile change none. ``id``: of its request, 32 hex digits, '' where it has
    none. ``enqueued``, ``died``: Unix times in seconds, None where they are not known. ``size``: bytes of its request. ``digest``: of all
    its bytes; with it the letter is found again.
    """

    position: int
    id: str
    reason: str
    attempts: int
    lane: str
    enqueued: float | None
    died: float | None
    size: int
    digest: bytes


def fields_of(data: bytes) -> dict[Any, Any]:
    """Return the fields of a letter; none where it is no letter at all."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=False)
    except Exception:  # noqa: BLE001 - msgpack raises many kinds for broken bytes
        return {}
    return fields if isinstance(fields, dict) else {}


def request_of(data: bytes) -> bytes:
    """Return the bytes of a letter's request; of what is no letter, all."""
    request = fields_of(data).get("request")
    return request if isinstance(request, bytes) else data


def read_letter(data: bytes, position: int) -> Letter:
    """Return what there is to tell of a letter, whatever its bytes are."""
    fields = fields_of(data)

    def text(name: str) -> str:
        value = fields.get(name)
        return value if isinstance(value, str) else ""

    def number(name: str) -> int:
        value = fields.get(name)
        return value if type(value) is int and 0 <= value < _LATEST_US else 0

    return Letter(
        position=position,
        id=text("id") if _ID.fullmatch(text("id")) else "",
        reason=text("reason") or "these bytes are no dead letter",
        attempts=number("attempts"),
        lane=_LANE_NAMES.get(text("lane"), ""),
        enqueued=number("enqueued_us") / 1e6 or None,
        died=number("died_us") / 1e6 or None,
        size=len(request_of(data)),
        digest=_digest(data),
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def names_of(letters: Sequence[Letter]) -> dict[int, str]:
    """Return how each letter is called, by its position: its id, or ``#3`` where it has none, or shares it."""
    counts = Counter(letter.id for letter in letters)
    return {
        letter.position: letter.id if letter.id and counts[letter.id] == 1 else f"#{letter.position}"
        for letter in letters
    }


def choose(letters: Sequence[Letter], refs: Sequence[str], queue: str) -> list[Letter]:
    """Return the letters that are meant, the oldest first; raise CliError for one that is not there, or not the only one.

    A ref is an id, the beginning of one that no other letter has, or a position such as ``#3``.
    """
    names = names_of(letters)
    chosen: dict[int, Letter] = {}
    for ref in refs:
        position, prefix = re.fullmatch(r"#([0-9]{1,9})", ref), ref.lower()
        if position is not None:
            found = [letter for letter in letters if letter.position == int(position[1])]
        elif re.fullmatch(r"[0-9a-f]{1,32}", prefix):
            found = [letter for letter in letters if letter.id.startswith(prefix)]
        else:
            raise CliError(f"{ref!r}: allowed are the beginning of an id, and a position: '#3'", EXIT_USAGE)
        if not found:
            raise CliError(
                f"queue {queue!r} has no dead letter {ref!r}; see batchq dead list --queue {queue}",
                EXIT_USAGE,
            )
        if len(found) > 1:
            some = ", ".join(names[letter.position] for letter in found[:5]) + ", …" * (len(found) > 5)
            raise CliError(
                f"{ref!r} means {len(found):,} dead letters: {some}; give more of the id", EXIT_USAGE
            )
        chosen[found[0].position] = found[0]
    return [chosen[position] for position in sorted(chosen)]


def new_job(data: bytes, *, lane: str, deadline: float, ttl_ms: int) -> Outgoing:
    """Make a job of a letter's request; raise wire.BadRequestError where it cannot be decoded.

    The job's id is made of the letter's bytes: a letter that is requeued twice, by two processes or by one that died in between, is one
    job. Its first id will not do: the answer that it is dead may still stand there.
    """
    request = wire.decode_request(request_of(data), copy=False)
    job_id = _digest(data)
    again = wire.encode_request(
        job_id, ttl_ms, int(deadline * 1000), request.value,
        meta=request.meta, batch_key=request.batch_key, cost=request.cost,
    )  # fmt: skip
    place = place_of(LANES.get(lane, LANES["normal"]), request.batch_key)
    return Outgoing(job_id, again, place, int(deadline * 1e6), ttl_ms, request.cost)


# --- what is said to Redis ---


class DeadLetters:
    """A queue's dead letters; each answer of Redis has limited time."""

    def __init__(self, link: AsyncLink, name: str, queue: str, seconds: float) -> None:
        self._link = link
        self._name = name
        self._keys = Keys(queue)
        self._seconds = seconds
        self._removed: list[int] = []

    async def _carry(self, call: Call[T]) -> T:
        return await _in_time(self._link.call(call), self._seconds, self._name)

    async def _read(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield positions and letters, the oldest first: letters that come meanwhile do not move those that are still to be read."""
        seen = 0
        while True:
            page = await self._carry(commands.dead_letters(self._keys, -seen - PAGE, -seen - 1))
            for data in reversed(page):
                seen += 1
                yield seen, data
            if len(page) < PAGE:
                return

    async def overview(self) -> list[Letter]:
        """Return what there is to tell of all of them, the oldest first."""
        return [read_letter(data, position) async for position, data in self._read()]

    async def fetch(self, letter: Letter) -> bytes | None:
        """Return a letter's bytes, None where it is gone."""
        at = -letter.position + sum(position < letter.position for position in self._removed)
        for data in await self._carry(commands.dead_letters(self._keys, at, at)):
            if _digest(data) == letter.digest:
                return data
        async for _, data in self._read():  # somebody else has removed others
            if _digest(data) == letter.digest:
                return data
        return None

    async def push(self, job: Outgoing) -> None:
        """Put a job into the queue, in its turn; raise QueueFullError where there is no room."""
        queue = self._keys.queue
        try:
            # without a producer's chain: a job that is pushed twice runs once anyway
            pushed = await self._carry(
                commands.push(self._keys, [job], producer="", previous="", token="", fresh=True, jobs=True)
            )
        except OutOfMemory:
            raise out_of_memory(queue, job.id) from None
        if not sum((pushed.admitted or {}).values()):
            raise refused(queue, pushed, job.id)

    async def drop(self, letter: Letter, data: bytes) -> bool:
        """Remove a letter; False where somebody else was faster."""
        if not await self._carry(commands.drop_letters(self._keys, [data])):
            return False
        self._removed.append(letter.position)
        return True


async def _in_time(work: Awaitable[T], seconds: float, name: str) -> T:
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise BackendUnavailableError(f"Redis at {name} has not answered within {seconds:g} s") from None


def converse(url: str, queue: str, timeout: float, work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    """Open a connection, let ``work`` use it, close it; return what ``work`` returned."""
    endpoint = Endpoint(resolve_url(url))
    name = resolve_queue(queue)
    seconds = check_timeout(timeout, DEFAULT_WAIT)

    async def talk() -> T:
        link = await _in_time(endpoint.async_link(), seconds, endpoint.name)
        try:
            return await work(DeadLetters(link, endpoint.name, name, seconds))
        finally:
            await link.close()

    return asyncio.run(talk())


# --- the commands ---


class DeadGroup(Described, click.Group):
    """The group, described as the other commands are."""


_CODES: Final = (EXIT_OK, EXIT_USAGE, EXIT_REDIS_AUTH, EXIT_REDIS_DOWN)
_refs_argument: Final = click.argument("refs", metavar="[ID]...", nargs=-1)
_timeout_option: Final = click.option(
    "--timeout",
    type=DURATION,
    default=show_duration(DEFAULT_WAIT),
    show_default=True,
    help="How long each answer of Redis may take.",
)


@click.group(
    cls=DeadGroup,
    invoke_without_command=True,
    examples=[
        "batchq dead list --queue sentiment",
        "batchq dead show 3f2a --payload",
        "batchq dead requeue 3f2a 91c0",
        "batchq dead drop '#3'",
    ],
    exit_codes=(*_CODES, EXIT_NO_ANSWER, EXIT_REQUEST_FAILED),
)
@click.pass_context
def dead(ctx: click.Context) -> None:
    """Look at dead letters, run them again, or drop them.

    A request becomes a dead letter when it has killed two workers while it ran alone, or when its bytes cannot be read; its caller has got
    its error by then. The newest 1,000 are kept, until 7 days have passed without a new one.

    A letter is named by its request's id, or by the beginning of it where no other letter has the same; one without an id, or with one
    that others have too, by its position: '#3' (quoted, for a shell takes # as a comment) is the third oldest.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@dead.command(
    name="list",
    cls=Described,
    shown={
        "ID": "of the request, as in the logs; or the letter's position",
        "ATTEMPTS": "how many workers died while they ran it alone",
        "AGE": "since it became a dead letter",
        "SIZE": "of the request, in bytes",
    },
    examples=["batchq dead list", "batchq dead list --json | jq -r '.[] | select(.attempts > 1) | .id'"],
    exit_codes=_CODES,
)
@redis_option
@queue_option
@_timeout_option
@json_option
def list_letters(redis_url: str, queue: str, timeout: float, as_json: bool) -> None:
    """List a queue's dead letters, the newest first, without their payloads."""
    letters = converse(redis_url, queue, timeout, DeadLetters.overview)[::-1]
    if as_json:
        click.echo(json.dumps([_as_dict(letter) for letter in letters], indent=2))
    elif not letters:
        click.echo(f"queue {queue!r} has no dead letters", err=True)
    else:
        names, now = names_of(letters), time.time()
        rows = [
            (
                names[letter.position],
                f"{letter.attempts:,}",
                letter.lane or "-",
                _age(letter.died, now) or "-",
                f"{letter.size:,}",
                letter.reason,
            )
            for letter in letters
        ]
        click.echo(
            "\n".join(table(("ID", "ATTEMPTS", "LANE", "AGE", "SIZE", "REASON"), rows, numbers=(1, 3, 4)))
        )


@dead.command(
    cls=Described,
    examples=[
        "batchq dead show 3f2a",
        "batchq dead show 3f2a --payload",
        "batchq dead show '#3' --payload --json | jq .value",
    ],
    exit_codes=_CODES,
)
@click.argument("ref", metavar="ID")
@click.option("--payload", "with_payload", is_flag=True, help="Show what the caller sent, too.")
@redis_option
@queue_option
@_timeout_option
@json_option
def show(ref: str, with_payload: bool, redis_url: str, queue: str, timeout: float, as_json: bool) -> None:
    """Show all of one dead letter; what the caller sent only with --payload.

    The payload is shown as `batchq call` prints answers: `value`, and `meta`, `batch_key` and `cost` where there are any. What cannot be
    decoded is shown as `hex`, byte by byte.
    """

    async def work(letters: DeadLetters) -> tuple[Letter, bytes]:
        letter = choose(await letters.overview(), [ref], queue)[0]
        data = await letters.fetch(letter)
        if data is None:
            raise CliError(f"the dead letter {ref!r} has just been removed", EXIT_USAGE)
        return letter, data

    letter, data = converse(redis_url, queue, timeout, work)
    payload = read_payload(request_of(data)) if with_payload else {}
    if as_json:
        click.echo(json.dumps(_as_dict(letter) | payload, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        for name, text in (*_lines(letter, time.time()), *_payload_lines(payload)):
            click.echo(f"{name:10}  {text}")


@dead.command(
    cls=Described,
    examples=[
        "batchq dead requeue 3f2a 91c0",
        "batchq dead requeue --all --json | jq -r '.[].job'",
    ],
    exit_codes=(*_CODES, EXIT_NO_ANSWER, EXIT_REQUEST_FAILED),
)
@_refs_argument
@click.option("--all", "all_letters", is_flag=True, help="All that are there now.")
@click.option(
    "--deadline",
    type=DURATION,
    default=show_duration(JOB_DEADLINE),
    show_default=True,
    help="Within which a job may be run, at most 1d.",
)
@click.option(
    "--result-ttl",
    type=DURATION,
    default=show_duration(DEFAULT_RESULT_TTL),
    show_default=True,
    help="How long a job's result is kept.",
)
@redis_option
@queue_option
@_timeout_option
@json_option
def requeue(
    refs: tuple[str, ...],
    all_letters: bool,
    deadline: float,
    result_ttl: float,
    redis_url: str,
    queue: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Put dead letters into the queue again, as jobs: their callers are gone.

    Prints each job's id; its result is read with `client.job(id).result()`. Value, meta, batch_key, cost and lane are those of the first
    request. The queue's capacity holds.

    A letter is removed once its job is in the queue. Where that is cut in between, the letter stays, and may be requeued once more: it is
    the same job then, and is not run again as long as the first one's deadline and result are not over. A letter that cannot be decoded
    cannot be requeued; the others are.
    """
    ttl_ms = check_result_ttl(result_ttl)
    seconds = check_timeout(deadline, JOB_DEADLINE, "deadline")

    async def one(letters: DeadLetters, letter: Letter, data: bytes) -> dict[str, Any]:
        try:
            job = new_job(data, lane=letter.lane, deadline=seconds, ttl_ms=ttl_ms)
        except (wire.BadRequestError, BatchqError) as error:
            return {"job": None, "error": f"it cannot be requeued: {error}"}
        await letters.push(job)
        try:
            await letters.drop(letter, data)
        except BackendUnavailableError as error:  # its job's id must not be lost for that
            return {"job": job.id.hex(), "error": f"it is job {job.id.hex()}, but is not removed: {error}"}
        return {"job": job.id.hex(), "error": None}

    def line(name: str, row: dict[str, Any]) -> str:
        return f"{name} is job {row['job']}"

    if not _act(refs, all_letters, redis_url, queue, timeout, as_json, one, line):
        click.get_current_context().exit(EXIT_REQUEST_FAILED)


@dead.command(
    cls=Described,
    examples=["batchq dead drop 3f2a '#3'", "batchq dead drop --all"],
    exit_codes=_CODES,
)
@_refs_argument
@click.option("--all", "all_letters", is_flag=True, help="All that are there now.")
@redis_option
@queue_option
@_timeout_option
@json_option
def drop(
    refs: tuple[str, ...], all_letters: bool, redis_url: str, queue: str, timeout: float, as_json: bool
) -> None:
    """Remove dead letters for good. With --all, those that come meanwhile stay."""

    async def one(letters: DeadLetters, letter: Letter, data: bytes) -> dict[str, Any]:
        return {"dropped": await letters.drop(letter, data), "error": None}

    def line(name: str, row: dict[str, Any]) -> str:
        return f"{name} is dropped" if row["dropped"] else f"{name} was gone"

    _act(refs, all_letters, redis_url, queue, timeout, as_json, one, line)


def _act(
    refs: tuple[str, ...],
    all_letters: bool,
    url: str,
    queue: str,
    timeout: float,
    as_json: bool,
    one: Callable[[DeadLetters, Letter, bytes], Awaitable[dict[str, Any]]],
    line: Callable[[str, dict[str, Any]], str],
) -> bool:
    """Do something to each letter that is meant, the oldest first, and tell of each once it is done; False if one failed."""
    if bool(refs) == all_letters:
        raise click.UsageError("either IDs or --all is needed")
    rows: list[dict[str, Any]] = []

    def tell(name: str, letter: Letter, row: dict[str, Any]) -> None:
        rows.append({"id": letter.id, "position": letter.position} | row)
        if row["error"]:
            click.echo("error: " + one_line(f"dead letter {name}: {row['error']}"), err=True)
        elif not as_json:
            click.echo(line(name, row))

    async def work(letters: DeadLetters) -> None:
        known = await letters.overview()
        names = names_of(known)
        for letter in known if all_letters else choose(known, refs, queue):
            data = await letters.fetch(letter)
            if data is None:
                if not as_json:
                    click.echo(f"{names[letter.position]} is gone: somebody else has seen to it", err=True)
                continue
            tell(names[letter.position], letter, await one(letters, letter, data))

    with contextlib.ExitStack() as stack:
        if as_json:  # what was done was done, also where the next one fails
            stack.callback(lambda: click.echo(json.dumps(rows, indent=2)))
        converse(url, queue, timeout, work)
    return not any(row["error"] for row in rows)


# --- what is printed ---


def read_payload(request: bytes) -> dict[str, Any]:
    """Return what a caller sent, as JSON can hold it; ``hex`` where it cannot be decoded."""
    try:
        fields = wire.decode_request(request, copy=False)
        value = {"value": to_json(fields.value)}
        more = {
            "meta": to_json(fields.meta),
            "batch_key": to_json(fields.batch_key),
            "cost": to_json(fields.cost),
        }
        json.dumps(value | more, allow_nan=False)
    except (wire.BadRequestError, RecursionError, ValueError):
        return {"hex": request.hex()}
    return value | {name: item for name, item in more.items() if item is not None}


def _payload_lines(payload: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, item in payload.items():
        yield name, item if name == "hex" else json.dumps(item, ensure_ascii=False, allow_nan=False)


def _as_dict(letter: Letter) -> dict[str, Any]:
    fields = dataclasses.asdict(letter)
    del fields["digest"]
    return fields


def _lines(letter: Letter, now: float) -> Iterator[tuple[str, str]]:
    yield "id", letter.id or "-"
    yield "position", f"#{letter.position}"
    yield "reason", one_line(letter.reason)
    yield "attempts", f"{letter.attempts:,}"
    yield "lane", letter.lane or "-"
    yield "enqueued", _when(letter.enqueued, now)
    yield "died", _when(letter.died, now)
    yield "size", f"{letter.size:,} bytes"


def _when(stamp: float | None, now: float) -> str:
    if stamp is None:
        return "-"
    moment = datetime.datetime.fromtimestamp(stamp, datetime.timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}, {_age(stamp, now)} ago"


def _age(stamp: float | None, now: float) -> str:
    return "" if stamp is None else show_duration(max(0.0, now - stamp))
