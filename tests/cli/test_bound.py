"""`elora bound`: the figures it prints, and one clear line for what it cannot answer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elora_connector.simulator import bounds
from elora_connector.simulator.shares import normalised, zipf
from tests.cli.filling import Ran

Elora = Callable[..., Ran]
ROOT = Path(__file__).parents[2]


def rates(ran: Ran) -> dict[tuple[str, str], float]:
    assert ran.code == 0, ran.err
    return {(f["cache"], f["where"]): f["rate"] for f in ran.json["hit_rates"]}


@pytest.mark.parametrize(
    ("adapters", "distribution", "quoted"),
    [(1, "uniform", 0.85), (4, "uniform", 0.2125), (4, "zipf:1", 0.408), (16, "zipf:1", 0.25142)],
)
def test_the_quoted_figures_beside_the_right_ones(
    elora: Elora, adapters: int, distribution: str, quoted: float
) -> None:
    args = ["--adapters", adapters, "--distribution", distribution, "--shared-fraction", 0.85]
    found = rates(elora("bound", *args, "--requests", 100_000, "--capacity", adapters, "--json"))
    assert found["widely quoted", ""] == pytest.approx(quoted, abs=1e-5)
    assert found["no limit", ""] == pytest.approx(0.85, abs=2e-4)
    assert found["LRU", ""] == found["no limit", ""]
    assert found["hottest pinned", ""] == pytest.approx(0.85)


def test_every_option_takes_effect(elora: Elora) -> None:
    args = ["--adapters", 8, "--distribution", "zipf:1.5", "--shared-fraction", 0.5]
    args += ["--requests", 400, "--capacity", 3, "--idle-s", 30, "--rate", 2, "--sticky", 0.25]
    ran = elora("bound", *args, "--slots", 2, "--json")
    found, shares = rates(ran), zipf(8, 1.5)
    assert found["no limit", ""] == bounds.infinite(shares, 0.5, 300)
    assert found["LRU", ""] == bounds.lru(shares, 0.5, 3, 300)
    assert found["idle expiry", ""] == bounds.idle(shares, 0.5, 30, 2, 300)
    assert found["adapter on the GPU", "gpu"] == bounds.lru(shares, 1, 2, 400)
    lru = next(f for f in ran.json["hit_rates"] if f["cache"] == "LRU")
    assert lru["sticky"] == 0.25 + 0.75 * lru["rate"]
    assert (ran.json["adapters"], ran.json["requests"]) == (8, 400)


def test_the_memory_picture(elora: Elora) -> None:
    args = ["--adapters", 20, "--model", "llama2-34b", "--rank", 64, "--gpus", 2]
    args += ["--gpu-memory", 90, "--host-memory", 100, "--chunk-tokens", 64]
    memory = elora("bound", *args, "--json").json["memory"]
    weights, adapter, kv = 67_487_940_608, 871_366_656, 192 * 1024
    assert memory["weights_bytes"] == weights
    assert memory["adapter_bytes"] == adapter
    assert memory["kv_bytes_per_token"] == kv
    pool = 2 * (81_000_000_000 - 4_500_000_000) - weights
    assert memory["gpu"] == {
        "nbytes": pool,
        "adapters_alone": pool // adapter,
        "tokens_alone": pool // (64 * kv) * 64,
        "adapters_kept": 20,
        "tokens_left": (pool - 20 * adapter) // (64 * kv) * 64,
    }
    assert memory["host"]["nbytes"] == 100_000_000_000
    assert memory["link_bytes_s"] == 100e9
    own = elora("bound", *args, "--link", 3, "--prefill-speed", 1000, "--json").json["memory"]
    assert (own["link_bytes_s"], own["break_even_bytes_s"]) == (3e9, 1000 * kv)
    few = elora("bound", *args, "--modules", "q_proj, v_proj", "--json").json["memory"]
    assert few["adapter_bytes"] == 64 * 48 * (8192 + 8192 + 8192 + 1024) * 2


def test_text(elora: Elora) -> None:
    ran = elora("bound", "--adapters", 16, "--distribution", "zipf:1", "--prompt-tokens", 2048)
    assert ran.code == 0
    for line in (
        "16 adapters, the hottest 29.6%; 85.0% of a prompt shared, 75.0% in whole chunks of 256",
        "The widely quoted figure is 0.85 x the hottest share. It is no bound:",
        "adapter: 83.9 MB (rank 16, 7 modules); KV: 128.0 KiB a token",
        "break-even: loading KV beats computing it above 4.0 GB/s",
        "- All adapters fit on the GPU (2.6% of the pool).",
    ):
        assert line in ran.out
    quoted = next(line for line in ran.out.splitlines() if line.startswith("widely quoted"))
    assert quoted.split()[2:4] == ["1", "25.1%"]
    assert "with later turns" not in ran.out
    assert "Che" not in ran.out
    assert ran.err == ""
    turns = elora("bound", "--adapters", 2, "--sticky", 0.5)
    assert "with later turns" in turns.out


def test_shares_and_a_model_from_files(elora: Elora, tmp_path: Path) -> None:
    shares = tmp_path / "shares.txt"
    shares.write_text("civil 6\nlegal 3\ntax 1\n")
    config = tmp_path / "config.json"
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config.write_text(json.dumps(fields | {"intermediate_size": 128, "vocab_size": 100}))
    args = ["--distribution", shares, "--model", tmp_path, "--rank", 8, "--capacity", 2]
    ran = elora("bound", *args, "--json")
    assert rates(ran)["LRU", ""] == bounds.lru(normalised([6, 3, 1]), 0.85, 2, 10_000)
    assert ran.json["memory"]["kv_bytes_per_token"] == 2 * 2 * 64 * 2
    assert ran.json["adapters"] == 3


def trace_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    header = {"format": "elora-trace", "version": 1, "name": "small", "chunk_tokens": 4}
    file = folder / "trace.jsonl.gz"
    lines = [json.dumps(row) for row in [header, *rows]]
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    return file


def row(at: float, adapter: str | None, *chunks: int) -> dict[str, Any]:
    made = {"at": at, "prompt_tokens": 4 * len(chunks) + 1, "output_tokens": 1}
    return made | {"chunks": list(chunks)} | ({} if adapter is None else {"adapter": adapter})


def test_a_trace_is_counted(elora: Elora, tmp_path: Path) -> None:
    order = [("a", 1, 2), ("b", 1, 2), ("a", 1, 2), ("c", 5, 6), ("b", 1, 2), ("b", 1, 9)]
    file = trace_file(tmp_path, [row(i, name, *chunks) for i, (name, *chunks) in enumerate(order)])
    args = ["--trace", file, "--chunk-tokens", 4, "--idle-s", 2]
    ran = elora("bound", *args, "--capacity", 4, "--slots", 2, "--json")
    found = rates(ran)
    assert ran.json["trace"] == "small"
    assert (ran.json["requests"], ran.json["adapters"]) == (6, 3)
    tokens = 6 * 9
    assert found["no limit", ""] == 5 * 4 / tokens
    assert found["widely quoted", ""] == pytest.approx(5 * 4 / tokens / 2)
    # Room for two prefixes: c took the place of b.
    assert found["LRU", ""] == 3 * 4 / tokens
    assert found["LRU, split by adapter", ""] == 3 * 4 / tokens
    assert found["idle expiry", ""] == 3 * 4 / tokens
    assert found["adapter on the GPU", "gpu"] == 2 / 6
    text = elora("bound", *args)
    assert "small: 6 requests, 3 adapters, the hottest 50.0%, chunks of 4 tokens" in text.out
    assert "chunks  hit rate" in text.out


def test_a_trace_without_adapters(elora: Elora, tmp_path: Path) -> None:
    file = trace_file(tmp_path, [row(i, None, 10 * i, 10 * i + 1) for i in range(50)])
    base = elora("bound", "--trace", file, "--chunk-tokens", 4)
    assert base.code == 0
    assert "names no adapters: all is the base model" in base.err
    assert "adapter on the GPU" not in base.out
    spread = elora("bound", "--trace", file, "--chunk-tokens", 4, "--adapters", 5, "--json")
    assert spread.json["adapters"] == 5
    assert spread.err == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "how many adapters? --adapters N, --distribution FILE or --trace FILE"),
        (["--adapters", 4, "--idle-s", 5], "--idle-s needs --rate"),
        (["--adapters", 4, "--distribution", "zipf:"], "expected uniform, zipf:S or a file"),
        (["--adapters", 4, "--distribution", "zipf:x"], "'x' is not a number"),
        (["--adapters", 4, "--distribution", "zipf:-1"], "exponent must be a number >= 0"),
        (["--adapters", 4, "--distribution", "skewed"], "expected uniform, zipf:S or a file"),
        (["--adapters", 4, "--model", "gpt"], "--model gpt: expected llama3-8b, llama2-34b"),
        (["--adapters", 4, "--modules", "lm_head"], "modules lm_head: expected some of q_proj"),
        (["--adapters", 4, "--link", "inf"], "expected a number, got inf"),
        (["--adapters", 4, "--gpu-memory", "inf"], "expected a number, got inf"),
        (["--trace", "no-such-file"], "no-such-file: No such file"),
    ],
)
def test_bad_usage_is_one_line(elora: Elora, args: list[Any], message: str) -> None:
    ran = elora("bound", *args)
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.err.strip().splitlines()) == 1
    assert message in ran.err
    for_programs = elora("bound", *args, "--json")
    assert for_programs.code == 2
    assert message in for_programs.json["error"]


@pytest.mark.parametrize(
    "args",
    [
        ["--adapters", 0],
        ["--shared-fraction", 1.1],
        ["--sticky", -0.1],
        ["--requests", "many"],
        ["--adapters", 10**13],
    ],
)
def test_values_out_of_range(elora: Elora, args: list[Any]) -> None:
    ran = elora("bound", "--adapters", 4, *args)
    assert ran.code == 2
    assert args[0] in ran.err


def test_bad_files_name_the_line(elora: Elora, tmp_path: Path) -> None:
    shares = tmp_path / "shares"
    shares.write_text("1\n2\nx\n")
    ran = elora("bound", "--distribution", shares)
    assert (ran.code, "line 3: expected a weight" in ran.err) == (2, True)
    shares.write_text("1\n2\n")
    assert "has 2" in elora("bound", "--distribution", shares, "--adapters", 3).err
    file = trace_file(tmp_path, [row(5, "a", 1), row(4, "a", 1)])
    ran = elora("bound", "--trace", file)
    assert (ran.code, f"{file}:3: " in ran.err) == (2, True)


def test_the_example_of_the_documentation_is_true(elora: Elora) -> None:
    example = "elora bound --adapters 16 --distribution zipf:1"
    example += " --shared-fraction 0.85 --requests 1000 --capacity 4"
    table = [line.rstrip() for line in elora(*example.split()[1:]).out.splitlines()[1:7]]
    page = (ROOT / "docs" / "sizing.md").read_text()
    assert f"```\n{example}\n```\n\n```\n{chr(10).join(table)}\n```\n" in page
    assert "\n".join(table[:5]) in (ROOT / "README.md").read_text()
