"""Engine of a sharded module: it acts before and after forward, backward and the optimizer's step."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import on_settle, on_written, refuse_get_state_dict, zero_grad_

from ._arrive import Arrivals
from ._check import ENGINE, mark_packed
from ._gather import Gatherer
from ._stage import ZeroStage
from ._torch_private import (
    call_first_after_step,
    call_last_before_step,
    has_compiled,
    is_within_step,
    without_torch_functions,
)
from ._unit import Unit
from .layout.chunk import Chunk
from .layout.meter import Meter
from .layout.packed import PackedParameters
from .layout.sharers import Sharers
from .layout.units import called
from .offload.plan import OffloadPlan
from .offload.tier import DiskTier, DiskUsage
from .optimizer.apart import SliceSplitter
from .optimizer.assembly import Assembly
from .optimizer.step import rewire_
from .optimizer.stepped import SteppedOptimizer
from .optimizer.written import ModuleWrites, Writes
from .placement.moments import Trace
from .placement.room import Room
from .programs.agreement import FLAGS, Agreement
from .programs.book import PassBook
from .programs.executor import Executor
from .programs.ledger import ZeroProgram
from .programs.predict import RegisteredModel
from .programs.record import StepRecord
from .programs.steps import Recording, StepBook
from .reduce.reducer import Reducer
from .reduce.sections import SectionProgram
from .residency.count import count
from .residency.table import Residency
from .watch.outputs import computed


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
        stepped = [[chunk for chunk in self._trained if chunk.plan.owner == n] for n in range(len(optimizers))]
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
        # At stage 3 a freed parameter reports each write by itself.
        self._module_writes = ModuleWrites(() if stage.shards_parameters else self._trained)
        self._gatherer: Gatherer | None = None
        self._steps: StepBook | None = None
        if stage.shards_parameters:
            flags = sharers.device_of_flags(chunks[0].device)
            agreement = Agreement(units, sharers.gathering, flags, self._reducer, flags=FLAGS + (room is not None))
            book = _book_of(units, room, optimizers, agreement.most)
            self._steps = book if isinstance(book, StepBook) else None
            executor = Executor(units, book, agreement, self._reducer)
            self._gatherer = Gatherer(module, units, self._reducer, executor, self._meter)
        # The gatherer's hooks come first, because the units that they free belong to the pass.
        self._reducer.hooks.at_end.append(self._meter.end_pass)
        self._program = StepRecord(model, self._reducer, self._meter)
        is_late = offload is not None and offload.late
        self._packed = PackedParameters(module, self._chunks, in_place=not stage.shards_parameters)
        self._optimizers: list[SteppedOptimizer] = []
        # The ranks compute with copies of the optimizer's tensors: on other ranks, or in another dtype on this rank.
        keeps_copies = any(
            chunk.has_copies or chunk.plan.assembled or (stage.shards_state and chunk.layout.ranks > 1)
            for chunk in self._trained
        )
        self._writes = Writes(
            stepped,
            sharers,
            self._publish_anew,
            self._follow_module_writes,
            ignored=not keeps_copies,
            late=is_late,
        )
        for assembly in assemblies.values():
            self._reducer.hooks.at_end.append(partial(assembly.take_gradients, self._reducer.gradients))
        cuts = {} if offload is None else {c: tiers.pieces for c, tiers in zip(chunks, offload.chunks, strict=True)}
        first = 0
        for number, optimizer in enumerate(optimizers):
            wholes = assemblies[number].wholes if number in assemblies else ()
            rewire_(optimizer, stepped[number], first, wholes, cuts)
            first += len(optimizer.param_groups)
            # The user's hooks may change gradients and settings, so this hook runs after them.
            call_last_before_step(optimizer, partial(self._before_step, number))
            if offload is None or not offload.in_pieces:
                # The user may compile the step, and the collectives of the hooks must not be traced with it.
                optimizer.register_step_post_hook(torch.compiler.disable(partial(self._after_step, number)))
            else:  # the user's hooks must see all gradients and all stepped tensors
                call_first_after_step(optimizer, partial(self._after_step, number))
            splitter = SliceSplitter(optimizer, stepped[number])
            self._optimizers.append(
                SteppedOptimizer(
                    optimizer=optimizer, chunks=stepped[number], splitter=splitter, assembly=assemblies.get(number)
                )
            )
            # A failed step may have left parts of slices in the optimizer. Reductions need the slices.
            self._reducer.hooks.at_start.append(splitter.leave)
            optimizer.register_state_dict_pre_hook(refuse_get_state_dict)
            optimizer.register_state_dict_pre_hook(splitter.leave)
            optimizer.register_load_state_dict_pre_hook(splitter.leave)
            zero_grad: Any = partial(self._zero_grad_of_optimizer, number)
            # `zero_grad_` reads the signature to decide which arguments it passes.
            zero_grad.__signature__ = inspect.signature(optimizer.zero_grad)
            # Registered later than `_after_step`, it runs earlier, so `_after_step` finds slices again.
            call_first_after_step(optimizer, partial(self._join, number))
            _override_(optimizer, zero_grad=zero_grad, add_param_group=_refuse_group)
            self._writes.watch(number, optimizer)
            held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            on_settle(held, partial(self._follow_module_writes, number))
        self._disk_tier = None if offload is None else self._make_disk_tier(offload)
        self._arrivals: Arrivals | None = None
        wait_for_step = None if self._disk_tier is None or not is_late else self._disk_tier.wait_for
        if not stage.shards_parameters and (stage.shards_state or wait_for_step is not None):
            self._arrivals = Arrivals(self._trained, self._reducer, wait_for_step)
            self._reducer.hooks.at_start.append(self._arrivals.begin_delayed)
        if self._disk_tier is not None:
            self._attend(self._disk_tier, units)
        items = called(module)
        for entry in dict.fromkeys((module, *items)):
            # A load writes the module's parameters, and master weights must follow.
            entry.register_load_state_dict_post_hook(self.refresh)
            # copy and pickle call `__reduce_ex__` first, and would otherwise fail with an unrelated error about a hook.
            _override_(entry, no_sync=self.no_sync, __reduce_ex__=partial(_refuse_copy, type(entry).__name__))
        for number, item in enumerate(items):
            _override_(item, zero_grad=partial(self._zero_grad_of, number))
            item.register_forward_hook(torch.compiler.disable(self._expect_backward))
            if keeps_copies:
                # This hook comes before the user's hooks, which may read parameters.
                item.register_forward_pre_hook(torch.compiler.disable(self._writes.publish_seen), prepend=True)
            if self._arrivals is not None and self._arrivals.late:
                item.register_forward_pre_hook(torch.compiler.disable(self._wait_if_compiled))
        # This comes after the items, because the module may be an item itself.
        _override_(module, zero_grad=self.zero_grad)

    def _make_disk_tier(self, offload: OffloadPlan) -> DiskTier | None:
        """Return the tier that steps state in pieces, after moving the optimizers' existing state to its file."""
        if not offload.in_pieces:
            return None
        optimizers = [each.optimizer for each in self._optimizers]
        device = self._sharers.device_of_flags(self._chunks[0].device)
        tier = DiskTier(offload, self._chunks, optimizers, self._sharers.agreeing, device)
        for store in tier.gradient_stores:
            for chunk in store.chunks:
                self._reducer.gradients[chunk.number].store = store
        for number, optimizer in enumerate(optimizers):
            tier.adopt_(number)
            on_settle(tier.tensors(number), tier.settle)
            on_settle(tier.tensors(number), self._writes.watches[number].settled)
            # Both read or write state, which a late step may still be stepping.
            optimizer.register_state_dict_pre_hook(tier.settle)
            optimizer.register_load_state_dict_pre_hook(tier.settle)
            optimizer.register_load_state_dict_post_hook(partial(tier.adopt_, number))
        return tier

    def _attend(self, tier: DiskTier, units: Sequence[Unit]) -> None:
        """Connect the disk tier to passes, to units that are gathered, and to readers of parameters."""
        self._reducer.hooks.at_start.append(tier.prefetch)
        if tier.shards.were_given or tier.gradients.were_given:
            tier.errors.on_lost = self._drop_gradients
            self._reducer.hooks.at_end.append(self._raise_problem)
        if tier.shards.were_given:
            if self._gatherer is not None:
                self._gatherer.read_ahead()
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
            on_settle([member.parameter for chunk in self._trained for member in chunk.members], tier.settle)

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
            settle = (lambda: None) if self._disk_tier is None else self._disk_tier.settle
            self._gatherer.guard(settle, self.refresh)

    @contextmanager
    def no_sync(self, *, keep: bool = True) -> Iterator[None]:
        """See `par_zero.no_sync`. It is the module's method, too."""
        # Within a budget the placement decides which units stay gathered.
        keeper = self._gatherer if keep and self._steps is None else None
        with self._reducer.no_sync(), nullcontext() if keeper is None else keeper.kept():
            yield

    @contextmanager
    def summon(self) -> Iterator[None]:
        """See `par_zero.summon`. Master weights change only in elements that were written."""
        self._wait_for_parameters()
        for number in range(len(self._optimizers)):
            self._follow_module_writes(number)
        # Writes so far are published first, because the comparison after the block shows only later writes.
        self._writes.publish()
        if self._disk_tier is not None:
            self._disk_tier.finish()
        # Only a comparison with the old values shows which elements a program has written. The other elements keep all
        # digits of their master weights.
        before = [(chunk, chunk.own.clone()) for chunk in self._chunks if chunk.has_copies]
        try:
            with nullcontext() if self._gatherer is None else self._gatherer.summon(self._raise_lost):
                yield
                self._packed.check(whole=True)
        finally:
            written = [(chunk, old) for chunk, old in before if not torch.equal(chunk.own, old)]
            if written and self._disk_tier is not None:
                self._disk_tier.settle()
            for chunk, old in written:
                for part, exact in chunk.copies():
                    now, then = chunk.own[part].to(exact.device), old[part].to(exact.device)
                    exact.copy_(torch.where(now == then, exact, now))
            self._module_writes.mark(self._trained)
            self._writes.forget()

    def _raise_lost(self) -> None:
        """Raise an error on all ranks if any rank could not read parameters that were just gathered."""
        if self._disk_tier is not None and self._disk_tier.shards.were_given:
            self._disk_tier.errors.raise_together()

    def _raise_problem(self, *, reduced: bool) -> None:
        """Raise an error on all ranks after a backward pass in which a disk has failed."""
        if self._disk_tier is not None and reduced:
            self._disk_tier.errors.raise_together()

    def _drop_gradients(self) -> None:
        """Drop all gradients, because a failed read made them NaN, and no step may use them."""
        self._reducer.usage.forget(self._trained)
        for chunk in self._trained:
            for tensor in (*(part.tensor for part in chunk.slices), *chunk.wholes):
                tensor.grad = None

    def residency(self) -> Residency:
        """See `par_zero.residency`."""
        gradients = self._reducer.memory()
        optimizers = [each.optimizer for each in self._optimizers]
        return count(self._module, optimizers, self._chunks, gradients, self._disk_tier, self._meter)

    def disk_usage(self) -> DiskUsage:
        """See `par_zero.disk_usage`."""
        return DiskUsage() if self._disk_tier is None else self._disk_tier.measure()

    def reload_state(self, size: int) -> int:
        """See `par_zero.reload_state`."""
        return 0 if self._disk_tier is None else self._disk_tier.reload_state(size)

    def program(self) -> ZeroProgram | None:
        """See `par_zero.program`."""
        return self._program.last

    @property
    def trace(self) -> Trace | None:
        """See `par_zero.trace`."""
        return None if self._steps is None else self._steps.trace

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those that wait under `no_sync`. It is the module's method."""
        self._finish_with_gradients(range(len(self._optimizers)), set_to_none)
        self._reducer.usage.forget(self._trained)
        for each in self._optimizers:
            zero_grad_(each.optimizer, set_to_none, partial(type(each.optimizer).zero_grad, each.optimizer))

    def _zero_grad_of_optimizer(self, number: int, *args: Any, **keywords: Any) -> None:
        """Drop the gradients of one optimizer. It is the optimizer's method, with its class's arguments."""
        set_to_none = keywords.get("set_to_none", args[0] if args else True)
        self._finish_with_gradients([number], bool(set_to_none))
        self._reducer.usage.forget(self._optimizers[number].chunks)
        optimizer = self._optimizers[number].optimizer
        type(optimizer).zero_grad(optimizer, *args, **keywords)

    def _finish_with_gradients(self, numbers: Iterable[int], set_to_none: bool) -> None:
        """Wait for the steps that may still read gradients of some optimizers before these are written."""
        for number in numbers:
            self._optimizers[number].splitter.leave()
        if self._disk_tier is not None:
            self._disk_tier.drop_hidden_gradients(numbers)
            # Zeros would overwrite gradients that a late step still reads; None leaves the tensors as they are.
            if not set_to_none:
                self._disk_tier.join()

    def _zero_grad_of(self, item: int, set_to_none: bool = True) -> None:  # noqa: ARG002 - the module's signature
        """Drop the gradients of one of several called modules."""
        chunks = [chunk for chunk in self._trained if item in chunk.plan.place.items]
        self._reducer.usage.forget(chunks)
        for chunk in chunks:
            for tensor in (*(part.tensor for part in chunk.slices), *chunk.wholes):
                tensor.grad = None

    def reset(self) -> None:
        """See `par_zero.reset`."""
        self._wait_for_parameters()
        if self._gatherer is not None:
            self._gatherer.fail()
        self._reducer.reset()
        for each in self._optimizers:
            each.splitter.leave()
        if self._sections is not None:
            self._sections.forget()
        if self._gatherer is not None:
            self._gatherer.reset()
        if self._disk_tier is not None:
            self._disk_tier.settle()
        self._program.forget()

    def refresh(self, *_: Any) -> None:
        """Copy parameters that other code has written to the optimizer's own copies."""
        self._wait_for_parameters()
        if self._disk_tier is not None:
            self._disk_tier.settle()
        # Units that are still gathered have the values from before the write.
        if self._gatherer is not None:
            self._gatherer.free_hidden()
        with torch.no_grad():
            for chunk in self._chunks:
                for part, exact in chunk.copies():
                    exact.copy_(chunk.own[part])
        self._module_writes.mark(self._trained)
        self._writes.forget()

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
            # The loss need not depend on every output, so the first gradient of any output begins the pass.
            torch.autograd.graph.register_multi_grad_hook(tensors, self._reducer.start, mode="any")

    def _before_step(
        self, number: int, optimizer: Optimizer, args: Any, keywords: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Prepare a step. For a step with a closure, prepare it after the closure has made the gradients."""
        if is_within_step(optimizer):
            return None
        stepped = self._optimizers[number]
        # Slices may still be split if the step before has failed.
        stepped.splitter.leave()
        chunks = stepped.chunks

        def prepare() -> None:
            if self._gatherer is not None:
                self._gatherer.check_step()
            self._wait_for_parameters(chunks)
            self._follow_module_writes(number)
            self._writes.watches[number].end()
            if self._disk_tier is not None:
                self._disk_tier.before_step(number)
            # Parameters of another optimizer may still be in flight, and a plain read would wait for them.
            with without_torch_functions():
                self._packed.look()
            self._reducer.usage.look_before_step(chunks)
            unused = self._reducer.usage.unused(chunks)
            if stepped.assembly is not None:
                stepped.assembly.before_step(dict(zip(chunks, unused, strict=True)))
            stepped.splitter.look(unused)
            self._meter.note("S", str(number))
            if self._disk_tier is not None:
                self._disk_tier.step(number, stepped.splitter)
            stepped.splitter.enter()

        # torch runs this hook before the closure, which makes the gradients. So the closure is wrapped, and the step is
        # prepared between closure and update.
        closure = keywords.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):  # a class may take something else there, such as a loss
            prepare()
            return None

        def closure_then_prepare() -> Any:
            with torch.enable_grad():
                loss = closure()
            prepare()
            return loss

        if "closure" in keywords:
            return args, {**keywords, "closure": closure_then_prepare}
        return (args[0], closure_then_prepare, *args[2:]), keywords

    def _join(self, number: int, optimizer: Optimizer, *_: Any) -> None:
        """Join split slices before the user's hooks read them."""
        if not is_within_step(optimizer):
            self._optimizers[number].splitter.join_()

    def _after_step(self, number: int, optimizer: Optimizer, *_: Any) -> None:
        """Copy an optimizer's updates to the parameters, and to the other ranks."""
        if is_within_step(optimizer):
            return
        if self._disk_tier is not None:
            self._disk_tier.end_step(number)
        self._writes.watches[number].put_back_()
        self._publish(number)
        if self._sections is not None:
            self._sections.forget()
        if self._gatherer is not None:
            self._gatherer.end_step()
        self._program.end_step()
        # A late step is still running, so its errors are raised later.
        if self._disk_tier is not None and not self._disk_tier.runner.is_late:
            self._disk_tier.errors.raise_together()

    def _publish(self, number: int, *, anew: bool = False) -> None:
        """Copy the tensors of an optimizer to the parameters, and to the other ranks.

        Args:
            number: Number of the optimizer.
            anew: Whether they were written outside of a step. In a step, pieces are copied when they are stepped.
        """
        chunks, assembly = self._optimizers[number].chunks, self._optimizers[number].assembly
        if assembly is not None:
            assembly.after_step()
        with torch.no_grad():
            for chunk in chunks:
                if anew:
                    for part, exact in chunk.copies():
                        chunk.own[part].copy_(exact)
                elif chunk.master is not chunk.own and not any(part.in_pieces for part in chunk.slices[:1]):
                    chunk.own[: chunk.master.numel()].copy_(chunk.master)
            if not anew:
                self._program.note_stepped(chunks)
            self._writes.watches[number].begin()
            # The all-gathers begin last: from then on the optimizer's tensors wait for them when they are touched.
            if self._arrivals is not None:
                self._arrivals.begin(chunks)

    def _follow_module_writes(self, number: int, *_: object) -> None:
        """Copy what a program has written to the module's parameters to the master weights of one optimizer.

        Raises:
            RuntimeError: The program has also written the master weights since the last step.
        """
        chunks = self._optimizers[number].chunks
        written = self._module_writes.find(chunks)
        # Version counters are equal on all ranks, so all ranks join the collective in `was_written`, or none does.
        if written and self._writes.was_written(number):
            self._refuse_both_writes(number, written[0])
        # An alias may exist on one rank only, such as in a log of rank 0, so the ranks exchange nothing here.
        aliased = [] if self._writes.watches[number].found else self._module_writes.find_aliased(chunks)
        found = list(dict.fromkeys([*written, *aliased]))
        if found:
            self._wait_for_parameters(found)
            if self._disk_tier is not None:
                self._disk_tier.settle()
            self._module_writes.follow_(found)
            self._writes.watches[number].begin()  # its tensors have what all ranks wrote

    def _refuse_both_writes(self, number: int, chunk: Chunk) -> NoReturn:
        optimizer = self._optimizers[number].optimizer
        raise RuntimeError(
            f"{self._module_writes.first_name(chunk)!r} was written in the module, and its master weights in the "
            f"{type(optimizer).__name__}, since the last step, and only one of the two can count; "
            "write the module's parameters within par_zero.summon(module)"
        )

    def _publish_anew(self, number: int) -> None:
        """Publish an optimizer's tensors that were written outside of its step. Collective, like a step."""
        if written := self._module_writes.find(self._optimizers[number].chunks):
            self._refuse_both_writes(number, written[0])
        self._wait_for_parameters()
        if self._disk_tier is not None:
            self._disk_tier.settle()
        if self._gatherer is not None:
            self._gatherer.free_hidden()
        self._publish(number, anew=True)

    def _wait_if_compiled(self, *_: Any) -> None:
        """Wait for parameters if torch.compile was used since the latest step: compiled code cannot wait."""
        if has_compiled():
            self._wait_for_parameters()

    def _wait_for_parameters(self, chunks: Sequence[Chunk] | None = None) -> None:
        """Wait for the all-gathers of the latest steps, for some chunks or for all."""
        if self._arrivals is not None:
            self._arrivals.wait(self._trained if chunks is None else chunks)


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
        Recording(list(sizes), room.other or partial(_other_bytes, units, optimizers, room)),
        outer,
        trained,
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


def _override_(target: object, **methods: Callable[..., Any]) -> None:
    """Give one object methods in place of its class's methods.

    An attribute of an object takes precedence over the methods of its class. The object therefore keeps its class, by
    which users and torch identify it, and other objects of that class do not change.
    """
    for name, method in methods.items():
        setattr(target, name, method)


def _refuse_copy(kind: str, _: Any = None) -> NoReturn:
    """Raise an error in place of the `__reduce_ex__` of a sharded module."""
    raise TypeError(
        f"this {kind} is sharded, and can be neither copied nor pickled; do that before shard(), or with its "
        "state_dict() within summon()"
    )


def _refuse_group(param_group: dict[str, Any]) -> NoReturn:
    """Raise an error in place of the `add_param_group` of an optimizer whose module is sharded."""
    raise ValueError(
        f"a param group with {sorted(param_group)} came after shard(), where nothing would reduce its gradients; give "
        "the optimizer all parameters before, frozen ones too"
    )
