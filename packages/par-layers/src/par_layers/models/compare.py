"""A plan, proven: the whole model beside the one that is cut, on a batch."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups, sharding_of

from .._layer_set import LayerSet, layer_set
from ..layers.partial_gradients import PartialGradientReducer
from .loss import shifts_labels
from .parallel import parallelization_of
from .parallelize import parallelize
from .plans.plans import Plan
from .survey.survey import tensor_axes


@dataclass(frozen=True)
class PlanComparison:
    """How far a model that was cut is from the whole one: largest differences, relative to the largest number.

    Args:
        loss: Of the losses.
        logits: Of the logits, or of the output.
        gradients: Of the gradients, by the name of the parameter; those that are a thousand times smaller than the
            largest one count as if they were not.
    """

    loss: float
    logits: float
    gradients: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest of all these numbers."""
        return max(self.loss, self.logits, *self.gradients.values())


def verify_plan(
    make: Callable[[], nn.Module],
    groups: ProcessGroups | LayerSet,
    batch: Mapping[str, Any] | Tensor,
    plan: str | Plan = "auto",
    backwards: int = 2,
) -> PlanComparison:
    """Runs a model whole and cut, forward and backward, and says how far apart they are; for a plan of your own.

    Every rank of the tensor group must call it, and each runs the whole model: make a small one, best of all in fp64.
    It runs without dropout. A right plan gives differences of rounding, 1e-12 in fp64; a wrong one 0.01 and more.

    Args:
        make: Makes the model; the weights of the first rank of the group are used on all of them.
        groups: The live groups, or a layer set of mode 1d.
        batch: What the model's forward takes by name, such as `{"input_ids": ids, "labels": ids}`; or the one tensor
            that it takes, the same on all ranks.
        plan: As for `parallelize`.
        backwards: Number of backward passes whose gradients are added up; labels are moved by one place for each.

    Returns:
        The differences, alike on all ranks of the group.

    Raises:
        TypeError: As `parallelize`; or the output is neither a tensor nor has a loss.
        ValueError: As `parallelize`.

    Example:
        compared = compare(lambda: MyModel(small_config).double(), groups, {"input_ids": ids, "labels": ids}, plan=mine)
        assert compared.worst < 1e-10, compared
    """
    layers = groups if isinstance(groups, LayerSet) else layer_set("auto", groups)
    axes = tensor_axes(layers.grid)
    whole = make().eval()
    if axes:
        group = layers.grid.group(axes)
        for tensor in (*whole.parameters(), *whole.buffers()):
            dist.broadcast(tensor.data, dist.get_global_rank(group, 0), group=group)
    computes_own = isinstance(batch, Mapping) and "labels" in batch and shifts_labels(whole) is None
    cut = parallelize(copy.deepcopy(whole), layers, plan, logits="whole" if computes_own else "cut")
    known = parallelization_of(cut)
    over = None if known is None else known.over
    loss = logits = 0.0
    for number in range(backwards):
        moved = batch
        if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
            moved = {**batch, "labels": batch["labels"].roll(number, -1)}
        expected_loss, expected = _run(whole, moved, lambda output: output)
        here_loss, here = _run(cut, moved, lambda output: output if over is None else over.whole(output))
        logits = max(logits, _distance(here, expected))
        loss = max(loss, _distance(here_loss, expected_loss))
        expected_loss.backward()
        here_loss.backward()
    if layers.grid.groups is not None:
        PartialGradientReducer(cut, layers.grid.groups).handle_gradient()
    references = dict(whole.named_parameters())
    largest = max((each.grad.abs().max().item() for each in references.values() if each.grad is not None), default=0.0)
    far = {
        name: _gradient_distance(parameter, references[name], largest / 1000)
        for name, parameter in cut.named_parameters()
    }
    numbers = torch.tensor([loss, logits, *far.values()], dtype=torch.float64, device=next(cut.parameters()).device)
    if axes:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=layers.grid.group(axes))
    loss, logits, *gradients = numbers.tolist()
    return PlanComparison(loss, logits, dict(zip(far, gradients, strict=True)))


def _run(
    model: nn.Module, batch: Mapping[str, Any] | Tensor, whole: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """A loss and a whole output; without a loss of the model's own, the mean of the squared output."""
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    if isinstance(output, Tensor):
        output = whole(output)
        return output.square().mean(), output
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor):
        raise TypeError(
            f"the model gave a {type(output).__name__} without `loss` and `logits`, and no tensor; put labels into the "
            "batch, or wrap the model so that it gives one tensor"
        )
    return loss, whole(logits)


def _gradient_distance(parameter: Tensor, whole: Tensor, least: float) -> float:
    """Relative to the whole gradient or to `least`: one that is zero but for rounding is not far from itself."""
    if whole.grad is None or parameter.grad is None:
        return 0.0 if whole.grad is parameter.grad else float("inf")
    boxes = sharding_of(parameter).boxes
    scale = max(whole.grad.abs().max().item(), least)
    return max((_distance(box.of(parameter.grad), whole.grad[box.slices], scale) for box in boxes), default=0.0)


def _distance(here: Tensor, there: Tensor, scale: float | None = None) -> float:
    scale = there.abs().max().item() if scale is None else scale
    return (here - there).abs().max().item() / (scale or 1.0)
