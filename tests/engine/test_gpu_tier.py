"""The GPU tier on a real engine: dormant hits, order of reuse, prefetched local hits.

The real worker, adapters and KV; what vLLM's block pool does is watched from outside.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.adapter_dir import AdapterDir
from tests.support.engine import Answer, Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.rig_gpu import GpuWatch
from tests.support.tiny import TinyModel

pytestmark = pytest.mark.engine

NAMES = ("civil", "legal", "tax")
LENGTH = 200
HIT = 192
BLOCKS = 44


def watch(live: Engine) -> GpuWatch:
    pool = live.scheduler.kv_cache_manager.block_pool
    return GpuWatch(pool, lambda: live.ledger.slot_watch.names)


def ask(live: Engine, tiny: TinyModel, name: str, seed: int) -> Answer:
    return live.ask(prompt(seed, LENGTH), lora(name, NAMES.index(name) + 1, tiny.adapters[name]))


class TestOneSlot:
    @pytest.fixture(scope="class")
    def live(self, tiny: TinyModel) -> Iterator[Engine]:
        # The host tier cannot help: what is hit is vLLM's own.
        settings = {"elora.retrieve": False}
        with engine(
            tiny.model,
            settings,
            enable_prefix_caching=True,
            max_loras=1,
            num_gpu_blocks_override=BLOCKS,
        ) as made:
            yield made

    def test_dormant_kv_is_a_hit_when_its_adapter_is_back(
        self, live: Engine, tiny: TinyModel, oracle: Oracle
    ) -> None:
        seen = watch(live)
        cached = [ask(live, tiny, name, 1).cached for name in ("civil", "legal")]
        assert cached == [0, 0]
        assert seen.dormant() == LENGTH // 32, "civil lost its slot"
        back = ask(live, tiny, "civil", 1)
        assert (back.cached, back.tokens) == (
            HIT,
            oracle(prompt(1, LENGTH), tiny.adapters["civil"]),
        )


def load(seed: int) -> list[tuple[str, int]]:
    """Forty requests: a few documents of each adapter, some far more often than others."""
    print(f"seed {seed}")
    made = random.Random(seed)
    names = made.choices(NAMES, (5, 3, 2), k=40)
    return [(name, made.choice((1, 1, 1, 2, 2, 3))) for name in names]


@pytest.mark.parametrize("slots", [1, 2])
def test_no_dormant_block_outlives_a_valid_one(tiny: TinyModel, oracle: Oracle, slots: int) -> None:
    options = {
        "enable_prefix_caching": True,
        "max_loras": slots,
        "num_gpu_blocks_override": BLOCKS,
    }
    requests = load(20 + slots)
    with engine(tiny.model, connector=False, **options) as plain:
        before = sum(ask(plain, tiny, *one).cached for one in requests)
    with engine(tiny.model, {"elora.prefetch": True}, **options) as live:
        seen = watch(live)
        answers, misplaced = [], 0
        for one in requests:
            answers.append(ask(live, tiny, *one))
            misplaced += seen.misplaced()
        live.settle()
    print(f"cached tokens: plain {before}, ours {sum(a.cached for a in answers)}; {seen.taken}")
    assert seen.taken["dormant"], "the load never needed the memory of an absent adapter"
    assert (misplaced, seen.wrong, seen.orphans) == (0, 0, 0)
    assert sum(answer.cached for answer in answers) >= before
    for (name, seed), answer in zip(requests, answers, strict=True):
        assert answer.tokens == oracle(prompt(seed, LENGTH), tiny.adapters[name])


class TestPrefetch:
    @pytest.fixture(scope="class")
    def live(self, tiny: TinyModel) -> Iterator[Engine]:
        with engine(
            tiny.model,
            {"elora.prefetch": True},
            enable_prefix_caching=True,
            num_gpu_blocks_override=BLOCKS,
        ) as made:
            yield made

    @staticmethod
    def forget(live: Engine) -> None:
        """The GPU loses everything, and a request has just ended."""
        live.settle()
        pool = live.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})

    @staticmethod
    def idle(live: Engine) -> None:
        live.until(lambda: not live.side.has_pending_work)

    def test_the_next_request_is_a_local_hit(
        self, live: Engine, tiny: TinyModel, oracle: Oracle
    ) -> None:
        ask(live, tiny, "civil", 5)
        self.forget(live)
        live.ask(prompt(6, 40), lora("civil", 1, tiny.adapters["civil"]), n=1)
        since = live.mark()
        self.idle(live)
        assert since("prefetched_blocks") == HIT // 32
        answer = ask(live, tiny, "civil", 5)
        assert (answer.cached, answer.tokens) == (
            HIT,
            oracle(prompt(5, LENGTH), tiny.adapters["civil"]),
        )
        assert since("hit_tokens", "gpu") == HIT
        assert since("hit_tokens", "host") == 0
        assert since("prefetched_blocks_hit") == HIT // 32

    def test_weights_that_change_under_a_prefetch(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, tmp_path: Path
    ) -> None:
        folder = AdapterDir(tmp_path / "adapter", tiny.adapters["civil"])
        text = prompt(7, LENGTH)
        live.ask(text, lora("moving", 7, folder.path))
        self.forget(live)
        live.ask(prompt(8, 40), lora("moving", 7, folder.path), n=1)
        for _ in range(50):
            if live.side.prefetch.open:
                break
            live.step()
        assert live.side.prefetch.open, "nothing was prefetched"
        folder.put(tiny.adapters["legal"])
        assert live.llm.llm_engine.add_lora(lora("moving", 7, folder.path, load_inplace=True))
        self.idle(live)
        answer = live.ask(text, lora("moving", 7, folder.path))
        assert (answer.cached, answer.tokens) == (0, oracle(text, tiny.adapters["legal"]))
