"""Which adapter names have a GPU slot in the ledger's account, and who wants to know.

vLLM's GPU prefix cache is keyed by adapter name, so the view of its block pool has to
follow names into and out of slots: in the same action, not with a later report.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol


class SlotListener(Protocol):
    """Told at once, from inside the ledger's methods, in the scheduler's thread.

    Some of those run inside vLLM's `get_num_new_matched_tokens`, where free blocks may be
    put into another order but nothing may be un-hashed or allocated.  The ledger is not to
    be called back.
    """

    def slot_taken(self, name: str) -> None:
        """From now on the ledger counts a slot for `name`: granted, or reported there."""
        ...

    def slot_left(self, name: str) -> None:
        """No id of this name has a slot any more: displaced, evicted, withdrawn, failed."""
        ...


class SlotWatch:
    """Keeps the names and tells the listeners about each change once."""

    def __init__(self) -> None:
        self._name_of: dict[int, str] = {}
        self._ids: Counter[str] = Counter()
        self._listeners: list[SlotListener] = []

    @property
    def names(self) -> frozenset[str]:
        """Names with a slot."""
        return frozenset(self._ids)

    def add(self, listener: SlotListener) -> None:
        """Tell `listener` of every change, and now of the names that have a slot."""
        self._listeners.append(listener)
        for name in self._ids:
            listener.slot_taken(name)

    def update(self, lora_id: int, name: str | None) -> None:
        """Id `lora_id` has a slot under `name`, or none (None)."""
        before = self._name_of.get(lora_id)
        if before == name:
            return
        if before is not None:
            del self._name_of[lora_id]
            self._leave(before)
        if name is not None:
            self._name_of[lora_id] = name
            self._take(name)

    def _take(self, name: str) -> None:
        self._ids[name] += 1
        if self._ids[name] == 1:
            for listener in self._listeners:
                listener.slot_taken(name)

    def _leave(self, name: str) -> None:
        self._ids[name] -= 1
        if not self._ids[name]:
            del self._ids[name]
            for listener in self._listeners:
                listener.slot_left(name)
