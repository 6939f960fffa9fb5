"""Groups (one for each batch_key) and budgets, on fakeredis and on a real server: what goes into a batch, and what stays."""

from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchq import commands
from batchq.commands import Place, Pushed, Taken
from batchq.keys import group_name, place_of
from batchq.store import Link
from tests.contract.queues import MINUTE, Queue, ids, outgoing, taken_ids

tokens = count(1)


def configure(queue: Queue, **changes: int) -> None:
    """Register a worker, with batches of 4."""
    config = {"max_batch_size": 4, "max_delay_us": MINUTE, "capacity": 4096, "capacity_bytes": 2**28,
              "max_batch_cost": 0, "padded": 0, **changes}  # fmt: skip
    queue.call(commands.report(queue.keys, "w1", "{}", config))


def put(queue: Queue, *places: str, **options: Any) -> list[bytes]:
    """Push one request to each place; their ids."""
    options = {"timeout_us": 60 * MINUTE, **options}
    requests = [out for place in places for out in outgoing(lane=place, **options)]
    push(queue, requests)
    return ids(requests)


def push(queue: Queue, requests: list[commands.Outgoing], **options: Any) -> Pushed:
    producer = f"p{next(tokens)}"
    return queue.push(requests, "", "t", producer=producer, fresh=True, **options)


def take(queue: Queue, *, over: bool = False, **changes: Any) -> Taken:
    """Take under a new name; ``over``: max_delay is over for all that waits."""
    names = ("max_batch_cost", "padded", "max_batch_size", "max_delay_us")
    options = {name: changes.pop(name) for name in names if name in changes}
    if over:
        options["max_delay_us"] = 0
    return queue.take(f"b{next(tokens)}", options=queue.options(**options), **changes)


def test_a_batch_holds_requests_of_one_group_only(queue: Queue) -> None:
    put(queue, "n:sa", "n:sb", "n:sa", "n", "n:sb")
    seen = []
    for _ in range(3):
        heads = [head for head in take(queue, over=True).heads if head]
        seen.append({head.group for head in heads})
    assert sorted(map(sorted, seen)) == [[""], ["sa"], ["sb"]]
    assert take(queue, over=True).outcome == "idle"
    assert not queue.groups()


def test_a_group_that_is_full_goes_at_once_and_those_that_are_not_wait(queue: Queue) -> None:
    configure(queue)
    put(queue, "n:sa", "n:sa", "n:sa")
    full = put(queue, *["n:sb"] * 5)
    taken = take(queue)
    assert taken_ids(taken) == full[:4]
    assert taken.pending == 4
    assert take(queue).outcome == "wait"


def test_of_two_that_are_due_the_one_whose_request_has_waited_longest_goes_first(queue: Queue) -> None:
    configure(queue)
    young, old = put(queue, "n:sa", "n:sb")
    queue.age("n:sa", 70)
    queue.age("n:sb", 80)
    assert taken_ids(take(queue)) == [old]
    assert taken_ids(take(queue)) == [young]


@pytest.mark.parametrize("due", ["n:sa", "n"])
def test_what_is_not_due_does_not_hold_up_what_is(queue: Queue, due: str) -> None:
    put(queue, "n:sb", "n" if due != "n" else "n:sc")
    [wanted] = put(queue, due)
    queue.age(due, 61)
    assert taken_ids(take(queue))[-1] == wanted
    assert take(queue).outcome == "wait"


def test_a_wait_ends_when_the_first_of_all_groups_is_due(queue: Queue) -> None:
    put(queue, "n:sa", "n:sb", "n")
    queue.age("n:sb", 50)
    taken = take(queue)
    assert taken.outcome == "wait"
    assert 9 < taken.left <= 10


def test_a_group_with_high_requests_goes_before_one_without(queue: Queue) -> None:
    normal, low, high = put(queue, "n:sa", "l:sb", "h:sc")
    order = [taken_ids(take(queue, over=True)) for _ in range(3)]
    assert order == [[high], [normal], [low]]


def test_of_two_full_groups_one_with_high_requests_goes_first(queue: Queue) -> None:
    configure(queue)
    put(queue, *["n:sa"] * 4)
    high = put(queue, *["h:sb"] * 4)
    assert taken_ids(take(queue)) == high


def test_each_fourth_batch_goes_to_whoever_has_waited_longest(queue: Queue) -> None:
    [starved] = put(queue, "l:sz")
    queue.age("l:sz", 5)
    for n in range(8):
        put(queue, f"h:s{n}")
    order = [taken_ids(take(queue, over=True)) for _ in range(5)]
    assert [starved] in order
    assert order.index([starved]) == 3


