"""What stands in `parameter.grad` while the gradient lives in the optimizer's flat tensors.

The optimizer owns a gradient from the end of the backward pass that has summed it over the ranks. A program that looks
for it in the module would find nothing, and clip, scale or drop nothing, without a word. So a stand-in is there: it
takes no memory, and whoever computes with it is told where the gradient is. A program that sets it to None, as torch
advises in place of `zero_grad`, has dropped the gradient, which is seen before the next pass or step.

It is an empty sparse tensor, to which autograd adds a gradient right if a pass begins unseen, in a module that is part
of the sharded one and was called by itself.
"""

from collections.abc import Iterable, Sequence
from types import GetSetDescriptorType
from typing import Any, NoReturn

import torch

from .._torch_private import may_share_data, tensor_members, without_torch_functions

_T = torch.Tensor
_OF_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_OF_SHAPES = {"shape", "ndim", "nbytes"}

NOTES: frozenset[Any] = frozenset(
    [
        getattr(_T, name).__get__
        for name, member in tensor_members().items()
        if isinstance(member, GetSetDescriptorType) and name not in _OF_VALUES | _OF_SHAPES
    ]
    + [_T.element_size, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.get_device, _T.is_inference, _T.is_conj]
    + [_T.requires_grad_, _T.requires_grad.__set__]  # type: ignore[attr-defined]
    + [torch.is_floating_point, torch.is_complex, may_share_data]
)
"""Operations on a tensor that read and write neither its values nor its shape."""

_SHAPES: frozenset[Any] = frozenset(
    [*(getattr(_T, name).__get__ for name in _OF_SHAPES), _T.size, _T.dim, _T.numel, _T.nelement, torch.numel]
)
_CONVERSIONS: frozenset[Any] = frozenset([_T.to, _T.cpu, _T.cuda, _T.float, _T.double, _T.half, _T.bfloat16])


class GradientElsewhere(torch.Tensor):
    """The stand-in for a gradient that lives in the optimizer."""

    par_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answers what can be answered without the gradient, and refuses the rest."""
        if func in _SHAPES or func in NOTES:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        if func in _CONVERSIONS and isinstance(args[0], GradientElsewhere):  # `module.to` sets it as data
            return args[0]
        if func == _T.data.__set__ and args[1] is args[0]:  # type: ignore[attr-defined]
            return None
        raise RuntimeError(
            f"the gradient of {_name_in([*args, *(kwargs or {}).values()])!r} is read or written in the module, and it "
            "lives in the optimizer's flat tensors; use par_groups.gradients(optimizer), or pass the optimizer to "
            "par_precision.clip_grad_norm_()"
        )

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # what torch shows of contents is not there
        return f"GradientElsewhere({self.par_name!r})"


def refuse_by_hand(name: str) -> NoReturn:
    """Raises an error about a gradient that a program has put into a parameter."""
    raise RuntimeError(
        f"{name!r} was given a gradient by hand, and the optimizer steps what backward passes sum over the ranks; use "
        "torch.autograd.backward(parameters, gradients) instead, or write in place through "
        "par_groups.gradients(optimizer)"
    )


def stand_in_for(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A stand-in for the gradient of a parameter, of the shape that this shows now."""
    made = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
    made.__class__ = GradientElsewhere  # torch makes no subclass of a sparse tensor
    made.par_name = name  # type: ignore[attr-defined]
    return made


def _name_in(values: Iterable[Any]) -> str:
    """The name of the first stand-in among the arguments of an operation."""
    for value in values:
        if isinstance(value, GradientElsewhere):
            return value.par_name
        if isinstance(value, list | tuple) and (found := _name_in(value)):
            return found
    return ""
