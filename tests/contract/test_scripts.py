"""Each verb: the raw state of Redis before and after it, on fakeredis and on a real server.

``Queue.call`` checks after every verb what must hold always (tests/contract/queues.py): a lane's two lists are as long as each other and
hold the same ids in the same order, ``pending_bytes`` is the sum of the sizes, ``due`` is gone, and there is at most one token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest

from batchq import commands, stats, wire
from batchq.commands import Answers
from batchq.errors import DeadlineExceededError, JobCancelledError, ModelError
from batchq.store import OutOfMemory
from tests.contract.queues import CLIENT, MINUTE, Queue, Seed, ids, outgoing, taken_ids

FORMS = ["light", "force", "native"]
every_form = pytest.mark.parametrize("form", FORMS)


# --- push -------------------------------------------------------------------------------------------------------------


def test_a_push_appends_requests_and_heads_in_order_and_leaves_a_token(queue: Queue):
    requests = outgoing(3)
    pushed = queue.push(requests, "", "1")
    assert (pushed.outcome, pushed.admitted, pushed.pending) == ("ok", {"n": 3}, 3)
    state = queue.dump()
    assert state["requests"] == [request.request for request in requests]
    assert state["heads"] == [
        f"{pushed.now};{MINUTE};{len(r.request)};0;n;0;{r.id.hex()}".encode() for r in requests
    ]
    assert state["producer:p"] == b"1 3"
    assert state["wake"] == [b"1"]
    assert queue.counter("accepted") == 3
    assert set(state) == {"requests", "heads", "producer:p", "wake", "counters"}


def test_idle_keys_of_a_push_expire(queue: Queue):
    queue.push(outgoing(1), "", "1")
    week = 7 * 86_400_000
    for name in ("requests", "heads"):
        assert week - 60_000 < queue.ttl_ms(name) <= week
    assert 3_540_000 < queue.ttl_ms("producer:p") <= 3_600_000


def test_a_push_of_several_lanes_fills_each_and_reports_by_lane(queue: Queue):
    high, normal, low = outgoing(1, lane="h"), outgoing(3), outgoing(2, lane="l")
    pushed = queue.push([*low, *normal, *high], "", "1")
    assert pushed.admitted == {"h": 1, "n": 3, "l": 2}
    assert pushed.pending == 6
    assert (queue.ids("h"), queue.ids("n"), queue.ids("l")) == (ids(high), ids(normal), ids(low))
    assert queue.raw("GET", queue.keys.producer("p")) == b"1 1,3,2"


def test_a_second_push_goes_behind_the_first_and_leaves_one_token(queue: Queue):
    first, second = outgoing(2), outgoing(2)
    queue.push(first, "", "1")
    queue.push(second, "1", "2")
    assert queue.ids("n") == ids(first + second)
    assert queue.tokens() == 1


def test_a_push_that_want_says_is_not_worth_it_leaves_no_token(queue: Queue):
    queue.raw("SET", queue.key("want"), 4, "PX", 60_000)
    queue.push(outgoing(3), "", "1")
    assert queue.tokens() == 0
    queue.push(outgoing(1), "1", "2")
    assert queue.tokens() == 1


def test_what_exceeds_the_capacity_is_refused_from_the_pushs_tail(queue: Queue):
    requests = outgoing(5)
    pushed = queue.push(requests, "", "1", capacity=3)
    assert (pushed.outcome, pushed.admitted, pushed.pending) == ("ok", {"n": 3}, 3)
    assert queue.ids("n") == ids(requests[:3])
    assert (queue.counter("accepted"), queue.counter("rejected")) == (3, 2)
    pushed = queue.push(outgoing(2), "1", "2", capacity=3)
    assert (pushed.admitted, pushed.pending) == ({"n": 0}, 3)
    assert queue.counter("rejected") == 4
    assert queue.raw("GET", queue.keys.producer("p")) == b"2 0"


def test_a_refused_push_leaves_the_requests_of_others_alone(queue: Queue):
    mine = outgoing(3)
    queue.push(mine, "", "1", producer="a", capacity=3)
    assert queue.push(outgoing(2), "", "1", producer="b", capacity=3).admitted == {"n": 0}
    assert queue.ids("n") == ids(mine)


def test_high_requests_get_the_room_that_is_left_before_normal_and_low(queue: Queue):
    pushed = queue.push(outgoing(2, lane="l") + outgoing(2) + outgoing(2, lane="h"), "", "1", capacity=3)
    assert pushed.admitted == {"h": 2, "n": 1, "l": 0}


def test_low_requests_fill_at_most_half_of_the_capacity(queue: Queue):
    low = outgoing(6, lane="l")
    assert queue.push(low, "", "1", capacity=8).admitted == {"l": 4}
    assert queue.push(outgoing(9), "1", "2", capacity=8).admitted == {"n": 4}
    assert queue.ids("l") == ids(low[:4])


def test_a_capacity_of_one_still_takes_a_low_request(queue: Queue):
    assert queue.push(outgoing(1, lane="l"), "", "1", capacity=1).admitted == {"l": 1}


def test_all_lanes_and_solo_count_against_the_capacity(queue: Queue):
    queue.seed(Seed(lane="h"), Seed(lane="l"), Seed(died=("w", 0)))
    assert queue.push(outgoing(5), "", "1", capacity=5).admitted == {"n": 2}


def test_a_whole_push_is_admitted_wholly_or_not_at_all(queue: Queue):
    assert queue.push(outgoing(4), "", "1", capacity=3, whole=True).admitted == {"n": 0}
    assert queue.ids("n") == []
    assert queue.push(outgoing(3), "1", "2", capacity=3, whole=True).admitted == {"n": 3}
    assert queue.push(outgoing(1), "2", "3", capacity=3, whole=True).admitted == {"n": 0}
    assert queue.counter("rejected") == 5


def test_a_forced_push_ignores_the_capacity(queue: Queue):
    requests = outgoing(3)
    assert queue.push(requests, "", "1", capacity=1, force=True).admitted == {"n": 3}
    assert queue.push(outgoing(2, lane="l"), "1", "2", capacity=1, force=True).admitted == {"l": 2}
    assert queue.ids("n") == ids(requests)


def test_the_queues_capacity_holds_and_a_client_can_only_lower_it(queue: Queue):
    queue.raw("HSET", queue.keys.config, "capacity", 3)
    assert queue.push(outgoing(2), "", "1", capacity=2).admitted == {"n": 2}
    assert queue.push(outgoing(2), "1", "2").admitted == {"n": 1}
    assert queue.push(outgoing(2), "2", "3", capacity=100).admitted == {"n": 0}


def test_the_queues_capacity_in_bytes_holds(queue: Queue):
    requests = outgoing(4, size=1000)
    size = len(requests[0].request)
    queue.raw("HSET", queue.keys.config, "capacity_bytes", 3 * size)
    pushed = queue.push(requests, "", "1")
    assert pushed.admitted == {"n": 3}
    assert queue.counter("pending_bytes") == 3 * size
    assert queue.push(outgoing(1), "1", "2").admitted == {"n": 0}
    assert queue.ids("n") == ids(requests[:3])


def test_bytes_are_refused_from_the_first_request_that_does_not_fit(queue: Queue):
    small, large, after = outgoing(1, size=10), outgoing(1, size=5000), outgoing(1, size=10)
    queue.raw("HSET", queue.keys.config, "capacity_bytes", 1000)
    assert queue.push(small + large + after, "", "1").admitted == {"n": 1}
    assert queue.ids("n") == ids(small)


def test_a_request_larger_than_the_capacity_in_bytes_is_taken_by_an_empty_queue(queue: Queue):
    queue.raw("HSET", queue.keys.config, "capacity_bytes", 1000)
    assert queue.push(outgoing(2, size=5000), "", "1").admitted == {"n": 1}
    assert queue.push(outgoing(1), "1", "2").admitted == {"n": 0}


def test_a_full_push_tells_the_rate_at_which_live_workers_drain(queue: Queue):
    queue.raw("HSET", queue.keys.counters, "drain_rate", "12.500", "reported_us", queue.now())
    assert queue.push(outgoing(2), "", "1", capacity=1).drain_rate == 12.5
    queue.raw("HSET", queue.keys.counters, "reported_us", queue.now() - 11_000_000)
    assert queue.push(outgoing(2), "1", "2", capacity=1).drain_rate == 0.0


def test_a_push_that_is_sent_again_is_not_doubled(queue: Queue):
    requests = outgoing(2) + outgoing(2, lane="l")
    queue.push(requests, "", "1", capacity=3)
    before = queue.dump()
    again = queue.push(requests, "", "1", capacity=3)
    assert (again.outcome, again.admitted) == ("dup", {"n": 2, "l": 1})
    assert queue.dump() == before


def test_a_push_that_is_sent_again_after_it_was_taken_is_not_doubled(queue: Queue):
    requests = outgoing(4)
    queue.push(requests, "", "1")
    assert len(queue.take().heads) == 4
    assert queue.push(requests, "", "1").outcome == "dup"
    assert queue.ids("n") == []


@pytest.mark.parametrize("previous", ["", "1", "3", "9"])
def test_a_push_behind_a_gap_changes_nothing_and_tells_the_last_one_known(queue: Queue, previous):
    queue.push(outgoing(1), "", "2")
    before = queue.dump()
    gap = queue.push(outgoing(2) + outgoing(1, lane="h"), previous, "4")
    assert (gap.outcome, gap.stored) == ("gap", "2")
    assert queue.dump() == before


def test_a_push_that_expects_a_lost_record_is_a_gap(queue: Queue):
    gap = queue.push(outgoing(2), "7", "8")
    assert (gap.outcome, gap.stored) == ("gap", "")
    assert queue.dump() == {}


def test_a_push_with_nothing_else_outstanding_needs_no_record(queue: Queue):
    pushed = queue.push(outgoing(2), "7", "8", fresh=True)
    assert (pushed.outcome, pushed.admitted) == ("ok", {"n": 2})
    assert queue.raw("GET", queue.keys.producer("p")) == b"8 2"


def test_a_fresh_push_is_a_gap_where_redis_knows_another_one(queue: Queue):
    queue.push(outgoing(1), "", "2")
    assert queue.push(outgoing(1), "7", "8", fresh=True).outcome == "gap"


def test_the_last_push_can_be_read(queue: Queue):
    assert queue.call(commands.last_push(queue.keys, "p")) == ""
    queue.push(outgoing(1), "", "17")
    assert queue.call(commands.last_push(queue.keys, "p")) == "17"
    health = queue.call(commands.health(queue.keys, "p"))
    assert health.stored == "17"
    assert health.silent > 1e9
    queue.raw("HSET", queue.keys.counters, "reported_us", queue.now())
    assert 0 <= queue.call(commands.health(queue.keys, "p")).silent < 60


def test_reading_a_producers_record_keeps_it_alive_as_long_as_its_requests_are_outstanding(queue: Queue):
    queue.push(outgoing(1), "", "1")
    queue.raw("PEXPIRE", queue.keys.producer("p"), 60_000)
    queue.call(commands.health(queue.keys, "p"))
    assert queue.ttl_ms("producer:p") > 3_000_000


def test_fail_fast_refuses_where_no_worker_reports(queue: Queue):
    pushed = queue.push(outgoing(2), "", "1", fail_fast=True)
    assert pushed.outcome == "no_worker"
    assert queue.dump() == {}
    queue.raw("HSET", queue.keys.counters, "reported_us", queue.now() - 11_000_000)
    assert queue.push(outgoing(1), "", "1", fail_fast=True).outcome == "no_worker"
    assert "requests" not in queue.dump()
    queue.raw("HSET", queue.keys.counters, "reported_us", queue.now() - 8_000_000)
    assert queue.push(outgoing(1), "", "1", fail_fast=True).outcome == "ok"


def test_a_job_leaves_a_mark_with_its_deadline_and_result_ttl(queue: Queue):
    [job] = outgoing(ttl_ms=5000, timeout_us=7_000_000)
    pushed = queue.push([job], "", "1", jobs=True)
    assert queue.raw("GET", queue.keys.job(job.id)) == f"{pushed.now + 7_000_000};5000".encode()
    assert 11_000 < queue.ttl_ms(f"job:{job.id.hex()}") <= 12_000
    assert queue.call(commands.job_state(queue.keys, job.id)) == (None, True)


def test_a_job_that_is_submitted_twice_runs_once(queue: Queue):
    [job] = outgoing(ttl_ms=5000)
    [other] = outgoing(ttl_ms=5000)
    queue.push([job], "", "1", jobs=True)
    mark = queue.raw("GET", queue.keys.job(job.id))
    queue.push([job, other], "1", "2", jobs=True)
    assert queue.raw("GET", queue.keys.job(job.id)) == mark
    taken = queue.take(options=queue.options(max_delay_us=0))
    assert sorted(taken_ids(taken)) == sorted([job.id, other.id])
    assert queue.call(commands.job_state(queue.keys, job.id)) == (
        None,
        True,
    )  # the second one got no answer of its own


def test_a_thousand_requests_fit_into_one_push_and_one_take(queue: Queue):
    requests = outgoing(2500, size=1)
    assert queue.push(requests, "", "1").admitted == {"n": 2500}
    options = queue.options(max_batch_size=2500)
    for form in ("light", "native"):
        taken = queue.take(form, form=form, options=options)
        assert taken_ids(taken) == ids(requests)
        assert queue.call(commands.release(queue.keys, form)) == 2500
        assert queue.ids("n") == ids(requests)


# --- repair -----------------------------------------------------------------------------------------------------------


def test_requests_that_lost_their_heads_are_not_run_and_keep_nobody_else_waiting(queue: Queue):
    [orphan] = outgoing()
    queue.raw("RPUSH", queue.keys.requests["n"], orphan.request)
    requests = outgoing(4)
    assert queue.push(requests, "", "1", consistent=False).admitted == {"n": 4}
    assert queue.counter("repaired") == 1
    assert queue.raw("LLEN", queue.keys.requests["n"]) == queue.raw("LLEN", queue.keys.heads["n"])
    taken = queue.take(options=queue.options(max_delay_us=0))
    assert taken_ids(taken) == ids(requests)
    assert queue.raw("EXISTS", queue.keys.requests["n"], queue.keys.heads["n"]) == 0
    assert queue.counter("pending_bytes") == 0


def test_heads_that_lost_their_requests_go(queue: Queue):
    queue.seed(Seed(), Seed(), Seed())
    kept = queue.seed(Seed(), Seed())
    for _ in range(3):  # from the front, as a take does that is torn
        queue.raw("LPOP", queue.keys.requests["n"])
    requests = outgoing(2)
    queue.push(requests, "", "1")
    assert queue.ids("n") == kept + ids(requests)
    assert queue.counter("repaired") == 3


@every_form
def test_take_repairs_a_lane_that_lost_heads(queue: Queue, form):
    [orphan] = outgoing()
    queue.raw("RPUSH", queue.keys.requests["n"], orphan.request)
    queue.take("a", form=form, consistent=False)
    taken = queue.take("b", form=form, options=queue.options(max_delay_us=0))
    assert taken_ids(taken) == []
    assert queue.counter("repaired") == 1
    assert "requests" not in queue.dump()


@every_form
def test_take_repairs_a_lane_that_lost_requests(queue: Queue, form):
    [_, kept] = queue.seed(Seed(age=100), Seed(age=100))
    queue.raw("LPOP", queue.keys.requests["n"])
    taken = queue.take(form=form)
    assert taken_ids(taken) == [kept]
    assert queue.dump()["counters"][b"repaired"] == b"1"


@every_form
def test_take_repairs_a_lane_that_lost_all_its_requests(queue: Queue, form):
    queue.seed(Seed(age=100), Seed(age=100))
    queue.raw("DEL", queue.keys.requests["n"])
    assert queue.take(form=form).outcome == "idle"
    assert "heads" not in queue.dump()


# --- take: when -------------------------------------------------------------------------------------------------------


@every_form
def test_an_empty_queue_is_idle(queue: Queue, form):
    queue.raw("SET", queue.key("want"), 4)
    taken = queue.take(form=form)
    assert (taken.outcome, taken.dropped) == ("idle", 0)
    assert queue.dump() == {}


@every_form
def test_a_part_filled_batch_waits_and_want_says_what_is_worth_a_token(queue: Queue, form):
    pending = queue.seed(Seed(age=20), Seed(lane="h", age=10), Seed(lane="l", age=30))
    taken = queue.take(form=form)
    assert taken.outcome == "wait"
    assert 29 < taken.left <= 30.001  # the oldest of all lanes has waited 30 s of 60
    assert queue.raw("GET", queue.key("want")) == b"4"
    assert taken.left * 1000 - 1000 < queue.ttl_ms("want") <= taken.left * 1000 + 51
    assert queue.tokens() == 0
    assert queue.ids("n") + queue.ids("h") + queue.ids("l") == pending
    assert queue.raw("ZCARD", queue.keys.leases) == 0


@every_form
def test_a_full_batch_is_taken_at_once_and_leased(queue: Queue, form):
    requests = outgoing(4)
    queue.push(requests, "", "1")
    queue.drink_token()
    queue.raw("SET", queue.key("want"), 4)
    taken = queue.take(form=form)
    assert (taken.outcome, taken.kind, taken.pending) == ("batch", "batch", 0)
    assert taken_ids(taken) == ids(requests)
    assert queue.link.call(commands.fetch_batch(queue.keys, "b")) == [r.request for r in requests]
    state = queue.dump()
    assert set(state) == {"batch:b", "batch:b:heads", "leases", "counters", "producer:p"}
    assert (queue.counter("taken"), queue.counter("batches")) == (4, 1)


@every_form
def test_what_is_over_a_full_batch_stays_in_order_and_leaves_a_token(queue: Queue, form):
    requests = outgoing(7)
    queue.push(requests, "", "1")
    queue.drink_token()
    taken = queue.take(form=form)
    assert (taken_ids(taken), taken.pending) == (ids(requests[:4]), 3)
    assert queue.ids("n") == ids(requests[4:])
    assert queue.tokens() == 1


@every_form
def test_a_single_request_that_is_left_over_leaves_a_token_too(queue: Queue, form):
    queue.push(outgoing(5), "", "1")
    queue.drink_token()
    assert queue.take(form=form).pending == 1
    assert queue.tokens() == 1


@every_form
def test_an_overdue_request_is_taken_alone(queue: Queue, form):
    pending = queue.seed(Seed(age=60))
    taken = queue.take(form=form)
    assert (taken_ids(taken), taken.kind, taken.pending) == (pending, "batch", 0)
    assert queue.tokens() == 0


@every_form
def test_with_a_delay_of_zero_whatever_is_pending_is_due(queue: Queue, form):
    pending = queue.seed(Seed(), Seed())
    assert taken_ids(queue.take(form=form, options=queue.options(max_delay_us=0))) == pending


@every_form
def test_a_stamp_far_in_the_future_is_due_now(queue: Queue, form):
    pending = queue.seed(Seed(age=-3600))
    assert taken_ids(queue.take(form=form)) == pending


@every_form
def test_a_stamp_a_little_in_the_future_waits_no_longer_than_max_delay(queue: Queue, form):
    queue.seed(Seed(age=-30))
    taken = queue.take(form=form)
    assert (taken.outcome, taken.left) == ("wait", 60.0)


@every_form
def test_a_workers_own_limit_makes_batches_smaller_but_not_due_earlier(queue: Queue, form):
    pending = queue.seed(Seed(), Seed(), Seed())
    assert queue.take(form=form, limit=2).outcome == "wait"
    pending += queue.seed(Seed())
    taken = queue.take(form=form, limit=2)
    assert (taken_ids(taken), taken.pending) == (pending[:2], 2)
    assert queue.ids("n") == pending[2:]
    assert queue.tokens() == 1


@every_form
def test_a_take_that_is_repeated_returns_the_same_batch_with_a_longer_lease(queue: Queue, form):
    queue.seed(*[Seed()] * 6)
    first = queue.take(form=form)
    queue.raw("ZADD", queue.keys.leases, 1, "b")
    rest = queue.ids("n")
    again = queue.take(form=form)
    assert (again.outcome, again.kind, again.pending) == ("batch", "again", 2)
    assert again.heads == first.heads
    if again.requests is not None:
        assert again.requests == first.requests
    assert queue.ids("n") == rest
    assert queue.counter("batches") == 1


# --- take: lanes ------------------------------------------------------------------------------------------------------


@every_form
def test_a_batch_takes_high_before_normal_before_low(queue: Queue, form):
    low = queue.seed(Seed(lane="l"), Seed(lane="l"))
    normal = queue.seed(Seed(), Seed())
    high = queue.seed(Seed(lane="h"))
    taken = queue.take(form=form)
    assert sorted(taken_ids(taken)) == sorted(high + normal + low[:1])
    assert (queue.ids("h"), queue.ids("n"), queue.ids("l")) == ([], [], low[1:])
    for lane, expected in (("h", high), ("n", normal), ("l", low[:1])):
        assert [head.id for head in taken.heads if head and head.lane == lane] == expected


@pytest.mark.parametrize("form", ["light", "force"])
def test_a_batch_has_its_high_requests_in_front(queue: Queue, form):
    queue.seed(Seed(lane="l"), Seed(), Seed(lane="h"), Seed())
    assert [head.lane for head in queue.take(form=form).heads if head] == ["h", "n", "n", "l"]


@every_form
def test_leftovers_of_several_lanes_stay_ahead_in_their_order(queue: Queue, form):
    high = queue.seed(*[Seed(lane="h")] * 6)
    normal = queue.seed(*[Seed()] * 3)
    low = queue.seed(*[Seed(lane="l")] * 3)
    assert taken_ids(queue.take("a", form=form)) == high[:4]
    assert (queue.ids("h"), queue.ids("n"), queue.ids("l")) == (high[4:], normal, low)
    assert sorted(taken_ids(queue.take("b", form=form))) == sorted(high[4:] + normal[:2])
    assert (queue.ids("h"), queue.ids("n"), queue.ids("l")) == ([], normal[2:], low)
    assert sorted(taken_ids(queue.take("c", form=form))) == sorted(normal[2:] + low)
    assert queue.take("d", form=form).outcome == "idle"


@every_form
def test_the_oldest_of_a_lane_gets_a_place_after_a_second(queue: Queue, form):
    queue.seed(*[Seed(lane="h", age=0.5)] * 6)
    low = queue.seed(Seed(lane="l", age=2), Seed(lane="l", age=2))
    normal = queue.seed(Seed(age=3), Seed(age=3))
    taken = queue.take(form=form)
    lanes = sorted(head.lane for head in taken.heads if head)
    assert lanes == ["h", "h", "l", "n"]
    assert low[0] in taken_ids(taken)
    assert normal[0] in taken_ids(taken)
    assert (queue.ids("n"), queue.ids("l")) == (normal[1:], low[1:])


@every_form
def test_of_more_aged_lanes_than_places_the_oldest_go_first(queue: Queue, form):
    queue.seed(Seed(lane="h", age=2), Seed(lane="h", age=2))
    [low] = queue.seed(Seed(lane="l", age=9))
    [normal] = queue.seed(Seed(age=5))
    assert sorted(taken_ids(queue.take(form=form, limit=2))) == sorted([low, normal])


# --- take: what is not run --------------------------------------------------------------------------------------------


@every_form
def test_requests_that_are_too_late_at_the_front_are_dropped_and_the_batch_is_filled(queue: Queue, form):
    queue.seed(*[Seed(age=5, timeout=1)] * 9)
    live = queue.seed(*[Seed()] * 5)
    taken = queue.take(form=form)
    assert taken_ids(taken) == live[:4]
    assert queue.ids("n") == live[4:]
    assert queue.counter("expired") == 9
    assert queue.counter("taken") == 4


@every_form
def test_what_cannot_be_answered_within_the_time_of_a_run_is_dropped(queue: Queue, form):
    queue.seed(Seed(timeout=10), Seed(timeout=10))
    [live] = queue.seed(Seed(timeout=30))
    taken = queue.take(form=form, run_us=20_000_000, options=queue.options(max_delay_us=0))
    assert taken_ids(taken) == [live]
    assert queue.counter("expired") == 2


@every_form
def test_a_queue_of_nothing_but_late_requests_is_idle_and_says_how_many_it_dropped(queue: Queue, form):
    queue.seed(*[Seed(age=5, timeout=1)] * 6, Seed(lane="l", age=5, timeout=1))
    taken = queue.take(form=form)
    assert (taken.outcome, taken.dropped) == ("idle", 7)
    assert set(queue.dump()) == {"counters"}


@every_form
def test_dropping_makes_no_batch_due(queue: Queue, form):
    queue.seed(*[Seed(age=100, timeout=1)] * 3)
    live = queue.seed(Seed(), Seed())
    taken = queue.take(form=form)
    assert (taken.outcome, taken.dropped) == ("wait", 3)
    assert queue.ids("n") == live
    assert 59 < taken.left <= 60


@every_form
def test_a_late_request_among_live_ones_is_moved_along_but_not_run(queue: Queue, form):
    a, _, b, c, d = queue.seed(Seed(), Seed(age=5, timeout=1), Seed(), Seed(), Seed())
    taken = queue.take(form=form)
    live = taken_ids(taken)
    assert live[:3] == [a, b, c]
    assert live[3:] == (
        [] if form == "native" else [d]
    )  # natively each element costs one LMOVE of the batch's
    assert queue.ids("n") == ([d] if form == "native" else [])
    assert queue.counter("expired") == 1
    assert [head is None for head in taken.heads].count(True) == 1
    assert queue.counter("taken") == len(live)


@every_form
def test_cancelled_requests_are_dropped_wherever_they_wait(queue: Queue, form):
    pending = queue.seed(*[Seed(age=100)] * 4)
    queue.call(commands.cancel(queue.keys, [pending[0], pending[2]], 60_000))
    taken = queue.take(form=form)
    assert taken_ids(taken) == [pending[1], pending[3]]
    assert queue.counter("cancelled") == 2
    assert queue.counter("expired") == 0


@every_form
@pytest.mark.parametrize("among", [False, True], ids=["at the front", "among live ones"])
def test_a_job_that_is_dropped_is_answered(queue: Queue, form, among):
    live = queue.seed(Seed(age=100)) if among else []
    [job] = queue.seed(Seed(age=100, timeout=1, ttl_ms=50_000))
    live += queue.seed(Seed(age=100))
    assert taken_ids(queue.take(form=form)) == live
    [reply] = wire.decode_replies(queue.call(commands.read_reply(queue.keys, job)))
    assert reply.id == job
    assert isinstance(reply.error(), DeadlineExceededError)
    assert 49_000 < queue.ttl_ms(f"reply:{job.hex()}") <= 50_000


@every_form
def test_only_what_was_submitted_is_answered_when_it_is_dropped(queue: Queue, form):
    queue.seed(Seed(age=100, timeout=1), Seed(age=100))
    queue.take(form=form)
    assert not [name for name in queue.dump() if name.startswith("reply")]


@every_form
def test_heads_that_are_no_heads_are_dropped(queue: Queue, form):
    [kept] = queue.seed(Seed(age=100))
    queue.raw("LPUSH", queue.keys.heads["n"], "garbage")
    queue.raw("LPUSH", queue.keys.requests["n"], "garbage")
    assert taken_ids(queue.take(form=form)) == [kept]


# --- take: solo -------------------------------------------------------------------------------------------------------


@every_form
def test_requests_whose_worker_died_run_one_at_a_time_first(queue: Queue, form):
    normal = queue.seed(*[Seed()] * 4)
    solo = queue.seed(Seed(died=("dead", 1)), Seed(died=("dead", 1)))
    first = queue.take("a", form=form)
    assert (first.kind, taken_ids(first), first.pending) == ("solo", solo[:1], 5)
    assert queue.tokens() == 1
    second = queue.take("b", form=form, solo_first=False)
    assert (second.kind, taken_ids(second)) == ("batch", normal)
    third = queue.take("c", form=form, solo_first=False)
    assert (third.kind, taken_ids(third)) == ("solo", solo[1:])
    assert queue.take("d", form=form).outcome == "idle"


@every_form
def test_a_solo_run_does_not_wait_for_others_to_join(queue: Queue, form):
    waiting = queue.seed(Seed(), Seed())
    solo = queue.seed(Seed(died=("dead", 0)))
    taken = queue.take(form=form, solo_first=False)
    assert (taken.kind, taken_ids(taken)) == ("solo", solo)
    assert queue.ids("n") == waiting


def report(queue: Queue, worker: str, ago: float = 0.0) -> None:
    queue.raw("HSET", queue.keys.workers, worker, f"{queue.now() - int(ago * 1e6)};{worker};{{}}")


@every_form
def test_a_second_solo_try_is_left_to_another_live_worker(queue: Queue, form):
    solo = queue.seed(Seed(died=("w1", 1), attempts=1))
    report(queue, "w1")
    report(queue, "w2")
    assert queue.take("a", form=form).outcome == "idle"
    assert queue.ids("s") == solo
    taken = queue.take("b", form=form, options=queue.options(worker="w2"))
    assert taken_ids(taken) == solo
    assert taken.heads[0] is not None
    assert taken.heads[0].attempts == 1


@every_form
@pytest.mark.parametrize(
    ("others", "died_ago", "attempts"),
    [([], 1, 1), (["w2"], 11, 1), (["w2"], 1, 0)],
    ids=["nobody else alive", "nobody came for it", "the first try"],
)
def test_a_solo_try_is_taken_by_the_same_worker_otherwise(queue: Queue, form, others, died_ago, attempts):
    solo = queue.seed(Seed(died=("w1", died_ago), attempts=attempts))
    for worker in ["w1", *others]:
        report(queue, worker)
    report(queue, "w3", ago=30)  # dead by now
    assert taken_ids(queue.take(form=form)) == solo


@every_form
def test_a_second_solo_try_left_to_another_holds_no_batch_up(queue: Queue, form):
    queue.seed(Seed(died=("w1", 1), attempts=1))
    normal = queue.seed(*[Seed()] * 4)
    report(queue, "w2")
    taken = queue.take(form=form)
    assert (taken.kind, taken_ids(taken)) == ("batch", normal)


@every_form
def test_solo_requests_that_are_late_or_cancelled_are_dropped(queue: Queue, form):
    late, cancelled, live = queue.seed(
        Seed(died=("w", 1), age=100, timeout=1, ttl_ms=5000), Seed(died=("w", 1)), Seed(died=("w", 1))
    )
    queue.call(commands.cancel(queue.keys, [cancelled], 60_000))
    taken = queue.take(form=form)
    assert taken_ids(taken) == [live]
    assert (queue.counter("expired"), queue.counter("cancelled")) == (1, 1)
    assert queue.call(commands.read_reply(queue.keys, late))


# --- take: prefetch ---------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize(
    ("seeds", "token"),
    [([Seed()] * 4, False), ([Seed()] * 3, True), ([Seed(age=100)] * 3, True), ([Seed(died=("w", 1))], True), ([], True),
     ([Seed(age=5, timeout=1)] * 3 + [Seed()] * 2, True), ([Seed(died=("w", 1), age=5, timeout=1)], True)],
    ids=["no token", "not full", "overdue but not full", "solo", "empty", "not full without the late", "late solo"],
)  # fmt: skip
def test_a_prefetch_that_may_not_take_writes_nothing(queue: Queue, form, seeds, token):
    queue.seed(*seeds)
    queue.raw("SET", queue.key("want"), 4)
    if token:
        queue.raw("RPUSH", queue.keys.wake, "1")
    before = queue.dump()
    assert queue.take(form=form, prefetch=True).outcome == "no"
    assert queue.dump() == before


@every_form
def test_a_prefetch_takes_a_full_batch_that_nobody_idle_waits_for(queue: Queue, form):
    requests = outgoing(5)
    queue.push(requests, "", "1")
    taken = queue.take(form=form, prefetch=True)
    assert (taken.kind, taken_ids(taken), taken.pending) == ("batch", ids(requests[:4]), 1)
    assert queue.tokens() == 1


@every_form
def test_a_prefetch_never_takes_what_runs_alone(queue: Queue, form):
    queue.push(outgoing(4), "", "1")
    solo = queue.seed(Seed(died=("w", 1)))
    assert queue.take(form=form, prefetch=True).kind == "batch"
    assert queue.ids("s") == solo


@every_form
def test_a_prefetch_within_a_workers_own_limit_still_wants_a_full_queue(queue: Queue, form):
    queue.push(outgoing(3), "", "1")
    assert queue.take(form=form, limit=2, prefetch=True).outcome == "no"
    queue.push(outgoing(1), "1", "2")
    assert len(queue.take(form=form, limit=2, prefetch=True).heads) == 2


# --- take: large payloads ---------------------------------------------------------------------------------------------


def test_a_batch_of_large_payloads_is_taken_again_natively(queue: Queue):
    requests = outgoing(5, size=30_000)
    queue.push(requests, "", "1")
    queue.drink_token()
    bulk = queue.take(form="light")
    assert bulk.outcome == "bulk"
    assert queue.ids("n") == ids(requests)
    assert queue.tokens() == 1  # should this worker die before it comes again
    assert queue.raw("ZCARD", queue.keys.leases) == 0
    taken = queue.take(form="native")
    assert taken_ids(taken) == ids(requests[:4])
    assert taken.requests == [request.request for request in requests[:4]]
    assert queue.ids("n") == ids(requests[4:])


def test_a_large_batch_that_is_the_whole_lane_needs_no_second_take(queue: Queue):
    requests = outgoing(4, size=30_000)
    queue.push(requests, "", "1")
    assert taken_ids(queue.take(form="light")) == ids(requests)


def test_force_moves_any_size(queue: Queue):
    requests = outgoing(5, size=30_000)
    queue.push(requests, "", "1")
    assert taken_ids(queue.take(form="force")) == ids(requests[:4])
    assert queue.ids("n") == ids(requests[4:])


def test_a_large_request_to_run_alone_needs_no_second_take(queue: Queue):
    solo = queue.seed(Seed(died=("w", 1), size=100_000), Seed(died=("w", 1), size=100_000))
    assert taken_ids(queue.take(form="light")) == solo[:1]


def test_late_requests_are_dropped_once_though_the_batch_is_taken_in_two_goes(queue: Queue):
    queue.seed(Seed(age=5, timeout=1))
    queue.push(outgoing(5, size=30_000), "", "1")
    assert queue.take(form="light").outcome == "bulk"
    queue.take(form="native")
    assert queue.counter("expired") == 1


@pytest.mark.parametrize(
    "sizes", [(6, 1, 1), (1, 6, 1), (1, 1, 6), (3, 3, 3), (2, 0, 5), (0, 2, 2), (4, 4, 0)]
)
@pytest.mark.parametrize("limit", [1, 3, 4])
def test_whatever_the_lanes_hold_a_native_take_moves_what_a_light_one_would(queue: Queue, sizes, limit):
    lanes = [Seed(lane=lane) for lane, n in zip("hnl", sizes, strict=True) for _ in range(n)]
    seen: dict[str, list[list[bytes]]] = {}
    for form in FORMS:
        order = queue.seed(*lanes)
        index = {id_: bytes([at]) for at, id_ in enumerate(order)}
        rounds = []
        for number in range(20):
            taken = queue.take(
                f"{form}{number}", form=form, limit=limit, options=queue.options(max_delay_us=0)
            )
            if taken.outcome == "idle":
                break
            rounds.append(sorted(index[id_] for id_ in taken_ids(taken)))
        seen[form] = rounds
        assert sorted(b for part in rounds for b in part) == sorted(index.values())
    assert seen["light"] == seen["force"] == seen["native"]


# --- wake and nudge ---------------------------------------------------------------------------------------------------


def test_a_token_that_lies_there_ends_the_wait(queue: Queue):
    queue.push(outgoing(1), "", "1")
    assert queue.call(commands.wait_wake(queue.keys, 1.0)) is True
    assert queue.tokens() == 0


def test_a_nudge_leaves_a_token_if_anything_is_pending(queue: Queue):
    queue.raw("SET", queue.key("want"), 32)
    assert queue.call(commands.nudge(queue.keys)) == 0
    assert queue.dump() == {}
    for seed in (Seed(), Seed(lane="l"), Seed(died=("w", 1))):
        queue.seed(seed)
        queue.drink_token()
        queue.raw("SET", queue.key("want"), 32)
        assert queue.call(commands.nudge(queue.keys)) > 0
        assert queue.tokens() == 1
        assert not queue.raw("EXISTS", queue.key("want"))
    assert queue.call(commands.nudge(queue.keys)) == 3
    assert queue.tokens() == 1


# --- finish -----------------------------------------------------------------------------------------------------------


def answers(requests: list[Any], own: list[tuple[bytes, int]] = (), failed: int = 0) -> Answers:  # type: ignore[assignment]
    stream = [wire.encode_reply(request.id, "answer") for request in requests]
    return Answers(
        {CLIENT: stream} if stream else {},
        [(id_, ttl, wire.encode_reply(id_, "own")) for id_, ttl in own],
        len(stream) + len(own),
        failed,
    )


both_finishes = pytest.mark.parametrize(
    "finish", [commands.finish, commands.finish_at_maxmemory], ids=["multi", "script"]
)


@both_finishes
def test_finish_publishes_the_replies_and_forgets_the_batch(queue: Queue, finish):
    requests = outgoing(4)
    queue.push(requests, "", "1")
    queue.take()
    own = b"o" * 16
    assert queue.call(finish(queue.keys, "b", answers(requests, [(own, 9000)], failed=2))) is True
    state = queue.dump()
    assert set(state) == {f"replies:{CLIENT}", f"reply:{own.hex()}", "counters", "producer:p", "wake"}
    [[_, data]] = state[f"replies:{CLIENT}"]
    assert [(reply.id, reply.value) for reply in wire.decode_replies(data)] == [
        (r.id, "answer") for r in requests
    ]
    assert state[f"reply:{own.hex()}"] == [wire.encode_reply(own, "own")]
    assert 8000 < queue.ttl_ms(f"reply:{own.hex()}") <= 9000
    assert 59_000 < queue.ttl_ms(f"replies:{CLIENT}") <= 60_000
    assert (queue.counter("completed"), queue.counter("failed")) == (5, 2)


@both_finishes
def test_finish_says_when_the_lease_was_lost_and_publishes_all_the_same(queue: Queue, finish):
    requests = outgoing(1)
    assert queue.call(finish(queue.keys, "gone", answers(requests))) is False
    assert len(queue.dump()[f"replies:{CLIENT}"]) == 1


@both_finishes
def test_a_batch_of_nothing_to_answer_is_finished_too(queue: Queue, finish):
    queue.push(outgoing(4), "", "1")
    queue.take()
    assert queue.call(finish(queue.keys, "b", Answers({}, [], 0))) is True
    assert set(queue.dump()) == {"counters", "producer:p", "wake"}


@both_finishes
def test_one_stream_entry_holds_at_most_a_mebibyte_but_for_a_larger_reply(queue: Queue, finish):
    replies = [
        wire.encode_reply(bytes([i]) * 16, b"x" * size)
        for i, size in enumerate([600_000, 600_000, 10, 2_000_000, 10])
    ]
    queue.call(finish(queue.keys, "b", Answers({CLIENT: replies}, [], 5)))
    entries = [fields[1] for fields in queue.dump()[f"replies:{CLIENT}"]]
    assert b"".join(entries) == b"".join(replies)
    assert [len(wire.decode_replies(entry)) for entry in entries] == [1, 2, 1, 1]


@both_finishes
def test_replies_of_several_clients_go_to_their_own_streams(queue: Queue, finish):
    first, second = (wire.encode_reply(bytes([i]) * 16, i) for i in range(2))
    queue.call(finish(queue.keys, "b", Answers({"a" * 20: [first], "b" * 20: [second]}, [], 2)))
    state = queue.dump()
    assert state["replies:" + "a" * 20] == [[b"r", first]]
    assert state["replies:" + "b" * 20] == [[b"r", second]]


def test_both_ways_to_finish_leave_the_same_state(queue: Queue):
    states = []
    replies = Answers({CLIENT: [wire.encode_reply(b"i" * 16, "x")]}, [(b"o" * 16, 9000, b"reply")], 3, 1)
    for finish in (commands.finish, commands.finish_at_maxmemory):
        queue.raw("DEL", queue.keys.replies(CLIENT), queue.keys.reply(b"o" * 16), queue.keys.counters)
        queue.seed(*[Seed()] * 4)
        queue.take()
        queue.call(finish(queue.keys, "b", replies))
        states.append(queue.dump())
    assert states[0] == states[1]


def test_a_client_reads_its_stream_and_trims_what_it_has_read(queue: Queue):
    data = [wire.encode_reply(bytes([i]) * 16, i) for i in range(3)]
    for reply in data[:2]:
        queue.call(commands.finish(queue.keys, "b", Answers({CLIENT: [reply]}, [], 1)))
    entries = queue.call(commands.read_replies(queue.keys, CLIENT, b"0-0", block_ms=10, count=10))
    assert [found for _, found in entries] == data[:2]
    assert queue.raw("XLEN", queue.keys.replies(CLIENT)) == 2
    queue.call(commands.finish(queue.keys, "b", Answers({CLIENT: [data[2]]}, [], 1)))
    entries = queue.call(commands.read_replies(queue.keys, CLIENT, entries[-1][0], block_ms=10, count=10))
    assert [found for _, found in entries] == data[2:]
    assert queue.raw("XLEN", queue.keys.replies(CLIENT)) == 1


def test_a_reply_under_its_own_key_can_be_read_many_times_and_dropped(queue: Queue):
    own = b"o" * 16
    queue.call(commands.finish(queue.keys, "b", answers([], [(own, 9000)])))
    reply = wire.encode_reply(own, "own")
    for _ in range(2):
        assert queue.call(commands.wait_reply(queue.keys, own, 0.01)) == reply
        assert queue.call(commands.read_reply(queue.keys, own)) == reply
    queue.call(commands.drop_reply(queue.keys, own))
    assert queue.call(commands.read_reply(queue.keys, own)) is None


# --- forget, release, recover, renew ----------------------------------------------------------------------------------


def test_forget_takes_answered_requests_out_of_solo_and_nothing_else(queue: Queue):
    solo = queue.seed(*[Seed(died=("w", 1))] * 4)
    other = queue.seed(Seed())
    assert queue.call(commands.forget(queue.keys, [solo[1], solo[3], other[0], b"?" * 16])) == 2
    assert queue.ids("s") == [solo[0], solo[2]]
    assert queue.ids("n") == other
    assert queue.call(commands.forget(queue.keys, [solo[0], solo[2]])) == 2
    assert "solo" not in queue.dump()
    assert queue.call(commands.forget(queue.keys, solo)) == 0


@every_form
def test_release_puts_a_batch_back_in_front_in_its_old_order(queue: Queue, form):
    high = queue.seed(*[Seed(lane="h")] * 2)
    normal = queue.seed(*[Seed()] * 4)
    low = queue.seed(*[Seed(lane="l", age=2)] * 3)
    queue.take(form=form)
    queue.drink_token()
    queue.raw("SET", queue.key("want"), 4)
    assert queue.call(commands.release(queue.keys, "b")) == 4
    assert (queue.ids("h"), queue.ids("n"), queue.ids("l")) == (high, normal, low)
    state = queue.dump()
    assert not {"batch:b", "batch:b:heads", "leases", "want"} & set(state)
    assert queue.tokens() == 1
    assert queue.counter("released") == 4


@every_form
def test_release_puts_a_solo_request_back_into_solo(queue: Queue, form):
    solo = queue.seed(*[Seed(died=("dead", 1))] * 3)
    heads = queue.raw("LRANGE", queue.key("heads:solo"), 0, -1)
    queue.take(form=form)
    assert queue.call(commands.release(queue.keys, "b")) == 1
    assert queue.ids("s") == solo
    assert queue.raw("LRANGE", queue.key("heads:solo"), 0, -1) == heads


def test_releasing_what_is_not_there_does_nothing(queue: Queue):
    assert queue.call(commands.release(queue.keys, "gone")) == 0
    assert queue.dump() == {}


def test_release_with_late_requests_among_live_ones_keeps_order_and_sums(queue: Queue):
    pending = queue.seed(Seed(), Seed(age=5, timeout=1), Seed(), Seed(), Seed(), Seed())
    queue.take()
    assert queue.call(commands.release(queue.keys, "b")) == 5
    assert queue.ids("n") == pending


@every_form
def test_recover_moves_a_dead_workers_batch_in_front_of_solo(queue: Queue, form):
    waiting = queue.seed(Seed(died=("before", 5)))
    requests = outgoing(4)
    queue.push(requests, "", "1")
    queue.take(form=form, solo_first=False)
    queue.drink_token()
    queue.raw("SET", queue.key("want"), 4)
    recovered = queue.call(
        commands.recover(queue.keys, "b", seen_end="", dead_worker="w1", lease_us=5_000_000)
    )
    assert (recovered.outcome, recovered.requests) == ("moved", 4)
    assert queue.ids("s") == ids(requests) + waiting
    heads = queue.raw("LRANGE", queue.key("heads:solo"), 0, 3)
    for head in heads:
        *_, attempts, lane, _, _, worker, since = head.split(b";")
        assert (attempts, lane, worker) == (b"0", b"n", b"w1")  # in company nobody is to blame
        assert abs(queue.now() - int(since)) < 60_000_000
    assert queue.tokens() == 1
    state = queue.dump()
    assert not {"batch:b", "batch:b:heads", "leases", "want"} & set(state)
    assert queue.counter("recovered") == 4


def test_recover_into_an_empty_solo(queue: Queue):
    requests = outgoing(4)
    queue.push(requests, "", "1")
    queue.take()
    queue.call(commands.recover(queue.keys, "b", seen_end="", dead_worker="w1", lease_us=5_000_000))
    assert queue.ids("s") == ids(requests)


def test_a_request_that_kills_two_workers_alone_is_dead(queue: Queue):
    [request] = outgoing()
    queue.push([request], "", "1")
    now_due = queue.options(max_delay_us=0)
    queue.take("first", options=now_due)
    recover = commands.recover(queue.keys, "first", seen_end="", dead_worker="w1", lease_us=5_000_000)
    assert queue.call(recover).outcome == "moved"
    second = queue.take("second", options=dataclasses.replace(now_due, worker="w2"))
    assert (second.kind, [head.attempts for head in second.heads if head]) == ("solo", [1])
    recovered = queue.call(
        commands.recover(queue.keys, "second", seen_end="", dead_worker="w2", lease_us=5_000_000)
    )
    assert recovered.outcome == "dead"
    assert recovered.head is not None
    assert (recovered.head.id, recovered.head.attempts) == (request.id, 2)
    # the batch is leased to the one that buries it: should that one die too, the next finds it dead again
    assert queue.raw("LRANGE", queue.keys.batch("second"), 0, -1) == [request.request]
    assert abs(int(queue.raw("ZSCORE", queue.keys.leases, "second")) - queue.now() - 5_000_000) < 60_000_000
    assert queue.ids("s") == []
    again = queue.call(
        commands.recover(queue.keys, "second", seen_end="", dead_worker="w3", lease_us=5_000_000)
    )
    assert again.outcome == "dead"
    letter = msgpack.packb({"id": request.id.hex()})
    reply = Answers({CLIENT: [wire.encode_error(request.id, ModelError("dead"))]}, [], 1, 1)
    queue.call(commands.bury(queue.keys, "second", [letter], reply))
    state = queue.dump()
    assert state["dead"] == [letter]
    assert len(state[f"replies:{CLIENT}"]) == 1
    assert not {"batch:second", "batch:second:heads", "leases", "solo"} & set(state)
    assert queue.counter("dead") == 1


def test_deaths_in_company_never_make_a_dead_letter(queue: Queue):
    queue.seed(*[Seed()] * 4)
    for death in range(4):
        queue.take(f"b{death}")
        recovered = queue.call(
            commands.recover(queue.keys, f"b{death}", seen_end="", dead_worker="w", lease_us=1)
        )
        assert (recovered.outcome, recovered.requests) == ("moved", 4)
        # back into company, as a worker that is told to stop would put them
        queue.raw("RENAME", queue.keys.solo, queue.keys.requests["n"])
        queue.raw("RENAME", queue.key("heads:solo"), queue.keys.heads["n"])
    assert all(head.split(b";")[3] == b"0" for head in queue.raw("LRANGE", queue.keys.heads["n"], 0, -1))


def test_a_request_is_counted_dead_alone_only_by_runs_alone(queue: Queue):
    queue.seed(*[Seed()] * 4)
    queue.take("company")
    queue.call(commands.recover(queue.keys, "company", seen_end="", dead_worker="w1", lease_us=1))
    taken = queue.take("alone")
    assert (taken.kind, len(taken.heads)) == ("solo", 1)
    assert (
        queue.call(commands.recover(queue.keys, "alone", seen_end="", dead_worker="w1", lease_us=1)).outcome
        == "moved"
    )
    assert queue.raw("LINDEX", queue.key("heads:solo"), 0).split(b";")[3] == b"1"


def test_a_lease_that_was_renewed_meanwhile_is_not_recovered(queue: Queue):
    queue.push(outgoing(4), "", "1")
    queue.take()
    lease = queue.raw("ZSCORE", queue.keys.leases, "b").decode()
    before = queue.dump()
    other = str(int(lease) - 1)
    verb = commands.recover(queue.keys, "b", seen_end=other, dead_worker="w1", lease_us=1)
    assert queue.call(verb).outcome == "none"
    assert queue.dump() == before
    verb = commands.recover(queue.keys, "b", seen_end=lease, dead_worker="w1", lease_us=1)
    assert queue.call(verb).outcome == "moved"


def test_a_batch_that_was_finished_meanwhile_is_not_recovered(queue: Queue):
    assert (
        queue.call(commands.recover(queue.keys, "b", seen_end="5", dead_worker="w", lease_us=1)).outcome
        == "none"
    )
    assert (
        queue.call(commands.recover(queue.keys, "b", seen_end="", dead_worker="w", lease_us=1)).outcome
        == "none"
    )
    assert queue.dump() == {}


def test_two_that_recover_the_same_batch_move_it_once(queue: Queue):
    queue.push(outgoing(4), "", "1")
    queue.take()
    lease = queue.raw("ZSCORE", queue.keys.leases, "b").decode()
    verb = commands.recover(queue.keys, "b", seen_end=lease, dead_worker="w1", lease_us=1)
    assert [queue.call(verb).outcome for _ in range(2)] == ["moved", "none"]
    assert len(queue.ids("s")) == 4


def test_renew_lengthens_live_leases_only_and_lists_the_expired(queue: Queue):
    queue.raw("ZADD", queue.keys.leases, queue.now() + 1_000_000_000, "mine", 5, "lost", 7, "lost.too")
    expired = queue.call(commands.renew(queue.keys, ["mine", "finished"], 90_000_000))
    assert expired == {"lost": "5", "lost.too": "7"}
    assert abs(int(queue.raw("ZSCORE", queue.keys.leases, "mine")) - queue.now() - 90_000_000) < 60_000_000
    assert queue.raw("ZSCORE", queue.keys.leases, "finished") is None
    assert queue.raw("ZCARD", queue.keys.leases) == 3


def test_an_expired_lease_is_recovered_by_the_end_that_renew_has_shown(queue: Queue):
    queue.push(outgoing(4), "", "1")
    queue.take(options=queue.options(lease_us=-1000))
    expired = queue.call(commands.renew(queue.keys, [], 1))
    [(batch, end)] = expired.items()
    verb = commands.recover(queue.keys, batch, seen_end=end, dead_worker="w1", lease_us=1)
    assert queue.call(verb).outcome == "moved"


# --- report -----------------------------------------------------------------------------------------------------------

CONFIG = {"max_batch_size": 32, "max_delay_us": 5000, "capacity": 100, "capacity_bytes": 10_000}


def test_the_first_live_workers_options_hold_and_a_later_one_gets_them_back(queue: Queue):
    first = queue.call(commands.report(queue.keys, "w1", '{"model": "m"}', CONFIG))
    assert (first.was_set, first.config, first.others) == (True, CONFIG, {})
    second = queue.call(commands.report(queue.keys, "w2", '{"model": "other"}', {**CONFIG, "capacity": 7}))
    assert (second.was_set, second.config, second.others) == (False, CONFIG, {"w1": '{"model": "m"}'})
    third = queue.call(commands.report(queue.keys, "w1", '{"model": "m;2"}'))
    assert (third.was_set, third.config, third.others) == (False, CONFIG, {"w2": '{"model": "other"}'})
    assert queue.call(commands.report(queue.keys, "w2", "{}")).others == {"w1": '{"model": "m;2"}'}


def test_the_options_of_workers_that_are_gone_hold_no_longer(queue: Queue):
    queue.call(commands.report(queue.keys, "w1", "{}", {**CONFIG, "extra": 5}))
    report(queue, "w1", ago=11)
    changed = queue.call(commands.report(queue.keys, "w2", "{}", {**CONFIG, "capacity": 7}))
    assert (changed.was_set, changed.config) == (True, {**CONFIG, "capacity": 7})


def test_a_worker_that_ends_says_so(queue: Queue):
    queue.call(commands.report(queue.keys, "w1", "{}", CONFIG))
    queue.call(commands.report(queue.keys, "w2", "{}", CONFIG))
    queue.call(commands.report(queue.keys, "w1", ""))
    assert set(queue.dump()["workers"]) == {b"w2"}
    assert "reported_us" in queue.counters()
    queue.call(commands.report(queue.keys, "w2", ""))
    assert "workers" not in queue.dump()
    assert queue.push(outgoing(1), "", "1", fail_fast=True).outcome == "no_worker"


def test_workers_silent_for_a_minute_are_pruned(queue: Queue):
    report(queue, "old", ago=61)
    report(queue, "silent", ago=30)
    reported = queue.call(commands.report(queue.keys, "w1", "{}"))
    assert reported.others == {}
    assert set(queue.dump()["workers"]) == {b"w1", b"silent"}


def test_the_drain_rate_is_what_was_taken_since_the_last_report(queue: Queue):
    queue.call(commands.report(queue.keys, "w1", "{}"))
    queue.raw(
        "HSET", queue.keys.counters, "taken", 1000, "drain_taken", 0, "drain_us", queue.now() - 10_000_000
    )
    queue.call(commands.report(queue.keys, "w1", "{}"))
    assert 50 < queue.counters()["drain_rate"] <= 100
    before = queue.counters()
    queue.call(commands.report(queue.keys, "w2", "{}"))  # within the same second: nothing to measure
    assert queue.counters()["drain_rate"] == before["drain_rate"]


def test_a_drain_rate_is_never_negative(queue: Queue):
    queue.raw(
        "HSET", queue.keys.counters, "taken", 5, "drain_taken", 1000, "drain_us", queue.now() - 20_000_000
    )
    queue.call(commands.report(queue.keys, "w1", "{}"))
    assert queue.counters()["drain_rate"] == 0


def test_the_hashes_of_a_queue_expire_when_it_is_left(queue: Queue):
    queue.call(commands.report(queue.keys, "w1", "{}", CONFIG))
    for name in ("config", "workers", "counters"):
        assert 604_000_000 < queue.ttl_ms(name) <= 604_800_000


def test_live_workers_are_counted_by_queue(queue: Queue):
    report(queue, "w1")
    report(queue, "w2", ago=9)
    report(queue, "w3", ago=11)
    assert queue.link.call(commands.live_workers([queue.keys.queue, "nobody-here"])) == {queue.keys.queue: 2}


def test_queues_are_listed_last_used_first(queue: Queue):
    name = queue.keys.queue
    queue.call(commands.touch_queue(queue.keys, 4e12))
    assert queue.link.call(commands.list_queues())[0] == name
    queue.raw("ZREM", "batchq:queues", name)


def test_the_capacity_that_a_queue_has(queue: Queue):
    assert queue.call(commands.queue_capacity(queue.keys)) == 4096
    queue.raw("HSET", queue.keys.config, "capacity", 7)
    assert queue.call(commands.queue_capacity(queue.keys)) == 7


# --- cancel, bury, stats ----------------------------------------------------------------------------------------------


def test_cancelled_ids_are_forgotten_after_their_time(queue: Queue):
    first, second = b"1" * 16, b"2" * 16
    queue.call(commands.cancel(queue.keys, [first], 60_000))
    [(member, until)] = queue.dump()["cancelled"].items()
    assert member == first.hex().encode()
    assert abs(int(until) - queue.now() - 60_000_000) < 30_000_000
    queue.raw("ZADD", queue.keys.cancelled, queue.now() - 1, first.hex())
    queue.call(commands.cancel(queue.keys, [second], 60_000))
    assert set(queue.dump()["cancelled"]) == {second.hex().encode()}
    assert 86_000_000 < queue.ttl_ms("cancelled") <= 86_400_000


def test_a_pending_job_can_be_cancelled_and_is_not_run(queue: Queue):
    job, other = outgoing(2, ttl_ms=5000)
    queue.push([job, other], "", "1", jobs=True)
    assert queue.call(commands.cancel_job(queue.keys, job.id)) == 1
    data, exists = queue.call(commands.job_state(queue.keys, job.id))
    assert exists
    assert isinstance(wire.decode_replies(data)[0].error(), JobCancelledError)  # type: ignore[arg-type]
    assert 4000 < queue.ttl_ms(f"reply:{job.id.hex()}") <= 5000
    taken = queue.take(options=queue.options(max_delay_us=0))
    assert taken_ids(taken) == [other.id]
    assert queue.raw("LRANGE", queue.keys.reply(job.id), 0, -1) == [data]
    assert queue.call(commands.cancel_job(queue.keys, job.id)) == 0


def test_an_answered_job_cannot_be_cancelled(queue: Queue):
    [job] = outgoing(ttl_ms=5000)
    queue.push([job], "", "1", jobs=True)
    queue.take(options=queue.options(max_delay_us=0))
    queue.call(commands.finish(queue.keys, "b", answers([], [(job.id, 5000)])))
    before = queue.dump()
    assert queue.call(commands.cancel_job(queue.keys, job.id)) == 0
    assert queue.dump() == before


def test_an_unknown_job_cannot_be_cancelled(queue: Queue):
    assert queue.call(commands.cancel_job(queue.keys, b"?" * 16)) == -1
    assert queue.dump() == {}
    assert queue.call(commands.job_state(queue.keys, b"?" * 16)) == (None, False)


def test_dead_letters_are_kept_newest_first_and_capped(queue: Queue):
    for letter in (b"a", b"b"):
        queue.call(commands.bury(queue.keys, "b", [letter]))
    assert queue.dump()["dead"] == [b"b", b"a"]
    queue.call(commands.bury(queue.keys, "b", [b"%d" % i for i in range(1100)]))
    assert queue.raw("LLEN", queue.keys.dead) == 1000
    assert queue.raw("LINDEX", queue.keys.dead, 0) == b"1099"
    assert queue.counter("dead") == 1102
    assert 604_000_000 < queue.ttl_ms("dead") <= 604_800_000


def test_burying_undecodable_requests_leaves_the_batch_to_finish(queue: Queue):
    queue.push(outgoing(4), "", "1")
    queue.take()
    queue.call(commands.bury(queue.keys, "b", [b"letter"]))
    assert "batch:b" in queue.dump()


def test_stats_of_an_empty_queue(queue: Queue):
    found = stats.from_answers("q", queue.call(commands.stats(queue.keys)))
    assert found.depth == {"high": 0, "normal": 0, "low": 0}
    assert (found.oldest_age, found.solo, found.in_flight, found.dead, found.accepted) == (0, 0, 0, 0, 0)
    assert (found.capacity, found.workers, found.drain_rate) == (4096, (), 0.0)


def test_stats_show_depth_age_totals_and_live_workers(queue: Queue):
    text = '{"model": "m:load", "host": "h", "state": "ready", "batch_size": 3.5, "run_seconds": 0.1, "wait_seconds": 0.2, "rate": 9}'
    queue.call(commands.report(queue.keys, "w1", text, CONFIG))
    queue.push(outgoing(6), "", "1")
    queue.take()
    queue.seed(Seed(lane="h", age=50), Seed(lane="l", age=5), Seed(died=("w", 1)))
    queue.call(commands.bury(queue.keys, "x", [b"letter"]))
    found = stats.from_answers("q", queue.call(commands.stats(queue.keys)))
    assert found.depth == {"high": 1, "normal": 2, "low": 1}
    assert 50 <= found.oldest_age < 80
    assert (found.solo, found.in_flight, found.dead, found.capacity) == (1, 1, 1, 100)
    assert (found.accepted, found.batches, found.rejected) == (6, 1, 0)
    [worker] = found.workers
    assert (worker.id, worker.model, worker.state, worker.batch_size) == ("w1", "m:load", "ready", 3.5)


# --- a server that has forgotten the scripts --------------------------------------------------------------------------


@every_form
def test_a_push_to_a_server_that_has_forgotten_the_scripts_is_not_doubled(queue: Queue, form):
    requests, more = outgoing(3), outgoing(2)
    queue.push(requests, "", "1")
    queue.raw("SCRIPT", "FLUSH")
    pushed = queue.push(more, "1", "2", consistent=False)
    assert (pushed.outcome, pushed.admitted) == ("ok", {"n": 2})
    queue.raw("SCRIPT", "FLUSH")
    assert queue.push(more, "1", "2", consistent=False).outcome == "dup"
    run: list[bytes] = []
    for number in range(10):
        queue.raw("SCRIPT", "FLUSH")
        taken = queue.take(f"b{number}", form=form, options=queue.options(max_delay_us=0), consistent=False)
        if taken.outcome == "idle":
            break
        run += [head.id for head in taken.heads if head is not None and head.timeout > 0]
    assert run == ids(requests + more)
    state = queue.dump()
    assert not {"requests", "heads"} & set(state)
    assert queue.counter("pending_bytes") == 0


def test_a_full_push_fits_though_the_server_has_forgotten_the_scripts(queue: Queue):
    queue.raw("SCRIPT", "FLUSH")
    assert queue.push(outgoing(4), "", "1", capacity=4, whole=True, consistent=False).admitted == {"n": 4}


def test_the_workers_verbs_work_on_a_server_that_has_forgotten_the_scripts(queue: Queue):
    def flushed(verb: Any) -> Any:
        queue.raw("SCRIPT", "FLUSH")
        return queue.call(verb)

    pending = queue.seed(*[Seed()] * 4)
    assert flushed(commands.nudge(queue.keys)) == 4
    assert flushed(commands.renew(queue.keys, [], 1)) == {}
    assert flushed(commands.cancel(queue.keys, [b"?" * 16], 1000)) == 1
    assert flushed(commands.cancel_job(queue.keys, b"?" * 16)) == -1
    assert flushed(commands.report(queue.keys, "w1", "{}", CONFIG)).was_set
    for form in FORMS:
        queue.raw("SCRIPT", "FLUSH")
        assert taken_ids(queue.take(form, form=form)) == pending
        assert flushed(commands.release(queue.keys, form)) == 4
    queue.take()
    recover = commands.recover(queue.keys, "b", seen_end="", dead_worker="w1", lease_us=1)
    assert flushed(recover).requests == 4
    assert flushed(commands.forget(queue.keys, pending[:1])) == 1
    queue.take()
    assert flushed(commands.finish_at_maxmemory(queue.keys, "b", Answers({}, [], 1))) is True


# --- a server at maxmemory --------------------------------------------------------------------------------------------


def refused(queue: Queue, verb: Any) -> None:
    """The verb is refused as out of memory, and changes nothing."""
    before = queue.dump()
    with pytest.raises(OutOfMemory):
        queue.link.call(verb)
    assert queue.dump() == before


def test_at_maxmemory_a_push_is_refused_and_changes_nothing(real_queue: Queue, full_memory):
    queue = real_queue
    queue.push(outgoing(1), "", "1")
    full_memory()
    refused(queue, commands.push(queue.keys, outgoing(2), producer="p", previous="1", token="2", fresh=False))
    refused(
        queue,
        commands.push(
            queue.keys, outgoing(2), producer="p", previous="1", token="2", fresh=False, force=True
        ),
    )


@pytest.mark.parametrize("form", ["light", "force"])
def test_at_maxmemory_a_batch_can_be_taken(real_queue: Queue, full_memory, form):
    queue = real_queue
    requests = outgoing(6) + outgoing(1, lane="h")
    queue.push(requests, "", "1")
    full_memory()
    assert len(queue.take(form=form).heads) == 4
    assert queue.take("b2", form=form).outcome == "wait"


def test_at_maxmemory_a_native_take_is_refused_and_force_moves_any_size(real_queue: Queue, full_memory):
    queue = real_queue
    requests = outgoing(5, size=30_000)
    queue.push(requests, "", "1")
    full_memory()
    refused(queue, commands.take(queue.keys, queue.options(), "b", limit=4, run_us=0, form="native"))
    assert queue.take(form="light").outcome == "bulk"
    assert taken_ids(queue.take(form="force")) == ids(requests[:4])


def test_at_maxmemory_a_take_that_is_repeated_returns_its_batch(real_queue: Queue, full_memory):
    queue = real_queue
    requests = outgoing(4)
    queue.push(requests, "", "1")
    queue.take()
    full_memory()
    again = queue.take()
    assert (again.kind, taken_ids(again)) == ("again", ids(requests))


def test_at_maxmemory_a_request_can_be_run_alone(real_queue: Queue, full_memory):
    queue = real_queue
    solo = queue.seed(Seed(died=("w", 1)), Seed(died=("w", 1), age=9, timeout=1), Seed(died=("w", 1)))
    full_memory()
    assert taken_ids(queue.take()) == solo[:1]
    assert taken_ids(queue.take("b2")) == solo[2:]


@pytest.mark.parametrize("lane", ["n", "s"])
def test_at_maxmemory_a_lane_that_lost_heads_holds_nobody_up(real_queue: Queue, full_memory, lane):
    queue = real_queue
    live = queue.seed(*[Seed(age=100, died=("w", 1) if lane == "s" else None)] * 2)
    [orphan] = outgoing()
    queue.raw("RPUSH", queue.keys.solo if lane == "s" else queue.keys.requests["n"], orphan.request)
    full_memory()
    assert taken_ids(queue.take(consistent=False))[:1] == live[:1]


def test_at_maxmemory_a_batch_can_be_finished_by_the_script_with_the_same_state(
    real_queue: Queue, full_memory
):
    queue = real_queue
    requests = outgoing(4)
    queue.push(requests, "", "1")
    queue.take()
    full_memory()
    done = answers(requests, [(b"o" * 16, 9000)], failed=1)
    refused(queue, commands.finish(queue.keys, "b", done))
    assert queue.call(commands.finish_at_maxmemory(queue.keys, "b", done)) is True
    state = queue.dump()
    assert len(state[f"replies:{CLIENT}"]) == 1
    assert f"reply:{(b'o' * 16).hex()}" in state
    assert not {"batch:b", "leases"} & set(state)


def test_at_maxmemory_a_queue_drains(real_queue: Queue, full_memory):
    queue = real_queue
    requests = outgoing(10, size=30_000)
    queue.push(requests, "", "1")
    full_memory()
    run: list[bytes] = []
    for number in range(3):
        batch = f"b{number}"
        taken = queue.take(batch, form="force", options=queue.options(max_delay_us=0))
        done = [
            dataclasses.replace(
                answers([]), streams={CLIENT: [wire.encode_reply(i, "x") for i in taken_ids(taken)]}
            )
        ]
        queue.call(commands.finish_at_maxmemory(queue.keys, batch, done[0]))
        run += taken_ids(taken)
    assert run == ids(requests)
    assert not {"requests", "heads", "leases", "batch:b0"} & set(queue.dump())


def test_at_maxmemory_leases_are_renewed(real_queue: Queue, full_memory):
    queue = real_queue
    queue.push(outgoing(4), "", "1")
    queue.take()
    full_memory()
    assert queue.call(commands.renew(queue.keys, ["b"], 500_000_000)) == {}
    assert int(queue.raw("ZSCORE", queue.keys.leases, "b")) > queue.now() + 400_000_000


def test_at_maxmemory_workers_still_report(real_queue: Queue, full_memory):
    queue = real_queue
    queue.call(commands.report(queue.keys, "w1", "{}", CONFIG))
    full_memory()
    queue.call(commands.report(queue.keys, "w1", '{"state": "ready"}'))
    assert queue.call(commands.report(queue.keys, "w2", "{}", CONFIG)).others == {"w1": '{"state": "ready"}'}


def test_at_maxmemory_batches_are_released_and_recovered(real_queue: Queue, full_memory):
    queue = real_queue
    requests = outgoing(8)
    queue.push(requests, "", "1")
    queue.take("a")
    queue.take("b")
    queue.drink_token()
    full_memory()
    assert queue.call(commands.release(queue.keys, "b")) == 4
    recover = commands.recover(queue.keys, "a", seen_end="", dead_worker="w1", lease_us=1)
    assert queue.call(recover).requests == 4
    assert (queue.ids("n"), queue.ids("s")) == (ids(requests[4:]), ids(requests[:4]))
    queue.drink_token()
    assert queue.call(commands.nudge(queue.keys)) == 8
    assert queue.tokens() == 1


def test_at_maxmemory_answered_requests_are_forgotten(real_queue: Queue, full_memory):
    queue = real_queue
    solo = queue.seed(*[Seed(died=("w", 1))] * 3)
    full_memory()
    assert queue.link.call(commands.forget(queue.keys, solo[:2])) == 2
    assert queue.ids("s") == solo[2:]


def test_at_maxmemory_requests_and_jobs_can_be_cancelled(real_queue: Queue, full_memory):
    queue = real_queue
    [job] = outgoing(ttl_ms=5000)
    queue.push([job], "", "1", jobs=True)
    full_memory()
    assert queue.call(commands.cancel(queue.keys, [b"?" * 16], 60_000)) == 1
    assert queue.call(commands.cancel_job(queue.keys, job.id)) == 1
    assert taken_ids(queue.take(options=queue.options(max_delay_us=0))) == []
