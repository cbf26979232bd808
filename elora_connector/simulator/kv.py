"""KV of simulated requests: what they find, what they compute, what is stored.

Does for the core and the manager what the connector's scheduler side does, with fake
copies that take virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elora_connector.assembly import Scoring
from elora_connector.core.load_choice import Choice, LoadChoice
from elora_connector.core.node import Node
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Tier
from elora_connector.manager import Job, Manager
from elora_connector.simulator.gpu import GpuArea
from elora_connector.simulator.live import Live
from elora_connector.simulator.wires import Wire


@dataclass(frozen=True, slots=True)
class KvRules:
    """What of KV is kept, and what a load is worth.

    Attributes:
        chunk_tokens, block_tokens: units of storage and of GPU memory.
        history: KV of ended requests stays in the GPU until its room is needed.
        touch_at_end: a request's chunks count as used when it ends, as in vLLM's own cache.
        decode: store generated tokens too.
        min_retrieve: fewer tokens are recomputed.
        sync_load_s: a load that takes no longer is waited for within the step.
        store_bytes: GPU bytes that stores under way may keep from being reused.
    """

    chunk_tokens: int
    block_tokens: int
    history: bool
    touch_at_end: bool
    decode: bool
    min_retrieve: int
    sync_load_s: float
    store_bytes: int


class KvSide:
    """Every move of KV.

    Args:
        manager: of the host tier; None without one.
        choice: load or recompute.
        to_gpu, to_host: the links of one rank.

    Attributes:
        wake: called when a load has ended.
        stores: GPU chunks that a store under way reads, one entry a reader.
        dropped: chunks that were not stored for want of room.
        hits: tokens of admitted requests that were in a tier, by its name.
        lost: tokens whose KV was thrown away with preempted requests.
    """

    def __init__(
        self,
        rules: KvRules,
        tree: DependencyTree,
        area: GpuArea,
        manager: Manager | None,
        scoring: Scoring,
        choice: LoadChoice,
        to_gpu: Wire,
        to_host: Wire,
    ) -> None:
        self.rules = rules
        self.wake: Callable[[Live, float], None] = _nobody
        self.stores: dict[int, list[Node]] = {}
        self.dropped = 0
        self.hits = {"gpu": 0, "host": 0}
        self.lost = 0
        self.tree = tree
        self.area = area
        self.manager = manager
        self._rates = scoring.rates
        self._choice = choice
        self._to_gpu = to_gpu
        self._to_host = to_host
        self._chunk_bytes = tree.chunk_nbytes
        self._block_bytes = tree.chunk_nbytes * rules.block_tokens // rules.chunk_tokens
        self._storing = 0

    def fits(self, tokens: int) -> bool:
        """Could a request of so many tokens ever run?"""
        return self._blocks(tokens) * self._block_bytes <= self.area.capacity

    # ---- admission ---------------------------------------------------------------------

    def promise(self, live: Live, now: float) -> tuple[int, int]:
        """Tokens that are in the GPU, and tokens beyond them that are to be loaded."""
        rules = self.rules
        keys = live.keys[: live.known_tokens // rules.chunk_tokens]
        usable = (live.known_tokens - 1) // rules.block_tokens * rules.block_tokens
        if self.area.dormant is not None:
            self.area.dormant.revive(self.tree.adapter(live.identity, now), now)
        here = self.tree.match(keys, Tier.GPU) if rules.history else 0
        local = min(here * rules.chunk_tokens, usable)
        if self.manager is None:
            return local, 0
        hosted = min(self.manager.host_prefix(keys) * rules.chunk_tokens, usable)
        return local, hosted - local if self._is_worth_it(hosted - local, now) else 0

    def _is_worth_it(self, tokens: int, now: float) -> bool:
        if tokens < max(1, self.rules.min_retrieve):
            return False
        nbytes = tokens // self.rules.block_tokens * self._block_bytes
        return self._choice.from_host(tokens, nbytes, now) is not Choice.RECOMPUTE

    def admit(self, live: Live, local: int, external: int, now: float, first: int) -> bool:
        """Hold what is in the GPU, make room for the load or `first` tokens, begin the load.

        Returns:
            False if there is no room.
        """
        chunk = self.rules.chunk_tokens
        found = self.tree.nodes(live.keys[: -(-local // chunk)])
        self.area.hold(found)
        live.nodes, live.shared = found, len(found)
        live.blocks = len(found) * (chunk // self.rules.block_tokens)
        whole = self._blocks(live.known_tokens) * self._block_bytes
        rest = whole - live.shared * self._chunk_bytes
        if rest > self.area.available or not self.reserve(live, local + external + first, now):
            self.release(live)
            return False
        live.local, live.loaded = local, external
        self.hits["gpu"] += local
        self.hits["host"] += external
        live.computed = local + external
        live.load_until, live.load_in_step = now, True
        if external:
            self._load(live, now)
        return True

    def reserve(self, live: Live, tokens: int, now: float) -> bool:
        """Let the request have blocks for its first `tokens` tokens."""
        blocks = self._blocks(tokens)
        if blocks <= live.blocks:
            return True
        nbytes = (blocks - live.blocks) * self._block_bytes
        if not self.area.make_room(nbytes, now):
            return False
        self.area.private += nbytes
        live.blocks = blocks
        return True

    def _load(self, live: Live, now: float) -> None:
        assert self.manager is not None
        until = -(-live.computed // self.rules.chunk_tokens)
        first = live.local // self.rules.chunk_tokens
        job = self.manager.begin_load(live.id, live.identity, live.keys[:until], first, now)
        nbytes = live.loaded // self.rules.block_tokens * self._block_bytes
        live.load_in_step = self._rates.load_s(nbytes) <= self.rules.sync_load_s
        live.load_until = self._to_gpu.send(nbytes, partial(self._loaded, live, job))

    def _loaded(self, live: Live, job: Job, now: float, seconds: float) -> None:
        assert self.manager is not None
        nbytes = live.loaded // self.rules.block_tokens * self._block_bytes
        self._rates.host_to_gpu.add(nbytes, seconds)
        self.publish(live, now)
        self.manager.finish(job.id, 0, len(job.items))
        self.wake(live, now)

    # ---- computing ---------------------------------------------------------------------

    def publish(self, live: Live, now: float) -> None:
        """Full chunks that the request has in the GPU can be hit from now on."""
        if not self.rules.history:
            return
        tree = self.tree
        upto = min(live.computed // self.rules.chunk_tokens, len(live.keys))
        for index in range(len(live.nodes), upto):
            parent = live.nodes[-1] if live.nodes else tree.adapter(live.identity, now)
            node = tree.add(parent, live.keys[index], now)
            if not node.ready(Tier.GPU):
                tree.set_ready(node, Tier.GPU)
                self.area.private -= self._chunk_bytes
                live.shared += 1
            self.area.hold((node,))
            live.nodes.append(node)

    def plan_store(self, live: Live, scheduled: int, now: float) -> Job | None:
        """Reserve host slots for chunks that are complete after `scheduled` more tokens."""
        if self.manager is None:
            return None
        chunks = self._storable(live, scheduled)
        room = (self.rules.store_bytes - self._storing) // max(1, self._chunk_bytes)
        if chunks <= live.next_store or room < 1:
            return None
        plan = self.manager.begin_store(
            live.id, live.identity, live.keys[:chunks], now, put_from=None, limit=room
        )
        live.next_store = plan.until
        self.dropped += plan.dropped
        if plan.job is not None:
            self._storing += len(plan.job.items) * self._chunk_bytes
        return plan.job

    def _storable(self, live: Live, scheduled: int) -> int:
        done = live.computed + scheduled
        if not self.rules.decode:
            done = min(done, live.request.prompt_tokens)
        return min(done // self.rules.chunk_tokens, len(live.keys))

    def start_store(self, job: Job) -> None:
        """The forward is done: copy."""
        nodes = [item.node for item in job.items if item.node.ready(Tier.GPU)]
        self.area.hold(nodes)
        self.stores[job.id] = nodes
        self._to_host.send(
            len(job.items) * self._chunk_bytes, partial(self._stored, job), demand=False
        )

    def _stored(self, job: Job, now: float, seconds: float) -> None:
        assert self.manager is not None
        nbytes = len(job.items) * self._chunk_bytes
        self._rates.gpu_to_host.add(nbytes, seconds)
        self._storing -= nbytes
        self.area.drop(self.stores.pop(job.id))
        self.manager.finish(job.id, 0, len(job.items))

    # ---- ending ------------------------------------------------------------------------

    def release(self, live: Live) -> None:
        """The request gives back its blocks."""
        self.area.drop(live.nodes)
        self.area.private -= self.private_bytes(live)
        live.nodes, live.shared, live.blocks, live.computed = [], 0, 0, 0
        live.next_store = 0

    def preempted(self, live: Live) -> None:
        """The request loses its blocks and begins anew later."""
        self.lost += live.computed
        self.release(live)

    def ended(self, live: Live, now: float) -> None:
        """The request has its answer."""
        if self.rules.touch_at_end and self.rules.history:
            self.tree.touch([self.tree.adapter(live.identity, now), *live.nodes], now)
        if self.manager is not None:
            self.dropped += max(0, self._storable(live, 0) - live.next_store)
        self.release(live)

    def private_bytes(self, live: Live) -> int:
        """Bytes of the request's blocks that are not chunks of the tree."""
        return live.blocks * self._block_bytes - live.shared * self._chunk_bytes

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.rules.block_tokens)


def _nobody(live: Live, now: float) -> None:
    return
