"""All private names of torch that this package uses: the first file to open after a new torch release.

Each entry lists since when torch has the name and why no public name replaces it. The entries that run for every tensor
of a step are torch's own objects, bound when this module is imported, so that they add no function call.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "apply_",
    "bare_step",
    "child_modules",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_unscale_",
    "grouped_by_device_and_dtype",
    "inside_ddp",
    "local_tensor_of",
    "note_step",
    "scaled_mm",
    "spec_of",
    "takes_scale",
    "tree_flatten",
    "tree_unflatten",
    "version_of",
    "with_step_hooks",
]

# Many tensors in one call. torch has no public form of these; its own optimizers are made of them.

foreach_norm = torch._foreach_norm
"""Norms of tensors, each in the dtype asked for. Since 1.12, with `dtype` since 2.4."""

foreach_copy_ = torch._foreach_copy_
"""Copies of tensors, also to another dtype. Since 2.1."""

foreach_mul_ = torch._foreach_mul_
"""Products with a scalar tensor, which the host need not read. Since 2.1 with a tensor."""

foreach_clamp_min_, foreach_clamp_max_ = torch._foreach_clamp_min_, torch._foreach_clamp_max_
"""Bounds for the elements of tensors. Since 1.13."""

foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""The kernel of torch's GradScaler: products with a scalar tensor, in place. On CPUs since 2.3, where it takes half as
long as `foreach_mul_`, for the same bits. Its second argument is set to 1 if it meets what is not finite."""

grouped_by_device_and_dtype = _group_tensors_by_device_and_dtype
"""Tensors as lists of one device and dtype, which is what the kernels above take. Since 2.1."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written, as autograd counts. Since 0.4. Nothing public tells."""

# DTensors. Asked for every tensor in every step.

local_tensor_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""A DTensor's local tensor. Since 2.0. `to_local()` looks at more, to return a view that autograd follows."""

spec_of: Callable[[Any], Any] = attrgetter("_spec")
"""A DTensor's mesh and placements in one record. Since 2.0. It is one object, so whoever keeps what he made of it can
tell whether it is still the same."""

# Optimizers


def takes_scale(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's kernels divide by its attribute `grad_scale`, and skip if `found_inf` is 1.

    Since 1.13. It is how torch's GradScaler asks, and no public method answers.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def with_step_hooks(step: Callable[[Optimizer], object]) -> Callable[[Optimizer], object]:
    """Wrap a function as an optimizer's `step`: with the optimizer's hooks and an entry in torch's profiler.

    Since 2.0. torch wraps the `step` of each class when its first optimizer is made; a step that is made of several
    must be wrapped as one.
    """
    wrapped: Callable[[Optimizer], object] = Optimizer.profile_hook_step(step)
    return wrapped


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Return the `step` of an optimizer's class, without the hooks that torch has wrapped around it.

    Since 1.8. There is no public way to a step without hooks.
    """
    function: Any = type(optimizer).step
    bare: Callable[[Optimizer], object] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return bare


def note_step(optimizer: Optimizer) -> None:
    """Mark an optimizer as stepped, for lr schedulers.

    Since 2.4. Schedulers wrap the `step` of the optimizer object to see its calls, and warn if a schedule advances
    before the optimizer. `with_step_hooks` does not call this wrapper.
    """
    optimizer.__dict__["_opt_called"] = True


# Modules and their arguments


def apply_(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the values of all parameters and buffers by what a function makes of them, as `module.to` does.

    `nn.Module._apply`, since 0.2. `to` casts all of them, and FSDP2 and layers of other packages extend this method.
    """
    module._apply(change)


def inside_ddp() -> bool:
    """Return whether a DistributedDataParallel is running its module's forward now.

    Since 1.8. A module does not otherwise know of the wrapper around it.
    """
    return nn.parallel.DistributedDataParallel._active_ddp_module is not None


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by attribute. A child with two names is listed twice, unlike in `named_children()`.

    Since 0.2.
    """
    return module._modules


# `tree_flatten` and `tree_unflatten`, imported above, since 1.8: the tensors in nested tuples, lists, dicts and classes
# that others have registered, as torch.compile and FSDP find them too. No public name for them is in every torch.

# Float8


def scaled_mm(
    one: Tensor, other: Tensor, scale_one: Tensor, scale_other: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Multiply two float8 matrices, (m, k) row-major by (k, n) column-major, each times its fp32 scale.

    Since 2.5 in this form. torch.nn.functional.scaled_mm is public, but younger on CPUs than the oldest torch that this
    package works with.

    Args:
        one: (m, k), contiguous.
        other: (k, n), whose transpose is contiguous.
        scale_one: Factor for the elements of `one`, an fp32 scalar.
        scale_other: Factor for the elements of `other`, an fp32 scalar.
        dtype: dtype of the product.
        fast: Whether Hopper GPUs sum in the tensor cores alone, with fewer bits.
    """
    return torch._scaled_mm(one, other, scale_a=scale_one, scale_b=scale_other, out_dtype=dtype, use_fast_accum=fast)
