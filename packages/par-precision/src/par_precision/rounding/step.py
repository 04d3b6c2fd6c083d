"""Step of any torch optimizer on bf16 weights without fp32 masters: computed in fp32 a piece at a time, then rounded.

For each piece of the parameters, fp32 stand-ins replace weights, gradients and moments in the optimizer. The
optimizer's own step, possibly fused, computes new fp32 values. Weights and moments are then rounded stochastically, and
the stand-ins are dropped before the next piece.
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
from .._torch_private import bare_step, foreach_copy_, note_step, with_step_hooks
from .matrices import DROPPED
from .rounding import ORDINARY, Rounding, packed_in, round_all_

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StochasticStep:
    """Options for the stochastic rounding of optimizer steps.

    Args:
        seed: Seed of the run, the same on all ranks.
        names: Names of parameters in the unsharded model, identical on all ranks; each name has its own random numbers.
            Flat tensors with `Segments` have names already. Default: the optimizer's names, or names of the form
            "param_groups.0.params.1".
        moments: dtype of the optimizer's per-element state between steps. torch.bfloat16 is rounded stochastically too:
            otherwise a second moment that changes by a thousandth per step would never change. torch.float32 is not
            rounded. Default: torch.bfloat16.
        piece: Number of elements that are fp32 at a time, at 16 bytes each with Adam; a larger parameter is a piece.

    Raises:
        ValueError: The dtype of moments is not supported, or `piece` is below 1.
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
    """Step an optimizer whose bf16 or fp16 parameters are their own masters.

    Per parameter, Adam takes 2 bytes of weight, 2 of gradient, and 4 or 8 of moments. fp32 parameters step as without
    rounding. The optimizer's hooks run once, as around its own `step`, and the `found_inf` of a fused optimizer is
    respected. Between steps the optimizer's state has the parameters as keys, and moments in the stated dtype (fp32 if
    they have no dims).

    Args:
        optimizer: Optimizer that keeps its state by parameter and steps each parameter separately; not LBFGS.
        step: Number of the training step, counted by the caller; each step has different random numbers.
        options: Options for the rounding.
        prepare: Function that changes gradients before the optimizer reads them. Default: no change.

    Raises:
        TypeError: The optimizer is LBFGS, whose step combines all parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS steps all parameters together; stochastic rounding needs one that steps each, like AdamW"
        )

    def in_pieces(optimizer: Optimizer) -> None:
        for piece in _pieces(optimizer, options):
            _step_piece_(optimizer, piece, step, options, prepare)

    # The hooks surround all pieces, because programs expect one call of them per step.
    with_step_hooks(in_pieces)(optimizer)
    note_step(optimizer)


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """Parameter with a gradient.

    Args:
        parameter: Parameter of the optimizer.
        gradient: Gradient of the parameter.
        group: Index of the param group.
        packed: Segments of the parameter, or its name.
    """

    parameter: Tensor
    gradient: Tensor
    group: int
    packed: Segments | str


def _pieces(optimizer: Optimizer, options: StochasticStep) -> Iterator[list[_Trained]]:
    """Yield all parameters with gradients, a few at a time."""
    piece: list[_Trained] = []
    size = 0
    for trained in _with_gradients(optimizer, options.names or {}):
        count = local_part(trained.parameter).numel()
        # A parameter is never divided, because optimizers keep one state for each; a large one is a piece of its own.
        if piece and size + count > options.piece:
            yield piece
            piece, size = [], 0
        piece.append(trained)
        size += count
    if piece:
        yield piece


def _with_gradients(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[_Trained]:
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"param_groups.{number}.params.{i}" for i in range(len(group["params"]))]
        for name, parameter in list(zip(given, group["params"], strict=True)):  # params change while pieces step
            if parameter.grad is not None:
                packed = packed_in(parameter, names.get(parameter, name))
                yield _Trained(parameter=parameter, gradient=parameter.grad, group=number, packed=packed)


def _step_piece_(
    optimizer: Optimizer, piece: Sequence[_Trained], step: int, options: StochasticStep, prepare: Prepare
) -> None:
    # All copies of a piece are made together, and each stand-in then takes its own in the same order.
    stand_ins = [_StandIn(optimizer, trained, options.moments) for trained in piece]
    copies = iter(_floats_of([tensor for stand_in in stand_ins for tensor in stand_in.to_copy()]))
    try:
        for stand_in in stand_ins:
            stand_in.enter(copies)
        prepare([stand_in.tensor for stand_in in stand_ins])
        with _params_replaced(optimizer, stand_ins):
            # Without the optimizer's hooks, which surround the steps of all pieces together.
            bare_step(optimizer)(optimizer)
        # State is kept only after the rounding: if the step raises, `leave` restores what was there before.
        round_all_([rounding for stand_in in stand_ins for rounding in stand_in.results()], options.seed, step)
        for stand_in in stand_ins:
            stand_in.keep()
    finally:
        for stand_in in stand_ins:
            stand_in.leave()


@torch.no_grad()
def _floats_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return an fp32 copy of each tensor, made in few calls; an fp32 tensor itself."""
    copies: list[Tensor] = []
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for tensor in tensors:
        if type(tensor) in ORDINARY and tensor.dtype in DROPPED:
            copies.append(torch.empty_like(tensor, dtype=torch.float32))
            into, given = alike.setdefault((tensor.device, tensor.dtype), ([], []))
            into.append(copies[-1])
            given.append(tensor)
        else:
            copies.append(tensor.detach().float())
    for into, given in alike.values():
        foreach_copy_(into, given)
    return copies


