"""What both clients do with a request before it leaves and when it fails; pure but for reading random bytes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from typing import Any

from batchq import wire
from batchq.commands import Pushed
from batchq.config import DAY, DEFAULT_RESULT_TTL, MAX_RESULT_TTL, WORKER_ALIVE, check_number
from batchq.errors import (
    BackendUnavailableError,
    BatchqError,
    ConfigError,
    DeadlineExceededError,
    JobNotFoundError,
    NoWorkerError,
    QueueFullError,
)

MAX_PUSH_REQUESTS = 512
MAX_PUSH_BYTES = 1024 * 1024
JOB_DEADLINE = DAY

_HEX_ID = re.compile(r"[0-9a-f]{32}")


def new_name() -> str:
    """Return a name for a client or a producer: 20 random hex digits."""
    return secrets.token_hex(wire.CLIENT_NAME_LENGTH // 2)


class Ids:
    """Request ids: 8 random bytes of this object's, then a count."""

    __slots__ = ("_count", "_prefix")

    def __init__(self) -> None:
        self._prefix = os.urandom(8)
        self._count = 0

    def next(self) -> bytes:
        """Return a new id of 16 bytes."""
        self._count += 1
        return self._prefix + self._count.to_bytes(8, "big")


def check_job_id(job_id: object) -> str:
    """Return the id if it may be a job's; raise ConfigError otherwise."""
    if not isinstance(job_id, str) or not 1 <= len(job_id) <= 256:
        raise ConfigError(
            f"id={job_id!r:.80}: allowed is a str of 1 to 256 characters, or None for a new random one"
        )
    return job_id


def job_wire_id(job_id: object) -> bytes:
    """Return the 16 bytes that stand for a job's id: 32 hex digits as they are, anything else by its BLAKE2b-128."""
    checked = check_job_id(job_id)
    if _HEX_ID.fullmatch(checked):
        return bytes.fromhex(checked)
    return hashlib.blake2b(checked.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def check_result_ttl(result_ttl: object) -> int:
    """Return a job's ``result_ttl`` in milliseconds."""
    return int(check_number("result_ttl", result_ttl, 1, MAX_RESULT_TTL, DEFAULT_RESULT_TTL, " s") * 1000)


def refused(queue: str, pushed: Pushed, request_id: bytes, asked: int = 1) -> BatchqError:
    """Return the error for a request that push did not admit."""
    if pushed.outcome == "no_worker":
        return NoWorkerError(
            f"no worker of queue {queue!r} has reported for {WORKER_ALIVE:g} s", request_id=request_id.hex()
        )
    drain = f"it drains {pushed.drain_rate:,.0f} requests/s" if pushed.drain_rate > 0 else "nothing drains it"
    # 60 s where nothing drains: the error bounds it
    retry_after = pushed.pending / pushed.drain_rate if pushed.drain_rate > 0 else 60.0
    what = "" if asked == 1 else f", too many for {asked:,} more at once"
    return QueueFullError(
        f"queue {queue!r} is full: {pushed.pending:,} requests are pending{what}; {drain}",
        request_id=request_id.hex(),
        retry_after=retry_after,
    )


def out_of_memory(queue: str, request_id: bytes) -> QueueFullError:
    """Return the error for a push that Redis refused at maxmemory."""
    return QueueFullError(
        f"queue {queue!r} cannot take more: Redis is at maxmemory",
        request_id=request_id.hex(),
        retry_after=5.0,
    )


def too_late(queue: str, timeout: float, request_id: bytes, hint: str, down: str) -> BatchqError:
    """Return the error for a request whose time is up: ``down`` says why Redis cannot be reached, ``hint`` what may be wrong."""
    if down:
        return BackendUnavailableError(
            f"{down.rstrip('.')}; gave up after {timeout:g} s", request_id=request_id.hex()
        )
    return DeadlineExceededError(
        f"no answer from queue {queue!r} within {timeout:g} s{'; ' + hint if hint else ''}",
        request_id=request_id.hex(),
    )


log = logging.getLogger("batchq.client")


def no_worker_hint(queue: str, others: dict[str, int]) -> str:
    """Return what to tell about a queue without a live worker; ``others`` are live queues and how many workers they have."""
    if not others:
        return f"no live worker on {queue!r}, nor on any other queue of this Redis"
    names = ", ".join(f"{name!r} ({n} worker{'s' * (n != 1)})" for name, n in sorted(others.items())[:10])
    return f"no live worker on {queue!r}; live queues: {names}"


def check_fits(count: int, capacity: int | None, place: str) -> None:
    """Raise ConfigError for more values at once than the queue can ever hold; None: not known."""
    if capacity is None:
        return
    share = max(1, capacity // 2) if place[0] == "l" else capacity
    if count > share:
        half = " (low priority may fill half of it)" if place[0] == "l" else ""
        raise ConfigError(
            f"predict_many of {count:,} values: the queue's capacity is {capacity:,}{half}; use map() for more"
        )


def no_job(job_id: str, request_id: bytes) -> JobNotFoundError:
    """Return the error for a job that Redis does not know."""
    return JobNotFoundError(
        f"job {job_id!r}: there is none, or its result has expired", request_id=request_id.hex()
    )


def no_result_yet(job_id: str, timeout: float, request_id: bytes) -> DeadlineExceededError:
    """Return the error for a job that is not done in time."""
    return DeadlineExceededError(
        f"job {job_id!r} has no result yet after {timeout:g} s", request_id=request_id.hex()
    )


def read_result(request_id: bytes, data: bytes, copy: bool) -> wire.Reply:
    """Return the reply that a job's key holds; one that cannot be read is an error of its own."""
    replies = wire.decode_replies(data, copy=copy)
    return replies[0] if replies else wire.Reply(request_id, "execution", "the result cannot be decoded")


def outcome(reply: wire.Reply, return_exceptions: bool = False) -> Any:
    """Return a reply's answer, or raise (or return) its error."""
    if not reply.code:
        return reply.value
    if return_exceptions:
        return reply.error()
    raise reply.error()
