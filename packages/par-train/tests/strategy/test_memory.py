"""`Strategy(memory=...)`: one number for each tier, the same bits as without, and what cannot be is refused."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_layers import initialize
from par_recompute import saved
from par_testing import for_each, storm
from par_train import Strategy
from par_train.strategy import plugins
from par_zero import disk_usage, residency, summon

ROWS, WIDTH = 6, 16


class Block(nn.Module):
    def __init__(self, inner=4 * WIDTH):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner)
        self.act, self.down = nn.GELU(), nn.Linear(inner, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


ELEMENTS = sum(parameter.numel() for parameter in blocks().parameters())


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(strategy, model, optimizer, number):
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
    loss = model(inputs).square().mean()
    strategy.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(memory, zero, steps=3):
    """Losses and parameters, with what was spent, and the least and the most that layers kept."""
    with Strategy(memory=memory, zero=zero) as strategy:
        model, optimizer = start(strategy)
        kept, losses = [], []
        for number in range(steps):
            losses.append(step(strategy, model, optimizer, number))
            if memory is not None:
                kept.append(saved(model).counted)
        with summon(model):
            parameters = [each.detach().clone() for each in model.parameters()]
        return [*losses, *parameters], strategy.spent, kept


def start(strategy):
    model = blocks()
    return strategy.initialize(model, adamw(model))


STATE = 5 * 4 * ELEMENTS
"""Bytes at stage 1 on 2 ranks: parameters, gradients, half of two moments, those that arrive, and a buffer for them."""
PADDING = 200
"""Bytes by which shares of ranks differ at most: they are cut at multiples of 16 elements."""
LAYER = 4 * ROWS * (3 * WIDTH + 2 + 2 * 4 * WIDTH)
"""Bytes that a block keeps by itself: the inputs of norm and products and what the norm knows of each row."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "zero", [1, pytest.param(0, marks=pytest.mark.storm), pytest.param(3, marks=pytest.mark.storm)]
)
def test_every_budget_gives_the_same_bits(zero, tmp_path):
    expected, _, _ = trained(None, zero)
    path = {"path": str(tmp_path)}
    _, spent, kept = trained({"device": 2**30}, zero)
    assert not spent.shares.part("optimizer")
    assert kept[0] < kept[1] == kept[2], "inputs alone at first, then all"
    assert "layers save all of their" in str(spent)
    everything, moments, most = spent.state, 8 * ELEMENTS / (2 if zero else 1), kept[2]
    least = everything - moments + kept[0] + most / 3 + PADDING  # no moments, and one layer runs again
    for device in (least, least + 0.4 * moments, everything + most + PADDING):
        for rooms in ({"host": 2**20}, {"disk": 2**20}, {"host": int(0.25 * moments), "disk": 2**20}):
            found, spent, kept = trained({"device": device, **rooms, **path}, zero)
            assert all(map(torch.equal, found, expected)), rooms
            assert spent.shares.part("optimizer") == pytest.approx(1), "what can is away in the first step"
            assert not spent.is_open
            assert spent.state + max(kept) <= device
            if "host" in rooms and len(rooms) == 1:
                assert spent.recalled == 0
            if device == everything + most + PADDING:
                assert max(kept) == most
                stays = "host" in rooms or bool(spent.shares.part("parameters"))  # state beside parameters on a disk
                assert stays or spent.recalled == pytest.approx(
                    moments * spent.shares.parts["optimizer"]["disk"], rel=0.01
                )
    assert "opt 25% host, 75% disk" in str(spent)


class Uneven(nn.Module):
    """Blocks of two widths between what is the root's own, and a buffer."""

    def __init__(self, units):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(20 + 64 * (n % 3)) for n in range(units))
        self.register_buffer("mean", torch.zeros(100))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x - self.mean[0]


