"""`elora inspect`: exact counts, foreign keys left out, names that cannot do harm."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elora_connector.core.types import BASE, Rank
from tests.cli.filling import (
    HARMLESS,
    NAMESPACE,
    OTHER,
    UNRECOGNISED,
    VALUE_BYTES,
    Filler,
    Ran,
    identity,
    litter,
    used_commands,
)
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.redis
Elora = Callable[..., Ran]
ROOT = Path(__file__).parents[2]

OLD, NEW, LEGAL = identity("civil", "old"), identity("civil", "new"), identity("legal")
TWO_RANKS = (Rank(0, 0), Rank(1, 0))


@pytest.fixture
def filled(server: RedisServer, filler: Filler) -> RedisServer:
    filler.chain(OLD, 3)
    filler.chain(NEW, 5)
    filler.chain(NEW, 2, prompt="q")
    filler.chain(LEGAL, 4, namespace=OTHER, ranks=TWO_RANKS)
    filler.chain(BASE, 1)
    litter(server)
    return server


def groups(ran: Ran) -> dict[tuple[str, str], dict[str, Any]]:
    assert ran.code == 0
    return {(group["namespace"], group["adapter"]): group for group in ran.json["groups"]}


def test_exact_counts(elora: Elora, filled: RedisServer) -> None:
    ran = elora("inspect", "--url", filled.url, "--json")
    found = groups(ran)
    ns, other = NAMESPACE.hex()[:32], OTHER.hex()[:32]
    counts = {place: (group["chunks"], group["values"]) for place, group in found.items()}
    assert counts == {
        (ns, "base@000000000000"): (1, 1),
        (ns, str(OLD)): (3, 3),
        (ns, str(NEW)): (7, 7),
        (other, str(LEGAL)): (4, 8),
    }
    assert found[other, str(LEGAL)]["ranks"] == ["tp0pp0", "tp1pp0"]
    assert found[other, str(LEGAL)]["bytes"] == 8 * VALUE_BYTES
    assert ran.json["totals"] == {
        "namespaces": 2,
        "adapters": 4,
        "chunks": 15,
        "values": 19,
        "bytes": 19 * VALUE_BYTES,
    }
    assert ran.json["unrecognised_keys"] == UNRECOGNISED
    assert ran.json["wrong_type_keys"] == 0
    assert ran.err == ""


def test_the_server_is_never_blocked(elora: Elora, filled: RedisServer) -> None:
    with filled.client() as admin:
        admin.config_resetstat()
    elora("inspect", "--url", filled.url)
    used = used_commands(filled)
    assert {"scan", "strlen", "pttl"} <= used <= HARMLESS
    assert "keys" not in used


def test_filters(elora: Elora, filled: RedisServer) -> None:
    def tags(*options: str) -> list[str]:
        ran = elora("inspect", "--url", filled.url, "--json", *options)
        return [group["adapter"] for group in ran.json["groups"]]

    assert tags("--adapter", "civil") == sorted([str(OLD), str(NEW)])
    assert tags("--adapter", str(NEW)) == [str(NEW)]
    assert tags("--adapter", f"civil@{NEW.digest.hex()}") == [str(NEW)]
    assert tags("--adapter", "civ") == []
    assert tags("--adapter", "civil*") == []
    assert tags("--namespace", OTHER.hex()[:8]) == [str(LEGAL)]
    assert tags("--namespace", OTHER.hex()[:32], "--adapter", "civil") == []
    assert elora("inspect", "--url", filled.url, "--namespace", "xyz").code == 2
    assert elora("inspect", "--url", filled.url, "--adapter", "").code == 2


def test_times_to_live(elora: Elora, server: RedisServer, filler: Filler) -> None:
    specs = filler.chain(OLD, 5)
    with server.client() as admin:
        for seconds, spec in zip((100, 200, 300, 400), specs, strict=False):
            admin.expire(spec.key, seconds)
        admin.persist(specs[4].key)
    ran = elora("inspect", "--url", server.url, "--json")
    (group,) = groups(ran).values()
    assert 95 < group["ttl_s"]["min"] <= 100
    assert 395 < group["ttl_s"]["max"] <= 400
    assert 245 < group["ttl_s"]["median"] <= 250
    assert group["without_ttl"] == 1
    assert "never" in elora("inspect", "--url", server.url).out


@pytest.mark.parametrize(
    "name",
    [
        "[red]x[/red]",
        "a\x1b[31mred\x07",
        "\u202egnp.exe",
        "new\nline\ttab",
        "user@0123456789ab",
        "back\\slash",
        "civil:{x}:*?",
        "名前",
        "\ud800",
    ],
)
def test_names_are_shown_and_do_nothing(
    elora: Elora, server: RedisServer, filler: Filler, name: str
) -> None:
    who = identity(name)
    filler.chain(who, 2)
    filler.chain(identity("other"), 2)
    ran = elora("inspect", "--url", server.url, "--json", "--adapter", f"{name}@{str(who)[-12:]}")
    (group,) = ran.json["groups"]
    assert group["name"] == name
    assert all(character.isprintable() or character == "\n" for character in ran.out)
    text = elora("inspect", "--url", server.url).out
    assert all(character.isprintable() or character == "\n" for character in text)
    assert len(text.splitlines()) == 4
    if name.startswith("["):
        assert f"{name}@" in text


def test_a_name_too_long_for_its_key(elora: Elora, server: RedisServer, filler: Filler) -> None:
    name = "x" * 300
    filler.chain(identity(name), 1)
    filler.chain(identity(name + "y"), 1)
    ran = elora("inspect", "--url", server.url, "--adapter", name, "--json")
    (group,) = ran.json["groups"]
    assert group["name"] is None
    assert group["adapter"].startswith("x" * 63 + "~")


def test_a_key_of_ours_that_is_no_string(elora: Elora, server: RedisServer, filler: Filler) -> None:
    key = filler.chain(OLD, 1)[0].key
    with server.client() as admin:
        admin.unlink(key)
        admin.rpush(key, "x")
    ran = elora("inspect", "--url", server.url, "--json")
    assert (ran.json["wrong_type_keys"], ran.json["groups"]) == (1, [])
    assert "something other than a string" in elora("inspect", "--url", server.url).err


def test_many_keys_are_counted_once_each(elora: Elora, server: RedisServer, filler: Filler) -> None:
    """More than one portion of SCAN, while the server's table grows and moves keys about."""
    key = filler.chain(OLD, 1)[0].key
    with server.client() as admin:
        pipeline = admin.pipeline(transaction=False)
        for index in range(3000):
            pipeline.set(key.replace(key[42:62], f"{index:020x}"), b"x" * 10)
        pipeline.execute()
    ran = elora("inspect", "--url", server.url, "--json")
    assert ran.json["totals"]["values"] == 3001
    assert ran.json["totals"]["bytes"] == 3000 * 10 + VALUE_BYTES


