"""What a request costs while Redis is down or slow, in interleaved pairs.

    python benchmarks/degraded.py [--pairs 60] [--tokens 513] [--lookup-timeout-ms 100]
                                  [--only dead stopped ...] [--json FILE]

One real engine.  In each pair one request is served with the degraded remote tier and one
as if no remote tier were configured, both on prompts that nobody has seen; the order
inside a pair alternates and the writes of each request end before the next one.  The
requests that met the first deadline are not counted but printed.  After each situation
Redis is well again, and the same engine must hit in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.overhead import interval, prompts  # noqa: E402
from examples.tiny_model import make_tiny_model  # noqa: E402
from tests.support.engine import CHUNK, Engine, engine, lora  # noqa: E402
from tests.support.proxy import SlowProxy  # noqa: E402
from tests.support.redis_server import RedisServer  # noqa: E402

FIRST = 3
"""Requests that may still meet a deadline when a situation begins."""


class Network:
    """A `SlowProxy` in a process of its own, so that it takes no time from the engine."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(port, far_end), daemon=True)
        self._process.start()
        self.url: str = self._pipe.recv()

    def set(self, **weather: Any) -> None:
        self._pipe.send(weather)
        self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(port: int, pipe: Any) -> None:
    proxy = SlowProxy(port)
    pipe.send(proxy.url)
    while True:
        for name, value in pipe.recv().items():
            setattr(proxy, name, value)
        pipe.send(None)


Change = Callable[[RedisServer, Network], None]
SITUATIONS: dict[str, tuple[Change, Change]] = {
    "well": (lambda store, net: None, lambda store, net: None),
    "dead": (lambda store, net: store.kill(), lambda store, net: store.start()),
    "stopped": (lambda store, net: store.pause(), lambda store, net: store.resume()),
    "black-holed": (
        lambda store, net: net.set(blackhole=True),
        lambda store, net: net.set(blackhole=False),
    ),
    "20 ms": (
        lambda store, net: net.set(latency_ms=20.0),
        lambda store, net: net.set(latency_ms=0.0),
    ),
    "300 ms": (
        lambda store, net: net.set(latency_ms=300.0),
        lambda store, net: net.set(latency_ms=0.0),
    ),
}
"""What is done to Redis, and how it is made well again."""


@contextlib.contextmanager
def no_remote(live: Engine) -> Iterator[None]:
    """As if `remote_url` were not set: nothing is looked up, fetched or written."""
    side = live.side
    remote, side._remote, side._planner._remote = side._remote, None, False
    try:
        yield
    finally:
        side._remote, side._planner._remote = remote, True


def seconds(live: Engine, prompt: list[int], adapter: Any) -> float:
    """One request of one output token, and then quiet."""
    answer = live.ask(prompt, adapter, n=1)
    if answer.cached:
        raise RuntimeError(f"{answer.cached} tokens of a new prompt were cached")
    live.settle(60)
    return answer.seconds


def measure(live: Engine, adapter: Any, count: int, fresh: Iterator[list[int]]) -> dict[str, Any]:
    """The situation is on; `fresh` gives prompts."""
    first = [seconds(live, next(fresh), adapter) for _ in range(FIRST)]
    left, right = [], []
    for pair in range(count):
        for degraded in (pair % 2 == 0, pair % 2 == 1):
            if degraded:
                left.append(seconds(live, next(fresh), adapter))
            else:
                with no_remote(live):
                    right.append(seconds(live, next(fresh), adapter))
    ratios = [a / b for a, b in zip(left, right, strict=True)]
    ratio, low, high = interval(ratios, random.Random(0))
    return {
        "first_ms": [round(1000 * s, 1) for s in first],
        "median_ms": [1000 * statistics.median(left), 1000 * statistics.median(right)],
        "ratio": ratio,
        "ratio_95": [low, high],
    }


def recover(live: Engine, adapter: Any, fresh: Iterator[list[int]]) -> float:
    """Seconds from Redis being well again to a hit in it; requests go on meanwhile."""
    start = time.monotonic()
    while True:
        prompt = next(fresh)
        live.ask(prompt, adapter, n=1)
        live.forget_host()
        if live.ask(prompt, adapter, n=1).cached:
            return time.monotonic() - start
        if time.monotonic() - start > 60:
            raise RuntimeError("no hit within a minute")


def run(options: argparse.Namespace, model: Path, adapter: Any) -> list[dict[str, Any]]:
    """Every situation on one engine."""
    rows = []
    count = (2 * options.pairs + 200) * len(options.only)
    fresh = iter(prompts(count, options.tokens, options.seed))
    with RedisServer() as store:
        network = Network(store.port)
        settings = {
            "lmcache.remote_url": network.url,
            "lmcache.max_local_cpu_size": 0.5,
            "elora.check_invariants": False,
            "elora.load_or_recompute.enabled": True,
            "elora.remote.lookup_timeout_ms": options.lookup_timeout_ms,
        }
        with engine(model, settings, kv_cache_memory_bytes=64 << 20) as live:
            for prompt in prompts(5, options.tokens, options.seed + 1):
                seconds(live, prompt, adapter)
            for name in options.only:
                spoil, mend = SITUATIONS[name]
                spoil(store, network)
                row = {"situation": name} | measure(live, adapter, options.pairs, fresh)
                mend(store, network)
                row["hit_again_s"] = recover(live, adapter, fresh)
                rows.append(row)
                show(row)
        network.close()
    return rows


def show(row: dict[str, Any]) -> None:
    a, b = row["median_ms"]
    low, high = row["ratio_95"]
    first = " ".join(f"{ms:.0f}" for ms in row["first_ms"])
    print(
        f"{row['situation']:<12} {a:7.1f} ms / {b:7.1f} ms = {row['ratio']:.3f} "
        f"[{low:.3f}, {high:.3f}]   first requests {first} ms, "
        f"a hit {row['hit_again_s']:.1f} s after",
        flush=True,
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=8 * CHUNK + 1, help="prompt length")
    parser.add_argument("--lookup-timeout-ms", type=float, default=100.0)
    parser.add_argument("--only", nargs="+", choices=SITUATIONS, default=list(SITUATIONS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{options.tokens}-token prompts with a LoRA adapter, 1 output token, {options.pairs} "
        f"pairs each, look-up timeout {options.lookup_timeout_ms:g} ms, seed {options.seed}"
    )
    with tempfile.TemporaryDirectory() as directory:
        tiny = make_tiny_model(Path(directory))
        rows = run(options, tiny.model, lora("civil", 1, tiny.adapters["civil"]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
