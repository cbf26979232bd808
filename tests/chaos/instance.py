"""The engines of a chaos run: their sizes, and a second one in a process of its own.

`python -m tests.chaos.instance JSON` is that process: it runs the questions it is given
and says what it was answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from tests.chaos.load import HUNG_S, Load, WrongError, totals
from tests.chaos.questions import MODEL_LENGTH, Question
from tests.support.engine import Engine, engine

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 32
HOST_CHUNKS = 32
CHUNK_BYTES = CHUNK * 4096
IO_THREADS = 4
CONNECTIONS = 2 * (IO_THREADS + 2)
"""Most connections of one engine: its scheduler and its worker have a client each."""
MAC_VARIABLE = "CHAOS_MAC_KEY"
START_S = 180.0


@dataclass(frozen=True)
class Kind:
    """What differs between the pieces of a long run."""

    signed: bool
    prefix_cache: bool

    @classmethod
    def of(cls, seed: int) -> Kind:
        return cls(signed=seed % 2 == 1, prefix_cache=seed // 2 % 2 == 0)


@contextlib.contextmanager
def chaos_engine(model: str, url: str, kind: Kind) -> Iterator[Engine]:
    """Small pools, so that what is asked again has to come from Redis; short deadlines."""
    settings: dict[str, Any] = {
        "lmcache.chunk_size": CHUNK,
        "lmcache.max_local_cpu_size": HOST_CHUNKS * CHUNK_BYTES / 1024**3,
        "lmcache.remote_url": url,
        "elora.fetch_deadline_ms": 1000,
        "elora.prefetch": True,
        "elora.load_or_recompute.enabled": True,
        "elora.shutdown_flush_s": 0.5,
        "elora.remote.operation_timeout_ms": 250,
        "elora.remote.connect_timeout_ms": 250,
        "elora.remote.io_threads": IO_THREADS,
        "elora.remote.write_queue_mb": 8,
    }
    if kind.signed:
        os.environ.setdefault(MAC_VARIABLE, "a key that only tests have")
        settings["elora.remote.mac_key_env"] = MAC_VARIABLE
    with engine(
        model,
        settings,
        enable_prefix_caching=kind.prefix_cache,
        num_gpu_blocks_override=64,
        max_model_len=MODEL_LENGTH,
        max_num_seqs=6,
        max_num_batched_tokens=256,
    ) as live:
        yield live


class Instance:
    """The second engine, as the test sees it; it may be killed at any moment."""

    def __init__(self, model: Path, adapters: dict[str, Path], url: str, kind: Kind) -> None:
        given = {
            "model": str(model),
            "adapters": {name: str(path) for name, path in adapters.items()},
            "url": url,
            "kind": asdict(kind),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.instance", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, questions: Sequence[Question]) -> None:
        """Let it forget what it has and run these, while the caller does other things."""
        if not self._started:
            assert self._next(START_S)["ready"]
            self._started = True
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([asdict(q) for q in questions]) + "\n")
        self._process.stdin.flush()

    def wait(self) -> Counter[str]:
        """Counters after the last `start`, once it ended.

        Raises:
            WrongError: an answer was wrong, or none came.
        """
        return self._next(2 * HUNG_S)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def _next(self, seconds: float) -> Counter[str]:
        try:
            return self._read(self._lines.get(timeout=seconds))
        except Empty:
            raise WrongError(f"the second engine was silent for {seconds:.0f} s") from None

    def _read(self, line: str) -> Counter[str]:
        said = json.loads(line) if line else {"error": "it died"}
        if "error" in said:
            raise WrongError(f"second engine: {said['error']}")
        return Counter(said)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")


def _serve(model: str, adapters: dict[str, str], url: str, kind: dict[str, bool]) -> None:
    paths = {name: Path(path) for name, path in adapters.items()}
    with chaos_engine(model, url, Kind(**kind)) as live:
        load = Load(live, paths, [], random.Random(0))
        _say({"ready": True})
        for line in sys.stdin:
            questions = [
                Question(tuple(asked["prompt"]), asked["adapter"], tuple(asked["answer"]))
                for asked in json.loads(line)
            ]
            try:
                live.until(live.remote_answers, HUNG_S)
                live.forget_host()
                live.forget_gpu()
                load.ask(questions)
                live.settle()
            except Exception as error:  # noqa: BLE001 - the parent is told and fails
                _say({"error": f"{type(error).__name__}: {error}"})
                return
            _say({**totals(live), "done": load.done})


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
