"""The push chain as a small pure model: a client as ``batchq/session.py`` plays it, a server as ``lua/admit.lua`` does.

A state is a value; ``steps`` gives all states that may follow it. Each user request travels alone, so that a push is one request but for
those that are pushed again after a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from batchq.chain import Chain, Position


class Sent(NamedTuple):
    """A push as it lies on the wire."""

    previous: str
    token: str
    fresh: bool
    requests: tuple[int, ...]


class Group(NamedTuple):
    requests: tuple[int, ...]
    force: bool = False


class Applied(NamedTuple):
    """A push that the server has run."""

    token: str
    requests: tuple[int, ...]


def admit(pushes: tuple[Applied, ...], sent: Sent) -> tuple[str, str, tuple[Applied, ...]]:
    """What lua/admit.lua makes of a push: outcome, stored token, and the pushes that have run then."""
    stored = pushes[-1].token if pushes else ""
    if stored == sent.token:
        return "dup", stored, pushes
    if stored == sent.previous or (stored == "" and sent.fresh):
        return "ok", sent.token, (*pushes, Applied(sent.token, sent.requests))
    return "gap", stored, pushes


@dataclass(frozen=True)
class State:
    # the client
    last: str = ""
    counter: int = 0
    buffer: tuple[Group, ...] = ()
    group: Group | None = None
    position: Position | None = None
    fresh: bool = False
    """Whether nothing else was outstanding when the group got its position."""
    numbers: tuple[tuple[int, int], ...] = ()
    """Request -> the push that it left with; those that are outstanding."""
    new: int = 0
    """How many requests its callers have made."""
    # the wire and the server
    late: tuple[Sent, ...] = ()
    """Pushes of connections that are cut, which may still arrive."""
    pushes: tuple[Applied, ...] = ()
    # what has gone wrong
    lost: frozenset[int] = frozenset()
    """Requests that the server had, and lost."""
    cuts: int = 0
    crashes: int = 0
    flushes: int = 0

    def copies(self, request: int) -> int:
        """How often a request stands in the server's list, or was taken from it."""
        return sum(applied.requests.count(request) for applied in self.pushes)

    @property
    def outstanding(self) -> tuple[int, ...]:
        return tuple(request for request, _ in self.numbers)


def _chain(state: State) -> Chain:
    chain = Chain()
    chain.last, chain._number = state.last, state.counter
    return chain


def _with_chain(state: State, chain: Chain) -> State:
    return replace(state, last=chain.last, counter=chain._number)


def _number(state: State, requests: tuple[int, ...], number: int) -> State:
    return replace(state, numbers=tuple((r, number if r in requests else n) for r, n in state.numbers))


# --- the client, as in session.py -------------------------------------------------------------------------------------


def call(state: State) -> State:
    """A caller makes a request."""
    request = state.new + 1
    return replace(
        state, new=request, buffer=(*state.buffer, Group((request,))), numbers=(*state.numbers, (request, 0))
    )


def begin(state: State) -> State:
    """The push task takes the next group, and a position for it."""
    while state.group is None and state.buffer:
        first, rest = state.buffer[0], state.buffer[1:]
        alive = tuple(request for request in first.requests if request in state.outstanding)
        state = replace(state, buffer=rest, group=Group(alive, first.force) if alive else None, position=None)
    if state.group is None or state.position is not None:
        return state
    chain = _chain(state)
    position = chain.next()
    fresh = all(request in state.group.requests for request in state.outstanding)
    return _with_chain(
        _number(replace(state, position=position, fresh=fresh), state.group.requests, position.number), chain
    )


def sent(state: State) -> Sent:
    """The push as it leaves now; one that is sent again keeps its position."""
    assert state.group is not None
    assert state.position is not None
    return Sent(state.position.previous, state.position.token, state.fresh, state.group.requests)


def repush(state: State, stored: str) -> State:
    chain = _chain(state)
    known = chain.gap(stored)
    lost = tuple(request for request, number in state.numbers if number > known)
    state = _with_chain(state, chain)
    return replace(state, buffer=(Group(lost, True), *state.buffer)) if lost else state


def answered(state: State, outcome: str, stored: str) -> State:
    """The client reads what the server says to its push."""
    group, position = state.group, state.position
    assert group is not None
    assert position is not None
    state = replace(state, group=None, position=None)
    if outcome == "gap":
        state = repush(_number(state, group.requests, 0), stored)
        at = 1 if state.buffer and state.buffer[0].force else 0
        return replace(state, buffer=(*state.buffer[:at], group, *state.buffer[at:]))
    chain = _chain(state)
    chain.done(position)
    return _with_chain(state, chain)


def checked(state: State) -> State:
    """The client reads the server's record: on reconnect, and each second."""
    stored = state.pushes[-1].token if state.pushes else ""
    if stored != state.last and state.numbers and not any(group.force for group in state.buffer):
        return repush(state, stored)
    return state


# --- what may happen --------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Something that may happen: its name, what comes of it, and what of it the server sees."""

    name: str
    after: State
    sent: Sent | None = None
    """A push that the server gets."""
    kept: int | None = None
    """How many of its pushes a server still knows after a loss."""


def _lose(state: State, kept: int) -> State:
    gone = {request for applied in state.pushes[kept:] for request in applied.requests}
    return replace(state, pushes=state.pushes[:kept], lost=state.lost | gone)


def steps(state: State, *, calls: int, cuts: int, crashes: int, flushes: int) -> Iterator[Step]:
    """All that may happen next."""
    if state.new < calls:
        yield Step("call", call(state))
    for request in state.outstanding:
        if state.copies(request):
            left = tuple((r, n) for r, n in state.numbers if r != request)
            yield Step(f"answer {request}", replace(state, numbers=left))
    ready = begin(state)
    if ready.group is not None:
        push = sent(ready)
        outcome, stored, pushes = admit(ready.pushes, push)
        name = f"push {push.token}"
        yield Step(f"{name}: {outcome}", answered(replace(ready, pushes=pushes), outcome, stored), sent=push)
        if state.cuts < cuts:
            cut = replace(ready, cuts=ready.cuts + 1)
            yield Step(f"{name}: {outcome}, answer lost", replace(cut, pushes=pushes), sent=push)
            yield Step(f"{name}: cut, never arrives", cut)
            yield Step(f"{name}: cut", replace(cut, late=(*cut.late, push)))
    elif state.numbers:
        looked = checked(state)
        if looked != state:
            yield Step("check", looked)
    for index, push in enumerate(state.late):
        outcome, _, pushes = admit(state.pushes, push)
        rest = state.late[:index] + state.late[index + 1 :]
        yield Step(
            f"push {push.token} arrives late: {outcome}", replace(state, late=rest, pushes=pushes), sent=push
        )
    if state.crashes < crashes:
        for kept in range(len(state.pushes)):
            # what survives a crash is a prefix; connections end with the server, and what was on them
            after = replace(_lose(state, kept), crashes=state.crashes + 1, late=())
            yield Step(f"crash, {kept} pushes survive", after, kept=kept)
    if state.flushes < flushes and state.pushes:
        yield Step("flush", replace(_lose(state, 0), flushes=state.flushes + 1), kept=0)


def settle(state: State) -> State:
    """Nothing goes wrong any more: the client pushes and checks until there is nothing to do."""
    for _ in range(50):
        ready = begin(state)
        if ready.group is not None:
            outcome, stored, pushes = admit(ready.pushes, sent(ready))
            after = answered(replace(ready, pushes=pushes), outcome, stored)
        else:
            after = checked(ready)
            if after == ready:
                return after
        state = after
    raise AssertionError(f"never settles: {state}")
