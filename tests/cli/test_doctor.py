"""`elora doctor`: every line ok, warn or fail, each for its reason, and the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elora_connector.cli import machine
from elora_connector.cli.checks import Status
from elora_connector.cli.redis_checks import check_encryption, check_signing
from elora_connector.config import load_config
from tests.cli.filling import HARMLESS, Ran, litter, used_commands
from tests.support.redis_server import RedisServer
from tests.support.tiny import make_tiny_model

Elora = Callable[..., Ran]
ROOT = Path(__file__).parents[2]
SMALL = '{"lmcache.max_local_cpu_size": 0.1}'


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that import vLLM take ten seconds; the last test runs them."""
    from elora_connector.cli import doctor
    from elora_connector.cli.checks import ok

    monkeypatch.setattr(doctor, "check_vllm", lambda: ok("vllm", "as if"))
    monkeypatch.setattr(doctor, "check_device", lambda: ok("device", "as if"))


def checks(ran: Ran) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in ran.json["checks"]}


def statuses(ran: Ran) -> dict[str, str]:
    return {name: check["status"] for name, check in checks(ran).items()}


@pytest.mark.redis
def test_a_healthy_store(elora: Elora, server: RedisServer) -> None:
    foreign = litter(server)
    ran = elora("doctor", "--url", server.url, "--extra", SMALL, "--json")
    found = checks(ran)
    assert ran.code == 0
    assert list(found) == [
        "vllm",
        "plugin",
        "device",
        "configuration",
        "memory",
        "redis",
        "encryption",
        "login",
        "signing",
        "redis memory",
        "latency",
        "throughput",
    ]
    assert found["throughput"]["facts"]["write_mb_s"] > 0
    assert found["latency"]["facts"]["median_ms"] > 0
    assert statuses(ran)["redis memory"] == "warn"  # the server has no limit
    assert (ran.json["ok"], ran.json["warn"], ran.json["fail"]) == (11, 1, 0)
    with server.client() as admin:
        assert set(admin.keys()) == {*foreign, b"elora:list"}


@pytest.mark.redis
def test_no_write_writes_nothing(elora: Elora, server: RedisServer) -> None:
    ran = elora("doctor", "--url", server.url, "--extra", SMALL, "--no-write", "--json")
    assert ran.code == 0
    assert "throughput" not in checks(ran)
    used = used_commands(server)
    assert "exists" in used
    assert used <= HARMLESS - {"set", "unlink"}


@pytest.mark.redis
def test_text_says_what_to_do(elora: Elora, server: RedisServer) -> None:
    ran = elora("doctor", "--url", server.url, "--extra", SMALL)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "  ok  vllm: as if"
    place = next(i for i, line in enumerate(lines) if line.startswith("warn  redis memory"))
    assert lines[place + 1].startswith("      -> set maxmemory")
    assert lines[-1] == "11 ok, 1 warnings, 0 failures"


@pytest.mark.redis
@pytest.mark.parametrize(
    ("policy", "limit", "status"),
    [("noeviction", "64mb", "warn"), ("allkeys-lru", "64mb", "ok"), ("allkeys-lru", "0", "warn")],
)
def test_memory_policy(
    elora: Elora, server: RedisServer, policy: str, limit: str, status: str
) -> None:
    with server.client() as admin:
        before = admin.config_get("maxmemory*")
        admin.config_set("maxmemory", limit)
        admin.config_set("maxmemory-policy", policy)
        try:
            ran = elora("doctor", "--url", server.url, "--extra", SMALL, "--no-write", "--json")
        finally:
            admin.config_set("maxmemory", before["maxmemory"])
            admin.config_set("maxmemory-policy", before["maxmemory-policy"])
    assert statuses(ran)["redis memory"] == status


@pytest.mark.redis
def test_a_full_store_fails_with_advice(elora: Elora) -> None:
    with RedisServer(maxmemory="2mb", policy="noeviction") as full:
        ran = elora("doctor", "--url", full.url, "--extra", SMALL, "--json")
    assert ran.code == 1
    assert checks(ran)["throughput"]["status"] == "fail"
    assert "[oom]" in checks(ran)["throughput"]["detail"]


PASSWORD = "s3cr3t-Pa55"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    users = {
        "least": [f">{PASSWORD}", "~elora:*", "+get", "+set", "+exists", "+expire", "+del"],
        "reader": [f">{PASSWORD}", "~elora:*", "+get", "+exists"],
    }
    with RedisServer(requirepass=PASSWORD, users=users) as server:
        yield server


