"""Byte view of vLLM's paged KV, whatever layout the attention backend chose.

Every layer becomes one or more *segments*: a uint8 matrix `[num_blocks, page_bytes]`
over vLLM's own memory.  A block's bytes are the concatenation of its pages in segment
order (layer order, for one layer K before V), and that order is the layout of a block
in a host slot, so it does not depend on how layers and blocks are interleaved in GPU
memory.

The block dimension is found by size.  It is the one dimension that may not be guessed
wrongly: a mix-up would copy bytes consistently, pass every round trip, and still store
the wrong tokens.  So anything doubtful is refused at start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from elora_connector.errors import UnsupportedError

KVValue: TypeAlias = "torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]"


@dataclass(frozen=True)
class Segment:
    """One page per block.

    Attributes:
        name: layer it belongs to, with an index where a layer has several segments.
        pages: uint8 `[num_blocks, page_bytes]` over vLLM's memory, last stride 1.
        layout: how the bytes inside a page are to be read (dtype, sizes, strides).
    """

    name: str
    pages: torch.Tensor
    layout: str

    @property
    def page_bytes(self) -> int:
        return self.pages.shape[1]

    @property
    def block_stride(self) -> int:
        """Bytes from one block's page to the next block's."""
        return self.pages.stride(0)


@dataclass(frozen=True)
class Band:
    """Successive segments at one distance in one storage, copied by one call.

    Attributes:
        offset: byte offset of the first page inside a block in a host slot.
        pages: uint8 `[num_blocks, segments, page_bytes]` over vLLM's memory.
    """

    offset: int
    pages: torch.Tensor

    def in_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """This band's part of `[..., block_bytes]` as `[..., segments, page_bytes]`."""
        count, page = self.pages.shape[1:]
        part = slots[..., self.offset : self.offset + count * page]
        return part.unflatten(-1, (count, page))


@dataclass(frozen=True)
class PagedKV:
    """vLLM's paged KV of one worker rank as bytes.

    Attributes:
        num_blocks: blocks as vLLM's scheduler counts them.
        segments: in the order of their bytes inside a block.
        bands: the same bytes, grouped for copying.
    """

    num_blocks: int
    segments: tuple[Segment, ...]
    bands: tuple[Band, ...]

    @property
    def block_bytes(self) -> int:
        return sum(segment.page_bytes for segment in self.segments)

    @property
    def device(self) -> torch.device:
        return self.segments[0].pages.device

    @property
    def layout(self) -> str:
        """How a block's bytes are to be read; equal for two engines that may share KV."""
        return "\n".join(f"{segment.name} {segment.layout}" for segment in self.segments)

    @classmethod
    def from_tensors(
        cls,
        kv_caches: Mapping[str, KVValue],
        num_blocks: int,
        block_dim_hint: int | None = None,
    ) -> PagedKV:
        """View the tensors vLLM passes to `register_kv_caches`.

        Args:
            kv_caches: layer name to KV tensor, or to several tensors.
            num_blocks: of the scheduler; a tensor may have a multiple of it in rows, when
                vLLM's kernels work on smaller blocks.
            block_dim_hint: the block dimension, where the caller knows it.

        Raises:
            UnsupportedError: a layout that cannot be proven safe, naming the layer.
        """
        segments: list[Segment] = []
        seen: set[tuple[int, int, int]] = set()
        for name, tensor in _flatten(kv_caches):
            for segment in _segments(name, tensor, num_blocks, block_dim_hint):
                where = (segment.pages.data_ptr(), segment.block_stride, segment.page_bytes)
                # Layers may share their KV: the same bytes must move once.
                if where not in seen:
                    seen.add(where)
                    segments.append(segment)
        _refuse_mixture(segments)
        _refuse_overlap(segments)
        return cls(num_blocks, tuple(segments), tuple(_bands(segments)))


def _flatten(kv_caches: Mapping[str, KVValue]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in kv_caches.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from ((f"{name}.{index}", tensor) for index, tensor in enumerate(value))


def _refused(name: str, tensor: torch.Tensor, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"KV cache of layer {name!r}: {why} "
        f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}, dtype {tensor.dtype})"
    )


def _block_dim(name: str, tensor: torch.Tensor, num_blocks: int, hint: int | None) -> int:
    """Find the block dimension, or refuse.

    With several candidates the outermost one wins if the only thing outside it can be
    the K/V pair and it also comes first in the shape: no layout of vLLM puts heads or
    tokens before blocks in its shape, while blocks of 128 tokens or heads of 128
    elements may well equal `num_blocks`.
    """
    if num_blocks < 1:
        raise _refused(name, tensor, f"num_blocks is {num_blocks}")
    shape, strides = tensor.shape, tensor.stride()
    fitting = [d for d, size in enumerate(shape) if size and size % num_blocks == 0]
    if hint is not None:
        if hint not in fitting:
            raise _refused(name, tensor, f"dimension {hint} does not hold {num_blocks} blocks")
        return hint
    if not fitting:
        raise _refused(name, tensor, f"no dimension holds {num_blocks} blocks")
    if len(fitting) == 1:
        return fitting[0]
    best = max(fitting, key=lambda d: strides[d])
    outside = [shape[d] for d in range(len(shape)) if strides[d] > strides[best]]
    if num_blocks > 2 and best == fitting[0] and all(size <= 2 for size in outside):
        return best
    raise _refused(name, tensor, f"dimensions {fitting} could each hold {num_blocks} blocks")


