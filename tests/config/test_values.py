"""Every kind of bad value: the message says key, value, origin and expectation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elora_connector.config import EloraConfig, load_config
from elora_connector.config.settings import SETTINGS
from elora_connector.errors import ConfigError


def _load(key: str, value: Any) -> EloraConfig:
    return load_config({}, {SETTINGS[key].connector_entry: value})


BAD = [
    ("chunk_size", "many", "a whole number, at least 1"),
    ("chunk_size", 0, "a whole number, at least 1"),
    ("chunk_size", -16, "a whole number, at least 1"),
    ("chunk_size", 16.5, "a whole number, at least 1"),
    ("chunk_size", True, "a whole number, at least 1"),
    ("chunk_size", None, "a whole number, at least 1"),
    ("chunk_size", [16], "a whole number, at least 1"),
    ("chunk_size", float("inf"), "a whole number, at least 1"),
    ("local_cpu", "maybe", "true or false"),
    ("local_cpu", 2, "true or false"),
    ("max_local_cpu_size", 0, "a number above 0"),
    ("max_local_cpu_size", -1.0, "a number above 0"),
    ("max_local_cpu_size", "5GB", "a number above 0"),
    ("max_local_cpu_size", "nan", "a number above 0"),
    ("max_local_cpu_size", float("inf"), "a number above 0"),
    ("max_local_cpu_size", 10**400, "a number above 0"),
    ("remote_url", "host:6379", "an address such as redis://"),
    ("remote_url", "://host", "an address such as redis://"),
    ("remote_url", "redis://", "an address such as redis://"),
    ("remote_url", 6379, "an address such as redis://"),
    ("remote_serde", "cachegen", "naive, or null"),
    ("save_decode_cache", "", "true or false"),
    ("save_unfull_chunk", True, "false: only full chunks have a key"),
    ("save_unfull_chunk", "some", "false: only full chunks have a key"),
    ("min_retrieve_tokens", -1, "a whole number, at least 0"),
    ("blocking_timeout_secs", 0, "a number above 0"),
    ("cache_policy", "ARC", "one of ELORA, LRU, LFU, FIFO, MRU"),
    ("pre_caching_hash_algorithm", 5, "the name of a hash algorithm"),
    ("elora.sync_load_ms", -0.1, "a number, 0 or more"),
    ("elora.shutdown_flush_s", "soon", "a number, 0 or more"),
    ("elora.residency", "disk", "one of gpu, host"),
    ("elora.dependency_rule", "maybe", "true or false"),
    ("elora.adapter_prefetch", "maybe", "true or false"),
    ("elora.cost_model.lora_term", 2, "true or false"),
    ("elora.cost_model.cost_term", "x", "true or false"),
    ("elora.cost_model.visit_term", "x", "true or false"),
    ("elora.cost_model.recency_term", "x", "true or false"),
    ("elora.cost_model.tau_s", 0, "a number above 0"),
    ("elora.cost_model.visit_half_life_s", 0, "a number above 0, or null"),
    ("elora.cost_model.visit_turnovers", 0, "a number above 0, or null"),
    ("elora.cost_model.visit_prior", -1, "a number, 0 or more"),
    ("elora.cost_model.swap_out", "both", "one of kept, literal"),
    ("elora.load_or_recompute.enabled", "x", "true or false"),
    ("elora.load_or_recompute.margin", 0, "a number above 0"),
    ("elora.adapter_deadline_s", 0, "a number above 0"),
    ("elora.fetch_deadline_ms", -1, "a number, 0 or more, or null"),
    ("elora.model_id", 7, "a name for the exact base weights"),
    ("elora.reset_remote", "purge", "one of new_epoch, keep"),
    ("elora.pin_share", 0, "a number above 0, at most 1"),
    ("elora.pin_share", 1.01, "a number above 0, at most 1"),
    ("elora.store_block_share", 2, "a number above 0, at most 1"),
    ("elora.prefetch", "perhaps", "true or false"),
    ("elora.gpu_share", 0, "a number above 0, at most 1"),
    ("elora.check_invariants", "si", "true or false"),
    ("elora.engines", 0, "a whole number, at least 1"),
    ("elora.store", "no way", "true or false"),
    ("elora.retrieve", 3, "true or false"),
    ("elora.remote.ttl_s", 0, "a whole number, at least 1, or null"),
    ("elora.remote.io_threads", 0, "a whole number from 1 to 256"),
    ("elora.remote.io_threads", 257, "a whole number from 1 to 256"),
    ("elora.remote.connect_timeout_ms", 0, "a number above 0"),
    ("elora.remote.operation_timeout_ms", -5, "a number above 0"),
    ("elora.remote.lookup_timeout_ms", 0, "a number above 0"),
    ("elora.remote.write_queue_mb", 0, "a whole number, at least 1"),
    ("elora.remote.checksum", "sha256", "true or false"),
    ("elora.remote.mac_key_env", 1, "the name of an environment variable"),
    ("elora.remote.fail_open", "open", "true or false"),
    ("elora.remote.username", 12, "a user name"),
    ("elora.remote.password", 83, "text (in quotes where it looks like a number)"),
    ("elora.remote.password_env", "my-password", "the name of an environment variable"),
    ("elora.remote.ca_file", 1, "a file path"),
    ("elora.remote.cert_file", [], "a file path"),
    ("elora.remote.key_file", {}, "a file path"),
    ("elora.remote.max_value_mb", 0, "a whole number, at least 1"),
]
_HIDDEN = {"elora.remote.password", "elora.remote.password_env", "elora.remote.mac_key_env"}


@pytest.mark.parametrize(("key", "value", "expectation"), BAD)
def test_bad_value(key: str, value: Any, expectation: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(key, value)
    message = str(caught.value)
    assert message.startswith(f"{key} = ")
    assert "(from kv_connector_extra_config): expected " in message
    assert expectation in message
    shown = message.removeprefix(f"{key} = ").split(" (from")[0]
    if key in _HIDDEN:
        assert shown == "***"
    elif isinstance(value, str):
        assert shown == repr(value)
    elif isinstance(value, (bool, type(None))):
        assert shown == json.dumps(value)
    elif not isinstance(value, dict):
        assert shown == str(value)


def test_every_setting_has_a_bad_value_above() -> None:
    assert {key for key, _, _ in BAD} == set(SETTINGS) - {"extra_config"}


@pytest.mark.parametrize("value", ["{not json", "[1]", "5", [1], 5, True, False, 0])
def test_bad_extra_config(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"extra_config = .*expected a mapping"):
        _load("extra_config", value)


@pytest.mark.parametrize("elora", [5, "text", [1], {"remote": "redis://:hunter2@h"}])
def test_bad_section(elora: Any) -> None:
    with pytest.raises(ConfigError, match="expected a mapping") as caught:
        _load("extra_config", {"elora": elora})
    assert "hunter2" not in str(caught.value)


def test_empty_sections_mean_defaults() -> None:
    """All lines of a section commented out leaves null behind."""
    for section in (None, {}, {"elora": None}, {"elora": {"remote": None}}):
        assert _load("extra_config", section).remote == load_config({}, {}).remote


GOOD = [
    ("chunk_size", "64", 64),
    ("chunk_size", 64.0, 64),
    ("local_cpu", "ON", True),
    ("save_decode_cache", " no ", False),
    ("save_decode_cache", 0, False),
    ("save_unfull_chunk", "false", False),
    ("max_local_cpu_size", "1e1", 10.0),
    ("max_local_cpu_size", 3, 3.0),
    ("remote_url", "", None),
    ("remote_url", " redis-sentinel://a:1,b:2/m ", "redis-sentinel://a:1,b:2/m"),
    ("remote_serde", None, None),
    ("remote_serde", "Naive", "naive"),
    ("cache_policy", "lfu", "LFU"),
    ("elora.residency", "HOST", "host"),
    ("elora.remote.ttl_s", "none", None),
    ("elora.remote.password", " spaced none ", " spaced none "),
    ("elora.remote.password", "none", "none"),
    ("elora.remote.password", "", None),
    ("elora.pin_share", 1, 1.0),
]


@pytest.mark.parametrize(("key", "value", "expected"), GOOD)
def test_good_value(key: str, value: Any, expected: Any) -> None:
    found: Any = _load(key, value)
    for part in SETTINGS[key].path.split("."):
        found = getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


def test_local_cpu_false_needs_a_remote() -> None:
    with pytest.raises(ConfigError, match=r"local_cpu = false .*expected true, or a remote_url"):
        load_config({"LMCACHE_LOCAL_CPU": "false"}, {})
    env = {"LMCACHE_LOCAL_CPU": "false", "LMCACHE_REMOTE_URL": "redis://h:6379"}
    config = load_config(env, {})
    assert config.local_cpu is False
    assert config.warnings == (
        "local_cpu = false: host memory still holds chunks while they are in use",
    )


def test_hash_algorithm_is_accepted_and_explained() -> None:
    config = load_config({"LMCACHE_PRE_CACHING_HASH_ALGORITHM": "builtin"}, {})
    (warning,) = config.warnings
    assert "'builtin' has no effect" in warning
    assert "SHA-256" in warning


@pytest.mark.parametrize("one", ["cert_file", "key_file"])
def test_certificate_and_key_belong_together(one: str) -> None:
    with pytest.raises(ConfigError, match=r"cert_file = .*key_file = .*both or neither"):
        load_config({}, {f"elora.remote.{one}": "/x"})


def test_tls_files_with_a_plain_address_are_pointed_out() -> None:
    extra = {"elora.remote.ca_file": "/ca.crt", "lmcache.remote_url": "redis://h:1"}
    assert any("use rediss://" in text for text in load_config({}, extra).warnings)
    extra["lmcache.remote_url"] = "rediss://h:1"
    assert load_config({}, extra).warnings == ()


def test_sizes_in_bytes() -> None:
    config = load_config({}, {"lmcache.max_local_cpu_size": 0.5, "elora.remote.max_value_mb": 2})
    assert config.host_bytes == 512 * 1024**2
    assert config.remote.max_value_bytes == 2 * 1024**2
    assert config.remote.write_queue_bytes == 256 * 1024**2
