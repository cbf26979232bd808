"""A vLLM engine in a process of its own, driven over pipes, for pairs of measurements.

Usage by `overhead.py` only.  Requests and replies are one JSON object a line: requests on
standard input, replies on the file descriptor given as the first argument (vLLM itself
writes to standard output).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
)
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def main() -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    first = json.loads(sys.stdin.readline())
    engine = _Child(first["engine"])
    replies.write("{}\n")
    for line in sys.stdin:
        replies.write(json.dumps(engine.answer(json.loads(line))) + "\n")
    engine.close()


class _Child:
    def __init__(self, args: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**args)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Seconds of one request, tokens and how many were cached."""
        if question.get("reset"):
            self._llm.reset_prefix_cache()
            return {}
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(
            temperature=0,
            max_tokens=question["n"],
            ignore_eos=True,
            extra_args={"kv_transfer_params": question["transfer"]}
            if question.get("transfer")
            else None,
        )
        lora = LoRARequest(*question["lora"]) if question.get("lora") else None
        prompt = {"prompt_token_ids": question["prompt"]}
        start = time.perf_counter()
        (out,) = self._llm.generate([prompt], params, lora_request=lora, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "tokens": list(out.outputs[0].token_ids),
            "cached": out.num_cached_tokens,
        }

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
