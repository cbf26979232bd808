"""What a simulated engine runs on: memory, links and how long a step takes.

All sizes are bytes of one rank; ranks mirror each other, so one stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elora_connector.simulator.models import H800, Machine


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one forward: ``floor + max(FLOPs / (peak x MFU), bytes / bandwidth)``.

    The defaults are fitted to a published H100 profile (CodeLlama-34B, tensor parallel 4,
    linear layers); tests/simulator/test_step_time.py compares them with its points.

    Attributes:
        floor_s: seconds of a step that computes nothing.
        peak_flops: of one GPU, dense 16-bit.
        mfu: share of the peak that large batches reach.
        bytes_per_s: memory bandwidth of one GPU that is reached.
    """

    floor_s: float = 2.3e-3
    peak_flops: float = H800.flops
    mfu: float = 0.64
    bytes_per_s: float = 0.98 * H800.memory_bytes_s

    def seconds(self, flops: float, nbytes: float) -> float:
        """One step; both arguments are of one rank."""
        busy = max(flops / (self.peak_flops * self.mfu), nbytes / self.bytes_per_s)
        return self.floor_s + busy


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model on its GPUs, and the memory beside them.

    Attributes:
        params: parameters of the model.
        attention_flops: FLOPs per pair of a token and a token it attends to.
        kv_token_bytes: KV of one token over all ranks.
        adapter_bytes: weights of one adapter over all ranks.
        tp: ranks, each on a GPU of its own.
        pool_bytes: GPU memory for KV and adapters on one rank.
        host_bytes: host memory for KV and adapters of one rank.
        link_per_s, link_overhead_s: one rank's link between host memory and GPU, either way.
        adapter_overhead_s: of bringing one adapter to the GPU, besides the bytes.
        read_per_s: reading adapters from disk, per rank.
        max_batch, max_tokens: vLLM's max_num_seqs and max_num_batched_tokens.
    """

    params: float
    attention_flops: float
    kv_token_bytes: int
    adapter_bytes: int
    pool_bytes: int
    host_bytes: int
    tp: int = 1
    link_per_s: float = 50e9
    link_overhead_s: float = 50e-6
    adapter_overhead_s: float = 1e-3
    read_per_s: float = 4e9
    max_batch: int = 128
    max_tokens: int = 2048
    step: StepTime = field(default_factory=StepTime)

    def step_s(self, tokens: int, pairs: float, context: int) -> float:
        """Seconds of a forward.

        Args:
            tokens: computed in it.
            pairs: tokens attended to, summed over those tokens.
            context: tokens whose KV is read.
        """
        flops = 2.0 * self.params * tokens + self.attention_flops * pairs
        nbytes = 2.0 * self.params + float(self.kv_token_bytes) * context
        return self.step.seconds(flops / self.tp, nbytes / self.tp)

    @property
    def rank_adapter_bytes(self) -> int:
        """Weights of one adapter on one rank."""
        return -(-self.adapter_bytes // self.tp)

    def rank_kv_bytes(self, tokens: int) -> int:
        """KV of `tokens` tokens on one rank."""
        return -(-self.kv_token_bytes * tokens // self.tp)


def engine_model(
    machine: Machine, lora_rank: int, *, memory: float = 1.0, link_per_s: float | None = None
) -> EngineModel:
    """An engine on one of the known machines.

    Args:
        memory: factor on GPU pool and host memory.
        link_per_s: in place of the GPU's own link to host memory.
    """
    model, tp = machine.model, machine.gpus
    return EngineModel(
        params=model.linear_parameters,
        attention_flops=4.0 * model.layers * model.heads * model.head_size,
        kv_token_bytes=model.kv_bytes_per_token,
        adapter_bytes=model.lora_bytes(lora_rank),
        pool_bytes=int(memory * machine.pool_bytes) // tp,
        host_bytes=int(memory * machine.host_bytes) // tp,
        tp=tp,
        link_per_s=machine.gpu.host_bytes_s if link_per_s is None else link_per_s,
    )
