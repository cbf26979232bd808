from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.filling import Filler, Ran, run_elora
from tests.support.redis_server import RedisServer, find_redis_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisServer]:
    """One healthy server; `server` empties it for every test."""
    if find_redis_server() is None:
        pytest.skip("no redis-server here")
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.client() as admin:
        admin.flushall()
        admin.config_resetstat()
    return shared_server


@pytest.fixture
def filler(server: RedisServer) -> Iterator[Filler]:
    with Filler(server.url) as made:
        yield made


@pytest.fixture
def elora(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run the command in this process, without the machine's own configuration."""
    for name in ("ELORA_CONFIG_FILE", "LMCACHE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    # On a busy machine even a healthy server may take its time.
    monkeypatch.setenv("ELORA_REMOTE_CONNECT_TIMEOUT_MS", "10000")
    monkeypatch.setenv("ELORA_REMOTE_OPERATION_TIMEOUT_MS", "10000")

    def run(*arguments: Any, **kwargs: Any) -> Ran:
        return run_elora([str(a) for a in arguments], **kwargs)

    return run
