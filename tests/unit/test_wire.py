"""Requests and replies on the wire: golden bytes, round trips, and what broken or newer bytes become."""

from __future__ import annotations

import random

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchq import codec, errors, wire
from batchq.errors import (
    BatchqError,
    DeadlineExceededError,
    EncodeError,
    ModelError,
    PayloadTooLargeError,
    from_wire,
)
from batchq.wire import BadRequestError, Request

ID = bytes(range(16))
CLIENT = "abcdefghij0123456789"
IDS = st.binary(min_size=16, max_size=16)
REPLIES = st.one_of(st.integers(0, 2**32 - 1), st.text("0123456789abcdef", min_size=20, max_size=20))
TIMEOUTS = st.integers(0, 2**32 - 1)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=10,
)
METAS = st.one_of(st.none(), st.dictionaries(st.text(max_size=5), VALUES, max_size=3))


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth - 1):
        value = [value]
    return value


# --- golden bytes: a change of the format has to change these, and the version ----------------------------------------

OWN_KEY = "9601c410000102030405060708090a0b0c0d0e0fce0000ea60ce000007d09201a17881a16b01"
STREAM = (
    "9601c410000102030405060708090a0b0c0d0e0fb46162636465666768696a30313233343536373839ce000007d09201a178c0"
)
EXTRAS = "9801c410000102030405060708090a0b0c0d0e0fce0000ea60ce000007d0c0c0a162cb4004000000000000"


def test_the_bytes_of_a_request_stay_the_same():
    assert wire.encode_request(ID, 60000, 2000, [1, "x"], meta={"k": 1}).hex() == OWN_KEY
    assert wire.encode_request(ID, CLIENT, 2000, [1, "x"]).hex() == STREAM
    assert wire.encode_request(ID, 60000, 2000, None, batch_key="b", cost=2.5).hex() == EXTRAS


def test_requests_of_version_1_can_be_read_for_ever():
    assert wire.decode_request(bytes.fromhex(OWN_KEY)) == Request(ID, 60000, 2000, [1, "x"], {"k": 1})
    assert wire.decode_request(bytes.fromhex(STREAM)) == Request(ID, CLIENT, 2000, [1, "x"])
    assert wire.decode_request(bytes.fromhex(EXTRAS)) == Request(ID, 60000, 2000, None, None, "b", 2.5)


def test_the_bytes_of_an_answer_and_of_errors_stay_the_same():
    assert (
        wire.encode_reply(ID, {"a": [1.0]}).hex()
        == "9401c410000102030405060708090a0b0c0d0e0fa081a16191cb3ff0000000000000"
    )
    assert wire.encode_error(ID, ModelError("boom", error_type="KeyError")).hex() == (
        "9501c410000102030405060708090a0b0c0d0e0faf657865637574696f6e2e6d6f64656ca4626f6f6da84b65794572726f72"
    )
    assert (
        wire.encode_error(ID, DeadlineExceededError("late")).hex()
        == "9501c410000102030405060708090a0b0c0d0e0fa8646561646c696e65a46c617465a0"
    )


# --- round trips ------------------------------------------------------------------------------------------------------


@given(IDS, REPLIES, TIMEOUTS, VALUES, METAS)
def test_a_request_arrives_as_it_was_sent(id_, reply, timeout_ms, value, meta):
    data = wire.encode_request(id_, reply, timeout_ms, value, meta=meta)
    assert wire.decode_request(data) == Request(id_, reply, timeout_ms, value, meta)
    assert wire.read_address(data) == (id_, reply)


@given(
    st.one_of(st.none(), st.text(max_size=10), st.integers(-(2**63), 2**63)),
    st.one_of(st.none(), st.floats(0, allow_infinity=False), st.integers(0, 2**63)),
    METAS,
)
def test_batch_key_and_cost_are_carried(batch_key, cost, meta):
    data = wire.encode_request(ID, 1, 2, "v", meta=meta, batch_key=batch_key, cost=cost)
    request = wire.decode_request(data)
    assert (request.value, request.meta, request.batch_key, request.cost) == ("v", meta, batch_key, cost)


@given(REPLIES, TIMEOUTS, TIMEOUTS, VALUES)
def test_a_timeout_can_be_changed_without_touching_the_rest(reply, before, after, value):
    data = wire.encode_request(ID, reply, before, value, batch_key="k")
    assert wire.with_timeout(data, after) == wire.encode_request(ID, reply, after, value, batch_key="k")


