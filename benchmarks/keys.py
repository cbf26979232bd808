"""How long the chunk keys of a prompt take: all at once, and one chunk more.

python benchmarks/keys.py [--tokens 32768] [--repeat 50]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from elora_connector.core.keys import ChunkHasher


def milliseconds(tokens: list[int], chunk_size: int, repeat: int) -> tuple[float, float]:
    """Medians of CPU time: hashing the whole prompt, and adding its last chunk."""
    whole, last = [], []
    for _ in range(repeat):
        hasher = ChunkHasher(bytes(32), chunk_size)
        start = time.thread_time()
        hasher.extend(tokens[:-chunk_size])
        middle = time.thread_time()
        hasher.extend(tokens)
        end = time.thread_time()
        whole.append(end - start)
        last.append(end - middle)
    return 1e3 * statistics.median(whole), 1e3 * statistics.median(last)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeat", type=int, default=50)
    options = parser.parse_args()
    rng = random.Random(0)
    tokens = [rng.randint(0, 150_000) for _ in range(options.tokens)]
    for chunk_size in (64, 256):
        whole, last = milliseconds(tokens, chunk_size, options.repeat)
        print(
            f"{options.tokens} tokens, chunk {chunk_size:>3}: {whole:.2f} ms of CPU, "
            f"one chunk more: {1000 * last:.0f} us"
        )


if __name__ == "__main__":
    main()
