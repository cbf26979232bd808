"""Pipelines on a healthy server, and everything that can go wrong in the middle of one."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from elora_connector.tiers.base import Health, Item, Outcome, Result, ValueSpec
from elora_connector.tiers.breaker import CircuitBreaker
from elora_connector.tiers.codec import HEADER_BYTES, encode_header
from elora_connector.tiers.redis import RedisTier
from elora_connector.tiers.redis_pipeline import Window
from tests.support.fake_redis import NIL, OK, FakeRedis, bulk
from tests.support.proxy import SlowProxy
from tests.support.redis_server import RedisServer
from tests.tiers.values import eventually, make_spec, payload_of

pytestmark = pytest.mark.redis

SPECS = [make_spec(i, nbytes=30_000) for i in range(6)]
WINDOW = Window(count=4, nbytes=1 << 20)
Connect = Callable[..., RedisTier]
End = tuple[Outcome, str]
GOOD: End = (Outcome.OK, "")
EXISTS: End = (Outcome.OK, "exists")


def lost(reason: str) -> End:
    return Outcome.ERROR, reason


class Clock:
    """Of the breakers: it stands still, so that an outage lasts until `go`."""

    def __init__(self) -> None:
        self._runs = False

    def __call__(self) -> float:
        return time.monotonic() if self._runs else 0.0

    def go(self) -> None:
        self._runs = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def connect(clock: Clock) -> Iterator[Connect]:
    made: list[RedisTier] = []

    def make(url: str, **kwargs: Any) -> RedisTier:
        options: dict[str, Any] = {
            "ttl_s": 60,
            "connect_timeout_s": 20.0,
            "operation_timeout_s": 20.0,
            "window": WINDOW,
            "breaker": lambda **more: CircuitBreaker(first_backoff_s=0.02, clock=clock, **more),
        }
        made.append(RedisTier(url, **(options | kwargs)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def clean(shared_server: RedisServer) -> Iterator[RedisServer]:
    yield shared_server
    with shared_server.client() as admin:
        admin.flushall()


def put_all(tier: RedisTier, specs: Sequence[ValueSpec] = SPECS) -> list[End]:
    items = ((spec, memoryview(payload_of(spec))) for spec in specs)
    return [(result.outcome, result.reason) for result in tier.write_many(items)]


def get_all(tier: RedisTier, specs: Sequence[ValueSpec] = SPECS) -> list[End]:
    """Ends, after checking that OK and the right bytes come together or not at all."""
    dests = [bytearray(spec.nbytes) for spec in specs]
    items = zip(specs, map(memoryview, dests), strict=True)
    results = list(tier.read_many(items))
    for spec, dest, result in zip(specs, dests, results, strict=True):
        assert result.ok == (dest == payload_of(spec))
    return [(result.outcome, result.reason) for result in results]


def value_of(spec: ValueSpec) -> bytes:
    payload = payload_of(spec)
    return encode_header(spec, memoryview(payload), None) + bytes(payload)


def calls(server: RedisServer, command: str) -> int:
    with server.client() as admin:
        return int(admin.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


# On a healthy server.


def test_a_prompt_is_looked_up_in_one_round_trip_and_moved_over_one_connection(
    server: RedisServer, connect: Connect
) -> None:
    """Counted by the server itself and by a proxy in front of it."""
    with SlowProxy(server.port) as proxy:
        tier = connect(proxy.url)
        assert put_all(tier) == [GOOD] * 6
        turns = proxy.turns
        assert tier.leading([[spec.key] for spec in SPECS]).count == 6
        assert proxy.turns - turns == 1
        assert get_all(tier) == [GOOD] * 6
        assert proxy.connections == 1
    assert [calls(server, name) for name in ("set", "exists", "get", "del")] == [6, 6, 6, 0]


def test_values_on_their_way_are_bounded(clean: RedisServer, connect: Connect) -> None:
    specs = [make_spec(i, nbytes=10_000) for i in range(40)]
    payloads = [memoryview(payload_of(spec)) for spec in specs]
    for window, most in [
        (Window(5, 1 << 30), 5),
        (Window(100, 30_000), 3),
        (Window(100, 30_001), 4),
        (Window(1, 1 << 30), 1),
        (Window(100, 1), 1),
    ]:
        tier = connect(clean.url, window=window)
        ahead: list[int] = []
        ended = 0

        def counted(ahead: list[int] = ahead) -> Iterator[Item]:
            for index, item in enumerate(zip(specs, payloads, strict=True)):
                ahead.append(index + 1 - ended)  # noqa: B023 - the count at this very moment
                yield item

        for result in tier.write_many(counted()):
            assert result.ok
            ended += 1
        assert max(ahead) == most
        assert ended == 40


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that Python allocated at the same time, at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("checksum", [True, False])
def test_a_payload_is_never_copied(clean: RedisServer, connect: Connect, checksum: bool) -> None:
    nbytes = 4 << 20
    specs = [make_spec(i, nbytes=nbytes) for i in range(4)]
    payloads = [memoryview(payload_of(spec)) for spec in specs]
    dests = [memoryview(bytearray(nbytes)) for _ in specs]
    tier = connect(clean.url, checksum=checksum)
    ends: list[Result] = []
    items = list(zip(specs, payloads, strict=True))
    assert peak_of(lambda: ends.extend(tier.write_many(items))) < nbytes // 4
    items = list(zip(specs, dests, strict=True))
    assert peak_of(lambda: ends.extend(tier.read_many(items))) < nbytes // 4
    assert all(result.ok for result in ends)
    assert dests == payloads


def test_the_fall_back_does_copy(clean: RedisServer, connect: Connect, fall_back: None) -> None:
    """Which shows that the measure above can see a copy."""
    spec = make_spec(nbytes=4 << 20)
    tier = connect(clean.url)
    assert put_all(tier, [spec]) == [GOOD]
    dest = memoryview(bytearray(spec.nbytes))
    assert peak_of(lambda: tier.read_into(spec, dest)) > spec.nbytes


def test_a_writer_sees_what_a_reader_of_the_same_tier_wrote(
    clean: RedisServer, connect: Connect
) -> None:
    tier = connect(clean.url, max_connections=2)
    writing = tier.write_many((spec, memoryview(payload_of(spec))) for spec in SPECS)
    assert next(writing).ok
    assert get_all(tier, SPECS[:1]) == [GOOD]
    assert all(result.ok for result in writing)
    assert get_all(tier) == [GOOD] * 6


def test_damaged_values_of_a_batch_are_deleted_when_it_ends(
    clean: RedisServer, connect: Connect
) -> None:
    tier = connect(clean.url, max_connections=1)
    assert put_all(tier) == [GOOD] * 6
    with clean.client() as admin:
        for index in (1, 3):
            admin.setrange(SPECS[index].key, HEADER_BYTES + 5, b"\x00\x01\x02\x03")
        bad = (Outcome.BAD, "checksum")
        assert get_all(tier) == [GOOD, bad, GOOD, bad, GOOD, GOOD]
        assert [admin.exists(spec.key) for spec in SPECS] == [1, 0, 1, 0, 1, 1]
    assert get_all(tier)[1] == (Outcome.MISS, "")


def test_a_refused_value_of_the_right_size_costs_nothing(
    clean: RedisServer, connect: Connect
) -> None:
    tier = connect(clean.url)
    assert put_all(tier) == [GOOD] * 6
    with clean.client() as admin:
        admin.set(SPECS[2].key, admin.get(SPECS[1].key))
        admin.set(SPECS[3].key, b"x" * 100)
        before = admin.info("stats")["total_connections_received"]
        bad = [(Outcome.BAD, "chunk"), (Outcome.BAD, "magic")]
        assert get_all(tier) == [GOOD, GOOD, *bad, GOOD, GOOD]
        assert admin.info("stats")["total_connections_received"] == before


def test_a_huge_foreign_value_costs_its_connection_but_not_its_neighbours(
    clean: RedisServer, connect: Connect
) -> None:
    tier = connect(clean.url)
    assert put_all(tier) == [GOOD] * 6
    with clean.client() as admin:
        admin.set(SPECS[2].key, b"x" * 10_000_000)
        admin.delete(SPECS[4].key)
        admin.delete(SPECS[5].key)
        admin.rpush(SPECS[5].key, "a")
        before = admin.info("stats")["total_connections_received"]
        assert get_all(tier) == [
            GOOD,
            GOOD,
            (Outcome.BAD, "magic"),
            GOOD,
            (Outcome.MISS, ""),
            (Outcome.BAD, "magic"),
        ]
        assert admin.info("stats")["total_connections_received"] - before == 1
    assert tier.health() is Health.CLOSED


# A connection that breaks in the middle.

VALUE = len(bulk(value_of(SPECS[0])))
GREETING = len(OK) + len(b"+PONG\r\n")
"""Of the connection: the answers to CLIENT SETNAME and PING."""


@pytest.mark.parametrize(
    "cut",
    [0, 1, 5, 500, HEADER_BYTES + 9, VALUE - 1, VALUE, VALUE + 1, 3 * VALUE - 20_000, 6 * VALUE],
)
def test_reads_on_their_way_over_a_cut_connection_are_sent_once_more(
    clean: RedisServer, connect: Connect, cut: int
) -> None:
    assert put_all(connect(clean.url)) == [GOOD] * 6
    with SlowProxy(clean.port, cut_after=GREETING + cut) as proxy:
        tier = connect(proxy.url)
        assert proxy.connections == 1
        proxy.cut_after = None
        before = calls(clean, "get")
        assert get_all(tier) == [GOOD] * 6
        assert proxy.connections == (1 if cut == 6 * VALUE else 2)
        whole = cut // VALUE
        again = calls(clean, "get") - before - 6
        assert again <= min(WINDOW.count, 6 - whole), "what was on its way, and no more"
        assert tier.health() is Health.CLOSED


@pytest.mark.parametrize("cut", [0, 3, len(OK), len(OK) + 2, 4 * len(OK)])
def test_writes_on_their_way_over_a_cut_connection_are_sent_once_more(
    clean: RedisServer, connect: Connect, cut: int
) -> None:
    with SlowProxy(clean.port, cut_after=GREETING + cut) as proxy:
        tier = connect(proxy.url)
        proxy.cut_after = None
        ends = put_all(tier)
        # EXISTS: it had been stored, but the answer was lost.
        assert set(ends) <= {GOOD, EXISTS}
        assert proxy.connections == 2
        assert tier.health() is Health.CLOSED
    assert get_all(connect(clean.url)) == [GOOD] * 6


def test_a_connection_that_always_breaks_is_an_outage(
    clean: RedisServer, connect: Connect, clock: Clock
) -> None:
    assert put_all(connect(clean.url)) == [GOOD] * 6
    with SlowProxy(clean.port, cut_after=GREETING + 2 * VALUE + 700) as proxy:
        tier = connect(proxy.url)
        proxy.cut_after = len(OK) + 700
        ends = get_all(tier)
        # What had arrived may be lost with the connection.
        answered = ends.count(GOOD)
        assert answered <= 2
        assert ends == [GOOD] * answered + [lost("connection")] + [lost("breaker")] * (5 - answered)
        proxy.cut_after = None
        clock.go()
        assert eventually(lambda: get_all(tier) == [GOOD] * 6)


def test_a_server_killed_in_the_middle_ends_the_batch(
    server: RedisServer, connect: Connect
) -> None:
    tier = connect(server.url)
    assert put_all(tier) == [GOOD] * 6
    dests = [memoryview(bytearray(spec.nbytes)) for spec in SPECS]
    results = tier.read_many(zip(SPECS, dests, strict=True))
    assert next(results).ok
    server.kill()
    ends = [(result.outcome, result.reason) for result in results]
    answered = ends.count(GOOD)
    assert ends == [GOOD] * answered + [lost("connection")] + [lost("breaker")] * (4 - answered)
    assert get_all(tier) == [lost("breaker")] * 6


def test_a_server_that_stops_in_the_middle_costs_one_deadline(
    clean: RedisServer, connect: Connect
) -> None:
    assert put_all(connect(clean.url)) == [GOOD] * 6
    with SlowProxy(clean.port) as proxy:
        tier = connect(proxy.url, operation_timeout_s=0.5)
        dests = [memoryview(bytearray(spec.nbytes)) for spec in SPECS]
        results = tier.read_many(zip(SPECS, dests, strict=True))
        assert next(results).ok
        proxy.trickle, proxy.latency_ms = True, 10.0
        ends = [(result.outcome, result.reason) for result in results]
        # What the proxy had sent before is still good.
        answered = ends.count(GOOD)
        assert ends == [GOOD] * answered + [lost("timeout")] + [lost("breaker")] * (4 - answered)


def test_a_server_that_reads_nothing_costs_a_writer_one_deadline(
    server: RedisServer, connect: Connect, clock: Clock
) -> None:
    """The value is larger than what the kernel takes from a sender that nobody reads."""
    specs = [make_spec(i, nbytes=16 << 20) for i in (20, 21)]
    tier = connect(server.url, operation_timeout_s=0.5)
    server.pause()
    assert put_all(tier, specs) == [lost("timeout"), lost("breaker")]
    server.resume()
    clock.go()
    assert eventually(lambda: put_all(tier) == [GOOD] * 6)
    assert get_all(tier) == [GOOD] * 6
    assert tier.leading([[specs[0].key]]).count == 0, "a value cut short is not there"


def test_closing_the_tier_ends_a_batch_that_waits(server: RedisServer, connect: Connect) -> None:
    tier = connect(server.url, operation_timeout_s=600.0)
    server.pause()
    ends: list[End] = []
    waiting = threading.Thread(target=lambda: ends.extend(get_all(tier)), daemon=True)
    waiting.start()
    assert eventually(lambda: bool(tier._pool._busy))
    tier.close()
    waiting.join(30)
    assert len(ends) == 6
    assert {outcome for outcome, _ in ends} == {Outcome.ERROR}


# Error replies, from a server of our own.


def answering(replies: dict[int, bytes | None]) -> Callable[[list[bytes]], bytes | None]:
    """GET and SET of SPECS[i] get `replies[i]`, the others what a sound server says."""
    index = {spec.key.encode(): i for i, spec in enumerate(SPECS)}

    def answer(command: list[bytes]) -> bytes | None:
        position = index[command[1]]
        if position in replies:
            return replies[position]
        return bulk(value_of(SPECS[position])) if command[0] == b"GET" else OK

    return answer


@pytest.mark.parametrize(
    ("reply", "end"),
    [
        (b"-MOVED 42 127.0.0.1:7001\r\n", lost("moved")),
        (b"-ASK 42 127.0.0.1:7001\r\n", lost("ask")),
        (b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n", lost("cluster")),
        (b"-READONLY You can't write against a read only replica.\r\n", lost("readonly")),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", lost("oom")),
        (b"-NOPERM this user has no permissions\r\n", lost("auth")),
        (b"-ERR unknown\r\n", lost("reply")),
        (b"-WRONGTYPE Operation against a key holding the wrong kind\r\n", None),
        (NIL, None),
    ],
)
def test_an_error_reply_leaves_the_others_on_the_same_connection(
    connect: Connect, reply: bytes, end: End | None
) -> None:
    read_end = end or ((Outcome.MISS, "") if reply == NIL else (Outcome.BAD, "magic"))
    write_end = end or (EXISTS if reply == NIL else lost("reply"))
    with FakeRedis(answering({1: reply})) as fake:
        tier = connect(fake.url)
        assert get_all(tier) == [GOOD, read_end, *[GOOD] * 4]
        assert put_all(tier) == [GOOD, write_end, *[GOOD] * 4]
        assert fake.connections == 1
        assert len(fake.commands) == 12, "nothing is sent twice"
        assert tier.health() is Health.CLOSED


def test_a_redirect_names_the_other_node(connect: Connect) -> None:
    with FakeRedis(answering({0: b"-MOVED 42 127.0.0.1:7001\r\n"})) as fake:
        tier = connect(fake.url)
        first = next(tier.read_many([(SPECS[0], memoryview(bytearray(SPECS[0].nbytes)))]))
        assert first == Result(Outcome.ERROR, "moved", instead="127.0.0.1:7001")


@pytest.mark.parametrize("word", [b"LOADING Redis is loading", b"MASTERDOWN Link is down"])
def test_a_server_that_loads_has_answered_what_was_on_its_way(
    connect: Connect, clock: Clock, word: bytes
) -> None:
    with FakeRedis(answering({1: b"-" + word + b"\r\n"})) as fake:
        tier = connect(fake.url)
        assert get_all(tier) == [GOOD, lost("loading"), GOOD, GOOD, GOOD, lost("breaker")]
        clock.go()
        assert eventually(lambda: tier.health() is Health.CLOSED)
        assert get_all(tier, SPECS[2:]) == [GOOD] * 4


@pytest.mark.parametrize(
    "reply", [b"+QUEUED\r\n", b":1\r\n", b"*1\r\n:1\r\n", b"$-2\r\n", b"$x\r\n", b"HTTP/1.1\r\n"]
)
def test_nonsense_closes_the_connection_and_is_not_asked_for_again(
    connect: Connect, clock: Clock, reply: bytes
) -> None:
    with FakeRedis(answering({1: reply})) as fake:
        tier = connect(fake.url)
        assert get_all(tier) == [GOOD, lost("reply"), *[lost("breaker")] * 4]
        assert [command[1] for command in fake.commands].count(SPECS[1].key.encode()) == 1
        clock.go()
        assert eventually(lambda: tier.health() is Health.CLOSED)
        assert get_all(tier, SPECS[2:]) == [GOOD] * 4


def test_a_value_without_its_end_is_not_taken(connect: Connect) -> None:
    """The size announced is one short of what follows, so the next reply would be garbage."""
    whole = value_of(SPECS[1])
    torn = b"$%d\r\n%b" % (len(whole), whole) + b"x\r\n"
    with FakeRedis(answering({1: torn})) as fake:
        tier = connect(fake.url)
        dests = [memoryview(bytearray(spec.nbytes)) for spec in SPECS]
        ends = [r.reason for r in tier.read_many(zip(SPECS, dests, strict=True))]
        assert ends == ["", "reply", *["breaker"] * 4]


def test_a_close_instead_of_a_reply_is_tried_once_more_and_no_oftener(
    connect: Connect, clock: Clock
) -> None:
    with FakeRedis(answering({1: None})) as fake:
        tier = connect(fake.url)
        assert get_all(tier) == [GOOD, lost("connection"), *[lost("breaker")] * 4]
        asked = [command[1] for command in fake.commands]
        assert asked.count(SPECS[1].key.encode()) == 2
        clock.go()
        assert eventually(lambda: tier.health() is Health.CLOSED)
