"""Losses of balance: their formulas, and gradients wherever tokens are cut."""

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import Grid, LoadBalancing, RouterConfig, RouterLosses, TokenAxes

from ..helpers import numbers
from .toy import EXPERTS, HIDDEN, TOP_K, Layer, backward, filled, whole_gradients

EXACT = {"rtol": 1e-12, "atol": 1e-13}  # fp64, sums in another order
LENGTH = 6


def expected(router, x, mask, balance):
    """The loss by its formulas, token by token, [B, S, h] at once."""
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if router.config.scoring_func == "softmax" else logits.sigmoid()
    ids = scores.topk(TOP_K).indices
    normal = scores / scores.sum(-1, keepdim=True)
    sequences = range(len(x)) if balance.scope == "sequence" else [slice(None)]
    aux = []
    for sequence in sequences:
        real = mask[sequence].flatten()
        chosen = ids[sequence].flatten(0, -2)[real]
        f = torch.stack([(chosen == expert).sum() for expert in range(EXPERTS)]) * EXPERTS / (TOP_K * real.sum())
        aux.append((f * normal[sequence].flatten(0, -2)[real].mean(0)).sum())
    z = logits[mask].logsumexp(-1).square().mean()
    return balance.aux_loss_coef * torch.stack(aux).mean() + balance.z_loss_coef * z


def masks(rows):
    """Padding at the end of every other row; as much in each replica's rows, whose means are then means of all."""
    return torch.arange(LENGTH) < LENGTH - 2 * (torch.arange(rows) % 2).unsqueeze(-1)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("over", ["sequence", "microbatch", "step"])
def test_gradients_are_those_of_the_formulas(score, over):
    balance = LoadBalancing(aux_loss_coef=0.3, scope=over, z_loss_coef=0.2)
    layer = filled(Layer(balance=balance, config=RouterConfig(scoring_func=score)))
    x, mask = numbers(3, LENGTH, HIDDEN), masks(3)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(mine, mask, 3).mul(0.0).sum().backward()
    gradient, layer.gate.weight.grad = layer.gate.weight.grad, None
    loss = expected(layer.gate, other, mask, balance)
    loss.backward()
    torch.testing.assert_close(mine.grad, other.grad, **EXACT)
    torch.testing.assert_close(gradient, layer.gate.weight.grad, **EXACT)
    taken = RouterLosses(layer).take()
    torch.testing.assert_close(taken["aux"] + taken["z"], loss.detach(), **EXACT)
    assert "aux" not in RouterLosses(layer).take()  # taken is taken


def test_perfect_balance_has_the_loss_one():
    layer = filled(Layer(balance=LoadBalancing(aux_loss_coef=1.0, scope="microbatch")))
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[:, :EXPERTS] = torch.eye(EXPERTS)
    x = torch.zeros(1, EXPERTS, HIDDEN, dtype=torch.float64)
    for token in range(EXPERTS):
        x[0, token, token], x[0, token, (token + 1) % EXPERTS] = 2.0, 1.0
    layer(x)
    taken = RouterLosses(layer).take()
    assert taken["aux"].item() == pytest.approx(1.0, abs=1e-12)
    assert taken["imbalance"].item() == 1.0


def test_a_step_counts_the_microbatches_so_far():
    layer = filled(Layer(balance=LoadBalancing(aux_loss_coef=1.0, scope="step")))
    first, second = numbers(1, LENGTH, HIDDEN), numbers(1, LENGTH, HIDDEN, seed=9)
    layer(first)
    ids = layer(second) is not None and torch.cat(layer.ids)
    logits = second[0] @ layer.gate.weight.detach().T
    f = torch.bincount(ids.flatten(), minlength=EXPERTS) * EXPERTS / (TOP_K * 2 * LENGTH)
    losses = RouterLosses(layer).take()["aux"] * 2  # the mean over microbatches
    chosen = torch.bincount(layer.ids[0].flatten(), minlength=EXPERTS) * EXPERTS / (TOP_K * LENGTH)
    alone = (chosen * (first[0] @ layer.gate.weight.detach().T).softmax(-1).mean(0)).sum()
    torch.testing.assert_close(losses, alone + (f * logits.softmax(-1).mean(0)).sum(), **EXACT)


