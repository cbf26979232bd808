"""One URL for each primary behind any URL, for tools that must look at every key.

The tiers do not use it: they follow fail-overs and moving slots as they work.
"""

from __future__ import annotations

import time

from elora_connector.tiers.redis_pool import Endpoint
from elora_connector.tiers.redis_sentinel import SentinelEndpoint, endpoint_at
from elora_connector.tiers.redis_slots import read_ranges
from elora_connector.tiers.redis_url import SeveralUrl, Topology, as_redis, topology_of


def check_url(url: str, *login: str | None) -> None:
    """Refuse what the tiers would refuse at start; no I/O.

    Args:
        login: user name, password, CA file, certificate and key, as `Endpoint` takes them.

    Raises:
        ConfigError: the URL, an option in it or a certificate file cannot be used.
    """
    if topology_of(url) is not Topology.CLUSTER:
        endpoint_at(url, *login)
        return
    parsed = SeveralUrl.parse(url)
    for place in parsed.places:
        Endpoint(parsed.server(place), *login)


def primary_urls(url: str, *login: str | None, timeout_s: float) -> list[str]:
    """redis://, rediss:// or unix:// URLs of all primaries as they are now.

    They hold the login that `url` holds; keep them out of logs.

    Raises:
        ConfigError: as from `check_url`.
        StoreError: Sentinels or cluster do not say.
    """
    deadline = time.monotonic() + timeout_s
    if topology_of(url) is Topology.CLUSTER:
        parsed = SeveralUrl.parse(url)
        seeds = [(place, Endpoint(parsed.server(place), *login)) for place in parsed.places]
        owners = {owner for _, _, owner in read_ranges(seeds, deadline)}
        return [parsed.server(owner) for owner in sorted(owners)]
    endpoint = endpoint_at(url, *login)
    if isinstance(endpoint, SentinelEndpoint):
        return [endpoint.primary_url(deadline)]
    return [as_redis(url)]
