"""Many adapters on the real engine: vLLM alone, LMCache, and ours with several policies.

    python benchmarks/multi_lora.py [--cases chat-2 agents-2 ...] [--rounds 6] [--json FILE]
                                    [--png FILE] [--work DIR]

A case is a load and a number of GPU slots for adapters (`chat-2`: load chat, max_loras 2);
`--cases all` runs every one.  All systems serve the same requests, in rounds: within a
round one system after the other, in another order each time, so that noise of the machine
hits all alike.  The first round warms up and is not counted; caches are never emptied.
Every answer is compared with that of plain vLLM without any cache.

Exits with 1 if one of our systems gave a wrong answer.  In every system the engine runs
inside the process that measures (VLLM_ENABLE_V1_MULTIPROCESSING=0): one step follows the
other, so counts hardly depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.children import Child  # noqa: E402
from benchmarks.serving import report  # noqa: E402
from benchmarks.serving.load import LOADS, Load, Request, Turn, prompt_of, turns_of  # noqa: E402
from benchmarks.serving.systems import SYSTEMS, System, oracle_args  # noqa: E402
from examples.tiny_model import TinyModel, make_tiny_model  # noqa: E402

CHILD = "serving_child.py"
CASES = ("chat-1", "chat-2", "chat-4", "fits-2", "agents-2")
DEFAULT_CASES = ("chat-2", "agents-2")
SEED = 20261130


class Bench:
    """The model, its adapters and a folder for logs and right answers."""

    def __init__(self, work: Path) -> None:
        count = max(load.adapters for load in LOADS.values())
        names = {f"adapter-{n}": 500 + n for n in range(count)}
        self.work = work
        self.tiny: TinyModel = make_tiny_model(work, names)
        self.adapters = [str(path) for path in self.tiny.adapters.values()]

    @property
    def adapter_bytes(self) -> int:
        return (Path(self.adapters[0]) / "adapter_model.safetensors").stat().st_size

    # ---- right answers ------------------------------------------------------------------

    def rounds(self, load: Load, count: int) -> list[list[Request]]:
        """Requests of rounds 0 (warm-up) to `count` with their right answers."""
        turns = turns_of(load, SEED, (count + 1) * load.requests)
        answers = self._answers(load, turns)
        requests = [
            Request(
                turn.conversation,
                turn.adapter,
                tuple(prompt_of(load, turns[: at + 1], answers[:at])),
                tuple(answers[at]),
            )
            for at, turn in enumerate(turns)
        ]
        size = load.requests
        return [requests[at : at + size] for at in range(0, len(requests), size)]

    def _answers(self, load: Load, turns: Sequence[Turn]) -> list[list[int]]:
        """Of plain vLLM, one request after the other; kept in the folder."""
        key = f"{load.traffic} {SEED}"
        kept = self.work / f"answers-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
        answers: list[list[int]] = json.loads(kept.read_text()) if kept.exists() else []
        if len(answers) < len(turns):
            with self._plain(load) as plain:
                try:
                    while len(answers) < len(turns):
                        _say(f"{load.name}: right answer {len(answers) + 1} of {len(turns)}")
                        answers.append(_right(load, turns[: len(answers) + 1], answers, plain))
                finally:
                    kept.write_text(json.dumps(answers))
        return answers[: len(turns)]

    @contextlib.contextmanager
    def _plain(self, load: Load) -> Iterator[Child]:
        child = Child(CHILD, env={"VLLM_PLUGINS": "none"}, log=self.work / "oracle.log")
        try:
            child.ask(self._start(oracle_args(self.tiny.model, load)))
            yield child
        finally:
            child.close()

    # ---- measuring ----------------------------------------------------------------------

    def run(
        self, load: Load, max_loras: int, count: int, systems: Sequence[System]
    ) -> dict[str, Any]:
        """One case: every system over the same rounds."""
        rounds = self.rounds(load, count)
        with contextlib.ExitStack() as stack:
            live = [self._enter(stack, system, load, max_loras) for system in systems]
            for one in live:
                _say(f"starting {one.system.name}")
                one.child.receive()
            for number, requests in enumerate(rounds):
                shift = number % len(live)
                for one in live[shift:] + live[:shift]:
                    _say(f"{load.name}-{max_loras}: round {number} of {count}, {one.system.name}")
                    one.serve(requests, load)
        _say("")
        measured = {one.system.name: one.rounds[1:] for one in live}
        return {
            "case": f"{load.name}-{max_loras}",
            "title": load.title,
            "max_loras": max_loras,
            "rounds": count,
            "systems": report.summary(measured, self.adapter_bytes),
            "comparisons": report.comparisons(measured),
        }

    def _enter(
        self, stack: contextlib.ExitStack, system: System, load: Load, max_loras: int
    ) -> _Live:
        log = self.work / f"{system.name}.log"
        server = stack.enter_context(system.server(load, log.with_suffix(".server.log")))
        child = Child(CHILD, env=system.environment, log=log)
        stack.callback(child.close)
        args = system.engine(self.tiny.model, load, max_loras, server.connector_config)
        child.send(self._start(args, kernels_first=system.kernels_first))
        return _Live(system, child, server)

    def _start(self, args: Mapping[str, Any], *, kernels_first: bool = False) -> dict[str, Any]:
        return {"engine": args, "adapters": self.adapters, "kernels_first": kernels_first}


class _Live:
    """A running system and what it did in every round."""

    def __init__(self, system: System, child: Child, server: Any) -> None:
        self.system = system
        self.child = child
        self.rounds: list[dict[str, Any]] = []
        self._server = server
        self._stored = 0.0

    def serve(self, requests: Sequence[Request], load: Load) -> None:
        reply = self.child.ask(_round(requests, load, salted=self.system.salted))
        for told, request in zip(reply["requests"], requests, strict=True):
            told["wrong"] = tuple(told["tokens"]) != request.right
            told["prompt"] = len(request.prompt)
        stored = reply["counts"]["stored_bytes"] + self._server.stored_bytes()
        reply["counts"]["stored_bytes"] = stored - self._stored
        self._stored = stored
        self.rounds.append(reply)


def _right(
    load: Load, turns: Sequence[Turn], answers: Sequence[Sequence[int]], plain: Child
) -> list[int]:
    """Plain vLLM's answer to the last turn."""
    turn = turns[-1]
    prompt = tuple(prompt_of(load, turns, answers))
    request = Request(turn.conversation, turn.adapter, prompt, (0,) * load.answer)
    reply = plain.ask(_round([request], load, salted=False))
    tokens: list[int] = reply["requests"][0]["tokens"]
    return tokens


