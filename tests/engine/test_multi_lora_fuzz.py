"""Random multi-adapter load on the real engine gives exactly the oracle's tokens.

Shared prefixes, several turns, cancels at any step, a tiny block pool, a small host tier,
in-place reloads, restarts of Redis.  The seed is printed; FUZZ_SEED repeats a run,
FUZZ_REQUESTS makes it longer, FUZZ_SETTINGS (JSON) changes the connector's settings and
FUZZ_TENSOR_PARALLEL=2 runs it on two ranks.

A request that ran across a reload of its own adapter has no right answer (vLLM itself
mixes the weights); it is run for what it may leave behind, and every later request of
that adapter is checked.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_dir import AdapterDir
from tests.support.engine import Engine, engine, lora
from tests.support.oracle import Oracle
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = [pytest.mark.engine, pytest.mark.redis, pytest.mark.fuzz]

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "20261129"))
SETTINGS = json.loads(os.environ.get("FUZZ_SETTINGS", "{}"))
RANKS = int(os.environ.get("FUZZ_TENSOR_PARALLEL", "1"))
MOST_TOKENS = 400
MOST_RUNNING = 6


@dataclass
class Adapter:
    """What a request names, and whose weights are behind it at the moment."""

    name: str
    lora_id: int
    path: Path
    content: Path
    version: int = 0
    inplace: bool = False

    def request(self) -> Any:
        return lora(self.name, self.lora_id, self.path, load_inplace=self.inplace)


@dataclass
class Sent:
    """One request under way: what it asked, and with which version of the adapter."""

    tokens: list[int]
    adapter: Adapter | None
    content: Path | None
    version: int
    length: int
    answer: tuple[int, ...] = ()
    finished: bool = False
    mixed: bool = False

    def touched(self) -> bool:
        return self.adapter is not None and self.adapter.version != self.version


@dataclass
class Fuzz:
    """The random driver; deterministic for a seed and a fixed engine."""

    live: Engine
    adapters: list[Adapter]
    contents: list[Path]
    mutable: AdapterDir
    store: RedisServer
    rng: random.Random
    sent: dict[str, Sent] = field(default_factory=dict)
    done: list[Sent] = field(default_factory=list)
    documents: list[list[int]] = field(default_factory=list)
    cancelled: int = 0
    reloads: int = 0
    restarts: int = 0

    def run(self, requests: int) -> None:
        self.documents = [self._words(self.rng.randint(60, 220)) for _ in range(6)]
        acts: list[tuple[int, Callable[[], None]]] = [
            (60, self._submit),
            (150, self._step),
            (6, self._cancel),
            (3, self._reload),
            (1, self._restart_store),
            (2, self._drop_gpu_cache),
        ]
        verbs = [verb for weight, verb in acts for _ in range(weight)]
        self.issued = 0
        while self.issued < requests or self.sent:
            verb = self.rng.choice(verbs) if self.issued < requests else self._step
            verb()

    # ---- verbs -------------------------------------------------------------------

    def _submit(self) -> None:
        if len(self.sent) >= MOST_RUNNING:
            self._step()
            return
        from vllm import SamplingParams

        adapter = self.rng.choices([None, *self.adapters], [2, 4, 3, 2, 2])[0]
        tokens = self._prompt(adapter)
        length = self.rng.choice([1, 2, 4, 8, 8, 40])
        choice = self.rng.choices([None, "elora.retrieve", "elora.store"], [12, 3, 1])[0]
        params = SamplingParams(
            temperature=0,
            max_tokens=length,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {choice: False}} if choice else None,
        )
        name = f"r{self.issued}"
        self.issued += 1
        self.live.llm.llm_engine.add_request(
            name,
            {"prompt_token_ids": tokens},
            params,
            lora_request=None if adapter is None else adapter.request(),
        )
        version, content = (0, None) if adapter is None else (adapter.version, adapter.content)
        self.sent[name] = Sent(tokens, adapter, content, version, length)

    def _step(self) -> None:
        if not self.sent:
            return
        for output in self.live.llm.llm_engine.step():
            if output.finished and output.request_id in self.sent:
                request = self.sent.pop(output.request_id)
                request.answer = tuple(output.outputs[0].token_ids)
                assert output.outputs[0].finish_reason == "length", output.outputs[0].stop_reason
                request.mixed = request.touched()
                self.done.append(request)

    def _cancel(self) -> None:
        if self.sent:
            name = self.rng.choice(sorted(self.sent))
            self.live.llm.llm_engine.abort_request([name])
            del self.sent[name]
            self.cancelled += 1

    def _reload(self) -> None:
        """Other weights in the same files, announced in one of the ways users have."""
        adapter = self.adapters[-1]
        content = self.rng.choice(self.contents)
        put = self.rng.choice([self.mutable.put, self.mutable.put_unseen])
        put(content)
        adapter.content = content
        adapter.version += 1
        adapter.inplace = True
        self.reloads += 1
        if self.rng.random() < 0.5:
            self.live.llm.llm_engine.add_lora(adapter.request())

    def _restart_store(self) -> None:
        self.store.restart()
        self.restarts += 1

    def _drop_gpu_cache(self) -> None:
        """Half the time also what runs begins anew."""
        self.live.llm.reset_prefix_cache(reset_running_requests=self.rng.random() < 0.5)

    # ---- prompts ------------------------------------------------------------------

    def _words(self, count: int) -> list[int]:
        return [self.rng.randint(8, 500) for _ in range(count)]

    def _prompt(self, adapter: Adapter | None) -> list[int]:
        """A shared document with a fresh question, or the next turn of a conversation."""
        turns = [d for d in self.done[-20:] if d.adapter is adapter and not d.mixed]
        if turns and self.rng.random() < 0.5:
            last = self.rng.choice(turns)
            base = [*last.tokens, *last.answer]
        else:
            base = self.rng.choice(self.documents)
        tokens = [*base, *self._words(self.rng.choice([0, 1, 5, 33]))]
        return tokens[:MOST_TOKENS]


def test_random_load_gives_the_oracles_tokens(
    tiny: TinyModel, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"FUZZ_SEED={SEED} FUZZ_REQUESTS={REQUESTS} {SETTINGS} ranks={RANKS}")
    if RANKS > 1:
        # vLLM's CPU workers want a core each, named rank by rank.
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(RANKS))))
    contents = [tiny.adapters["tax"], tiny.adapters["patent"]]
    mutable = AdapterDir(tmp_path / "mutable", contents[0])
    names = ["civil", "legal", "patent"]
    adapters = [Adapter(n, i + 1, tiny.adapters[n], tiny.adapters[n]) for i, n in enumerate(names)]
    adapters.append(Adapter("mutable", 9, mutable.path, contents[0]))
    with RedisServer() as store:
        settings = {
            "lmcache.max_local_cpu_size": 0.004,
            "lmcache.remote_url": store.url,
            "elora.fetch_deadline_ms": 500,
            "elora.remote.operation_timeout_ms": 500,
            "elora.prefetch": True,
            **SETTINGS,
        }
        with engine(
            tiny.model,
            settings,
            enable_prefix_caching=True,
            num_gpu_blocks_override=40,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            tensor_parallel_size=RANKS,
        ) as live:
            fuzz = Fuzz(live, adapters, contents, mutable, store, random.Random(SEED))
            fuzz.run(REQUESTS)
            live.settle()
            loaded = sum(live.total("hit_tokens", tier) for tier in ("host", "remote"))
            assert live.side.manager.pinned_by_waiters == 0
            assert live.side.pool.pinned == 0
    checked = [request for request in fuzz.done if not request.mixed]
    print(
        f"{len(checked)} checked, {len(fuzz.done) - len(checked)} ran across a reload, "
        f"{fuzz.cancelled} cancelled, {fuzz.reloads} reloads, {fuzz.restarts} restarts, "
        f"{loaded:.0f} tokens loaded"
    )
    assert loaded > 0
    assert min(fuzz.cancelled, fuzz.reloads, fuzz.restarts) > 0
    wrong = [r for r in checked if r.answer != oracle(r.tokens, r.content, r.length)]
    assert not wrong, f"seed {SEED}: {len(wrong)} of {len(checked)} differ, first {wrong[0]}"
