"""How a worker makes batches of what it took."""

from __future__ import annotations

from typing import Any

from batchq import wire
from batchq.commands import Place, Taken
from batchq.model import Model
from batchq_workers.batches import Decoder

NOW = 1_000_000_000_000_000


class Keyed:
    """Groups values by their first letter; costs their length."""

    def batch_key(self, value: str) -> str:
        return value[0]

    def cost(self, value: str) -> int:
        return len(value)

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


def taken(*rows: tuple[str, Any], kind: str = "batch", suffix: str = "") -> tuple[Taken, list[bytes]]:
    """A batch of (place and cost as in a head, value)."""
    heads, requests = [], []
    for number, (field, value) in enumerate(rows):
        request_id = bytes([number]) * 16
        key = 1 if ":i1" in field else None
        requests.append(wire.encode_request(request_id, 60_000, 1000, value, batch_key=key))
        heads.append(f"{NOW};60000000;{len(requests[-1])};0;{field};0;{request_id.hex()}{suffix}".encode())
    return Taken("batch", NOW, kind=kind, raw_heads=tuple(heads), requests=requests), requests


def decode(decoder: Decoder, *rows: tuple[str, Any], **options: str) -> Any:
    what, requests = taken(*rows, **options)
    return decoder.decode("b", what, requests)


def test_a_budget_that_take_has_kept_is_not_counted_again_in_another_order() -> None:
    # it is 6 from the smallest on, and 6.000000000000001 in this order: to hand such a batch back would never end
    costs = [0.7, 0.1, 0.9, 0.4, 0.8, 0.8, 0.9, 0.4, 0.6, 0.4]
    assert sum(sorted(costs)) <= 6 < sum(costs)
    rows = [(f"n:sa@{cost!r}", "a") for cost in costs]
    batch = decode(Decoder(Model(Keyed()), 1024, budget=6), *rows)
    assert not batch.places
    assert len(batch.requests) == len(costs)


def test_requests_in_no_group_go_to_the_end_of_the_groups_that_the_model_tells() -> None:
    batch = decode(Decoder(Model(Keyed()), 1024, budget=9), ("n", "ab"), ("h", "b"), ("l@4", "a"))
    assert batch.places == [Place("n", "sa", 2), Place("h", "sb", 1), Place("l", "sa", 4)]
    assert not batch.to_front


def test_what_is_too_much_once_its_costs_are_known_goes_back_in_front() -> None:
    batch = decode(Decoder(Model(Keyed()), 1024, budget=5), ("n:i1", "aaa"), ("n:i1", "bbb"))
    assert batch.places == [Place("n", "i1", 3), Place("n", "i1", 3)]
    assert batch.to_front
    batch = decode(Decoder(Model(Keyed()), 1024, budget=6), ("n:i1", "aaa"), ("n:i1", "bbb"))
    assert not batch.places


def test_a_recovered_request_is_run_alone_whatever_its_group() -> None:
    batch = decode(Decoder(Model(Keyed()), 1024, budget=5), ("n", "aaa"), suffix=f";w1;{NOW}")
    assert not batch.places
    assert [request.value for request in batch.requests] == ["aaa"]


def test_a_take_that_is_repeated_is_regrouped_like_the_first() -> None:
    batch = decode(Decoder(Model(Keyed()), 1024), ("n", "ab"), kind="again")
    assert batch.places == [Place("n", "sa", 2)]


def test_a_model_that_tells_nothing_gets_what_was_taken() -> None:
    batch = decode(Decoder(Model(lambda inputs: inputs), 1024, budget=5), ("n:sa@2", 1), ("n:sa@9", 2))
    assert [request.value for request in batch.requests] == [1]
    assert len(batch.early) == 1
