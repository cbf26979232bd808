"""Base-model rows beside adapter rows on CPU: what vLLM does, and with our mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elora_connector.integration.vllm import cpu_lora_fix
from elora_connector.integration.vllm.cpu_lora_fix import MODULES, OPERATORS
from tests.support.inproc import adapter, engine, generate
from tests.support.tiny import TinyModel, make_tiny_model

pytestmark = pytest.mark.engine

SLOTS = torch.tensor([-1, 1, 0, -1, 1])
ROWS, INNER, OUTER = len(SLOTS), 3, 4


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """vLLM's own operators before a test, what was there before it afterwards."""
    before = [(m, n, getattr(m, n)) for m in MODULES for n in OPERATORS if hasattr(m, n)]
    for module, name, operator in before:
        setattr(module, name, getattr(operator, "__wrapped__", operator))
    yield
    for module, name, operator in before:
        setattr(module, name, operator)


def run(name: str, add: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of an operator, and the right answer computed row by row."""
    torch.manual_seed(7)
    inputs = torch.randn(ROWS, INNER)
    weights = torch.randn(2, 1, OUTER, INNER)
    output = torch.randn(ROWS, OUTER + 2)
    expected = output.clone()
    extra: tuple[Any, ...] = {
        "bgmv_shrink": (0.5,),
        "bgmv_expand": (add,),
        "bgmv_expand_slice": (1, OUTER, add),
    }[name]
    start = 1 if name == "bgmv_expand_slice" else 0
    for row, slot in enumerate(SLOTS.tolist()):
        part = expected[row, start : start + OUTER]
        if slot < 0:
            if name == "bgmv_shrink":
                expected[row] = 0
            continue
        product = weights[slot, 0] @ inputs[row]
        if name == "bgmv_shrink":
            part.copy_(0.5 * product)
        else:
            part.copy_(part + product if add else product)
    getattr(cpu_lora_fix.lora_ops, name)(inputs, weights, output, SLOTS, *extra)
    return output, expected


@pytest.mark.parametrize("name", OPERATORS)
def test_vllm_gives_base_rows_the_last_slot(name: str) -> None:
    output, expected = run(name)
    base = SLOTS < 0
    assert torch.allclose(output[~base], expected[~base])
    assert not torch.allclose(output[base], expected[base])
    assert not cpu_lora_fix.keeps_base_rows(name, getattr(cpu_lora_fix.lora_ops, name))


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("name", OPERATORS)
def test_masked_operators_are_right(name: str, add: bool) -> None:
    assert cpu_lora_fix.install()
    output, expected = run(name, add)
    assert torch.allclose(output, expected)
    assert cpu_lora_fix.keeps_base_rows(name, getattr(cpu_lora_fix.lora_ops, name))


def test_every_reference_is_replaced_once() -> None:
    assert cpu_lora_fix.install()
    first = [[getattr(module, name, None) for name in OPERATORS] for module in MODULES]
    assert cpu_lora_fix.install()
    again = [[getattr(module, name, None) for name in OPERATORS] for module in MODULES]
    assert first == again
    assert first[0] == first[1] == first[2]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_are_right_are_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(cpu_lora_fix.lora_ops, name)

    def right(*args: Any) -> None:
        inputs, weights, output, slots, *extra = args
        before = output.clone()
        original(inputs, weights, output, slots.clamp(min=0), *extra)
        base = slots < 0
        output[base] = 0 if name == "bgmv_shrink" else before[base]

    for module in MODULES:
        monkeypatch.setattr(module, name, right)
    cpu_lora_fix.install()
    assert getattr(cpu_lora_fix.lora_ops, name) is right


def test_other_platforms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(cpu_lora_fix.current_platform), "is_cpu", lambda _self: False)
    before = cpu_lora_fix.lora_ops.bgmv_shrink
    assert not cpu_lora_fix.install()
    assert cpu_lora_fix.lora_ops.bgmv_shrink is before


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def logprobs(llm: Any, loras: list[Any]) -> list[list[float]]:
    """Log-probability of each greedy token, for one prompt per given adapter, in one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    prompts = ["one prompt for everybody in the batch"] * len(loras)
    outputs = llm.generate(prompts, sampling, lora_request=loras, use_tqdm=False)
    return [
        [next(iter(step.values())).logprob for step in output.outputs[0].logprobs]
        for output in outputs
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_base_beside_adapters_on_a_real_engine(tiny: TinyModel, masked: bool) -> None:
    with engine(tiny.model) as llm:
        if masked:
            assert cpu_lora_fix.install()
        loras = [adapter(name, i, path) for i, (name, path) in enumerate(tiny.adapters.items(), 1)]
        alone = generate(llm, [None])[0], logprobs(llm, [None])[0]
        adapters = [generate(llm, [lora])[0] for lora in loras[:2]]
        together = generate(llm, [None, *loras[:2]])
        mixed = logprobs(llm, [None, *loras[:2]])[0]
    assert together[1:] == adapters
    same: Callable[[], bool] = lambda: mixed == pytest.approx(alone[1], abs=1e-4)  # noqa: E731
    assert (together[0] == alone[0]) is masked
    assert same() is masked
