"""Exact means over items: losses weigh by what they are means over, on every rank and in every microbatch."""

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_precision import DynamicScale, mixed
from par_precision.scale.loss_weights import LossWeights
from par_testing import count_collectives

from ..training import MAKERS, adamw, loss_of, model

CPU = torch.device("cpu")
PRECISIONS = ["fp32", "bf16", "bf16-amp", "fp16-amp", "fp16", "bf16-sr"]
ITEMS = {0: [1.0] * 4, 1: [5.0]}
"""By rank: gradients of items, whose mean is 1.8, and the mean of whose means is 3."""


def together(*ranks):
    """A step of several ranks in one process: what each divides by."""
    totals = torch.stack([each.beside(torch.ones((), dtype=torch.float64)) for each in ranks]).sum(0)
    return [each.divide_(totals.clone()) for each in ranks]


def test_gradients_are_divided_by_the_mean_weight_of_the_ranks_that_have_a_loss():
    first, second, silent = (LossWeights(CPU) for _ in range(3))
    for _ in range(3):
        for each, weights in ((first, (15, 17)), (second, (torch.tensor(123), 0.0))):
            for weight in weights:
                factor = each.count(weight)
                assert factor * each.typical == weight
        typical = first.typical
        for divisor in together(first, second, silent):
            assert divisor == 155 / 2 / typical
    assert first.typical == second.typical == silent.typical == 64


def test_what_no_rank_weighs_is_divided_by_one():
    silent, ordinary = LossWeights(CPU), LossWeights(CPU)
    assert together(silent) == [1]
    assert ordinary.count(None) is None
    assert together(silent, ordinary) == [1, None]
    weighed = LossWeights(CPU)
    weighed.count(100)
    assert together(silent, weighed) == [100, 100]
    assert together(silent, weighed) == [1, 1]
    assert silent.typical == 128  # stays for the next weight


@pytest.mark.parametrize("weight", [0, math.inf, math.nan])
def test_sums_that_say_nothing_leave_what_is_typical(weight):
    weights = LossWeights(CPU)
    weights.count(100)
    together(weights)
    weights.count(torch.tensor(float(weight)))
    (divisor,) = together(weights)
    assert not (1 / divisor).isfinite() or divisor == math.inf
    assert weights.typical == 128


def test_weights_and_none_do_not_mix_within_a_step():
    for given, other in ((None, 1), (1, None)):
        weights = LossWeights(CPU)
        weights.count(given)
        with pytest.raises(ValueError, match="give every loss of a step its number of items, or none of them"):
            weights.count(other)
        weights.forget()
        weights.count(other)


def test_ranks_that_differ_all_notice_and_go_on():
    weighed, ordinary, _ = ranks = [LossWeights(CPU) for _ in range(3)]
    weighed.count(1000)
    ordinary.count(None)
    totals = torch.stack([each.beside(torch.ones((), dtype=torch.float64)) for each in ranks]).sum(0)
    for each in ranks:
        own = totals.clone()
        each.divide_(own)
        assert own[0].isnan()
    for each in ranks:
        with pytest.raises(ValueError, match="some ranks of the group gave their losses a weight"):
            each.check()
        each.check()
        assert each.typical == 1
        each.count(4)
    assert together(*ranks) == [4, 4, 4]


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, -math.inf])
def test_numbers_that_count_nothing_are_refused(weight):
    with pytest.raises(ValueError, match=rf"the weight is {weight}; give the number of items"):
        LossWeights(CPU).count(weight)


def test_a_weight_is_one_number():
    with pytest.raises(ValueError, match=r"shape \(2,\); give one number of items"):
        LossWeights(CPU).count(torch.ones(2))
    assert LossWeights(CPU).count(torch.tensor([[3]])) == 3


