"""`elora purge`: remove an adapter, a version of it or a namespace from a store.

Children go before their parents, so that an interrupted purge leaves whole prefixes
behind and nothing that no look-up can reach.  An engine may go on writing meanwhile:
the store is scanned again until nothing is left.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from elora_connector.cli import PROBLEM, options
from elora_connector.cli.keyspace import Key, Scan, Selection, meter, selection, shown_adapter
from elora_connector.cli.output import (
    UsageError,
    console,
    human_bytes,
    note,
    reporting,
    show,
    table,
)
from elora_connector.cli.store import Shard, Store
from elora_connector.cli.values import Beginning, beginnings
from elora_connector.errors import CodecError
from elora_connector.tiers.codec import parse_header

_PASSES = 5

Node = tuple[str, bytes]
"""Namespace and chunk."""


@dataclass(slots=True)
class Plan:
    """Keys to remove, by chunk, and each chunk's parent.

    `kept`: keys of ours whose values do not claim to be ours; they stay.
    """

    keys: dict[Node, list[tuple[Shard, bytes]]] = field(default_factory=dict)
    parents: dict[Node, Node] = field(default_factory=dict)
    groups: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    kept: int = 0

    def add(self, shard: Shard, key: Key, begin: Beginning) -> None:
        if not begin.exists:
            return
        if not begin.ours:
            self.kept += 1
            return
        namespace = key.parts.namespace_hex
        node = namespace, bytes(key.parts.chunk)
        first = node not in self.keys
        self.keys.setdefault(node, []).append((shard, key.raw))
        sums = self.groups.setdefault((namespace, shown_adapter(key.parts)), [0, 0, 0])
        sums[0] += first
        sums[1] += 1
        sums[2] += begin.size
        try:
            self.parents[node] = namespace, parse_header(begin.raw).parent
        except CodecError:
            return  # damaged, so nobody can read it: no order to keep above it

    def levels(self) -> Iterator[list[Node]]:
        """Chunks by depth, the deepest first."""
        by_depth: dict[int, list[Node]] = defaultdict(list)
        depths: dict[Node, int] = {}
        for node in self.keys:
            by_depth[self._depth(node, depths)].append(node)
        for depth in sorted(by_depth, reverse=True):
            yield by_depth[depth]

    def _depth(self, node: Node, known: dict[Node, int]) -> int:
        path: dict[Node, None] = {}
        here: Node | None = node
        # A forged header may make a circle; it is cut where it closes.
        while here is not None and here not in known and here not in path:
            path[here] = None
            parent = self.parents.get(here)
            here = parent if parent in self.keys else None
        depth = known.get(here, -1) if here is not None else -1
        for step in reversed(path):
            depth += 1
            known[step] = depth
        return known[node]

    def data(self) -> list[dict[str, Any]]:
        return [
            {"namespace": place[0], "adapter": place[1], "chunks": c, "values": v, "bytes": size}
            for place, (c, v, size) in sorted(self.groups.items())
        ]


def purge(
    url: options.StoreUrl = None,
    config: options.ConfigFile = None,
    adapter: options.Adapter = None,
    namespace: options.Namespace = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: options.Json = False,
) -> None:
    """Remove an adapter, one version of it, or a namespace from a store.

    Shows what would go and asks first; without a terminal it needs --yes. Only values
    that claim to be ours are removed.
    """
    with reporting(as_json):
        wanted = selection(adapter, namespace)
        if wanted.everything:
            raise UsageError("name what to remove: --adapter, --namespace or both")
        with Store(options.resolve(config, url)) as store:
            plan = _plan(store, wanted, quiet=as_json)
            _one_namespace(wanted, plan)
            data = {"store": store.label, "dry_run": dry_run, "groups": plan.data()}
            data |= {"kept": plan.kept, "removed": 0, "left": 0}
            if not as_json:
                _show_plan(data)
            if plan.keys and not dry_run:
                _agree(yes, interactive=not as_json)
                data |= _remove_all(store, wanted, plan, quiet=as_json)
        show(as_json, data, lambda console: _show_end(console, data))
        if data["left"]:
            note("an engine is still writing: unload the adapter there, then purge again")
            raise typer.Exit(PROBLEM)


def _plan(store: Store, wanted: Selection, *, quiet: bool) -> Plan:
    plan = Plan()
    with meter("scanning", store.size(), quiet=quiet) as progress:
        for shard, keys in Scan(store, wanted).batches(progress):
            for key, begin in zip(keys, beginnings(shard, keys), strict=True):
                plan.add(shard, key, begin)
    return plan


def _one_namespace(wanted: Selection, plan: Plan) -> None:
    found = sorted({namespace for namespace, _ in plan.keys})
    if wanted.namespace is not None and len(found) > 1:
        raise UsageError(f"--namespace {wanted.namespace} fits several: {', '.join(found)}")


def _agree(yes: bool, *, interactive: bool) -> None:
    if yes:
        return
    if not interactive or not sys.stdin.isatty():
        raise UsageError("nothing was removed: give --yes, since there is no terminal to ask on")
    if not typer.confirm("Remove these?", err=True):
        note("nothing was removed")
        raise typer.Exit(PROBLEM)


def _remove_all(store: Store, wanted: Selection, plan: Plan, *, quiet: bool) -> dict[str, int]:
    removed = 0
    for _ in range(_PASSES):
        removed += _remove(plan, quiet=quiet)
        plan = _plan(store, wanted, quiet=quiet)
        if not plan.keys:
            break
    return {"removed": removed, "left": sum(map(len, plan.keys.values()))}


def _remove(plan: Plan, *, quiet: bool) -> int:
    """Unlink level by level; a level is gone on every shard before the next begins."""
    removed = 0
    with meter("removing", sum(map(len, plan.keys.values())), quiet=quiet) as progress:
        for level in plan.levels():
            by_shard: dict[Shard, list[bytes]] = defaultdict(list)
            for node in level:
                for shard, raw in plan.keys[node]:
                    by_shard[shard].append(raw)
            for shard, raws in by_shard.items():
                removed += shard.unlink(raws)
                progress.advance(len(raws))
    return removed


def _show_plan(data: dict[str, Any]) -> None:
    out = console()
    columns = {"namespace": "left", "adapter": "left", "chunks": "right", "values": "right"}
    columns["size"] = "right"
    rows = [
        (g["namespace"][:12], g["adapter"], g["chunks"], g["values"], human_bytes(g["bytes"]))
        for g in data["groups"]
    ]
    if rows:
        out.print(table(columns, rows))
    else:
        out.print(f"{data['store']}: nothing matches")
    if data["kept"]:
        note(f"{data['kept']} keys hold something that does not claim to be ours; they stay")


def _show_end(out: Console, data: dict[str, Any]) -> None:
    if data["dry_run"]:
        out.print("dry run: nothing was removed")
    else:
        out.print(f"removed {data['removed']} values, {data['left']} left")
