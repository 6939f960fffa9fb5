"""Settings: what is allowed, and that a bad value names itself, the range and the default."""

from __future__ import annotations

import dataclasses
import math

import pytest

from batchq import config
from batchq.config import (
    DEFAULT_TIMEOUT,
    MIB,
    BatchPolicy,
    ClientConfig,
    check_extras,
    check_int,
    check_lane,
    check_number,
    check_timeout,
    mask_url,
    resolve_queue,
    resolve_url,
)
from batchq.errors import ConfigError


def test_the_documented_defaults():
    policy = BatchPolicy()
    assert (policy.max_batch_size, policy.max_delay) == (32, 0.005)
    assert (policy.capacity, policy.capacity_bytes) == (4096, 256 * MIB)
    client = ClientConfig()
    assert (client.url, client.queue, client.timeout) == ("redis://localhost:6379/0", "default", 10.0)
    assert (client.capacity, client.max_payload, client.fail_fast, client.copy) == (
        None,
        64 * MIB,
        False,
        True,
    )
    assert config.REPLY_TTL_MS == 60_000
    assert (config.DEFAULT_RESULT_TTL, config.DEFAULT_LEASE, config.DEFAULT_BATCH_TIMEOUT) == (3600, 5, 120)
    assert (config.DEFAULT_DRAIN_TIMEOUT, config.WORKER_ALIVE, config.DAY) == (25, 10, 86_400)


@pytest.mark.parametrize("made", [BatchPolicy(), ClientConfig()], ids=["BatchPolicy", "ClientConfig"])
def test_settings_are_frozen_slotted_and_keyword_only(made):
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.capacity = 5
    assert not hasattr(made, "__dict__")
    with pytest.raises(TypeError):
        type(made)(5)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("max_batch_size", [1, 4096]),
        ("max_delay", [0, 0.0, 0.001, 60, 60.0]),
        ("capacity", [1, 1_000_000]),
        ("capacity_bytes", [1024, MIB * MIB]),
    ],
)
def test_a_policy_takes_all_values_of_its_ranges(name, good):
    for value in good:
        assert getattr(BatchPolicy(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [
        ("max_batch_size", [0, -1, 4097, 1.0, True, "32", None], "1 to 4,096"),
        ("max_delay", [-0.001, 60.1, math.nan, math.inf, True, "0", None], "0 to 60"),
        ("capacity", [0, 1_000_001, 4096.0, False, None], "1 to 1,000,000"),
        ("capacity_bytes", [1023, MIB * MIB + 1, 1e6, None], "1,024 to"),
    ],
)
def test_a_value_out_of_range_names_itself_the_range_and_the_default(name, bad, said):
    default = getattr(BatchPolicy(), name)
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            BatchPolicy(**{name: value})
        text = str(caught.value)
        assert f"{name}={value!r}" in text
        assert said in text
        assert f"default {default}" in text


@pytest.mark.parametrize("timeout", [1e-9, 0.001, 1, 10.5, 86_400, 86_400.0])
def test_timeouts_from_just_above_nothing_to_a_day_are_allowed(timeout):
    assert check_timeout(timeout, 10.0) == timeout
    assert type(check_timeout(timeout, 10.0)) is float


def test_a_timeout_of_none_means_the_default():
    assert check_timeout(None, DEFAULT_TIMEOUT) == 10.0
    assert check_timeout(None, 86_400.0) == 86_400.0


@pytest.mark.parametrize("timeout", [0, 0.0, -1, 86_400.001, math.inf, -math.inf, math.nan, True, "5", [1]])
def test_any_other_timeout_is_a_value_error(timeout):
    with pytest.raises(ValueError, match=r"more than 0 and at most 86,400 s, or None \(default 10\)"):
        check_timeout(timeout, 10.0)


def test_a_timeout_error_uses_the_arguments_name():
    with pytest.raises(ConfigError, match="deadline=0"):
        check_timeout(0, 86_400.0, "deadline")


@pytest.mark.parametrize(("priority", "lane"), [("high", "h"), ("normal", "n"), ("low", "l")])
def test_priorities_and_their_lanes(priority, lane):
    assert check_lane(priority) == lane


@pytest.mark.parametrize("priority", ["", "HIGH", "h", "urgent", None, 0, ["high"]])
def test_an_unknown_priority_is_refused(priority):
    with pytest.raises(ConfigError, match="'high', 'normal' and 'low'"):
        check_lane(priority)


def test_extras_that_are_allowed():
    check_extras(None, None, None)
    check_extras("key", 0, {})
    check_extras(7, 1.5, {"a": [1]})


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ((1.5, None, None), "batch_key=1.5"),
        ((True, None, None), "batch_key=True"),
        ((b"k", None, None), "batch_key="),
        ((None, -0.1, None), "cost=-0.1"),
        ((None, math.inf, None), "cost=inf"),
        ((None, math.nan, None), "cost=nan"),
        ((None, True, None), "cost=True"),
        ((None, "1", None), "cost='1'"),
        ((None, None, [1]), "meta="),
        ((None, None, "x"), "meta="),
    ],
)
def test_other_extras_are_refused(extras, said):
    with pytest.raises(ConfigError) as caught:
        check_extras(*extras)
    assert said in str(caught.value)


