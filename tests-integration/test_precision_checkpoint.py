"""Masters, moments, scale and counters are saved by parameter name, and go on exactly, in another topology too."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import par_checkpoint
from par_precision import DynamicScale, mixed
from par_zero import shard, summon

pytest.importorskip("safetensors")

KINDS = ("plain", "FSDP2", "ZeRO 1", "ZeRO 3")
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16-amp": None}
pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning")


def model(seed):
    """37 and 13: no world divides them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(37, 13), nn.Tanh(), nn.Linear(13, 37))


def made(kind, precision, group, seed=0):
    module = model(seed)
    scale = DynamicScale(init=2.0**24, interval=3, hysteresis=2) if precision.startswith("fp16") else None
    if kind == "FSDP2":
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    if kind.startswith("ZeRO"):
        shard(module, optimizer, stage=int(kind[-1]), group=group, precision={"param_dtype": WEIGHTS[precision]})
    return mixed(module, optimizer, precision, group=group, replicas=group, scale=scale, clip_norm=0.5)


def steps(module, optimizer, first, count):
    """Every rank sees the same rows, so that plain modules stay copies."""
    for step in range(first, first + count):
        x = torch.randn(8, 37, generator=torch.Generator().manual_seed(step))
        optimizer.backward((module(x) - x.flip(1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def whole(kind, module):
    if kind.startswith("ZeRO"):
        with summon(module):
            return [p.detach().clone() for p in module.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in module.parameters()]


TYPICAL = [("FSDP2", "bf16"), ("ZeRO 1", "fp16-amp"), ("ZeRO 3", "fp16")]
REFUSED = [("ZeRO 3", "fp16-amp")]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        pytest.param(*each, marks=[] if each in TYPICAL else pytest.mark.storm)
        for each in itertools.product(KINDS, WEIGHTS)
        if each not in REFUSED
    ],
)
@pytest.mark.ranks(2, timeout=120)
def test_a_checkpoint_goes_on_exactly_in_the_middle_of_a_growth_interval(kind, precision, tmp_path):
    world = dist.group.WORLD
    module, optimizer = made(kind, precision, world)
    steps(module, optimizer, 0, 11)
    par_checkpoint.save(tmp_path / "c", model=module, optimizer=optimizer, scheduler=optimizer.scaling).wait()
    steps(module, optimizer, 11, 5)
    expected, skipped = whole(kind, module), optimizer.scaling.skipped
    module, optimizer = made(kind, precision, world, seed=1)
    par_checkpoint.load(tmp_path / "c", model=module, optimizer=optimizer, scheduler=optimizer.scaling)
    steps(module, optimizer, 11, 5)
    assert all(torch.equal(one, other) for one, other in zip(whole(kind, module), expected, strict=True))
    assert optimizer.scaling.skipped == skipped
    assert (skipped > 0) is precision.startswith("fp16")


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[] if each == "ZeRO 3" else pytest.mark.storm) for each in KINDS]
)
@pytest.mark.ranks(2, timeout=120)
def test_masters_of_every_kind_load_into_every_other(kind, tmp_path):
    world = dist.group.WORLD
    module, optimizer = made(kind, "bf16", world)
    steps(module, optimizer, 0, 3)
    par_checkpoint.save(tmp_path / "c", model=module, optimizer=optimizer).wait()
    steps(module, optimizer, 3, 2)
    expected = whole(kind, module)
    for other in KINDS:
        module, optimizer = made(other, "bf16", world, seed=1)
        par_checkpoint.load(tmp_path / "c", model=module, optimizer=optimizer)
        steps(module, optimizer, 3, 2)
        for one, its in zip(whole(other, module), expected, strict=True):
            torch.testing.assert_close(one, its, rtol=2**-7, atol=1e-4)  # a unit in bf16's last place, by other sums


@pytest.mark.parametrize(
    "kind", ["FSDP2", *(pytest.param(each, marks=pytest.mark.storm) for each in ("ZeRO 3", *KINDS[::2]))]
)
@pytest.mark.ranks(2, timeout=120)
def test_reshard_moves_masters_and_scale_to_every_kind(kind):
    """The rounded weights, which move first, must not end up in the masters."""
    world = dist.group.WORLD
    for precision in ("bf16", "fp16"):
        module, optimizer = made(kind, precision, world)
        steps(module, optimizer, 0, 11)
        source = par_checkpoint.State(model=module, optimizer=optimizer, scheduler=optimizer.scaling)
        moved = []
        for other in KINDS:
            target, its = made(other, precision, world, seed=1)
            par_checkpoint.reshard(
                source, par_checkpoint.State(model=target, optimizer=its, scheduler=its.scaling), verify=True
            )
            moved.append((other, target, its))
        steps(module, optimizer, 11, 5)
        expected = whole(kind, module)
        for other, target, its in moved:
            steps(target, its, 11, 5)
            assert its.scaling.skipped == optimizer.scaling.skipped
            for one, value in zip(whole(other, target), expected, strict=True):
                # Kinds sum in other orders: a unit in the last place of the dtype.
                torch.testing.assert_close(one, value, rtol=2**-7 if precision == "bf16" else 2**-9, atol=1e-4)


@pytest.mark.ranks(2)
def test_files_hold_masters_in_fp32_beside_weights_in_bf16(tmp_path):
    from safetensors.torch import load_file

    module, optimizer = made("FSDP2", "bf16", dist.group.WORLD)
    steps(module, optimizer, 0, 2)
    par_checkpoint.save(tmp_path / "c", model=module, optimizer=optimizer).wait()
    tensors = {}
    for file in (tmp_path / "c").rglob("*.safetensors"):
        tensors |= load_file(file)
    masters = {name: each for name, each in tensors.items() if name.endswith(".master")}
    assert sorted(name.removesuffix(".master").split("/")[-1].removeprefix("optimizer.") for name in masters) == sorted(
        name for name, _ in model(0).named_parameters()
    )
    assert {each.dtype for each in masters.values()} == {torch.float32}
    for name, each in masters.items():
        weight = tensors[name.removesuffix(".master").removeprefix("optimizer.")]
        assert torch.equal(each.bfloat16(), weight)


@pytest.mark.ranks(2)
def test_weights_alone_refresh_the_masters(tmp_path):
    source, its = made("plain", "bf16", dist.group.WORLD, seed=5)
    par_checkpoint.save(tmp_path / "c", model=source).wait()
    for kind in KINDS:
        module, optimizer = made(kind, "bf16", dist.group.WORLD)
        steps(module, optimizer, 0, 1)
        par_checkpoint.load(tmp_path / "c", model=module)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        steps(module, optimizer, 1, 1)
        assert all(torch.equal(a, b) for a, b in zip(whole(kind, module), whole("plain", source), strict=True)), kind
    assert its is not None
