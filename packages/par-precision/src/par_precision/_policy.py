"""What happens around a module's forward: casts, autocast, TF32."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ._precisions import Precision


class Policy:
    """Runs a module's forward in a precision.

    Floating-point inputs take the dtype of the weights. Floating-point outputs become `output_dtype`, so that a loss
    made of them has the digits it needs. Where it runs within another that has the same policy, as it or an item of a
    ModuleList may, nothing more is done.

    Args:
        precision: The precision.
        device: Type of the module's device.
        output_dtype: Of half-precision outputs; None leaves them.
        takes_gradients: Whether gradients are taken from parameters as they come, before DDP has averaged them.
    """

    def __init__(
        self, precision: Precision, device: str, output_dtype: torch.dtype | None, *, takes_gradients: bool = False
    ) -> None:
        self._precision, self._device, self._output_dtype = precision, device, output_dtype
        self._takes_gradients = takes_gradients
        self._here = _Here()

    def attach(self, module: nn.Module) -> None:
        """Puts itself around a module's forward, inside all hooks."""
        for each in called(module):
            each.forward = _Forward(self, each.forward)

    def backward(self) -> AbstractContextManager[Any]:
        """What backward runs in: autocast has chosen its dtypes in forward, TF32 is a setting of the process."""
        return tf32() if self._precision.tf32 else nullcontext()

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What forward returns."""
        if self._here.inside:
            return forward(*args, **keywords)
        if self._takes_gradients and nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise RuntimeError(
                "accumulate_fp32=True adds gradients up before DistributedDataParallel averages them, so replicas "
                "would drift apart; leave it away, or use FSDP2 or par-zero"
            )
        weights = self._precision.weights
        if weights is not None:
            args = tuple(_cast(each, weights) for each in args)
            keywords = {name: _cast(each, weights) for name, each in keywords.items()}
        self._here.inside = True
        try:
            with self._context():
                output = forward(*args, **keywords)
        finally:
            self._here.inside = False
        return output if self._output_dtype is None else _cast(output, self._output_dtype, of=_HALF)

    def _context(self) -> AbstractContextManager[Any]:
        if self._precision.autocast is not None:
            return torch.autocast(self._device, self._precision.autocast)
        return self.backward()


class _Here(threading.local):
    """Whether a thread is inside a policy. A copy begins outside."""

    def __init__(self) -> None:  # in every thread; what a class alone has, torch.compile takes for absent
        self.inside = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Here, ()


class _Forward:
    """A module's forward within a policy. An object and no closure: a copy of the module has its own."""

    def __init__(self, policy: Policy, forward: Callable[..., Any]) -> None:
        update_wrapper(self, forward)  # for its signature; it copies attributes, too, so they come after
        self._policy, self._forward = policy, forward

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._policy.run(self._forward, args, keywords)


def called(module: nn.Module) -> list[nn.Module]:
    """What is called of a module: itself, or, where it has no forward, as a ModuleDict has none, its children."""
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        return [module]
    return list(dict.fromkeys(each for child in module.children() for each in called(child)))


_HALF = (torch.bfloat16, torch.float16)


def _cast(value: Any, dtype: torch.dtype, of: tuple[torch.dtype, ...] | None = None) -> Any:
    """The floating-point tensors in an argument as another dtype; only those `of` some dtypes.

    What has none of them stays the object that it is: forward may write into a caller's dict or list.
    """

    def one(leaf: Any) -> Any:
        cast = isinstance(leaf, Tensor) and leaf.is_floating_point() and (of is None or leaf.dtype in of)
        return leaf.to(dtype) if cast else leaf

    leaves, structure = tree_flatten(value)
    changed = [one(leaf) for leaf in leaves]
    if all(after is before for after, before in zip(changed, leaves, strict=True)):
        return value
    return tree_unflatten(changed, structure)


@contextmanager
def tf32() -> Iterator[None]:
    """fp32 products of NVIDIA GPUs in TF32, inside only. The settings belong to the process, so they are put back."""
    settings: tuple[Any, ...] = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
    )
    before = [each.fp32_precision for each in settings]
    try:
        for each in settings:
            each.fp32_precision = "tf32"
        yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.fp32_precision = value
