"""Linear layers whose three matrix products run in float8, with everything else in bf16 or fp32."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from par_groups import WeightGradHook, WeightGradient, kept_tensors, weight_and_hook

from ._torch_private import child_modules, scaled_mm

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Activations and weights need the digits, gradients the range."""
MULTIPLE = 16
"""GPUs' float8 products take matrices whose sides are multiples of this."""
_SMALLEST = 2.0**-100
"""Maxima below this count as this, so that a tensor of zeros has a finite scale too."""
_EXPONENT = 0x7F800000
"""The bits of an fp32 number that hold its exponent."""


class Float8Linear(nn.Linear):
    """Linear layer with float8 matmuls: e4m3 input and weight in forward, e5m2 output gradients in backward.

    Each call scales each tensor by the power of two that brings its largest element just below the largest float8
    number. The scaling is therefore exact, and the cast's rounding is the only error. Matmuls accumulate in fp32.
    Parameters and gradients stay bf16 or fp32; the output has the input's dtype, or autocast's. Rows are padded with
    zeros to a multiple of 16. Backward saves the input with one byte per element. It saves the weight itself, as
    nn.Linear does, and casts it again, so that no float8 copy outlives FSDP's gathered weight.

    Args:
        in_features: Size of the last dim of inputs, a multiple of 16.
        out_features: Size of the last dim of outputs, a multiple of 16.
        bias: Whether the layer has a bias. Default: True.
        group: Ranks that share the scale of the largest element on any of them. Each rank then rounds like one device
            with all of the data, or with the unsharded weight. All of these ranks must call forward and backward the
            same number of times; each call all-reduces 8 and 4 bytes. None: each rank scales separately. This seldom
            matters: another power of two only changes the rounding of elements below about 2**-14 (input, weight) or
            2**-29 (gradient) of the largest element.
        device: Device of the parameters.
        dtype: dtype of the parameters, bf16 or fp32.

    Raises:
        ValueError: Sizes that are not multiples of 16.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (the formats and which tensor has which).
    """

    weight_grad_hook: WeightGradHook | None = None
    """Set by whoever wants to compute weight gradients later, such as a pipeline schedule."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_sizes(in_features, out_features, "keep this layer as it is")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        """Maps (..., in_features) to (..., out_features), both bf16 or fp32."""
        return float8_linear(input, self.weight, self.bias, group=self.group, layer=self)


def float8_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    layer: nn.Module | None = None,
) -> Tensor:
    """Compute `functional.linear` with the float8 matmuls of `Float8Linear`, for layers of other classes.

    Args:
        inputs: (..., in), bf16 or fp32.
        weight: (out, in), bf16 or fp32; both sizes are multiples of 16.
        bias: (out) or None.
        group: The ranks that scale by the largest element of any of them. None: each rank scales for itself.
        layer: The layer whose weight it is. If its `weight_grad_hook` is set, backward hands that a closure which adds
            the weight's gradient, instead of computing it.

    Returns:
        (..., out), in the dtype of the inputs, or of autocast.

    Raises:
        TypeError: Another dtype, or a DTensor.
        ValueError: Sizes that are not multiples of 16.
    """
    if torch.is_autocast_enabled(inputs.device.type):
        inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
    for name, tensor in (("input", inputs), ("weight", weight)):
        if hasattr(tensor, "to_local"):
            raise TypeError(f"the {name} of a float8 product is a DTensor; give it local tensors")
        if tensor.dtype not in {torch.bfloat16, torch.float32}:
            raise TypeError(f"the {name} of a float8 product has dtype {tensor.dtype}; give it bfloat16 or float32")
    _check_sizes(weight.shape[1], weight.shape[0], "keep this layer as it is")
    weight, hook = (weight, None) if layer is None else weight_and_hook(layer, weight)
    output: Tensor = _Float8Product.apply(inputs, weight, bias, group, hook)  # type: ignore[no-untyped-call]
    return output


def is_float8(module: nn.Module) -> bool:
    """Return whether a layer has float8 matmuls, as `convert_to_float8_` makes them."""
    return isinstance(module, Float8Linear) or getattr(vars(module).get("linear"), "func", None) is float8_linear


def convert_to_float8_(
    module: nn.Module,
    chosen: Callable[[str, nn.Linear], bool] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Replace nn.Linear layers by `Float8Linear`, in place. Parameters, hooks and names stay the same objects.

    The layers of par-layers are converted, too. They have an attribute `linear`, a function that replaces torch's
    matmul if it is not None; this call sets it to `float8_linear`. Any class with `in_features`, `out_features` and
    such an attribute works in the same way.

    Args:
        module: Model; subclasses of nn.Linear in it stay unchanged.
        chosen: Function of a layer's name and the layer that returns whether to convert it. Default: convert all layers
            with sizes that are multiples of 16, except for the head of a language model, because its errors directly
            affect the loss. The head is a layer named lm_head, or the result of `module.get_output_embeddings()`.
        group: Ranks that share the scale of the largest element on any of them. None: each rank scales separately; see
            `Float8Linear`.

    Returns:
        The module; a new one only if it is itself an nn.Linear.

    Raises:
        RuntimeError: The device does not support float8 matmuls.
        ValueError: A size of a chosen layer is not a multiple of 16, or no layer is chosen.
    """
    layers = float8_layers(module, chosen)
    if not layers:
        raise ValueError("there is no linear layer to convert to float8: none is chosen, or none has fitting sizes")
    check_chosen(module, chosen)
    for layer in layers.values():
        check_float8(layer.weight.device)
    # All checks are done, so from here on nothing raises with half of the model converted.
    swapped: dict[nn.Module | None, nn.Module] = {}
    for layer in layers.values():
        if type(layer) is nn.Linear:
            # The constructor allocates nothing on "meta", and the next line replaces all that it has set.
            converted = Float8Linear(layer.in_features, layer.out_features, bias=False, group=group, device="meta")
            converted.__dict__.update(layer.__dict__)  # parameters, hooks, mode: all that makes this layer this one
            swapped[layer] = converted
        else:
            layer.linear = partial(float8_linear, group=group, layer=layer)
    # A layer may be used under several names, and each of them must lead to the converted layer.
    for parent in list(module.modules()):
        for name, child in child_modules(parent).items():
            if child in swapped:
                setattr(parent, name, swapped[child])
    return swapped[module] if isinstance(module, nn.Linear) else module


