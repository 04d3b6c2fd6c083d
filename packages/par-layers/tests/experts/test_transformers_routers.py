"""Routers and losses of balance against those of transformers."""

import pytest
import torch

from par_layers import LoadBalancing, Router, RouterConfig, RouterLosses

from ..helpers import numbers

transformers = pytest.importorskip("transformers", minversion="5.23")

HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 8, 3, 33


def dense(ids, gates):
    """The gates of all experts, since of equally good ones the order is nobody's business, [M, E]."""
    return torch.zeros(len(ids), EXPERTS, dtype=gates.dtype).scatter(1, ids, gates)


def assert_equal_to(theirs, ours, dtype, exact):
    """Gates, and the gradients of x and of every parameter."""
    with torch.no_grad():
        for number, parameter in enumerate(theirs.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=number))
    theirs.to(dtype)
    ours.to(dtype).load_state_dict(theirs.state_dict())
    x = numbers(TOKENS, HIDDEN, dtype=dtype)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    routing = ours(mine)
    _, gates, ids = theirs(other)
    here, there = dense(routing.ids, routing.gates), dense(ids, gates)
    torch.testing.assert_close(here, there, rtol=exact, atol=exact)
    upstream = numbers(TOKENS, EXPERTS, dtype=dtype)
    here.backward(upstream)
    there.backward(upstream)
    torch.testing.assert_close(mine.grad, other.grad, rtol=exact, atol=exact)
    for (name, parameter), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad, reference.grad, rtol=exact, atol=exact, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_gates_and_gradients_are_those_of_mixtral():
    config = transformers.MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    assert_equal_to(
        transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter(config),
        Router(HIDDEN, EXPERTS, TOP_K),
        torch.float32,
        0.0,
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_gates_and_gradients_are_those_of_qwen3_moe(normalise):
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=normalise
    )
    assert_equal_to(
        transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter(config),
        Router(HIDDEN, EXPERTS, TOP_K, config=RouterConfig(norm_topk_prob=normalise)),
        torch.float32,
        0.0,
    )


def test_gates_and_gradients_are_those_of_deepseek_v3_with_groups_and_a_bias_of_the_choice():
    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    theirs = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    theirs.e_score_correction_bias.copy_(numbers(EXPERTS, seed=8))
    options = {
        "config": RouterConfig(
            scoring_func="sigmoid", routed_scaling_factor=2.5, n_group=4, topk_group=2, correction_bias=True
        )
    }
    exact = 2e-6  # theirs adds the gates of a token in another order, in fp32
    assert_equal_to(theirs, Router(HIDDEN, EXPERTS, TOP_K, **options), torch.float32, exact)


def test_gates_and_gradients_are_those_of_gpt_oss():
    config = transformers.GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    ours = Router(HIDDEN, EXPERTS, TOP_K, config=RouterConfig(bias=True))
    assert_equal_to(
        transformers.models.gpt_oss.modeling_gpt_oss.GptOssTopKRouter(config), ours, torch.float64, 1e-12
    )  # softmax of the chosen, or of all


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_balance_is_that_of_transformers_by_the_number_of_chosen_experts(masked):
    function = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    router = Router(HIDDEN, EXPERTS, TOP_K, balance=LoadBalancing(aux_loss_coef=1.0, scope="microbatch"))
    router.load_state_dict({"weight": numbers(EXPERTS, HIDDEN, seed=1)})
    mask = torch.arange(TOKENS) % 5 > 0 if masked else None
    x = numbers(TOKENS, HIDDEN, dtype=torch.float32)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    router(mine, mask).gates.mul(0.0).sum().backward()  # whoever uses the gates has the loss
    gradient, router.weight.grad = router.weight.grad, None
    logits = router(other, mask).logits
    expected = function((logits,), EXPERTS, TOP_K, None if mask is None else mask.unsqueeze(0))
    expected.backward()
    exact = {"rtol": 1e-5, "atol": 1e-7}  # fp32, and sums in another order
    torch.testing.assert_close(mine.grad * TOP_K, other.grad, **exact)
    torch.testing.assert_close(gradient * TOP_K, router.weight.grad, **exact)
    assert RouterLosses(router).take()["aux"].item() * TOP_K == pytest.approx(expected.item(), rel=1e-6)
