"""When a batch is due and what goes in it, on a clock that the test holds."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchq.config import BatchPolicy
from batchq.policy import AGED, CAP_SECONDS, DEADLINE_MARGIN, Cap, Pending, RunTime

FAR = 1e9


@dataclass(eq=False)
class Request:
    name: object = None
    lane: str = "n"
    enqueued: float = 0.0
    deadline: float = FAR
    size: int = 1
    group: Hashable = None
    cost: float | None = None
    pending: object = field(default=None, repr=False)


def pending(*requests: Request, **settings: object) -> Pending[Request]:
    given = {"max_batch_size": 4, "max_delay": 0.5, "capacity": 100, "capacity_bytes": 1024, **settings}
    found: Pending[Request] = Pending(BatchPolicy(**given))
    found.add(requests)
    return found


def names(requests: list[Request]) -> list[object]:
    return [request.name for request in requests]


def test_nothing_is_due_while_nothing_waits():
    assert pending().due_in(0.0) is None


def test_a_full_batch_is_due_at_once():
    assert pending(*(Request() for _ in range(4))).due_in(0.0) == 0.0


def test_requests_of_all_lanes_together_make_a_batch_full():
    assert (
        pending(Request(lane="h"), Request(lane="n"), Request(lane="l"), Request(lane="l")).due_in(0.0) == 0.0
    )


def test_a_part_filled_batch_is_due_when_its_oldest_request_has_waited_max_delay():
    queue = pending(Request(enqueued=1.25, lane="h"), Request(enqueued=1.0, lane="l"))
    assert queue.due_in(1.0) == 0.5
    assert queue.due_in(1.25) == 0.25
    assert queue.due_in(1.5) == 0.0
    assert queue.due_in(9.0) == 0.0


def test_nobody_waits_longer_than_max_delay_when_the_clock_steps_back_a_little():
    assert pending(Request(enqueued=10.25)).due_in(10.0) == 0.5


def test_a_request_stamped_far_in_the_future_is_due_now_because_the_clock_stepped_back():
    assert pending(Request(enqueued=3600.0)).due_in(0.0) == 0.0


def test_a_discarded_request_makes_no_batch_due():
    first, second = Request(enqueued=0.0), Request(enqueued=2.0)
    queue = pending(first, second)
    queue.discard(first)
    assert queue.due_in(2.0) == 0.5
    queue.discard(second)
    assert queue.due_in(2.0) is None


def test_a_batch_holds_the_oldest_requests_in_their_order():
    queue = pending(*(Request(n) for n in range(6)))
    assert names(queue.take(0.0)[0]) == [0, 1, 2, 3]
    assert names(queue.take(0.0)[0]) == [4, 5]


def test_a_batch_mixes_lanes_high_first():
    queue = pending(Request("l", "l"), Request("n", "n"), Request("h", "h"))
    assert names(queue.take(0.0)[0]) == ["h", "n", "l"]


def test_what_does_not_fit_is_left_in_the_lower_lanes():
    queue = pending(*(Request(lane=lane, name=lane) for lane in "lllnnnhh"))
    assert names(queue.take(0.0)[0]) == ["h", "h", "n", "n"]
    assert names(queue.take(0.0)[0]) == ["n", "l", "l", "l"]


def test_the_oldest_request_of_a_lane_gets_a_place_after_a_second_whatever_waits_above_it():
    high = [Request("h", "h", enqueued=5.0) for _ in range(8)]
    queue = pending(Request("l1", "l", enqueued=0.0), Request("l2", "l", enqueued=0.0), *high)
    assert names(queue.take(5.0)[0]) == ["h", "h", "h", "l1"]


def test_a_request_that_has_waited_a_second_and_no_more_has_no_granted_place():
    queue = pending(Request("l", "l", enqueued=0.0), *(Request("h", "h", enqueued=1.0) for _ in range(4)))
    assert names(queue.take(AGED)[0]) == ["h"] * 4


def test_of_more_aged_lanes_than_places_the_longest_waiting_goes_first():
    queue = pending(Request("h", "h", 3.0), Request("n", "n", 2.0), Request("l", "l", 1.0), max_batch_size=1)
    assert names(queue.take(10.0)[0]) == ["l"]
    assert names(queue.take(10.0)[0]) == ["n"]


def test_what_cannot_finish_in_time_is_dropped_and_its_place_goes_to_the_next():
    run_time = 0.8
    late, live = Request("late", deadline=DEADLINE_MARGIN * run_time - 0.01), Request("live", deadline=1.0)
    queue = pending(late, *(Request(n) for n in range(3)), live)
    batch, expired = queue.take(0.0, run_time)
    assert names(batch) == [0, 1, 2, "live"]
    assert expired == [late]
    assert len(queue) == 0


def test_an_expired_request_is_not_granted_the_place_of_an_aged_one():
    queue = pending(Request("dead", "l", 0.0, deadline=1.0), *(Request("h", "h", 5.0) for _ in range(4)))
    batch, expired = queue.take(5.0)
    assert names(batch) == ["h"] * 4
    assert names(expired) == ["dead"]


def test_a_lower_limit_of_the_worker_holds_but_never_below_one():
    queue = pending(*(Request() for _ in range(8)))
    assert [len(queue.take(0.0, limit=limit)[0]) for limit in (2, 0, 99)] == [2, 1, 4]


@pytest.mark.parametrize(("lane", "room"), [("h", 10), ("n", 10), ("l", 5)])
def test_all_lanes_share_the_capacity_and_the_low_one_fills_half_at_most(lane, room):
    queue = pending(capacity=10)
    assert queue.fits(lane, room, 1)
    assert not queue.fits(lane, room + 1, 1)


def test_the_low_lane_has_room_for_one_even_at_a_capacity_of_one():
    assert pending(capacity=1).fits("l", 1, 1)


def test_capacity_is_free_again_after_a_take_and_after_a_discard():
    requests = [Request() for _ in range(5)]
    queue = pending(*requests, capacity=5)
    assert not queue.fits("n", 1, 1)
    queue.discard(requests[4])
    assert queue.fits("n", 1, 1)
    queue.take(0.0)
    assert queue.fits("n", 5, 1)


def test_bytes_are_limited_as_well_as_requests():
    queue = pending(Request(size=1000))
    assert queue.fits("n", 1, 24)
    assert not queue.fits("n", 1, 25)


def test_discarding_twice_or_after_a_take_changes_nothing():
    request = Request()
    queue = pending(request, Request())
    queue.take(0.0)
    queue.discard(request)
    queue.discard(request)
    assert (len(queue), queue.bytes) == (0, 0)


def test_callers_who_give_up_leave_nothing_behind_even_if_no_batch_is_ever_taken():
    first = Request()
    queue = pending(first, capacity=10)
    for _ in range(1000):
        request = Request()
        queue.add([request])
        queue.discard(request)
    assert len(first.pending._lanes["n"]) < 100
    assert names(queue.take(0.0)[0]) == [first.name]


@pytest.mark.parametrize("group", [None, "a"])
@pytest.mark.parametrize("given_up", [0, 1, 2])
def test_a_request_that_was_given_up_is_not_kept_longer_than_the_others(given_up, group):
    requests = [Request(n, group=group) for n in range(3)]
    gone = weakref.ref(requests[given_up])
    queue = pending(*requests, max_batch_size=2)
    queue.discard(requests[given_up])
    assert len(queue.take(0.0)[0]) == 2
    del requests
    assert gone() is None


def test_clear_returns_what_waits_and_leaves_nothing():
    gone = Request("gone")
    queue = pending(Request("l", "l"), gone, Request("h", "h"))
    queue.discard(gone)
    assert names(queue.clear()) == ["h", "l"]
    assert (len(queue), queue.bytes, queue.oldest()) == (0, 0, None)


def test_the_run_time_starts_at_the_first_batch_and_follows_later_ones():
    run_time = RunTime()
    run_time.ran(1.0)
    assert run_time.seconds == 1.0
    for _ in range(50):
        run_time.ran(0.1)
    assert run_time.seconds == pytest.approx(0.1, rel=0.01)


def test_one_slow_warm_up_run_does_not_make_every_later_request_look_hopeless_for_ever():
    run_time = RunTime()
    run_time.ran(30.0)
    for _ in range(10):
        batch, expired = pending(Request(deadline=1.0)).take(0.0, run_time.seconds)
        if batch:
            break
        assert expired
        run_time.all_dropped()
    assert batch


def test_after_out_of_memory_batches_are_half_as_large_for_a_minute_and_double_then():
    cap = Cap()
    assert cap.limit(0.0) is None
    cap.out_of_memory(32, 0.0)
    assert cap.limit(CAP_SECONDS - 0.01) == 16
    assert cap.limit(CAP_SECONDS) == 32
    assert cap.limit(2 * CAP_SECONDS) is None
    assert cap.limit(1e12) is None


def test_each_further_failure_halves_what_was_left_and_the_limit_ends_over_the_largest_that_failed():
    cap = Cap()
    for second, size in enumerate([32, 16, 8, 16]):
        cap.out_of_memory(size, float(second))
    assert [cap.limit(3.0 + n * CAP_SECONDS) for n in range(5)] == [4, 8, 16, 32, None]


def test_a_failure_while_the_limit_grows_starts_the_minute_anew():
    cap = Cap()
    cap.out_of_memory(32, 0.0)
    cap.out_of_memory(32, CAP_SECONDS)
    assert [cap.limit(n * CAP_SECONDS) for n in (1, 2, 3)] == [16, 32, None]
    cap.out_of_memory(5, 1000.0)
    assert [cap.limit(1000.0 + n * CAP_SECONDS) for n in range(3)] == [2, 4, None]


def test_a_limit_is_never_below_one_and_a_clock_that_steps_back_does_not_change_it():
    cap = Cap()
    cap.out_of_memory(1, 100.0)
    assert cap.limit(100.0) == cap.limit(0.0) == 1
    assert cap.limit(100.0 + CAP_SECONDS) is None


# groups


def test_only_requests_of_one_group_share_a_batch():
    queue = pending(*(Request(n, group="ab"[n % 2]) for n in range(4)), max_delay=0)
    assert [names(queue.take(0.0)[0]) for _ in range(3)] == [[0, 2], [1, 3], []]


def test_requests_of_different_groups_do_not_make_a_batch_full():
    queue = pending(*(Request(group=n) for n in range(8)))
    assert queue.due_in(0.0) == 0.5
    queue.add([Request(group=0) for _ in range(3)])
    assert queue.due_in(0.0) == 0.0


def test_a_group_that_is_not_due_blocks_none_that_is():
    queue = pending(
        Request("early", "h", enqueued=1.0, group="a"), *(Request(n, "l", 1.25, group="b") for n in range(4))
    )
    assert names(queue.take(1.25)[0]) == [0, 1, 2, 3]
    assert queue.due_in(1.25) == 0.25


def test_the_next_batch_is_due_when_that_of_any_group_is():
    queue = pending(Request(enqueued=2.0, group="a"), Request(enqueued=1.75, group="b"))
    assert queue.due_in(2.0) == 0.25
    queue.take(2.25)
    assert queue.due_in(2.25) == 0.25


def test_among_due_groups_one_with_a_high_request_goes_first_then_one_with_normal_ones():
    queue = pending(
        Request("l", "l", 0.0, group=1),
        Request("n", "n", 0.1, group=2),
        Request("h", "h", 0.2, group=3),
        Request("n2", "n", 0.3, group=3),
    )
    assert [names(queue.take(1.0)[0]) for _ in range(3)] == [["h", "n2"], ["n"], ["l"]]


def test_among_equal_groups_the_one_with_the_oldest_request_goes_first():
    queue = pending(*(Request(n, enqueued=time, group=n) for n, time in enumerate([0.2, 0.0, 0.1])))
    assert [names(queue.take(0.75)[0]) for _ in range(3)] == [[1], [2], [0]]


def test_a_high_request_that_comes_later_brings_its_group_to_the_front():
    first, second = Request("first", enqueued=0.0, group=1), Request("second", enqueued=0.1, group=2)
    queue = pending(first, second)
    assert queue.due_in(1.0) == 0.0
    high = Request("high", "h", 0.9, group=2)
    queue.add([high])
    assert names(queue.take(1.0)[0]) == ["high", "second"]


def test_a_high_request_that_was_given_up_does_not_bring_its_group_to_the_front():
    high = Request("high", "h", 0.0, group=2)
    queue = pending(Request("first", enqueued=0.0, group=1), high, Request("second", enqueued=0.1, group=2))
    assert queue.due_in(1.0) == 0.0
    queue.discard(high)
    assert names(queue.take(1.0)[0]) == ["first"]


def test_a_high_request_that_is_too_late_does_not_bring_its_group_to_the_front():
    late = Request("late", "h", 0.0, deadline=0.5, group=2)
    queue = pending(Request("first", enqueued=0.0, group=1), late, Request("second", enqueued=0.1, group=2))
    batch, expired = queue.take(1.0)
    assert (names(batch), names(expired)) == (["first"], ["late"])
    assert names(queue.take(1.0)[0]) == ["second"]


def test_every_fourth_batch_goes_to_the_group_that_has_waited_longest():
    queue = pending(
        Request("low", "l", 0.0, group="low"), *(Request("high", "h", 1.0, group=n) for n in range(6))
    )
    assert [names(queue.take(2.0)[0]) for _ in range(7)] == [["high"]] * 3 + [["low"]] + [["high"]] * 3


def test_the_fourth_batch_is_no_exception_while_nobody_has_waited_for_over_a_second():
    queue = pending(
        Request("low", "l", 0.0, group="low"), *(Request("high", "h", 0.1, group=n) for n in range(4))
    )
    assert [names(queue.take(AGED)[0]) for _ in range(5)] == [["high"]] * 4 + [["low"]]


def test_if_nothing_of_a_group_can_finish_in_time_the_batch_is_that_of_the_next_group():
    queue = pending(
        *(Request("late", "h", 0.0, deadline=1.0, group=1) for _ in range(3)),
        *(Request(n, group=2) for n in range(2)),
    )
    batch, expired = queue.take(2.0)
    assert (names(batch), names(expired)) == ([0, 1], ["late"] * 3)
    assert len(queue) == 0


def test_a_stamp_far_in_the_future_makes_its_group_due_now_whatever_else_waits():
    queue = pending(Request("now", enqueued=0.0, group=1), Request("ahead", enqueued=3600.0, group=2))
    assert queue.due_in(0.0) == 0.0
    assert names(queue.take(0.0)[0]) == ["ahead"]
    assert queue.due_in(0.0) == 0.5


def test_a_discarded_request_makes_its_group_due_no_more():
    full = [Request(n, group=1) for n in range(4)]
    old = Request(enqueued=-9.0, group=2)
    queue = pending(*full, old, Request(enqueued=0.0, group=2))
    assert queue.due_in(0.0) == 0.0
    queue.discard(full[2])
    assert queue.due_in(0.0) == 0.0
    queue.discard(old)
    assert queue.due_in(0.0) == 0.5


def test_capacity_and_depth_count_the_requests_of_all_groups():
    queue = pending(*(Request(lane="l", group=n, size=100) for n in range(4)), capacity=8)
    assert not queue.fits("l", 1, 1)
    assert queue.fits("n", 4, 1)
    assert not queue.fits("n", 5, 1)
    assert not queue.fits("n", 1, 625)
    assert (queue.depth("l"), len(queue), queue.bytes) == (4, 4, 400)
    assert {request.group for request in queue.clear()} == {0, 1, 2, 3}
    assert queue.fits("l", 4, 1024)


def left_behind(queue: Pending[Request]) -> int:
    """How many groups, and notes of them, a queue holds."""
    heaps = [queue._waiting, *queue._due.values()]
    return len(queue._groups) + len(queue._changed) + sum(map(len, heaps))


@pytest.mark.parametrize("looked_at", [True, False])
@pytest.mark.parametrize("fate", ["taken", "discarded", "too late", "cleared"])
def test_thousands_of_short_lived_groups_leave_nothing_behind(fate, looked_at):
    queue = pending(max_delay=0.1, capacity=10_000, capacity_bytes=2**20)
    for round_ in range(3):
        requests = [Request(enqueued=float(round_), deadline=round_ + 1.0, group=n) for n in range(2000)]
        queue.add(requests)
        if looked_at:
            assert queue.due_in(float(round_)) == pytest.approx(0.1)
        if fate == "taken":
            assert all(queue.take(round_ + 0.5)[0] for _ in requests)
        elif fate == "discarded":
            for request in requests:
                queue.discard(request)
        elif fate == "too late":
            assert queue.take(round_ + 2.0) == ([], requests)
        else:
            assert queue.clear() == requests
        assert left_behind(queue) <= 256
    assert queue.due_in(99.0) is None
    assert left_behind(queue) == 0
    assert (len(queue), queue.bytes, queue.oldest()) == (0, 0, None)


def test_a_group_that_changes_all_the_time_leaves_no_trail():
    older, stays = Request("older", enqueued=-0.1, group=2), Request("stays", "l", 0.0, group=1)
    queue = pending(older, stays, max_batch_size=1000)
    for n in range(1000):
        comes = Request(lane="h", enqueued=float(n), group=1)
        queue.add([comes])
        queue.due_in(0.0)
        queue.discard(comes)
        queue.due_in(0.0)
    assert left_behind(queue) <= 256
    assert len(stays.pending._lanes["h"]) < 100


# costs


def costs(*numbers: float | None, **settings: object) -> Pending[Request]:
    return pending(*(Request(cost, cost=cost) for cost in numbers), max_batch_size=8, **settings)


def test_a_batch_ends_before_the_request_that_does_not_fit_and_skips_nothing():
    queue = costs(4, 4, 3, 1, 10, max_batch_cost=10)
    assert [names(queue.take(0.0)[0]) for _ in range(4)] == [[4, 4], [3, 1], [10], []]


def test_a_padded_batch_costs_its_largest_request_times_its_size():
    queue = costs(2, 2, 2, 4, 1, 1, 6, padded=True, max_batch_cost=10)
    assert [names(queue.take(0.0)[0]) for _ in range(4)] == [[2, 2, 2], [4, 1], [1], [6]]


def test_the_first_request_of_a_batch_goes_whatever_it_costs():
    for padded in (False, True):
        queue = costs(99, 0, 1, max_batch_cost=10, padded=padded)
        assert [names(queue.take(0.0)[0]) for _ in range(2)] == [[99], [0, 1]]


def test_a_request_without_a_cost_counts_one():
    assert names(costs(None, None, None, max_batch_cost=2).take(0.0)[0]) == [None, None]


def test_without_a_budget_costs_decide_nothing():
    queue = costs(1e9, 1e9, None)
    assert queue.due_in(0.0) == 0.5
    assert len(queue.take(0.0)[0]) == 3


def test_a_group_whose_cost_reaches_the_budget_is_due_at_once():
    assert costs(4, 5, max_batch_cost=10).due_in(0.0) == 0.5
    assert costs(4, 6, max_batch_cost=10).due_in(0.0) == 0.0
    assert costs(4, 5, max_batch_cost=10, padded=True).due_in(0.0) == 0.0
    assert costs(4, 4, max_batch_cost=10, padded=True).due_in(0.0) == 0.5


def test_the_budget_is_that_of_one_group():
    queue = pending(*(Request(group=n, cost=6) for n in range(3)), max_batch_cost=10)
    assert queue.due_in(0.0) == 0.5


@pytest.mark.parametrize("padded", [False, True])
def test_a_costly_request_that_was_given_up_makes_no_batch_full(padded):
    costly = Request(cost=9)
    queue = pending(Request(cost=1), costly, Request(cost=1), max_batch_cost=10, padded=padded)
    assert queue.due_in(0.0) == 0.0
    queue.discard(costly)
    assert queue.due_in(0.0) == 0.5


def test_what_a_batch_leaves_behind_is_due_in_its_own_time():
    queue = pending(*(Request(n, enqueued=n / 10, cost=6) for n in range(3)), max_batch_cost=10)
    assert names(queue.take(0.2)[0]) == [0]
    assert queue.due_in(0.2) == 0.0
    assert names(queue.take(0.2)[0]) == [1]
    assert queue.due_in(0.25) == pytest.approx(0.45)


def test_the_budget_ends_a_batch_before_the_lower_lanes():
    queue = pending(
        Request("l", "l", cost=1), Request("n", "n", cost=6), Request("h", "h", cost=6), max_batch_cost=10
    )
    assert [names(queue.take(0.0)[0]) for _ in range(2)] == [["h"], ["n", "l"]]


def test_a_granted_place_counts_first_so_that_no_lane_starves_of_the_budget():
    high = [Request("h", "h", enqueued=5.0, cost=4) for _ in range(4)]
    queue = pending(Request("l", "l", 0.0, cost=4), Request("l2", "l", 0.0, cost=1), *high, max_batch_cost=10)
    assert names(queue.take(5.0)[0]) == ["h", "l"]


# requests whose group is not known yet


def test_an_unsorted_request_counts_as_pending_and_is_in_no_batch():
    queue = pending(capacity=2, max_delay=0)
    queue.add_unsorted([Request("x", "h", size=7), Request("y", enqueued=1.0)])
    assert not queue.fits("n", 1, 1)
    assert (len(queue), queue.bytes, queue.depth("h"), queue.oldest()) == (2, 8, 1, 0.0)
    assert queue.due_in(9.0) is None
    assert queue.take(9.0) == ([], [])


def test_a_sorted_request_is_in_the_group_that_it_has_by_then():
    requests = [Request(n) for n in range(4)]
    queue = pending(max_batch_size=2)
    queue.add_unsorted(requests)
    for request in queue.unsorted(99):
        request.group = request.name % 2
        queue.sort(request)
    assert queue.unsorted(99) == []
    assert queue.due_in(0.0) == 0.0
    assert [names(queue.take(0.0)[0]) for _ in range(3)] == [[0, 2], [1, 3], []]
    assert (len(queue), queue.bytes) == (0, 0)


def test_unsorted_requests_are_given_out_a_few_of_each_lane_in_their_order():
    queue = pending()
    queue.add_unsorted(Request(lane + str(n), lane) for n in range(3) for lane in "lnh")
    assert names(queue.unsorted(2)) == ["h0", "h1", "n0", "n1", "l0", "l1"]
    queue.sort(queue.unsorted(2)[0])
    assert names(queue.unsorted(2)) == ["h1", "h2", "n0", "n1", "l0", "l1"]


def test_an_unsorted_request_that_was_given_up_is_not_sorted():
    request = Request()
    queue = pending()
    queue.add_unsorted([request])
    queue.discard(request)
    queue.sort(request)
    assert (len(queue), queue.bytes, queue.unsorted(9), queue.due_in(0.0)) == (0, 0, [], None)


def test_unsorted_requests_that_were_given_up_leave_nothing_behind():
    queue = pending(capacity=10)
    queue.add_unsorted([Request("stays")])
    for _ in range(1000):
        request = Request()
        queue.add_unsorted([request])
        queue.discard(request)
    assert len(queue._unsorted._lanes["n"]) < 100
    assert names(queue.unsorted(9)) == ["stays"]
    assert names(queue.clear()) == ["stays"]
    assert queue.unsorted(9) == []


# all rules at once, against a model of them that looks at everything each time


@dataclass
class Rules:
    """The rules, carried out on a list."""

    policy: BatchPolicy
    waiting: list[Request] = field(default_factory=list)
    batches: int = 0

    def cost(self, requests: list[Request]) -> float:
        numbers = [1 if request.cost is None else request.cost for request in requests]
        return max(numbers) * len(numbers) if self.policy.padded else sum(numbers)

    def groups(self) -> list[list[Request]]:
        found: dict[Hashable, list[Request]] = {}
        for request in self.waiting:
            found.setdefault(request.group, []).append(request)
        return list(found.values())

    def full(self, group: list[Request]) -> bool:
        budget = self.policy.max_batch_cost
        return len(group) >= self.policy.max_batch_size or (budget is not None and self.cost(group) >= budget)

    def due_in(self, group: list[Request], now: float) -> float:
        delay = self.policy.max_delay
        oldest = min(lane[0].enqueued for lane in lanes(group).values())
        return 0.0 if self.full(group) or oldest - now > delay else min(max(0.0, oldest + delay - now), delay)

    def batch(self, now: float, cutoff: float, limit: int | None) -> list[Request]:
        groups = self.groups()
        due = [group for group in groups if self.due_in(group, now) == 0.0] or groups
        live = [found for group in due if (found := [r for r in group if r.deadline >= cutoff])]
        if not live:
            return []

        def oldest(group: list[Request]) -> float:
            return min(lane[0].enqueued for lane in lanes(group).values())

        chosen = min(live, key=lambda group: ("hnl".index(next(iter(lanes(group)))), oldest(group)))
        if self.batches % 4 == 3 and any(now - oldest(group) > AGED for group in live):
            chosen = min(live, key=oldest)
        self.batches += 1
        size = self.policy.max_batch_size if limit is None else max(1, min(limit, self.policy.max_batch_size))

        def fits(requests: list[Request]) -> bool:
            budget = self.policy.max_batch_cost
            return len(requests) <= size and (
                budget is None or len(requests) == 1 or self.cost(requests) <= budget
            )

        heads = sorted((lane[0] for lane in lanes(chosen).values()), key=lambda head: head.enqueued)
        batch: list[Request] = []
        for head in heads:
            if now - head.enqueued > AGED and fits([*batch, head]):
                batch.append(head)
        for request in (request for lane in lanes(chosen).values() for request in lane):
            if request not in batch:
                if not fits([*batch, request]):
                    break
                batch.append(request)
        return [request for lane in lanes(chosen).values() for request in lane if request in batch]


def lanes(requests: list[Request]) -> dict[str, list[Request]]:
    found = {lane: [request for request in requests if request.lane == lane] for lane in "hnl"}
    return {lane: requests for lane, requests in found.items() if requests}


OPERATION = st.one_of(
    st.tuples(
        st.just("add"),
        st.sampled_from("hnl"),
        st.sampled_from([None, None, "a", "b", 1]),
        st.sampled_from([None, 0, 0.5, 1, 2, 3, 8, 20]),
        st.floats(0.0, 5.0),
        st.integers(1, 50),
        st.sampled_from([0.0, 0.0, 0.0, 0.25, 1e6]),
        st.booleans(),
    ),
    st.tuples(st.just("discard"), st.integers(0, 50)),
    st.tuples(st.just("take"), st.floats(0.0, 2.0), st.sampled_from([None, None, 0, 1, 3])),
    st.tuples(st.just("later"), st.floats(0.0, 3.0)),
    st.tuples(st.just("sort"), st.integers(1, 3)),
)


@given(
    st.lists(OPERATION, max_size=60),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from([None, 5, 10]),
    st.booleans(),
)
@example(
    [("add", "n", None, None, 0.0, 1, 0.0, False), ("later", 1.0), ("take", 0.0, None)], 1, 1, None, True
)
def test_whatever_happens_each_batch_is_what_the_rules_say(operations, size, capacity, budget, padded):
    policy = BatchPolicy(
        max_batch_size=size,
        max_delay=0.5,
        capacity=capacity,
        capacity_bytes=1024,
        max_batch_cost=budget,
        padded=padded and budget is not None,
    )
    queue: Pending[Request] = Pending(policy)
    rules = Rules(policy)
    unsorted: list[Request] = []
    now = 0.0
    for number, (operation, *rest) in enumerate(operations):
        everything = rules.waiting + unsorted
        if operation == "later":
            now += rest[0]
        elif operation == "add":
            lane, group, cost, timeout, bytes_, ahead, known = rest
            enqueued = now + ahead + number * 1e-6  # no two at the same time
            if queue.fits(lane, 1, bytes_):
                request = Request(
                    number, lane, enqueued, enqueued + timeout, size=bytes_, group=group, cost=cost
                )
                if known:
                    rules.waiting.append(request)
                    seems_full = queue.add([request])
                    assert seems_full or not any(rules.full(g) for g in rules.groups() if request in g)
                else:
                    unsorted.append(request)
                    queue.add_unsorted([request])
        elif operation == "discard" and everything:
            request = everything[rest[0] % len(everything)]
            queue.discard(request)
            (rules.waiting if request in rules.waiting else unsorted).remove(request)
        elif operation == "sort":
            found = queue.unsorted(rest[0])
            assert found == [request for lane in lanes(unsorted).values() for request in lane[: rest[0]]]
            for request in found:
                queue.sort(request)
                unsorted.remove(request)
                rules.waiting.append(request)
        elif operation == "take":
            run_time, limit = rest
            cutoff = now + DEADLINE_MARGIN * run_time
            batch, expired = queue.take(now, run_time, limit)
            assert names(batch) == names(rules.batch(now, cutoff, limit))
            assert all(request.deadline < cutoff for request in expired)
            for request in batch + expired:
                rules.waiting.remove(request)
        left = rules.waiting + unsorted
        assert (len(queue), queue.bytes) == (len(left), sum(request.size for request in left))
        assert [queue.depth(lane) for lane in "hnl"] == [len(lanes(left).get(lane, [])) for lane in "hnl"]
        heads = [lane[0].enqueued for group in rules.groups() for lane in lanes(group).values()]
        heads += [lane[0].enqueued for lane in lanes(unsorted).values()]
        assert queue.oldest() == min(heads, default=None)
        assert queue.due_in(now) == min((rules.due_in(g, now) for g in rules.groups()), default=None)
        assert len(queue) <= capacity
        assert queue.depth("l") <= max(1, capacity // 2)
        assert len(queue._groups) == len({request.group for request in rules.waiting} - {None})
    assert {request.name for request in rules.waiting + unsorted} == set(names(queue.clear()))
