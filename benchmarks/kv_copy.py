"""GB/s between paged KV and the host buffer, against a plain copy of the same bytes.

    python benchmarks/kv_copy.py --layers 8 --heads 4 --head-size 64
    python benchmarks/kv_copy.py --device cuda --layers 32 --heads 8 --head-size 128 \
        --block-size 16 --json

The baseline moves as many bytes between two contiguous buffers: one memcpy on the CPU
(single-threaded, like the engine), one asynchronous copy of pinned memory on CUDA.
Baseline and engine take turns, so that a busy machine slows both.  Not named `copy.py`:
that would hide the standard library's `copy` from every script in this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elora_connector.transfer import (
    ChunkCopy,
    CopyEngine,
    HostBuffer,
    PagedKV,
    Ticket,
    copy_engine_for,
    round_trip,
)

Timed = Callable[[], float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4, help="KV heads of one rank")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", help="a torch dtype")
    parser.add_argument("--block-size", type=int, default=128, help="tokens")
    parser.add_argument("--chunk-size", type=int, default=256, help="tokens")
    parser.add_argument("--order", choices=["random", "sequential"], default="random")
    parser.add_argument("--mib", type=int, default=64, help="bytes per measured batch")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    if options.chunk_size % options.block_size:
        parser.error("--chunk-size must be a multiple of --block-size")
    return options


def build(options: argparse.Namespace) -> tuple[CopyEngine, list[ChunkCopy]]:
    """Paged KV of twice the batch in vLLM's layout, a host buffer, and the batch."""
    per_chunk = options.chunk_size // options.block_size
    page = (options.heads, options.block_size, 2 * options.head_size)
    dtype = getattr(torch, options.dtype)
    chunk_bytes = torch.empty(per_chunk, options.layers, *page, dtype=dtype, device="meta").nbytes
    chunks = max(1, (options.mib << 20) // chunk_bytes)
    blocks = max(3, 2 * chunks * per_chunk)
    storage = torch.zeros((options.layers, blocks, *page), dtype=dtype, device=options.device)
    kv_caches = {f"layer{i}": layer for i, layer in enumerate(storage)}
    paged = PagedKV.from_tensors(kv_caches, blocks, block_dim_hint=0)
    host = HostBuffer(chunks, per_chunk * paged.block_bytes, pin=True)
    ids = np.arange(blocks)
    if options.order == "random":
        np.random.default_rng(0).shuffle(ids)
    copies = [
        ChunkCopy(i, tuple(ids[i * per_chunk : (i + 1) * per_chunk].tolist()))
        for i in range(chunks)
    ]
    return copy_engine_for(paged, host), copies


def verb_timer(verb: Callable[[list[ChunkCopy]], Ticket], copies: list[ChunkCopy]) -> Timed:
    def run() -> float:
        began = time.perf_counter()
        ticket = verb(copies)
        ticket.wait()
        took = time.perf_counter() - began
        if ticket.error is not None:
            raise ticket.error
        return took

    return run


def baseline_timer(device: torch.device, nbytes: int, to_host: bool) -> Timed:
    """One contiguous copy of `nbytes`, in the same direction as the verb."""
    if device.type == "cpu":
        target, source = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)

        def memcpy() -> float:
            began = time.perf_counter()
            target[:] = source
            return time.perf_counter() - began

        return memcpy

    buffer = HostBuffer(1, nbytes, pin=True)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    ends = (buffer.slot(0), on_device) if to_host else (on_device, buffer.slot(0))

    def pinned() -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        ends[0].copy_(ends[1], non_blocking=True)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began

    # The buffer owns the page lock and must live as long as its memory is used.
    pinned.buffer = buffer  # type: ignore[attr-defined]
    return pinned


def summary(seconds: list[float], nbytes: int) -> dict[str, float]:
    """GB/s at the median and at the 50th and 95th percentile of time."""
    p50, p95 = np.percentile(seconds, [50, 95])
    return {
        "gb_s": round(nbytes / p50 / 1e9, 3),
        "p50_ms": round(p50 * 1e3, 3),
        "p95_ms": round(p95 * 1e3, 3),
    }


def measure(name: str, ours: Timed, plain: Timed, repeats: int) -> tuple[list[float], list[float]]:
    """Take turns; the first turn of each warms up and is dropped."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        print(f"\r{name}: {turn}/{repeats} ", end="", file=sys.stderr, flush=True)
        for kept, timer in zip(times, (ours, plain), strict=True):
            took = timer()
            if turn:
                kept.append(took)
    print(file=sys.stderr)
    return times


def main() -> None:
    options = arguments()
    print("building paged KV ...", file=sys.stderr, flush=True)
    engine, copies = build(options)
    began = time.perf_counter()
    round_trip(engine, engine.paged, engine.host)
    result: dict[str, object] = {
        **{key: value for key, value in vars(options).items() if key != "json"},
        "block_bytes": engine.paged.block_bytes,
        "chunk_bytes": engine.host.chunk_bytes,
        "chunks": len(copies),
        "self_test_ms": round((time.perf_counter() - began) * 1e3, 2),
    }
    nbytes = len(copies) * engine.host.chunk_bytes
    rows: dict[str, dict[str, float]] = {}
    for name in ("store", "load", "load_ordered"):
        plain = baseline_timer(engine.paged.device, nbytes, to_host=name == "store")
        ours = verb_timer(getattr(engine, name), copies)
        own, reference = measure(name, ours, plain, options.repeats)
        rows[name] = summary(own, nbytes)
        rows[f"plain ({name})"] = summary(reference, nbytes)
        rows[name]["ratio"] = round(rows[name]["gb_s"] / rows[f"plain ({name})"]["gb_s"], 3)
    engine.close()
    engine.host.close()
    report({**result, "results": rows}, rows, as_json=options.json)


def report(result: dict[str, object], rows: dict[str, dict[str, float]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(", ".join(f"{key} {value}" for key, value in result.items() if key != "results"))
    print(f"{'':22s}{'GB/s':>8s}{'p50 ms':>9s}{'p95 ms':>9s}{'of plain':>10s}")
    for name, row in rows.items():
        ratio = f"{row['ratio']:10.0%}" if "ratio" in row else ""
        print(f"{name:22s}{row['gb_s']:8.2f}{row['p50_ms']:9.2f}{row['p95_ms']:9.2f}{ratio}")


if __name__ == "__main__":
    main()
