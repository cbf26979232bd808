"""What every remote tier does, the in-process one included."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from elora_connector.core.types import Rank
from elora_connector.tiers.base import Health, Item, Outcome, RemoteTier, Result, ValueSpec
from elora_connector.tiers.codec import HEADER_BYTES
from elora_connector.tiers.instrumented import InstrumentedTier
from tests.tiers.values import Store, eventually, make_spec, payload_of

KEY = b"k" * 32


def put(tier: RemoteTier, spec: ValueSpec, salt: int = 0) -> bytearray:
    payload = payload_of(spec, salt)
    assert tier.write(spec, memoryview(payload)).ok
    return payload


def get(tier: RemoteTier, spec: ValueSpec) -> tuple[Outcome, str, bytes]:
    dest = bytearray(b"\xee" * spec.nbytes)
    result = tier.read_into(spec, memoryview(dest))
    assert result.nbytes == (spec.nbytes if result.ok else 0)
    return result.outcome, result.reason, bytes(dest)


def test_is_a_remote_tier(store: Store) -> None:
    assert isinstance(store.tier(), RemoteTier)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 3_000_001])
@pytest.mark.parametrize("mac_key", [None, KEY])
@pytest.mark.parametrize("checksum", [True, False])
def test_returns_the_bytes_written(
    store: Store, nbytes: int, mac_key: bytes | None, checksum: bool
) -> None:
    tier = store.tier(mac_key=mac_key, checksum=checksum)
    spec = make_spec(nbytes=nbytes, shape=(nbytes,))
    payload = put(tier, spec)
    assert get(tier, spec) == (Outcome.OK, "", bytes(payload))
    raw = store.raw(spec.key)
    assert raw is not None
    assert len(raw) == HEADER_BYTES + nbytes


def test_other_instances_find_it(store: Store) -> None:
    spec = make_spec()
    payload = put(store.tier(), spec)
    assert get(store.tier(), spec) == (Outcome.OK, "", bytes(payload))


def test_accepts_views_of_other_item_sizes(store: Store) -> None:
    tier, spec = store.tier(), make_spec()
    payload = payload_of(spec)
    assert tier.write(spec, memoryview(payload).cast("I")).ok
    dest = bytearray(spec.nbytes)
    assert tier.read_into(spec, memoryview(dest).cast("H")).ok
    assert dest == payload


def test_missing_is_a_miss_and_touches_nothing(store: Store) -> None:
    assert get(store.tier(), make_spec()) == (Outcome.MISS, "", b"\xee" * make_spec().nbytes)


def test_a_second_write_changes_nothing(store: Store) -> None:
    tier, spec = store.tier(), make_spec()
    first = put(tier, spec)
    again = tier.write(spec, memoryview(payload_of(spec, salt=1)))
    assert (again.outcome, again.reason, again.nbytes) == (Outcome.OK, "exists", 0)
    assert get(tier, spec)[2] == bytes(first)


def test_size_of_the_buffer_must_be_that_of_the_spec(store: Store) -> None:
    tier, spec = store.tier(), make_spec()
    put(tier, spec)
    for size in (spec.nbytes - 1, spec.nbytes + 1, 0):
        dest = bytearray(size)
        found = tier.read_into(spec, memoryview(dest))
        assert (found.outcome, found.reason) == (Outcome.BAD, "length")
        assert not any(dest)
    other = make_spec(1)
    refused = tier.write(other, memoryview(bytearray(other.nbytes + 1)))
    assert (refused.outcome, refused.reason) == (Outcome.BAD, "length")
    assert store.raw(other.key) is None


def test_leading_counts_up_to_the_first_hole(store: Store) -> None:
    tier = store.tier()
    ranks = [Rank(0, 0), Rank(1, 0)]
    chunks = [[make_spec(i, rank=rank) for rank in ranks] for i in range(5)]
    groups = [[spec.key for spec in chunk] for chunk in chunks]
    assert tier.leading([]).count == 0
    assert tier.leading(groups).count == 0
    for chunk in chunks:
        for spec in chunk:
            put(tier, spec)
    assert tier.leading(groups).count == 5
    store.drop(groups[3][1])
    assert tier.leading(groups).count == 3
    assert tier.leading(groups[4:]).count == 1
    assert tier.leading([*groups[:2], [], *groups[2:]]).count == 2
    assert tier.leading([[]]).count == 0
    assert all(found.outcome is Outcome.OK for found in (tier.leading([]), tier.leading(groups)))


def test_long_prompts_in_one_lookup(store: Store) -> None:
    tier = store.tier()
    specs = [make_spec(i) for i in range(40)]
    for spec in specs:
        put(tier, spec)
    groups = [[spec.key] for spec in specs] + [[make_spec(i).key] for i in range(40, 3000)]
    assert tier.leading(groups).count == 40


def test_awkward_names(store: Store) -> None:
    tier = store.tier()
    names = ["a b", "@%:/{}*", "\u00fcn\u00efc\u00f6d\u00e9 \U0001f600", "x" * 300, "x" * 301]
    names += ["a\r\nDEL b", "\ud800", ""]
    specs = [make_spec(name=name) for name in names]
    payloads = [put(tier, spec, salt) for salt, spec in enumerate(specs)]
    for spec, payload in zip(specs, payloads, strict=True):
        assert get(tier, spec) == (Outcome.OK, "", bytes(payload))
        assert tier.leading([[spec.key]]).count == 1


def test_values_expire_unless_refreshed(store: Store) -> None:
    tier, kept, lost = store.tier(ttl_s=1), make_spec(0), make_spec(1)
    put(tier, kept)
    put(tier, lost)
    long_lived = store.tier(ttl_s=3600)
    assert long_lived.refresh([kept.key, make_spec(9).key]).ok
    assert eventually(lambda: tier.leading([[lost.key]]).count == 0)
    assert tier.leading([[kept.key]]).count == 1
    assert get(tier, lost)[0] is Outcome.MISS


def test_without_a_ttl_nothing_expires(store: Store) -> None:
    tier, spec = store.tier(ttl_s=None), make_spec()
    put(tier, spec)
    assert tier.refresh([spec.key]).ok
    assert tier.refresh([]).ok
    time.sleep(0.01)
    assert tier.leading([[spec.key]]).count == 1


# Damaged and foreign values (cases 16-18).


def test_a_flipped_byte_is_a_miss_and_the_key_is_freed(store: Store) -> None:
    tier, spec = store.tier(), make_spec()
    for position, reason in [(HEADER_BYTES + 7, "checksum"), (HEADER_BYTES - 1, "header")]:
        payload = put(tier, spec)
        raw = bytearray(store.raw(spec.key) or b"")
        raw[position] ^= 0x40
        store.put_raw(spec.key, bytes(raw))
        assert get(tier, spec)[:2] == (Outcome.BAD, reason)
        assert store.raw(spec.key) is None
        assert put(tier, spec) == payload
        assert get(tier, spec)[0] is Outcome.OK
        store.drop(spec.key)


@pytest.mark.parametrize("size", [HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 511])
def test_a_truncated_value_is_refused_and_the_key_is_freed(store: Store, size: int) -> None:
    tier, spec = store.tier(), make_spec()
    put(tier, spec)
    store.put_raw(spec.key, (store.raw(spec.key) or b"")[:size])
    assert get(tier, spec)[:2] == (Outcome.BAD, "truncated")
    assert store.raw(spec.key) is None


def test_a_value_longer_than_the_destination_is_refused(store: Store) -> None:
    tier, spec = store.tier(), make_spec()
    put(tier, spec)
    store.put_raw(spec.key, (store.raw(spec.key) or b"") + b"x")
    outcome, reason, dest = get(tier, spec)
    assert (outcome, reason) == (Outcome.BAD, "length")
    assert dest == b"\xee" * spec.nbytes


@pytest.mark.parametrize("raw", [b"", b"x", b"E", b"ELORA-KV", b"garbage" * 400])
def test_foreign_bytes_are_refused_and_left_alone(store: Store, raw: bytes) -> None:
    tier, spec = store.tier(), make_spec()
    store.put_raw(spec.key, raw)
    outcome, reason, dest = get(tier, spec)
    assert outcome is Outcome.BAD
    assert reason in {"truncated", "magic"}
    assert dest == b"\xee" * spec.nbytes
    assert store.raw(spec.key) == raw


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (make_spec(1), "chunk"),
        (make_spec(name="legal"), "identity"),
        (make_spec(content="other weights"), "identity"),
        (make_spec(namespace=b"n" * 32), "namespace"),
        (make_spec(rank=Rank(1, 0)), "rank"),
        (make_spec(rank=Rank(0, 1)), "rank"),
    ],
)
def test_another_value_under_this_key_is_refused(
    store: Store, other: ValueSpec, reason: str
) -> None:
    tier, spec = store.tier(), make_spec()
    put(tier, other)
    swapped = store.raw(other.key) or b""
    store.put_raw(spec.key, swapped)
    outcome, got, dest = get(tier, spec)
    assert (outcome, got) == (Outcome.BAD, reason)
    assert dest == b"\xee" * spec.nbytes
    assert store.raw(spec.key) == swapped, "only values that claim this key may be deleted"


def test_checksums_are_demanded_where_they_are_configured(store: Store) -> None:
    spec = make_spec()
    put(store.tier(checksum=False), spec)
    assert get(store.tier(checksum=False), spec)[0] is Outcome.OK
    assert get(store.tier(), spec)[:2] == (Outcome.BAD, "checksum_missing")
    assert get(store.tier(checksum=False), spec)[0] is Outcome.OK


@pytest.mark.parametrize(("writer", "reason"), [(None, "mac_missing"), (b"z" * 32, "mac")])
def test_only_values_of_the_same_mac_key(store: Store, writer: bytes | None, reason: str) -> None:
    spec = make_spec()
    put(store.tier(mac_key=writer), spec)
    assert get(store.tier(mac_key=KEY), spec)[:2] == (Outcome.BAD, reason)


# Life of a tier.


def test_closed_tiers_answer_and_do_nothing(store: Store) -> None:
    tier, spec = store.tier(ttl_s=60), make_spec()
    tier.close()
    tier.close()
    assert get(tier, spec)[:2] == (Outcome.ERROR, "closed")
    assert tier.write(spec, memoryview(payload_of(spec))).reason == "closed"
    assert tier.refresh([spec.key]).reason == "closed"
    assert tier.leading([[spec.key]]).outcome is Outcome.ERROR
    assert store.raw(spec.key) is None


def test_many_threads_at_once(store: Store) -> None:
    tier = store.tier()
    specs = [make_spec(i, nbytes=40_000) for i in range(24)]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for step in range(len(specs)):
            index = (step * 5 + offset) % len(specs)
            spec = specs[index]
            if not tier.write(spec, memoryview(payload_of(spec))).ok:
                wrong.append(index)
            if get(tier, spec) != (Outcome.OK, "", bytes(payload_of(spec))):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.health() is Health.CLOSED


def test_the_wrapper_changes_no_result_and_sees_every_call(store: Store) -> None:
    seen: list[tuple[str, Outcome, float]] = []
    ticks = iter(range(100))
    inner = store.tier()
    tier = InstrumentedTier(
        inner,
        lambda op, result, seconds: seen.append((op, result.outcome, seconds)),
        clock=lambda: float(next(ticks)),
    )
    spec = make_spec()
    assert isinstance(tier, RemoteTier)
    assert get(tier, spec)[0] is Outcome.MISS
    payload = put(tier, spec)
    assert get(tier, spec) == (Outcome.OK, "", bytes(payload))
    assert tier.leading([[spec.key]]).count == 1
    assert tier.refresh([spec.key]).ok
    assert tier.health() is inner.health()
    assert seen == [
        ("read_into", Outcome.MISS, 1.0),
        ("write", Outcome.OK, 1.0),
        ("read_into", Outcome.OK, 1.0),
        ("leading", Outcome.OK, 1.0),
        ("refresh", Outcome.OK, 1.0),
    ]
    tier.close()
    assert get(inner, spec)[1] == "closed"


# Batches.


def put_all(tier: RemoteTier, specs: Sequence[ValueSpec], salt: int = 0) -> list[Result]:
    return list(tier.write_many((spec, memoryview(payload_of(spec, salt))) for spec in specs))


def get_all(tier: RemoteTier, specs: Sequence[ValueSpec]) -> list[tuple[Outcome, str, bytes]]:
    dests = [bytearray(b"\xee" * spec.nbytes) for spec in specs]
    items = zip(specs, map(memoryview, dests), strict=True)
    ends = [(result.outcome, result.reason) for result in tier.read_many(items)]
    return [(*end, bytes(dest)) for end, dest in zip(ends, dests, strict=True)]


def test_an_empty_batch_has_no_results(store: Store) -> None:
    tier = store.tier()
    assert list(tier.read_many([])) == []
    assert list(tier.write_many([])) == []


@pytest.mark.parametrize("mac_key", [None, KEY])
def test_batches_return_the_bytes_written(store: Store, mac_key: bytes | None) -> None:
    tier = store.tier(mac_key=mac_key)
    specs = [make_spec(i, nbytes=n, shape=(n,)) for i, n in enumerate([0, 1, 70_000, 3, 300_001])]
    specs += [make_spec(i, nbytes=20_000) for i in range(5, 60)]
    assert [(r.outcome, r.reason, r.nbytes) for r in put_all(tier, specs)] == [
        (Outcome.OK, "", spec.nbytes) for spec in specs
    ]
    assert get_all(tier, specs) == [(Outcome.OK, "", bytes(payload_of(spec))) for spec in specs]
    again = put_all(tier, specs, salt=1)
    assert [(r.outcome, r.reason, r.nbytes) for r in again] == [(Outcome.OK, "exists", 0)] * 60
    assert get_all(tier, specs[::-1]) == [
        (Outcome.OK, "", bytes(payload_of(spec))) for spec in specs[::-1]
    ]


def test_each_value_of_a_batch_ends_in_its_own_way(store: Store) -> None:
    """Whatever one value is, its neighbours are read, from a healthy connection."""
    tier = store.tier()
    specs = [make_spec(i, nbytes=5_000) for i in range(13)]
    put_all(tier, specs)
    untouched = b"\xee" * 5_000
    store.drop(specs[1].key)
    raw = bytearray(store.raw(specs[3].key) or b"")
    raw[HEADER_BYTES + 9] ^= 1
    store.put_raw(specs[3].key, bytes(raw))
    foreign = store.raw(specs[4].key) or b""
    store.put_raw(specs[5].key, foreign)
    store.put_raw(specs[7].key, (store.raw(specs[7].key) or b"")[: HEADER_BYTES + 100])
    store.put_raw(specs[9].key, b"")
    store.put_raw(specs[10].key, b"x" * 200_000)
    store.put_raw(specs[11].key, b"short")
    found = get_all(tier, specs)
    assert [end[:2] for end in found] == [
        (Outcome.OK, ""),
        (Outcome.MISS, ""),
        (Outcome.OK, ""),
        (Outcome.BAD, "checksum"),
        (Outcome.OK, ""),
        (Outcome.BAD, "chunk"),
        (Outcome.OK, ""),
        (Outcome.BAD, "truncated"),
        (Outcome.OK, ""),
        (Outcome.BAD, "truncated"),
        (Outcome.BAD, "magic"),
        (Outcome.BAD, "magic"),
        (Outcome.OK, ""),
    ]
    for index in (0, 2, 4, 6, 8, 12):
        assert found[index][2] == bytes(payload_of(specs[index]))
    for index in (1, 5, 7, 9, 10, 11):
        assert found[index][2] == untouched
    assert [store.raw(specs[i].key) is None for i in (3, 5, 7, 10)] == [True, False, True, False]
    assert tier.health() is Health.CLOSED


def test_buffers_of_a_wrong_size_do_not_stop_a_batch(store: Store) -> None:
    tier = store.tier()
    specs = [make_spec(i) for i in range(3)]
    short = memoryview(bytearray(specs[1].nbytes - 1))
    full = [memoryview(payload_of(spec)) for spec in specs]
    written = list(tier.write_many(zip(specs, [full[0], short, full[2]], strict=True)))
    assert [(r.outcome, r.reason) for r in written] == [
        (Outcome.OK, ""),
        (Outcome.BAD, "length"),
        (Outcome.OK, ""),
    ]
    put(tier, specs[1])
    dests = [memoryview(bytearray(spec.nbytes)) for spec in specs]
    read = list(tier.read_many(zip(specs, [dests[0], short, dests[2]], strict=True)))
    assert [r.outcome for r in read] == [Outcome.OK, Outcome.BAD, Outcome.OK]
    assert not any(short)
    assert (dests[0], dests[2]) == (full[0], full[2])


def test_a_batch_can_be_ended_from_either_side(store: Store) -> None:
    tier = store.tier()
    specs = [make_spec(i, nbytes=50_000) for i in range(40)]
    put_all(tier, specs)
    taken: list[ValueSpec] = []
    stop = threading.Event()

    def items() -> Iterator[Item]:
        for spec in specs:
            if stop.is_set():
                return
            taken.append(spec)
            yield spec, memoryview(bytearray(spec.nbytes))

    results = tier.read_many(items())
    assert next(results).ok
    stop.set()
    assert len(list(results)) == len(taken) - 1 < len(specs) - 1
    # The reader goes away while values are on their way.
    results = tier.read_many((spec, memoryview(bytearray(spec.nbytes))) for spec in specs)
    assert next(results).ok
    results.close()  # type: ignore[attr-defined]
    assert get_all(tier, specs) == [(Outcome.OK, "", bytes(payload_of(spec))) for spec in specs]


def test_batches_of_closed_tiers_answer_and_do_nothing(store: Store) -> None:
    tier = store.tier()
    specs = [make_spec(i) for i in range(3)]
    tier.close()
    assert [(r.outcome, r.reason) for r in put_all(tier, specs)] == [(Outcome.ERROR, "closed")] * 3
    assert get_all(tier, specs) == [(Outcome.ERROR, "closed", b"\xee" * specs[0].nbytes)] * 3
    assert store.raw(specs[0].key) is None


def test_batches_of_many_threads_at_once(store: Store) -> None:
    tier = store.tier()
    specs = [make_spec(i, nbytes=40_000) for i in range(30)]
    want = {spec.key: (Outcome.OK, "", bytes(payload_of(spec))) for spec in specs}
    wrong: list[str] = []

    def work(offset: int) -> None:
        mine = specs[offset:] + specs[:offset]
        if not all(result.ok for result in put_all(tier, mine)):
            wrong.append("write")
        if get_all(tier, mine) != [want[spec.key] for spec in mine]:
            wrong.append("read")

    threads = [threading.Thread(target=work, args=(3 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.health() is Health.CLOSED


def test_the_wrapper_sees_each_value_of_a_batch(store: Store) -> None:
    seen: list[tuple[str, Outcome, float]] = []
    ticks = iter(range(100))
    tier = InstrumentedTier(
        store.tier(),
        lambda op, result, seconds: seen.append((op, result.outcome, seconds)),
        clock=lambda: float(next(ticks)),
    )
    specs = [make_spec(i) for i in range(3)]
    put_all(tier, specs[:2])
    assert [end[0] for end in get_all(tier, specs)] == [Outcome.OK, Outcome.OK, Outcome.MISS]
    assert seen == [
        ("write", Outcome.OK, 1.0),
        ("write", Outcome.OK, 1.0),
        ("read_into", Outcome.OK, 1.0),
        ("read_into", Outcome.OK, 1.0),
        ("read_into", Outcome.MISS, 1.0),
    ]
