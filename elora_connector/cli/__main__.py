"""`python -m elora_connector.cli` is the `elora` command."""

from __future__ import annotations

from elora_connector.cli import main

main()
