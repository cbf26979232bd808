"""docs/operations.md and docs/security.md say what the code has, no more and no less."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest
import yaml

from elora_connector.metrics import BY_NAME, METRICS, Kind

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
DOCS = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
DOCS["README.md"] = (ROOT / "README.md").read_text("utf-8")
OF_VLLM = {"model_name", "engine"}


def rows() -> dict[str, tuple[str, tuple[str, ...]]]:
    between = OPERATIONS.split("<!-- metrics -->\n")[1].split("<!-- end of metrics -->")[0]
    found = {}
    for line in between.splitlines()[2:]:
        name, kind, labels, *text = (cell.strip() for cell in line.strip("|").split("|"))
        assert len(text) == 2
        assert all(text), f"a row without words: {line}"
        found[name.strip("`")] = kind, tuple(filter(None, labels.split(", ")))
    return found


def test_every_metric_has_a_row() -> None:
    code = {metric.name: (metric.kind.value, metric.labels) for metric in METRICS}
    assert rows() == code, "add or correct the row in the table of docs/operations.md"


def test_queries_and_alarms_use_metrics_and_labels_that_exist() -> None:
    uses = re.findall(r"vllm:elora_(\w+)(?:\{([^}]*)\})?", OPERATIONS)
    assert len(uses) > 10
    for name, matchers in uses:
        metric = BY_NAME[name.removesuffix("_total")]
        assert name.endswith("_total") is (metric.kind is Kind.COUNTER), name
        labels = set(re.findall(r"(\w+)\s*=~?", matchers))
        assert labels <= {*metric.labels, *OF_VLLM}, name


def test_grouping_is_by_labels_that_exist() -> None:
    for labels, rest in re.findall(r"by \(([^)]*)\) \((?:rate\()?(vllm:elora_\w+)", OPERATIONS):
        metric = BY_NAME[rest.removeprefix("vllm:elora_").removesuffix("_total")]
        assert set(re.split(r",\s*", labels)) <= {*metric.labels, *OF_VLLM}, rest


def test_alarms_are_a_rule_file() -> None:
    text = OPERATIONS.split("### Alarms")[1].split("```yaml\n")[1].split("```")[0]
    rules = yaml.safe_load(text)["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    assert all(rule["expr"] for rule in rules)


@pytest.mark.parametrize("name", DOCS)
def test_metrics_named_in_the_tables_exist(name: str) -> None:
    for metric, matchers in re.findall(r"`(\w+)\{(\w+)=[^}]*\}`", DOCS[name]):
        assert matchers in BY_NAME[metric].labels


@pytest.mark.parametrize("name", DOCS)
def test_links_and_named_tests_exist(name: str) -> None:
    folder = ROOT if name == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", DOCS[name]):
        assert (folder / target).exists(), target
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for function in re.findall(r"`(test_\w+)`", DOCS[name]):
        assert f"def {function}(" in tests, function
    for path in re.findall(r"`(tests/[\w/.]+)`", DOCS[name]):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", ["operations.md", "security.md", "traces.md", "README.md"])
def test_commands_and_their_options_exist(name: str) -> None:
    uses = re.findall(r"(?:^|`)elora ((?:trace )?\w+)([^`\n#]*)", DOCS[name], re.MULTILINE)
    assert uses
    for command, rest in uses:
        ours = re.split(r"(?:^| )-- ", rest)[0]
        assert set(re.findall(r"--[\w-]+", ours)) <= options_of(command), (command, rest)


@lru_cache
def options_of(command: str) -> set[str]:
    from typer.testing import CliRunner

    from elora_connector.cli.app import app

    helped = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert helped.exit_code == 0, command
    return set(re.findall(r"--[\w-]+", helped.stdout))
