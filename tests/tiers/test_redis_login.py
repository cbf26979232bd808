"""Addresses, logins and TLS: they work, or one clear message names the cause (case 15)."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.errors import ConfigError
from elora_connector.tiers.base import Health, Outcome
from elora_connector.tiers.redis import RedisTier, redact_url
from elora_connector.tiers.redis_failure import StoreError
from tests.support.proxy import ScriptedServer, TlsProxy
from tests.support.redis_server import RedisServer, find_redis_server
from tests.tiers.values import make_spec, payload_of

pytestmark = pytest.mark.redis

USER, PASSWORD = "hunter-of-tests", "s3cr3t-Pa55!"
SPEC = make_spec()

Connect = Callable[..., RedisTier]


@pytest.fixture
def connect(caplog: pytest.LogCaptureFixture) -> Iterator[Connect]:
    caplog.set_level(logging.DEBUG)
    made: list[RedisTier] = []

    def make(url: str, **kwargs: Any) -> RedisTier:
        options = {"ttl_s": 60, "connect_timeout_s": 20.0, "operation_timeout_s": 20.0}
        made.append(RedisTier(url, **(options | kwargs)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A server with a password, one full user and one who may only do what the tier needs."""
    if find_redis_server() is None:
        pytest.skip("no redis-server here")
    least = ["+get", "+set", "+exists", "+expire", "+del"]
    users = {
        USER: [f">{PASSWORD}", "~*", "+@all"],
        "least": [f">{PASSWORD}", "~elora:*", *least],
        "reader": [f">{PASSWORD}", "~elora:*", "+get", "+exists"],
    }
    with RedisServer(requirepass=PASSWORD, users=users) as server:
        yield server


def works(tier: RedisTier) -> bool:
    dest = bytearray(SPEC.nbytes)
    return (
        tier.write(SPEC, memoryview(payload_of(SPEC))).ok
        and tier.read_into(SPEC, memoryview(dest)).ok
        and dest == payload_of(SPEC)
        and tier.leading([[SPEC.key]]).count == 1
        and tier.refresh([SPEC.key]).ok
    )


def refusal(connect: Connect, url: str, caplog: pytest.LogCaptureFixture, **kwargs: Any) -> str:
    """The message of a failed start, which must be the only log line when failing open."""
    with pytest.raises(ConfigError) as caught:
        connect(url, fail_open=False, **kwargs)
    caplog.clear()
    tier = connect(url, **kwargs)
    assert tier.health() is not Health.CLOSED
    assert tier.leading([[SPEC.key]]).outcome is Outcome.ERROR
    tier.close()
    assert len(caplog.records) == 1
    shown = [str(caught.value), repr(caught.value), repr(tier), caplog.text]
    for text in shown:
        assert PASSWORD not in text
        assert USER not in text
    return str(caught.value)


def with_login(server: RedisServer, user: str, password: str) -> str:
    return server.url.replace("://", f"://{user}:{password}@")


# Ways in.


def test_login_in_the_url_or_beside_it(guarded: RedisServer, connect: Connect) -> None:
    assert works(connect(with_login(guarded, USER, PASSWORD)))
    assert works(connect(guarded.url, username=USER, password=PASSWORD))
    assert works(connect(guarded.url, password=PASSWORD))
    assert works(connect(with_login(guarded, "x", "y"), username=USER, password=PASSWORD))


def test_least_privileges_are_enough(guarded: RedisServer, connect: Connect) -> None:
    """Neither PING nor CLIENT SETNAME is needed."""
    tier = connect(guarded.url, username="least", password=PASSWORD, fail_open=False)
    assert works(tier)
    assert tier.ping() >= 0.0


def test_a_reader_may_read(guarded: RedisServer, connect: Connect) -> None:
    assert works(connect(guarded.url, password=PASSWORD))
    tier = connect(guarded.url, username="reader", password=PASSWORD)
    other = make_spec(1)
    assert tier.write(other, memoryview(payload_of(other))).reason == "auth"
    assert tier.refresh([SPEC.key]).reason == "auth"
    assert tier.read_into(SPEC, memoryview(bytearray(SPEC.nbytes))).ok
    assert tier.health() is Health.CLOSED


def test_unix_socket_and_database(shared_server: RedisServer, connect: Connect) -> None:
    assert works(connect(shared_server.unix_url))
    assert works(connect(shared_server.url[:-1] + "3"))
    with shared_server.client(db=3) as admin:
        assert admin.keys() == [SPEC.key.encode()]
        admin.flushall()