def _round(requests: Sequence[Request], load: Load, *, salted: bool) -> dict[str, Any]:
    return {
        "requests": [request.question() for request in requests],
        "window": load.window,
        "pause": load.pause,
        "salted": salted,
    }


def _say(what: str) -> None:
    print(f"\r{what:78}", end="" if what else "\r", file=sys.stderr, flush=True)


def _chosen(names: Sequence[str] | None) -> tuple[list[System], dict[str, str]]:
    """Systems that can run here, and why the others cannot."""
    wanted = [s for n, s in SYSTEMS.items() if not names or n in names or n == report.BASELINE]
    reasons = {system.name: system.missing() for system in wanted}
    return (
        [system for system in wanted if not reasons[system.name]],
        {name: reason for name, reason in reasons.items() if reason},
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "all"], default=DEFAULT_CASES)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--png", type=Path, help="draw the ratios there, needs matplotlib")
    parser.add_argument("--work", type=Path, help="keep model, right answers and logs there")
    return parser.parse_args()


def main() -> int:
    """Run and print; 1 if one of our systems answered wrongly."""
    options = _options()
    systems, skipped = _chosen(options.systems)
    names = CASES if "all" in options.cases else options.cases
    cases = []
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options.work or Path(directory))
        for name in names:
            load, _, slots = name.partition("-")
            case = bench.run(LOADS[load], int(slots), options.rounds, systems)
            case["skipped"] = skipped
            cases.append(case)
            print(report.text(case), flush=True)
    if options.json:
        found = {"machine": report.machine(), "seed": SEED, "cases": cases}
        options.json.write_text(json.dumps(found, indent=1))
    if options.png:
        print(report.picture(cases, options.png) or f"picture: {options.png}")
    wrong = {
        name: one["wrong"]
        for case in cases
        for name, one in case["systems"].items()
        if SYSTEMS[name].ours and one["wrong"]
    }
    if wrong:
        print(f"WRONG OUTPUTS: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
