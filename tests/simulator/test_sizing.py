"""What fits, and what the advice is: every sentence from the figures that call for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elora_connector.simulator.advice import Case, Speeds, advise
from elora_connector.simulator.models import GB, H800, Machine, Model
from elora_connector.simulator.shares import normalised, uniform
from elora_connector.simulator.sizing import Sizing

# KV: 2 x 2 layers x 1 head x 250 x 2 bytes = 2000 a token; adapters of rank 1, q_proj alone:
# 2 layers x (1000 + 1000) x 2 bytes = 8000.
TINY = Model("tiny", 1000, 2, 4, 1, 250, 4000, 1000)
POOL = 2_000_000


def machine(pool: int = POOL, host: int = 3 * POOL) -> Machine:
    gpu = replace(H800, memory_bytes=TINY.weights_bytes + pool)
    return Machine(TINY, 1, gpu, utilisation=1.0, reserve_bytes=0, host_bytes=host)


def sizing(adapters: int = 10, slots: int | None = None, pool: int = POOL) -> Sizing:
    return Sizing(machine(pool), adapters, 1, ("q_proj",), slots, chunk_tokens=100)


def test_room_by_hand() -> None:
    found = sizing()
    assert (found.adapter_bytes, found.chunk_bytes) == (8000, 200_000)
    assert found.machine.pool_bytes == POOL
    # 2,000,000 - 10 x 8,000 = 1,920,000: nine whole chunks.
    assert (found.gpu.adapters_alone, found.gpu.tokens_alone) == (250, 1000)
    assert (found.gpu.adapters_kept, found.gpu.tokens_left) == (10, 900)
    assert (found.host.adapters_kept, found.host.tokens_left) == (10, 2900)
    # Prefixes of 250 tokens keep two chunks each.
    assert found.whole_chunks(250) == 200
    assert found.prefixes(found.gpu, 250) == 4
    assert found.prefixes(found.gpu, 99) == 0


def test_adapters_take_half_at_most_unless_told() -> None:
    assert sizing(adapters=1000).gpu.adapters_kept == 125
    assert sizing(adapters=1000).gpu.tokens_left == 500
    assert sizing(adapters=1000, slots=200).gpu.adapters_kept == 200
    assert sizing(adapters=1000, slots=900).gpu.adapters_kept == 250
    # Slots are taken whether there are adapters for all of them or not, as in vLLM.
    assert sizing(adapters=3, slots=50).gpu.tokens_left == (POOL - 50 * 8000) // 200_000 * 100


def test_no_pool() -> None:
    assert sizing(pool=-1).gpu.tokens_alone == 0
    assert sizing(pool=-1).gpu.adapters_kept == 0


def case(
    found: Sizing | None = None,
    hit: float | None = 0.5,
    unlimited: float = 0.52,
    rate: float | None = None,
    link: float = 50e9,
) -> Case:
    found = sizing() if found is None else found
    # 10,000 tokens a second x 2,000 bytes: break-even at 20 MB/s.
    speeds = Speeds(10_000, link)
    return Case(found, uniform(10), hit, unlimited, speeds, rate, None if rate is None else 100)


def only(case: Case, part: str) -> None:
    matching = [sentence for sentence in advise(case) if part in sentence]
    assert len(matching) == 1, advise(case)


def test_share_or_split() -> None:
    assert case(rate=10).prefill_need == pytest.approx(10 * 100 * 0.5 / 10_000)
    only(case(), "Share one instance unless one adapter alone needs more than 60%")
    only(case(rate=10), "Share one instance: prefill needs 5% of the throughput, the hottest")
    only(case(rate=300), "More replicas: prefill needs 150% of the throughput, but no adapter mor")
    hot = replace(case(rate=180), shares=normalised([7, 3]))
    only(hot, "Split: prefill of the hottest adapter alone needs 63% of the throughput")
    assert not any("instance" in sentence for sentence in advise(case(sizing(adapters=1))))
    # Nobody said what fits: what could hit is what is reckoned with.
    assert case(hit=None, rate=10).prefill_need == pytest.approx(10 * 100 * 0.48 / 10_000)


def test_adapters_that_fit_or_not() -> None:
    only(case(), "All adapters fit on the GPU (4.0% of the pool)")
    only(case(sizing(adapters=60)), "All adapters fit on the GPU, but take 24% of the pool")
    crowded = case(sizing(adapters=1000), link=8e6)
    only(crowded, "Not all adapters stay on the GPU: 125 of 1000 (50% of the pool)")
    only(crowded, "1.0 ms each")
    only(crowded, "Host memory keeps 375 of 1000 adapters")
    only(case(sizing(pool=-1)), "do not fit on 1 x 0 GB: use more or larger GPUs")
    assert len(advise(case(sizing(pool=-1)))) == 1


def test_hit_rates_that_help_or_not() -> None:
    only(case(), "50% is expected; more memory would hardly add to it")
    only(case(hit=0.3), "30% is expected of 52% that could hit: more room")
    only(case(hit=0.2), "20% is expected of 52% that could hit and below what helps: more room")
    only(case(hit=0.2, unlimited=0.2), "At most 20% can hit, with any memory: below 25%")
    only(case(hit=None), "52% can be expected where all prefixes fit")


def test_load_or_compute() -> None:
    assert case().break_even_bytes_s == 10_000 * 2000
    only(case(), "Loading KV is faster than computing it (50.0 GB/s against a break-even of 0.0)")
    only(case(link=0.019 * GB), "Computing KV is faster than loading it (0.0 GB/s against")
    only(case(link=0.021 * GB), "Loading KV is faster")
