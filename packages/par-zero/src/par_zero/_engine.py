"""Engine of a sharded module: it acts before and after forward, backward and the optimizer's step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import follow_written_, on_settle, on_written

from ._arrive import watch_compiles
from ._gather import Gatherer
from ._stage import ZeroStage
from ._step_hooks import StepHooks, override_
from ._torch_private import skip_frame
from ._unit import Unit
from .checks.module import ENGINE, mark_packed
from .layout.chunk import Chunk
from .layout.meter import Meter
from .layout.sharers import Sharers
from .layout.units import called
from .offload.plan import OffloadPlan
from .offload.tier import DiskTier, DiskUsage
from .optimizer.assembly import Assembly
from .placement.moments import Trace
from .placement.room import Room
from .programs.agreement import Agreement
from .programs.book import PassBook
from .programs.executor import Executor
from .programs.ledger import ZeroProgram
from .programs.predict import RegisteredModel
from .programs.record import StepRecord
from .programs.steps import StepBook
from .reduce.reducer import Reducer
from .reduce.sections import SectionProgram
from .residency.count import count
from .residency.table import Residency
from .watch.calls import RESET
from .watch.outputs import call_at_backward, computed


class Engine:
    """Engine of a sharded module.

    Args:
        module: Module.
        optimizers: Optimizers of its parameters.
        chunks: Chunks that hold the parameters.
        stage: ZeRO stage.
        sharers: Communicators of all data-parallel groups.
        units: FSDP units, which stage 3 gathers separately.
        assemblies: Assembly of full tensors for an optimizer, by the optimizer's number.
        model: Module as its program sees it, with the bound of reductions in flight that the caller of `shard` gave.
        offload: Tiers of the chunks. None: nothing is offloaded.
        room: Memory for gathered units at stage 3; None: a unit is freed when the next begins.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        chunks: Sequence[Chunk],
        stage: ZeroStage,
        sharers: Sharers,
        units: Sequence[Unit],
        *,
        assemblies: Mapping[int, Assembly],
        model: RegisteredModel,
        offload: OffloadPlan | None = None,
        room: Room | None = None,
    ) -> None:
        self._sharers, self._chunks = sharers, tuple(chunks)
        self._trained = [chunk for chunk in chunks if chunk.plan.trained]
        self._module, self._meter = module, Meter()
        for chunk in chunks:
            chunk.meter = self._meter
        # A user who bounds the reductions in flight states that unused parameters do not depend on data. Chunks then
        # need no program, which would delay their reductions and hold their memory.
        inflight = model.inflight
        exchanges = len(sharers.each) > 1 and (inflight is None or inflight >= len(self._trained))
        programmed = exchanges or stage.shards_parameters
        self._reducer = Reducer(self._trained, sharers, inflight, self._meter, programmed=programmed)
        self._sections: SectionProgram | None = None
        if exchanges and not stage.shards_parameters:
            self._sections = SectionProgram(module, self._trained, self._reducer)
        self._gatherer: Gatherer | None = None
        self._steps: StepBook | None = None
        if stage.shards_parameters:
            flags = sharers.device_of_flags(chunks[0].device)
            # Two flags of a pass, one more if replicas learn an order of reductions, and one of a budget.
            count = 2 + bool(sharers.beside_gathering) + (room is not None)
            agreement = Agreement(units, sharers.gathering, flags, self._reducer, sharers.calls, flags=count)
            book = _book_of(units, room, optimizers, agreement.most)
            self._steps = book if isinstance(book, StepBook) else None
            executor = Executor(units, book, agreement, self._reducer)
            self._gatherer = Gatherer(module, units, self._reducer, executor, self._meter)
        self._program = StepRecord(model, self._reducer, self._meter)
        self._hooks = StepHooks(
            module,
            optimizers,
            self._chunks,
            stage,
            sharers,
            self._reducer,
            gatherer=self._gatherer,
            assemblies=assemblies,
            offload=offload,
            on_stepped=self._end_step,
        )
        # Units that the gatherer frees, and gradients that are assembled, belong to the pass.
        self._reducer.hooks.at_end.append(self._meter.end_pass)
        tier = self._hooks.disk_tier
        if tier is not None:
            self._attend(tier, units)
        for unit in units:
            unit.on_written = self._follow
        items = called(module)
        for entry in dict.fromkeys((module, *items)):
            # A load writes the module's parameters, and master weights must follow.
            entry.register_load_state_dict_post_hook(self.refresh)
            # copy and pickle call `__reduce_ex__` first, and would otherwise fail with an unrelated error about a hook.
            override_(entry, no_sync=self.no_sync, __reduce_ex__=partial(_refuse_copy, type(entry).__name__))
        for number, item in enumerate(items):
            override_(item, zero_grad=partial(self._zero_grad_of, number))
            item.register_forward_hook(torch.compiler.disable(self._expect_backward))
            if self._hooks.copies:
                # This hook comes before the user's hooks, which may read parameters.
                item.register_forward_pre_hook(torch.compiler.disable(self._hooks.publish_seen), prepend=True)
            if tier is not None and tier.is_in_backward:
                item.register_forward_pre_hook(torch.compiler.disable(tier.refuse_forward))
            if self._hooks.arrivals is not None and self._hooks.arrivals.late:
                item.register_forward_pre_hook(partial(skip_frame(watch_compiles), self._hooks.arrivals))
        # This comes after the items, because the module may be an item itself.
        override_(module, zero_grad=self._hooks.zero_grad)

    def _attend(self, tier: DiskTier, units: Sequence[Unit]) -> None:
        """Connect the disk tier to passes, to units that are gathered, and to readers of parameters."""
        self._reducer.hooks.at_start.append(tier.prefetch)
        if tier.is_in_backward:
            self._reducer.hooks.at_start.append(self._hooks.before_backward)
            self._reducer.hooks.at_end.append(tier.end_backward)
        if tier.shards.were_given or tier.gradients.were_given:
            # A failed read made gradients NaN, and no step may use them.
            tier.errors.on_lost = partial(self._hooks.drop_gradients, self._trained)
            self._reducer.hooks.at_end.append(partial(_raise_reduced, tier))
        if tier.shards.were_given:
            if self._gatherer is not None:
                self._gatherer.executor.on_next = Unit.expect
                # An evaluation has no backward pass, at whose end the ranks would otherwise exchange errors of a disk.
                self._gatherer.on_evaluated = partial(tier.errors.raise_together, *self._sharers.beside_replicas)
            for unit in units:
                unit.shards = tier.shards
        for unit in units:
            unit.link = tier.link
            unit.on_read = tier.wait_for if tier.runner.is_late else None
        if tier.runner.is_late or any(chunk.is_on_host for chunk in self._chunks):
            for part in self._module.modules():
                part.register_state_dict_pre_hook(tier.settle)
                part.register_load_state_dict_pre_hook(tier.settle)
            on_settle([parameter for chunk in self._trained for parameter in chunk.parameters], tier.settle)

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Mark the finished module as sharded, and watch reads and writes of its parameters from now on.

        Args:
            parameters: All packed parameters.
        """
        on_written(parameters, self.refresh)
        mark_packed(parameters)
        for entry in (self._module, *called(self._module)):
            setattr(entry, ENGINE, self)
        if self._gatherer is not None:
            # Writes to a shard on the host of an accelerator must not race with its copies to the device.
            self._gatherer.guard(self._hooks.settle, self.refresh)

    @contextmanager
    def no_sync(self, *, keep: bool = True) -> Iterator[None]:
        """See `par_zero.no_sync`. It is the module's method, too."""
        # Within a budget the placement decides which units stay gathered.
        keeper = self._gatherer if keep and self._steps is None else None
        self._reducer.deferring += 1
        try:
            with nullcontext() if keeper is None else keeper.kept():
                yield
        finally:
            self._reducer.deferring -= 1

    @property
    def reduces_gradients(self) -> bool:
        """See `par_zero.reduces_gradients`."""
        return not self._reducer.deferring

    @contextmanager
    def summon(self) -> Iterator[None]:
        """See `par_zero.summon`. Master weights change only in elements that were written."""
        self._hooks.wait_for_parameters()
        # Writes so far are published first, because the comparison after the block shows only later writes.
        self._hooks.follow_()
        tier = self._hooks.disk_tier
        if tier is not None:
            tier.finish()
        # Parameters that were just gathered may be those that some rank could not read. Without a disk, none can be.
        check = tier.errors.raise_together if tier is not None and tier.shards.were_given else lambda: None
        # Only a comparison with the old values shows which elements a program has written. The other elements keep all
        # digits of their master weights.
        before = [(chunk, chunk.own.clone()) for chunk in self._chunks if chunk.has_copies]
        try:
            with nullcontext() if self._gatherer is None else self._gatherer.summon(check):
                yield
                self._hooks.packed.check(whole=True)
        finally:
            written = [(chunk, old) for chunk, old in before if not torch.equal(chunk.own, old)]
            if written:
                self._hooks.settle()
            for chunk, old in written:
                for part, exact in chunk.copies():
                    now, then = chunk.own[part].to(exact.device), old[part].to(exact.device)
                    exact.copy_(torch.where(now == then, exact, now))
            self._hooks.agree()

    def residency(self) -> Residency:
        """See `par_zero.residency`."""
        optimizers = [each.optimizer for each in self._hooks.optimizers]
        return count(self._module, optimizers, self._chunks, self._reducer.memory(), self._hooks.disk_tier, self._meter)

    def disk_usage(self) -> DiskUsage:
        """See `par_zero.disk_usage`."""
        return DiskUsage() if self._hooks.disk_tier is None else self._hooks.disk_tier.measure()

    def reload_state(self, size: int) -> int:
        """See `par_zero.reload_state`."""
        return 0 if self._hooks.disk_tier is None else self._hooks.disk_tier.reload_state(size)

    def program(self) -> ZeroProgram | None:
        """See `par_zero.program`."""
        return self._program.last

    @property
    def trace(self) -> Trace | None:
        """See `par_zero.trace`."""
        return None if self._steps is None else self._steps.trace

    def _zero_grad_of(self, item: int, set_to_none: bool = True) -> None:  # noqa: ARG002 - the module's signature
        """Drop the gradients of one of several called modules."""
        self._hooks.drop_gradients([chunk for chunk in self._trained if item in chunk.plan.place.items])

    def _end_step(self) -> None:
        """End the step of an optimizer."""
        if self._sections is not None:
            self._sections.forget()
        if self._gatherer is not None:
            self._gatherer.end_step()
        self._program.end_step()

    def reset(self) -> None:
        """See `par_zero.reset`."""
        self._sharers.calls.note(RESET)
        self._hooks.wait_for_parameters()
        if self._hooks.disk_tier is not None:
            # First, because nothing may be stepped by the reductions that other ranks wait for.
            self._hooks.disk_tier.forget_backward()
        if self._gatherer is not None:
            self._gatherer.executor.fail()
        self._reducer.reset()
        if self._hooks.disk_tier is not None:
            # After the reductions that other ranks waited for, which have copied sums, too.
            self._hooks.disk_tier.release_copies()
        self._sharers.calls.agree()
        for each in self._hooks.optimizers:
            each.splitter.leave()
        if self._sections is not None:
            self._sections.forget()
        if self._gatherer is not None:
            self._gatherer.reset()
        self._hooks.settle()
        self._program.forget()

    def refresh(self, *_: Any) -> None:
        """Copy parameters that other code has written to the optimizer's own copies."""
        self._hooks.settle()
        # Units that are still gathered have the values from before the write.
        if self._gatherer is not None:
            self._gatherer.free_hidden()
        with torch.no_grad():
            for chunk in self._chunks:
                for part, exact in chunk.copies():
                    exact.copy_(chunk.own[part])
        self._hooks.agree()

    @torch.no_grad()
    def _follow(self, chunk: Chunk) -> None:
        """Copy what a forward at stage 3 wrote to its parameters to the optimizer's own copies of this rank's shard."""
        for part, exact in chunk.copies():
            follow_written_(exact, chunk.own[part].to(exact.device))
        self._hooks.agree()

    def _expect_backward(self, module: nn.Module, _: Any, output: Any) -> None:
        """Start the reducer at the gradient of the output, where a backward pass begins.

        If the user called a submodule directly, the pass begins elsewhere.
        """
        tensors = computed(output)
        if tensors and self._reducer.failed:
            raise RuntimeError(
                f"before this forward of {type(module).__name__} a backward pass has failed half-way, and what it left "
                "would spoil the next; call par_zero.reset(module) after an exception in forward or backward"
            )
        if tensors and torch.is_grad_enabled():
            call_at_backward(tensors, self._reducer.start)


