"""Adapter-safe external KV cache for vLLM with many LoRA adapters."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["EloraConnector", "__version__"]


def __getattr__(name: str) -> Any:
    """`kv_connector_module_path: elora_connector` finds the connector class here.

    Not imported before somebody asks: the core must stay importable without vLLM.
    """
    if name == "EloraConnector":
        from elora_connector.integration.vllm.connector import EloraConnector

        return EloraConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
