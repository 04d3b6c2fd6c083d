"""Stand-ins for gradients: tensors in `.grad` of a chunk's parameters while the optimizer holds the gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from par_groups import GradientElsewhere, stand_in_gradient

from .._torch_private import without_torch_functions
from ..watch.freed import refuse_by_hand
from .chunk import Chunk

_Kinds = tuple[tuple[torch.Size, torch.dtype], ...]


class Dropped(NamedTuple):
    """Gradients that a program has dropped by setting them to None.

    Attributes:
        chunk: Chunk.
        members: Numbers of the members.
        others: Whether other members of the chunk still have their gradients.
    """

    chunk: Chunk
    members: list[int]
    others: bool


class StandIns:
    """Stand-ins in the parameters of some chunks."""

    def __init__(self) -> None:
        self._shown: dict[Chunk, list[torch.Tensor | None]] = {}  # for each member; None: it has no gradient
        # For each member, by the shapes and dtypes of all: at stage 3 the parameters are whole or parts of a shard.
        self._made: dict[Chunk, dict[_Kinds, list[torch.Tensor]]] = {}

    def show(self, chunk: Chunk, used: Sequence[int]) -> None:
        """Put stand-ins into the members whose gradients the optimizer holds now.

        Args:
            chunk: Chunk.
            used: Whether each member has a gradient.
        """
        if chunk.plan.owner < 0:
            return
        parameters, known = chunk.parameters, self._made.setdefault(chunk, {})
        with without_torch_functions():
            kinds = tuple([(parameter.shape, parameter.dtype) for parameter in parameters])
            # Each stand-in is made once: making a tensor of a subclass in each step takes longer than reusing it.
            if kinds not in known:
                known[kinds] = [
                    stand_in_gradient(member.names[0], member.parameter, "the optimizer's flat tensors")
                    for member in chunk.members
                ]
            shown: list[torch.Tensor | None] = [*known[kinds]]
            if not all(used):
                shown = [one if has else None for one, has in zip(shown, used, strict=True)]
            self._shown[chunk] = shown
            for parameter, one in zip(parameters, shown, strict=True):
                if one is not None:
                    parameter.grad = one

    def take(self, arrived: torch.Tensor | None) -> list[Dropped]:
        """Remove all stand-ins when a backward pass begins.

        Args:
            arrived: Parameter that has a new gradient already. Its own stand-in can no longer be checked, so it counts
                like the other parameters.

        Returns:
            Gradients that the program has dropped, by removing stand-ins.
        """
        shown, self._shown = self._shown, {}
        dropped: list[Dropped] = []
        kept, place = False, None
        with without_torch_functions():
            for chunk, stand_ins in shown.items():
                gone, others = [], False
                for index, (parameter, one) in enumerate(zip(chunk.parameters, stand_ins, strict=True)):
                    if one is None:
                        continue
                    if parameter.grad is one:
                        parameter.grad, kept = None, True
                    elif parameter is arrived:
                        place = chunk, index
                    else:
                        gone.append(index)
                        continue
                    others = True
                dropped.append(Dropped(chunk, gone, others))
        # The program dropped every other gradient, as `zero_grad` does, so it dropped this parameter's as well.
        if place is not None and not kept:
            for each in dropped:
                each.members.extend([place[1]] if each.chunk is place[0] else [])
            dropped = [each._replace(others=False) for each in dropped]
        return [each for each in dropped if each.members]

    def dropped_before_step(self, chunk: Chunk) -> Dropped | None:
        """Return what the program has dropped of a chunk since the latest pass; None if it dropped nothing.

        Raises:
            RuntimeError: The program assigned a gradient to a member.
        """
        with without_torch_functions():
            gradients = [parameter.grad for parameter in chunk.parameters]
        # This is the case of nearly every step, so it is decided before the loop.
        if {*map(type, gradients)} == {GradientElsewhere}:
            return None
        shown, gone = self._shown.get(chunk, [None] * len(gradients)), []
        for index, gradient in enumerate(gradients):
            if gradient is None and shown[index] is not None:
                gone.append(index)
                shown[index] = None
            elif gradient is not None and type(gradient) is not GradientElsewhere:
                refuse_by_hand(chunk.members[index].names[0])
        return Dropped(chunk, gone, any(one is not None for one in shown)) if gone else None

    def forget(self, chunk: Chunk) -> None:
        """Forget the stand-ins of a chunk, whose gradients were dropped."""
        self._shown.pop(chunk, None)
