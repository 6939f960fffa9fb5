"""Every Redis key of a queue: name, type, who writes it, when it expires.

All keys of a queue share the hash tag ``{<queue>}``, so that each script and each MULTI touches one slot of a Redis Cluster. Scripts get
``Keys.prefix`` as KEYS[1] and append the names below.

==========================  ======  =========================  ==========================================================
key                         type    written by                 what it holds; when it goes
==========================  ======  =========================  ==========================================================
requests, requests:high,    list    push, release, take        pending requests, msgpack, oldest first; 7 days idle
requests:low
heads, heads:high,          list    push, release, take        one head a request, same order; 7 days idle
heads:low
requests@<group>, … and     list    push, release, take        the same for one ``batch_key``; <group>: see ``group_name``
heads@<group>, …
groups:high, groups,        zset    push, release, take        group -> enqueue time of its first request in that lane
groups:low
full                        zset    push, release, take        groups that may fill a batch, by highest lane, then oldest
costs                       hash    push, release, take        group -> by how much its requests cost more than 1 each
solo, heads:solo            list    recover, take              requests whose worker died, to be run alone; 7 days idle
due, due:aside, due:home    list …  take                       exist only inside take's MULTI
wake                        list    push, take, nudge …        at most one token: "something is worth a take"
want                        string  take                       how many pending requests are worth a token; PX
batch:<b>, batch:<b>:heads  list    take; finish deletes       a batch in flight
leases                      zset    take, renew; finish        batch -> end of its lease, Redis' clock, microseconds
reply:<id>                  list    finish, take, cancel       a reply kept under its own key; 60 s, jobs ``result_ttl``
replies:<client>            stream  finish                     replies for an asyncio client; 60 s
producer:<x>                string  push                       token and counts of the last push; 1 h
job:<id>                    string  push                       a submitted job exists; its deadline and ``result_ttl``
cancelled                   zset    cancel                     id -> when to forget it; 24 h
config                      hash    register                   the queue's settings, see ``BatchPolicy``
workers                     hash    report                     worker -> last report; pruned after 60 s
counters                    hash    push, take, finish …       totals since the queue was made, approximate
dead                        list    bury                       dead letters, newest first, capped; 7 days
==========================  ======  =========================  ==========================================================

One key has no tag: ``batchq:queues``, a zset of queue names by last use.
"""

from __future__ import annotations

import hashlib
import re

from batchq.errors import ConfigError

QUEUES = b"batchq:queues"

_MAX_GROUP = 64
_PLAIN_GROUP = re.compile(r"[A-Za-z0-9._-]{1,63}")
_QUEUE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_queue_name(name: object) -> str:
    """Return the name if it is a queue name; raise ConfigError otherwise."""
    if not isinstance(name, str) or not _QUEUE_NAME.fullmatch(name):
        raise ConfigError(
            f"queue name {name!r}: allowed are 1 to 64 letters, digits, '.', '_' and '-' (default 'default')"
        )
    return name


def group_name(batch_key: str | int | None) -> str:
    """Return the name that the requests of one ``batch_key`` go by in Redis; '' for None.

    A short plain str is its own name behind an ``s``, an int stands behind an ``i``; anything else is named by a digest of 128 bits
    (BLAKE2b), so that a name never holds a separator and never grows.
    """
    if batch_key is None:
        return ""
    if isinstance(batch_key, int):
        name = f"i{batch_key}"
        return name if len(name) <= _MAX_GROUP else "j" + _digest(name)
    return "s" + batch_key if _PLAIN_GROUP.fullmatch(batch_key) else "h" + _digest(batch_key)


def place_of(lane: str, batch_key: str | int | None) -> str:
    """Return where a request waits: its lane's letter, behind it the group's name where it has a ``batch_key``."""
    return lane if batch_key is None else f"{lane}:{group_name(batch_key)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Keys:
    """The key names of one queue, as bytes."""

    __slots__ = ("_text", "cancelled", "config", "counters", "dead", "groups", "heads", "leases", "prefix", "queue",
                 "requests", "solo", "wake", "workers")  # fmt: skip

    def __init__(self, queue: str) -> None:
        self.queue = check_queue_name(queue)
        self._text = f"batchq:{{{queue}}}:"
        self.prefix = self._text.encode()
        lanes = {"h": b":high", "n": b"", "l": b":low"}
        self.requests = {lane: self.prefix + b"requests" + suffix for lane, suffix in lanes.items()}
        self.heads = {lane: self.prefix + b"heads" + suffix for lane, suffix in lanes.items()}
        self.groups = {lane: self.prefix + b"groups" + suffix for lane, suffix in lanes.items()}
        self.solo = self.prefix + b"solo"
        self.wake = self.prefix + b"wake"
        self.leases = self.prefix + b"leases"
        self.cancelled = self.prefix + b"cancelled"
        self.config = self.prefix + b"config"
        self.workers = self.prefix + b"workers"
        self.counters = self.prefix + b"counters"
        self.dead = self.prefix + b"dead"

    def requests_of(self, place: str) -> bytes:
        """Name the pending requests of a place: a lane's letter, or ``<lane>:<group>``."""
        lane, _, group = place.partition(":")
        return self.requests[lane] + b"@" + group.encode() if group else self.requests[lane]

    def batch(self, batch: str) -> bytes:
        """Name the requests of a batch in flight."""
        return f"{self._text}batch:{batch}".encode()

    def batch_heads(self, batch: str) -> bytes:
        """Name the heads of a batch in flight."""
        return f"{self._text}batch:{batch}:heads".encode()

    def reply(self, request_id: bytes) -> bytes:
        """Name the list that holds the reply to one request."""
        return f"{self._text}reply:{request_id.hex()}".encode()

    def replies(self, client: str) -> bytes:
        """Name the stream that holds the replies to one asyncio client."""
        return f"{self._text}replies:{client}".encode()

    def producer(self, name: str) -> bytes:
        """Name the record of a producer's last push."""
        return f"{self._text}producer:{name}".encode()

    def job(self, request_id: bytes) -> bytes:
        """Name the mark of a submitted job."""
        return f"{self._text}job:{request_id.hex()}".encode()
