"""Checks of the store: can it be reached, how fast is it, who may do what there."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from redis.exceptions import RedisError, ResponseError

from elora_connector.assembly import remote_tier
from elora_connector.cli.checks import Check, fail, ok, warn
from elora_connector.cli.output import human_bytes
from elora_connector.cli.store import Shard, Store, require_url
from elora_connector.config import EloraConfig
from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.errors import ConfigError
from elora_connector.metrics import Recorder
from elora_connector.tiers.base import RemoteTier, Result, ValueSpec
from elora_connector.tiers.codec import mac_key_id
from elora_connector.tiers.redis_failure import StoreError, explain
from elora_connector.tiers.redis_url import Topology, topology_of

_PROBES = 8
_PROBE_BYTES = 1 << 20
_PROBE_TTL_S = 30
_ASKS = 25
_SLOW_MS = 5.0
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", None})

_ADVICE = {
    "connection": "check host and port, and that a firewall lets this machine through",
    "timeout": "check the address and the network; raise elora.remote.connect_timeout_ms if slow",
    "auth": "check user, password and ACL rules (docs/security.md)",
    "tls": "check rediss:// against redis://, and elora.remote.ca_file",
    "loading": "wait until the server has loaded its data",
}


def check_store(config: EloraConfig, *, write: bool) -> Iterator[Check]:
    """All checks of the store, as they are done."""
    try:
        with Store(config) as store:
            yield ok("redis", f"{store.label} answers", primaries=len(store.shards))
            yield check_encryption(config)
            yield _guarded("login", lambda: _login(store.shards[0], config))
            yield check_signing(config)
            for number, shard in enumerate(store.shards):
                where = f" {number + 1}" if len(store.shards) > 1 else ""
                yield _guarded("redis memory" + where, partial(_memory, shard, config))
                yield _guarded("latency" + where, partial(_latency, shard))
            if write:
                yield _guarded("throughput", lambda: _throughput(store, config))
    except StoreError as error:
        advice = _ADVICE.get(error.reason, "see docs/operations.md")
        yield fail("redis", f"{error} [{error.reason}]", advice, reason=error.reason)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return replace(check(), name=name)
    except (RedisError, StoreError, ConfigError) as error:
        failure = explain(error)
        return fail(name, f"{failure} [{failure.reason}]", _ADVICE.get(failure.reason, ""))


def _local(config: EloraConfig) -> bool:
    url = require_url(config)
    if topology_of(url) is not Topology.SINGLE:
        return False  # what the servers call each other is not in the address
    parts = urlsplit(url)
    return parts.scheme == "unix" or parts.hostname in _LOCAL_HOSTS


def check_encryption(config: EloraConfig) -> Check:
    """TLS, as far as the address tells; the handshake has already worked."""
    url = require_url(config)
    if url.partition("-")[0].partition(":")[0] in {"rediss", "valkeys"}:
        if "ssl_cert_reqs=none" in url.lower():
            return warn(
                "encryption",
                "TLS, but the server's certificate is not checked",
                "remove ssl_cert_reqs=none and set elora.remote.ca_file",
            )
        trusted = config.remote.ca_file or "the system's certificates"
        own = "with" if config.remote.cert_file else "without"
        return ok("encryption", f"TLS, checked against {trusted}, {own} a certificate of our own")
    if _local(config):
        return ok("encryption", "none, and none needed: the connection stays on this machine")
    return warn(
        "encryption",
        "none: KV and the password cross the network in clear",
        "use rediss:// or a network of their own (docs/security.md)",
    )


def check_signing(config: EloraConfig) -> Check:
    """Checksum and MAC, as configured."""
    remote = config.remote
    if remote.mac_key is not None:
        return ok("signing", f"values are signed, key id {mac_key_id(remote.mac_key)}")
    if not remote.checksum:
        return warn("signing", "neither checksum nor MAC", "set elora.remote.checksum to true")
    if _local(config):
        return ok("signing", "checksum, no MAC")
    return warn(
        "signing",
        "checksum, no MAC: whoever can write to this store can plant KV",
        "set elora.remote.mac_key_env where others can write (docs/security.md)",
    )


def _login(shard: Shard, config: EloraConfig) -> Check:
    try:
        user = shard.call("ACL", "WHOAMI")
    except ResponseError:
        return ok("login", "accepted; this user may not ask for its own name")
    name = user.decode("utf-8", "replace") if isinstance(user, bytes) else str(user)
    if name == "default" and not _password_given(config):
        if _local(config):
            return ok("login", "none needed on this machine")
        return warn(
            "login",
            "none: whoever reaches this port can read and write KV",
            "set a password or an ACL user (docs/security.md)",
        )
    return ok("login", "user default" if name == "default" else "an ACL user of our own")


def _password_given(config: EloraConfig) -> bool:
    """A login that the server accepted although it has no password cannot be told from one."""
    url = require_url(config)
    return config.remote.password is not None or "@" in url or "password=" in url


def _memory(shard: Shard, config: EloraConfig) -> Check:
    try:
        info = shard.call("INFO", "memory")
    except ResponseError:
        advice = "allow +info to this user to have memory checked"
        return warn("redis memory", "this user may not ask for it", advice)
    limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "?"))
    used = int(info.get("used_memory", 0))
    facts = {"maxmemory": limit, "policy": policy, "used_bytes": used}
    text = f"{human_bytes(used)} used of {human_bytes(limit) if limit else 'no limit'}, {policy}"
    if not limit:
        advice = "set maxmemory: without one, the server grows until the system ends it"
        return warn("redis memory", text, advice, **facts)
    if policy == "noeviction":
        advice = "set maxmemory-policy to allkeys-lru: a full server refuses new chunks"
        return warn("redis memory", text, advice, **facts)
    if policy.startswith("volatile") and config.remote.ttl_s is None:
        advice = "values have no TTL here, so this policy evicts none of them: use allkeys-lru"
        return warn("redis memory", text, advice, **facts)
    return ok("redis memory", text, **facts)


def _latency(shard: Shard) -> Check:
    """Round trips of the command that every look-up uses."""
    times = []
    for _ in range(_ASKS):
        start = time.perf_counter()
        shard.greet()
        times.append((time.perf_counter() - start) * 1000)
    median, most = statistics.median(times), max(times)
    text = f"{median:.2f} ms median, {most:.2f} ms at most, of {_ASKS} round trips"
    facts = {"median_ms": round(median, 3), "max_ms": round(most, 3)}
    if median > _SLOW_MS:
        advice = "each remote look-up waits this long: place the store nearer"
        return warn("latency", text, advice, **facts)
    return ok("latency", text, **facts)


def _throughput(store: Store, config: EloraConfig) -> Check:
    """Write and read values of one MiB the way an engine does; they are removed again."""
    short = replace(config, remote=replace(config.remote, ttl_s=_PROBE_TTL_S))
    tier = remote_tier(short, Recorder())
    if tier is None:
        return fail("throughput", "no store is configured", "set remote_url")
    payload = os.urandom(_PROBE_BYTES)
    specs = _probe_specs()
    try:
        wrote = _timed(tier, specs, lambda spec: tier.write(spec, memoryview(payload)))
        dest = memoryview(bytearray(_PROBE_BYTES))
        read = _timed(tier, specs, lambda spec: tier.read_into(spec, dest))
    finally:
        tier.close()
        store.remove_everywhere([spec.key.encode() for spec in specs])
    if dest != payload:
        return fail("throughput", "what was read is not what was written", "do not use this store")
    speed = [_PROBES * _PROBE_BYTES / seconds / 1e6 for seconds in (wrote, read)]
    text = f"write {speed[0]:.0f} MB/s, read {speed[1]:.0f} MB/s, one connection, values of 1 MiB"
    return ok("throughput", text, write_mb_s=round(speed[0], 1), read_mb_s=round(speed[1], 1))


def _probe_specs() -> list[ValueSpec]:
    """Values under keys of their own kind, which no engine asks for."""
    run = secrets.token_hex(8)
    return [
        ValueSpec(
            key=f"elora:probe:{run}:{index}",
            namespace=secrets.token_bytes(32),
            identity=Identity("elora-doctor", bytes(32)),
            chunk=ChunkKey(secrets.token_bytes(32)),
            parent=bytes(32),
            rank=Rank(),
            dtype="uint8",
            shape=(_PROBE_BYTES,),
            nbytes=_PROBE_BYTES,
        )
        for index in range(_PROBES)
    ]


def _timed(tier: RemoteTier, specs: list[ValueSpec], call: Callable[[ValueSpec], Result]) -> float:
    start = time.perf_counter()
    for spec in specs:
        result = call(spec)
        if not result.ok:
            raise StoreError(result.reason or "reply", "a probe value was refused", down=False)
    return time.perf_counter() - start
