"""The namespace that `elora doctor` tells beforehand is the one that an engine uses."""

from __future__ import annotations

import pytest

from elora_connector.config import load_config
from elora_connector.core.keys import RemoteKeys
from elora_connector.errors import ConfigError, UnsupportedError
from elora_connector.integration.vllm.fingerprint import fingerprint
from tests.support.engine import SETTINGS, engine, lora, prompt
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = [pytest.mark.engine, pytest.mark.redis]

KEY = "0123456789abcdef"


def test_as_the_engine_has_it(
    tiny: TinyModel, store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAC_KEY_OF_TESTS", KEY)
    settings = {"elora.remote.mac_key_env": "MAC_KEY_OF_TESTS", "lmcache.remote_url": store.url}
    config = load_config({"MAC_KEY_OF_TESTS": KEY}, {**SETTINGS, **settings})
    arguments = ["--model", str(tiny.model), "--dtype", "float32", "--block-size", "32"]
    arguments += ["--max-model-len", "1024", "--enforce-eager"]
    told = fingerprint(config, arguments)
    with engine(tiny.model, settings) as live:
        live.ask(prompt(1, 200), lora("civil", 1, tiny.adapters["civil"]))
        live.settle()
    with store.client() as admin:
        parts = [RemoteKeys.parse(key.decode()) for key in admin.scan_iter()]
    assert len(parts) == 3
    assert {part.namespace_hex for part in parts if part is not None} == {told.namespace}
    assert (told.ranks, told.block_size, told.chunk_size) == (1, 32, 64)


def test_other_settings_are_other_namespaces(tiny: TinyModel) -> None:
    def told(*more: str, **settings: object) -> str:
        named = {key.replace("__", "."): value for key, value in settings.items()}
        config = load_config({}, {**SETTINGS, "elora.model_id": "m", **named})
        arguments = ["--model", str(tiny.model), "--dtype", "float32", "--block-size", "32"]
        return fingerprint(config, [*arguments, *more]).namespace

    plain = told()
    assert told() == plain
    assert told("--dtype", "bfloat16") != plain
    assert told("--block-size", "64") != plain
    assert told(lmcache__chunk_size=128) != plain
    assert told(elora__model_id="other") != plain


def test_what_cannot_be_told(tiny: TinyModel) -> None:
    config = load_config({}, SETTINGS)
    arguments = ["--model", str(tiny.model), "--dtype", "float32"]
    with pytest.raises(UnsupportedError, match="KV cache type of its own"):
        fingerprint(config, [*arguments, "--kv-cache-dtype", "fp8"])
    with pytest.raises(UnsupportedError, match="does not accept"):
        fingerprint(config, [*arguments, "--no-such-argument"])
    with pytest.raises(UnsupportedError, match="vLLM refuses this model"):
        fingerprint(config, ["--model", "/nowhere"])
    with pytest.raises(ConfigError, match="multiple of vLLM's block size"):
        fingerprint(config, [*arguments, "--block-size", "96"])
