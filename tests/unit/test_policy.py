"""When a batch is due and what goes in it, on a clock that the test holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
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
    pending: bool = field(default=False)


def pending(
    *requests: Request, max_batch_size: int = 4, max_delay: float = 0.5, capacity: int = 100
) -> Pending[Request]:
    policy = BatchPolicy(
        max_batch_size=max_batch_size, max_delay=max_delay, capacity=capacity, capacity_bytes=1024
    )
    found: Pending[Request] = Pending(policy)
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
    assert len(queue._lanes["n"]) < 100
    assert names(queue.take(0.0)[0]) == [first.name]


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


def test_after_out_of_memory_batches_are_half_as_large_for_a_minute():
    cap = Cap()
    assert cap.limit(0.0) is None
    cap.out_of_memory(32, 0.0)
    cap.out_of_memory(8, 1.0)
    cap.out_of_memory(16, 2.0)
    assert cap.limit(2.0) == 4
    assert cap.limit(2.0 + CAP_SECONDS) is None
    cap.out_of_memory(1, 100.0)
    assert cap.limit(100.0) == 1


OPERATION = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("hnl"), st.floats(0.0, 5.0), st.integers(1, 50)),
    st.tuples(st.just("discard"), st.integers(0, 50)),
    st.tuples(st.just("take"), st.floats(0.0, 2.0)),
    st.tuples(st.just("later"), st.floats(0.0, 3.0)),
)


@given(st.lists(OPERATION, max_size=60), st.integers(1, 5), st.integers(1, 12))
def test_whatever_happens_no_live_request_is_lost_and_lanes_stay_in_order(
    operations, max_batch_size, capacity
):
    queue = pending(max_batch_size=max_batch_size, capacity=capacity)
    waiting: dict[str, list[Request]] = {"h": [], "n": [], "l": []}
    now = 0.0
    for operation, *rest in operations:
        everything = [request for lane in waiting.values() for request in lane]
        if operation == "later":
            now += rest[0]
        elif operation == "add":
            lane, timeout, size = rest
            if queue.fits(lane, 1, size):
                request = Request(lane=lane, enqueued=now, deadline=now + timeout, size=size)
                queue.add([request])
                waiting[lane].append(request)
        elif operation == "discard" and everything:
            request = everything[rest[0] % len(everything)]
            queue.discard(request)
            waiting[request.lane].remove(request)
        elif operation == "take":
            run_time = rest[0]
            cutoff = now + DEADLINE_MARGIN * run_time
            live = {lane: [r for r in requests if r.deadline >= cutoff] for lane, requests in waiting.items()}
            aged = [
                requests[0] for requests in live.values() if requests and now - requests[0].enqueued > AGED
            ]
            batch, expired = queue.take(now, run_time)
            # as many as there are, never more than max_batch_size, none that is late
            assert len(batch) == min(max_batch_size, sum(map(len, live.values())))
            assert all(request.deadline < cutoff for request in expired)
            # each lane gives its oldest, in order; high stands before normal before low
            assert batch == [
                r for lane in "hnl" for r in live[lane][: sum(other.lane == lane for other in batch)]
            ]
            # the oldest of each lane that has waited a second is in it, as far as there are places
            assert sum(request in batch for request in aged) == min(len(aged), max_batch_size)
            for request in batch + expired:
                waiting[request.lane].remove(request)
        left = [request for lane in waiting.values() for request in lane]
        assert (len(queue), queue.bytes) == (len(left), sum(request.size for request in left))
        assert {lane: queue.depth(lane) for lane in "hnl"} == {
            lane: len(found) for lane, found in waiting.items()
        }
        assert queue.oldest() == min((request.enqueued for request in left), default=None)
        assert len(queue) <= capacity
        assert queue.depth("l") <= max(1, capacity // 2)
        due = queue.due_in(now)
        assert (due is None) == (not left)
        assert due is None or 0.0 <= due <= queue.policy.max_delay
    assert {request for lane in waiting.values() for request in lane} == set(queue.clear())
