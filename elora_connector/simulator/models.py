"""Sizes of models, adapters and KV, and what a group of GPUs has room for.

Everything follows from the shape of a dense decoder with gated MLPs (Llama, Mistral, Qwen).
GB is 10^9 bytes here, as vendors and the paper count GPU memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from elora_connector.errors import EloraError

GB: Final = 10**9

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")
ALL_LINEAR: Final = ATTENTION + MLP
"""The linear modules of a layer that adapters usually change."""

_LOADED_BYTES: Final = {"float32": 2, "float16": 2, "bfloat16": 2}
"""Of a weight, by the checkpoint's dtype: vLLM loads float32 as 16 bit unless told otherwise."""


class ModelError(EloraError):
    """A model, machine or module list that has no sizes we can compute."""


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder; the same names as in a Hugging Face `config.json`.

    Attributes:
        dtype_bytes: of one weight.
        kv_dtype_bytes, lora_dtype_bytes: of one element of KV, of one adapter weight.
        tied: input and output embedding are one matrix.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    lora_dtype_bytes: int = 2
    tied: bool = False

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "heads", "kv_heads", "head_size", "intermediate"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"{self.name}: {field} must be a whole number >= 1, got {value!r}")
        if self.vocab < 0 or self.heads % self.kv_heads:
            raise ModelError(
                f"{self.name}: need vocab >= 0 and heads a multiple of kv_heads, "
                f"got {self.vocab}, {self.heads} and {self.kv_heads}"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear module of one layer."""
        query, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear modules of all layers: what every token is multiplied with."""
        return self.layers * sum(rows * columns for rows, columns in self.shapes.values())

    @property
    def parameters(self) -> int:
        """All weights: linear modules, norms and embeddings; no biases."""
        norms = (2 * self.layers + 1) * self.hidden
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.linear_parameters + norms + embeddings

    @property
    def weights_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers, over all ranks together."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.kv_dtype_bytes

    def lora_parameters(self, rank: int, modules: Collection[str] = ALL_LINEAR) -> int:
        """A (rank x inputs) and B (outputs x rank) of every named module of every layer.

        Raises:
            ModelError: rank < 1, no module, or one that a layer does not have.
        """
        shapes = self.shapes
        unknown = sorted(set(modules) - set(shapes))
        if unknown or not modules:
            raise ModelError(
                f"modules {', '.join(unknown) or '(none)'}: expected some of {', '.join(shapes)}"
            )
        if rank < 1:
            raise ModelError(f"rank must be at least 1, got {rank}")
        return rank * self.layers * sum(sum(shapes[module]) for module in set(modules))

    def lora_bytes(self, rank: int, modules: Collection[str] = ALL_LINEAR) -> int:
        """Bytes of one adapter, over all ranks together; errors as `lora_parameters`."""
        return self.lora_parameters(rank, modules) * self.lora_dtype_bytes

    @property
    def flops_per_token(self) -> int:
        """The usual estimate of a forward pass, 2 x all weights; attention comes on top."""
        return 2 * self.parameters

    @property
    def linear_flops_per_token(self) -> int:
        """Of the linear modules alone, without embeddings: what a prefill really multiplies."""
        return 2 * self.linear_parameters

    def attention_flops(self, tokens: int, context: int) -> int:
        """QK^T and PV for `tokens` new tokens behind `context` earlier ones, causal."""
        pairs = tokens * context + tokens * (tokens + 1) // 2
        return 4 * self.layers * self.heads * self.head_size * pairs


LLAMA3_8B: Final = Model("llama3-8b", 4096, 32, 32, 8, 128, 14336, 128256)
LLAMA2_34B: Final = Model("llama2-34b", 8192, 48, 64, 8, 128, 22016, 32000)
"""The shape of CodeLlama-34B: Llama 2's own 34B was never published."""
LLAMA3_70B: Final = Model("llama3-70b", 8192, 80, 64, 8, 128, 28672, 128256)

MODELS: Final = {
    "llama3-8b": LLAMA3_8B,
    "llama2-34b": LLAMA2_34B,
    "codellama-34b": replace(LLAMA2_34B, name="codellama-34b"),
    "llama3-70b": LLAMA3_70B,
}


def model_from_config(path: Path) -> Model:
    """The model of a Hugging Face `config.json` (the file, or the folder it is in).

    Raises:
        ModelError: not readable, or not a dense decoder with plain attention.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{file}: not valid JSON") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: not a JSON object")
    _refuse_unlike(config, file)
    hidden, heads = _whole(config, "hidden_size", file), _whole(config, "num_attention_heads", file)
    return Model(
        name=path.name if path.is_dir() else str(file),
        hidden=hidden,
        layers=_whole(config, "num_hidden_layers", file),
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", file, heads),
        head_size=_whole(config, "head_dim", file, hidden // heads),
        intermediate=_whole(config, "intermediate_size", file),
        vocab=_whole(config, "vocab_size", file),
        dtype_bytes=_dtype_bytes(config, file),
        tied=config.get("tie_word_embeddings") is True,
    )


_UNLIKE: Final = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "quantization_config": "quantised weights",
}


def _refuse_unlike(config: dict[str, Any], file: Path) -> None:
    for key, kind in _UNLIKE.items():
        if config.get(key):
            raise ModelError(f"{file}: {key} means {kind}, whose sizes are not modelled")


def _whole(config: dict[str, Any], key: str, file: Path, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{file}: {key} must be a whole number >= 1, got {value!r}")
    return value


def _dtype_bytes(config: dict[str, Any], file: Path) -> int:
    # Newer files say `dtype`, some nothing.
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    size = _LOADED_BYTES.get(name) if isinstance(name, str) else None
    if size is None:
        raise ModelError(f"{file}: dtype {name!r}: expected one of {', '.join(_LOADED_BYTES)}")
    return size


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device.

    Attributes:
        flops: peak dense 16-bit operations per second.
        memory_bytes_s, host_bytes_s: bandwidth of its memory, of its link to host memory.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bytes_s: float
    host_bytes_s: float


H800: Final = Gpu("H800", 80 * GB, 989.4e12, 3.35e12, 50e9)
"""80 GB, peak of an H100 SXM; PCIe 5.0 x16 carries about 50 of its nominal 64 GB/s."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a group of equal GPUs (tensor parallel).

    Attributes:
        utilisation: vLLM's gpu_memory_utilization.
        reserve_bytes: activations, graphs and context, on each GPU.  4.5 GB makes the pools
            of the paper's three set-ups 51, 203 and 399 GB.
        host_bytes: host memory for KV and adapters, all ranks together.
        mfu: share of the peak that a long prefill reaches.
    """

    model: Model
    gpus: int = 1
    gpu: Gpu = H800
    utilisation: float = 0.9
    reserve_bytes: int = 45 * GB // 10
    host_bytes: int = 256 * GB
    mfu: float = 0.5

    def __post_init__(self) -> None:
        if self.gpus < 1 or not 0 < self.utilisation <= 1 or not 0 < self.mfu <= 1:
            raise ModelError(
                "need at least one GPU and utilisation and mfu in (0, 1], "
                f"got {self.gpus}, {self.utilisation} and {self.mfu}"
            )

    @property
    def pool_bytes(self) -> int:
        """GPU memory for KV and adapters, all GPUs together; 0 if the model does not fit."""
        usable = int(self.gpu.memory_bytes * self.utilisation) - self.reserve_bytes
        return max(0, self.gpus * usable - self.model.weights_bytes)

    @property
    def prefill_tokens_s(self) -> float:
        """Tokens of prompt per second, without attention over long contexts."""
        return self.gpus * self.gpu.flops * self.mfu / self.model.flops_per_token

    @property
    def link_bytes_s(self) -> float:
        """From host memory, all ranks side by side."""
        return self.gpus * self.gpu.host_bytes_s

    def break_even_bytes_s(self, prefill_tokens_s: float | None = None) -> float:
        """Bandwidth below which loading KV takes longer than computing it again."""
        speed = self.prefill_tokens_s if prefill_tokens_s is None else prefill_tokens_s
        return speed * self.model.kv_bytes_per_token

    def slots(self, rank: int, ratio: float) -> int:
        """LoRA slots of `rank` in vLLM's static area of `ratio` of the pool."""
        return int(self.pool_bytes * ratio) // self.model.lora_bytes(rank)


MACHINES: Final = {
    "llama3-8b": Machine(LLAMA3_8B, gpus=1),
    "llama2-34b": Machine(LLAMA2_34B, gpus=4),
    "codellama-34b": Machine(MODELS["codellama-34b"], gpus=4),
    "llama3-70b": Machine(LLAMA3_70B, gpus=8),
}
"""The paper's set-ups: 1, 4 and 8 x H800."""
