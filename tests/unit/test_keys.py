"""Key names are a part of the protocol: clients and workers of other versions and languages use them."""

from __future__ import annotations

import re

import pytest
from redis.crc import key_slot

from batchq import keys as module
from batchq.errors import ConfigError
from batchq.keys import QUEUES, Keys, check_queue_name

ID = bytes(range(16))


def all_keys(keys: Keys) -> list[bytes]:
    return [
        *keys.requests.values(), *keys.heads.values(), keys.solo, keys.wake, keys.leases, keys.cancelled, keys.config,
        keys.workers, keys.counters, keys.dead, keys.batch("w.1.2"), keys.batch_heads("w.1.2"), keys.reply(ID),
        keys.replies("a" * 20), keys.producer("b" * 20), keys.job(ID),
    ]  # fmt: skip


def test_the_names_of_all_keys():
    assert all_keys(Keys("q")) == [
        b"batchq:{q}:requests:high",
        b"batchq:{q}:requests",
        b"batchq:{q}:requests:low",
        b"batchq:{q}:heads:high",
        b"batchq:{q}:heads",
        b"batchq:{q}:heads:low",
        b"batchq:{q}:solo",
        b"batchq:{q}:wake",
        b"batchq:{q}:leases",
        b"batchq:{q}:cancelled",
        b"batchq:{q}:config",
        b"batchq:{q}:workers",
        b"batchq:{q}:counters",
        b"batchq:{q}:dead",
        b"batchq:{q}:batch:w.1.2",
        b"batchq:{q}:batch:w.1.2:heads",
        b"batchq:{q}:reply:000102030405060708090a0b0c0d0e0f",
        b"batchq:{q}:replies:" + b"a" * 20,
        b"batchq:{q}:producer:" + b"b" * 20,
        b"batchq:{q}:job:000102030405060708090a0b0c0d0e0f",
    ]
    assert QUEUES == b"batchq:queues"
    assert Keys("q").prefix == b"batchq:{q}:"


@pytest.mark.parametrize("queue", ["q", "a.b-c_D9", "x" * 64, "..", "-"])
def test_all_keys_of_a_queue_lie_in_one_slot_of_a_cluster(queue):
    keys = Keys(queue)
    assert {key_slot(key) for key in all_keys(keys)} == {key_slot(keys.prefix)}


def test_the_keys_of_two_queues_never_meet():
    assert not set(all_keys(Keys("a"))) & set(all_keys(Keys("a.b")))


@pytest.mark.parametrize("name", ["q", "A9", "a.b", "a_b-c", "x" * 64])
def test_queue_names_that_are_allowed(name):
    assert check_queue_name(name) == name
    assert Keys(name).queue == name


@pytest.mark.parametrize(
    "name", ["", "x" * 65, "a b", "a}", "{a", "a:b", "ä", "a\n", "\na", "a\0", "a/b", None, 7, b"q", ["q"]]
)
def test_any_other_queue_name_is_refused_with_the_rule(name):
    with pytest.raises(ConfigError, match=r"1 to 64 letters") as caught:
        Keys(name)
    assert repr(name) in str(caught.value)


def test_the_docstring_lists_every_key():
    text = module.__doc__ or ""
    for key in all_keys(Keys("q")):
        name = key.decode().removeprefix("batchq:{q}:")
        name = re.sub(r":[0-9a-f]{20,}$", "", name).replace("w.1.2", "<b>")
        assert name in text, name
