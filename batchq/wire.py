"""Requests and replies <-> msgpack: pure, versioned, limited.

A request is ``[version, id, reply, timeout_ms, value, meta]`` and, where it has them, ``batch_key, cost``; a reply is
``[version, id, code, value]`` and for errors ``error_type``. Readers accept longer arrays. docs/protocol.md has every field.
"""

from __future__ import annotations

import re
import struct
from typing import Any, NamedTuple

import msgpack

from batchq import codec
from batchq.errors import BatchqError, ModelError, PayloadTooLargeError, from_wire

VERSION = 1
OLDEST_VERSION = 1
"""Workers read this version and all up to ``VERSION``."""

_CLIENT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_TTL_MS = 2**32 - 1
_ENVELOPE = 64 * 1024
"""Bytes that a request may have around its value: meta, batch_key, its address."""

# [version, id: bin 16, reply: uint 32 or str, timeout_ms: uint 32, …: with its fixed widths, the timeout can be changed in place
_OWN_KEY = struct.Struct(">BBH16sBIBI")
_STREAM = struct.Struct(">BBH16sB20sBI")
_ID = 0xC410  # bin 8, 16 bytes
CLIENT_NAME_LENGTH = 20
_TIMEOUT = struct.Struct(">I")
_OURS = bytes((0x96, VERSION, 0xC4, 0x10))
_NAMED = bytes((0xA0 | CLIENT_NAME_LENGTH,))


class Request(NamedTuple):
    """One request as a worker reads it.

    ``reply`` is the asyncio client's name (its stream), or for how many milliseconds a reply under the request's own key is kept.
    """

    id: bytes
    reply: str | int
    timeout_ms: int
    value: Any
    meta: dict[str, Any] | None = None
    batch_key: str | int | None = None
    cost: float | None = None


class Reply(NamedTuple):
    """One reply: ``code`` is '' for an answer, else the wire code of an error whose message is ``value``."""

    id: bytes
    code: str
    value: Any
    error_type: str = ""

    def error(self) -> BatchqError:
        """Return the error that this reply stands for."""
        return from_wire(self.code, str(self.value), self.id.hex(), self.error_type)


