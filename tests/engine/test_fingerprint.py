"""What a store shows of an engine: the namespace that was foretold, and no secret."""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from elora_connector.config import load_config
from elora_connector.core.keys import RemoteKeys
from elora_connector.errors import ConfigError, UnsupportedError
from elora_connector.integration.vllm.fingerprint import fingerprint
from tests.support.engine import SETTINGS, Engine, engine, lora, prompt
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = [pytest.mark.engine, pytest.mark.redis]

KEY = "0123456789abcdef"


ARGUMENTS = ["--dtype", "float32", "--block-size", "32", "--max-model-len", "1024"]


class TestWhatTheStoreSees:
    """One engine whose store is looked at from outside."""

    @pytest.fixture(scope="class")
    def settings(self, class_store: RedisServer) -> Iterator[dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MAC_KEY_OF_TESTS", KEY)
            yield {
                "elora.remote.mac_key_env": "MAC_KEY_OF_TESTS",
                "lmcache.remote_url": class_store.url,
            }

    @pytest.fixture(scope="class")
    def live(self, tiny: TinyModel, settings: dict[str, Any]) -> Iterator[Engine]:
        with engine(tiny.model, settings) as made:
            yield made

    def test_the_namespace_is_as_foretold(
        self, tiny: TinyModel, live: Engine, settings: dict[str, Any], class_store: RedisServer
    ) -> None:
        config = load_config({"MAC_KEY_OF_TESTS": KEY}, {**SETTINGS, **settings})
        told = fingerprint(config, ["--model", str(tiny.model), *ARGUMENTS])
        live.ask(prompt(1, 200), lora("civil", 1, tiny.adapters["civil"]))
        live.settle()
        with class_store.client() as admin:
            parts = [RemoteKeys.parse(key.decode()) for key in admin.scan_iter()]
        assert len(parts) == 3
        assert {part.namespace_hex for part in parts if part is not None} == {told.namespace}
        assert (told.ranks, told.block_size, told.chunk_size) == (1, 32, 64)

    def test_neither_salt_nor_tokens_nor_mac_key_are_in_it(
        self, tiny: TinyModel, live: Engine, class_store: RedisServer
    ) -> None:
        """Every key and every value, searched for every form that the secrets may have."""
        salt, text = "salt-of-tenant-17", prompt(2, 200)
        with class_store.client() as admin:
            admin.flushall()
            live.ask(text, lora("civil", 1, tiny.adapters["civil"]), cache_salt=salt)
            live.settle()
            stored = {key: admin.get(key) for key in admin.scan_iter()}
        assert len(stored) == 3
        # The search below finds what is there: the adapter's name is in all of them.
        assert all(b"civil" in key and b"civil" in value for key, value in stored.items())
        secrets = [salt.encode(), KEY.encode()]
        forms = [form for secret in secrets for form in _forms(secret)]
        forms += [array("i", text[:16]).tobytes(), array("q", text[:16]).tobytes()]
        assert [
            (key, form)
            for key, value in stored.items()
            for form in forms
            if form in key or form in value
        ] == []

    def test_a_salt_is_part_of_every_key(
        self, tiny: TinyModel, live: Engine, class_store: RedisServer
    ) -> None:
        """The same prompt under another salt, or none, finds nothing of the first."""
        text, adapter = prompt(3, 200), lora("civil", 1, tiny.adapters["civil"])
        assert live.ask(text, adapter, cache_salt="a").cached == 0
        live.settle()
        live.forget_host()
        for salt in ("b", "A", "a ", None):
            more = {} if salt is None else {"cache_salt": salt}
            assert live.ask(text, adapter, **more).cached == 0
            live.settle()
            live.forget_host()
        assert live.ask(text, adapter, cache_salt="a").cached == 192


def _forms(secret: bytes) -> list[bytes]:
    """The secret itself, and what somebody might have made of it to hide it badly."""
    digests = [hashlib.new(name, secret) for name in ("md5", "sha1", "sha256", "blake2b")]
    found = [secret, secret[:12], secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")]
    found += [digest.digest() for digest in digests]
    return found + [digest.hexdigest()[:16].encode() for digest in digests]


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
