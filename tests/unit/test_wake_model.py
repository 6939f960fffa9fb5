"""The wake protocol: every interleaving of a few workers and pushes, on the model in tests/wake_model.py."""

from __future__ import annotations

import pytest

from tests.wake_model import State, Worker, attended, idle, settles, steps

Seen = dict[State, tuple[State, str] | None]


def explore(workers: int, **limits: int) -> Seen:
    """Visit all states that can be reached; the values tell how each was come by."""
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