def at_the_fullest(make, memory, zero, steps=3):
    """Losses, what was spent, and for each step the bytes of the device at its fullest moment and those kept then.

    In the first step no unit is gathered before it is needed, as nobody knows the order.
    """
    with Strategy(memory=memory, zero=zero) as strategy:
        model = make()
        model, optimizer = strategy.initialize(model, adamw(model))
        losses, held = [], []
        for number in range(steps):
            losses.append(step(strategy, model, optimizer, number))
            held.append((residency(model), saved(model).counted))
        return losses, strategy.spent, held


@pytest.mark.ranks(2)
@for_each(case=((1, 3), storm((2, 3)), (3, 3), storm((5, 3)), (3, 2), (3, 1)))
def test_at_the_fullest_moment_the_device_holds_no_more_than_its_budget(case, tmp_path):
    units, stage = case

    def make():
        return Uneven(units)

    zero = {"stage": stage, "overlap": {"bucket": 3000}}
    expected, spent, held = at_the_fullest(make, {"device": 2**30}, zero)
    # What is predicted is what is counted, but for what is left of padding, and for the units that are neighbours.
    there, kinds = held[-1][0].fullest["device"], spent.kinds
    for kind in ("parameters", "optimizer"):
        assert abs(kinds[kind] - there[kind]) <= PADDING * (units + 1)
    counted = held[-1][0].total(fullest=True)
    # The plan for a CPU counts the buffers into which gloo receives; reductions of other backends need none of them.
    received = 0 if dist.get_backend() == "gloo" else kinds["buffers"]
    limit = (1 if units < 3 else 1.1) * counted + 3 * PADDING * (units + 1) + received
    assert counted <= spent.state <= limit
    most, moments = held[-1][1] + held[0][1], kinds["optimizer"]  # inputs, and what a layer needs to run again
    away = 0.4 * (kinds["parameters"] - 400) if stage == 3 else 0
    most += 100  # there is one more count of steps for each tier, and bytes are whole
    least = spent.state - moments + most + 100
    host, disk = {"host": 2**20}, {"disk": 2**20, "path": str(tmp_path)}
    for device, rooms in ((spent.state + most, disk), (least, host), (least - away, host), (least - away, disk)):
        memory = {"device": int(device), "activations": most, **rooms}
        losses, less, held = at_the_fullest(make, memory, zero)
        assert all(map(torch.equal, losses, expected))
        assert all(each.total(fullest=True) <= less.state for each, _ in held), (held[-1][0], less.kinds)
        assert all(each.total(fullest=True) + kept <= memory["device"] for each, kept in held)
        assert less.shares.part("optimizer") == pytest.approx(1), "what can is away in the first step"
        assert bool(less.shares.part("parameters")) == (device < least)


@pytest.mark.ranks(2)
def test_at_stage_3_parameters_leave_when_state_does_not_do(tmp_path):
    zero = {"stage": 3, "overlap": {"bucket": 1000}}
    expected, *_ = trained(None, zero)
    _, whole, kept = trained({"device": 2**30}, zero)
    shares = whole.kinds["parameters"]
    unit = whole.kinds["units"] / 4
    assert 3 * unit <= shares <= 3 * unit + PADDING, "of three"
    least = whole.state - whole.kinds["optimizer"] - shares + kept[0] + kept[2] / 3 + PADDING
    for rooms in ({"host": 2**20}, {"disk": 2**20}, {"host": int(whole.kinds["optimizer"] + unit), "disk": 2**20}):
        memory = {"device": least + 0.3 * shares, "path": str(tmp_path), **rooms}
        losses, spent, held = at_the_fullest(blocks, memory, zero)
        assert all(map(torch.equal, losses, expected)), rooms
        for there, activations in held:
            assert there.now["device"]["parameters"] <= spent.kinds["parameters"]
            assert there.total(fullest=True) <= spent.state
            assert there.total(fullest=True) + activations <= memory["device"]
            away = there.now["host"]["parameters"] + there.now["disk"]["parameters"]
            assert 0.5 * shares < away <= there.total("host") + there.total("disk")
            assert there.total("host") - there.now["host"]["buffers"] <= rooms.get("host", 0)
        assert spent.shares.part("optimizer") == pytest.approx(1), "which leaves first"
        assert "param" in str(spent)
    words = "and 73.9 kB are the least: units 17.4, gradients 13.1, buffers 43.5; raise it"
    memory = {"device": 50_000, "host": 2**20}
    with Strategy(memory=memory, zero=zero) as strategy, pytest.raises(ValueError, match=words):
        start(strategy)


