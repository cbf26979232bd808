"""`python -m elora_connector.config` prints the table of settings in docs/configuration.md."""

from __future__ import annotations

import sys

from elora_connector.config.settings import markdown_table

sys.stdout.write(markdown_table())
