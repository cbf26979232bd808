"""`elora purge`: exactly what was named goes, children before parents, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from elora_connector.cli.store import Shard
from elora_connector.core.types import Rank
from elora_connector.tiers.base import ValueSpec
from elora_connector.tiers.codec import encode_header
from tests.cli.filling import (
    HARMLESS,
    NAMESPACE,
    OTHER,
    VALUE_BYTES,
    Filler,
    Ran,
    chain,
    identity,
    litter,
    payload_of,
    used_commands,
)
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.redis
Elora = Callable[..., Ran]

OLD, NEW, LEGAL = identity("civil", "old"), identity("civil", "new"), identity("legal")


def names(server: RedisServer) -> set[str]:
    with server.client() as admin:
        return {key.decode("utf-8", "surrogateescape") for key in admin.scan_iter(count=1000)}


def keys(*chains: list[ValueSpec]) -> set[str]:
    return {spec.key for specs in chains for spec in specs}


def test_one_version_goes(elora: Elora, server: RedisServer, filler: Filler) -> None:
    old, new, legal = filler.chain(OLD, 6), filler.chain(NEW, 4), filler.chain(LEGAL, 3)
    foreign = litter(server)
    before = names(server)
    ran = elora("purge", "--url", server.url, "--adapter", str(OLD), "--yes", "--json")
    assert ran.code == 0
    assert ran.json["groups"] == [
        {
            "namespace": NAMESPACE.hex()[:32],
            "adapter": str(OLD),
            "chunks": 6,
            "values": 6,
            "bytes": 6 * VALUE_BYTES,
        }
    ]
    assert (ran.json["removed"], ran.json["left"], ran.json["kept"]) == (6, 0, 0)
    assert before - names(server) == keys(old)
    assert all(filler.readable(spec) for spec in new + legal)
    with server.client() as admin:
        assert {key: admin.get(key) for key in foreign} == foreign
        assert admin.lrange("elora:list", 0, -1) == [b"x"]


def test_an_adapter_with_all_versions_and_ranks(
    elora: Elora, server: RedisServer, filler: Filler
) -> None:
    ranks = (Rank(0, 0), Rank(1, 0))
    filler.chain(OLD, 3, ranks=ranks)
    filler.chain(NEW, 2, namespace=OTHER)
    legal = filler.chain(LEGAL, 3)
    ran = elora("purge", "--url", server.url, "--adapter", "civil", "--yes", "--json")
    counts = {g["adapter"]: (g["chunks"], g["values"]) for g in ran.json["groups"]}
    assert counts == {str(OLD): (3, 6), str(NEW): (2, 2)}
    assert ran.json["removed"] == 8
    assert names(server) == keys(legal)


def test_a_namespace(elora: Elora, server: RedisServer, filler: Filler) -> None:
    filler.chain(OLD, 3)
    rest = filler.chain(OLD, 3, namespace=OTHER)
    ran = elora("purge", "--url", server.url, "--namespace", NAMESPACE.hex()[:8], "--yes")
    assert ran.code == 0
    assert "removed 3 values, 0 left" in ran.out
    assert names(server) == keys(rest)


def test_a_prefix_of_several_namespaces_is_refused(
    elora: Elora, server: RedisServer, filler: Filler
) -> None:
    twin = NAMESPACE[:4] + bytes(28)
    both = [filler.chain(OLD, 2), filler.chain(OLD, 2, namespace=twin)]
    ran = elora("purge", "--url", server.url, "--namespace", NAMESPACE.hex()[:8], "--yes")
    assert ran.code == 2
    assert "fits several" in ran.err
    assert names(server) == keys(*both)


def test_a_dry_run_and_a_missing_yes_remove_nothing(
    elora: Elora, server: RedisServer, filler: Filler
) -> None:
    kept = filler.chain(OLD, 3)
    arguments = ["purge", "--url", server.url, "--adapter", "civil"]
    dry = elora(*arguments, "--dry-run")
    assert (dry.code, "nothing was removed" in dry.out) == (0, True)
    assert str(OLD) in dry.out
    assert elora(*arguments, "--dry-run", "--json").json["groups"][0]["values"] == 3
    for options in ([], ["--json"]):
        refused = elora(*arguments, *options, stdin="y\n")
        assert refused.code == 2
        assert "give --yes" in refused.err
    assert names(server) == keys(kept)


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 3)])
def test_asks_on_a_terminal(
    elora: Elora,
    server: RedisServer,
    filler: Filler,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    left: int,
) -> None:
    from elora_connector.cli import purge as module

    class Terminal:
        def isatty(self) -> bool:
            return True

    class Sys:
        stdin = Terminal()

    filler.chain(OLD, 3)
    monkeypatch.setattr(module, "sys", Sys)
    ran = elora("purge", "--url", server.url, "--adapter", "civil", stdin=answer)
    assert ran.code == code
    assert "Remove these?" in ran.err
    assert str(OLD) in ran.out
    assert len(names(server)) == left


def test_bad_usage(elora: Elora, server: RedisServer) -> None:
    assert elora("purge", "--url", server.url, "--yes").code == 2
    assert elora("purge", "--url", server.url, "--namespace", "*", "--yes").code == 2
    assert elora("purge", "--url", server.url, "--adapter", "", "--yes").code == 2
    none = elora("purge", "--url", server.url, "--adapter", "nobody", "--yes")
    assert (none.code, "nothing matches" in none.out) == (0, True)


def holes(filler: Filler, chains: list[list[ValueSpec]]) -> list[str]:
    """Keys that exist below a parent that does not."""
    found = []
    for specs in chains:
        there = [filler.tier.leading([[spec.key]]).count == 1 for spec in specs]
        pairs = zip(specs[1:], there[1:], there, strict=False)
        found += [spec.key for spec, here, above in pairs if here and not above]
    return found


@pytest.mark.parametrize("survived", [0, 1, 7, 19])
def test_an_interrupted_purge_leaves_whole_prefixes(
    elora: Elora,
    server: RedisServer,
    filler: Filler,
    monkeypatch: pytest.MonkeyPatch,
    survived: int,
) -> None:
    chains = [filler.chain(OLD, length, prompt=f"p{length}") for length in (1, 5, 9, 12)]
    left = [27 - survived]
    real = Shard.unlink

    def unlink(self: Shard, raws: list[bytes]) -> int:
        done = real(self, raws[: left[0]])
        left[0] -= done
        if left[0] == 0:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Shard, "unlink", unlink)
    ran = elora("purge", "--url", server.url, "--adapter", "civil", "--yes", "--json")
    assert ran.code == 1
    assert len(names(server)) == survived
    assert holes(filler, chains) == []


def test_what_an_engine_writes_meanwhile_goes_too(
    elora: Elora, server: RedisServer, filler: Filler, monkeypatch: pytest.MonkeyPatch
) -> None:
    filler.chain(OLD, 4)
    late = chain(OLD, 6)[4:]
    real = Shard.unlink

    def unlink(self: Shard, raws: list[bytes]) -> int:
        done = real(self, raws)
        while late:
            spec = late.pop(0)
            assert filler.tier.write(spec, memoryview(payload_of(spec))).ok
        return done

    monkeypatch.setattr(Shard, "unlink", unlink)
    ran = elora("purge", "--url", server.url, "--adapter", "civil", "--yes", "--json")
    assert (ran.code, ran.json["removed"], ran.json["left"]) == (0, 6, 0)
    assert names(server) == set()


def test_an_engine_that_never_stops_is_reported(
    elora: Elora, server: RedisServer, filler: Filler, monkeypatch: pytest.MonkeyPatch
) -> None:
    filler.chain(OLD, 1)
    real, prompts = Shard.unlink, iter(range(1000))

    def unlink(self: Shard, raws: list[bytes]) -> int:
        done = real(self, raws)
        filler.chain(OLD, 1, prompt=f"again {next(prompts)}")
        return done

    monkeypatch.setattr(Shard, "unlink", unlink)
    ran = elora("purge", "--url", server.url, "--adapter", "civil", "--yes", "--json")
    assert (ran.code, ran.json["left"]) == (1, 1)
    assert "still writing" in ran.err


def test_concurrent_writes_leave_no_orphan(
    elora: Elora, server: RedisServer, filler: Filler
) -> None:
    chains = [chain(OLD, 10, prompt=f"p{index}") for index in range(40)]
    stop, all_written = threading.Event(), threading.Event()

    def write() -> None:
        with Filler(server.url) as other:
            while not stop.is_set():
                for spec in (spec for specs in chains for spec in specs):
                    other.tier.write(spec, memoryview(payload_of(spec)))
                all_written.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all_written.wait(60)
        purge = ["purge", "--url", server.url, "--adapter", "civil", "--yes", "--json"]
        during = elora(*purge)
    finally:
        stop.set()
        writer.join()
    assert during.json["removed"] >= 400
    # A chunk below a hole is never served, whatever the race left behind ...
    for specs in chains:
        served = filler.tier.leading([[spec.key] for spec in specs]).count
        assert all(filler.readable(spec) for spec in specs[:served])
    # ... and with nobody writing, nothing at all is left.
    after = elora(*purge)
    assert (after.code, after.json["left"], names(server)) == (0, 0, set())


def test_only_what_claims_our_schema_goes(
    elora: Elora, server: RedisServer, filler: Filler
) -> None:
    specs = filler.chain(OLD, 6)
    with server.client() as admin:
        admin.set(specs[1].key, b"somebody else's value under a key of ours")
        admin.set(specs[2].key, b"")
        admin.unlink(specs[3].key)
        admin.rpush(specs[3].key, "x")
        admin.setrange(specs[4].key, 100, b"\xff\xff")  # damaged, but it claims to be ours
    ran = elora("purge", "--url", server.url, "--adapter", "civil", "--yes", "--json")
    assert (ran.json["removed"], ran.json["kept"]) == (3, 3)
    assert names(server) == keys(specs[1:4])


def test_a_circle_of_forged_parents_ends(elora: Elora, server: RedisServer) -> None:
    one, two, three = chain(OLD, 3)
    circle = [replace(one, parent=bytes(three.chunk)), two, three]
    with server.client() as admin:
        for spec in circle:
            payload = payload_of(spec)
            admin.set(spec.key, encode_header(spec, memoryview(payload), None) + payload)
    ran = elora("purge", "--url", server.url, "--adapter", "civil", "--yes", "--json")
    assert (ran.code, ran.json["removed"]) == (0, 3)


def test_the_server_is_never_blocked(elora: Elora, server: RedisServer, filler: Filler) -> None:
    filler.chain(OLD, 5)
    with server.client() as admin:
        admin.config_resetstat()
    elora("purge", "--url", server.url, "--adapter", "civil", "--yes")
    used = used_commands(server)
    assert {"scan", "unlink", "getrange"} <= used <= HARMLESS
