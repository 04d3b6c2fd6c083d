"""Param groups of all optimizers of a module, numbered consecutively."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from par_groups import JointOptimizer, UpdateScope, update_scope_of

from ._policies import OptimizerUpdate


@dataclass(frozen=True, eq=False, kw_only=True)
class ParamGroup:
    """Param group of one of the optimizers.

    Args:
        optimizer: Optimizer that has the group.
        owner: Number of the optimizer.
        number: Number of the group in the optimizer.
        settings: Dict of the group, with `params`.
        atomic: Whether the optimizer needs full tensors.
        scope: Update scope of the optimizer's class.
        declared: Whether the user has declared the scope by `OptimizerUpdate`.
    """

    optimizer: Optimizer
    owner: int
    number: int
    settings: dict[str, Any]
    atomic: bool
    scope: UpdateScope
    declared: bool

    @property
    def place(self) -> str:
        """Text for errors, such as "param_groups[1] of the AdamW"."""
        return f"param_groups[{self.number}] of the {type(self.optimizer).__name__}"


def in_a_row(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return a list of the optimizers that were passed as one optimizer, as several, or as None.

    Raises:
        TypeError: Something else was passed.
        ValueError: The list is empty, or an optimizer wraps another one.
    """
    if isinstance(optimizer, JointOptimizer):
        # A joint optimizer only forwards calls. Its members have the param groups that `shard` replaces.
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
        inner = _wrapped_by(one)
        if inner is not None:
            raise ValueError(
                f"optimizer={type(one).__name__}: it wraps a {type(inner).__name__}, whose tensors and state shard() "
                f"replaces; pass the {type(inner).__name__} to shard(), and wrap it afterwards"
            )
    return list(given)


def _wrapped_by(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that another optimizer wraps, as a Lookahead does; None if it wraps none."""
    for value in vars(optimizer).values():
        inside = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        for each in inside:
            if isinstance(each, Optimizer) and not any(own is optimizer for own in vars(each).values()):
                return each
    return None


def param_groups(optimizers: Sequence[Optimizer], update: OptimizerUpdate) -> list[ParamGroup]:
    """Return the param groups of all optimizers.

    An optimizer gets full tensors if its class needs them, if its class is unknown, or if `update` declares it atomic.

    Raises:
        TypeError: A function returned something else than True or False.
        ValueError: A declaration contradicts another one, or the known scope of the class.
    """
    groups = []
    for owner, optimizer in enumerate(optimizers):
        for number, settings in enumerate(optimizer.param_groups):
            whole = update.atomic(settings) if callable(update.atomic) else update.atomic
            by_element = update.elementwise(settings) if callable(update.elementwise) else update.elementwise
            # The scope is looked up per group, because a setting such as a norm over all gradients may widen it.
            scope = update_scope_of(optimizer, settings)
            group = ParamGroup(
                optimizer=optimizer,
                owner=owner,
                number=number,
                settings=settings,
                atomic=whole or (scope is not UpdateScope.ELEMENT and not by_element),
                scope=scope,
                declared=whole or by_element,
            )
            for name, value in (("atomic", whole), ("elementwise", by_element)):
                if not isinstance(value, bool):
                    raise TypeError(f"{name} gives {value!r} for {group.place}; let it give True or False")
            if whole and by_element:
                raise ValueError(
                    f"atomic=True and elementwise=True for {group.place}: tensors of an optimizer that treats each "
                    "element by itself need not stay whole; set one of them"
                )
            if by_element and scope in {UpdateScope.TENSOR, UpdateScope.MODEL}:
                raise ValueError(
                    f"elementwise=True for {group.place}: this class does not treat each element by itself; remove "
                    "elementwise, or pass a function that returns False for this param group"
                )
            groups.append(group)
    return groups
