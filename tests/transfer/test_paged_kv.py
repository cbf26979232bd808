"""Byte views over every KV layout vLLM hands over, and what is refused."""

from __future__ import annotations

import pytest
import torch

from elora_connector.errors import UnsupportedError
from elora_connector.transfer.paged_kv import PagedKV, word_dtype

BLOCKS, HEADS, TOKENS, DIM = 7, 3, 4, 5


def filled(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.int64).to(dtype).view(shape)


def block_bytes(paged: PagedKV, block: int) -> bytes:
    return b"".join(segment.pages[block].numpy().tobytes() for segment in paged.segments)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_contiguous_blocks_are_their_own_bytes() -> None:
    layers = {f"l{i}": filled(BLOCKS, HEADS, TOKENS, DIM) + i for i in range(2)}
    paged = PagedKV.from_tensors(layers, BLOCKS)
    assert paged.block_bytes == 2 * HEADS * TOKENS * DIM * 2
    assert paged.device == torch.device("cpu")
    for block in range(BLOCKS):
        assert block_bytes(paged, block) == raw(layers["l0"][block]) + raw(layers["l1"][block])


def test_views_of_one_storage_make_one_band() -> None:
    storage = filled(4, BLOCKS, HEADS, TOKENS, DIM)
    paged = PagedKV.from_tensors({f"l{i}": storage[i] for i in range(4)}, BLOCKS)
    assert [band.pages.shape for band in paged.bands] == [(BLOCKS, 4, HEADS * TOKENS * DIM * 2)]
    assert block_bytes(paged, 3) == raw(storage[:, 3])
    assert paged.bands[0].pages[3].numpy().tobytes() == raw(storage[:, 3])


def test_layers_in_separate_storages_make_a_band_each() -> None:
    layers = {f"l{i}": filled(BLOCKS, TOKENS, DIM) for i in range(3)}
    paged = PagedKV.from_tensors(layers, BLOCKS)
    page = TOKENS * DIM * 2
    assert [band.offset for band in paged.bands] == [0, page, 2 * page]


def test_blocks_outermost_with_interleaved_layers() -> None:
    storage = filled(BLOCKS, 3, HEADS, TOKENS, DIM)
    paged = PagedKV.from_tensors({f"l{i}": storage[:, i] for i in range(3)}, BLOCKS)
    assert len(paged.bands) == 1
    assert block_bytes(paged, 5) == raw(storage[5])


def test_block_bytes_do_not_depend_on_how_layers_and_blocks_interleave() -> None:
    by_layer = filled(3, BLOCKS, HEADS, TOKENS, DIM)
    by_block = by_layer.transpose(0, 1).contiguous()
    one = PagedKV.from_tensors({f"l{i}": by_layer[i] for i in range(3)}, BLOCKS)
    two = PagedKV.from_tensors({f"l{i}": by_block[:, i] for i in range(3)}, BLOCKS)
    assert one.layout == two.layout
    assert [block_bytes(one, b) for b in range(BLOCKS)] == [
        block_bytes(two, b) for b in range(BLOCKS)
    ]


def test_padded_pages_leave_the_padding_out() -> None:
    storage = filled(BLOCKS, TOKENS * DIM + 6)
    layer = storage[:, : TOKENS * DIM].unflatten(1, (TOKENS, DIM))
    paged = PagedKV.from_tensors({"l": layer}, BLOCKS)
    assert paged.segments[0].page_bytes == TOKENS * DIM * 2
    assert paged.segments[0].block_stride == (TOKENS * DIM + 6) * 2
    assert block_bytes(paged, 2) == raw(layer[2])


def test_separate_keys_and_values_are_two_segments() -> None:
    layer = filled(2, BLOCKS, TOKENS, HEADS, DIM)
    paged = PagedKV.from_tensors({"l": layer}, BLOCKS)
    assert [segment.name for segment in paged.segments] == ["l[0]", "l[1]"]
    assert block_bytes(paged, 4) == raw(layer[:, 4])


