"""One step of one rank: a loop over its actions."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from par_groups import copy_to_device

from .._program import Instruction, Message, Program
from .._structure import flatten, tensors_of
from .._torch_private import is_profiled, tree_map_only
from ..schedules.actions import FORWARD, INPUT_GRAD, OPERATION_NAMES, WEIGHT_GRAD, Action
from ..wire.message import Contents
from ..wire.wire import Wire
from .clock import Clock
from .feed import Feed
from .gradient_sync import GradientSync
from .local_stage import Gradients, LocalStage, across_border, as_arguments
from .microbatches import check_visible, rows_of
from .offload import Activations
from .weight_gradients import SplitBackward

Loss = Callable[..., Tensor]

_UNNAMED: AbstractContextManager[object] = nullcontext()
"""Context of an action without a profiler; one object for all actions, because a tiny action takes microseconds."""


class Recorded(NamedTuple):
    """Action that this rank has run, with moments of its clock."""

    action: Action
    start: Any
    end: Any


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """Objects that a rank uses in all steps.

    Args:
        stages: Stages of this rank, by number.
        split: Stages whose backward is split.
        syncs: Data-parallel reduction of each stage.
        wire: Connection with the other ranks.
        rank: This rank, within the pipeline.
        last: Number of the pipeline's last stage.
        loss_fn: Loss function, on the rank with the last stage.
        complete: Function that is called with a stage's number when its gradients are complete.
        activations: Offloading of activations.
        border: Widest dtype of tensors that are sent to other ranks.
        clock: Clock for the times of actions.
    """

    stages: Mapping[int, LocalStage]
    split: SplitBackward
    syncs: Mapping[int, GradientSync]
    wire: Wire
    rank: int
    last: int
    loss_fn: Loss | None
    complete: Callable[[int], None] | None
    activations: Activations
    border: torch.dtype | None
    clock: Clock


@dataclass(kw_only=True)
class StepExecution:
    """Running step.

    Args:
        equipment: Objects that the rank uses in all steps.
        program: Actions and messages of the rank.
        training: Whether the step has a backward.
        keep_outputs: Whether to keep the last stage's outputs.
        feed: Batch.
        shares: Factor of each microbatch's loss; empty on ranks without the last stage.
        has_blind_shares: Whether the factors are equal only because the microbatches' rows are unknown.

    Attributes:
        doing: Current action, or words for the work after the last action; None before the first action.
        outputs: Outputs of the last stage, by microbatch.
        losses: Losses, by microbatch.
        recorded: Finished actions with their times.
    """

    equipment: Equipment
    program: Program
    training: bool
    keep_outputs: bool
    feed: Feed = field(default_factory=Feed)
    shares: list[float] = field(default_factory=list)
    has_blind_shares: bool = False
    doing: Action | str | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    recorded: list[Recorded] = field(default_factory=list)
    _local: dict[Message, Contents] = field(default_factory=dict)  # from one stage of this rank to another
    _without_autocast: AbstractContextManager[object] = field(default_factory=nullcontext)
    _finals: set[int] = field(default_factory=set)  # places of the actions after which a stage's gradients are complete
    _first_rows: int | None = None
    _loss_has_gradient: bool = False

    def execute(self) -> None:
        """Run all actions."""
        equipment, self._without_autocast = self.equipment, _autocast_off()
        with ExitStack() as during:
            during.enter_context(torch.enable_grad() if self.training else torch.no_grad())
            if self.training:
                for number, sync in equipment.syncs.items():
                    if_split, if_whole = self.program.final[number]
                    is_split = number in equipment.split.stages
                    self._finals.add(if_split if is_split else if_whole)
                    # The only backward of a step may reduce as ever: to hold it back costs memory and overlap.
                    is_alone = self.program.forwards == 1 and not is_split and not sync.waits_for_all
                    if not is_alone:
                        # Reducing in each microbatch's backward would repeat the traffic, so all backwards but the last
                        # accumulate locally.
                        during.enter_context(sync.held_back())
                during.enter_context(equipment.split.active())
                actions = (each.action for each in self.program.instructions if each.action.op != WEIGHT_GRAD)
                equipment.activations.begin((op == FORWARD, (stage, number)) for op, stage, number in actions)
            for position, instruction in enumerate(self.program.instructions):
                self._do(position, instruction)

    def par_doing(self) -> str:
        """Return what the step is doing, in words; see `par_groups.attributes.DOING`."""
        if not isinstance(self.doing, Action):
            return f"in a step of the pipeline ({self.doing or 'at its beginning'})"
        what = OPERATION_NAMES[self.doing.op]
        return f"in the {what} of microbatch {self.doing.microbatch} in stage {self.doing.stage} of the pipeline"

    def _do(self, position: int, instruction: Instruction) -> None:
        self.doing = action = instruction.action
        # The wait for a message is not part of the action: a timeline then shows it as idle time.
        taken = None if instruction.takes is None else self._take(instruction.takes, instruction.source)
        start = self.equipment.clock.now()
        final = position in self._finals
        with record_function(f"pipeline {action}") if is_profiled() else _UNNAMED:
            if action.op == FORWARD:
                self._forward(instruction, taken)
            else:
                # torch runs a backward in the dtypes of its forward; an enabled autocast would cast the operations of
                # custom backwards again.
                with self._without_autocast:
                    self._backward(instruction, taken, final)
        self.recorded.append(Recorded(action, start, self.equipment.clock.now()))
        if final and self.equipment.complete is not None:
            self.equipment.complete(action.stage)

    # Forward

    def _forward(self, instruction: Instruction, taken: Contents | None) -> None:
        _, number, microbatch = instruction.action
        stage, activations = self.equipment.stages[number], self.equipment.activations
        kwargs = self.feed.kwargs[microbatch]
        args: tuple[Any, ...] = ()
        leaves: list[Tensor] = []  # tensors that another stage made
        if taken is not None:
            value, leaves = across_border(*taken, copied=stage.writes)
            # A stage that returns a tuple passes several arguments to the next stage, like modules in an nn.Sequential
            # that unpack them.
            args = as_arguments(value)
        elif self.feed.inputs:
            args = self.feed.inputs[microbatch]
        if not self.training:
            output = stage.module(*args, **kwargs)
        else:
            with activations.saving((number, microbatch)):
                output = stage.module(*args, **kwargs)
        if number == self.equipment.last:
            outputs = self._finish(microbatch, output)
        else:
            outputs, stage.output = flatten(output, stage.output, self.equipment.border)
            self._give(instruction, (stage.output, outputs))
        if self.training:
            stage.keep(microbatch, leaves, outputs)
            # The received tensors are saved by autograd in the form that the offloading chose, so their own memory is
            # no longer needed.
            activations.free_(leaves, output)

    def _finish(self, microbatch: int, output: Any) -> list[Tensor]:
        """Compute the loss of a microbatch, and return the tensors from which its backward starts."""
        loss_fn, targets = self.equipment.loss_fn, self.feed.targets
        if self.keep_outputs:
            check_visible(output)
            self.outputs[microbatch] = tree_map_only(Tensor, Tensor.detach, output)
        if loss_fn is None or not (self.training or targets):
            return []
        if self.has_blind_shares:
            self._check_rows(microbatch, output)
        # The loss must still have a graph, because the earlier stages wait for gradients.
        if self.shares[microbatch] == 0:  # a mean over nothing is NaN, and so is its gradient
            floats = (tensor for tensor in tensors_of(output) if tensor.is_floating_point())
            loss = sum((tensor.sum() * 0 for tensor in floats), torch.zeros(()))
        else:
            loss = loss_fn(output, targets[microbatch]) if targets else loss_fn(output)
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}; loss_fn must give one number per microbatch")
        if self.training:  # of a microbatch in which nothing counts it may be a constant
            self._loss_has_gradient |= loss.requires_grad or not any(t.requires_grad for t in tensors_of(output))
            is_last = len(self.losses) == len(self.shares) - 1
            if is_last and not self._loss_has_gradient:  # the other ranks still wait for gradients
                raise ValueError(
                    "the loss has no gradient, though the outputs do; loss_fn must not detach them, or use .item()"
                )
        self.losses[microbatch] = loss.detach()
        return [loss]

    def _check_rows(self, microbatch: int, output: Any) -> None:
        """Raise ValueError unless a microbatch has as many rows as the first microbatch."""
        rows = rows_of(output)
        if self._first_rows is None:
            self._first_rows = rows
        if rows != self._first_rows:
            raise ValueError(
                f"microbatch {microbatch} has {rows} rows and the first one {self._first_rows}, which the rank with "
                "the loss learns too late to weigh them; give it the inputs or the target as well, or a batch that "
                "divides"
            )

    def loss(self) -> Tensor | None:
        """Return the loss of the batch; None on ranks without the last stage."""
        if not self.losses:
            return None
        losses = torch.stack([self.losses[i].reshape(()) for i in range(len(self.losses))])
        shares = torch.tensor(self.shares, dtype=torch.float64).to(losses.dtype)
        return (losses * copy_to_device(shares, losses.device)).sum()

    def forget(self) -> None:
        """Drop the batch and its results."""
        self.feed = Feed()
        self.outputs.clear()
        self.losses.clear()
        self._local.clear()

    # Backward

    def _backward(self, instruction: Instruction, taken: Contents | None, final: bool) -> None:
        op, number, microbatch = instruction.action
        stage, split, sync = self.equipment.stages[number], self.equipment.split, self.equipment.syncs[number]
        if op != WEIGHT_GRAD:
            self.equipment.activations.approach((number, microbatch))
        # The weight-gradient half of a split backward still reads saved activations.
        if op != INPUT_GRAD or number not in split.stages:
            self.equipment.activations.done((number, microbatch))
        if number not in split.stages:
            if op != WEIGHT_GRAD:
                self._whole_backward(instruction, self._gradients(instruction, taken), final)
            return
        if op != WEIGHT_GRAD:
            split.begin()
            self._give_back(instruction, stage.backward(microbatch, self._gradients(instruction, taken)))
            split.keep(number, microbatch)
        if op != INPUT_GRAD:
            if final:
                # The reduction may start only in the very last half, because gradients are incomplete before.
                sync.release(split.ends(number) if sync.follows_graph else [])
            split.finish(number, microbatch, last=final, every=final and sync.waits_for_all)

    def _whole_backward(self, instruction: Instruction, gradients: Gradients, final: bool) -> None:
        """Run a complete backward. If it reduces gradients, send the inputs' gradients before the reduction ends."""
        _, number, microbatch = instruction.action
        sync, stage = self.equipment.syncs[number], self.equipment.stages[number]
        if not (final and sync.active):
            self._give_back(instruction, stage.backward(microbatch, gradients))
            return
        sync.release(stage.outputs(microbatch))
        is_given = False

        def ready(of_inputs: Gradients) -> None:
            nonlocal is_given
            is_given = True
            self._give_back(instruction, of_inputs)

        # The stage before waits for the inputs' gradients. They are sent from a hook inside the backward, because the
        # backward returns only after the reduction.
        of_inputs = stage.backward(microbatch, gradients, ready)
        if not is_given:  # an input that is not used has no gradient
            self._give_back(instruction, of_inputs)

    def _gradients(self, instruction: Instruction, taken: Contents | None) -> Gradients:
        """Return the gradients of a stage's outputs, or of the loss."""
        _, number, microbatch = instruction.action
        if taken is not None:
            gradients: Gradients = across_border(*taken)[0]
            return gradients
        if not self.equipment.stages[number].has_outputs(microbatch):
            return ()
        return (torch.full_like(self.losses[microbatch], self.shares[microbatch]),)

    def _give_back(self, instruction: Instruction, gradients: Gradients) -> None:
        if instruction.gives is not None:
            stage = self.equipment.stages[instruction.action.stage]
            tensors, stage.gradient = flatten(gradients, stage.gradient, self.equipment.border)
            self._give(instruction, (stage.gradient, tensors))

    # Between stages

    def _take(self, message: Message, source: int) -> Contents:
        if source == self.equipment.rank:
            return self._local.pop(message)
        return self.equipment.wire.take(message, source)

    def _give(self, instruction: Instruction, contents: Contents) -> None:
        message, target = instruction.gives, instruction.target
        if message is not None and target == self.equipment.rank:
            # Detached, because the graph of one stage must end at its border even if the next stage is on the same
            # rank.
            self._local[message] = contents[0], [tensor.detach() for tensor in contents[1]]
        elif message is not None:
            self.equipment.wire.give(message, target, contents)


def _autocast_off() -> AbstractContextManager[object]:
    """Return a context that disables autocast: a backward runs in the dtypes of its forward."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    active = next((kind for kind in kinds if torch.is_autocast_enabled(kind)), None)
    return nullcontext() if active is None else torch.autocast(active, enabled=False)
