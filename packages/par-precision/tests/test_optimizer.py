"""What a step does: one sum, one decision for all ranks, and nothing where a gradient was not finite."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from par_groups import GradientElsewhere, JointOptimizer, gradients
from par_precision import DynamicScale, MasterWeights, StochasticRounding, mixed
from par_testing import count_collectives, for_each

from .training import MAKERS, adamw, batch, loss_of, model, train

makers = pytest.mark.parametrize("maker", MAKERS)
PRECISIONS = ["fp32", "bf16", "bf16-amp", "fp16-amp", "fp16", "bf16-sr"]


devices = pytest.mark.parametrize("reads_freely", [True, False], ids=["as on a CPU", "as on a GPU"])


def overflow(module, optimizer):
    """A step whose gradient is infinite in one place."""
    optimizer.backward(loss_of(module, 0))
    tensor = next(p for p in module.parameters() if p.grad is not None)
    tensor.grad.view(-1)[3] = math.inf
    step = optimizer.step()
    optimizer.zero_grad()
    return step


def snapshot(module, optimizer):
    numbers = [p.detach().clone() for p in module.parameters()]
    numbers += [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return numbers + [v.clone() for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]


@makers
@devices
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_that_is_not_finite_changes_nothing_but_scale_and_counters(maker, precision, reads_freely):
    module = model()
    module, optimizer = mixed(module, MAKERS[maker](module), precision, clip_norm=1.0)
    optimizer._reads_freely = reads_freely
    train(module, optimizer, steps=2)
    before = snapshot(module, optimizer)
    step = overflow(module, optimizer)
    assert step.skipped
    assert step.grad_norm == math.inf
    after = snapshot(module, optimizer)
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert optimizer.scaling.skipped == 1
    if optimizer.scaling.scale is not None:
        assert optimizer.scaling.scale.value == 2.0**15


@makers
@devices
@pytest.mark.parametrize("precision", ["bf16", "fp16-amp"])
def test_training_that_begins_with_skips_is_training_without_them(maker, precision, reads_freely):
    """torch's fused SGD would begin with momentum that nobody has written."""
    losses = []
    for skips in (0, 3):
        module = model()
        module, optimizer = mixed(module, MAKERS[maker](module), precision, scale=DynamicScale.static(64.0))
        optimizer._reads_freely = reads_freely
        for _ in range(skips):
            overflow(module, optimizer)
        losses.append(train(module, optimizer, steps=4))
    assert losses[1] == losses[0]


@makers
@devices
def test_fp16_amp_steps_are_those_of_torchs_scaler_and_clipping(maker, reads_freely):
    """Through overflows and growth. torch's coefficient has 1e-6 added to the norm, and its fused SGD is wrong here."""
    module, reference = model(), model()
    options = {"init": 2.0**30, "interval": 3}
    _, optimizer = mixed(module, MAKERS[maker](module), "fp16-amp", clip_norm=0.5, scale=DynamicScale.torch(**options))
    optimizer._reads_freely = reads_freely
    theirs = MAKERS[maker.removesuffix(" fused") if "SGD" in maker else maker](reference)
    scaler = GradScaler("cpu", init_scale=2.0**30, growth_interval=3)
    skipped = 0
    for step in range(24):
        loss = loss_of(module, step)
        optimizer.backward(loss)
        said = optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = reference(batch(step))
        expected = (output.float() - batch(step).flip(1)).square().mean()
        scaler.scale(expected).backward()
        scaler.unscale_(theirs)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
        skipped += bool(said.skipped)
        assert optimizer.scaling.scale.value == scaler.get_scale()
        assert said.skipped == (not norm.isfinite())
        assert loss.item() == pytest.approx(expected.item(), rel=2e-3)  # fp16 products of weights 1e-6 apart
    assert 4 < skipped < 20


@pytest.mark.parametrize("fused", [True, False])
def test_values_are_clipped_after_unscaling(fused):
    module = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=fused)
    for precision in ("fp16-amp", "fp16"):
        module = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=fused)
        module, optimizer = mixed(module, optimizer, precision, clip_value=0.5, scale=1024)
        optimizer.backward(module(torch.tensor([[4.0, -0.25, -4.0]])).sum())
        assert optimizer.step().grad_norm == pytest.approx(math.sqrt(32 + 1 / 16), rel=1e-7)  # fp32 scale
        assert module.weight.tolist() == [[-0.5, 0.25, 0.5]]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16-amp", "bf16", "bf16-sr"])
