"""Mixtures of experts under a strategy: as on one device, wherever experts lie and whoever multiplies the loss."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import set_sharding, sharding_of
from par_layers import LoadBalancing, RouterConfig, RouterLosses, initialize, layer_set, normal, update_correction_bias_
from par_testing import assert_equal_to_one_device, storm
from par_train import Strategy

WIDTH, ROWS, LENGTH = 8, 8, 4
BALANCE = LoadBalancing(aux_loss_coef=0.3, scope="sequence", z_loss_coef=0.1, bias_update_rate=1e-2)


def blocks(layers, balance=BALANCE, *, number=2, dense_first=False, **options):
    """Norms and mixtures of experts, one after the other."""
    mixture = {
        "num_experts": 4,
        "top_k": 2,
        "num_shared_experts": 1,
        "balance": balance,
        "router": RouterConfig(scoring_func="sigmoid", correction_bias=True),
    }
    mixture |= options
    made = [layers.LayerNorm(WIDTH)] if dense_first else []
    for _ in range(number):
        made += [layers.MoE(WIDTH, 8, init=normal(0.4), **mixture), layers.LayerNorm(WIDTH)]
    return nn.Sequential(*made)


def batches(steps):
    generator = torch.Generator().manual_seed(5)
    shape = (ROWS, LENGTH, WIDTH)
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(steps)]


def adamw(model):
    """With an `eps` far above rounding, else a gradient that is nothing but rounding makes a step of full size."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def data_loss(outputs, target):
    return (outputs - target).square().mean()


