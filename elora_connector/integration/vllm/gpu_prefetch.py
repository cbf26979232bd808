"""Idle prefetch: the most valuable chunks of the host tier go back into free GPU blocks.

So that the next request of a resident adapter finds its prefix in vLLM's own cache.
Only blocks that are un-hashed or dormant are used, never valid KV; a job is small, and
only one is under way.  Its blocks are referenced by us and unknown to vLLM's prefix
cache until every rank has confirmed the copy; if anything that the bytes depend on
changed meanwhile, they are given back as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from elora_connector.config import EloraConfig
from elora_connector.core.node import AdapterNode, Node
from elora_connector.core.policy_scores import ScoresOfNow
from elora_connector.core.types import ChunkKey, Identity, Tier
from elora_connector.integration.vllm.geometry import Geometry
from elora_connector.integration.vllm.gpu_recipes import Recipe, RecipeBook
from elora_connector.integration.vllm.gpu_table import CACHED
from elora_connector.integration.vllm.gpu_view import GpuView
from elora_connector.integration.vllm.metadata import PrefetchOrder
from elora_connector.manager import Job
from elora_connector.transfer.base import ChunkCopy

_BUSY_SHARE: Final = 0.7
"""Above this share of referenced blocks nothing is prefetched (paper, section V)."""
_SPARE_SHARE: Final = 0.05
_JOB_CHUNKS: Final = 8
_SEARCHED: Final = 2048
_EVERY_S: Final = 1.0

MayPublish = Callable[[int | None, Identity], bool]
"""(LoRA id, identity) -> are these the weights that vLLM's prefix cache stands for now?"""


@dataclass(slots=True)
class _Task:
    """One job: `blocks` are filled, `held` ancestors must stay until they are."""

    job: Job
    recipes: list[Recipe]
    blocks: list[Any]
    held: list[Any]
    drops: int
    alive: bool = True


@dataclass(slots=True)
class _Plan:
    nodes: list[Node]
    recipes: list[Recipe]
    held: list[Any] = field(default_factory=list)


