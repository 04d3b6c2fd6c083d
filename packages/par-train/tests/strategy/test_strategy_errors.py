"""A strategy that is told nonsense says so on every rank, before anything has changed."""

import dataclasses
import gc
import inspect
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from par_checkpoint import inspect as checkpoint_of
from par_groups import ProcessGroups, Topology
from par_train import Plugin, Strategy, StrategyOptions, register_gradient_handler
from par_train.strategy.handlers import HANDLERS
from par_zero import Offload


def raises(words, call, *arguments, **keywords):
    """The call raises on this rank, and so on all."""
    with pytest.raises((ValueError, TypeError), match=words):
        call(*arguments, **keywords)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.ranks(2)
def test_options_that_make_no_sense():
    raises("precision is 'fp12'; it can be 'fp32'", Strategy, precision="fp12")
    raises("zero=4: it must be 0, 1, 2 or 3", Strategy, zero=4)
    raises(
        r"zero\['bucket'\]: .* no such option; use one of stage, .* overlap", Strategy, zero={"stage": 1, "bucket": 300}
    )
    raises(r"zero\['depth'\]: .* use one of stage, units", Strategy, zero={"stage": 1, "depth": 2})
    raises("zero=3 with precision='bf16-amp': .* use precision='bf16'", Strategy, zero=3, precision="bf16-amp")
    raises("unknown key 'tensr'", Strategy, parallel={"tensr": 2})
    raises("unexpected keyword argument 'zeros'", Strategy, zeros=1)
    with ProcessGroups(Topology({"data": 1, "expert": 2})) as groups:
        raises("has expert=2 and no view 'experts', .* with Topology.from_config", Strategy, parallel=groups)
    raises(r"plugins='my.mod:Plugin': it must be a list; pass plugins=\['my", Strategy, plugins="my.mod:Plugin")
    raises("gradient_handlers='data_parallel': it must be a list", Strategy, gradient_handlers="data_parallel")
    raises("no gradient handler is called 'mine'", Strategy, gradient_handlers=[{"type": "mine"}])
    raises("pass dict\\(type=NAME", Strategy, gradient_handlers=[{"kind": "mine"}])
    raises("zero=1: .* lacks 'data_parallel'", Strategy, zero=1, gradient_handlers=[{"type": "partial"}])
    raises(
        "no pipeline schedule is called 'x'|no schedule is called 'x'",
        Strategy,
        parallel={"pipeline": 2},
        pipeline={"schedule": "x"},
    )


def test_described_options_differ_if_a_dtype_differs():
    """Ranks compare this text, and would hang in their first collective with different dtypes."""
    precisions = [{"precision": "bf16", "output_dtype": dtype} for dtype in (torch.float32, torch.bfloat16)]
    zeros = [{"stage": 1, "precision": {"reduce_dtype": dtype}} for dtype in (torch.float32, torch.bfloat16)]
    assert len({StrategyOptions(precision=each).described() for each in precisions}) == 2
    assert len({StrategyOptions(zero=each).described() for each in zeros}) == 2


def test_described_options_differ_if_a_policy_differs_but_for_a_path():
    host, half = Offload(optimizer="host"), Offload(optimizer=0.5)
    assert len({StrategyOptions(zero={"stage": 1, "offload": each}).described() for each in (host, half)}) == 2
    disks = [{"optimizer": "disk", "path": f"/disk{rank}"} for rank in range(2)]
    orders = [{"stage": 1, "units": None}, {"units": None, "stage": 1}]
    assert len({StrategyOptions(zero=each).described() for each in orders}) == 1
    for make in (dict, Offload):
        assert len({StrategyOptions(zero={"stage": 1, "offload": make(**each)}).described() for each in disks}) == 1


