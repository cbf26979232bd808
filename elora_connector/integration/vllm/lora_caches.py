"""vLLM's two adapter caches of one worker, seen from the outside.

The only place that touches the insides of vLLM's adapter manager: `_registered_adapters`
(host cache, `max_cpu_loras`) and `_active_adapters` (GPU slots, `max_loras`).  Both are
LRU caches; looking here never touches their order.  Main thread only.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from elora_connector.integration.vllm.adapter_messages import AdapterOrder


class NoRoomError(RuntimeError):
    """Every place of a cache is taken by an adapter that may not leave."""


@dataclass(frozen=True, slots=True)
class Room:
    """Who must leave the host cache, and who only its GPU slot, so that one adapter fits."""

    evict: tuple[int, ...]
    displace: tuple[int, ...]


class LoraCaches:
    """Wraps a live `LRUCacheLoRAModelManager`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    @property
    def capacity(self) -> int:
        """Adapters the host cache can hold."""
        return int(self._manager.capacity)

    def resize(self) -> None:
        """Let vLLM's host cache hold `capacity` adapters, the least recent ones leaving."""
        hosted = self._manager._registered_adapters
        hosted._Cache__maxsize = self.capacity
        while len(hosted) > self.capacity:
            hosted.remove_oldest()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one GPU slot on this rank: of an adapter of the highest rank allowed."""
        stacked = [
            tensor
            for module in self._manager.modules.values()
            for name, value in vars(module).items()
            if name.endswith("_stacked")
            for tensor in (value if isinstance(value, tuple | list) else (value,))
        ]
        return sum(int(tensor.nbytes) for tensor in stacked) // self.slots

    @property
    def slots(self) -> int:
        """Adapters the GPU can hold."""
        return int(self._manager.lora_slots)

    def registered(self) -> list[int]:
        """Ids in the host cache, least recently used first."""
        return list(self._manager._registered_adapters.order)

    def active(self) -> list[int]:
        """Ids in GPU slots, least recently used first."""
        return list(self._manager._active_adapters.order)

    def pinned(self) -> frozenset[int]:
        """Ids pinned by the user in either cache."""
        manager = self._manager
        return frozenset(
            manager._registered_adapters.pinned_items | manager._active_adapters.pinned_items
        )

    def models(self) -> dict[int, Any]:
        """All models of the host cache by id."""
        return dict(self._manager.list_adapters())

    def peek(self, lora_id: int) -> Any | None:
        """One model of the host cache."""
        if lora_id not in self._manager._registered_adapters:
            return None
        return self._manager._registered_adapters.cache[lora_id]

    def is_active(self, lora_id: int) -> bool:
        """Is it in a GPU slot?"""
        return lora_id in self._manager._active_adapters

    def room_for(
        self, order: AdapterOrder, batch: frozenset[int], kept: frozenset[int]
    ) -> Room | None:
        """Who goes for an order: the adapters it names, then unkept ones, LRU first.

        Changes nothing.

        Args:
            batch: ids that must stay even if the order names them.
            kept: ids that only the order may name; `pinned` ones are never taken.

        Returns:
            None if there is no room, or only at the price of the batch.
        """
        never = self.pinned() | {order.lora_id}
        named = [i for i in self.registered() if i in order.evict and i not in never]
        hosted = [i for i in self.registered() if i not in named]
        fits = order.lora_id in hosted or len(hosted) < self.capacity
        evict = _with_spare(named, hosted, kept | never, fits)
        if evict is None:
            return None
        active = [i for i in self.active() if i not in evict]
        named = [i for i in active if order.activate and i in order.displace and i not in never]
        active = [i for i in active if i not in named]
        fits = not order.activate or order.lora_id in active or len(active) < self.slots
        displace = _with_spare(named, active, kept | never, fits)
        if displace is None or not batch.isdisjoint((*evict, *displace)):
            return None
        return Room(tuple(evict), tuple(displace))

    def remove(self, lora_id: int) -> None:
        """Take it out of both caches."""
        self._manager.remove_adapter(lora_id)

    def deactivate(self, lora_id: int) -> None:
        """Take it out of its GPU slot."""
        self._manager.deactivate_adapter(lora_id)

    def unpin(self, lora_id: int) -> None:
        """Undo a pin in both caches."""
        self._manager._registered_adapters.pinned_items.discard(lora_id)
        self._manager._active_adapters.pinned_items.discard(lora_id)

    def use(self, lora_id: int, *, activate: bool) -> None:
        """Mark a registered adapter as recently used and, if asked, put it into a slot.

        Raises:
            Exception: its weights do not fit the model; it is taken out then, because
                vLLM would otherwise count the half-written slot as good.
        """
        self._manager.get_adapter(lora_id)
        if not activate:
            return
        try:
            self._manager.activate_adapter(lora_id)
        except Exception:
            self.remove(lora_id)
            raise

    def install(self, model: Any, *, activate: bool) -> None:
        """Register a model, in place of one with the same id; room must have been made.

        A model that replaces an active or pinned one is active or pinned as well.

        Raises:
            Exception: vLLM refused it; what was there before is back.
        """
        lora_id = model.id
        old = self.peek(lora_id)
        activate = activate or self.is_active(lora_id)
        was_active = self.is_active(lora_id)
        pins = self._pins(lora_id)
        try:
            self.remove(lora_id)
            self._manager.add_adapter(model)
            if activate:
                self._manager.activate_adapter(lora_id)
        except Exception:
            self.remove(lora_id)
            self._put_back(lora_id, old, was_active, pins)
            raise
        self._pin(lora_id, pins)

    def _put_back(self, lora_id: int, old: Any | None, active: bool, pins: list[Any]) -> None:
        if old is None:
            return
        # Not add_adapter: it merges the weights of packed modules, which was done before.
        self._manager._registered_adapters[lora_id] = old
        if active:
            self._manager.activate_adapter(lora_id)
        self._pin(lora_id, pins)

    def _pins(self, lora_id: int) -> list[Any]:
        caches = (self._manager._registered_adapters, self._manager._active_adapters)
        return [cache for cache in caches if lora_id in cache.pinned_items]

    @staticmethod
    def _pin(lora_id: int, caches: list[Any]) -> None:
        for cache in caches:
            cache.pin(lora_id)


def _with_spare(
    named: list[int], candidates: Iterable[int], kept: Container[int], fits: bool
) -> list[int] | None:
    """`named`, and if that is not enough the first candidate that is not kept."""
    if fits:
        return named
    spare = next((i for i in candidates if i not in kept), None)
    return None if spare is None else [*named, spare]
