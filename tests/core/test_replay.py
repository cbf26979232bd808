"""Exact hits of the cost model against LRU on small seeded loads (docs/cost_model.md)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from elora_connector.config import load_config
from elora_connector.core.cost_model import CostSettings, EloraPolicy
from elora_connector.core.demand import Demand
from elora_connector.core.policy import LRU, EvictionPolicy
from elora_connector.core.rates import Rates
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import BASE, ChunkKey, Tier
from elora_connector.core.victims import VictimQueue

HOST = Tier.HOST
Load = Iterator[tuple[float, tuple[object, ...]]]
"""(time, path of chunk names) of each request."""


def zipf() -> Load:
    """400 prompts of four chunks, popularity 1/rank, never changing."""
    rng, now = random.Random(0), 0.0
    weights = [1 / (i + 1) for i in range(400)]
    for _ in range(2000):
        now += rng.expovariate(10.0)
        yield now, (rng.choices(range(400), weights)[0], 0, 1, 2)


def scan() -> Load:
    """60 hot prompts; every other minute most requests are one-off ones of a scan."""
    rng, now = random.Random(1), 0.0
    for number in range(2000):
        now += rng.expovariate(10.0)
        scanned = (number // 400) % 2 and rng.random() < 0.8
        yield now, ("scan", number, 1, 2) if scanned else ("hot", rng.randrange(60), 1, 2)


def agent(rate: float) -> Load:
    """20 sessions at a time, each turn two chunks longer than the one before, then gone."""
    rng, now = random.Random(2), 0.0
    active: list[list[int]] = []
    started = 0
    while started < 250 or active:
        while len(active) < 20 and started < 250:
            active.append([started, 0, rng.randint(3, 12)])
            started += 1
        now += rng.expovariate(rate)
        session = rng.choice(active)
        session[1] += 1
        yield now, ("system", session[0] % 4, *((session[0], i) for i in range(2 * session[1])))
        if session[1] == session[2]:
            active.remove(session)


def hits(load: Load, room: int, tree: DependencyTree, policy: EvictionPolicy) -> int:
    """Chunks found, in a host tier of `room` chunks that takes in everything."""
    queue = VictimQueue(tree, HOST, policy, k=64)
    adapter = tree.adapter(BASE, 0.0)
    found = 0
    for now, path in load:
        keys = [ChunkKey(repr(path[: i + 1]).encode()) for i in range(len(path))]
        hit = tree.match(keys, HOST)
        found += hit
        nodes = tree.nodes(keys)
        tree.touch([adapter, *nodes], now)
        parent = nodes[hit - 1] if hit else adapter
        for one in keys[hit:]:
            if tree.num_resident(HOST) == room:
                tree.pin(parent)
                victims = queue.select_count(1, now)
                tree.unpin(parent)
                if not victims:
                    break
                tree.set_absent(victims[0], HOST)
                tree.clock.turned_over(1 / room, now)
            parent = tree.add(parent, one, now)
            tree.set_pending(parent, HOST)
            tree.set_ready(parent, HOST)
    return found


def elora(load: Load, room: int) -> int:
    """With the defaults of the configuration."""
    model = load_config({}, {}).cost_model
    tree = DependencyTree(
        1 << 20,
        model.visit_decay_s,
        model.visit_prior,
        visit_turnovers=model.visit_turnovers or math.inf,
    )
    settings = CostSettings(tau_s=model.tau_s, token_bytes=4096.0)
    return hits(load, room, tree, EloraPolicy(tree, Rates(), Demand(), settings))


def lru(load: Load, room: int) -> int:
    return hits(load, room, DependencyTree(1 << 20), LRU())


@pytest.mark.parametrize(
    ("name", "room", "least"),
    [
        ("zipf", 150, 1.03),
        ("zipf", 600, 1.0),
        ("scan", 150, 1.0),
        ("scan", 350, 1.01),
        ("agent", 150, 0.98),
        ("agent", 350, 0.99),
        ("slow agent", 150, 0.98),
        ("slow agent", 350, 0.99),
    ],
)
def test_against_lru(name: str, room: int, least: float) -> None:
    loads = {
        "zipf": zipf,
        "scan": scan,
        "agent": lambda: agent(4.0),
        "slow agent": lambda: agent(0.5),
    }
    ours, base = elora(loads[name](), room), lru(loads[name](), room)
    print(f"{name} in {room} chunks: {ours} hits, LRU {base}: {ours / base:.3f}")
    assert ours >= least * base
