"""Whole layers over ranks against the dense loop on one device: outputs and every gradient, in fp64."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

from par_layers import (
    ExpertConfig,
    Experts,
    Grid,
    LoadBalancing,
    Router,
    RouterConfig,
    TokenDispatcher,
    initialize,
    layer_set,
)
from par_testing import assert_equal_to_one_device, storm

from ..helpers import whole_state
from .dense import mixture
from .worlds import TOKENS, Tokens, world

EXACT = 1e-12
"""Sums of some hundred numbers of order 1 in another order, in fp64."""

WORLDS = {
    2: [
        {"expert": 2},
        {"tp": 2},
        {"expert": {"size": 2, "tensor": 1}, "tp": 2},
        {"expert": {"size": 2, "tensor": 1}, "sp": 2},
        {"expert": {"size": 1, "tensor": 1}, "tp": 2},
        {"sp": 2},
    ],
    4: [
        {"expert": 4},
        {"expert": 2},
        {"expert": 2, "tp": 2},
        {"expert": 2, "sp": 2},
        {"expert": {"size": 4, "tensor": 1}, "tp": 2},
        {"expert": {"size": 4, "tensor": 1}, "sp": 2},
        {"expert": {"size": 2, "tensor": 1}, "sp": 2},
        {"expert": {"size": 2, "tensor": 1}, "tp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "sp": 2, "sequence": 2},
        {"expert": {"size": 2, "tensor": 2}, "sp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "sequence": 2},
        {"expert": 2, "sequence": 2},
    ],
    8: [
        {"expert": 4, "tp": 2},
        {"expert": {"size": 4, "tensor": 2}, "sp": 2, "sequence": 2},
        {"expert": {"size": 2, "tensor": 2}, "tp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "sp": 2, "sequence": 2},
        {"expert": {"size": 2, "tensor": 1}, "tp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "tp": 2, "sequence": 4},
        {"expert": {"size": 8, "tensor": 1}, "sp": 2},
        {"expert": 2, "sp": 2, "sequence": 2},
        {"expert": 4},
    ],
}
"""By number of ranks: every expert parallelism with experts that are whole or cut, with and without copies of them."""


def check_equal_to_the_loop(parallel, tokens, **options):
    """Forward and backward of a layer in a world, and of the loop over the tokens of all replicas."""
    with world(parallel) as here:
        parts = here.groups.size("expert_parallel") if "experts" in here.groups.topology.views else 1
        parallel_layer, whole = (tokens.make(layers, parts, **options) for layers in (here.layers, layer_set(None)))
        mine = tokens.of(here.replica).requires_grad_()
        weights = [torch.randn_like(tokens.of(replica)) for replica in range(here.replicas)]
        for replica, weight in enumerate(weights):
            weight.copy_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(replica), dtype=weight.dtype)
            )
        y = here.layers.gather(parallel_layer(here.layers.split(mine)))
        (y * weights[here.replica]).sum().backward()
        here.average_(parallel_layer)
        state = dict(whole.named_parameters())
        for parameter in state.values():
            parameter.grad = torch.zeros_like(parameter)  # that of a world without any token
        inputs = [tokens.of(replica).requires_grad_() for replica in range(here.replicas)]
        outputs = [mixture(state, x, tokens.top_k) for x in inputs]
        (sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)) / here.replicas).backward()
        torch.testing.assert_close(y, outputs[here.replica], rtol=EXACT, atol=EXACT)
        expected = inputs[here.replica].grad * here.replicas
        torch.testing.assert_close(mine.grad, expected, rtol=EXACT, atol=EXACT)
        assert_equal_to_one_device(
            parallel_layer, whole, gradients=True, rtol=EXACT, atol=EXACT, reason="sums in another order"
        )


def covering(worlds):
    """Each world and each distribution of tokens at least once."""
    names = list(TOKENS)
    count = max(len(worlds), len(names))
    return [(worlds[number % len(worlds)], names[number % len(names)]) for number in range(count)]


def run(pairs, **options):
    for parallel, name in pairs:
        try:
            check_equal_to_the_loop(parallel, TOKENS[name], **options)
        except BaseException as error:
            error.add_note(f"{name} in {parallel}")
            raise


@pytest.mark.ranks([storm(2), 4])
def test_a_layer_over_ranks_is_the_dense_loop():
    run(covering(WORLDS[dist.get_world_size()]), num_shared_experts=1)


@pytest.mark.ranks([2, 4, 8])
@pytest.mark.storm
def test_a_layer_over_any_ranks_with_any_tokens_is_the_dense_loop():
    run(itertools.product(WORLDS[dist.get_world_size()], TOKENS))


OPTIONS = [
    {
        "num_shared_experts": 2,
        "shared_expert_gate": True,
        "router": RouterConfig(bias=True),
        "expert": ExpertConfig(activation="gelu", bias=True),
    },
    {
        "num_shared_experts": 1,
        "shared_expert_gate": True,
        "router": RouterConfig(
            scoring_func="sigmoid", n_group=4, topk_group=2, routed_scaling_factor=2.5, correction_bias=True
        ),
    },
    {
        "router": RouterConfig(norm_topk_prob=False),
        "expert": ExpertConfig(bias=True, activation="clamped_swiglu", interleaved=True, transposed=True),
    },
    {"num_shared_experts": 1, "capacity_factor": 100.0, "expert": ExpertConfig(activation="clamped_swiglu")},
]


@pytest.mark.ranks([storm(2), 4])
def test_every_option_over_ranks_is_the_layer_on_one_device():
    """Which is compared with transformers' blocks elsewhere. A capacity that drops nothing changes nothing."""
    every = WORLDS[dist.get_world_size()]
    for number, parallel in enumerate(every):
        options = OPTIONS[number % len(OPTIONS)]
        try:
            check_equal_to_one_device(parallel, TOKENS["uneven"], **options)
        except BaseException as error:
            error.add_note(f"{options} in {parallel}")
            raise


