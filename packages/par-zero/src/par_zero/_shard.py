"""`shard`: one call makes an ordinary module and its optimizer data-parallel, without duplicates."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import on_written

from ._build import Plan, make_chunks, members_of
from ._chunk import Chunk, Member
from ._collectives import Handle, all_gather
from ._engine import Groups, Reducer
from ._gather import Gatherer, Unit, tensors_of
from ._records import SameShare, record_, record_of
from ._step import Unmoved, rewire_, works_flat
from ._units import Units, choose_units, owners

T = TypeVar("T")

_ATTRIBUTE = "par_zero"  # where a sharded module keeps its engine


class Zero:
    """The engine of a sharded module.

    Args:
        module: The module.
        optimizer: Of its parameters, or None.
        chunks: That hold them.
        stage: 0 to 3.
        groups: Who shares.
        units: At stage 3, by number: a module that is gathered for itself.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        chunks: Sequence[Chunk],
        stage: int,
        groups: Groups,
        units: Sequence[Unit],
    ) -> None:
        self.module, self.optimizer, self.stage, self.groups = module, optimizer, stage, groups
        self.chunks = tuple(chunks)
        trained = [chunk for chunk in chunks if chunk.trained]
        for number, chunk in enumerate(trained):
            chunk.number = number
        self.gatherer = Gatherer(module, units, groups.shards) if stage == 3 else None
        self.reducer = Reducer(trained, stage, groups, self.gatherer.end_backward if self.gatherer else None)
        self._trained = trained
        self._unmoved: Unmoved | None = None
        if optimizer is not None:
            rewire_(optimizer, trained, stage)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
            optimizer.__dict__["zero_grad"] = self.zero_grad
        module.__dict__.update(zero_grad=self.zero_grad, no_sync=self.no_sync)
        module.register_forward_hook(torch.compiler.disable(self._expect_backward))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `par_zero.no_sync`. At stage 3 what is gathered stays so, until gradients are reduced."""
        with self.reducer.no_sync(), nullcontext() if self.gatherer is None else self.gatherer.kept():
            yield

    @contextmanager
    def summon(self) -> Iterator[None]:
        """See `par_zero.summon`. Where the optimizer has copies of more digits, only what was written is rounded."""
        before = [(chunk, self._mine(chunk).clone()) for chunk in self.chunks if chunk.master.dtype != chunk.flat.dtype]
        try:
            with nullcontext() if self.gatherer is None else self.gatherer.summon():
                yield
        finally:
            for chunk, old in before:
                new = self._mine(chunk)
                chunk.master.copy_(torch.where(new == old, chunk.master, new))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those too that wait under `no_sync`. The module's, and the optimizer's, are this."""
        self.reducer.forget()
        if self.optimizer is not None:
            type(self.optimizer).zero_grad(self.optimizer, set_to_none)

    def reset(self) -> None:
        """See `par_zero.reset`."""
        self.reducer.reset()
        if self.gatherer is not None:
            self.gatherer.free_all()

    def refresh(self, *_: Any) -> None:
        """Parameters were written from outside: the optimizer's own copies follow."""
        for chunk in self.chunks:
            if chunk.master is not chunk.share and self.stage:
                chunk.master.copy_(chunk.share)
            elif chunk.master is not chunk.flat and not self.stage:
                chunk.master.copy_(chunk.flat)

    def _expect_backward(self, _: nn.Module, __: Any, output: Any) -> None:
        """The gradient of the output is where a backward pass begins, unless a submodule was called directly."""
        tensors = [each for each in tensors_of(output) if each.requires_grad]
        if tensors and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(tensors, self.reducer.start, mode="any")

    def _before_step(self, optimizer: Optimizer, args: Any, keywords: dict[str, Any]) -> tuple[Any, Any] | None:
        """Notes what must not move; with a closure, when that has made the gradients."""

        def prepare() -> None:
            self._unmoved = Unmoved(optimizer, self._trained, self.reducer.unused())

        given = dict(zip(("self", "closure"), args, strict=False)) | keywords
        closure = given.pop("closure", None)
        if closure is None:
            prepare()
            return None

        def closed() -> Any:
            with torch.enable_grad():
                loss = closure()
            prepare()
            return loss

        return (given.pop("self"), closed), given

    def _after_step(self, *_: Any) -> None:
        if self._unmoved is not None:
            self._unmoved.restore_()
        self._unmoved = None
        with torch.no_grad():
            handles = [self._publish(chunk) for chunk in self._trained]
        for handle in handles:
            handle.wait()
        if self.gatherer is not None:
            self.gatherer.free_all()

    def _mine(self, chunk: Chunk) -> torch.Tensor:
        """The parameters of which the optimizer holds copies."""
        return chunk.flat if self.stage == 0 else chunk.share

    def _publish(self, chunk: Chunk) -> Handle:
        """Brings what the optimizer has updated to the parameters."""
        mine = self._mine(chunk)
        if chunk.master is not mine:
            mine.copy_(chunk.master)
        return all_gather(chunk.flat, chunk.share, self.groups.shards) if self.stage in (1, 2) else Handle([])


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How to shard. Each field may be given to `shard` as a keyword.

    Args:
        units: At stage 3, what is gathered at a time; see `choose_units`. "auto": the items of ModuleLists and
            Sequentials.
        bucket: Bytes of parameters that are reduced as one, such as 10_000_000.
        param_dtype: Of the parameters in use, such as torch.bfloat16; the optimizer keeps the original ones.
        reduce_dtype: Of gradients while they are added up over microbatches and ranks; default: the parameters'.
        reduce: "mean" or "sum" over the ranks.
        atomic: For optimizers that are not element-wise (Muon, Adafactor): keeps every parameter whole on one rank.

    Raises:
        ValueError: A value that is none of these.
    """

    units: Units = "auto"
    bucket: int = 10_000_000
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce: str = "mean"
    atomic: bool = False

    def __post_init__(self) -> None:
        if self.bucket < 1:
            raise ValueError(f"bucket is {self.bucket} bytes; give 1 or more")
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce is {self.reduce!r}; it can be 'mean' or 'sum'")
        for name, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} is {dtype}; give a floating-point dtype")


def shard(
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    stage: int,
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None = None,
    **keywords: Any,
) -> tuple[nn.Module, Optimizer | None]:
    """Makes a module and its optimizer data-parallel over a group, in place. Collective.

    They stay an ordinary nn.Module and torch.optim.Optimizer: `loss.backward(); optimizer.step()`. Rank 0's parameters
    are everybody's. The optimizer comes to hold flat slices; its group dicts stay the objects that they were.

    Args:
        module: On its device.
        optimizer: Made from the module's parameters, before any step; None if the module is only run, or trained by
            something that reads `gradients`.
        stage: What is not kept twice: 0 nothing (what DistributedDataParallel does), 1 the optimizer's state,
            2 gradients too, 3 parameters too.
        group: The ranks with different data that share the work.
        replicas: For hybrid sharding: the ranks that keep the same share.
        keywords: Fields of `ShardOptions`.

    Returns:
        The module and the optimizer.

    Raises:
        ValueError, TypeError: What cannot be sharded, and what differs between the ranks; on every rank.
    """
    problem, members, options = None, [], ShardOptions()
    modules: list[list[nn.Module]] = [[module]]
    try:
        options = ShardOptions(**keywords)
        _check(module, optimizer, stage, options)
        members = members_of(module, optimizer, stage)
        if not members:
            raise ValueError("the module has no parameters to shard; give one that has, or leave it alone")
        if stage == 3:
            modules = choose_units(module, options.units, options.bucket)
    except (ValueError, TypeError) as error:
        problem = error
    unit_of = owners(module, modules)
    _agree(problem, _described(members, unit_of, stage, options), group, replicas)
    ranks = tuple(dist.get_process_group_ranks(group))
    plan = Plan(
        stage=stage,
        rank=dist.get_rank(group),
        ranks=len(ranks),
        bucket=options.bucket,
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        atomic=options.atomic,
    )
    copies = ranks if replicas is None else tuple(sorted(set().union(*_gathered(ranks, replicas))))
    records = {member.parameter: record_of(member.parameter, copies) for member in members}
    with torch.no_grad():
        for member in members:
            _broadcast(member.parameter, group, replicas)
    chunks = make_chunks(members, unit_of, records, plan)
    for chunk in chunks:
        for member, view in zip(chunk.members, chunk.views(chunk.flat), strict=True):
            member.parameter.data = view
    units = [
        Unit(number, each, [chunk for chunk in chunks if unit_of[chunk.members[0].parameter] == number])
        for number, each in enumerate(modules)
    ]
    zero = Zero(
        module, optimizer, chunks, stage, Groups(shards=group, replicas=replicas, mean=options.reduce == "mean"), units
    )
    record_(chunks, records, stage, SameShare(group, replicas))
    on_written([member.parameter for member in members], zero.refresh)
    module.__dict__[_ATTRIBUTE] = zero
    return module, optimizer


def engine_of(module: nn.Module) -> Zero:
    """The engine of a sharded module.

    Raises:
        ValueError: It is not sharded.
    """
    zero = module.__dict__.get(_ATTRIBUTE)
    if not isinstance(zero, Zero):
        raise ValueError(f"this {type(module).__name__} is not sharded; give what was given to shard()")
    return zero


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Backward passes inside add up gradients on each rank; the first one outside reduces them all together.

    At stages 2 and 3 this takes a whole gradient's memory, as at stage 1.
    """
    return engine_of(module).no_sync()


