"""The table of settings, the dataclasses and the documentation agree."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from elora_connector.config import (
    SETTINGS,
    CostModelConfig,
    EloraConfig,
    LoadOrRecomputeConfig,
    RemoteConfig,
    load_config,
    markdown_table,
)

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "configuration.md"


def test_fields_are_the_settings() -> None:
    sections = {
        "remote": RemoteConfig,
        "cost_model": CostModelConfig,
        "load_or_recompute": LoadOrRecomputeConfig,
    }
    fields = {f.name for f in dataclasses.fields(EloraConfig)} - {"origins", "warnings"}
    assert set(sections) < fields
    nested = {f"{n}.{f.name}" for n, kind in sections.items() for f in dataclasses.fields(kind)}
    fields = (fields - set(sections)) | (nested - {"remote.mac_key"})
    assert fields == {setting.path for setting in SETTINGS.values()}


@pytest.mark.parametrize("key", SETTINGS)
def test_default_is_accepted_by_its_own_kind(key: str) -> None:
    setting = SETTINGS[key]
    assert setting.parse(setting.default, "test") == setting.default
    assert setting.meaning
    assert "|" not in setting.meaning + setting.unit


def test_describe_has_every_setting_once() -> None:
    lines = load_config({}, {}).describe().splitlines()[1:]
    assert [line.split(" = ")[0].strip() for line in lines] == list(SETTINGS)
    assert "  chunk_size = 256 tokens  [default]" in lines
    assert "  elora.fetch_deadline_ms = 10000.0 ms  [default]" in lines
    assert "  remote_url = null  [default]" in lines


def test_repr_has_values() -> None:
    text = repr(load_config({}, {"elora.residency": "host"}))
    assert text.startswith("EloraConfig(chunk_size=256, ")
    assert "elora.residency=host" in text


def test_documentation_has_the_table() -> None:
    between = DOC.read_text().split("<!-- settings -->\n")[1].split("<!-- end of settings -->")[0]
    assert between == markdown_table(), "run: python -m elora_connector.config"


def test_module_prints_the_table_without_heavy_imports() -> None:
    code = (
        "import runpy, sys; runpy.run_module('elora_connector.config', run_name='__main__');"
        "assert not {'torch', 'vllm', 'redis'} & set(sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == markdown_table()