class Prefetcher:
    """One per scheduler; called by its thread.

    Args:
        share: part of the pool that prefetched KV may fill before it is used.
        job_chunks: most chunks of one job.
        may_publish: see `MayPublish`.
    """

    def __init__(
        self,
        view: GpuView,
        recipes: RecipeBook,
        may_publish: MayPublish,
        *,
        share: float,
        job_chunks: int,
    ) -> None:
        self._view = view
        self._pool, self._owners = view.pool, view.owners
        self._manager, self._recorder = view.manager, view.recorder
        self._recipes = recipes
        self._may_publish = may_publish
        self._limit = int(share * len(self._pool.blocks))
        self._job_chunks = job_chunks
        self._task: _Task | None = None
        self._wanted = False
        self._looked = -_EVERY_S
        self._refused: set[ChunkKey] = set()
        self.paused = False

    # ---- what the scheduler side asks --------------------------------------------------

    @property
    def open(self) -> bool:
        """Blocks are referenced by a job."""
        return self._task is not None

    @property
    def wants_step(self) -> bool:
        """The engine must go on stepping: a job is open, or there is something to fetch."""
        return self.open or (self._wanted and not self.paused)

    def plan(self, now: float, *, idle: bool, running: int) -> PrefetchOrder | None:
        """Start the next job, if this step leaves room for one.

        Args:
            idle: the step computes nothing.
            running: requests of this step.
        """
        if not idle:
            self._wanted, self._refused = True, set()
        if self._task is not None or self.paused or not self._wanted:
            return None
        if not idle and now - self._looked < _EVERY_S:
            return None
        self._looked = now
        plan = self._next(now, self._room(running))
        if plan is None:
            self._wanted = False
            return None
        return self._start(plan)

    def ended(self, job: Job) -> None:
        """Every rank has ended its copy of a job."""
        task = self._task
        if task is None or task.job is not job:
            return  # abandoned before
        self._task = None
        good = job.ok_items == len(job.items)
        if not good:
            self._refused.update(item.key for item in job.items)
        if good and self._current(task):
            self._publish(task)
        self._pool.free_blocks(reversed([*task.held, *task.blocks]))

    def abandon(self) -> bool:
        """Give every block back now; workers must end the copy before they go on.

        Returns:
            Whether there was a job.
        """
        task, self._task, self._wanted = self._task, None, False
        if task is None:
            return False
        self._pool.free_blocks(reversed([*task.held, *task.blocks]))
        return True

    def distrust(self) -> None:
        """Bytes in the host tier may be of other weights: publish none of those under way."""
        if self._task is not None:
            self._task.alive = False
        self._recipes.clear()

    # ---- choosing ----------------------------------------------------------------------

    def _room(self, running: int) -> int:
        """Blocks that may be used now: un-hashed or dormant, within our share."""
        table, total = self._view.table, len(self._pool.blocks)
        used = total - self._pool.get_num_free_blocks()
        if used > _BUSY_SHARE * total:
            return 0
        free = table.free_cached()
        spare = table.empty + int(self._view.order.dormant(free).sum())
        spare -= running + 1 + int(_SPARE_SHARE * total)
        unused = table.fresh & (table.state >= CACHED)
        return min(spare, self._limit - int(unused.sum()))

    def _next(self, now: float, room: int) -> _Plan | None:
        """The top of the highest score, and what of its best descendants fits in a job."""
        chunks = min(self._job_chunks, room // self._view.per_chunk)
        if chunks < 1:
            return None
        scores = ScoresOfNow(self._manager.tree, self._manager.policy, Tier.GPU, now)
        tops = self._tops()
        scores.add(tops)
        for top in sorted(tops, key=scores.of, reverse=True):
            plan = self._plan(top, chunks, scores)
            if plan is not None:
                return plan
        return None

    def _tops(self) -> list[Node]:
        """Chunks whose parent is in the GPU and that are not; a bounded search."""
        tops: list[Node] = []
        stack: list[Node] = []
        for adapter in self._manager.tree.adapters:
            stack.extend((adapter.children or {}).values())
        for _ in range(_SEARCHED):
            if not stack:
                break
            node = stack.pop()
            recipe = self._usable(node)
            if recipe is None:
                continue
            if self._recipes.cached(recipe.hashes[-1]) is None:
                tops.append(node)
            else:
                stack.extend((node.children or {}).values())
        return tops

    def _usable(self, node: Node) -> Recipe | None:
        if not node.ready(Tier.HOST) or node.key in self._refused:
            return None
        recipe = self._recipes.get(node.key)
        if recipe is None or not self._may_publish(recipe.lora_id, recipe.identity):
            return None
        return recipe

    def _plan(self, top: Node, chunks: int, scores: ScoresOfNow) -> _Plan | None:
        held = self._ancestors(top)
        recipe = self._usable(top)
        if held is None or recipe is None:
            return None
        plan = _Plan([top], [recipe], held)
        while len(plan.nodes) < chunks:
            children = [
                (child, found)
                for child in (plan.nodes[-1].children or {}).values()
                if (found := self._usable(child)) is not None
                and self._recipes.cached(found.hashes[-1]) is None
            ]
            if not children:
                break
            child, recipe = max(children, key=lambda pair: scores.of(pair[0]))
            plan.nodes.append(child)
            plan.recipes.append(recipe)
        return plan

    def _ancestors(self, top: Node) -> list[Any] | None:
        """The GPU blocks that `top` stands on, in token order; None if one is missing."""
        held: list[Any] = []
        node = top.parent
        while node is not None and not isinstance(node, AdapterNode):
            recipe = self._recipes.get(node.key)
            if recipe is None:
                return None
            for one in reversed(recipe.hashes):
                block = self._recipes.cached(one)
                if block is None:
                    return None
                held.append(block)
            node = node.parent
        return held[::-1]

    # ---- a job -------------------------------------------------------------------------

    def _start(self, plan: _Plan) -> PrefetchOrder:
        self._pool.touch(plan.held)
        per_chunk = self._view.per_chunk
        blocks = self._pool.get_new_blocks(per_chunk * len(plan.nodes))
        ids = [block.block_id for block in blocks]
        identity = plan.recipes[0].identity
        name = "" if plan.recipes[0].lora_id is None else identity.name
        self._owners.own(name, ids)
        self._view.place(plan.nodes, ids, plan.held[-1].block_id if plan.held else 0)
        job = self._manager.begin_prefetch(identity, plan.nodes)
        self._task = _Task(job, plan.recipes, blocks, plan.held, self._owners.drops(name))
        return PrefetchOrder(
            job.id,
            tuple(
                ChunkCopy(item.ref.slot, tuple(ids[n * per_chunk : (n + 1) * per_chunk]))
                for n, item in enumerate(job.items)
            ),
        )

    def _current(self, task: _Task) -> bool:
        """Nothing that the bytes depend on changed since the job began."""
        recipe = task.recipes[0]
        name = "" if recipe.lora_id is None else recipe.identity.name
        return (
            task.alive
            and self._owners.drops(name) == task.drops
            and self._may_publish(recipe.lora_id, recipe.identity)
            and all(block.block_hash is not None for block in task.held)
        )

    def _publish(self, task: _Task) -> None:
        count, per_chunk = 0, self._view.per_chunk
        for number, block in enumerate(task.blocks):
            recipe, index = task.recipes[number // per_chunk], number % per_chunk
            if self._recipes.register(recipe, index, block):
                self._view.table.fresh[block.block_id] = True
                count += 1
        self._recorder.add("prefetched_blocks", count)


def make_prefetcher(
    view: GpuView,
    may_publish: MayPublish,
    config: EloraConfig,
    geometry: Geometry,
    job_bytes: int,
) -> Prefetcher | None:
    """A prefetcher as configured; None where vLLM hashes other runs than blocks.

    Args:
        job_bytes: most bytes of one job; never less than a chunk.
    """
    if view.pool.hash_block_size != geometry.block_size:
        return None
    per_chunk, chunk_bytes = geometry.blocks_per_chunk, geometry.chunk_bytes
    limit = 2 * view.manager.slots.capacity
    view.recipes = RecipeBook(view.pool, per_chunk, geometry.block_size, limit)
    return Prefetcher(
        view,
        view.recipes,
        may_publish,
        share=config.gpu_share,
        job_chunks=max(1, min(_JOB_CHUNKS, job_bytes // chunk_bytes)),
    )