def test_within_a_group_lanes_hold(queue: Queue) -> None:
    normal, low, high = put(queue, "n:sa", "l:sa", "h:sa")
    assert taken_ids(take(queue, over=True)) == [high, normal, low]


def test_a_waiting_worker_is_woken_when_a_group_is_full_not_when_many_wait_in_different_ones(
    queue: Queue,
) -> None:
    configure(queue)
    put(queue, "n:sa")
    queue.drink_token()
    assert take(queue).outcome == "wait"
    put(queue, "n:sb", "n:sc", "n:sd", "n:se", "n")
    assert queue.tokens() == 0
    put(queue, "n:sa", "n:sa", "n:sa")
    assert queue.tokens() == 1


def test_a_waiting_worker_is_woken_when_a_budget_is_used_up(queue: Queue) -> None:
    configure(queue, max_batch_cost=10, max_batch_size=100)
    for place in ("n:sa", "n"):
        put(queue, place, cost=4)
        queue.drink_token()
        assert take(queue, max_batch_cost=10, max_batch_size=100).outcome == "wait"
        put(queue, place, cost=3)
        assert queue.tokens() == 0
        put(queue, place, cost=3)
        assert queue.tokens() == 1
        assert len(take(queue, max_batch_cost=10, max_batch_size=100).heads) == 3


@pytest.mark.parametrize("form", ["light", "native"])
@pytest.mark.parametrize("place", ["n", "n:sa"])
def test_what_does_not_fit_the_budget_stays_in_front_in_order(queue: Queue, place: str, form: str) -> None:
    configure(queue, max_batch_cost=10, max_batch_size=8)
    sent = [put(queue, place, cost=cost)[0] for cost in (4, 4, 5, 1, 1, 1)]
    options: dict[str, Any] = {"max_batch_cost": 10, "max_batch_size": 8, "form": form}
    assert taken_ids(take(queue, **options)) == sent[:2]  # the 1s do not overtake the 5
    assert taken_ids(take(queue, over=True, **options)) == sent[2:]
    assert not queue.raw("EXISTS", queue.key("costs"))


def test_with_padding_a_batch_costs_its_longest_times_its_size(queue: Queue) -> None:
    configure(queue, max_batch_cost=12, padded=1, max_batch_size=8)
    sent = [put(queue, "n:sa", cost=cost)[0] for cost in (3, 2, 4, 1)]
    first = take(queue, max_batch_cost=12, padded=True, max_batch_size=8)
    assert taken_ids(first) == sent[:3]  # 4 x 3; a fourth would make it 16


@pytest.mark.parametrize("form", ["light", "native"])
def test_a_request_over_the_budget_goes_alone(queue: Queue, form: str) -> None:
    configure(queue, max_batch_cost=10)
    big = put(queue, "n:sa", cost=50)
    rest = put(queue, "n:sa", "n:sa", cost=2)
    assert taken_ids(take(queue, max_batch_cost=10, form=form)) == big
    assert taken_ids(take(queue, max_batch_cost=10, form=form, over=True)) == rest


def test_requests_without_a_cost_count_one(queue: Queue) -> None:
    configure(queue, max_batch_cost=3, max_batch_size=8)
    sent = put(queue, *["n:sa"] * 5)
    assert taken_ids(take(queue, max_batch_cost=3, max_batch_size=8)) == sent[:3]


def test_high_and_normal_share_one_budget(queue: Queue) -> None:
    configure(queue, max_batch_cost=5, max_batch_size=8)
    normal = put(queue, "n:sa", "n:sa", cost=2)
    high = put(queue, "h:sa", cost=2)
    assert taken_ids(take(queue, max_batch_cost=5, max_batch_size=8)) == [*high, normal[0]]


def test_the_capacity_is_that_of_all_groups_together(queue: Queue) -> None:
    requests = [out for n in range(10) for out in outgoing(lane=f"n:s{n}")]
    pushed = push(queue, requests, capacity=6)
    assert sum((pushed.admitted or {}).values()) == 6
    assert push(queue, outgoing(lane="n:sx"), capacity=6).admitted == {"n:sx": 0}
    assert push(queue, outgoing(lane="n"), capacity=6).admitted == {"n": 0}


def test_low_requests_fill_half_of_it_whatever_their_groups(queue: Queue) -> None:
    pushed = push(queue, [out for n in range(10) for out in outgoing(lane=f"l:s{n}")], capacity=8)
    assert sum((pushed.admitted or {}).values()) == 4
    assert push(queue, outgoing(3, lane="l"), capacity=8).admitted == {"l": 0}
    assert push(queue, outgoing(3, lane="n:s1"), capacity=8).admitted == {"n:s1": 3}


