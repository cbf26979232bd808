"""Real engines, a real Redis, and every fault we know of: never a wrong token, never a hang.

Short form: one seed, every kind of fault at least once.  `make chaos` is the long form.
CHAOS_SEED (several, separated by commas) and CHAOS_REQUESTS (for each seed) repeat a run.
A seed fixes the prompts, the faults and their order; the moments at which threads run are
not fixed by anything.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from tests.chaos.instance import Instance, Kind, chaos_engine
from tests.chaos.load import Load
from tests.chaos.questions import Question, make_questions
from tests.chaos.run import Run, faults
from tests.chaos.world import World
from tests.support.bad_network import BadNetwork
from tests.support.oracle import Oracle
from tests.support.redis_server import RedisServer
from tests.support.tiny import ADAPTERS, TinyModel, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.redis, pytest.mark.chaos]

SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEED", "1").split(",")]
REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "0"))
LONG = REQUESTS > 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("chaos"), {**ADAPTERS, "patent": 104})


@pytest.fixture(scope="module")
def questions(tiny: TinyModel) -> Iterator[list[Question]]:
    with Oracle(tiny.model) as oracle:
        yield make_questions(oracle, tiny.adapters, 80 if LONG else 40, seed=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_every_kind_under_load(
    tiny: TinyModel, questions: list[Question], seed: int
) -> None:
    name = f"CHAOS_SEED={seed} CHAOS_REQUESTS={REQUESTS}"
    print(f"\n{name} {Kind.of(seed)}", flush=True)
    with ExitStack() as stack:
        run = _prepare(stack, tiny, questions, seed)
        try:
            run.play()
        except BaseException:
            load = run.world.load
            print(f"FAILED after {load.done} requests in {load.mood}: {name}", flush=True)
            raise
        print("\n".join(run.figures()), flush=True)
    assert run.world.load.done >= REQUESTS
    missed = set(faults(run.world.kind)) - set(run.struck)
    assert not missed, f"these faults never struck: {missed}"
    assert run.good_hits > 0
    if LONG:
        run.watch.check()


def _prepare(stack: ExitStack, tiny: TinyModel, questions: list[Question], seed: int) -> Run:
    kind, rng = Kind.of(seed), random.Random(seed)
    store = stack.enter_context(RedisServer())
    net, second_net = (stack.enter_context(BadNetwork(store.port, seed + i)) for i in range(2))
    new_second = partial(Instance, tiny.model, tiny.adapters, second_net.url, kind)
    second = stack.enter_context(new_second())  # it starts while the first one does
    live = stack.enter_context(chaos_engine(str(tiny.model), net.url, kind))
    load = Load(live, tiny.adapters, questions, rng)
    world = World(store, net, second_net, live, load, questions, rng, kind, second, new_second)
    stack.callback(world.end)
    return Run(world, REQUESTS, least=10 if LONG else 6, pairs=0.25 if LONG else 0.0)
