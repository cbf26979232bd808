"""The connector's share of one scheduler step, on vLLM's real scheduler without a model.

Usage: python -m benchmarks.scheduler_step [--json] [--steps N] [--running R] [--nodes N]
                                           [--blocks N]

A full batch decodes while requests end and arrive; the tree has `--nodes` chunks and every
GPU block is cached, so that each new block is a victim chosen by score.  Counted is the
CPU time inside our methods, also where vLLM's own code calls them (taking blocks), per step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

from tests.support import rig_setup

rig_setup.BLOCK, rig_setup.CHUNK = 16, 128

from elora_connector.core.types import BASE, ChunkKey, Identity  # noqa: E402
from tests.support.scheduler_rig import SYNC, Rig, prompt  # noqa: E402

CHAIN = 16
"""Chunks of one prompt in the tree."""
LENGTH, ANSWER = 96, 120
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
)


class Clock:
    """Seconds inside our methods; those that call each other count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_name: dict[str, float] = {}
        self._depth = 0

    def wrap(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, self._depth = time.thread_time(), self._depth + 1
            try:
                return inner(*args, **kwargs)
            finally:
                self._depth -= 1
                spent = time.thread_time() - start
                self.by_name[name] = self.by_name.get(name, 0.0) + spent
                if not self._depth:
                    self.seconds += spent

        setattr(owner, name, timed)


def make_rig(running: int, nodes: int, blocks: int, *, dormant: bool) -> Rig:
    rig = Rig(
        SYNC,
        num_blocks=blocks + 1,
        host_slots=nodes,
        max_num_seqs=running,
        max_tokens_per_step=8192,
        remote=False,
        settings={"elora.check_invariants": False},
    )
    rig.gpu.detach()
    rig.run(rig.submit("a", prompt(5), 1), rig.submit("b", prompt(5), 1))
    rig.ranks[0]._forward = lambda output, sampled: forward(rig.ranks[0], output)
    fill_tree(rig, nodes)
    fill_pool(rig, blocks, "d" if dormant else "a")
    rig.side.gpu.order.slot_left("d")
    return rig


def forward(rank: Any, output: Any) -> list[list[int]]:
    """Tokens without KV: the rig's own check of every byte would take most of the time."""
    computed, sampled = rank._computed(output), []
    for request_id, count in output.num_scheduled_tokens.items():
        tokens = rank.requests[request_id].tokens
        new = [7] if computed[request_id] + count >= len(tokens) else []
        tokens.extend(new)
        sampled.append(new)
    return sampled


def fill_tree(rig: Rig, nodes: int) -> None:
    manager = rig.side.manager
    identities = [BASE, *(Identity(name, bytes(31) + name.encode()) for name in "abcd")]
    made = random.Random(1)
    while len(manager.tree) + CHAIN <= nodes - 4096:
        keys = [ChunkKey(secrets.token_bytes(32)) for _ in range(CHAIN)]
        rig.now += 0.001
        plan = manager.begin_store(
            "fill", made.choice(identities), keys, rig.now, put_from=None, limit=CHAIN
        )
        manager.finish(plan.job.id, 0, CHAIN)


def fill_pool(rig: Rig, blocks: int, name: str) -> None:
    """All but a few free blocks are cached and belong to chunks of the tree."""
    pool = rig.scheduler.kv_cache_manager.block_pool
    view, per_chunk = rig.side.gpu, rig.side.geometry.blocks_per_chunk
    chains = [node for node in rig.side.manager.tree.chunks if node.parent is node.adapter]
    for top in chains:
        path = [top]
        while path[-1].children:
            path.append(next(iter(path[-1].children.values())))
        if pool.get_num_free_blocks() - view.table.free_cached().size < len(path) * per_chunk:
            return
        taken = pool.get_new_blocks(len(path) * per_chunk)
        ids = [block.block_id for block in taken]
        rig.side.pool.own(name, ids)
        view.place(path, ids, 0)
        for block in taken:
            pool._insert_block_hash(secrets.token_bytes(36), block, num_tokens=16)
        pool.free_blocks(reversed(taken))


def measure(rig: Rig, running: int, steps: int) -> dict[str, Any]:
    number = 0

    def arrive(answer: int) -> None:
        nonlocal number
        number += 1
        rig.submit((None, "a", "b")[number % 3], prompt(LENGTH, number), answer)

    made = random.Random(2)
    for _ in range(running):
        arrive(made.randint(2, ANSWER))
    for _ in range(20):
        rig.step()
    clock = Clock()
    for name in CALLS:
        clock.wrap(rig.scheduler.connector, name)
    clock.wrap(rig.side.gpu.order, "need")
    spent = []
    for _ in range(steps):
        while len(rig.scheduler.requests) < running:
            arrive(ANSWER)
        clock.seconds = 0.0
        rig.step()
        spent.append(clock.seconds * 1e3)
    spent.sort()
    return {
        "mean_ms": statistics.mean(spent),
        "median_ms": statistics.median(spent),
        "p99_ms": spent[int(0.99 * len(spent))],
        "max_ms": spent[-1],
        "ms_by_call": {name: 1e3 * s / steps for name, s in sorted(clock.by_name.items())},
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=100_000)
    options = parser.parse_args(argv)
    results = {}
    for case, dormant in (("victims by score", False), ("dormant victims", True)):
        rig = make_rig(options.running, options.nodes, options.blocks, dormant=dormant)
        results[case] = measure(rig, options.running, options.steps)
    if options.json:
        print(json.dumps(results))
        return 0
    for case, found in results.items():
        print(
            f"{case:18} mean {found['mean_ms']:.3f} ms  median {found['median_ms']:.3f}  "
            f"p99 {found['p99_ms']:.3f}  max {found['max_ms']:.3f}"
        )
        for name, ms in found["ms_by_call"].items():
            print(f"    {name:28} {ms:.4f} ms a step")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
