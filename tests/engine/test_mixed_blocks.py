"""A request that ran across a change of its weights leaves nothing to hit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.support.adapter_dir import AdapterDir
from tests.support.engine import engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.tiny import TinyModel

pytestmark = pytest.mark.engine


def test_blocks_of_a_mixed_request_can_never_be_hit(
    tiny: TinyModel, oracle: Oracle, tmp_path: Path
) -> None:
    """Not even within the schedule() that registers them, before we can take them out."""
    folder = AdapterDir(tmp_path / "adapter", tiny.adapters["civil"])
    text = prompt(330, 150)
    civil = lora("mixed", 1, folder.path)
    with engine(tiny.model, enable_prefix_caching=True) as live:
        name = live.submit(text, civil, n=150)
        twin = copy.copy(live.decode(20))
        folder.put(tiny.adapters["legal"])
        assert live.llm.llm_engine.add_lora(lora("mixed", 1, folder.path, load_inplace=True))
        known: set[bytes] = set()
        exposed: list[int] = []
        build = live.side.build_step

        def watch(output: object) -> object:
            """Between vLLM's schedule() and our own hook."""
            twin.block_hashes = []
            known.update(honest(twin))
            pool = live.scheduler.kv_cache_manager.block_pool
            exposed.extend(
                block.block_id
                for block in pool.blocks
                if block.block_hash is not None and bytes(block.block_hash)[:32] in known
            )
            return build(output)

        honest = twin._block_hasher
        live.run(steps=3)  # the report of the new weights arrives
        live.side.build_step = watch
        answer = live.run()[name]
        live.side.build_step = build
        assert len(known) >= 8
        assert exposed == []
        follow = [*text, *answer.tokens]
        for cached in (0, 288):
            again = live.ask(follow, lora("mixed", 1, folder.path))
            assert (again.tokens, again.cached) == (oracle(follow, tiny.adapters["legal"]), cached)


def test_a_reload_while_kv_is_being_loaded_begins_anew(
    tiny: TinyModel, oracle: Oracle, tmp_path: Path
) -> None:
    """Nothing was computed yet: the answer is the new weights', not a mixture."""
    folder = AdapterDir(tmp_path / "adapter", tiny.adapters["civil"])
    text = prompt(331, 200)
    request = lora("mixed", 1, folder.path)
    with engine(tiny.model, {"elora.sync_load_ms": 0}) as live:
        first = live.ask(text, request)
        assert first.tokens == oracle(text, tiny.adapters["civil"])
        name = live.submit(text, request)
        live.run(steps=1)
        (waiting,) = live.scheduler.requests.values()
        assert waiting.status.name == "WAITING_FOR_REMOTE_KVS"
        folder.put(tiny.adapters["legal"])
        assert live.llm.llm_engine.add_lora(lora("mixed", 1, folder.path, load_inplace=True))
        assert live.run()[name].tokens == oracle(text, tiny.adapters["legal"])
        again = live.ask(text, request)
        assert again.tokens == oracle(text, tiny.adapters["legal"])
