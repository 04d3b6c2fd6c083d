"""Steps of bf16 weights without masters: equal to the same arithmetic by hand, within their bytes."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_precision import mixed, stochastic_round_
from par_precision.rounding import rounding
from par_precision.rounding.step import StochasticStep, stochastic_step_
from par_testing import default_device_type, live_storages

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = {"first": (15, 17), "second": (123,), "scale": (), "third": (3, 5, 7)}

OPTIMIZERS = {
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "AdamW amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "SGD fused momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, centered=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def named(dtype=BF16):
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def gradient(name, step):
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator).to(BF16)


def give_gradients(parameters, step):
    for name, parameter in parameters.items():
        parameter.grad = gradient(name, step).to(parameter.dtype)


def trained(make, steps=5, **options):
    """Parameters after some steps, and their optimizer; two param groups of settings of their own."""
    parameters = named()
    groups = [list(parameters.values())[:2], list(parameters.values())[2:]]
    optimizer = make([{"params": groups[0], "lr": 1e-2}, {"params": groups[1]}])
    names = {parameter: name for name, parameter in parameters.items()}
    for step in range(steps):
        give_gradients(parameters, step)
        stochastic_step_(optimizer, step, StochasticStep(names=names, **options))
    return parameters, optimizer


def same(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def by_hand(make, name, value, lr, steps, moments):
    """One parameter alone: an fp32 optimizer between which all that is kept is rounded."""
    weight, state = value.detach().clone(), {}
    for step in range(steps):
        wide = nn.Parameter(weight.float())
        optimizer = make([{"params": [wide], "lr": lr}])
        wide.grad = gradient(name, step).float()
        for slot, kept in state.items():
            optimizer.state[wide][slot] = kept.float() if kept.shape == wide.shape and slot != "step" else kept
        optimizer.step()
        stochastic_round_(weight, wide.detach(), 0, step, name=name)
        state = dict(optimizer.state[wide])
        for slot, kept in state.items():
            of_elements = isinstance(kept, torch.Tensor) and kept.shape == wide.shape and kept.dim() > 0
            if of_elements and slot != "step" and moments == BF16:
                state[slot] = torch.empty_like(kept, dtype=BF16)
                stochastic_round_(state[slot], kept, 0, step, name=f"{name}.{slot}")
    return weight, state


@pytest.mark.parametrize("moments", [BF16, FP32])
@every_optimizer
def test_a_step_is_the_optimizers_own_in_fp32_and_then_rounding(make, moments):
    initial, (parameters, optimizer) = named(), trained(make, moments=moments)
    for name, parameter in parameters.items():
        lr = 1e-2 if name in {"first", "second"} else 1e-3
        weight, state = by_hand(make, name, initial[name], lr, 5, moments)
        assert same(parameter.detach(), weight), name
        assert parameter.dim() == 0 or not same(parameter.detach(), initial[name].detach())
        for slot, kept in state.items():
            found = optimizer.state[parameter][slot]
            if isinstance(kept, torch.Tensor):
                assert found.dtype == kept.dtype, (name, slot)
                assert torch.equal(found, kept), (name, slot)


@every_optimizer
def test_the_size_of_a_piece_changes_nothing(make):
    results = [trained(make, piece=piece)[0] for piece in (1, 130, 10_000)]
    for other in results[1:]:
        assert all(same(other[name].detach(), parameter.detach()) for name, parameter in results[0].items())


@pytest.mark.parametrize(("piece", "pieces"), [(1, 4), (10_000, 1)])
def test_all_tensors_of_a_piece_are_rounded_at_once(piece, pieces, monkeypatch):
    """So that a GPU's host starts one kernel for weights and moments, of which the parameter without dims has none."""
    counts = []
    monkeypatch.setattr(rounding, "rounds_on", lambda _: lambda matrices: counts.append(len(matrices)))
    trained(OPTIMIZERS["AdamW fused"], steps=1, piece=piece)
    assert len(counts) == pieces
    assert sum(counts) == 3 * 3 + 1


