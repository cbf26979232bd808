"""Wire format of one remote value: a fixed-size header, then the raw payload.

```
 offset  bytes  field
      0      8  magic, never changes
      8      2  schema version, little endian
     10      2  length of the msgpack body
     12     16  XXH3-128 of the whole header with this field zeroed
     28     32  MAC, zero without a key
     60      n  msgpack body: who wrote which bytes
   60+n         zeros up to HEADER_BYTES
```

The header can be read, checked and compared with what was asked for before one byte
of payload is accepted, and its size does not depend on the name of the adapter.  The
XXH3 sums find accidents; only the MAC (keyed BLAKE2b over header and payload) finds
malice.  Nothing here is ever unpickled or evaluated.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import xxhash

from elora_connector.core.types import Rank
from elora_connector.errors import CodecError
from elora_connector.tiers.base import ValueSpec

MAGIC: Final = b"ELORA-KV"
SCHEMA: Final = 1
HEADER_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 256
"""Longer names are stored as a prefix and the SHA-256 of the whole name."""

_PRELUDE = struct.Struct("<8sHH16s32s")
_SUM_AT = slice(12, 28)
_MAC_AT = slice(28, 60)
_NO_SUM = bytes(16)
_NO_MAC = bytes(32)
_NAME_PREFIX = MAX_NAME_BYTES - 64
_PIECE_BYTES = 64 * 1024
_MAX_DIMS = 8
_MAX_DTYPE = 32
_MAX_DIGEST = 64
_KEY_FIELDS = ("name", "digest", "namespace", "chunk", "tp", "pp")
_VALUE_FIELDS = ("parent", "dtype", "shape", "nbytes", "checksum", "mac_key")
_FIELDS = frozenset((*_KEY_FIELDS, *_VALUE_FIELDS))


@dataclass(frozen=True, slots=True)
class Header:
    """What a stored value claims about itself; believed only as far as it was compared.

    `name` is the bounded form (see `bounded_name`), `checksum` the XXH3-128 of the
    payload or None, `mac_key` the id of the MAC key or None, `raw` the header as stored.
    """

    name: bytes
    digest: bytes
    namespace: bytes
    chunk: bytes
    parent: bytes
    rank: Rank
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: bytes | None
    mac_key: str | None
    raw: bytes


def bounded_name(name: str) -> bytes:
    """The adapter name as stored: UTF-8, at most `MAX_NAME_BYTES` + 1 bytes, injective.

    A shortened name is one byte longer than any name stored in full, so the two kinds
    cannot meet.  Lone surrogates are kept, since a name is any string vLLM accepts.
    """
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) <= MAX_NAME_BYTES:
        return encoded
    tail = hashlib.sha256(encoded).hexdigest().encode("ascii")
    return encoded[:_NAME_PREFIX] + b"~" + tail


def mac_key_id(key: bytes) -> str:
    """16 hex digits that identify a MAC key without revealing it; part of the namespace."""
    return _keyed(key, b"elora-key-id").hexdigest()[:16]


def encode_header(
    spec: ValueSpec, payload: memoryview, mac_key: bytes | None, *, checksum: bool = True
) -> bytes:
    """Header of `HEADER_BYTES` bytes for `payload`, which is a contiguous byte view.

    Raises:
        ValueError: the payload is not `spec.nbytes` long or a field exceeds its bound.
    """
    if payload.nbytes != spec.nbytes:
        raise ValueError(f"payload has {payload.nbytes} bytes, its spec says {spec.nbytes}")
    body = _pack_body(spec, payload, mac_key, checksum)
    header = bytearray(HEADER_BYTES)
    _PRELUDE.pack_into(header, 0, MAGIC, SCHEMA, len(body), _NO_SUM, _NO_MAC)
    header[_PRELUDE.size : _PRELUDE.size + len(body)] = body
    if mac_key is not None:
        header[_MAC_AT] = _mac(bytes(header), payload, mac_key)
    header[_SUM_AT] = xxhash.xxh3_128_digest(header)
    return bytes(header)


def decode_header(buf: bytes | memoryview, spec: ValueSpec, *, total: int | None = None) -> Header:
    """Check the first `HEADER_BYTES` of a value against what was asked for.

    Args:
        buf: the value or its beginning.
        spec: the value that was asked for.
        total: bytes in the whole value, where known.

    Raises:
        CodecError: reason truncated, magic, schema, header, namespace, identity, chunk,
            parent, rank, shape, dtype or length, the first that applies in this order.
    """
    try:
        header = parse_header(buf)
    except CodecError as error:
        claimed = _claim_of_damaged(bytes(buf[:HEADER_BYTES]))
        ours = claimed is not None and _foreign(claimed, spec) is None
        raise CodecError(error.reason, str(error), ours=ours) from None
    reason = _foreign(header, spec)
    if reason is not None:
        raise CodecError(reason, f"the value at this key is of another {reason}")
    reason = _misfit(header, spec, total)
    if reason is not None:
        raise CodecError(reason, f"{reason} differs from the one asked for", ours=True)
    return header


def parse_header(buf: bytes | memoryview) -> Header:
    """Read a header without an expectation, for tools that list a store.

    Raises:
        CodecError: reason truncated, magic, schema or header.
    """
    raw = bytes(buf[:HEADER_BYTES])
    if not raw.startswith(MAGIC[: len(raw)]):
        raise CodecError("magic", "not a value of this package")
    if len(raw) < HEADER_BYTES:
        raise CodecError("truncated", f"{len(raw)} bytes are less than a header")
    _, schema, length, stored, _ = _PRELUDE.unpack_from(raw)
    if schema != SCHEMA:
        raise CodecError("schema", f"schema {schema}, this version reads {SCHEMA}")
    if xxhash.xxh3_128_digest(_without(raw, _SUM_AT)) != stored:
        raise CodecError("header", "the checksum of the header does not match")
    return _unpack_body(raw, length)


def verify_payload(
    header: Header,
    payload: memoryview,
    mac_key: bytes | None,
    *,
    require_checksum: bool = False,
) -> None:
    """Check the payload bytes that are now in place against an already checked header.

    A MAC also proves integrity, so a value without a checksum but with a good MAC passes.

    Raises:
        CodecError: reason length, mac_missing, mac, checksum or checksum_missing.
    """
    if payload.nbytes != header.nbytes:
        raise CodecError("length", f"{payload.nbytes} bytes, header says {header.nbytes}")
    if mac_key is not None:
        _verify_mac(header, payload, mac_key)
    if header.checksum is not None:
        if _sum(payload) != header.checksum:
            raise CodecError("checksum", "the payload does not match its checksum", ours=True)
    elif require_checksum and mac_key is None:
        # Not ours to delete: its writer chose to run without checksums.
        raise CodecError("checksum_missing", "the value was written without a checksum")


def _sum(payload: memoryview) -> bytes:
    """XXH3-128 of the payload.

    In pieces, because xxhash lets go of Python's global lock for larger ones, and to get
    it back takes up to 5 ms while another thread computes; the whole sum of a megabyte
    takes some 20 us.
    """
    view = payload.cast("B")
    total = xxhash.xxh3_128()
    for start in range(0, view.nbytes, _PIECE_BYTES):
        total.update(view[start : start + _PIECE_BYTES])
    return total.digest()


def _verify_mac(header: Header, payload: memoryview, mac_key: bytes) -> None:
    if header.mac_key is None:
        raise CodecError("mac_missing", "the value carries no MAC", ours=True)
    blank = _without(_without(header.raw, _SUM_AT), _MAC_AT)
    # The key id in the header is a hint for people; only the MAC itself decides.
    if not hmac.compare_digest(_mac(blank, payload, mac_key), header.raw[_MAC_AT]):
        raise CodecError("mac", "the MAC of the value does not match", ours=True)


def _pack_body(
    spec: ValueSpec, payload: memoryview, mac_key: bytes | None, checksum: bool
) -> bytes:
    digests = (spec.namespace, spec.chunk, spec.parent)
    if len(spec.shape) > _MAX_DIMS or len(spec.dtype) > _MAX_DTYPE:
        raise ValueError("shape or dtype is too long for the header")
    if any(len(digest) > _MAX_DIGEST for digest in digests):
        raise ValueError(f"namespace, chunk and parent are at most {_MAX_DIGEST} bytes")
    body: bytes = msgpack.packb(
        {
            "name": bounded_name(spec.identity.name),
            "digest": spec.identity.digest,
            "namespace": spec.namespace,
            "chunk": spec.chunk,
            "parent": spec.parent,
            "tp": spec.rank.tp,
            "pp": spec.rank.pp,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "nbytes": spec.nbytes,
            "checksum": _sum(payload) if checksum else None,
            "mac_key": None if mac_key is None else mac_key_id(mac_key),
        },
        use_bin_type=True,
    )
    if len(body) > HEADER_BYTES - _PRELUDE.size:
        raise ValueError(f"header body of {len(body)} bytes does not fit")
    return body


def _unpack_body(raw: bytes, length: int) -> Header:
    end = _PRELUDE.size + length
    if end > HEADER_BYTES or raw[end:].strip(b"\0"):
        raise CodecError("header", "the body overruns the header or its padding is not zero")
    try:
        body = msgpack.unpackb(
            raw[_PRELUDE.size : end],
            raw=False,
            max_bin_len=MAX_NAME_BYTES + 1,
            max_str_len=64,
            max_array_len=_MAX_DIMS,
            max_map_len=len(_FIELDS),
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise CodecError("header", f"unreadable body: {type(error).__name__}") from None
    return _header_of(body, raw)


def _header_of(body: Any, raw: bytes) -> Header:
    if not isinstance(body, dict) or body.keys() != _FIELDS:
        raise CodecError("header", "the body does not have exactly the known fields")
    _expect(body, bytes, "name", "digest", "namespace", "chunk", "parent")
    _expect(body, int, "tp", "pp", "nbytes")
    _expect(body, str, "dtype")
    _expect(body, (bytes, type(None)), "checksum")
    _expect(body, (str, type(None)), "mac_key")
    _expect(body, list, "shape")
    shape, tp, pp = tuple(body.pop("shape")), body.pop("tp"), body.pop("pp")
    if any(type(size) is not int or size < 0 for size in (*shape, tp, pp, body["nbytes"])):
        raise CodecError("header", "a size in the header is not a natural number")
    return Header(shape=shape, rank=Rank(tp, pp), raw=raw, **body)


def _expect(body: dict[str, Any], kind: type | tuple[type, ...], *fields: str) -> None:
    for field in fields:
        if not isinstance(body[field], kind):
            raise CodecError("header", f"field {field} has the wrong type")


def _claim_of_damaged(raw: bytes) -> Header | None:
    """Which key a damaged header still claims, so that bit rot at our own key is deleted."""
    if len(raw) < _PRELUDE.size:
        return None
    magic, schema, length, _, _ = _PRELUDE.unpack_from(raw)
    if magic != MAGIC or schema != SCHEMA or _PRELUDE.size + length > len(raw):
        return None
    try:
        return _unpack_body(raw[: _PRELUDE.size + length], length)
    except CodecError:
        return None


def _foreign(header: Header, spec: ValueSpec) -> str | None:
    """The first part of the key under which this value does not belong."""
    claims = {
        "namespace": header.namespace == spec.namespace,
        "identity": (header.name, header.digest)
        == (bounded_name(spec.identity.name), spec.identity.digest),
        "chunk": header.chunk == spec.chunk,
        "rank": header.rank == spec.rank,
    }
    return next((reason for reason, same in claims.items() if not same), None)


def _misfit(header: Header, spec: ValueSpec, total: int | None) -> str | None:
    """The first property, beyond the key itself, that makes the value unusable."""
    whole = HEADER_BYTES + spec.nbytes
    claims = {
        "parent": header.parent == spec.parent,
        "shape": header.shape == spec.shape,
        "dtype": header.dtype == spec.dtype,
        "length": header.nbytes == spec.nbytes and (total is None or total <= whole),
        "truncated": total is None or total >= whole,
    }
    return next((reason for reason, same in claims.items() if not same), None)


def _without(raw: bytes, field: slice) -> bytes:
    return raw[: field.start] + bytes(field.stop - field.start) + raw[field.stop :]


def _mac(blank_header: bytes, payload: memoryview, key: bytes) -> bytes:
    """MAC over a header with checksum and MAC zeroed, then the payload.

    The header has a fixed size, so the two parts need no separator.
    """
    mac = _keyed(key, b"elora-value")
    mac.update(blank_header)
    mac.update(payload)
    return mac.digest()


def _keyed(key: bytes, purpose: bytes) -> hashlib.blake2b:
    if not key:
        raise ValueError("an empty MAC key protects nothing")
    if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        key = hashlib.blake2b(key).digest()
    return hashlib.blake2b(key=key, digest_size=32, person=purpose)
