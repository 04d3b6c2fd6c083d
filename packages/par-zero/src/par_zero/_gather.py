"""The hooks of stage 3: they turn what the model does into events of a program, which gathers and frees units.

- Forward: a unit begins. Its event makes the executor gather its parameters.
- Backward: the gradient of a unit's output arrives. Its event makes the executor reduce the gradients of the units that
  were called later, and gather the parameters of this unit.
- End of a pass: all units are freed, except those that a program keeps.

`programs.executor` decides what happens at an event.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from par_groups import is_compiled

from ._torch_private import compiles_frames, is_in_torch_func, skip_frame, without_torch_functions
from ._unit import Unit, UnitState
from .layout.meter import Meter
from .programs.agreement import PassEnd
from .programs.entries import BACKWARD, FORWARD, RECOMPUTE, PassEvent
from .programs.executor import Executor
from .reduce.reducer import Reducer
from .watch.outputs import SideOutputs, call_at_backward, computed, hook_, output_tensors


class Gatherer:
    """The hooks that report a module's events to the executor, and show full parameters while a unit runs.

    Args:
        root: Sharded module. Its own unit stays gathered from forward to the end of backward.
        units: Units, the root's own unit first.
        reducer: Reducer, which reports arrived gradients and the end of a backward pass.
        executor: Executor that gathers and frees the units.
        meter: Meter that records the entries of the step.

    Attributes:
        executor: Executor that gathers and frees the units.
        on_evaluated: Function that is called after each pass without gradients.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[Unit], reducer: Reducer, executor: Executor, meter: Meter
    ) -> None:
        self._units, self._reducer, self.executor, self._meter = tuple(units), reducer, executor, meter
        self._keepers = 0  # number of open `no_sync` and `summon` contexts, in which units stay gathered
        self._summoners = 0
        self._in_backward = False
        self._graphed = False  # whether the current pass creates a graph, for a gradient of a gradient
        # Units that return the same tensor share its mark. The keys are weak, so that a mark does not keep an output.
        self._marks = WeakTensorKeyDictionary()
        self.on_evaluated: Callable[[], None] = lambda: None
        self._inner_hooks: dict[nn.Module, tuple[RemovableHandle, ...]] = {}  # of the modules within units
        drop = partial(skip_frame(_drop_inner_hooks), self._inner_hooks)
        self._opaque: set[Unit] = set()  # units that returned an object in which no tensor was found
        flats = [chunk.flat for unit in units for chunk in unit.chunks if chunk.flat.is_floating_point()]
        self._dtypes = {(flat.device.type, flat.dtype) for flat in flats}
        reducer.hooks.compare = partial(executor.end_pass, PassEnd.BACKWARD)
        reducer.hooks.before_last = executor.finish_program
        reducer.hooks.at_end.append(self._end_backward)
        for unit in units:
            unit.side = SideOutputs(_own_modules(unit, units))
            for module in unit.modules:
                module.register_forward_pre_hook(drop)
                hook_(module, partial(self._enter, unit), partial(self._leave, unit))
        unit_modules = {module for unit in units for module in unit.modules}
        unit_of = {id(member.parameter): unit for unit in units for chunk in unit.chunks for member in chunk.members}
        for module in root.modules():
            own = [unit_of[id(tensor)] for tensor in module.parameters(recurse=False) if id(tensor) in unit_of]
            if own:
                module.register_state_dict_pre_hook(self._show_parts)
            others = [unit for unit in dict.fromkeys(own) if module not in unit.modules]
            # A caller may call this inner module directly, without the module of its unit.
            if others:
                hooks = hook_(module, partial(self._enter_part, others), partial(self._leave_part, others))
                self._inner_hooks[module] = hooks
        # A compiled module may be smaller than a unit, such as a block of a pipeline stage.
        for module in [module for module in root.modules() if module not in unit_modules]:
            if any(inner in self._inner_hooks for inner in module.modules() if inner is not module):
                handle = module.register_forward_pre_hook(drop)
                self._inner_hooks[module] = (*self._inner_hooks.get(module, ()), handle)

    def check_step(self) -> None:
        """Raise if the caller is within `summon`, because the step makes the summoned parameters out of date."""
        if self._summoners:
            raise RuntimeError(
                "optimizer.step() within summon(): stage 3 steps this rank's parts, and what is summoned would be out "
                "of date and written over them; leave par_zero.summon(module) before the step"
            )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the units that are gathered inside, until the end of the first backward pass outside."""
        self._keepers += 1
        try:
            yield
        finally:
            self._keepers -= 1

    @contextmanager
    def summon(self, check: Callable[[], None]) -> Iterator[None]:
        """Gather all units inside, and keep what the caller writes to the parameters.

        Args:
            check: Function that is called when all units are gathered. If it raises, all units return to their state.
        """
        if not self._summoners:
            self._leave_placement()
        # Within another `summon` both lists are empty, so the inner exit neither frees nor hides a unit.
        freed = [unit for unit in self._units if not unit.gathered]
        hidden = [unit for unit in self._units if unit.state is UnitState.HIDDEN]
        if freed:
            self.executor.note("enters par_zero.summon")
        for unit in (*freed, *hidden):
            unit.gather()
        self._summoners += 1
        self._keepers += 1  # so that a forward inside frees no unit
        checked = False
        try:
            check()
            checked = True
            yield
        finally:
            self._summoners -= 1
            self._keepers -= 1
            # If `check` raised, the caller has not written anything.
            for unit in self._units if checked else ():
                unit.write_back()
            for unit in freed:
                unit.free()
            for unit in hidden:
                unit.hide()

    def guard(self, settle: Callable[[], None], written: Callable[[], None]) -> None:
        """Let freed parameters raise if a caller reads them like full parameters, from now on.

        Args:
            settle: Function that is called before this rank's shard is written on the host of an accelerator.
            written: Function that is called when this rank's shard of a freed parameter was written.
        """
        for unit in self._units:
            for chunk in unit.chunks:
                chunk.guard(settle, written)

    def reset(self) -> None:
        """Free all units, and forget a pass that has failed. Not collective."""
        self.free_all()
        self.executor.forget()

    def end_step(self) -> None:
        """Free all units after a step of the optimizer, because the gathered parameters are out of date."""
        self.free_all()
        self.executor.end_step()

    def free_all(self) -> None:
        """Free all units, unless the caller is within `summon`."""
        for unit in self._units if not self._summoners else ():
            unit.free()
        self._forget_backward()

    def free_hidden(self) -> None:
        """Free hidden units after a caller has written the shards, because the gathered values are out of date."""
        self._leave_placement()
        for unit in self._units:
            if unit.state is not UnitState.SHOWN:
                unit.free()

    @property
    def _is_outside(self) -> bool:
        """Whether neither a forward nor a backward is in progress."""
        return not self._in_backward and not any(unit.running for unit in self._units)

    def _leave_placement(self) -> None:
        """Free all units and stop the placement, if called between passes: the caller may write parameters."""
        if self.executor.stays and self._is_outside and any(not unit.freed for unit in self._units):
            self.free_all()
            self.executor.stop()

    def _gather(self, unit: Unit) -> None:
        """Gather and show a unit's parameters for a forward. All-gathers over the group if they are freed."""
        if unit.state is not UnitState.SHOWN and not unit.gathered and is_in_torch_func():
            raise RuntimeError(
                f"{unit.name} is called within a transform of torch.func, such as jvp, grad or vmap, where stage 3 "
                "cannot gather its parameters; pass stage=2 to shard(), or enter par_zero.summon(module) around the "
                "transform and its backward pass"
            )
        if torch.is_grad_enabled():
            self._refuse_autocast()
        if unit.chunks:
            op: Literal["F", "R"] = RECOMPUTE if self._in_backward else FORWARD
            self.executor.meet(PassEvent(op, unit.number, self._keepers > 0), in_backward=self._in_backward)
        unit.show()

    def _refuse_autocast(self) -> None:
        """Raise if autocast would cast parameters in forward.

        Autograd and autocast would keep the cast copies of all units until backward, which stage 3 must avoid.
        """
        for device, dtype in self._dtypes:
            if not torch.is_autocast_enabled(device):
                continue
            wanted = torch.get_autocast_dtype(device)
            if dtype not in (wanted, torch.float64):  # autocast does not cast float64
                raise ValueError(
                    f"a forward under autocast to {wanted} with parameters of {dtype} would keep a cast copy of all of "
                    "them until backward, which stage 3 is there to save; "
                    f"pass precision=MixedPrecision(param_dtype={wanted}) to shard(), which gathers in that dtype, "
                    "or stage=2"
                )

    def _enter(self, unit: Unit, *_: Any) -> None:
        """Record that a module of a unit begins, and gather the unit if no outer call has done so."""
        unit.running += 1
        if unit.running == 1 or unit.state is not UnitState.SHOWN:
            self._gather(unit)

    def _leave(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        unit.running -= 1
        self._expect_backward([unit], output)
        self._end_evaluation(output)

    def _enter_part(self, units: Sequence[Unit], *_: Any) -> None:
        """Record that an inner module of units begins, and gather the units if a caller has called it directly."""
        for unit in units:
            # The usual case, a call from within the unit, must cost little. Autocast may begin inside a unit's forward.
            if unit.running and unit.state is UnitState.SHOWN:
                if torch.is_grad_enabled():
                    self._refuse_autocast()
            else:
                self._gather(unit)

    def _leave_part(self, units: Sequence[Unit], _: nn.Module, __: Any, output: Any) -> None:
        called = [unit for unit in units if not unit.running]
        if called:  # the usual case is a call from within the units
            self._expect_backward(called, output)
            self._end_evaluation(output)

    def _end_evaluation(self, output: Any) -> None:
        """Free gathered parameters after a forward without a backward: without gradients, or of a frozen module."""
        if self._units[0].running:  # the usual case: a call from within the root's forward
            return
        if self._is_outside and not self._keepers and (not torch.is_grad_enabled() or self._is_frozen(output)):
            # Forward has raised. The other ranks may not have, so this rank must not begin a comparison.
            if output is None and sys.exception() is not None:
                self.reset()
                return
            self.executor.end_pass(PassEnd.EVALUATION)
            self._end_pass()
            self._meter.note("E")
            self.on_evaluated()

    def _end_pass(self) -> None:
        """Free all units at the end of a pass, or hide those that a placement keeps.

        Outside of passes the parameters show shards, and their sharding metadata describes shards.
        """
        if not self.executor.stays:
            self.free_all()
            return
        for unit in self._units:
            unit.kept = False
            unit.hide()
        self.executor.settle()

    def _is_frozen(self, output: Any) -> bool:
        """Return whether neither an output nor any parameter requires gradients."""
        tensors = list(output_tensors(output))
        if not tensors or any(tensor.requires_grad for tensor in tensors):
            return False
        chunks = [chunk for unit in self._units for chunk in unit.chunks]
        with without_torch_functions():  # faster if parameters are freed
            return not any(member.parameter.requires_grad for chunk in chunks for member in chunk.members)

    def _expect_backward(self, units: Sequence[Unit], output: Any) -> None:
        """Record that a module of some units ends, and hook the gradient of its output, which begins their backward."""
        # torch.func works only within `summon`, where passes free nothing. Hooks would run among its own transforms.
        expects = torch.is_grad_enabled() and not is_in_torch_func()
        if not expects:
            return
        tensors = [*computed(output), *(tensor for unit in units for tensor in unit.side.computed())]
        if not tensors and next(output_tensors(output), None) is None and sys.exception() is None:
            self._keep_opaque(units, output)
        if tensors:
            mark = self._marks.setdefault(tensors[0], object())
            for unit in units:
                # Backward needs the parameters as soon as the first gradient of an output arrives.
                call_at_backward(tensors, partial(self._before_backward, unit, mark))

    def _keep_opaque(self, units: Sequence[Unit], output: Any) -> None:
        """Keep units gathered to the end of backward if no tensor was found in their output.

        No hook can report when their backward begins, so their parameters must stay in memory.
        """
        for unit in units:
            if unit.number == 0 or not unit.chunks:
                continue
            unit.kept = True
            if unit not in self._opaque:
                self._opaque.add(unit)
                warnings.warn(
                    f"no tensor is found in the {type(output).__name__} that {unit.name} returns, so its parameters "
                    "stay gathered to the end of backward; return tensors, collections of them or objects that have "
                    "them as attributes",
                    stacklevel=2,
                )

    def _before_backward(self, unit: Unit, mark: object, _: torch.Tensor) -> None:
        """Begin the backward of a unit, because the gradient of its output has arrived.

        Units that return the same tensor, such as a block and its last layer, begin together.
        """
        if not self._in_backward:
            self.executor.begin_backward()
        self._in_backward, self._graphed = True, torch.is_grad_enabled()
        self._reducer.start()
        self.executor.begin_unit_backward(unit, mark, graphed=self._graphed)
        if unit.chunks:
            self.executor.meet(PassEvent(BACKWARD, unit.number, self._keepers > 0), in_backward=True)
        unit.show()

    def _end_backward(self, *, reduced: bool) -> None:
        """End a backward pass. If it reduced gradients, the reducer has compared the ranks already."""
        if not (reduced or self._graphed or self._keepers):
            self.executor.end_pass(PassEnd.UNREDUCED)
        # No hook gathers the units again for a later pass through the new graph, so they stay.
        if self._graphed:
            for unit in self._units:
                unit.kept |= unit.gathered
            self.executor.stop()
        elif not self._keepers:
            self._end_pass()
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._in_backward, self._graphed = False, False
        self.executor.end_backward()

    def _show_parts(self, *_: Any) -> None:
        """Hide all units before a state dict outside of passes and `summon`, so that it holds shards.

        The units are not freed, because a graph that waits for its backward pass may still need the memory.
        """
        if not (self._summoners or self._in_backward or any(unit.running for unit in self._units)):
            for unit in self._units:
                # A caller may write to the state dict, which would race with an all-gather. One that fails, such as
                # after the loss of a rank, is repeated at the next use, so the shards can still be saved.
                with suppress(RuntimeError):
                    unit.wait()
                unit.hide()


def _drop_inner_hooks(hooks: dict[nn.Module, tuple[RemovableHandle, ...]], module: nn.Module, *_: Any) -> None:
    """Remove the hooks of the modules within a module, if torch.compile compiles the module's forward.

    They serve a caller who calls an inner module without its unit. In a compiled forward each of them would break the
    graph, and torch.compile guards on their ids, so blocks with equal code could not share a graph.

    Args:
        hooks: Handles of the hooks of all modules within units.
        module: Module whose forward begins.
    """
    if hooks and (callable(compiles_frames()) or is_compiled(module)):
        for inner in module.modules():
            # The module's own hooks run outside of its graph, and those after forward must match those before it.
            for handle in hooks.pop(inner, ()) if inner is not module else ():
                handle.remove()


def _own_modules(unit: Unit, units: Sequence[Unit]) -> Iterator[nn.Module]:
    """Yield the modules of a unit and their children, except the modules of other units."""
    others = {module for other in units if other is not unit for module in other.modules}
    left = list(unit.modules)
    while left:
        module = left.pop()
        yield module
        left += [child for child in module.children() if child not in others]