def check_equal_to_one_device(parallel, tokens, **options):
    with world(parallel) as here:
        layer, whole = tokens.make(here.layers, **options), tokens.make(layer_set(None), **options)
        for moe in (layer, whole):
            randomise_biases_(moe)
        mine = tokens.of(here.replica).requires_grad_()
        y = here.layers.gather(layer(here.layers.split(mine)))
        y.square().sum().backward()
        here.average_(layer)
        for replica in range(here.replicas):
            x = tokens.of(replica).requires_grad_()
            out = whole(x)
            (out.square().sum() / here.replicas).backward()
            if replica == here.replica:
                torch.testing.assert_close(y, out, rtol=EXACT, atol=EXACT)
                torch.testing.assert_close(mine.grad, x.grad * here.replicas, rtol=EXACT, atol=EXACT)
        assert_equal_to_one_device(layer, whole, gradients=True, rtol=EXACT, atol=EXACT, reason="sums in another order")


def randomise_biases_(moe):
    """Biases begin at zero, which would hide one that is added twice."""
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            if name.endswith("bias"):
                generator = torch.Generator().manual_seed(len(name))
                values = torch.randn(parameter.par_sharding.shape, generator=generator, dtype=torch.float64)
                for box in parameter.par_sharding.boxes:
                    box.of(parameter).copy_(values[box.slices])
        if moe.gate.e_score_correction_bias is not None:
            moe.gate.e_score_correction_bias.copy_(torch.arange(8) % 3 * 0.1)