class _StandIn:
    """fp32 copy of a parameter that replaces it, its gradient and its state in the optimizer.

    A parameter of another dtype than bf16 and fp16 stands in for itself.

    Args:
        optimizer: Optimizer whose state is replaced.
        trained: Parameter and its gradient.
        moments: dtype of moments between steps.

    Attributes:
        tensor: Tensor that the optimizer steps: the copy, or the parameter itself.
        group: Index of the param group.
    """

    def __init__(self, optimizer: Optimizer, trained: _Trained, moments: torch.dtype) -> None:
        self._optimizer, self._parameter, self._gradient = optimizer, trained.parameter, trained.gradient
        self.group, self.tensor = trained.group, trained.parameter
        self._packed = trained.packed
        self._copies = trained.parameter.dtype in DROPPED
        # Without dims a moment looks like a scalar of the optimizer's own, and takes as little: both stay fp32
        self._dtype = moments if trained.parameter.dim() else torch.float32
        self._state: State = optimizer.state.get(trained.parameter, {})
        self._before = self._moments(self._state)
        self._result: State = {}

    def to_copy(self) -> list[Tensor]:
        """Return the tensors of which `enter` needs fp32 copies."""
        return [self._parameter, self._gradient, *self._before.values()] if self._copies else []

    def enter(self, copies: Iterator[Tensor]) -> None:
        """Take the parameter's place, with the next of these copies."""
        if self._copies:
            self.tensor = nn.Parameter(next(copies))
            self.tensor.grad = next(copies)
        # With two entries for one parameter, an optimizer that walks over its state would count it twice.
        self._optimizer.state.pop(self._parameter, None)
        if self._state:
            self._optimizer.state[self.tensor] = {**self._state, **{slot: next(copies) for slot in self._before}}

    def results(self) -> Iterator[Rounding]:
        """List what is to be rounded: the parameter, and its moments, into their own tensors if these are there."""
        self._result = dict(self._optimizer.state.get(self.tensor, {}))
        if not self._copies:
            return
        yield Rounding(self._parameter, self.tensor.detach(), self._packed)
        if self._dtype == torch.float32:
            return
        for slot, value in self._moments(self._result).items():
            target = self._state.get(slot)
            if target is None or target.dtype != self._dtype:
                # The first step of a parameter has made this moment in fp32, so it has no tensor of the kept dtype yet.
                target = torch.empty_like(value, dtype=self._dtype)
            self._result[slot] = target
            yield Rounding(target, value, self._packed, f".{slot}")

    def keep(self) -> None:
        """Make `results`, now that they are rounded, what `leave` gives back."""
        self._state = self._result

    def leave(self) -> None:
        """Restore the parameter's state: the state from `keep`, or, if the step failed, the state before the step."""
        self._optimizer.state.pop(self.tensor, None)
        if self._state:
            self._optimizer.state[self._parameter] = self._state

    def _moments(self, state: State) -> dict[str, Tensor]:
        """Return the entries of a state that have one value per element."""
        return {
            slot: value
            for slot, value in state.items()
            if self._copies
            and slot != "step"
            and isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == self._parameter.shape
        }


@contextmanager
def _params_replaced(optimizer: Optimizer, stand_ins: Sequence[_StandIn]) -> Iterator[None]:
    """Replace the parameters in the param groups by the stand-ins, inside the context.

    Groups and lists stay the same objects.
    """
    lists = [group["params"] for group in optimizer.param_groups]
    try:
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [stand_in.tensor for stand_in in stand_ins if stand_in.group == number]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
