"""Where settings come from: a YAML file, the environment, vLLM's command line.

Every source becomes one or two `Layer`s of raw values by setting key; nothing
is interpreted here except the names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from elora_connector.config import lmcache_keys
from elora_connector.config.redact import redact_url
from elora_connector.config.settings import OWN, SETTINGS
from elora_connector.errors import ConfigError

CONNECTOR_ORIGIN = "kv_connector_extra_config"
FILE_VARIABLES = ("ELORA_CONFIG_FILE", "LMCACHE_CONFIG_FILE")

_VARIABLES = {name: s.key for s in SETTINGS.values() for name in s.variables}
_CONNECTOR_ENTRIES = {s.connector_entry: s.key for s in SETTINGS.values()}
_TOP_LEVEL = {s.key for s in SETTINGS.values() if not s.own}
_SECTIONS = {s.key.rsplit(".", 1)[0] for s in SETTINGS.values() if s.own}

_QUOTED_NAME = re.compile(r"\b(alias|anchor|tag) .*", re.DOTALL)

# Kubernetes adds these for every service of the namespace; one called "elora"
# must not stop the start.
_SERVICE_LINK = re.compile(
    r"_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)


class Raw(NamedTuple):
    """A value as the source has it, and the words for where it stands."""

    value: Any
    origin: str


@dataclass(slots=True)
class Layer:
    """What one source says.  Later layers win over earlier ones."""

    values: dict[str, Raw] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    """LMCache's settings that this package does not have, with their origin."""
    unknown_variables: dict[str, str] = field(default_factory=dict)
    """Variables that are no setting, with what to say if no setting names them either."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, judged by its last part."""
    names = list(known)
    leaf = _leaf(name)
    for candidate in names:
        if _leaf(candidate) == leaf:
            return candidate
    # Not by the whole name: all names of a section resemble each other.
    by_leaf = {_leaf(candidate).lower(): candidate for candidate in names}
    found = difflib.get_close_matches(leaf.lower(), list(by_leaf), n=1, cutoff=0.7)
    return by_leaf[found[0]] if found else None


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def flatten(prefix: str, section: Mapping[Any, Any], origin: str) -> dict[str, Raw]:
    """Nested sections as dotted keys; an empty section (null) is no value."""
    flat: dict[str, Raw] = {}
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key not in _SECTIONS:
            flat[key] = Raw(value, origin)
        elif isinstance(value, Mapping):
            flat |= flatten(key + ".", value, origin)
        elif value is not None:
            shown = redact_url(repr(value))
            raise ConfigError(f"{key} = {shown} (from {origin}): expected a mapping")
    return flat


def own_section(extra_config: Mapping[str, Any], origin: str) -> dict[str, Raw]:
    """Our settings inside an `extra_config`, by key.

    Raises:
        ConfigError: `elora` is misspelt, or a name below it is unknown.
    """
    for name in extra_config:
        if name != "elora" and difflib.get_close_matches(name.lower(), ["elora"], cutoff=0.75):
            raise ConfigError(
                f"unknown section extra_config.{name} ({origin}); did you mean elora?"
            )
    flat = flatten("", {"elora": extra_config.get("elora")}, origin)
    for key in flat:
        if key not in SETTINGS:
            hint = _did_you_mean(key, SETTINGS)
            raise ConfigError(f"unknown setting {key} (from extra_config, {origin}){hint}")
    return flat


# --- file ---------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice: one of the two would be lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key_node.value!r} is given twice",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key_node.value)
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


def config_file(env: Mapping[str, str]) -> tuple[str, str] | None:
    """(variable, path) of the file to read; ELORA_CONFIG_FILE wins."""
    for variable in FILE_VARIABLES:
        if env.get(variable):
            return variable, env[variable]
    return None