class Scalar(nn.Module):
    """Its gradient is the mean of what it is given."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x):
        return self.weight * x


def average(module):
    """What data parallelism does."""
    for each in module.parameters():
        if each.grad is None:
            each.grad = torch.zeros_like(each)
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()


def world():
    return {"group": dist.group.WORLD, "replicas": dist.group.WORLD}


@pytest.mark.ranks(2)
def test_means_of_4_and_of_1_item_make_the_mean_of_5():
    values = torch.tensor(ITEMS[dist.get_rank()])
    clips = (({}, 1.8), ({"clip_norm": 0.9}, 0.9), ({"clip_value": 0.9}, 0.9))
    for number, (precision, fused, (clip, expected)) in enumerate(itertools.product(PRECISIONS, (True, False), clips)):
        module = Scalar()
        scale = 1024.0 if precision.startswith("fp16") else None
        inner = torch.optim.SGD(module.parameters(), lr=1.0, fused=fused)
        module, optimizer = mixed(module, inner, precision, scale=scale, **clip, **world())
        weight = torch.tensor(len(values)) if number % 2 else len(values)
        for _ in range(2):  # the second knows what is typical
            with torch.no_grad():  # the module follows its master
                optimizer.param_groups[0]["params"][0].zero_()
            optimizer.backward(module(values).mean(), weight=weight)
            average(module)
            step = optimizer.step()
            optimizer.zero_grad()
            assert step.grad_norm.item() == pytest.approx(1.8, rel=1e-15), precision  # 4 and 5 are exact in every dtype
            (master,) = optimizer.param_groups[0]["params"]
            near = 2**-7 if precision == "bf16-sr" else 1e-6  # gradient and weight are bf16; a digit of fp32
            assert master.item() == pytest.approx(-expected, rel=near), precision


@pytest.mark.ranks(2)
def test_training_on_uneven_microbatches_is_that_of_one_device_with_all_items():
    """In fp64, with ranks that have no items at times."""
    counts = [[(15, 17), (123, 1)], [(0, 3), (7, 5)], [(4, 4), (0, 0)]]  # by step, rank, microbatch
    for clip in ({}, {"clip_norm": 0.01}):
        module, reference = model().double(), model().double()
        module, optimizer = mixed(module, adamw(module, fused=False), "fp32", **clip, **world())
        plain = adamw(reference, fused=False)
        for step, of_ranks in enumerate(counts):
            rows = torch.randn(200, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            parts = iter(rows.split([*itertools.chain(*of_ranks), 200 - sum(itertools.chain(*of_ranks))]))
            mine = [[next(parts) for _ in of_rank] for of_rank in of_ranks][dist.get_rank()]
            for part in mine:
                loss = module(part).square().sum(1)
                optimizer.backward(loss.mean() if len(part) else loss.sum(), weight=len(part))
            average(module)
            norm = optimizer.step().grad_norm
            optimizer.zero_grad()
            reference(rows[: sum(itertools.chain(*of_ranks))]).square().sum(1).mean().backward()
            limit = clip.get("clip_norm", math.inf)
            expected = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
            assert norm.item() == pytest.approx(expected.item(), rel=1e-12)  # fp64 sums in another order
            for each in reference.parameters():
                each.grad *= min(1.0, limit / expected.item())
            plain.step()
            plain.zero_grad()
        for mine, its in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_weights_ride_in_the_one_all_reduce():
    for precision in PRECISIONS:
        module = model()
        module, optimizer = mixed(module, adamw(module), precision, clip_norm=1.0, **world())
        with count_collectives() as counted:
            for step, weight in enumerate((15, torch.tensor(17), 0)):
                optimizer.backward(loss_of(module, step), weight=weight)
            optimizer.step()
        assert counted.calls() == counted.calls("all_reduce") == 1
        assert (counted.elements(), counted.bytes()) == (4, 32)


@pytest.mark.ranks(2)
def test_a_step_without_any_items_changes_nothing():
    for maker in MAKERS:
        module = model()
        module, optimizer = mixed(module, MAKERS[maker](module), "bf16", **world())
        for weight in (3, 0, 3):
            before = copy.deepcopy(module.state_dict())
            optimizer.backward(loss_of(module, 0) * weight, weight=weight)
            average(module)
            step = optimizer.step()
            optimizer.zero_grad()
            assert bool(step.skipped) is (weight == 0)
            same = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            assert same is (weight == 0)
        assert optimizer.scaling.skipped == 1


@pytest.mark.ranks(2)
def test_a_loss_that_is_nan_skips_also_where_it_weighs_nothing():
    module = model()
    module, optimizer = mixed(module, adamw(module), "fp32", **world())
    bad = dist.get_rank() == 1
    optimizer.backward(loss_of(module, 0) * (math.nan if bad else 1.0), weight=0 if bad else 3)
    average(module)
    assert optimizer.step().skipped


@pytest.mark.cpu(reason="on a device a later step reports it")
@pytest.mark.ranks(2)
def test_where_one_rank_weighs_and_one_does_not_both_raise_and_can_go_on():
    for fused in (True, False):
        module = model()
        module, optimizer = mixed(module, adamw(module, fused=fused), "bf16", **world())
        before = copy.deepcopy(module.state_dict())
        optimizer.backward(loss_of(module, 0), weight=None if dist.get_rank() else 4)
        average(module)
        with pytest.raises(ValueError, match="some ranks of the group gave their losses a weight"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        optimizer.zero_grad()
        optimizer.backward(loss_of(module, 0), weight=4)
        average(module)
        assert not optimizer.step().skipped


@pytest.mark.ranks(2)
def test_a_pipelines_last_stage_alone_weighs():
    """Each rank has a stage of one factor; the loss is the mean of their product with the items."""
    rank = dist.get_rank()
    module = Scalar(torch.float64)
    nn.init.constant_(module.weight, 2.0)
    _, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=1.0), "fp32", group=dist.group.WORLD)
    for _ in range(2):
        with torch.no_grad():
            module.weight.fill_(2.0)
        for values in ITEMS.values():
            sent = torch.empty(len(values), dtype=torch.float64)
            if rank == 0:
                output = module(torch.tensor(values, dtype=torch.float64))
                dist.send(output.detach(), 1)
                dist.recv(sent, 1)
                output.backward(sent)
            else:
                dist.recv(sent, 0)
                sent.requires_grad_()
                optimizer.scale(module(sent).mean(), weight=len(values)).backward()
                dist.send(sent.grad, 0)
        assert optimizer.step().grad_norm.item() == pytest.approx(3.6 * math.sqrt(2), rel=1e-15)
        optimizer.zero_grad()
        assert module.weight.item() == pytest.approx(2 - 2 * 1.8, rel=1e-15)


def test_a_weight_without_a_world_needs_no_group():
    module = Scalar()
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=1.0), "fp32")
    for values in ITEMS.values():
        optimizer.backward(module(torch.tensor(values)).mean(), weight=len(values))
    assert optimizer.step().grad_norm == pytest.approx(1.8)
    assert module.weight.item() == pytest.approx(-1.8)


@pytest.mark.ranks(2)
def test_a_weight_among_ranks_needs_their_group():
    module, optimizer = mixed(module := model(), adamw(module), "fp32")
    with pytest.raises(ValueError, match=r"a world of 2 ranks .* give mixed\(\) a group"):
        optimizer.backward(loss_of(module, 0), weight=3)


def test_what_ends_a_step_forgets_its_weights():
    for end in ("zero_grad", "step", "skipped step", "load_state_dict"):
        module, optimizer = mixed(module := model(), adamw(module), "bf16")
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.backward(loss_of(module, 0), weight=1000)
        if end == "skipped step":
            module[0].weight.grad[0] = math.inf
        if end in ("step", "skipped step"):
            assert bool(optimizer.step().skipped) is (end == "skipped step")
        if end == "load_state_dict":
            optimizer.load_state_dict(state)
            optimizer.inner.zero_grad()
            module.zero_grad()
        else:
            optimizer.zero_grad()
        loss = module(torch.ones(2, 16)).sum() * 0 + module[0].weight.float().sum()
        optimizer.backward(loss)  # without a weight
        count = module[0].weight.numel()
        assert optimizer.step().grad_norm.item() == pytest.approx(math.sqrt(count), rel=1e-12)


@pytest.mark.parametrize("precision", ["fp16", "fp16-amp"])
def test_weights_beyond_fp16_leave_the_scale_alone_once_they_are_known(precision):
    """A mean over a million items; the first step does not know of them yet."""
    module, optimizer = mixed(module := model(), adamw(module), precision, scale=DynamicScale(init=2.0**10))
    skipped = []
    for step in range(4):
        optimizer.backward(loss_of(module, step), weight=2_000_000)
        skipped.append(bool(optimizer.step().skipped))
        optimizer.zero_grad()
    assert skipped == [True, False, False, False]
    assert optimizer.scaling.scale.value == 2.0**9


def test_what_is_typical_is_saved():
    module, optimizer = mixed(module := model(), adamw(module), "fp16", scale=DynamicScale(init=2.0**10))
    for step in range(2):
        optimizer.backward(loss_of(module, step), weight=2_000_000)
        optimizer.step()
        optimizer.zero_grad()
    weights, state = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.backward(loss_of(module, 2), weight=2_000_000)
    expected = optimizer.step().grad_norm
    module, optimizer = mixed(module := model(1), adamw(module), "fp16", scale=DynamicScale(init=2.0**10))
    module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.backward(loss_of(module, 2), weight=2_000_000)
    assert optimizer.step().grad_norm == expected


def test_steps_without_items_leave_the_scale_and_its_counters():
    module, optimizer = mixed(module := model(), adamw(module), "fp16", scale=DynamicScale(init=2.0**10, max_skipped=3))
    for weight in (4, *(0 for _ in range(5)), 4):
        optimizer.backward(loss_of(module, 0) * bool(weight), weight=weight)
        before, scale = copy.deepcopy(module.state_dict()), optimizer.scaling.scale.state_dict()
        assert bool(optimizer.step().skipped) is (weight == 0)
        optimizer.zero_grad()
        stays = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert stays is (weight == 0)
        assert (optimizer.scaling.scale.state_dict() == scale) is (weight == 0)  # a finite step counts as one
    assert optimizer.scaling.skipped == 5


def test_a_nan_among_losses_that_weigh_nothing_halves_the_scale():
    module, optimizer = mixed(module := model(), adamw(module), "fp16", scale=DynamicScale(init=2.0**10))
    optimizer.backward(loss_of(module, 0) * math.nan, weight=0)
    assert optimizer.step().skipped
    assert optimizer.scaling.scale.value == 2.0**9
