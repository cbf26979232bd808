"""Slots are disjoint windows onto one piece of memory."""

from __future__ import annotations

import pytest
import torch

from elora_connector.transfer import host_buffer
from elora_connector.transfer.host_buffer import PAGE, HostBuffer


def test_slot_and_view_are_the_same_writable_bytes() -> None:
    host = HostBuffer(3, 37, pin=False)
    host.tensor.zero_()
    host.view(1)[:] = bytes(range(37))
    assert host.slot(1).tolist() == list(range(37))
    host.slot(1)[5] = 99
    assert host.view(1)[5] == 99
    assert host.slot(0).sum() == 0
    assert host.slot(2).sum() == 0


def test_view_is_made_for_sockets() -> None:
    view = HostBuffer(2, 10, pin=False).view(1)
    assert (view.nbytes, view.format, view.readonly, view.contiguous) == (10, "B", False, True)


def test_base_is_page_aligned() -> None:
    assert HostBuffer(3, 1000, pin=False).tensor.data_ptr() % PAGE == 0


@pytest.mark.parametrize("slot", [-1, 3])
def test_refuses_foreign_slots(slot: int) -> None:
    host = HostBuffer(3, 8, pin=False)
    with pytest.raises(IndexError):
        host.slot(slot)
    with pytest.raises(IndexError):
        host.view(slot)


@pytest.mark.parametrize(("slots", "chunk_bytes"), [(0, 8), (8, 0)])
def test_refuses_empty_buffers(slots: int, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="slots of"):
        HostBuffer(slots, chunk_bytes, pin=False)


def test_close_twice_is_harmless() -> None:
    host = HostBuffer(1, 8, pin=True)
    host.close()
    host.close()


class FakeCudart:
    """Answers registration calls and remembers them."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> FakeCudart:  # noqa: N802
        self.calls.append(("register", nbytes))
        self.address = address
        return self

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        assert address == self.address
        self.calls.append(("unregister", 0))

    @property
    def value(self) -> int:
        return self.error


def with_cudart(monkeypatch: pytest.MonkeyPatch, error: int) -> FakeCudart:
    fake = FakeCudart(error)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_pinning_registers_exactly_the_buffer_and_close_releases_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = with_cudart(monkeypatch, error=0)
    host = HostBuffer(5, 100, pin=True)
    host.close()
    host.close()
    assert fake.calls == [("register", 500), ("unregister", 0)]


def test_failed_registration_falls_back_to_the_pinned_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = with_cudart(monkeypatch, error=2)
    asked: list[bool] = []
    empty = torch.empty

    def pinned_empty(*args: int, pin_memory: bool = False, **kwargs: torch.dtype) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(host_buffer, "_drop_pending_cuda_error", lambda: None)
    host = HostBuffer(2, 100, pin=True)
    assert asked == [False, True]
    host.view(1)[:] = bytes(100)
    host.close()
    assert fake.calls == [("register", 200)]


def test_populate_keeps_what_was_written() -> None:
    buffer = HostBuffer(slots=64, chunk_bytes=PAGE * 8, pin=False)
    for i in range(buffer.slots):
        buffer.slot(i).fill_(i)
    buffer.populate().join(30)
    assert all(bool((buffer.slot(i) == i).all()) for i in range(buffer.slots))


def test_populate_makes_pages_resident() -> None:
    buffer = HostBuffer(slots=1024, chunk_bytes=PAGE * 16, pin=False)
    before = _resident_bytes()
    buffer.populate().join(30)
    assert _resident_bytes() - before > buffer.slots * buffer.chunk_bytes // 2


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE
