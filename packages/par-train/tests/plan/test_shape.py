"""The planner's numbers of parameters, against models that are made."""

import pytest
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import layer_set
from par_plan import Shape
from par_plan.shape import ModelSlice, count, tensor_split
from par_train.jobs.byte_gpt import make_gpt
from par_train.jobs.options import ModelOptions

SIZES = {"layers": 3, "width": 48, "heads": 4, "context": 12}


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_of_one_device(tied):
    model = make_gpt(ModelOptions(**SIZES, tied=tied))
    shape = Shape(**SIZES, tied=tied)
    assert shape.parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.ranks(1, init=False)
def test_the_parameters_of_a_rank_in_every_mode():
    modes = {
        4: [{"mode": "1d"}, {"mode": "1d", "sequence_parallel": True}, {"mode": "2d"}],
        8: [{"mode": "2.5d", "depth": 2}, {"mode": "3d"}],
    }
    for world, tensors in modes.items():
        for tensor in tensors:
            for tied in (False, True):
                assert_counted(world, tensor, tied)


def assert_counted(world, tensor, tied):
    dist.init_process_group("fake", rank=0, world_size=world)
    topology = Topology.from_config({"tensor": {"size": world, **tensor}}, world)
    model = make_gpt(ModelOptions(**SIZES, tied=tied), layer_set("auto", ProcessGroups(topology)))
    counted = count(Shape(**SIZES, tied=tied), tensor_split(topology), ModelSlice(blocks=3, first=True, last=True))
    parameters = list(model.parameters())
    dist.destroy_process_group()
    assert counted.total == sum(each.numel() for each in parameters), (tensor, tied)
    assert counted.tensors == len(parameters)
    assert counted.largest == max(each.numel() for each in parameters)
