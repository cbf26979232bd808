"""The namespace that an engine will use, worked out without starting one.

An engine knows its namespace once its model and attention backends exist.  For plain
full attention everything in it follows from vLLM's configuration, so a tool can say
beforehand which namespace of a store belongs to a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from elora_connector.config import EloraConfig
from elora_connector.core.keys import NAMESPACE_HEX
from elora_connector.errors import UnsupportedError
from elora_connector.integration.vllm import compat
from elora_connector.integration.vllm.build import (
    geometry_of,
    namespace_of,
    weights_of,
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a model and vLLM's arguments lead to.

    `namespace` is as in the store's keys.  `certain` is False where vLLM may still choose
    another block size when it loads the model.  Sizes are of one rank.
    """

    namespace: str
    certain: bool
    ranks: int
    block_size: int
    chunk_size: int
    chunk_bytes: int


def fingerprint(config: EloraConfig, arguments: Sequence[str]) -> Fingerprint:
    """The namespace of a vLLM with these command line arguments (``--model``, ...).

    Reads weights in full where `elora.model_id` is not set and they are no Hub blobs.

    Raises:
        ConfigError: the chunk size does not fit the block size.
        UnsupportedError: it cannot be told, and why.
    """
    vllm_config = _vllm_config(arguments)
    spec, layout = _spec(vllm_config)
    layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[str(i) for i in range(layers)])
    kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=0, kv_cache_layout=layout)
    weights = weights_of(config, vllm_config)
    if weights is None:
        raise UnsupportedError(
            "the weights cannot be identified, so the remote tier would be off: set elora.model_id"
        )
    geometry = geometry_of(config, vllm_config, kv_cache_config)
    namespace = namespace_of(config, vllm_config, kv_cache_config, geometry, weights)
    parallel = vllm_config.parallel_config
    fixed = bool(vllm_config.cache_config.user_specified_block_size)
    return Fingerprint(
        namespace=namespace.hex()[:NAMESPACE_HEX],
        certain=fixed or compat.device_type() == "cpu",
        ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        block_size=geometry.block_size,
        chunk_size=config.chunk_size,
        chunk_bytes=geometry.chunk_bytes,
    )


def _vllm_config(arguments: Sequence[str]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    try:
        return EngineArgs.from_cli_args(parser.parse_args(list(arguments))).create_engine_config()
    except SystemExit:
        raise UnsupportedError("vLLM does not accept these arguments, see above") from None
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises, the answer is the same
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedError(f"vLLM refuses this model: {reason}") from None


def _spec(vllm_config: Any) -> tuple[Any, str]:
    """KV cache of one layer, and the layout's name.  The model has one kind of layer."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model, cache = vllm_config.model_config, vllm_config.cache_config
    _refuse_special(model, cache)
    head_size = model.get_head_size()
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(head_size, model.dtype, cache.cache_dtype)
        names = [layout.name for layout in get_supported_kv_cache_layouts([backend])]
        layout = resolve_kv_cache_layout(vllm_config, [names])
    spec = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=head_size,
        dtype=model.dtype,
    )
    return spec, str(layout.name)


def _refuse_special(model: Any, cache: Any) -> None:
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    special = {
        "MLA": model.use_mla,
        "hybrid layers": model.is_hybrid,
        "several kinds of layers": bool(kinds - {"full_attention"}),
        "a KV cache type of its own": cache.cache_dtype != "auto",
    }
    found = [name for name, there in special.items() if there]
    if found:
        raise UnsupportedError(
            f"with {found[0]} the namespace is only known to a running engine, which logs it"
        )
