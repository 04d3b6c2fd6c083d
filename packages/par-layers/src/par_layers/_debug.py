"""A debug mode: activations carry their layout, and a layer refuses one that it was not made for.

Two column layers in a row have the right shapes in 3D and the wrong values; so has a residual that is added to an inner
activation. With `layer_set(..., debug=True)` both raise. It costs a tensor subclass, so it is for finding mistakes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from ._layout import Layout

M = TypeVar("M", bound=nn.Module)


class LaidOut(Tensor):
    """A tensor that knows its layout, and hands it on to what is computed from it."""

    par_layout: Layout

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Computes as usual; raises if the layouts of the inputs differ."""
        layout = _common_layout((*args, *(kwargs or {}).values()), f"torch's {getattr(func, '__name__', func)}")
        result = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]
        if layout is not None:
            for each in result if isinstance(result, tuple | list) else (result,):
                if isinstance(each, LaidOut):
                    each.par_layout = layout
        return result


def watched(module: M, takes: Layout | None, gives: Layout | None) -> M:
    """Lets a module check the layout of its input, and mark its output.

    Args:
        module: A layer.
        takes: The layout that it is made for; None does not check.
        gives: The layout of its output; None does not mark it.
    """

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(check(each, takes, type(module).__name__) for each in inputs)

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001 - torch's signature
        return output if gives is None else mark(output, gives)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    return module


def check(x: Any, layout: Layout | None, who: str) -> Any:
    """The plain tensor.

    Raises:
        ValueError: It carries another layout than `layout`.
    """
    if not isinstance(x, LaidOut):
        return x
    if layout is not None and x.par_layout != layout:
        raise ValueError(
            f"{who} takes activations in {layout}, but was given one in {x.par_layout}; a column layer is closed by a "
            "row layer, and a Linear stays in the residual layout"
        )
    return x.as_subclass(Tensor)


def mark(x: Tensor, layout: Layout) -> Tensor:
    """The tensor, with its layout."""
    marked = x.as_subclass(LaidOut)
    marked.par_layout = layout
    return marked


def _common_layout(values: Iterable[Any], who: str) -> Layout | None:
    found: Layout | None = None
    for value in values:
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, LaidOut) and hasattr(each, "par_layout"):
                if found is not None and each.par_layout != found:
                    raise ValueError(f"{who} mixes activations in {found} and in {each.par_layout}")
                found = each.par_layout
    return found
