"""Anything in any order, on the real scheduler: right bytes, no leak, no hang.

`RIG_EXAMPLES` and `RIG_STEPS` (per example) make it longer;
`RIG_SEED` starts from other examples, which are printed when one fails.
"""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.exceptions import LoRAAdapterNotFoundError

from tests.support.scheduler_rig import ADAPTERS, VARIANTS, Rig, id_of, path_of, prompt

EXAMPLES = int(os.environ.get("RIG_EXAMPLES", "15"))
STEPS = int(os.environ.get("RIG_STEPS", "40"))
SEED = int(os.environ.get("RIG_SEED", "20261"))

QUICK: dict[str, int | tuple[int, int]] = {}
SLOW: dict[str, int | tuple[int, int]] = {
    "adapter": (0, 4),
    "fetch": (0, 5),
    "load": (0, 4),
    "lookup": (0, 3),
    "ordered": (0, 2),
    "put": (0, 6),
    "store": (0, 4),
}
ZIPF = (None, *"aaaaaa", *"bbb", *"cc", "d")

adapters = st.sampled_from(ADAPTERS)


class Life(RuleBasedStateMachine):
    """One engine's life; the variant of the scheduler is set by the subclasses."""

    variant = VARIANTS[0]

    def __init__(self) -> None:
        super().__init__()
        self.rig: Any = None
        self.live: list[str] = []
        self.broken: set[str] = set()
        self.may_fail: set[str] = set()

    @initialize(
        delay=st.integers(0, 2),
        ranks=st.sampled_from((1, 2, 3)),
        number=st.integers(0, 2**16),
        slow=st.booleans(),
        blocks=st.sampled_from((20, 32, 64)),
        slots=st.sampled_from((3, 8, 32)),
        loras=st.sampled_from(((1, 1), (1, 2), (2, 2), (2, 3), (1, None), (2, None))),
        caching=st.sampled_from((True, True, True, False)),
        beside=st.booleans(),
        weights=st.sampled_from((0, 0.5, 2)),
        policy=st.sampled_from(("ELORA", "ELORA", "LRU", "MRU", "LFU", "FIFO")),
        dependent=st.sampled_from((True, True, True, False)),
    )
    def start(
        self,
        *,
        delay: int,
        ranks: int,
        number: int,
        slow: bool,
        blocks: int,
        slots: int,
        loras: tuple[int, int | None],
        caching: bool,
        beside: bool,
        weights: float,
        policy: str,
        dependent: bool,
    ) -> None:
        self.begin(
            delay,
            ranks,
            # 0: every load runs beside the forward.
            {
                "elora.sync_load_ms": 0 if beside else 1000,
                "elora.store_block_share": 0.5,
                "lmcache.cache_policy": policy,
                "elora.dependency_rule": dependent,
            },
            number=number,
            delays=SLOW if slow else QUICK,
            num_blocks=blocks,
            host_slots=slots,
            max_loras=loras[0],
            max_cpu_loras=loras[1],
            prefix_caching=caching,
            adapter_chunks=weights,
        )

    def begin(
        self, delay: int, ranks: int, config: dict[str, Any], *, number: int, **options: Any
    ) -> None:
        note(f"{self.variant.name} delay {delay} ranks {ranks} seed {number} {config} {options}")
        self.random = random.Random(number)
        self.rig = Rig(self.variant, delay, ranks, config, seed=number, **options)

    # ---- clients ---------------------------------------------------------------------

    @rule(
        adapter=st.sampled_from(ZIPF),
        length=st.integers(1, 44),
        document=st.integers(0, 2),
        answer=st.integers(1, 12),
        salt=st.sampled_from((None, None, None, "s")),
        inplace=st.sampled_from((False,) * 7 + (True,)),
        skip=st.sampled_from((False,) * 7 + (True,)),
    )
    def new(
        self,
        adapter: str | None,
        length: int,
        document: int,
        answer: int,
        salt: str | None,
        inplace: bool,
        skip: bool,
    ) -> None:
        tokens = prompt(length, document)
        self._submit(adapter, tokens, answer, salt=salt, load_inplace=inplace, skip=skip)

    @precondition(lambda self: self.rig and any(a.reason for a in self.rig.answers.values()))
    @rule(which=st.integers(0, 50), answer=st.integers(1, 8), more=st.integers(1, 9))
    def follow_up(self, which: int, answer: int, more: int) -> None:
        ended = [a for a in self.rig.answers.values() if a.reason]
        before = ended[which % len(ended)]
        tokens = [*before.prompt, *before.tokens, *prompt(more, which)][:60]
        self._submit(before.adapter, tokens, answer)

    def _submit(self, adapter: str | None, tokens: list[int], answer: int, **more: Any) -> None:
        request_id = self.rig.submit(adapter, tokens, answer, **more)
        self.live.append(request_id)
        if adapter in self.broken:
            self.may_fail.add(request_id)

    @precondition(lambda self: self._unfinished())
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        live = self._unfinished()
        self.rig.abort(live[which % len(live)])

    # ---- operators -------------------------------------------------------------------

    @precondition(lambda self: self.rig)
    @rule(adapter=adapters)
    def change(self, adapter: str) -> None:
        if adapter not in self.broken:
            self.rig.change(adapter)

    @precondition(lambda self: self.rig)
    @rule(adapter=adapters)
    def break_adapter(self, adapter: str) -> None:
        # Stock vLLM dies when the files of an adapter are gone that it took out itself.
        if id_of(adapter) not in self.rig.unguarded:
            self.rig.disk.remove(path_of(adapter))
            self.broken.add(adapter)
            self.may_fail.update(
                r for r in self._unfinished() if self.rig.answers[r].adapter == adapter
            )

    @precondition(lambda self: self.broken)
    @rule()
    def mend(self) -> None:
        for adapter in sorted(self.broken):
            self.rig.change(adapter)
        self.broken.clear()

    @precondition(lambda self: self.rig)
    @rule(adapter=adapters, inplace=st.booleans())
    def add_lora(self, adapter: str, inplace: bool) -> None:
        with contextlib.suppress(LoRAAdapterNotFoundError):
            self.rig.add_lora(adapter, load_inplace=inplace)

    @precondition(lambda self: self.rig)
    @rule(adapter=adapters)
    def remove_lora(self, adapter: str) -> None:
        if adapter not in self.broken:
            self.rig.remove_lora(adapter)

    @precondition(lambda self: self.rig)
    @rule()
    def reset_cache(self) -> None:
        assert self.rig.scheduler.reset_connector_cache()

    @precondition(lambda self: self.rig)
    @rule(running=st.booleans())
    def reset_prefix_cache(self, running: bool) -> None:
        # vLLM raises when blocks are busy that it cannot take back now.
        with contextlib.suppress(RuntimeError):
            self.rig.scheduler.reset_prefix_cache(reset_running_requests=running)

    # ---- faults ----------------------------------------------------------------------

    @precondition(lambda self: self.rig)
    @rule(down=st.booleans())
    def remote_down(self, down: bool) -> None:
        self.rig.tier.down = down

    @precondition(lambda self: self.rig)
    @rule(share=st.sampled_from((0.0, 0.3)))
    def remote_fails(self, share: float) -> None:
        fails = self.random.random
        self.rig.tier.hook = lambda operation, keys: "timeout" if fails() < share else None

    @precondition(lambda self: self.rig)
    @rule(share=st.sampled_from((0.2, 1.0)))
    def remote_evicts(self, share: float) -> None:
        for key in list(self.rig.tier._entries):
            if self.random.random() < share:
                self.rig.tier.drop(key)

    @precondition(lambda self: self.rig)
    @rule(share=st.sampled_from((0.0, 0.5)))
    def loads_fail(self, share: float) -> None:
        self.rig.fail_loads = share

    # ---- time ------------------------------------------------------------------------

    @precondition(lambda self: self.rig)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            self.rig.check()

    @invariant()
    def holds(self) -> None:
        if self.rig:
            self.rig.check()

    def teardown(self) -> None:
        if self.rig is None:
            return
        self.rig.tier.down, self.rig.tier.hook, self.rig.fail_loads = False, None, 0.0
        self.mend()
        self.rig.drain()
        for request_id in self.live:
            answer = self.rig.answers[request_id]
            served = answer.reason in ("length", "abort") or request_id in self.may_fail
            assert served, f"{request_id} of {answer.adapter}: {answer.message}"
        for adapter in (None, *ADAPTERS):
            (answer,) = self.rig.run(self.rig.submit(adapter, prompt(20)))
            assert answer.reason == "length", f"{adapter} is not served: {answer.message}"
        self.rig.drain()

    def _unfinished(self) -> list[str]:
        return [r for r in self.live if not self.rig.answers[r].reason]


def live(kind: type[Life], variant: Any, examples: int, steps: int, **more: Any) -> None:
    """Many lives of `kind` on one variant of the scheduler; `more`: class attributes."""
    kind = type(f"{kind.__name__}_{variant.name}", (kind,), {"variant": variant, **more})
    print(f"seed {SEED}, {examples} examples of {steps} steps")
    case = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # shrinking takes minutes; an example is short enough
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(seed(SEED)(kind), settings=case)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_life(variant: Any) -> None:
    live(Life, variant, EXAMPLES, STEPS)
