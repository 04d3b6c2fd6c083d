"""What stands in `parameter.grad` while the gradient lives in the optimizer's flat tensors.

The optimizer owns a gradient from the end of the backward pass that has summed it over the ranks. A program that looks
for it in the module would find nothing, and clip, scale or drop nothing, without a word. So a stand-in is there: it
takes no memory, and whoever computes with it is told where the gradient is. A program that sets it to None, as torch
advises in place of `zero_grad`, has dropped the gradient, which is seen before the next pass or step.

It is an empty sparse tensor, to which autograd adds a gradient right if a pass begins unseen, in a module that is part
of the sharded one and was called by itself.
"""

from collections.abc import Iterable, Sequence
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from .._torch_private import without_torch_functions

if TYPE_CHECKING:
    from .chunk import Chunk


_T = torch.Tensor
_OF_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_OF_SHAPES = {"shape", "ndim", "nbytes"}

NOTES: frozenset[Any] = frozenset(
    [
        getattr(_T, name).__get__
        for name, member in vars(torch._C.TensorBase).items()
        if isinstance(member, GetSetDescriptorType) and name not in _OF_VALUES | _OF_SHAPES
    ]
    + [_T.element_size, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.get_device, _T.is_inference, _T.is_conj]
    + [_T.requires_grad_, _T.requires_grad.__set__]  # type: ignore[attr-defined]
    + [torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type]
)
"""Operations on a tensor that read and write neither its values nor its shape."""

_SHAPES: frozenset[Any] = frozenset(
    [*(getattr(_T, name).__get__ for name in _OF_SHAPES), _T.size, _T.dim, _T.numel, _T.nelement, torch.numel]
)
_CONVERSIONS: frozenset[Any] = frozenset([_T.to, _T.cpu, _T.cuda, _T.float, _T.double, _T.half, _T.bfloat16])


class GradientElsewhere(torch.Tensor):
    """The stand-in for a gradient that lives in the optimizer."""

    par_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answers what can be answered without the gradient, and refuses the rest."""
        if func in _SHAPES or func in NOTES:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        if func in _CONVERSIONS and isinstance(args[0], GradientElsewhere):  # `module.to` sets it as data
            return args[0]
        if func == _T.data.__set__ and args[1] is args[0]:  # type: ignore[attr-defined]
            return None
        raise RuntimeError(
            f"the gradient of {_name_in([*args, *(kwargs or {}).values()])!r} is read or written in the module, and it "
            "lives in the optimizer's flat tensors; use par_groups.gradients(optimizer), or pass the optimizer to "
            "par_precision.clip_grad_norm_()"
        )

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # what torch shows of contents is not there
        return f"GradientElsewhere({self.par_name!r})"


_Kind = tuple[torch.Size, torch.dtype]


class Dropped(NamedTuple):
    """Gradients that a program has dropped by setting them to None.

    Attributes:
        chunk: The chunk.
        members: Numbers of the members.
        others: Whether others of the chunk have theirs still.
    """

    chunk: "Chunk"
    members: list[int]
    others: bool


class StandIns:
    """The stand-ins in the parameters of some chunks."""

    def __init__(self) -> None:
        self._shown: dict[Chunk, dict[int, torch.Tensor]] = {}  # by number of the member
        self._made: dict[Chunk, list[dict[_Kind, torch.Tensor]]] = {}  # for each member

    def show(self, chunk: "Chunk", used: Iterable[int]) -> None:
        """Puts stand-ins into the members that have a gradient, which the optimizer holds now.

        Args:
            chunk: The chunk.
            used: For each member, whether it has.
        """
        if chunk.owner < 0:
            return
        shown = self._shown[chunk] = {}
        known = self._made.setdefault(chunk, [{} for _ in chunk.members])
        with without_torch_functions():
            for index, (member, made, has) in enumerate(zip(chunk.members, known, used, strict=True)):
                if has:
                    parameter = member.parameter
                    kind = parameter.shape, parameter.dtype
                    if kind not in made:
                        made[kind] = _stand_in(member.names[0], parameter)
                    parameter.grad = shown[index] = made[kind]

    def take(self, arrived: torch.Tensor | None) -> list[Dropped]:
        """Takes all stand-ins away, as a backward pass begins.

        Args:
            arrived: A parameter that has a new gradient already. Nothing tells whether it had its stand-in before, so
                it counts as all others do.

        Returns:
            What the program has dropped, by taking stand-ins away.
        """
        shown, self._shown = self._shown, {}
        dropped: list[Dropped] = []
        kept, place = False, None
        with without_torch_functions():
            for chunk, stand_ins in shown.items():
                gone = []
                for index, one in stand_ins.items():
                    parameter = chunk.members[index].parameter
                    if parameter.grad is one:
                        parameter.grad, kept = None, True
                    elif parameter is arrived:
                        place = chunk, index
                    else:
                        gone.append(index)
                dropped.append(Dropped(chunk, gone, len(gone) < len(stand_ins)))
        if place is not None and not kept:
            for each in dropped:
                each.members.extend([place[1]] if each.chunk is place[0] else [])
            dropped = [each._replace(others=False) for each in dropped]
        return [each for each in dropped if each.members]

    def dropped_before_step(self, chunk: "Chunk") -> Dropped | None:
        """What the program has dropped of a chunk since the latest pass; None: nothing.

        Raises:
            RuntimeError: A member was given a gradient by hand.
        """
        shown, gone = self._shown.get(chunk, {}), []
        with without_torch_functions():
            gradients = [member.parameter.grad for member in chunk.members]
        if len(shown) == len(gradients) and all(type(gradient) is GradientElsewhere for gradient in gradients):
            return None
        for index, gradient in enumerate(gradients):
            if gradient is None and index in shown:
                gone.append(index)
                del shown[index]
            elif gradient is not None and type(gradient) is not GradientElsewhere:
                refuse_by_hand(chunk.members[index].names[0])
        return Dropped(chunk, gone, bool(shown)) if gone else None

    def forget(self, chunk: "Chunk") -> None:
        """The gradients of a chunk were dropped, and the stand-ins with them."""
        self._shown.pop(chunk, None)


def refuse_by_hand(name: str) -> NoReturn:
    """Raises an error about a gradient that a program has put into a parameter."""
    raise RuntimeError(
        f"{name!r} was given a gradient by hand, and the optimizer steps what backward passes sum over the ranks; use "
        "torch.autograd.backward(parameters, gradients) instead, or write in place through "
        "par_groups.gradients(optimizer)"
    )


def _stand_in(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A stand-in for the gradient of a parameter, of the shape that this shows now."""
    made = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
    made.__class__ = GradientElsewhere  # torch makes no subclass of a sparse tensor
    made.par_name = name  # type: ignore[attr-defined]
    return made


def _name_in(values: Iterable[Any]) -> str:
    """The name of the first stand-in among the arguments of an operation."""
    for value in values:
        if isinstance(value, GradientElsewhere):
            return value.par_name
        if isinstance(value, list | tuple) and (found := _name_in(value)):
            return found
    return ""