def _book_of(
    units: Sequence[Unit], room: Room | None, optimizers: Sequence[Optimizer], most: Callable[[list[int]], list[int]]
) -> PassBook:
    """Make the book of passes, or the book of steps within a budget of the device."""
    outer = [unit.outer for unit in units]
    trained = [[chunk.number for chunk in unit.chunks if chunk.number >= 0] for unit in units]
    if room is None:
        return PassBook(outer, trained)
    sizes = {unit.label: room.sizes.get(unit.number, 0) for unit in units}
    return StepBook(
        list(sizes),
        room.other or partial(_other_bytes, units, optimizers, room),
        outer=outer,
        chunks=trained,
        place=partial(room.place, sizes),
        resident=sum(room.resident.values()),
        most=most,
    )


def _other_bytes(units: Sequence[Unit], optimizers: Sequence[Optimizer], room: Room) -> int:
    """Return the bytes on an accelerator that are neither units, nor shards, nor state.

    Gradients are included, so they are counted twice.
    """
    device = next(unit.device for unit in units if unit.chunks)
    # torch counts no allocations on a CPU.
    if device.type == "cpu":
        return 0
    there = sum(unit.size for unit in units if not unit.freed) + room.resident["parameters"]
    if any(optimizer.state for optimizer in optimizers):
        there += room.resident["optimizer"]
    return max(0, int(torch.accelerator.memory_allocated(device)) - there)


def _raise_reduced(tier: DiskTier, *, reduced: bool) -> None:
    """Raise an error on all ranks after a backward pass in which a disk has failed."""
    if reduced:
        tier.errors.raise_together()


def _refuse_copy(kind: str, _: Any = None) -> NoReturn:
    """Raise an error in place of the `__reduce_ex__` of a sharded module."""
    raise TypeError(
        f"this {kind} is sharded, and can be neither copied nor pickled; do that before shard(), or with its "
        "state_dict() within summon()"
    )
