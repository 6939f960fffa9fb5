"""From a taken batch to values for the model, and from its outcomes to replies: pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgpack

from batchq import wire
from batchq.answers import unsendable
from batchq.commands import Answers, Head, Place, Taken, parse_head
from batchq.config import DEFAULT_COST, MAX_COST
from batchq.errors import (
    BatchqError,
    DeadlineExceededError,
    EncodeError,
    ModelError,
    RequestError,
    from_wire,
)
from batchq.keys import group_name
from batchq.model import Model, Prepared
from batchq.protocols import BatchContext

NO_KEY: Final = "n"
"""The group of requests that a model has looked at and given no ``batch_key``."""
FAULTY: Final = "x"
"""The group of requests that cannot be decoded, or whose ``batch_key`` or ``cost`` the model failed to tell."""


class _Row(NamedTuple):
    """An element of a batch in Redis; without a head if take has dropped it, without a request if that is not to be run."""

    head: Head | None
    request: wire.Request | None
    recovered: bool


@dataclass(slots=True)
class Batch:
    """A batch that this child holds.

    ``requests`` are to be run, in order. ``early`` are replies that need no run (what cannot be decoded but can be told so, jobs that are
    too late). ``letters`` are dead letters: what cannot even be told. ``places`` is not empty where the batch must not be run as it is:
    then it says, for each element of the batch in Redis, where the request goes (None: nowhere).
    """

    name: str
    kind: str
    pending: int
    requests: list[wire.Request] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    early: list[tuple[bytes, str | int, bytes]] = field(default_factory=list)
    letters: list[bytes] = field(default_factory=list)
    waited: float = 0.0
    """Seconds that its oldest request had waited when it was taken."""
    places: list[Place | None] = field(default_factory=list)
    to_front: bool = False
    """Whether ``places`` are to be filled from the front: the requests stood there."""
    deadlines: list[float] = field(default_factory=list)
    """Unix seconds by which each caller wants its answer; empty where the model does not ask."""
    prepared: Prepared | None = None

    @property
    def values(self) -> list[Any]:
        """The inputs for the model."""
        return [request.value for request in self.requests]

    @property
    def context(self) -> BatchContext:
        """What the model may know of the requests."""
        return BatchContext(
            ids=tuple(request.id.hex() for request in self.requests),
            meta=tuple(request.meta for request in self.requests),
            deadlines=tuple(self.deadlines),
        )

    def again(self, start: int, end: int) -> list[Any]:
        """Decode some of the inputs once more."""
        return [wire.decode_request(data, tensors=True).value for data in self.raw[start:end]]

    @property
    def ids(self) -> list[bytes]:
        """The ids of all requests that get a reply."""
        return [request.id for request in self.requests] + [early[0] for early in self.early]

    def refuse(self, request: wire.Request, error: BatchqError) -> None:
        """Answer a request with an error, without a run."""
        self.early.append((request.id, request.reply, wire.encode_error(request.id, error)))


def dead_letter(reason: str, request: bytes, head: Head | None, attempts: int = 0) -> bytes:
    """Return a dead letter: a msgpack map that keeps the request's bytes."""
    return msgpack.packb(  # type: ignore[no-any-return]
        {
            "id": head.id.hex() if head else "",
            "reason": reason,
            "attempts": head.attempts if head else attempts,
            "lane": head.lane if head else "",
            "enqueued_us": head.enqueued if head else 0,
            "died_us": int(time.time() * 1e6),
            "request": request,
        }
    )


