"""Values <-> msgpack. Never pickle, never object dtype.

None, bool, int (64 bit), float, str, bytes, list (tuples arrive as lists), dict with str or int keys, datetime, numpy scalars (as Python
ones), numpy arrays of any numeric or bool dtype, torch tensors (sent as arrays, without their device and gradient). Two msgpack
extension types carry what msgpack lacks:

====  ========================================================================================
ext   data
====  ========================================================================================
1     an array: msgpack ``[dtype, shape]`` (numpy's dtype string, e.g. ``"<f4"``, or ``"bfloat16"``: 2 bytes each, little-endian), zero
      bytes up to a multiple of 16, then the elements in C order
2     a datetime: ISO 8601 text in UTF-8, with an offset if it is aware
====  ========================================================================================

Tensors arrive as numpy arrays. Of bfloat16, which numpy lacks, arrives a tensor where the reader asks for tensors and has imported torch,
else a float32 array of exactly the same values.

Only modules that the process has imported itself are looked at: packing never imports numpy or torch.
"""

from __future__ import annotations

import datetime
import math
import re
import sys
from typing import Any

import msgpack

from batchq.errors import EncodeError

EXT_ARRAY = 1
EXT_DATETIME = 2

_ALIGN = 16
_BFLOAT16 = "bfloat16"
_MAX_DIMS = 32
_DTYPE = re.compile(r"[<>|][biufc][0-9]{1,2}")
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))


class DecodeError(Exception):
    """Bytes that are not a value of this codec; the message says why."""


def _default(value: Any) -> Any:
    """Turn what msgpack does not know into something it does; TypeError where there is none."""
    if isinstance(value, datetime.datetime):
        return msgpack.ExtType(EXT_DATETIME, value.isoformat().encode())
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    np = sys.modules.get("numpy")
    if np is not None:
        if isinstance(value, np.ndarray):
            return _pack_array(value)
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return value.item()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _pack_tensor(value)
    raise TypeError(type(value).__name__)


def is_bfloat16(tensor: Any) -> bool:
    """Tell whether a torch tensor is of the dtype bfloat16."""
    return str(tensor.dtype) == "torch.bfloat16"


def tensor_to_array(tensor: Any) -> Any:
    """Return a torch tensor's values as a numpy array, on the CPU; bfloat16 becomes float32."""
    tensor = tensor.detach().cpu()
    if is_bfloat16(tensor):  # float32 holds each of its values
        tensor = tensor.float()
    return tensor.resolve_conj().resolve_neg().numpy()


def _pack_tensor(tensor: Any) -> msgpack.ExtType:
    try:
        if not is_bfloat16(tensor):
            return _pack_array(tensor_to_array(tensor))
        bits = tensor.detach().cpu().view(sys.modules["torch"].int16).numpy()
    except (TypeError, RuntimeError) as error:
        if problem := _tensor_problem(tensor):
            raise TypeError(problem[0]) from error
        raise
    return _ext_array(_BFLOAT16, bits.astype("<i2", copy=False))


def _tensor_problem(tensor: Any) -> tuple[str, str] | None:
    """Return why a tensor cannot be an array, and the remedy; None where it can."""
    torch = sys.modules["torch"]
    if tensor.device.type == "meta":
        return "a tensor on the meta device", "it has no values"
    if tensor.is_nested:
        return "a nested tensor", "call .unbind()"
    if tensor.is_quantized:
        return "a quantized tensor", "call .dequantize()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}", "call .to_dense()"
    try:
        torch.empty(0, dtype=tensor.dtype).numpy()
    except TypeError:
        if not is_bfloat16(tensor):
            kind = "cfloat" if tensor.dtype.is_complex else "float"
            return f"a tensor of dtype {tensor.dtype}, which numpy has not", f"call .{kind}()"
    return None


def _pack_array(array: Any) -> msgpack.ExtType:
    if array.dtype.kind not in "biufc" or array.dtype.hasobject:
        raise TypeError(f"an array of dtype {array.dtype}")
    return _ext_array(array.dtype.str, array)


def _ext_array(dtype: str, array: Any) -> msgpack.ExtType:
    if array.ndim > _MAX_DIMS:
        raise TypeError(f"an array of {array.ndim} dimensions, over {_MAX_DIMS}")
    header = msgpack.packb([dtype, list(array.shape)])
    padding = b"\0" * (-len(header) % _ALIGN)
    return msgpack.ExtType(EXT_ARRAY, b"".join((header, padding, array.tobytes())))


def _unpack_array(data: bytes, copy: bool, tensors: bool) -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise DecodeError(
            "the value holds a numpy array, and numpy is not installed here: pip install numpy"
        ) from error
    unpacker = msgpack.Unpacker()
    unpacker.feed(data[:1024])
    header = unpacker.unpack()
    if not (
        isinstance(header, list)
        and len(header) >= 2
        and isinstance(header[0], str)
        and isinstance(header[1], list)
    ):
        raise DecodeError("an array without [dtype, shape]")
    dtype_name, shape = header[0], header[1]
    if len(shape) > _MAX_DIMS or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise DecodeError(f"an array of shape {shape!r:.80}")
    if dtype_name != _BFLOAT16 and not _DTYPE.fullmatch(dtype_name):
        raise DecodeError(f"an array of dtype {dtype_name!r:.40}")
    dtype = np.dtype("<u2" if dtype_name == _BFLOAT16 else dtype_name)
    start = unpacker.tell()
    start += -start % _ALIGN
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise DecodeError(f"an array of shape {shape} and dtype {dtype_name} with {len(data) - start} bytes")
    array = np.frombuffer(data, dtype, offset=start).reshape(shape)
    if dtype_name == _BFLOAT16:
        return _unpack_bfloat16(array, tensors)
    return array.copy() if copy else array


