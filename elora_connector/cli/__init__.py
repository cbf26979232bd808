"""The `elora` command: look at, check and clean up a store, a configuration, a machine.

One module per command.  Results go to stdout (text, or one JSON object with `--json`);
progress, warnings and errors go to stderr.  Exit codes: 0 all is well, 1 a problem was
found, 2 bad usage.
"""

from __future__ import annotations

import sys

OK = 0
PROBLEM = 1
USAGE = 2


def main() -> None:
    """Entry point of the `elora` command."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"elora needs {error.name}: pip install 'typer>=0.12' 'rich>=13'\n")
        sys.exit(USAGE)
    from elora_connector.cli.app import app

    app()