def alone(steps, make):
    """The model on one device after some steps, and the loss and the norm of each."""
    model = make(layer_set(None))
    initialize(model, seed=3)
    optimizer, losses = adamw(model), []
    for inputs, target in batches(steps):
        loss = data_loss(model(inputs), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update_correction_bias_(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((float(loss.detach()), float(norm)))
    return model, losses, RouterLosses(model)


def check_trains_as_alone(parallel, *, steps=3, make=blocks, microbatches=2, schedule="1f1b", **options):
    """Weights, buffers, losses, norms and what routers say, after some steps under a strategy and on one device."""
    whole, expected, routers = alone(steps, make)
    pipeline = {"schedule": schedule, "microbatches": microbatches}
    with Strategy(parallel=parallel, clip_norm=1.0, seed=3, pipeline=pipeline, **options) as strategy:
        layers, groups = strategy.layers, strategy.groups
        model = make(layers)
        model, optimizer = strategy.initialize(model, adamw(model))
        ranks, rank, losses = groups.size(strategy.data_axes), groups.rank(strategy.data_axes), []
        for inputs, target in batches(steps):
            mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
            batch = (layers.split(inputs[mine]), target[mine])
            loss = strategy.execute_pipeline(
                iter([batch]), model, lambda outputs, target: data_loss(layers.gather(outputs), target), optimizer
            )
            outcome = optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss, group=groups[strategy.data_axes])
            losses.append((float(loss) / ranks, float(outcome.grad_norm)))
        metrics, loads = strategy.router_metrics(model), strategy.expert_load(model)
        reason = "sums in another order in fp32, over three steps of a size of 1e-2"
        assert_equal_to_one_device(model, whole, rtol=1e-5, atol=1e-6, reason=reason)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0, msg=lambda m: f"sums in another order: {m}")
        buffers = dict(whole.named_buffers())
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
        assert {name: counts.tolist() for name, counts in loads.items()} == {
            name: counts.tolist() for name, counts in routers.load().items()
        }
        for name, value in routers.take().items():
            torch.testing.assert_close(
                metrics[name].float(), value.float(), rtol=1e-5, atol=0.0, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("parallel", "zero"),
    [
        storm({"expert": 2}, 0),
        ({"expert": 2}, 3),
        ({"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}}, 1),
        storm({"pipeline": 2}, 1),
    ],
)
def test_a_mixture_trains_as_on_one_device(parallel, zero):
    check_trains_as_alone(parallel, zero=zero)


def dense_then_mixture(layers):
    """The first of two stages has no experts."""
    return nn.Sequential(*[layers.LayerNorm(WIDTH) for _ in range(3)], *blocks(layers, number=1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_stages_without_experts_take_part(schedule):
    check_trains_as_alone({"pipeline": 2}, zero=1, microbatches=4, make=dense_then_mixture, schedule=schedule)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["layers", "layers:2"])
def test_a_mixture_that_runs_again_counts_once(recompute):
    check_trains_as_alone({"expert": 2}, recompute=recompute)


FOUR = [
    {"expert": 2},
    {"expert": 4},
    {"expert": {"size": 4, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}},
    {"expert": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}},
    {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 4, "mode": "1d"}},
    {"expert": {"size": 1, "tensor": 1}, "tensor": {"size": 4, "mode": "1d"}},
    {"expert": 2, "pipeline": 2},
]


@pytest.mark.ranks(4)
def test_experts_trains_as_on_one_device_over_four_ranks():
    check_trains_as_alone(FOUR[0], zero=2)
    check_trains_as_alone(FOUR[2], zero=3)
    check_trains_as_alone(FOUR[6], zero=1)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("parallel", FOUR, ids=str)
def test_experts_train_as_on_one_device_wherever_they_lie(parallel, zero):
    check_trains_as_alone(parallel, zero=zero)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallel", [{"expert": 2}, {"pipeline": 2}])
def test_a_sum_and_its_count_weigh_the_losses_of_routers_too(parallel):
    """Rows count differently, in equal microbatches of one row; on one device each has its weight in the sum."""
    rows = torch.arange(1.0, 5.0)
    whole = blocks(layer_set(None))
    initialize(whole, seed=3)
    ((inputs, target),) = batches(1)
    routers = RouterLosses(whole)
    for row, weight in enumerate(rows):
        routers.scale = weight / rows.sum()
        error = (whole(inputs[row : row + 1]) - target[row : row + 1]).square().mean()
        (error * weight / rows.sum()).backward()
    pipeline = {"schedule": "1f1b", "microbatches": 4 if "pipeline" in parallel else 2}
    with Strategy(parallel=parallel, seed=3, pipeline=pipeline) as strategy:
        model = blocks(strategy.layers)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        ranks, rank = strategy.groups.size(strategy.data_axes), strategy.groups.rank(strategy.data_axes)
        mine = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)

        def summed(outputs, target):
            theirs, weight = target
            return ((outputs - theirs).square().mean((1, 2)) * weight).sum(), weight.sum()

        batch = (inputs[mine], (target[mine], rows[mine]))
        strategy.execute_pipeline(iter([batch]), model, summed, optimizer)
        optimizer.step()
        gradients = {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            set_sharding(gradients[name], sharding_of(parameter))
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        reason = "sums in another order in fp32"
        assert_equal_to_one_device(gradients, expected, rtol=1e-4, atol=1e-6, reason=reason)


@pytest.mark.ranks(2)
def test_backward_multiplies_the_losses_of_routers_by_its_factor():
    with Strategy(parallel={"expert": 2}, precision="fp16", seed=3) as strategy:
        model = blocks(strategy.layers)
        model, optimizer = strategy.initialize(model, adamw(model))
        loss = model(batches(1)[0][0].half()).float().square().mean()
        strategy.backward(loss, optimizer, factor=0.25)
        assert float(RouterLosses(model).scale) == 0.25 * float(optimizer.scaling.scale.value)


@pytest.mark.ranks(2)
def test_a_step_that_fp16_skips_still_moves_the_bias_of_the_choice():
    with Strategy(parallel={"expert": 2}, precision="fp16", seed=3) as strategy:
        model = blocks(strategy.layers)
        model, optimizer = strategy.initialize(model, adamw(model))
        for _ in range(3):  # microbatches
            loss = model(batches(1)[0][0].half()).float().square().mean()
            strategy.backward(loss * float("inf"), optimizer)
        assert bool(optimizer.step().skipped)
        bias = dict(model.named_buffers())["0.gate.e_score_correction_bias"]
        assert bias.abs().max() == BALANCE.bias_update_rate
        total = sum(counts.sum() for counts in strategy.expert_load(model).values())
        assert total == 2 * 3 * 2 * 2 * ROWS * LENGTH, "layers, microbatches, ranks, experts of a token"


@pytest.mark.ranks(2)
def test_the_topology_deals_out_experts_that_no_model_has():
    with Strategy(parallel={"expert": 2}) as strategy:
        model = nn.Sequential(strategy.layers.LayerNorm(WIDTH))
        with pytest.raises(ValueError, match=r"distributes experts over 2 ranks, and Sequential has no"):
            strategy.initialize(model, adamw(model))
        model = blocks(strategy.layers)
        strategy.initialize(model, adamw(model))  # nothing was changed


@pytest.mark.ranks(2)
def test_scores_that_are_nan_name_rank_and_layer_on_every_rank():
    with Strategy(parallel={"expert": 2}) as strategy:
        model = blocks(strategy.layers)
        model, _ = strategy.initialize(model, adamw(model))
        inputs = batches(1)[0][0]
        if strategy.groups.rank("expert") == 1:
            inputs[0, 0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"router '0.gate': ids of rank 1 are out of range 0 \.\. 3"):
            model(inputs)


@pytest.mark.ranks(4)
def test_the_plan_shares_experts_over_those_who_have_copies():
    for zero in range(4):
        with Strategy(parallel={"expert": 2}, zero=zero) as strategy:
            model = blocks(strategy.layers, number=1)
            model, optimizer = strategy.initialize(model, adamw(model))
            plan, inputs = strategy.plan(), batches(1)[0][0]
            strategy.backward(model(inputs[:2]).sum(), optimizer)
            held = [each for group in optimizer.param_groups for each in group["params"]]
            gradients = sum(each.grad.untyped_storage().nbytes() for each in held)
            optimizer.step()
            state = sum(value.nbytes for each in optimizer.state.values() for value in each.values())
            padding = 64 * len(held)
            assert abs(plan.memory[0].optimizer - state) <= padding
            assert abs(plan.memory[0].gradients - gradients) <= padding
            received = dict.fromkeys(("data", "expert_data"), 0.0)
            for move in plan.transfers:
                received[move.axis] += move.bytes * (move.what == "gradients")
            experts, others = 2 * 3 * WIDTH * 8, 4 * WIDTH + 3 * WIDTH * 8 + 2 * WIDTH  # router, shared expert, norm
            times = 1 if zero else 2
            assert received["expert_data"] == pytest.approx(times * 4 * experts / 2, abs=padding)
            assert received["data"] == pytest.approx(times * 4 * others * 3 / 4, abs=padding)
