"""Precision and cut layers: training in every parallel mode follows one device, tied embeddings and copies included."""

import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import PartialGradientReducer, initialize, layer_set
from par_layers.examples import GPT
from par_precision import mixed
from par_testing import for_each, once, storm
from par_zero import shard

CASES = {
    "1d": ({"tensor": {"size": 2, "mode": "1d"}}, 2),
    "by sequence": ({"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, 2),
    "2d": ({"tensor": {"size": 4, "mode": "2d"}}, 4),
}
DISTANCE = {"fp32": 1e-5, "bf16": 0.02, "bf16-amp": 0.02, "fp16": 0.004}


def gpt(layers, *, tied):
    model = GPT(layers, 29, 32, 4, 1, 12, tied=tied)
    initialize(model, seed=0)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def data(step):
    return torch.randint(29, (8, 9), generator=torch.Generator().manual_seed(step))


class Loss(torch.nn.Module):
    """The model and its loss, so that mixed() has one forward to go around."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, rows):
        return self.model.loss(rows[:, :-1], rows[:, 1:])


def train(module, optimizer, partial=None, *, ranks=1, rank=0):
    norms, losses = [], []
    for step in range(3):
        loss = module(data(step).chunk(ranks)[rank])
        optimizer.backward(loss)
        if partial is not None:
            partial.handle_gradient()
        norms.append(optimizer.step().grad_norm.item())
        optimizer.zero_grad()
        losses.append(loss.item())
    return norms, losses


@functools.cache
def alone(precision, *, tied):
    """Norms and losses of one device."""
    reference = Loss(gpt(layer_set(None), tied=tied))
    return train(*mixed(reference, adamw(reference), precision, clip_norm=0.5))


@for_each(precision=DISTANCE)
@pytest.mark.parametrize("case", [storm("1d"), "by sequence", storm("2d")])
@pytest.mark.ranks(4, timeout=120)
def test_cut_models_train_as_on_one_device(precision, case):
    axes, tensor = CASES[case]
    world = 4
    odd = (list(DISTANCE).index(precision) + list(CASES).index(case)) % 2 == 1
    topology = Topology.from_config({"data": world // tensor, **axes}, world)
    with ProcessGroups(topology) as groups:
        for tied in (False, True) if precision == "fp32" else (odd,):  # each of both in every precision and mode
            expected = once(alone, precision, tied=tied)
            module = Loss(gpt(layer_set("auto", groups), tied=tied))
            module, optimizer = mixed(module, adamw(module), precision, group=groups["tensor"], clip_norm=0.5)
            norms, losses = train(module, optimizer, PartialGradientReducer(optimizer, groups))  # all see the same rows
            assert norms == pytest.approx(expected[0], rel=DISTANCE[precision])
            assert losses == pytest.approx(expected[1], rel=DISTANCE[precision])


@pytest.mark.parametrize(
    "cases",
    [
        tuple(zip(range(4), ("fp32", "bf16") * 2, strict=True)),  # every stage takes both where nothing is cut
        pytest.param(tuple(itertools.product(range(4), ("fp32", "bf16"))), marks=pytest.mark.storm),
    ],
    ids=["typical", "all"],
)
@pytest.mark.ranks(4, timeout=120)
def test_cut_and_sharded_models_train_as_on_one_device(cases):
    topology = Topology.from_config({"data": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, 4)
    with ProcessGroups(topology) as groups:
        data_group = groups["data"]
        for stage, precision in cases:
            dtype = torch.bfloat16 if precision == "bf16" else None
            expected, _ = once(alone, precision, tied=True)
            module = Loss(gpt(layer_set("auto", groups), tied=True))
            optimizer = adamw(module)
            shard(
                module,
                optimizer,
                stage=stage,
                group=data_group,
                overlap={"bucket": 20_000},
                precision={"param_dtype": dtype},
            )
            module, optimizer = mixed(module, optimizer, precision, group=dist.group.WORLD, clip_norm=0.5)
            partial = PartialGradientReducer(optimizer, groups)
            norms, _ = train(module, optimizer, partial, ranks=2, rank=dist.get_rank(data_group))
            assert norms == pytest.approx(expected, rel=DISTANCE[precision]), (stage, precision)


@pytest.mark.ranks(2)
def test_an_infinity_in_one_ranks_columns_is_skipped_by_both():
    topology = Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)
    with ProcessGroups(topology) as groups:
        module = Loss(gpt(layer_set("auto", groups), tied=True))
        module, optimizer = mixed(module, adamw(module), "fp16", group=groups["tensor"])
        optimizer.backward(module(data(0)))
        if dist.get_rank() == 1:
            cut = [p for p in module.parameters() if len(p.par_sharding.boxes[0].copies) == 1]
            cut[-1].grad.view(-1)[0] = math.inf
        assert optimizer.step().skipped
        assert optimizer.scaling.scale.value == 2.0**15