def test_the_bytes_are_those_of_all_groups_together(queue: Queue) -> None:
    configure(queue, capacity_bytes=1000)
    pushed = push(queue, [out for n in range(5) for out in outgoing(lane=f"n:s{n}", size=300)])
    assert sum((pushed.admitted or {}).values()) == 2


def test_a_thousand_keys_that_nobody_uses_again_leave_nothing_behind(queue: Queue) -> None:
    # each expires where it stands, one alone in its group
    requests = [out for n in range(1000) for out in outgoing(lane=f"n:s{n}", timeout_us=1, cost=3)]
    push(queue, requests)
    for _ in range(12):  # a take looks at a bounded number of groups, and leaves a token for the next
        if not queue.groups():
            break
        take(queue, over=True)
        assert queue.drink_token()
    left = {name.partition(":")[0] for name in queue.dump()}
    assert left <= {"counters", "producer", "wake", "want"}
    assert queue.counter("expired") == 1000


def test_what_has_expired_in_front_of_a_group_gives_its_place_to_the_next(queue: Queue) -> None:
    put(queue, "n:sa", "n:sa", timeout_us=1)
    [live] = put(queue, "n:sa")
    assert taken_ids(take(queue, over=True)) == [live]
    assert queue.counter("expired") == 2


def test_what_was_cancelled_in_a_group_is_not_run(queue: Queue) -> None:
    gone, live = put(queue, "n:sa", "n:sa")
    queue.call(commands.cancel(queue.keys, [gone], 60_000))
    assert taken_ids(take(queue, over=True)) == [live]


def test_fetching_ahead_takes_what_is_due_where_more_than_a_batch_waits_in_many_groups(queue: Queue) -> None:
    configure(queue)
    [due] = put(queue, "n:sa")
    queue.age("n:sa", 70)
    put(queue, "n:sb", "n:sc")
    assert take(queue, prefetch=True).outcome == "no"
    put(queue, "n:sd")
    assert taken_ids(take(queue, prefetch=True)) == [due]


def test_a_batch_that_is_handed_back_stands_in_front_of_its_group(queue: Queue) -> None:
    configure(queue)
    first = put(queue, *["n:sa"] * 4, cost=2)
    taken = take(queue)
    later = put(queue, "n:sa", cost=2)
    queue.call(commands.release(queue.keys, _name(queue)))
    assert taken_ids(taken) == first
    assert taken_ids(take(queue)) == first
    assert taken_ids(take(queue, over=True)) == later


def test_the_batch_of_a_dead_worker_is_run_alone_and_forgets_its_group(queue: Queue) -> None:
    sent = put(queue, "n:sa", "n:sa", cost=2)
    take(queue, over=True)
    verb = commands.recover(queue.keys, _name(queue), seen_end="", dead_worker="w1", lease_us=MINUTE)
    assert queue.call(verb).requests == 2
    taken = take(queue)
    assert (taken.kind, taken_ids(taken)) == ("solo", sent[:1])
    assert taken.heads[0] is not None
    assert (taken.heads[0].group, taken.heads[0].cost) == ("sa", 2)


def test_fetching_ahead_takes_only_a_group_that_is_full(queue: Queue) -> None:
    configure(queue)
    put(queue, "n:sa", "n:sb", "n:sc", "n:sd")
    before = queue.dump()
    assert take(queue, prefetch=True).outcome == "no"
    assert queue.dump() == before
    full = put(queue, "n:sb", "n:sb", "n:sb")
    assert taken_ids(take(queue, prefetch=True))[1:] == full


# --- a worker whose model tells groups and costs ---


def test_what_has_no_group_yet_is_regrouped_before_anything_that_is_not_full(queue: Queue) -> None:
    configure(queue)
    put(queue, "n:sa")
    queue.age("n:sa", 70)
    unknown = put(queue, "n", "n")
    assert taken_ids(take(queue, regroups="first")) == unknown
    put(queue, "n")
    assert [head.group for head in take(queue, regroups="last").heads if head] == ["sa"]
    assert [head.group for head in take(queue, regroups="last").heads if head] == [""]


def test_a_full_group_goes_before_what_is_to_be_regrouped(queue: Queue) -> None:
    configure(queue)
    full = put(queue, *["n:sa"] * 4)
    put(queue, "n")
    assert taken_ids(take(queue, regroups="full")) == full


