"""Copies between vLLM's paged KV and the host buffer (torch, no vllm)."""

from elora_connector.transfer.base import ChunkCopy, CopyEngine, Ticket
from elora_connector.transfer.cuda import copy_engine_for
from elora_connector.transfer.host_buffer import HostBuffer
from elora_connector.transfer.paged_kv import PagedKV
from elora_connector.transfer.selftest import round_trip

__all__ = [
    "ChunkCopy",
    "CopyEngine",
    "HostBuffer",
    "PagedKV",
    "Ticket",
    "copy_engine_for",
    "round_trip",
]
