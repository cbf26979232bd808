"""Credentials: every way to give them, and no way for them to leak."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.config import load_config
from elora_connector.config.redact import redact_url
from elora_connector.errors import ConfigError

KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://u:p@h:6379/0", "redis://***@h:6379/0"),
        ("redis://:p@ss/w:rd@h:6379", "redis://***@h:6379"),
        ("redis-sentinel://u:p@a:1,u:p@b:2/m", "redis-sentinel://***@b:2/m"),
        ("redis:u:p@h", "***@h"),
        ("redis://h?db=1&password=p&x=2", "redis://h?db=1&password=***&x=2"),
        ("s3://h?sas_token=p;b=1", "s3://h?sas_token=***;b=1"),
    ],
)
def test_redact_url(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@given(st.text(min_size=1).map(lambda text: f"<{text}>"))
def test_password_never_survives_redaction(password: str) -> None:
    assert password not in redact_url(f"redis://user:{password}@host:6379/0")


def test_nothing_shows_a_secret() -> None:
    env = {
        "LMCACHE_REMOTE_URL": "redis://user:hunter2@h:6379",
        "ELORA_REMOTE_PASSWORD": "hunter2",
        "ELORA_REMOTE_MAC_KEY_ENV": "MAC",
        "MAC": "hunter2" * 3,
        "LMCACHE_EXTRA_CONFIG": '{"aws_secret_access_key": "hunter2", "password": "hunter2"}',
    }
    config = load_config(env, {})
    assert config.remote.password == "hunter2"
    assert config.remote_url == "redis://user:hunter2@h:6379"
    for text in (config.describe(), repr(config), str(config), repr(config.remote)):
        assert "hunter2" not in text
    assert "remote_url = redis://***@h:6379  [env LMCACHE_REMOTE_URL]" in config.describe()
    assert "elora.remote.password = ***  [env ELORA_REMOTE_PASSWORD]" in config.describe()
    assert "extra_config = {aws_secret_access_key, password}" in config.describe()


def test_bad_values_do_not_show_a_secret() -> None:
    for extra in (
        {"lmcache.remote_url": "user:hunter2@h"},
        {"elora.remote.password": ["hunter2"]},
        {"elora.remote.password_env": "hunter2"},
        {"elora.remote.mac_key_env": "hunter2"},
        {"lmcache.extra_config": '{"password": "hunter2"'},
        {"lmcache.extra_config": ["hunter2"]},
    ):
        with pytest.raises(ConfigError) as caught:
            load_config({}, extra)
        assert "hunter2" not in str(caught.value)


def test_credentials_in_order_of_rank() -> None:
    env = {"LMCACHE_RESP_USERNAME": "resp", "LMCACHE_RESP_PASSWORD": "resp"}
    config = load_config(env, {})
    assert (config.remote.username, config.remote.password) == ("resp", "resp")
    assert config.origin("remote.password") == "env LMCACHE_RESP_PASSWORD"

    env["LMCACHE_EXTRA_CONFIG"] = '{"username": "extra", "password": "extra"}'
    config = load_config(env, {})
    assert (config.remote.username, config.remote.password) == ("extra", "extra")

    env["LMCACHE_EXTRA_CONFIG"] = '{"password": "extra", "elora": {"remote": {"password": "own"}}}'
    assert load_config(env, {}).remote.password == "own"
    assert load_config(env, {}).remote.username == "resp"


def test_general_variables_do_not_replace_credentials_of_the_address() -> None:
    env = {"LMCACHE_RESP_PASSWORD": "resp", "LMCACHE_REMOTE_URL": "redis://:own@h:1"}
    assert load_config(env, {}).remote.password is None


def test_password_from_a_variable() -> None:
    env = {"ELORA_REMOTE_PASSWORD_ENV": "REDIS_PW", "REDIS_PW": " hunter2 "}
    config = load_config(env, {})
    assert config.remote.password == " hunter2 "
    assert config.origin("remote.password") == "env REDIS_PW"


@pytest.mark.parametrize("key", ["password_env", "mac_key_env"])
@pytest.mark.parametrize("env", [{}, {"PW": ""}])
def test_variable_that_is_not_set(key: str, env: dict[str, str]) -> None:
    message = f"elora.remote.{key} = 'PW': expected the name of a variable that is set"
    with pytest.raises(ConfigError, match=message):
        load_config(env, {f"elora.remote.{key}": "PW"})


def test_password_given_twice() -> None:
    env = {"ELORA_REMOTE_PASSWORD": "a", "PW": "b"}
    with pytest.raises(ConfigError, match="expected only one of the two"):
        load_config(env, {"elora.remote.password_env": "PW"})
    extra = {"elora.remote.password_env": "ELORA_REMOTE_PASSWORD"}
    assert load_config(env, extra).remote.password == "a"


@pytest.mark.parametrize("name", ["ELORA_SECRET", "LMCACHE_SECRET"])
def test_variables_that_hold_secrets_may_have_our_prefix(name: str) -> None:
    env = {"ELORA_REMOTE_MAC_KEY_ENV": name, "ELORA_REMOTE_PASSWORD_ENV": name, name: KEY}
    config = load_config(env, {})
    assert (config.remote.password, config.remote.mac_key) == (KEY, KEY.encode())
    assert config.warnings == ()


def test_short_mac_key() -> None:
    with pytest.raises(ConfigError, match=r"at least 16 bytes .*found 15") as caught:
        load_config({"MAC": KEY[:15]}, {"elora.remote.mac_key_env": "MAC"})
    assert KEY[:15] not in str(caught.value)


def test_no_mac_key_by_default() -> None:
    assert load_config({}, {}).remote.mac_key is None


def test_config_is_frozen_hashable_and_can_be_copied() -> None:
    config = load_config({}, {"lmcache.extra_config": {"a": {"b": 1}}})
    with pytest.raises(AttributeError):
        config.chunk_size = 1  # type: ignore[misc]
    assert hash(config) == hash(load_config({}, {}))
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