@given(st.lists(st.tuples(IDS, VALUES), max_size=8))
def test_replies_that_stand_one_behind_the_other_arrive_in_order(answers):
    data = b"".join(wire.encode_reply(id_, value) for id_, value in answers)
    assert [(reply.id, reply.code, reply.value) for reply in wire.decode_replies(data)] == [
        (id_, "", value) for id_, value in answers
    ]


@pytest.mark.parametrize(
    "cls",
    [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, BatchqError)],
)
def test_every_error_crosses_the_wire(cls):
    [reply] = wire.decode_replies(wire.encode_error(ID, cls("some text")))
    error = reply.error()
    assert type(error) is cls
    assert str(error) == "some text"
    assert error.request_id == ID.hex()


def test_a_model_errors_type_crosses_the_wire():
    [reply] = wire.decode_replies(wire.encode_error(ID, ModelError("boom", error_type="KeyError")))
    assert reply.error().error_type == "KeyError"


def test_an_error_text_that_is_no_unicode_still_crosses_the_wire():
    [reply] = wire.decode_replies(wire.encode_error(ID, ModelError("bad \ud800 text")))
    assert reply.error().message == "bad ? text"


def test_an_error_type_that_is_no_unicode_still_crosses_the_wire():
    [reply] = wire.decode_replies(wire.encode_error(ID, ModelError("boom", error_type="Bad\ud800")))
    assert reply.error().message == "boom"


def test_arrays_cross_both_ways_as_copies_or_as_views():
    array = np.arange(6.0).reshape(2, 3)
    request = wire.decode_request(wire.encode_request(ID, 1, 2, array))
    assert np.array_equal(request.value, array)
    [copy] = wire.decode_replies(wire.encode_reply(ID, array))
    [view] = wire.decode_replies(wire.encode_reply(ID, array), copy=False)
    assert copy.value.flags.writeable
    assert not view.value.flags.writeable


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_value_over_max_payload_is_refused_with_both_sizes():
    wire.encode_request(ID, 1, 2, b"x" * 998, max_payload=1001)
    with pytest.raises(PayloadTooLargeError, match=r"1,003 bytes; max_payload is 1,002"):
        wire.encode_request(ID, 1, 2, b"x" * 1000, max_payload=1002)
    with pytest.raises(PayloadTooLargeError, match="1,003"):
        wire.encode_reply(ID, b"x" * 1000, max_payload=1002)


@pytest.mark.parametrize(
    "what", [{"meta": {"a": {1}}}, {"meta": {"a": 2**64}}, {"batch_key": 2**64}, {"cost": 2**64}]
)
def test_extras_that_cannot_be_carried_are_an_encode_error(what):
    with pytest.raises(EncodeError):
        wire.encode_request(ID, 1, 2, None, **what)


@pytest.mark.parametrize("depth", [500, 511, 900, *range(1015, 1030), 5000])
@pytest.mark.parametrize(
    "around", [lambda v: v, lambda v: [0] * 20 + [v]], ids=["plain", "behind many scalars"]
)
def test_what_a_client_can_send_a_worker_can_read_and_the_other_way_round_however_deep(depth, around):
    value = around(nested(depth))
    try:
        request, reply = wire.encode_request(ID, 1, 2, value), wire.encode_reply(ID, value)
    except EncodeError:
        return
    assert wire.decode_request(request).id == ID
    assert [found.id for found in wire.decode_replies(reply)] == [ID]


# --- newer and broken requests ----------------------------------------------------------------------------------------


def raw(*fields: object) -> bytes:
    return msgpack.packb(list(fields))


def test_a_longer_request_of_a_later_minor_version_is_accepted():
    data = raw(1, ID, CLIENT, 5, "v", None, "key", 1.5, "more", {"and": "more"})
    assert wire.decode_request(data) == Request(ID, CLIENT, 5, "v", None, "key", 1.5)


def test_a_request_without_meta_is_accepted():
    assert wire.decode_request(raw(1, ID, CLIENT, 5, "v")) == Request(ID, CLIENT, 5, "v")
    assert wire.decode_request(raw(1, ID, 0, 5, None, {})) == Request(ID, 0, 5, None, {})


@pytest.mark.parametrize("reply", [CLIENT, 60000])
@pytest.mark.parametrize("version", [0, 2, 255, 2**63])
def test_a_request_of_another_version_can_still_be_answered(version, reply):
    with pytest.raises(BadRequestError, match=f"version {version}, this worker 1 to 1") as caught:
        wire.decode_request(raw(version, ID, reply, "all", "other", "now"))
    assert (caught.value.code, caught.value.id, caught.value.reply) == ("request.version", ID, reply)
    assert type(from_wire(caught.value.code, "", None)) is errors.ProtocolVersionError


