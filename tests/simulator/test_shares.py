"""Shares: distributions, files, and one clear error for what is neither."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.simulator.shares import SharesError, normalised, read_shares, uniform, zipf


@given(st.integers(1, 3000), st.floats(0, 1e4))
def test_zipf_is_a_falling_distribution(adapters: int, s: float) -> None:
    shares = zipf(adapters, s)
    assert shares.shape == (adapters,)
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert np.all(np.diff(shares) <= 0)


def test_shares_by_hand() -> None:
    assert uniform(4).tolist() == [0.25] * 4
    # 1 + 1/2 + 1/3 + 1/4 = 25/12
    assert zipf(4, 1) == pytest.approx(np.array([12, 6, 4, 3]) / 25)
    assert zipf(3, 1e300).tolist() == [1, 0, 0]
    assert normalised([2, 0, 6]).tolist() == [0.25, 0, 0.75]
    assert normalised([1e308, 1e308]).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "names", "shares"),
    [
        ("3\n1\n", ["adapter-0", "adapter-1"], [0.75, 0.25]),
        ("# counts\ncivil, 30\n\nlegal 10  # few\n", ["civil", "legal"], [0.75, 0.25]),
        ('{"civil": 1, "legal": 0, "tax": 3.0}', ["civil", "legal", "tax"], [0.25, 0, 0.75]),
    ],
)
def test_files(tmp_path: Path, text: str, names: list[str], shares: list[float]) -> None:
    file = tmp_path / "shares"
    file.write_text(text)
    found = read_shares(file)
    assert found.names == names
    assert found.shares.tolist() == shares


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n-2\n", r"line 2: expected a weight >= 0, got '-2'"),
        ("a 1\nb x\n", r"line 2: expected a weight >= 0, got 'x'"),
        ("nan", r"line 1: expected a weight >= 0, got 'nan'"),
        ("a 1\na 2\n", r"line 2: 'a' again"),
        ("a 1 2\n", r"line 1: expected `weight` or `name weight`"),
        ("\n# nothing\n", "no adapter in it"),
        ("0\n0\n", "all weights are 0"),
        ("{", "not valid JSON"),
        ("{}", "no adapter in it"),
        ('{"a": "many"}', "weight of 'a' is not a number"),
        ('{"a": true}', "weight of 'a' is not a number"),
        ('{"a": -1}', "weights must be numbers >= 0"),
        ('{"a": NaN}', "weights must be numbers >= 0"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "shares"
    file.write_text(text)
    with pytest.raises(SharesError, match=message):
        read_shares(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SharesError, match="No such file"):
        read_shares(tmp_path / "absent")
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SharesError, match="not a text file"):
        read_shares(file)


def test_nonsense_is_refused() -> None:
    with pytest.raises(SharesError, match="at least one adapter, got 0"):
        uniform(0)
    for s in (-0.1, float("inf"), float("nan")):
        with pytest.raises(SharesError, match="exponent"):
            zipf(3, s)
    with pytest.raises(SharesError, match="at least one"):
        normalised([])