@pytest.mark.ranks(2, init=False)
def test_what_cannot_be_made_leaves_nothing_running(monkeypatch):
    """Neither torch.distributed nor groups, whatever it is that fails."""
    raises("no schedule is called 'x'", Strategy, parallel={"pipeline": 2}, pipeline={"schedule": "x"})
    assert not dist.is_initialized()
    raises("experts need tensor mode '1d'", Strategy, parallel={"expert": 2, "tensor": {"size": 1, "mode": "2d"}})
    assert not dist.is_initialized()
    monkeypatch.setattr(ProcessGroups, "_meet", lambda _: int("no connection"))
    with pytest.raises(ValueError, match="invalid literal"):
        Strategy()
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_ranks_that_were_told_different_things():
    raises("rank 1 has other options than rank 0 .*; give all ranks the same", Strategy, zero=dist.get_rank())
    wrong = "fp12" if dist.get_rank() == 1 else "fp32"
    raises(
        "precision is 'fp12'" if dist.get_rank() == 1 else "rank 1: ValueError: precision is 'fp12'",
        Strategy,
        precision=wrong,
    )


@pytest.mark.ranks(2)
def test_objects_that_do_not_fit():
    strategy, model = Strategy(), nn.Linear(2, 2)
    raises("holds|is a parameter of no model that", strategy.initialize, model, sgd(nn.Linear(2, 2)))
    raises("received a list; it takes modules.*Strategy.build", strategy.initialize, [model])
    raises("received an object twice", strategy.initialize, model, model)
    raises("batch_size", strategy.initialize, DataLoader(list(range(9)), batch_size=3))
    model, optimizer = strategy.initialize(model, sgd(model))
    raises("this Linear was initialized before", strategy.initialize, model)
    raises("SGD|MixedOptimizer was initialized before", Strategy().initialize, nn.Linear(2, 2), optimizer)
    other = nn.Linear(2, 2)
    other, _ = strategy.initialize(other, sgd(other))
    raises(
        "the loss does not depend on any parameter of Linear",
        strategy.backward,
        other(torch.ones(1, 2)).sum(),
        optimizer,
    )
    raises("this SGD is not from initialize", strategy.backward, other(torch.ones(1, 2)).sum(), sgd(other))
    raises("does not train this Linear", strategy.execute_pipeline, iter([]), nn.Linear(2, 2), None, optimizer)
    raises("plan='zip'", strategy.save, model, "nowhere", plan="zip")
    raises("this Linear is not from initialize", strategy.save, nn.Linear(1, 1), "nowhere")
    strategy.backward(model(torch.ones(1, 2)).sum(), optimizer)
    raises("step\\(\\) received a closure", optimizer.step, lambda: None)
    optimizer.step(None)  # as Accelerate calls it


@pytest.mark.ranks(2)
def test_an_error_on_one_rank_is_everybodys():
    mine = nn.Linear(2, 2)
    optimizer = sgd(mine if dist.get_rank() == 0 else nn.Linear(2, 2))
    words = "rank 1: ValueError: param_groups" if dist.get_rank() == 0 else "param_groups"
    raises(words, Strategy().initialize, mine, optimizer)


@pytest.mark.ranks(2)
def test_layers_that_do_not_know_of_a_tensor_group():
    strategy = Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}})
    raises("'weight' has no sharding metadata for the 2 ranks", strategy.initialize, nn.Linear(2, 2))


@pytest.mark.ranks(2)
def test_modules_that_cannot_be_cut():
    strategy = Strategy(parallel={"pipeline": 2})
    raises("a Linear cannot be split into pipeline stages", strategy.initialize, nn.Linear(2, 2))


class Recorded(Plugin):
    """Counts what it is called with."""

    name = "recorded"
    supports_no_sync = False

    def __init__(self):
        self.seen = []

    def setup_model(self, model, optimizer, strategy):
        self.seen.append(("model", type(model), type(optimizer)))
        return nn.Sequential(model)

    def setup_optimizer(self, optimizer, model, strategy):
        self.seen.append(("optimizer", type(optimizer), type(model)))
        return optimizer

    def setup_dataloader(self, dataloader, strategy):
        self.seen.append(("dataloader", len(dataloader)))
        return list(dataloader)