def _unpack_bfloat16(bits: Any, tensors: bool) -> Any:
    torch = sys.modules.get("torch") if tensors else None
    if torch is not None:
        return torch.from_numpy(bits.astype("i2")).view(torch.bfloat16)
    wide = bits.astype("u4")
    wide <<= 16  # a bfloat16 is the upper half of a float32
    return wide.view("f4")


def _ext_hook(copy: bool, tensors: bool) -> Any:
    def hook(code: int, data: bytes) -> Any:
        if code == EXT_ARRAY:
            return _unpack_array(data, copy, tensors)
        if code == EXT_DATETIME:
            return datetime.datetime.fromisoformat(data.decode())
        raise DecodeError(f"an extension of type {code}, which this version does not know")

    return hook


def checked_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a dict of what msgpack read, as its ``object_pairs_hook``; raise DecodeError for a key that is neither str nor int."""
    for key, _ in pairs:
        if type(key) is not str and type(key) is not int:
            raise DecodeError(f"a dict key of type {type(key).__name__}; allowed are str and int")
    return dict(pairs)


_HOOKS = {(copy, tensors): _ext_hook(copy, tensors) for copy in (True, False) for tensors in (True, False)}


def ext_hook(copy: bool, tensors: bool = False) -> Any:
    """Return msgpack's ``ext_hook`` for this codec's extension types."""
    return _HOOKS[copy, tensors]


def pack(value: object) -> bytes:
    """Return ``value`` as msgpack; raise EncodeError that names the path to what cannot be carried, and the remedy."""
    try:
        if type(value) not in _SCALARS and has_bad_key(value):
            raise explain(value)
        return msgpack.packb(value, default=_default)  # type: ignore[no-any-return]
    except EncodeError:
        raise
    except Exception as error:  # noqa: BLE001 - a class of the user's may raise anything: it fails this value alone
        raise explain(value, error) from None


def unpack(data: bytes | memoryview, *, copy: bool = True, tensors: bool = False) -> Any:
    """Return the value in ``data``; raise DecodeError for anything else.

    ``copy=False`` gives arrays as read-only views. ``tensors=True`` gives arrays of bfloat16 as torch tensors, if torch is imported.
    """
    try:
        return msgpack.unpackb(
            data,
            ext_hook=_HOOKS[copy, tensors],
            object_pairs_hook=checked_dict,
            strict_map_key=False,
        )
    except DecodeError:
        raise
    except Exception as error:  # noqa: BLE001 - msgpack, datetime and numpy raise many kinds for broken bytes
        raise DecodeError(f"not a msgpack value: {error or type(error).__name__}") from None


def has_bad_key(value: object) -> bool:
    """Tell whether a dict in ``value`` has a key that is neither str nor int."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                return True
            if type(item) not in _SCALARS and has_bad_key(item):
                return True
    elif isinstance(value, (list, tuple)):
        if _SCALARS.issuperset(
            map(type, value)
        ):  # three times as fast as the loop below, and most lists are such
            return False
        for item in value:
            if type(item) not in _SCALARS and has_bad_key(item):
                return True
    return False


def explain(value: object, error: Exception | None = None) -> EncodeError:
    """Return an EncodeError that names the path to what cannot be carried, and the remedy."""
    try:
        path, problem = _find(value, "value", 0)
    except RecursionError:
        path, problem = "value", "nested too deeply (over 500 levels)"
    except Exception as other:  # noqa: BLE001
        path, problem = "value", f"{type(other).__name__} while it was packed: {other}"
    return EncodeError(f"{path}: {problem or error}")


def _find(value: Any, path: str, depth: int) -> tuple[str, str]:
    if depth > 500:
        return "value", "nested too deeply (over 500 levels), or it contains itself"
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                return f"{path}[{key!r}]", f"a dict key of type {type(key).__name__}; use str or int keys"
            if isinstance(key, int) and not -(2**63) <= key < 2**64:
                return f"{path}[{key!r}]", "a dict key beyond 64 bits; use a str"
            found = _find(
                item,
                f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]",
                depth + 1,
            )
            if found[1]:
                return found
        return path, ""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            found = _find(item, f"{path}[{index}]", depth + 1)
            if found[1]:
                return found
        return path, ""
    if isinstance(value, int):
        return path, "" if -(2**63) <= value < 2**64 else "an int beyond 64 bits; send it as a str"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return path, "a str with lone surrogates; send it as bytes"
        return path, ""
    if value is None or isinstance(value, (float, bytes)):
        return path, ""
    try:
        _default(value)
    except TypeError as error:
        return path, f"{error}{_remedy(value)}"
    return path, ""


def _remedy(value: Any) -> str:
    if hasattr(value, "model_dump"):
        return "; call .model_dump()"
    if hasattr(value, "__dataclass_fields__"):
        return "; call dataclasses.asdict()"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and (problem := _tensor_problem(value)):
        return f"; {problem[1]}"
    if hasattr(value, "dtype"):
        return "; convert it to a numeric dtype or to a list"
    if hasattr(value, "tobytes") and hasattr(value, "mode"):  # PIL.Image
        return "; send the encoded file's bytes or np.asarray(image)"
    if isinstance(value, (set, frozenset)) or hasattr(value, "__next__"):
        return "; call list()"
    if callable(value):
        return "; did you forget to call it?"
    return "; allowed are None, bool, int, float, str, bytes, list, dict, datetime and numeric numpy arrays"
