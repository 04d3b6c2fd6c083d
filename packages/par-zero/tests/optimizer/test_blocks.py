"""Which rank steps which block, as arithmetic on records."""

import pytest

from par_groups import Box, Sharding
from par_zero.optimizer.blocks import blocks_of, work


def rows(shape, start, stop, copies=(0,), sum_over=()):
    return Box((start, 0), (stop - start, shape[1]), 0, (shape[1], 1), copies, sum_over)


def cut(shape, ranks):
    """Rows of a matrix, evenly."""
    part = shape[0] // ranks
    return [Sharding(shape, (rows(shape, rank * part, (rank + 1) * part),)) for rank in range(ranks)]


def gpt(width, depth, ranks):
    for number in range(depth):
        for name, shape in {"q": (1, 1), "k": (1, 1), "v": (1, 1), "o": (1, 1), "up": (4, 1), "down": (1, 4)}.items():
            yield f"{number}.{name}", cut(tuple(width * each for each in shape), ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_rank_with_most_to_do_has_little_more_than_the_mean(ranks):
    """In products of matrices, of which a rank has 1/ranks at best; 1.3 times that is allowed."""
    blocks = blocks_of(list(gpt(64, 12, ranks)))
    loads = [sum(work(block.size) for block in blocks if block.stepper == rank) for rank in range(ranks)]
    assert max(loads) <= 1.05 * sum(loads) / ranks
    assert work((64, 256)) == work((256, 64)) == 64 * 64 * 256


def test_the_copy_of_the_rank_that_steps_is_taken_and_partial_ones_are_added():
    shape = (4, 3)
    whole = [Sharding(shape, (rows(shape, 0, 4, (0, 1)),)) for _ in range(2)]
    partial = [Sharding(shape, (rows(shape, 0, 4, (0, 1), ("tensor",)),)) for _ in range(2)]
    one, other, third = blocks_of([("one", whole), ("other", whole), ("third", partial)])
    assert [one.stepper, other.stepper, third.stepper] == [0, 1, 0]
    assert [piece.chosen for piece in other.pieces] == [False, True]
    assert [piece.counts for piece in other.pieces] == [False, True]
    assert [piece.counts for piece in third.pieces] == [True, True]


def test_the_boxes_of_a_record_are_blocks_by_themselves():
    shape = (10, 3)
    records = [
        Sharding(shape, (rows(shape, 0, 3), rows(shape, 6, 8))),
        Sharding(shape, (rows(shape, 3, 6), rows(shape, 8, 10))),
    ]
    first, second = blocks_of([("fused", records)])
    assert (first.start, first.size) == ((0, 0), (6, 3))
    assert (second.start, second.size) == ((6, 0), (4, 3))
    assert second.slices(records[1].boxes[1]) == (slice(2, 4), slice(0, 3))


def overlapping():
    shape = (6, 3)
    return [Sharding(shape, (rows(shape, 0, 4),)), Sharding(shape, (rows(shape, 2, 6),))]


def gap_and_overlap():
    """As many elements as the rectangle has, and yet not all of them."""
    shape = (8, 3)
    boxes = [(0, 3), (2, 5), (6, 8)]
    return [Sharding(shape, (rows(shape, *each),)) for each in boxes]


def other_numbers():
    shape = (6, 3)
    return [Sharding(shape, (rows(shape, 0, 2), rows(shape, 2, 4))), Sharding(shape, (rows(shape, 4, 6),))]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (overlapping, "no rectangle together"),
        (gap_and_overlap, "no rectangle together"),
        (other_numbers, r"\[1, 2\] boxes"),
        (lambda: cut((6, 3), 2)[:1], "have 9 of 18 elements"),
    ],
)
def test_records_that_do_not_fit_together_are_named(records, words):
    with pytest.raises(ValueError, match=words):
        blocks_of([("q.weight", records())])
