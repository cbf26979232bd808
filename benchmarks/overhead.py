"""What the connector costs on a miss and what it gives on a hit, in interleaved pairs.

    python benchmarks/overhead.py [--pairs 60] [--tokens 1345] [--json FILE]

Two engines in processes of their own answer in turn, so that noise of the machine hits
both alike; the order inside a pair alternates.  An engine whose turn it is first answers a short
request that is not timed: a process that was just switched in runs some 4 ms slower, which
is a third of a warm request and would hit whichever engine did not answer the one before.
Reported: medians and the 95 % interval of the ratio (bootstrap over pairs).

cold     a new prompt each time.  Two engines, connector on against off; the same with two
         engines without connector shows how much two equal processes differ here (by up to
         9 % for their whole lives, so the pairs are spread over several starts).  Inside
         one engine: requests that are looked up and stored against requests that opt out,
         which leaves the differences between processes out
warm     the same prompts again: loaded from the host tier (vLLM's own prefix cache off)
         against a hit in vLLM's GPU prefix cache
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.children import Child, children  # noqa: E402
from benchmarks.paired import interval  # noqa: E402
from examples.tiny_model import make_tiny_model  # noqa: E402
from tests.support.redis_server import RedisServer  # noqa: E402

BLOCK = 32
CHUNK = 64
CHILD = "engine_child.py"
OPT_OUT = {"elora.store": False, "elora.retrieve": False}
STARTS = 6
SETTLE = list(range(8, 40))


def engine_args(model: Path, *, caching: bool, settings: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of LLM(); `settings` is the connector's configuration, None: without it."""
    args: dict[str, Any] = {
        "model": str(model),
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 2048,
        "enable_prefix_caching": caching,
    }
    if settings is not None:
        args["kv_transfer_config"] = {
            "kv_connector": "EloraConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.chunk_size": CHUNK,
                "lmcache.max_local_cpu_size": 1.0,
                **settings,
            },
        }
    return args


Seconds = tuple[list[float], list[float]]


def pairs(
    title: str, count: int, first: Callable[[int], float], second: Callable[[int], float]
) -> Seconds:
    """Measure `first` and `second` alternately."""
    left, right = [], []
    for i in range(count):
        print(f"\r{title}: pair {i + 1} of {count} ", end="", file=sys.stderr, flush=True)
        if i % 2:
            right.append(second(i))
            left.append(first(i))
        else:
            left.append(first(i))
            right.append(second(i))
    print(file=sys.stderr)
    return left, right


def row(title: str, seconds: Seconds) -> dict[str, Any]:
    """Medians, and the ratio left / right with its 95 % interval."""
    left, right = seconds
    ratio, low, high = interval([a / b for a, b in zip(left, right, strict=True)], random.Random(0))
    return {
        "title": title,
        "pairs": len(left),
        "median_ms": [1000 * statistics.median(left), 1000 * statistics.median(right)],
        "ratio": ratio,
        "ratio_95": [low, high],
    }


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(8, 500) for _ in range(tokens)] for _ in range(count)]


def measure(
    child: Child, prompt: list[int], lora: list[Any], cached: int | None, transfer: Any = None
) -> float:
    """Seconds of one request; checks that it hit, or missed, what it should."""
    child.ask({"prompt": SETTLE, "lora": lora, "n": 1, "transfer": OPT_OUT})
    question = {"prompt": prompt, "lora": lora, "n": 1, "transfer": transfer}
    reply = child.ask(question)
    if cached is not None and reply["cached"] != cached:
        raise RuntimeError(f"expected {cached} cached tokens, got {reply['cached']}")
    return float(reply["seconds"])


def cold(model: Path, lora: list[Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """On prompts that nobody has seen: between two engines, and inside one."""
    fresh = prompts(2 * options.pairs + STARTS + 3, options.tokens, 1)
    plain = engine_args(model, caching=False, settings=None)
    ours = engine_args(model, caching=False, settings={})
    for name, left in (("no connector / no connector (noise)", plain), ("on / off", ours)):
        title = f"cold, two engines, {name}"
        yield row(title, two_engines(title, left, plain, fresh, lora, options.pairs))
    with RedisServer() as store:
        for name, settings in (("host", {}), ("host + Redis", {"lmcache.remote_url": store.url})):
            with children(CHILD, engine_args(model, caching=False, settings=settings)) as (one,):
                for warm_up in fresh[-3:]:
                    measure(one, warm_up, lora, None)
                title = f"cold, one engine, request served / opted out ({name})"
                seconds = pairs(
                    title,
                    options.pairs,
                    lambda i, one=one: measure(one, fresh[2 * i], lora, 0),
                    lambda i, one=one: measure(one, fresh[2 * i + 1], lora, 0, OPT_OUT),
                )
                yield row(title, seconds)


def two_engines(
    title: str,
    left: dict[str, Any],
    right: dict[str, Any],
    fresh: list[list[int]],
    lora: list[Any],
    count: int,
) -> Seconds:
    """`count` pairs or a few more, spread over `STARTS` pairs of processes."""
    seconds: Seconds = ([], [])
    each = -(-count // STARTS)
    for start in range(STARTS):
        todo = fresh[start * each : (start + 1) * each]
        with children(CHILD, left, right) as (first, second):
            for warm_up in fresh[-3:]:
                measure(first, warm_up, lora, None)
                measure(second, warm_up, lora, None)
            part = pairs(
                f"{title}, start {start + 1} of {STARTS}",
                each,
                lambda i, first=first, todo=todo: measure(first, todo[i], lora, 0),
                lambda i, second=second, todo=todo: measure(second, todo[i], lora, 0),
            )
        for all_of_them, some in zip(seconds, part, strict=True):
            all_of_them.extend(some)
    return seconds


def warm(model: Path, lora: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """A hit in the host tier against a hit in vLLM's GPU prefix cache."""
    known = prompts(6, options.tokens, 2)
    hit = (options.tokens - 1) // CHUNK * CHUNK
    gpu_hit = (options.tokens - 1) // BLOCK * BLOCK
    ours = engine_args(model, caching=False, settings={})
    plain = engine_args(model, caching=True, settings=None)
    with children(CHILD, ours, plain) as (host, gpu):
        for prompt in known * 2:
            measure(host, prompt, lora, None)
            measure(gpu, prompt, lora, None)
        title = "warm, from host / from GPU prefix cache"
        seconds = pairs(
            title,
            options.pairs,
            lambda i: measure(host, known[i % len(known)], lora, hit),
            lambda i: measure(gpu, known[i % len(known)], lora, gpu_hit),
        )
        return row(title, seconds)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=1345, help="prompt length")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tiny = make_tiny_model(Path(directory))
        lora = ["civil", 1, str(tiny.adapters["civil"])]
        rows = [*cold(tiny.model, lora, options), warm(tiny.model, lora, options)]
    print(
        f"{options.tokens}-token prompts with a LoRA adapter, 1 output token, {options.pairs} pairs"
    )
    for row in rows:
        a, b = row["median_ms"]
        low, high = row["ratio_95"]
        print(
            f"{row['title']:<62} {a:8.1f} ms / {b:8.1f} ms = {row['ratio']:.3f} "
            f"[{low:.3f}, {high:.3f}]"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
