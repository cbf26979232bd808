"""GET and SET of one value: what is sent, and what its reply means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elora_connector.errors import CodecError
from elora_connector.tiers.base import Outcome, Result, ValueSpec
from elora_connector.tiers.codec import HEADER_BYTES, decode_header, encode_header, verify_payload
from elora_connector.tiers.redis_failure import ReplyError
from elora_connector.tiers.redis_link import Link, pack_set


class Exchange(Protocol):
    """One command and its reply; both may happen again on another link."""

    @property
    def spec(self) -> ValueSpec: ...

    def send(self, link: Link) -> None:
        """Write the command."""
        ...

    def receive(self, link: Link) -> Result:
        """Read the reply.

        Raises:
            CodecError: the value is not the one asked for; `link.torn` says whether the
                rest of it is still on its way.
            ReplyError: the server answered with an error.
            StoreError, OSError: the link cannot be used any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class Seal:
    """How values are protected: `checksum` and `mac_key` as in `RedisTier`."""

    checksum: bool
    mac_key: bytes | None


@dataclass(frozen=True, slots=True)
class Reading:
    """GET straight into `dest`, a writable byte view of `spec.nbytes` bytes."""

    spec: ValueSpec
    dest: memoryview
    seal: Seal

    def send(self, link: Link) -> None:
        link.ask_value(self.spec.key, HEADER_BYTES + self.spec.nbytes)

    def receive(self, link: Link) -> Result:
        try:
            size = link.bulk_size()
        except ReplyError as error:
            if str(error).startswith("WRONGTYPE"):
                raise CodecError("magic", "the key holds something else than a string") from None
            raise
        if size is None:
            return Result(Outcome.MISS)
        head = link.take(min(size, HEADER_BYTES))
        try:
            header = decode_header(head, self.spec, total=size)
        except CodecError:
            # A value of about the right size is cheaper to read than a new connection.
            if size - len(head) <= self.spec.nbytes:
                link.skip(size - len(head))
                link.end_bulk()
            raise
        link.fill(self.dest)
        link.end_bulk()
        seal = self.seal
        verify_payload(header, self.dest, seal.mac_key, require_checksum=seal.checksum)
        return Result(Outcome.OK, nbytes=self.spec.nbytes)


@dataclass(frozen=True, slots=True)
class Writing:
    """SET of a key that does not exist; `options` from `pack_set_options`."""

    spec: ValueSpec
    payload: memoryview
    seal: Seal
    options: bytes

    def send(self, link: Link) -> None:
        seal = self.seal
        header = encode_header(self.spec, self.payload, seal.mac_key, checksum=seal.checksum)
        link.send(pack_set(self.spec.key, header, self.payload, self.options))

    def receive(self, link: Link) -> Result:
        if link.reply() is None:
            return Result(Outcome.OK, "exists")
        return Result(Outcome.OK, nbytes=self.spec.nbytes)
