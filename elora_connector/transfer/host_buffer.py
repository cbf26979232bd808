"""The host tier's memory of one worker rank: fixed slots of one chunk each."""

from __future__ import annotations

import ctypes
import logging
import threading

import torch

from elora_connector.errors import UnsupportedError

logger = logging.getLogger(__name__)

PAGE = 4096
"""Alignment of the buffer's base, in bytes: whole pages can be registered with CUDA."""

_MADV_POPULATE_WRITE = 23
_POPULATE_STEP = 16 << 20


class HostBuffer:
    """uint8 memory `[slots, chunk_bytes]`, shared by the copy engine and socket I/O.

    Pinning touches all memory at start; pageable memory is touched on first use, or
    ahead of it by `populate`.
    Who may use which slot is decided elsewhere: this class does no bookkeeping.

    Args:
        slots: number of chunks that fit.
        chunk_bytes: bytes of one chunk of one rank.
        pin: page-lock the memory where CUDA is there, so that copies are asynchronous
            and at wire speed; without CUDA the memory stays pageable.

    Raises:
        ValueError: no slots, or slots of no bytes.
        UnsupportedError: CUDA is there but the memory cannot be pinned.
    """

    def __init__(self, slots: int, chunk_bytes: int, pin: bool) -> None:
        if slots < 1 or chunk_bytes < 1:
            raise ValueError(f"host buffer of {slots} slots of {chunk_bytes} bytes")
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        nbytes = slots * chunk_bytes
        self._registered = False
        self._memory = _aligned(torch.empty(nbytes + PAGE, dtype=torch.uint8), nbytes)
        if pin and torch.cuda.is_available():
            self._pin(nbytes)
        self._slots = self._memory.view(slots, chunk_bytes)
        self._bytes = memoryview(self._memory.numpy())

    @property
    def tensor(self) -> torch.Tensor:
        """The whole buffer, uint8 `[slots, chunk_bytes]`."""
        return self._slots

    @property
    def pinned(self) -> bool:
        return self._memory.is_pinned() if torch.cuda.is_available() else False

    def slot(self, i: int) -> torch.Tensor:
        """Slot `i` as uint8 `[chunk_bytes]`; no copy."""
        return self._slots[self._checked(i)]

    def view(self, i: int) -> memoryview:
        """Slot `i` as writable bytes for socket I/O; no copy."""
        start = self._checked(i) * self.chunk_bytes
        return self._bytes[start : start + self.chunk_bytes]

    def populate(self) -> threading.Thread:
        """Have the kernel provide the pages ahead of use, first slots first.

        Runs in the background and never changes a byte, so slots may be used meanwhile.
        A page's first touch is several times slower than a copy into it, and would
        otherwise be paid inside requests.  Where the kernel cannot do it, nothing happens.

        Returns:
            The thread, for those who want to wait.
        """
        thread = threading.Thread(
            target=_populate, args=(self._memory,), name="elora-populate", daemon=True
        )
        thread.start()
        return thread

    def close(self) -> None:
        """Release the page lock; idempotent.  Close the copy engine first."""
        if self._registered:
            self._registered = False
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

    def _checked(self, i: int) -> int:
        # A negative index would silently be another slot.
        if not 0 <= i < self.slots:
            raise IndexError(f"slot {i} of {self.slots}")
        return i

    def _pin(self, nbytes: int) -> None:
        """Register the memory: torch's pinned allocator rounds up to a power of two."""
        error = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), nbytes, 0)
        if error.value == 0:
            self._registered = True
            return
        logger.warning("cudaHostRegister of %d bytes failed: %s", nbytes, error)
        _drop_pending_cuda_error()
        try:
            pinned = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as failure:
            raise UnsupportedError(
                f"cannot pin {nbytes} bytes of host memory ({failure}); lower "
                "max_local_cpu_size or raise the locked-memory limit (ulimit -l)"
            ) from failure
        self._memory = _aligned(pinned, nbytes)


def _populate(memory: torch.Tensor) -> None:
    libc = ctypes.CDLL(None)
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel() // PAGE * PAGE
    for address in range(begin, end, _POPULATE_STEP):
        length = min(_POPULATE_STEP, end - address)
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
            return  # Linux before 5.14, or no memory: pages come on first use, as usual


def _aligned(raw: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the `nbytes` of `raw` that start at a page boundary."""
    skip = -raw.data_ptr() % PAGE
    return raw[skip : skip + nbytes]


def _drop_pending_cuda_error() -> None:
    """Let a tiny kernel pick up the error CUDA remembers.

    CUDA reports a failed call once more at the next kernel launch; that would be the
    model's, far away from the cause.
    """
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as pending:
        logger.debug("dropped pending CUDA error: %s", pending)
