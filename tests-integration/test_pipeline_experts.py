"""Mixtures of experts in pipelines, of which some stages have none: the gradients and counts of one device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology
from par_layers import LoadBalancing, RouterConfig, RouterLosses, initialize, layer_set, update_correction_bias_
from par_pipeline import Pipeline, one_f_one_b, zb_h1
from par_testing import assert_equal_to_one_device

WIDTH, LENGTH, MICROBATCHES = 8, 4, 3
DENSE = ("data", "sequence", "expert")
EXACT = 1e-10
"""Sums over ranks and microbatches in another order, in fp64."""


class Stage(nn.Module):
    """A linear, and experts after it in the stages that have some."""

    def __init__(self, layers, number, has_experts):
        super().__init__()
        self.inner = layers.RMSNorm(WIDTH)
        self.moe = None
        if has_experts:
            balance = LoadBalancing(aux_loss_coef=0.1, scope="microbatch", z_loss_coef=0.01, bias_update_rate=0.01)
            self.moe = layers.MoE(
                WIDTH, 6, 4, 2, num_shared_experts=1, balance=balance, router=RouterConfig(correction_bias=True)
            )
        initialize(self, seed=3, prefix=f"{number}.", dtype=torch.float64)

    def forward(self, x):
        x = self.inner(x)
        return x if self.moe is None else x + self.moe(x)


def mse(output, target):
    return (output - target).square().mean()


def data(step, replica):
    generator = torch.Generator().manual_seed(10 * step + replica)
    shape = (2 * MICROBATCHES, LENGTH, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("make", [pytest.param(one_f_one_b, marks=pytest.mark.storm), zb_h1])
@pytest.mark.ranks(4, timeout=90)
def test_a_stage_without_experts_trains_beside_one_with_megatron_0_11(make):
    """There, such a stage hung. Under zb_h1 the gradients of experts' weights come after those of activations."""
    for with_experts in ((1,), (0,)):
        topology = Topology.from_config({"pipeline": 2, "expert": 2}, 4)
        with ProcessGroups(topology, declare=[DENSE]) as groups:
            number, replica = groups.rank("pipeline"), groups.rank(DENSE)
            module = Stage(layer_set("auto", groups), number, number in with_experts)
            run = Pipeline(module, make(2, MICROBATCHES), groups["pipeline"], loss_fn=mse)
            whole = nn.Sequential(*(Stage(layer_set(None), stage, stage in with_experts) for stage in range(2)))
            RouterLosses(module).scale = 1 / MICROBATCHES
            RouterLosses(whole).scale = 1 / MICROBATCHES / 2
            for step in range(2):
                x, y = data(step, replica)
                run.step(x, target=y)
                for other in range(2):
                    for part in zip(*(each.chunk(MICROBATCHES) for each in data(step, other)), strict=True):
                        (mse(whole(part[0]), part[1]) / MICROBATCHES / 2).backward()
                update_correction_bias_(module, groups)
                update_correction_bias_(whole)
            for name, parameter in module.named_parameters():
                if not name.startswith("moe.experts."):
                    dist.all_reduce(parameter.grad, group=groups[DENSE])
                parameter.grad /= 2
            reason = "sums over ranks and microbatches are in another order"
            assert_equal_to_one_device(module, whole[number], rtol=EXACT, atol=EXACT, reason=reason, gradients=True)
            if module.moe is not None:
                gate, one = module.moe.gate, whole[number].moe.gate
                assert torch.equal(gate.e_score_correction_bias, one.e_score_correction_bias)
                assert gate.e_score_correction_bias.any()
