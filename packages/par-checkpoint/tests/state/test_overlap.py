"""Which tensors share memory: compared with the set of addresses of their elements."""

import random

import torch

from par_checkpoint.state.overlap import MemoryRegion, regions_of
from par_groups import whole


def drawn(rng: random.Random) -> torch.Tensor:
    """A view of a small storage, with drawn sizes and steps."""
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    steps = [rng.choice([0, 1, 1, 2, 3, 4, 6, 8]) for _ in shape]
    return MEMORY.as_strided(shape, steps, rng.randrange(20))


MEMORY = torch.zeros(100, dtype=torch.int16)


def addresses(view: torch.Tensor) -> list[int]:
    """The address of each element."""
    found = [view.data_ptr()]
    for size, step in zip(view.shape, view.stride(), strict=True):
        found = [address + index * step * view.element_size() for address in found for index in range(size)]
    return found


def region(view: torch.Tensor) -> MemoryRegion:
    steps = [(step * view.element_size(), size) for step, size in zip(view.stride(), view.shape, strict=True)]
    return MemoryRegion(name="t", begin=view.data_ptr(), steps=(*steps, (1, view.element_size())))


def test_overlap_of_drawn_views_equals_that_of_their_addresses():
    rng = random.Random(5)
    seen = set()
    for _ in range(4000):
        views = drawn(rng), drawn(rng)
        one, other = map(addresses, views)
        found = region(views[0]).overlaps(region(views[1]))
        assert found == region(views[1]).overlaps(region(views[0])) == bool(set(one) & set(other)), views
        within = region(views[0]).overlaps_itself
        assert within == (len(set(one)) < len(one)), views[0]
        seen.add((found, within))
    assert len(seen) == 4


def test_regions_of_a_tensor_end_with_its_last_byte():
    matrix = torch.zeros(4, 6)
    [found] = regions_of("t", whole((4, 2), (0,)), matrix[:, 2:4])
    assert (found.begin, found.end) == (matrix.data_ptr() + 8, matrix.data_ptr() + (3 * 6 + 4) * 4)
    assert not list(regions_of("t", whole((4, 2), (0,)), torch.zeros(4, 2, device="meta")))
