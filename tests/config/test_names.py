"""Unknown, misspelt and foreign names in each source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elora_connector.config import load_config
from elora_connector.config.lmcache_keys import KEYS
from elora_connector.config.settings import SETTINGS
from elora_connector.errors import ConfigError

Write = Callable[..., str]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("chunk_sise: 64", "did you mean chunk_size?"),
        ("Chunk_Size: 64", "did you mean chunk_size?"),
        ("max_local_cpu: 5", "did you mean max_local_cpu_size?"),
        ("sync_load_ms: 5", "did you mean elora.sync_load_ms? It goes under `extra_config"),
        ("ttl_s: 5", "did you mean elora.remote.ttl_s? It goes under `extra_config"),
        ("elora: {engines: 2}", "our own settings go under `extra_config: {elora: {...}}`"),
        ("elora.engines: 2", "our own settings go under `extra_config: {elora: {...}}`"),
        ("extra_config: {elora: {sync_laod_ms: 5}}", "did you mean elora.sync_load_ms?"),
        ("extra_config: {elora: {remote: {ttl: 5}}}", "did you mean elora.remote.ttl_s?"),
        ("extra_config: {elora: {ttl_s: 5}}", "did you mean elora.remote.ttl_s?"),
        ("extra_config: {elora: {chunk_size: 5}}", "did you mean chunk_size?"),
        ("extra_config: {elroa: {engines: 2}}", "unknown section extra_config.elroa"),
        ("extra_config: {Elora: {engines: 2}}", "did you mean elora?"),
        ("extra_config: {elora: {remote: {limit: 5}}}", "unknown setting elora.remote.limit"),
        ("1: 2", "unknown setting 1 in"),
    ],
)
def test_unknown_in_a_file(write_file: Write, text: str, hint: str) -> None:
    path = write_file(text)
    with pytest.raises(ConfigError) as caught:
        load_config({"LMCACHE_CONFIG_FILE": path}, {})
    assert "unknown" in str(caught.value)
    assert hint in str(caught.value)
    assert path in str(caught.value)


def test_nothing_is_suggested_for_a_name_like_no_other(write_file: Write) -> None:
    path = write_file("zzz: 1")
    with pytest.raises(ConfigError, match=r"unknown setting zzz in .*elora\.yaml$"):
        load_config({"LMCACHE_CONFIG_FILE": path}, {})


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("chunk_size", "did you mean lmcache.chunk_size?"),
        ("chunk_sze", "did you mean lmcache.chunk_size?"),
        ("residency", "did you mean elora.residency?"),
        ("lmcache.chunksize", "did you mean lmcache.chunk_size?"),
        ("elora.chunk_size", "did you mean lmcache.chunk_size?"),
        ("lmcache.residency", "did you mean elora.residency?"),
        ("elora.remote.tls", "unknown entry elora.remote.tls in kv_connector_extra_config"),
        ("elora.ttl_s", "did you mean elora.remote.ttl_s?"),
        ("something", "unknown entry something in kv_connector_extra_config"),
    ],
)
def test_unknown_connector_entry(entry: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, {entry: 1})
    assert hint in str(caught.value)


def test_connector_entries_of_others_are_left_alone() -> None:
    config = load_config({}, {"other.setting": 1, "nixl.port": 2})
    assert config == load_config({}, {})
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("ELORA_CHUNK_SISE", "did you mean ELORA_CHUNK_SIZE?"),
        ("ELORA_TTL_S", "did you mean ELORA_REMOTE_TTL_S?"),
        ("ELORA_ZZZ", "unknown setting ELORA_ZZZ in the environment"),
    ],
)
def test_unknown_elora_variable_is_an_error(variable: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({variable: "1"}, {})
    assert hint in str(caught.value)


def test_unknown_lmcache_variable_is_a_warning() -> None:
    config = load_config({"LMCACHE_CHUNK_SISE": "64"}, {})
    assert config.chunk_size == 256
    assert config.warnings == (
        (
            "unknown variable LMCACHE_CHUNK_SISE in the environment is ignored; "
            "did you mean LMCACHE_CHUNK_SIZE?"
        ),
    )


@pytest.mark.parametrize(
    "variable",
    [
        "LMCACHE_TRACK_USAGE",
        "LMCACHE_LOG_LEVEL",
        "LMCACHE_CONTROLLER_URL",
        "LMCACHE_SERVICE_HOST",
        "LMCACHE_PORT_80_TCP",
        "ELORA_SERVICE_HOST",
        "ELORA_REDIS_SERVICE_PORT",
        "ELORA_SERVICE_PORT_HTTP",
        "ELORA_PORT",
        "ELORA_PORT_6379_TCP",
        "ELORA_PORT_6379_TCP_ADDR",
        "PATH",
        "XELORA_Y",
    ],
)
def test_variables_that_are_no_settings(variable: str) -> None:
    assert load_config({variable: "1"}, {}).warnings == ()


def test_no_setting_looks_like_a_kubernetes_variable() -> None:
    for setting in SETTINGS.values():
        for variable in setting.variables:
            assert not variable.endswith(("_PORT", "_SERVICE_HOST"))


def test_unsupported_lmcache_settings_share_one_warning(write_file: Write) -> None:
    path = write_file("local_disk: /tmp\nenable_pd: true\nec_role: producer\nchunk_size: 64")
    env = {"LMCACHE_CONFIG_FILE": path, "LMCACHE_USE_LAYERWISE": "true", "LMCACHE_EC_X": "1"}
    extra: dict[str, Any] = {
        "lmcache.enable_p2p": True,
        "lmcache.mp.port": 5555,
        "lmcache_rpc_port": "a",
    }
    config = load_config(env | {"LMCACHE_FORCE_SKIP_SAVE": "1"}, extra)

    (warning,) = config.warnings
    for name in ("local_disk", "enable_pd", "ec_role"):
        assert f"{name} (file {path})" in warning
    for name in ("LMCACHE_USE_LAYERWISE", "LMCACHE_EC_X", "LMCACHE_FORCE_SKIP_SAVE"):
        assert f"env {name}" in warning
    for name in ("lmcache.enable_p2p", "lmcache.mp.port", "lmcache_rpc_port"):
        assert f"{name} (kv_connector_extra_config)" in warning
    assert "chunk_size" not in warning


def test_every_shared_setting_is_one_of_lmcaches() -> None:
    assert {key for key, setting in SETTINGS.items() if not setting.own} <= KEYS


def test_own_setting_beside_the_elora_section_is_pointed_out() -> None:
    config = load_config({}, {"lmcache.extra_config": {"sync_load_ms": 1, "ping_timeout": 5}})
    (warning,) = config.warnings
    assert "extra_config.sync_load_ms" in warning
    assert "did you mean extra_config.elora.sync_load_ms?" in warning
    assert config.sync_load_ms == 5.0
