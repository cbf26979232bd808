from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis_server import RedisServer, find_redis_server
from tests.tiers.values import MemoryStore, RedisStore, Store


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisServer]:
    """One healthy server for all tests that do not break it."""
    if find_redis_server() is None:
        pytest.skip("no redis-server here")
    with RedisServer(unix_socket=True) as server:
        yield server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of one's own, to be broken."""
    if find_redis_server() is None:
        pytest.skip("no redis-server here")
    with RedisServer() as own:
        yield own


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore()
    else:
        made = RedisStore(request.getfixturevalue("shared_server"))
    yield made
    made.close()
