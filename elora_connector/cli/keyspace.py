"""Which keys of a store are ours, and which of them a command is about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from elora_connector.cli.output import UsageError, console, printable
from elora_connector.cli.store import Shard, Store
from elora_connector.core.keys import KEY_SCHEMA, RemoteKeyParts, RemoteKeys, encode_name

_FINGERPRINT = re.compile(r"(.*)@([0-9a-f]{12}|[0-9a-f]{64})", re.DOTALL)
_NAMESPACE = re.compile(r"[0-9a-f]{1,32}")
_TAG_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Key:
    """One of our keys, and what it says."""

    raw: bytes
    parts: RemoteKeyParts


@dataclass(frozen=True, slots=True)
class Selection:
    """What a command is about; None stands for all.

    `name` is percent-encoded as in a key, `fingerprint` its first 12 hex digits,
    `namespace` the first hex digits of a namespace.
    """

    namespace: str | None = None
    name: str | None = None
    fingerprint: str | None = None

    @property
    def everything(self) -> bool:
        return self == Selection()

    @property
    def pattern(self) -> str:
        """Glob for SCAN; none of the parts can hold a character that is special in one."""
        if self.everything:
            return "elora:*"
        tag = "*" if self.name is None else f"{self.name}@{self.fingerprint or '*'}"
        return f"elora:{KEY_SCHEMA}:{self.namespace or ''}*:{{*}}:{tag}:*"

    def __contains__(self, parts: RemoteKeyParts) -> bool:
        name, _, fingerprint = parts.tag.rpartition("@")
        return (
            parts.schema == KEY_SCHEMA
            and (self.namespace is None or parts.namespace_hex.startswith(self.namespace))
            and self.name in (None, name)
            and self.fingerprint in (None, fingerprint)
        )


def selection(adapter: str | None, namespace: str | None) -> Selection:
    """From the options `--adapter` and `--namespace`.

    A name that itself ends like a fingerprint is meant with its own fingerprint behind it.

    Raises:
        UsageError: the namespace is not one.
    """
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        raise UsageError("--namespace takes up to 32 hex digits, as elora inspect shows them")
    if adapter is None:
        return Selection(namespace)
    if not adapter:
        raise UsageError("--adapter takes NAME or NAME@FINGERPRINT")
    match = _FINGERPRINT.fullmatch(adapter)
    if match is None:
        return Selection(namespace, encode_name(adapter))
    return Selection(namespace, encode_name(match[1]), match[2][:_TAG_DIGITS])


def shown_adapter(parts: RemoteKeyParts) -> str:
    """`name@<12 hex>`, safe to print; a name that was cut stays as it is in the key."""
    return parts.tag if parts.name is None else f"{printable(parts.name)}@{parts.digest_hex}"


@dataclass(slots=True)
class Scan:
    """Our keys in a store, each once, and a count of what only looks like ours.

    `unknown`: keys that begin with `elora:` but are none of this schema.
    """

    store: Store
    wanted: Selection
    unknown: int = 0
    _seen: set[int] = field(default_factory=set)

    def batches(self, progress: Meter) -> Iterator[tuple[Shard, list[Key]]]:
        """Portions of new keys, shard by shard."""
        for shard in self.store.shards:
            for raws in shard.scan(self.wanted.pattern):
                progress.advance(len(raws))
                yield shard, self._new(raws)

    def _new(self, raws: list[bytes]) -> list[Key]:
        keys = []
        for raw in raws:
            # Of a hundred million keys, a pair shares 64 bits with a chance below 0.1 %.
            mark = xxhash.xxh3_64_intdigest(raw)
            if mark in self._seen:
                continue
            self._seen.add(mark)
            parts = RemoteKeys.parse(raw.decode("utf-8", "replace"))
            if parts is None or parts.schema != KEY_SCHEMA:
                self.unknown += 1
            elif parts in self.wanted:
                keys.append(Key(raw, parts))
        return keys


class Meter:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, progress: Progress | None, what: str, total: int) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=total)

    def advance(self, count: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, count)


@contextmanager
def meter(what: str, total: int, *, quiet: bool) -> Iterator[Meter]:
    """Progress towards `total`, on stderr; `quiet` never shows any."""
    err = console(stderr=True)
    if quiet or not err.is_terminal:
        yield Meter(None, what, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        yield Meter(progress, what, total)
