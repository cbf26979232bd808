"""The commands under one name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from elora_connector import __version__
from elora_connector.cli.bound import bound
from elora_connector.cli.config import config
from elora_connector.cli.doctor import doctor
from elora_connector.cli.inspect import inspect
from elora_connector.cli.purge import purge
from elora_connector.cli.simulate import simulate
from elora_connector.cli.trace import trace
from elora_connector.cli.verify import verify

app = typer.Typer(
    name="elora",
    help=(
        "Look at, check and clean up what elora_connector keeps.\n\n"
        "Exit codes: 0 all is well, 1 a problem was found, 2 bad usage."
    ),
    no_args_is_help=True,
    add_completion=False,
    # A traceback with local variables would show passwords.
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


_COMMANDS: tuple[Any, ...] = (bound, config, doctor, inspect, purge, simulate, verify)
for _command in _COMMANDS:
    app.command()(_command)
app.add_typer(trace)