def test_parameters_and_gradients_that_are_not_contiguous_step_like_others():
    results = []
    for turned in (False, True):
        parameters = named()
        if turned:
            values = {name: value.detach() for name, value in parameters.items()}
            values["first"] = values["first"].t().contiguous().t()
            values["third"] = values["third"].mT.contiguous().mT
            parameters = {name: nn.Parameter(value) for name, value in values.items()}
        optimizer = OPTIMIZERS["AdamW foreach"](parameters.values())
        names = {parameter: name for name, parameter in parameters.items()}
        for step in range(3):
            give_gradients(parameters, step)
            if turned:
                parameters["first"].grad = gradient("first", step).t().contiguous().t()
            stochastic_step_(optimizer, step, StochasticStep(names=names))
        results.append((parameters, optimizer))
    (parameters, optimizer), (others, other) = results
    for name, parameter in parameters.items():
        assert same(others[name].detach().contiguous(), parameter.detach())
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(other.state[others[name]][slot], optimizer.state[parameter][slot])


def live():
    """Bytes of the tensors that were made since `gc.freeze()`; nothing is collected, which would hide what lives."""
    return sum(each.nbytes() for each in live_storages().values())


class Watching(torch.optim.AdamW):
    """Notes how many bytes of tensors are alive right after a piece was stepped, and its elements."""

    def step(self, closure=None):
        super().step(closure)
        self.__dict__.setdefault("seen", []).append(live())
        self.__dict__.setdefault("sizes", []).append(sum(p.numel() for g in self.param_groups for p in g["params"]))


@pytest.mark.parametrize(("moments", "per_parameter"), [(BF16, 8), (FP32, 12)])
@pytest.mark.usefixtures("quick_collector")
def test_memory_is_that_of_bf16_and_one_piece(moments, per_parameter):
    count, size, piece = 10, 5000, 10_000
    parameters = [nn.Parameter(torch.randn(size).to(BF16)) for _ in range(count)]
    optimizer = Watching(parameters, fused=True)
    for step in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        stochastic_step_(optimizer, step, StochasticStep(moments=moments, piece=piece))
    assert max(optimizer.sizes) == piece
    counters = 4 * count
    assert 0 < max(optimizer.seen) <= per_parameter * count * size + 16 * piece + counters
    kept = [parameters, [parameter.grad for parameter in parameters]]
    kept += [[state[slot] for state in optimizer.state.values()] for slot in ("exp_avg", "exp_avg_sq")]
    assert sum(each.nbytes for tensors in kept for each in tensors) == per_parameter * count * size
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_hooks_run_once_a_step_and_see_the_parameters():
    parameters = named()
    optimizer = torch.optim.AdamW(parameters.values())
    groups, lists = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    seen = []
    optimizer.register_step_pre_hook(lambda *given: seen.append(("before", given)))
    optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(("after", set(optimizer.state))))
    give_gradients(parameters, 0)
    stochastic_step_(optimizer, 0, StochasticStep(piece=1))
    assert [when for when, _ in seen] == ["before", "after"]
    assert seen[0][1] == (optimizer, (optimizer,), {})  # as of step(): hooks may give other arguments in their place
    assert seen[1][1] == set(parameters.values())
    assert optimizer.param_groups == groups
    assert all(group["params"] is each for group, each in zip(optimizer.param_groups, lists, strict=True))


def test_a_learning_rate_schedule_on_the_optimizer_works_without_warnings():
    parameters = named()
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=2)
    for step in range(3):
        give_gradients(parameters, step)
        before = parameters["second"].detach().float()
        stochastic_step_(optimizer, step, StochasticStep())
        moved = (parameters["second"].float() - before) / gradient("second", step).float()
        assert abs(moved.mean() + [0.5, 0.75, 1.0][step]) < 0.05  # a rounding each
        schedule.step()


