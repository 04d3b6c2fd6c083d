import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from par_groups import Box, ProcessGroups, Sharding, Topology, gradients, set_sharding, sharding_of, to_dtensor


def check_boxes(tensor, whole):
    """Every box of a DTensor's local tensor holds that rectangle of the whole one, and the boxes hold all of it."""
    sharding, local = sharding_of(tensor), tensor.to_local()
    assert sharding.shape == tuple(whole.shape)
    assert sharding.local_numel == local.numel()
    for box in sharding.boxes:
        assert box.of(local).equal(whole[box.slices])
    assert dist.get_rank() in {rank for box in sharding.boxes for rank in box.copies} or local.numel() == 0


def check_owned_once(tensor):
    """Over the world, and over every line of the mesh that covers the tensor, each element is counted once."""
    mesh = tensor.device_mesh
    lines = [mesh.mesh.flatten().tolist()]
    for dim in range(mesh.ndim):
        others = [each for position, each in enumerate(tensor.placements) if position != dim]
        if all(isinstance(each, Replicate) for each in others):
            lines.append(dist.get_process_group_ranks(mesh.get_group(dim)))
    by_line = []
    for ranks in lines:
        counts = torch.zeros(tensor.shape)
        for box in sharding_of(tensor).boxes:
            if box.owns(dist.get_rank(), set(ranks)):
                counts[box.slices] += 1
        by_line.append(counts)
    counts = torch.stack(by_line)
    every = [torch.zeros_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(every, counts)
    for number, ranks in enumerate(lines):
        assert sum(every[rank][number] for rank in ranks).eq(1).all()


@pytest.mark.ranks(4)
def test_boxes_of_every_placement_agree_with_dtensors_own_full_tensor():
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    on_line = [(each,) for each in (Replicate(), Shard(0), Shard(1), Shard(-1))]
    on_square = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
    for shape in ((8, 4), (5, 3), (1, 2), (17, 15)):
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
        for mesh, placements in itertools.chain(
            itertools.product([line], on_line), itertools.product([square], on_square)
        ):
            tensor = distribute_tensor(whole, mesh, placements)
            assert tensor.full_tensor().equal(whole)
            check_boxes(tensor, whole)
            check_owned_once(tensor)


@pytest.mark.ranks(4)
def test_five_rows_over_four_ranks_are_2_2_1_0():
    mesh = init_device_mesh("cpu", (4,))
    sharding = sharding_of(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]))
    assert sharding.local_numel // 3 == [2, 2, 1, 0][dist.get_rank()]


@pytest.mark.ranks(8)
def test_strided_shards_are_several_boxes():
    """FSDP (the slower mesh dims) over a dim that tensor parallelism (the fastest) cuts too."""
    for mesh_shape, rows in itertools.product(((2, 4), (4, 2)), (24, 8, 17)):
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
        for placements in (
            (_StridedShard(0, split_factor=mesh_shape[1]), Shard(0)),
            (_StridedShard(0, split_factor=3), Shard(1)),
            (_StridedShard(1, split_factor=2), Replicate()),
        ):
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            check_boxes(tensor, whole)
            check_owned_once(tensor)
            if rows % 8 == 0 and (placements[0].split_factor != 3 or torch.__version__ >= (2, 13)):  # 2.11 cannot
                check_boxes(tensor, tensor.full_tensor())


@pytest.mark.ranks(4)
def test_fsdp_over_tensor_parallel_is_read_even_where_rows_are_uneven():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for rows in (12, 10, 7):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, rows))
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            check_boxes(parameter, parameter.full_tensor())
            if rows % 4 == 0:
                assert parameter.full_tensor().equal(whole[name])
                check_owned_once(parameter)


@pytest.mark.ranks(2)
def test_partial_is_refused():
    tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(ValueError, match=r"holds terms of a sum.*redistribute"):
        sharding_of(tensor)


@pytest.mark.ranks(2)
def test_scalars_and_empty_tensors():
    mesh = init_device_mesh("cpu", (2,))
    assert sharding_of(distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])).boxes[0].size == ()
    assert sharding_of(distribute_tensor(torch.zeros(0, 3), mesh, [Shard(1)])).boxes == ()


@pytest.mark.ranks(2)
def test_gradients_of_fsdp_parameters_are_views_of_their_local_part():
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Linear(4, 3), mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    for name, box, view in gradients(model):
        local = dict(model.named_parameters())[name].grad.to_local()
        assert view.data_ptr() == local.data_ptr()
        assert view.shape == box.size


@pytest.mark.ranks(4)
def test_a_local_tensor_with_our_record_becomes_a_dtensor_and_back():
    rank = dist.get_rank()
    with ProcessGroups(Topology({"data": 2, "tensor": 2})) as groups:
        mesh = groups.mesh(("data", "tensor"))
        for shape, placements in itertools.product(
            ((5, 3), (4, 4), (3, 1)), itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2)
        ):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            reference = distribute_tensor(whole, mesh, placements)
            local = reference.to_local().clone()
            set_sharding(local, sharding_of(reference))
            made = to_dtensor(local, mesh)
            assert made.full_tensor().equal(whole)
            assert made.to_local().data_ptr() == local.data_ptr()
            assert to_dtensor(local, mesh, placements).placements == tuple(placements)
        row = Box((rank % 2 * 2, 0), (2, 3), 0, (3, 1), (rank % 2, rank % 2 + 2))
        local = torch.zeros(2, 3)
        set_sharding(local, Sharding((4, 3), (row,)))
        assert to_dtensor(local, mesh).placements == (Replicate(), Shard(0))


@pytest.mark.ranks(2)
def test_what_no_dtensor_can_say_is_refused():
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    with pytest.raises(ValueError, match="no Sharding on it"):
        to_dtensor(torch.zeros(2), mesh)
    fused = torch.zeros(6)
    set_sharding(
        fused, Sharding((12,), tuple(Box((part * 4 + 2 * rank,), (2,), part * 2, (1,), (rank,)) for part in range(3)))
    )
    with pytest.raises(ValueError, match="no placements give every rank of mesh"):
        to_dtensor(fused, mesh)
    with pytest.raises(ValueError, match=r"placements \(Shard\(dim=0\),\) do not give"):
        to_dtensor(fused, mesh, [Shard(0)])


@pytest.mark.ranks(3)
def test_what_does_not_fit_on_one_rank_is_refused_on_all():
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    begin, rows = ((0, 2), (2, 1), (3, 1))[rank]  # torch cuts 4 rows into 2, 2 and none, so rank 0 alone fits
    local = torch.zeros(rows, 3)
    set_sharding(local, Sharding((4, 3), (Box((begin, 0), (rows, 3), 0, (3, 1), (rank,)),)))
    with pytest.raises(ValueError, match="do not give every rank"):
        to_dtensor(local, mesh, [Shard(0)])
    unknown = local.clone() if rank == 1 else local
    with pytest.raises(ValueError, match="no Sharding on it" if rank == 1 else "no placements give every rank"):
        to_dtensor(unknown, mesh)
