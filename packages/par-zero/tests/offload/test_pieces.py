"""Splitting into pieces and laying them out in a file: each element once, fractions by tier, aligned slots."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from par_zero.layout.packing import SliceRange
from par_zero.offload.pieces import PAGE, lay_out_blocks, split_into_pieces

CHUNKS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=4), min_size=1, max_size=5
)


@given(chunks=CHUNKS, host=st.integers(0, 10), disk=st.integers(0, 10), limit=st.integers(1, 200))
def test_split_into_pieces_covers_each_element_once(chunks, host, disk, limit):
    disk = min(disk, 10 - host)
    parts = {"device": (10 - host - disk) / 10, "host": host / 10, "disk": disk / 10}
    ranges = []
    for chunk in chunks:
        start, made = 0, []
        for group, count in chunk:
            made.append(SliceRange(group=group, start=start, stop=start + 16 * count))
            start += 16 * count
        ranges.append(made)
    pieces = split_into_pieces(ranges, parts, limit)
    for whole, found in zip(ranges, pieces, strict=True):
        assert [element for one in whole for element in _elements(one)] == [
            element for piece in found for element in _elements(piece)
        ]
    every = [piece for found in pieces for piece in found]
    assert all(piece.start % 16 == 0 and piece.stop % 16 == 0 and piece.start < piece.stop for piece in every)
    assert all(piece.stop - piece.start <= max(limit, 16) for piece in every if piece.tier == "disk")
    assert [piece.tier for piece in every] == sorted(
        (piece.tier for piece in every), key=("device", "host", "disk").index
    )
    total = sum(piece.stop - piece.start for piece in every)
    for tier, part in parts.items():
        count = sum(piece.stop - piece.start for piece in every if piece.tier == tier)
        assert abs(count - part * total) <= 32  # both ends are multiples of 16


def _elements(piece):
    return [(piece.group, element) for element in range(piece.start, piece.stop)]


def test_lay_out_blocks_aligns_each_slot_to_pages():
    slots = {"exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}
    first, second = lay_out_blocks([(1024, slots, None), (1040, slots, None)])
    assert (first.start, first.size) == (0, PAGE + PAGE)
    assert (second.start, second.size) == (2 * PAGE, 2 * PAGE + PAGE)
    assert [(slot.name, slot.start, slot.count) for slot in second.slots] == [
        ("exp_avg", 0, 1040),
        ("exp_avg_sq", 2 * PAGE, 1040),
    ]
    assert lay_out_blocks([(16, {}, None)])[0].size == 0
