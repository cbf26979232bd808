"""What plain vLLM answers, from a process that has neither our plugin nor a connector.

A process of its own, because vLLM keeps one connector per process and our hooks are
installed in the test process for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tests.support.engine import DEFAULTS

if TYPE_CHECKING:
    from typing_extensions import Self

_LEAST = 8
"""Tokens computed at least: most tests ask for fewer, and a longer answer contains them."""
_ROOT = Path(__file__).resolve().parents[2]


class Oracle:
    """Greedy tokens of a request; computed once per session and configuration.

    Adapter directories that are asked for must not change afterwards.
    """

    def __init__(self, model: Path) -> None:
        self._model = str(model)
        self._known: dict[str, list[int]] = {}
        reader, writer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.oracle", str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=_ROOT,
            env={**os.environ, "VLLM_PLUGINS": "none"},
            pass_fds=[writer],
            text=True,
        )
        os.close(writer)
        self._answers = os.fdopen(reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()  # it has nothing to save, and vLLM takes its time to end
        self._process.wait()
        self._answers.close()

    def __call__(
        self, prompt: Sequence[int], adapter: Path | str | None = None, n: int = 8, **config: Any
    ) -> tuple[int, ...]:
        """Tokens of `prompt` with the adapter in a directory, or of the base model.

        `config`: engine arguments over the defaults of `tests.support.engine`.
        """
        args = {"model": self._model, **config}
        path = None if adapter is None else str(adapter)
        question = {"args": args, "prompt": list(prompt), "adapter": path}
        name = json.dumps(question)
        if len(self._known.get(name, ())) < n:
            self._known[name] = self._compute({**question, "n": max(n, _LEAST)})
        return tuple(self._known[name][:n])

    def _compute(self, question: dict[str, Any]) -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the oracle process ended ({self._process.wait()})")
        tokens: list[int] = json.loads(line)
        return tokens


class _Plain:
    """One engine at a time in this process, for the configuration asked for last."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._args: dict[str, Any] = {}
        self._ids: dict[str, int] = {}

    def answer(self, question: dict[str, Any]) -> list[int]:
        from vllm import SamplingParams

        self._use(question["args"])
        params = SamplingParams(temperature=0, max_tokens=question["n"], ignore_eos=True)
        (output,) = self._llm.generate(
            [{"prompt_token_ids": question["prompt"]}],
            params,
            lora_request=self._lora(question["adapter"]),
            use_tqdm=False,
        )
        return list(output.outputs[0].token_ids)

    def _use(self, args: dict[str, Any]) -> None:
        if self._llm is not None and args == self._args:
            return
        from vllm import LLM

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm, self._args = LLM(**{**DEFAULTS, **args}), args

    def _lora(self, path: str | None) -> Any:
        from vllm.lora.request import LoRARequest

        if path is None:
            return None
        number = self._ids.setdefault(path, len(self._ids) + 1)
        return LoRARequest(f"oracle-{number}", number, path)


def _serve(writer: int) -> None:
    plain = _Plain()
    with os.fdopen(writer, "w") as answers:
        for line in sys.stdin:
            answers.write(json.dumps(plain.answer(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
