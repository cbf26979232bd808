"""The main job on real servers: many adapters, one Redis, and the right tokens everywhere.

Usage: make demo, or python -m examples.demo

The same prompts go to the base model and to three adapters, one request after the other,
on four vLLM OpenAI servers: one without a connector (its tokens are the truth), two with
EloraConnector on one Redis, and one with vLLM's own ExampleConnector, which knows tokens
but not adapters.  One table says what came back; the exit status is 1 if any row is not
as it must be.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

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
from examples.tiny_model import ADAPTERS, TinyModel, make_tiny_model

MODELS = ("base", *ADAPTERS)
TOPICS = ("moving house", "parking permits", "building a shed")
LATER_TOPICS = ("school fees", "dog licences", "a late tax return")

EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}

Truth = dict[tuple[str, str], tuple[int, ...]]
"""(model, prompt) -> tokens of the server without a connector."""


def make_prompt(topic: str) -> str:
    """About 400 tokens whose first words differ between topics: no shared prefix."""
    rule = (
        f"On {topic}: quote the by-law, name the office that decides, list the papers to bring, "
        "say what it costs and how long it takes, and be polite. "
    )
    return f"{topic.capitalize()}. " + 3 * rule + f"Question: whom do I ask about {topic}?"


@dataclass(frozen=True)
class Row:
    """What one model answered at one stage, over a few prompts."""

    stage: str
    model: str
    equal: bool
    supplied: int
    """Prompt tokens that the connector supplied, by the server's own counter."""
    answers: tuple[Answer, ...]
    expect_equal: bool
    expect_supplied: bool | None
    """Whether the connector had to supply something, None if either is fine."""

    @property
    def ok(self) -> bool:
        """The row is as it must be."""
        supplied = self.expect_supplied in (None, self.supplied > 0)
        return self.equal == self.expect_equal and supplied

    @property
    def verdict(self) -> str:
        """Whether the tokens are those of the server without a connector."""
        if self.equal:
            return "yes" if self.expect_equal else "yes (WRONG was expected)"
        return "WRONG" if self.expect_equal else "WRONG (expected)"

    @property
    def ttft_ms(self) -> float:
        """Median time to the first token."""
        return 1000 * statistics.median(answer.ttft for answer in self.answers)