def test_a_finite_gradient_so_far_above_its_limit_that_fp32_lacks_the_ratio_is_clipped_to_it(precision, fused):
    module = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(module.weight)
    inner = torch.optim.SGD(module.parameters(), lr=1.0, fused=fused)
    module, optimizer = mixed(module, inner, precision, scale=2.0**60, clip_norm=2.0**-7)
    module.weight.grad = torch.full_like(module.weight, 1e37)
    step = optimizer.step()
    assert not step.skipped
    assert step.grad_norm == pytest.approx(4e37 / 2.0**60, rel=0.01)  # a bf16 gradient
    torch.testing.assert_close(module.weight.float(), torch.full((4, 4), -(2.0**-9)), rtol=0.01, atol=0)  # bf16 weights


@pytest.mark.ranks(2)
def test_gradients_replicated_and_sharded_in_either_order_skip_on_all_ranks():
    """torch's scaler asks the first gradient's mesh alone, and lets rank 0 step."""
    mesh = init_device_mesh("cpu", (2,))
    for first, fused in zip((Replicate(), Shard(0)), (False, True), strict=True):
        placements = [first, Shard(0) if first == Replicate() else Replicate()]
        parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [each])) for each in placements]
        holder = nn.ParameterList(parameters)
        inner = torch.optim.AdamW(parameters, fused=True) if fused else torch.optim.SGD(parameters, lr=1.0)
        _, optimizer = mixed(holder, inner, "fp16-amp", group=dist.group.WORLD)
        for bad in (0, 1, None):
            for each in parameters:
                local = torch.full_like(each.to_local(), 65536.0)
                if dist.get_rank() == bad and each.placements == (Shard(0),):
                    local[0] = math.inf
                each.grad = DTensor.from_local(local, mesh, each.placements)
            assert optimizer.step().skipped == (bad is not None)
        assert optimizer.scaling.scale.value == 2.0**14
        for each in parameters:
            first_step = 1 - 1e-3 * 1e-2 - 1e-3 if fused else 1.0 - 65536 / 2**14
            torch.testing.assert_close(each.to_local(), torch.full_like(each.to_local(), first_step))


@pytest.mark.ranks(4)
def test_two_pipeline_stages_agree_whichever_has_the_infinity():
    """Each stage a mesh of two, with the parameters in the other order."""
    rank = dist.get_rank()
    stage = rank // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))["tensor"]
    placements = [Replicate(), Shard(0)] if stage == 0 else [Shard(0), Replicate()]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [each])) for each in placements]
    plain = nn.Parameter(torch.ones(2))
    holder = nn.ParameterList([*parameters, plain])
    optimizer = torch.optim.SGD([{"params": parameters}, {"params": [plain]}], lr=1.0)
    _, optimizer = mixed(holder, optimizer, "fp16-amp", group=dist.group.WORLD)
    scales = []
    for bad in (3, 0, None):
        for each in parameters:
            local = torch.ones_like(each.to_local())
            if rank == bad and each.placements == (Shard(0),):
                local[0] = math.nan
            each.grad = DTensor.from_local(local, mesh, each.placements)
        plain.grad = torch.ones(2)
        assert optimizer.step().skipped == (bad is not None)
        scales.append(optimizer.scaling.scale.value.item())
    assert scales == [2.0**15, 2.0**14, 2.0**14]


@pytest.mark.ranks(2)
def test_a_step_reduces_four_numbers_at_once_and_a_rank_without_gradients_takes_part():
    for precision in PRECISIONS:
        module = nn.Linear(4, 4)
        module, optimizer = mixed(
            module, torch.optim.AdamW(module.parameters(), fused=True), precision, group=dist.group.WORLD, clip_norm=1.0
        )
        if dist.get_rank() == 0:
            optimizer.backward(module(torch.ones(2, 4)).sum())
        with count_collectives() as counted:
            norm = optimizer.step().grad_norm
        assert counted.calls() == counted.calls("all_reduce") == 1
        assert (counted.elements(), counted.bytes()) == (4, 32)
        both = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
        dist.all_gather(both, norm)
        assert both[0] == both[1] > 0


@pytest.mark.ranks(2)
def test_a_stage_without_parameters_takes_part():
    module = nn.Linear(2, 2) if dist.get_rank() else nn.ReLU()
    optimizer = torch.optim.SGD(list(module.parameters()) or [nn.Parameter(torch.zeros(0))], lr=1.0)
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["params"] = []
    module, optimizer = mixed(module, optimizer, "bf16", group=dist.group.WORLD)
    if dist.get_rank():
        optimizer.backward(module(torch.ones(1, 2)).sum())
    assert optimizer.step().grad_norm > 0


