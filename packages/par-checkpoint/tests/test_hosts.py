"""Ranks on several machines, as host names say: a stand-in in one world. tests-integration/hosts has real ones."""

import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_checkpoint import Format, load, save
from par_checkpoint.storage.local import LocalSource
from par_checkpoint.transfer.ranks import Ranks
from par_groups import set_sharding
from par_testing import default_device_type, storm

from .helpers import rectangle

SHAPES = {"rows": (1024, 77), "columns": (513, 2048), "all": (3, 70001)}
CUTS = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}


def cut(shape, values):
    mesh = init_device_mesh(default_device_type(), shape, mesh_dim_names=("data", "tensor"))
    return {name: distribute_tensor(values[name], mesh, [Replicate(), CUTS[name]]) for name in values}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", [storm(1), 2])
def test_what_is_read_by_ranks_on_one_machine_and_on_two(tmp_path, hosts):
    """Across machines every byte is read once, by one rank, and handed on; on one, ranks share the page cache."""
    torch.manual_seed(0)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    read, read_into = [], LocalSource.read_into

    def counted(source, begin, view):
        read.append(len(view))
        read_into(source, begin, view)

    with mock.patch.object(socket, "gethostname", return_value=f"host{dist.get_rank() * hosts // 4}"):
        save(tmp_path / "c", model=cut((2, 2), values), format=Format(max_shard_size="3MB"))
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


@pytest.mark.ranks(4)
def test_each_byte_crosses_to_a_host_once_and_a_rank_meets_few(tmp_path):
    values = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in SHAPES.items()}
    stored = sum(value.nbytes for value in values.values())
    few = 1 << 14  # bytes of checksums, and of what lets each piece begin at an even place
    rank, receive = dist.get_rank(), Ranks.receive
    crossed, sources = [], set()

    def counted(ranks, buffer, source):
        sources.add(source)
        crossed.append(buffer.numel() * (hosts[source] != hosts[rank]))
        return receive(ranks, buffer, source)

    def moved():
        total = torch.tensor(sum(crossed))
        dist.all_reduce(total)
        crossed.clear()
        return total

    for hosts in ([0, 0, 0, 1], [0, 0, 1, 1]):
        group = dist.new_group(backend="gloo")  # one that has not asked for hosts yet
        with (
            mock.patch.object(socket, "gethostname", return_value=f"host{hosts[rank]}"),
            mock.patch.object(Ranks, "receive", counted),
        ):
            save(tmp_path / f"{hosts}", model=cut((2, 2), values), group=group, format=Format(max_shard_size="3MB"))
            assert moved() < few or hosts == [0, 0, 0, 1]  # where rank 3 has the other half of the columns from afar
            for shape in ((4, 1), (2, 2)):
                model = cut(shape, {name: torch.zeros(size) for name, size in SHAPES.items()})
                sources.clear()
                load(tmp_path / f"{hosts}", model=model, group=group)
                assert all(torch.equal(model[name].full_tensor(), values[name]) for name in values)
                assert stored / 2 < moved() <= stored + few
                assert sources <= {rank ^ 1, rank ^ 2} or hosts == [0, 0, 0, 1]


@pytest.mark.storm
@pytest.mark.ranks([8, 64])
def test_ranks_of_hosts_of_eight_open_as_many_sockets_as_the_page_says(tmp_path):
    """No full mesh: a rank meets those 1, 2, 4, ... away on either side, and in a load as many as its replicas need."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts, receive, send = size // 8, Ranks.receive, Ranks.send
    met = set()

    def sockets():
        return sum(link.is_socket() for link in Path("/proc/self/fd").iterdir())

    def noted(act):
        def call(ranks, buffer, peer):
            met.add(peer)
            return act(ranks, buffer, peer)

        return call

    whole, first = torch.randn(64 * size, 4096, generator=torch.Generator().manual_seed(0)), 64 * rank  # a MiB each
    rows = whole[first : first + 64].clone()
    set_sharding(rows, rectangle(tuple(whole.shape), 0, first, first + 64, rank))
    model = {"rows": rows, "all": whole[:7].clone()}
    before = sockets()
    with mock.patch.object(socket, "gethostname", return_value=f"host{rank // 8}"):
        for _ in range(2):
            save(tmp_path / "c", model=model, async_=True, overwrite=True).wait()
        steps = {1 << power for power in range((size - 1).bit_length())}
        known = {(rank + sign * step) % size for step in steps for sign in (1, -1)}
        assert len(known) == {8: 5, 64: 11}[size]
        assert sockets() - before == len(known) + 1  # and one that listens
        for tensor in model.values():
            tensor.zero_()
        with mock.patch.object(Ranks, "receive", noted(receive)), mock.patch.object(Ranks, "send", noted(send)):
            load(tmp_path / "c", model=model)
    assert torch.equal(model["all"], whole[:7])
    assert torch.equal(rows, whole[first : first + 64])
    assert len(met) <= max(hosts - 1, 2 * (hosts - 1).bit_length()) + 7  # few hosts are given all by the first one


@pytest.mark.storm
@pytest.mark.ranks(3)
def test_a_replica_that_rounds_what_it_loads_hands_on_the_bytes_of_the_file(tmp_path):
    value = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    save(tmp_path / "c", model={"w": value})
    mine = torch.zeros_like(value, dtype=torch.float32 if dist.get_rank() == 2 else torch.bfloat16)
    with mock.patch.object(socket, "gethostname", return_value=f"host{min(dist.get_rank(), 1)}"):
        load(tmp_path / "c", model={"w": mine}, dtype=torch.bfloat16, group=dist.new_group(backend="gloo"))
    assert torch.equal(mine, value.to(mine.dtype))
