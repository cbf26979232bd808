"""From sources to one checked configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elora_connector.config.model import (
    CostModelConfig,
    EloraConfig,
    LoadOrRecomputeConfig,
    RemoteConfig,
)
from elora_connector.config.settings import OWN, SETTINGS, defaults
from elora_connector.config.sources import (
    Layer,
    Raw,
    config_file,
    connector_layer,
    environment_layers,
    file_layer,
    own_section,
    read_yaml,
)
from elora_connector.errors import ConfigError

_REMOTE = OWN + "remote."
_MIN_MAC_KEY_BYTES = 16
_SECTIONS: Mapping[str, Callable[..., Any]] = {
    "remote": RemoteConfig,
    "cost_model": CostModelConfig,
    "load_or_recompute": LoadOrRecomputeConfig,
}


def load_config(env: Mapping[str, str], extra: Mapping[str, Any]) -> EloraConfig:
    """Resolve the configuration: file < LMCACHE_ env < ELORA_ env < connector entries.

    Args:
        env: the process environment; ELORA_CONFIG_FILE or LMCACHE_CONFIG_FILE names the file.
        extra: vLLM's `kv_connector_extra_config`.

    Raises:
        ConfigError: a file cannot be read, a name is unknown, a value is not
            accepted, or two settings contradict each other.
    """
    layers = _layers(env, extra)
    notes = _unsupported(layers)
    raws = _merge(layers, notes)
    values = defaults()
    values |= {key: SETTINGS[key].parse(raw.value, raw.origin) for key, raw in raws.items()}
    origins = {key: raw.origin for key, raw in raws.items()}
    _fill_credentials(values, origins, env)
    _check_unknown_variables(layers, values, notes)
    mac_key = _mac_key(values, env)
    _resolve_times(values, origins, notes)
    _cross_check(values, origins, notes)
    return _build(values, mac_key, origins, tuple(notes))


def _layers(env: Mapping[str, str], extra: Mapping[str, Any]) -> list[Layer]:
    named = config_file(env)
    layers = []
    if named:
        variable, path = named
        layers.append(file_layer(path, read_yaml(path, variable)))
    return [*layers, *environment_layers(env), connector_layer(extra)]


def _unsupported(layers: list[Layer]) -> list[str]:
    names = [name for layer in layers for name in layer.unsupported]
    return [f"LMCache settings without effect here: {', '.join(names)}"] if names else []


def _merge(layers: list[Layer], notes: list[str]) -> dict[str, Raw]:
    """Lay the layers over each other; only the last `extra_config` counts, as in LMCache.

    Its `elora` section ranks just below the single settings of the same source.
    """
    setters = [layer for layer in layers if "extra_config" in layer.values]
    merged: dict[str, Raw] = {}
    for layer in layers:
        if setters and layer is setters[-1]:
            merged |= _from_extra_config(layer.values["extra_config"], notes)
        merged |= layer.values
    for layer in setters[:-1]:
        lost = layer.values["extra_config"].origin
        winner = merged["extra_config"].origin
        notes.append(f"extra_config from {winner} replaces that from {lost} whole")
    return merged


def _from_extra_config(raw: Raw, notes: list[str]) -> dict[str, Raw]:
    extra_config = SETTINGS["extra_config"].parse(raw.value, raw.origin)
    aliases = {s.extra_key: key for key, s in SETTINGS.items() if s.extra_key}
    found = {
        aliases[name]: Raw(value, raw.origin)
        for name, value in extra_config.items()
        if name in aliases
    }
    for name in extra_config:
        if OWN + name in SETTINGS:
            meant = f"extra_config.elora.{name}"
            notes.append(f"extra_config.{name} ({raw.origin}) is not read; did you mean {meant}?")
    return found | own_section(extra_config, raw.origin)


def _fill_credentials(
    values: dict[str, Any], origins: dict[str, str], env: Mapping[str, str]
) -> None:
    """Password and user from the variables that may hold them."""
    password, variable = _REMOTE + "password", values[_REMOTE + "password_env"]
    if variable and values[password] is not None and origins[password] != f"env {variable}":
        raise ConfigError(
            f"{password} (from {origins[password]}) and {password}_env = {variable!r}: "
            "expected only one of the two"
        )
    if variable:
        values[password] = _variable(env, password + "_env", variable)
        origins[password] = f"env {variable}"
    if "@" in (values["remote_url"] or ""):
        return  # the address brings its own; LMCache's general variables must not win over it
    for key, setting in SETTINGS.items():
        if setting.extra_env and values[key] is None and env.get(setting.extra_env):
            values[key] = env[setting.extra_env]
            origins[key] = f"env {setting.extra_env}"


def _variable(env: Mapping[str, str], key: str, name: str) -> str:
    if not env.get(name):
        raise ConfigError(f"{key} = {name!r}: expected the name of a variable that is set")
    return env[name]


def _mac_key(values: Mapping[str, Any], env: Mapping[str, str]) -> bytes | None:
    key = _REMOTE + "mac_key_env"
    if values[key] is None:
        return None
    secret = _variable(env, key, values[key]).encode()
    if len(secret) < _MIN_MAC_KEY_BYTES:
        raise ConfigError(
            f"{key} = {values[key]!r}: expected at least {_MIN_MAC_KEY_BYTES} bytes in that "
            f"variable, found {len(secret)}"
        )
    return secret


def _check_unknown_variables(
    layers: list[Layer], values: Mapping[str, Any], notes: list[str]
) -> None:
    """An unknown ELORA_ variable is an error, an unknown LMCACHE_ one (not ours) a warning.

    Neither, where a setting says that it holds a secret.
    """
    named = {values[_REMOTE + "mac_key_env"], values[_REMOTE + "password_env"]}
    for layer in layers:
        for name, message in layer.unknown_variables.items():
            if name.startswith("ELORA_") and name not in named:
                raise ConfigError(message)
            if name not in named:
                notes.append(message)


def _resolve_times(values: dict[str, Any], origins: dict[str, str], notes: list[str]) -> None:
    limit_ms = values["blocking_timeout_secs"] * 1000
    if values[OWN + "fetch_deadline_ms"] is None:
        values[OWN + "fetch_deadline_ms"] = limit_ms
    for key in (_REMOTE + "operation_timeout_ms", _REMOTE + "lookup_timeout_ms"):
        if values[key] > limit_ms:
            if key in origins:
                notes.append(
                    f"{key} = {values[key]:g} (from {origins[key]}) is above "
                    f"blocking_timeout_secs; {limit_ms:g} is used"
                )
            values[key] = limit_ms


def _cross_check(values: Mapping[str, Any], origins: dict[str, str], notes: list[str]) -> None:
    if not values["local_cpu"]:
        _check_staging_only(values, origins, notes)
    if "pre_caching_hash_algorithm" in origins:
        notes.append(
            f"pre_caching_hash_algorithm = {values['pre_caching_hash_algorithm']!r} has no effect: "
            "keys are always SHA-256 chains, the same in every process"
        )
    _check_tls(values, notes)


def _check_staging_only(
    values: Mapping[str, Any], origins: Mapping[str, str], notes: list[str]
) -> None:
    if values["remote_url"] is None:
        raise ConfigError(
            f"local_cpu = false (from {origins['local_cpu']}): expected true, or a remote_url; "
            "without either there is nowhere to keep KV"
        )
    notes.append("local_cpu = false: host memory still holds chunks while they are in use")


def _check_tls(values: Mapping[str, Any], notes: list[str]) -> None:
    certificate, private = values[_REMOTE + "cert_file"], values[_REMOTE + "key_file"]
    if (certificate is None) != (private is None):
        raise ConfigError(
            f"{_REMOTE}cert_file = {certificate!r}, {_REMOTE}key_file = {private!r}: "
            "expected both or neither"
        )
    url = values["remote_url"] or ""
    if url.startswith("redis://") and (values[_REMOTE + "ca_file"] or certificate):
        notes.append("remote_url begins with redis://, so the TLS files are unused; use rediss://")


def _build(
    values: Mapping[str, Any],
    mac_key: bytes | None,
    origins: dict[str, str],
    notes: tuple[str, ...],
) -> EloraConfig:
    paths = {SETTINGS[key].path: value for key, value in values.items()}
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    top: dict[str, Any] = {}
    for path, value in paths.items():
        section, _, name = path.rpartition(".")
        (sections[section] if section else top)[name] = value
    sections["remote"]["mac_key"] = mac_key
    parts = {name: _SECTIONS[name](**entries) for name, entries in sections.items()}
    return EloraConfig(origins=origins, warnings=notes, **parts, **top)