def test_numbers_are_checked_at_both_ends():
    assert check_number("x", 1, 1, 2, 1) == 1.0
    assert check_int("x", 2, 1, 2, 1) == 2
    for bad in (0.99, 2.01, True, "1", None, math.nan):
        with pytest.raises(ConfigError, match="x="):
            check_number("x", bad, 1, 2, 1)
    for bad in (0, 3, 1.0, False, "1", None):
        with pytest.raises(ConfigError, match="x="):
            check_int("x", bad, 1, 2, 1)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@host:1/2", "redis://:***@host:1/2"),
        ("rediss://user:s%40cret@host/0?ssl_cert_reqs=none", "rediss://user:***@host/0?ssl_cert_reqs=none"),
        ("redis://user@host/0", "redis://user@host/0"),
        ("unix://user:secret@/run/redis.sock?db=1", "unix://user:***@/run/redis.sock?db=1"),
    ],
)
def test_a_password_never_shows(url, shown):
    assert mask_url(url) == shown


def test_a_client_config_does_not_show_its_url():
    assert "secret" not in repr(ClientConfig(url="redis://:secret@host/0"))


def test_url_and_queue_come_from_the_argument_then_the_environment_then_the_default(monkeypatch):
    monkeypatch.delenv("BATCHQ_REDIS_URL", raising=False)
    monkeypatch.delenv("BATCHQ_QUEUE", raising=False)
    assert (resolve_url(None), resolve_queue(None)) == ("redis://localhost:6379/0", "default")
    monkeypatch.setenv("BATCHQ_REDIS_URL", "rediss://env/1")
    monkeypatch.setenv("BATCHQ_QUEUE", "from-env")
    assert (resolve_url(None), resolve_queue(None)) == ("rediss://env/1", "from-env")
    assert (resolve_url("unix:///s"), resolve_queue("given")) == ("unix:///s", "given")
    monkeypatch.setenv("BATCHQ_REDIS_URL", "")
    monkeypatch.setenv("BATCHQ_QUEUE", "")
    assert (resolve_url(None), resolve_queue(None)) == ("redis://localhost:6379/0", "default")


@pytest.mark.parametrize("url", ["http://x", "localhost:6379", "", "REDIS://x", 5])
def test_a_url_of_another_scheme_is_refused_with_those_that_are_allowed(url, monkeypatch):
    monkeypatch.delenv("BATCHQ_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="redis://, rediss:// and unix://"):
        resolve_url(url)


def test_a_refused_url_does_not_show_its_password():
    with pytest.raises(ConfigError) as caught:
        resolve_url("http://user:secret@host")
    assert "secret" not in str(caught.value)


def test_an_empty_queue_name_given_as_argument_is_refused():
    with pytest.raises(ConfigError):
        resolve_queue("")


@pytest.mark.parametrize(
    "bad",
    [{"queue": "a b"}, {"timeout": 0}, {"capacity": 0}, {"capacity": 1_000_001}, {"max_payload": 1023},
     {"max_payload": 512 * MIB + 1}],
    ids=str,
)  # fmt: skip
def test_a_client_config_is_checked_when_it_is_built(bad):
    with pytest.raises(ConfigError):
        ClientConfig(**bad)
