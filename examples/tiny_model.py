"""Make a small random Llama, a working tokenizer and LoRA adapters, offline and in seconds.

Usage: python examples/tiny_model.py DIRECTORY

The weights are random but fixed by seeds, so two machines get the same greedy outputs.
They are scaled so that the next token depends on the whole prompt and every adapter
answers differently: KV from a wrong adapter or prompt shows up as a wrong token.
The answers themselves mean nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

ADAPTERS: Mapping[str, int] = {"civil": 101, "legal": 102, "tax": 103}
"""Adapters of `make_tiny_model` with their seeds."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<unk>")
COMMON_LETTERS = "etaoinshrdlucmfw"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
RECIPE = "tiny_model.json"

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults give 4 KiB of float32 KV per token."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = 512
    max_positions: int = 2048

    def projection(self, name: str) -> tuple[int, int]:
        """(out, in) features of a projection."""
        attention, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (attention, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, attention),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }[name]


@dataclass(frozen=True)
class TinyModel:
    """Where `make_tiny_model` put things."""

    model: Path
    adapters: dict[str, Path]


def make_tiny_model(directory: Path | str, adapters: Mapping[str, int] = ADAPTERS) -> TinyModel:
    """Make `directory`/model and one directory per adapter (name -> seed).

    What an earlier call made with the same arguments is kept as it is.
    """
    root = Path(directory)
    made = TinyModel(root / "model", {name: root / name for name in adapters})
    recipe = {"format": 1, "shape": asdict(Shape()), "adapters": dict(adapters)}
    marker = root / RECIPE
    if marker.exists() and json.loads(marker.read_text()) == recipe:
        return made
    make_model(made.model)
    for name, seed in adapters.items():
        make_adapter(made.adapters[name], seed)
    # Written last: an interrupted run is made again.
    _write_json(marker, recipe)
    return made


def make_model(
    directory: Path | str,
    *,
    seed: int = 0,
    rope_theta: float = 10000.0,
    shape: Shape = Shape(),
) -> Path:
    """Write config, float32 weights and tokenizer of a random Llama; returns the directory."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", _config(shape, rope_theta))
    _write_json(
        path / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    )
    save_file(_model_weights(shape, seed), path / "model.safetensors", {"format": "pt"})
    _write_tokenizer(path, shape)
    return path


def make_adapter(
    directory: Path | str,
    seed: int,
    rank: int = 8,
    *,
    targets: Sequence[str] = ATTENTION + MLP,
    strength: float = 0.7,
    base: str = "model",
    shape: Shape = Shape(),
) -> Path:
    """Write a LoRA adapter in PEFT's format; returns the directory.

    Args:
        rank: LoRA rank; vLLM refuses one above its `--max-lora-rank`.
        targets: projections with weights in the adapter.
        strength: size of the change relative to the base weights.
        base: what the adapter says about its base model.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
        "inference_mode": True,
    }
    _write_json(path / "adapter_config.json", config)
    weights = _adapter_weights(shape, seed, rank, targets, strength)
    save_file(weights, path / "adapter_model.safetensors", {"format": "pt"})
    return path


def _config(shape: Shape, rope_theta: float) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "float32",
    }


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    return np.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(std))


def _model_weights(shape: Shape, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    ones = np.ones(shape.hidden, np.float32)
    head = _normal(rng, (shape.vocab, shape.hidden), 2 * shape.hidden**-0.5)
    # Zero logits for the special tokens: greedy decoding never ends early by chance.
    head[: len(SPECIAL_TOKENS)] = 0
    weights: Weights = {
        "model.embed_tokens.weight": _normal(rng, (shape.vocab, shape.hidden), 1.0),
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    # Sharp attention (queries and keys doubled) makes outputs depend on distant tokens.
    gains = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 1.5, "o_proj": 1.5}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = ones.copy()
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones.copy()
        for name in ATTENTION + MLP:
            out, fan_in = shape.projection(name)
            std = gains.get(name, 1.0) * fan_in**-0.5
            weights[f"{prefix}.{_block(name)}.{name}.weight"] = _normal(rng, (out, fan_in), std)
    return weights


def _adapter_weights(
    shape: Shape, seed: int, rank: int, targets: Sequence[str], strength: float
) -> Weights:
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for layer in range(shape.layers):
        for name in targets:
            out, fan_in = shape.projection(name)
            prefix = f"base_model.model.model.layers.{layer}.{_block(name)}.{name}"
            weights[f"{prefix}.lora_A.weight"] = _normal(rng, (rank, fan_in), fan_in**-0.5)
            # alpha / rank is 2, and a sum over `rank` terms grows with its root.
            weights[f"{prefix}.lora_B.weight"] = _normal(
                rng, (out, rank), strength / 2 * rank**-0.5
            )
    return weights


def _block(projection: str) -> str:
    return "self_attn" if projection in ATTENTION else "mlp"


def _write_tokenizer(path: Path, shape: Shape) -> None:
    """Byte-level BPE over all 256 bytes plus pairs of common letters: any text round-trips."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in COMMON_LETTERS for b in COMMON_LETTERS]
    tokens = [*SPECIAL_TOKENS, *letters, *(a + b for a, b in pairs)][: shape.vocab]
    merges = pairs[: max(0, shape.vocab - len(SPECIAL_TOKENS) - len(letters))]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    bos, eos, pad, unknown = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_positions,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", settings)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Entry point: one argument, the directory."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    made = make_tiny_model(arguments[0])
    print(f"model    {made.model}")
    for name, path in made.adapters.items():
        print(f"adapter  {name} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
