"""A process with one engine for `multi_lora.py`; see `children.py` for the protocol."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING"
)
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

from benchmarks.serving.engine import Server


def main() -> None:
    """Serve until standard input ends."""
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as replies:
        first = json.loads(sys.stdin.readline())
        if first["kernels_first"]:
            _register_kernels()
        server = Server(first["engine"], first["adapters"])
        replies.write("{}\n")
        for line in sys.stdin:
            question: dict[str, Any] = json.loads(line)
            replies.write(json.dumps(server.run(**question)) + "\n")
        server.close()


def _register_kernels() -> None:
    """vLLM's search for Triton kernels on the CPU trips over objects that LMCache imports."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _kind: None)


if __name__ == "__main__":
    main()
