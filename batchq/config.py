"""Frozen, validated settings: a bad value names itself, what is allowed, and the default."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Final, Literal

from batchq.errors import ConfigError
from batchq.keys import check_queue_name

Priority = Literal["high", "normal", "low"]
LANES: Final[dict[str, str]] = {"high": "h", "normal": "n", "low": "l"}

KIB: Final = 1024
MIB: Final = 1024 * 1024

DEFAULT_URL: Final = "redis://localhost:6379/0"
DEFAULT_QUEUE: Final = "default"
DEFAULT_TIMEOUT: Final = 10.0
DEFAULT_CAPACITY: Final = 4096
DEFAULT_CAPACITY_BYTES: Final = 256 * MIB
DEFAULT_MAX_PAYLOAD: Final = 64 * MIB
DEFAULT_RESULT_TTL: Final = 3600.0
DEFAULT_MAX_BATCH_SIZE: Final = 32
DEFAULT_MAX_DELAY: Final = 0.005
MAX_COST: Final = 1_000_000_000
DEFAULT_COST: Final = 1
"""What a request counts that says nothing about its cost, where batches have a budget."""
DEFAULT_LEASE: Final = 5.0
DEFAULT_BATCH_TIMEOUT: Final = 120.0
DEFAULT_DRAIN_TIMEOUT: Final = 25.0
DAY: Final = 86_400.0
MAX_RESULT_TTL: Final = 30 * DAY
REPLY_TTL_MS: Final = 60_000
WORKER_ALIVE: Final = 10.0
"""A worker that has not reported for this many seconds does not count as alive."""


def check_number(name: str, value: object, low: float, high: float, default: object, unit: str = "") -> float:
    """Return ``value`` as a float if ``low <= value <= high``; raise ConfigError otherwise."""
    # bool is an int to Python, but max_delay=True is a slip of the user's
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: allowed is {low:,g} to {high:,g}{unit} (default {default})")
    return float(value)


def check_int(name: str, value: object, low: int, high: int, default: object, unit: str = "") -> int:
    """Return ``value`` if it is an int with ``low <= value <= high``; raise ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{name}={value!r}: allowed is a whole number from {low:,} to {high:,}{unit} (default {default})"
        )
    return value


def check_timeout(timeout: object, default: float, name: str = "timeout") -> float:
    """Return a timeout in seconds; None means ``default``. Allowed: 0 < timeout <= 86,400."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= DAY:
        raise ConfigError(
            f"{name}={timeout!r}: allowed is more than 0 and at most 86,400 s, or None (default {default:g})"
        )
    return float(timeout)


def check_lane(priority: object) -> str:
    """Return the lane's letter on the wire for a priority."""
    lane = LANES.get(priority) if isinstance(priority, str) else None
    if lane is None:
        raise ConfigError(f"priority={priority!r}: allowed are 'high', 'normal' and 'low' (default 'normal')")
    return lane


def check_extras(batch_key: object, cost: object, meta: object) -> None:
    """Check what a request carries beside its value."""
    if batch_key is not None and (isinstance(batch_key, bool) or not isinstance(batch_key, (str, int))):
        raise ConfigError(f"batch_key={batch_key!r}: allowed is a str, an int or None (default None)")
    if cost is not None and (
        isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 <= cost <= MAX_COST
    ):
        raise ConfigError(
            f"cost={cost!r}: allowed is a number from 0 to {MAX_COST:,}, or None (default None)"
        )
    if meta is not None and not isinstance(meta, dict):
        raise ConfigError(f"meta={meta!r}: allowed is a dict or None (default None)")


def mask_url(url: str) -> str:
    """Return the URL with its password, wherever it stands, replaced by ``***``, for logs and reprs."""
    url = re.sub(r"(://[^:@/]*):[^/?#]*@", r"\1:***@", url)
    return re.sub(r"([?&]password)=[^&]*", r"\1=***", url, flags=re.IGNORECASE)


def resolve_url(url: str | None) -> str:
    """Return ``url``, else ``BATCHQ_REDIS_URL``, else ``redis://localhost:6379/0``."""
    found = url if url is not None else os.environ.get("BATCHQ_REDIS_URL") or DEFAULT_URL
    if not isinstance(found, str) or not found.startswith(("redis://", "rediss://", "unix://")):
        shown = mask_url(found) if isinstance(found, str) else found
        raise ConfigError(
            f"url={shown!r}: allowed are redis://, rediss:// and unix:// URLs (default {DEFAULT_URL!r}, or BATCHQ_REDIS_URL)"
        )
    return found


def resolve_queue(queue: str | None) -> str:
    """Return ``queue``, else ``BATCHQ_QUEUE``, else ``default``."""
    return check_queue_name(queue if queue is not None else os.environ.get("BATCHQ_QUEUE") or DEFAULT_QUEUE)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPolicy:
    """When a batch is due and how much waits at most: the settings that belong to a queue.

    ``max_batch_size``: requests a batch, 1 to 4,096. ``max_delay``: seconds that the oldest request waits for others, 0 to 60.
    ``capacity``: requests that may be pending, 1 to 1,000,000. ``capacity_bytes``: bytes that may be pending, 1 KiB to 1 TiB.
    ``max_batch_cost``: the sum of the requests' costs in a batch, 1 to 1,000,000,000, None for no such limit; a request without a cost
    counts 1. ``padded``: a batch costs its largest cost x its size instead, as one that is padded to its longest item does.
    """

    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    max_delay: float = DEFAULT_MAX_DELAY
    capacity: int = DEFAULT_CAPACITY
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES
    max_batch_cost: int | None = None
    padded: bool = False

    def __post_init__(self) -> None:
        check_int("max_batch_size", self.max_batch_size, 1, 4096, DEFAULT_MAX_BATCH_SIZE)
        check_number("max_delay", self.max_delay, 0, 60, DEFAULT_MAX_DELAY, " s")
        check_int("capacity", self.capacity, 1, 1_000_000, DEFAULT_CAPACITY, " requests")
        check_int("capacity_bytes", self.capacity_bytes, KIB, MIB * MIB, DEFAULT_CAPACITY_BYTES, " bytes")
        if self.max_batch_cost is not None:
            check_int("max_batch_cost", self.max_batch_cost, 1, MAX_COST, "None, no limit")
        elif self.padded:
            raise ConfigError(
                "padded=True says how max_batch_cost is counted, and there is none: give max_batch_cost as well (default False)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """The settings of a client; see ``Client``."""

    url: str = field(default=DEFAULT_URL, repr=False)
    queue: str = DEFAULT_QUEUE
    timeout: float = DEFAULT_TIMEOUT
    capacity: int | None = None
    max_payload: int = DEFAULT_MAX_PAYLOAD
    fail_fast: bool = False
    copy: bool = True

    def __post_init__(self) -> None:
        check_queue_name(self.queue)
        check_timeout(self.timeout, DEFAULT_TIMEOUT)
        if self.capacity is not None:
            check_int("capacity", self.capacity, 1, 1_000_000, "the queue's", " requests")
        check_int("max_payload", self.max_payload, KIB, 512 * MIB, DEFAULT_MAX_PAYLOAD, " bytes")
