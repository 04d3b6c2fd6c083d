"""Verification of a plan: the sharded model compared with the unsharded model on a batch."""

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
    """Largest differences between a sharded and an unsharded model, relative to the largest absolute value.

    Args:
        loss: Relative difference of the losses.
        logits: Relative difference of the logits, or of the output.
        gradients: Relative difference of each gradient, by the name of the parameter. The denominator is at least a
            thousandth of the largest gradient of all parameters.
    """

    loss: float
    logits: float
    gradients: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest of all differences."""
        return max(self.loss, self.logits, *self.gradients.values())


def verify_plan(
    make: Callable[[], nn.Module],
    groups: ProcessGroups | LayerSet,
    batch: Mapping[str, Any] | Tensor,
    plan: str | Plan = "auto",
    backwards: int = 2,
) -> PlanComparison:
    """Compare a model with its sharded copy, forward and backward, to verify a plan of your own. Collective.

    Every rank of the tensor group must call it, and each rank runs the unsharded model. Use a small model, preferably
    in fp64. Dropout is off. A correct plan gives rounding differences (about 1e-12 in fp64), a wrong plan 0.01 or more.

    Args:
        make: Function that creates the model. All ranks use the weights of the group's first rank.
        groups: The live groups, or a layer set of mode 1d.
        batch: Keyword arguments of the model's forward, such as `{"input_ids": ids, "labels": ids}`, or its only
            tensor; identical on all ranks.
        plan: Rules by pattern, or "auto", as for `parallelize`.
        backwards: Number of backward passes whose gradients accumulate. Each pass shifts the labels by one token.

    Returns:
        The differences, identical on all ranks of the group.

    Raises:
        TypeError: `parallelize` raises it, or the output is neither a tensor nor has a loss and logits.
        ValueError: `parallelize` raises it.

    Example:
        batch = {"input_ids": ids, "labels": ids}
        compared = verify_plan(lambda: MyModel(small_config).double(), groups, batch, plan=mine)
        assert compared.worst < 1e-10, compared
    """
    layers = groups if isinstance(groups, LayerSet) else layer_set("auto", groups)
    axes = tensor_axes(layers.grid)
    whole = make().eval()
    # Ranks may have drawn different weights. `parallelize` broadcasts only those of the copy that it shards.
    if axes:
        group = layers.grid.group(axes)
        for tensor in (*whole.parameters(), *whole.buffers()):
            dist.broadcast(tensor.data, dist.get_global_rank(group, 0), group=group)
    # A loss that the model computes itself would be of this rank's classes only, so its logits are gathered.
    computes_own = isinstance(batch, Mapping) and "labels" in batch and shifts_labels(whole) is None
    cut = parallelize(copy.deepcopy(whole), layers, plan, logits="full" if computes_own else "sharded")
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
        # Each rank has compared its own shards only.
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=layers.grid.group(axes))
    loss, logits, *gradients = numbers.tolist()
    return PlanComparison(loss, logits, dict(zip(far, gradients, strict=True)))


def _run(
    model: nn.Module, batch: Mapping[str, Any] | Tensor, whole: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return a loss and the full output. Without a loss of the model, the loss is the mean of the squared output."""
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
    """Return the difference relative to the full gradient's maximum, or to `least` if the maximum is smaller.

    A gradient that is zero except for rounding errors then has a small difference.
    """
    if whole.grad is None or parameter.grad is None:
        return 0.0 if whole.grad is parameter.grad else float("inf")
    boxes = sharding_of(parameter).boxes
    scale = max(whole.grad.abs().max().item(), least)
    return max((_distance(box.of(parameter.grad), whole.grad[box.slices], scale) for box in boxes), default=0.0)


def _distance(here: Tensor, there: Tensor, scale: float | None = None) -> float:
    scale = there.abs().max().item() if scale is None else scale
    return (here - there).abs().max().item() / (scale or 1.0)
