"""State: everything is saved, and training goes on as if it had never stopped."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from par_groups import written_
from par_precision import DynamicScale, StochasticRounding, mixed
from par_testing import default_device_type

from .training import MAKERS, adamw, model, train

PRECISIONS = ["fp32", "bf16", "bf16-amp", "fp16-amp", "fp16", "bf16-sr"]


def made(precision, maker="AdamW fused", seed=0, **options):
    module = model(seed)
    scale = DynamicScale(init=2.0**24, interval=5, hysteresis=2) if precision.startswith("fp16") else None
    return mixed(module, MAKERS[maker](module), precision, clip_norm=1.0, scale=scale, **options)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # weights_only: nothing but tensors and numbers


@pytest.mark.parametrize(
    ("precision", "maker"),
    [
        *((precision, "AdamW fused") for precision in PRECISIONS),
        *((precision, maker) for precision in ("fp16", "bf16-sr") for maker in MAKERS if maker != "AdamW fused"),
        *((precision, "SGD") for precision in ("fp32", "bf16")),  # with and without masters, and no scale
    ],
)
def test_training_resumed_in_the_middle_of_a_growth_interval_goes_on_exactly(precision, maker):
    """fp16 begins with skipped steps and grows while it runs."""
    module, optimizer = made(precision, maker)
    train(module, optimizer, steps=13)
    saved = through_a_file({"module": module.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(module, optimizer, steps=12, first=13)
    skipped = optimizer.scaling.skipped
    for order in (("module", "optimizer"), ("optimizer", "module")):
        module, optimizer = made(precision, maker, seed=1)
        for part in order:  # torch's optimizers go on with the very tensors that they are given
            {"module": module, "optimizer": optimizer}[part].load_state_dict(copy.deepcopy(saved[part]))
        assert train(module, optimizer, steps=12, first=13) == expected
        assert (optimizer.scaling.skipped, optimizer.scaling.steps) == (skipped, 25)
    assert (skipped > 0) is precision.startswith("fp16")


def test_fp32_moments_of_rounded_weights_are_saved_as_they_are():
    module, optimizer = made("bf16-sr", rounding=StochasticRounding(moments=torch.float32))
    train(module, optimizer, steps=3)
    saved, weights = through_a_file(optimizer.state_dict()), copy.deepcopy(module.state_dict())
    expected = train(module, optimizer, steps=3, first=3)
    module, optimizer = made("bf16-sr", seed=1, rounding=StochasticRounding(moments=torch.float32))
    module.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    assert train(module, optimizer, steps=3, first=3) == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_loaded_weights_alone_refresh_the_masters(precision):
    source, _ = made(precision, seed=7)
    module, optimizer = made(precision)
    train(module, optimizer, steps=2)
    module.load_state_dict(source.state_dict())
    written_(module.parameters())
    for group in optimizer.param_groups:
        for name, master in zip(group["param_names"], group["params"], strict=True):
            assert torch.equal(master, source.get_parameter(name).float())
    before = copy.deepcopy(module.state_dict())
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    train(module, optimizer, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_masters_have_the_digits_from_before_the_cast():
    original = model().state_dict()
    _, optimizer = made("bf16")
    for group in optimizer.param_groups:
        for name, master in zip(group["param_names"], group["params"], strict=True):
            assert torch.equal(master, original[name])


def test_a_loaded_state_brings_its_weights():
    module, optimizer = made("bf16")
    train(module, optimizer, steps=3)
    other, its = made("bf16", seed=1)
    its.load_state_dict(optimizer.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_the_state_of_an_optimizer_that_was_not_mixed_fits():
    reference = model()
    plain = adamw(reference)
    reference(torch.ones(2, 16)).sum().backward()
    plain.step()
    _, optimizer = made("bf16")
    optimizer.load_state_dict(plain.state_dict())
    for group in optimizer.param_groups:
        for master in group["params"]:
            assert optimizer.state[master]["exp_avg"].dtype == torch.float32
            assert optimizer.state[master]["step"] == 1


def test_masters_of_another_model_are_refused_before_anything_changes():
    _, optimizer = made("bf16")
    state = optimizer.state_dict()
    state["par_precision"]["masters"].pop()
    module, optimizer = made("bf16", seed=1)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"the state has 5 masters, .* and here are 6"):
        optimizer.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.ranks(2)
def test_every_rank_of_an_fsdp2_model_saves_its_masters():
    mesh = init_device_mesh(default_device_type(), (2,))

    def sharded(seed):
        module = model(seed)
        fully_shard(module, mesh=mesh)
        return mixed(module, adamw(module), "bf16", group=dist.group.WORLD, clip_norm=1.0)

    module, optimizer = sharded(0)
    train(module, optimizer, steps=3)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = train(module, optimizer, steps=3, first=3)
    module, optimizer = sharded(1)
    optimizer.load_state_dict(saved)
    assert train(module, optimizer, steps=3, first=3) == expected


@pytest.mark.ranks(2)
def test_torchs_own_checkpoints_hold_all_masters_and_moments_and_go_on_on_other_ranks(tmp_path):
    """Parts that do not say that they are parts would be taken for replicas, and only the first rank's saved."""
    from torch.distributed.checkpoint import load, save

    meshes = init_device_mesh(default_device_type(), (2, 1), mesh_dim_names=("both", "alone"))

    def trained(mesh, steps, path=None):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(16, 9), torch.nn.Tanh(), torch.nn.Linear(9, 16))
        fully_shard(module, mesh=mesh)
        inner = torch.optim.AdamW(module.parameters(), lr=0.1)
        module, optimizer = mixed(module, inner, "bf16", group=mesh.get_group())

        def step(number):
            data = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
            optimizer.backward(module(data).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        for number in range(steps):
            step(number)
        if path is not None:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            load(state, checkpoint_id=path, process_group=mesh.get_group())
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        return module, optimizer, step

    def numbers(optimizer):
        every = optimizer.state_dict()
        tensors = [*every["par_precision"]["masters"]]
        tensors += [slots[slot] for slots in every["state"].values() for slot in ("exp_avg", "exp_avg_sq")]
        return [tensor.full_tensor() for tensor in tensors]

    module, optimizer, step = trained(meshes["both"], 2)
    save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "c")
    before = numbers(optimizer)
    _, its, step_again = trained(meshes["both"], 1, tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(numbers(its), before, strict=True))
    for number in (5, 6):
        step(number)
        step_again(number)
    assert all(torch.equal(a, b) for a, b in zip(numbers(its), numbers(optimizer), strict=True))
    _, alone, _ = trained(meshes["alone"], 1, tmp_path / "c")  # whole on each rank
    for mine, whole in zip(numbers(alone), before, strict=True):
        assert torch.equal(mine, whole)
