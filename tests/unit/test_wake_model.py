"""The wake protocol: every interleaving of a few workers and pushes, on the model in tests/wake_model.py."""

from __future__ import annotations

import threading
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from batchq import commands
from batchq.commands import Taken, TakeOptions
from batchq.keys import Keys
from batchq.policy import Cap, RunTime
from batchq_workers.loop import Loop, Stop
from tests.wake_model import State, Worker, attended, idle, settles, steps

Seen = dict[State, tuple[State, str] | None]


@cache
def explore(workers: int, pushes: int, deaths: int, stops: bool, bulk: bool) -> Seen:
    """Visit all states that can be reached; the values tell how each was come by."""
    limits = {"pushes": pushes, "deaths": deaths, "stops": stops, "bulk": bulk}
    start = State((Worker(),) * workers)
    seen: Seen = {start: None}
    edge = [start]
    while edge:
        following = []
        for state in edge:
            for step in steps(state, **limits):
                if step.after not in seen:
                    seen[step.after] = (state, step.name)
                    following.append(step.after)
        edge = following
    return seen


def trace(seen: Seen, state: State) -> str:
    names = [str(state)]
    while (how := seen[state]) is not None:
        state, name = how
        names.append(name)
    return "\n".join(reversed(names))


CASES = [
    (1, {"pushes": 5, "deaths": 0, "stops": False, "bulk": True}),
    (2, {"pushes": 5, "deaths": 0, "stops": True, "bulk": False}),
    (2, {"pushes": 4, "deaths": 0, "stops": True, "bulk": True}),
    (3, {"pushes": 4, "deaths": 0, "stops": False, "bulk": False}),
    (3, {"pushes": 3, "deaths": 0, "stops": True, "bulk": False}),
]
MORTAL = [
    (2, {"pushes": 4, "deaths": 1, "stops": False, "bulk": False}),
    (3, {"pushes": 3, "deaths": 2, "stops": False, "bulk": False}),
    (2, {"pushes": 3, "deaths": 1, "stops": True, "bulk": True}),
]


def name(case: tuple[int, dict]) -> str:
    return f"{case[0]} workers, " + ", ".join(f"{key} {value}" for key, value in case[1].items())


def lives(worker: Worker) -> bool:
    return worker.at not in ("gone", "vanished", "leaving") and not worker.stopping


@pytest.mark.parametrize("case", CASES, ids=name)
def test_while_nobody_dies_a_due_batch_never_waits_for_a_poll_while_a_worker_is_idle(case):
    workers, limits = case
    seen = explore(workers, **limits)
    assert len(seen) > 300
    for state in seen:
        if state.due and idle(state):
            assert attended(state), trace(seen, state)


@pytest.mark.parametrize("case", CASES + MORTAL, ids=name)
def test_whatever_happens_all_that_is_pending_is_taken_by_a_live_worker(case):
    workers, limits = case
    seen = explore(workers, **limits)
    known: set[State] = set()
    for state in seen:
        if any(lives(worker) for worker in state.workers):
            assert settles(state, known), trace(seen, state)


# --- the same rules in the worker's loop, where the model takes them for granted --------------------------------------


@pytest.fixture
def loop() -> Any:
    """A worker's loop without its connections."""
    loop = Loop.__new__(Loop)
    loop._stop, loop._main_id, loop._due_at = Stop(), 7, None
    loop._keys, loop._run_time, loop._cap = Keys("q"), RunTime(), Cap()
    loop._options = TakeOptions(worker="w", max_batch_size=2, max_delay_us=1000, lease_us=1000)
    loop._model = SimpleNamespace(classifies=False)
    loop._regroup_time = RunTime()
    loop._regrouped, loop._native_size = 0, 2
    loop._issued, loop._free_name, loop._in_doubt = 0, "w.1.1", None
    loop._solo_first, loop._native = True, False
    return loop


def test_a_worker_ends_its_wait_again_where_redis_got_that_before_the_wait_itself(loop):
    """Two connections have no order between them: CLIENT UNBLOCK may overtake BLPOP, and then ends nothing."""
    unblocks: list[int] = []
    looks = 0

    def unblock(call: commands.Call[Any]) -> int:
        assert b"UNBLOCK" in call.payload
        unblocks.append(len(unblocks))
        return 0 if len(unblocks) == 1 else 1  # 0: that connection was not blocked

    def wait(seconds: float, *others: int) -> bool:
        nonlocal looks
        looks += 1
        assert looks < 1000, "the worker waits until its BLPOP ends by itself"
        return len(unblocks) > 1

    loop._due_at = 0.0  # the batch is due
    loop._await_token(SimpleNamespace(wait=wait, close=lambda: None), SimpleNamespace(call=unblock))
    assert len(unblocks) == 2


def test_a_prefetch_of_large_payloads_stays_a_prefetch_when_it_takes_again(loop):
    takes: list[bytes] = []

    def call(verb: commands.Call[Any]) -> Taken:
        takes.append(verb.payload)
        return Taken("bulk", 0) if len(takes) == 1 else Taken("no", 0)

    loop._side_link = lambda: SimpleNamespace(call=call)
    over = threading.Event()
    over.set()
    assert loop._prefetch(over) is None
    light, native = (loop._take("w.1.1", form, prefetch=True).payload for form in ("light", "native"))
    assert takes == [light, native]
