"""What a rank is called, and which parallel set-ups are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elora_connector.core.types import Rank
from elora_connector.integration.vllm import build
from elora_connector.integration.vllm.worker_side import all_ranks, rank_of


def parallel(tp: int = 1, pp: int = 1, **more: Any) -> Any:
    return SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, **more)


@pytest.mark.parametrize("replica", [0, 1])
def test_replicas_of_a_data_parallel_engine_share_names(
    monkeypatch: pytest.MonkeyPatch, replica: int
) -> None:
    """Rank is (tp, pp): two replicas write and read the same keys of one Redis."""
    import vllm.distributed.parallel_state as state

    monkeypatch.setattr(state, "get_tp_group", lambda: SimpleNamespace(rank_in_group=1))
    monkeypatch.setattr(state, "get_pp_group", lambda: SimpleNamespace(rank_in_group=1))
    config = parallel(2, 2, data_parallel_size=2, data_parallel_rank=replica, rank=4 * replica + 3)
    assert rank_of(config) == (Rank(tp=1, pp=1), 3)
    assert all_ranks(config) == [Rank(0, 0), Rank(1, 0), Rank(0, 1), Rank(1, 1)]


def vllm_config(**changes: Any) -> Any:
    fields = {
        "parallel_config": parallel(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        "lora_config": None,
        "speculative_config": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def kv_cache(*kinds: str) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds]
    return SimpleNamespace(kv_cache_groups=groups)


def reasons(config: Any, kv_cache_config: Any) -> list[str]:
    return [r for refuse in build._REFUSALS if (r := refuse(config, kv_cache_config))]


PLAIN = kv_cache("FullAttentionSpec")
REFUSED = {
    "pipeline parallelism together with LoRA": (
        vllm_config(parallel_config=parallel(pp=2), lora_config=object()),
        PLAIN,
    ),
    "decode_context_parallel_size > 1": (
        vllm_config(parallel_config=parallel(decode_context_parallel_size=2)),
        PLAIN,
    ),
    "prefill_context_parallel_size > 1": (
        vllm_config(parallel_config=parallel(prefill_context_parallel_size=2)),
        PLAIN,
    ),
    "2 KV cache groups": (vllm_config(), kv_cache("FullAttentionSpec", "FullAttentionSpec")),
    "SlidingWindowSpec": (vllm_config(), kv_cache("SlidingWindowSpec")),
    "MambaSpec": (vllm_config(), kv_cache("MambaSpec")),
    "'eagle' keeps a drafter": (
        vllm_config(speculative_config=SimpleNamespace(method="eagle")),
        PLAIN,
    ),
}
SERVED = {
    "plain": vllm_config(),
    "lora": vllm_config(lora_config=object()),
    "tensor parallel with lora": vllm_config(parallel_config=parallel(tp=2), lora_config=object()),
    "pipeline parallel without lora": vllm_config(parallel_config=parallel(pp=2)),
    "ngram": vllm_config(speculative_config=SimpleNamespace(method="ngram")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_at_start_with_the_reason(reason: str) -> None:
    (told,) = reasons(*REFUSED[reason])
    assert reason in told


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str) -> None:
    assert reasons(SERVED[name], PLAIN) == []
    assert reasons(SERVED[name], kv_cache("MLAAttentionSpec")) == []