@pytest.mark.redis
def test_logins(elora: Elora, guarded: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD_OF_TESTS", PASSWORD)
    monkeypatch.setenv("ELORA_REMOTE_PASSWORD_ENV", "PASSWORD_OF_TESTS")

    def ask(user: str | None, *more: str) -> Ran:
        extra = {"lmcache.max_local_cpu_size": 0.1, "elora.remote.username": user}
        ran = elora("doctor", "--url", guarded.url, "--extra", json.dumps(extra), "--json", *more)
        assert PASSWORD not in ran.out + ran.err
        return ran

    assert ask(None).code == 0
    assert checks(ask(None))["login"]["detail"] == "user default"
    least = ask("least")
    assert (least.code, statuses(least)["throughput"]) == (0, "ok")
    assert "may not ask" in checks(least)["login"]["detail"]
    reader = ask("reader")
    assert (reader.code, statuses(reader)["throughput"]) == (1, "fail")
    assert ask("reader", "--no-write").code == 0
    monkeypatch.setenv("PASSWORD_OF_TESTS", "wrong")
    wrong = ask(None)
    assert (wrong.code, wrong.json["checks"][-1]["facts"]) == (1, {"reason": "auth"})
    assert "user, password and ACL" in wrong.json["checks"][-1]["advice"]


def test_a_store_that_is_not_there(elora: Elora) -> None:
    ran = elora("doctor", "--url", f"redis://u:{PASSWORD}@127.0.0.1:1", "--extra", SMALL, "--json")
    assert ran.code == 1
    assert ran.json["checks"][-1]["facts"] == {"reason": "connection"}
    assert PASSWORD not in ran.out + ran.err


def test_without_a_store(elora: Elora) -> None:
    ran = elora("doctor", "--extra", SMALL, "--json")
    assert ran.code == 0
    assert "none configured" in checks(ran)["redis"]["detail"]


def test_configuration(elora: Elora, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("chunk_sise: 5\n")
    ran = elora("doctor", "--config", path, "--json")
    assert (ran.code, ran.json["checks"][-1]["name"]) == (1, "configuration")
    assert "did you mean chunk_size" in ran.json["checks"][-1]["detail"]
    path.write_text("max_local_cpu_size: 0.1\npre_caching_hash_algorithm: sha256\n")
    ran = elora("doctor", "--config", path, "--json")
    assert (ran.code, statuses(ran)["configuration"]) == (0, "warn")


def test_memory() -> None:
    small, huge = (load_config({}, {"lmcache.max_local_cpu_size": gb}) for gb in (0.001, 1e6))
    assert machine.check_memory(small, 1).status is Status.OK
    assert machine.check_memory(huge, 1).status is Status.FAIL
    half = machine.available_memory_bytes() / 1024**3 * 0.45
    tight = load_config({}, {"lmcache.max_local_cpu_size": half})
    assert machine.check_memory(tight, 2).status is Status.WARN


def test_plugin() -> None:
    assert machine.check_plugin({}).status is Status.OK
    assert machine.check_plugin({"VLLM_PLUGINS": "other,elora"}).status is Status.OK
    assert machine.check_plugin({"VLLM_PLUGINS": "other"}).status is Status.FAIL


@pytest.mark.parametrize(
    ("url", "encryption", "signing"),
    [
        ("redis://localhost", "ok", "ok"),
        ("unix:///run/redis.sock", "ok", "ok"),
        ("redis://cache.internal:6379", "warn", "warn"),
        ("rediss://cache.internal:6379", "ok", "warn"),
        ("rediss://cache.internal:6379?ssl_cert_reqs=none", "warn", "warn"),
        ("rediss-sentinel://a:1,b:2/main", "ok", "warn"),
        ("redis-cluster://a:1,b:2", "warn", "warn"),
        ("redis-cluster://localhost:1,b:2", "warn", "warn"),
    ],
)
def test_what_the_address_tells(url: str, encryption: str, signing: str) -> None:
    config = load_config({}, {"lmcache.remote_url": url})
    assert check_encryption(config).status.value == encryption
    assert check_signing(config).status.value == signing


def test_signing() -> None:
    entries = {"lmcache.remote_url": "redis://far", "elora.remote.mac_key_env": "MAC"}
    signed = check_signing(load_config({"MAC": "0123456789abcdef"}, entries))
    assert signed.status is Status.OK
    assert "0123456789abcdef" not in signed.detail
    bare = check_signing(
        load_config({}, {"lmcache.remote_url": "redis://x", "elora.remote.checksum": False})
    )
    assert bare.status is Status.WARN


@pytest.mark.redis
def test_all_of_it_as_a_process(server: RedisServer, tmp_path: Path) -> None:
    """The real vLLM, a real model, a real store; nothing but JSON on stdout."""
    model = make_tiny_model(tmp_path, {}).model
    command = [sys.executable, "-m", "elora_connector.cli", "doctor", "--json"]
    command += ["--url", server.url, "--model", str(model)]
    command += ["--extra", '{"lmcache.max_local_cpu_size": 0.1, "lmcache.chunk_size": 64}']
    command += ["--", "--dtype", "float32", "--block-size", "32", "--max-model-len", "1024"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["vllm"]["status"] == "ok"
    assert found["device"]["facts"]["device"] == "cpu"
    facts = found["model"]["facts"]
    assert len(facts.pop("namespace")) == 32
    assert facts == {
        "certain": True,
        "ranks": 1,
        "block_size": 32,
        "chunk_size": 64,
        "chunk_bytes": 64 * 4 * 2 * 2 * 64 * 4,
    }
