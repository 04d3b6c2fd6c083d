import pickle

import pytest
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers.layers.parameter import Rows, constant, make_parameter
from par_layers.modes.grid import Grid

TENSOR = {"tensor": {"size": 2, "mode": "1d"}}


def experts_on(grid):
    """A weight [8 experts, 6, 3] as it lies on this rank: dealt out over expert_parallel, cut over expert_tensor."""
    axes = ("expert_parallel",)
    weight = make_parameter([Rows(length=8, axes=axes)], [(6, ("expert_tensor",)), (3, ())], grid, constant(0.0))
    (box,) = weight.par_sharding.boxes
    return box


@pytest.mark.ranks(4)
def test_a_grid_over_the_view_of_experts_cuts_and_copies_as_the_view_says():
    rank = dist.get_rank()
    for expert, start, size, copies in [
        ({"size": 4, "tensor": 1}, (2 * rank, 0, 0), (2, 6, 3), (rank,)),
        ({"size": 2, "tensor": 1}, (4 * (rank % 2), 0, 0), (4, 6, 3), (rank % 2, rank % 2 + 2)),
        ({"size": 2, "tensor": 2}, (4 * (rank // 2), 3 * (rank % 2), 0), (4, 3, 3), (rank,)),
        (1, (0, 3 * (rank % 2), 0), (8, 3, 3), (rank % 2, rank % 2 + 2)),
    ]:
        with ProcessGroups(Topology.from_config({**TENSOR, "expert": expert}, 4)) as groups:
            box = experts_on(Grid(groups, view="experts"))
            assert (box.start, box.size, tuple(box.copies)) == (start, size, copies)


@pytest.mark.ranks(2)
def test_a_grid_over_experts_where_none_are_spread_is_that_of_the_tensor_ranks():
    with ProcessGroups(Topology.from_config(TENSOR, 2)) as groups:
        grid = Grid(groups, view="experts")
        assert grid.size(("expert_parallel",)) == 1
        assert grid.index(("expert_tensor",)) == dist.get_rank()
        assert grid.group(("expert_tensor",)) is groups["tensor"]
        assert grid.larger(("expert_parallel", "expert_tensor")) == ("tensor",)
    with ProcessGroups(Topology({"data": 2})) as groups:
        assert Grid(groups, view="experts").size(("expert_tensor", "expert_parallel")) == 1
        with pytest.raises(ValueError, match="no view 'expertz'; views are"):
            Grid(groups, view="expertz")


def test_one_device_has_every_expert():
    grid = pickle.loads(pickle.dumps(Grid(None, view="experts")))
    assert grid.view == "experts"
    assert experts_on(grid).size == (8, 6, 3)
