"""One URL for each way of running Redis."""

from __future__ import annotations

import pytest

from elora_connector.errors import ConfigError
from elora_connector.tiers.redis_cluster import redis_tier
from elora_connector.tiers.redis_url import (
    SeveralUrl,
    Topology,
    as_redis,
    redact_url,
    topology_of,
)

SECRET = "s3cr3t-Pa55!"


@pytest.mark.parametrize(
    ("url", "kind", "known"),
    [
        ("redis://h", Topology.SINGLE, "redis://h"),
        ("valkey://h", Topology.SINGLE, "redis://h"),
        ("valkeys://valkey://", Topology.SINGLE, "rediss://valkey://"),
        ("unix:///s", Topology.SINGLE, "unix:///s"),
        ("http-cluster://h", Topology.SINGLE, "http-cluster://h"),
        ("redis-sentinel://h/s", Topology.SENTINEL, "redis-sentinel://h/s"),
        ("valkeys-sentinel://h/s", Topology.SENTINEL, "rediss-sentinel://h/s"),
        ("rediss-cluster://h", Topology.CLUSTER, "rediss-cluster://h"),
        ("valkey-cluster://h", Topology.CLUSTER, "redis-cluster://h"),
    ],
)
def test_schemes(url: str, kind: Topology, known: str) -> None:
    assert (topology_of(url), as_redis(url)) == (kind, known)


def test_sentinels() -> None:
    url = SeveralUrl.parse(f"valkeys-sentinel://u:{SECRET}@a:1,[::1]:2,b/kv-1/3?ssl_ciphers=x")
    assert (url.scheme, url.service, url.database) == ("rediss", "kv-1", 3)
    assert url.places == (("a", 1), ("::1", 2), ("b", 26379))
    assert url.server(("::1", 2)) == f"rediss://u:{SECRET}@[::1]:2/3?ssl_ciphers=x"
    assert url.label == "valkeys-sentinel://***@a:1,[::1]:2,b/kv-1/3"
    assert SECRET not in repr(url)
    assert SeveralUrl.parse("redis-sentinel://a/kv").database == 0


def test_clusters() -> None:
    url = SeveralUrl.parse(f"redis-cluster://:{SECRET}@a,b:7001/0")
    assert (url.scheme, url.service, url.database) == ("redis", "", 0)
    assert url.places == (("a", 6379), ("b", 7001))
    assert url.server(("c", 9)) == f"redis://:{SECRET}@c:9/0"
    assert SeveralUrl.parse("rediss-cluster://a").scheme == "rediss"


@pytest.mark.parametrize(
    "rest",
    [
        "-sentinel://u:{}@a:1",
        "-sentinel://u:{}@a:1/",
        "-sentinel://u:{}@a:1/kv/x",
        "-sentinel://u:{}@a:1/kv/0/0",
        "-sentinel://u:{}@a:x/kv",
        "-sentinel://u:{}@a,,b/kv",
        "-sentinel://u:{}@/kv",
        "-sentinel://u:{}@a/kv?socket_timeout=1",
        "-sentinel://u:{}@a/kv?sentinel_password={}&nonsense=1",
        "-cluster://u:{}@",
        "-cluster://u:{}@a/1",
        "-cluster://u:{}@a/kv",
        "-cluster://u:{}@a:999999",
        "-cluster://u:{}@a#b",
        "-cluster://u:{}/x@a?y@b",
        "s-cluster://u:{}@a?ssl_unheard_of=1",
    ],
)
def test_unusable_urls_are_refused_without_being_quoted(rest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        redis_tier("redis" + rest.format(SECRET, SECRET), ttl_s=60)
    assert SECRET not in str(caught.value)
    assert SECRET[:6] not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "redis-sentinel://u:p@a:1,b:2/kv/1?sentinel_password=p",
            "redis-sentinel://***@a:1,b:2/kv/1",
        ),
        ("redis-sentinel://u:p@a,u:p@b/kv", "redis-sentinel://***@b/kv"),
        ("redis-cluster://a,b", "redis-cluster://a,b"),
        ("redis-cluster://u:p@a b", "redis-cluster://***"),
        ("redis://a,b", "redis://***"),
    ],
)
def test_redacted(url: str, shown: str) -> None:
    assert redact_url(url) == shown
