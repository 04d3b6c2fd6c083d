"""Debug mode: activations carry their layout and layer set, and layers raise for the wrong layout.

Some mistakes have the right shapes and wrong values: two consecutive column layers in 3D, a residual added to an inner
activation, or a layer with the tokens of another batch. All of them raise with `layer_set(..., debug=True)`. The mode
uses a tensor subclass, which costs time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from ..context.tokens import Tokens
from ..modes.layout import ActivationLayout

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
        """Compute as usual; raise if the layouts of the inputs differ."""
        carried = common((*args, *(kwargs or {}).values()), f"torch's {getattr(func, '__name__', func)}")
        result = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]
        if carried is not None:
            # torch gives results the class of the inputs, but not their attributes.
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, LaidOut):
                    tensor.par_mark = carried
        return result


def watched(module: M, takes: "Mark | None", gives: "Mark | None") -> M:
    """Let a module check the layout of its input, and mark its output.

    Args:
        module: A layer.
        takes: The mark of activations that it is made for; None does not check.
        gives: The mark of its output; None does not mark it.
    """

    def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        who = type(module).__name__
        values = (*inputs, *named.values())
        carried = common(values, who)
        given = next((value for value in values if isinstance(value, Tokens)), None)
        if given is None and carried is not None and carried.tokens is not None and who in _KNOW_PLACES:
            raise ValueError(
                f"{who} was given no tokens, but an activation of a batch that was cut to {carried.tokens}; give it "
                "the same tokens"
            )
        known = given if carried is None or given is not None else carried.tokens
        expected = None if takes is None else replace(takes, tokens=known)
        module.__dict__["par_tokens"] = known  # what its output will carry, too
        plain = {name: check(value, expected, who) for name, value in named.items()}
        return tuple(check(value, expected, who) for value in inputs), plain

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001 - torch's signature
        known = module.__dict__.pop("par_tokens", None)
        return output if gives is None else mark(output, replace(gives, tokens=known))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    return module


_KNOW_PLACES = ("ParallelDropout", "ParallelPositionEmbedding")  # layers whose numbers depend on where a token stands


@dataclass(frozen=True, eq=False)
class Mark:
    """Debug information of one activation.

    Args:
        layout: Layout of the activation.
        layers: Layer set that created it; only its identity counts.
        tokens: Split of its batch along the sequence; None if no layer has received it yet.
    """

    layout: ActivationLayout
    layers: object
    tokens: Tokens | None = None

    def fits(self, other: "Mark") -> bool:
        """Return whether two activations, or an activation and a layer, have the same layout and split."""
        alike = self.tokens is None or other.tokens is None or self.tokens == other.tokens
        return alike and self.layout == other.layout and self.layers is other.layers

    def differs(self, other: "Mark") -> str:
        """Describe in words how this mark and another mark differ."""
        if self.layout != other.layout:
            return f"{self.layout.describe()}, and {other.layout.describe()}"
        if self.layers is not other.layers:
            return "two layer sets; make all layers of a model with one"
        return f"two batches, one cut to {self.tokens}, and one to {other.tokens}; give all layers the same tokens"


def check(x: Any, takes: Mark | None, who: str) -> Any:
    """Return the plain tensor inside an activation that carries a mark; any other value unchanged.

    Args:
        x: An argument of a layer.
        takes: The mark that it must carry; None does not check.
        who: The layer, for the message.

    Raises:
        ValueError: The activation carries another mark.
    """
    if not isinstance(x, LaidOut):
        return x
    if takes is not None and not takes.fits(x.par_mark):
        raise ValueError(
            f"{who} was given an activation of another layout than it takes: {takes.differs(x.par_mark)}. A column "
            "layer is closed by a row layer, and a Linear stays in the residual layout"
        )
    return x.as_subclass(Tensor)


def mark(x: Tensor, carried: Mark) -> Tensor:
    """Attach a mark to a tensor, and return the tensor."""
    marked = x.as_subclass(LaidOut)
    marked.par_mark = carried
    return marked


def common(values: Iterable[Any], who: str) -> Mark | None:
    """Return the mark of all activations among the values; None if there are no activations.

    Args:
        values: Arguments, possibly with tuples and lists.
        who: Name of the called function, for the message.

    Raises:
        ValueError: Two of them carry different marks.
    """
    carried: Mark | None = None
    for value in values:
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, LaidOut) and hasattr(tensor, "par_mark"):
                if carried is not None and not carried.fits(tensor.par_mark):
                    raise ValueError(f"{who} mixes activations: {carried.differs(tensor.par_mark)}")
                # A mark with tokens is preferred, because it can be compared with more.
                carried = tensor.par_mark if carried is None or carried.tokens is None else carried
    return carried