@pytest.mark.ranks(2)
def test_state_comes_back_from_a_disk_or_layers_keep_more_whichever_saves_more(monkeypatch, tmp_path):
    """Seconds of the disk are put in the place of those measured: where it is slow state comes back, else it stays."""
    _, spent, kept = trained({"device": 2**30}, 1)
    device = spent.state - 4 * ELEMENTS + kept[0] + LAYER + 30_000
    found = {}
    for name, rate in (("slow", 1e3), ("quick", 1e15)):
        look = lambda model, rate=rate: replace(disk_usage(model), read=rate, write=rate)  # noqa: E731
        monkeypatch.setattr(plugins, "disk_usage", look)
        found[name] = trained({"device": device, "disk": "1MB", "path": str(tmp_path)}, 1)
    assert all(map(torch.equal, found["slow"][0], found["quick"][0]))
    (_, slow, few), (_, quick, many) = found["slow"], found["quick"]
    assert slow.recalled > 0 == quick.recalled
    assert max(few) < max(many)
    assert "to memory" in str(slow)
    assert "all of it stays on the disk: saved activations save more time per byte" in str(quick)


@pytest.mark.ranks(2)
def test_a_run_goes_on_without_a_budget_and_with_another_one(tmp_path):
    expected, *_ = trained(None, 1, steps=6)
    limit = {"device": STATE, "disk": "1MB", "path": str(tmp_path), "activations": "20kB"}
    losses = []
    for number, memory in enumerate((limit, None, {**limit, "host": "1MB"})):
        with Strategy(memory=memory, zero=1) as strategy:
            model, optimizer = start(strategy)
            if number:
                assert strategy.resume(tmp_path / "run") == 2 * number
            losses += [step(strategy, model, optimizer, 2 * number + each) for each in range(2)]
            strategy.checkpoint(tmp_path / "run", step=2 * number + 2)
            if memory is not None:
                assert strategy.spent.shares.part("optimizer") == 1
    assert all(map(torch.equal, losses, expected[:6]))


@pytest.mark.ranks(2)
def test_a_tier_that_is_short_is_named_on_all_ranks_and_nothing_is_changed(tmp_path):
    for memory, words in (
        (
            {"device": "1kB"},
            r"the budget of the device is 1.0 kB, and 130 kB are the least: parameters 26, gradients 26, optimizer 26, "
            "buffers 52; raise it, or give bytes of a host or a disk, where the optimizer's state may lie",
        ),
        (
            {"device": "20kB", "host": "1GB"},
            "the budget of the device is 20.0 kB, and 104 kB are the least: parameters 26, gradients 26, buffers 52; "
            "raise it",
        ),
        (
            {"device": STATE - 9000, "host": "1kB"},
            r"the budget of the host is 1.0 kB, and 9\.\d kB are the least: optimizer 9\.\d, for which the device",
        ),
        (
            {"device": STATE - 9000, "host": "2kB", "disk": "1kB", "path": str(tmp_path)},
            r"the budget of the disk is 1.0 kB, and 7\.\d kB are the least: optimizer 7\.\d, for which the device",
        ),
    ):
        with Strategy(memory=memory, zero=1) as strategy:
            model = blocks()
            optimizer = adamw(model)
            before = copy.deepcopy(model.state_dict())
            with pytest.raises(ValueError, match=words):
                strategy.initialize(model, optimizer)
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            assert [len(group["params"]) for group in optimizer.param_groups] == [len(before)]