def test_the_scale_of_the_main_loss_is_that_of_the_routers_losses():
    """As a loss scale of fp16, on two layers; Megatron-Core keeps it in a class, for all models of a process."""
    gradients = []
    for scale in (1.0, 1024.0):
        balance = LoadBalancing(aux_loss_coef=0.3, scope="microbatch", z_loss_coef=0.1)
        model = torch.nn.Sequential(*(filled(Layer(balance=balance)) for _ in "ab"))
        other = filled(Layer(balance=balance))
        RouterLosses(other).scale = 7.0
        x = numbers(2, LENGTH, HIDDEN)
        backward(model, model(x), numbers(2, LENGTH, HIDDEN, seed=7), scale)
        gradients.append([parameter.grad / scale for parameter in model.parameters()])
    for one, scaled in zip(*gradients, strict=True):
        assert torch.equal(one, scaled)  # a power of two


def test_the_scale_is_as_exact_as_the_losses():
    """A third of fp32 is another number than that of fp64, which the main loss is divided by."""
    layer = filled(Layer(balance=LoadBalancing(aux_loss_coef=0.3, scope="microbatch")))
    gradients = []
    for scale in (1.0, 1 / 3):
        RouterLosses(layer).scale = scale
        layer.zero_grad()
        layer(numbers(2, LENGTH, HIDDEN)).mul(0.0).sum().backward()
        gradients.append(layer.gate.weight.grad / scale)
    torch.testing.assert_close(*gradients, **EXACT)


def test_a_scale_on_the_device_may_change_in_place():
    layer = filled(Layer(balance=LoadBalancing(aux_loss_coef=1.0, scope="microbatch")))
    scale = torch.tensor(1.0)
    RouterLosses(layer).scale = scale
    loss = layer(numbers(1, LENGTH, HIDDEN)).mul(0.0).sum()
    scale.fill_(4.0)  # between forward and backward, as GradScaler does
    loss.backward()
    four, layer.gate.weight.grad = layer.gate.weight.grad, None
    scale.fill_(1.0)
    layer(numbers(1, LENGTH, HIDDEN)).mul(0.0).sum().backward()
    assert torch.equal(four, layer.gate.weight.grad * 4)
    with pytest.raises(ValueError, match="scale has 2 elements: it is one factor; pass one number"):
        RouterLosses(layer).scale = torch.ones(2)


CUTS = {
    "tensor": ({"tensor": {"size": 2, "mode": "1d"}}, TokenAxes(partial=("tensor",)), None),
    "sequence": ({"sequence": 2}, TokenAxes(context=("sequence",)), "sequence"),
    "data": ({"data": 2}, TokenAxes(replicas=("data",)), "data"),
    "expert": ({"expert": 2}, TokenAxes(replicas=("expert",)), "expert"),
}
FOUR = {
    "sequence and tensor": (
        {"sequence": 2, "tensor": {"size": 2, "mode": "1d"}},
        TokenAxes(context=("sequence",), partial=("tensor",)),
        "sequence",
    ),
    "data and tensor": (
        {"data": 2, "tensor": {"size": 2, "mode": "1d"}},
        TokenAxes(replicas=("data",), partial=("tensor",)),
        "data",
    ),
}


