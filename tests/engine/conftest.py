"""One tiny model and one oracle for all tests with a real engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# First: it sets what vLLM reads at import.
import tests.support.engine  # noqa: F401
from tests.support.oracle import Oracle
from tests.support.redis_server import RedisServer
from tests.support.tiny import ADAPTERS, TinyModel, make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The examples' model with a fourth adapter; its directories are never changed."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), {**ADAPTERS, "patent": 104})


@pytest.fixture(scope="session")
def oracle(tiny: TinyModel) -> Iterator[Oracle]:
    with Oracle(tiny.model) as made:
        yield made


@pytest.fixture
def store() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="class")
def class_store() -> Iterator[RedisServer]:
    """One server for the tests of a class that share an engine."""
    with RedisServer() as server:
        yield server
