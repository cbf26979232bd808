"""Values under our keys that are not what was written there."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import redis

from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.errors import CodecError
from elora_connector.tiers.base import ValueSpec
from elora_connector.tiers.codec import HEADER_BYTES, Header, encode_header, parse_header
from tests.chaos.world import Fault, Strike, World, sample

REFUSALS = (
    *("truncated", "magic", "schema", "header", "namespace", "identity", "chunk", "parent"),
    *("rank", "shape", "dtype", "length", "checksum", "checksum_missing", "mac", "mac_missing"),
)
"""Reasons for which bytes that arrived are not used."""

SHARE = 0.5
"""Part of the keys that is damaged."""


Damage = Callable[[redis.Redis, bytes, bytes], object]
"""Does something to one key, given its value."""


@contextmanager
def _damaged(world: World, damage: Damage, reasons: Sequence[str] = REFUSALS) -> Iterator[Strike]:
    """Damage a part of the values; what is left of it is deleted in the end.

    Values that do not even claim to be ours are never deleted by the connector, so
    without that they would be refused, rightly, until their time is over.
    """
    errors = world.errors()
    with world.admin() as admin:
        hurt = sample(world, admin, SHARE)
        for key in hurt:
            value = admin.get(key)
            if value is not None and _sound(value):  # another fault may have been quicker
                damage(admin, key, value)
        try:
            yield Strike(lambda: errors(*reasons) > 0)
        finally:
            if hurt:
                admin.delete(*hurt)


def flipped(world: World) -> AbstractContextManager[Strike]:
    """One bit anywhere, one in the header, or all bits of a stretch of the payload.

    One bit is the hardest to notice, a stretch could not be used without a wrong token.
    """

    def damage(admin: redis.Redis, key: bytes, value: bytes) -> None:
        size = len(value)
        start, length = world.rng.choice(
            [(world.rng.randrange(size), 1), (world.rng.randrange(100), 1), (size // 4, size // 2)]
        )
        mask = 1 << world.rng.randrange(8) if length == 1 else 0xFF
        turned = bytes(byte ^ mask for byte in value[start : start + length])
        admin.set(key, value[:start] + turned + value[start + length :])

    return _damaged(world, damage)


def resized(world: World) -> AbstractContextManager[Strike]:
    """Truncated anywhere, or with something behind the end."""

    def damage(admin: redis.Redis, key: bytes, value: bytes) -> None:
        cuts = [0, world.rng.randrange(HEADER_BYTES), world.rng.randrange(len(value))]
        shorter = value[: world.rng.choice([*cuts, len(value) - 1])]
        admin.set(key, world.rng.choice([shorter, shorter, value + b"\0", value + value]))

    return _damaged(world, damage)


def swapped(world: World) -> AbstractContextManager[Strike]:
    """Sound values of ours under other keys of ours, whatever adapter or prompt they are of."""
    others: deque[bytes] = deque(maxlen=8)

    def damage(admin: redis.Redis, key: bytes, value: bytes) -> None:
        if others:
            admin.set(key, world.rng.choice(others))
        others.append(value)

    return _damaged(world, damage)


def foreign(world: World) -> AbstractContextManager[Strike]:
    """Well-formed values of somebody else: another model, adapter, rank, chunk or type."""

    def damage(admin: redis.Redis, key: bytes, value: bytes) -> None:
        other = world.rng.choice(_OTHERS)(_spec(parse_header(value)))
        payload = memoryview(world.rng.randbytes(other.nbytes))
        admin.set(key, encode_header(other, payload, None) + payload)

    return _damaged(world, damage)


def garbage(world: World) -> AbstractContextManager[Strike]:
    """Text, noise, huge values, other types, and headers that lie."""

    def damage(admin: redis.Redis, key: bytes, value: bytes) -> None:
        admin.delete(key)
        world.rng.choice(_GARBAGE)(world, admin, key, value)

    return _damaged(world, damage)


def forged(world: World) -> AbstractContextManager[Strike]:
    """Right header, right checksum, wrong KV: only a MAC can tell, so only with one."""

    def damage(admin: redis.Redis, key: bytes, value: bytes) -> None:
        spec = _spec(parse_header(value))
        payload = memoryview(world.rng.randbytes(spec.nbytes))
        secret = world.rng.choice([None, b"a key of somebody else"])
        admin.set(key, encode_header(spec, payload, secret) + payload)

    return _damaged(world, damage, ("mac", "mac_missing"))


def _sound(value: bytes) -> bool:
    try:
        parse_header(value)
    except CodecError:
        return False
    return True


def _spec(header: Header) -> ValueSpec:
    """What the owner of a value would ask for; names here are short."""
    return ValueSpec(
        key="",
        namespace=header.namespace,
        identity=Identity(header.name.decode(), header.digest),
        chunk=ChunkKey(header.chunk),
        parent=header.parent,
        rank=header.rank,
        dtype=header.dtype,
        shape=header.shape,
        nbytes=header.nbytes,
    )


_NO_DIGEST = bytes(32)
_OTHERS: tuple[Callable[[ValueSpec], ValueSpec], ...] = (
    lambda spec: dataclasses.replace(spec, namespace=_NO_DIGEST),
    lambda spec: dataclasses.replace(spec, identity=Identity("other", spec.identity.digest)),
    lambda spec: dataclasses.replace(spec, identity=Identity(spec.identity.name, b"\1" * 32)),
    lambda spec: dataclasses.replace(spec, chunk=ChunkKey(_NO_DIGEST)),
    lambda spec: dataclasses.replace(spec, parent=_NO_DIGEST),
    lambda spec: dataclasses.replace(spec, rank=Rank(1, 0)),
    lambda spec: dataclasses.replace(spec, dtype=f"{spec.dtype}x"),
    lambda spec: dataclasses.replace(spec, shape=(*spec.shape[::-1], 1)),
    lambda spec: dataclasses.replace(spec, nbytes=spec.nbytes // 2),
    lambda spec: dataclasses.replace(spec, nbytes=spec.nbytes * 2),
)

_HUGE = bytes(8 << 20)
_Place = Callable[[World, redis.Redis, bytes, bytes], object]
_GARBAGE: tuple[_Place, ...] = (
    lambda world, admin, key, value: admin.set(key, world.rng.randbytes(len(value))),
    lambda world, admin, key, value: admin.set(key, _HUGE),
    lambda world, admin, key, value: admin.set(key, b"-OOM command not allowed\r\n" * 50),
    lambda world, admin, key, value: admin.set(key, value[:8] + world.rng.randbytes(2000)),
    lambda world, admin, key, value: admin.set(key, value[:8] + b"\2\0" + value[10:]),
    lambda world, admin, key, value: admin.set(key, value[:60] + b"\xdf" * len(value[60:])),
    lambda world, admin, key, value: admin.rpush(key, value),
    lambda world, admin, key, value: admin.hset(key, "value", value),
)

VALUES: dict[str, Fault] = {
    fault.__name__: fault for fault in (flipped, resized, swapped, foreign, garbage)
}
SIGNED: dict[str, Fault] = {"forged": forged}
"""Only where values are signed."""
