"""Hypothesis without deadlines (shared machines are slow at times); failures print a blob."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("core", deadline=None, print_blob=True)
settings.load_profile("core")
