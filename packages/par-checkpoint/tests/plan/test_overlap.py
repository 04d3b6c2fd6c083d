import itertools
import math

import pytest
import torch

from par_checkpoint.plan.overlap import BoxIndex, indexes_of
from par_groups import Claims, GlobalTensor, merge_claims


def held(shape: tuple[int, ...], boxes: list[list[list[int]]]) -> GlobalTensor:
    """A tensor from each rank's boxes, start and size joined."""
    tensors = (("model:x", torch.float32, shape),)
    dims = len(shape)
    claims = [Claims.of_boxes(tensors, [(0, tuple(box[:dims]), tuple(box[dims:])) for box in each]) for each in boxes]
    return merge_claims([([rank], each) for rank, each in enumerate(claims)])[0]


def index_of(tensor: GlobalTensor) -> BoxIndex:
    return indexes_of([tensor])[0]


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
    masks = [
        marked(shape, *each) for each in zip(tensor.boxes.starts.tolist(), tensor.boxes.sizes.tolist(), strict=True)
    ]
    holders = index_of(tensor)
    for start, stop in itertools.combinations(range(math.prod(shape) + 1), 2):
        stretch = torch.zeros(math.prod(shape), dtype=torch.bool)
        stretch[start:stop] = True
        stretch = stretch.view(shape)
        overlap = holders.within(start, stop)
        expected = {box: int((mask & stretch).sum()) for box, mask in enumerate(masks)}
        assert overlap.boxes == {box: count for box, count in expected.items() if count}
        runs = torch.full((math.prod(shape),), -1)
        for first, last, box in overlap.stretch.runs() or ():
            assert masks[box].view(-1)[first:last].all()
            runs[first:last] = box
        assert torch.equal(runs >= 0, stretch.view(-1) & torch.stack(masks).any(0).view(-1))
        assert stop == start or overlap.stretch.runs(limit=0) is None or not overlap.boxes
        for box in overlap.boxes:
            parts = torch.zeros(shape, dtype=torch.int64)
            for part in overlap.stretch.parts(box):
                parts += marked(shape, *part)
            assert torch.equal(parts, (masks[box] & stretch).long())


def test_a_rank_knows_its_boxes_and_those_of_others():
    index = index_of(held((8,), [[[0, 4]], [[4, 4]], [[4, 4]]]))
    assert [sorted(index.held_by(rank)) for rank in range(4)] == [[0], [1], [1], []]
    overlap = index.within(2, 6)
    assert [overlap.boxes_of(rank) for rank in range(3)] == [[0], [1], [1]]
    assert index.within(4, 8).boxes_of(0) == []


def test_a_scalar_has_one_element():
    overlap = index_of(held((), [[[]], [[]]])).within(0, 1)
    assert overlap.boxes == {0: 1}
    assert list(overlap.stretch.parts(0)) == [((), ())]
    assert overlap.stretch.runs() == [(0, 1, 0)]
