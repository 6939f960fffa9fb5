"""What becomes of the batches of a child, or a whole machine, that has died with them."""

from __future__ import annotations

import logging

from batchq import commands, wire
from batchq.commands import Answers, Recovered
from batchq.errors import WorkerLostError
from batchq.keys import Keys
from batchq.store import Link, OutOfMemory
from batchq_workers.batches import dead_letter
from batchq_workers.board import worker_of

log = logging.getLogger("batchq.worker")


def release(link: Link, keys: Keys, batch: str) -> None:
    """Hand a batch back to the queue that nothing has happened to."""
    count = link.call(commands.release(keys, batch))
    if count:
        log.info("%d requests went back to the queue", count, extra={"batch": batch})


def recover(link: Link, keys: Keys, batch: str, *, lease: float, seen_end: str = "") -> None:
    """Have a dead worker's requests run again, one at a time.

    ``seen_end``: its lease's end as it was seen expired; '' where the worker is known to be dead. A request that has killed its workers
    alone is answered and kept as a dead letter; meanwhile its batch is leased for ``lease`` seconds.
    """
    recovered = link.call(
        commands.recover(
            keys,
            batch,
            seen_end=seen_end,
            dead_worker=worker_of(batch),
            lease_us=int(lease * 1e6),
        )
    )
    if recovered.outcome == "moved":
        log.warning("%d requests are run again, one at a time", recovered.requests, extra={"batch": batch})
    elif recovered.outcome == "dead":
        _bury(link, keys, batch, recovered)


def _bury(link: Link, keys: Keys, batch: str, recovered: Recovered) -> None:
    reason = f"killed its worker {commands.MAX_SOLO_DEATHS} times while it ran alone"
    streams: dict[str, list[bytes]] = {}
    own: list[tuple[bytes, int, bytes]] = []
    letters = []
    for data in link.call(commands.fetch_batch(keys, batch)):
        letters.append(dead_letter(reason, data, recovered.head))
        try:
            request_id, reply = wire.read_address(data)
        except wire.BadRequestError:
            continue
        error = wire.encode_error(
            request_id, WorkerLostError(f"the request {reason}; it is in the dead letters")
        )
        if isinstance(reply, str):
            streams.setdefault(reply, []).append(error)
        else:
            own.append((request_id, reply, error))
        log.error("request %s is dead: it %s", request_id.hex(), reason)
    answers = Answers(streams, own, len(letters), len(letters))
    try:
        link.call(commands.bury(keys, batch, letters, answers))
    except OutOfMemory:  # the caller's answer before the letter
        link.call(commands.finish_at_maxmemory(keys, batch, answers))
        log.error("Redis is at maxmemory: no dead letter is kept", extra={"batch": batch})
