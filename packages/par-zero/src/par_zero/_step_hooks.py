"""Hooks of the optimizers of a sharded module, before and after a step, and for writes between two steps."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import drop_reads_, on_settle, on_written, refuse_get_state_dict, zero_grad_

from ._arrive import Arrivals
from ._collectives import largest_of
from ._gather import Gatherer
from ._stage import ZeroStage
from ._torch_private import (
    call_first_after_step,
    call_last_after_step,
    call_last_before_step,
    is_within_step,
    without_torch_functions,
)
from .layout.chunk import Chunk
from .layout.sharers import Sharers
from .offload.plan import OffloadPlan
from .offload.tier import DiskTier
from .optimizer.apart import SliceSplitter
from .optimizer.assembly import Assembly
from .optimizer.packed import PackedParameters
from .optimizer.step import rewire_
from .optimizer.stepped import SteppedOptimizer
from .optimizer.written import ModuleWrites, Watch, all_see
from .reduce.reducer import Reducer
from .watch.calls import STEP


class StepHooks:
    """The hooks on the optimizers of a sharded module.

    Before a step they show an optimizer its gradients, and after it they copy its updates to the parameters of all
    ranks. Between two steps they find what a program has written to the optimizers' tensors or to the parameters.

    Args:
        module: Sharded module.
        optimizers: Optimizers of its parameters.
        chunks: Chunks that hold the parameters.
        stage: ZeRO stage.
        sharers: Communicators of all data-parallel groups.
        reducer: Reducer of the chunks.
        gatherer: Gatherer of units at stage 3. None: parameters are never freed.
        assemblies: Assembly of full tensors for an optimizer, by the optimizer's number.
        offload: Tiers of the chunks. None: nothing is offloaded.
        on_stepped: Function that is called after each step, when the updates are on their way to all ranks.

    Attributes:
        optimizers: Optimizers, with all objects that their steps use.
        copies: Whether the ranks compute with copies of the optimizers' tensors, on other ranks or in another dtype.
        packed: Parameters of the module, which a step checks.
        disk_tier: Data that is stepped piece by piece. None: there is none.
        arrivals: Parameters that arrive after a step. None: no step sends parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        chunks: Sequence[Chunk],
        stage: ZeroStage,
        sharers: Sharers,
        reducer: Reducer,
        *,
        gatherer: Gatherer | None,
        assemblies: Mapping[int, Assembly],
        offload: OffloadPlan | None,
        on_stepped: Callable[[], None],
    ) -> None:
        self._trained = [chunk for chunk in chunks if chunk.plan.trained]
        self._sharers, self._reducer, self._gatherer, self._on_stepped = sharers, reducer, gatherer, on_stepped
        # At stage 3 a freed parameter reports each write by itself.
        self._module_writes = ModuleWrites(() if stage.shards_parameters else self._trained)
        self.packed = PackedParameters(module, chunks, in_place=not stage.shards_parameters)
        self.copies = any(
            chunk.has_copies or chunk.plan.assembled or (stage.shards_state and chunk.layout.ranks > 1)
            for chunk in self._trained
        )
        is_late = offload is not None and offload.late
        for assembly in assemblies.values():
            reducer.hooks.at_end.append(partial(assembly.take_gradients, reducer.gradients))
        cuts = {} if offload is None else {c: tiers.pieces for c, tiers in zip(chunks, offload.chunks, strict=True)}
        self.optimizers: list[SteppedOptimizer] = []
        first = 0
        for number, optimizer in enumerate(optimizers):
            own = [chunk for chunk in self._trained if chunk.plan.owner == number]
            rewire_(optimizer, own, first, assemblies[number].wholes if number in assemblies else (), cuts)
            first += len(optimizer.param_groups)
            stepped = SteppedOptimizer(
                number=number,
                optimizer=optimizer,
                chunks=own,
                splitter=SliceSplitter(optimizer, own),
                assembly=assemblies.get(number),
                watch=Watch(own, late=is_late),
                all_see=all_see(own),
            )
            self.optimizers.append(stepped)
            self._hook(stepped, in_pieces=offload is not None and offload.in_pieces)
        self.disk_tier = None if offload is None else self._make_disk_tier(offload, chunks)
        self.arrivals: Arrivals | None = None
        wait_for_step = None if self.disk_tier is None or not is_late else self.disk_tier.wait_for
        if not stage.shards_parameters and (stage.shards_state or wait_for_step is not None):
            self.arrivals = Arrivals(module, self._trained, reducer, wait_for_step)
            reducer.hooks.at_start.append(self.arrivals.begin_delayed)

    def _hook(self, stepped: SteppedOptimizer, *, in_pieces: bool) -> None:
        """Register the hooks of one optimizer, whose order among the user's hooks matters."""
        optimizer, splitter = stepped.optimizer, stepped.splitter
        # The user's hooks may change gradients and settings, so this hook runs after them.
        call_last_before_step(optimizer, partial(self._before_step, stepped))
        if in_pieces:  # the user's hooks must see all gradients and all stepped tensors
            call_first_after_step(optimizer, partial(self._after_step, stepped))
        else:
            # The user may compile the step, and the collectives of the hooks must not be traced with it.
            optimizer.register_step_post_hook(torch.compiler.disable(partial(self._after_step, stepped)))
        # A failed step may have left parts of slices in the optimizer. Reductions need the slices.
        self._reducer.hooks.at_start.append(splitter.leave)
        optimizer.register_state_dict_pre_hook(refuse_get_state_dict)
        optimizer.register_state_dict_pre_hook(splitter.leave)
        optimizer.register_state_dict_pre_hook(drop_reads_)  # split slices, which are its tensors, have left
        optimizer.register_load_state_dict_pre_hook(splitter.leave)
        zero_grad: Any = partial(self._zero_grad_of, stepped)
        # `zero_grad_` reads the signature to decide which arguments it passes.
        zero_grad.__signature__ = inspect.signature(optimizer.zero_grad)
        # Registered later than `_after_step`, it runs earlier, so `_after_step` finds slices again.
        call_first_after_step(optimizer, partial(self._join, stepped))
        override_(optimizer, zero_grad=zero_grad, add_param_group=_refuse_group)
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if self.copies:
            on_written(held, self._forget_writes)
            call_last_after_step(optimizer, partial(self._after_hooks, stepped))
            for name in ("train", "eval"):
                if callable(switch := getattr(optimizer, name, None)):
                    override_(optimizer, **{name: partial(self._switch, stepped, switch)})
        on_settle(held, partial(self._follow_module_writes, stepped))

    def _make_disk_tier(self, offload: OffloadPlan, chunks: Sequence[Chunk]) -> DiskTier | None:
        """Return the tier that steps state in pieces, after moving the optimizers' existing state to its file."""
        if not offload.in_pieces:
            return None
        device = self._sharers.device_of_flags(chunks[0].device)
        optimizers = [each.optimizer for each in self.optimizers]
        used = self._reducer.usage.has_all_of
        tier = DiskTier(offload, chunks, optimizers, self._sharers.agreeing, device, used)
        for store in tier.gradient_stores:
            for chunk in store.chunks:
                self._reducer.gradients[chunk.number].store = store
        for stepped in self.optimizers:
            optimizer, number = stepped.optimizer, stepped.number
            tier.adopt_(number)
            on_settle(tier.tensors(number), tier.settle)
            on_settle(tier.tensors(number), stepped.watch.settled)
            # Both read or write state, which a late step may still be stepping.
            optimizer.register_state_dict_pre_hook(tier.settle)
            optimizer.register_load_state_dict_pre_hook(tier.settle)
            optimizer.register_load_state_dict_post_hook(partial(tier.adopt_, number))
        return tier

    def wait_for_parameters(self, chunks: Sequence[Chunk] | None = None) -> None:
        """Wait for the all-gathers of the latest steps.

        Args:
            chunks: Chunks whose parameters are waited for. Default: all.
        """
        if self.arrivals is not None:
            self.arrivals.wait(self._trained if chunks is None else chunks)

    def settle(self) -> None:
        """End all steps in progress, because a caller reads or writes what they step."""
        self.wait_for_parameters()
        if self.disk_tier is not None:
            self.disk_tier.settle()

    def before_backward(self) -> None:
        """Prepare steps of pieces within the backward that begins, as `_prepare` does for those that follow it."""
        for stepped in self.optimizers:
            self._follow_module_writes(stepped)
            stepped.watch.begin()  # without pieces, which backward steps
        if self.disk_tier is not None:
            self.disk_tier.begin_backward()

    def drop_gradients(self, chunks: Sequence[Chunk]) -> None:
        """Drop all gradients of some chunks, those that are not reduced too."""
        self._reducer.usage.forget(chunks)
        for chunk in chunks:
            for tensor in (*(part.tensor for part in chunk.slices), *chunk.wholes):
                tensor.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all optimizers, including those that wait under `no_sync`. It is the module's method.

        Args:
            set_to_none: Whether gradients are dropped (default), or set to zeros.
        """
        for stepped in self.optimizers:
            self._finish_with_gradients(stepped, set_to_none)
        self._reducer.usage.forget(self._trained)
        for each in self.optimizers:
            zero_grad_(each.optimizer, set_to_none, partial(type(each.optimizer).zero_grad, each.optimizer))

    def _zero_grad_of(self, stepped: SteppedOptimizer, *args: Any, **keywords: Any) -> None:
        """Drop the gradients of one optimizer. It is the optimizer's method, with its class's arguments."""
        self._finish_with_gradients(stepped, bool(keywords.get("set_to_none", args[0] if args else True)))
        self._reducer.usage.forget(stepped.chunks)
        type(stepped.optimizer).zero_grad(stepped.optimizer, *args, **keywords)

    def _finish_with_gradients(self, stepped: SteppedOptimizer, set_to_none: bool) -> None:
        """Wait for the steps that may still read gradients of an optimizer before these are written."""
        stepped.splitter.leave()
        if self.disk_tier is not None:
            self.disk_tier.drop_hidden_gradients(stepped.number)
            # Zeros would overwrite gradients that a late step still reads; None leaves the tensors as they are.
            if not set_to_none:
                self.disk_tier.join()

    def _before_step(
        self, stepped: SteppedOptimizer, optimizer: Optimizer, args: Any, keywords: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Prepare a step. For a step with a closure, prepare it after the closure has made the gradients."""
        if is_within_step(optimizer):
            return None
        # Slices may still be split if the step before has failed.
        stepped.splitter.leave()
        # torch runs this hook before the closure, which makes the gradients. So the closure is wrapped, and the step is
        # prepared between closure and update.
        closure = keywords.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):  # a class may take something else there, such as a loss
            self._prepare(stepped)
            return None

        def closure_then_prepare() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._prepare(stepped)
            return loss

        if "closure" in keywords:
            return args, {**keywords, "closure": closure_then_prepare}
        return (args[0], closure_then_prepare, *args[2:]), keywords

    def _prepare(self, stepped: SteppedOptimizer) -> None:
        """Show an optimizer the gradients of its step, and step the pieces that it does not step itself."""
        chunks, usage = stepped.chunks, self._reducer.usage
        if self._gatherer is not None:
            self._gatherer.check_step()
        self._sharers.calls.note(STEP)
        self.wait_for_parameters(chunks)
        # A step compiles code that reads gradients and state, such as Muon's, and no parameters in flight.
        if self.arrivals is not None:
            self.arrivals.in_use = False
        self._follow_module_writes(stepped)
        stepped.watch.end()
        if self.disk_tier is not None:
            self.disk_tier.before_step(stepped.number)
        # Parameters of another optimizer may still be in flight, and a plain read would wait for them.
        with without_torch_functions():
            self.packed.look()
        usage.look_before_step(chunks)
        unused = usage.unused(chunks)
        if stepped.assembly is not None:
            stepped.assembly.before_step(dict(zip(chunks, unused, strict=True)))
        stepped.splitter.look(unused)
        self._reducer.meter.note("S", str(stepped.number))
        if self.disk_tier is not None:
            self.disk_tier.step(stepped.number, stepped.splitter)
        stepped.splitter.enter()

    def _join(self, stepped: SteppedOptimizer, optimizer: Optimizer, *_: Any) -> None:
        """Join split slices before the user's hooks read them."""
        if not is_within_step(optimizer):
            stepped.splitter.join_()

    def _after_step(self, stepped: SteppedOptimizer, optimizer: Optimizer, *_: Any) -> None:
        """Copy an optimizer's updates to the parameters, and to the other ranks."""
        if is_within_step(optimizer):
            return
        if self.disk_tier is not None:
            self.disk_tier.end_step(stepped.number)
        stepped.watch.put_back_()
        calls = self._sharers.calls
        calls.steps, calls.unreduced_steps = calls.steps + 1, calls.unreduced_steps + 1
        self._publish(stepped)
        self._on_stepped()
        # A late step is still running, so its errors are raised later.
        if self.disk_tier is not None and not self.disk_tier.runner.is_late:
            self.disk_tier.errors.raise_together()

    @torch.no_grad()
    def _publish(self, stepped: SteppedOptimizer, *, anew: bool = False) -> None:
        """Copy the tensors of an optimizer to the parameters, and to the other ranks.

        Args:
            stepped: Optimizer.
            anew: Whether they were written outside of a step. In a step, pieces are copied when they are stepped.
        """
        if stepped.assembly is not None:
            stepped.assembly.after_step()
        for chunk in stepped.chunks:
            in_pieces = any(part.in_pieces for part in chunk.slices)
            if anew:
                for part, exact in chunk.copies():
                    chunk.own[part].copy_(exact)
            elif chunk.master is not chunk.own and not any(part.in_pieces for part in chunk.slices[:1]):
                chunk.own[: chunk.master.numel()].copy_(chunk.master)
            # The tier records the steps of pieces.
            if not anew and not in_pieces:
                chunk.meter.note("step", chunk.name)
        stepped.watch.begin()
        # The all-gathers begin last: from then on the optimizer's tensors wait for them when they are touched.
        if self.arrivals is not None:
            self.arrivals.begin(stepped.chunks)

    def follow_(self) -> None:
        """Copy what was written to parameters to the master weights, and publish what was written to these. Collective.

        Raises:
            RuntimeError: The program has written both since the last step.
        """
        for stepped in self.optimizers:
            self._follow_module_writes(stepped)
        for stepped in self.optimizers if self.copies else ():
            if self._was_written(stepped):
                self._publish_anew(stepped)

    def agree(self) -> None:
        """Record that the optimizers' tensors and the parameters agree on all ranks."""
        self._module_writes.mark(self._trained)
        self._forget_writes()

    def _follow_module_writes(self, stepped: SteppedOptimizer, *_: object) -> None:
        """Copy what a program has written to the module's parameters to the master weights of one optimizer."""
        written = self._module_writes.find(stepped.chunks)
        # Version counters are equal on all ranks, so all ranks join the collective in `_was_written`, or none does.
        if written and self._was_written(stepped):
            self._refuse_both_writes(stepped, written[0])
        # An alias may exist on one rank only, such as in a log of rank 0, so the ranks exchange nothing here.
        aliased = [] if stepped.watch.found else self._module_writes.find_aliased(stepped.chunks)
        found = list(dict.fromkeys([*written, *aliased]))
        if found:
            self.wait_for_parameters(found)
            if self.disk_tier is not None:
                self.disk_tier.settle()
            self._module_writes.follow_(found)
            stepped.watch.begin()  # its tensors have what all ranks wrote

    def _refuse_both_writes(self, stepped: SteppedOptimizer, chunk: Chunk) -> NoReturn:
        raise RuntimeError(
            f"{self._module_writes.first_name(chunk)!r} was written in the module, and its master weights in the "
            f"{type(stepped.optimizer).__name__}, since the last step, and only one of the two can count; "
            "write the module's parameters within par_zero.summon(module)"
        )

    def _publish_anew(self, stepped: SteppedOptimizer) -> None:
        """Publish an optimizer's tensors that were written outside of its step. Collective, like a step."""
        if written := self._module_writes.find(stepped.chunks):
            self._refuse_both_writes(stepped, written[0])
        self.settle()
        if self._gatherer is not None:
            self._gatherer.free_hidden()
        self._publish(stepped, anew=True)

    def publish_seen(self, *_: object) -> None:
        """Publish what was written, before a forward, in which ranks only exchange something if all of them see it."""
        for stepped in self.optimizers:
            if not stepped.watch.found:
                continue
            # A rank without the tensor sees no write and would not join the collective, so the ranks that see it would
            # hang.
            if not stepped.all_see:
                raise RuntimeError(
                    f"the tensors of the {type(stepped.optimizer).__name__} were written after its step, and "
                    "some ranks have none of them, so these cannot tell; enter par_zero.summon(module) on all ranks "
                    "after writing, before the next forward"
                )
            self._publish_anew(stepped)

    def _after_hooks(self, stepped: SteppedOptimizer, has_more: bool) -> None:
        """Publish what the hooks of a step, which have run, may have written to the optimizer's tensors."""
        if not has_more:
            return
        if self._was_written(stepped):
            self._publish_anew(stepped)
        else:  # a wrapper of the step, such as a Lookahead, must read master weights with the hook's writes
            self._follow_module_writes(stepped)

    def _switch(self, stepped: SteppedOptimizer, switch: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call `train` or `eval` of an optimizer, which may write its tensors. It is the optimizer's method."""
        self._follow_module_writes(stepped)
        # The master weights have the module's writes by now. Otherwise the switch would write over them.
        result = switch(*args, **keywords)
        if self._was_written(stepped):
            self._publish_anew(stepped)
        return result

    def _was_written(self, stepped: SteppedOptimizer) -> bool:
        """Return whether any rank has written an optimizer's tensors since its step.

        If a rank may not see the write, the ranks all-reduce a flag.
        """
        found = stepped.watch.found
        if stepped.all_see:
            return found
        device = self._sharers.device_of_flags(stepped.chunks[0].device)
        return bool(*largest_of([found], self._sharers.agreeing, device))

    def _forget_writes(self, *_: object) -> None:
        """Ignore all writes so far: one of two equal tensors was set from the other, or both were loaded."""
        for stepped in self.optimizers:
            stepped.watch.begin()


def override_(target: object, **methods: Callable[..., Any]) -> None:
    """Give one object methods in place of its class's methods.

    An attribute of an object takes precedence over the methods of its class. The object therefore keeps its class, by
    which users and torch identify it, and other objects of that class do not change.
    """
    for name, method in methods.items():
        setattr(target, name, method)


def _refuse_group(param_group: dict[str, Any]) -> NoReturn:
    """Raise an error in place of the `add_param_group` of an optimizer whose module is sharded."""
    raise ValueError(
        f"a param group with {sorted(param_group)} came after shard(), where nothing would reduce its gradients; give "
        "the optimizer all parameters before, frozen ones too"
    )
