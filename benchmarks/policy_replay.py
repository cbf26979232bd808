"""Exact counts of the loads of `multi_lora.py` with every policy, without a model.

    python benchmarks/policy_replay.py [--cases chat-2 ...] [--seeds 3] [--rounds 10]
                                       [--hosts 0.5 1 2] [--set KEY=VALUE ...] [--json FILE]

vLLM's real scheduler and block pool and the whole connector run over workers that compute
nothing (`tests.support.scheduler_rig`); the clock is virtual, a step takes a fixed time and
some more for each token.  The requests, their order, the adapters and all memory are those
of the benchmark; only answers are made up.  A run takes seconds and always gives the same
counts, so policies can be compared on many loads.

Prints counts of ELORA over those of LRU: prompt tokens computed, reads of adapter files,
bytes moved (KV out of and into the GPU, adapters).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.serving.load import LOADS, Load, Turn, system_prompt, turns_of  # noqa: E402
from benchmarks.serving.systems import BLOCK, CHUNK, GB, TOKEN_BYTES  # noqa: E402
from elora_connector.core.rates import Mean  # noqa: E402
from tests.support import rig_setup, scheduler_rig  # noqa: E402
from tests.support.rig_bytes import TOKEN_BYTES as RIG_TOKEN_BYTES  # noqa: E402
from tests.support.scheduler_rig import SYNC, Rig  # noqa: E402

CASES = ("chat-1", "chat-2", "chat-4", "fits-2", "agents-2")
POLICIES: Final = {
    "LRU": {"lmcache.cache_policy": "LRU"},
    "ELORA": {"lmcache.cache_policy": "ELORA"},
}
SEED: Final = 20261130
STEP_S: Final = 0.015
TOKEN_S: Final = 0.0002
ADAPTER_LOAD_S: Final = 0.03
ADAPTER_ACTIVATION_S: Final = 0.005
ADAPTER_BYTES: Final = 531392
_NAMES: Final = tuple("abcdefghijklmnop")


@dataclass(frozen=True)
class Counts:
    """What one replay did after its first round.

    Attributes:
        prefill: prompt tokens computed.
        adapter_loads: reads of an adapter's files.
        kv_out, kv_in: KV copied from and to the GPU, tokens.
    """

    prompt: int
    prefill: int
    adapter_loads: int
    adapter_activations: int
    kv_out: int
    kv_in: int

    @property
    def bytes_moved(self) -> int:
        """Over the link between host and GPU, and from disk."""
        adapters = self.adapter_loads + self.adapter_activations
        return (self.kv_out + self.kv_in) * TOKEN_BYTES + adapters * ADAPTER_BYTES


class _Fixed(Mean):
    """A duration that measuring does not change: the rig's loads take no time."""

    __slots__ = ()

    def add(self, name: str, seconds: float) -> None:
        pass


class Replay:
    """One load on one engine."""

    def __init__(self, load: Load, max_loras: int, settings: Mapping[str, Any]) -> None:
        self._load = load
        chunks = load.host_gb * GB / (CHUNK * TOKEN_BYTES)
        self.rig = Rig(
            SYNC,
            settings={
                "elora.check_invariants": False,
                "lmcache.max_local_cpu_size": chunks * CHUNK * RIG_TOKEN_BYTES / GB,
                "elora.sync_load_ms": 5,
                **settings,
            },
            max_loras=max_loras,
            max_cpu_loras=max(max_loras, load.host_adapters),
            num_blocks=load.gpu_blocks,
            host_slots=int(chunks),
            adapter_chunks=ADAPTER_BYTES / (CHUNK * TOKEN_BYTES),
            remote=False,
            max_num_seqs=128,
            max_tokens_per_step=2048,
        )
        rates = self.rig.side._rates
        rates.adapter_load = _Fixed(ADAPTER_LOAD_S)
        rates.adapter_activation = _Fixed(ADAPTER_ACTIVATION_S)
        self.rig.ranks[0]._forward = self._forward
        self._activations = 0
        self._watch(self.rig.ranks[0].adapters._models)
        self._computed = 0
        self._prompt = 0
        self._said: dict[int, list[int]] = {}

    def _watch(self, models: Any) -> None:
        activate = models.activate_adapter

        def counted(lora_id: int) -> bool:
            done = bool(activate(lora_id))
            self._activations += done
            return done

        models.activate_adapter = counted

    def _forward(self, output: Any, sampled: list[list[int]] | None) -> list[list[int]]:
        """Tokens without KV, and the time that the step takes."""
        rank, made = self.rig.ranks[0], []
        computed = rank._computed(output)
        for request_id, count in output.num_scheduled_tokens.items():
            run = rank.requests[request_id]
            new = [7] if computed[request_id] + count >= len(run.tokens) else []
            self._computed += count if computed[request_id] < run.prompt else 0
            run.tokens.extend(new)
            made.append(new)
        if output.total_num_scheduled_tokens:
            self.rig.now += STEP_S + TOKEN_S * output.total_num_scheduled_tokens
        return made

    def run(self, turns: Sequence[Turn]) -> None:
        """Serve `turns` as the benchmark does."""
        waiting = deque(enumerate(turns))
        going: dict[str, int] = {}
        while waiting or going:
            while waiting and self._may_start(*waiting[0], going):
                _, turn = waiting.popleft()
                going[self._submit(turn)] = turn.conversation
            self.rig.step()
            for request_id in [r for r in going if self.rig.answers[r].reason]:
                self._said[going.pop(request_id)] += self.rig.answers[request_id].tokens
            if not going:
                self.rig.settle()

    def _may_start(self, number: int, turn: Turn, going: Mapping[str, int]) -> bool:
        if number % self._load.pause == 0 and going:
            return False
        return len(going) < self._load.window and turn.conversation not in going.values()

    def _submit(self, turn: Turn) -> str:
        said = self._said.setdefault(
            turn.conversation, list(system_prompt(self._load, turn.adapter))
        )
        said += turn.user
        self._prompt += len(said)
        return self.rig.submit(_NAMES[turn.adapter], said, self._load.answer)

    def counts(self) -> Counts:
        rank = self.rig.ranks[0]
        recorder, token = rank.side.recorder, RIG_TOKEN_BYTES
        return Counts(
            self._prompt,
            self._computed,
            rank.adapters.loader.loads,
            self._activations,
            round(recorder.total("bytes", "gpu_to_host") / token),
            round(recorder.total("bytes", "host_to_gpu") / token),
        )


