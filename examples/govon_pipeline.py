"""The pipeline of a civic assistant: planner, then civil adapter, then legal adapter.

Usage: python -m examples.govon_pipeline [--chunk-size 64] [--offices 5]

Every question makes three calls.  Each call begins with a fixed prompt that is the same
for all questions (350 tokens for the planner on the base model, 250 for each adapter) and
goes on with the question and what the call before said.  The table has the median time to
the first token per call: cold, warm (the fixed prompts were seen), after the server was
restarted, and on a second instance that shares only Redis.

Only whole chunks are kept, so of a fixed prompt of n tokens floor(n / chunk_size) *
chunk_size are reused: with 64 that is 320 of 350 and 192 of 250, with LMCache's default
of 256 it is 256 of 350 and nothing of 250.  A smaller chunk reuses more and costs more
keys; it has to be a multiple of vLLM's block size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from examples.servers import (
    ELORA,
    Answer,
    RedisServer,
    ServerError,
    VllmServer,
    end_on_sigterm,
    wait_for,
    write_config,
)
from examples.tiny_model import TinyModel, make_tiny_model

ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Call:
    """One call of the pipeline: who answers, and its fixed prompt."""

    name: str
    model: str
    fixed_tokens: int
    instructions: str


CALLS = (
    Call("planner", "base", 350, "Decide which tools answer the citizen, and in which order. "),
    Call("civil", "civil", 250, "Draft an answer to the complaint, kindly and in plain words. "),
    Call("legal", "legal", 250, "Add the paragraphs of law that the draft relies on. "),
)
QUESTIONS = (
    "My neighbour's hedge is too high.",
    "The street lamp at my door is broken.",
    "How do I object to a parking fine?",
    "Who removes snow from the school road?",
)


@dataclass(frozen=True)
class Stage:
    """A row of the table: per call, the answers for all offices."""

    title: str
    answers: Sequence[Sequence[Answer]]

    def ttft_ms(self, call: int) -> float:
        """Median time to the first token of one call."""
        return 1000 * statistics.median(answer.ttft for answer in self.answers[call])

    def reused(self, call: int) -> int:
        """Median of the prompt tokens that were not computed."""
        return int(statistics.median(answer.cached_tokens for answer in self.answers[call]))


class Pipeline:
    """Builds the prompts and asks a server; offices differ so that each one starts cold."""

    def __init__(self, tiny: TinyModel, offices: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tiny.model / "tokenizer.json"))
        self._offices = offices

    def fixed_prompt(self, call: Call, office: int) -> list[int]:
        """Exactly `call.fixed_tokens` token ids, different from the first one per office."""
        text = f"{office} is the office. {call.instructions}" + call.instructions * 12
        ids = self._encode(text)
        if len(ids) < call.fixed_tokens:
            raise ValueError(f"{len(ids)} tokens are too few for {call.name}")
        return ids[: call.fixed_tokens]

    def run(self, server: VllmServer, title: str, question: str) -> Stage:
        """One question to every office."""
        answers: list[list[Answer]] = [[] for _ in CALLS]
        for office in range(self._offices):
            # Questions differ from their first token, so nothing but the fixed prompt is shared.
            context = self._encode(question)
            for index, call in enumerate(CALLS):
                prompt = self.fixed_prompt(call, office) + context
                answer = server.complete(call.model, prompt, ANSWER_TOKENS)
                answers[index].append(answer)
                context = [*context, *answer.tokens]
        return Stage(title, answers)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


class Measurement:
    """Servers and stages, in the order of the table's rows."""

    def __init__(
        self, console: Console, directory: Path, stack: ExitStack, chunk_size: int, offices: int
    ) -> None:
        self._console = console
        self._directory = directory
        self._stack = stack
        self._chunk_size = chunk_size
        self._tiny = make_tiny_model(directory / "tiny")
        self._pipeline = Pipeline(self._tiny, offices)

    def run(self) -> list[Stage]:
        """Measure all stages."""
        redis = RedisServer(self._directory)
        self._stack.callback(redis.kill)
        redis.wait_ready()
        config = write_config(self._directory / "elora.yaml", redis.url, self._chunk_size)

        plain, first = self._servers(("no connector", None), ("Elora", config))
        stages = [
            self._ask(plain, "no connector, cold", 0),
            self._ask(plain, "no connector, warm", 1),
            self._ask(first, "Elora, cold", 0),
            self._ask(first, "Elora, warm", 1),
        ]
        self._console.print(f"{redis.wait_quiet()} chunks are in Redis; stopping both")
        plain.stop()
        first.stop()
        again, second = self._servers(("Elora restarted", config), ("second instance", config))
        stages += [
            self._ask(again, "Elora, after a restart", 2),
            self._ask(second, "Elora, second instance", 3),
        ]
        again.stop()
        second.stop()
        return stages

    def _servers(self, *wanted: tuple[str, Path | None]) -> list[VllmServer]:
        servers = []
        for name, config in wanted:
            self._console.print(f"starting {name}")
            transfer = ELORA if config else None
            servers.append(
                VllmServer(name, self._tiny, self._directory, transfer=transfer, config_file=config)
            )
            self._stack.callback(servers[-1].process.kill)
        wait_for(servers, [call.model for call in CALLS])
        return servers

    def _ask(self, server: VllmServer, title: str, question: int) -> Stage:
        self._console.print(f"measuring: {title}")
        return self._pipeline.run(server, title, QUESTIONS[question])


def make_table(stages: Sequence[Stage], chunk_size: int) -> Table:
    """Rows are stages, columns are calls."""
    table = Table(title="Time to the first token (prompt tokens reused), medians")
    table.add_column("stage\n(in whole chunks)", no_wrap=True)
    for call in CALLS:
        whole = call.fixed_tokens // chunk_size * chunk_size
        table.add_column(f"{call.name}\n{whole}/{call.fixed_tokens}", justify="right")
    table.add_column("pipeline", justify="right")
    calls = range(len(CALLS))
    for stage in stages:
        cells = [f"{stage.ttft_ms(call):.0f} ms ({stage.reused(call)})" for call in calls]
        table.add_row(stage.title, *cells, f"{sum(map(stage.ttft_ms, calls)):.0f} ms")
    return table


def main() -> int:
    """Entry point: 0, or 2 if a server could not run."""
    parser = argparse.ArgumentParser(description="TTFT of a multi-adapter pipeline")
    parser.add_argument("--chunk-size", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--offices", type=int, default=5, help="samples per cell (default 5)")
    arguments = parser.parse_args()
    console = Console()
    directory = Path(tempfile.mkdtemp(prefix="elora-govon-"))
    end_on_sigterm()
    try:
        with ExitStack() as stack:
            measurement = Measurement(
                console, directory, stack, arguments.chunk_size, arguments.offices
            )
            stages = measurement.run()
    except ServerError as error:
        console.print(str(error), style="bold red", markup=False, highlight=False)
        return 2
    console.print(make_table(stages, arguments.chunk_size))
    console.print(
        f"Fixed prompts are reused in whole chunks of {arguments.chunk_size} tokens:"
        " floor(n / chunk_size) * chunk_size of n.  'warm' is mostly vLLM's own prefix cache;"
        " after a restart without the connector everything is cold."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
