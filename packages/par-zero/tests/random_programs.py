"""Training programs as values: printed as code, and run on a sharded module or in one process."""

from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_groups import gradients
from par_zero import Offload, no_sync, reset, shard, summon

from .helpers import batch, copies, matrices_and_rest, policies

EXPERTS, WIDTH, HIDDEN = 4, 6, 9

ALL = "0 1 2 3 h"
"""What runs all that a model has: its experts in order, and its head."""


class Printed:
    """A dataclass whose text leaves out what has its default, and can be pasted."""

    def __repr__(self):
        given = [each for each in fields(self) if getattr(self, each.name) != each.default]
        return f"{type(self).__name__}({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in given)})"


@dataclass(frozen=True, repr=False)
class Forward(Printed):
    """A forward whose loss is stored under a letter.

    Args:
        loss: The letter, which no other forward of the step has.
        runs: What each rank runs, in order, or one text for all ranks: "2" is an expert, "2-" its first layer only, "h"
            the head; "!" raises there, and "?" raises when backward comes there.
        checkpoint: Activation checkpointing of experts: "reentrant", "plain" or None.
    """

    loss: str
    runs: tuple[str, ...] = (ALL,)
    checkpoint: str | None = None


@dataclass(frozen=True, repr=False)
class Backward(Printed):
    """A backward of the sum of some losses; `retain` is for a graph that another backward goes through again."""

    losses: str
    retain: bool = False


@dataclass(frozen=True, repr=False)
class Evaluate(Printed):
    """A forward without gradients."""

    runs: tuple[str, ...] = (ALL,)


@dataclass(frozen=True, repr=False)
class NoSync(Printed):
    """Operations within `no_sync`."""

    ops: tuple
    keep: bool = True


@dataclass(frozen=True, repr=False)
class Freeze(Printed):
    """An expert is frozen, or thawed."""

    expert: int
    frozen: bool = True


@dataclass(frozen=True, repr=False)
class Visit(Printed):
    """Something looks at the weights: "summon", "write" in it, "state" dicts, or a "load" of them."""

    what: str


@dataclass(frozen=True, repr=False)
class Step(Printed):
    """Passes, and a step of some of the optimizers.

    Args:
        ops: What happens before the step.
        clips: Whether the gradients are clipped by their norm.
        zero: How gradients are dropped: "none", "zeros", or "module" for the module's own `zero_grad`.
        steps: The optimizers that step, by number; None: all.
    """

    ops: tuple
    clips: bool = False
    zero: str = "none"
    steps: tuple[int, ...] | None = None


@dataclass(frozen=True, repr=False)
class Setup(Printed):
    """How a module is sharded.

    Args:
        stage: The ZeRO stage.
        inflight: Number of reductions in flight.
        bucket: Bytes of a chunk below stage 3. With 1 each parameter is a chunk.
        optimizers: 1, or 2 of which one steps the matrices, so that an expert has two chunks at stage 3, too.
        offload: "host" for the optimizer's state, "budget" for a placement of units, or None.
        hybrid: Number of ranks that shard parameters; the others hold replicas. None: all ranks shard them.
        alike: Whether all ranks run the same.
    """

    stage: int
    inflight: int | None = None
    bucket: int = 1
    optimizers: int = 1
    offload: str | None = None
    hybrid: int | None = None
    alike: bool = False


@dataclass(frozen=True, repr=False)
class Program(Printed):
    """A module that is sharded over some ranks, and the steps that train it."""

    setup: Setup
    ranks: int
    steps: tuple[Step, ...]

    def __repr__(self):
        steps = "".join(f"\n    {step!r}," for step in self.steps)
        return f"Program(\n  {self.setup!r}, {self.ranks}, ({steps}\n  ),\n)"


class Failure(Exception):
    """The exception of a program of the user's."""


def fails_on_some(ops):
    """Whether a pass fails on some ranks, and not on all."""
    for op in ops:
        if isinstance(op, NoSync) and fails_on_some(op.ops):
            return True
        if isinstance(op, Forward) and len({"!" in runs or "?" in runs for runs in op.runs}) > 1:
            return True
    return False


