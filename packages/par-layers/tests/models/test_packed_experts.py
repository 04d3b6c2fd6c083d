"""Packed experts of any kind, dealt out or not, against a loop over them; lists that are packed; what is refused."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import ExpertParallel, pack_experts_, parallelize, plan_shardings
from par_testing import for_each

from .helpers import close

EXACT = 1e-12  # fp64: sums in another order
EXPERTS, HIDDEN, WIDTH, TOP = 4, 6, 4, 2
DEALT = {"experts": "ep_dispatch_experts"}
WAYS = {"own axis": {"expert": 2}, "folded": {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}}}


class Kind(nn.Module):
    """Packed experts as transformers 5 has them: what its decorator says of a class stands on the instances."""

    def __init__(self, *, gate=True, bias=False, transposed=False, concatenated=True, norm=False):
        super().__init__()
        self.has_gate, self.has_bias, self.has_post_expert_norm = gate, bias, norm
        self.is_transposed, self.is_concatenated = transposed, concatenated
        first, wide = ("gate_up_proj", 2 * WIDTH) if gate else ("up_proj", WIDTH)
        for name, shape in ((first, (wide, HIDDEN)), ("down_proj", (HIDDEN, WIDTH))):
            weight = torch.randn(EXPERTS, *(shape[::-1] if transposed else shape))
            self.register_parameter(name, nn.Parameter(weight))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, shape[0])))
        self.act_fn = nn.GELU()
        if norm:
            self.post_expert_norm = nn.LayerNorm(HIDDEN)

    def _apply_gate(self, gate_up):
        """One of its own: of the interleaved kind too."""
        if self.is_concatenated:
            gate, up = gate_up.chunk(2, -1)
        else:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return self.act_fn(gate) * (up + 1)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        first = "gate_up_proj" if self.has_gate else "up_proj"
        result = torch.zeros_like(hidden_states)
        for expert in range(EXPERTS):
            tokens, places = torch.where(top_k_index == expert)
            y = self.product(hidden_states[tokens], first, expert)
            y = self.product(self._apply_gate(y) if self.has_gate else self.act_fn(y), "down_proj", expert)
            y = self.post_expert_norm(y) if self.has_post_expert_norm else y
            result = result.index_add(0, tokens, y * top_k_weights[tokens, places, None])
        return result

    def product(self, x, name, expert):
        weight = getattr(self, name)[expert]
        y = x @ (weight if self.is_transposed else weight.T)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y


class Block(nn.Module):
    """A router, and experts as given."""

    def __init__(self, experts):
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS, bias=False), experts

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(TOP, -1)
        return self.experts(x, ids, weights)


def block(seed=0, **kind):
    torch.manual_seed(seed)
    return Block(Kind(**kind)).double()


def live(way):
    return ProcessGroups(Topology.from_config(WAYS[way], dist.get_world_size()))


def compare(whole, cut, groups):
    """Outputs and all gradients, of tokens that differ on the ranks of an axis of their own, and in number."""
    mine, count = groups.rank(("data", "sequence", "expert")), groups.size(("data", "sequence", "expert"))
    generator = torch.Generator().manual_seed(1)
    for replica in range(count):
        x = torch.randn(3 + 2 * replica, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
        here = x.detach().clone().requires_grad_()
        expected = whole(x)
        expected.square().sum().backward()
        if replica == mine:
            y = cut(here)
            close(y, expected, EXACT)
            y.square().sum().backward()
            close(here.grad, x.grad, EXACT)
    for name, parameter in cut.named_parameters():
        is_norm = "norm" in name  # of outputs: each rank has some of them, whoever sent the token
        assert any(box.sum_over for box in sharding_of(parameter).boxes) == (is_norm and count == 1)
        if is_norm or (name == "gate.weight" and count > 1):
            dist.all_reduce(parameter.grad)
        for box in sharding_of(parameter).boxes:
            close(box.of(parameter.grad), whole.get_parameter(name).grad[box.slices], EXACT)


KINDS = (
    {},
    {"gate": False},
    {"bias": True, "transposed": True, "concatenated": False},
    {"gate": False, "bias": True, "transposed": True},
    {"norm": True},
)


@pytest.mark.ranks(2)
@for_each(way=WAYS, kind=KINDS)
def test_experts_of_every_kind_equal_a_loop(way, kind):
    with live(way) as groups:
        whole, cut = block(**kind), block(**kind)
        parallelize(cut, groups, DEALT)
        compare(whole, cut, groups)


@pytest.mark.ranks(2)
def test_each_expert_is_cut_where_no_axis_deals_them_out():
    for kind in ({}, {"bias": True, "transposed": True, "concatenated": False}):
        with ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)) as groups:
            whole, cut = block(**kind), block(**kind)
            parallelize(cut, groups, {"experts": ExpertParallel(), "experts.down_proj": "grouped_gemm"})
            assert cut.experts.down_proj.numel() * 2 == whole.experts.down_proj.numel()
            compare(whole, cut, groups)


@pytest.mark.ranks(2)
def test_a_norm_after_each_expert_would_see_parts_of_sums():
    with ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)) as groups:
        plan = {"experts": "moe_tp_experts", "experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"}
        with pytest.raises(
            ValueError, match=r"'experts' has a norm after each expert, .* cannot be sharded over 2 ranks"
        ):
            parallelize(block(norm=True), groups, plan)


@pytest.mark.ranks(2)
def test_a_copy_is_a_model_of_its_own():
    with live("own axis") as groups:
        whole, cut = block(), parallelize(block(), groups, DEALT)
        made = copy.deepcopy(cut)
        with torch.no_grad():
            cut.experts.down_proj.zero_()
            cut.experts.act_fn = None
        compare(whole, made, groups)


@pytest.mark.ranks(2)
def test_gradients_of_weights_may_come_later():
    """As a zero-bubble schedule of a pipeline asks for."""
    with live("own axis") as groups:
        plain, later = (parallelize(block(), groups, DEALT) for _ in range(2))
        found = []
        later.experts.weight_grad_hook = found.append
        for model in (plain, later):
            model(torch.ones(3, HIDDEN, dtype=torch.float64)).square().sum().backward()
        assert later.experts.down_proj.grad is None
        assert len(found) == 2
        for gradient in found:
            gradient()
        for name, parameter in plain.named_parameters():
            close(later.get_parameter(name).grad, parameter.grad, EXACT)


def test_what_will_be_cut_is_known_without_ranks():
    topology = Topology.from_config({"expert": 2, "tensor": {"size": 2, "mode": "1d"}}, 4)
    model = block()
    for rank, (expert, features) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        found = plan_shardings(model, topology, rank, DEALT)
        gate, up = found["experts.gate_up_proj"].boxes
        assert gate.start == (2 * expert, 2 * features, 0)
        assert up.start == (2 * expert, 4 + 2 * features, 0)
        assert (gate.size, tuple(gate.copies)) == ((2, 2, HIDDEN), (rank,))
        assert found["experts.down_proj"].boxes[0].start == (2 * expert, 0, 2 * features)
        assert tuple(found["gate.weight"].boxes[0].copies) == (0, 1, 2, 3)


# Lists of experts


class Expert(nn.Module):
    def __init__(self, bias, width=WIDTH):
        super().__init__()
        self.w1, self.w2 = nn.Linear(HIDDEN, width, bias), nn.Linear(width, HIDDEN, bias)
        self.w3 = nn.Linear(HIDDEN, width, bias)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def listed(bias=False):
    torch.manual_seed(0)
    return Block(nn.ModuleList(Expert(bias) for _ in range(EXPERTS))).double()


def looped(model, x):
    """What older code does with a list of experts."""
    weights, ids = model.gate(x).softmax(-1).topk(TOP, -1)
    result = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        tokens, places = torch.where(ids == number)
        result = result.index_add(0, tokens, expert(x[tokens]) * weights[tokens, places, None])
    return result


@pytest.mark.parametrize("bias", [False, True])
def test_a_list_of_experts_becomes_packed_ones(bias):
    reference, model = listed(bias), listed(bias)
    held = model.experts
    assert pack_experts_(model.experts, gate="w1", up="w3", down="w2") is held is model.experts
    x = torch.randn(7, HIDDEN, dtype=torch.float64, requires_grad=True)
    close(model(x), looped(reference, x), EXACT)
    model(x).square().sum().backward()
    looped(reference, x).square().sum().backward()
    for number, expert in enumerate(reference.experts):
        close(held.gate_up_proj.grad[number], torch.cat([expert.w1.weight.grad, expert.w3.weight.grad]), EXACT)
        close(held.down_proj.grad[number], expert.w2.weight.grad, EXACT)
        if bias:
            close(held.down_proj_bias.grad[number], expert.w2.bias.grad, EXACT)
    close(model.gate.weight.grad, reference.gate.weight.grad, EXACT)
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model.experts.down_proj.zero_()
    close(again(x), looped(reference, x), EXACT)


@pytest.mark.ranks(2)
def test_packed_lists_are_dealt_out():
    with live("own axis") as groups:
        whole, cut = listed(True), listed(True)
        for model in (whole, cut):
            pack_experts_(model.experts, gate="w1", up="w3", down="w2")
        parallelize(cut, groups, DEALT)
        compare(whole, cut, groups)


def test_experts_that_share_a_linear_are_refused():
    model = listed()
    model.experts[1].w1 = model.experts[0].w1
    with pytest.raises(ValueError, match="some experts share a parameter of 'w1', 'w3' or 'w2'"):
        pack_experts_(model.experts, gate="w1", up="w3", down="w2")


def test_a_list_that_is_not_alike_is_refused():
    model = listed()
    with pytest.raises(TypeError, match=r"'w4' of a Expert is no nn.Linear; its linears are \['w1', 'w2', 'w3'\]"):
        pack_experts_(model.experts, gate="w4", up="w3", down="w2")
    with pytest.raises(TypeError, match=r"parameters beside None, 'w3' and 'w2': \['0.w1.weight'"):
        pack_experts_(model.experts, gate=None, up="w3", down="w2")
    with pytest.raises(TypeError, match=r"is for an nn\.ModuleList of experts, and this is a Expert"):
        pack_experts_(model.experts[0], gate="w1", up="w3", down="w2")
    with pytest.raises(TypeError, match="the activation PReLU has parameters"):
        pack_experts_(model.experts, gate="w1", up="w3", down="w2", activation=nn.PReLU())
    model.experts[1] = Expert(False, width=8)
    with pytest.raises(ValueError, match="the experts' 'w1' differ in shapes or biases"):
        pack_experts_(model.experts, gate="w1", up="w3", down="w2")
    model = listed()
    looped(model, torch.ones(2, HIDDEN, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match="has a gradient, or was cut"):
        pack_experts_(model.experts, gate="w1", up="w3", down="w2")
    assert isinstance(model.experts, nn.ModuleList)


# Refusals


def unknown(**wrong):
    model = block()
    for name, value in wrong.items():
        setattr(model.experts, name, value)
    return model


@pytest.mark.ranks(2)
@for_each(
    case=(
        (listed, DEALT, "'experts' is a ModuleList of Expert, .* call pack_experts_"),
        (lambda: unknown(has_gate=None), DEALT, "a Kind without the attributes has_gate"),
        (lambda: unknown(extra=nn.Parameter(torch.ones(1))), DEALT, r"has the parameters \['down_proj', 'extra'"),
        (lambda: unknown(act_fn=nn.PReLU()), DEALT, r"has the parameters \['act_fn.weight', 'down_proj'"),
        (block, {"gate": "replicate"}, "deals experts out over 2 ranks, but no module of Block has the rule"),
        (block, {"experts.down_proj": "grouped_gemm"}, "but no module of Block has the rule"),
        (
            lambda: unknown(identity_expert=nn.Identity()),
            {**DEALT, "experts.identity_expert": "moe_identity_expert"},
            "'experts.identity_expert' has the rule 'moe_identity_expert', .* cannot be dealt out",
        ),
        (block, {"gate": "ep_router"}, "'ep_router', removed by transformers; use ep_dispatch_experts"),
    )
)
def test_experts_that_cannot_be_dealt_out_are_refused_on_every_rank(case):
    make, plan, words = case
    with live("own axis") as groups:
        model = make() if dist.get_rank() == 0 else block()
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        with pytest.raises((TypeError, ValueError), match=words):
            parallelize(model, groups, plan if dist.get_rank() == 0 else DEALT)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])


def test_a_weight_alone_is_not_dealt_out():
    topology = Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)
    with pytest.raises(TypeError, match=r"'experts.down_proj' has the rule 'grouped_gemm', .* give 'experts' the rule"):
        plan_shardings(block(), topology, 0, {"experts.down_proj": "grouped_gemm"})


def test_sizes_that_do_not_divide_are_refused():
    topology = Topology.from_config({"expert": 8}, 8)
    with pytest.raises(ValueError, match="'experts': num_experts=4: not a multiple of the 8 ranks"):
        plan_shardings(block(), topology, 0, DEALT)
    topology = Topology.from_config({"expert": 2, "tensor": {"size": 2, "mode": "1d"}}, 4)
    with pytest.raises(ValueError, match="'experts' has a norm after each expert, which needs full outputs"):
        plan_shardings(block(norm=True), topology, 0, DEALT)
