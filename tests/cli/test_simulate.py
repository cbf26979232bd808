"""`elora simulate`, as it is called."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elora_connector.cli.app import app
from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.traces.elora import write_trace
from elora_connector.simulator.workloads import Demand, make_workload

SMALL = ["--requests", "40", "--adapters", "5", "--rate", "20"]


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_sweep_has_one_run_for_each_combination_and_seed() -> None:
    code, out, _ = call(
        "--workload", "agent", *SMALL, "--policy", "vllm,elora", "--memory", "1,0.5",
        "--seeds", "2", "--json", "-",
    )  # fmt: skip
    assert code == 0
    data = json.loads(out)
    assert len(data["runs"]) == 8
    assert [(r["policy"], r["memory"], r["seeds"]) for r in data["means"]] == [
        ("vllm", 1.0, 2), ("elora", 1.0, 2), ("vllm", 0.5, 2), ("elora", 0.5, 2),
    ]  # fmt: skip
    runs = [r["result"] for r in data["runs"] if r["policy"] == "elora" and r["memory"] == 1.0]
    mean = data["means"][1]["result"]["ttft_s"]["mean"]
    assert mean == pytest.approx(sum(r["ttft_s"]["mean"] for r in runs) / 2)
    assert {r["requests"] for r in runs} == {40}


def test_the_same_command_gives_the_same_numbers() -> None:
    command = ["--workload", "chat", *SMALL, "--policy", "elora-pool", "--json", "-"]
    assert call(*command) == call(*command)


def test_a_file_is_replayed_and_the_table_names_every_policy(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(make_workload("translation", Demand(adapters=3, requests=30)), file)
    saved = tmp_path / "out.json"
    code, out, err = call(
        "--trace", str(file), "--policy", "vllm,lru", "--adapters", "3", "--json", str(saved)
    )
    assert code == 0, err
    assert "vllm" in out
    assert "lru" in out
    assert json.loads(saved.read_text())["means"][0]["rate"] is None


def test_requests_that_fit_nowhere_are_told(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    sizes = [1_000_000, 100]
    requests = [SimRequest(float(i), "x", i, 0, 0.0, (), n, 1) for i, n in enumerate(sizes)]
    write_trace(Trace("t", 256, requests), file)
    code, out, err = call("--trace", str(file), "--policy", "elora")
    assert code == 0, err
    assert "elora, memory 1: 1 requests were longer than its GPU memory holds" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --trace FILE or --workload"),
        (["--workload", "chat", "--policy", "nonsense"], "there are: elora"),
        (["--workload", "nonsense"], "expected one of chat"),
        (["--workload", "chat", "--memory", "0"], "numbers above zero"),
        (["--workload", "chat", "--memory", "0.01", *SMALL], "slots"),
        (["--workload", "chat", "--rate", "fast"], "numbers with commas"),
        (["--workload", "chat", "--model", "gpt-2"], "llama3-8b"),
    ],
)
def test_a_bad_command_is_one_clear_error(arguments: list[str], message: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="it is there")
def test_without_matplotlib_charts_are_one_clear_error(tmp_path: Path) -> None:
    code, _, err = call("--workload", "chat", *SMALL, "--policy", "lru", "--png", str(tmp_path))
    assert code == 2
    assert "matplotlib" in err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_charts_are_written(tmp_path: Path) -> None:
    code, _, err = call(
        "--workload", "chat", *SMALL, "--policy", "lru,elora", "--memory", "1,0.5",
        "--png", str(tmp_path),
    )  # fmt: skip
    assert code == 0, err
    names = sorted(file.name for file in tmp_path.glob("*.png"))
    assert names == ["hits.png", "tpot.png", "ttft.png", "ttft_p99.png"]
