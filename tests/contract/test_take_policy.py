"""LocalClient's policy and take.lua are given the same pending requests, and must come to the same batch.

Two differences are meant, and tested as such: the policy counts what is too late as pending until it meets it, where take.lua looks past
it first; and take.lua drops what is too late directly behind a batch's last request, where the policy leaves it for the next batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchq.commands import Taken
from batchq.config import BatchPolicy
from batchq.policy import Pending
from batchq.store import Endpoint, Link
from tests.contract.queues import Queue, Seed, taken_ids

MAX_DELAY = 60.0
RUN_TIME = 8.0
_POLICY_MARGIN = 1.25


@dataclass(eq=False)
class Waiting:
    id: bytes
    lane: str
    enqueued: float
    deadline: float
    group: str = ""
    cost: float | None = None
    size: int = 1
    pending: object = field(default=False)


@pytest.fixture(scope="module")
def fake_link() -> Iterator[Link]:
    import fakeredis

    link = Endpoint(None, fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7,)))).link()
    yield link
    link.close()


# Ages lie far from all limits (max_delay, and the second after which a lane is granted a place): that the two sides read their clocks at
# different moments must not decide. Stamps in the future by less than max_delay are as good as new.
AGES = st.sampled_from([-30.0, -20.0, 15.0, 30.0, 75.0, 90.0, 120.0])
REQUESTS = st.lists(st.tuples(st.sampled_from("hnl"), AGES, st.booleans()), max_size=14)
# With groups all of what is in none or in the normal lane: which of two groups goes first where one has fresh high requests besides what
# makes it due, take.lua decides without looking at each group.
GROUPED = st.lists(
    st.tuples(
        st.sampled_from(["h", "n", "l", "n:sa", "n:sb", "n:sc"]),
        AGES,
        st.just(False),
        st.sampled_from([None, 0.5, 1, 2, 3, 9]),
    ),
    max_size=16,
)
Row = tuple[str, float, bool] | tuple[str, float, bool, float | None]


class Both:
    """The same pending requests on both sides."""

    def __init__(
        self,
        link: Link,
        name: str,
        rows: list[Row],
        most: int,
        *,
        budget: int | None = None,
        padded: bool = False,
    ) -> None:
        self.queue = Queue(link, name)
        for key in self.queue.dump():
            self.queue.raw("DEL", self.queue.key(key))
        # first in, first out: in each lane the oldest first, and no two of the same age
        ordered = sorted(enumerate(rows), key=lambda row: (-row[1][1], row[0]))
        seeds, waiting = [], []
        base = 1000.0
        for number, (_, (place, age, late, *cost)) in enumerate(ordered):
            late = late and age > 0  # a deadline before the enqueue time there is not
            exact = age + (len(ordered) - number) * 0.002
            # late: alive still, but not for as long as a run takes
            left = 4.0 if late else 3600.0
            seeds.append(Seed(lane=place, age=exact, timeout=exact + left, cost=(cost or [None])[0]))
            waiting.append((place[0], base - exact, base + left, place[2:], (cost or [None])[0]))
        self.now = base
        self.ids = self.queue.seed(*seeds)
        self.lanes = dict(zip(self.ids, (row[0] for _, row in ordered), strict=True))
        self.late = {
            id_ for id_, (_, (_, age, late, *_)) in zip(self.ids, ordered, strict=True) if late and age > 0
        }
        self.local: Pending[Waiting] = Pending(
            BatchPolicy(
                max_batch_size=most,
                max_delay=MAX_DELAY,
                capacity=1000,
                capacity_bytes=1024,
                max_batch_cost=budget,
                padded=padded,
            )
        )
        self.local.add(Waiting(id_, *row) for id_, row in zip(self.ids, waiting, strict=True))
        self.options = {"max_batch_size": most, "max_batch_cost": budget or 0, "padded": padded}

    def take(self, batch: str, limit: int, form: str, *, delay: float = MAX_DELAY) -> Taken:
        return self.queue.take(
            batch,
            form=form,
            limit=limit,
            run_us=int(RUN_TIME * _POLICY_MARGIN * 1e6),
            options=self.queue.options(max_delay_us=int(delay * 1e6), **self.options),
        )

    def left_over(self) -> list[bytes]:
        return [id_ for lane in "hnl" for id_ in self.queue.ids(lane)]


def plain(rows: list[tuple[str, float, bool]]) -> list[tuple[str, float, bool]]:
    return [(lane, age, False) for lane, age, _ in rows]


checked = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@given(rows=REQUESTS, most=st.integers(1, 6), form=st.sampled_from(["light", "native"]))
@checked
def test_both_come_to_the_same_decision_when_a_batch_is_due(fake_link, rows, most, form):
    both = Both(fake_link, "decide", plain(rows), most)
    due_in = both.local.due_in(both.now)
    taken = both.take("b", most, form)
    if due_in is None:
        assert taken.outcome == "idle"
    elif due_in == 0:
        assert taken.outcome == "batch"
    else:
        assert taken.outcome == "wait"
        assert due_in - 10 < taken.left <= due_in + 0.001


@given(
    rows=REQUESTS,
    most=st.integers(1, 6),
    less=st.integers(0, 5),
    form=st.sampled_from(["light", "force", "native"]),
)
@checked
def test_both_put_the_same_requests_into_each_batch_until_nothing_is_left(fake_link, rows, most, less, form):
    both = Both(fake_link, "fill", plain(rows), most)
    limit = max(1, most - less)
    waiting = set(both.ids)
    for number in range(len(rows) + 1):
        batch, dropped = both.local.take(both.now, RUN_TIME, limit)
        taken = both.take(f"b{number}", limit, form, delay=0)
        assert dropped == []
        waiting -= {request.id for request in batch}
        assert sorted(taken_ids(taken)) == sorted(request.id for request in batch)
        if form != "native":  # natively the largest lane's part stands last, whichever that is
            assert taken_ids(taken) == [request.id for request in batch]
        assert set(both.left_over()) == waiting
        if not batch:
            assert taken.outcome == "idle"
            break


@given(
    rows=REQUESTS, most=st.integers(1, 6), less=st.integers(0, 5), form=st.sampled_from(["light", "force"])
)
@checked
def test_both_run_the_same_requests_though_some_are_too_late(fake_link, rows, most, less, form):
    both = Both(fake_link, "late", rows, most)
    limit = max(1, most - less)
    gone: set[bytes] = set()
    seen: set[bytes] = set()
    for number in range(len(rows) + 1):
        before = set(both.left_over())
        batch, dropped = both.local.take(both.now, RUN_TIME, limit)
        taken = both.take(f"b{number}", limit, form, delay=0)
        assert taken_ids(taken) == [request.id for request in batch]
        gone |= {request.id for request in dropped}
        seen |= before - set(both.left_over()) - set(taken_ids(taken))
        assert gone <= seen <= both.late
        if not batch:
            break
    assert both.left_over() == []
    assert gone == seen == both.late
    assert both.queue.counter("expired") == len(both.late)


@given(rows=REQUESTS, most=st.integers(1, 6))
@checked
def test_what_is_too_late_never_makes_a_batch_due_in_redis(fake_link, rows, most):
    both = Both(fake_link, "due", rows, most)
    live = [row for row in rows if not (row[2] and row[1] > 0)]
    alone = Both(fake_link, "alone", live, most)
    taken = both.take("b", most, "light")
    leading = len(both.late & _leading(both))
    if not live:
        assert taken.outcome == "idle"
    elif alone.local.due_in(alone.now) == 0:
        assert taken.outcome == "batch"
    elif len(rows) - leading < most:
        assert taken.outcome == "wait"


def _leading(both: Both) -> set[bytes]:
    """The ids of what is too late in front of each lane's first live request."""
    found: set[bytes] = set()
    for lane in "hnl":
        for id_ in (id_ for id_ in both.ids if both.lanes[id_] == lane):
            if id_ not in both.late:
                break
            found.add(id_)
    return found


@given(
    rows=GROUPED,
    most=st.integers(1, 6),
    budget=st.sampled_from([None, 1, 4, 10]),
    padded=st.booleans(),
    form=st.sampled_from(["light", "native"]),
)
@checked
def test_both_choose_the_same_group_and_stop_at_the_same_cost(fake_link, rows, most, budget, padded, form):
    both = Both(fake_link, "groups", rows, most, budget=budget, padded=padded and budget is not None)
    for number in range(len(rows) + 1):
        due_in = both.local.due_in(both.now)
        if due_in != 0:
            break
        batch, _ = both.local.take(both.now, 0.0)
        taken = both.take(f"b{number}", most, form)
        assert sorted(taken_ids(taken)) == sorted(request.id for request in batch)
    outcome = both.take("last", most, form).outcome
    assert outcome == ("idle" if due_in is None else "wait")
