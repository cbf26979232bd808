"""Per-request switches as clients really send them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elora_connector.integration.vllm.requests import switch


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, None),
        ({}, None),
        ({"elora.store": True}, True),
        ({"elora.store": False}, False),
        ({"elora.store": "false"}, False),
        ({"elora.store": " No "}, False),
        ({"elora.store": 0}, False),
        ({"elora.store": "true"}, True),
        ({"elora.store": [1]}, None),
        ({"elora.store": "maybe"}, None),
        (["elora.store"], None),
    ],
)
def test_switch(params: Any, expected: bool | None) -> None:
    assert switch(SimpleNamespace(kv_transfer_params=params), "elora.store") is expected
