"""Values under our keys that are not what was written there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

from elora_connector.core.types import ChunkKey, Identity, Rank
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


@contextmanager
def _damaged(world: World, damage: Callable[[redis.Redis, list[bytes]], None]) -> Iterator[Strike]:
    """Damage a part of the values; what is left of it is deleted in the end.

    Values that do not even claim to be ours are never deleted by the connector, so
    without that they would be refused, rightly, until their time is over.
    """
    errors = world.errors()
    with world.admin() as admin:
        hurt = sample(world, admin, SHARE)
        damage(admin, hurt)
        try:
            yield Strike(lambda: errors(*REFUSALS) > 0)
        finally:
            if hurt:
                admin.delete(*hurt)


@contextmanager
def flipped(world: World) -> Iterator[Strike]:
    """One bit of each is turned, in the header or in the payload."""

    def damage(admin: redis.Redis, hurt: list[bytes]) -> None:
        for key in hurt:
            size = admin.strlen(key)
            at = world.rng.choice([world.rng.randrange(100), world.rng.randrange(size)])
            byte = admin.getrange(key, at, at)[0] ^ 1 << world.rng.randrange(8)
            admin.setrange(key, at, bytes([byte]))

    with _damaged(world, damage) as strike:
        yield strike


@contextmanager
def resized(world: World) -> Iterator[Strike]:
    """Truncated anywhere, or with something behind the end."""

    def damage(admin: redis.Redis, hurt: list[bytes]) -> None:
        for key in hurt:
            value = admin.get(key)
            cuts = [0, world.rng.randrange(HEADER_BYTES), world.rng.randrange(len(value))]
            shorter = value[: world.rng.choice([*cuts, len(value) - 1])]
            admin.set(key, world.rng.choice([shorter, shorter, value + b"\0", value + value]))

    with _damaged(world, damage) as strike:
        yield strike


@contextmanager
def swapped(world: World) -> Iterator[Strike]:
    """Sound values of ours under each other's keys, whatever adapter or prompt they are of."""

    def damage(admin: redis.Redis, hurt: list[bytes]) -> None:
        values = admin.mget(hurt) if hurt else []
        for key, value in zip(hurt, [*values[1:], *values[:1]], strict=True):
            admin.set(key, value)

    with _damaged(world, damage) as strike:
        yield strike


@contextmanager
def foreign(world: World) -> Iterator[Strike]:
    """Well-formed values of somebody else: another model, adapter, rank, chunk or type."""

    def damage(admin: redis.Redis, hurt: list[bytes]) -> None:
        for key in hurt:
            value = admin.get(key)
            other = world.rng.choice(_OTHERS)(_spec(parse_header(value)))
            payload = memoryview(world.rng.randbytes(other.nbytes))
            admin.set(key, encode_header(other, payload, None) + payload)

    with _damaged(world, damage) as strike:
        yield strike


@contextmanager
def garbage(world: World) -> Iterator[Strike]:
    """Text, noise, huge values, other types, and headers that lie."""

    def damage(admin: redis.Redis, hurt: list[bytes]) -> None:
        for key in hurt:
            value = admin.get(key)
            admin.delete(key)
            world.rng.choice(_GARBAGE)(world, admin, key, value)

    with _damaged(world, damage) as strike:
        yield strike


@contextmanager
def forged(world: World) -> Iterator[Strike]:
    """Right header, right checksum, wrong KV: only a MAC can tell, so only with one."""
    errors = world.errors()

    def damage(admin: redis.Redis, hurt: list[bytes]) -> None:
        for key in hurt:
            spec = _spec(parse_header(admin.get(key)))
            payload = memoryview(world.rng.randbytes(spec.nbytes))
            secret = world.rng.choice([None, b"a key of somebody else"])
            admin.set(key, encode_header(spec, payload, secret) + payload)

    with _damaged(world, damage):
        yield Strike(lambda: errors("mac", "mac_missing") > 0)


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
    lambda spec: dataclasses.replace(spec, dtype="bfloat16"),
    lambda spec: dataclasses.replace(spec, shape=(*spec.shape[::-1], 1)),
    lambda spec: dataclasses.replace(spec, nbytes=spec.nbytes // 2),
    lambda spec: dataclasses.replace(spec, nbytes=spec.nbytes * 2),
)

_Place = Callable[[World, redis.Redis, bytes, bytes], object]
_GARBAGE: tuple[_Place, ...] = (
    lambda world, admin, key, value: admin.set(key, world.rng.randbytes(len(value))),
    lambda world, admin, key, value: admin.set(key, world.rng.randbytes(8 << 20)),
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
