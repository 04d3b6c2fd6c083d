"""Whether the module still has the parameters that were packed, and has them where they were packed."""

from collections.abc import Sequence

from torch import nn

from .chunk import Chunk


class Held:
    """The parameters of a module that lie in chunks.

    Args:
        module: The module.
        chunks: Of its parameters.
        whole: Whether the parameters lie in the whole buffers for good.
    """

    def __init__(self, module: nn.Module, chunks: Sequence[Chunk], *, whole: bool) -> None:
        self._module, self._chunks, self._whole = module, chunks, whole
        self._parameters = [member.parameter for chunk in chunks for member in chunk.members]
        self._pointers = [each.data_ptr() for each in self._parameters] if whole else []
        self._find()

    def look(self) -> None:
        """Before a step: looks whether anything has changed, which is quick, and if so checks.

        Raises:
            RuntimeError: A parameter was replaced.
        """
        if [id(held.get(name)) for held, name in self._places] != self._ids or (
            self._whole and [each.data_ptr() for each in self._parameters] != self._pointers
        ):
            self.check(whole=self._whole)
            self._find()  # parametrizations keep parameters under other names

    def check(self, *, whole: bool) -> None:
        """Checks each parameter.

        Args:
            whole: Whether they lie in the whole buffers now.

        Raises:
            RuntimeError: A parameter was replaced.
        """
        found = {_place(each) for each in self._module.parameters()}
        for chunk in self._chunks:
            places = chunk.views(chunk.flat) if whole else (member.parameter for member in chunk.members)
            for member, place in zip(chunk.members, places, strict=True):
                mine = member.parameter
                moved = mine.data_ptr() != place.data_ptr() or mine.dtype != place.dtype
                if moved or _place(mine) not in found:
                    raise RuntimeError(
                        f"{member.names[0]!r} was replaced after shard(), as module.to(), load_state_dict(assign=True) "
                        "or an assignment to .data does, so the optimizer would not reach it; write in place, with "
                        "copy_(), and choose dtype and device before shard()"
                    )

    def _find(self) -> None:
        packed = {_place(each) for each in self._parameters}
        self._places = [
            (each._parameters, name)
            for each in self._module.modules()
            for name, parameter in each._parameters.items()
            if parameter is not None and _place(parameter) in packed
        ]
        self._ids = [id(held[name]) for held, name in self._places]


def _place(parameter: nn.Parameter) -> tuple[object, ...]:
    """What another parameter in its place shares with it, such as a pipeline's for the time of a step."""
    return parameter.data_ptr() or id(parameter), parameter.shape, parameter.dtype
