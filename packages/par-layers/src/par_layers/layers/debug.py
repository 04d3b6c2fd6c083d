"""A debug mode: activations carry their layout and layer set, and a layer refuses one that it was not made for.

Two column layers in a row have the right shapes in 3D and the wrong values; so has a residual that is added to an inner
activation. With `layer_set(..., debug=True)` both raise. It costs a tensor subclass, so it is for finding mistakes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from ..modes.layout import Layout

M = TypeVar("M", bound=nn.Module)


class LaidOut(Tensor):
    """A tensor that knows its layout, and hands it on to what is computed from it."""

    par_mark: "Mark"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Computes as usual; raises if the layouts of the inputs differ."""
        carried = _common_mark((*args, *(kwargs or {}).values()), f"torch's {getattr(func, '__name__', func)}")
        result = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]
        if carried is not None:
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, LaidOut):
                    tensor.par_mark = carried
        return result


def watched(module: M, takes: "Mark | None", gives: "Mark | None") -> M:
    """Lets a module check the layout of its input, and mark its output.

    Args:
        module: A layer.
        takes: The mark of activations that it is made for; None does not check.
        gives: The mark of its output; None does not mark it.
    """

    def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        who = type(module).__name__
        plain = {name: check(value, takes, who) for name, value in named.items()}
        return tuple(check(value, takes, who) for value in inputs), plain

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001 - torch's signature
        return output if gives is None else mark(output, gives)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    return module


@dataclass(frozen=True)
class Mark:
    """What an activation carries.

    Args:
        layout: How it is cut.
        layers: The layer set that made it; only its identity counts.
    """

    layout: Layout
    layers: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mark) and self.layout == other.layout and self.layers is other.layers

    __hash__ = None  # type: ignore[assignment]  # compared, never a key

    def differs(self, other: "Mark") -> str:
        """How this mark and another one differ, in words."""
        if self.layout == other.layout:
            return "two layer sets; make all layers of a model with one"
        return f"{self.layout.describe()}, and {other.layout.describe()}"


def check(x: Any, takes: Mark | None, who: str) -> Any:
    """The plain tensor inside an activation that carries a mark; anything else as it is.

    Args:
        x: An argument of a layer.
        takes: The mark that it must carry; None does not check.
        who: The layer, for the message.

    Raises:
        ValueError: The activation carries another mark.
    """
    if not isinstance(x, LaidOut):
        return x
    if takes is not None and x.par_mark != takes:
        raise ValueError(
            f"{who} was given an activation of another layout than it takes: {takes.differs(x.par_mark)}. A column "
            "layer is closed by a row layer, and a Linear stays in the residual layout"
        )
    return x.as_subclass(Tensor)


def mark(x: Tensor, carried: Mark) -> Tensor:
    """Puts a mark on a tensor, and gives it back."""
    marked = x.as_subclass(LaidOut)
    marked.par_mark = carried
    return marked


def _common_mark(values: Iterable[Any], who: str) -> Mark | None:
    common: Mark | None = None
    for value in values:
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, LaidOut) and hasattr(tensor, "par_mark"):
                if common is not None and tensor.par_mark != common:
                    raise ValueError(f"{who} mixes activations: {common.differs(tensor.par_mark)}")
                common = tensor.par_mark
    return common
