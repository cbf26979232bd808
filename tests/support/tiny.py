"""The tiny model of the examples, for tests."""

from __future__ import annotations

from examples.tiny_model import (
    ADAPTERS,
    Shape,
    TinyModel,
    make_adapter,
    make_model,
    make_tiny_model,
)

__all__ = ["ADAPTERS", "Shape", "TinyModel", "make_adapter", "make_model", "make_tiny_model"]
