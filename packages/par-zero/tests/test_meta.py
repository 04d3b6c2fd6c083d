"""A model made on the meta device becomes real unit by unit in `shard`, or when a checkpoint is loaded."""

import ctypes
import gc
import resource
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import segments_of, sharding_of, written_
from par_testing import for_each, live_bytes, peak_bytes, storm
from par_zero import shard, summon

from .helpers import (
    KINDS_OF_STAGES,
    OPTIMIZERS,
    STAGES,
    adamw,
    assert_same,
    batch,
    for_each_stage,
    policies,
    sgd,
    train,
    whole,
)


class Block(nn.Module):
    """A unit within which there is another, parameters of two dtypes, and buffers that are saved and that are not."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.inner = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.Tanh())
        self.scale = nn.Parameter(torch.empty(2 * width, dtype=torch.float64))
        self.register_buffer("shift", torch.empty(width))
        self.register_buffer("fixed", torch.empty(3), persistent=False)
        self.last = nn.Linear(2 * width, width)

    def forward(self, x):
        hidden = (self.inner(self.first(x)) * self.scale).to(x.dtype)
        return x + self.last(hidden) + self.shift * self.fixed.sum()


class Model(nn.Module):
    """Tied parameters within the root and across blocks, a frozen one, and one that the root has itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Linear(11, 7, bias=False)
        self.place = nn.Parameter(torch.empty(11))
        self.blocks = nn.ModuleList(Block(11) for _ in range(3))
        self.blocks[2].last.weight = self.blocks[0].last.weight
        self.blocks[1].first.bias.requires_grad_(False)
        self.norm = nn.LayerNorm(11)
        self.head = nn.Linear(11, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = x + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.table(x)


def on_meta():
    with torch.device("meta"):
        return Model()


def fill(unit, prefix):
    """Each tensor by its name in the whole model, as a new object, as `to_empty` and many functions of users do it."""
    seen = {}
    for path, module in unit.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in seen:
                    whole_name = f"{prefix}{path}.{name}".replace("..", ".")
                    generator = torch.Generator().manual_seed(sum(map(ord, whole_name)))
                    made = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) / 3
                    parameter = isinstance(tensor, nn.Parameter)
                    seen[tensor] = nn.Parameter(made, tensor.requires_grad) if parameter else made
                tensors[name] = seen.get(tensor)


def filled():
    """The model that was filled whole, on one device."""
    model = on_meta()
    fill(model, "")
    return model


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def data():
    return [[batch(step, width=11)] for step in range(2)]


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


UNITS = {
    "auto": {"bucket": 300},
    "two joined": {"bucket": 9000},
    "joined": {"bucket": 20_000},
    "nested": {"bucket": 300, "units": lambda module: isinstance(module, Block | nn.Sequential)},
}


FILLED = [*((stage, "auto") for stage in STAGES), *((3, units) for units in UNITS if units != "auto")]
"""ZeRO stage and units: packed alike at every stage. A storm has all of both."""


@pytest.mark.parametrize(
    "cases", [FILLED, pytest.param(list(product(STAGES, UNITS)), marks=pytest.mark.storm)], ids=["typical", "all"]
)
@pytest.mark.ranks(3, timeout=120)
def test_units_that_are_filled_are_those_of_the_whole_model(cases):
    for stage, units in cases:
        assert_filled_as_the_whole(stage, units)


def assert_filled_as_the_whole(stage, units):
    model, reference = on_meta(), filled()
    before = dict(model.named_parameters(remove_duplicate=False))
    optimizer, its = sgd(trained(model)), sgd(trained(reference))
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, **policies(init_fn=fill, **UNITS[units]))
    shard(reference, its, stage=stage, group=dist.group.WORLD, **policies(**UNITS[units]))
    assert_same(whole(model), whole(reference))
    assert_same(buffers(model), buffers(reference))
    assert all(parameter is before[name] for name, parameter in model.named_parameters(remove_duplicate=False))
    for name, parameter in reference.named_parameters():
        mine = model.get_parameter(name)
        assert sharding_of(mine) == sharding_of(parameter)
        assert mine.requires_grad == parameter.requires_grad
    assert segments(optimizer) == segments(its)
    train(model, optimizer, data())
    train(reference, its, data())
    assert_same(whole(model), whole(reference))