@pytest.mark.ranks(4)
def test_weights_after_three_steps_do_not_depend_on_expert_parallelism_deepspeed_5259_5618_6546():
    """With the same batch over four ranks. There, experts' gradients were EP times too large; Adam hides that."""
    after = {}
    for parallel in ({}, {"expert": 2}, {"expert": 4}):
        with world(parallel) as here:
            layer = TOKENS["uneven"].make(here.layers, num_shared_experts=1)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            for step in range(3):
                layer(TOKENS["uneven"].of(4 * step + dist.get_rank())).square().sum().backward()
                here.average_(layer)
                optimizer.step()
                optimizer.zero_grad()
            after[len(after)] = whole_state(layer)
    for name, weight in after[0].items():
        for other in (after[1], after[2]):
            torch.testing.assert_close(other[name], weight, rtol=EXACT, atol=EXACT)


@pytest.mark.ranks(4)
def test_an_experts_gradient_is_that_of_every_split_megatron_1622_5956_7165():
    """Of the same four ranks' tokens, with whole and cut experts. There, it was a multiple, or that of others."""
    found = []
    for parallel in (
        {"tp": 2, "expert": {"size": 4, "tensor": 1}},
        {"sp": 2, "expert": {"size": 2, "tensor": 1}},
        {"tp": 2, "expert": 2},
        {"sp": 2, "expert": 1},
    ):
        with world(parallel) as here:
            layer = TOKENS["uneven"].make(here.layers)
            layer(here.layers.split(TOKENS["uneven"].of(here.replica))).square().sum().backward()
            here.average_(layer)
            gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
            for name, parameter in layer.named_parameters():
                parameter.data = gradients[name]
            found.append(whole_state(layer))
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=EXACT, atol=EXACT)


@pytest.mark.ranks(2)
def test_every_parameter_has_a_finite_gradient_transformers_48205_48687():
    """Of the router, of x and of experts without a row; there were NaN, and gradients that were missing."""
    for parallel in ({"expert": 2}, {"tp": 2}, {"expert": {"size": 2, "tensor": 1}, "sp": 2}):
        for rows in ((2, 0), (0, 0)):
            with world(parallel) as here:
                tokens = Tokens(rows=rows, favoured=(0,), top_k=1)
                layer = tokens.make(here.layers, num_shared_experts=1)
                x = tokens.of(here.replica).requires_grad_()
                layer(here.layers.split(x)).square().sum().backward()
                assert x.grad.isfinite().all()
                for name, parameter in layer.named_parameters():
                    assert parameter.grad is not None, name
                    assert parameter.grad.isfinite().all(), name


@pytest.mark.ranks(4)
def test_two_models_of_different_expert_parallelism_live_in_one_process():
    tokens = TOKENS["uneven"]
    with world({"expert": 2}) as one, world({"expert": 4}) as other:
        layers = [tokens.make(here.layers) for here in (one, other)]
        x = tokens.of(one.replica)
        outputs = [layer(x) for layer in layers]
        for y in outputs:
            y.square().sum().backward()
        torch.testing.assert_close(*outputs, rtol=EXACT, atol=EXACT)
        for here, layer in zip((one, other), layers, strict=True):
            here.average_(layer)
        torch.testing.assert_close(*(layer.gate.weight.grad for layer in layers), rtol=EXACT, atol=EXACT)
        part = layers[1].experts.down_proj.shape[0]
        begin = (dist.get_rank() % 2) * 2 * part
        mine = layers[0].experts.down_proj.grad
        rank = other.groups.rank("expert_parallel")
        assert begin == one.groups.rank("expert_parallel") * 2 * part
        if rank // 2 == one.groups.rank("expert_parallel"):
            theirs = layers[1].experts.down_proj.grad
            torch.testing.assert_close(mine[rank % 2 * part :][:part], theirs, rtol=EXACT, atol=EXACT)


@pytest.mark.ranks(4)
def test_weights_start_alike_wherever_experts_live():
    states = []
    for parallel in ({"expert": 4}, {"tp": 2, "expert": {"size": 2, "tensor": 1}}, {"sp": 2, "expert": 2}, {}):
        for init in (None, fill):
            with world(parallel) as here:
                layer = here.layers.MoE(8, 6, num_experts=8, top_k=2, num_shared_experts=1, init=init)
                initialize(layer, seed=5)
                states.append(whole_state(layer))
    for number, state in enumerate(states):
        assert all(torch.equal(weight, states[number % 2][name]) for name, weight in state.items())


