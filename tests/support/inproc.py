"""A real vLLM engine inside the test process, on the tiny model."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPT = "the tenant and the landlord agree that rent is due on the first day of a month"


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    """`LLM` without other processes; shut down at the end.

    Only one may live at a time: vLLM keeps its connector in a process global.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 32,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 512,
        "enable_prefix_caching": False,
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 3,
        "max_lora_rank": 8,
    }
    llm = LLM(model=str(model), **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def core(llm: Any) -> Any:
    """The engine's `EngineCore`."""
    return llm.llm_engine.engine_core.engine_core


def lora_manager(llm: Any) -> Any:
    """The worker's LoRA manager."""
    worker = core(llm).model_executor.driver_worker.worker
    return worker.model_runner.lora_manager


def adapter(name: str, lora_id: int, path: Path, **options: Any) -> Any:
    """A `LoRARequest`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, lora_id, str(path), **options)


def generate(
    llm: Any, loras: Sequence[Any], prompt: str = PROMPT, max_tokens: int = 6
) -> list[tuple[int, ...]]:
    """Greedy tokens of one prompt for every given adapter (None: base), in one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(
        [prompt] * len(loras), sampling, lora_request=list(loras), use_tqdm=False
    )
    return [tuple(output.outputs[0].token_ids) for output in outputs]
