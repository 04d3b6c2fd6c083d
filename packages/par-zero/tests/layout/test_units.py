"""Which modules are called and gathered by themselves; containers whose items are called, such as actor and critic."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_groups import part_of
from par_testing import count_collectives, for_each, storm
from par_zero import no_sync, reset, shard
from par_zero.layout.units import called, choose_units, places, sections

from ..helpers import STAGES, adamw, assert_near, assert_same, batch, for_each_stage, loss_of, mlp, sgd, whole

ORDERS = ["ac", "ca", "a", "c", "cca", "aa", "ac"]
"""Which item runs when, in some steps, each with its own backward."""


def both():
    """An actor and a critic of several layers."""
    return nn.ModuleDict({"actor": mlp(8, 2, seed=0), "more": nn.ModuleList([mlp(8, 3, seed=1)])})


def item(module, name):
    return module["actor"] if name == "a" else module["more"][0]


def train(module, optimizer, orders=ORDERS, *, held=None, ranks=None):
    """`held` is what no_sync is asked of in all passes of a step but the last; `ranks` are those whose data is mine."""
    ranks = (dist.get_rank(),) if ranks is None else ranks
    for step, names in enumerate(orders):
        optimizer.zero_grad()
        for number, name in enumerate(names):
            running = item(module, name)
            last = held is None or number == len(names) - 1
            with nullcontext() if last else no_sync(module if held == "container" else running):
                data = [batch(step, rank, width=8, micro=number) for rank in ranks]
                (sum(loss_of(running, each) for each in data) / len(data)).backward()
        optimizer.step()


def sharded(stage, make=adamw, module=None):
    module = both() if module is None else module
    optimizer = make(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 600})
    return module, optimizer


def test_the_items_of_containers_are_what_is_called():
    class Callable(nn.ModuleList):
        def forward(self, x):
            return self[0](x)

    first, second, third = nn.Identity(), nn.Sequential(nn.Identity()), Callable([nn.Identity()])
    nested = nn.ModuleDict({"a": nn.ModuleList([first, second]), "b": third, "c": first})
    assert called(nested) == [first, second, third]
    assert called(second) == [second]


def test_units_are_chosen_within_each_item():
    trunk = mlp(8, 2)
    module = nn.ModuleDict({"trunk": trunk, "actor": nn.Sequential(trunk, nn.Linear(8, 3)), "critic": nn.Linear(8, 1)})
    units = choose_units(module, "auto", bucket=1)
    assert units == [
        *([module], [trunk], [trunk[0]], [trunk[1]]),
        *([module["actor"]], [module["actor"][1]], [module["critic"]]),
    ]
    assert choose_units(trunk, "auto", bucket=1) == [[trunk], [trunk[0]], [trunk[1]]]
    found = places(module, units)
    assert found[trunk[1][0].weight] == (3, (0, 1))
    assert found[module["actor"][1].weight] == (5, (1,))
    assert found[module["critic"].weight] == (6, (2,))


def test_sections_are_units_and_the_largest_modules_beside_them():
    model = nn.Module()
    model.embed, model.mix = nn.Embedding(3, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model.blocks = nn.ModuleList([mlp(8, 1), nn.Linear(8, 8)])
    model.norm, model.exchange = nn.LayerNorm(8), nn.Identity()
    root = nn.Module()
    root.model, root.head = model, nn.Linear(8, 3)
    root.head.weight = model.embed.weight
    assert sections(root) == [
        *(root, model.embed, model.mix[0], model.mix[1], model.blocks[0], model.blocks[1]),
        *(model.norm, model.exchange, root.head),
    ]
    plain = nn.Module()
    plain.first, plain.second = nn.Linear(8, 8), nn.Linear(8, 8)
    assert sections(plain) == [plain, plain.first, plain.second]
    trunk = mlp(8, 2)
    items = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(8, 1)})
    assert sections(items) == [items, trunk, trunk[0], trunk[1], items["head"]]


@for_each(make=(adamw, storm(sgd)))
@pytest.mark.ranks(2)
def test_items_train_in_any_order_and_not_all_in_every_step(make):
    """The count of steps of one that did not run stays: torch passes over it too."""
    reference = both()
    train(reference, make(reference.parameters()), ranks=(0, 1))
    for held in (None, "item") if make is adamw else ("container",):
        weights = []
        for stage in STAGES if held is None and make is adamw else (0, 2, 3):  # stage 1 reduces as stage 2
            module, optimizer = sharded(stage, make)
            train(module, optimizer, held=held)
            weights.append(whole(module))
        assert_near(weights[0], dict(reference.named_parameters()))
        for each in weights[1:]:
            assert_same(each, weights[0])


@for_each_stage
@pytest.mark.ranks(2)
def test_passes_that_are_held_back_by_an_item_are_reduced_once(stage):
    module, optimizer = sharded(stage)
    reductions, told = [], []
    for held in (None, "item"):
        train(module, optimizer, ["acac"] * 2, held=held)
        with count_collectives() as counted:
            train(module, optimizer, ["acac"], held=held)
        events = [event for event in counted.events if event.op in ("all_to_all", "reduce_scatter", "all_reduce")]
        told.append(sum(event.dtype == torch.int32 for event in events))
        reductions.append(len(events) - told[-1])
    assert 0 < 4 * reductions[1] == reductions[0]
    assert told == [4 + 1, 1]  # a word each time, and after the first "a" alone, which parameters had no gradient


@for_each_stage
@pytest.mark.ranks(2)
def test_items_may_share_a_part_and_be_parts(stage):
    def trained(parallel):
        torch.manual_seed(0)
        trunk = mlp(8, 2)
        module = nn.ModuleList([trunk, nn.Sequential(trunk, nn.Linear(8, 3)), nn.Sequential(trunk, nn.Linear(8, 1))])
        optimizer = adamw(module.parameters())
        if parallel:
            shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
        for step, order in enumerate(((1, 2), (0, 1), (2,), (2, 0, 1))):
            for number in order:
                ranks = (dist.get_rank(),) if parallel else (0, 1)
                (sum(loss_of(module[number], batch(step, each, width=8)) for each in ranks) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(module) if parallel else dict(module.named_parameters())

    assert_near(trained(parallel=True), trained(parallel=False))


@pytest.mark.ranks(2)
def test_at_stage_3_only_the_item_that_runs_is_gathered():
    module, _ = sharded(3)
    seen = {}

    def look(name):
        def hook(*_):
            seen[name] = [sum(part_of(p).numel() for p in item(module, each).parameters()) for each in "ac"]

        return hook

    full = [sum(p.numel() for p in item(both(), each).parameters()) for each in "ac"]
    for name, other in ((0, 1), (1, 0)):
        running = item(module, "ac"[name])
        running[1][2].register_forward_hook(look("forward"))
        running[1][0].register_full_backward_hook(look("backward"))
        loss_of(running, batch(0, width=8)).backward()
        for when in ("forward", "backward"):
            assert full[name] / 2 < seen[when][name] < full[name]  # a unit of it is whole
            assert seen[when][other] <= full[other] / 2 + 64  # a share, and padding


@for_each_stage
@pytest.mark.ranks(2)
def test_dropping_the_gradients_of_an_item_leaves_the_others(stage):
    module, optimizer = sharded(stage)
    before = whole(module)
    for name in "ac":
        loss_of(item(module, name), batch(0, width=8)).backward()
    item(module, "a").zero_grad()
    optimizer.step()
    for name, value in whole(module).items():
        assert torch.equal(value, before[name]) is name.startswith("actor")


@for_each_stage
@pytest.mark.ranks(2)
def test_an_item_that_raised_can_be_reset(stage):
    weights = []
    for fails in (True, False):
        module, optimizer = sharded(stage)
        if fails:
            actor = item(module, "a")
            hook = actor[1][0].register_full_backward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(actor, batch(0, width=8)).backward()
            hook.remove()
            reset(actor)
        train(module, optimizer, ["ac", "ca"])
        weights.append(whole(module))
    assert_same(*weights)


@for_each_stage
@pytest.mark.ranks(2)
def test_items_may_checkpoint_with_passes_within_the_pass(stage):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for each in self:
                x = checkpoint(each, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
            return x

    weights = []
    for kind in (Checkpointed, nn.Sequential):
        module = nn.ModuleDict(
            {"actor": kind(*mlp(8, 2, seed=0)), "more": nn.ModuleList([kind(*mlp(8, 3, seed=1))])},
        )
        module, optimizer = sharded(stage, module=module)
        train(module, optimizer, ["ac", "ca", "c"])
        weights.append(whole(module))
    assert_same(*weights)
