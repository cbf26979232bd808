"""Keys: which bytes may be used for which request, and where a store keeps them.

Every digest here is SHA-256 over an encoding in which each field carries a type
tag and a length, below a domain string.  So ``1`` and ``"1"``, ``None`` and
``""``, ``("a", "bc")`` and ``("ab", "c")`` can never meet, nor can a digest made
for one purpose be taken for another.  Python's ``hash()`` is not used: it
differs between processes.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from elora_connector.core.types import DIGEST_BYTES, ChunkKey, Identity, Rank

FieldValue: TypeAlias = (
    "bool | int | float | str | bytes | Sequence[FieldValue] | Mapping[str, FieldValue] | None"
)

_NAMESPACE_DOMAIN = "elora/namespace/1"
_ROOT_DOMAIN = "elora/root/1"
_CHUNK_DOMAIN = "elora/chunk/1"

KEY_SCHEMA = 1
"""Raised when the meaning of a key changes; part of every remote key."""
NAMESPACE_HEX = 32
MAX_NAME_CHARS = 80
_CUT_MARK = "~"
_CUT_HEX = 16
_DIGEST_HEX = 12


def _tagged(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload


def _utf8(text: str) -> bytes:
    # JSON may carry lone surrogates; they must give a key, not an exception.
    return text.encode("utf-8", "surrogatepass")


def _encode_value(value: FieldValue) -> bytes:
    if isinstance(value, Mapping):
        pairs = sorted((_encode_value(key), _encode_value(item)) for key, item in value.items())
        return _tagged(b"m", b"".join(key + item for key, item in pairs))
    if isinstance(value, (tuple, list)):
        return _tagged(b"l", b"".join(map(_encode_value, value)))
    return _tagged(*_encode_scalar(value))


def _encode_scalar(value: FieldValue) -> tuple[bytes, bytes]:
    """Type tag and payload."""
    match value:
        case None:
            encoded = b"n", b""
        case bool():  # before int: a bool is one
            encoded = b"t", b"\x01" if value else b"\x00"
        case int():
            encoded = b"i", format(int(value), "d").encode("ascii")
        case float():
            encoded = b"f", struct.pack("<d", value)
        case str():
            encoded = b"s", _utf8(value)
        case bytes() | bytearray() | memoryview():
            encoded = b"b", bytes(value)
        case _:
            raise TypeError(f"a key field cannot be a {type(value).__name__}: {value!r}")
    return encoded


def encode_fields(domain: str, fields: Sequence[FieldValue]) -> bytes:
    """Injective encoding of `fields` below `domain`.

    Tuples and lists are the same value; mappings are sorted by key.

    Raises:
        TypeError: a field has a type without a stable encoding (a set, an array, ...).
    """
    return _tagged(b"d", _utf8(domain)) + _encode_value(tuple(fields))


def digest_fields(domain: str, fields: Sequence[FieldValue]) -> bytes:
    """SHA-256 (32 bytes) of `encode_fields`."""
    return hashlib.sha256(encode_fields(domain, fields)).digest()


def namespace_digest(fields: Mapping[str, FieldValue]) -> bytes:
    """Digest (32 bytes) of everything that must agree before two engines share KV."""
    return digest_fields(_NAMESPACE_DOMAIN, [fields])


def root_key(namespace: bytes, identity: Identity, cache_salt: str | None) -> bytes:
    """Parent (32 bytes) of an adapter's first chunks; no salt differs from an empty one."""
    return digest_fields(_ROOT_DOMAIN, [namespace, identity.name, identity.digest, cache_salt])


def _token_bytes(token_ids: Sequence[int]) -> memoryview:
    """Token ids as little-endian int32.

    `array` refuses floats and values over 32 bits, where numpy would truncate them.
    """
    try:
        raw = array("i", token_ids)
    except OverflowError as error:
        raise ValueError(f"token ids must be in [0, 2**31 - 1]: {error}") from None
    lowest = int(np.frombuffer(raw, dtype=np.intc).min(initial=0))
    if lowest < 0:
        raise ValueError(f"token ids must be in [0, 2**31 - 1], found {lowest}")
    if sys.byteorder == "big":
        raw.byteswap()
    return memoryview(raw).cast("B")