def read_yaml(path: str, variable: str) -> dict[Any, Any]:
    """Top-level mapping of a file; an empty file is an empty mapping."""
    try:
        content = yaml.load(Path(path).read_text("utf-8"), Loader=_Loader)  # noqa: S506  (safe)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"cannot read {path} (named by {variable}): {reason}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML{_where(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(f"{path}: expected `key: value` lines at the top level, found a {kind}")
    return content


def _where(error: Exception) -> str:
    # Only the problem and its place: the full text quotes the line, which may hold a
    # password; one that begins with * or ! is taken for an alias or a tag and named.
    mark = getattr(error, "problem_mark", None)
    problem = _QUOTED_NAME.sub(r"\1 (text may need quotes)", getattr(error, "problem", "") or "")
    line = f", line {mark.line + 1}" if mark else ""
    return line + (f": {problem}" if problem else "")


def file_layer(path: str, content: Mapping[Any, Any]) -> Layer:
    """Values of a configuration file.  Raises ConfigError for an unknown key."""
    layer = Layer()
    origin = f"file {path}"
    for name, value in ((str(name), value) for name, value in content.items()):
        if name in _TOP_LEVEL:
            layer.values[name] = Raw(value, origin)
        elif lmcache_keys.is_key(name):
            layer.unsupported.append(f"{name} ({origin})")
        else:
            raise ConfigError(f"unknown setting {name} in {path}{_file_hint(name)}")
    return layer


def _file_hint(name: str) -> str:
    if name == "elora" or name.startswith(OWN):
        return "; our own settings go under `extra_config: {elora: {...}}`"
    found = nearest(name, SETTINGS)
    if found is None:
        return ""
    if found.startswith(OWN):
        return f"; did you mean {found}? It goes under `extra_config: {{elora: {{...}}}}`"
    return f"; did you mean {found}?"


# --- environment --------------------------------------------------------------


def environment_layers(env: Mapping[str, str]) -> tuple[Layer, Layer]:
    """The LMCACHE_ variables and, over them, the ELORA_ variables."""
    lmcache, ours = Layer(), Layer()
    for name in sorted(env):
        if name in FILE_VARIABLES or _SERVICE_LINK.search(name):
            continue
        raw = Raw(env[name], f"env {name}")
        if name.startswith("LMCACHE_"):
            _add_lmcache_variable(lmcache, name, raw)
        elif name in _VARIABLES:
            ours.values[_VARIABLES[name]] = raw
        elif name.startswith("ELORA_"):
            hint = _did_you_mean(name, _VARIABLES)
            ours.unknown_variables[name] = f"unknown setting {name} in the environment{hint}"
    return lmcache, ours


def _add_lmcache_variable(layer: Layer, name: str, raw: Raw) -> None:
    if name in _VARIABLES:
        layer.values[_VARIABLES[name]] = raw
    elif lmcache_keys.is_other_variable(name):
        return
    elif name in lmcache_keys.ENV_UNSUPPORTED or lmcache_keys.is_key(
        name.removeprefix("LMCACHE_").lower()
    ):
        layer.unsupported.append(raw.origin)
    else:
        hint = _did_you_mean(name, _VARIABLES)
        message = f"unknown variable {name} in the environment is ignored{hint}"
        layer.unknown_variables[name] = message


# --- vLLM's command line --------------------------------------------------------


def connector_layer(extra: Mapping[str, Any]) -> Layer:
    """Values of `kv_connector_extra_config`.  Raises ConfigError for an unknown entry."""
    layer = Layer()
    for name, value in flatten("", extra, CONNECTOR_ORIGIN).items():
        if name in _CONNECTOR_ENTRIES:
            layer.values[_CONNECTOR_ENTRIES[name]] = value
        elif lmcache_keys.is_connector_entry(name):
            layer.unsupported.append(f"{name} ({CONNECTOR_ORIGIN})")
        elif "." not in name or name.startswith(("lmcache.", OWN)):
            hint = _did_you_mean(name, _CONNECTOR_ENTRIES)
            raise ConfigError(f"unknown entry {name} in {CONNECTOR_ORIGIN}{hint}")
    return layer
