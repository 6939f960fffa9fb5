"""Values on the wire: what goes in comes out, what cannot go in says where and why, and broken bytes break nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import math
import random
import re
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batchq import codec
from batchq.codec import DecodeError
from batchq.errors import EncodeError

INTS = st.integers(-(2**63), 2**64 - 1)
OFFSETS = st.integers(-82_800, 82_800).map(lambda s: datetime.timezone(datetime.timedelta(seconds=s)))
# fold does not cross the wire: == does not see it either
DATETIMES = st.datetimes(timezones=st.one_of(st.none(), OFFSETS)).map(lambda value: value.replace(fold=0))
SCALARS = st.one_of(
    st.none(), st.booleans(), INTS, st.floats(allow_nan=False), st.text(), st.binary(), DATETIMES
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=20), st.dictionaries(st.one_of(st.text(), INTS), inner, max_size=5)
    ),
    max_leaves=30,
)
DTYPES = [
    f"{order}{kind}"
    for order in "<>"
    for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "b1")
]


def round_trip(value: object) -> object:
    return codec.unpack(codec.pack(value))


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth - 1):
        value = [value]
    return value


def ext(code: int, data: bytes) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, data))


def array_ext(dtype: object, shape: object, data: bytes) -> bytes:
    header = msgpack.packb([dtype, shape])
    return ext(codec.EXT_ARRAY, header + b"\0" * (-len(header) % 16) + data)


# --- golden bytes: a change of the format has to change these, and the protocol's version -----------------------------


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (None, "c0"),
        (True, "c3"),
        (-1, "ff"),
        (2**64 - 1, "cfffffffffffffffff"),
        (-(2**63), "d38000000000000000"),
        (1.5, "cb3ff8000000000000"),
        ("hé", "a368c3a9"),
        (b"\0\xff", "c40200ff"),
        ([1, "a", None], "9301a161c0"),
        ((1, 2), "920102"),
        ({"a": 1, 2: [3]}, "82a16101029103"),
        (
            datetime.datetime(2024, 2, 29, 12, 30, 15, 123456),
            "c71a02323032342d30322d32395431323a33303a31352e313233343536",
        ),
        (
            datetime.datetime(
                2024, 2, 29, 12, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))
            ),
            "c71902323032342d30322d32395431323a33303a30302b30353a3330",
        ),
        (
            np.array([[1, 2], [3, 4]], "<i2"),
            "c7180192a33c693292020200000000000000000100020003000400",
        ),
        (np.array([1], ">f8"), "c7180192a33e663891010000000000000000003ff0000000000000"),
        (np.zeros((0, 3), "<f4"), "d80192a33c66349200030000000000000000"),
        (np.array(True), "c7110192a37c6231900000000000000000000001"),
    ],
    ids=lambda value: repr(value)[:30].replace("\n", ""),
)
def test_the_bytes_of_a_value_stay_the_same(value, wire):
    assert codec.pack(value).hex() == wire
    back = codec.unpack(bytes.fromhex(wire))
    if isinstance(value, np.ndarray):
        assert np.array_equal(back, value)
        assert back.dtype == value.dtype
    else:
        assert back == (list(value) if isinstance(value, tuple) else value)


# --- round trips ------------------------------------------------------------------------------------------------------


@given(VALUES)
def test_values_arrive_as_they_were_sent(value):
    back = round_trip(value)
    assert back == value
    assert repr(type(back)) == repr(type(value))


@given(VALUES)
def test_a_bool_stays_a_bool_and_an_int_an_int(value):
    # repr tells True from 1 and 0.0 from -0.0 at any depth; tzinfo compares equal
    assert repr(round_trip(value)) == repr(value)


def test_not_a_number_and_the_infinities_arrive():
    assert math.isnan(round_trip(float("nan")))
    assert round_trip([math.inf, -math.inf, -0.0, 5e-324]) == [math.inf, -math.inf, -0.0, 5e-324]


def test_tuples_arrive_as_lists():
    assert round_trip((1, (2, [3]), {"a": ()})) == [1, [2, [3]], {"a": []}]


def test_bytearray_and_memoryview_arrive_as_bytes():
    assert round_trip([bytearray(b"ab"), memoryview(b"cd")]) == [b"ab", b"cd"]


@given(DATETIMES)
def test_datetimes_keep_their_microseconds_and_offsets(value):
    back = round_trip(value)
    assert back == value
    assert back.utcoffset() == value.utcoffset()


@given(st.data())
@settings(max_examples=200)
def test_arrays_of_every_dtype_and_shape_arrive_bit_by_bit(data):
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    array = data.draw(hnp.arrays(dtype, shape))
    for form in (array, np.asfortranarray(array), array[..., ::-1] if array.ndim else array, array.T):
        back = round_trip(form)
        assert back.shape == form.shape
        assert back.dtype == form.dtype
        assert back.tobytes() == form.tobytes()


def test_a_non_contiguous_view_sends_its_own_elements_only():
    base = np.arange(1000, dtype="<i4").reshape(100, 10)
    view = base[::10, ::3]
    packed = codec.pack(view)
    assert len(packed) < 10 * 4 * 4 + 64
    assert np.array_equal(codec.unpack(packed), view)


def test_arrays_stand_anywhere_in_a_value():
    back = round_trip({"a": [np.arange(3), {"b": (np.float32(1.5), np.array(7, "u1"))}]})
    assert np.array_equal(back["a"][0], np.arange(3))
    assert back["a"][1]["b"][0] == 1.5
    assert back["a"][1]["b"][1].shape == ()


@pytest.mark.parametrize(
    ("value", "python"),
    [
        (np.int8(-5), -5),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float16(0.5), 0.5),
        (np.float32(0.25), 0.25),
        (np.float64(0.1), 0.1),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.bytes_(b"a"), b"a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_scalars_arrive_as_python_ones(value, python):
    back = round_trip([value])[0]
    assert back == python
    assert type(back) is type(python)


def test_arrays_are_writable_copies_unless_asked_otherwise():
    packed = codec.pack(np.arange(4.0))
    copy = codec.unpack(packed)
    copy[0] = 9
    view = codec.unpack(packed, copy=False)
    assert not view.flags.writeable
    assert view[0] == 0


@pytest.mark.parametrize("ndim", [1, 31, 32])
def test_arrays_of_up_to_32_dimensions_arrive(ndim):
    assert round_trip(np.zeros((1,) * ndim)).shape == (1,) * ndim


@pytest.mark.parametrize("ndim", [33, 40, 64])
def test_an_array_of_too_many_dimensions_fails_at_its_sender_not_at_its_reader(ndim):
    try:
        array = np.zeros((1,) * ndim)
    except ValueError:
        pytest.skip("this numpy has no such arrays")
    try:
        packed = codec.pack([array])
    except EncodeError as error:
        problem = str(error)
    else:
        assert codec.unpack(packed)[0].shape == array.shape
        return
    assert "value[0]" in problem


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "complex64",
        "complex128",
    ],
)
@pytest.mark.parametrize("tensors", [False, True])
def test_a_tensor_arrives_as_an_array_of_its_dtype(torch, dtype, tensors):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(getattr(torch, dtype))
    back = codec.unpack(codec.pack({"a": [tensor]}), tensors=tensors)["a"][0]
    assert back.dtype == np.dtype(dtype)
    assert np.array_equal(back, tensor.numpy())


def test_a_tensor_of_any_layout_arrives_and_its_gradient_does_not_matter(torch):
    tensor = torch.arange(24.0).reshape(2, 3, 4).requires_grad_()
    for form in (
        tensor,
        tensor.permute(2, 0, 1),
        tensor[:, ::2],
        tensor[0].expand(5, 3, 4),
        tensor[0, 0, 0],
        tensor * 2,
    ):
        for dtype in (torch.float32, torch.bfloat16):
            back = round_trip(form.to(dtype))
            assert back.shape == tuple(form.shape)
            assert np.array_equal(back, form.detach().numpy())
    assert np.array_equal(round_trip(torch.tensor([1 + 2j]).conj()), np.array([1 - 2j], "c8"))
    assert np.array_equal(round_trip(torch.tensor([1 + 2j]).conj().imag), np.array([-2], "f4"))


def test_the_bytes_of_a_bfloat16_stay_the_same(torch):
    wire = "c7140192a862666c6f61743136910200000000c03f00c0"
    assert codec.pack(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)).hex() == wire


def every_bfloat16():
    """Return the bits of each bfloat16 there is, as signed integers."""
    return np.arange(-(2**15), 2**15, dtype="i2")


def test_every_bfloat16_arrives_as_exactly_the_same_float32_where_nobody_asks_for_tensors(torch):
    tensor = torch.from_numpy(every_bfloat16()).view(torch.bfloat16)
    packed = codec.pack(tensor)
    assert len(packed) < 2 * 2**16 + 64
    for back in (codec.unpack(packed), codec.unpack(packed, copy=False)):
        assert back.dtype == np.float32
        assert back.flags.writeable
        assert back.view("u4").tolist() == (every_bfloat16().view("u2").astype("u4") << 16).tolist()
    number = ~np.isnan(back)
    assert np.array_equal(back[number], tensor.float().numpy()[number])


def test_bfloat16_arrives_as_a_tensor_where_the_reader_asks_for_it(torch):
    tensor = torch.from_numpy(every_bfloat16()).view(torch.bfloat16)
    for shape in [(256, 256), (2**16,), (2, 2**15, 1)]:
        for copy in (True, False):
            back = codec.unpack(codec.pack([tensor.reshape(shape)]), copy=copy, tensors=True)[0]
            assert back.dtype == torch.bfloat16
            assert tuple(back.shape) == shape
            assert np.array_equal(back.view(torch.int16).numpy().reshape(-1), every_bfloat16())
            back.zero_()  # it may be written to
    for empty in (torch.zeros(0, 3, dtype=torch.bfloat16), torch.tensor(1.5, dtype=torch.bfloat16)):
        assert codec.unpack(codec.pack(empty), tensors=True).shape == empty.shape
        assert round_trip(empty).shape == empty.shape


def test_a_reader_without_torch_reads_bfloat16_and_imports_nothing_for_it(torch):
    packed = codec.pack(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    code = (
        f"import sys; from batchq import codec; array = codec.unpack({packed!r}, tensors=True); "
        "sys.exit(array.tolist() != [1.5, -2.0] or array.dtype.name != 'float32' or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("shape", [[2], [1, 1, 1], [0]])
def test_a_bfloat16_array_whose_header_lies_is_refused(shape):
    with pytest.raises(DecodeError):
        codec.unpack(array_ext("bfloat16", shape, b"\0\0\0"))


@pytest.mark.parametrize("tensors", [False, True])
def test_random_bits_of_bfloat16_are_a_value(tensors):
    data = random.Random(3).randbytes(64)
    assert codec.unpack(array_ext("bfloat16", [4, 8], data), tensors=tensors).shape == (4, 8)


@pytest.mark.filterwarnings("ignore")  # torch warns that some of these are new, or old
@pytest.mark.parametrize(
    ("make", "problem", "remedy"),
    [
        (
            lambda t: t.zeros(2, dtype=t.float8_e4m3fn),
            "dtype torch.float8_e4m3fn, which numpy has not",
            "call .float()",
        ),
        (lambda t: t.zeros(2, dtype=t.complex32), "dtype torch.complex32", "call .cfloat()"),
        (lambda t: t.zeros(2, 2).to_sparse(), "layout torch.sparse_coo", "call .to_dense()"),
        (lambda t: t.zeros(2, 2).to_sparse_csr(), "layout torch.sparse_csr", "call .to_dense()"),
        (lambda t: t.zeros(2, device="meta"), "on the meta device", "it has no values"),
        (lambda t: t.zeros(2, device="meta", dtype=t.bfloat16), "on the meta device", "it has no values"),
        (
            lambda t: t.quantize_per_tensor(t.zeros(2), 0.1, 0, t.qint8),
            "a quantized tensor",
            "call .dequantize()",
        ),
        (lambda t: t.nested.nested_tensor([t.zeros(2), t.zeros(3)]), "a nested tensor", "call .unbind()"),
    ],
    ids=range(8),
)
def test_a_tensor_that_no_array_can_be_made_of_names_its_kind_and_the_remedy(torch, make, problem, remedy):
    with pytest.raises(EncodeError) as caught:
        codec.pack({"a": [make(torch)]})
    assert str(caught.value).startswith("value.a[0]: ")
    assert problem in str(caught.value)
    assert remedy in str(caught.value)


def test_a_tensor_whose_device_fails_says_so_and_not_that_it_cannot_be_sent(torch):
    class Broken(torch.Tensor):
        def cpu(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(EncodeError, match="unspecified launch failure"):
        codec.pack(torch.zeros(2).as_subclass(Broken))


def test_packing_and_unpacking_plain_values_imports_no_numpy():
    code = (
        "import sys; from batchq import codec; codec.unpack(codec.pack({'a': [1, 'b', b'c', None, (1.5,)]})); "
        "sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# --- what cannot be sent ----------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Pydantic:
    def model_dump(self) -> dict:
        return {}


class Picture:
    mode = "RGB"

    def tobytes(self) -> bytes:
        return b""


@dataclasses.dataclass
class Data:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "path", "remedy"),
    [
        (2**64, "value:", "send it as a str"),
        (-(2**63) - 1, "value:", "64 bits"),
        ([0, [1, 2**70]], "value[1][1]:", "send it as a str"),
        ([-(2**63), 2**64 - 1, 2**64], "value[2]:", "send it as a str"),
        ({"a": {"b c": [2**64]}}, "value.a['b c'][0]:", "64 bits"),
        ({2**64: 1}, "value[18446744073709551616]:", "dict key"),
        ({"a": {(1, 2): 3}}, "value.a[(1, 2)]:", "str or int keys"),
        ({True: 1}, "value[True]:", "key of type bool"),
        ({1.5: 1}, "value[1.5]:", "key of type float"),
        ({None: 1}, "value[None]:", "key of type NoneType"),
        ({b"k": 1}, "value[b'k']:", "key of type bytes"),
        ([[{1, 2}]], "value[0][0]:", "call list()"),
        ((i for i in "ab"), "value:", "call list()"),
        ({"user": Pydantic()}, "value.user:", "call .model_dump()"),
        ({"d": [Data()]}, "value.d[0]:", "dataclasses.asdict()"),
        ([Picture()], "value[0]:", "np.asarray(image)"),
        ([len], "value[0]:", "forget to call it"),
        ([Colour.RED], "value[0]: Colour", "allowed are"),
        ([1 + 2j], "value[0]: complex", "allowed are"),
        ([datetime.date(2024, 1, 1)], "value[0]: date", "allowed are"),
        ({"s": "\ud800"}, "value.s:", "send it as bytes"),
        (np.array([object()]), "value:", "numeric dtype"),
        ({"a": np.array(["x"])}, "value.a:", "numeric dtype"),
        ([np.array(["2024-01-01"], "M8[D]")], "value[0]:", "numeric dtype"),
        (np.zeros(2, "i4,f4"), "value:", "numeric dtype"),
        ([0] * 20 + [{(1, 2): 3}], "value[20][(1, 2)]:", "str or int keys"),
        ([0] * 20 + [{"a": {True: 3}}], "value[20].a[True]:", "str or int keys"),
    ],
    ids=lambda value: re.sub(r" at 0x.*", "", repr(value))[:40],
)
def test_what_cannot_be_sent_fails_at_the_caller_with_its_path_and_a_remedy(value, path, remedy):
    with pytest.raises(EncodeError) as caught:
        codec.pack(value)
    assert str(caught.value).startswith(path)
    assert remedy in str(caught.value)


def test_a_scalar_wider_than_a_float_is_refused_with_its_path():
    if np.dtype(np.longdouble).itemsize <= 8:
        pytest.skip("this machine has none")
    with pytest.raises(EncodeError, match=r"value\.a\[0\]"):
        codec.pack({"a": [np.longdouble(1)]})


@pytest.mark.parametrize("number", [2**64 - 1, 2**63, 2**63 - 1, -(2**63), -(2**63) + 1, 2**32, -(2**31) - 1])
def test_ints_at_the_edges_of_64_bits_arrive(number):
    assert round_trip({number: [number]}) == {number: [number]}


@given(st.one_of(st.integers(min_value=2**64), st.integers(max_value=-(2**63) - 1)))
def test_ints_beyond_64_bits_never_get_onto_the_wire(number):
    for value in (number, [number], {"a": number}, {number: 1}):
        with pytest.raises(EncodeError, match="64 bits"):
            codec.pack(value)


def test_a_value_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    table: dict[str, object] = {}
    table["self"] = table
    for value in (loop, table, [0] * 20 + [loop]):
        with pytest.raises(EncodeError, match="nested too deeply"):
            codec.pack(value)


@pytest.mark.parametrize(
    "depth", [10, 500, 511, 512, 700, 900, 1000, 1010, 1020, 1021, 1022, 1023, 1024, 1100, 5000, 100_000]
)
@pytest.mark.parametrize(
    "around", [lambda v: v, lambda v: [0] * 20 + [v]], ids=["plain", "behind many scalars"]
)
def test_what_can_be_packed_can_be_unpacked_however_deep(depth, around):
    value = around(nested(depth))
    try:
        packed = codec.pack(value)
    except EncodeError as error:
        problem = str(error)
    else:
        codec.unpack(packed)
        return
    assert "nested too deeply" in problem


# --- broken bytes -----------------------------------------------------------------------------------------------------


def reads_or_refuses(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        codec.unpack(data)


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_random_bytes_are_a_value_or_a_decode_error(data):
    reads_or_refuses(data)


@given(st.sampled_from([codec.EXT_ARRAY, codec.EXT_DATETIME, 3, 127]), st.binary(max_size=80))
@settings(max_examples=500)
def test_random_bytes_in_an_extension_are_a_value_or_a_decode_error(code, data):
    reads_or_refuses(ext(code, data))


@given(
    st.one_of(st.text(max_size=8), st.sampled_from(DTYPES), st.integers(), st.none()),
    st.one_of(
        st.lists(st.one_of(st.integers(-(2**63), 2**64 - 1), st.text(max_size=3)), max_size=40),
        st.none(),
        INTS,
    ),
    st.binary(max_size=64),
)
@settings(max_examples=500)
def test_any_array_header_is_an_array_or_a_decode_error(dtype, shape, data):
    if isinstance(dtype, int) and not -(2**63) <= dtype < 2**64:
        dtype = 0
    reads_or_refuses(array_ext(dtype, shape, data))


SAMPLE = codec.pack(
    {"a": [1, 2.5, "text", b"bytes"], 7: np.arange(6.0).reshape(2, 3), "t": datetime.datetime(2024, 1, 2)}
)


def test_every_truncation_is_a_decode_error():
    for end in range(len(SAMPLE)):
        with pytest.raises(DecodeError):
            codec.unpack(SAMPLE[:end])


def test_bytes_behind_a_value_are_a_decode_error():
    with pytest.raises(DecodeError):
        codec.unpack(SAMPLE + b"\xc0")


def test_every_changed_byte_is_a_value_or_a_decode_error():
    draw = random.Random(7)
    for at in range(len(SAMPLE)):
        for new in {0, 0xFF, SAMPLE[at] ^ 1, SAMPLE[at] ^ 0x80, draw.randrange(256)}:
            reads_or_refuses(SAMPLE[:at] + bytes([new]) + SAMPLE[at + 1 :])


@pytest.mark.parametrize(
    "data",
    [
        array_ext("bfloat16", [2**60], b""),
        array_ext("<f8", [2**60], b""),
        array_ext("<f8", [2**39, 2**39], b"\0" * 8),
        array_ext("<f8", [2**32, 2**32], b""),
        array_ext("|i1", [-1], b"\0"),
        array_ext("<f8", [1] * 33, b"\0" * 8),
        array_ext("|O", [1], b"\0" * 8),
        array_ext("<f3", [1], b"\0" * 3),
        array_ext("<U4", [1], b"\0" * 16),
        array_ext("<M8", [1], b"\0" * 8),
        array_ext("<f8", [True], b"\0" * 8),
        array_ext("<f8", [1], b"\0" * 7),
        array_ext("<f8", [1], b"\0" * 9),
        ext(codec.EXT_ARRAY, b"\xdd\xff\xff\xff\xff" * 100),
        ext(codec.EXT_ARRAY, b""),
        ext(codec.EXT_DATETIME, b"yesterday"),
        ext(codec.EXT_DATETIME, b"\xff\xff"),
        ext(codec.EXT_DATETIME, b"2024-13-01T00:00:00"),
        ext(99, b"x"),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdd\x00\x0f\xff\xff" * 1000,
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\x81\x91\x01\x01",
        b"\x81\xc3\x01",
        b"\x81\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x01",
        b"",
        b"\xc1",
        b"\xa1\xff",
    ],
    ids=lambda data: f"{len(data)}:{data[:12].hex()}",
)
def test_headers_that_lie_are_refused_without_the_memory_that_they_ask_for(data):
    with pytest.raises(DecodeError):
        codec.unpack(data)


@pytest.mark.parametrize("dtype", ["<i4,i4", "<i4,<f4", "2i4", "<i4,b1"])
def test_an_array_is_of_a_plain_numeric_dtype_or_refused(dtype):
    size = np.dtype(dtype).itemsize
    with pytest.raises(DecodeError):
        codec.unpack(array_ext(dtype, [1], b"\0" * size))


def test_a_longer_array_header_of_a_later_version_is_accepted():
    header = msgpack.packb(["<i2", [2], "more"])
    data = header + b"\0" * (-len(header) % 16) + b"\1\0\2\0"
    assert codec.unpack(ext(codec.EXT_ARRAY, data)).tolist() == [1, 2]


def test_a_buffer_of_any_kind_can_be_unpacked():
    for data in (SAMPLE, bytearray(SAMPLE), memoryview(SAMPLE)):
        assert codec.unpack(data)["a"] == [1, 2.5, "text", b"bytes"]
