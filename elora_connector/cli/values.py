"""What the values under our keys claim, and whether the claims are true.

Nothing is read whose size was not looked at first: a header is asked for as the first
`HEADER_BYTES` of a value, a payload only when header and length agree.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from elora_connector.cli.keyspace import Key
from elora_connector.cli.store import Command, Shard
from elora_connector.core.keys import encode_name
from elora_connector.errors import CodecError
from elora_connector.tiers.codec import (
    HEADER_BYTES,
    MAGIC,
    MAX_NAME_BYTES,
    SCHEMA,
    Header,
    mac_key_id,
    parse_header,
    verify_payload,
)

_CLAIM = MAGIC + struct.pack("<H", SCHEMA)
_CUT_HEX = 16


@dataclass(frozen=True, slots=True)
class Beginning:
    """Size and first bytes of a value; `wrong_type` for what is no string at all."""

    size: int
    raw: bytes
    exists: bool
    wrong_type: bool = False

    @property
    def ours(self) -> bool:
        """It claims to be a value of this package and schema, damaged or not."""
        return self.raw.startswith(_CLAIM)


def beginnings(shard: Shard, keys: Sequence[Key]) -> list[Beginning]:
    """Sizes and headers of many values in one pipeline."""
    commands: list[Command] = []
    for key in keys:
        commands.append(("STRLEN", key.raw))
        commands.append(("GETRANGE", key.raw, 0, HEADER_BYTES - 1))
        commands.append(("EXISTS", key.raw))
    replies = shard.ask(commands)
    return [_beginning(*replies[start : start + 3]) for start in range(0, len(replies), 3)]


def _beginning(size: Any, raw: Any, exists: Any) -> Beginning:
    for reply in (size, raw, exists):
        if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
            return Beginning(0, b"", exists=True, wrong_type=True)
        if isinstance(reply, Exception):
            raise reply
    return Beginning(size, raw, bool(exists))


@dataclass(frozen=True, slots=True)
class Checker:
    """Reads a whole value back and checks it, as an engine with this configuration would.

    Args:
        largest: bytes of payload above which a value is not read.
        mac_key: the key to check MACs with, or None.
    """

    largest: int
    mac_key: bytes | None

    def check(self, shard: Shard, key: Key, begin: Beginning) -> Header:
        """The header of a value that is what its key says.

        Raises:
            CodecError: it is not; beyond the codec's own reasons, `type` (no string) and
                `oversized`.
        """
        if begin.wrong_type:
            raise CodecError("type", "the key holds something other than a string")
        header = parse_header(begin.raw)
        reason = _misplaced(header, key)
        if reason is not None:
            raise CodecError(reason, f"the header names another {reason} than the key")
        if header.nbytes > self.largest or begin.size > HEADER_BYTES + self.largest:
            raise CodecError("oversized", f"{begin.size} bytes are over the configured limit")
        if begin.size != HEADER_BYTES + header.nbytes:
            short = begin.size < HEADER_BYTES + header.nbytes
            raise CodecError("truncated" if short else "length", "not as long as its header says")
        payload = shard.call("GETRANGE", key.raw, HEADER_BYTES, begin.size - 1)
        verify_payload(header, memoryview(payload), self._key_for(header))
        return header

    def authentic(self, header: Header) -> bool:
        """Did `check` prove that somebody with our key wrote this?"""
        return self._key_for(header) is not None

    def _key_for(self, header: Header) -> bytes | None:
        # Values of other keys are not ours to judge: they belong to other namespaces.
        if self.mac_key is None or header.mac_key != mac_key_id(self.mac_key):
            return None
        return self.mac_key


def _misplaced(header: Header, key: Key) -> str | None:
    """The first part of the key that the header contradicts."""
    parts = key.parts
    claims = {
        "namespace": header.namespace.hex()[: len(parts.namespace_hex)] == parts.namespace_hex,
        "identity": header.digest.hex().startswith(parts.digest_hex)
        and _same_name(header.name, parts.tag.rpartition("@")[0]),
        "chunk": header.chunk == parts.chunk,
        "rank": header.rank == parts.rank,
    }
    return next((reason for reason, same in claims.items() if not same), None)


def _same_name(bounded: bytes, encoded: str) -> bool:
    """Compare the header's bounded name with the key's; both may have been cut."""
    if len(bounded) <= MAX_NAME_BYTES:
        try:
            return encode_name(bounded.decode("utf-8", "surrogatepass")) == encoded
        except UnicodeDecodeError:
            return False
    # Both keep the beginning of the name and a digest of the whole.
    _, _, digest = bounded.rpartition(b"~")
    return encoded.endswith("~" + digest.decode("ascii", "replace")[:_CUT_HEX])
