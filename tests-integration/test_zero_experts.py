"""MoE layers under par-zero: experts are shared by who has copies of them, everything else by all data ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology
from par_layers import PartialGradients, initialize, layer_set
from par_precision import clip_grad_norm_
from par_testing import assert_equal_to_one_device
from par_zero import Share, shard

DENSE = ("data", "sequence", "expert")
ROWS = (2, 0, 1, 3)
"""Rows of tokens of each replica; one has none."""

WORLDS = {
    2: [{"expert": 2}, {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}}],
    4: [
        {"expert": 2},
        {"expert": 4},
        {"expert": {"size": 4, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}},
        {"expert": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}},
        {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 4, "mode": "1d"}},  # copies beyond the data ranks
    ],
}


class Stack(nn.Module):
    """Experts between norms, of which a rank may leave one out."""

    def __init__(self, layers):
        super().__init__()
        kinds = [layers.LayerNorm, layers.MoE, layers.LayerNorm, layers.MoE, layers.LayerNorm]
        options = {layers.MoE: (6, 4, 2), layers.LayerNorm: ()}
        self.blocks = nn.ModuleList(kind(8, *options[kind]) for kind in kinds)
        initialize(self, seed=2, dtype=torch.float64)

    def forward(self, x, left_out):
        for number, block in enumerate(self.blocks):
            if number != left_out:
                x = x + block(x)
        return x


def adamw(module):
    """With an `eps` far above rounding, else a gradient that is nothing but rounding makes a step of full size."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def tokens(step, replica):
    """They ask for a gradient, so that all ranks exchange in backward, one too that leaves out what is below."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(ROWS[replica], 4, 8, generator=generator, dtype=torch.float64, requires_grad=True)


def left_out(step, replica):
    """The last norm, and then the first one, on one replica; it takes part in all exchanges."""
    return {(1, 1): 4, (2, 0): 0}.get((step, replica), -1)


def alone(replicas):
    """The model on one device after three steps, and the norm of each."""
    model = Stack(layer_set(None))
    optimizer, norms = adamw(model), []
    for step in range(3):
        optimizer.zero_grad()
        for replica in range(replicas):
            model(tokens(step, replica), left_out(step, replica)).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 10.0))
        optimizer.step()
    return model, norms


def check_like_one_device(parallel, stage):
    with ProcessGroups(Topology.from_config(parallel, dist.get_world_size()), declare=[DENSE]) as groups:
        layers = layer_set("auto", groups)
        model, replicas, replica = Stack(layers), groups.size(DENSE), groups.rank(DENSE)
        optimizer = adamw(model)
        experts = [each for block in model.blocks[1::2] for each in block.experts.parameters()]
        others = [Share(groups["data", "expert_data"], parameters=experts)]
        shard(model, optimizer, stage=stage, group=groups[DENSE], others=others, bucket=500)
        partial, norms = PartialGradients(optimizer, groups), []
        for step in range(3):
            optimizer.zero_grad()
            y = layers.gather(model(layers.split(tokens(step, replica)), left_out(step, replica)))
            (y.square().sum() * replicas).backward()
            partial.handle_gradient()
            norms.append(clip_grad_norm_(optimizer, 10.0, dist.group.WORLD).double())
            optimizer.step()
        whole, expected = alone(replicas)
        torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0.0, msg=lambda m: f"norms in fp32: {m}")
        reason = "sums in another order, clipped by a factor of fp32, over three steps"
        assert_equal_to_one_device(model, whole, rtol=1e-6, atol=1e-7, reason=reason)


def check_all(stages, worlds):
    for stage, parallel in itertools.product(stages, worlds):
        try:
            check_like_one_device(parallel, stage)
        except BaseException as error:
            error.add_note(f"stage {stage} in {parallel}")
            raise


@pytest.mark.ranks(4, timeout=60)
def test_experts_under_zero_train_as_on_one_device():
    check_all((1, 3), WORLDS[4][2:])


@pytest.mark.ranks([2, 4], timeout=120)
@pytest.mark.storm
def test_experts_in_any_world_train_at_every_stage_as_on_one_device():
    check_all((0, 1, 2, 3), WORLDS[dist.get_world_size()])
