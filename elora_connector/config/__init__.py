"""Configuration: LMCache's YAML file and keys, plus our own under `extra_config.elora`.

`settings.py` is the table of all settings, `sources.py` finds raw values,
`load.py` merges and checks them, `model.py` holds the result, `checks.py` compares
it with the machine.  Nothing here imports torch, vLLM or a Redis client.
"""

from __future__ import annotations

from elora_connector.config.checks import (
    adapter_budget,
    available_memory_bytes,
    budget_line,
    check_chunk_size,
    check_files,
    memory_budget,
)
from elora_connector.config.load import load_config
from elora_connector.config.model import (
    CostModelConfig,
    EloraConfig,
    LoadOrRecomputeConfig,
    RemoteConfig,
)
from elora_connector.config.settings import SETTINGS, Setting, markdown_table

__all__ = [
    "SETTINGS",
    "CostModelConfig",
    "EloraConfig",
    "LoadOrRecomputeConfig",
    "RemoteConfig",
    "Setting",
    "adapter_budget",
    "available_memory_bytes",
    "budget_line",
    "check_chunk_size",
    "check_files",
    "load_config",
    "markdown_table",
    "memory_budget",
]