@dataclass(frozen=True)
class Stage:
    """A title, the prompts to send and what must come back."""

    title: str
    topics: Sequence[str]
    expect_supplied: bool | None
    adapters_wrong: bool = False
    """Adapters are expected to answer with somebody else's KV."""

    def run(self, server: VllmServer, truth: Truth) -> Iterator[Row]:
        """Ask every model in turn, the base model first.

        What `truth` does not know yet is taken as true: the first stage fills it.
        """
        prompts = [make_prompt(topic) for topic in self.topics]
        for model in MODELS:
            before = server.external_hits()
            answers = tuple(server.complete(model, prompt) for prompt in prompts)
            equal = [
                truth.setdefault((model, prompt), answer.tokens) == answer.tokens
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            yield Row(
                self.title,
                model,
                all(equal),
                server.external_hits() - before,
                answers,
                expect_equal=model == "base" or not self.adapters_wrong,
                expect_supplied=self.expect_supplied,
            )


class Demo:
    """Servers, the rows so far, and a line of progress for each thing that happens."""

    def __init__(self, console: Console, directory: Path, stack: ExitStack) -> None:
        self.rows: list[Row] = []
        self._console = console
        self._directory = directory
        self._stack = stack
        self._began = time.monotonic()
        self._truth: Truth = {}
        self._tiny: TinyModel = make_tiny_model(directory / "tiny")
        self.say("made a tiny model with adapters " + ", ".join(self._tiny.adapters))

    def say(self, what: str) -> None:
        """Print one line of progress."""
        self._console.print(f"[dim]{time.monotonic() - self._began:4.0f} s[/dim]  {what}")

    def run(self) -> None:
        """All stages; servers start in pairs because a start keeps only one core busy."""
        redis = RedisServer(self._directory)
        self._stack.callback(redis.kill)
        redis.wait_ready()
        self.say(f"Redis listens on port {redis.port}")
        config = write_config(self._directory / "elora.yaml", redis.url)

        plain = self._server("no connector")
        first = self._server("Elora A", transfer=ELORA, config_file=config)
        self._wait(plain, first)
        self._ask(plain, Stage("no connector", (*TOPICS, *LATER_TOPICS), False))
        self._check_distinct()
        plain.stop()
        self._first_instance(first, redis)
        first.stop()

        storage = {"shared_storage_path": str(self._directory / "example-storage")}
        second = self._server("Elora B", transfer=ELORA, config_file=config)
        example = self._server(
            "ExampleConnector", transfer=EXAMPLE | {"kv_connector_extra_config": storage}
        )
        self._wait(second, example)
        self._second_instance(second, redis)
        second.stop()
        self._ask(example, Stage("ExampleConnector", TOPICS, None, adapters_wrong=True))
        example.stop()

    def _first_instance(self, server: VllmServer, redis: RedisServer) -> None:
        self._ask(server, Stage("Elora A, cold", (*TOPICS, *LATER_TOPICS), False))
        self.say(f"written to Redis: {redis.wait_quiet()} chunks")
        server.reset_prefix_cache()
        self._ask(server, Stage("Elora A, from host", TOPICS, True))

    def _second_instance(self, server: VllmServer, redis: RedisServer) -> None:
        self._ask(server, Stage("Elora B, from Redis", TOPICS, True))
        redis.kill()
        self.say("Redis was killed")
        # B has not seen these prompts, and where their KV lies is gone.
        self._ask(server, Stage("Elora B, Redis killed", LATER_TOPICS, False))

    def _check_distinct(self) -> None:
        """Without different answers per model the whole comparison would prove nothing."""
        if len(set(self._truth.values())) != len(self._truth):
            raise ServerError("two models answer the same: the tiny model is not fit for this")

    def _server(self, name: str, **settings: object) -> VllmServer:
        self.say(f"starting vLLM: {name}")
        server = VllmServer(name, self._tiny, self._directory, **settings)  # type: ignore[arg-type]
        self._stack.callback(server.process.kill)
        return server

    def _wait(self, *servers: VllmServer) -> None:
        names = " and ".join(server.name for server in servers)
        with self._console.status(f"waiting for {names} (about a minute)"):
            wait_for(servers, MODELS, lambda server: self.say(f"{server.name} is up"))
        self.say("first requests done, measuring")

    def _ask(self, server: VllmServer, stage: Stage) -> None:
        server.process.check_alive()
        with self._console.status(stage.title):
            rows = list(stage.run(server, self._truth))
        self.rows += rows
        self.say(f"{stage.title}: {sum(row.ok for row in rows)} of {len(rows)} rows as expected")


def make_table(rows: Iterable[Row]) -> Table:
    """The one table."""
    table = Table(title="Greedy tokens against a vLLM without connector")
    table.add_column("stage")
    table.add_column("model")
    table.add_column("tokens equal")
    table.add_column("from connector", justify="right")
    table.add_column("TTFT", justify="right")
    previous = ""
    for row in rows:
        if previous and row.stage != previous:
            table.add_section()
        style = "green" if row.equal and row.ok else "yellow" if row.ok else "bold red"
        prompt_tokens = sum(answer.prompt_tokens for answer in row.answers)
        table.add_row(
            row.stage if row.stage != previous else "",
            row.model,
            f"[{style}]{row.verdict}[/]",
            f"{row.supplied} of {prompt_tokens}",
            f"{row.ttft_ms:.0f} ms",
        )
        previous = row.stage
    return table


def report(console: Console, rows: Sequence[Row]) -> int:
    """Print the table and one sentence; the exit status."""
    console.print(make_table(rows))
    console.print(
        "'from connector': prompt tokens, over all prompts of the row, whose KV the connector"
        " supplied.  TTFT: median time to the first token."
    )
    bad = [row for row in rows if not row.ok]
    for row in bad:
        console.print(
            f"[bold red]not as expected:[/] {row.stage}, {row.model}: tokens equal"
            f" {row.equal} (expected {row.expect_equal}), {row.supplied} tokens supplied"
        )
    if not bad:
        console.print(
            "[green]All rows are as they must be.[/] ExampleConnector gave adapters the"
            " KV of the base model; EloraConnector never does."
        )
    return 1 if bad else 0


def main() -> int:
    """Entry point: 0 if every row is right, 1 if not, 2 if a server could not run."""
    console = Console()
    directory = Path(tempfile.mkdtemp(prefix="elora-demo-"))
    end_on_sigterm()
    try:
        with ExitStack() as stack:
            demo = Demo(console, directory, stack)
            demo.run()
        status = report(console, demo.rows)
    except ServerError as error:
        console.print(str(error), style="bold red", markup=False, highlight=False)
        status = 2
    console.print(f"Logs: {directory}")
    return status


if __name__ == "__main__":
    sys.exit(main())