def test_parameters_of_other_dtypes_step_as_ever():
    parameters, twins = named(FP32), named(FP32)
    low = nn.Parameter(torch.ones(7, dtype=BF16))
    optimizer = torch.optim.AdamW([*parameters.values(), low])
    alone = torch.optim.AdamW(twins.values())
    for step in range(3):
        give_gradients(parameters, step)
        give_gradients(twins, step)
        low.grad = torch.ones_like(low)
        stochastic_step_(optimizer, step, StochasticStep(piece=100))
        alone.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, twins[name])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], alone.state[twins[name]]["exp_avg"])
    assert optimizer.state[low]["exp_avg"].dtype == BF16


def test_fp16_weights_work_too():
    parameter = nn.Parameter(torch.ones(1000, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=2**-12)
    parameter.grad = torch.ones_like(parameter)
    for step in range(16):
        stochastic_step_(optimizer, step, StochasticStep())
    # 16 steps of half an ulp below 1, each of variance ulp**2 / 4
    assert abs(parameter.double().mean() - (1 - 2**-8)) < 4 * math.sqrt(16 / 4 / 1000) * 2**-11


@pytest.mark.parametrize(("kind", "scalars"), [(torch.optim.NAdam, {"mu_product"}), (torch.optim.ASGD, {"eta", "mu"})])
def test_an_optimizers_own_scalars_keep_their_digits_also_beside_a_parameter_without_dims(kind, scalars):
    def stepped(optimizer, first, last):
        parameter = optimizer.param_groups[0]["params"][0]
        for _ in range(first, last):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return {slot: optimizer.state[parameter][slot] for slot in scalars}

    def made(shape):
        module = nn.ParameterList([nn.Parameter(torch.ones(shape))])
        return mixed(module, kind(module.parameters(), lr=0.01), "bf16-sr")[1]

    for shape in ((), (1,)):
        expected = stepped(kind([nn.Parameter(torch.ones(shape))], lr=0.01), 0, 40)
        optimizer = made(shape)
        stepped(optimizer, 0, 20)
        again = made(shape)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for found in (stepped(optimizer, 20, 40), stepped(again, 20, 40)):
            assert {value.dtype for value in found.values()} == {FP32}
            assert found == expected


def test_a_parameter_without_a_gradient_stays_and_has_no_state():
    parameters = named()
    optimizer = torch.optim.AdamW(parameters.values(), weight_decay=0.1)
    before = parameters["first"].detach().clone()
    parameters["second"].grad = gradient("second", 0)
    stochastic_step_(optimizer, 0, StochasticStep())
    assert same(parameters["first"].detach(), before)
    assert set(optimizer.state) == {parameters["second"]}


def test_a_step_that_found_infinities_changes_nothing():
    parameters, optimizer = trained(OPTIMIZERS["AdamW fused"], steps=2)
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    moments = {name: optimizer.state[parameter]["exp_avg"].clone() for name, parameter in parameters.items()}
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    give_gradients(parameters, 2)
    stochastic_step_(optimizer, 2, StochasticStep())
    for name, parameter in parameters.items():
        assert same(parameter.detach(), weights[name])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moments[name])
        assert optimizer.state[parameter]["step"] == 2


class Failing(torch.optim.AdamW):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise RuntimeError("as asked")
        return super().step(closure)


def test_a_step_that_fails_leaves_weights_state_and_groups():
    parameters, optimizer = trained(Failing, steps=1)
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    state = {parameter: dict(each) for parameter, each in optimizer.state.items()}
    lists = [list(group["params"]) for group in optimizer.param_groups]
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="as asked"):
        stochastic_step_(optimizer, 1, StochasticStep())
    assert all(same(parameter.detach(), weights[name]) for name, parameter in parameters.items())
    assert {parameter: dict(each) for parameter, each in optimizer.state.items()} == state
    assert [list(group["params"]) for group in optimizer.param_groups] == lists