class BadRequestError(Exception):
    """A request that cannot be decoded. Where its id and reply address could be read, its caller can still be told."""

    def __init__(
        self, code: str, message: str, id: bytes | None = None, reply: str | int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.id = id
        self.reply = reply


def encode_request(
    id: bytes,
    reply: str | int,
    timeout_ms: int,
    value: object,
    *,
    meta: dict[str, Any] | None = None,
    batch_key: str | int | None = None,
    cost: float | None = None,
    max_payload: int = 2**31,
) -> bytes:
    """Return the request as msgpack; raise EncodeError or PayloadTooLargeError."""
    payload = codec.pack(value)
    if len(payload) > max_payload:
        raise PayloadTooLargeError(
            f"the value takes {len(payload):,} bytes; max_payload is {max_payload:,}. Send less, or raise max_payload on both sides"
        )
    extras = batch_key is not None or cost is not None
    array = 0x98 if extras else 0x96
    if isinstance(reply, int):
        head = _OWN_KEY.pack(array, VERSION, _ID, id, 0xCE, reply, 0xCE, timeout_ms)
    else:
        head = _STREAM.pack(
            array, VERSION, _ID, id, 0xA0 | CLIENT_NAME_LENGTH, reply.encode(), 0xCE, timeout_ms
        )
    tail = b"\xc0" if meta is None else codec.pack(meta)
    if extras:
        tail += codec.pack(batch_key) + codec.pack(cost)
    return head + payload + tail


def with_timeout(request: bytes, timeout_ms: int) -> bytes:
    """Return the same request with another ``timeout_ms``; for one that ``encode_request`` made."""
    end = (_OWN_KEY if request[20] == 0xCE else _STREAM).size
    return request[: end - 4] + _TIMEOUT.pack(timeout_ms) + request[end:]


def decode_request(
    data: bytes, *, copy: bool = True, tensors: bool = False, max_payload: int = 2**31
) -> Request:
    """Return the request in ``data``; raise BadRequestError, with as much as could be read.

    ``copy``, ``tensors``: as ``codec.unpack`` takes them.
    """
    reply: str | int
    if (
        data[:4] == _OURS
        and data[20:21] == _NAMED
        and _CLIENT_NAME.fullmatch(name := data[21:41].decode("latin-1"))
    ):
        version, id, reply = VERSION, data[4:20], name  # as encode_request lays it out
    else:
        version, id, reply = _read_address(data)
    if len(data) > max_payload + _ENVELOPE:
        raise BadRequestError(
            "request.too_large",
            f"the request takes {len(data):,} bytes; the worker's max_payload is {max_payload:,}",
            id,
            reply,
        )
    if not OLDEST_VERSION <= version <= VERSION:
        raise BadRequestError(
            "request.version",
            f"the request speaks protocol version {version}, this worker {OLDEST_VERSION} to {VERSION}: upgrade the workers first",
            id,
            reply,
        )
    try:
        fields = codec.unpack(data, copy=copy, tensors=tensors)
    except codec.DecodeError as error:
        raise BadRequestError(
            "request.encode", f"the request cannot be decoded: {error}", id, reply
        ) from None
    timeout_ms, meta = fields[3], fields[5] if len(fields) > 5 else None
    batch_key, cost = (fields[6], fields[7]) if len(fields) > 7 else (None, None)
    sound = (
        type(timeout_ms) is int
        and (meta is None or isinstance(meta, dict))
        and (batch_key is None or type(batch_key) in (str, int))
        and (cost is None or type(cost) in (int, float))
    )
    if not sound:
        raise BadRequestError(
            "request.encode", "the request lacks fields, or has some of the wrong type", id, reply
        )
    return Request(id, reply, timeout_ms, fields[4], meta, batch_key, cost)


def _read_address(data: bytes) -> tuple[int, bytes, str | int]:
    """Read the three fields that stand first in every version."""
    try:
        unpacker = msgpack.Unpacker(strict_map_key=False)
        unpacker.feed(data[:256])
        length = unpacker.read_array_header()
        version, id, reply = unpacker.unpack(), unpacker.unpack(), unpacker.unpack()
    except Exception as error:  # noqa: BLE001 - msgpack raises many kinds for broken bytes
        raise BadRequestError("request.encode", f"not a request: {error or type(error).__name__}") from None
    named = type(reply) is str and _CLIENT_NAME.fullmatch(reply)
    timed = type(reply) is int and 0 <= reply <= _MAX_TTL_MS
    if (
        length < 5
        or type(version) is not int
        or type(id) is not bytes
        or len(id) != 16
        or not (named or timed)
    ):
        raise BadRequestError(
            "request.encode", "not a request: [version, id: bin 16, reply: str or uint, …] expected"
        )
    return version, id, reply


def read_address(data: bytes) -> tuple[bytes, str | int]:
    """Return a request's id and reply address, whatever its version; raise BadRequestError."""
    return _read_address(data)[1:]


def encode_reply(id: bytes, value: object, *, max_payload: int = 2**31) -> bytes:
    """Return an answer as msgpack; raise EncodeError or PayloadTooLargeError."""
    payload = codec.pack(value)
    if len(payload) > max_payload:
        raise PayloadTooLargeError(f"the answer takes {len(payload):,} bytes; max_payload is {max_payload:,}")
    return b"\x94\x01\xc4\x10" + id + b"\xa0" + payload


def encode_error(id: bytes, error: BatchqError) -> bytes:
    """Return an error as msgpack."""
    kind = error.error_type if isinstance(error, ModelError) else ""
    # an exception's text may hold lone surrogates
    return msgpack.packb([VERSION, id, error.code, _as_unicode(error.message), _as_unicode(kind)])  # type: ignore[no-any-return]


def _as_unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def decode_replies(data: bytes, *, copy: bool = True) -> list[Reply]:
    """Return the replies that stand one behind the other in ``data``; one that cannot be read is left out."""
    replies: list[Reply] = []
    unpacker = msgpack.Unpacker(
        ext_hook=codec.ext_hook(copy),
        object_pairs_hook=codec.checked_dict,
        strict_map_key=False,
        max_buffer_size=0,
    )
    unpacker.feed(data)
    try:
        for fields in unpacker:
            replies.append(_reply(fields))
    except Exception:  # noqa: BLE001 - broken bytes raise many kinds
        return [reply for part in _split(data) if (reply := _decode_reply(part, copy))]
    return replies


def _reply(fields: Any) -> Reply:
    _, id, code, value, *rest = fields
    if type(id) is not bytes or type(code) is not str:
        raise TypeError("not a reply: [version, id, code, value, …] expected")
    return Reply(id, code, value, str(rest[0]) if rest else "")


def _split(data: bytes) -> list[bytes]:
    """Cut ``data`` between the messages in it, as far as they can be told apart."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    parts, start = [], 0
    try:
        while start < len(data):
            unpacker.skip()
            parts.append(data[start : unpacker.tell()])
            start = unpacker.tell()
    except Exception:  # noqa: BLE001 - what stands behind it is lost; its callers run into their deadline
        return parts
    return parts


def _decode_reply(data: bytes, copy: bool) -> Reply | None:
    """Decode one reply that stands alone; if only its answer cannot be read, make an error of it for its caller."""
    try:
        return _reply(codec.unpack(data, copy=copy))
    except (TypeError, ValueError):
        return None
    except codec.DecodeError as error:
        try:
            unpacker = msgpack.Unpacker(max_buffer_size=0)
            unpacker.feed(data)
            unpacker.read_array_header()
            unpacker.skip()
            id = unpacker.unpack()
        except Exception:  # noqa: BLE001 - no reply at all
            return None
        return Reply(id, "execution", f"the answer cannot be decoded: {error}") if type(id) is bytes else None
