"""What autograd keeps, by mode: shapes alone matter, so one rank of each world is simulated on the fake backend."""

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_layers.examples.gpt import Block
from par_testing import saved_bytes

B, S, H = 16, 16, 32


def kept(world, tensor, make, features, *, inner=False):
    """Bytes that rank 0 of a world saves in the forward of a layer."""
    dist.init_process_group("fake", rank=0, world_size=world)
    layers = layer_set("auto", ProcessGroups(Topology.from_config({"tensor": {"size": world, **tensor}}, world)))
    module = make(layers)
    initialize(module, seed=0)
    layout = layers.rules.inner if inner else layers.rules.residual
    sizes = [layers.grid.size(axes) for axes in (layout.batch, layout.sequence, layout.features)]
    x = torch.randn(B // sizes[0], S // sizes[1], features // sizes[2], requires_grad=True)
    result = saved_bytes(lambda: module(x), module.parameters())
    dist.destroy_process_group()
    return result


def block(layers):
    return Block(layers, H, 8, 8)


@pytest.mark.ranks(1, init=False)
def test_at_equal_world_size_2d_to_3d_save_less_than_1d():
    for world, modes in {4: [{"mode": "2d"}], 8: [{"mode": "2.5d", "depth": 2}, {"mode": "3d"}]}.items():
        in_1d = kept(world, {"mode": "1d"}, block, H)
        for tensor in modes:
            assert kept(world, tensor, block, H) < 0.6 * in_1d


@pytest.mark.ranks(1, init=False)
def test_linears_save_their_shards_and_nothing_that_was_gathered():
    whole = 4 * B * S * H  # bytes of an input [B, S, H], fp32
    shard = {
        (4, "1d", False): whole,
        (4, "1d", True): whole // 4,
        (4, "2d", None): whole // 4,
        (8, "2.5d", None): whole // 8,
        (8, "3d", None): whole // 8,
    }
    for (world, mode, sequence), expected in shard.items():
        options = {"depth": 2} if mode == "2.5d" else {"sequence_parallel": True} if sequence else {}
        tensor = {"mode": mode, **options}
        assert kept(world, tensor, lambda layers: layers.ColumnLinear(H, 4 * H), H) == expected
        rows = kept(world, tensor, lambda layers: layers.RowLinear(4 * H, H), 4 * H, inner=True)
        assert rows == 4 * whole // world
