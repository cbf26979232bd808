"""A real engine over a real cluster and a real Sentinel: a fail-over is misses, then hits."""

from __future__ import annotations

from typing import Any

import pytest

from elora_connector.tiers.base import Health, ValueSpec
from elora_connector.tiers.redis_cluster import ClusterTier
from tests.support.engine import engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.redis_groups import ClusterServers, SentinelServers
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = [pytest.mark.engine, pytest.mark.redis]

LENGTH = 520
HIT = 512
SETTINGS = {
    "elora.remote.operation_timeout_ms": 2000,
    "elora.remote.connect_timeout_ms": 2000,
    "elora.shutdown_flush_s": 0.5,
}


def replicated(server: RedisServer) -> None:
    with server.client() as client:
        assert client.execute_command("WAIT", 1, 5000) == 1


def test_case_13_a_cluster_loses_a_node(
    tiny: TinyModel, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = ClusterTier.write

    def spy(self: ClusterTier, spec: ValueSpec, payload: memoryview) -> Any:
        written.append(spec.key)
        return write(self, spec, payload)

    monkeypatch.setattr(ClusterTier, "write", spy)
    text, civil = prompt(800, LENGTH), lora("civil", 1, tiny.adapters["civil"])
    want = oracle(text, civil.lora_path)
    with (
        ClusterServers(replicas=1) as servers,
        engine(tiny.model, SETTINGS | {"lmcache.remote_url": servers.url}) as live,
    ):
        answer = live.ask(text, civil)
        assert (answer.tokens, answer.cached) == (want, 0)
        live.forget_host()
        assert len(written) == 8
        victim = servers.primaries[0]
        lost = [servers.primary_of(key) is victim for key in written]
        assert any(lost)
        replicated(victim)
        answer = live.ask(text, civil)
        assert (answer.tokens, answer.cached) == (want, HIT)

        victim.kill()
        live.forget_host()
        answer = live.ask(text, civil)
        assert (answer.tokens, answer.cached) == (want, 64 * lost.index(True))
        live.step()
        assert live.gauge("remote_degraded") == 1
        assert Health.PARTIAL in {tier.health() for tier in live.tiers()}

        live.until(live.remote_answers)
        live.forget_host()
        answer = live.ask(text, civil)
        assert (answer.tokens, answer.cached) == (want, HIT)
        live.step()
        assert live.gauge("remote_degraded") == 0
        assert live.total("failed_requests") == live.total("load_failures") == 0


def test_case_13_a_sentinel_fails_over(tiny: TinyModel, oracle: Oracle) -> None:
    text, civil = prompt(801, LENGTH), lora("civil", 1, tiny.adapters["civil"])
    want = oracle(text, civil.lora_path)
    with (
        SentinelServers() as servers,
        engine(tiny.model, SETTINGS | {"lmcache.remote_url": servers.url}) as live,
    ):
        assert live.ask(text, civil).tokens == want
        live.forget_host()
        replicated(servers.primary)
        servers.primary.kill()
        answer = live.ask(text, civil)
        assert (answer.tokens, answer.cached) == (want, 0)
        assert live.total("remote_errors") >= 1
        live.until(live.remote_answers)
        assert servers.named() == servers.replica.port
        live.forget_host()
        answer = live.ask(text, civil)
        assert (answer.tokens, answer.cached) == (want, HIT)
        assert live.total("failed_requests") == live.total("load_failures") == 0
