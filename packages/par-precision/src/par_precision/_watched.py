"""Parameters with masters that note who may write to them unseen."""

from typing import Any

from torch import Tensor, nn


class WatchedWeight(nn.Parameter):
    """A parameter with a master.

    Autograd counts what is written to a parameter, but not what is written to its `data`, which old programs clip or
    load. Such an alias may be kept, too. So from the first access to `data` on the parameter is compared with its
    master before each step. Operations on it cost what those on any parameter cost.
    """

    par_has_alias = False
    """Whether `data` was asked for or replaced."""

    @property
    def data(self) -> Tensor:
        """The tensor, outside of autograd."""
        self.par_has_alias = True
        found: Tensor = nn.Parameter.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: Any) -> None:
        self.par_has_alias = True
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]


def watch_(parameter: nn.Parameter) -> None:
    """Makes an ordinary parameter a watched one. What is of another kind, such as a DTensor, stays what it is."""
    kind: type = type(parameter)
    if kind is nn.Parameter:
        parameter.__class__ = WatchedWeight
