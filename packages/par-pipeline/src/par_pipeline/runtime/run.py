"""One step of one rank: a loop over its actions."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._program import Instruction, Message, Program
from .._structure import flatten, tensors_of
from ..schedules.actions import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from ..wire.channel import Contents, Wire
from .clock import Clock
from .feed import Feed
from .gradient_sync import GradientSync
from .local_stage import Gradients, Stage, arguments, border
from .microbatches import check_visible, rows_of
from .offload import Activations
from .weight_gradients import SplitBackward

Loss = Callable[..., Tensor]


class Recorded(NamedTuple):
    """An action of this rank, and moments of its clock."""

    action: Action
    start: Any
    end: Any


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a rank runs its actions with.

    Args:
        stages: Of this rank, by number.
        split: Of those whose backward is split.
        syncs: By stage.
        wire: To the other ranks.
        rank: This one.
        last: The number of the last stage.
        loss_fn: On the rank that runs it.
        complete: Called with a stage's number when its gradients are complete.
        activations: Where they wait.
        border: The widest dtype of what other ranks are sent.
        clock: Of the stages.
    """

    stages: Mapping[int, Stage]
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
class Run:
    """A step under way.

    Args:
        parts: What it runs with.
        program: What it does.
        training: Whether there is a backward.
        keep_outputs: Whether the last stage's outputs are kept.
        feed: The batch.
        shares: Of each microbatch in the loss; empty where the last stage is elsewhere.
        alike: Whether they are equal because nothing is known of the microbatches' rows.
        action: The one under way.
        outputs: Of the last stage, by microbatch.
        losses: By microbatch.
        recorded: What has run.
    """

    parts: Parts
    program: Program
    training: bool
    keep_outputs: bool
    feed: Feed = field(default_factory=Feed)
    shares: list[float] = field(default_factory=list)
    alike: bool = False
    action: Action | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    recorded: list[Recorded] = field(default_factory=list)
    _local: dict[Message, Contents] = field(default_factory=dict)
    _as_forward: AbstractContextManager[object] = field(default_factory=nullcontext)
    _finals: set[int] = field(default_factory=set)
    _rows: int | None = None
    _trains: bool = False

    def execute(self) -> None:
        """Runs all actions."""
        parts, self._as_forward = self.parts, _without_autocast()
        with ExitStack() as during:
            during.enter_context(torch.enable_grad() if self.training else torch.no_grad())
            if self.training:
                self._finals = {self._final(number) for number in parts.stages}
                for number, sync in parts.syncs.items():
                    if not self._reduces_anyway(number):
                        during.enter_context(sync.held())
                during.enter_context(parts.split.active())
            for position, instruction in enumerate(self.program.instructions):
                self._do(position, instruction)

    def _reduces_anyway(self, number: int) -> bool:
        """Whether a stage's only backward pass is the rank's only one: what is held back costs memory and overlap."""
        alone = self.program.forwards == 1
        return alone and number not in self.parts.split.stages and not self.parts.syncs[number].waits_for_all

    def _do(self, position: int, instruction: Instruction) -> None:
        self.action = action = instruction.action
        taken = None if instruction.takes is None else self._take(instruction.takes, instruction.source)
        start = self.parts.clock.now()
        final = position in self._finals
        if action.op == FORWARD:
            self._forward(instruction, taken)
        else:
            with self._as_forward:
                self._backward(instruction, taken, final)
        self.recorded.append(Recorded(action, start, self.parts.clock.now()))
        if final and self.parts.complete is not None:
            self.parts.complete(action.stage)

    # Forward

    def _forward(self, instruction: Instruction, taken: Contents | None) -> None:
        _, number, microbatch = instruction.action
        stage, activations = self.parts.stages[number], self.parts.activations
        args, kwargs, leaves = self._arguments(stage, microbatch, taken)
        if not self.training:
            output = stage.module(*args, **kwargs)
        else:
            with activations.saving((number, microbatch)):
                output = stage.module(*args, **kwargs)
        if number == self.parts.last:
            outputs = self._finish(microbatch, output)
        else:
            outputs, stage.output = flatten(output, stage.output, self.parts.border)
            self._give(instruction, (stage.output, outputs))
        if self.training:
            stage.keep(microbatch, leaves, outputs)
            activations.free_(leaves, output)

    def _arguments(
        self, stage: Stage, microbatch: int, taken: Contents | None
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """What a stage is called with, and those tensors that another stage made."""
        every = self.feed.kwargs[microbatch]
        if taken is None:
            args, kwargs = self.feed.inputs[microbatch] if self.feed.inputs else ((), {})
            return args, kwargs | every, []
        value, leaves = border(*taken, copied=stage.writes)
        return arguments(value), every, leaves

    def _finish(self, microbatch: int, output: Any) -> list[Tensor]:
        """The loss, which is where the backward begins."""
        if self.keep_outputs:
            check_visible(output)
            self.outputs[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, output)
        if self.parts.loss_fn is None or not (self.training or self.feed.targets):
            return []
        if self.alike:
            self._check_rows(microbatch, output)
        if self.shares[microbatch] == 0:  # a mean over nothing is NaN, and so is its gradient
            loss = sum((each.sum() * 0 for each in tensors_of(output) if each.is_floating_point()), torch.zeros(()))
        else:
            target = self.feed.targets
            loss = self.parts.loss_fn(output, target[microbatch]) if target else self.parts.loss_fn(output)
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}; loss_fn must give one number a microbatch")
        if self.training:  # of a microbatch in which nothing counts it may be a constant
            self._trains |= loss.requires_grad or not any(each.requires_grad for each in tensors_of(output))
            if not self._trains and len(self.losses) == len(self.shares) - 1:  # the others still wait for gradients
                raise ValueError(
                    "the loss has no gradient, though the outputs do; loss_fn must not detach them, or use .item()"
                )
        self.losses[microbatch] = loss.detach()
        return [loss]

    def _check_rows(self, microbatch: int, output: Any) -> None:
        """Raises unless they are as many as those of the first one."""
        rows = rows_of(output)
        if self._rows is None:
            self._rows = rows
        if rows != self._rows:
            raise ValueError(
                f"microbatch {microbatch} has {rows} rows and the first one {self._rows}, which the rank with the loss "
                "learns too late to weigh them; give it the inputs or the target as well, or a batch that divides"
            )

    def loss(self) -> Tensor | None:
        """Of the batch, where the last stage is."""
        if not self.losses:
            return None
        losses = torch.stack([self.losses[i].reshape(()) for i in range(len(self.losses))])
        return (losses * torch.tensor(self.shares, dtype=torch.float64).to(losses, non_blocking=True)).sum()

    # Backward

    def _backward(self, instruction: Instruction, taken: Contents | None, final: bool) -> None:
        op, number, microbatch = instruction.action
        stage, split, sync = self.parts.stages[number], self.parts.split, self.parts.syncs[number]
        if op != INPUT_GRAD or number not in split.stages:
            self.parts.activations.done((number, microbatch))
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
                sync.release(split.ends(number) if sync.follows_graph else [])
            split.finish(number, microbatch, last=final, every=final and sync.waits_for_all)

    def _whole_backward(self, instruction: Instruction, gradients: Gradients, final: bool) -> None:
        """Where gradients are reduced in this pass, the stage before gets its part before the pass is over."""
        _, number, microbatch = instruction.action
        sync, stage = self.parts.syncs[number], self.parts.stages[number]
        if not (final and sync.active):
            self._give_back(instruction, stage.backward(microbatch, gradients))
            return
        sync.release(stage.outputs(microbatch))
        given: list[Gradients] = []

        def ready(of_inputs: Gradients) -> None:
            given.append(of_inputs)
            self._give_back(instruction, of_inputs)

        of_inputs = stage.backward(microbatch, gradients, ready)
        if not given:  # an input that is not used has none
            self._give_back(instruction, of_inputs)

    def _gradients(self, instruction: Instruction, taken: Contents | None) -> Gradients:
        """Of a stage's outputs, or of the loss."""
        _, number, microbatch = instruction.action
        if taken is not None:
            gradients: Gradients = border(*taken)[0]
            return gradients
        if not self.parts.stages[number].has_outputs(microbatch):
            return ()
        return (torch.full_like(self.losses[microbatch], self.shares[microbatch]),)

    def _give_back(self, instruction: Instruction, gradients: Gradients) -> None:
        if instruction.gives is not None:
            stage = self.parts.stages[instruction.action.stage]
            tensors, stage.gradient = flatten(gradients, stage.gradient, self.parts.border)
            self._give(instruction, (stage.gradient, tensors))

    def _final(self, number: int) -> int:
        """The place of the action after which a stage's gradients are complete."""
        if_split, if_whole = self.program.final[number]
        return if_split if number in self.parts.split.stages else if_whole

    # Between stages

    def _take(self, message: Message, source: int) -> Contents:
        if source == self.parts.rank:
            return self._local.pop(message)
        return self.parts.wire.take(message, source)

    def _give(self, instruction: Instruction, contents: Contents) -> None:
        message, target = instruction.gives, instruction.target
        if message is not None and target == self.parts.rank:
            self._local[message] = contents[0], [each.detach() for each in contents[1]]
        elif message is not None:
            self.parts.wire.give(message, target, contents)


def _without_autocast() -> AbstractContextManager[object]:
    """For a backward, which runs in the types of its forward whatever the caller casts."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    on = next((kind for kind in kinds if torch.is_autocast_enabled(kind)), None)
    return nullcontext() if on is None else torch.autocast(on, enabled=False)