def _split_dims(name: str, tensor: torch.Tensor, dim: int) -> tuple[int, list[int]]:
    """Elements of one contiguous row of `dim`, and the dimensions outside all rows."""
    shape, strides = tensor.shape, tensor.stride()
    run = 1
    outer: list[int] = []
    reach = shape[dim] * strides[dim]
    others = [d for d in range(tensor.dim()) if d != dim and shape[d] > 1]
    for d in sorted(others, key=lambda d: strides[d]):
        if strides[d] == run and not outer:
            run *= shape[d]
        elif strides[d] >= reach:
            outer.append(d)
            reach = shape[d] * strides[d]
        else:
            raise _refused(name, tensor, "the bytes of a block are not contiguous")
    if strides[dim] < run:
        raise _refused(name, tensor, "blocks overlap")
    return run, sorted(outer)


def _segments(
    name: str, tensor: torch.Tensor, num_blocks: int, hint: int | None
) -> Iterator[Segment]:
    """One segment per index over the dimensions outside the block dimension."""
    dim = _block_dim(name, tensor, num_blocks, hint)
    run, outer = _split_dims(name, tensor, dim)
    shape, strides = tensor.shape, tensor.stride()
    rows = shape[dim] // num_blocks
    if rows > 1 and strides[dim] != run:
        raise _refused(name, tensor, f"the {rows} rows of a block are not adjacent")
    item = tensor.element_size()
    size = (num_blocks, rows * run * item)
    stride = (rows * strides[dim] * item, 1)
    inner = [d for d in range(tensor.dim()) if d != dim and d not in outer]
    layout = (
        f"{tensor.dtype} rows={rows} sizes={[shape[d] for d in inner]} "
        f"strides={[strides[d] for d in inner]}"
    )
    for index in itertools.product(*(range(shape[d]) for d in outer)):
        start = tensor.storage_offset() + sum(
            i * strides[d] for i, d in zip(index, outer, strict=True)
        )
        label = name + "".join(f"[{i}]" for i in index)
        yield Segment(label, _bytes_view(tensor, start * item, size, stride), layout)


def _bytes_view(
    tensor: torch.Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """View the storage of `tensor` as uint8; all arguments in bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, size, stride)


def _refuse_mixture(segments: Sequence[Segment]) -> None:
    if not segments:
        raise UnsupportedError("vLLM registered no KV cache")
    devices = {str(segment.pages.device) for segment in segments}
    if len(devices) > 1:
        raise UnsupportedError(f"KV cache spread over several devices: {sorted(devices)}")


def _span(segment: Segment) -> tuple[int, int]:
    """First byte and one past the last byte, as addresses."""
    start = segment.pages.data_ptr()
    last = (segment.pages.shape[0] - 1) * segment.block_stride
    return start, start + last + segment.page_bytes


def _refuse_overlap(segments: Sequence[Segment]) -> None:
    """Refuse segments that share some bytes without being the same.

    Overlaid layers (hybrid models) would be stored twice and could be restored in the
    wrong order.  Segments whose spans meet are safe only when they interleave.
    """
    ordered = sorted(segments, key=lambda segment: segment.pages.data_ptr())
    open_spans: list[Segment] = []
    for later in ordered:
        start = later.pages.data_ptr()
        open_spans = [earlier for earlier in open_spans if _span(earlier)[1] > start]
        for earlier in open_spans:
            if not _interleave(earlier, later):
                raise UnsupportedError(
                    f"KV caches of {earlier.name!r} and {later.name!r} overlap in memory"
                )
        open_spans.append(later)


def _interleave(earlier: Segment, later: Segment) -> bool:
    distance = later.pages.data_ptr() - earlier.pages.data_ptr()
    phase = distance % earlier.block_stride
    return (
        earlier.block_stride == later.block_stride
        and phase >= earlier.page_bytes
        and phase + later.page_bytes <= earlier.block_stride
    )


def _bands(segments: Sequence[Segment]) -> Iterator[Band]:
    """Group successive segments of one storage at a constant positive distance."""
    offset, at = 0, 0
    while at < len(segments):
        count = _band_length(segments, at)
        first = segments[at].pages
        distance = segments[at + 1].pages.data_ptr() - first.data_ptr() if count > 1 else 1
        size = (first.shape[0], count, first.shape[1])
        stride = (first.stride(0), distance, 1)
        yield Band(offset, _bytes_view(first, first.storage_offset(), size, stride))
        offset += count * first.shape[1]
        at += count


def _band_length(segments: Sequence[Segment], at: int) -> int:
    first = segments[at]
    count, distance = 1, 0
    for previous, segment in itertools.pairwise(segments[at:]):
        step = segment.pages.data_ptr() - previous.pages.data_ptr()
        alike = (
            _storage(segment) == _storage(first)
            and segment.page_bytes == first.page_bytes
            and segment.block_stride == first.block_stride
        )
        if not alike or step <= 0 or (count > 1 and step != distance):
            break
        distance = step
        count += 1
    return count


def _storage(segment: Segment) -> int:
    return segment.pages.untyped_storage().data_ptr()


def word_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the widest integer type all uint8 `tensors` can be viewed as.

    Device kernels copy element by element, so eight bytes at a time is up to eight
    times faster than one.
    """
    unit = 8
    for tensor in tensors:
        numbers = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
        unit = math.gcd(unit, *numbers)
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit]