@pytest.mark.ranks(2)
def test_a_plugin_sees_everything_and_may_replace_it():
    plugin = Recorded()
    with Strategy(plugins=[plugin]) as strategy:
        model = nn.Linear(2, 2)
        given = strategy.initialize(model, sgd(model), DataLoader(torch.ones(8, 2), batch_size=4))
        assert [type(each).__name__ for each in given] == ["Sequential", "MixedOptimizer", "list"]
        assert plugin.seen == [
            ("model", nn.Linear, torch.optim.SGD),
            ("optimizer", torch.optim.SGD, nn.Sequential),
            ("dataloader", 2),
        ]
        with pytest.raises(ValueError, match="'recorded' does not support no_sync"), strategy.no_sync(given[0]):
            pass


class Noted:
    """A handler that takes the data-parallel mean itself, and notes when."""

    calls = 0

    def __init__(self, model, optimizer, groups, factor=1.0):
        self.model, self.groups, self.factor = model, groups, factor

    def handle_gradient(self):
        Noted.calls += 1
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.groups["data"])
            parameter.grad /= self.groups.size("data") / self.factor


@pytest.mark.ranks(2)
def test_a_handler_takes_the_place_of_the_default_ones():
    if "noted" not in HANDLERS:
        register_gradient_handler("noted")(Noted)
    with Strategy(gradient_handlers=[{"type": "noted", "factor": 2.0}]) as strategy:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)
        before = model.weight.detach().clone()
        model, optimizer = strategy.initialize(model, sgd(model))
        for number in (1, 2):
            strategy.backward(model(torch.full((1, 2), float(dist.get_rank()))).sum(), optimizer)
            assert Noted.calls == number - 1
            optimizer.step()
            optimizer.zero_grad()
            assert Noted.calls == number
        torch.testing.assert_close(model.weight, before - 2 * 0.1 * 2 * 0.5)


@pytest.mark.ranks(2)
def test_options_that_a_handler_does_not_take():
    if "noted" not in HANDLERS:
        register_gradient_handler("noted")(Noted)
    strategy, model = Strategy(gradient_handlers=[{"type": "noted", "scale": 1}]), nn.Linear(2, 1)
    raises(r"'noted' does not take \{'scale': 1\}", strategy.initialize, model, sgd(model))


class FailsOnOne(Plugin):
    """Raises on rank 1."""

    name = "fails"

    def setup_model(self, model, optimizer, strategy):
        if dist.get_rank() == 1:
            raise OSError("the disk of rank 1")
        return model


@pytest.mark.ranks(2)
def test_what_fails_on_one_rank_is_raised_on_all():
    words = "the disk of rank 1" if dist.get_rank() == 1 else "rank 1: OSError: the disk of rank 1"
    strategy = Strategy(parallel={"pipeline": 2}, plugins=[FailsOnOne()])
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises((OSError, ValueError), match=words):
        strategy.initialize(model, sgd(model))


@pytest.mark.ranks(2)
def test_an_optimizer_of_another_model_is_refused_by_a_pipeline():
    strategy = Strategy()
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    first, _, second, of_second = strategy.initialize(first, sgd(first), second, sgd(second))
    raises("does not train this Linear", strategy.execute_pipeline, iter([]), first, None, of_second)
    raises("the strategy sets 'loss_fn' itself", Strategy, pipeline={"loss_fn": None})


@pytest.mark.ranks(2)
def test_a_loss_whose_parameters_checkpointing_hides_is_only_warned_of():
    """As with adapters in a frozen model whose blocks are checkpointed."""
    with Strategy() as strategy:
        frozen, adapter = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
        model, optimizer = strategy.initialize(nn.Sequential(frozen, adapter), sgd(adapter))
        loss = checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=True).sum()
        with pytest.warns(UserWarning, match="as far as can be seen through CheckpointFunction.*use_reentrant=False"):
            strategy.backward(loss, optimizer)
        before = adapter.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, adapter.weight)