def test_gradients_of_masters_are_found_through_the_optimizer():
    for accumulate in (False, True):
        module = model()
        module, optimizer = mixed(module, adamw(module), "bf16", masters=MasterWeights(accumulate=accumulate))
        optimizer.backward(loss_of(module, 0))
        found = {name: view for name, _, view in gradients(optimizer)}
        assert set(found) == {name for name, _ in module.named_parameters()}
        for name, parameter in module.named_parameters():
            assert found[name].dtype == (torch.float32 if accumulate else torch.bfloat16)
            assert accumulate == (type(parameter.grad) is GradientElsewhere)
            found[name].zero_()  # a handler's change is what the optimizer sees
        assert optimizer.step().grad_norm == 0
        optimizer.zero_grad()
        assert list(gradients(optimizer)) == []


def test_a_closure_is_called_once_with_gradients_on():
    module = model()
    module, optimizer = mixed(module, adamw(module), "bf16")
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append(loss_of(module, 0))
        optimizer.backward(losses[-1])

    assert optimizer.step(closure) is None  # what it returned
    assert optimizer.last.grad_norm > 0
    assert len(losses) == 1


def test_hooks_on_either_optimizer_run():
    module = model()
    inner = adamw(module)
    called = []
    inner.register_step_post_hook(lambda *_: called.append("inner"))
    module, optimizer = mixed(module, inner, "bf16")
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(module, optimizer, steps=1)
    assert called == ["before", "inner", "after"]


def test_a_loss_may_be_scaled_by_hand():
    module = model()
    module, optimizer = mixed(module, adamw(module), "fp16-amp")
    optimizer.scale(loss_of(module, 0)).backward()
    by_hand = optimizer.step().grad_norm
    optimizer.zero_grad()
    module = model()
    module, optimizer = mixed(module, adamw(module), "fp16-amp")
    optimizer.backward(loss_of(module, 0))
    assert optimizer.step().grad_norm == by_hand


def test_backward_takes_what_torchs_backward_takes():
    module = nn.Linear(2, 1)
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters()), "fp32", scale=4.0)
    loss = module(torch.tensor([[1.0, 2.0]])).sum()
    optimizer.backward(loss, gradient=torch.tensor(0.5), retain_graph=True, inputs=[module.weight])
    assert module.weight.grad.tolist() == [[2, 4]]
    assert module.bias.grad is None
    with pytest.warns(UserWarning, match="create_graph"):
        optimizer.backward(loss, create_graph=True)
    assert module.bias.grad.tolist() == [4]


def test_half_precision_losses_are_scaled_in_fp32():
    _, optimizer = mixed(module := nn.Linear(1, 1), torch.optim.SGD(module.parameters()), "fp16-amp")
    assert optimizer.scale(torch.tensor(2.0, dtype=torch.float16)) == 2.0**17


def test_a_loss_of_whole_numbers_is_refused():
    _, optimizer = mixed(module := nn.Linear(1, 1), torch.optim.SGD(module.parameters()), "fp32")
    for call in (optimizer.scale, optimizer.backward):
        with pytest.raises(TypeError, match=r"the loss has dtype torch.int64"):
            call(torch.tensor(3))


