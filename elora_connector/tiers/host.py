"""Book-keeping of the host tier's fixed slots; the bytes live in the workers.

A slot holds one chunk of one rank.  Every rank has the same number of slots and
uses the same slot for the same chunk, so one number describes all of them.  Each
hand-out raises the slot's generation: a late report about an earlier use is
recognised and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from elora_connector.errors import InvariantError


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One use of one slot."""

    slot: int
    generation: int


class SlotPool:
    """Free list with generations.  Changes state; called by the scheduler thread only."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvariantError(f"the host tier needs at least one slot, got {capacity}")
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._generation = [0] * capacity
        self._used = bytearray(capacity)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def take(self) -> SlotRef:
        """Hand out a free slot; the caller has made room before."""
        if not self._free:
            raise InvariantError("no free host slot")
        slot = self._free.pop()
        self._used[slot] = 1
        self._generation[slot] += 1
        return SlotRef(slot, self._generation[slot])

    def current(self, ref: SlotRef) -> bool:
        """Does this reference still describe the slot's present use?"""
        return bool(self._used[ref.slot]) and self._generation[ref.slot] == ref.generation

    def give_back(self, ref: SlotRef) -> None:
        """The use ended and nothing in any worker touches the slot any more."""
        if not self.current(ref):
            raise InvariantError(f"host slot {ref.slot} generation {ref.generation} is not in use")
        self._used[ref.slot] = 0
        self._free.append(ref.slot)
