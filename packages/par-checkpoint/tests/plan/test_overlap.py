import itertools
import math

import pytest
import torch

from par_checkpoint.plan.claims import Claims, GlobalTensor, merge
from par_checkpoint.plan.overlap import BoxIndex


def held(shape: tuple[int, ...], boxes: list[list[list[int]]]) -> GlobalTensor:
    """A tensor from each rank's boxes, start and size joined."""
    tensors = (("model:x", torch.float32, shape),)
    claims = [Claims(tensors=tensors, rows={len(shape): torch.tensor([[0, *box] for box in each])}) for each in boxes]
    return merge([([rank], each) for rank, each in enumerate(claims)])[0]


def marked(shape: tuple[int, ...], start: list[int], size: list[int]) -> torch.Tensor:
    """True in a box."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = True
    return mask


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((12,), [[[0, 5]], [[5, 7]], [[5, 7]]]),
        ((4, 6), [[[0, 0, 4, 2]], [[0, 2, 4, 4]]]),
        ((4, 6), [[[0, 0, 4, 6]], [[0, 0, 4, 6]]]),
        ((5, 4), [[[0, 0, 2, 4]], [[1, 0, 3, 4]], [[4, 0, 1, 3], [4, 3, 1, 1]]]),
        ((2, 3, 4), [[[0, 0, 0, 2, 1, 4]], [[0, 1, 0, 2, 2, 2]], [[0, 1, 2, 2, 2, 2]]]),
        ((3, 4), [[[0, 0, 1, 4]], [[1, 0, 1, 2]], [[1, 2, 1, 2]], [[2, 0, 1, 1]], [[2, 1, 1, 2]], [[2, 3, 1, 1]]]),
    ],
)
def test_every_stretch_counts_the_elements_that_each_box_holds(shape, boxes):
    tensor = held(shape, boxes)
    masks = [marked(shape, *each) for each in zip(tensor.starts.tolist(), tensor.sizes.tolist(), strict=True)]
    holders = BoxIndex(tensor, rank=1)
    for start, stop in itertools.combinations(range(math.prod(shape) + 1), 2):
        stretch = torch.zeros(math.prod(shape), dtype=torch.bool)
        stretch[start:stop] = True
        stretch = stretch.view(shape)
        overlap = holders.within(start, stop)
        expected = {box: int((mask & stretch).sum()) for box, mask in enumerate(masks)}
        assert overlap.boxes == {box: count for box, count in expected.items() if count}
        by_rank = sorted((rank, expected[box] * 4) for box in overlap.boxes for rank in tensor.holders(box).tolist())
        weights = sorted(zip(overlap.ranks.tolist(), overlap.weights.tolist(), strict=True))
        assert [each for each in weights if each[1]] == by_rank
        for box in overlap.boxes:
            parts = torch.zeros(shape, dtype=torch.int64)
            for part in overlap.parts(box):
                parts += marked(shape, *part)
            assert torch.equal(parts, (masks[box] & stretch).long())


def test_a_rank_knows_its_boxes_and_those_of_others():
    overlap = BoxIndex(held((8,), [[[0, 4]], [[4, 4]], [[4, 4]]]), rank=2).within(2, 6)
    assert overlap.mine == [1]
    assert overlap.boxes_of(0) == {0}
    assert overlap.boxes_of(1) == overlap.boxes_of(2) == {1}
    assert BoxIndex(held((8,), [[[0, 4]], [[4, 4]]]), rank=0).within(4, 8).mine == []


def test_a_scalar_has_one_element():
    overlap = BoxIndex(held((), [[[]], [[]]]), rank=0).within(0, 1)
    assert overlap.boxes == {0: 1}
    assert list(overlap.parts(0)) == [((), ())]
