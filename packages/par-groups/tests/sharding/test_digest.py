"""Digests of sharded tensors: equal for equal tensors, whatever holds which part of them."""

import pytest
import torch
import torch.distributed as dist

from par_groups import Box, Segment, Segments, Sharding, digest_of, set_segments, set_sharding


def weight(dtype=torch.float32):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def whole_digest(dtype=torch.float32):
    return digest_of([("w", weight(dtype)), ("b", torch.arange(5.0))], None)


@pytest.mark.ranks(2)
def test_digest_of_rows_columns_and_a_flat_buffer_is_that_of_the_tensor():
    rank, full, bias = dist.get_rank(), weight(), torch.arange(5.0)
    rows = full[3 * rank : 3 * rank + 3].clone()
    set_sharding(rows, Sharding((6, 8), (Box((3 * rank, 0), (3, 8), 0, (8, 1), (rank,)),)))
    columns = full[:, 4 * rank : 4 * rank + 4].contiguous()
    set_sharding(columns, Sharding((6, 8), (Box((0, 4 * rank), (6, 4), 0, (4, 1), (rank,)),)))
    copy = bias.clone()
    set_sharding(copy, Sharding((5,), (Box((0,), (5,), 0, (1,), (0, 1)),)))
    # Elements 0 to 2 of the bias on rank 0, the others on rank 1, behind the rows.
    own = bias[:3] if rank == 0 else bias[3:]
    flat = torch.cat([rows.reshape(-1), own])
    boxes = (Box((3 * rank,), (len(own),), 24, (1,), (rank,)),)
    in_rows = Sharding((6, 8), (Box((3 * rank, 0), (3, 8), 0, (8, 1), (rank,)),))
    set_segments(flat, Segments([Segment("w", in_rows), Segment("b", Sharding((5,), boxes))]))
    expected = whole_digest()
    for named in ([("w", rows), ("b", copy)], [("w", columns), ("b", copy)], [("", flat)]):
        assert digest_of(named, dist.group.WORLD) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_digest_changes_with_one_bit_one_place_or_one_name(dtype):
    expected = whole_digest(dtype)
    tensors = {"w": weight(dtype), "b": torch.arange(5.0)}
    bit = tensors["w"].clone()
    real = torch.view_as_real(bit) if dtype.is_complex else bit
    real.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize])[2, 3] ^= 1
    swapped = tensors["w"].flip(0)
    assert digest_of([("w", bit), ("b", tensors["b"])], None).differing(expected) == ["w"]
    assert digest_of([("w", swapped), ("b", tensors["b"])], None).differing(expected) == ["w"]
    assert digest_of([("v", tensors["w"]), ("b", tensors["b"])], None).differing(expected) == ["v", "w"]
    assert digest_of(reversed(tensors.items()), None) == expected
    assert str(digest_of([("w", bit), ("b", tensors["b"])], None)) != str(expected)


def test_digest_has_a_sha256_as_text():
    assert len(str(whole_digest())) == 64


def test_zeros_at_different_places_differ():
    """A hash that multiplied an element by its place would not see a zero."""
    ones = torch.ones(64)
    digests = set()
    for place in range(64):
        tensor = ones.clone()
        tensor[place] = 0
        digests.add(str(digest_of([("w", tensor)], None)))
    assert len(digests) == 64
