"""The push chain: each outstanding request gets into the queue, and once, whatever is cut, late or lost."""

from __future__ import annotations

import asyncio

import pytest

from batchq.chain import Chain, Position
from batchq.config import ClientConfig
from batchq.exchange import Exchange, Extras
from batchq.session import Group, Session
from batchq.slots import Pool, Slot
from batchq.store import Endpoint, LinkLostError
from tests.chain_model import State, settle, steps


def test_tokens_count_up_and_each_push_names_the_last_confirmed_one():
    chain = Chain()
    first = chain.next()
    assert first == Position("", "1", 1)
    chain.done(first)
    second, third = chain.next(), chain.next()  # the second one was dropped unconfirmed
    assert (second, third) == (Position("1", "2", 2), Position("1", "3", 3))
    chain.done(third)
    assert chain.next() == Position("3", "4", 4)


def test_after_a_gap_the_chain_goes_on_from_what_redis_knows_with_new_tokens():
    chain = Chain()
    for _ in range(3):
        chain.done(chain.next())
    assert chain.gap("2") == 2
    assert chain.next() == Position("2", "4", 4)


def test_after_a_total_loss_all_pushes_count_as_lost():
    chain = Chain()
    for _ in range(3):
        chain.done(chain.next())
    assert chain.gap("") == 0
    assert chain.next() == Position("", "4", 4)


def test_a_record_that_is_no_number_counts_as_a_total_loss():
    chain = Chain()
    chain.done(chain.next())
    assert chain.gap("strange") == 0
    assert chain.next().previous == "strange"


def explore(depth: int, **limits: int) -> dict[State, tuple[State, str] | None]:
    """Visit all states within ``depth`` steps; the values tell how each was come by."""
    seen: dict[State, tuple[State, str] | None] = {State(): None}
    edge = [State()]
    for _ in range(depth):
        following = []
        for state in edge:
            for step in steps(state, **limits):
                if step.after not in seen:
                    seen[step.after] = (state, step.name)
                    following.append(step.after)
        edge = following
    return seen


def trace(seen: dict[State, tuple[State, str] | None], state: State) -> str:
    names = []
    while (how := seen[state]) is not None:
        state, name = how
        names.append(name)
    return " / ".join(reversed(names))


@pytest.mark.parametrize(
    ("depth", "limits"),
    [
        (14, {"calls": 3, "cuts": 3, "crashes": 0, "flushes": 0}),
        (12, {"calls": 3, "cuts": 2, "crashes": 1, "flushes": 0}),
        (12, {"calls": 3, "cuts": 1, "crashes": 2, "flushes": 0}),
        (12, {"calls": 2, "cuts": 2, "crashes": 1, "flushes": 1}),
    ],
    ids=["cuts", "a crash", "two crashes", "a crash and a flush"],
)
def test_every_outstanding_request_gets_into_the_queue_exactly_once(depth, limits):
    seen = explore(depth, **limits)
    assert len(seen) > 1000
    for state in seen:
        end = settle(state)
        for request in end.outstanding:
            copies = end.copies(request)
            assert copies > 0, f"request {request} is lost: {trace(seen, state)}"
            # after FLUSHALL pushes that were on their way all the time may still run, beside those that make up for the loss
            if not end.flushes:
                assert copies == 1, f"request {request} is in the queue {copies} times: {trace(seen, state)}"
        if not (limits["crashes"] or limits["flushes"]):
            assert all(end.copies(request) == 1 for request in range(1, end.new + 1)), trace(seen, state)


def test_without_a_loss_nothing_is_ever_pushed_again():
    seen = explore(10, calls=3, cuts=0, crashes=0, flushes=0)
    for state in seen:
        assert not any(group.force for group in state.buffer), trace(seen, state)
        assert all(state.copies(request) <= 1 for request in range(1, state.new + 1))


def test_what_survives_a_crash_is_not_pushed_again():
    seen = explore(9, calls=3, cuts=1, crashes=1, flushes=0)
    for state in seen:
        for request in range(1, state.new + 1):
            assert state.copies(request) <= 1, trace(seen, state)


def push_args(payload: bytes) -> list[bytes]:
    """The arguments of a push's admit, from its bytes."""
    args = payload[payload.index(b"EVALSHA") :].split(b"\r\n")[2::2]
    return args[3:]


class Cut:
    """A connection on which every push is cut, and after which a caller goes away."""

    broken = False

    def __init__(self, gone: list) -> None:
        self.fresh: list[bytes] = []
        self.gone = gone
        self.enough = asyncio.Event()

    def cut(self, verb) -> None:
        self.fresh.append(push_args(verb.payload)[3])
        if self.gone:
            self.gone.pop()()
        if len(self.fresh) == 3:
            self.enough.set()
        raise LinkLostError("cut")

    async def call(self, verb):
        self.cut(verb)


async def test_a_push_is_not_fresh_while_requests_of_earlier_pushes_are_outstanding():
    """However many of its own callers go while it is tried again: their requests are no reason to forget the others."""
    session = Session(ClientConfig(), Endpoint("redis://unused"), asyncio.get_running_loop())
    earlier, *mine = (session.encode("x", 10.0, "n", None, None, None) for _ in range(3))
    earlier.number = 1
    group = Group()
    for call in mine:
        group.add(call)
    for call in (earlier, *mine):
        session.outstanding[call.id] = call
    link = Cut([lambda call=call: (session.outstanding.pop(call.id), call.future.cancel()) for call in mine])
    session._push_link = link
    session.buffer.append(group)
    task = asyncio.create_task(session._push_forever())
    await asyncio.wait_for(link.enough.wait(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert link.fresh == [b"0", b"0", b"0"]


async def test_a_push_that_was_fresh_stays_fresh_when_it_is_tried_again():
    """What has joined since has not been pushed. A late first try and its repetition must not be judged differently."""
    session = Session(ClientConfig(), Endpoint("redis://unused"), asyncio.get_running_loop())
    mine, *later = (session.encode("x", 10.0, "n", None, None, None) for _ in range(3))
    group = Group()
    group.add(mine)
    session.outstanding[mine.id] = mine
    link = Cut([lambda call=call: session.outstanding.update({call.id: call}) for call in later])
    session._push_link = link
    session.buffer.append(group)
    task = asyncio.create_task(session._push_forever())
    await asyncio.wait_for(link.enough.wait(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert link.fresh == [b"1", b"1", b"1"]


def test_the_blocking_client_judges_its_pushes_the_same_way():
    class CutSlot(Slot):
        def ask(self, call, until, *, then=None):
            fresh.append(push_args(call.payload)[3])
            raise LinkLostError("cut")

    fresh: list[bytes] = []
    exchange = Exchange(Pool(ClientConfig(), Endpoint("redis://unused"), 1), 10.0, stream=True)
    exchange._slot = CutSlot()
    extras = Extras(None, None, None)

    def request():
        return exchange.request(exchange.new_id(), "x", "n", extras, 10.0, exchange.deadline)

    earlier, *mine = request(), request(), request()
    exchange.add([earlier])
    exchange._groups.clear()
    earlier.number = 1
    exchange.add(mine)
    for gone in [*mine, None]:
        with pytest.raises(LinkLostError):
            exchange._push(exchange.deadline)
        if gone is not None:
            del exchange.outstanding[gone.id]
    assert fresh == [b"0", b"0", b"0"]
