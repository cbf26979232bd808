"""The formula against its oracle, its worked example, its edges, and each of its switches."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.core.cost_model import CostSettings, EloraPolicy, SwapOut, Terms
from elora_connector.core.demand import Demand, expected_adapters
from elora_connector.core.invariants import check_tree
from elora_connector.core.leaves import LeafTable
from elora_connector.core.node import TIERS, AdapterNode, Node, NodeKind
from elora_connector.core.rates import Rates
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import BASE, ChunkKey, Identity, Tier
from elora_connector.core.victims import VictimQueue

GPU, HOST, REMOTE = TIERS
CHUNK_BYTES = 1 << 20
TOKEN_BYTES = 4096.0


def identity(number: int) -> Identity:
    return Identity(f"a{number}", bytes([number]) * 32)


def key(*path: int) -> ChunkKey:
    return ChunkKey(bytes(path).ljust(32, b"\xff"))


def model(
    tree: DependencyTree,
    demand: Demand | None = None,
    rates: Rates | None = None,
    **changes: object,
) -> EloraPolicy:
    settings = CostSettings(token_bytes=TOKEN_BYTES, **changes)  # type: ignore[arg-type]
    return EloraPolicy(tree, rates or Rates(), demand or Demand(), settings)


# ---- Eq. 3 -----------------------------------------------------------------------------


def test_worked_example() -> None:
    """1 - .5^4 = .9375, 1 - .7^4 = .7599, 1 - .8^4 = .5904."""
    assert expected_adapters([0.5, 0.3, 0.2], 4) == pytest.approx(2.2878)
    assert round(expected_adapters([0.5, 0.3, 0.2], 4), 2) == 2.29


def test_demand_measures_the_worked_example() -> None:
    demand = Demand()
    for batch in ({"a": 2, "b": 1, "c": 1}, {"a": 2, "b": 2}, {"a": 2, "b": 1, "c": 1}):
        demand.note(1.0, batch, 4)
    demand.note(1.0, {"a": 4}, 4)
    demand.note(1.0, {"b": 2, "c": 2}, 4)
    assert demand.batch_size(1.0) == 4
    assert demand.low(1.0) == pytest.approx(expected_adapters([0.5, 0.3, 0.2], 4))


def test_demand_forgets_after_the_window() -> None:
    demand = Demand(window_s=5.0)
    demand.note(10.0, {"a": 1}, 1)
    demand.note(13.0, {"b": 3}, 3)
    assert demand.batch_size(14.0) == 2
    assert demand.low(14.0) == pytest.approx(expected_adapters([0.25, 0.75], 2))
    assert demand.low(16.0) == 1.0, "only the batches of b are left"
    assert demand.low(19.0) == 0.0
    assert demand.batch_size(19.0) == 0.0


def test_requests_of_the_base_model_need_no_adapter() -> None:
    demand = Demand()
    demand.note(0.0, {"a": 1}, 4)
    assert demand.low(0.0) == pytest.approx(1 - 0.75**4)
    demand.note(0.0, {}, 0)
    assert demand.batch_size(0.0) == 4, "a step without requests is no batch"


def test_a_clock_that_went_back_loses_nothing() -> None:
    demand = Demand()
    demand.note(10.0, {"a": 1}, 1)
    demand.note(9.0, {"b": 1}, 1)
    assert demand.low(10.0) == pytest.approx(1.0)
    assert demand.batch_size(10.0) == 1


@given(
    st.lists(
        st.tuples(
            st.floats(0, 4), st.dictionaries(st.integers(0, 5), st.integers(1, 5), max_size=4)
        ),
        max_size=20,
    )
)
def test_demand_adds_up(batches: list[tuple[float, dict[int, int]]]) -> None:
    """Whatever came and went, what is left is what was noted in the window."""
    demand, now = Demand(), 0.0
    noted = []
    for gap, adapters in batches:
        now += gap
        demand.note(now, adapters, sum(adapters.values()) + 1)
        noted.append((now, adapters))
    slice_s = 5.0 / 50
    kept = [a for t, a in noted if t // slice_s > now // slice_s - 50]
    total = sum(sum(a.values()) + 1 for a in kept)
    counts = {k: sum(a.get(k, 0) for a in kept) for k in range(6)}
    if not kept:
        assert demand.low(now) == 0.0
        return
    assert demand.batch_size(now) == total / len(kept)
    expected = expected_adapters((c / total for c in counts.values()), total / len(kept))
    assert demand.low(now) == pytest.approx(expected)


@pytest.mark.parametrize("window", [0.0, -1.0, math.nan])
def test_bad_window(window: float) -> None:
    with pytest.raises(ValueError, match="window_s"):
        Demand(window)


@pytest.mark.parametrize(
    ("probabilities", "batch", "low"),
    [([], 4, 0.0), ([1.0], 0, 0.0), ([1.0], 3, 1.0), ([0.5, -1.0, 2.0], 1, 1.5)],
)
def test_expected_adapters_at_the_edges(
    probabilities: list[float], batch: float, low: float
) -> None:
    assert expected_adapters(probabilities, batch) == low


# ---- the oracle ------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 10**6), st.integers(0, 40)), max_size=40
)
MODES = st.builds(
    lambda lora, cost, visit, recency, swap: {
        "terms": Terms(lora, cost, visit, recency),
        "swap_out": swap,
    },
    *[st.booleans()] * 4,
    st.sampled_from(SwapOut),
)


def grown(
    steps: Iterable[tuple[int, int, int]], rates: Rates
) -> tuple[DependencyTree, Demand, float]:
    """A tree after some life in all tiers."""
    tree = DependencyTree(CHUNK_BYTES, visit_decay_s=20.0, visit_prior=1.0)
    demand, now, slot = Demand(), 100.0, 0
    nodes: list[Node] = [tree.adapter(i, now) for i in (BASE, identity(1), identity(2))]
    for action, which, more in steps:
        now += more / 8
        nodes = [n for n in nodes if n.attached]
        node = nodes[which % len(nodes)]
        if action < 4:
            if isinstance(node, AdapterNode) or node.ready(HOST):
                slot += 1
                child = tree.add(node, key(slot // 256, slot % 256), now)
                tree.set_pending(child, HOST, slot=slot)
                tree.set_ready(child, HOST)
                nodes.append(child)
        elif action < 6:
            tree.touch(path_to(node), now)
        elif action == 6:
            tree.set_ready(node, REMOTE)
        elif action == 7 and isinstance(node, AdapterNode) and node.identity != BASE:
            tree.set_ready(node, HOST)
            tree.set_ready(node, GPU)
            tree.resize(node, 1000 * more)
        elif action == 8:
            demand.note(now, {which % 5: 1 + more}, 2 + more)
            rates.adapter_load.add(f"a{which % 3}", more / 100)
            rates.adapter_activation.add(f"a{which % 3}", more / 1000)
        elif action == 9:
            parent = node.parent
            if node.kind is NodeKind.CHUNK and parent is not None and _usable_on_gpu(parent):
                tree.set_ready(node, GPU)
    check_tree(tree)
    return tree, demand, now


def _usable_on_gpu(parent: Node) -> bool:
    return parent.ready(GPU) or (isinstance(parent, AdapterNode) and parent.always_resident)


def path_to(node: Node) -> list[Node]:
    path: list[Node] = []
    here: Node | None = node
    while here is not None and here.adapter is not None:
        path.append(here)
        here = here.parent
    return path[::-1]


@given(STEPS, MODES, st.sampled_from(TIERS), st.integers(-5, 500), st.booleans())
def test_vectorised_is_eval_one(
    steps: list[tuple[int, int, int]],
    mode: dict[str, object],
    tier: Tier,
    later: int,
    exchange: bool,
) -> None:
    rates = Rates()
    tree, demand, now = grown(steps, rates)
    policy = model(tree, demand, rates, **mode)
    if exchange:
        policy = policy.for_exchange()
    now += later
    table = LeafTable(tier, tree.clock)
    nodes = [*tree.adapters, *tree.chunks]
    table.fill(nodes)
    scores = policy.scores(table, now)
    assert scores.shape == (len(nodes),)
    assert not np.isnan(scores).any()
    assert not np.isneginf(scores).any()
    at_the_floor = np.isposinf(scores)
    for node, score, spared in zip(nodes, scores, at_the_floor, strict=True):
        if spared:
            assert node.kind is NodeKind.ADAPTER
            assert mode["swap_out"] is SwapOut.KEPT
            assert not exchange
        else:
            assert score == pytest.approx(policy.eval_one(node, tier, now), abs=1e-9)


@given(STEPS, MODES, st.sampled_from([GPU, HOST]), st.integers(0, 200))
def test_fresh_pop_is_the_lowest_eval_of_all_leaves(
    steps: list[tuple[int, int, int]], mode: dict[str, object], tier: Tier, later: int
) -> None:
    rates = Rates()
    tree, demand, now = grown(steps, rates)
    policy = model(tree, demand, rates, **mode)
    now += later
    leaves = [
        node
        for node in (*tree.adapters, *tree.chunks)
        if node.ready(tier) and not node.pins and not node.counts[tier]
    ]
    evals = {node: policy.eval_one(node, tier, now) for node in leaves}
    finite = [node for node in leaves if evals[node] < math.inf]
    popped = VictimQueue(tree, tier, policy).select_count(1, now)
    if not finite:
        assert popped == []
        return
    lowest = min(evals[node] for node in finite)
    assert evals[popped[0]] == pytest.approx(lowest, abs=1e-9)


# ---- each term -------------------------------------------------------------------------


def scene() -> tuple[DependencyTree, Node, Node]:
    """Two host chunks of the base model: one hot and recent, one with a remote copy."""
    tree = DependencyTree(CHUNK_BYTES, visit_decay_s=1e9, visit_prior=1.0)
    base = tree.adapter(BASE, 0.0)
    nodes = []
    for i in range(2):
        node = tree.add(base, key(i), 0.0)
        tree.set_pending(node, HOST, slot=i)
        tree.set_ready(node, HOST)
        nodes.append(node)
    tree.touch([base, nodes[0]], 30.0)
    tree.set_ready(nodes[1], REMOTE)
    return tree, nodes[0], nodes[1]


def test_each_switch_changes_exactly_its_term() -> None:
    tree, hot, _ = scene()
    demand = Demand()
    demand.note(90.0, {"x": 1, "y": 1}, 2)
    now, tau = 90.0, 60.0
    low = expected_adapters([0.5, 0.5], 2)
    tree.set_ready(tree.adapter(identity(1), 0.0), HOST)
    idle = (now - 30.0) / tau
    terms = {
        "lora": math.log(1 / low),
        "cost": math.log(CHUNK_BYTES / TOKEN_BYTES / Rates().prefill.per_s),
        "visit": math.log(2.0),
        "recency": -math.log1p(math.exp(idle)),
    }
    assert terms["lora"] < 0
    whole = model(tree, demand).eval_one(hot, HOST, now)
    assert whole == pytest.approx(sum(terms.values()))
    for name, value in terms.items():
        without = model(tree, demand, terms=Terms(**{name: False}))
        table = LeafTable(HOST, tree.clock)
        table.fill([hot])
        assert without.scores(table, now)[0] == pytest.approx(whole - value), name
        assert without.eval_one(hot, HOST, now) == pytest.approx(whole - value), name


def test_tau_is_the_unit_of_idle_time() -> None:
    tree, hot, _ = scene()
    only = Terms(lora=False, cost=False, visit=False)
    assert model(tree, terms=only, tau_s=30.0).eval_one(hot, HOST, 60.0) == pytest.approx(
        -math.log1p(math.exp(1.0))
    )
    assert model(tree, terms=only).eval_one(hot, HOST, 0.0) == pytest.approx(-math.log(2)), (
        "a clock that went back is no idle time"
    )


def test_far_past_still_orders() -> None:
    """1 - sigmoid(1e6) is 0 in any float; its logarithm is not."""
    tree, hot, cold = scene()
    policy = model(tree, terms=Terms(lora=False, cost=False, visit=False))
    now = 60.0 * 1e6
    assert policy.eval_one(cold, HOST, now) < policy.eval_one(hot, HOST, now) < -9e5


# ---- cost ------------------------------------------------------------------------------


def test_what_it_costs_to_bring_back() -> None:
    tree, alone, shared = scene()
    rates = Rates()
    policy = model(tree, rates=rates)
    recompute = CHUNK_BYTES / TOKEN_BYTES / rates.prefill.per_s
    fetch = rates.remote_to_host.seconds(CHUNK_BYTES)
    assert policy.cost_s(alone, HOST) == recompute == 256 / 5000
    assert policy.cost_s(shared, HOST) == fetch < recompute
    tree.set_ready(alone, GPU)
    load = rates.host_to_gpu.seconds(CHUNK_BYTES)
    assert policy.cost_s(alone, GPU) == load < fetch
    tree.set_absent(alone, HOST)
    assert policy.cost_s(alone, GPU) == recompute, "nobody else holds it"
    tree.set_ready(alone, REMOTE)
    assert policy.cost_s(alone, GPU) == min(load + fetch, recompute)


def test_a_copy_that_is_slower_than_recomputing_is_worth_nothing() -> None:
    tree, alone, shared = scene()
    rates = Rates()
    for _ in range(5):
        rates.remote_to_host.add(CHUNK_BYTES, 10.0)
    policy = model(tree, rates=rates)
    assert policy.cost_s(shared, HOST) == policy.cost_s(alone, HOST)


def test_kv_of_an_adapter_that_is_not_loaded_costs_its_reload_too() -> None:
    tree = DependencyTree(CHUNK_BYTES, visit_prior=1.0)
    adapter = tree.adapter(identity(1), 0.0)
    node = tree.add(adapter, key(1), 0.0)
    tree.set_pending(node, HOST, slot=1)
    tree.set_ready(node, HOST)
    rates = Rates()
    rates.adapter_load.add("a1", 3.0)
    rates.adapter_load.add("a2", 1.0)
    policy = model(tree, rates=rates)
    recompute = 256 / 5000
    assert policy.cost_s(node, HOST) == 3.0 + recompute
    assert policy.cost_s(adapter, HOST) == 3.0
    tree.set_ready(adapter, HOST)
    assert policy.cost_s(node, HOST) == recompute
    assert policy.cost_s(adapter, GPU) == rates.adapter_activation.of("a1")
    assert policy.cost_s(tree.adapter(identity(9), 0.0), HOST) == rates.adapter_load.overall


# ---- Eq. 4 -----------------------------------------------------------------------------


def adapters_on_gpu(count: int) -> tuple[DependencyTree, list[AdapterNode]]:
    tree = DependencyTree(visit_prior=1.0)
    nodes = [tree.adapter(identity(i + 1), float(i)) for i in range(count)]
    for node in nodes:
        tree.resize(node, 10)
        tree.set_ready(node, HOST)
        tree.set_ready(node, GPU)
    return tree, nodes


def demand_of_two() -> Demand:
    demand = Demand()
    demand.note(10.0, {"x": 2, "y": 2}, 4)
    assert 1 < demand.low(10.0) < 2
    return demand


@pytest.mark.parametrize(("here", "victims"), [(1, 0), (2, 0), (3, 1), (4, 2)])
def test_no_adapter_goes_below_the_floor(here: int, victims: int) -> None:
    tree, nodes = adapters_on_gpu(here)
    queue = VictimQueue(tree, GPU, model(tree, demand_of_two()), kind=NodeKind.ADAPTER)
    assert queue.select_count(victims + 1, 10.0) == []
    assert queue.select_count(victims, 10.0) == nodes[:victims]


def test_an_exchange_knows_no_floor() -> None:
    tree, nodes = adapters_on_gpu(2)
    policy = model(tree, demand_of_two()).for_exchange()
    assert VictimQueue(tree, GPU, policy).select_count(1, 10.0) == nodes[:1]


def test_without_demand_there_is_no_floor() -> None:
    tree, nodes = adapters_on_gpu(1)
    assert VictimQueue(tree, GPU, model(tree)).select_count(1, 10.0) == nodes


def test_literal_reading_counts_without_the_victim() -> None:
    tree, nodes = adapters_on_gpu(1)
    demand = demand_of_two()
    literal = model(tree, demand, swap_out=SwapOut.LITERAL)
    kept = model(tree, demand, terms=Terms(lora=False))
    difference = literal.eval_one(nodes[0], GPU, 10.0) - kept.eval_one(nodes[0], GPU, 10.0)
    assert difference == pytest.approx(math.log(1e-30)), "none would be left: as near 0 as can be"
    tree, nodes = adapters_on_gpu(2)
    literal = model(tree, demand, swap_out=SwapOut.LITERAL)
    kept = model(tree, demand, terms=Terms(lora=False))
    difference = literal.eval_one(nodes[0], GPU, 10.0) - kept.eval_one(nodes[0], GPU, 10.0)
    assert difference == pytest.approx(math.log(1 / demand.low(10.0)))
    assert VictimQueue(tree, GPU, literal).select_count(2, 10.0) == nodes


# ---- monotone along a path -------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans(), st.integers(0, 60)), max_size=40))
def test_eval_never_rises_along_a_path(steps: list[tuple[int, bool, int]]) -> None:
    """Touches are of whole paths and a newborn never has more visits than its parent."""
    tree = DependencyTree(CHUNK_BYTES, visit_decay_s=30.0, visit_prior=1.0)
    nodes: list[Node] = [tree.adapter(BASE, 0.0)]
    now = 0.0
    for which, grow, more in steps:
        now += more
        node = nodes[which % len(nodes)]
        tree.touch(path_to(node), now)
        if grow:
            child = tree.add(node, key(len(nodes)), now)
            tree.set_pending(child, HOST, slot=len(nodes))
            tree.set_ready(child, HOST)
            nodes.append(child)
    policy = model(tree)
    for node in nodes[1:]:
        assert node.parent is not None
        if node.parent.kind is NodeKind.CHUNK:
            above = policy.eval_one(node.parent, HOST, now)
            assert policy.eval_one(node, HOST, now) <= above + 1e-12


@pytest.mark.parametrize("change", [{"tau_s": 0.0}, {"tau_s": math.nan}, {"token_bytes": 0.0}])
def test_bad_settings(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="tau_s"):
        CostSettings(**change)  # type: ignore[arg-type]


def test_bad_prior() -> None:
    with pytest.raises(ValueError, match="visit_prior"):
        DependencyTree(visit_prior=-1.0)