@pytest.mark.ranks(1)
def test_loaders_are_not_kept(tmp_path):
    """Neither those that were initialized, nor iterators of others, such as one for each evaluation."""
    with Strategy() as strategy:
        model = nn.Linear(2, 2)
        model, optimizer = strategy.initialize(model, sgd(model))
        loaders = [DataLoader(torch.ones(8, 2), batch_size=2), DataLoader(torch.ones(4, 2), batch_size=2)]
        loaders[0] = strategy.initialize(loaders[0])
        for _ in range(3):  # more than an epoch of one of them
            for loader in loaders:
                strategy.execute_pipeline(loader, model, lambda outputs, _: outputs.mean(), optimizer)
        assert loaders[0].samples == 6
        kept = [weakref.ref(loader) for loader in loaders]
        del loaders, loader
        gc.collect()
        assert [reference() for reference in kept] == [None, None]
        strategy.checkpoint(tmp_path, step=1)  # the position is saved all the same
        assert checkpoint_of(tmp_path / "step-00000001").extra["loaders"] == [{"samples": 6}]


def test_help_lists_every_option_with_its_default():
    signature = inspect.signature(Strategy)
    assert sorted(signature.parameters) == sorted(field.name for field in dataclasses.fields(StrategyOptions))
    assert not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    assert signature.parameters["precision"].default == "fp32"


class JointlyScaled(torch.optim.SGD):
    """Divides by one norm of all gradients that it has."""

    @torch.no_grad()
    def step(self, closure=None):
        given = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.nn.utils.get_total_norm([each.grad for each in given])
        for each in given:
            each.grad /= norm
        return super().step(closure)


Listed = type("Prodigy", (JointlyScaled,), {"__module__": "prodigyopt", "__qualname__": "Prodigy"})


@pytest.mark.ranks(2)
def test_an_optimizer_that_would_step_otherwise_the_more_ranks_there_are():
    """Without par-zero, too, where nobody else looks."""
    part = r"optimizer={}: it would treat a shard of 'weight' .* this rank has 32 of 64 elements"
    tensor = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    for zero in (0, 1):
        strategy = Strategy(**tensor, zero={"stage": zero, "update": {"elementwise": True}})
        model = strategy.layers.ColumnLinear(8, 8, bias=False)
        words = r"elementwise=True for param_groups\[0\] of the Muon: this class does not .*remove elementwise"
        raises(words, strategy.initialize, model, torch.optim.Muon(model.parameters()))
        strategy = Strategy(**tensor, zero=zero)
        model = strategy.layers.ColumnLinear(8, 8, bias=False)
        strategy.initialize(model, torch.optim.Muon(model.parameters()))  # one of the ranks steps the whole weight
    strategy = Strategy(**tensor, gradient_handlers=[{"type": "partial"}])
    model = strategy.layers.ColumnLinear(8, 8, bias=False)
    raises(part.format("Adafactor"), strategy.initialize, model, torch.optim.Adafactor(model.parameters()))
    strategy.initialize(model, sgd(model))
    strategy = Strategy(gradient_handlers=[{"type": "partial"}])
    model = strategy.layers.ColumnLinear(8, 24, bias=False, blocks=3)
    words = "optimizer=Muon: it would update 'weight' as one tensor, .* lists 3 in it, .* use 'data_parallel'"
    raises(words, strategy.initialize, model, torch.optim.Muon(model.parameters()))
    for parallel in (tensor["parallel"], {"pipeline": 2}):
        ranks = f"each of 2 {next(iter(parallel))} ranks"
        for option, kind, words in (
            ("atomic", JointlyScaled, "atomic=True for .* of the JointlyScaled: a trial shows .* in other tensors"),
            ("elementwise", JointlyScaled, "elementwise=True for .* of the JointlyScaled: a trial shows"),
            ("", JointlyScaled, f"optimizer=JointlyScaled: par-zero does not know .* {ranks} .*dict.elementwise=True"),
            ("", Listed, f"optimizer=Prodigy: .* by a quantity of all of them, .* {ranks} has only"),
        ):
            strategy = Strategy(parallel=parallel, zero={"stage": 0, "update": {option: True} if option else {}})
            layers = strategy.layers
            model = nn.Sequential(layers.ColumnLinear(8, 8), layers.RowLinear(8, 8))
            raises(words, strategy.initialize, model, kind(model.parameters(), lr=0.1))
    strategy = Strategy()
    model = nn.Linear(8, 8)
    strategy.initialize(model, JointlyScaled(model.parameters(), lr=0.1))  # all ranks see all