@pytest.mark.parametrize(
    "rest",
    [
        ("late", "v", None),
        (None, "v", None),
        (1.5, "v", None),
        (True, "v", None),
        (5, "v", [1]),
        (5, "v", "meta"),
        (5, {(1,): 2}),
        (5, {True: 2}),
        (5, msgpack.ExtType(99, b"")),
        (5, msgpack.ExtType(codec.EXT_ARRAY, b"junk")),
        (5, "v", None, [1, 2], None),
        (5, "v", None, "key", "dear"),
    ],
    ids=str,
)
def test_a_request_with_broken_fields_can_still_be_answered(rest):
    with pytest.raises(BadRequestError) as caught:
        wire.decode_request(raw(1, ID, CLIENT, *rest))
    assert (caught.value.code, caught.value.id, caught.value.reply) == ("request.encode", ID, CLIENT)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"garbage",
        b"\xc0",
        raw(),
        raw(1),
        raw(1, ID),
        raw(1, ID, CLIENT),
        raw(1, ID, CLIENT, 5),
        raw("1", ID, CLIENT, 5, "v", None),
        raw(True, ID, CLIENT, 5, "v", None),
        raw(1, ID[:15], CLIENT, 5, "v", None),
        raw(1, ID + b"x", CLIENT, 5, "v", None),
        raw(1, ID.hex(), CLIENT, 5, "v", None),
        raw(1, ID, "", 5, "v", None),
        raw(1, ID, "x" * 65, 5, "v", None),
        raw(1, ID, "a:b", 5, "v", None),
        raw(1, ID, "a}b", 5, "v", None),
        raw(1, ID, "a\n", 5, "v", None),
        raw(1, ID, "é", 5, "v", None),
        raw(1, ID, b"a" * 20, 5, "v", None),
        raw(1, ID, -1, 5, "v", None),
        raw(1, ID, 2**32, 5, "v", None),
        raw(1, ID, 1.0, 5, "v", None),
        raw(1, ID, True, 5, "v", None),
        raw(1, ID, None, 5, "v", None),
        raw(1, ID, [CLIENT], 5, "v", None),
        msgpack.packb({1: ID, 2: CLIENT, 3: 5, 4: 6, 5: 7}),
        b"\x96" + b"\xdd\xff\xff\xff\xff" * 50,
        b"\x96" + b"\xdd\x05\xf5\xe0\xff" * 50,
        b"\xdd\xff\xff\xff\xff" + raw(1, ID, CLIENT)[1:],
        b"\x96" + b"\x91" * 1000,
        b"\x96\x01\xc6\xff\xff\xff\xff" + ID,
    ],
    ids=lambda data: f"{len(data)}:{data[:24].hex()}",
)
def test_what_is_no_request_names_no_address(data):
    with pytest.raises(BadRequestError) as caught:
        wire.decode_request(data)
    if caught.value.id is not None:  # the first three fields were good
        assert (caught.value.id, caught.value.reply) == (ID, CLIENT)
    assert caught.value.code == "request.encode"
    assert caught.value.message


def decoded(data: bytes) -> tuple[BadRequestError | None, Request | None]:
    try:
        return None, wire.decode_request(data)
    except BadRequestError as error:
        return error, None


def reads_or_refuses(data: bytes) -> None:
    refused, request = decoded(data)
    if refused is not None:
        assert refused.code in ("request.encode", "request.version")
        assert refused.message
        assert (refused.id is None) == (refused.reply is None)
    if request is not None:
        assert len(request.id) == 16
        assert type(request.timeout_ms) is int
        assert request.meta is None or isinstance(request.meta, dict)


@given(st.binary(max_size=120))
@settings(max_examples=500)
def test_random_bytes_are_a_bad_request_and_nothing_worse(data):
    reads_or_refuses(data)


@given(st.binary(max_size=120), st.booleans())
@settings(max_examples=500)
def test_random_bytes_behind_a_good_address_can_be_answered(data, stream):
    head = wire.encode_request(ID, CLIENT if stream else 7, 5, None)[:-2]
    for result in decoded(head + data):
        if result is not None:
            assert (result.id, result.reply) == (ID, CLIENT if stream else 7)


SAMPLES = [
    wire.encode_request(ID, CLIENT, 5, {"a": [1, 2.5, np.arange(3)]}, meta={"m": b"x"}),
    wire.encode_request(ID, 60000, 5, "text", batch_key="key", cost=2.0),
]


def test_every_truncation_of_a_request_is_a_bad_request():
    for sample in SAMPLES:
        for end in range(len(sample)):
            with pytest.raises(BadRequestError):
                wire.decode_request(sample[:end])


