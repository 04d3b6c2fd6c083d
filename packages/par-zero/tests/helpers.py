"""What the tests share: small models, optimizers, steps on data that differs by rank, and whole parameters."""

import sys
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each, storm
from par_testing.optimizers import NormScaled
from par_zero import ShardOptions, no_sync, predict_step, shard, summon
from par_zero._engine import Engine
from par_zero.offload.errors import DiskErrors
from par_zero.programs.record import StepRecord

STAGES = (0, 1, 2, 3)
KINDS_OF_STAGES = (0, storm(1), 2, 3)
"""For tests that ask one thing of every stage: stage 1 reduces, steps and gathers as stage 2 does."""


def _check_program(record):
    """That a step was a valid program, and that its ledger and its prediction are the bytes that were counted."""
    if not all(chunk.flat.untyped_storage().resizable() for chunk in record.chunks):
        return  # NumPy has seen it, so its memory is not given back
    found = record.last
    if found is None:
        return  # more entries than are kept
    *_, (_, held) = found.walk()
    counted, fullest = record._meter.now, record._meter.fullest
    peak = sum(fullest.values())
    # What a disk cannot take stays in memory, which no program knows.
    if record.disk_errors not in _FAILED:
        assert held == dict(counted), f"{found}\nends with {held}, counted {dict(counted)}"
        assert peak == sum(found.peak().values()), f"{found}\nis fullest with {found.peak()}, counted {dict(fullest)}"
        _check_storages(record.engine(), found, held, record._meter)
    _check_prediction(record, found, peak)


def _check_storages(engine, found, held, meter):
    """That the ledger's bytes at the end of a step are those of the storages that exist."""
    for _ in range(100):
        now = engine.residency().now["device"]
        there = {kind: now[kind] for kind in held}
        # The step drops the gradients of unused parameters, which the ledger counts until `zero_grad`. If it steps in
        # backward, the ledger knows of each that is dropped.
        dropped = sum(
            tensor.nbytes
            for each in engine._reducer.gradients
            for tensor in each._stepped
            if each.is_cast and tensor.grad is None
        )
        if dict(meter.now) in (there, {**there, "gradients": there["gradients"] + dropped}):
            return
        time.sleep(0.01)  # a thread may step, and drop gradients, meanwhile
    raise AssertionError(f"{found}\nends with {dict(meter.now)}, storages have {there}")


def _check_prediction(record, found, peak):
    """That the peak that was predicted in `shard` is the counted one, or at most that if reductions have no bound.

    It is checked until a step is another than the predicted one: the passes of the first step, forwards and backwards
    of all units in which all gradients come in the order of registration, perhaps under `no_sync`. Memory then depends
    on what the loop does, as after evaluations, `summon`, failures, and unused or recomputed units, also in later
    passes, which follow what earlier ones did. What a disk cannot take stays in memory, and a write may fail later on
    one rank. Within a budget a policy decides which units stay, and with experts below stage 3 chunks wait until
    backward has left a section of the model, which no program has.
    """
    record.is_predicted &= all(map(all, record._reducer.usage._here))
    record.is_predicted &= record.disk_errors not in _FAILED
    if record.is_predicted and record.predicted is None:
        record.predicted = record.predict(_passes(found))
    record.is_predicted = record.is_predicted and any(_events(found) == _events(each) for each in record.predicted)
    if not record.is_predicted:
        return
    operations = [entry.op for entry in found.entries]
    if found.is_late and "fetch" in operations[: operations.index("S")]:
        return  # a thread has stepped pieces of the step before beside this forward, at any pace
    starts = [_without_late_pieces(each) for each in record.predicted if each.start == found.start]
    if record._model.inflight is None:
        most = max(sum(each.peak().values()) for each in record.predicted)
        assert peak <= most, f"{found}\npredicted {most} at most, counted {peak}"
    else:
        assert _without_late_pieces(found) in starts, f"{found}\npredicted {record.predicted[-1]}"
        assert peak in [sum(each.peak().values()) for each in starts], f"{found}\ncounted {peak}"


def _without_late_pieces(program):
    """A program without the pieces of a thread, which may update them while the next step begins."""
    pieces = {entry.of for entry in program.entries if entry.op in ("fetch", "evict") and program.is_late}
    return replace(program, entries=tuple(entry for entry in program.entries if entry.of not in pieces))


def _passes(program):
    """Whether each pass of a step reduced gradients."""
    passes, ops = [], set()
    for entry in program.entries:
        ops.add(entry.op)
        if entry.op == "E":
            passes += [] if "S" in ops else [bool(ops & {"scatter", "reduce"})]
            ops = set()
    return tuple(passes)


def _events(program):
    """What the model and the loop do in a step."""
    gathers = [entry for entry in program.entries if entry.op == "gather"]
    events = [entry for entry in program.entries if entry.op in ("F", "R", "B", "C", "zero", "S", "E")]
    # Below stage 3, gradients that have come in another order on another rank show in the order of gathers alone.
    return events, Counter(gathers) if any(entry.op == "F" for entry in events) else gathers


def _watch_predicted(engine, parameters, watch=Engine.watch):
    watch(engine, parameters)
    record = engine._program
    record.chunks, record.predicted = engine._chunks, None
    record.engine = weakref.ref(engine)
    record.disk_errors = engine._hooks.disk_tier and engine._hooks.disk_tier.errors
    record.is_predicted = engine._steps is None and engine._sections is None


Engine.watch = _watch_predicted


_FAILED = weakref.WeakSet()
"""What has told of a disk that could not be written."""


