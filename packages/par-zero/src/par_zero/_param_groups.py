"""The param groups of a module's optimizers, in one row: those of the first, then those of the second."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from par_groups import JointOptimizer

Atomic = bool | Callable[[Mapping[str, Any]], bool]
"""Which param groups have tensors that their optimizer must see whole: all, none, or what a function says of each."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ParamGroup:
    """A param group of one of the optimizers.

    Args:
        optimizer: The optimizer.
        owner: The optimizer's number among all optimizers.
        number: The group's number in the optimizer.
        settings: The group's dict, with `params`.
        atomic: Whether the optimizer must see each of its tensors as a whole.
    """

    optimizer: Optimizer
    owner: int
    number: int
    settings: dict[str, Any]
    atomic: bool

    @property
    def place(self) -> str:
        """What errors call it, such as "param_groups[1] of the AdamW"."""
        return f"param_groups[{self.number}] of the {type(self.optimizer).__name__}"


def in_a_row(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """The optimizers that were given as one, as several or as None.

    Raises:
        TypeError: What is no optimizer.
        ValueError: An empty list.
    """
    if isinstance(optimizer, JointOptimizer):
        return list(optimizer.optimizers)
    given = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, a list of several, or None"
        )
    if optimizer is not None and not given:
        raise ValueError(f"optimizer is {optimizer!r}; give the optimizers that have the module's parameters, or None")
    for number, one in enumerate(given):
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer[{number}] is a {type(one).__name__}; give a torch.optim.Optimizer")
    return list(given)


def param_groups(optimizers: Sequence[Optimizer], atomic: Atomic) -> list[ParamGroup]:
    """The param groups of all optimizers.

    Raises:
        TypeError: A function that gives something else than True or False.
    """
    groups = []
    for owner, optimizer in enumerate(optimizers):
        for number, settings in enumerate(optimizer.param_groups):
            whole = atomic(settings) if callable(atomic) else atomic
            group = ParamGroup(optimizer=optimizer, owner=owner, number=number, settings=settings, atomic=whole)
            if not isinstance(whole, bool):
                raise TypeError(f"atomic gives {whole!r} for {group.place}; let it give True or False")
            groups.append(group)
    return groups
