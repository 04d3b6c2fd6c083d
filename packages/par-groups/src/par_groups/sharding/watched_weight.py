"""Parameters that record whether a program may have written to them through `data`."""

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
    """Make an ordinary parameter a `WatchedWeight`. A parameter of another class, such as a DTensor, is unchanged.

    Args:
        parameter: The parameter; it stays the same object.
    """
    kind: type = type(parameter)
    if kind is nn.Parameter:
        parameter.__class__ = WatchedWeight
