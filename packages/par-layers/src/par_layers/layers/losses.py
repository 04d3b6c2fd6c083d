"""Cross entropy and accuracy for logits that are sharded over the vocabulary, the batch or the sequence."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .._collectives import finish, reduce_from, start_all_reduce
from .._torch_private import assert_async
from ..modes.grid import Axes, Grid
from ..modes.layout import ActivationLayout
from ..modes.rules import ModeRules
from ..modes.token_losses import LossOptions
from .embedding import cut_tokens


def cross_entropy(logits: Tensor, target: Tensor, rules: ModeRules, grid: Grid, options: LossOptions) -> Tensor:
    """Return the mean or sum of the losses over all tensor and sequence ranks, identical on each rank, fp32 or fp64.

    Args:
        logits: Logits [b, ..., classes or fewer], in the classifier's layout.
        target: Full targets [B, ...], int64.
        rules: Rules of the mode.
        grid: This rank's coordinates.
        options: Number of classes, ignored target, smoothing and reduction.

    Raises:
        ValueError: A target is no class. On an accelerator this is a device-side assertion, because a check on the host
            would wait for the device.
    """
    check_targets(target, options)
    return _reduced(_summed_losses(logits, target, rules, grid, options), target, rules, grid, options)


def linear_cross_entropy(
    hidden: Tensor,
    classifier: Callable[[Tensor], Tensor],
    target: Tensor,
    rules: ModeRules,
    grid: Grid,
    *,
    options: LossOptions,
    chunks: int,
) -> Tensor:
    """Compute classifier and cross entropy for one part of the sequence at a time, to save memory for logits.

    Backward recomputes the logits of each part, which costs one more forward of the classifier.

    Args:
        hidden: Activations [b, s, h] in the residual layout.
        classifier: Function from activations to logits.
        target: Full targets [B, S], int64.
        rules: Rules of the mode.
        grid: This rank's coordinates.
        options: Number of classes, ignored target, smoothing and reduction.
        chunks: Number of parts, whose lengths may differ.
    """
    check_targets(target, options)
    # A part of the local activations is a part of each rank's stretch of the sequence, so targets are split in the same
    # way.
    by_rank = target.unflatten(1, (grid.size(rules.residual.sequence), hidden.shape[1]))  # [B, sequence ranks, s]
    parts = zip(hidden.chunk(chunks, 1), by_rank.chunk(chunks, 2), strict=True)

    def loss_of(part: Tensor, of_part: Tensor) -> Tensor:
        return _summed_losses(classifier(part), of_part.flatten(1), rules, grid, options)

    sums = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
    return _reduced(torch.stack(sums).sum(), target, rules, grid, options)


def _reduced(total: Tensor, target: Tensor, rules: ModeRules, grid: Grid, options: LossOptions) -> Tensor:
    """Reduce a sum over the tensor group's tokens to a sum or mean over all sequence ranks.

    Args:
        total: Sum over the tokens of the tensor group.
        target: Full targets of the tensor group.
        rules: Rules of the mode.
        grid: This rank's coordinates.
        options: Ignored target and reduction.
    """
    context: Axes = grid.larger(rules.residual.context)
    if options.reduction == "sum":
        if not context:
            return total
        whole: Tensor = _OverContext.apply(total.double(), grid.group(context))  # type: ignore[no-untyped-call]
        return whole.to(total.dtype)
    count = (target != options.ignore_index).sum()
    if not context:
        return total / count
    both = torch.stack([total.double(), count.double()])  # counts are exact beyond 2**24 tokens
    summed: Tensor = _OverContext.apply(both, grid.group(context))  # type: ignore[no-untyped-call]
    return (summed[0] / summed[1]).to(total.dtype if total.is_floating_point() else torch.get_default_dtype())


def _summed_losses(logits: Tensor, target: Tensor, rules: ModeRules, grid: Grid, options: LossOptions) -> Tensor:
    """Return the sum of the losses over the tokens of the tensor group, fp32 or fp64."""
    # A bf16 sum would drop the losses of some tokens, and an fp16 loss would overflow when a loss scale multiplies it.
    cut = logits.shape[-1] < options.classes
    layout = logits_layout(rules, cut=cut)
    mine = cut_tokens(target, layout, grid).flatten()
    flat = logits.reshape(-1, logits.shape[-1])
    losses = rules.token_losses(flat, mine, grid, layout.features, options)
    return over_tokens(losses.sum(), layout, grid)


def accuracy(logits: Tensor, target: Tensor, rules: ModeRules, grid: Grid, options: LossOptions) -> Tensor:
    """Return the fraction of tokens whose target has the largest logit. Ignored tokens do not count.

    If several logits are equal, the first class counts, on any number of ranks.

    Args:
        logits: Logits [b, ..., classes or fewer], in the classifier's layout.
        target: Full targets [B, ...], int64.
        rules: Rules of the mode.
        grid: This rank's coordinates.
        options: Number of classes, ignored target, and reduction: "mean" for a fraction, "sum" for a count.

    Raises:
        ValueError: A target is no class. On an accelerator this is a device-side assertion.
    """
    check_targets(target, options)
    classes, ignore_index = options.classes, options.ignore_index
    cut = logits.shape[-1] < classes
    layout = logits_layout(rules, cut=cut)
    mine = cut_tokens(target, layout, grid)
    values, guesses = logits.detach().max(-1)
    if cut:
        group = grid.group(layout.features)
        guesses = guesses + grid.index(layout.features) * logits.shape[-1]
        highest = finish(start_all_reduce(values, group, "max"))
        guesses = guesses.masked_fill(values < highest, classes)  # no class: another rank's logit is higher
        # The minimum selects the first class among equal logits, as `argmax` does on one device.
        guesses = finish(start_all_reduce(guesses, group, "min"))
    right = ((guesses == mine) & (mine != ignore_index)).sum()
    return _reduced(over_tokens(right, layout, grid), target, rules, grid, options)


def logits_layout(rules: ModeRules, *, cut: bool) -> ActivationLayout:
    """Return the layout of logits.

    Sharded logits have the layout of a column-parallel matmul. Full logits have the residual layout with the sequence
    gathered.
    """
    return rules.inner if cut else ActivationLayout(batch=rules.residual.batch)


def over_tokens(value: Tensor, layout: ActivationLayout, grid: Grid) -> Tensor:
    """Sum a number over the ranks that have different tokens; backward returns the gradient unchanged."""
    axes: Axes = grid.larger(layout.tokens)
    return reduce_from(value, grid.group(axes)) if axes else value


def check_targets(target: Tensor, options: LossOptions) -> None:
    """Raise ValueError for a target that is no class. On an accelerator, start a device-side assertion instead."""
    classes, ignore_index = options.classes, options.ignore_index
    fine = ((target >= 0) & (target < classes)) | (target == ignore_index)
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        if not fine.all():
            wrong = target[~fine][0].item()
            raise ValueError(f"target {wrong} is no class: classes are 0 to {classes - 1}, {ignore_index} is ignored")
    else:
        assert_async(fine.all(), f"a target is no class: classes are 0 to {classes - 1}")


class _OverContext(torch.autograd.Function):
    """All-reduce over the sequence's ranks; backward: multiplication by their number.

    Each rank computes the gradient of its own tokens' part of the loss. The caller averages gradients over data and
    sequence ranks, so the factor makes that mean equal to one device's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        return finish(start_all_reduce(x, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.ranks, None
