"""The server's side of the push chain: the real script does what the model in tests/chain_model.py does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchq import commands
from batchq.commands import Outgoing
from batchq.store import Endpoint
from tests.chain_model import State, admit, settle, steps
from tests.contract.queues import Queue, outgoing

LIMITS = {"calls": 5, "cuts": 4, "crashes": 2, "flushes": 1}
NAMES = ("requests", "heads")


class Server:
    """A queue on which pushes run, and which can be put back to what it was after any of them."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.requests: dict[int, Outgoing] = {}
        self.saved: list[list[Any]] = [[[], [], None]]

    def push(self, sent: Any) -> commands.Pushed:
        for number in sent.requests:
            self.requests.setdefault(number, outgoing()[0])
        before = len(self.saved)
        pushed = self.queue.push(
            [self.requests[number] for number in sent.requests],
            sent.previous,
            sent.token,
            fresh=sent.fresh,
            force=True,
        )
        if pushed.outcome == "ok":
            lists = [self.queue.raw("LRANGE", self.queue.key(name), 0, -1) for name in NAMES]
            self.saved.append([*lists, self.queue.raw("GET", self.queue.keys.producer("p"))])
        assert len(self.saved) - before == (pushed.outcome == "ok")
        return pushed

    def lose(self, kept: int) -> None:
        del self.saved[kept + 1 :]
        *lists, record = self.saved[-1]
        for key in self.queue.dump():
            self.queue.raw("DEL", self.queue.key(key))
        for name, values in zip(NAMES, lists, strict=True):
            if values:
                self.queue.raw("RPUSH", self.queue.key(name), *values)
        self.queue.raw("HSET", self.queue.keys.counters, "pending_bytes", sum(map(len, lists[0])))
        if record is not None:
            self.queue.raw("SET", self.queue.keys.producer("p"), record)
        self.queue.check()

    def holds(self, state: State) -> None:
        """Compare with the model."""
        expected = [self.requests[number].id for applied in state.pushes for number in applied.requests]
        assert self.queue.ids("n") == expected
        stored = self.queue.link.call(commands.last_push(self.queue.keys, "p"))
        assert stored == (state.pushes[-1].token if state.pushes else "")


def walk(server: Server, seed: int, length: int) -> list[str]:
    draw = random.Random(seed)
    state, names = State(), []
    for _ in range(length):
        possible = list(steps(state, **LIMITS))
        if not possible:
            break
        step = draw.choice(possible)
        names.append(step.name)
        if step.kept is not None:
            server.lose(step.kept)
        if step.sent is not None:
            outcome, stored, _ = admit(state.pushes, step.sent)
            pushed = server.push(step.sent)
            assert pushed.outcome == outcome, names
            if outcome == "gap":
                assert pushed.stored == stored, names
        state = step.after
        server.holds(state)
    settle(state)
    return names


def test_the_script_answers_as_the_model_does_through_hundreds_of_cuts_and_losses(fake_endpoint: Endpoint):
    link = fake_endpoint.link()
    seen: set[str] = set()
    for seed in range(150):
        for name in walk(Server(Queue(link, f"walk{seed}")), seed, 16):
            seen.add(" ".join(word for word in name.split() if not word.rstrip(":").isdigit()))
    link.close()
    assert {
        "push ok",
        "push dup",
        "push gap",
        "push ok, answer lost",
        "push arrives late: ok",
        "flush",
    } <= seen


@pytest.mark.parametrize("seed", range(5))
def test_a_real_server_answers_as_the_model_does(redis_url: str, seed: int):
    link = Endpoint(redis_url).link()
    walk(Server(Queue(link, f"walk{seed}")), 1000 + seed, 30)
    link.close()
