"""What somebody who can write to the store, or listens to it, can and cannot do.

docs/security.md names these tests, threat by threat.
"""

from __future__ import annotations

import ast
import dataclasses
import logging
import random
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis.exceptions as redis_errors
import xxhash
from redis.connection import AbstractConnection

import elora_connector
from elora_connector.errors import CodecError, ConfigError
from elora_connector.metrics import Recorder
from elora_connector.tiers.base import Outcome, ValueSpec
from elora_connector.tiers.codec import (
    HEADER_BYTES,
    decode_header,
    encode_header,
    verify_payload,
)
from elora_connector.tiers.redis import RedisTier
from elora_connector.tiers.redis_failure import StoreError
from tests.support.proxy import ScriptedServer
from tests.support.redis_server import RedisServer
from tests.tiers.values import RedisStore, make_spec, payload_of

KEY = b"the fleet's own key"
OTHER_KEY = b"somebody else's key"
PASSWORD = "s3cr3t-Pa55"
USER = "hunter-of-tests"
SEED = 20260417


def value_of(spec: ValueSpec, key: bytes | None = None) -> bytes:
    payload = payload_of(spec)
    return encode_header(spec, memoryview(payload), key) + payload


def refused(value: bytes, spec: ValueSpec, key: bytes | None) -> str:
    """The reason why an engine does not use this value; "" if it does."""
    try:
        header = decode_header(value, spec, total=len(value))
        verify_payload(header, memoryview(value)[HEADER_BYTES:], key, require_checksum=True)
    except CodecError as error:
        return error.reason
    return ""


def resealed(header: bytes, **changes: Any) -> bytes:
    """A header with other fields and a checksum that is right again, its MAC kept."""
    length = int.from_bytes(header[10:12], "little")
    body = msgpack.unpackb(header[60 : 60 + length]) | changes
    packed = msgpack.packb(body, use_bin_type=True)
    made = bytearray(HEADER_BYTES)
    made[:10], made[10:12], made[28:60] = header[:10], struct.pack("<H", len(packed)), header[28:60]
    made[60 : 60 + len(packed)] = packed
    made[12:28] = xxhash.xxh3_128_digest(made)
    return bytes(made)


# Accidents.


