"""Adapter weights and KV share one host budget on the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from elora_connector.core.node import NodeKind
from elora_connector.core.types import Tier
from tests.support.engine import Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.tiny import TinyModel, make_adapter

pytestmark = pytest.mark.engine

NAMES = [f"n{i}" for i in range(6)]


@pytest.fixture(scope="module")
def six(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six adapters of one size."""
    folder = tmp_path_factory.mktemp("six")
    return [make_adapter(folder / name, seed=300 + i) for i, name in enumerate(NAMES)]


def rounds(live: Engine, oracle: Oracle, paths: list[Path], count: int, n: int = 4) -> None:
    """Every adapter in turn, answers compared with an engine without cache."""
    for turn in range(count):
        text = prompt(700 + turn, 70)
        for number, path in enumerate(paths, 1):
            answer = live.ask(text, lora(NAMES[number - 1], number, path), n=n)
            assert answer.tokens == oracle(text, path, n)


def test_default_flags_read_every_adapter_once_where_the_budget_holds_all(
    oracle: Oracle, tiny: TinyModel, six: list[Path]
) -> None:
    """vLLM's own default keeps one adapter in host memory and reads at every turn."""
    with engine(tiny.model, max_loras=1, max_cpu_loras=None) as live:
        reads = live.mark_worker()
        rounds(live, oracle, six, 3)
        assert reads("adapter_reads") == 6
        tree = live.side.manager.tree
        assert live.ledger.counts() == (1, 6)
        sizes = {node.nbytes for node in tree.adapters if node.resident(Tier.HOST)}
        assert len(sizes) == 1
        assert tree.used_bytes(Tier.HOST, NodeKind.ADAPTER) == 6 * sizes.pop()
        # The server repeats load_inplace with every request: a look at the files, no read.
        for _ in range(3):
            request = lora(NAMES[0], 1, six[0], load_inplace=True)
            text = prompt(710, 70)
            assert live.ask(text, request, n=4).tokens == oracle(text, six[0], 4)
        assert reads("adapter_reads") == 6
        assert reads("adapter_rechecks", "unchanged") == 3
        assert reads("adapter_rechecks", "changed") == 0


def test_a_budget_for_some_keeps_those_that_score_highest(
    oracle: Oracle, tiny: TinyModel, six: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tiny.model, max_loras=1, max_cpu_loras=None) as live:
        live.ask(prompt(720, 70), lora("one", 9, six[0]), n=1)
        weights = live.side.manager.tree.used_bytes(Tier.HOST, NodeKind.ADAPTER)
        chunk = live.side.geometry.chunk_bytes
    budget = 3 * weights + weights // 2
    assert budget > chunk
    settings = {
        "lmcache.max_local_cpu_size": budget / 2**30,
        "lmcache.cache_policy": "LRU",
        "elora.store": False,  # KV would compete for the same bytes
    }
    with engine(tiny.model, settings, max_loras=1, max_cpu_loras=None) as live:
        reads = live.mark_worker()
        rounds(live, oracle, six[:2], 2)
        assert reads("adapter_reads") == 2, "these two always fit"
        rounds(live, oracle, six, 1)
        tree = live.side.manager.tree
        assert tree.used_bytes(Tier.HOST) <= live.side.config.host_bytes
        assert reads("adapter_reads") == 6
        known = [i for i in range(1, 7) if live.ledger.identity(i) is not None]
        assert known == [4, 5, 6], "those that were used last"
        text = prompt(730, 70)
        for number in (4, 5, 6):
            answer = live.ask(text, lora(NAMES[number - 1], number, six[number - 1]), n=4)
            assert answer.tokens == oracle(text, six[number - 1], 4)
        assert reads("adapter_reads") == 6
