"""Controls of canonical numerics: a rule that is switched off changes the bits, and a fault is found by name."""

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import agree, on_grid, segments_of
from par_precision.exact import grid, sums
from par_train import Strategy
from par_train.strategy.handlers import PipelineShared

from ._canonical import LANES, LAYER_LANES, canonical, one_device
from ._cases import case
from ._training import Run, strategy_of

TABLE = "0.tokens.weight"


def after_one_step(case, device, *, break_model=lambda _: None, break_optimizer=lambda _: None, lanes=LANES):
    """The digest after the first step, without clipping: a norm would spread a fault to all parameters."""
    with strategy_of(canonical(case, lanes), "fp32", device) as strategy:
        run = Run(strategy, 3, tied=case.tied)
        run.optimizer.clip_norm = None
        break_model(run.model)
        run.backward()
        break_optimizer(run.optimizer)
        run.optimizer.step()
        return strategy.digest(run.model)


# A rule that is switched off


@pytest.mark.ranks(1)
@pytest.mark.parametrize("rounds", [True, False])
def test_lanes_in_another_order_change_bits_only_off_the_grid(rounds, monkeypatch):
    if not rounds:
        monkeypatch.setattr(grid, "on_grid", lambda gradient: gradient.double())
    tiny = 1.5 * 2.0**-54  # 1 + tiny is 1 in fp64, and -1 + tiny is not -1
    digests = []
    for lanes in ([1.0, tiny, tiny, -1.0], [-1.0, tiny, tiny, 1.0]):
        with Strategy(numerics="canonical", lanes=4) as strategy:
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            model, optimizer = strategy.initialize(model, torch.optim.AdamW(model.parameters(), eps=1e-30))
            for lane in lanes:
                strategy.backward(model(torch.tensor([[lane]])).sum(), optimizer)
            optimizer.step()
            digests.append(str(strategy.digest(model)))
    assert (digests[0] == digests[1]) == rounds


def one_after_another(parts):
    return functools.reduce(operator.add, parts)


def of_all_tokens(_, x):
    return on_grid(x.float().flatten(0, -2).sum(0))


@pytest.mark.storm
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("axis", "name", "target", "replacement"),
    [
        ("tensor", "TP2", "par_layers.modes.lanes.tree", one_after_another),
        ("tensor", "SP2", "par_layers.modes.chunks.ChunkSums.of_tokens", of_all_tokens),
        ("sequence", "Gather2", "par_layers.context.modes.lanes.tree", one_after_another),
    ],
    ids=["lanes of features", "chunks of rows", "lanes of queries"],
)
def test_sums_in_another_order_change_bits(axis, name, target, replacement, device, monkeypatch):
    found = []
    for switched_off in (False, True):
        if switched_off:
            monkeypatch.setattr(target, replacement)
        digests = [after_one_step(case(**each), device, lanes=LAYER_LANES) for each in ({"data": 2}, {axis: name})]
        found.append(digests[0].differing(digests[1]) == [])
    assert found == [True, False]


@pytest.mark.ranks(2)
def test_a_norm_in_the_order_of_ranks_has_other_bits(device, monkeypatch):
    expected = one_device("fp32", 3, 3, device, tied=False)[1]
    monkeypatch.setattr(sums, "exact_squares", lambda parts, _: sum(part.double().square().sum() for part in parts))
    monkeypatch.setattr(sums, "squares_of", lambda total, _: total)
    with strategy_of(canonical(case(2, zero=1)), "fp32", device) as strategy:
        norms = Run(strategy, 3).train(3).norms
    assert norms == pytest.approx(expected.norms, rel=1e-12)
    assert norms != expected.norms


# A fault in the first step


@pytest.mark.ranks(2)
def test_a_gradient_twice_too_large_is_found_by_name(device):
    def double(model):
        if dist.get_rank():
            model[2].expand.weight.register_hook(lambda gradient: 2 * gradient)

    healthy, broken = (after_one_step(case(2, zero=1), device, break_model=each) for each in (lambda _: None, double))
    assert healthy.differing(broken) == ["2.expand.weight"]


@pytest.mark.ranks(2)
def test_a_lost_tie_is_found_by_name(device, monkeypatch):
    tied = case(pipeline="1f1b", tied=True)
    healthy = after_one_step(tied, device)
    monkeypatch.setattr(PipelineShared, "handle_gradient", lambda _: None)
    assert healthy.differing(after_one_step(tied, device)) == [TABLE]


@pytest.mark.ranks(2)
def test_an_exchanged_shard_is_found_by_name(device):
    names = set()

    def exchange(optimizer):
        shard = next(tensor for group in optimizer.param_groups for tensor in group["params"])
        both = [torch.empty_like(shard.grad) for _ in range(2)]
        dist.all_gather(both, shard.grad)
        shard.grad.copy_(both[1 - dist.get_rank()])
        for own in agree(None, [segment.name for segment in segments_of(shard, "")], None).values():
            names.update(own)

    healthy = after_one_step(case(2, zero=1), device)
    broken = after_one_step(case(2, zero=1), device, break_optimizer=exchange)
    assert set(healthy.differing(broken)) == names
    assert 0 < len(names) < len(healthy.tensors)


@pytest.mark.ranks(2)
def test_exchanged_blocks_of_tensor_ranks_are_found_by_name(device):
    def exchange(gradient):
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient.contiguous())
        return both[1 - dist.get_rank()]

    def break_model(model):
        model[2].expand.weight.register_hook(exchange)

    cell = case(tensor="TP2")
    healthy, broken = (
        after_one_step(cell, device, break_model=each, lanes=LAYER_LANES) for each in (lambda _: None, break_model)
    )
    assert healthy.differing(broken) == ["2.expand.weight"]