@pytest.mark.ranks(2)
def test_what_layers_keep_at_least_is_refused_on_all_ranks_when_it_is_known():
    with Strategy(memory={"device": STATE + 1000, "host": 0}, zero=1) as strategy:
        model, optimizer = start(strategy)
        words = r"the budget of the device is 13[01] kB, and 13[45] kB are the least: .*inputs of layers 1, one layer 4"
        with pytest.raises(ValueError, match=words + "; raise it, or train fewer rows at a time"):
            step(strategy, model, optimizer, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "80GB"}, "memory is '80GB'; give a mapping of device, host, disk, path, activations, or None"),
        ({"memory": {"gpu": 1}}, "memory has 'gpu'; it can have device, host, disk"),
        ({"memory": {"host": 1}}, "without the device's; give its bytes"),
        ({"memory": {"device": "80 gigs"}}, r"memory\['device'\]='80 gigs': a size is a number"),
        ({"memory": {"device": -1}}, r"memory\['device'\] is -1; give bytes"),
        ({"memory": {"device": 1, "disk": 1}}, "the disk needs a path"),
        ({"memory": {"device": 1}, "zero": {"stage": 1, "offload": {}}}, "zero has an `offload` of its own; pass one"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Strategy(**options)


def test_one_budget_is_for_one_optimizer():
    with Strategy(memory={"device": "1GB"}) as strategy:
        start(strategy)
        with pytest.raises(ValueError, match="used for another optimizer; use a Strategy for each"):
            start(strategy)


def test_a_model_without_layers_and_one_that_is_not_trained_are_left():
    with Strategy(memory={"device": "1GB"}) as strategy:
        model = nn.Linear(4, 4)
        model, _, teacher = strategy.initialize(model, adamw(model), blocks())
        assert strategy.spent is not None
        for one in (model, teacher):
            with pytest.raises(ValueError, match="no layer"):
                saved(one)


def cut_model(strategy):
    """Blocks of the strategy's layers, which are cut over its tensor ranks, where it has any."""
    layers = strategy.layers

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = layers.LayerNorm(WIDTH), nn.GELU()
            self.up, self.down = layers.ColumnLinear(WIDTH, 4 * WIDTH), layers.RowLinear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.down(self.act(self.up(self.norm(x))))

    return nn.Sequential(*(Cut() for _ in range(3)))


def matrices_and_the_rest(model):
    """Two optimizers, with as many slots or fewer, and two param groups in the first."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    rest = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": matrices[:2]}, {"params": matrices[2:], "lr": 1e-3}]
    return [torch.optim.AdamW(groups, lr=1e-2, fused=True), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)]


@pytest.mark.storm
@pytest.mark.ranks(4)
@for_each(zero=(1, 3), several=(False, True))
def test_a_budget_beside_tensor_ranks_and_with_several_optimizers(zero, several, tmp_path):
    def run(memory):
        parallel = {"tensor": {"size": 2, "mode": "1d"}}
        with Strategy(parallel=parallel, memory=memory, zero={"stage": zero, "overlap": {"bucket": 1000}}) as strategy:
            model = cut_model(strategy)
            initialize(model, 5)
            given = matrices_and_the_rest(model) if several else adamw(model)
            model, optimizer = strategy.initialize(model, given)
            losses, held = [], []
            for number in range(3):
                losses.append(step(strategy, model, optimizer, number))
                held.append((residency(model).total(fullest=True), 0 if memory is None else saved(model).counted))
            return losses, strategy.spent, held

    expected, _, _ = run(None)
    _, spent, held = run({"device": 2**30})
    most = held[0][1] + held[-1][1] + 200
    away = 0.5 * spent.kinds["parameters"] if zero == 3 else 0
    for rooms in ({"host": 2**20}, {"disk": 2**20, "path": str(tmp_path)}):
        device = (
            int(spent.state - spent.kinds["optimizer"] - away + most) + 200
        )  # one more count of steps for each tier
        losses, less, held = run({"device": device, "activations": most, **rooms})
        assert all(map(torch.equal, losses, expected))
        assert all(fullest <= less.state and fullest + kept <= device for fullest, kept in held)
        assert less.shares.part("optimizer") == pytest.approx(1)
        assert bool(less.shares.part("parameters")) == bool(away)
