"""Which source wins, and what `origin` says about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.config import load_config
from elora_connector.config.settings import SETTINGS
from elora_connector.errors import ConfigError

Write = Callable[..., str]


def test_defaults_come_from_the_table() -> None:
    config = load_config({}, {})

    assert config.chunk_size == 256
    assert config.save_decode_cache is True
    assert config.cache_policy == "ELORA"
    assert config.cost_model.tau_s == 60
    assert config.load_or_recompute.enabled is True
    assert config.remote.ttl_s == 86400
    assert config.fetch_deadline_ms == 10_000
    assert config.warnings == ()
    assert {config.origin(key) for key in SETTINGS} == {"default"}


def test_each_source_wins_over_the_one_before(write_file: Write) -> None:
    path = write_file("chunk_size: 16")
    env: dict[str, str] = {"LMCACHE_CONFIG_FILE": path}
    assert load_config(env, {}).chunk_size == 16
    assert load_config(env, {}).origin("chunk_size") == f"file {path}"

    env["LMCACHE_CHUNK_SIZE"] = "32"
    assert load_config(env, {}).chunk_size == 32
    assert load_config(env, {}).origin("chunk_size") == "env LMCACHE_CHUNK_SIZE"

    env["ELORA_CHUNK_SIZE"] = "48"
    assert load_config(env, {}).chunk_size == 48
    assert load_config(env, {}).origin("chunk_size") == "env ELORA_CHUNK_SIZE"

    config = load_config(env, {"lmcache.chunk_size": 64})
    assert config.chunk_size == 64
    assert config.origin("chunk_size") == "kv_connector_extra_config"


def test_own_setting_through_every_source(write_file: Write) -> None:
    path = write_file("extra_config: {elora: {remote: {ttl_s: 1}, residency: host}}")
    env: dict[str, str] = {"ELORA_CONFIG_FILE": path}
    config = load_config(env, {})
    assert (config.remote.ttl_s, config.residency) == (1, "host")
    assert config.origin("elora.remote.ttl_s") == config.origin("remote.ttl_s") == f"file {path}"

    env["ELORA_REMOTE_TTL_S"] = "2"
    assert load_config(env, {}).remote.ttl_s == 2
    assert load_config(env, {}).residency == "host"

    for extra in (
        {"elora.remote.ttl_s": 3},
        {"elora": {"remote": {"ttl_s": 3}}},
        {"elora.remote": {"ttl_s": 3}},
        {"lmcache.extra_config": {"elora": {"remote": {"ttl_s": 3}}}},
    ):
        assert load_config(env, extra).remote.ttl_s == 3


def test_single_entry_wins_over_extra_config_of_the_same_source(write_file: Write) -> None:
    section = {"elora": {"engines": 2}}
    env = {"LMCACHE_EXTRA_CONFIG": json.dumps(section), "ELORA_ENGINES": "3"}
    assert load_config(env, {}).engines == 3
    extra = {"elora.engines": 4, "lmcache.extra_config": section}
    assert load_config({}, extra).engines == 4


def test_extra_config_is_replaced_whole_and_that_is_said(write_file: Write) -> None:
    path = write_file("extra_config: {elora: {engines: 2, residency: host}, resp_num_threads: 3}")
    env = {
        "LMCACHE_CONFIG_FILE": path,
        "LMCACHE_EXTRA_CONFIG": '{"elora": {"engines": 5}, "ping_timeout": 1}',
    }
    config = load_config(env, {})

    assert (config.engines, config.residency) == (5, "gpu")
    assert config.extra_config == {"elora": {"engines": 5}, "ping_timeout": 1}
    assert config.warnings == (
        f"extra_config from env LMCACHE_EXTRA_CONFIG replaces that from file {path} whole",
    )


@pytest.mark.parametrize("text", ["", "   ", "{}"])
def test_empty_extra_config_variable(text: str) -> None:
    assert load_config({"LMCACHE_EXTRA_CONFIG": text}, {}).extra_config == {}


def test_elora_config_file_wins_over_lmcache_config_file(write_file: Write) -> None:
    ours = write_file("chunk_size: 16", "ours.yaml")
    theirs = write_file("chunk_size: 32", "theirs.yaml")
    env = {"ELORA_CONFIG_FILE": ours, "LMCACHE_CONFIG_FILE": theirs}
    assert load_config(env, {}).chunk_size == 16
    assert load_config({**env, "ELORA_CONFIG_FILE": ""}, {}).chunk_size == 32


def test_fetch_deadline_follows_the_blocking_timeout() -> None:
    assert load_config({"LMCACHE_BLOCKING_TIMEOUT_SECS": "3"}, {}).fetch_deadline_ms == 3000
    env = {"LMCACHE_BLOCKING_TIMEOUT_SECS": "3", "ELORA_FETCH_DEADLINE_MS": "500"}
    assert load_config(env, {}).fetch_deadline_ms == 500


def test_operation_timeout_is_bounded_by_the_blocking_timeout() -> None:
    by_default = load_config({"LMCACHE_BLOCKING_TIMEOUT_SECS": "1"}, {})
    assert by_default.remote.operation_timeout_ms == 1000
    assert by_default.warnings == ()

    env = {"LMCACHE_BLOCKING_TIMEOUT_SECS": "1", "ELORA_REMOTE_OPERATION_TIMEOUT_MS": "5000"}
    asked = load_config(env, {})
    assert asked.remote.operation_timeout_ms == 1000
    (warning,) = asked.warnings
    assert "operation_timeout_ms = 5000" in warning
    assert "1000 is used" in warning


def test_unknown_name_has_no_origin() -> None:
    with pytest.raises(KeyError):
        load_config({}, {}).origin("chunk_sizes")


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "chunk_size": st.integers(1, 10**6),
    "local_cpu": st.just(True),
    "save_decode_cache": st.booleans(),
    "max_local_cpu_size": st.floats(0.01, 1e4),
    "cache_policy": st.sampled_from(["ELORA", "LRU", "LFU", "FIFO", "MRU"]),
    "remote_url": st.none() | st.just("redis://h:1"),
    "elora.residency": st.sampled_from(["gpu", "host"]),
    "elora.pin_share": st.floats(0.001, 1),
    "elora.model_id": st.none() | st.just("m"),
    "elora.remote.ttl_s": st.none() | st.integers(1, 10**9),
    "elora.cost_model.visit_half_life_s": st.none() | st.floats(0.1, 1e6),
    "elora.cost_model.swap_out": st.sampled_from(["kept", "literal"]),
    "elora.load_or_recompute.margin": st.floats(0.1, 100),
    "elora.remote.fail_open": st.booleans(),
}


@given(st.fixed_dictionaries({}, optional=_VALUES), st.booleans())
def test_round_trip(chosen: dict[str, Any], short: bool) -> None:
    """What goes in by one source comes out, whichever source it was."""
    by_entry = load_config({}, {SETTINGS[key].connector_entry: v for key, v in chosen.items()})
    env = {SETTINGS[key].variables[-1]: _text(v, short) for key, v in chosen.items()}
    by_env = load_config(env, {})

    assert by_entry == by_env
    for key, value in chosen.items():
        found: Any = by_entry
        for part in SETTINGS[key].path.split("."):
            found = getattr(found, part)
        assert found == value
        assert by_env.origin(key) == f"env {SETTINGS[key].variables[-1]}"


def _text(value: Any, short: bool) -> str:
    if value is None:
        return "" if short else "null"
    if isinstance(value, bool):
        return str(int(value)) if short else str(value)
    return repr(value) if isinstance(value, float) else str(value)


def test_every_variable_sets_its_own_setting() -> None:
    """No two settings share a variable, so nested names cannot collide."""
    names = [name for setting in SETTINGS.values() for name in setting.variables]
    assert len(names) == len(set(names))
    assert "ELORA_REMOTE_TTL_S" in names


def test_bad_value_is_not_looked_at_when_overridden(write_file: Write) -> None:
    path = write_file("chunk_size: many")
    env = {"LMCACHE_CONFIG_FILE": path}
    with pytest.raises(ConfigError, match="chunk_size"):
        load_config(env, {})
    assert load_config({**env, "LMCACHE_CHUNK_SIZE": "64"}, {}).chunk_size == 64
