"""`elora config`: values, origins, and the errors of a start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elora_connector.config import SETTINGS
from tests.cli.filling import Ran

Elora = Callable[..., Ran]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "elora.yaml"
    path.write_text(
        "chunk_size: 64\n"
        "remote_url: redis://user:hunter2@cache.internal:6379/0\n"
        "extra_config: {elora: {remote: {ttl_s: 3600, password: hunter2}}}\n"
    )
    return path


def test_every_setting_with_its_origin(
    elora: Elora, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELORA_RESIDENCY", "host")
    ran = elora("config", file, "--extra", '{"elora.pin_share": 0.25}', "--json")
    settings = ran.json["settings"]
    assert (ran.code, list(settings)) == (0, list(SETTINGS))
    assert settings["chunk_size"] == {"value": 64, "unit": "tokens", "origin": f"file {file}"}
    assert settings["local_cpu"] == {"value": True, "unit": "", "origin": "default"}
    assert settings["elora.residency"]["origin"] == "env ELORA_RESIDENCY"
    assert settings["elora.pin_share"] == {
        "value": 0.25,
        "unit": "",
        "origin": "kv_connector_extra_config",
    }
    assert settings["elora.remote.ttl_s"]["value"] == 3600
    assert settings["elora.model_id"]["value"] is None
    assert ran.json["warnings"] == []


def test_text_has_the_same_values_and_no_secret(elora: Elora, file: Path) -> None:
    text, data = elora("config", file), elora("config", file, "--json")
    for shown in (text.out, text.err, data.out, data.err):
        assert "hunter2" not in shown
    lines = {line.split()[0]: line.split()[1:] for line in text.out.splitlines()[1:]}
    assert list(lines) == list(SETTINGS)
    assert lines["chunk_size"] == ["64", "tokens", "file", str(file)]
    assert lines["remote_url"][0] == "redis://***@cache.internal:6379/0"
    assert lines["elora.remote.password"][0] == "***"
    assert lines["elora.check_invariants"] == ["false", "default"]


def test_warnings_go_to_stderr(elora: Elora, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("pre_caching_hash_algorithm: sha256\n")
    ran = elora("config", path)
    assert "has no effect" in ran.err
    assert "has no effect" not in ran.out
    assert len(elora("config", path, "--json").json["warnings"]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_sise: 64\n", "did you mean chunk_size"),
        ("chunk_size: zero\n", "expected a whole number"),
        ("remote_url: 'redis://user:hunter2@host:port'\n", "is not usable"),
        ("remote_url: 'gopher://user:hunter2@host'\n", "is not usable"),
    ],
)
def test_the_errors_of_a_start(elora: Elora, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    ran = elora("config", path)
    assert (ran.code, ran.out) == (1, "")
    assert message in ran.err
    assert "hunter2" not in ran.err
    assert message in elora("config", path, "--json").json["error"]


def test_a_file_that_is_not_here_fails_after_the_values_were_shown(elora: Elora) -> None:
    """A configuration is often looked at on another machine than the one it is for."""
    path = ROOT / "configs/redis_tls.yaml"
    ran = elora("config", path)
    assert ran.code == 1
    assert "elora.remote.ca_file = '/etc/elora/tls/ca.crt'" in ran.err
    assert "expected a readable file" in ran.err
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == list(SETTINGS)
    data = elora("config", path, "--json")
    assert (data.code, list(data.json["settings"])) == (1, list(SETTINGS))
    assert "expected a readable file" in data.json["error"]


def test_bad_usage(elora: Elora) -> None:
    assert elora("config", "--extra", "{").code == 2
    assert elora("config", "--extra", "[]").code == 2
    assert elora("config", "--nonsense").code == 2
    assert elora("nonsense").code == 2
    assert elora("inspect").code == 2
    assert elora("inspect", "--url", "nonsense").code == 2
    assert elora("inspect", "--url", "redis://127.0.0.1:1").code == 1


def test_as_a_process(file: Path) -> None:
    command = [sys.executable, "-m", "elora_connector.cli", "config", str(file), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["settings"]["chunk_size"]["value"] == 64


def test_without_its_libraries_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['rich'] = None; from elora_connector.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "elora needs rich: pip install 'typer>=0.12' 'rich>=13'\n"
