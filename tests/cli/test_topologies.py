"""The commands over a cluster, over Sentinels, a socket file and another database."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator

import pytest

from elora_connector.cli import doctor
from elora_connector.cli.checks import ok
from tests.cli.filling import Filler, Ran, identity
from tests.support.proxy import TlsProxy
from tests.support.redis_groups import ClusterServers, SentinelServers
from tests.support.redis_server import RedisServer, find_redis_server

pytestmark = pytest.mark.redis
Elora = Callable[..., Ran]
WHO, LEGAL = identity("civil"), identity("legal")
SMALL = '{"lmcache.max_local_cpu_size": 0.1}'


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServers]:
    if find_redis_server() is None:
        pytest.skip("no redis-server here")
    with ClusterServers() as servers:
        yield servers


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_vllm", "check_device"):
        monkeypatch.setattr(doctor, name, lambda: ok("vllm", "as if"))


def round_of_commands(elora: Elora, url: str) -> None:
    """Everything that the commands do to a store, with exact counts."""
    with Filler(url) as filler:
        filler.chain(WHO, 40)
        filler.chain(LEGAL, 20)
        assert elora("inspect", "--url", url, "--json").json["totals"]["chunks"] == 60
        found = elora("verify", "--url", url, "--json").json
        assert (found["good"], found["bad"], found["parentless"]) == (60, 0, 0)
        ran = elora("doctor", "--url", url, "--extra", SMALL, "--json")
        assert ran.code == 0, ran.out
        assert {c["name"]: c["status"] for c in ran.json["checks"]}["throughput"] == "ok"
        gone = elora("purge", "--url", url, "--adapter", "civil", "--yes", "--json").json
        assert (gone["removed"], gone["left"]) == (40, 0)
        after = elora("inspect", "--url", url, "--json").json
        assert [group["adapter"] for group in after["groups"]] == [str(LEGAL)]
        assert elora("purge", "--url", url, "--adapter", "legal", "--yes").code == 0


@pytest.mark.usefixtures("quick_doctor")
def test_a_cluster(elora: Elora, cluster: ClusterServers) -> None:
    round_of_commands(elora, cluster.url)
    seed = f"redis-cluster://127.0.0.1:{cluster.primaries[1].port}"
    assert elora("inspect", "--url", seed).code == 0
    ran = elora("doctor", "--url", cluster.url, "--extra", SMALL, "--no-write", "--json")
    names = [check["name"] for check in ran.json["checks"]]
    assert [name for name in names if name.startswith("latency")] == [
        "latency 1",
        "latency 2",
        "latency 3",
    ]


@pytest.mark.usefixtures("quick_doctor")
def test_sentinels(elora: Elora) -> None:
    with SentinelServers() as servers:
        round_of_commands(elora, servers.url)
        assert elora("inspect", "--url", servers.url + "x").code == 1


@pytest.mark.usefixtures("quick_doctor")
def test_a_socket_and_another_database(elora: Elora) -> None:
    with RedisServer(unix_socket=True) as server:
        round_of_commands(elora, server.unix_url)
        round_of_commands(elora, server.url[:-1] + "3")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return cert, key


@pytest.mark.usefixtures("quick_doctor")
def test_tls(
    elora: Elora,
    server: RedisServer,
    filler: Filler,
    certificate: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    filler.chain(WHO, 3)
    with TlsProxy(server.port, context) as proxy:
        arguments = ["doctor", "--url", proxy.url, "--extra", SMALL, "--json"]
        unknown = elora(*arguments)
        assert (unknown.code, unknown.json["checks"][-1]["facts"]) == (1, {"reason": "tls"})
        assert "ca_file" in unknown.json["checks"][-1]["advice"]
        monkeypatch.setenv("ELORA_REMOTE_CA_FILE", certificate[0])
        trusted = elora(*arguments)
        assert trusted.code == 0
        details = {check["name"]: check["detail"] for check in trusted.json["checks"]}
        assert details["encryption"].startswith(f"TLS, checked against {certificate[0]}")
        assert elora("verify", "--url", proxy.url, "--json").json["good"] == 3
        monkeypatch.delenv("ELORA_REMOTE_CA_FILE")
        plain = elora("inspect", "--url", proxy.url.replace("rediss", "redis"))
        assert plain.code == 1
        assert "rediss://" in plain.err


def test_settings_beat_the_login_of_the_address(
    elora: Elora, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD_OF_TESTS", "right")
    monkeypatch.setenv("ELORA_REMOTE_PASSWORD_ENV", "PASSWORD_OF_TESTS")
    with RedisServer(requirepass="right") as server:
        url = server.url.replace("://", "://:wrong@")
        assert elora("inspect", "--url", url).code == 0


@pytest.mark.parametrize(
    "url", ["redis-cluster://h:1/5", "redis-sentinel://h:1", "redis-cluster://u:p@h:x"]
)
def test_addresses_that_cannot_be_used(elora: Elora, url: str) -> None:
    ran = elora("inspect", "--url", url)
    assert ran.code == 2
    assert "u:p" not in ran.err
