"""`elora verify`: read every value back and check it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from elora_connector.cli import PROBLEM, options
from elora_connector.cli.keyspace import Key, Scan, meter, selection, shown_adapter
from elora_connector.cli.output import human_bytes, note, reporting, show, table
from elora_connector.cli.store import Shard, Store
from elora_connector.cli.values import Beginning, Checker, beginnings
from elora_connector.core.keys import root_key
from elora_connector.core.types import Identity
from elora_connector.errors import CodecError
from elora_connector.tiers.codec import MAX_NAME_BYTES, Header

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Bad:
    """A value that is not what it should be; `removable` if it claims to be ours."""

    shard: Shard
    key: Key
    reason: str
    removable: bool

    def data(self) -> dict[str, Any]:
        adapter = shown_adapter(self.key.parts)
        return {"key": self.key.raw.decode(), "adapter": adapter, "reason": self.reason}


@dataclass(slots=True)
class Findings:
    """What reading everything back found.

    `children`: keys of values that are no root, and their parents.  `unsigned`: values
    without a MAC of our key; since a namespace belongs to one MAC key, they are forgeries
    in the namespaces that are `signed`.
    """

    good: int = 0
    size: int = 0
    without_checksum: int = 0
    bad: list[Bad] = field(default_factory=list)
    chunks: set[tuple[str, bytes]] = field(default_factory=set)
    children: list[tuple[Key, bytes]] = field(default_factory=list)
    authentic: int = 0
    signed: set[str] = field(default_factory=set)
    unsigned: list[tuple[Shard, Key]] = field(default_factory=list)


class Reader:
    """Checks values one after the other and keeps account."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self.found = Findings()

    def read(self, shard: Shard, key: Key, begin: Beginning) -> None:
        """Check one value; a bad one is looked at twice, since it may just be changing."""
        for attempt in (1, 2):
            if not begin.exists:
                return
            try:
                header = self._checker.check(shard, key, begin)
            except CodecError as error:
                if attempt == 2:
                    self.found.bad.append(Bad(shard, key, error.reason, begin.ours))
                    return
                begin = beginnings(shard, [key])[0]
            else:
                self._keep(shard, key, begin, header)
                return

    def _keep(self, shard: Shard, key: Key, begin: Beginning, header: Header) -> None:
        found, namespace = self.found, key.parts.namespace_hex
        found.good += 1
        found.size += begin.size
        found.without_checksum += header.checksum is None
        found.chunks.add((namespace, bytes(key.parts.chunk)))
        if not _is_root(header):
            found.children.append((key, header.parent))
        if self._checker.authentic(header):
            found.authentic += 1
            found.signed.add(namespace)
        else:
            found.unsigned.append((shard, key))

    def finish(self, store: Store) -> int:
        """Settle what needs all values: forgeries, and the number without a parent."""
        found = self.found
        forged = [item for item in found.unsigned if item[1].parts.namespace_hex in found.signed]
        found.bad += [Bad(shard, key, "mac_missing", removable=True) for shard, key in forged]
        found.good -= len(forged)
        lonely = [
            key.raw.replace(key.parts.chunk.hex().encode(), parent.hex().encode())
            for key, parent in found.children
            if (key.parts.namespace_hex, parent) not in found.chunks
        ]
        # Asked once more: a parent may have been written behind the scan's back.
        return sum(not store.has(raw) for raw in lonely)


def _is_root(header: Header) -> bool:
    """Is this the first chunk of a prompt without a salt?  With one, nobody can tell."""
    if len(header.name) > MAX_NAME_BYTES:
        return False
    name = header.name.decode("utf-8", "surrogatepass")
    return header.parent == root_key(header.namespace, Identity(name, header.digest), None)


def verify(
    url: options.StoreUrl = None,
    config: options.ConfigFile = None,
    adapter: options.Adapter = None,
    namespace: options.Namespace = None,
    delete_bad: Annotated[
        bool, typer.Option("--delete-bad", help="Remove bad values that claim to be ours.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Read every value back: header against key, length, checksum, MAC, parent.

    The MAC is checked where the configuration has its key. Exit code 1 if anything is bad.
    """
    with reporting(as_json):
        wanted = selection(adapter, namespace)
        resolved = options.resolve(config, url)
        reader = Reader(Checker(resolved.remote.max_value_bytes, resolved.remote.mac_key))
        with Store(resolved) as store:
            with meter("verifying", store.size(), quiet=as_json) as progress:
                for shard, keys in Scan(store, wanted).batches(progress):
                    for key, begin in zip(keys, beginnings(shard, keys), strict=True):
                        reader.read(shard, key, begin)
            parentless = reader.finish(store)
            removed = _remove(reader.found.bad) if delete_bad else 0
            data = _data(store, reader.found, parentless, removed)
        show(as_json, data, lambda console: _render(console, data))
        if data["bad"]:
            raise typer.Exit(PROBLEM)


def _remove(bad: list[Bad]) -> int:
    return sum(item.shard.unlink([item.key.raw]) for item in bad if item.removable)


def _data(store: Store, found: Findings, parentless: int, removed: int) -> dict[str, Any]:
    return {
        "store": store.label,
        "good": found.good,
        "bytes": found.size,
        "bad": len(found.bad),
        "reasons": dict(sorted(Counter(item.reason for item in found.bad).items())),
        "bad_values": [item.data() for item in found.bad],
        "removed": removed,
        "parentless": parentless,
        "without_checksum": found.without_checksum,
        "mac_checked": found.authentic,
    }


def _render(console: Console, data: dict[str, Any]) -> None:
    rows = [(item["reason"], item["adapter"], item["key"]) for item in data["bad_values"][:_SHOWN]]
    if rows:
        console.print(table({"reason": "left", "adapter": "left", "key": "left"}, rows))
        if data["bad"] > _SHOWN:
            console.print(f"... and {data['bad'] - _SHOWN} more; --json lists them all")
    console.print(
        f"{data['store']}: {data['good']} good values ({human_bytes(data['bytes'])}), "
        f"{data['bad']} bad, {data['removed']} removed; MAC checked on {data['mac_checked']}"
    )
    if data["parentless"]:
        note(
            f"{data['parentless']} values have no parent here: first chunks of salted prompts, "
            "or left over; nobody can read the latter and they expire"
        )
    if data["without_checksum"]:
        note(f"{data['without_checksum']} values carry no checksum; only their length was checked")