# Wrong logins.


@pytest.mark.parametrize(("user", "word"), [(USER, "wrong"), ("default", "wrong")])
def test_wrong_password(
    guarded: RedisServer,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    user: str,
    word: str,
) -> None:
    message = refusal(connect, with_login(guarded, user, "not" + PASSWORD), caplog)
    assert "wrong user or password" in message


def test_missing_password(
    guarded: RedisServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    assert "requires a login" in refusal(connect, guarded.url, caplog)


def test_password_where_none_is_set(
    shared_server: RedisServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    message = refusal(connect, shared_server.url, caplog, password=PASSWORD)
    assert "server has none set" in message


def test_a_database_that_does_not_exist(
    shared_server: RedisServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    assert "error reply" in refusal(connect, shared_server.url[:-1] + "99", caplog)


def test_a_server_that_echoes_the_login(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Redis quotes the arguments of a command it does not know, also those of AUTH."""
    echo = f"-ERR unknown command `AUTH`, with args beginning with: `{USER}`, `{PASSWORD}`\r\n"
    with ScriptedServer(echo.encode()) as stub:
        url = f"redis://{USER}:{PASSWORD}@127.0.0.1:{stub.port}"
        assert "refused the login" in refusal(connect, url, caplog)


# TLS.


def test_tls_with_its_ca(
    shared_server: RedisServer,
    connect: Connect,
    certificate: tuple[str, str],
    context: ssl.SSLContext,
) -> None:
    with TlsProxy(shared_server.port, context) as proxy:
        tier = connect(proxy.url, ssl_ca=certificate[0], fail_open=False)
        assert works(tier)
        large = make_spec(5, nbytes=3_000_000)
        assert tier.write(large, memoryview(payload_of(large))).ok
        dest = bytearray(large.nbytes)
        assert tier.read_into(large, memoryview(dest)).ok
        assert dest == payload_of(large)
        assert proxy.connections == 1
    with shared_server.client() as admin:
        admin.flushall()


def test_tls_with_a_client_certificate(
    shared_server: RedisServer, connect: Connect, certificate: tuple[str, str]
) -> None:
    """As with `tls-auth-clients yes`: whoever has none is turned away, and is told so."""
    strict = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    strict.load_cert_chain(*certificate)
    strict.verify_mode = ssl.CERT_REQUIRED
    strict.load_verify_locations(certificate[0])
    cert, key = certificate
    with TlsProxy(shared_server.port, strict) as proxy:
        url = proxy.url.replace("rediss://", "valkeys://")
        tier = connect(url, ssl_ca=cert, ssl_cert=cert, ssl_key=key, fail_open=False)
        assert works(tier)
        # Where the server has closed before its alert was read, there is only an end.
        with pytest.raises(ConfigError, match=r"it may ask for a certificate|EOF occurred"):
            connect(proxy.url, ssl_ca=cert, fail_open=False)
    with shared_server.client() as admin:
        admin.flushall()


def test_tls_with_an_unknown_ca(
    shared_server: RedisServer,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    context: ssl.SSLContext,
) -> None:
    with TlsProxy(shared_server.port, context) as proxy:
        message = refusal(connect, proxy.url, caplog)
    assert "certificate is not accepted" in message
    assert "CA file" in message


def test_tls_for_another_host(
    shared_server: RedisServer,
    connect: Connect,
    certificate: tuple[str, str],
    context: ssl.SSLContext,
) -> None:
    with TlsProxy(shared_server.port, context) as proxy:
        url = proxy.url.replace("127.0.0.1", "127.0.0.2")
        proxy.listen_on("127.0.0.2")
        with pytest.raises(ConfigError, match="certificate is not accepted"):
            connect(url, ssl_ca=certificate[0], fail_open=False)
        lenient = f"{url}?ssl_check_hostname=false"
        assert works(connect(lenient, ssl_ca=certificate[0], fail_open=False))


@pytest.mark.parametrize("login", ["", f"{USER}:{PASSWORD}@"])
def test_plain_client_at_a_tls_port(
    shared_server: RedisServer,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    context: ssl.SSLContext,
    login: str,
) -> None:
    with TlsProxy(shared_server.port, context) as proxy:
        url = proxy.url.replace("rediss://", f"redis://{login}")
        assert "rediss://" in refusal(connect, url, caplog)


@pytest.mark.parametrize("login", ["", f"{USER}:{PASSWORD}@"])
def test_tls_client_at_a_plain_port(
    shared_server: RedisServer, connect: Connect, caplog: pytest.LogCaptureFixture, login: str
) -> None:
    url = shared_server.url.replace("redis://", f"rediss://{login}")
    message = refusal(connect, url, caplog, connect_timeout_s=0.5)
    assert "seems not to speak TLS" in message


def test_a_plain_port_that_answers_the_handshake(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedServer(b"-ERR unknown command\r\n") as stub:
        message = refusal(connect, f"rediss://127.0.0.1:{stub.port}", caplog)
    assert "seems not to speak TLS" in message


def test_a_port_that_closes_at_once(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedServer(b"") as stub:
        stub.hang_up = True
        message = refusal(connect, f"redis://127.0.0.1:{stub.port}", caplog)
    assert "expects TLS" in message


# Settings.


@pytest.mark.parametrize(
    "url",
    [
        f"http://{USER}:{PASSWORD}@host",
        f"{USER}:{PASSWORD}@host:6379",
        f"redis://{USER}:{PASSWORD}@host:port/0",
        f"redis://{USER}:{PASSWORD}/x@host:6379",
        f"redis://{USER}:{PASSWORD}#x@host:6379",
        f"redis://{USER}:{PASSWORD}?x@host:6379",
        f"redis://:{PASSWORD}",
        f"redis://{USER}:{PASSWORD}@host:6379/mydb",
        f"redis://host/0?password={PASSWORD}&username={USER}&db=x",
        f"redis://{USER}:{PASSWORD}@host?decode_responses=yes",
        f"redis://{USER}:{PASSWORD}@host?socket_timeout=1",
        f"rediss://{USER}:{PASSWORD}@host?ssl_cert_reqs=maybe",
        f"rediss://{USER}:{PASSWORD}@host?ssl_unheard_of=1",
        f"unix://{USER}:{PASSWORD}?x@/run/redis.sock",
        f"redis://{USER}:{PASSWORD}@[::1/0",
        "",
    ],
)
def test_unusable_urls_are_refused_without_being_quoted(connect: Connect, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for part in (USER, PASSWORD, PASSWORD[:6]):
        assert part not in str(caught.value)


def test_certificate_settings_are_checked_at_start(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        connect("rediss://127.0.0.1:1", ssl_ca=str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match="not a rediss:// URL"):
        connect("redis://127.0.0.1:1", ssl_ca=__file__)
    with pytest.raises(ConfigError, match="certificate"):
        connect("rediss://127.0.0.1:1", ssl_ca=__file__)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://", "redis://"),
        ("redis://u:p@localhost", "redis://***@localhost"),
        ("rediss://:p@[::1]:6380/2?ssl_cert_reqs=none", "rediss://***@[::1]:6380/2"),
        ("redis://token@h", "redis://***@h"),
        ("unix:///run/redis.sock?password=p", "unix:///run/redis.sock"),
        ("unix://u:p@/run/redis.sock?db=1", "unix://***@/run/redis.sock"),
    ],
)
def test_redacted_urls(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@given(
    scheme=st.sampled_from(["redis", "rediss", "unix"]),
    user=st.text(alphabet=st.characters(codec="ascii"), max_size=8),
    secret=st.text(alphabet=st.characters(codec="ascii"), max_size=12),
    place=st.sampled_from(["host:6379/0", "/run/redis.sock", "host?db=1", "host#x", ""]),
)
def test_redaction_shows_no_secret_however_badly_quoted(
    scheme: str, user: str, secret: str, place: str
) -> None:
    marked = f"<{secret}>"
    shown = redact_url(f"{scheme}://{user}:{marked}@{place}")
    assert "<" not in shown
    assert ">" not in shown
    assert re.fullmatch(rf"{scheme}://(\*\*\*(@.*)?)?", shown, re.DOTALL)


def test_the_state_of_a_tier_can_be_printed(
    shared_server: RedisServer, connect: Connect, guarded: RedisServer
) -> None:
    tier = connect(with_login(guarded, USER, PASSWORD))
    for shown in (repr(tier), str(tier), repr(tier._endpoint)):
        assert PASSWORD not in shown
        assert USER not in shown
    assert f"127.0.0.1:{guarded.port}" in repr(tier)


def test_ping_says_why(guarded: RedisServer, connect: Connect) -> None:
    assert connect(with_login(guarded, USER, PASSWORD)).ping() > 0.0
    tier = connect(with_login(guarded, USER, "no"))
    with pytest.raises(StoreError, match="wrong user or password") as caught:
        tier.ping()
    assert caught.value.reason == "auth"
