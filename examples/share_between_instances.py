"""Two vLLM servers on one Redis: what the first one computed, the second one reuses.

Usage: python -m examples.share_between_instances

Both servers run at the same time and know nothing of each other.  The first one answers
a long question with the base model and with two adapters; then the second one is asked
the same, and says how many prompt tokens it did not have to compute.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from examples.servers import (
    ELORA,
    RedisServer,
    ServerError,
    VllmServer,
    end_on_sigterm,
    wait_for,
    write_config,
)
from examples.tiny_model import make_tiny_model

MODELS = ("base", "civil", "legal")
QUESTION = "The city's rules on parking, in short: " + "no car may stand here at night. " * 16


def ask_all(server: VllmServer) -> dict[str, tuple[int, ...]]:
    """Ask every model, print one line each, and return the tokens."""
    tokens = {}
    for model in MODELS:
        answer = server.complete(model, QUESTION)
        print(
            f"{server.name:10} {model:6} {answer.cached_tokens:4} of {answer.prompt_tokens} prompt"
            f" tokens reused, first token after {1000 * answer.ttft:4.0f} ms"
        )
        tokens[model] = answer.tokens
    return tokens


def run(directory: Path, stack: ExitStack) -> bool:
    """Start everything, ask both; whether the answers agree."""
    tiny = make_tiny_model(directory / "tiny")
    redis = RedisServer(directory)
    stack.callback(redis.kill)
    redis.wait_ready()
    config = write_config(directory / "elora.yaml", redis.url)
    servers = []
    for name in ("instance A", "instance B"):
        print(f"starting {name}")
        servers.append(VllmServer(name, tiny, directory, transfer=ELORA, config_file=config))
        stack.callback(servers[-1].process.kill)
    wait_for(servers, MODELS)
    first = ask_all(servers[0])
    print(f"{redis.wait_quiet()} chunks are in Redis")
    second = ask_all(servers[1])
    for server in servers:
        server.stop()
    return first == second


def main() -> int:
    """Entry point: 0 if both instances gave the same tokens."""
    directory = Path(tempfile.mkdtemp(prefix="elora-share-"))
    end_on_sigterm()
    try:
        with ExitStack() as stack:
            same = run(directory, stack)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 2
    print("same tokens" if same else "DIFFERENT TOKENS", f"(logs: {directory})")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