class Decoder:
    """Makes batches of what was taken, for one model and one budget (``max_batch_cost``, 0 for none)."""

    def __init__(self, model: Model, max_payload: int, *, budget: int = 0, padded: bool = False) -> None:
        self._model = model
        self._max_payload = max_payload
        self._budget = budget
        self._padded = padded

    def decode(self, name: str, taken: Taken, requests: Sequence[bytes]) -> Batch:
        """Decode a taken batch, each request on its own: a broken one harms no other."""
        model = self._model
        batch = Batch(name, taken.kind, taken.pending, waited=max(0.0, (taken.now - taken.oldest) / 1e6))
        # only who has to know more than the requests themselves pays for reading their heads
        look = taken.kind == "again" or self._budget or model.classifies or model.wants_context
        rows: list[_Row] = []
        for raw_head, data in zip(taken.raw_heads, requests, strict=True):
            head = parse_head(raw_head) if look else None
            request = self._request(batch, taken, raw_head, head, data) if raw_head else None
            if request is not None:
                batch.requests.append(request)
                batch.raw.append(data)
            if look:
                rows.append(_Row(head, request, raw_head.count(b";") > 6))
        if model.classifies or self._budget:
            self._sort(batch, rows)
        if model.wants_context:
            ahead = time.time() - taken.now / 1e6  # of Redis' clock
            ends = {row.head.id: (row.head.enqueued + row.head.timeout) / 1e6 for row in rows if row.head}
            batch.deadlines = [ends[request.id] + ahead for request in batch.requests]
        return batch

    def _request(
        self, batch: Batch, taken: Taken, raw_head: bytes, head: Head | None, data: bytes
    ) -> wire.Request | None:
        try:
            request = wire.decode_request(
                data, copy=not self._model.views, tensors=True, max_payload=self._max_payload
            )
        except wire.BadRequestError as error:
            if error.id is None or error.reply is None:
                batch.letters.append(dead_letter(f"undecodable: {error.message}", data, parse_head(raw_head)))
            else:
                reply = wire.encode_error(error.id, from_wire(error.code, error.message, error.id.hex()))
                batch.early.append((error.id, error.reply, reply))
            return None
        if (
            taken.kind == "again" and head is not None and head.enqueued + head.timeout <= taken.now
        ):  # take itself has looked at all others
            if head.ttl_ms:
                late = DeadlineExceededError("the job's deadline passed before a worker could run it")
                batch.refuse(request, late)
            return None
        return request

    def _sort(self, batch: Batch, rows: list[_Row]) -> None:
        """See whether the requests make one batch; ask the model for the groups and costs that callers have not given.

        What has no group yet is no batch: its requests go to their groups. Those of one group of which only the costs were not known may
        turn out to be too many for the budget: they go back in front. A request whose group or cost cannot be told goes to a group of
        its own kind, and is told so when that is taken: so nothing has to be answered while a batch is handed back.
        """
        places: list[Place | None] = []
        errors: dict[bytes, BatchqError] = {}
        for row in rows:
            place, error = self._place(row)
            places.append(place)
            if error is not None and row.request is not None:
                errors[row.request.id] = error
        if not any(row.recovered for row in rows):
            faulty = any(row.head and row.head.group == FAULTY for row in rows)
            if faulty:  # those of which it can be told now leave it, so that this comes to an end
                ungrouped = any(place and place.group != FAULTY for place in places)
            else:
                ungrouped = self._model.classifies and any(row.head and not row.head.group for row in rows)
            if ungrouped or self._is_over(rows, places):
                batch.places, batch.to_front = places, not ungrouped
                return
        for row, place in zip(rows, places, strict=True):
            request, cost = row.request, place.cost if place else None
            if request is None or cost is None or not self._budget:
                continue
            text = ""
            if not 0 <= cost <= MAX_COST:  # no client of ours sends that
                text = f"cost {cost:g}: allowed is a number from 0 to {MAX_COST:,}"
            elif cost > self._budget:
                text = f"cost {cost:g} is over the queue's max_batch_cost of {self._budget:,}: no batch can hold it"
            if text:
                errors.setdefault(request.id, RequestError(text))
        if errors:
            kept = [pair for pair in zip(batch.requests, batch.raw, strict=True) if pair[0].id not in errors]
            for request in batch.requests:
                if request.id in errors:
                    batch.refuse(request, errors[request.id])
            batch.requests, batch.raw = [request for request, _ in kept], [data for _, data in kept]

    def _is_over(self, rows: list[_Row], places: list[Place | None]) -> bool:
        """Tell whether the batch costs too much, now that more of its costs are known: what take knew of it has kept within the budget."""
        if not self._budget or not any(
            row.head and place and row.head.cost != place.cost
            for row, place in zip(rows, places, strict=True)
        ):
            return False
        costs = [place.cost if place.cost is not None else DEFAULT_COST for place in places if place]
        total = max(costs) * len(costs) if self._padded else sum(costs)
        return len(costs) > 1 and total > self._budget

    def _place(self, row: _Row) -> tuple[Place | None, BatchqError | None]:
        """Return where a request belongs; None for one that take has dropped."""
        head, request, model = row.head, row.request, self._model
        if head is None:
            return None, None
        if request is None:
            return Place(head.lane, FAULTY, None), None
        cost = head.cost if head.cost is not None else request.cost
        known = head.group not in ("", FAULTY) and (cost is not None or not model.costs)
        if known or not model.classifies:
            return Place(head.lane, head.group, cost), None
        try:
            key, cost = model.classify(request.value, request.batch_key, cost)
        except ModelError as error:
            return Place(head.lane, FAULTY, None), error
        return Place(head.lane, group_name(key) or NO_KEY, cost), None


def encode(batch: Batch, outcomes: Sequence[Any], max_payload: int) -> Answers:
    """Turn the model's outcomes into replies; an answer that cannot be sent fails its own request."""
    streams: dict[str, list[bytes]] = {}
    own: list[tuple[bytes, int, bytes]] = []
    failed = 0

    def add(request_id: bytes, address: str | int, reply: bytes) -> None:
        if isinstance(address, str):
            streams.setdefault(address, []).append(reply)
        else:
            own.append((request_id, address, reply))

    for request, answer in zip(batch.requests, outcomes, strict=True):
        if isinstance(answer, BatchqError):
            failed += 1
            reply = wire.encode_error(request.id, answer)
        else:
            try:
                reply = wire.encode_reply(request.id, answer, max_payload=max_payload)
            except BatchqError as error:
                failed += 1
                if isinstance(error, EncodeError):
                    error = unsendable(error)
                reply = wire.encode_error(request.id, error)
        add(request.id, request.reply, reply)
    for request_id, address, reply in batch.early:
        failed += 1
        add(request_id, address, reply)
    return Answers(streams, own, len(batch.requests) + len(batch.early), failed)
