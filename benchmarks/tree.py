"""What the dependency tree costs: look-up, touch, victims, refresh, memory.

    python benchmarks/tree.py [--nodes 100000 1000000] [--json FILE]

Medians of CPU time.  Two shapes: *shared* (a long prompt per adapter and many short
continuations: one node in six is a leaf) and *apart* (nothing shared: every path is cold
in the processor's caches).  Every chunk is in the host tier.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from elora_connector.core.cost_model import CostSettings, EloraPolicy  # noqa: E402
from elora_connector.core.demand import Demand  # noqa: E402
from elora_connector.core.node import Node  # noqa: E402
from elora_connector.core.rates import Rates  # noqa: E402
from elora_connector.core.tree import DependencyTree  # noqa: E402
from elora_connector.core.types import ChunkKey, Identity, Tier  # noqa: E402
from elora_connector.core.victims import VictimQueue  # noqa: E402

PATH = 128
BRANCH = 6
ADAPTERS = 50
CHUNK_BYTES = 32 << 20
TARGETS = {
    "lookup_us": 50.0,
    "touch_us": 10.0,
    "pop_us": 5.0,
    "refresh_ms": 2.0,
    "bytes_per_node": 250.0,
}
PAPER = "paper: match + update < 500 us a query, Eval update <= 3.1 us, 232 + 24 bytes a node"
GROWTH = 3.0

Build = Callable[[DependencyTree, int], list[list[ChunkKey]]]


def fresh_keys() -> Iterator[ChunkKey]:
    """Keys as spread out as real ones."""
    number = 0
    while True:
        yield ChunkKey(hashlib.sha256(number.to_bytes(8, "big")).digest())
        number += 1


class Grower:
    """Adds chunks that are READY in the host tier."""

    def __init__(self, tree: DependencyTree) -> None:
        self._tree = tree
        self._keys = fresh_keys()
        self.now = 0.0
        self.count = 0

    def run(self, parent: Node, length: int) -> list[Node]:
        """A chain of `length` chunks below `parent`, created at one time."""
        self.now += 0.001
        nodes = []
        for _ in range(length):
            node = self._tree.add(parent, next(self._keys), self.now)
            self._tree.set_pending(node, Tier.HOST, slot=self.count, generation=1)
            self._tree.set_ready(node, Tier.HOST)
            self.count += 1
            nodes.append(node)
            parent = node
        return nodes


def shared(tree: DependencyTree, size: int) -> list[list[ChunkKey]]:
    """One prompt of PATH - BRANCH chunks per adapter, continued in many ways."""
    grower = Grower(tree)
    trunks = []
    for i in range(ADAPTERS):
        adapter = tree.adapter(Identity(f"a{i}", bytes([i]) * 32), 0.0)
        trunks.append(grower.run(adapter, PATH - BRANCH))
    prefixes = [[node.key for node in trunk] for trunk in trunks]
    paths = []
    while grower.count < size:
        i = len(paths) % ADAPTERS
        branch = grower.run(trunks[i][-1], BRANCH)
        paths.append(prefixes[i] + [node.key for node in branch])
    return paths


def apart(tree: DependencyTree, size: int) -> list[list[ChunkKey]]:
    """Chains of PATH chunks."""
    grower = Grower(tree)
    adapters = [tree.adapter(Identity(f"a{i}", bytes([i]) * 32), 0.0) for i in range(ADAPTERS)]
    paths = []
    while grower.count < size:
        nodes = grower.run(adapters[len(paths) % ADAPTERS], PATH)
        paths.append([node.key for node in nodes])
    return paths


def new_tree() -> DependencyTree:
    return DependencyTree(CHUNK_BYTES, visit_decay_s=433.0, visit_prior=1.0)


def bytes_per_node(build: Build, size: int) -> float:
    """Everything that the tree holds, its index, keys and tables included."""
    gc.collect()
    tracemalloc.start()
    tree = new_tree()
    build(tree, size)  # the paths are let go of; the keys stay with the tree
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / len(tree)


def median_us(act: Callable[[Any], object], inputs: Sequence[Any]) -> float:
    """Median CPU time of one call."""
    times = []
    for one in inputs:
        start = time.process_time_ns()
        act(one)
        times.append(time.process_time_ns() - start)
    return statistics.median(times) / 1000


def measure(build: Build, size: int, repeat: int) -> dict[str, float]:
    """One tree of about `size` chunks."""
    tree = new_tree()
    paths = build(tree, size)
    rng = random.Random(0)
    sample = [rng.choice(paths) for _ in range(repeat)]
    now = [1e6]

    def touch(nodes: list[Node]) -> None:
        now[0] += 0.01
        tree.touch(nodes, now[0])

    found = {"nodes": float(len(tree)), "leaves": float(len(tree.leaves[Tier.HOST]))}
    found["lookup_us"] = median_us(lambda keys: tree.match(keys, Tier.HOST), sample)
    found["nodes_us"] = median_us(tree.nodes, sample)
    found["touch_us"] = median_us(touch, [tree.nodes(keys) for keys in sample])
    found |= victims(tree, now[0], repeat)
    return found


def victims(tree: DependencyTree, now: float, repeat: int) -> dict[str, float]:
    """Refreshes, then pops with their evictions; the tree shrinks."""
    policy = EloraPolicy(tree, Rates(), Demand(), CostSettings(token_bytes=131072.0))
    queue = VictimQueue(tree, Tier.HOST, policy)
    refresh = median_us(lambda i: queue.select_count(1, now + i), range(1, 31))
    now += 31.0
    queue.select_count(1, now)

    def pop(_: int) -> None:
        chosen.append(queue.select_count(1, now)[0])

    pops, evictions = [], []
    for i in range(min(repeat, len(tree) // 4)):
        chosen: list[Node] = []
        refreshes = queue.refreshes
        spent = median_us(pop, [i])
        if queue.refreshes == refreshes:
            pops.append(spent)
        evictions.append(median_us(lambda node: tree.set_absent(node, Tier.HOST), chosen))
    return {
        "pop_us": statistics.median(pops),
        "pop_mean_us": statistics.mean(pops),
        "evict_us": statistics.median(evictions),
        "refresh_ms": refresh / 1000,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeat", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for build in (shared, apart):
        for size in options.nodes:
            row: dict[str, Any] = {"shape": build.__name__}
            row |= measure(build, size, options.repeat)
            row["bytes_per_node"] = bytes_per_node(build, size)
            rows.append(row)
            print(f"{build.__name__}, {row['nodes']:.0f} nodes, {row['leaves']:.0f} leaves")
            for name, value in row.items():
                if name in ("shape", "nodes", "leaves"):
                    continue
                target = TARGETS.get(name)
                aim = "" if target is None else f"  aim < {target:g}"
                print(f"  {name:<16}{value:10.2f}{aim}{verdict(value, target)}")
    print_growth(rows)
    print(PAPER)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def verdict(value: float, target: float | None) -> str:
    return "" if target is None or value < target else "  MISSED"


def print_growth(rows: Sequence[dict[str, Any]]) -> None:
    """From the smallest to the largest tree of each shape."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        same = [row for row in rows if row["shape"] == shape]
        if len(same) < 2:
            continue
        grown = {name: same[-1][name] / same[0][name] for name in TARGETS}
        listed = ", ".join(f"{name} x{factor:.2f}" for name, factor in grown.items())
        print(f"{shape}, from {same[0]['nodes']:.0f} to {same[-1]['nodes']:.0f} nodes: {listed}")


if __name__ == "__main__":
    main()