def test_what_has_no_group_yet_has_its_turn_though_groups_are_full(queue: Queue) -> None:
    configure(queue)
    put(queue, *["n:sa"] * 8)
    unknown = put(queue, "l")
    assert taken_ids(take(queue, regroups="first")) == unknown


def test_what_cannot_be_told_its_group_and_be_run_in_time_is_dropped(queue: Queue) -> None:
    put(queue, "n", timeout_us=10_000_000)
    [grouped] = put(queue, "n:sa", timeout_us=10_000_000)
    [live] = put(queue, "n")
    assert taken_ids(take(queue, regroups="first", regroup_us=20_000_000)) == [live]
    assert queue.counter("expired") == 1
    assert taken_ids(take(queue, regroups="last", regroup_us=20_000_000, over=True)) == [grouped]


def test_costs_that_no_client_of_ours_sends_do_no_harm(queue: Queue) -> None:
    sent = [outgoing(lane="n:sa", cost=cost)[0] for cost in (1e308, 1e300, 1e308, 5.0)]
    for request in sent:
        push(queue, [request], consistent=False)
    assert taken_ids(take(queue, over=True, consistent=False)) == ids(sent)


def test_regrouped_requests_go_to_the_end_of_their_groups_and_keep_their_age(queue: Queue) -> None:
    configure(queue)
    [there] = put(queue, "n:sa")
    first, second, third = put(queue, "n", "h", "n")
    taken = take(queue, regroups="first")
    assert taken_ids(taken) == [second, first, third]
    places = [Place("h", "sa", 2.0), Place("n", "sa", 1.5), Place("n", "n", None)]
    verb = commands.regroup(queue.keys, _name(queue), places, front=False)
    assert queue.call(verb) == 3
    assert queue.tokens() == 1
    assert queue.counter("taken") == 0
    assert queue.counter("batches") == 0
    heads = take(queue, over=True).heads
    assert [head.id for head in heads if head] == [second, there, first]
    assert [head.cost for head in heads if head] == [2.0, None, 1.5]
    assert [head.enqueued for head in heads if head][2] == taken.heads[1].enqueued  # type: ignore[union-attr]
    assert taken_ids(take(queue, over=True)) == [third]


def test_what_turned_out_to_be_too_much_goes_back_to_the_front(queue: Queue) -> None:
    configure(queue, max_batch_cost=10)
    sent = put(queue, *["n:sa"] * 3)
    take(queue, over=True)
    later = put(queue, "n:sa", cost=1)
    verb = commands.regroup(queue.keys, _name(queue), [Place("n", "sa", 6.0)] * 3, front=True)
    queue.call(verb)
    order = [taken_ids(take(queue, over=True, max_batch_cost=10)) for _ in range(3)]
    assert order == [sent[:1], sent[1:2], [sent[2], *later]]


def test_regrouping_leaves_out_what_take_has_dropped(queue: Queue) -> None:
    configure(queue)
    first = put(queue, "n")
    put(queue, "n", timeout_us=1)
    last = put(queue, "n")
    taken = take(queue, regroups="first")
    assert [head and head.id for head in taken.heads] == [*first, None, *last]
    places = [Place("n", "sa", None), None, Place("n", "sb", None)]
    queue.call(commands.regroup(queue.keys, _name(queue), places, front=False))
    assert queue.counter("expired") == 1
    assert {*taken_ids(take(queue, over=True)), *taken_ids(take(queue, over=True))} == {*first, *last}


@pytest.mark.parametrize("verb", ["take", "release", "regroup"])
def test_groups_work_at_maxmemory(real_queue: Queue, full_memory: Any, verb: str) -> None:
    queue = real_queue
    configure(queue)
    sent = put(queue, *["n:sa"] * 4, cost=2)
    if verb != "take":
        take(queue)
    full_memory()
    if verb == "release":
        assert queue.call(commands.release(queue.keys, _name(queue))) == 4
    elif verb == "regroup":
        places = [Place("n", "sb", 3.0)] * 4
        assert queue.call(commands.regroup(queue.keys, _name(queue), places, front=False)) == 4
    assert taken_ids(take(queue, over=True)) == sent


def test_names_of_groups_keep_keys_apart_and_short() -> None:
    keys = [None, "a", "A", "", "1", 1, -1, "i1", "a;b", "a:b", "ä", "x" * 63, "x" * 64, "y" * 100_000, 2**70]
    names = [group_name(key) for key in keys]  # type: ignore[arg-type]
    assert len(set(names)) == len(keys)
    assert all(len(name) <= 64 and not set(name) & set(";@:} ") for name in names)
    assert place_of("h", None) == "h"
    assert place_of("h", "a") == "h:sa"


