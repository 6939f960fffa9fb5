"""The chain of tokens by which a push gets into the queue exactly once: the client's side, pure.

Redis keeps, a producer, the token of its last push. A push names the token that it expects there and its own. If Redis has the push's own,
it ran before. If Redis has the expected one, it runs. Anything else is a gap: Redis has lost pushes, and says which is the last it knows.
Tokens count up and are never used again, so "later than the last one known" is a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Pushed(Protocol):
    """A request, with the number of the push that it left with; 0 if it has not left."""

    number: int


class Position(NamedTuple):
    """What one push carries of the chain; ``number`` goes to the requests that leave with it."""

    previous: str
    token: str
    number: int
    fresh: bool = True
    """Whether nothing of earlier pushes was outstanding when it was made: then Redis need not know the previous one. A push that is sent
    again is judged as the first time."""


class Chain:
    """The chain of one producer. One push at a time: ``next``, then ``done`` or ``gap``."""

    __slots__ = ("_number", "last")

    def __init__(self) -> None:
        self.last = ""
        """The token of the last push that Redis has confirmed, '' for none."""
        self._number = 0

    def next(self, outstanding: Iterable[Pushed] = ()) -> Position:
        """Return the position of a new push; a push that is sent again keeps its own.

        ``outstanding``: all requests that wait for an answer, oldest first. They leave in that order, so the first one tells whether any
        has left.
        """
        self._number += 1
        oldest = next(iter(outstanding), None)
        return Position(self.last, str(self._number), self._number, oldest is None or not oldest.number)

    def done(self, position: Position) -> None:
        """Note that Redis has confirmed a push."""
        self.last = position.token

    def gap(self, stored: str) -> int:
        """Note that Redis knows ``stored`` as the last push; requests of pushes with a higher number are lost. 0: all of them."""
        self.last = stored
        return int(stored) if stored.isdigit() else 0