def test_heads_outside_blocks_are_a_segment_each() -> None:
    layer = filled(HEADS, BLOCKS, TOKENS, DIM).transpose(0, 1)
    paged = PagedKV.from_tensors({"l": layer}, BLOCKS)
    assert len(paged.segments) == HEADS
    assert block_bytes(paged, 4) == raw(layer[4])


def test_permuted_dimensions_keep_memory_order_and_show_in_the_layout() -> None:
    memory = filled(BLOCKS, HEADS, TOKENS, DIM)
    permuted = PagedKV.from_tensors({"l": memory.transpose(1, 2)}, BLOCKS)
    plain = PagedKV.from_tensors({"l": filled(BLOCKS, TOKENS, HEADS, DIM)}, BLOCKS)
    assert block_bytes(permuted, 1) == raw(memory[1])
    assert permuted.layout != plain.layout


def test_layout_tells_types_and_shapes_apart_but_not_pool_sizes() -> None:
    def layout(blocks: int, dtype: torch.dtype, tokens: int) -> str:
        tensor = torch.zeros(blocks, tokens, DIM, dtype=dtype)
        return PagedKV.from_tensors({"l": tensor}, blocks).layout

    same = layout(7, torch.float16, TOKENS)
    assert same == layout(11, torch.float16, TOKENS)
    assert same != layout(7, torch.bfloat16, TOKENS)
    assert same != layout(7, torch.float16, TOKENS + 2)


def test_smaller_kernel_blocks_are_joined() -> None:
    layer = filled(BLOCKS * 2, HEADS, TOKENS, DIM)
    paged = PagedKV.from_tensors({"l": layer}, BLOCKS)
    assert paged.segments[0].pages.shape == (BLOCKS, 2 * HEADS * TOKENS * DIM * 2)
    assert block_bytes(paged, 3) == raw(layer[6:8])


def test_smaller_kernel_blocks_with_separate_keys_and_values() -> None:
    layer = filled(2, BLOCKS * 3, TOKENS, DIM)
    paged = PagedKV.from_tensors({"l": layer}, BLOCKS)
    assert block_bytes(paged, 2) == raw(layer[:, 6:9])


def test_several_tensors_per_layer() -> None:
    parts = [filled(BLOCKS, 3), filled(BLOCKS, 5) + 1]
    paged = PagedKV.from_tensors({"l": parts}, BLOCKS)
    assert [segment.name for segment in paged.segments] == ["l.0", "l.1"]
    assert block_bytes(paged, 6) == raw(parts[0][6]) + raw(parts[1][6])


def test_layers_that_share_their_kv_move_once() -> None:
    layer = filled(BLOCKS, TOKENS, DIM)
    paged = PagedKV.from_tensors({"a": layer, "b": layer.view(BLOCKS, DIM, TOKENS)}, BLOCKS)
    assert [segment.name for segment in paged.segments] == ["a"]


def test_an_offset_into_the_storage_is_kept() -> None:
    storage = filled(3 + BLOCKS * TOKENS)
    layer = storage[3:].view(BLOCKS, TOKENS)
    assert block_bytes(PagedKV.from_tensors({"l": layer}, BLOCKS), 5) == raw(layer[5])


@pytest.mark.parametrize(
    ("shape", "blocks", "page_elements", "segments"),
    [
        ((128, 4, 128, 128), 128, 4 * 128 * 128, 1),
        ((64, 4, 128, 128), 64, 4 * 128 * 128, 1),
        ((2, 16, 16, 2, 16), 16, 16 * 2 * 16, 2),
        ((256, 4, 64, 32), 64, 4 * 4 * 64 * 32, 1),
    ],
)
def test_blocks_come_before_equal_inner_sizes(
    shape: tuple[int, ...], blocks: int, page_elements: int, segments: int
) -> None:
    paged = PagedKV.from_tensors({"l": torch.zeros(shape, dtype=torch.uint8)}, blocks)
    assert [s.page_bytes for s in paged.segments] == [page_elements] * segments


