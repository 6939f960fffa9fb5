"""wake, want and nudge as a small pure model.

Workers are as ``batchq_workers/loop.py`` plays them, Redis as take.lua, admit.lua and nudge.lua do. Time is abstract: ``ripe`` says that
the oldest pending request has waited for ``max_delay``. Everything that may happen next may happen now, in any order; only the poll, with
which an idle worker looks by itself once a second, is told apart: nothing should ever need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

MOST = 2
"""max_batch_size"""


class Worker(NamedTuple):
    """One worker.

    ``at``: ``sending`` (BLPOP and the take behind it are on their way), ``blocked``, ``taking`` (the BLPOP has ended, the take runs next),
    ``retaking`` (the take has to come again in its native form), ``busy``, ``prefetching`` (busy, and the same), ``leaving`` (it was told
    to stop, and says so next), ``vanished`` (dead, and Redis does not know it yet), ``gone``.
    """

    at: str = "sending"
    armed: bool = False
    """Whether it waits for a batch to be due."""
    holds: int = 0
    """How many requests it has taken."""
    stopping: bool = False


@dataclass(frozen=True)
class State:
    workers: tuple[Worker, ...]
    pending: int = 0
    ripe: bool = False
    token: bool = False
    want: bool = False
    """Whether ``want`` is set, to MOST."""
    pushed: int = 0
    deaths: int = 0

    @property
    def full(self) -> bool:
        return self.pending >= MOST

    @property
    def due(self) -> bool:
        return self.full or (self.ripe and self.pending > 0)


class Step(NamedTuple):
    name: str
    after: State
    kind: str = "system"
    """``system``: it will happen by itself, soon. ``poll``. ``late``: by itself, after a delay. ``outside``: it may never happen."""


def set_worker(state: State, index: int, worker: Worker) -> State:
    workers = list(state.workers)
    workers[index] = worker
    return replace(state, workers=tuple(workers))


def tidy(state: State) -> State:
    """States that differ in the order of the workers are one; nothing pending is never ripe."""
    if not state.pending:
        state = replace(state, ripe=False)
    return replace(state, workers=tuple(sorted(state.workers)))


def leave_token(state: State) -> Iterator[State]:
    """A token for any one of those that wait for it, or into ``wake``; Redis has them queue, but any of them will do."""
    blocked = [index for index, worker in enumerate(state.workers) if worker.at in ("blocked", "vanished")]
    if state.token or not blocked:
        yield replace(state, token=True)
    for index in blocked if not state.token else ():
        worker = state.workers[index]
        yield set_worker(state, index, worker._replace(at="taking"))


# --- Redis ------------------------------------------------------------------------------------------------------------


def push(state: State) -> Iterator[State]:
    """admit.lua, of one request."""
    after = replace(state, pending=state.pending + 1, pushed=state.pushed + 1)
    if after.pending >= (MOST if after.want else 1):
        yield from leave_token(after)
    else:
        yield after


def nudge(state: State) -> Iterator[State]:
    """nudge.lua"""
    after = replace(state, want=False)
    if after.pending:
        yield from leave_token(after)
    else:
        yield after


def give_back(state: State, count: int) -> Iterator[State]:
    """release.lua, or recover.lua: what was given back has waited long enough, or runs alone."""
    after = replace(state, pending=state.pending + count, ripe=True, want=False)
    yield from leave_token(after)


def take(state: State) -> Iterator[tuple[str, int, State]]:
    """take.lua: outcome, how many were taken, and the state after it."""
    if state.pending == 0:
        yield "idle", 0, replace(state, want=False)
    elif not state.due:
        yield "wait", 0, replace(state, want=True)
    else:
        count = min(MOST, state.pending)
        after = replace(state, pending=state.pending - count, ripe=False, want=False)
        if after.pending:
            for left in leave_token(after):
                yield "batch", count, left
        else:
            yield "batch", count, after


# --- what may happen --------------------------------------------------------------------------------------------------


def took(state: State, index: int, outcome: str, count: int) -> State:
    """What a worker does with what its take came to."""
    worker = state.workers[index]
    if worker.at == "vanished":
        return state
    if worker.stopping:
        return set_worker(state, index, Worker("leaving", holds=count, stopping=True))
    if outcome == "batch":
        return set_worker(state, index, Worker("busy", holds=count))
    return set_worker(state, index, Worker("sending", armed=outcome == "wait"))


def steps(state: State, *, pushes: int, deaths: int, stops: bool, bulk: bool) -> Iterator[Step]:
    """All that may happen next."""
    for found in _steps(state, pushes, deaths, stops, bulk):
        yield found._replace(after=tidy(found.after))


def _steps(state: State, pushes: int, deaths: int, stops: bool, bulk: bool) -> Iterator[Step]:
    if state.pushed < pushes:
        for after in push(state):
            yield Step("push", after, "outside")
    if state.pending and not state.ripe:
        yield Step("max_delay passes", replace(state, ripe=True))
    if state.want:
        yield Step("want expires", replace(state, want=False), "late")
    for index, worker in enumerate(state.workers):
        who = f"worker {index} ({worker.at})"
        if worker.at == "sending":
            if state.token:
                yield Step(
                    f"{who}: gets the token",
                    set_worker(replace(state, token=False), index, worker._replace(at="taking", armed=False)),
                )
            else:
                yield Step(f"{who}: waits", set_worker(state, index, worker._replace(at="blocked")))
        if worker.at == "blocked":
            ended = set_worker(state, index, worker._replace(at="taking", armed=False))
            if worker.armed and state.ripe:
                yield Step(f"{who}: unblocks itself, the batch is due", ended)
            if worker.armed and not state.pending:
                yield Step(f"{who}: unblocks itself, for nothing", ended)
            if worker.stopping:
                yield Step(f"{who}: unblocks itself, to stop", ended)
            yield Step(f"{who}: looks by itself after a second", ended, "poll")
        if worker.at in ("taking", "retaking"):
            for outcome, count, after in take(state):
                yield Step(f"{who}: takes: {outcome}", took(after, index, outcome, count))
                if bulk and outcome == "batch" and worker.at == "taking":
                    again = set_worker(replace(state, want=False), index, worker._replace(at="retaking"))
                    for left in leave_token(again):
                        yield Step(f"{who}: takes: bulk", left)
        if worker.at == "busy":
            yield Step(
                f"{who}: answers", set_worker(state, index, Worker("sending", stopping=worker.stopping))
            )
            if state.token and state.full and worker.holds == MOST:
                for _, count, after in take(state):
                    yield Step(
                        f"{who}: prefetches", set_worker(after, index, worker._replace(holds=MOST + count))
                    )
                if bulk:
                    again = set_worker(replace(state, want=False), index, worker._replace(at="prefetching"))
                    yield Step(f"{who}: prefetches: bulk", again)
        if worker.at == "busy" and worker.holds > MOST:
            yield Step(
                f"{who}: goes on with what it has prefetched",
                set_worker(state, index, Worker("busy", holds=worker.holds - MOST)),
            )
        if worker.at == "prefetching":  # natively, and a prefetch again: a full batch and a token, or nothing
            back = worker._replace(at="busy")
            if state.token and state.full:
                for _, count, after in take(state):
                    yield Step(
                        f"{who}: prefetches", set_worker(after, index, back._replace(holds=MOST + count))
                    )
            else:
                yield Step(f"{who}: prefetches: no", set_worker(state, index, back))
        if worker.at == "leaving":
            if worker.holds:
                for after in give_back(state, worker.holds):
                    yield Step(f"{who}: releases", set_worker(after, index, worker._replace(holds=0)))
            else:
                for after in nudge(set_worker(state, index, Worker("gone"))):
                    yield Step(f"{who}: nudges and goes", after)
        if worker.at == "vanished" and not worker.holds:
            yield Step(f"{who}: Redis drops it", set_worker(state, index, Worker("gone")), "late")
        if worker.at == "vanished" and worker.holds:
            for after in give_back(set_worker(state, index, Worker("gone")), worker.holds):
                yield Step(f"{who}: its batch is recovered", after, "late")
        if stops and worker.at in ("sending", "blocked", "busy") and not worker.stopping:
            if worker.at == "busy":
                left = worker.holds - MOST if worker.holds > MOST else 0
                yield Step(
                    f"{who}: is told to stop",
                    set_worker(state, index, Worker("leaving", holds=left, stopping=True)),
                    "outside",
                )
            else:
                yield Step(
                    f"{who}: is told to stop",
                    set_worker(state, index, worker._replace(stopping=True)),
                    "outside",
                )
        if state.deaths < deaths and worker.at not in ("gone", "vanished"):
            dead = replace(state, deaths=state.deaths + 1)
            yield Step(
                f"{who}: vanishes", set_worker(dead, index, Worker("vanished", holds=worker.holds)), "outside"
            )


def attended(state: State) -> bool:
    """Whether somebody is about to take what is due, without looking by itself."""
    if any(
        worker.at in ("taking", "retaking", "leaving") or worker.stopping
        for worker in state.workers
        if worker.at != "gone"
    ):
        return True
    if state.token and any(worker.at == "sending" for worker in state.workers):
        return True
    waiters = any(worker.at in ("sending", "blocked") and worker.armed for worker in state.workers)
    return waiters and not state.full


def idle(state: State) -> bool:
    """Whether a live worker is free."""
    return any(worker.at == "blocked" for worker in state.workers)


def settles(state: State, known: set[State]) -> bool:
    """Whether all is taken once nothing comes from outside any more: what happens by itself happens, the rarest last.

    ``known`` are states that do; those on the way join them.
    """
    path = []
    while state not in known:
        if state.pending or any(worker.at not in ("blocked", "gone") for worker in state.workers):
            path.append(state)
            following = [
                step
                for step in steps(state, pushes=0, deaths=0, stops=False, bulk=False)
                if step.kind != "outside" and step.after != state
            ]
            following.sort(key=lambda step: ("system", "late", "poll").index(step.kind))
            if not following or len(path) > 200:
                return False
            state = following[0].after
        else:
            break
    known.update(path)
    return True
