"""Precision policy around a module's forward: casts, autocast, TF32."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from ._precisions import Precision
from ._records import is_record, parts_of_record, with_parts
from ._torch_private import inside_ddp, tree_flatten, tree_unflatten

_HALF = (torch.bfloat16, torch.float16)


class Policy:
    """Runs a module's forward in a precision.

    Floating-point inputs take the dtype of the weights. Floating-point outputs become `output_dtype`, so that a loss
    made of them has the digits it needs. A module that runs inside another one with the same policy, as an item of a
    ModuleList may, is left to the outer one.

    Args:
        precision: The precision.
        device: Type of the module's device.
        output_dtype: dtype that half-precision outputs get. None leaves them.
        takes_gradients: Whether gradients are taken from parameters as they come, before DDP has averaged them.
        before: Function to call before each forward, such as one that updates rounded parameters. Compiled code does
            not call it. Default: None.
        at_backward: Function to call when a backward pass begins at an output, before it reaches a parameter.
            Default: None.
    """

    def __init__(
        self,
        precision: Precision,
        device: str,
        output_dtype: torch.dtype | None,
        *,
        takes_gradients: bool = False,
        before: Callable[[], object] | None = None,
        at_backward: Callable[..., None] | None = None,
    ) -> None:
        self._precision, self._device, self._output_dtype = precision, device, output_dtype
        self._takes_gradients, self._before, self._at_backward = takes_gradients, before, at_backward
        self._here = _Here()

    def attach(self, module: nn.Module) -> None:
        """Put the policy around a module's forward, inside all hooks."""
        for part in called(module):
            part.forward = _Forward(self, part.forward)

    def backward(self) -> AbstractContextManager[Any]:
        """Return the context for a backward. It only sets TF32, because autocast has chosen its dtypes in forward."""
        return tf32() if self._precision.tf32 else nullcontext()

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a module's own forward within the policy.

        Raises:
            RuntimeError: DDP around a module whose gradients are taken before it averages them.
        """
        # The outermost module casts inputs and outputs, so modules within it pass tensors as they are.
        if self._here.inside:
            return forward(*args, **keywords)
        if self._takes_gradients and inside_ddp():
            raise RuntimeError(
                "masters=MasterWeights(accumulate=True): gradients would be added up before DistributedDataParallel "
                "averages them, and replicas would drift apart; remove it, or use FSDP2 or par-zero"
            )
        if self._before is not None and not torch.compiler.is_compiling():
            self._before()
        weights = self._precision.weights
        if weights is not None:
            args = tuple(_cast(value, weights) for value in args)
            keywords = {name: _cast(value, weights) for name, value in keywords.items()}
        autocast = self._precision.autocast
        context = self.backward() if autocast is None else torch.autocast(self._device, autocast)
        self._here.inside = True
        try:
            with context:
                output = forward(*args, **keywords)
        finally:
            self._here.inside = False
        if self._at_backward is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # The hook runs at the first output that backward reaches, so before any parameter's gradient is added.
            leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
            if leaves:
                torch.autograd.graph.register_multi_grad_hook(leaves, self._at_backward, mode="any")
        return output if self._output_dtype is None else _cast(output, self._output_dtype, only=_HALF)


class _Here(threading.local):
    """Whether a thread is inside a policy. A copy begins outside."""

    def __init__(self) -> None:  # runs in every thread; an attribute of the class torch.compile takes for absent
        self.inside = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Here, ()


class _Forward:
    """A module's forward within a policy: an object and no closure, so that a copy of the module has its own."""

    def __init__(self, policy: Policy, forward: Callable[..., Any]) -> None:
        update_wrapper(self, forward)  # for its signature; it copies attributes too, so ours are set after it
        self._policy, self._forward = policy, forward

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._policy.run(self._forward, args, keywords)


def called(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a caller calls: the module, or its children if it has no forward, like a ModuleDict."""
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        return [module]
    # A module that is registered under two names gets one policy, since a second one would find itself inside the
    # first.
    return list(dict.fromkeys(part for child in module.children() for part in called(child)))


def _cast(
    value: Any, dtype: torch.dtype, only: tuple[torch.dtype, ...] | None = None, inside: frozenset[int] = frozenset()
) -> Any:
    """Return an argument with its floating-point tensors in another dtype.

    An argument without casts stays the same object, because forward may write into a caller's dict or list. A record
    with a cast tensor is copied.

    Args:
        value: Tensors, nested in tuples, lists, dicts and the like, and in records.
        dtype: Target dtype.
        only: dtypes that are cast. Default: all floating-point dtypes.
        inside: Ids of the enclosing records, so that a record that refers to itself is visited once. Default: none.
    """

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _cast_record(leaf, dtype, only, inside) if id(leaf) not in inside and is_record(leaf) else leaf
        fits = leaf.is_floating_point() and (only is None or leaf.dtype in only)
        return leaf.to(dtype) if fits else leaf

    leaves, structure = tree_flatten(value)
    changed = [cast(leaf) for leaf in leaves]
    if all(after is before for after, before in zip(changed, leaves, strict=True)):
        return value
    return tree_unflatten(changed, structure)


def _cast_record(record: Any, dtype: torch.dtype, only: tuple[torch.dtype, ...] | None, inside: frozenset[int]) -> Any:
    """Return a copy of a record with its floating-point tensors in another dtype; the record if nothing is cast."""
    before = parts_of_record(record)
    changed = {
        name: after
        for name, value in before.items()
        if (after := _cast(value, dtype, only, inside | {id(record)})) is not value
    }
    return with_parts(record, changed) if changed else record


@contextmanager
def tf32() -> Iterator[None]:
    """Use TF32 for fp32 matmuls of NVIDIA GPUs inside the context.

    The settings are per process, so they are restored.
    """
    settings: tuple[Any, ...] = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
    )
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "tf32"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
