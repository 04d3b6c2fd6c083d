"""Stand-ins for gradients: tensors in `.grad` of a chunk's parameters while the optimizer holds the gradients."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from par_groups import GradientElsewhere, stand_in_gradient

from .._torch_private import without_torch_functions
from ..watch.freed import refuse_by_hand
from .chunk import Chunk

_Kind = tuple[torch.Size, torch.dtype]


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
        self._shown: dict[Chunk, dict[int, torch.Tensor]] = {}  # by number of the member
        self._made: dict[Chunk, list[dict[_Kind, torch.Tensor]]] = {}  # for each member

    def show(self, chunk: Chunk, used: Iterable[int]) -> None:
        """Put stand-ins into the members whose gradients the optimizer holds now.

        Args:
            chunk: Chunk.
            used: Whether each member has a gradient.
        """
        if chunk.plan.owner < 0:
            return
        shown = self._shown[chunk] = {}
        known = self._made.setdefault(chunk, [{} for _ in chunk.members])
        with without_torch_functions():
            for index, (member, made, has) in enumerate(zip(chunk.members, known, used, strict=True)):
                if has:
                    parameter = member.parameter
                    kind = parameter.shape, parameter.dtype
                    # Each stand-in is made once: making a tensor of a subclass in each step takes longer than reusing
                    # it.
                    if kind not in made:
                        made[kind] = stand_in_gradient(member.names[0], parameter, "the optimizer's flat tensors")
                    parameter.grad = shown[index] = made[kind]

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
                gone = []
                for index, one in stand_ins.items():
                    parameter = chunk.members[index].parameter
                    if parameter.grad is one:
                        parameter.grad, kept = None, True
                    elif parameter is arrived:
                        place = chunk, index
                    else:
                        gone.append(index)
                dropped.append(Dropped(chunk, gone, len(gone) < len(stand_ins)))
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
        shown, gone = self._shown.get(chunk, {}), []
        with without_torch_functions():
            gradients = [member.parameter.grad for member in chunk.members]
        # This is the case of nearly every step, so it is decided before the loop.
        if len(shown) == len(gradients) and all(type(gradient) is GradientElsewhere for gradient in gradients):
            return None
        for index, gradient in enumerate(gradients):
            if gradient is None and index in shown:
                gone.append(index)
                del shown[index]
            elif gradient is not None and type(gradient) is not GradientElsewhere:
                refuse_by_hand(chunk.members[index].names[0])
        return Dropped(chunk, gone, bool(shown)) if gone else None

    def forget(self, chunk: Chunk) -> None:
        """Forget the stand-ins of a chunk, whose gradients were dropped."""
        self._shown.pop(chunk, None)
