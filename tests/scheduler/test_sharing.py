"""Several instances and one store: who writes what, and what is kept alive."""

from __future__ import annotations

import pytest

from tests.support.faulty_tier import FaultyTier
from tests.support.scheduler_rig import CHUNK, SYNC, VARIANTS, Rig, Variant, prompt

LENGTH = 4 * CHUNK + 1
TTL = 86400.0


def calls(rig: Rig, operation: str) -> list[tuple[str, ...]]:
    assert rig.tier is not None
    return [keys for found, keys in rig.tier.calls if found == operation]


def written(rig: Rig) -> list[str]:
    return [key for (key,) in calls(rig, "write")]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_instances_do_not_write_what_others_have_written(variant: Variant) -> None:
    first = Rig(variant)
    first.run(first.submit("a", prompt(LENGTH)))
    first.drain()
    assert len(written(first)) == 4
    for seed in range(3):
        other = Rig(variant, seed=seed, store=first.tier)
        (answer,) = other.run(other.submit("a", prompt(LENGTH)))
        other.drain()
        assert answer.hit == 4 * CHUNK
        assert written(other) == []
    # Of a longer prompt only what is new.
    more = Rig(variant, store=first.tier)
    more.run(more.submit("a", prompt(6 * CHUNK + 1)))
    more.drain()
    assert len(written(more)) == 2


def test_parents_are_written_before_their_children() -> None:
    rig = Rig(SYNC, ranks=2)
    rig.run(rig.submit("a", prompt(LENGTH), max_tokens=2 * CHUNK))
    rig.drain()
    root_first = [rig.side._names.of(k, i, r) for k, i, r in path_of(rig)]
    for rank in range(2):
        suffix = f"tp{rank}pp0"
        order = [key for key in written(rig) if key.endswith(suffix)]
        assert order == [key for key in root_first if key.endswith(suffix)]
        assert len(order) == 6


def path_of(rig: Rig) -> list[tuple[object, object, object]]:
    """(chunk, identity, rank) of the one path in the tree, from the root on."""
    from elora_connector.core.node import NodeKind
    from elora_connector.core.types import Rank

    chunks = {node.key: node for node in rig.side.manager.tree.chunks}
    depth = {}
    for key, node in chunks.items():
        steps, up, identity = 0, node.parent, None
        while up is not None and up.kind is NodeKind.CHUNK:
            steps, up = steps + 1, up.parent
        assert up is not None
        identity = up.identity
        depth[key] = (steps, identity)
    ordered = sorted(depth, key=lambda key: depth[key][0])
    return [(key, depth[key][1], Rank(tp=tp)) for key in ordered for tp in range(2)]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_store_keeps_its_ancestors_alive(prefix_caching: bool) -> None:
    """Also where the GPU's own cache serves the prompt, so that nothing is ever loaded."""
    rig = Rig(SYNC, prefix_caching=prefix_caching)
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    rig.settle()
    assert calls(rig, "refresh") == []
    rig.now += TTL / 2
    longer = [*answer.prompt, *answer.tokens, *prompt(3 * CHUNK, 5)]
    rig.run(rig.submit("a", longer))
    rig.drain()
    root_first = written(rig)
    assert len(root_first) == 7
    assert calls(rig, "refresh") == [tuple(root_first[:4])]


def test_host_hits_refresh_once_per_quarter_of_the_ttl() -> None:
    rig = Rig(SYNC, prefix_caching=False)
    rig.run(rig.submit("a", prompt(LENGTH)))
    for _ in range(5):
        rig.run(rig.submit("a", prompt(LENGTH)))
    assert calls(rig, "refresh") == [tuple(written(rig))]
    rig.now += TTL / 4
    for _ in range(5):
        rig.run(rig.submit("a", prompt(LENGTH)))
    assert calls(rig, "refresh") == [tuple(written(rig))] * 2
    rig.drain()


def test_a_child_without_its_parent_is_not_used_and_goes_by_its_ttl() -> None:
    first = Rig(SYNC)
    first.run(first.submit("a", prompt(LENGTH)))
    first.drain()
    store = first.tier
    assert store is not None
    root, *children = written(first)
    store.drop(root)
    second = Rig(SYNC, store=store)
    second.now = first.now
    (answer,) = second.run(second.submit("a", prompt(LENGTH)))
    second.drain()
    assert answer.hit == 0
    assert written(second) == [root, *children], "each is offered again"
    assert all(store.raw(key) is not None for key in (root, *children))


def test_the_default_ttl_is_finite() -> None:
    rig = Rig(SYNC)
    assert rig.side.config.remote.ttl_s == TTL
    assert FaultyTier().raw("x") is None
