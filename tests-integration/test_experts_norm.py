"""Norms of gradients of layers with experts: who counts what is said by records alone."""

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import ExpertConfig, PartialGradientReducer, initialize, layer_set
from par_precision import clip_grad_norm_
from par_testing import assert_equal_to_one_device, storm

WORLDS = {
    2: [{"expert": 2}, {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}}],
    4: [
        {"expert": 2},
        {"expert": 4},
        {"expert": 2, "tensor": {"size": 2, "mode": "1d"}},
        {"expert": {"size": 4, "tensor": 1}, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}},
        {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}, "sequence": 2},
        {"expert": 2, "sequence": 2},
    ],
}
NORM = 1e-6
"""Norms are given in fp32."""
CLIPPED = 1e-6
"""So is what gradients are multiplied by."""


def tokens(replica):
    """The activation of one of the ranks that see other tokens."""
    generator = torch.Generator().manual_seed(replica)
    return torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)


def mixture(layers):
    """Experts, shared ones, and a router, in fp64."""
    layer = layers.MoE(8, 6, num_experts=8, top_k=2, num_shared_experts=1, expert=ExpertConfig(bias=True))
    initialize(layer, seed=2, dtype=torch.float64)
    return layer


@pytest.mark.ranks([storm(2), 4])
def test_the_norm_counts_every_expert_once_megatron_5916():
    """Clipped gradients are those of one device, too. There, experts of tensor x expert ranks were missing."""
    dense = ("data", "sequence", "expert")
    for parallel in WORLDS[dist.get_world_size()]:
        with ProcessGroups(Topology.from_config(parallel, dist.get_world_size())) as groups:
            layers = layer_set("auto", groups)
            layer, whole = mixture(layers), mixture(layer_set(None))
            replicas = groups.size(dense)
            layer(layers.split(tokens(groups.rank(dense)))).square().sum().backward()
            PartialGradientReducer(layer, groups).handle_gradient()
            for name, parameter in layer.named_parameters():
                axes = ("data", "expert_data") if name.startswith("experts.") else dense
                if groups.size(axes) > 1:
                    dist.all_reduce(parameter.grad, group=groups[axes])
                parameter.grad /= replicas
            for replica in range(replicas):
                (whole(tokens(replica)).square().sum() / replicas).backward()
            expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            assert expected > 1.0
            norm = clip_grad_norm_(layer, 0.5, dist.group.WORLD)
            torch.testing.assert_close(
                norm.double(), expected, rtol=NORM, atol=0.0, msg=lambda m, p=parallel: f"{p}: {m}"
            )
            assert_equal_to_one_device(
                layer, whole, gradients=True, rtol=CLIPPED, atol=1e-12, reason="the factor has fp32's digits"
            )
