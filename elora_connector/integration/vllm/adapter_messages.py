"""What scheduler and worker tell each other about adapters; picklable, no torch, no vLLM.

The scheduler side sends `AdapterOrder`s in a step's metadata, every rank answers with
one `AdapterReport` per step.  Ranks never choose an adapter on their own, so equal
orders lead to equal residency on all of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elora_connector.core.adapter_orders import Grant, Placing

__all__ = [
    "AdapterOrder",
    "AdapterReport",
    "AdapterState",
    "Grant",
    "OrderResult",
    "Placing",
    "Verify",
]


class Verify(enum.Enum):
    """How far to distrust weights that are already loaded."""

    NO = "no"
    IF_CHANGED = "if_changed"
    """Look at the files' metadata; read them only if that differs."""
    ALWAYS = "always"
    """Hash the files; reload them only if their content differs."""


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Make one adapter resident, at the price of others; without `request`: only evict.

    Args:
        seq: order number, rising; the same number twice is one order.
        name: adapter name, for messages.
        lora_id: vLLM's integer id, the key of its caches.
        request: the `LoRARequest` to load from, or None.
        evict: ids to take out of vLLM's host cache (and so out of their GPU slot).
        displace: ids to take out of their GPU slot; only with `activate`.
        activate: put it into a GPU slot too.
        verify: what to do if it is already loaded.
        placing: when the weights enter vLLM's caches; a `Grant` turns ON_GRANT into NOW.
    """

    seq: int
    name: str
    lora_id: int
    request: object
    evict: tuple[int, ...] = ()
    displace: tuple[int, ...] = ()
    activate: bool = True
    verify: Verify = Verify.NO
    placing: Placing = Placing.NOW


@dataclass(frozen=True, slots=True)
class AdapterState:
    """One adapter in vLLM's host cache of this rank.

    Args:
        digest: 32 bytes of SHA-256 over the content that was loaded.
        load_seq: number of the load these weights come from, rising per rank.
        in_slot: it also is in a GPU slot.
        nbytes: size of its weights in host memory.
        pinned: the operator pinned it; only an unload takes it out.
    """

    lora_id: int
    name: str
    digest: bytes
    load_seq: int
    in_slot: bool
    nbytes: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class OrderResult:
    """End of one order.

    `error` is empty or one sentence for the user.  `seconds` is the time spent reading,
    hashing and installing, without waiting: 0.0 when the adapter was right already.
    `read`: its weights were read from the files.  `activation_s`: the part of `seconds`
    that went into placing weights, with a GPU slot.
    """

    seq: int
    lora_id: int
    ok: bool
    error: str = ""
    seconds: float = 0.0
    read: bool = False
    activation_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What one rank's adapters look like after a step.

    Args:
        last_seq: every order up to this number has arrived.
        rpc_seq: add, remove and pin calls executed so far outside a step.
        states: all adapters in vLLM's host cache, by id.
        results: orders finished since the last report.
        changed: something differs from the last report.
        open: numbers of orders that have not ended, well or badly.
        read: those of them whose weights are in hand, waiting for a grant.
    """

    last_seq: int
    rpc_seq: int
    states: tuple[AdapterState, ...]
    results: tuple[OrderResult, ...]
    changed: bool
    open: tuple[int, ...] = ()
    read: tuple[int, ...] = ()

    @property
    def acked_seq(self) -> int:
        """Every order up to this number has ended."""
        return min(self.open) - 1 if self.open else self.last_seq