def segments(optimizer):
    return {
        segment.name: segment.sharding
        for group in optimizer.param_groups
        for tensor in group["params"]
        for segment in segments_of(tensor)
    }


@for_each(stage=(storm(0), 3), make=OPTIMIZERS)
@pytest.mark.ranks(2, timeout=120)
def test_any_optimizer_may_be_made_of_a_model_on_meta(stage, make):
    model, reference = on_meta(), filled()
    optimizer, its = OPTIMIZERS[make](trained(model)), OPTIMIZERS[make](trained(reference))
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300}, init={"init_fn": fill})
    shard(reference, its, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    train(model, optimizer, data())
    train(reference, its, data())
    assert_same(whole(model), whole(reference))


def several(model):
    """Muon for square matrices, which it must see whole, and SGD for the rest."""
    square = [each for each in trained(model) if each.ndim == 2 and each.shape[0] == each.shape[1]]
    others = [each for each in trained(model) if all(each is not one for one in square)]
    return [torch.optim.Muon(square, lr=1e-3), sgd(others)]


@for_each_stage
@pytest.mark.ranks(2, timeout=120)
def test_several_optimizers_may_be_made_of_a_model_on_meta(stage):
    model, reference = on_meta(), filled()
    options = {"stage": stage, "group": dist.group.WORLD, "bucket": 300, "atomic": lambda group: "ns_steps" in group}
    own, its = several(model), several(reference)
    shard(model, own, **policies(init_fn=fill, **options))
    shard(reference, its, **policies(**options))
    for microbatches in data():
        for module, optimizers in ((model, own), (reference, its)):
            module(microbatches[0]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(whole(model), whole(reference))


@pytest.mark.storm
@pytest.mark.cpu(reason="units that are made on the CPU")
@pytest.mark.ranks(4)
def test_units_are_filled_under_hybrid_sharding():
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for stage in (1, 3):  # as on one group, of which the others are proven above
        model, reference = on_meta(), filled()
        optimizer, its = sgd(trained(model)), sgd(trained(reference))
        options = {"stage": stage, "group": shards, "replicas": replicas, "bucket": 300}
        shard(model, optimizer, **policies(init_fn=fill, device=torch.device("cpu"), **options))
        shard(reference, its, **policies(**options))
        train(model, optimizer, data())
        train(reference, its, data())
        assert_same(whole(model), whole(reference))


def reset(unit, _):
    """The usual way: memory for all, then each layer's own values."""
    unit.to_empty(device="cpu")
    for module in unit.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if isinstance(module, Block):
            nn.init.ones_(module.scale)
            nn.init.ones_(module.shift)
            nn.init.ones_(module.fixed)
        if isinstance(module, Model):
            nn.init.ones_(module.place)


@for_each_stage
@pytest.mark.ranks(2)
def test_drawn_values_are_alike_on_all_ranks_and_tied_parameters_stay_tied(stage):
    torch.manual_seed(dist.get_rank())
    model = on_meta()
    model.head.weight.role = "table"
    shard(
        model,
        adamw(trained(model)),
        stage=stage,
        group=dist.group.WORLD,
        overlap={"bucket": 300},
        init={"init_fn": reset},
    )
    assert model.head.weight.role == "table"
    assert model.head.weight is model.table.weight
    assert model.blocks[2].last.weight is model.blocks[0].last.weight
    theirs = [None] * dist.get_world_size()
    packed = {name for name, each in model.named_parameters() if stage == 3 or each.requires_grad}
    mine = {name: each for name, each in whole(model).items() if name in packed}
    dist.all_gather_object(theirs, mine)
    assert_same(*theirs)
    assert all(each.isfinite().all() and each.any() for name, each in mine.items() if name != "norm.bias")


@for_each_stage
@pytest.mark.ranks(2)
def test_param_dtype_keeps_copies_of_what_was_filled(stage):
    model, reference = on_meta(), filled()
    optimizer, its = adamw(trained(model)), adamw(trained(reference))
    options = {"stage": stage, "group": dist.group.WORLD, "bucket": 300, "param_dtype": torch.bfloat16}
    shard(model, optimizer, **policies(init_fn=fill, **options))
    shard(reference, its, **policies(**options))
    for one, other in zip(optimizer.param_groups[0]["params"], its.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    assert_same(whole(model), whole(reference))


class Counted:
    """Notes what is filled."""

    def __init__(self):
        self.names = []

    def __call__(self, unit, prefix):
        fill(unit, prefix)
        self.names.extend(prefix + name for name, _ in unit.named_parameters())
        self.names.extend(prefix + name for name, _ in unit.named_buffers())


@for_each(stage=KINDS_OF_STAGES, units=UNITS)
@pytest.mark.ranks(1)
def test_every_tensor_is_filled_once_under_its_first_name(stage, units):
    """But what blocks have beside tied parameters, five tensors each, which are filled once more, in vain."""
    model, counted = on_meta(), Counted()
    expected = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    shard(model, stage=stage, group=dist.group.WORLD, **policies(init_fn=counted, **UNITS[units]))
    assert set(counted.names) - {"blocks.2.last.weight"} == expected
    assert len(counted.names) <= len(expected) + 2 * 5


WIDTH, BLOCKS = 128, 6
UNIT = 4 * (WIDTH * WIDTH + WIDTH)


def zeros(unit, _):
    unit.to_empty(device="cpu")
    for parameter in unit.parameters():
        nn.init.zeros_(parameter)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_meta_is_never_there_as_a_whole(stage):
    """Nothing of it is there before it is packed; a unit is there twice while it is."""
    before = live_bytes()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert live_bytes() == before
    kept = UNIT * BLOCKS / (2 if stage == 3 else 1)
    expected = kept * (BLOCKS - 1) / BLOCKS + 2 * UNIT

    def run():
        shard(
            model,
            optimizer,
            stage=stage,
            group=dist.group.WORLD,
            overlap={"bucket": 4 * WIDTH * WIDTH},
            init={"init_fn": zeros},
        )

    peak = peak_bytes(run, before + expected + 2048) - before
    assert expected - 2048 < peak < expected + 2048, (peak, expected)
    assert live_bytes(lambda total: abs(total - before - kept) < 2048) - before < kept + 2048


def without_hidden_buffers():
    model = on_meta()
    for block in model.blocks:
        block.fixed = torch.ones(3)
    return model


def private_bytes():
    """What RLIMIT_DATA counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere RLIMIT_DATA leaves out most memory")
@pytest.mark.ranks(2, backend="gloo")
def test_a_model_that_a_rank_has_no_room_for_is_sharded_and_runs():
    """The operating system gives four fifths of what the model takes. A rank keeps half, and gathers two units."""
    width, blocks = 1152, 24
    whole_size = 4 * blocks * (width * width + width)

    def make():
        with torch.device("meta"):
            return nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))

    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: else glibc keeps some units' memory, in pieces
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    stack = 2**23  # of the thread that watches the calls of the ranks
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + int(0.8 * whole_size) + stack, most))
    try:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            zeros(make(), "")
        gc.collect()
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        shard(
            model,
            optimizer,
            stage=3,
            group=dist.group.WORLD,
            overlap={"bucket": width * width},
            init={"init_fn": zeros},
        )
        with torch.no_grad():
            assert not model(torch.ones(1, width)).any()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


@pytest.mark.cpu(reason="units that are made on the CPU")
@for_each_stage
@pytest.mark.ranks(2)
def test_without_fill_a_forward_names_the_first_that_has_no_values(stage):
    model = on_meta()
    optimizer = sgd(trained(model))
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    abstract = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta]
    assert abstract == [f"blocks.{number}.fixed" for number in range(3)], "which a load makes, not fills"

    def refuses(name, part=model):
        with pytest.raises(RuntimeError, match=rf"'{name}' has no values yet.*load a checkpoint"):
            part(torch.ones(2, 11))

    for part in (model, model.blocks[1].first, model):
        refuses("place", part)
    written_([model.place])
    refuses(r"table\.weight")
    reference = filled()
    with summon(model):
        model.load_state_dict(reference.state_dict())
    refuses(r"blocks\.0\.fixed")
    for block, other in zip(model.blocks, reference.blocks, strict=True):
        block.fixed = other.fixed.clone()
    its = sgd(trained(reference))
    shard(reference, its, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    train(model, optimizer, data())
    train(reference, its, data())
    assert_same(whole(model), whole(reference))
    assert_same(buffers(model), buffers(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_what_a_state_dict_leaves_out_has_no_values(stage):
    model, reference = without_hidden_buffers(), filled()
    shard(model, sgd(trained(model)), stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    given = {name: each for name, each in reference.state_dict().items() if name not in ("norm.bias", "blocks.1.shift")}
    with summon(model):
        nn.ModuleDict({"outer": model}).load_state_dict({f"outer.{name}": each for name, each in given.items()}, False)
    with pytest.raises(RuntimeError, match=r"'norm\.bias' has no values yet"):
        model(torch.ones(2, 11))
    with summon(model):
        nn.init.zeros_(model.norm.bias)
        nn.init.zeros_(model.blocks[1].shift)
    written_([model.norm.bias])
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.shift' has no values yet"):
        model(torch.ones(2, 11))
    written_([model.blocks[1].shift])
    model(torch.ones(2, 11))


@for_each_stage
@pytest.mark.ranks(2)
def test_a_model_of_which_a_part_is_real_keeps_that(stage):
    model = without_hidden_buffers()
    model.norm = nn.LayerNorm(11)
    nn.init.constant_(model.norm.weight, 7.0)
    shard(model, adamw(trained(model)), stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    assert whole(model)["norm.weight"].eq(7).all()
    assert not whole(model)["place"].any()


def refused(error, match, model=None, optimizer=None, **options):
    model = on_meta() if model is None else model
    before = [(each, each.is_meta, each.shape) for each in model.parameters()]
    with pytest.raises(error, match=match):
        shard(model, optimizer, stage=3, group=dist.group.WORLD, **policies(**options))
    for (one, is_meta, shape), other in zip(before, model.parameters(), strict=True):
        assert one is other
        assert (other.is_meta, other.shape) == (is_meta, shape)
    dist.barrier()


@pytest.mark.ranks(2)
def test_what_cannot_become_real_is_refused_on_all_ranks():
    refused(TypeError, "init_fn='zeros': it is a function", init_fn="zeros")
    refused(TypeError, r"device='cpu': it must be a torch\.device", device="cpu", init_fn=fill)
    refused(ValueError, "device='meta'", device=torch.device("meta"), init_fn=fill)
    model = on_meta()
    made = torch.optim.Adagrad(trained(model))
    refused(ValueError, r"Adagrad has made the state 'sum' of 'place' on the meta device", model, made, init_fn=fill)
    model = without_hidden_buffers()
    if dist.get_rank() == 0:
        model.norm = nn.LayerNorm(11)
    refused(ValueError, "rank 1 has other", model)


def left(unit, prefix):
    fill(unit, prefix)
    if prefix == "blocks.1.":
        unit.shift = torch.empty(11, device="meta")


def in_half(unit, prefix):
    fill(unit, prefix)
    unit.half()


def on_one_rank(unit, prefix):
    if dist.get_rank() == 1 and prefix == "blocks.1.":
        raise KeyError("mine")
    fill(unit, prefix)


BROKEN = {
    "left": (left, RuntimeError, r"init_fn has left 'blocks\.1\.shift' on the meta device"),
    "in half": (in_half, RuntimeError, r"init_fn has made 'blocks\.0\.\S+' torch\.float16 .* it was torch\.float"),
    "on one rank": (on_one_rank, (KeyError, ValueError), "mine"),
}


@for_each(how=BROKEN)
@pytest.mark.ranks(2)
def test_a_fill_that_fails_is_an_error_on_all_ranks(how):
    broken, error, match = BROKEN[how]
    model = on_meta()
    with pytest.raises(error, match=match) as raised:
        shard(model, stage=3, group=dist.group.WORLD, overlap={"bucket": 300}, init={"init_fn": broken})
    assert "half-way" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="sharded already"):
        shard(model, stage=3, group=dist.group.WORLD, overlap={"bucket": 300}, init={"init_fn": fill})
    dist.barrier()
