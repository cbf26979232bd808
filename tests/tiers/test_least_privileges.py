"""The ACL rules that docs/security.md names are enough, and none is there for nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elora_connector.cli import doctor
from elora_connector.cli.checks import ok
from elora_connector.tiers.base import Outcome
from elora_connector.tiers.redis import RedisTier
from elora_connector.tiers.redis_cluster import ClusterTier
from tests.cli.filling import Filler, identity, run_elora
from tests.support.redis_groups import ClusterServers
from tests.support.redis_server import RedisServer
from tests.tiers.values import make_spec, payload_of

pytestmark = pytest.mark.redis

PASSWORD = "s3cr3t-Pa55!"
COURTESIES = {"client|setname", "client|setinfo", "client", "ping"}
"""Tried, and done without where they are forbidden."""
SPEC, DAMAGED = make_spec(0), make_spec(1)


def rules(user: str) -> list[str]:
    """The rules of a user in the page on security."""
    page = Path(__file__).parents[2] / "docs/security.md"
    (line,) = re.findall(rf"ACL SETUSER {user} on >PASSWORD (.*)", page.read_text("utf-8"))
    return str(line).split()


@pytest.fixture
def connect() -> Iterator[Callable[..., RedisTier]]:
    made: list[RedisTier] = []

    def make(kind: type[RedisTier], url: str) -> RedisTier:
        options: dict[str, Any] = {"connect_timeout_s": 20.0, "operation_timeout_s": 20.0}
        login = {"username": "elora", "password": PASSWORD}
        made.append(kind(url, ttl_s=60, fail_open=False, **options, **login))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def admit(server: RedisServer, user: str, wanted: list[str]) -> None:
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", user, "reset", "on", f">{PASSWORD}", *wanted)
        admin.execute_command("ACL", "LOG", "RESET")


def refused(server: RedisServer) -> set[str]:
    """Commands that an ACL did not allow, and keys."""
    with server.client() as admin:
        return {row[b"object"].decode() for row in admin.execute_command("ACL", "LOG")}


def all_that_an_engine_does(tier: RedisTier, damage: Callable[[], object]) -> bool:
    dest = memoryview(bytearray(SPEC.nbytes))
    assert tier.leading([[SPEC.key]]).outcome is Outcome.OK
    assert tier.read_into(SPEC, dest).outcome is Outcome.MISS
    for spec in (SPEC, DAMAGED):
        assert tier.write(spec, memoryview(payload_of(spec))).ok
    assert tier.leading([[SPEC.key], [DAMAGED.key]]).count == 2
    assert tier.read_into(SPEC, dest).ok
    assert tier.refresh([SPEC.key]).ok
    damage()
    assert tier.read_into(DAMAGED, dest).outcome is Outcome.BAD
    return tier.leading([[DAMAGED.key]]).count == 0


@pytest.fixture(params=["data path", "public methods"])
def path(request: pytest.FixtureRequest) -> None:
    if request.param == "public methods":
        request.getfixturevalue("fall_back")


@pytest.mark.parametrize("database", [0, 3])
@pytest.mark.usefixtures("path")
def test_an_engine(server: RedisServer, connect: Callable[..., RedisTier], database: int) -> None:
    admit(server, "elora", rules("elora"))
    tier = connect(RedisTier, f"{server.url[:-1]}{database}")
    with server.client(db=database) as admin:
        assert all_that_an_engine_does(tier, lambda: admin.setrange(DAMAGED.key, 2000, b"damage"))
    assert refused(server) <= COURTESIES


@pytest.mark.usefixtures("path")
def test_an_engine_in_a_cluster(
    shared_cluster: ClusterServers, connect: Callable[..., RedisTier]
) -> None:
    for node in shared_cluster.primaries:
        admit(node, "elora", [*rules("elora"), *rules("elora-in-cluster")])
    tier = connect(ClusterTier, shared_cluster.url)  # type: ignore[arg-type]
    with shared_cluster.client() as admin:
        assert all_that_an_engine_does(tier, lambda: admin.setrange(DAMAGED.key, 2000, b"damage"))
        admin.flushall()
    for node in shared_cluster.primaries:
        assert refused(node) <= COURTESIES


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("rule", [rule for rule in rules("elora") if rule.startswith("+")])
def test_no_rule_is_there_for_nothing(
    server: RedisServer, connect: Callable[..., RedisTier], rule: str
) -> None:
    """Over one of the two paths, in one of the databases, each is needed."""
    admit(server, "elora", [other for other in rules("elora") if other != rule])
    needed = False
    try:
        tier = connect(RedisTier, server.url[:-1] + "3")
        with server.client(db=3) as admin:
            needed = not all_that_an_engine_does(
                tier, lambda: admin.setrange(DAMAGED.key, 2000, b"damage")
            )
    except Exception:  # noqa: BLE001 - how it fails is the business of other tests
        needed = True
    assert needed or rule in {"+get", "+getrange"}, "which of these, depends on the path"


def test_the_command(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELORA_CONFIG_FILE", "LMCACHE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("check_vllm", "check_device"):
        monkeypatch.setattr(doctor, name, lambda: ok("vllm", "as if"))
    monkeypatch.setenv("PASSWORD_OF_TESTS", PASSWORD)
    monkeypatch.setenv("ELORA_REMOTE_PASSWORD_ENV", "PASSWORD_OF_TESTS")
    monkeypatch.setenv("ELORA_REMOTE_USERNAME", "operator")
    monkeypatch.setenv("ELORA_REMOTE_CONNECT_TIMEOUT_MS", "20000")
    monkeypatch.setenv("ELORA_REMOTE_OPERATION_TIMEOUT_MS", "20000")
    with Filler(server.url) as filler:
        specs = filler.chain(identity("civil"), 8)
    with server.client() as admin:
        admin.setrange(specs[-1].key, 1100, b"damage")
    admit(server, "operator", rules("operator"))
    url = ("--url", server.url, "--json")
    assert run_elora(["inspect", *url]).json["totals"]["chunks"] == 8
    assert run_elora(["verify", "--delete-bad", *url]).json["bad"] == 1
    small = '{"lmcache.max_local_cpu_size": 0.1}'
    found = {c["name"]: c for c in run_elora(["doctor", *url, "--extra", small]).json["checks"]}
    assert found["throughput"]["status"] == "ok"
    assert found["login"]["detail"] == "an ACL user of our own"
    assert "used of" in found["redis memory"]["detail"]
    assert run_elora(["purge", "--adapter", "civil", "--yes", *url]).json["removed"] == 7
    assert refused(server) <= COURTESIES
