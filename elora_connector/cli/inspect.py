"""`elora inspect`: what a store holds, by namespace and adapter version."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from elora_connector.cli import options
from elora_connector.cli.keyspace import Key, Scan, meter, selection, shown_adapter
from elora_connector.cli.output import (
    human_bytes,
    human_seconds,
    note,
    reporting,
    show,
    table,
)
from elora_connector.cli.store import Shard, Store

_GONE = -2
_NO_TTL = -1


@dataclass(slots=True)
class Group:
    """Sums of one adapter version in one namespace; sizes in bytes, times in ms."""

    namespace: str
    adapter: str
    name: str | None
    fingerprint: str
    values: int = 0
    size: int = 0
    untimed: int = 0
    chunks: set[bytes] = field(default_factory=set)
    ranks: set[str] = field(default_factory=set)
    ttls: array[int] = field(default_factory=lambda: array("q"))

    def add(self, key: Key, size: int, ttl_ms: int) -> None:
        self.values += 1
        self.size += size
        # Half of a SHA-256 is as good as the whole one for counting.
        self.chunks.add(bytes(key.parts.chunk[:16]))
        self.ranks.add(str(key.parts.rank))
        if ttl_ms == _NO_TTL:
            self.untimed += 1
        else:
            self.ttls.append(ttl_ms)

    def ttl_s(self) -> dict[str, float] | None:
        if not self.ttls:
            return None
        ttls = sorted(self.ttls)
        middle = statistics.median(ttls)
        return {"min": ttls[0] / 1000, "median": middle / 1000, "max": ttls[-1] / 1000}

    def data(self) -> dict[str, Any]:
        return {
            "namespace": self.namespace,
            "adapter": self.adapter,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "chunks": len(self.chunks),
            "values": self.values,
            "bytes": self.size,
            "ranks": sorted(self.ranks),
            "ttl_s": self.ttl_s(),
            "without_ttl": self.untimed,
        }


class Census:
    """All groups, and what lies under our keys without being a value."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], Group] = {}
        self.wrong_type = 0

    def add(self, shard: Shard, keys: list[Key]) -> None:
        commands = [(verb, key.raw) for key in keys for verb in ("STRLEN", "PTTL")]
        replies = shard.ask(commands)
        for key, size, ttl in zip(keys, replies[::2], replies[1::2], strict=True):
            if isinstance(ttl, Exception):
                raise ttl
            if isinstance(size, Exception):
                self._refused(size)
            elif ttl != _GONE:
                self._group(key).add(key, size, ttl)

    def _refused(self, error: Exception) -> None:
        if not str(error).startswith("WRONGTYPE"):
            raise error
        self.wrong_type += 1

    def _group(self, key: Key) -> Group:
        parts = key.parts
        place = parts.namespace_hex, parts.tag
        if place not in self.groups:
            shown = shown_adapter(parts)
            self.groups[place] = Group(parts.namespace_hex, shown, parts.name, parts.digest_hex)
        return self.groups[place]

    def sorted(self) -> list[Group]:
        return [group for _, group in sorted(self.groups.items())]


def inspect(
    url: options.StoreUrl = None,
    config: options.ConfigFile = None,
    adapter: options.Adapter = None,
    namespace: options.Namespace = None,
    as_json: options.Json = False,
) -> None:
    """List namespaces and adapter versions in a store: chunks, bytes, time to live.

    Reads no values and does not hold up the server (SCAN, STRLEN, PTTL).
    """
    with reporting(as_json):
        wanted = selection(adapter, namespace)
        with Store(options.resolve(config, url)) as store:
            scan, census = Scan(store, wanted), Census()
            with meter("scanning", store.size(), quiet=as_json) as progress:
                for shard, keys in scan.batches(progress):
                    census.add(shard, keys)
            groups = census.sorted()
            data = {
                "store": store.label,
                "groups": [group.data() for group in groups],
                "totals": _totals(groups),
                "unrecognised_keys": scan.unknown,
                "wrong_type_keys": census.wrong_type,
            }
        show(as_json, data, lambda console: _render(console, data))


def _totals(groups: Iterable[Group]) -> dict[str, int]:
    groups = list(groups)
    return {
        "namespaces": len({group.namespace for group in groups}),
        "adapters": len({group.adapter for group in groups}),
        "chunks": sum(len(group.chunks) for group in groups),
        "values": sum(group.values for group in groups),
        "bytes": sum(group.size for group in groups),
    }


def _render(console: Console, data: dict[str, Any]) -> None:
    totals = data["totals"]
    columns = {"namespace": "left", "adapter": "left", "chunks": "right", "values": "right"}
    columns |= {"size": "right", "ttl min": "right", "median": "right", "max": "right"}
    rows = [_cells(group) for group in data["groups"]]
    if rows:
        console.print(table(columns, rows))
    console.print(
        f"{data['store']}: {totals['chunks']} chunks in {totals['values']} values, "
        f"{human_bytes(totals['bytes'])}, {totals['adapters']} adapter versions, "
        f"{totals['namespaces']} namespaces"
    )
    if data["unrecognised_keys"]:
        note(f"{data['unrecognised_keys']} keys begin with elora: but are not of this version")
    if data["wrong_type_keys"]:
        note(f"{data['wrong_type_keys']} of our keys hold something other than a string")


def _cells(group: dict[str, Any]) -> list[str]:
    ttl = group["ttl_s"]
    times = [human_seconds(ttl[which]) for which in ("min", "median", "max")] if ttl else ["-"] * 3
    if group["without_ttl"]:
        times[2] = "never"
    return [
        group["namespace"][:12],
        group["adapter"],
        str(group["chunks"]),
        str(group["values"]),
        human_bytes(group["bytes"]),
        *times,
    ]
