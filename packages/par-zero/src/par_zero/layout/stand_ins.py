"""The stand-ins for gradients in the parameters of chunks: put there, taken away, and found gone."""

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
        chunk: The chunk.
        members: Numbers of the members.
        others: Whether others of the chunk have theirs still.
    """

    chunk: Chunk
    members: list[int]
    others: bool


class StandIns:
    """The stand-ins in the parameters of some chunks."""

    def __init__(self) -> None:
        self._shown: dict[Chunk, dict[int, torch.Tensor]] = {}  # by number of the member
        self._made: dict[Chunk, list[dict[_Kind, torch.Tensor]]] = {}  # for each member

    def show(self, chunk: Chunk, used: Iterable[int]) -> None:
        """Puts stand-ins into the members that have a gradient, which the optimizer holds now.

        Args:
            chunk: The chunk.
            used: For each member, whether it has.
        """
        if chunk.owner < 0:
            return
        shown = self._shown[chunk] = {}
        known = self._made.setdefault(chunk, [{} for _ in chunk.members])
        with without_torch_functions():
            for index, (member, made, has) in enumerate(zip(chunk.members, known, used, strict=True)):
                if has:
                    parameter = member.parameter
                    kind = parameter.shape, parameter.dtype
                    if kind not in made:
                        made[kind] = stand_in_gradient(member.names[0], parameter, "the optimizer's flat tensors")
                    parameter.grad = shown[index] = made[kind]

    def take(self, arrived: torch.Tensor | None) -> list[Dropped]:
        """Takes all stand-ins away, as a backward pass begins.

        Args:
            arrived: A parameter that has a new gradient already. Nothing tells whether it had its stand-in before, so
                it counts as all others do.

        Returns:
            What the program has dropped, by taking stand-ins away.
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
        if place is not None and not kept:
            for each in dropped:
                each.members.extend([place[1]] if each.chunk is place[0] else [])
            dropped = [each._replace(others=False) for each in dropped]
        return [each for each in dropped if each.members]

    def dropped_before_step(self, chunk: Chunk) -> Dropped | None:
        """What the program has dropped of a chunk since the latest pass; None: nothing.

        Raises:
            RuntimeError: A member was given a gradient by hand.
        """
        shown, gone = self._shown.get(chunk, {}), []
        with without_torch_functions():
            gradients = [member.parameter.grad for member in chunk.members]
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
        """The gradients of a chunk were dropped, and the stand-ins with them."""
        self._shown.pop(chunk, None)
