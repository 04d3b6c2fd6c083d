"""The tensor in `parameter.grad` while the gradient is stored in tensors of an optimizer.

The optimizer owns a gradient from the end of the backward pass that has added it up. A program that looks for it in
the module would find nothing, and would clip, scale or drop nothing, without an error. Therefore `parameter.grad` holds
a placeholder. It takes no memory, and every computation with it raises an error that names the owner of the gradient. A
program that sets it to None, as torch advises in place of `zero_grad`, has dropped the gradient. The owner notices this
before the next pass or step.

The placeholder is an empty sparse tensor. Autograd adds a gradient to it correctly if a pass begins without the owner,
such as the pass of a submodule that was called directly.
"""

from collections.abc import Iterable, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch

from .._torch_private import may_share_data, tensor_members, without_torch_functions

_T = torch.Tensor
# Properties that return values or a view of them, and properties that depend on the shape.
_OF_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_OF_SHAPES = {"shape", "ndim", "nbytes"}

METADATA_OPERATIONS: frozenset[Any] = frozenset(
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
    """Stand-in for a gradient that an optimizer stores."""

    par_name: str
    par_where: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no gradient.

        Raises:
            RuntimeError: The operation reads or writes the gradient.
        """
        if func in _SHAPES or func in METADATA_OPERATIONS:
            # Without this context, the call would return to this method.
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        if func in _CONVERSIONS and isinstance(args[0], GradientElsewhere):  # `module.to` sets it as data
            return args[0]
        # `module.to` sets as data what the conversion above has returned, the stand-in itself.
        if func == _T.data.__set__ and args[1] is args[0]:  # type: ignore[attr-defined]
            return None
        found = _first_in([*args, *(kwargs or {}).values()])
        raise RuntimeError(
            f"the gradient of {found.par_name!r} is read or written in the module, and it lives in {found.par_where}; "
            "use par_groups.gradients(optimizer), or pass the optimizer to par_precision.clip_grad_norm_()"
        )

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # what torch shows of contents is not there
        return f"GradientElsewhere({self.par_name!r})"


def stand_in_gradient(name: str, parameter: torch.Tensor, where: str) -> torch.Tensor:
    """Return a stand-in for the gradient of a parameter, of the shape that the parameter has now.

    Args:
        name: Name of the parameter, for error messages.
        parameter: Parameter of a module.
        where: Tensor that has the gradient, in words, such as "the optimizer's fp32 master".
    """
    # torch takes gradients of this dtype alone. None stands for any dtype; older versions lack the attribute.
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    made = torch.empty(parameter.shape, dtype=dtype, device=parameter.device, layout=torch.sparse_coo)
    made.__class__ = GradientElsewhere  # torch makes no subclass of a sparse tensor
    made.par_name, made.par_where = name, where  # type: ignore[attr-defined]
    return made


def _first_in(values: Iterable[Any]) -> Any:
    """Return the first stand-in among the arguments of an operation, or None."""
    for value in values:
        if isinstance(value, GradientElsewhere):
            return value
        if isinstance(value, list | tuple) and (found := _first_in(value)) is not None:
            return found
    return None
