"""`elora verify`: every kind of damage is found, named, and only then removed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elora_connector.core.types import BASE, Rank
from elora_connector.tiers.base import ValueSpec
from elora_connector.tiers.codec import HEADER_BYTES, encode_header
from tests.cli.filling import (
    HARMLESS,
    OTHER,
    VALUE_BYTES,
    Filler,
    Ran,
    identity,
    litter,
    payload_of,
    used_commands,
)
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.redis
Elora = Callable[..., Ran]

WHO, LEGAL = identity("civil"), identity("legal")
KEY = "0123456789abcdef"
OTHER_KEY = "fedcba9876543210"


def value_of(spec: ValueSpec, key: bytes | None = None, *, checksum: bool = True) -> bytes:
    payload = payload_of(spec)
    return encode_header(spec, memoryview(payload), key, checksum=checksum) + payload


def test_a_sound_store(elora: Elora, server: RedisServer, filler: Filler) -> None:
    filler.chain(WHO, 5, ranks=(Rank(0, 0), Rank(1, 0)))
    filler.chain(LEGAL, 3, namespace=OTHER)
    filler.chain(BASE, 2)
    filler.chain(identity("x" * 300), 2)
    filler.chain(identity("\ud800 odd"), 1)
    litter(server)
    with server.client() as admin:
        admin.config_resetstat()
    ran = elora("verify", "--url", server.url, "--json")
    assert ran.code == 0
    assert (ran.json["good"], ran.json["bad"]) == (18, 0)
    assert ran.json["bytes"] == 18 * VALUE_BYTES
    # The cut name's root cannot be told from a chunk without a parent.
    assert ran.json["parentless"] == 1
    assert ran.json["mac_checked"] == 0
    used = used_commands(server)
    assert {"scan", "strlen", "getrange"} <= used <= HARMLESS
    assert elora("verify", "--url", server.url, "--adapter", "civil", "--json").json["good"] == 10


def damage(server: RedisServer, specs: list[ValueSpec]) -> dict[str, str]:
    """One kind of damage per value; key -> the reason that must be found."""
    values = {spec.key: value_of(spec) for spec in specs}
    it = iter(specs)

    def take() -> ValueSpec:
        return next(it)

    planned: list[tuple[ValueSpec, bytes, str]] = []
    spec = take()
    planned.append((spec, b"garbage", "magic"))
    spec = take()
    planned.append((spec, b"", "truncated"))
    spec = take()
    planned.append((spec, values[spec.key][:-1], "truncated"))
    spec = take()
    planned.append((spec, values[spec.key][:500], "truncated"))
    spec = take()
    planned.append((spec, values[spec.key] + b"x", "length"))
    spec = take()
    flipped = bytearray(values[spec.key])
    flipped[HEADER_BYTES + 7] ^= 1
    planned.append((spec, bytes(flipped), "checksum"))
    spec = take()
    flipped = bytearray(values[spec.key])
    flipped[70] ^= 1
    planned.append((spec, bytes(flipped), "header"))
    spec = take()
    planned.append((spec, b"ELORA-KV\x63\x00" + values[spec.key][10:], "schema"))
    spec = take()
    planned.append((spec, value_of(replace(spec, namespace=OTHER)), "namespace"))
    spec = take()
    planned.append((spec, value_of(replace(spec, identity=LEGAL)), "identity"))
    spec = take()
    planned.append((spec, value_of(replace(spec, identity=identity("civil", "y"))), "identity"))
    spec = take()
    planned.append((spec, value_of(specs[-1]), "chunk"))
    spec = take()
    planned.append((spec, value_of(replace(spec, rank=Rank(1, 0))), "rank"))
    with server.client() as admin:
        for spec, value, _ in planned:
            admin.set(spec.key, value)
        spec = take()
        admin.unlink(spec.key)
        admin.rpush(spec.key, "x")
    return {spec.key: reason for spec, _, reason in planned} | {spec.key: "type"}


def test_every_damage_has_its_reason(elora: Elora, server: RedisServer, filler: Filler) -> None:
    specs = filler.chain(WHO, 16)
    expected = damage(server, specs)
    assert len(expected) == 14
    ran = elora("verify", "--url", server.url, "--json")
    assert ran.code == 1
    assert {item["key"]: item["reason"] for item in ran.json["bad_values"]} == expected
    assert (ran.json["good"], ran.json["bad"], ran.json["removed"]) == (2, 14, 0)
    text = elora("verify", "--url", server.url)
    assert text.code == 1
    assert "2 good values" in text.out
    assert "14 bad, 0 removed" in text.out


def test_delete_bad_removes_what_claims_to_be_ours(
    elora: Elora, server: RedisServer, filler: Filler
) -> None:
    expected = damage(server, filler.chain(WHO, 16))
    foreign = litter(server)
    ran = elora("verify", "--url", server.url, "--delete-bad", "--json")
    # Garbage, the empty value, the other schema and the list do not claim to be ours.
    assert (ran.code, ran.json["bad"], ran.json["removed"]) == (1, 14, 10)
    after = elora("verify", "--url", server.url, "--json")
    left = {item["key"]: item["reason"] for item in after.json["bad_values"]}
    assert sorted(left.values()) == ["magic", "schema", "truncated", "type"]
    assert left.items() <= expected.items()
    with server.client() as admin:
        assert {key: admin.get(key) for key in foreign} == foreign


def test_oversized_values_are_not_read(
    elora: Elora, server: RedisServer, filler: Filler, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = replace(filler.chain(WHO, 1)[0], nbytes=2 << 20)
    with server.client() as admin:
        admin.set(big.key, value_of(big))
        admin.config_resetstat()
        monkeypatch.setenv("ELORA_REMOTE_MAX_VALUE_MB", "1")
        ran = elora("verify", "--url", server.url, "--json")
        assert ran.json["reasons"] == {"oversized": 1}
        assert admin.info("stats")["total_net_output_bytes"] < 100_000


def test_chunks_without_a_parent_are_counted(
    elora: Elora, server: RedisServer, filler: Filler
) -> None:
    specs = filler.chain(WHO, 6)
    with server.client() as admin:
        admin.unlink(specs[1].key, specs[3].key)
    ran = elora("verify", "--url", server.url)
    assert ran.code == 0
    assert "2 values have no parent here" in ran.err
    filler.chain(WHO, 3, salt="secret")
    ran = elora("verify", "--url", server.url, "--json")
    assert (ran.json["good"], ran.json["parentless"]) == (7, 3)


def test_values_without_checksum_are_counted(
    elora: Elora, server: RedisServer, filler: Filler
) -> None:
    with Filler(server.url, checksum=False) as plain:
        plain.chain(WHO, 2)
    filler.chain(LEGAL, 2)
    ran = elora("verify", "--url", server.url, "--json")
    assert (ran.code, ran.json["good"], ran.json["without_checksum"]) == (0, 4, 2)


def test_macs(
    elora: Elora, server: RedisServer, filler: Filler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours are checked, forgeries beside them found, those of other keys left alone."""
    with Filler(server.url, mac_key=KEY.encode()) as ours:
        signed = ours.chain(WHO, 4)
    with Filler(server.url, mac_key=OTHER_KEY.encode()) as others:
        others.chain(WHO, 2, namespace=OTHER)
    forged = replace(signed[2], parent=bytes(32))
    with server.client() as admin:
        admin.set(signed[1].key, value_of(signed[1]))
        admin.set(forged.key, value_of(forged, OTHER_KEY.encode()))
        raw = bytearray(value_of(signed[3], KEY.encode()))
        raw[30] ^= 1
        admin.set(signed[3].key, reseal(bytes(raw)))
    without = elora("verify", "--url", server.url, "--json")
    assert (without.code, without.json["good"], without.json["mac_checked"]) == (0, 6, 0)
    monkeypatch.setenv("ELORA_REMOTE_MAC_KEY_ENV", "MAC_KEY_OF_TESTS")
    monkeypatch.setenv("MAC_KEY_OF_TESTS", KEY)
    ran = elora("verify", "--url", server.url, "--json")
    assert ran.code == 1
    assert ran.json["reasons"] == {"mac": 1, "mac_missing": 2}
    assert (ran.json["good"], ran.json["mac_checked"]) == (3, 1)
    assert KEY not in ran.out + ran.err
    gone = elora("verify", "--url", server.url, "--delete-bad", "--json")
    assert gone.json["removed"] == 3
    assert elora("verify", "--url", server.url, "--json").json["good"] == 3


def reseal(value: bytes) -> bytes:
    """Recompute the header's own checksum, as an attacker would."""
    import xxhash

    header = bytearray(value[:HEADER_BYTES])
    header[12:28] = bytes(16)
    header[12:28] = xxhash.xxh3_128_digest(header)
    return bytes(header) + value[HEADER_BYTES:]


def test_the_log_of_a_run_has_no_credentials(
    elora: Elora, server: RedisServer, tmp_path: Path
) -> None:
    url = server.url.replace("://", "://hunter:hunter2@")
    for command in (["inspect"], ["verify"], ["purge", "--adapter", "a", "--yes"]):
        for form in ([], ["--json"]):
            ran = elora(*command, "--url", url, *form)
            assert ran.code == 1
            assert "wrong user or password" in ran.err
            assert "hunter" not in ran.out + ran.err