def summon(module: nn.Module) -> AbstractContextManager[None]:
    """Whole parameters inside, at stage 3 too; what is written to them is kept. Collective."""
    return engine_of(module).summon()


def reset(module: nn.Module) -> None:
    """After an exception in forward or backward: drops half-made gradients, so that the next step is right."""
    engine_of(module).reset()


def _check(module: nn.Module, optimizer: Optimizer | None, stage: int, options: ShardOptions) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage!r}; it can be 0, 1, 2 or 3")
    if any(isinstance(each.__dict__.get(_ATTRIBUTE), Zero) for each in module.modules()):
        raise ValueError("the module, or a part of it, is sharded already; shard once")
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name!r} is on the meta device; materialise it first, or load a checkpoint into it")
        if not parameter.is_floating_point() and not parameter.is_complex():
            raise ValueError(f"{name!r} has dtype {parameter.dtype}, which has no gradients; make it a buffer")
        if hasattr(parameter, "placements"):
            raise ValueError(
                f"{name!r} is a DTensor; shard plain parameters, with a par_groups.Sharding if they are cut"
            )
    if optimizer is not None:
        _check_optimizer(module, optimizer, options)


def _check_optimizer(module: nn.Module, optimizer: Optimizer, options: ShardOptions) -> None:
    names = {parameter: name for name, parameter in module.named_parameters()}
    kind = type(optimizer).__name__
    if optimizer.state:
        raise ValueError(f"the {kind} has stepped already; shard first, then load its state from a checkpoint")
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ValueError(f"param_groups[{number}].params[{i}] of the {kind} is no parameter of the module")
        for key, value in group.items():
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"param_groups[{number}][{key!r}] of the {kind} is NaN; give a number")
    if not options.atomic and optimizer.param_groups and not works_flat(optimizer, optimizer.param_groups[0]):
        raise ValueError(
            f"{kind} does not treat each element by itself, so its parameters cannot be cut; pass atomic=True, which "
            "keeps each whole on one rank"
        )


