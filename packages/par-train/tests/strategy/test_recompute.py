"""`Strategy(recompute=...)`: the losses and weights of no recompute under every axis, and less that is kept."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from par_groups import part_of
from par_recompute import Drop, Keep, Layers, saved
from par_train import Plugin, Strategy
from par_train.jobs.byte_gpt import fill_, gpt_stages, make_gpt
from par_train.jobs.options import ModelOptions

SIZES = ModelOptions(width=12, layers=3, heads=2, context=10)
TEXT = torch.randint(256, (12, 11), generator=torch.Generator().manual_seed(1))


def trained(parallel=None, *, recompute=None, zero=0, steps=2, **options):
    """Losses and parameters of the GPT of `par-train run`, and what its layers keep."""
    pipeline = {"microbatches": 2}
    with Strategy(parallel=parallel, zero=zero, recompute=recompute, pipeline=pipeline, **options) as strategy:
        model = make_gpt(SIZES, strategy.layers)
        if strategy.schedule is not None:
            model = gpt_stages(model, strategy.schedule, strategy.groups.rank("pipeline"))
        whole = fill_(model, 0)
        criterion = partial(strategy.layers.cross_entropy, classes=256)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, fused=True)
        data = DataLoader(TensorDataset(TEXT[:, :-1], TEXT[:, 1:]), batch_size=6)
        model, optimizer, batches = strategy.initialize(model, optimizer, data)
        losses = []
        for _ in range(steps):
            losses.append(strategy.execute_pipeline(batches, model, criterion, optimizer))
            optimizer.step()
            optimizer.zero_grad()
        kept = None if recompute is None else saved(model)
        return [*losses, *(part_of(parameter).detach().clone() for parameter in whole.parameters())], kept


POLICIES = {
    "cheap": "cheap",
    "layers": "layers",
    "every second": Layers(2),
    "keep": Keep(0.5),
    "drop": Drop(lambda name, module: isinstance(module, nn.GELU)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("parallel", "zero", "names"),
    [
        ({"data": 2}, 3, ("cheap", "keep")),
        pytest.param({"data": 2}, 3, tuple(POLICIES), marks=pytest.mark.storm),
        ({"tensor": {"size": 2, "mode": "1d"}}, 0, ("layers", "keep")),
        ({"pipeline": 2}, 0, ("cheap", "layers")),
        ({"sequence": {"size": 2, "mode": "ring"}}, 2, ("layers", "keep")),
    ],
    ids=["ZeRO 3", "all", "tensor", "pipeline", "sequence"],
)
def test_losses_and_weights_are_the_bits_of_none_under_every_axis(parallel, zero, names):
    expected, _ = trained(parallel, zero=zero)
    for name in names:
        found, kept = trained(parallel, zero=zero, recompute=POLICIES[name])
        assert all(map(torch.equal, found, expected)), name
        dropped = {name for line in kept.lines for name in line.dropped}
        assert dropped, f"{name} computes something again"
        assert all(line.layer.startswith("blocks.") for line in kept.lines), "names are those of the whole model"


def gelu_and_none(name):
    first = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    return nn.Sequential(first, nn.Linear(4, 4)) if name == "some" else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.ranks(2)
def test_a_stage_may_have_no_layer_but_not_all_of_them():
    with Strategy(parallel={"pipeline": 2}, pipeline={"microbatches": 2}, recompute="layers") as strategy:
        whole = gelu_and_none("some")
        model, optimizer = strategy.initialize(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
        batch = (torch.ones(4, 4), torch.ones(4, 4))
        loss = strategy.execute_pipeline(iter([batch]), model, nn.functional.mse_loss, optimizer)
        assert loss.isfinite()
        whole = gelu_and_none("none")
        with pytest.raises(ValueError, match="has no such module"):
            strategy.initialize(whole, torch.optim.SGD(whole.parameters(), lr=0.1))


def test_models_without_an_optimizer_are_left_and_several_have_theirs_each():
    first, second, teacher = gelu_and_none("some"), gelu_and_none("some"), gelu_and_none("none")
    with Strategy(recompute="layers") as strategy:
        parameters = [*first.parameters(), *second.parameters()]
        strategy.initialize(first, second, teacher, torch.optim.SGD(parameters, lr=0.1))
        for model in (first, second):
            model(torch.ones(2, 4)).sum().backward()
            assert [line.layer for line in saved(model).lines] == ["0"]
        with pytest.raises(ValueError, match="no layer"):
            saved(teacher)


def test_it_comes_after_what_replaces_modules_and_can_be_replaced():
    class Mine(Plugin):
        name = "mine"

    class Own(Plugin):
        name = "recompute"

    with Strategy(recompute="cheap", plugins=[Mine()]) as strategy:
        names = [plugin.name for plugin in strategy.plugins]
    assert names == ["tensor", "pipeline", "device", "mine", "recompute", "tied", "zero", "precision"]
    with Strategy(recompute="cheap", plugins=[Own()]) as strategy:
        assert sum(isinstance(plugin, Own) for plugin in strategy.plugins) == 1
        assert len(strategy.plugins) == 7
    with Strategy() as strategy:
        assert "recompute" not in [plugin.name for plugin in strategy.plugins]


@pytest.mark.ranks(2)
def test_ranks_that_want_other_things_hear_of_it():
    import torch.distributed as dist

    with pytest.raises(ValueError, match="options"):
        Strategy(recompute=("layers", "layers:2")[dist.get_rank()])
    with pytest.raises(ValueError, match="recompute='lairs'"):
        Strategy(recompute="lairs")