@pytest.mark.parametrize(
    ("tensor", "blocks", "why"),
    [
        (torch.zeros(8, 3, 5), 7, "no dimension holds 7"),
        (torch.zeros(2, 2, 3, 5), 2, "could each hold 2"),
        (torch.zeros(3, 1, 5), 1, "could each hold 1"),
        (torch.zeros(8, 4, 3, 5).permute(1, 0, 2, 3), 4, "could each hold 4"),
        (torch.zeros(4, 4, 3, 5).transpose(0, 1), 4, "could each hold 4"),
        (torch.zeros(5, 7).transpose(0, 1)[:, :1].expand(7, 3), 7, "not contiguous"),
        (torch.zeros(7, 6, 5)[:, :, :4], 7, "not contiguous"),
        (torch.zeros(100).as_strided((7, 5), (3, 1)), 7, "blocks overlap"),
        (torch.zeros(200).as_strided((14, 5), (6, 1)), 7, "rows of a block are not adjacent"),
        (torch.zeros(7, 3), 0, "num_blocks is 0"),
    ],
)
def test_refuses_what_it_cannot_prove(tensor: torch.Tensor, blocks: int, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why) as caught:
        PagedKV.from_tensors({"model.layers.3": tensor}, blocks)
    for named in ("model.layers.3", str(tuple(tensor.shape)), str(tensor.stride())):
        assert named in str(caught.value)


def test_a_hint_settles_what_the_sizes_leave_open() -> None:
    layer = filled(2, 2, TOKENS, DIM)
    keys_first = PagedKV.from_tensors({"l": layer}, 2, block_dim_hint=1)
    blocks_first = PagedKV.from_tensors({"l": layer}, 2, block_dim_hint=0)
    assert block_bytes(keys_first, 1) == raw(layer[:, 1])
    assert block_bytes(blocks_first, 1) == raw(layer[1])
    with pytest.raises(UnsupportedError, match="dimension 2"):
        PagedKV.from_tensors({"l": filled(2, 2, 5)}, 2, block_dim_hint=2)


def test_refuses_layers_that_overlap_in_part() -> None:
    storage = filled(BLOCKS + 1, 6)
    with pytest.raises(UnsupportedError, match="'a' and 'b' overlap"):
        PagedKV.from_tensors({"a": storage[:-1], "b": storage[1:]}, BLOCKS)
    with pytest.raises(UnsupportedError, match="'a' and 'b' overlap"):
        PagedKV.from_tensors({"a": storage[:-1, :4], "b": storage[:-1, 2:]}, BLOCKS)
    with pytest.raises(UnsupportedError, match="overlap"):
        PagedKV.from_tensors({"a": storage[:-1, :3], "b": storage[:-1]}, BLOCKS)


def test_refuses_nothing_at_all() -> None:
    with pytest.raises(UnsupportedError, match="no KV cache"):
        PagedKV.from_tensors({}, BLOCKS)


@pytest.mark.parametrize(
    ("page", "expected"),
    [(24, torch.int64), (12, torch.int32), (6, torch.int16), (7, torch.uint8)],
)
def test_words_are_as_wide_as_the_page_allows(page: int, expected: torch.dtype) -> None:
    assert word_dtype(torch.zeros(3, page, dtype=torch.uint8)) is expected


def test_words_respect_offsets_and_strides() -> None:
    storage = torch.zeros(1000, dtype=torch.uint8)
    assert word_dtype(storage.as_strided((3, 8), (12, 1))) is torch.int32
    assert word_dtype(storage.as_strided((3, 8), (16, 1), 2)) is torch.int16
    assert word_dtype(storage.as_strided((3, 8), (8, 1)), storage[1:9]) is torch.uint8