class Model(nn.Module):
    """A first layer, experts that are units, a head, and a layer that nothing uses, all of them smooth."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)
        self.experts = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, WIDTH)])
            for _ in range(EXPERTS)
        )
        for expert in self.experts:
            expert.forward = lambda x, half, expert=expert: run_expert(expert, x, half)
        self.double()

    def forward(self, x, runs, checkpointing=None):
        x = self.first(x)
        for token in runs.split():
            if token == "!":
                raise Failure("in forward")
            if token == "?":
                x = raise_in_backward(x)
            elif token == "h":
                x = self.head(x)
            elif checkpointing is None or not torch.is_grad_enabled():
                x = x + self.experts[int(token[0])](x, token[1:] == "-")
            else:
                expert = self.experts[int(token[0])]
                x = x + checkpoint(expert, x, token[1:] == "-", use_reentrant=checkpointing == "reentrant")
        return x


def run_expert(expert, x, half):
    """The layers of an expert, or the first alone, whose output is cut to the width of the input."""
    x = torch.tanh(expert[0](x))
    return x[:, :WIDTH] if half else expert[2](torch.tanh(expert[1](x)))


def raise_in_backward(x):
    if not x.requires_grad:
        return x
    x = x.clone()

    def hook(_):
        raise Failure("in backward")

    x.register_hook(hook)
    return x


def optimizers_of(module, count):
    """An AdamW whose `eps` is far above rounding, and for two an SGD for what is no matrix."""
    if count == 1:
        return [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)]
    matrices, rest = matrices_and_rest(module)
    return [
        torch.optim.AdamW(matrices, lr=1e-2, eps=1e-3, weight_decay=0.1),
        torch.optim.SGD(rest, lr=0.05, momentum=0.9),
    ]


class OneProcess:
    """Runs a program for all ranks in one process.

    Args:
        program: The program.
        failed: The steps that ended in an error of par-zero's, which change nothing but what is frozen or written.

    Attributes:
        losses: The loss of each forward on each rank.
    """

    def __init__(self, program, failed=()):
        self.program, self.failed, self.losses = program, failed, []
        self.module = Model()
        self.optimizers = optimizers_of(self.module, program.setup.optimizers)
        self.ranks = range(program.ranks)
        self.graphs = {}
        self.step = 0

    def run(self):
        for number, step in enumerate(self.program.steps):
            self.step = number
            ops = step.ops
            if self.step in self.failed:
                ops = [op for op in ops if isinstance(op, Freeze) or op == Visit("write")]
            self.run_ops(ops)
            if self.step not in self.failed:
                self.end_step(step)
            self.zero_grad(step.zero)
            self.graphs.clear()

    def run_ops(self, ops):
        for op in ops:
            try:
                self.run_op(op)
            except Failure as failure:
                self.recover(failure)

    def recover(self, failure):
        """After an exception of the user's the passes of the step so far do not count."""
        self.graphs.clear()
        self.zero_grad("none")

    def run_op(self, op):
        match op:
            case Forward():
                self.graphs[op.loss] = [self.forward(op, rank) for rank in self.ranks]
            case Backward():
                for graphs in zip(*[self.graphs[loss] for loss in op.losses if loss in self.graphs], strict=True):
                    (sum(graphs) * self.scale).backward(retain_graph=op.retain)
            case Evaluate():
                with torch.no_grad():
                    for rank in self.ranks:
                        self.forward(op, rank)
            case NoSync():
                with self.no_sync(op.keep):
                    for each in op.ops:
                        self.run_op(each)
            case Freeze():
                self.module.experts[op.expert].requires_grad_(not op.frozen)
            case Visit():
                self.visit(op.what)

    def forward(self, op, rank):
        data = batch(self.step, rank, WIDTH, micro=ord(getattr(op, "loss", "z"))).double()
        runs = op.runs[rank % len(op.runs)]
        loss = self.module(data, runs, getattr(op, "checkpoint", None)).square().mean()
        self.losses.append(loss.detach())
        return loss

    scale = property(lambda self: 1 / self.program.ranks)

    def no_sync(self, keep):
        return nullcontext()

    def visit(self, what):
        if what == "write":
            with torch.no_grad():
                self.module.first.weight.mul_(0.9)

    def zero_grad(self, how):
        """What no rank has used keeps its value in par-zero, also where gradients are zeros."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def end_step(self, step):
        if step.clips:
            nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        for number, optimizer in enumerate(self.optimizers):
            if step.steps is None or number in step.steps:
                optimizer.step()

    def weights(self):
        return copies(self.module)


CLIP = 0.05


class ThisRank(OneProcess):
    """Runs the part of a program that is this rank's, on a sharded module."""

    scale = 1

    def __init__(self, program):
        super().__init__(program)
        self.ranks, self.failed, self.errors = [dist.get_rank()], set(), []
        setup = program.setup
        self.shards, replicas = hybrid_groups(setup.hybrid)
        options = policies(bucket=setup.bucket, inflight=setup.inflight)
        offload = {None: None, "host": Offload(optimizer="host"), "budget": self.budget()}[setup.offload]
        units = list(self.module.experts)
        shard(
            self.module, self.optimizers, stage=setup.stage, group=self.shards, replicas=replicas, units=units,
            offload=offload, **options,
        )  # fmt: skip

    def budget(self):
        """Bytes of the shards with their gradients and two moments, and of the root and two experts and a half."""
        whole = sum(parameter.numel() for parameter in self.module.parameters())
        expert = sum(parameter.numel() for parameter in self.module.experts[0].parameters())
        ranks = dist.get_world_size(self.shards)
        padded = whole + 16 * ranks * 4 * (EXPERTS + 1)
        return Offload(budget=8 * (4 * padded // ranks + whole - EXPERTS * expert + 5 * expert // 2), other=lambda: 0)

    def run(self):
        for number, step in enumerate(self.program.steps):
            self.step = number
            self.fails_on_some = fails_on_some(step.ops)
            error = None
            try:
                self.run_ops(step.ops)
            except Failure:
                error = OF_ANOTHER_RANK
            except RuntimeError as raised:
                error = next((words for words in NAMED if words in str(raised)), None)
                if error is None:
                    raise
                error = error if error == OF_ANOTHER_RANK else str(raised)
            if error is not None:
                reset(self.module)
            self.agree(error)
            if error is None:
                self.end_step(step)
            else:
                self.failed.add(self.step)
            self.zero_grad(step.zero)
            self.graphs.clear()

    def agree(self, error):
        """Checks that all ranks raise the same, and at the same step."""
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, (self.step, error))
        if len(set(said)) > 1:
            raise AssertionError(f"not all ranks raise the same: {said}")
        if error is not None:
            self.errors.append(error)

    def recover(self, failure):
        if self.fails_on_some:
            raise failure  # and leave out the whole step, as the other ranks do
        reset(self.module)
        super().recover(failure)

    def no_sync(self, keep):
        return no_sync(self.module, keep=keep)

    def visit(self, what):
        if what in ("summon", "write"):
            with summon(self.module):
                super().visit(what)
        else:
            state = self.module.state_dict()
            if what == "load":
                self.module.load_state_dict(state)
            else:
                for optimizer in self.optimizers:
                    optimizer.state_dict()

    def zero_grad(self, how):
        if how == "module":
            self.module.zero_grad()
        for optimizer in self.optimizers if how != "module" else ():
            optimizer.zero_grad(set_to_none=how == "none")

    def end_step(self, step):
        if step.clips:
            found = [view for each in self.optimizers for _, _, view in gradients(each)]
            squares = torch.stack(
                [view.square().sum() for view in found] or [torch.zeros((), dtype=torch.float64)]
            ).sum()
            if self.program.setup.stage:
                dist.all_reduce(squares, group=self.shards)
            for view in found:
                view.mul_(min(1, CLIP / (float(squares.sqrt()) + 1e-6)))
        super().end_step(Step((), steps=step.steps))

    def weights(self):
        with summon(self.module):
            return copies(self.module)


OF_ANOTHER_RANK = "because its pass has failed; call par_zero.reset(module) on all ranks"
NAMED = (
    "and at stage 3 all ranks gather a unit together; make one unit",
    "which no backward before needed there",
    OF_ANOTHER_RANK,
)
"""Of the errors that a rank which departs may end in."""


def hybrid_groups(size):
    """The ranks that shard parameters, and those that hold replicas of a shard."""
    if size is None:
        return dist.group.WORLD, None
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    columns = [dist.new_group(list(range(first, world, size))) for first in range(size)]
    return rows[rank // size], columns[rank % size]