def test_every_changed_byte_of_a_request_is_a_request_or_a_bad_request():
    draw = random.Random(7)
    for sample in SAMPLES:
        for at in range(len(sample)):
            for new in {0, 0xFF, sample[at] ^ 1, sample[at] ^ 0x80, draw.randrange(256)}:
                reads_or_refuses(sample[:at] + bytes([new]) + sample[at + 1 :])


@pytest.mark.parametrize("name", ["a", "A-z_09", "x" * 64])
def test_another_implementations_client_name_may_be_any_of_64_plain_characters(name):
    assert wire.decode_request(raw(1, ID, name, 5, "v", None)).reply == name


# --- broken replies ---------------------------------------------------------------------------------------------------

GOOD = wire.encode_reply(ID, "good")
OTHER = wire.encode_reply(ID[::-1], "other")


def found(data: bytes) -> list[tuple[bytes, object]]:
    return [(reply.id, reply.value) for reply in wire.decode_replies(data)]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xc1",
        b"\xa5ab",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x94\x01",
        b"\x94\xa1\xff",
    ],
)
def test_garbage_behind_replies_leaves_them_standing(garbage):
    assert found(GOOD + OTHER + garbage) == [(ID, "good"), (ID[::-1], "other")]


@pytest.mark.parametrize(
    "odd",
    [
        raw(1, ID, 5, "code is no str"),
        raw(1, "id", "", "id is no bin"),
        raw(1, None, None, None),
        raw(1, ID, "", "v", "", "more", {"and": "more"})[:0] + raw(9, ID.hex(), "", "v"),
    ],
    ids=["code", "id", "none", "hex id"],
)
def test_a_reply_of_the_wrong_shape_does_not_hide_the_next(odd):
    assert found(GOOD + odd + OTHER) == [(ID, "good"), (ID[::-1], "other")]


@pytest.mark.parametrize(
    "odd", [raw(), raw(1), raw(1, ID), raw(1, ID, ""), b"\xc0", b"\x07", b"\x80"], ids=bytes.hex
)
def test_a_reply_without_its_fields_does_not_hide_the_next(odd):
    assert found(GOOD + odd + OTHER) == [(ID, "good"), (ID[::-1], "other")]


@pytest.mark.parametrize(
    "value",
    [{(1, 2): 3}, {"a": [{(1,): 2}]}, msgpack.ExtType(99, b"x"), msgpack.ExtType(codec.EXT_ARRAY, b"junk"),
     msgpack.ExtType(codec.EXT_DATETIME, b"junk")],
    ids=["list as key", "list as key, deep", "unknown ext", "broken array", "broken datetime"],
)  # fmt: skip
def test_an_answer_that_this_client_cannot_read_fails_its_own_caller_and_hides_no_other(value):
    bad_id = b"b" * 16
    replies = wire.decode_replies(GOOD + raw(1, bad_id, "", value) + OTHER)
    assert [(reply.id, reply.value) for reply in replies if reply.id != bad_id] == [
        (ID, "good"),
        (ID[::-1], "other"),
    ]
    [bad] = [reply for reply in replies if reply.id == bad_id]
    assert bad.code  # its caller gets an error, not silence until the deadline
    assert isinstance(bad.error(), BatchqError)


def test_an_answer_that_a_worker_can_encode_hides_no_other():
    value = [0] * 20 + [{(1, 2): 3}]
    try:
        data = wire.encode_reply(b"b" * 16, value)
    except EncodeError:
        return
    assert (ID, "good") in found(data + GOOD)


def test_longer_replies_of_a_later_minor_version_are_accepted():
    assert found(raw(1, ID, "", "v", "", "more", [1])) == [(ID, "v")]


def test_a_reply_of_an_unknown_code_is_its_familys_error():
    [reply] = wire.decode_replies(raw(1, ID, "execution.new_kind", "text"))
    assert isinstance(reply.error(), errors.ExecutionError)


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_random_bytes_are_replies_or_nothing(data):
    for reply in wire.decode_replies(data):
        assert type(reply.id) is bytes
        assert type(reply.code) is str
        if reply.code:
            assert isinstance(reply.error(), BatchqError)


@given(st.binary(max_size=100))
@settings(max_examples=300)
def test_random_bytes_behind_a_reply_leave_it_standing(data):
    assert found(GOOD + data)[:1] == [(ID, "good")]


def test_a_truncated_reply_is_left_out_and_those_before_it_stand():
    data = GOOD + OTHER
    for end in range(len(data)):
        assert found(data[:end]) == ([(ID, "good")] if end >= len(GOOD) else [])
