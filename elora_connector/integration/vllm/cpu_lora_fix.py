"""Keep base-model rows of a mixed batch clean on CPU.

vLLM marks tokens without an adapter by slot index -1.  Its CUDA kernels skip them; its
plain PyTorch operators (used on CPU) index with -1 and so give them the adapter in the
*last* slot.  The KV of such a request is another adapter's, under the base model's key.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.lora.ops import torch_ops
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform

from elora_connector.integration.vllm.patching import is_wrapped, mark

logger = logging.getLogger(__name__)

MODULES = (lora_ops, torch_ops, punica_cpu)
"""Every module that holds a reference; the sgmv_* operators call those of `lora_ops`."""
OPERATORS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def install() -> bool:
    """Mask rows without an adapter, on CPU and only if vLLM does not; idempotent.

    Returns:
        whether the operators are masked by us now.
    """
    if not current_platform.is_cpu():
        return False
    for name in OPERATORS:
        _install_one(name)
    return any(is_wrapped(getattr(lora_ops, name)) for name in OPERATORS)


def _install_one(name: str) -> None:
    original = getattr(lora_ops, name)
    if is_wrapped(original) or keeps_base_rows(name, original):
        return
    masked = _masked_shrink(original) if name == "bgmv_shrink" else _masked_expand(original)
    mark(masked)
    for module in MODULES:
        if getattr(module, name, None) is original:
            setattr(module, name, masked)
    logger.info("elora: vLLM's CPU operator %s is masked for rows without an adapter", name)


def keeps_base_rows(name: str, operator: Callable[..., Any]) -> bool:
    """Does an operator leave a row with slot -1 alone?  Tried on a batch of two rows."""
    inputs = torch.ones(2, 2)
    weights = torch.ones(2, 1, 2, 2)
    indices = torch.tensor([-1, 0])
    output = torch.zeros(2, 2)
    extra: Sequence[Any] = {"bgmv_shrink": (1.0,), "bgmv_expand": (True,)}.get(name, (0, 2, True))
    operator(inputs, weights, output, indices, *extra)
    return bool((output[0] == 0).all()) and bool((output[1] == 2).all())


def _all_have_adapters(indices: torch.Tensor) -> bool:
    """True of most batches, and asked some sixty times a step: one reduction, no more."""
    return not indices.numel() or int(indices.min()) >= 0


def _rows_without(indices: torch.Tensor) -> torch.Tensor:
    """Positions of the rows without an adapter."""
    return torch.nonzero(indices < 0).flatten()


def _masked_shrink(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bgmv_shrink(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        if _all_have_adapters(lora_indices_tensor):
            original(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
            return
        slots = lora_indices_tensor.clamp(min=0)
        original(inputs, lora_b_weights, output_tensor, slots, scaling)
        output_tensor[_rows_without(lora_indices_tensor)] = 0

    return bgmv_shrink


def _masked_expand(original: Callable[..., Any]) -> Callable[..., Any]:
    """For bgmv_expand and bgmv_expand_slice: rows without an adapter keep their output."""

    @functools.wraps(original)
    def bgmv_expand(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if _all_have_adapters(lora_indices_tensor):
            original(inputs, lora_b_weights, output_tensor, lora_indices_tensor, *args, **kwargs)
            return
        # vLLM may pass more indices than output rows.
        without = _rows_without(lora_indices_tensor[: output_tensor.shape[0]])
        before = output_tensor[without]
        original(
            inputs, lora_b_weights, output_tensor, lora_indices_tensor.clamp(min=0), *args, **kwargs
        )
        output_tensor[without] = before

    return bgmv_expand