class ChunkHasher:
    """Incremental chain of chunk keys over one request's tokens.

    key(i) = SHA-256(domain, key(i-1) or `root`, tokens of chunk i, extra bytes of chunk i).
    A tail shorter than `chunk_size` has no key.

    Args:
        root: 32 bytes, from `root_key`.
        chunk_size: tokens per chunk.
    """

    __slots__ = ("_prefix", "_root", "_tokens_head", "chunk_size", "keys")

    def __init__(self, root: bytes, chunk_size: int) -> None:
        if len(root) != DIGEST_BYTES:
            raise ValueError(f"root must be {DIGEST_BYTES} bytes, got {len(root)}")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be positive, got {chunk_size}")
        self.chunk_size = chunk_size
        self.keys: list[ChunkKey] = []
        self._root = root
        self._prefix = _tagged(b"d", _utf8(_CHUNK_DOMAIN)) + b"b" + struct.pack("<Q", DIGEST_BYTES)
        self._tokens_head = b"v" + struct.pack("<Q", 4 * chunk_size)

    @property
    def num_tokens(self) -> int:
        """Tokens covered by `keys`."""
        return len(self.keys) * self.chunk_size

    def extend(
        self,
        token_ids: Sequence[int],
        extras: Callable[[int, int], bytes] | None = None,
    ) -> list[ChunkKey]:
        """Hash the chunks of `token_ids` that are complete and not hashed yet.

        Args:
            token_ids: the request's FULL token list; what was hashed before is not read again.
            extras: bytes that must agree besides the tokens of `[start, end)`, such as
                multimodal ids.  No callback and ``b""`` mean the same: nothing.

        Returns:
            `keys`, the live list of all keys; do not modify it.

        Raises:
            ValueError: a token id is negative or over 2**31 - 1, or the list is shorter
                than what was hashed (call `truncate` first).  `keys` is then unchanged.
        """
        start = self.num_tokens
        if len(token_ids) < start:
            raise ValueError(f"{len(token_ids)} tokens given, {start} already hashed")
        count = (len(token_ids) - start) // self.chunk_size
        if count:
            data = _token_bytes(token_ids[start : start + count * self.chunk_size])
            self.keys.extend(self._chain(data, start, count, extras))
        return self.keys

    def _chain(
        self,
        data: memoryview,
        start: int,
        count: int,
        extras: Callable[[int, int], bytes] | None,
    ) -> list[ChunkKey]:
        prefix, head, size = self._prefix, self._tokens_head, self.chunk_size
        tail = _tagged(b"b", b"")
        parent: bytes = self.keys[-1] if self.keys else self._root
        added: list[ChunkKey] = []
        for i in range(count):
            if extras is not None:
                first = start + i * size
                tail = _tagged(b"b", extras(first, first + size))
            tokens = data[4 * size * i : 4 * size * (i + 1)]
            parent = hashlib.sha256(b"".join((prefix, parent, head, tokens, tail))).digest()
            added.append(ChunkKey(parent))
        return added

    def truncate(self, num_tokens: int) -> None:
        """Forget the chunks that are not whole within the first `num_tokens` tokens."""
        del self.keys[max(0, num_tokens) // self.chunk_size :]


_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_ESCAPED = tuple(chr(b) if b in _PLAIN else f"%{b:02X}" for b in range(256))


def encode_name(name: str) -> str:
    """Adapter name as at most 80 characters of ``[A-Za-z0-9_.%~-]``; injective.

    Every other byte of the UTF-8 form is ``%XX``.  A longer result is cut between
    escapes and ends in ``~`` and 16 hex digits of the full name's SHA-256; a ``~`` of
    the name itself is escaped, so a cut name equals no whole one.
    """
    raw = _utf8(name)
    whole = "".join(_ESCAPED[b] for b in raw)
    if len(whole) <= MAX_NAME_CHARS:
        return whole
    end = MAX_NAME_CHARS - _CUT_HEX - len(_CUT_MARK)
    escape = whole.rfind("%", end - 2, end)
    if escape >= 0:
        end = escape
    return whole[:end] + _CUT_MARK + hashlib.sha256(raw).hexdigest()[:_CUT_HEX]


@lru_cache(maxsize=4096)
def identity_tag(identity: Identity) -> str:
    """``<encoded name>@<12 hex>``: what an operator lists and purges by.

    The full digest is in the chunk hash, so two identities with one tag share no key.
    """
    return f"{encode_name(identity.name)}@{identity.digest.hex()[:_DIGEST_HEX]}"


@dataclass(frozen=True, slots=True)
class RemoteKeyParts:
    """What a store key says.  `name` is None when the name was too long to be kept whole."""

    schema: int
    namespace_hex: str
    chunk: ChunkKey
    tag: str
    name: str | None
    digest_hex: str
    rank: Rank


_KEY = re.compile(
    r"elora:(?P<schema>0|[1-9][0-9]*):(?P<namespace>[0-9a-f]{32}):\{(?P<chunk>[0-9a-f]{64})\}"
    r":(?P<tag>(?P<name>(?:[A-Za-z0-9_.-]|%[0-9A-F]{2})*)(?P<cut>~[0-9a-f]{16})?"
    r"@(?P<digest>[0-9a-f]{12}))"
    r":tp(?P<tp>0|[1-9][0-9]*)pp(?P<pp>0|[1-9][0-9]*)"
)


def _decode_name(encoded: str) -> str | None:
    raw = re.sub(rb"%([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), encoded.encode("ascii"))
    try:
        name = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return name if encode_name(name) == encoded else None


class RemoteKeys:
    """Store keys ``elora:<schema>:<namespace>:{<chunk hash>}:<identity tag>:<rank>``.

    The braces are Redis Cluster's hash tag: a chunk's ranks share a slot, chunks spread.
    """

    __slots__ = ("_prefix", "namespace_hex", "schema")

    def __init__(self, schema: int, namespace: bytes) -> None:
        if len(namespace) != DIGEST_BYTES:
            raise ValueError(f"namespace must be {DIGEST_BYTES} bytes, got {len(namespace)}")
        if schema < 0:
            raise ValueError(f"schema must not be negative, got {schema}")
        self.schema = schema
        self.namespace_hex = namespace.hex()[:NAMESPACE_HEX]
        self._prefix = f"elora:{schema}:{self.namespace_hex}:{{"

    def of(self, chunk: ChunkKey, identity: Identity, rank: Rank) -> str:
        """Key of one rank's part of a chunk."""
        return f"{self._prefix}{chunk.hex()}}}:{identity_tag(identity)}:{rank}"

    @staticmethod
    def parse(key: str) -> RemoteKeyParts | None:
        """Parts of a key of any schema and namespace; None when `of` cannot have made it."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        name = None if match["cut"] else _decode_name(match["name"])
        if name is None and not _is_cut(match["name"], match["cut"]):
            return None
        return RemoteKeyParts(
            schema=int(match["schema"]),
            namespace_hex=match["namespace"],
            chunk=ChunkKey(bytes.fromhex(match["chunk"])),
            tag=match["tag"],
            name=name,
            digest_hex=match["digest"],
            rank=Rank(int(match["tp"]), int(match["pp"])),
        )


def _is_cut(encoded: str, cut: str | None) -> bool:
    """A cut name fills its room up to at most the two characters of a split escape."""
    room = MAX_NAME_CHARS - _CUT_HEX - len(_CUT_MARK)
    return cut is not None and room - 2 <= len(encoded) <= room