_push = st.tuples(
    st.just("push"),
    st.lists(
        st.tuples(st.sampled_from("hnl"), st.sampled_from(["", "sa", "sb", "sc"]), st.sampled_from([None, 0, 1, 2.5, 7]),
                  st.sampled_from([MINUTE, 1])),
        min_size=1, max_size=8,
    ),
)  # fmt: skip
_take = st.tuples(
    st.just("take"),
    st.fixed_dictionaries(
        {"form": st.sampled_from(["light", "native", "force"]), "over": st.booleans(), "prefetch": st.booleans(),
         "limit": st.integers(1, 4), "regroups": st.sampled_from(["", "first", "full", "last"])}
    ),
)  # fmt: skip
_end = st.tuples(st.just("end"), st.sampled_from(["finish", "release", "recover", "regroup"]))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(st.one_of(_push, _take, _end), max_size=14),
    budget=st.sampled_from([0, 5]),
    padded=st.booleans(),
)
def test_whatever_happens_nothing_is_lost_and_the_indexes_are_right(
    redis_url: str, steps: list[Any], budget: int, padded: bool
) -> None:
    """Each step is followed by ``Queue.check``: lists, indexes, counts and costs agree. At the end all that was accepted comes out."""
    from batchq.store import Endpoint

    link: Link = Endpoint(redis_url).link()
    queue = Queue(link, f"h{next(tokens)}")
    configure(queue, max_batch_cost=budget, padded=int(padded and budget > 0))
    options: dict[str, Any] = {"max_batch_cost": budget, "padded": padded and budget > 0}
    waiting: set[bytes] = set()
    held: list[tuple[str, Taken]] = []
    for kind, what in steps:
        if kind == "push":
            requests = [
                outgoing(lane=f"{lane}:{group}" if group else lane, cost=cost, timeout_us=timeout)[0]
                for lane, group, cost, timeout in what
            ]
            push(queue, requests)
            waiting |= {r.id for r in requests if r.timeout_us == MINUTE}
        elif kind == "take":
            taken = take(queue, **options, **what)
            if taken.outcome == "batch":
                heads = [head for head in taken.heads if head]
                assert len({(head.group) for head in heads}) == 1
                costs = [1.0 if head.cost is None else head.cost for head in heads]
                whole = what["regroups"] and heads[0].group == ""
                if budget and len(heads) > 1 and not whole:
                    assert (max(costs) * len(costs) if padded else sum(costs)) <= budget
                held.append((_name(queue), taken))
        elif held:
            name, taken = held.pop()
            if what == "finish":
                queue.call(commands.finish(queue.keys, name, commands.Answers({}, [], 1)))
                waiting -= set(taken_ids(taken))
            elif what == "release":
                queue.call(commands.release(queue.keys, name))
            elif what == "recover":
                queue.call(commands.recover(queue.keys, name, seen_end="", dead_worker="w", lease_us=MINUTE))
            else:
                places = [head and Place(head.lane, "sr", head.cost) for head in taken.heads]
                queue.call(commands.regroup(queue.keys, name, places, front=len(steps) % 2 == 0))
    for name, _ in held:
        queue.call(commands.release(queue.keys, name))
    found: set[bytes] = set()
    for _ in range(200):
        taken = take(queue, over=True, **options)
        if taken.outcome == "idle":
            break
        found |= set(taken_ids(taken))
    assert found == waiting
    assert not queue.groups()
    link.close()


def _name(queue: Queue) -> str:
    """The name of the last batch that was taken."""
    leases = queue.raw("ZRANGE", queue.keys.leases, 0, -1)
    return max((lease.decode() for lease in leases), key=lambda name: int(name[1:]))


def test_lanes_of_a_group_are_listed_with_their_oldest(queue: Queue) -> None:
    put(queue, "n:sa", "n:sb", "h:sa")
    queue.age("n:sb", 30)
    answers = queue.call(commands.stats(queue.keys))
    from batchq.stats import from_answers

    stats = from_answers("q", answers)
    assert stats.depth == {"high": 1, "normal": 2, "low": 0}
    assert stats.groups == 2
    assert 29 < stats.oldest_age < 40


def test_order_within_a_group_is_first_in_first_out(queue: Queue) -> None:
    sent = put(queue, *["n:sa"] * 11)
    seen = []
    while (taken := take(queue, over=True)).outcome == "batch":
        seen += taken_ids(taken)
    assert seen == sent
    assert all(a < b for a, b in pairwise(seen))
