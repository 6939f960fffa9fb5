"""From a taken batch to values for the model, and from its outcomes to replies: pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from batchq import wire
from batchq.commands import Answers, Head, Taken, parse_head
from batchq.errors import BatchqError, DeadlineExceededError, EncodeError, ModelError, from_wire


@dataclass(slots=True)
class Batch:
    """A batch that this child holds.

    ``requests`` are to be run, in order. ``early`` are replies that need no run (what cannot be decoded but can be told so, jobs that are
    too late). ``letters`` are dead letters: what cannot even be told.
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

    @property
    def values(self) -> list[Any]:
        """The inputs for the model."""
        return [request.value for request in self.requests]

    def again(self, start: int, end: int) -> list[Any]:
        """Decode some of the inputs once more."""
        return [wire.decode_request(data).value for data in self.raw[start:end]]

    @property
    def ids(self) -> list[bytes]:
        """The ids of all requests that get a reply."""
        return [request.id for request in self.requests] + [early[0] for early in self.early]


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


def decode(name: str, taken: Taken, requests: Sequence[bytes], max_payload: int) -> Batch:
    """Decode a taken batch, each request on its own: a broken one harms no other."""
    batch = Batch(name, taken.kind, taken.pending, waited=max(0.0, (taken.now - taken.oldest) / 1e6))
    for raw_head, data in zip(taken.raw_heads, requests, strict=True):
        if not raw_head:
            continue
        try:
            request = wire.decode_request(data, max_payload=max_payload)
        except wire.BadRequestError as error:
            if error.id is None or error.reply is None:
                batch.letters.append(dead_letter(f"undecodable: {error.message}", data, parse_head(raw_head)))
            else:
                reply = wire.encode_error(error.id, from_wire(error.code, error.message, error.id.hex()))
                batch.early.append((error.id, error.reply, reply))
            continue
        head = parse_head(raw_head) if taken.kind == "again" else None
        if (
            head is not None and head.enqueued + head.timeout <= taken.now
        ):  # take itself has looked at all others
            if head.ttl_ms:
                late = DeadlineExceededError("the job's deadline passed before a worker could run it")
                batch.early.append((request.id, request.reply, wire.encode_error(request.id, late)))
            continue
        batch.requests.append(request)
        batch.raw.append(data)
    return batch


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
                    text = error.message.replace("value", "answer", 1)
                    error = ModelError(f"the model's answer cannot be sent: {text}", error_type="EncodeError")
                reply = wire.encode_error(request.id, error)
        add(request.id, request.reply, reply)
    for request_id, address, reply in batch.early:
        failed += 1
        add(request_id, address, reply)
    return Answers(streams, own, len(batch.requests) + len(batch.early), failed)