def float8_layers(module: nn.Module, chosen: Callable[[str, nn.Linear], bool] | None = None) -> dict[str, Any]:
    """Return the layers that `convert_to_float8_` changes, by name."""
    kept = {id(tensor) for tensor in kept_tensors(module, torch.bfloat16).values()}  # routers, whose choice is exact
    head_of: Any = getattr(module, "get_output_embeddings", None)
    head = None if head_of is None else head_of()

    def fits(name: str, layer: nn.Linear) -> bool:
        is_head = layer is head or name.rpartition(".")[2] == "lm_head"
        return _fits(layer.in_features, layer.out_features) and not is_head and id(layer.weight) not in kept

    choose = chosen or fits
    return {
        name: layer
        for name, layer in module.named_modules()
        if (type(layer) is nn.Linear or _takes_product(layer)) and choose(name, layer)
    }


def check_chosen(module: nn.Module, chosen: Callable[[str, nn.Linear], bool] | None) -> None:
    """Raise ValueError if a chosen layer has sizes that float8 cannot multiply."""
    for name, layer in float8_layers(module, chosen).items():
        _check_sizes(layer.in_features, layer.out_features, f"do not choose {name!r}")


def check_float8(device: torch.device) -> None:
    """Raise RuntimeError if a device has no float8 products; the CPU has them for tests, not for speed."""
    if device.type in {"cpu", "meta"}:
        return
    if device.type != "cuda" or torch.version.hip:
        raise RuntimeError(f"float8 products run on NVIDIA GPUs and on the CPU, not on {device}; use bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise RuntimeError(f"{name} has compute capability {version}; float8 products need 8.9 or above: use bf16")


def _takes_product(layer: nn.Module) -> bool:
    """Return whether a layer of another class lets a caller replace its matmul."""
    product = vars(layer).get("linear", ...)
    sized = all(hasattr(layer, name) for name in ("in_features", "out_features", "weight"))
    return sized and (product is None or isinstance(product, Callable))  # type: ignore[arg-type]


def _fits(in_features: int, out_features: int) -> bool:
    return in_features % MULTIPLE == 0 and out_features % MULTIPLE == 0


def _check_sizes(in_features: int, out_features: int, remedy: str) -> None:
    if not _fits(in_features, out_features):
        raise ValueError(
            f"a linear layer from {in_features} to {out_features} numbers: float8 needs multiples of {MULTIPLE}; "
            f"{remedy}"
        )


class _Scaled(NamedTuple):
    """A float8 matrix, and the fp32 scalar that its elements are to be multiplied by."""

    values: Tensor
    unit: Tensor

    def t(self) -> "_Scaled":
        """Return the transposed matrix as a view; row-major becomes column-major."""
        return _Scaled(self.values.t(), self.unit)

    def turned(self) -> "_Scaled":
        """Return the matrix in the other memory order."""
        return _Scaled(self.values.t().contiguous().t(), self.unit)


class _Float8Product(torch.autograd.Function):
    """`functional.linear` of matrices in float8: inputs (rows, in), weight (out, in), output (rows, out)."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup | None,
        hook: WeightGradHook | None,
    ) -> Tensor:
        rows = _rows(inputs)
        largest = _largest(group, rows, weight)
        inputs8, weight8 = _cast(rows, FORWARD, largest[0]), _cast(weight, FORWARD, largest[1])
        output = _product(inputs8, weight8.t(), inputs.dtype, fast=True)[: inputs.shape[:-1].numel()]
        if bias is not None:
            output += bias
        # The input is saved in float8. The weight is saved itself, with the maximum that casts it again without a
        # collective.
        ctx.save_for_backward(*inputs8, weight, largest[1])
        ctx.group, ctx.hook = group, hook
        ctx.shape, ctx.dtype, ctx.bias = inputs.shape, inputs.dtype, bias is not None and bias.dtype
        # .data, so that it is not a view for autograd: FSDP warns of outputs that are
        return output.view(*inputs.shape[:-1], weight.shape[0]).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        values, unit, weight, largest = ctx.saved_tensors
        rows = _rows(gradient)
        gradient8 = _cast(rows, BACKWARD, _largest(ctx.group, rows)[0])
        inputs_gradient = weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            # Both operands have their inner dim contiguous, so (out, in) is turned around for a product over `out`.
            product = _product(gradient8, _cast(weight, FORWARD, largest).turned(), ctx.dtype)
            inputs_gradient = product[: ctx.shape[:-1].numel()].view(ctx.shape)
        if ctx.needs_input_grad[1]:
            compute = partial(_weight_gradient, gradient8, _Scaled(values, unit), weight.dtype)
            if ctx.hook is None:
                weight_gradient = compute()
            else:
                ctx.hook(WeightGradient(weight, compute))
        if ctx.needs_input_grad[2]:
            bias_gradient = rows.sum(0, dtype=torch.float32).to(ctx.bias)
        return inputs_gradient, weight_gradient, bias_gradient, None, None


def _weight_gradient(gradient: _Scaled, inputs: _Scaled, dtype: torch.dtype) -> Tensor:
    """Return the weight's gradient (out, in) from the output's gradient (rows, out) and the inputs (rows, in)."""
    return _product(gradient.turned().t(), inputs.turned(), dtype)


def _product(one: _Scaled, other: _Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Multiply (m, k) row-major by (k, n) column-major, the only orders that every GPU with float8 multiplies.

    Args:
        one: The first matrix.
        other: The second matrix.
        dtype: dtype of the product.
        fast: Whether Hopper GPUs sum in the tensor cores alone, with fewer bits; usual forward, which forgives it.
    """
    return scaled_mm(one.values, other.values, one.unit, other.unit, dtype, fast=fast)


def _cast(matrix: Tensor, dtype: torch.dtype, largest: Tensor) -> _Scaled:
    """Cast a matrix to float8, row-major.

    Args:
        matrix: bf16 or fp32.
        dtype: A float8 dtype.
        largest: The absolute value that is to stay below the largest number of `dtype`; an fp32 scalar.
    """
    ratio = torch.finfo(dtype).max / largest.clamp(min=_SMALLEST)
    scale = ratio.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)  # the power of two below
    return _Scaled((matrix * scale).to(dtype).contiguous(), scale.reciprocal())


def _largest(group: dist.ProcessGroup | None, *tensors: Tensor) -> Tensor:
    """Return the largest absolute value of each tensor over the group.

    Inf for a tensor with a NaN, so that its products are NaN.

    Returns:
        (number of tensors) in fp32.
    """
    # One pass finds both ends, where `abs().amax()` would first write a tensor of absolute values.
    ends = [torch.aminmax(tensor) for tensor in tensors]
    largest = torch.stack([torch.maximum(high, -low) for low, high in ends]).float()
    largest.masked_fill_(largest.isnan(), torch.inf)  # not every backend's MAX passes a NaN on
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest


def _rows(tensor: Tensor) -> Tensor:
    """Reshape (..., n) to (rows, n) and pad with rows of zeros to a multiple of 16, at least 16."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    # Zero rows become 16, because the product takes no empty matrix.
    missing = -rows.shape[0] % MULTIPLE if rows.shape[0] else MULTIPLE
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