def test_groups_cannot_be_added_later():
    _, optimizer = mixed(module := nn.Linear(1, 1), torch.optim.SGD(module.parameters()), "bf16")
    with pytest.raises(RuntimeError, match="add it before mixed"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.ranks(2)
@for_each(precision=["fp16", "fp16-amp", "bf16", "fp32"])
def test_a_loss_that_is_nan_from_the_start_ends_the_run_on_all_ranks(precision):
    """One rank's alone is."""
    module = model()
    scale = DynamicScale(max_skipped=7) if precision.startswith("fp16") else DynamicScale.static(1.0, max_skipped=7)
    module, optimizer = mixed(
        module, adamw(module), precision, scale=scale, group=dist.group.WORLD, replicas=dist.group.WORLD
    )
    done = []

    def steps():
        while len(done) < 100:
            optimizer.backward(loss_of(module, 0) * (math.nan if dist.get_rank() else 1.0))
            if dist.get_rank() == 0:  # the first rank is the one that counts copies; plain ones agree after reduction
                for each in module.parameters():
                    each.grad.fill_(math.nan)
            optimizer.step()
            optimizer.zero_grad()
            done.append("step")

    with pytest.raises(
        RuntimeError, match=r"7 steps in a row were skipped, all since step 0, .*max_skipped=.* allows more than 7"
    ):
        steps()
    assert len(done) == 6


def test_finite_steps_in_between_keep_a_run_going():
    module = model()
    module, optimizer = mixed(module, adamw(module), "fp16-amp", scale=DynamicScale(max_skipped=3))
    for _ in range(4):
        overflow(module, optimizer)
        overflow(module, optimizer)
        train(module, optimizer, steps=1)
    assert optimizer.scaling.skipped == 8
    overflow(module, optimizer)
    overflow(module, optimizer)
    with pytest.raises(RuntimeError, match=r"3 steps in a row .* since step 12, .* loss scale is down to 32\."):
        overflow(module, optimizer)


def test_moments_of_more_digits_than_the_weights_come_back_exactly():
    def stepped(steps):
        torch.manual_seed(0)
        module = nn.Linear(16, 16)
        _, optimizer = mixed(
            module,
            torch.optim.AdamW(module.parameters()),
            "bf16-sr",
            rounding=StochasticRounding(moments=torch.float32),
        )
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.backward(module(torch.randn(4, 16)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        return module, optimizer

    _, saved = stepped(3)
    _, again = stepped(0)
    again.load_state_dict(saved.state_dict())
    for mine, its in zip(again.state.values(), saved.state.values(), strict=True):
        assert mine["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(mine["exp_avg_sq"], its["exp_avg_sq"])


@for_each(precision=("fp32", "bf16", "fp16"))
def test_several_optimizers_of_a_module_are_clipped_by_one_norm_and_have_one_state(precision):
    """As one optimizer with a param group for each, of which each has its own settings."""

    def groups(module):
        weights = [each for each in module.parameters() if each.ndim == 2]
        rest = [each for each in module.parameters() if each.ndim != 2]
        return [{"params": weights, "lr": 1e-2}, {"params": rest, "lr": 3e-3}]

    def run(make, count, saved=None):
        module = model()
        module, optimizer = mixed(module, make(groups(module)), precision, clip_norm=0.05)
        if saved is not None:
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        norms = []
        for step in range(count) if saved is None else range(count, 2 * count):
            optimizer.zero_grad()
            optimizer.backward(loss_of(module, step))
            norms.append(optimizer.step().grad_norm.item())
        return norms, copy.deepcopy((module.state_dict(), optimizer.state_dict()))

    def apart(given):
        return JointOptimizer(*(torch.optim.AdamW([group]) for group in given))

    expected, whole = run(torch.optim.AdamW, 4)
    norms, saved = run(apart, 2)
    more, (weights, _) = run(apart, 2, saved)
    assert norms + more == expected
    assert min(expected) > 0.05
    for name, value in whole[0].items():
        assert torch.equal(weights[name], value), name


def test_stochastic_rounding_refuses_several_optimizers():
    module = model()
    joint = JointOptimizer(adamw(module))
    with pytest.raises(ValueError, match=r"'bf16-sr' rounds the steps of one optimizer, and here are 1; use 'bf16'"):
        mixed(module, joint, "bf16-sr")


def test_the_norm_may_be_named_between_steps():
    module = nn.Linear(2, 1, bias=False)
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=1.0), "fp32")
    for limit, moved in ((None, 5.0), (1.0, 1.0), (10.0, 5.0)):
        optimizer.clip_norm = limit
        before = module.weight.detach().clone()
        optimizer.backward(module(torch.tensor([3.0, 4.0])).sum())
        assert optimizer.step().grad_norm.item() == pytest.approx(5.0)
        optimizer.zero_grad()
        assert (before - module.weight).norm().item() == pytest.approx(moved, rel=1e-5)
    with pytest.raises(ValueError, match="clip_norm is 0; give a number above 0"):
        optimizer.clip_norm = 0
    assert optimizer.clip_norm == 10.0
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=1.0), "fp32", clip_value=1.0)
    with pytest.raises(ValueError, match="give one of them"):
        optimizer.clip_norm = 1.0


def test_a_step_with_a_closure_returns_its_loss_as_torchs_own_do():
    module = nn.Linear(16, 16)
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=0.1), "bf16")

    def closure():
        optimizer.zero_grad()
        loss = module(torch.ones(2, 16)).square().mean()
        optimizer.backward(loss)
        return loss

    loss = optimizer.step(closure)
    assert loss.grad_fn is not None
    assert optimizer.step(closure).item() < loss.item()
    assert float(optimizer.last.grad_norm) > 0
    assert optimizer.step() is optimizer.last


class Free(torch.optim.SGD):
    """Weights to train with and others to evaluate with; and a `zero_grad` and a name of its own."""

    kind = "free"

    def zero_grad(self):
        super().zero_grad()

    def train(self):
        return [self.state[each] for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.mul_(0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mixed_optimizer_has_the_modes_of_the_optimizer_inside(precision):
    """Parameters that are rounded copies follow what a mode writes, and an empty entry of state is no step."""
    module = model()
    inner = Free(module.parameters(), lr=0.1)
    inner.train()
    module, optimizer = mixed(module, inner, precision)
    assert optimizer.kind == "free"
    assert not hasattr(optimizer, "swap")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.eval()
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, value * 0.5)  # exact in binary
    optimizer.backward(loss_of(module, 0))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())
