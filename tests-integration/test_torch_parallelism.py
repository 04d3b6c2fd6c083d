"""Groups and meshes of ours under torch's own parallel wrappers, against one device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from par_groups import ProcessGroups, Topology
from par_testing import assert_equal_to_one_device, storm

STEPS, BATCH = 5, 12


def make_model(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 24), nn.GELU(), nn.Linear(24, 17)).double().to(device)


def batches(device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 15, generator=generator, dtype=torch.float64).to(device)


def train(model, device, part=slice(None)):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(device):
        model(batch[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def rank_device(device):
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device(device)


def share(groups, axes):
    """This rank's slice of the global batch."""
    each = BATCH // groups.size(axes)
    return slice(groups.rank(axes) * each, (groups.rank(axes) + 1) * each)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's word on views, at its own output
@pytest.mark.ranks(4)
@pytest.mark.parametrize("parallel", [storm("ddp"), storm("fsdp"), "fsdp-tensor"])
def test_torchs_wrappers_on_our_groups_equal_one_device(parallel, device):
    on = rank_device(device)
    whole = train(make_model(on), on)
    tensor = 2 if parallel == "fsdp-tensor" else 1
    topology = Topology.from_config({"tensor": {"size": tensor, "mode": "1d"}}, 4)
    with ProcessGroups(topology, device=on) as groups:
        model = make_model(on)
        if parallel == "ddp":
            model = train(
                DistributedDataParallel(model, process_group=groups["data"]), on, share(groups, "data")
            ).module
        else:
            mesh = groups.mesh(("data", "tensor"))
            if tensor > 1:
                parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            model = train(fully_shard(model, mesh=mesh["data"]), on, share(groups, "data"))
        assert_equal_to_one_device(
            model, whole, rtol=1e-9, atol=1e-12, reason="fp64 sums over ranks in another order, through five Adam steps"
        )
