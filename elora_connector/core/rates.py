"""Measured speeds: what it really takes to move bytes, load adapters and compute tokens.

Everything is averaged exponentially over what was reported, from start values that are
used until enough was measured.
"""

from __future__ import annotations

import enum
from typing import Final

KEEP: Final = 0.9
"""Weight of what was known before, at every new sample (memory of about ten samples)."""
ENOUGH: Final = 3
"""Samples before a rate counts as measured."""
_LEAST_SLOPE: Final = 0.05
_LEAST_SPREAD: Final = 0.01


class Move(enum.Enum):
    """Direction of a move, as metrics name it."""

    HOST_TO_GPU = "host_to_gpu"
    GPU_TO_HOST = "gpu_to_host"
    REMOTE_TO_HOST = "remote_to_host"


class Link:
    """Seconds for an amount: ``overhead_s + amount / per_s``, fitted to samples.

    Least squares over discounted sums.  Samples of one size only cannot tell the two
    apart; then the overhead stays as it was and the speed takes up the difference, so
    that the time for this size is right in any case.

    Args:
        per_s: start value, amount (bytes, tokens) a second.
        overhead_s: start value, seconds per move whatever its size.
    """

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "overhead_s", "per_s", "samples")

    def __init__(self, per_s: float, overhead_s: float = 0.0) -> None:
        if not per_s > 0 or not overhead_s >= 0:
            raise ValueError(f"need per_s > 0 and overhead_s >= 0, got {per_s}, {overhead_s}")
        self.per_s = per_s
        self.overhead_s = overhead_s
        self.samples = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def measured(self) -> bool:
        """Do the values come from samples?  Until then they are the start values."""
        return self.samples >= ENOUGH

    def seconds(self, amount: float) -> float:
        """Expected seconds of one move of `amount`."""
        return self.overhead_s + amount / self.per_s

    def add(self, amount: float, seconds: float) -> None:
        """Take in one measured move; one without amount or duration says nothing."""
        if not amount > 0 or not seconds > 0:
            return
        self.samples += 1
        self._n = KEEP * self._n + 1.0
        self._x = KEEP * self._x + amount
        self._y = KEEP * self._y + seconds
        self._xx = KEEP * self._xx + amount * amount
        self._xy = KEEP * self._xy + amount * seconds
        if self.measured:
            self._fit()

    def _fit(self) -> None:
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        steepest = y / x
        if spread > _LEAST_SPREAD * x * x:
            slope = (self._xy / self._n - x * y) / spread
        else:
            slope = (y - self.overhead_s) / x
        # Noise must make neither the overhead negative nor bytes free.
        slope = min(max(slope, _LEAST_SLOPE * steepest), steepest)
        self.per_s = 1.0 / slope
        self.overhead_s = max(0.0, y - slope * x)


class Mean:
    """Seconds per adapter, and over all adapters for those that were never measured."""

    __slots__ = ("_by_name", "changes", "overall")

    def __init__(self, start_s: float) -> None:
        self.overall = start_s
        self.changes = 0
        """Raised with every sample."""
        self._by_name: dict[str, float] = {}

    def of(self, name: str) -> float:
        """Seconds for one adapter."""
        return self._by_name.get(name, self.overall)

    def add(self, name: str, seconds: float) -> None:
        """Take in one measured duration; zero means that nothing was to do."""
        if not seconds > 0:
            return
        # The first sample replaces the start value, which was only a guess.
        keep = KEEP if self._by_name else 0.0
        self.overall = keep * self.overall + (1 - keep) * seconds
        known = self._by_name.get(name, seconds)
        self._by_name[name] = KEEP * known + (1 - KEEP) * seconds
        self.changes += 1


class Rates:
    """Every measured speed of one engine.

    Start values are those of a modest machine with PCIe and a network store; none of
    them decides anything that depends on `measured`.

    Args:
        lanes: parallel reads from the remote tier on one rank.

    Attributes:
        host_to_gpu, gpu_to_host: one copy job; amount = its bytes on one rank.
        remote_to_host: one value read by one thread; amount = its bytes.
        prefill: one step that mostly computes prompts; amount = its tokens.
        adapter_load: seconds to read, hash and build an adapter's weights, by name.
        adapter_activation: seconds to put loaded weights into a GPU slot, by name.
    """

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = max(1, lanes)
        self.host_to_gpu = Link(8e9, 50e-6)
        self.gpu_to_host = Link(8e9, 50e-6)
        self.remote_to_host = Link(0.5e9, 1e-3)
        self.prefill = Link(5_000.0)
        self.adapter_load = Mean(0.2)
        self.adapter_activation = Mean(5e-3)

    def link(self, move: Move) -> Link:
        """The measured speed of one direction."""
        links = {
            Move.HOST_TO_GPU: self.host_to_gpu,
            Move.GPU_TO_HOST: self.gpu_to_host,
            Move.REMOTE_TO_HOST: self.remote_to_host,
        }
        return links[move]

    def load_s(self, nbytes: float) -> float:
        """One copy of `nbytes` bytes from the host tier to the GPU."""
        return self.host_to_gpu.seconds(nbytes)

    def fetch_s(self, value_bytes: float, values: int = 1, queued: int = 0) -> float:
        """`values` values of `value_bytes` bytes each from the remote tier, behind `queued`."""
        rounds = -(-(values + queued) // self.lanes)
        return rounds * self.remote_to_host.seconds(value_bytes)

    def recompute_s(self, tokens: float) -> float:
        """`tokens` more prompt tokens in steps that run anyway."""
        return tokens / self.prefill.per_s
