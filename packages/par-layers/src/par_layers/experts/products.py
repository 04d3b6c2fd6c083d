"""Grouped matmuls: routed tokens, sorted by expert, times one matrix per expert; and the activation between two."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from par_groups import copy_to_device

from .._once import once_differentiable
from .._torch_private import apart, assert_async, gelu_backward, silu_backward

ROWS_ONE_BY_ONE = 256
"""Mean number of rows per expert from which a CPU is faster with one expert after another (measured)."""

ALIGNED = 16
"""Alignment of rows that `grouped_mm` requires, in bytes."""


class ExpertSegments:
    """Consecutive segments of rows, one for each expert.

    Args:
        counts: Number of rows of each expert, int64 [E], in host memory or on the device; or a list.
        rows: Number of all rows, R.
        like: Tensor with the dtype and device of the rows.
        weights: Weights of all experts in the matmuls. Each matmul is one call for all experts if torch supports it,
            else one call for each expert.

    Raises:
        ValueError: The counts do not add up to the rows.
    """

    def __init__(self, counts: Tensor | Sequence[int], rows: int, like: Tensor, *weights: Tensor) -> None:
        self._device = like.device
        self._counts = counts
        self.rows, self.experts = rows, len(counts)
        widths = {width for weight in weights for width in weight.shape[1:]}
        # One grouped kernel for all experts if layout and dtype allow it; else a loop, which needs the counts on the
        # host.
        self.are_grouped = can_be_grouped(like.device, like.dtype, *widths) and all(map(is_aligned, weights))
        # Reading the counts would make the host wait for the device, so the device checks them.
        if isinstance(counts, Tensor) and counts.device.type != "cpu":
            assert_async(counts.sum() == self.rows, "counts of experts do not add up to the rows")
        elif sum(self.sizes) != self.rows:
            raise ValueError(
                f"counts are {self.sizes}, {sum(self.sizes)} together, but there are {self.rows} rows; give the counts "
                "that came with them"
            )

    @cached_property
    def sizes(self) -> list[int]:
        """Number of rows of each expert, on the host. The host waits if the counts are on the device."""
        return self._counts.tolist() if isinstance(self._counts, Tensor) else list(self._counts)

    @cached_property
    def offsets(self) -> Tensor:
        """The end of each expert's rows, int32 [E], on the device."""
        counts = self._counts if isinstance(self._counts, Tensor) else torch.tensor(self._counts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        return copy_to_device(offsets, self._device)

    def of(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Return, for each expert, its rows of every tensor."""
        return zip(*(tensor.split(self.sizes) for tensor in tensors), strict=True)


def is_one_by_one(rows: int, experts: int, device: str) -> bool:
    """Return whether to compute both matmuls expert by expert, instead of each matmul for all experts at once. Pure.

    On a CPU the rows of an expert then stay in cache. With few rows, the additional calls cost more time than this
    saves.

    Args:
        rows: Number of rows.
        experts: Number of experts.
        device: Type of the device.
    """
    return device == "cpu" and rows >= ROWS_ONE_BY_ONE * experts


def can_be_grouped(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Return whether torch's `grouped_mm` supports the tensors: widths must be a multiple of 16 bytes.

    Args:
        device: Device of the tensors. Only for a GPU it reads a property of the device.
        dtype: Dtype of the tensors.
        widths: Widths of all rows and matrices, in elements.
    """
    if dtype not in _DTYPES.get(device.type, ()) or any(width * dtype.itemsize % ALIGNED for width in widths):
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}


def is_aligned(weight: Tensor) -> bool:
    """Return whether matrices [E, n, k] have a memory layout that `grouped_mm` supports, transposed or not."""
    _, outer, inner = weight.shape
    lies = weight.stride() in ((outer * inner, inner, 1), (outer * inner, 1, outer))
    return lies and not weight.storage_offset() * weight.element_size() % ALIGNED


def product(x: Tensor, weight: Tensor, segments: ExpertSegments, bias: Tensor | None = None) -> Tensor:
    """Multiply each row by its expert's matrix, without autograd.

    Args:
        x: Rows [R, k], expert by expert.
        weight: A matrix for each expert, [E, n, k].
        segments: Rows of each expert.
        bias: A vector for each expert, [E, n], or None.

    Returns:
        [R, n].
    """
    if segments.are_grouped:
        y = functional.grouped_mm(x, weight.transpose(1, 2), offs=segments.offsets)
        return y if bias is None else y.add_(of_each_row(bias, segments))
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (part, out) in enumerate(segments.of(x, y)):
        linear_into(out, part, weight[expert], None if bias is None else bias[expert])
    return y


def batched(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `product` for experts with equally many rows; autograd and torch.compile support it."""
    experts = weight.shape[0]
    return torch.bmm(x.view(experts, x.shape[0] // experts, x.shape[1]), weight.transpose(1, 2)).flatten(0, 1)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write the product of torch.nn.Linear to `out`; of no rows, nothing."""
    if not x.shape[0]:
        return
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def weight_product(gradient: Tensor, x: Tensor, segments: ExpertSegments) -> Tensor:
    """Return the gradients of all matrices, [E, n, k], of rows [R, n] and [R, k]; zeros for an expert without rows."""
    if segments.are_grouped:
        return functional.grouped_mm(gradient.t(), x, offs=segments.offsets)
    total = x.new_empty(segments.experts, gradient.shape[1], x.shape[1])
    for out, (left, right) in zip(total.unbind(), segments.of(gradient, x), strict=True):
        torch.mm(left.t(), right, out=out)  # of no rows it is zero
    return total


def of_each_row(vectors: Tensor, segments: ExpertSegments) -> Tensor:
    """Return each row's vector of its expert, [R, n] of [E, n]."""
    expert = torch.searchsorted(segments.offsets, _places(segments, vectors.device), right=True)
    return vectors.index_select(0, expert)


def sums_of_rows(x: Tensor, segments: ExpertSegments) -> Tensor:
    """Return the sum of each expert's rows, [E, n] of [R, n]; zeros for an expert without rows."""
    return torch.stack([part.sum(0) for part in x.split(segments.sizes)])


def _places(segments: ExpertSegments, device: torch.device) -> Tensor:
    return torch.arange(segments.rows, dtype=torch.int32, device=device)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
    """Multiplies each row with its expert's matrix. Autograd can go through it.

    Args:
        rows: Rows [R, k], expert by expert.
        weight: A matrix for each expert, [E, n, k], as torch.nn.Linear has one. A transposed view is taken as it is.
        counts: Number of rows of each expert, int64 [E]; or a list.

    Returns:
        [R, n].

    Raises:
        ValueError: Shapes do not fit, or counts do not add up to the rows.
    """
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[2] or len(counts) != len(weight):
        raise ValueError(
            f"rows are {list(rows.shape)}, the weight is {list(weight.shape)}, and there are {len(counts)} counts; "
            "they must be [R, k], [E, n, k] and E"
        )
    return apart(_multiplied, rows, weight, counts) if is_compiling() else _multiplied(rows, weight, counts)


def _multiplied(rows: Tensor, weight: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
    y: Tensor = _GroupedLinear.apply(rows.contiguous(), weight, ExpertSegments(counts, len(rows), rows, weight))  # type: ignore[no-untyped-call]
    return y


def grouped_weight_gradient(gradient: Tensor, rows: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
    """Return the gradient of `grouped_linear`'s weight.

    Args:
        gradient: Gradient of the result, [R, n].
        rows: Input rows, [R, k].
        counts: Number of rows of each expert, int64 [E]; or a list.

    Returns:
        [E, n, k], zeros for an expert without rows.

    Raises:
        ValueError: Shapes do not fit, or counts do not add up to the rows.
    """
    if gradient.dim() != 2 or rows.dim() != 2 or len(gradient) != len(rows):
        raise ValueError(
            f"the gradient is {list(gradient.shape)} and rows are {list(rows.shape)}; they must be [R, n] and [R, k]"
        )
    gradient, rows = gradient.detach().contiguous(), rows.detach().contiguous()
    segments = ExpertSegments(counts, len(rows), rows)
    # `ExpertSegments` has only seen the rows; the gradient's width matters as well.
    segments.are_grouped = can_be_grouped(rows.device, rows.dtype, gradient.shape[1], rows.shape[1])
    return weight_product(gradient, rows, segments)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, segments: ExpertSegments) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.segments = segments
        return product(rows, weight, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = product(gradient, weight.transpose(1, 2), ctx.segments) if ctx.needs_input_grad[0] else None
        of_weight = weight_product(gradient, rows, ctx.segments) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, None


def scaled(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply rows [R, n] by their routing weights [R], and return the dtype of the rows."""
    return (x * gates.unsqueeze(1)).to(x.dtype)


@dataclass(frozen=True)
class Activation:
    """Activation between the two matmuls of an expert. It must process each row separately.

    Args:
        forward: Function from the first matmul's result [R, n], in its memory layout, to the activation [R, f].
        backward: Function of the same [R, n] and the gradient of the activation [R, f], which returns the gradient of
            the first matmul's result, [R, n]. None recomputes `forward` with autograd.
        gated: Whether n is 2 f, a gate and an up part; else n is f.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor] | None = None
    gated: bool = True

    def differentiable(self, x: Tensor) -> Tensor:
        """Compute the activation [R, f] of [R, n], differentiable by autograd and traceable by torch.compile."""
        if self.backward is None:
            return self.forward(x)
        y: Tensor = _Activated.apply(x, self.forward, self.backward)  # type: ignore[no-untyped-call]
        return y

    def scaled(self, x: Tensor, gates: Tensor) -> Tensor:
        """Compute the activation [R, f] of [R, n], times routing weights [R]."""
        return scaled(self.forward(x), gates)

    def again(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Recompute the activation in backward.

        Returns:
            The activation [R, f], which the caller may overwrite, and a function from its gradient to the gradient of
            x. The function may overwrite its argument.
        """
        if self.backward is not None:
            backward = self.backward
            # A copy, because `middle` overwrites it, and a function may return its input.
            return self.forward(x).clone(), lambda gradient: backward(x, gradient)
        # A user's activation has no backward of its own, so autograd differentiates a recomputation of it.
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = self.forward(leaf)
        return y.detach().clone(), lambda gradient: torch.autograd.grad(y, leaf, gradient)[0]

    def middle(self, wide: Tensor, gates: Tensor, of_act: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Recompute the step between the matmuls of experts, and differentiate it.

        Args:
            wide: Result of the first matmul, [R, n].
            gates: Gates, [R].
            of_act: Gradient of the second matmul's input, [R, f]. It is overwritten.

        Returns:
            The second matmul's input, [R, f]; the gradient of the gates, [R]; and the gradient of `wide`, [R, n].
        """
        act, pull = self.again(wide)
        of_gates = (of_act * act).sum(1, dtype=gates.dtype)
        column = gates.unsqueeze(1)
        return act.mul_(column), of_gates, pull(of_act.mul_(column))


class _Activated(torch.autograd.Function):
    """An activation with a backward of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.way_back = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way_back(*ctx.saved_tensors, gradient), None, None


@dataclass(frozen=True)
class _Gated(Activation):
    """An activation of a gate and an up part, which lie one after the other or interleaved."""

    interleaved: bool = False

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            return x[:, 0::2], x[:, 1::2]
        gate, up = x.chunk(2, dim=1)
        return gate, up


class _Swiglu(_Gated):
    """silu(gate) * up."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__(self._forward, interleaved=interleaved)

    def _forward(self, x: Tensor) -> Tensor:
        gate, up = self.halves(x)
        return functional.silu(gate).mul_(up)

    def scaled(self, x: Tensor, gates: Tensor) -> Tensor:
        return self._forward(x).mul_(gates.unsqueeze(1))

    def again(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        gate, up = self.halves(x)
        silu = functional.silu(gate)

        def pull(gradient: Tensor) -> Tensor:
            of_x = torch.empty_like(x)
            of_gate, of_up = self.halves(of_x)
            # First, because the next line overwrites the gradient.
            torch.mul(gradient, silu, out=of_up)
            silu_backward(gradient.mul_(up), gate, grad_input=of_gate)
            return of_x

        return silu * up, pull


class _ClampedSwiglu(_Gated):
    """gpt-oss's: (up + 1) * gate * sigmoid(1.702 * gate), where gate is at most 7 and up between -7 and 7."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__(self._forward, interleaved=interleaved)

    def _forward(self, x: Tensor) -> Tensor:
        gate, up = self.halves(x)
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * _SLOPE))


_LIMIT, _SLOPE = 7.0, 1.702


def _gelu_backward(x: Tensor, gradient: Tensor) -> Tensor:
    of_x: Tensor = gelu_backward(gradient, x)
    return of_x


def activation_of(named: "str | Activation", *, interleaved: bool) -> Activation:
    """Return the activation of a name.

    Args:
        named: "swiglu" or "clamped_swiglu" (with a gate), "gelu" (without a gate), or an `Activation`, which is
            returned unchanged.
        interleaved: Whether gate and up features alternate. If False, all gate features come first.

    Raises:
        ValueError: The name is unknown, or the activation has no gate to interleave.
    """
    if isinstance(named, Activation):
        return named
    if named == "swiglu":
        return _Swiglu(interleaved)
    if named == "clamped_swiglu":
        return _ClampedSwiglu(interleaved)
    if named != "gelu":
        raise ValueError(
            f"there is no activation {named!r}; there are 'swiglu', 'gelu' and 'clamped_swiglu', or give an Activation"
        )
    if interleaved:
        raise ValueError("interleaved=True: the activation 'gelu' has no gate; pass ExpertConfig(interleaved=False)")
    return Activation(functional.gelu, _gelu_backward, gated=False)
