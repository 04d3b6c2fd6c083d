"""Ranks on several machines, as host names say: a stand-in in one world. tests-integration/hosts has real ones."""

import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_checkpoint import load, save
from par_checkpoint.storage.local import LocalSource

SHAPES = {"rows": (1024, 77), "columns": (513, 2048), "all": (3, 70001)}
CUTS = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", [1, 2])
def test_what_is_read_by_ranks_on_one_machine_and_on_two(tmp_path, hosts):
    """Across machines every byte is read once, by one rank, and handed on; on one, ranks share the page cache."""
    torch.manual_seed(0)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    read, read_into = [], LocalSource.read_into

    def counted(source, begin, view):
        read.append(len(view))
        read_into(source, begin, view)

    def cut(shape, values):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        return {name: distribute_tensor(values[name], mesh, [Replicate(), CUTS[name]]) for name in values}

    with mock.patch.object(socket, "gethostname", return_value=f"host{dist.get_rank() * hosts // 4}"):
        save(tmp_path / "c", model=cut((2, 2), values), max_shard_size="3MB")
        for shape in ((1, 4), (4, 1)):
            model = cut(shape, {name: torch.zeros(size) for name, size in SHAPES.items()})
            read.clear()
            with mock.patch.object(LocalSource, "read_into", counted):
                load(tmp_path / "c", model=model)
            assert all(torch.equal(model[name].full_tensor(), values[name]) for name in values)
            total = torch.tensor(float(sum(read)))
            dist.all_reduce(total)
            stored = sum(value.nbytes for value in values.values())
            assert stored <= total <= (1.1 * stored if hosts == 2 else 4.1 * stored)
