"""Layers on one device against the blocks of transformers' models, whose weights they take by name, in fp64."""

from importlib import import_module

import pytest
import torch

from par_layers import ExpertConfig, RouterConfig, initialize, layer_set
from par_testing import keep_fp64

from ..helpers import numbers

transformers = pytest.importorskip("transformers", minversion="5.23")

EXACT = 1e-12
"""Sums in another order, in fp64."""

GROUPS = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}

BLOCKS = {
    "Mixtral": ("MixtralSparseMoeBlock", {"intermediate_size": 12, "num_local_experts": 8}, {}),
    "Qwen3Moe": (
        "Qwen3MoeSparseMoeBlock",
        {"moe_intermediate_size": 12, "num_experts": 8, "norm_topk_prob": False},
        {"router": RouterConfig(norm_topk_prob=False)},
    ),
    "Qwen2Moe": (
        "Qwen2MoeSparseMoeBlock",
        {
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 24,
        },
        {"num_shared_experts": 2, "shared_expert_gate": True},
    ),
    "DeepseekV3": (
        "DeepseekV3MoE",
        {"moe_intermediate_size": 12, "n_routed_experts": 8, "n_shared_experts": 2, **GROUPS},
        {
            "num_shared_experts": 2,
            "router": RouterConfig(
                scoring_func="sigmoid", routed_scaling_factor=2.5, n_group=4, topk_group=2, correction_bias=True
            ),
        },
    ),
    "GptOss": (
        "GptOssMLP",
        {"intermediate_size": 12, "num_local_experts": 8},
        {
            "router": RouterConfig(bias=True),
            "expert": ExpertConfig(bias=True, activation="clamped_swiglu", interleaved=True, transposed=True),
        },
    ),
}
"""By family: the block, what its config says, and the same for our layer."""

RENAMED = {"GptOss": {"router.": "gate."}, "Qwen2Moe": {"shared_expert.": "shared_experts."}}
"""Where a family has other names than most."""


def ours_of(family, name):
    for theirs, ours in RENAMED.get(family, {}).items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("family", BLOCKS)
def test_outputs_and_gradients_are_those_of_the_block(family):
    stem, sizes, options = BLOCKS[family]
    config = getattr(transformers, f"{family}Config")(hidden_size=16, num_experts_per_tok=3, **sizes)
    config._experts_implementation = "eager"  # the grouped product has no fp64
    module = {"Qwen3Moe": "qwen3_moe", "Qwen2Moe": "qwen2_moe", "DeepseekV3": "deepseek_v3", "GptOss": "gpt_oss"}
    name = module.get(family, family.lower())
    theirs = getattr(import_module(f"transformers.models.{name}.modeling_{name}"), stem)(config).double()
    with torch.no_grad():
        for number, tensor in enumerate([*theirs.parameters(), *theirs.buffers()]):
            tensor.copy_(numbers(*tensor.shape, seed=number))
    ours = layer_set(None).MoE(16, 12, num_experts=8, top_k=3, **options)
    initialize(ours, seed=None, dtype=torch.float64)
    ours.load_state_dict({ours_of(family, name): tensor for name, tensor in theirs.state_dict().items()})
    x = numbers(2, 9, 16, seed=40)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with keep_fp64():
        expected = theirs(other)
    expected = expected[0] if isinstance(expected, tuple) else expected
    y = ours(mine)
    torch.testing.assert_close(y, expected, rtol=EXACT, atol=EXACT)
    upstream = numbers(2, 9, 16, seed=41)
    y.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(mine.grad, other.grad, rtol=EXACT, atol=EXACT)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert len(gradients) == len(list(theirs.parameters()))
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[ours_of(family, name)], parameter.grad, rtol=EXACT, atol=EXACT)