def test_progress_is_for_terminals_only(server: RedisServer, filler: Filler) -> None:
    """On a terminal a bar on stderr, else nothing; stdout does not change."""
    filler.chain(OLD, 3)
    command = [sys.executable, "-m", "elora_connector.cli", "inspect", "--url", server.url]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    main, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    shown = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=terminal, env=env, check=True
    )
    os.close(terminal)
    bar = os.read(main, 65536)
    os.close(main)
    assert piped.stderr == b""
    assert b"scanning" in bar
    # The line of sums; the times to live above it go on.
    assert shown.stdout.splitlines()[-1] == piped.stdout.splitlines()[-1]
    assert b"3 chunks in 3 values" in shown.stdout


def test_an_empty_store(elora: Elora, server: RedisServer) -> None:
    ran = elora("inspect", "--url", server.url)
    assert ran.code == 0
    assert "0 chunks in 0 values, 0 B, 0 adapter versions, 0 namespaces" in ran.out


def test_the_store_of_the_configuration(
    elora: Elora,
    server: RedisServer,
    filler: Filler,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    filler.chain(OLD, 2)
    path = tmp_path / "e.yaml"
    path.write_text(f"remote_url: {server.url}\n")
    assert elora("inspect", "--config", path, "--json").json["totals"]["chunks"] == 2
    monkeypatch.setenv("ELORA_REMOTE_URL", server.url)
    assert elora("inspect", "--json").json["totals"]["chunks"] == 2
