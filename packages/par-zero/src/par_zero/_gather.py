"""Stage 3: what the model does, as events of a program which says when units are gathered and freed.

forward    a unit begins -> an event; its parameters are whole afterwards
backward   the gradient of a unit's output is there -> what was called behind it is reduced, see `Calls`
                                                    -> an event; its parameters are whole afterwards
           the pass is over                         -> all units are freed, unless a program says what stays

What happens at an event says `program.executor`.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ._torch_private import is_in_torch_func, without_torch_functions
from ._unit import State, Unit
from .calls.record import Call, Calls
from .layout.meter import Meter
from .programs.agreement import PassEnd
from .programs.book import PassKind
from .programs.entries import BACKWARD, FORWARD, RECOMPUTE, PassEvent
from .programs.executor import Executor
from .reduce.reducer import Reducer
from .watch.outputs import SideOutputs, computed, hook_, tensors_of


class Gatherer:
    """Tells the executor of a module's program what the model does, and shows units whole while they run.

    Args:
        root: The sharded module; what belongs to no other unit stays gathered from forward to the end of backward.
        units: The units, the root's own first.
        reducer: Knows which gradients are there, and when a backward pass ends.
        executor: Gathers and frees units.
        meter: Records what is done.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[Unit], reducer: Reducer, executor: Executor, meter: Meter
    ) -> None:
        self._units, self._reducer, self._executor, self._meter = tuple(units), reducer, executor, meter
        self._calls = Calls(len(self._units))
        self._keepers = 0  # under no_sync: gathered once for several passes
        self._summoners = 0
        self._in_backward = False
        self._graphed = False  # whether the pass under way makes a graph, for a gradient of a gradient
        self._marks = WeakTensorKeyDictionary()  # an object for each tensor that a unit has returned
        self.on_evaluated: Callable[[], None] = lambda: None  # is called after each pass without gradients
        self._skipped: list[int] = []  # units that other ranks came to in this backward, and this one did not
        self._opaque: set[Unit] = set()  # the units that have returned something in which no tensor was found
        flats = [chunk.flat for unit in units for chunk in unit.chunks if chunk.flat.is_floating_point()]
        self._dtypes = {(flat.device.type, flat.dtype) for flat in flats}
        reducer.hooks.compare = partial(executor.end_pass, PassEnd.BACKWARD)
        reducer.expect_last(units[0].chunks)
        reducer.hooks.before_last = executor.finish_program
        reducer.hooks.at_end.append(self._end_backward)
        executor.on_skipped = self._pass_by
        for unit in units:
            unit.side = SideOutputs(_own_modules(unit, units))
            for module in unit.modules:
                hook_(module, partial(self._enter, unit), partial(self._leave, unit))
        unit_of = {id(member.parameter): unit for unit in units for chunk in unit.chunks for member in chunk.members}
        for module in root.modules():
            own = [unit_of[id(tensor)] for tensor in module.parameters(recurse=False) if id(tensor) in unit_of]
            if own:
                module.register_state_dict_pre_hook(self._show_parts)
            others = [unit for unit in dict.fromkeys(own) if module not in unit.modules]
            if others:  # it may be called directly
                hook_(module, partial(self._enter_part, others), partial(self._leave_part, others))

    def read_ahead(self) -> None:
        """Has shares that lie on a disk read before their unit is gathered."""
        self._executor.on_next = Unit.expect

    def check_step(self) -> None:
        """Raises if parameters are whole for a caller, who would go on with what a step makes out of date."""
        if self._summoners:
            raise RuntimeError(
                "optimizer.step() within summon(): stage 3 steps this rank's parts, and what is summoned would be out "
                "of date and written over them; leave par_zero.summon(module) before the step"
            )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is gathered inside stays gathered until the end of the first backward pass outside."""
        self._keepers += 1
        try:
            yield
        finally:
            self._keepers -= 1

    @contextmanager
    def summon(self, check: Callable[[], None]) -> Iterator[None]:
        """Everything is gathered inside, and what is written there is kept.

        Args:
            check: Is called when everything is gathered. It may raise, and then everything is as before.
        """
        if not self._summoners:
            self._leave_placement()
        freed = [unit for unit in self._units if not unit.gathered]  # none within another summon
        hidden = [unit for unit in self._units if unit.state is State.HIDDEN]
        for unit in (*freed, *hidden):
            unit.gather()
        self._summoners += 1
        self._keepers += 1  # a forward inside frees nothing
        checked = False
        try:
            check()
            checked = True
            yield
        finally:
            self._summoners -= 1
            self._keepers -= 1
            for unit in self._units if checked else ():
                unit.write_back()
            for unit in freed:
                unit.free()
            for unit in hidden:
                unit.hide()

    def guard(self, written: Callable[[], None]) -> None:
        """Has freed parameters refuse to be read as if they were whole, from now on.

        Args:
            written: Is called when this rank's part of one was written.
        """
        for unit in self._units:
            for chunk in unit.chunks:
                chunk.guard(written)

    def reset(self) -> None:
        """Frees everything, and forgets a pass that has failed."""
        self.free_all()
        self._calls.forget()
        self._executor.forget()

    def end_step(self) -> None:
        """After a step of the optimizer what is gathered is out of date."""
        self.free_all()
        self._calls.forget()
        self._executor.end_step()

    def free_all(self) -> None:
        """Frees everything, but for what is summoned."""
        for unit in self._units if not self._summoners else ():
            unit.free()
        self._forget_backward()

    def free_hidden(self) -> None:
        """Frees what does not show, after the parts were written: what was gathered of them before is out of date."""
        self._leave_placement()
        for unit in self._units:
            if unit.state is not State.SHOWN:
                unit.free()

    @property
    def _is_outside(self) -> bool:
        """Whether neither a forward nor a backward is under way."""
        return not self._in_backward and not any(unit.running for unit in self._units)

    def _leave_placement(self) -> None:
        """Between passes, as parameters may be written: frees what is there, and follows no placement in this step."""
        if self._executor.stays and self._is_outside and any(not unit.freed for unit in self._units):
            self.free_all()
            self._executor.stop()

    def _gather(self, unit: Unit) -> None:
        """Makes a unit's parameters whole for a forward. All-gather over the group, unless they are there."""
        if unit.state is not State.SHOWN and not unit.gathered and is_in_torch_func():
            raise RuntimeError(
                f"{unit.name} is called within a transform of torch.func, such as jvp, grad or vmap, where stage 3 "
                "cannot gather its parameters; pass stage=2 to shard(), or enter par_zero.summon(module) around the "
                "transform and its backward pass"
            )
        if torch.is_grad_enabled():
            self._refuse_autocast()
        if unit.chunks:
            op: Literal["F", "R"] = RECOMPUTE if self._in_backward else FORWARD
            self._meet(PassEvent(op, unit.number, self._keepers > 0))
        unit.show()

    def _meet(self, event: PassEvent) -> None:
        """Has a unit whole, as it begins."""
        without = "forward" if torch.is_grad_enabled() else "evaluation"
        kind = PassKind("backward" if self._in_backward else without, event.keeps)
        self._executor.meet(event, kind, in_backward=self._in_backward)

    def _refuse_autocast(self) -> None:
        """Raises if a forward would cast parameters.

        Autograd and autocast would keep the copies of all units until backward, which is the memory that stage 3 saves.
        """
        for device, dtype in self._dtypes:
            if not torch.is_autocast_enabled(device):
                continue
            wanted = torch.get_autocast_dtype(device)
            if dtype not in (wanted, torch.float64):  # autocast leaves float64 alone
                raise ValueError(
                    f"a forward under autocast to {wanted} with parameters of {dtype} would keep a cast copy of all of "
                    "them until backward, which stage 3 is there to save; "
                    f"pass precision=MixedPrecision(param_dtype={wanted}) to shard(), which gathers in that dtype, "
                    "or stage=2"
                )

    def _enter(self, unit: Unit, *_: Any) -> None:
        """A module of a unit begins."""
        self._calls.begin()
        unit.running += 1
        if unit.running == 1 or unit.state is not State.SHOWN:
            self._gather(unit)

    def _leave(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        unit.running -= 1
        self._expect_backward([unit], output)
        self._end_evaluation(output)

    def _enter_part(self, units: Sequence[Unit], *_: Any) -> None:
        """A module within a unit begins, which may have been called directly."""
        self._calls.begin()
        for unit in units:
            if unit.running and unit.state is State.SHOWN:  # as most are: these calls must cost little
                if torch.is_grad_enabled():
                    self._refuse_autocast()
            else:
                self._gather(unit)

    def _leave_part(self, units: Sequence[Unit], _: nn.Module, __: Any, output: Any) -> None:
        for unit in units:
            if not unit.running:
                break
        else:  # as is usual
            self._calls.end_within()
            return
        called = [unit for unit in units if not unit.running]
        self._expect_backward(called, output)
        self._end_evaluation(output)

    def _end_evaluation(self, output: Any) -> None:
        """Free gathered parameters after a forward without a backward: without gradients, or of a frozen module."""
        if self._units[0].running:  # as is so of all calls but the root's own
            return
        if self._is_outside and not self._keepers and (not torch.is_grad_enabled() or self._is_frozen(output)):
            if output is None and sys.exception() is not None:  # forward has failed
                self.reset()
                return
            self._executor.end_pass(PassEnd.EVALUATION)
            self._end_pass()
            self._meter.note("E")
            self.on_evaluated()

    def _end_pass(self) -> None:
        """A pass has ended: all is freed, or hidden where a placement says that it stays.

        Records of parameters outside of passes are those of parts.
        """
        if not self._executor.stays:
            self.free_all()
            return
        for unit in self._units:
            unit.kept = False
            unit.hide()
        self._executor.settle()

    def _is_frozen(self, output: Any) -> bool:
        """Whether neither what a module returns nor any parameter wants gradients."""
        tensors = list(tensors_of(output))
        if not tensors or any(tensor.requires_grad for tensor in tensors):
            return False
        chunks = [chunk for unit in self._units for chunk in unit.chunks]
        with without_torch_functions():  # quicker, where parameters are freed
            return not any(member.parameter.requires_grad for chunk in chunks for member in chunk.members)

    def _expect_backward(self, units: Sequence[Unit], output: Any) -> None:
        """A module of some units ends, and the gradient of what it returns begins their backward."""
        # In torch.func, within summon, passes free nothing, and hooks would fall among those of torch.func.
        expects = torch.is_grad_enabled() and not is_in_torch_func()
        tensors = computed(output) if expects else []
        if expects:
            tensors += [tensor for unit in units for tensor in unit.side.computed()]
        numbers = [unit.number for unit in units]
        calls = self._calls
        call = calls.repeat(numbers) if self._in_backward else calls.end(numbers, has_graph=bool(tensors))
        if not expects:
            return
        if not tensors and next(tensors_of(output), None) is None and sys.exception() is None:
            self._keep_opaque(units, output)
        if tensors:
            mark = self._marks.setdefault(tensors[0], object())
            for unit in units:
                before = partial(self._before_backward, unit, call, mark)
                torch.autograd.graph.register_multi_grad_hook(tensors, before, mode="any")

    def _keep_opaque(self, units: Sequence[Unit], output: Any) -> None:
        """Keeps units to the end of backward that have returned something in which no tensor is found.

        Nothing tells when their backward begins, so their parameters must be there.
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

    def _before_backward(self, unit: Unit, call: Call, mark: object, _: torch.Tensor) -> None:
        """The gradient of a unit's output is there.

        Units that return the same tensor, such as a block and its last layer, begin together, so neither is over.
        """
        if not self._in_backward:
            self._executor.begin_backward()
        self._in_backward, self._graphed = True, torch.is_grad_enabled()
        self._reducer.start()
        self._close(self._calls.left_behind(call))
        self._executor.begin_unit_backward(unit, mark, graphed=self._graphed)
        if unit.chunks:
            self._meet(PassEvent(BACKWARD, unit.number, self._keepers > 0))
        unit.show()

    def _close(self, numbers: Iterable[int]) -> None:
        """This pass brings no more gradients of some units, nor of those that no rank has called or comes to."""
        uncalled = self._calls.uncalled if self._calls.returned else []
        uncalled = [number for number in uncalled if not self._executor.is_to_come(number)]
        self._calls.uncalled = [number for number in self._calls.uncalled if number not in uncalled]
        # A call of an earlier pass may be known still, as somebody keeps its loss: autograd knows what this one brings.
        skipped = [number for number in self._skipped if not self._may_come_to(number)]
        self._skipped = [number for number in self._skipped if number not in skipped]
        # What the root has is used by anybody, at any time.
        over = dict.fromkeys((*numbers, *uncalled, *skipped))
        closed = [chunk for number in over if number for chunk in self._units[number].chunks]
        if closed:
            self._reducer.close(closed)

    def _may_come_to(self, number: int) -> bool:
        """Whether this pass may still come to a unit that this rank has skipped."""
        chunks = self._units[number].chunks
        return self._executor.is_to_come(number) or any(self._reducer.may_bring(chunk) for chunk in chunks)

    def _pass_by(self, number: int) -> None:
        """Another rank comes to the backward of a unit that this one skips, and begins to reduce what is behind it."""
        if number not in self._skipped:
            self._skipped.append(number)
        self._close([])
        self._reducer.begin(before=self._units[number].chunks)

    def _end_backward(self, *, reduced: bool) -> None:
        """A backward pass has ended, with gradients reduced or not."""
        if not (reduced or self._graphed or self._keepers):
            self._executor.end_pass(PassEnd.UNREDUCED)
        if self._graphed:  # nobody would gather again what a pass through its graph needs
            for unit in self._units:
                unit.kept |= unit.gathered
            self._executor.stop()
        elif not self._keepers:
            self._end_pass()
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._calls.end_pass(graphed=self._graphed)
        self._in_backward, self._graphed = False, False
        self._skipped.clear()
        self._executor.end_backward()

    def _show_parts(self, *_: Any) -> None:
        """Before a state dict outside of passes and summon: the records of parameters are those of parts.

        A graph that waits for its backward pass may need the memory still, so it stays.
        """
        if not (self._summoners or self._in_backward or any(unit.running for unit in self._units)):
            for unit in self._units:
                unit.wait()  # it may be on its way, and what is on its way must not be written
                unit.hide()


def _own_modules(unit: Unit, units: Sequence[Unit]) -> Iterator[nn.Module]:
    """The modules of a unit and their children, but for those of other units."""
    others = {module for other in units if other is not unit for module in other.modules}
    left = list(unit.modules)
    while left:
        module = left.pop()
        yield module
        left += [child for child in module.children() if child not in others]
