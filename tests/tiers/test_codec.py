"""No byte of a value can change, move or vanish without the value being refused."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.errors import CodecError
from elora_connector.tiers.base import ValueSpec
from elora_connector.tiers.codec import (
    HEADER_BYTES,
    MAGIC,
    MAX_NAME_BYTES,
    Header,
    bounded_name,
    decode_header,
    encode_header,
    mac_key_id,
    parse_header,
    verify_payload,
)
from tests.tiers.values import make_spec, payload_of

KEY = b"0123456789abcdef"
digests = st.binary(min_size=32, max_size=32)
sizes = st.integers(min_value=0, max_value=2**40)
specs = st.builds(
    ValueSpec,
    key=st.just("key"),
    namespace=digests,
    identity=st.builds(Identity, name=st.text(max_size=400), digest=digests),
    chunk=st.builds(ChunkKey, digests),
    parent=digests,
    rank=st.builds(Rank, st.integers(0, 1023), st.integers(0, 1023)),
    dtype=st.sampled_from(["bfloat16", "float16", "float8_e4m3fn"]),
    shape=st.lists(sizes, max_size=8).map(tuple),
    nbytes=st.integers(0, 300),
)
keys = st.none() | st.binary(min_size=1, max_size=100)


def value_of(spec: ValueSpec, key: bytes | None = None, *, checksum: bool = True) -> bytes:
    payload = payload_of(spec)
    return encode_header(spec, memoryview(payload), key, checksum=checksum) + payload


def accept(value: bytes, spec: ValueSpec, key: bytes | None = None) -> Header:
    """What a tier does with a whole value."""
    header = decode_header(value, spec, total=len(value))
    verify_payload(header, memoryview(value)[HEADER_BYTES:], key, require_checksum=True)
    return header


def refusal(value: bytes, spec: ValueSpec, key: bytes | None = None) -> CodecError:
    with pytest.raises(CodecError) as caught:
        accept(value, spec, key)
    return caught.value


@given(specs, keys)
def test_round_trip(spec: ValueSpec, key: bytes | None) -> None:
    value = value_of(spec, key)
    header = accept(value, spec, key)
    assert len(value) == HEADER_BYTES + spec.nbytes
    assert (header.chunk, header.parent, header.namespace) == (
        spec.chunk,
        spec.parent,
        spec.namespace,
    )
    assert (header.rank, header.dtype, header.shape) == (spec.rank, spec.dtype, spec.shape)
    assert header.digest == spec.identity.digest
    assert header.mac_key == (None if key is None else mac_key_id(key))


@given(specs, keys, st.data())
def test_any_changed_byte_is_refused(
    spec: ValueSpec, key: bytes | None, data: st.DataObject
) -> None:
    value = bytearray(value_of(spec, key))
    position = data.draw(st.integers(0, len(value) - 1))
    value[position] ^= data.draw(st.integers(1, 255))
    refusal(bytes(value), spec, key)


def test_every_single_byte_of_one_value() -> None:
    spec = make_spec(nbytes=64)
    for key in (None, KEY):
        value = value_of(spec, key)
        for position in range(len(value)):
            broken = bytearray(value)
            broken[position] ^= 0x01
            refusal(bytes(broken), spec, key)


@given(specs, keys, st.data())
def test_any_truncation_is_refused(spec: ValueSpec, key: bytes | None, data: st.DataObject) -> None:
    value = value_of(spec, key)
    size = data.draw(st.integers(0, len(value) - 1))
    assert refusal(value[:size], spec, key).reason == "truncated"


@given(specs, st.binary(min_size=1, max_size=50))
def test_any_extension_is_refused(spec: ValueSpec, tail: bytes) -> None:
    assert refusal(value_of(spec) + tail, spec).reason == "length"


@given(specs, specs)
def test_swapped_values_are_refused(one: ValueSpec, two: ValueSpec) -> None:
    if one != two:
        refusal(value_of(two), one)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_arbitrary_bytes_are_refused(value: bytes) -> None:
    spec = make_spec()
    assert not refusal(value, spec).ours
    assert not refusal(MAGIC + value, spec).ours


@pytest.mark.parametrize(
    ("change", "reason", "ours"),
    [
        ({"namespace": b"n" * 32}, "namespace", False),
        ({"identity": Identity("legal", make_spec().identity.digest)}, "identity", False),
        ({"identity": Identity("civil", b"d" * 32)}, "identity", False),
        ({"chunk": ChunkKey(b"c" * 32)}, "chunk", False),
        ({"rank": Rank(0, 1)}, "rank", False),
        ({"parent": b"p" * 32}, "parent", True),
        ({"shape": (4, 64)}, "shape", True),
        ({"dtype": "float16"}, "dtype", True),
        ({"nbytes": 256}, "length", True),
    ],
)
def test_each_field_has_its_reason(change: dict[str, object], reason: str, ours: bool) -> None:
    spec = make_spec()
    error = refusal(value_of(spec), dataclasses.replace(spec, **change))  # type: ignore[arg-type]
    assert (error.reason, error.ours) == (reason, ours)


def test_only_damage_at_our_own_key_is_ours() -> None:
    spec = make_spec()
    value = bytearray(value_of(spec))
    value[HEADER_BYTES - 1] = 1
    mine = refusal(bytes(value), spec)
    theirs = refusal(bytes(value), make_spec(1))
    assert (mine.reason, mine.ours) == ("header", True)
    assert (theirs.reason, theirs.ours) == ("header", False)
    value = bytearray(value_of(spec))
    value[20] ^= 1
    assert refusal(bytes(value), spec).ours
    assert not refusal(bytes(value), make_spec(1)).ours
    value = bytearray(value_of(spec))
    value[0] ^= 1
    assert (refusal(bytes(value), spec).reason, refusal(bytes(value), spec).ours) == (
        "magic",
        False,
    )
    value = bytearray(value_of(spec))
    value[8] ^= 2
    assert (refusal(bytes(value), spec).reason, refusal(bytes(value), spec).ours) == (
        "schema",
        False,
    )


@given(st.text(max_size=600), st.text(max_size=600))
def test_bounded_names_stay_apart(one: str, two: str) -> None:
    assert len(bounded_name(one)) <= MAX_NAME_BYTES + 1
    assert (bounded_name(one) == bounded_name(two)) == (one == two)
    shortened = bounded_name("x" * 300 + one)
    assert bounded_name(shortened.decode("ascii", "replace")) != shortened


@given(specs, st.binary(min_size=1, max_size=80), st.binary(min_size=1, max_size=80))
def test_another_mac_key_is_refused(spec: ValueSpec, one: bytes, two: bytes) -> None:
    if one != two and one.rstrip(b"\0") != two.rstrip(b"\0"):
        assert refusal(value_of(spec, one), spec, two).reason == "mac"
        assert mac_key_id(one) != mac_key_id(two)


def test_mac_and_checksum_rules() -> None:
    spec = make_spec()
    assert refusal(value_of(spec), spec, KEY).reason == "mac_missing"
    assert refusal(value_of(spec, checksum=False), spec).reason == "checksum_missing"
    accept(value_of(spec, KEY, checksum=False), spec, KEY)
    accept(value_of(spec, KEY), spec, None)
    with pytest.raises(ValueError, match="empty MAC key"):
        value_of(spec, b"")


def test_the_mac_binds_the_header_to_the_payload() -> None:
    """An attacker who can recompute the sums still cannot move a payload elsewhere."""
    one, two = make_spec(1), make_spec(2)
    forged = encode_header(one, memoryview(payload_of(two)), None) + payload_of(two)
    assert refusal(forged, one, KEY).reason == "mac_missing"
    graft = value_of(one, KEY)[:HEADER_BYTES] + payload_of(two)
    assert refusal(graft, one, KEY).reason == "mac"


def test_the_key_id_says_nothing_about_the_key() -> None:
    assert mac_key_id(KEY) == mac_key_id(bytes(KEY))
    assert len(mac_key_id(KEY)) == 16
    assert KEY.hex()[:8] not in mac_key_id(KEY)


def test_bodies_are_read_strictly() -> None:
    """Correct sums around a hostile body: wrong types, sizes, extra or missing fields."""
    spec = make_spec()
    good = body_of(value_of(spec))
    hostile: list[object] = [
        [],
        None,
        {},
        good | {"extra": 1},
        {field: item for field, item in good.items() if field != "tp"},
        good | {"nbytes": -1},
        good | {"nbytes": True},
        good | {"nbytes": 512.0},
        good | {"shape": [1] * 9},
        good | {"shape": ["a"]},
        good | {"shape": 5},
        good | {"name": "civil"},
        good | {"name": b"n" * 400},
        good | {"checksum": "x"},
        good | {"dtype": b"bfloat16"},
        good | {"dtype": msgpack.ExtType(1, b"x")},
        good | {"shape": [[[[[[]]]]]]},
    ]
    for body in hostile:
        error = refusal(sealed(msgpack.packb(body)) + payload_of(spec), spec)
        assert error.reason == "header", body
    assert sealed(msgpack.packb(good)) == value_of(spec)[:HEADER_BYTES]
    assert refusal(sealed(b"\xdd\xff\xff\xff\xff") + payload_of(spec), spec).reason == "header"
    assert refusal(sealed(msgpack.packb(good) + b"\x00") + payload_of(spec), spec)


def body_of(value: bytes) -> dict[str, object]:
    length = int.from_bytes(value[10:12], "little")
    body: dict[str, object] = msgpack.unpackb(value[60 : 60 + length])
    return body


def sealed(body: bytes) -> bytes:
    import struct

    import xxhash

    header = bytearray(HEADER_BYTES)
    struct.pack_into("<8sHH16s32s", header, 0, MAGIC, 1, len(body), bytes(16), bytes(32))
    header[60 : 60 + len(body)] = body
    header[12:28] = xxhash.xxh3_128_digest(header)
    return bytes(header)


def test_a_body_length_beyond_the_header_is_refused() -> None:
    import xxhash

    header = bytearray(sealed(b"\x80"))
    header[10:12] = (65535).to_bytes(2, "little")
    header[12:28] = bytes(16)
    header[12:28] = xxhash.xxh3_128_digest(header)
    assert refusal(bytes(header), make_spec(nbytes=0, shape=())).reason == "header"


def test_headers_can_be_listed_without_knowing_what_to_expect() -> None:
    header = parse_header(value_of(make_spec(name="civil"), KEY))
    assert header.name == b"civil"
    assert header.nbytes == make_spec().nbytes


def test_misuse_is_an_error_at_once() -> None:
    spec = make_spec()
    with pytest.raises(ValueError, match="payload has 3 bytes"):
        encode_header(spec, memoryview(b"abc"), None)
    for change in ({"shape": (1,) * 9}, {"dtype": "x" * 33}, {"namespace": b"n" * 65}):
        with pytest.raises(ValueError, match=r"shape|at most"):
            value_of(dataclasses.replace(spec, **change))
