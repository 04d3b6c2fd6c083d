"""One optimizer whose pieces are stepped elsewhere, and one step of these pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import TensorStepper

from ..optimizer.apart import SliceSplitter
from .link import HostReads
from .piece import DiskPiece
from .swapper import PieceValues


@dataclass(eq=False, kw_only=True)
class OffloadedStep:
    """One step of an optimizer's pieces, with all inputs as they were when it began.

    Args:
        stepper: Steps one tensor as the optimizer would.
        splitter: Splits slices whose parameters have different step counts. None: there are no such slices.
        order: Values of each piece that has a gradient, in the order of the step.
        reads: Copies to the host of tensors that the stepper uses.
    """

    stepper: TensorStepper
    splitter: SliceSplitter | None
    order: Mapping[DiskPiece, PieceValues]
    reads: HostReads

    def update_(self, piece: DiskPiece, fetched: PieceValues) -> None:
        """Update a piece that is in memory."""
        gradient = cast("torch.Tensor", fetched.gradient)  # the order of a step has only pieces with a gradient
        split = None if self.splitter is None else self.splitter.take(piece.tensor, gradient, fetched.state)
        if split is None:
            # The program may drop `piece.tensor.grad` while a thread steps, so a tensor of the same memory has its own.
            stepped = nn.Parameter(piece.tensor.detach())
            stepped.grad = gradient
            self.stepper.step(stepped, piece.group, fetched.state)
        else:
            for part in split.parts:
                self.stepper.step(part.tensor, piece.group, part.state)
            split.join_()


@dataclass(eq=False, kw_only=True)
class OffloadedOptimizer:
    """An optimizer, its pieces, and its latest step.

    Args:
        optimizer: The optimizer.
        pieces: All of its pieces, in the order of a step.
        order: The pieces of its latest step, in order. The next step is expected to have the same.
        hidden: Gradients that the optimizer's own step must not see, because its pieces are stepped elsewhere.
        step: The step that has not ended yet.
        stepper: Steps tensors with the settings at the beginning of backward. None: no piece is stepped in backward.
        applied: Pieces that were stepped in backward, before the optimizer's own step.
        awaits_step: Whether backward has stepped pieces on any rank, and the optimizer's own step has not followed.
    """

    optimizer: Optimizer
    pieces: list[DiskPiece]
    order: Sequence[DiskPiece] = ()
    hidden: list[tuple[nn.Parameter, torch.Tensor | None]] = field(default_factory=list)
    step: OffloadedStep | None = None
    stepper: TensorStepper | None = None
    applied: set[DiskPiece] = field(default_factory=set)
    awaits_step: bool = False

    def show_gradients(self) -> None:
        """Set the hidden gradients again, unless the program has set new ones."""
        for tensor, gradient in self.hidden:
            if tensor.grad is None:
                tensor.grad = gradient
        self.hidden = []

    def begin_backward(self) -> None:
        """Take the settings for steps of pieces within the backward that begins."""
        self.check_is_stepped("another backward begins")
        reads = HostReads()
        self.stepper = TensorStepper(self.optimizer, reads.begin)
        # The program may write settings on the device until it calls `step`, which only the device would see.
        if reads.has_begun:
            self.stepper = None

    def take_stepper(self) -> TensorStepper | None:
        """Return what has stepped pieces in backward, for the rest of the step; None if nothing has.

        Raises:
            RuntimeError: The program has changed a setting, or dropped gradients, since backward began.
        """
        stepper, self.stepper, self.awaits_step = self.stepper, None, False
        if stepper is None:
            return None
        changed = stepper.find_change()
        if changed is None and any(piece.tensor.grad is None for piece in self.applied):
            changed = "grad"
        if changed is not None:
            raise RuntimeError(
                f"{changed!r} was changed between backward and step(), after Offload(overlap='backward') had stepped "
                "with the value before; change it after step(), or remove overlap"
            )
        return stepper

    def drop_applied(self) -> None:
        """Forget the pieces that backward has stepped, and their gradients."""
        for piece in self.applied:
            piece.tensor.grad = None
        self.applied.clear()

    def check_is_stepped(self, what: str) -> None:
        """Raise if backward has stepped pieces, and the optimizer's own step has not followed.

        Args:
            what: What happens instead, for the error.
        """
        if self.awaits_step:
            raise RuntimeError(
                f"{what} before step(), after Offload(overlap='backward') has updated parameters in backward; call "
                f"step() of the {type(self.optimizer).__name__} after each backward that is not within no_sync(), or "
                "remove overlap"
            )

    def end_step(self) -> None:
        """Apply the settings that the step has changed, once for all pieces."""
        if self.step is not None:
            self.step.stepper.apply_changes_()
            self.step = None
