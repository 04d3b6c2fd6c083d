"""par-groups on the GPUs of this machine. Runs with plain `pytest tests-integration/gpu` too."""

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology, launch, sharding_of
from par_testing import accelerator_type

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]


def test_world_of_one_gpu_uses_its_backend():
    with launch(timeout=60) as environment:
        assert environment.device.type == DEVICE
        assert dist.get_default_backend_for_device(DEVICE) in environment.backend
        value = torch.ones(3, device=environment.device)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1, 1]


def test_groups_of_one_gpu_share_the_default_communicator():
    with launch(timeout=60) as environment, ProcessGroups(Topology.from_config({}, 1)) as groups:
        assert groups.device == environment.device
        assert groups["data"] is groups["tensor"] is dist.group.WORLD
        value = torch.ones(2, device=environment.device)
        dist.all_reduce(value, group=groups["model"])
        assert value.tolist() == [1, 1]
        assert groups.mesh(("data", "tensor")).device_type == DEVICE


def test_boxes_are_views_on_the_gpu():
    tensor = torch.zeros(4, 4, device=DEVICE)
    sharding_of(tensor).boxes[0].of(tensor).fill_(3)
    assert tensor.eq(3).all()


def gpus():
    return torch.cuda.device_count()


@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")
@pytest.mark.ranks(2, init=False)
def test_every_axis_works_over_nccl():
    with launch(timeout=60) as environment:
        topology = Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)
        for _ in range(2):
            with ProcessGroups(topology) as groups:
                value = torch.full((1,), float(environment.rank), device=environment.device)
                dist.all_reduce(value, group=groups["tensor"])
                assert value.item() == 1
                dist.all_reduce(value, group=groups["data"])
                assert value.item() == 1
