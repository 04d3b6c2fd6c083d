"""What happens around a module's forward: casts, autocast, TF32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ._precisions import Precision


class Policy:
    """Runs a module's forward in a precision, by hooks: a copy of the module has its own.

    Floating-point inputs take the dtype of the weights. Floating-point outputs become `output_dtype`, so that a loss
    made of them has the digits it needs. Where it runs within another that has the same policy, as it or an item of a
    ModuleList may, nothing more is done.

    Args:
        precision: The precision.
        device: Type of the module's device.
        output_dtype: Of half-precision outputs; None leaves them.
    """

    def __init__(self, precision: Precision, device: str, output_dtype: torch.dtype | None) -> None:
        self._precision, self._device, self._output_dtype = precision, device, output_dtype
        self._entered: list[AbstractContextManager[Any]] = []  # forward may call itself

    def attach(self, module: nn.Module) -> None:
        """Puts the hooks around a module's forward, inside all that is hooked to it later."""
        for each in called(module):
            each.register_forward_pre_hook(self._before, with_kwargs=True)
            each.register_forward_hook(self._after, always_call=True)  # also when forward raises

    def backward(self) -> AbstractContextManager[Any]:
        """What backward runs in: autocast has chosen its dtypes in forward, TF32 is a setting of the process."""
        return tf32() if self._precision.tf32 else nullcontext()

    def _before(self, _: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
        within = bool(self._entered)
        context = nullcontext() if within else self._context()
        context.__enter__()
        self._entered.append(context)
        weights = self._precision.weights
        return (args, keywords) if within or weights is None else (_cast(args, weights), _cast(keywords, weights))

    def _after(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)
        within = bool(self._entered)
        return output if within or self._output_dtype is None else _cast(output, self._output_dtype, of=_HALF)

    def _context(self) -> AbstractContextManager[Any]:
        if self._precision.autocast is not None:
            return torch.autocast(self._device, self._precision.autocast)
        return self.backward()


def called(module: nn.Module) -> list[nn.Module]:
    """What is called of a module: itself, or, of a ModuleList or ModuleDict without a forward, its items."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward:
        return [module]
    return list(dict.fromkeys(each for child in module.children() for each in called(child)))


_HALF = (torch.bfloat16, torch.float16)


def _cast(value: Any, dtype: torch.dtype, of: tuple[torch.dtype, ...] | None = None) -> Any:
    """The floating-point tensors in some arguments as another dtype; only those `of` some dtypes."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and (of is None or tensor.dtype in of) else tensor

    return tree_map_only(Tensor, one, value)


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
