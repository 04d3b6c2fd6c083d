"""Parameters that record whether a program may have written to them through `data`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..attributes import HAS_ALIAS


class WatchedWeight(nn.Parameter):
    """A parameter of which an optimizer holds a copy in higher precision.

    Autograd counts in-place writes to a parameter in its version counter. It does not count writes to `parameter.data`,
    which many programs use to clip or to load weights. A program may also keep that alias and write to it later. So
    after the first access to `data`, the holder of the copy compares the parameter with the copy before each step.
    Operations on a watched weight cost the same as on any parameter.
    """

    @property
    def data(self) -> Tensor:
        """The tensor outside of autograd."""
        HAS_ALIAS.set(self, value=True)
        found: Tensor = nn.Parameter.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: Any) -> None:
        HAS_ALIAS.set(self, value=True)
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]


def watch_weight_(parameter: nn.Parameter) -> None:
    """Turn a parameter into a `WatchedWeight`, so that writes to `parameter.data` are noticed.

    A parameter of another class, such as a DTensor, is unchanged.

    Args:
        parameter: The parameter; it stays the same object.
    """
    kind: type = type(parameter)
    if kind is nn.Parameter:
        parameter.__class__ = WatchedWeight


class WatchedParameter(nn.Parameter):
    """A tensor of an optimizer between two steps.

    The holder of rounded copies finds in-place writes by the tensor's version counter. `data` of an ordinary parameter
    has a counter of its own, so a write through it would stay unseen. Fused kernels accept only ordinary parameters, so
    the holder sets the class after each step and removes it before the next step.
    """

    @property
    def data(self) -> Tensor:
        """The tensor outside of autograd, with the same version counter, so that writes to it are counted."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy the values. The tensor keeps its memory, which may be part of a larger buffer."""
        self.detach().copy_(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_ordinary(self):
            return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_ordinary(self):
            return self.__deepcopy__(memo)


@contextmanager
def _as_ordinary(tensor: nn.Parameter) -> Iterator[None]:
    """Make a watched tensor an ordinary parameter inside, so that copies of it are ordinary parameters."""
    tensor.__class__ = nn.Parameter
    try:
        yield
    finally:
        tensor.__class__ = WatchedParameter