def fill(whole, generator):
    """An init rule of one's own; of experts it is given one after the other."""
    assert whole.dim() < 3
    whole.normal_(generator=generator)


def test_an_expert_has_the_same_numbers_among_any_others():
    few, many = (layer_set(None).MoE(8, 6, num_experts=number, top_k=2, init=fill) for number in (4, 64))
    for layer in (few, many):
        initialize(layer, seed=5)
    assert torch.equal(few.experts.gate_up_proj, many.experts.gate_up_proj[:4])
    assert many.experts.gate_up_proj.unique().numel() > 0.99 * many.experts.gate_up_proj.numel()


@pytest.mark.ranks(4)
def test_the_free_pieces_make_the_same_layer_without_a_layer_set():
    """In a module of one's own, over a group of torch alone; gradients are averaged by hand."""
    tokens = TOKENS["uneven"]
    whole = tokens.make(layer_set(None))
    state = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    with world({"expert": 4}) as here:
        mixture_ = Plain(here.groups)
        with torch.no_grad():
            mixture_.router.weight = torch.nn.Parameter(state["gate.weight"].clone())
            for name in ("gate_up_proj", "down_proj"):
                setattr(mixture_.experts, name, torch.nn.Parameter(state[f"experts.{name}"][mine].clone()))
        y = mixture_(tokens.of(here.replica).flatten(0, 1))
        y.square().sum().backward()
        for replica in range(4):
            out = whole(tokens.of(replica)).flatten(0, 1)
            out.square().sum().backward()
            if replica == here.replica:
                torch.testing.assert_close(y, out, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(
            mixture_.experts.down_proj.grad, whole.experts.down_proj.grad[mine], rtol=EXACT, atol=EXACT
        )
        dist.all_reduce(mixture_.router.weight.grad)
        torch.testing.assert_close(mixture_.router.weight.grad, whole.gate.weight.grad, rtol=EXACT, atol=EXACT)


class Plain(torch.nn.Module):
    """Eight experts over four ranks, of the pieces alone."""

    def __init__(self, groups):
        super().__init__()
        self.router = Router(8, num_experts=8, top_k=2)
        self.dispatch = TokenDispatcher(8, groups.channels("expert_parallel", 1)[0])
        self.experts = Experts(8, 8, 6, grid=Grid(groups, view="experts"))

    def forward(self, x):
        routing = self.router(x)
        sent = self.dispatch.dispatch(x, routing.ids, routing.gates)
        return sent.combine(self.experts(*sent.wait()))


@pytest.mark.ranks(2)
def test_a_copy_of_a_layer_has_weights_of_its_own_and_the_same_ranks():
    with world({"expert": 2}) as here:
        layer = TOKENS["uneven"].make(here.layers, num_shared_experts=1)
        again = copy.deepcopy(layer)
        x = TOKENS["uneven"].of(here.replica)
        assert torch.equal(again(x), layer(x))
        assert again.experts.down_proj is not layer.experts.down_proj
        assert again.experts.down_proj.par_sharding == layer.experts.down_proj.par_sharding


@pytest.mark.ranks(4)
def test_debug_layers_check_the_layout_of_what_a_mixture_is_given():
    with world({"sp": 2, "expert": 2}) as here:
        layers = layer_set("auto", here.groups, debug=True)
        layer = TOKENS["uneven"].make(layers)
        x = layers.split(TOKENS["uneven"].of(here.replica))
        layers.gather(layer(x)).sum().backward()
        column = layers.ColumnLinear(8, 8)
        initialize(column, 3, dtype=torch.float64)
        with pytest.raises(ValueError, match="MoE"):
            layer(column(x))


WRONG = [
    ({"num_experts": 9}, {}, "num_experts=9: not a multiple of the 2 ranks"),
    ({"intermediate_size": 5}, {"expert": 2, "tp": 2}, "intermediate_size=5: not a multiple of the 2 ranks"),
    ({"top_k": 9}, {}, "top_k=9: there are 8 experts"),
    ({"capacity_factor": 0.0}, {}, "capacity_factor=0.0: it must be positive"),
    ({"router": RouterConfig(n_group=3, topk_group=1)}, {}, "8 experts do not divide into 3 groups"),
    ({"shared_expert_gate": True}, {}, "num_shared_experts=0: it does not fit shared_expert_gate=True"),
    ({"balance": LoadBalancing(bias_update_rate=0.1)}, {}, r"pass RouterConfig\(correction_bias=True\)"),
]


@pytest.mark.ranks(4)
def test_what_cannot_be_is_refused_before_anything_is_made():
    good = {"hidden_size": 8, "intermediate_size": 6, "num_experts": 8, "top_k": 2}
    for options, parallel, message in WRONG:
        with world(parallel or {"expert": 2}) as here, pytest.raises(ValueError, match=message):
            here.layers.MoE(**(good | options))
    with (
        world({"tensor": {"size": 4, "mode": "2d"}}) as here,
        pytest.raises(ValueError, match="mode='2d': experts need mode '1d' or one device"),
    ):
        here.layers.MoE(**good)
    with world({"tp": 2}) as here, pytest.raises(ValueError, match=r"2 tensor ranks, .* use layer_set\('1d'"):
        layer_set(None, here.groups).MoE(**good)


@pytest.mark.ranks(2)
def test_no_rows_of_one_token_for_each_rank_are_balanced():
    """A part of the sequence of length one, of which a batch of no rows has none."""
    with world({"sp": 2, "expert": {"size": 2, "tensor": 1}}) as here:
        layer = Tokens(rows=(0,)).make(here.layers, balance=LoadBalancing(aux_loss_coef=0.1, z_loss_coef=0.1))
        x = torch.zeros(0, 1, 8, dtype=torch.float64, requires_grad=True)
        layer(x, torch.ones(0, 2, dtype=torch.bool)).sum().backward()
        assert x.grad.shape == x.shape
        assert all(not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.ranks(2)
def test_what_a_layer_cannot_be_given_is_refused():
    with world({"sp": 2}) as here:
        layer = TOKENS["uneven"].make(here.layers)
        x = here.layers.split(TOKENS["uneven"].of(0))
        for wrong, mask, message in [
            (x[0], None, r"activations \[2, 8\]; give \[B, S, h\]"),
            (x[..., :7], None, r"x has shape \[8, 7\]: this router needs tokens; pass \[M, 8\]"),
            (
                x,
                torch.ones(2, 2, dtype=torch.bool),
                r"mask is \[2, 2\], but the tokens of the tensor group are \[2, 4\]",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                layer(wrong, mask)
    with world({"expert": 2}) as here:
        layer = TOKENS["uneven"].make(here.layers, balance=LoadBalancing(aux_loss_coef=0.1))
        with pytest.raises(ValueError, match=r"tokens \[M, h\] have no sequence boundaries"):
            layer(TOKENS["uneven"].of(0).flatten(0, 1))


@pytest.mark.ranks(2)
def test_every_rank_hears_of_scores_that_are_no_numbers():
    """Before a row travels, and whichever rank has them."""
    for parallel in ({"expert": 2}, {"expert": {"size": 2, "tensor": 1}, "sp": 2}):
        for bad in range(2):
            with world(parallel) as here:
                layer = TOKENS["uneven"].make(here.layers, num_shared_experts=1)
                x = here.layers.split(TOKENS["uneven"].of(here.replica)).detach()
                if dist.get_rank() == bad:
                    x[0, 1, 3] = torch.nan
                with pytest.raises(ValueError, match=rf"router 'gate': ids of rank {bad} are .* NaN scores"):
                    layer(x)
