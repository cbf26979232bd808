"""Stores filled by the tier itself, and the command run in this process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from elora_connector.core.keys import KEY_SCHEMA, RemoteKeys, root_key
from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.tiers.base import ValueSpec
from elora_connector.tiers.redis_cluster import redis_tier
from tests.support.redis_server import RedisServer

if TYPE_CHECKING:
    from typing_extensions import Self

NAMESPACE = hashlib.sha256(b"namespace").digest()
OTHER = hashlib.sha256(b"another namespace").digest()
NBYTES = 256
VALUE_BYTES = 1024 + NBYTES
RANK = Rank()

HARMLESS = {
    "scan", "strlen", "pttl", "getrange", "exists", "dbsize", "unlink", "ping", "info",
    "client|setname", "client|setinfo", "client", "select", "hello", "auth", "command",
    "set", "get", "acl", "acl|whoami", "config", "config|resetstat",
}  # fmt: skip
"""Commands that never hold up a server for long."""


def identity(name: str, content: str = "weights") -> Identity:
    return Identity(name, hashlib.sha256(content.encode()).digest())


def payload_of(spec: ValueSpec) -> bytes:
    return hashlib.shake_128(bytes(spec.chunk) + str(spec.rank).encode()).digest(spec.nbytes)


class Filler:
    """Writes chains of chunks as an engine does: parents first, keys of the real kind."""

    def __init__(self, url: str, **options: Any) -> None:
        settings = {"ttl_s": 600, "connect_timeout_s": 20.0, "operation_timeout_s": 20.0}
        self.tier = redis_tier(url, fail_open=False, **(settings | options))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.tier.close()

    def chain(
        self,
        who: Identity,
        length: int,
        *,
        prompt: str = "p",
        namespace: bytes = NAMESPACE,
        ranks: tuple[Rank, ...] = (RANK,),
        salt: str | None = None,
    ) -> list[ValueSpec]:
        """Write a prompt's chunks and return their specs, root first."""
        specs = chain(who, length, prompt=prompt, namespace=namespace, ranks=ranks, salt=salt)
        for spec in specs:
            assert self.tier.write(spec, memoryview(payload_of(spec))).ok
        return specs

    def readable(self, spec: ValueSpec) -> bool:
        dest = bytearray(spec.nbytes)
        return self.tier.read_into(spec, memoryview(dest)).ok and dest == payload_of(spec)


def chain(
    who: Identity,
    length: int,
    *,
    prompt: str = "p",
    namespace: bytes = NAMESPACE,
    ranks: tuple[Rank, ...] = (RANK,),
    salt: str | None = None,
) -> list[ValueSpec]:
    names = RemoteKeys(KEY_SCHEMA, namespace)
    parent = root_key(namespace, who, salt)
    specs = []
    for position in range(length):
        chunk = ChunkKey(hashlib.sha256(parent + f"{prompt}/{position}".encode()).digest())
        specs += [
            ValueSpec(
                key=names.of(chunk, who, rank),
                namespace=namespace,
                identity=who,
                chunk=chunk,
                parent=parent,
                rank=rank,
                dtype="bfloat16",
                shape=(2, NBYTES // 4),
                nbytes=NBYTES,
            )
            for rank in ranks
        ]
        parent = chunk
    return specs


def litter(server: RedisServer) -> dict[bytes, bytes]:
    """Keys of others, some of them close to ours; all must survive every command."""
    ours = RemoteKeys(KEY_SCHEMA, NAMESPACE).of(ChunkKey(bytes(32)), identity("civil"), RANK)
    strings = {
        "session:42": b"somebody else's",
        "elora": b"not a key of ours",
        "elora:": b"x",
        "elora:1:abc": b"x",
        "elora:config": b"x",
        ours + ":more": b"x",
        ours.replace("elora:1:", "elora:2:"): b"another schema",
        ours.replace("elora:1:", "Elora:1:"): b"x",
    }
    with server.client() as admin:
        for key, value in strings.items():
            admin.set(key, value)
        admin.rpush("elora:list", "x")
        admin.set(b"elora:\xff\xfe", b"x")
    return {key.encode(): value for key, value in strings.items()} | {b"elora:\xff\xfe": b"x"}


UNRECOGNISED = 7
"""Keys of `litter` that begin with `elora:` and are none of this schema."""


def used_commands(server: RedisServer) -> set[str]:
    """Commands the server has run since its statistics were reset."""
    with server.client() as admin:
        return {name.removeprefix("cmdstat_") for name in admin.info("commandstats")}


@dataclass(frozen=True)
class Ran:
    """What one run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_elora(arguments: list[str], *, stdin: str | None = None) -> Ran:
    from typer.testing import CliRunner

    from elora_connector.cli.app import app

    done = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
    return Ran(done.exit_code, done.stdout, done.stderr)
