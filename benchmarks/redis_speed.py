"""How fast chunks move in and out of Redis, against other clients and a bare socket.

python benchmarks/redis_speed.py [--count 20] [--rounds 20] [--mib 1 8] [--busy] [--json FILE]

One server for all, on 127.0.0.1, without persistence; it and the clients share this
machine.  In each round, for each size, every client in turn, in a random order, stores
`count` chunks under new keys and reads them back; short turns, so that whatever else the
machine does meets all of them alike.  MB/s (1e6 bytes) is the median
over the rounds; p50 and p95 are over all chunks, in milliseconds.  "of bare" is the
median of the ratios to a bare socket that works in the same manner (one by one or
pipelined, as many connections) in the same round.

LMCache is measured where it can be imported (`pip install lmcache`, or this package's
extra `lmcache`), redis-benchmark where it is on PATH or named; else they are named as
not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.redis_peers import (  # noqa: E402
    BareSocket,
    Ours,
    Peer,
    RedisPy,
    RedisPyBatched,
    Several,
    Slots,
    seal_seconds,
)
from tests.support.redis_server import RedisServer  # noqa: E402

MIB = 1 << 20
SLOT_BYTES = 128 * MIB
WINDOW, WINDOW_BYTES = 4, 4 * MIB
"""As ours: one value of more than 4 MiB is on its way at a time."""
MAC_KEY = bytes(32)
DIRECTIONS = ("put", "get")


@dataclass(frozen=True)
class Entry:
    """A client; `bare` names the bare socket that works in the same manner."""

    name: str
    make: Callable[[int, int], Peer]
    bare: str


@dataclass
class Figures:
    """Of one client and direction: MB/s of each round, seconds of each chunk."""

    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


SINGLE, PIPELINED = "bare socket, one by one", "bare socket, pipelined"
SINGLE_2, PIPELINED_2 = SINGLE + ", 2 connections", PIPELINED + ", 2 connections"


def two(make: Callable[[int, int], Peer]) -> Callable[[int, int], Peer]:
    return lambda port, nbytes: Several([make(port, nbytes) for _ in range(2)])


def ours(**options: Any) -> Callable[[int, int], Peer]:
    return lambda port, _: Ours(port, **options)


def entries() -> list[Entry]:
    """Every client that can be measured here."""

    def single(port: int, _: int) -> Peer:
        return BareSocket(port)

    def pipelined(port: int, nbytes: int) -> Peer:
        return BareSocket(port, max(1, min(WINDOW, WINDOW_BYTES // nbytes)))

    checked = {"checksum": True}
    signed = {"checksum": True, "mac_key": MAC_KEY}
    return [
        Entry(SINGLE, single, SINGLE),
        Entry(PIPELINED, pipelined, PIPELINED),
        Entry(SINGLE_2, two(single), SINGLE_2),
        Entry(PIPELINED_2, two(pipelined), PIPELINED_2),
        Entry("redis-py + hiredis", lambda port, _: RedisPy(port), SINGLE),
        Entry("redis-py pipeline / MGET", lambda port, _: RedisPyBatched(port), PIPELINED),
        *lmcache_entries(),
        Entry("ours, one by one, no checksum", ours(batched=False, checksum=False), SINGLE),
        Entry("ours, one by one", ours(batched=False, **checked), SINGLE),
        Entry("ours, one by one, MAC", ours(batched=False, **signed), SINGLE),
        Entry("ours, batched, no checksum", ours(batched=True, checksum=False), PIPELINED),
        Entry("ours, batched", ours(batched=True, **checked), PIPELINED),
        Entry("ours, batched, MAC", ours(batched=True, **signed), PIPELINED),
        Entry("ours, one by one, 2 connections", two(ours(batched=False, **checked)), SINGLE_2),
        Entry("ours, batched, 2 connections", two(ours(batched=True, **checked)), PIPELINED_2),
        Entry("ours, batched, MAC, 2 connections", two(ours(batched=True, **signed)), PIPELINED_2),
    ]


def lmcache_entries() -> list[Entry]:
    if importlib.util.find_spec("lmcache") is None:
        return []
    from benchmarks.redis_lmcache import LMCache

    def connector(scheme: str, *, batched: bool) -> Callable[[int, int], Peer]:
        return lambda port, nbytes: LMCache(port, nbytes, scheme, batched=batched)

    return [
        Entry(f"LMCache {scheme}://, {how}", connector(scheme, batched=batched), bare)
        for scheme in ("redis", "resp")
        for how, batched, bare in (("one by one", False, SINGLE), ("batched", True, PIPELINED))
    ]


class RedisBenchmark:
    """The server's own benchmark program, which sends and forgets the same bytes."""

    def __init__(self, program: str) -> None:
        self._program = program

    def run(self, port: int, nbytes: int, count: int) -> dict[str, tuple[float, float, float]]:
        """Direction -> MB/s, p50 and p95 in milliseconds."""
        found = {}
        for direction, test in (("put", "set"), ("get", "get")):
            command = [self._program, "-p", str(port), "-c", "1", "-n", str(count)]
            command += ["-d", str(nbytes), "-t", test, "--csv"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            names, values = (line.strip('"').split('","') for line in done.stdout.split("\n")[:2])
            row = dict(zip(names, values, strict=True))
            rate = float(row["rps"]) * nbytes / 1e6
            found[direction] = rate, float(row["p50_latency_ms"]), float(row["p95_latency_ms"])
        return found


class Field:
    """All clients with their connections, for chunks of one size."""

    def __init__(
        self,
        server: RedisServer,
        nbytes: int,
        count: int,
        chosen: list[Entry],
        program: str | None,
    ) -> None:
        self.figures: dict[str, dict[str, Figures]] = {}
        self._server = server
        self._nbytes = nbytes
        self._count = count
        self._slots = make_slots(nbytes, count)
        self._peers = {entry.name: entry.make(server.port, nbytes) for entry in chosen}
        self._other = None if program is None else RedisBenchmark(program)

    def round(self, turn: int) -> None:
        """Every client once."""
        keys = [f"chunk:{turn}:{i}" for i in range(self._count)]
        names = list(self._peers)
        random.Random(turn).shuffle(names)
        with self._server.client() as admin:
            for name in names:
                admin.flushall()
                for direction in DIRECTIONS:
                    self._turn(name, direction, keys)
            admin.flushall()
            if self._other is not None:
                rows = self._other.run(self._server.port, self._nbytes, self._count)
                for direction, (rate, p50, p95) in rows.items():
                    found = self._found("redis-benchmark, 1 connection", direction)
                    found.rates.append(rate)
                    found.seconds += [p50 / 1e3, p95 / 1e3]
            admin.flushall()

    def _turn(self, name: str, direction: str, keys: list[str]) -> None:
        start = time.perf_counter()
        seconds = getattr(self._peers[name], direction)(keys, self._slots)
        wall = time.perf_counter() - start
        found = self._found(name, direction)
        found.rates.append(len(keys) * self._nbytes / wall / 1e6)
        found.seconds += seconds

    def _found(self, name: str, direction: str) -> Figures:
        both = self.figures.setdefault(name, {d: Figures() for d in DIRECTIONS})
        return both[direction]


def make_slots(nbytes: int, count: int) -> Slots:
    """As a host tier has them: side by side, together more than the processor's caches."""
    number = max(2, min(count, SLOT_BYTES // nbytes))
    memory = memoryview(bytearray(os.urandom(MIB) * (number * nbytes // MIB + 1)))
    return [memory[i * nbytes : (i + 1) * nbytes] for i in range(number)]


def rows(figures: dict[str, dict[str, Figures]]) -> list[dict[str, Any]]:
    """One per client: medians, percentiles, ratios."""
    bare = {entry.name: entry.bare for entry in entries()}
    table = []
    order = [*bare, *sorted(figures.keys() - bare.keys())]
    for name in (name for name in order if name in figures):
        both = figures[name]
        row: dict[str, Any] = {"client": name, "against": bare.get(name, SINGLE)}
        for direction, found in both.items():
            ground = figures[row["against"]][direction].rates
            ratios = [one / other for one, other in zip(found.rates, ground, strict=True)]
            seconds = sorted(found.seconds)
            row[direction] = {
                "mb_s": statistics.median(found.rates),
                "p50_ms": 1e3 * statistics.median(seconds),
                "p95_ms": 1e3 * seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
                "of_bare": statistics.median(ratios),
            }
        table.append(row)
    return table


def show(mib: int, table: list[dict[str, Any]]) -> None:
    print(f"\nchunks of {mib} MiB")
    print("| client | PUT MB/s | of bare | p50 / p95 ms | GET MB/s | of bare | p50 / p95 ms |")
    print("|---|---|---|---|---|---|---|")
    for row in table:
        cells = [row["client"]]
        for direction in DIRECTIONS:
            one = row[direction]
            cells += [
                f"{one['mb_s']:.0f}",
                f"{one['of_bare']:.2f}",
                f"{one['p50_ms']:.2f} / {one['p95_ms']:.2f}",
            ]
        print("| " + " | ".join(cells) + " |")


def show_seals(mib: int, count: int) -> dict[str, float]:
    """Milliseconds of CPU per chunk for what protects it; the same again to check it."""
    slots = make_slots(mib * MIB, count)
    seconds = {
        "checksum (XXH3-128)": seal_seconds(slots, None, checksum=True),
        "MAC (keyed BLAKE2b)": seal_seconds(slots, MAC_KEY, checksum=False),
    }
    print(f"\nCPU per chunk of {mib} MiB:")
    for name, one in seconds.items():
        print(f"{name}: {1e3 * one:.3f} ms, {mib * MIB / one / 1e9:.1f} GB/s")
    return seconds


@contextlib.contextmanager
def computing(wanted: bool) -> Iterator[None]:
    """Meanwhile a thread of this process does nothing but compute, in Python."""
    ended = threading.Event()

    def compute() -> None:
        number = 1
        while not ended.is_set():
            number = number * 31 % 1_000_003

    thread = threading.Thread(target=compute, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if wanted:
            thread.join()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", nargs="+", help="clients whose name has one of these words")
    parser.add_argument("--redis-benchmark", default=shutil.which("redis-benchmark"))
    parser.add_argument(
        "--busy",
        action="store_true",
        help="beside a thread that computes, as the clients' threads are in a worker",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    wanted = options.only or [""]
    named = [entry.name for entry in entries() if any(word in entry.name for word in wanted)]
    grounds = {SINGLE} | {entry.bare for entry in entries() if entry.name in named}
    chosen = [entry for entry in entries() if entry.name in {*named, *grounds}]
    tables, seals = {}, {}
    with RedisServer() as server:
        fields = {
            mib: Field(server, mib * MIB, options.count, chosen, options.redis_benchmark)
            for mib in options.mib
        }
        with computing(options.busy):
            for turn in range(options.rounds):
                for one in fields.values():
                    one.round(turn)
    beside = ", beside a computing thread" if options.busy else ""
    print(f"{options.rounds} rounds of {options.count} chunks{beside}")
    for mib, one in fields.items():
        tables[str(mib)] = rows(one.figures)
        show(mib, tables[str(mib)])
        seals[str(mib)] = show_seals(mib, options.count)
    if importlib.util.find_spec("lmcache") is None:
        print("\nnot measured: LMCache (not installed here)")
    if options.redis_benchmark is None:
        print("\nnot measured: redis-benchmark (not found; name it with --redis-benchmark)")
    if options.json is not None:
        facts = {
            "count": options.count,
            "rounds": options.rounds,
            "busy": options.busy,
            "mib": tables,
            "seals": seals,
        }
        options.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(0)  # LMCache's threads do not end by themselves


if __name__ == "__main__":
    main()
