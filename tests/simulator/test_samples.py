"""The packaged traces: exact figures, and that an installed package has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from elora_connector.errors import TraceError
from elora_connector.simulator import samples
from elora_connector.simulator.sessions import find_sessions
from elora_connector.simulator.trace_stats import dispersion, gap_cv, leading, per_second, spread
from elora_connector.simulator.traces import RawTrace
from elora_connector.simulator.traces.source import Lines

ROOT = Path(__file__).parents[2]
DATA = ROOT / "elora_connector" / "simulator" / "data"


def hit_tokens(raw: RawTrace) -> int:
    """Prompt tokens that a cache without limits would hold, of prompts only."""
    seen: set[int] = set()
    hit = 0
    for row in raw.rows:
        assert row.blocks is not None
        hit += min(leading(row.blocks, seen) * raw.block_tokens, row.input_tokens)
        seen.update(row.blocks)
    return hit


def figures(raw: RawTrace) -> tuple[object, ...]:
    """Requests, ms, most in 1 s, gap CV, dispersion, sums and spread of tokens."""
    at = [row.at for row in raw.rows]
    prompts = [row.input_tokens for row in raw.rows]
    answers = [row.output_tokens for row in raw.rows]
    return (
        len(at),
        round(at[-1] * 1000),
        int(per_second(at).max()),
        round(gap_cv(at), 2),
        round(dispersion(at), 2),
        (sum(prompts), *map(round, spread(prompts))),
        (sum(answers), *map(round, spread(answers))),
    )


def test_mooncake() -> None:
    raw = samples.mooncake("conversation")
    assert figures(raw) == (
        12_031,
        3_536_999,
        28,
        3.03,
        7.89,
        (144_793_823, 6_909, 39_550, 12_035),
        (4_122_048, 350, 698, 343),
    )
    assert round(hit_tokens(raw) / 144_793_823, 4) == 0.3736
    assert len({block for row in raw.rows for block in row.blocks or ()}) == 182_790
    assert all(row.blocks and row.blocks[0] == 0 for row in raw.rows)
    assert max(find_sessions(raw)) + 1 == 8_196


def test_mooncake_synthetic() -> None:
    raw = samples.mooncake("synthetic")
    assert figures(raw) == (
        3_993,
        1_022_025,
        13,
        1.01,
        1.09,
        (61_194_628, 11_587, 48_905, 15_325),
        (595_432, 69, 519, 149),
    )
    assert round(hit_tokens(raw) / 61_194_628, 4) == 0.6512


def test_azure() -> None:
    assert figures(samples.azure("code")) == (
        8_819,
        3_435_948,
        67,
        13.15,
        13.18,
        (18_059_974, 1_469, 7_303, 2_048),
        (245_896, 13, 90, 28),
    )
    assert figures(samples.azure("conv")) == (
        10_108,
        1_799_899,
        15,
        1.07,
        1.31,
        (12_566_772, 1_033, 4_086, 1_243),
        (2_196_947, 134, 460, 217),
    )


@pytest.mark.parametrize(
    ("name", "windows", "active", "weibull", "requests", "cv", "lengths"),
    [
        ("large", 6_719, 85, 1_310, 24_062_290, (1.15, 4.71), 105),
        ("mid", 8_182, 88, 1_986, 115_470_494, (1.22, 4.59), 74),
        ("small", 2_748, 29, 808, 85_092_379, (1.17, 4.84), 38),
    ],
)
def test_servegen(
    name: str,
    windows: int,
    active: int,
    weibull: int,
    requests: int,
    cv: tuple[float, float],
    lengths: int,
) -> None:
    found = samples.client_windows(name)
    assert (len(found), len({w.rank for w in found})) == (windows, active)
    assert sum(w.kind == "W" for w in found) == weibull
    assert round(sum(w.rate for w in found) * 600) == requests
    measured = np.percentile([w.cv for w in found], [50, 90]).round(2)
    assert tuple(measured) == cv
    assert len(samples.client_lengths(name)) == lengths


def test_taskmaster() -> None:
    found = samples.dialogues()
    assert (len(found), len({d.scenario for d in found})) == (3_710, 32)
    assert sum(len(d.turns) for d in found) == 13_915
    assert sum(abs(turn) for d in found for turn in d.turns) == 158_692
    assert sum(len(d.exchanges) for d in found) == 6_920


def test_a_damaged_sample_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("t_ms,input_tokens,output_tokens,shared\n0,600,1,-1\n1,600,1,2\n")
    with pytest.raises(TraceError, match=r"bad\.csv:3: shared: no block 2 so far"):
        samples._mooncake(Lines(path))


def test_the_files_are_small_and_attributed() -> None:
    sizes = {path.name: path.stat().st_size for path in DATA.iterdir()}
    assert max(sizes.values()) < 150_000
    assert sum(sizes.values()) < 400_000
    readme = (DATA / "README.md").read_text()
    for name in set(sizes) - {"README.md"}:
        general = name.replace("_large_", "_*_").replace("_mid_", "_*_").replace("_small_", "_*_")
        assert f"`{general}`" in readme, name


def test_a_built_wheel_has_them(tmp_path: Path) -> None:
    """Built as pip builds it; read from the wheel itself, which is not even unpacked."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "elora_connector", tmp_path / "elora_connector", ignore=ignored)
    code = "from setuptools.build_meta import build_wheel; build_wheel('out')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {Path(name).name for name in archive.namelist() if "simulator/data/" in name}
    assert inside == {path.name for path in DATA.iterdir()}
    code = (
        "from elora_connector.simulator import samples\n"
        "print(samples.__file__, len(samples.mooncake('conversation').rows))\n"
    )
    # The environment's own copy must not come first.
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "out",
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    place, rows = done.stdout.split()
    assert place.startswith(str(wheel))
    assert rows == "12031"