def test_a_bf16_second_moment_follows_its_mean():
    """Its steps of a thousandth are below half of a bf16 ulp: rounded to nearest it stands still."""
    parameter = nn.Parameter(torch.zeros(2000, dtype=BF16))
    optimizer = torch.optim.AdamW([parameter], lr=0.0)
    parameter.grad = torch.ones_like(parameter)
    for step in range(600):
        stochastic_step_(optimizer, step, StochasticStep())
    found, expected = optimizer.state[parameter]["exp_avg_sq"].double(), 1 - 0.999**600
    # variance: at most 600 roundings of a chance p to move one ulp (2**-9 at most), p * ulp <= 0.001
    assert abs(found.mean() - expected) < 4 * math.sqrt(600 * 2**-9 * 1e-3 / 2000)
    assert found.mean() > 0.4


def test_names_come_from_the_caller_or_else_from_the_optimizer():
    def stepped(given, **options):
        parameter = nn.Parameter(torch.zeros(1000, dtype=BF16))
        optimizer = torch.optim.SGD([(given, parameter)] if given else [parameter], lr=2**-3)
        parameter.data.fill_(1)
        parameter.grad = torch.full_like(parameter, 2**-7)
        names = {parameter: options["name"]} if options else None
        stochastic_step_(optimizer, 0, StochasticStep(names=names))
        return parameter.detach()

    expected = torch.ones(1000, dtype=BF16)
    stochastic_round_(expected, torch.full((1000,), 1 - 2**-10), 0, 0, name="w")
    assert same(stepped("w"), expected)
    assert same(stepped("v", name="w"), expected)
    assert same(stepped(None, name="w"), expected)
    assert not same(stepped(None), expected)


@pytest.mark.ranks(4)
def test_every_cut_steps_like_one_device():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(default_device_type(), (dist.get_world_size(),))
    make = OPTIMIZERS["AdamW foreach"]
    expected, _ = trained(make, steps=2)
    for placement in (Replicate(), Shard(0)):
        parameters = {
            name: nn.Parameter(distribute_tensor(value.detach(), mesh, [placement if value.dim() else Replicate()]))
            for name, value in named().items()
        }
        values = list(parameters.values())
        optimizer = make([{"params": values[:2], "lr": 1e-2}, {"params": values[2:]}])
        names = {parameter: name for name, parameter in parameters.items()}
        for step in range(2):
            for name, parameter in parameters.items():
                parameter.grad = distribute_tensor(gradient(name, step), mesh, parameter.placements)
            stochastic_step_(optimizer, step, StochasticStep(names=names, piece=100))
        for name, parameter in parameters.items():
            assert same(parameter.full_tensor(), expected[name].detach()), (name, placement)


def test_what_cannot_work_is_refused():
    parameters = list(named().values())
    with pytest.raises(TypeError, match=r"LBFGS.*like AdamW"):
        stochastic_step_(torch.optim.LBFGS(parameters), 0, StochasticStep())
    with pytest.raises(ValueError, match=r"moments in torch.float16: keep them in"):
        StochasticStep(moments=torch.float16)
    with pytest.raises(ValueError, match="a piece of 0 elements"):
        StochasticStep(piece=0)


@pytest.mark.parametrize("fused", [True, False])
def test_clipped_gradients_are_not_rounded_on_the_way(fused):
    """The step is of fp32 gradients, whoever multiplies them; 1 - 2**-6 - 2**-9 has more digits than bf16."""
    parameter = nn.Parameter(torch.zeros(4096, dtype=BF16))
    module = nn.ParameterDict({"w": parameter})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=fused)
    module, optimizer = mixed(module, optimizer, "bf16-sr", clip_norm=64 * (1 - 2**-6 - 2**-9))
    module["w"].grad = torch.ones_like(module["w"])
    optimizer.step()
    values = module["w"].detach().float()
    assert set(values.tolist()) == {-(1 - 2**-6), -(1 - 2**-6 - 2**-8)}  # its neighbours, each half of the time