def _note_failure(errors, error, add_unwritten=DiskErrors.add_unwritten):
    _FAILED.add(errors)
    add_unwritten(errors, error)


DiskErrors.add_unwritten = _note_failure


def _end_checked(record, end_step=StepRecord.end_step):
    end_step(record)
    if sys.getprofile() is None:  # else somebody lists what a step calls
        _check_program(record)


def _forget(record, forget=StepRecord.forget):
    forget(record)
    record.is_predicted = False


StepRecord.forget = _forget
StepRecord.end_step = _end_checked  # every step of every test


for_each_stage = for_each(stage=(0, 1, storm(2), 3))
"""Of a test that asks one thing more: 2 shards the gradients of 1 as 3 does, and is itself in test_equality.py."""


class Uneven(nn.Module):
    """Sizes that no world divides, and a layer that is never used.

    All of it is smooth: at the bend of a ReLU one rounding, which differs between CPUs, would move a whole gradient.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(123, 253)
        self.blocks = nn.ModuleList([nn.Linear(253, 253, bias=False), nn.Linear(253, 512)])
        self.never = nn.Linear(17, 3)
        self.norm = nn.LayerNorm(512)
        self.last = nn.Linear(512, 7)

    def forward(self, x):
        x = nn.functional.gelu(self.first(x))
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(self.norm(x))


def uneven(seed=0):
    torch.manual_seed(seed)
    return Uneven()


def mlp(width=8, depth=3, seed=0):
    """Blocks of two linears each: one unit a block where `bucket` is small."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(depth)]
    return nn.Sequential(*blocks)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True)


def adamw(parameters, **options):
    """With an `eps` far above rounding, else a gradient that is nothing but rounding makes a step of full size."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, **{"foreach": True, **options})


OPTIMIZERS = {
    "sgd": sgd,
    "fused": lambda parameters: adamw(parameters, fused=True, foreach=None),
    "foreach": adamw,
    "single": lambda parameters: adamw(parameters, foreach=False),
}


POLICY_OF = {
    **dict.fromkeys(("bucket", "inflight", "gather_group"), "overlap"),
    **dict.fromkeys(("param_dtype", "reduce_dtype", "reduce_op"), "precision"),
    **dict.fromkeys(("elementwise", "atomic", "tensor_group"), "update"),
    **dict.fromkeys(("init_fn", "device"), "init"),
}


def policies(**options):
    """Keywords of `shard`, from fields of its policies, which tests vary one by one."""
    keywords = {}
    for name, value in options.items():
        if name in POLICY_OF:
            keywords.setdefault(POLICY_OF[name], {})[name] = value
        else:
            keywords[name] = value
    return keywords


def predicted_tiers(module, optimizer, stage, offload, **options):
    """Bytes by tier and kind of a module before `shard`, whose options are those of `policies`."""
    given = ShardOptions.of(**policies(**options))
    return predict_step(
        module, optimizer, stage=stage, ranks=dist.get_world_size(), options=given, offload=offload
    ).tiers


def sharded(module, stage, make=adamw, **options):
    """A sharded module and its optimizer, over the world; small buckets, so that there are several chunks."""
    return shard(
        module, make(module.parameters()), stage=stage, group=dist.group.WORLD, **policies(**{"bucket": 300, **options})
    )


def batch(step, rank=None, width=123, rows=4, micro=0):
    """A rank's data of a step; by default this rank's."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(rows, width, generator=generator)


def joint(step, width=123, world=None, **options):
    """The data of all ranks."""
    return torch.cat([batch(step, rank, width, **options) for rank in range(world or dist.get_world_size())])


def loss_of(module, data):
    return module(data).square().mean()


def train(module, optimizer, data, *, deferred=None):
    """A step for each list of microbatches; `deferred` is a no_sync for all of them but the last."""
    for microbatches in data:
        optimizer.zero_grad()
        for number, each in enumerate(microbatches):
            last = number == len(microbatches) - 1
            with nullcontext() if last or deferred is None else deferred():
                loss_of(module, each).backward()
        optimizer.step()


def deferred(module):
    return lambda: no_sync(module)


def whole(module):
    """Copies of whole parameters, by name."""
    with summon(module):
        return copies(module)


def copies(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), (name, (tensor - other[name]).abs().max())


def assert_near(one, other, rtol=1e-5, atol=1e-6):
    """Of sums in another order: a few roundings, times the steps."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=rtol, atol=atol, msg=lambda text, name=name: name + text)


class NewtonSchulz(torch.optim.Optimizer):
    """What Muon does, in the dtype of the parameters: a matrix moves by its momentum, made orthogonal."""

    def __init__(self, parameters, lr=0.05, momentum=0.9, weight_decay=0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.ndim != 2:
                    raise ValueError(f"a parameter has {parameter.ndim} dims; it steps matrices alone")
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(orthogonal(momentum), alpha=group["lr"])
        return loss


def orthogonal(matrix):
    """The matrix with singular values near one, by five steps of Newton and Schulz."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def matrices_and_rest(module):
    """The parameters that a matrix optimizer steps, and the others."""
    parameters = list(module.parameters())
    return [each for each in parameters if each.ndim == 2], [each for each in parameters if each.ndim != 2]


WHOLE = {"Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon, "NormScaled": NormScaled}


class Stumbling(torch.optim.AdamW):
    """Fails once when it is told to, in the main thread, before it has stepped anything."""

    fails = False

    def step(self, closure=None):
        if type(self).fails:
            type(self).fails = False
            raise ArithmeticError("a step stumbles")
        return super().step(closure)
