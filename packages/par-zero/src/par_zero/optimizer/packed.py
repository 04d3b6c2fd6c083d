"""Check that a module still has its packed parameters, at the addresses where they were packed."""

from collections.abc import Sequence

import torch
from torch import nn

from .._torch_private import own_parameters
from ..layout.chunk import Chunk

_ADDRESS = torch.Tensor.data_ptr


class PackedParameters:
    """Parameters of a module that are stored in chunks.

    Args:
        module: Module.
        chunks: Chunks of its parameters.
        in_place: Whether the parameters are permanently views of the chunks' full buffers, as they are before stage 3.
    """

    def __init__(self, module: nn.Module, chunks: Sequence[Chunk], *, in_place: bool) -> None:
        self._module, self._chunks, self._in_place = module, chunks, in_place
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters]
        self._pointers = list(map(_ADDRESS, self._parameters)) if in_place else []
        self._find()

    def look(self) -> None:
        """Compare identities and addresses before a step, and run the full, slower check only if one has changed.

        Raises:
            RuntimeError: A parameter was replaced.
        """
        # Two C loops, because a Python call for each parameter would take longer than the rest of the check.
        now = list(map(id, [own.get(name) for own, name in self._places]))
        if now != self._ids or (self._in_place and list(map(_ADDRESS, self._parameters)) != self._pointers):
            self.check(whole=self._in_place)
            self._find()  # parametrizations keep parameters under other names

    def check(self, *, whole: bool) -> None:
        """Check that the module has every parameter at its address.

        Args:
            whole: Whether the parameters are views of the full buffers now.

        Raises:
            RuntimeError: A parameter was replaced.
        """
        # Comparing memory instead of identity accepts a parameter that another object replaces for a time.
        places_of_module = {_place(parameter) for parameter in self._module.parameters()}
        for chunk in self._chunks:
            places = chunk.whole_views if whole else chunk.parameters
            for member, place in zip(chunk.members, places, strict=True):
                mine = member.parameter
                moved = mine.data_ptr() != place.data_ptr() or mine.dtype != place.dtype
                if moved or _place(mine) not in places_of_module:
                    raise RuntimeError(
                        f"{member.names[0]!r} was replaced after shard(), as module.to(), load_state_dict(assign=True) "
                        "or an assignment to .data does, so the optimizer would not reach it; write in place, with "
                        "copy_(), and choose dtype and device before shard()"
                    )

    def _find(self) -> None:
        """Store the module dictionary and the name of each packed parameter."""
        packed = {_place(parameter) for parameter in self._parameters}
        self._places = [
            (own, name)
            for own in map(own_parameters, self._module.modules())
            for name, parameter in own.items()
            if parameter is not None and _place(parameter) in packed
        ]
        self._ids = [id(own[name]) for own, name in self._places]


def _place(parameter: nn.Parameter) -> tuple[object, ...]:
    """Return a key that is equal for a parameter and its replacement in the same memory.

    A pipeline, for example, puts another parameter in its place for the time of a step.
    """
    # All parameters without elements have the address 0, so their identity counts.
    return parameter.data_ptr() or id(parameter), parameter.shape, parameter.dtype