@pytest.mark.parametrize("key", [None, KEY])
def test_every_flipped_bit_of_a_header_is_refused(key: bytes | None) -> None:
    spec = make_spec(nbytes=64)
    value = value_of(spec, key)
    assert refused(value, spec, key) == ""
    accepted = []
    for bit in range(8 * HEADER_BYTES):
        broken = bytearray(value)
        broken[bit // 8] ^= 1 << bit % 8
        if not refused(bytes(broken), spec, key):
            accepted.append(bit)
    assert accepted == []


@pytest.mark.parametrize("key", [None, KEY])
def test_flipped_bits_of_a_payload_are_refused(key: bytes | None) -> None:
    """The first and last bytes, and a sample in between, of a payload of one MiB."""
    print(f"seed {SEED}")
    spec = make_spec(nbytes=1 << 20)
    value = bytearray(value_of(spec, key))
    middle = random.Random(SEED).sample(range(8 * HEADER_BYTES, 8 * len(value)), 100)
    edges = [
        *range(8 * HEADER_BYTES, 8 * HEADER_BYTES + 16),
        *range(8 * len(value) - 16, 8 * len(value)),
    ]
    for bit in [*edges, *middle]:
        value[bit // 8] ^= 1 << bit % 8
        assert refused(bytes(value), spec, key) == ("mac" if key else "checksum")
        value[bit // 8] ^= 1 << bit % 8
    assert refused(bytes(value), spec, key) == ""


@pytest.fixture
def store(shared_server: RedisServer) -> Iterator[RedisStore]:
    made = RedisStore(shared_server)
    yield made
    made.close()


@pytest.mark.redis
@pytest.mark.parametrize("key", [None, KEY])
def test_values_swapped_between_two_keys_are_refused(store: RedisStore, key: bytes | None) -> None:
    one, two = make_spec(1), make_spec(2)
    tier = store.tier(mac_key=key)
    for spec in (one, two):
        assert tier.write(spec, memoryview(payload_of(spec))).ok
    first, second = store.raw(one.key), store.raw(two.key)
    assert first is not None
    assert second is not None
    store.put_raw(one.key, second)
    store.put_raw(two.key, first)
    for spec in (one, two):
        result = tier.read_into(spec, memoryview(bytearray(spec.nbytes)))
        assert (result.outcome, result.reason) == (Outcome.BAD, "chunk")
    store.put_raw(one.key, first)
    assert tier.read_into(one, memoryview(bytearray(one.nbytes))).ok


# Attackers who can write, and can compute every checksum.


def forgeries(spec: ValueSpec) -> dict[str, bytes]:
    """Values whose sums are all right and whose payload is the attacker's."""
    planted = bytes(spec.nbytes)
    signed, donor = value_of(spec, KEY), make_spec(7)
    donated = value_of(donor, KEY)
    checksum = xxhash.xxh3_128_digest(planted)
    here = {
        "namespace": spec.namespace,
        "name": spec.identity.name.encode(),
        "digest": spec.identity.digest,
        "chunk": spec.chunk,
        "parent": spec.parent,
    }
    unsigned = encode_header(spec, memoryview(planted), None)
    other = encode_header(spec, memoryview(planted), OTHER_KEY)
    key_id = msgpack.unpackb(signed[60 : 60 + int.from_bytes(signed[10:12], "little")])["mac_key"]
    return {
        "no MAC": unsigned + planted,
        "another key": other + planted,
        "another key under our key's id": resealed(other, mac_key=key_id) + planted,
        "no MAC under our key's id": resealed(unsigned, mac_key=key_id) + planted,
        "the MAC of the value that was here": resealed(signed, checksum=checksum) + planted,
        "payload without its checksum": resealed(signed, checksum=None) + planted,
        "a signed value moved here": resealed(donated[:HEADER_BYTES], **here)
        + donated[HEADER_BYTES:],
        "a signed header, another signed payload": signed[:HEADER_BYTES] + donated[HEADER_BYTES:],
        "another parent": resealed(signed, parent=bytes(32)) + signed[HEADER_BYTES:],
    }


@pytest.mark.parametrize("kind", forgeries(make_spec()))
def test_without_the_key_nothing_can_be_planted(kind: str) -> None:
    spec = make_spec()
    assert refused(value_of(spec, KEY), spec, KEY) == ""
    assert refused(forgeries(spec)[kind], spec, KEY) in {"mac", "mac_missing", "checksum", "parent"}


def test_without_a_mac_a_forger_succeeds() -> None:
    """So the tests above would notice a MAC that is not looked at."""
    spec = make_spec()
    assert refused(forgeries(spec)["no MAC"], spec, None) == ""
    assert refused(forgeries(spec)["the MAC of the value that was here"], spec, None) == ""


@pytest.mark.redis
def test_a_planted_value_is_a_miss_at_the_tier(store: RedisStore) -> None:
    spec = make_spec()
    for kind, value in forgeries(spec).items():
        store.put_raw(spec.key, value)
        dest = bytearray(spec.nbytes)
        result = store.tier(mac_key=KEY).read_into(spec, memoryview(dest))
        assert result.outcome is Outcome.BAD, kind


# Sizes.


@pytest.mark.redis
def test_a_huge_value_under_our_key_costs_no_memory_and_little_traffic(
    store: RedisStore, shared_server: RedisServer
) -> None:
    spec = make_spec()
    huge = dataclasses.replace(spec, nbytes=32 << 20)
    store.put_raw(spec.key, value_of(huge))
    tier, dest = store.tier(), bytearray(spec.nbytes)
    tracemalloc.start()
    try:
        result = tier.read_into(spec, memoryview(dest))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (result.outcome, result.reason) == (Outcome.BAD, "length")
    assert peak < 1 << 20


@pytest.mark.parametrize("size", [b"9" * 18, b"9" * 40, b"-5", b"1e9"])
def test_an_announced_size_is_not_believed(size: bytes) -> None:
    with ScriptedServer(b"+OK\r\n") as server:
        url = f"redis://127.0.0.1:{server.port}"
        tier = RedisTier(url, ttl_s=None, connect_timeout_s=5.0, operation_timeout_s=0.5)
        server.answer = b"$" + size + b"\r\nxxxx"
        spec = make_spec()
        tracemalloc.start()
        try:
            result = tier.read_into(spec, memoryview(bytearray(spec.nbytes)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            tier.close()
    assert result.outcome in {Outcome.BAD, Outcome.ERROR}
    assert peak < 1 << 20


# Nothing received is executed.

_FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}
_FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
_TRUSTING = {"yaml.unsafe_load", "yaml.full_load", "torch.load", "numpy.load", "np.load"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    """In the whole package: no pickle, no eval, no loader that may run code, no shell."""
    root = Path(elora_connector.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            found += [f"{path.relative_to(root)}: {what}" for what in _dangers(node)]
    assert found == []


def _dangers(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        names = {alias.name.split(".")[0] for alias in node.names}
        return sorted(names & _FORBIDDEN_MODULES)
    if isinstance(node, ast.ImportFrom):
        return [node.module] if (node.module or "").split(".")[0] in _FORBIDDEN_MODULES else []
    if isinstance(node, ast.keyword) and node.arg in {"shell", "allow_pickle"}:
        return [f"{node.arg}="]
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return [name] if name in _FORBIDDEN_CALLS | _TRUSTING else []
    return []


def test_the_search_for_dangers_finds_them() -> None:
    for source in ("import pickle", "from marshal import loads", "eval(x)", "f(shell=True)"):
        tree = ast.parse(source)
        assert [what for node in ast.walk(tree) for what in _dangers(node)]


def test_the_linter_refuses_unsafe_calls() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    selected = text.split("[tool.ruff.lint]")[1].split("ignore = [")[0]
    assert '"S",' in selected
    ignored = text.split("ignore = [")[1].split("]")[0]
    assert not {"S301", "S302", "S307", "S506"} & set(
        ignored.replace('"', " ").replace(",", " ").split()
    )


# Credentials.

_LOUD_ERRORS = [
    redis_errors.AuthenticationError,
    redis_errors.AuthenticationWrongNumberOfArgsError,
    redis_errors.BusyLoadingError,
    redis_errors.ConnectionError,
    redis_errors.DataError,
    redis_errors.InvalidResponse,
    redis_errors.NoPermissionError,
    redis_errors.ReadOnlyError,
    redis_errors.RedisError,
    redis_errors.ResponseError,
    redis_errors.TimeoutError,
    ConnectionResetError,
    RuntimeError,
    UnicodeError,
    ValueError,
]


@pytest.mark.parametrize("kind", _LOUD_ERRORS)
def test_errors_of_redis_py_are_not_passed_on(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever text an exception carries, none of it is logged, raised, shown or counted."""

    def connect(self: object, *_: object, **__: object) -> None:
        raise kind(f"while sending AUTH {USER} {PASSWORD}")

    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(AbstractConnection, "connect", connect)
    url = f"redis://{USER}:{PASSWORD}@127.0.0.1:1/0"
    recorder, events = Recorder(), []

    def count(event: str, detail: str) -> None:
        events.append((event, detail))
        if event == "error":
            recorder.add("remote_errors", 1, detail)

    tier, spec = RedisTier(url, ttl_s=None, on_event=count), make_spec()
    shown = [repr(tier), str(tier), repr(tier.leading([[spec.key]]))]
    shown += [repr(tier.write(spec, memoryview(payload_of(spec))))]
    with pytest.raises(StoreError) as caught:
        tier.ping()
    tier.close()
    with pytest.raises(ConfigError) as refused_start:
        RedisTier(url, ttl_s=None, fail_open=False)
    for error in (caught.value, refused_start.value):
        shown += [str(error), repr(error)]
        assert error.__cause__ is None
        assert error.__suppress_context__
    shown += [caplog.text, repr(events), repr(recorder.totals)]
    for text in shown:
        assert PASSWORD not in text
        assert USER not in text


@pytest.mark.parametrize(
    "answer",
    [
        f"-ERR unknown command `AUTH`, with args beginning with: `{USER}`, `{PASSWORD}`, ",
        f"-WRONGPASS for {USER} {PASSWORD}",
        f"-{PASSWORD}",
        f"-NOAUTH {PASSWORD}",
        f"+{PASSWORD}",
        f"?{PASSWORD}",
    ],
)
def test_a_server_that_repeats_the_password_is_not_quoted(
    answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with ScriptedServer(answer.encode() + b"\r\n") as server:
        url = f"redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}"
        tier = RedisTier(url, ttl_s=None, connect_timeout_s=5.0, operation_timeout_s=0.5)
        server.answer = b"+OK\r\n"  # now the login works, and it is the command that is refused
        late = RedisTier(url.replace(f"{USER}:{PASSWORD}@", ""), ttl_s=None)
        server.answer = answer.encode() + b"\r\n"
        results = [each.leading([["elora:x"]]) for each in (tier, late)]
        shown = [repr(results), repr([tier, late]), caplog.text]
        tier.close()
        late.close()
        try:
            RedisTier(url, ttl_s=None, connect_timeout_s=5.0, fail_open=False).close()
        except ConfigError as error:
            shown.append(str(error))
    for text in shown:
        assert PASSWORD not in text