def _described(
    members: Sequence[Member], unit_of: Mapping[nn.Parameter, int], stage: int, options: ShardOptions
) -> str:
    """What all ranks must have alike."""
    parts = [
        (each.names, tuple(each.shape), str(each.parameter.dtype), each.group, unit_of[each.parameter])
        for each in members
    ]
    fields = (stage, options.bucket, options.param_dtype, options.reduce_dtype, options.reduce, options.atomic)
    return repr((fields, parts))


def _agree(problem: Exception | None, text: str, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> None:
    """Raises on every rank if any has a problem, or if they are about to make different chunks."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    said = f"!{type(problem).__name__}: {problem}" if problem else digest
    every = dict(_gathered((dist.get_rank(), said), group))
    if replicas is not None:  # whose other groups know of their own ranks
        every = {rank: word for each in _gathered(every, replicas) for rank, word in each.items()}
    if problem is not None:
        raise problem
    for rank in sorted(every):
        if every[rank].startswith("!"):
            raise ValueError(f"rank {rank}: {every[rank][1:]}")
    different = [rank for rank in sorted(every) if every[rank] != every[min(every)]]
    if different:
        raise ValueError(
            f"ranks {different} have other parameters, shapes, dtypes, param groups or options than rank {min(every)}; "
            "build the same model and optimizer on all"
        )


def _gathered(mine: T, group: dist.ProcessGroup) -> list[T]:
    """What each rank of a group says; all-gather of small objects."""
    every: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return [each for each in every if each is not None]


def _broadcast(parameter: nn.Parameter, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> None:
    """The first rank's values on all."""
    data = parameter.detach().contiguous()
    for each in (group, replicas):
        if each is not None and dist.get_world_size(each) > 1:
            dist.broadcast(data, group=each, group_src=0)
    if data.data_ptr() != parameter.data_ptr():
        parameter.detach().copy_(data)
