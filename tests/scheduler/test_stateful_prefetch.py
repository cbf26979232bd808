"""Anything in any order around idle prefetch: it begins, ends, fails and is cut off, often.

The same life as in `test_stateful`, on an engine that has reasons to prefetch.  What was
met is counted over a run and has to suffice, so that the test cannot quietly stop testing it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from vllm.v1.core.sched.interface import PauseState

from tests.scheduler.test_stateful import EXAMPLES, SLOW, STEPS, ZIPF, Life, live
from tests.support.scheduler_rig import ADAPTERS, VARIANTS, Rig, prompt

LEAST = {
    "begun": 10,
    "published": 5,
    "copy failed": 1,
    "cut off by a reset": 1,
    "a pause while under way": 1,
    "bytes no longer trusted": 1,
    "blocks allocated beside it": 5,
}

AMID = ("wait", "fail", "reset", "forget", "pause", "change", "call", "ask", "crowd")


class PrefetchLife(Life):
    met: Counter[str]

    @initialize(
        delay=st.integers(0, 2),
        ranks=st.sampled_from((1, 2)),
        number=st.integers(0, 2**16),
        blocks=st.sampled_from((32, 64)),
        loras=st.sampled_from(((1, 2), (2, 3), (2, None))),
        policy=st.sampled_from(("ELORA", "LRU")),
        share=st.sampled_from((0.3, 1.0)),
    )
    def start(  # type: ignore[override]
        self,
        *,
        delay: int,
        ranks: int,
        number: int,
        blocks: int,
        loras: tuple[int, int | None],
        policy: str,
        share: float,
    ) -> None:
        self.begin(
            delay,
            ranks,
            {
                "elora.sync_load_ms": 0,
                "elora.gpu_share": share,
                "lmcache.cache_policy": policy,
            },
            number=number,
            delays=SLOW | {"load": (1, 5)},
            num_blocks=blocks,
            host_slots=32,
            max_loras=loras[0],
            max_cpu_loras=loras[1],
        )
        watch(self.rig, self.met)

    @precondition(lambda self: self.rig)
    @rule(adapter=st.sampled_from(ZIPF), document=st.integers(0, 2), what=st.sampled_from(AMID))
    def idle(self, adapter: str | None, document: int, what: str) -> None:
        """Requests end, the GPU loses their KV, and amid the prefetch something happens."""
        if adapter in self.broken:
            return
        self._submit(adapter, prompt(33, document), 1)
        self._finish()
        if self._unfinished():
            return
        self.rig.settle()
        pool = self.rig.scheduler.kv_cache_manager.block_pool
        # Of a pool at rest: what is registered meanwhile would stand on a missing block.
        pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})
        self.rig.fail_loads = float(what == "fail")
        self._submit(adapter, prompt(2, 9), 1)
        if self._under_way():
            getattr(self, f"_{what}")(adapter, document)
        self.rig.fail_loads = 0.0

    def teardown(self) -> None:
        """Whatever state this life is in: each of the cases once more."""
        if self.rig is not None:
            self.rig.tier.down, self.rig.tier.hook, self.rig.fail_loads = False, None, 0.0
            self.mend()
            for what in self.random.sample(AMID, len(AMID)):
                self.idle("a", self.random.randrange(3), what)
        super().teardown()

    def _finish(self) -> None:
        for _ in range(150):
            if not self._unfinished():
                return
            self.rig.step()
            self.rig.check()

    def _under_way(self) -> bool:
        for _ in range(30):
            self.rig.step()
            self.rig.check()
            if self.rig.side.prefetch.open:
                return True
        return False

    # What may happen amid a prefetch

    def _wait(self, adapter: str | None, document: int) -> None:
        self.rig.step(12)

    def _fail(self, adapter: str | None, document: int) -> None:
        self.rig.step(12)

    def _reset(self, adapter: str | None, document: int) -> None:
        self.rig.scheduler.reset_prefix_cache()

    def _forget(self, adapter: str | None, document: int) -> None:
        self.reset_cache()

    def _pause(self, adapter: str | None, document: int) -> None:
        self.met["a pause while under way"] += 1
        state = self.random.choice((PauseState.PAUSED_ALL, PauseState.PAUSED_NEW))
        self.rig.scheduler.set_pause_state(state)
        self.rig.step(8)
        self.rig.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _change(self, adapter: str | None, document: int) -> None:
        if adapter is not None:
            self.rig.change(adapter)
            self._submit(adapter, prompt(33, document), 1, load_inplace=True)

    def _call(self, adapter: str | None, document: int) -> None:
        if adapter is not None:
            self.rig.change(adapter)
            self.rig.add_lora(adapter, load_inplace=True)

    def _ask(self, adapter: str | None, document: int) -> None:
        self._submit(adapter, prompt(44, document), 8)

    def _crowd(self, adapter: str | None, document: int) -> None:
        for other in (None, *ADAPTERS):
            if other not in self.broken:
                self._submit(other, prompt(30, document + 3), 8)


def watch(rig: Rig, met: Counter[str]) -> None:
    """Count what the prefetcher does."""
    prefetch, scheduler = rig.side.prefetch, rig.scheduler
    start, ended, abandon = prefetch._start, prefetch.ended, prefetch.abandon
    schedule = scheduler.schedule

    def started(plan: Any) -> Any:
        met["begun"] += 1
        return start(plan)

    def over(job: Any) -> None:
        mine = prefetch._task is not None and prefetch._task.job is job
        before = rig.total("prefetched_blocks")
        trusted = mine and prefetch._current(prefetch._task)
        ended(job)
        if not mine:
            met["ended after it was cut off"] += 1
        elif job.ok_items < len(job.items):
            met["copy failed"] += 1
        elif not trusted:
            met["bytes no longer trusted"] += 1
        elif rig.total("prefetched_blocks") > before:
            met["published"] += 1

    def cut() -> bool:
        found = bool(abandon())
        met["cut off by a reset"] += found
        return found

    def beside(*args: Any, **more: Any) -> Any:
        was_open = prefetch.open
        output = schedule(*args, **more)
        if was_open and output.scheduled_new_reqs:
            met["blocks allocated beside it"] += 1
        return output

    prefetch._start, prefetch.ended, prefetch.abandon = started, over, cut
    scheduler.schedule = beside


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_prefetch_in_any_life(variant: Any) -> None:
    met: Counter[str] = Counter()
    live(PrefetchLife, variant, max(3, EXAMPLES // 5), STEPS // 4, met=met)
    print(dict(met))
    short = {what: met[what] for what, least in LEAST.items() if met[what] < least}
    assert not short, f"hardly met: {short} of {dict(met)}"