def check(parallel, tokens, averaged, balance, scale=1.0):
    """A batch of which each rank has a part: rows along replicas, and tokens of each row along the others."""
    rows = 4
    x, upstream, mask = numbers(rows, LENGTH, HIDDEN), numbers(rows, LENGTH, HIDDEN, seed=7), masks(rows)
    whole = filled(Layer(balance=balance))
    other = x.clone().requires_grad_()
    world = dist.get_world_size()
    with ProcessGroups(Topology.from_config(parallel, world)) as groups:
        replicas = groups.size(tokens.replicas)
        if balance.scope == "microbatch" and replicas > 1:  # each replica's rows are a microbatch
            parts = zip(other.chunk(replicas), upstream.chunk(replicas), mask.chunk(replicas), strict=True)
            for part, of_output, real in parts:
                backward(whole, whole(part, real), of_output, scale / replicas)
        else:
            backward(whole, whole(other, mask, rows), upstream / replicas, scale)
        layer = filled(Layer(balance=balance, grid=Grid(groups), token_axes=tokens))
        mine = x.clone().requires_grad_()
        own = torch.arange(rows).chunk(replicas)[groups.rank(tokens.replicas)]
        along, cuts = (*tokens.context, *tokens.partial), groups.size((*tokens.context, *tokens.partial))
        place = groups.rank(along) if along else 0
        columns = torch.arange(LENGTH).tensor_split(cuts)[place]
        cut = (own.unsqueeze(-1), columns)
        part, of_output = mine[cut], upstream[cut] * groups.size(tokens.context)
        backward(layer, layer(part, mask[cut], len(own)), of_output, scale)
        whole_gradients(layer, groups, averaged)
        for (name, parameter), one in zip(layer.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, one.grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
        dist.all_reduce(mine.grad)
        if averaged:
            mine.grad /= groups.size(averaged)
        torch.testing.assert_close(mine.grad, other.grad, **EXACT)
        taken, one = RouterLosses(layer).take(), RouterLosses(whole).take()
        for name in ("aux", "z") if replicas == 1 else ():  # the whole loss, on every rank that has a part of it
            torch.testing.assert_close(taken[name], one[name], **EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("over", ["sequence", "microbatch", "step"])
def test_gradients_do_not_depend_on_how_tokens_are_cut(over):
    """Megatron-Core's auxiliary losses depended on the tensor size (#5047)."""
    for cut in CUTS.values():
        check(*cut, LoadBalancing(aux_loss_coef=0.3, scope=over, z_loss_coef=0.2), scale=64.0)


@pytest.mark.storm
@pytest.mark.ranks(4)
@pytest.mark.parametrize("over", ["sequence", "microbatch", "step"])
def test_gradients_do_not_depend_on_how_tokens_are_cut_along_two_axes(over):
    for cut in FOUR.values():
        check(*cut, LoadBalancing(aux_loss_coef=0.3, scope=over, z_loss_coef=0.2))


def test_sequences_must_be_known_where_balance_is_over_them():
    layer = filled(Layer(balance=LoadBalancing(aux_loss_coef=0.3)))
    x = numbers(6, HIDDEN)
    with pytest.raises(ValueError, match=r"scope='sequence': tokens \[M, h\] have no sequence boundaries"):
        layer(x)
    with pytest.raises(ValueError, match="sequences=4: 6 tokens do not divide"):
        layer(x, None, 4)
    with pytest.raises(ValueError, match=r"sequences has shape \[2, 5\]: there are 6 tokens"):
        layer(x, None, torch.ones(2, 5, dtype=torch.bool))


def test_rows_of_sequences_may_be_of_any_length():
    balance, x = LoadBalancing(aux_loss_coef=0.3), numbers(6, HIDDEN)
    members = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    layer = filled(Layer(balance=balance))
    layer(x, None, members)
    parts = [expected(layer.gate, part.unsqueeze(0), torch.ones(1, len(part)) > 0, balance) for part in x.split([2, 4])]
    torch.testing.assert_close(RouterLosses(layer).take()["aux"], torch.stack(parts).mean().detach(), **EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aux_loss_coef": -1.0}, "aux_loss_coef=-1.0: it must not be negative; pass 0 to disable it"),
        ({"z_loss_coef": float("nan")}, "z_loss_coef=nan"),
        ({"bias_update_rate": -1e-3}, "bias_update_rate=-0.001"),
        ({"scope": "batch"}, "scope='batch': unknown scope; pass 'sequence', 'microbatch' or 'step'"),
    ],
)
def test_load_balancing_rejects_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        LoadBalancing(**options)
