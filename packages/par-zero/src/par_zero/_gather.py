"""Stage 3: a unit's parameters are gathered before it runs and freed after, forward and backward.

A freed parameter is not left as a view of memory that is gone: it shows this rank's part of it, a flat tensor. Autograd
keeps views of the gathered buffer, so its memory is given back and taken again under the same storage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._collectives import Handle, all_gather
from .layout.chunk import Chunk


class Unit:
    """Modules that run one after the other, and the chunks that hold their parameters.

    Args:
        number: Its place; 0 is the root's own.
        modules: Their roots.
        chunks: What they need.
    """

    def __init__(self, number: int, modules: Sequence[nn.Module], chunks: Sequence[Chunk]) -> None:
        self.number, self.modules, self.chunks = number, tuple(modules), tuple(chunks)
        self.handles: list[Handle] | None = None  # of a gathering under way
        self.gathered = True  # as it is packed
        self.shown = True  # whether the parameters show what is gathered, and not this rank's part
        self.kept = False  # gathered for later passes too
        self.running = 0  # calls of forward under way
        self.outer: frozenset[int] = frozenset()  # the units around it


class Gatherer:
    """Gathers and frees units.

    Args:
        root: The whole module; what belongs to no other unit stays gathered from forward to the end of backward.
        units: The root's own first.
        group: The ranks that keep the shares.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit], group: dist.ProcessGroup) -> None:
        self._keepers = 0  # under no_sync: gathered once for several passes
        self._summoners = 0
        self._units, self._group = tuple(units), group
        self._order: list[int] = []  # of gathering, as the step before had it
        self._recorded: list[int] = []
        self._in_backward = False
        self._graphed = False  # whether the pass under way makes a graph, for a gradient of a gradient
        self._begun: list[Unit] = []  # in backward
        self._end: object = None  # what the units that began last return
        owner: dict[int, Unit] = {
            id(member.parameter): unit for unit in units for chunk in unit.chunks for member in chunk.members
        }
        for unit in units:
            unit.outer = frozenset(
                each.number
                for each in units
                if each is not unit and any(unit.modules[0] in set(outer.modules()) for outer in each.modules)
            )
            self.free_(unit)
            for module in unit.modules:
                module.register_forward_pre_hook(torch.compiler.disable(partial(self._enter, unit)))
                module.register_forward_hook(torch.compiler.disable(partial(self._leave, unit)), always_call=True)
        for module in root.modules():
            own = [owner[id(each)] for each in module.parameters(recurse=False) if id(each) in owner]
            if own:
                module.register_state_dict_pre_hook(self._show_parts)
            others = [each for each in dict.fromkeys(own) if module not in each.modules]
            if others:
                module.register_forward_pre_hook(torch.compiler.disable(partial(self._ensure, others)))
                module.register_forward_hook(
                    torch.compiler.disable(partial(self._leave_part, others)), always_call=True
                )

    @property
    def keep(self) -> bool:
        """Whether what is gathered stays so."""
        return self._keepers > 0

    def gather(self, unit: Unit) -> None:
        """Makes a unit's parameters whole. All-gather over the group, unless they are."""
        if not unit.gathered:
            self._begin(unit)
            for handle in unit.handles or ():
                handle.wait()
            unit.handles, unit.gathered = None, True
            self._prefetch(unit)
        if not unit.shown:
            unit.shown = True
            for chunk in unit.chunks:
                for member, view in zip(chunk.members, chunk.views(chunk.flat), strict=True):
                    member.parameter.data = view
        unit.kept |= self.keep

    def free_(self, unit: Unit) -> None:
        """Gives back the memory of a unit's whole parameters."""
        for handle in unit.handles or ():
            handle.wait()
        unit.handles, unit.gathered, unit.kept = None, False, False
        self._hide(unit)
        for chunk in unit.chunks:
            _resize_(chunk.flat, 0)

    def free_all(self) -> None:
        """After a step, what is gathered is out of date."""
        for unit in self._units:
            self.free_(unit)
        self._between_passes()

    def free_hidden(self) -> None:
        """After the shares were written: what was gathered of them before is out of date, or on its way."""
        for unit in self._units:
            if not unit.shown:
                self.free_(unit)

    def end_backward(self) -> None:
        """After a backward pass. Nobody would gather again what a pass through its graph needs."""
        if self._graphed:
            for unit in self._units:
                unit.kept |= unit.gathered
        elif not self.keep:
            self.free_all()
        self._between_passes()
        self._order, self._recorded = self._recorded, []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is gathered inside stays gathered, until the end of the first backward pass outside."""
        self._keepers += 1
        try:
            yield
        finally:
            self._keepers -= 1

    @contextmanager
    def summon(self) -> Iterator[None]:
        """Everything gathered inside; what is written there is kept."""
        freed = [unit for unit in self._units if not unit.gathered]  # unless this is within another summon
        hidden = [unit for unit in self._units if unit.gathered and not unit.shown]
        for unit in (*freed, *hidden):
            self.gather(unit)
        self._summoners += 1
        try:
            yield
        finally:
            self._summoners -= 1
            for unit in self._units:
                for chunk in unit.chunks:
                    low, high = chunk.layout.share(chunk.rank)
                    chunk.share.copy_(chunk.flat[low:high])
            for unit in freed:
                self.free_(unit)
            for unit in hidden:
                self._hide(unit)
            self._recorded = []

    def _hide(self, unit: Unit) -> None:
        """The parameters show this rank's part; a pass that needs them whole gathers, even if their memory is there."""
        if not unit.shown:
            return
        unit.shown = False
        for chunk in unit.chunks:
            low, high = chunk.layout.share(chunk.rank)
            for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True):
                first = min(max(start, low), high)
                member.parameter.data = chunk.share[first - low : max(first, min(stop, high)) - low]

    def _show_parts(self, *_: Any) -> None:
        """Before a state dict outside of passes and summon: their records are those of parts.

        A graph that waits for its backward pass may need the memory still, so it stays.
        """
        if not (self._summoners or self._in_backward or any(unit.running for unit in self._units)):
            for unit in self._units:
                self._hide(unit)

    def _between_passes(self) -> None:
        self._in_backward, self._graphed, self._end = False, False, None
        self._begun.clear()

    def _begin(self, unit: Unit) -> None:
        if unit.handles is None and not unit.gathered:
            unit.handles = []
            self._recorded.append(unit.number)
            for chunk in unit.chunks:
                _resize_(chunk.flat, chunk.layout.size * chunk.flat.element_size())
                with torch.autograd.grad_mode._unsafe_preserve_version_counter(chunk.flat):
                    unit.handles.append(all_gather(chunk.flat, chunk.share, self._group))

    def _prefetch(self, unit: Unit) -> None:
        """Begins to gather what the last step needed next."""
        place = len(self._recorded)
        if place < len(self._order) and self._order[place - 1] == unit.number:
            self._begin(self._units[self._order[place]])

    def _enter(self, unit: Unit, *_: Any) -> None:
        """The beginning of a module; those that ran before are done, unless this is backward."""
        if unit.chunks and not self.keep and not self._in_backward:
            for each in self._units:
                if each.gathered and each is not unit and each.number and not each.running and not each.kept:
                    self.free_(each)
        unit.running += 1
        self.gather(unit)

    def _leave(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        unit.running -= 1
        self._expect_backward([unit], output)
        self._end_evaluation(output)

    def _ensure(self, units: Sequence[Unit], *_: Any) -> None:
        for unit in units:
            self.gather(unit)

    def _leave_part(self, units: Sequence[Unit], _: nn.Module, __: Any, output: Any) -> None:
        """The end of a module within a unit, which may have been called directly."""
        self._expect_backward([unit for unit in units if not unit.running], output)
        self._end_evaluation(output)

    def _end_evaluation(self, output: Any) -> None:
        """No backward pass will free what was gathered for a forward without gradients, or of a frozen module."""
        outside = not self._in_backward and not any(unit.running for unit in self._units)
        if outside and not self.keep and (not torch.is_grad_enabled() or self._is_frozen(output)):
            self.free_all()
            self._recorded = []

    def _is_frozen(self, output: Any) -> bool:
        """Whether neither what a module returns nor any parameter wants gradients."""
        tensors = list(tensors_of(output))
        return (
            bool(tensors)
            and not any(each.requires_grad for each in tensors)
            and not any(
                member.parameter.requires_grad
                for unit in self._units
                for chunk in unit.chunks
                for member in chunk.members
            )
        )

    def _expect_backward(self, units: Sequence[Unit], output: Any) -> None:
        tensors = computed(output)
        if tensors and torch.is_grad_enabled():
            end = tensors[0].__dict__.setdefault("par_zero_end", object())  # one for units that return the same tensor
            for unit in units:
                before = partial(self._before_backward, unit, end)
                torch.autograd.graph.register_multi_grad_hook(tensors, before, mode="any")

    def _before_backward(self, unit: Unit, end: object, _: torch.Tensor) -> None:
        """The gradient of a unit's output is there, so those of the units that began before are done."""
        self._in_backward, self._graphed = True, torch.is_grad_enabled()
        self.gather(unit)
        if end is not self._end:  # else they end together, and begin together
            for begun in list(self._begun):
                if begun.number not in unit.outer and begun is not unit and begun.number and self._is_done(begun):
                    self._begun.remove(begun)
                    if not self.keep and not self._graphed:
                        self.free_(begun)
        self._end = end
        if unit not in self._begun:
            self._begun.append(unit)

    def _is_done(self, unit: Unit) -> bool:
        return all(chunk.pending == 0 for chunk in unit.chunks if chunk.trained)


def _resize_(flat: torch.Tensor, size: int) -> None:
    """Gives memory back, or takes it. What NumPy has seen of it may still be in use, and stays as it is."""
    storage = flat.untyped_storage()
    if storage.resizable():
        storage.resize_(size)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name, None))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def computed(value: Any) -> list[torch.Tensor]:
    """The tensors in what a module returns that a backward pass goes through; a parameter would keep hooks for good."""
    return [each for each in tensors_of(value) if each.requires_grad and not each.is_leaf]
