"""Files that cannot be read, and files that can."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from elora_connector.config import SETTINGS, load_config
from elora_connector.errors import ConfigError

Write = Callable[..., str]
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("variable", ["ELORA_CONFIG_FILE", "LMCACHE_CONFIG_FILE"])
def test_missing_file(tmp_path: Path, variable: str) -> None:
    path = str(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config({variable: path}, {})
    assert path in str(caught.value)
    assert variable in str(caught.value)


def test_directory_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config({"ELORA_CONFIG_FILE": str(tmp_path)}, {})


def test_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config({"ELORA_CONFIG_FILE": str(path)}, {})


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n", "{}\n"])
def test_empty_file_means_defaults(write_file: Write, text: str) -> None:
    assert load_config({"LMCACHE_CONFIG_FILE": write_file(text)}, {}) == load_config({}, {})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("chunk_size: 64\nlocal_cpu: [1", 2),
        ("chunk_size: 64\n\tlocal_cpu: true", 2),
        ("a: 1\nb: 2\nchunk_size: 3: 4", 3),
        ("chunk_size: 64\nlocal_cpu: true\nchunk_size: 32", 3),
        ("extra_config:\n  elora:\n    engines: 1\n    engines: 2", 4),
    ],
)
def test_wrong_yaml_names_the_line(write_file: Write, text: str, line: int) -> None:
    path = write_file(text)
    with pytest.raises(ConfigError) as caught:
        load_config({"LMCACHE_CONFIG_FILE": path}, {})
    assert f"{path} is not valid YAML, line {line}: " in str(caught.value)


@pytest.mark.parametrize("secret", ["*hunter2", "!hunter2", "'hunter2", "hunter2: x: y"])
def test_yaml_error_does_not_quote_the_file(write_file: Write, secret: str) -> None:
    path = write_file(f"extra_config:\n  password: {secret}\n")
    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        load_config({"LMCACHE_CONFIG_FILE": path}, {})
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("text", ["a: 2024-99-99", "a: !!python/object:os.system x", "!!map a"])
def test_values_that_yaml_itself_refuses(write_file: Write, text: str) -> None:
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config({"LMCACHE_CONFIG_FILE": write_file(text)}, {})


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b", "list"), ("text", "str"), ("5", "int")])
def test_top_level_must_be_a_mapping(write_file: Write, text: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"at the top level, found a {kind}"):
        load_config({"LMCACHE_CONFIG_FILE": write_file(text)}, {})


def test_anchors_and_merge_keys_work(write_file: Write) -> None:
    path = write_file("extra_config:\n  base: &b {engines: 2}\n  elora: {<<: *b, store: false}")
    config = load_config({"LMCACHE_CONFIG_FILE": path}, {})
    assert (config.engines, config.store) == (2, False)


def test_there_are_example_files() -> None:
    assert {"host_only.yaml", "redis.yaml", "redis_tls.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_example_file_loads(path: Path) -> None:
    config = load_config({"LMCACHE_CONFIG_FILE": str(path)}, {})
    assert config.warnings == ()
    assert config.chunk_size == 64
    assert config.origin("chunk_size") == f"file {path}"
    url = config.remote_url or ""
    schemes = {
        "redis": "redis",
        "redis_tls": "rediss",
        "redis_sentinel": "redis-sentinel",
        "redis_cluster": "redis-cluster",
    }
    assert url.split(":")[0] == schemes.get(path.stem, "")
    assert (config.remote.ca_file is not None) == (path.stem == "redis_tls")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_commented_settings_of_example_files_are_valid(tmp_path: Path, path: Path) -> None:
    """A setting somebody uncomments must be a real one."""
    names = {key.rsplit(".", 1)[-1] for key in SETTINGS}
    setting = re.compile(rf"^( *)# ((?:{'|'.join(names)}): )", re.MULTILINE)
    text = setting.sub(r"\1\2", path.read_text())
    copy = tmp_path / path.name
    copy.write_text(text)
    secrets = {"REDIS_PASSWORD": "hunter2", "REDIS_MAC_KEY": "k" * 16}
    config = load_config({"ELORA_CONFIG_FILE": str(copy), **secrets}, {})
    assert config.chunk_size == 64
    if path.stem == "redis_tls":
        assert (config.remote.password, config.remote.mac_key) == ("hunter2", b"k" * 16)
    if path.stem == "redis":
        assert config.fetch_deadline_ms == 500
