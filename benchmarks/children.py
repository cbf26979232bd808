"""Engine processes that answer questions over pipes, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REPLY_S = 600.0
_HERE = Path(__file__).resolve().parent


class Child:
    """One process that runs a script of this folder; the constructor does not wait for it.

    The script reads questions from standard input and writes replies to the file
    descriptor given as its first argument (vLLM itself writes to standard output).
    """

    def __init__(
        self, script: str, *, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        reader, writer = os.pipe()
        with open(log or os.devnull, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(_HERE / script), str(writer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[writer],
                env={**os.environ, **(env or {})},
                text=True,
            )
        os.close(writer)
        self._replies = os.fdopen(reader)

    def send(self, question: dict[str, Any]) -> None:
        """Put a question; `receive` gives the reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The next reply; RuntimeError if the process ends or is silent for REPLY_S seconds."""
        if not select.select([self._replies], [], [], REPLY_S)[0]:
            raise RuntimeError("an engine process does not answer")
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"an engine process ended with {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One question, one reply."""
        self.send(question)
        return self.receive()

    def close(self) -> None:
        """Let the process end; it is killed if it takes longer than a minute."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()


@contextlib.contextmanager
def children(script: str, *engines: dict[str, Any]) -> Iterator[list[Child]]:
    """Processes that live at the same time, each with the engine of its arguments."""
    started: list[Child] = []
    try:
        for args in engines:
            child = Child(script)
            started.append(child)
            child.ask({"engine": args})
        yield started
    finally:
        for child in started:
            child.close()
