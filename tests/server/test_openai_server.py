"""The connector behind vLLM's OpenAI server: metrics, messages, reloads over HTTP.

One server for all tests of the file (half a minute to start).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.servers import ELORA, VllmServer, engine_environment, wait_for
from tests.support.adapter_dir import AdapterDir
from tests.support.engine import prompt
from tests.support.oracle import Oracle
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.redis]

LENGTH = 200
HIT = 192


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def oracle(tiny: TinyModel) -> Iterator[Oracle]:
    with Oracle(tiny.model) as made:
        yield made


@pytest.fixture(scope="module")
def server(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """vLLM's prefix cache off: every cached token is ours; two adapters in host memory."""
    directory = tmp_path_factory.mktemp("server")
    with RedisServer() as store:
        config = directory / "elora.yaml"
        config.write_text(
            "chunk_size: 64\nmax_local_cpu_size: 0.1\n"
            f"remote_url: {store.url}\nextra_config: {{elora: {{check_invariants: true}}}}\n"
        )
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        made = VllmServer(
            "elora",
            tiny,
            directory,
            transfer=ELORA,
            config_file=config,
            options=["--no-enable-prefix-caching", "--max-cpu-loras", "2"],
        )
        try:
            wait_for([made], ["base", *tiny.adapters])
            yield made
        finally:
            made.stop()


def metrics(server: VllmServer) -> dict[str, float]:
    """Sums of our metrics by name and the value of their distinguishing labels."""
    text = server._http.get("/metrics").raise_for_status().text
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:elora_"):
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            kept = [p for p in labels.split(",") if not p.startswith(("engine=", "model_name="))]
            key = ",".join([name, *kept])
            found[key] = found.get(key, 0.0) + float(value)
    return found


def post(server: VllmServer, path: str, **body: Any) -> httpx.Response:
    return server._http.post(path, json=body)


def test_answers_hits_and_metrics(server: VllmServer, tiny: TinyModel, oracle: Oracle) -> None:
    before = metrics(server)
    text = prompt(1, LENGTH)
    for name, path in (("base", None), *tiny.adapters.items()):
        first = server.complete(name, text, 8)
        again = server.complete(name, text, 8)
        assert first.tokens == again.tokens == oracle(text, path, 8)
        assert (first.cached_tokens, again.cached_tokens) == (0, HIT)
    after = metrics(server)
    hits = 'vllm:elora_hit_tokens_total,adapter="civil",tier="host"'
    assert after[hits] - before.get(hits, 0.0) == HIT
    misses = 'vllm:elora_miss_tokens_total,adapter="civil"'
    assert after[misses] - before.get(misses, 0.0) == 2 * LENGTH - HIT
    assert after['vllm:elora_bytes_total,direction="gpu_to_host"'] > 0
    assert after['vllm:elora_bytes_total,direction="host_to_gpu"'] > 0
    assert after['vllm:elora_seconds_total,direction="host_to_gpu"'] > 0
    assert after['vllm:elora_resident_adapters,tier="gpu"'] == 2
    assert after["vllm:elora_remote_degraded"] == 0
    assert after["vllm:elora_host_chunks"] >= 12


def test_a_reload_over_http_serves_no_old_kv(
    server: VllmServer, tiny: TinyModel, oracle: Oracle, tmp_path: Path
) -> None:
    """The load call runs between steps; vLLM repeats the flag with every later request."""
    text = prompt(2, LENGTH)
    content = AdapterDir(tmp_path / "moving", tiny.adapters["civil"])
    load = {"lora_name": "moving", "lora_path": str(content.path)}
    assert post(server, "/v1/load_lora_adapter", **load).is_success
    old = server.complete("moving", text, 8)
    assert old.tokens == oracle(text, tiny.adapters["civil"], 8)
    content.put_unseen(tiny.adapters["tax"])
    assert post(server, "/v1/load_lora_adapter", load_inplace=True, **load).is_success
    new = [server.complete("moving", text, 8) for _ in range(3)]
    assert {answer.tokens for answer in new} == {oracle(text, tiny.adapters["tax"], 8)}
    assert [answer.cached_tokens for answer in new] == [0, HIT, HIT]
    content.put_unseen(tiny.adapters["civil"])
    assert post(server, "/v1/load_lora_adapter", load_inplace=True, **load).is_success
    back = server.complete("moving", text, 8)
    assert (back.tokens, back.cached_tokens) == (old.tokens, HIT)


def test_an_adapter_that_vanished_fails_with_a_message(
    server: VllmServer, tiny: TinyModel, oracle: Oracle, tmp_path: Path
) -> None:
    text = prompt(3, LENGTH)
    content = AdapterDir(tmp_path / "gone", tiny.adapters["legal"])
    load = {"lora_name": "gone", "lora_path": str(content.path)}
    assert post(server, "/v1/load_lora_adapter", **load).is_success
    for name in ("civil", "tax", "legal"):
        server.complete(name, text, 4)  # takes its place
    content.remove()
    reply = post(server, "/v1/completions", model="gone", prompt=text, max_tokens=4)
    assert reply.status_code == httpx.codes.BAD_REQUEST, reply.text
    assert "adapter 'gone'" in reply.text
    assert server.complete("base", text, 8).tokens == oracle(text, None, 8)
    assert server.complete("civil", text, 8).tokens == oracle(text, tiny.adapters["civil"], 8)


def start_without_plugin(tiny: TinyModel, plugins: str) -> str:
    """Output of an engine whose plugin list leaves us out."""
    code = (
        "from vllm import LLM\n"
        f"LLM({str(tiny.model)!r}, enforce_eager=True, max_model_len=256, "
        "kv_cache_memory_bytes=16 << 20, block_size=32, kv_transfer_config=dict("
        "kv_connector='EloraConnector', kv_connector_module_path='elora_connector', "
        "kv_role='kv_both'))\n"
    )
    env = engine_environment() | {
        "VLLM_PLUGINS": plugins,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_without_the_plugin_the_connector_names_the_line_to_add(tiny: TinyModel) -> None:
    assert "VLLM_PLUGINS" in start_without_plugin(tiny, "none")