def replay(
    load: Load, max_loras: int, seed: int, rounds: int, settings: Mapping[str, Any]
) -> Counts:
    """Counts of `rounds` rounds after the first."""
    turns = turns_of(load, seed, (rounds + 1) * load.requests)
    with _sizes():
        one = Replay(load, max_loras, settings)
        one.run(turns[: load.requests])
        before = asdict(one.counts())
        one.run(turns[load.requests :])
        after = asdict(one.counts())
    return Counts(**{name: after[name] - before[name] for name in before})


@contextlib.contextmanager
def _sizes() -> Iterator[None]:
    """The rig with the benchmark's blocks, chunks and number of adapters."""
    make = rig_setup.engine_config

    def engine_config(*args: Any) -> Any:
        config = copy.deepcopy(make(*args))
        config.model_config.max_model_len = max(load.max_model_len for load in LOADS.values())
        return config

    sizes = {"BLOCK": BLOCK, "CHUNK": CHUNK, "ADAPTERS": _NAMES, "STEP_S": 0.001}
    with (
        patch.multiple(rig_setup, **sizes),
        patch.multiple(scheduler_rig, **sizes, engine_config=engine_config),
    ):
        yield


def _case(name: str, host: float) -> tuple[Load, int]:
    load, _, slots = name.partition("-")
    return LOADS[load].scaled(host_gb=LOADS[load].host_gb * host), int(slots)


def _ratio(mine: Sequence[Counts], base: Sequence[Counts], name: str) -> str:
    """Ratio of sums, and that of the worst seed."""
    pairs = [(getattr(m, name), getattr(b, name)) for m, b in zip(mine, base, strict=True)]
    whole = sum(m for m, _ in pairs) / (sum(b for _, b in pairs) or 1)
    worst = max(m / (b or 1) for m, b in pairs)
    return f"{whole:.3f} ({worst:.3f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--hosts", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--set", nargs="+", default=[], help="settings of ELORA, KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write all counts there")
    return parser.parse_args()


def main() -> None:
    """Replay every case with both policies."""
    options = _options()
    changed = {key: json.loads(value) for key, _, value in (s.partition("=") for s in options.set)}
    found = []
    print("| case | host memory | prefill tokens | adapter loads | activations | bytes moved |")
    print("|---|---|---|---|---|---|")
    for name in options.cases:
        for host in options.hosts:
            load, slots = _case(name, host)
            runs: dict[str, list[Counts]] = {policy: [] for policy in POLICIES}
            for seed in range(SEED, SEED + options.seeds):
                for policy, settings in POLICIES.items():
                    more = changed if policy == "ELORA" else {}
                    runs[policy].append(
                        replay(load, slots, seed, options.rounds, {**settings, **more})
                    )
            columns = ("prefill", "adapter_loads", "adapter_activations", "bytes_moved")
            ratios = " | ".join(_ratio(runs["ELORA"], runs["LRU"], c) for c in columns)
            print(f"| `{name}` | {host:g} | {ratios} |", flush=True)
            counts = {policy: [asdict(one) for one in many] for policy, many in runs.items()}
            found.append({"case": name, "host": host, "counts": counts})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
