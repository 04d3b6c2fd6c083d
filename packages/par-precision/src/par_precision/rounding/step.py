"""A step of any torch optimizer on bf16 weights without fp32 masters: computed in fp32 a piece at a time, then rounded.

piece      weights, gradients and moments of some parameters -> fp32 stand-ins, which take their place in the optimizer
           the optimizer's own step, fused if it is          -> new fp32 values
           weights and moments are rounded stochastically, the stand-ins go, the next piece comes
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import Segments

from .._dtensor import local_part
from .floats import floats_of
from .rounding import DROPPED, Rounding, packed_in, round_all_

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StochasticStep:
    """How steps are rounded.

    Args:
        seed: Of the run, the same on all ranks.
        names: Of parameters in the whole model, by which random numbers are told apart. The same whoever holds them;
            flat tensors with `Segments` have their own. Without: "param_groups.0.params.1", or as the optimizer has it.
        moments: Of what the optimizer keeps for each element: torch.bfloat16, rounded stochastically too, since a
            second moment that changes by a thousandth a step stands still otherwise; or torch.float32.
        piece: Elements that are fp32 at a time, or one parameter if it has more: 16 bytes each with Adam.

    Raises:
        ValueError: Another dtype of moments, or an empty piece.
    """

    seed: int = 0
    names: Mapping[Tensor, str] | None = None
    moments: torch.dtype = torch.bfloat16
    piece: int = 1 << 22

    def __post_init__(self) -> None:
        if self.moments not in {torch.bfloat16, torch.float32}:
            raise ValueError(f"moments in {self.moments}: keep them in torch.bfloat16 or torch.float32")
        if self.piece < 1:
            raise ValueError(f"a piece of {self.piece} elements: it needs at least 1")


Prepare = Callable[[Sequence[Tensor]], object]
"""Called with the fp32 tensors of a piece, to change their gradients."""


def stochastic_step_(
    optimizer: Optimizer, step: int, options: StochasticStep, prepare: Prepare = lambda _: None
) -> None:
    """Steps an optimizer whose bf16 or fp16 parameters are their own masters.

    Per parameter, Adam takes 2 bytes of weight, 2 of gradient, and 4 or 8 of moments. fp32 parameters among them step
    as ever. The optimizer's hooks run once, as around its own `step`; a fused optimizer's `found_inf` is obeyed.
    Between steps its state has the parameters as keys and moments in the stated dtype, fp32 if they have no dims.

    Args:
        optimizer: Any that keeps its state by parameter and steps each parameter alone; not LBFGS.
        step: Of training, counted by the caller: at another one the random numbers are others.
        options: How.
        prepare: Changes gradients before the optimizer sees them.

    Raises:
        TypeError: LBFGS, whose step is one of all parameters together.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS steps all parameters together; stochastic rounding needs one that steps each, like AdamW"
        )

    def in_pieces(optimizer: Optimizer) -> None:
        for piece in _pieces(optimizer, options):
            _step_piece_(optimizer, piece, step, options, prepare)

    Optimizer.profile_hook_step(in_pieces)(optimizer)  # what torch puts around every optimizer's step
    optimizer.__dict__["_opt_called"] = True  # as lr schedulers' wrapper of `step` says, which is passed by


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A parameter with a gradient.

    Args:
        parameter: The optimizer's.
        gradient: Its gradient.
        group: The number of its param group.
        packed: What it packs, or its name.
    """

    parameter: Tensor
    gradient: Tensor
    group: int
    packed: Segments | str


def _pieces(optimizer: Optimizer, options: StochasticStep) -> Iterator[list[_Held]]:
    """All parameters with gradients, a few at a time."""
    piece: list[_Held] = []
    size = 0
    for held in _with_gradients(optimizer, options.names or {}):
        count = local_part(held.parameter).numel()
        if piece and size + count > options.piece:
            yield piece
            piece, size = [], 0
        piece.append(held)
        size += count
    if piece:
        yield piece


def _with_gradients(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[_Held]:
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"param_groups.{number}.params.{i}" for i in range(len(group["params"]))]
        for name, parameter in list(zip(given, group["params"], strict=True)):
            if parameter.grad is not None:
                packed = packed_in(parameter, names.get(parameter, name))
                yield _Held(parameter=parameter, gradient=parameter.grad, group=number, packed=packed)


def _step_piece_(
    optimizer: Optimizer, piece: Sequence[_Held], step: int, options: StochasticStep, prepare: Prepare
) -> None:
    stand_ins = [_StandIn(optimizer, held, options.moments) for held in piece]
    copies = iter(floats_of([tensor for each in stand_ins for tensor in each.copied()]))
    try:
        for each in stand_ins:
            each.enter(copies)
        prepare([each.tensor for each in stand_ins])
        with _only(optimizer, stand_ins):
            _bare_step(optimizer)(optimizer)
        round_all_([rounding for each in stand_ins for rounding in each.results()], options.seed, step)
        for each in stand_ins:
            each.keep()
    finally:
        for each in stand_ins:
            each.leave()


class _StandIn:
    """An fp32 copy of a parameter that takes its place, its gradient and its state in the optimizer.

    A parameter of another dtype than bf16 and fp16 stands in for itself.

    Args:
        optimizer: Whose state moves.
        held: The parameter.
        moments: The dtype that moments have between steps.
    """

    def __init__(self, optimizer: Optimizer, held: _Held, moments: torch.dtype) -> None:
        self._optimizer, self._held = optimizer, held
        self.group, self.tensor = held.group, held.parameter
        self._copies = held.parameter.dtype in DROPPED
        # without dims a moment looks like a scalar of the optimizer's own, and takes as little: both stay fp32
        self._dtype = moments if held.parameter.dim() else torch.float32
        self._state: State = optimizer.state.get(held.parameter, {})
        self._kept = self._moments(self._state)
        self._result: State = {}

    def copied(self) -> list[Tensor]:
        """What `enter` needs fp32 copies of."""
        return [self._held.parameter, self._held.gradient, *self._kept.values()] if self._copies else []

    def enter(self, copies: Iterator[Tensor]) -> None:
        """Takes the parameter's place, with the next of these copies."""
        if self._copies:
            self.tensor = nn.Parameter(next(copies))
            self.tensor.grad = next(copies)
        self._optimizer.state.pop(self._held.parameter, None)
        if self._state:
            self._optimizer.state[self.tensor] = {**self._state, **{slot: next(copies) for slot in self._kept}}

    def results(self) -> Iterator[Rounding]:
        """What is to be rounded: the parameter, and its moments, into their own tensors where these are there."""
        self._result = dict(self._optimizer.state.get(self.tensor, {}))
        if not self._copies:
            return
        yield Rounding(self._held.parameter, self.tensor.detach(), self._held.packed)
        for slot, value in self._moments(self._result).items() if self._dtype != torch.float32 else ():
            target = self._state.get(slot)
            if target is None or target.dtype != self._dtype:
                target = torch.empty_like(value, dtype=self._dtype)
            self._result[slot] = target
            yield Rounding(target, value, self._held.packed, f".{slot}")

    def keep(self) -> None:
        """Makes `results`, now that they are rounded, what `leave` gives back."""
        self._state = self._result

    def leave(self) -> None:
        """Gives the state back: that of `keep`, or, if the step failed, what was there before."""
        self._optimizer.state.pop(self.tensor, None)
        if self._state:
            self._optimizer.state[self._held.parameter] = self._state

    def _moments(self, state: State) -> dict[str, Tensor]:
        """What the optimizer keeps for each element."""
        return {
            slot: value
            for slot, value in state.items()
            if self._copies
            and slot != "step"
            and isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == self._held.parameter.shape
        }


@contextmanager
def _only(optimizer: Optimizer, stand_ins: Sequence[_StandIn]) -> Iterator[None]:
    """Param groups with nothing but the stand-ins. The groups stay the same objects, and so do their lists."""
    lists = [group["params"] for group in optimizer.param_groups]
    try:
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [each.tensor for each in stand_ins if each.group == number]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = parameters


def _bare_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The step of its class without the hooks around it."""
    function: Any = type(optimizer).step
    bare: Callable[[Optimizer], object] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return bare
