"""Cross entropy and accuracy where the vocabulary, the batch or the sequence is cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .._collectives import finish, reduce_from, start_all_reduce
from .._torch_private import assert_async
from ..modes.grid import Axes, Grid
from ..modes.layout import ActivationLayout
from ..modes.rules import ModeRules
from .embedding import cut_tokens


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What a cross entropy counts.

    Args:
        classes: Number of classes in the whole vocabulary; fewer logits than that mean that it is cut.
        ignore_index: The target that does not count.
        label_smoothing: Weight of the uniform distribution over all classes, 0 to 1.
        reduction: "mean" over the tokens that count, or their "sum".

    Raises:
        ValueError: The smoothing is out of range, or the reduction unknown.
    """

    classes: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {self.reduction!r}; it can be 'mean' or 'sum'")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it lies between 0 and 1")


def cross_entropy(logits: Tensor, target: Tensor, rules: ModeRules, grid: Grid, options: LossOptions) -> Tensor:
    """The mean, or sum, over the tensor group's tokens that are not ignored, on every rank alike; in fp32 at least.

    Where the sequence was cut before the layers saw it, it is that over the tokens of all these ranks.

    Args:
        logits: [b, ..., classes or less], in the layout that the classifier gave them.
        target: The whole targets [B, ...], int64.
        rules: How the mode cuts and multiplies.
        grid: This rank's place.
        options: Number of classes, what is ignored, smoothing, and whether it is a mean.

    Raises:
        ValueError: A target is no class. On an accelerator, where a look would wait for the device, it is a device-side
            assertion instead.
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
    """Classifier and cross entropy, a part of the sequence at a time: the whole logits are never in memory.

    Each part's logits are computed again in backward, which costs the classifier's forward once more.

    Args:
        hidden: [b, s, h] in the residual layout.
        classifier: From hidden to logits.
        target: The whole targets [B, S], int64.
        rules: How the mode cuts and multiplies.
        grid: This rank's place.
        options: Number of classes, what is ignored, smoothing, and whether it is a mean.
        chunks: Number of parts; they need not be equal.
    """
    check_targets(target, options)
    by_rank = target.unflatten(1, (grid.size(rules.residual.sequence), hidden.shape[1]))  # [B, sequence ranks, s]
    parts = zip(hidden.chunk(chunks, 1), by_rank.chunk(chunks, 2), strict=True)

    def loss_of(part: Tensor, of_part: Tensor) -> Tensor:
        return _summed_losses(classifier(part), of_part.flatten(1), rules, grid, options)

    sums = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
    return _reduced(torch.stack(sums).sum(), target, rules, grid, options)


def _reduced(total: Tensor, target: Tensor, rules: ModeRules, grid: Grid, options: LossOptions) -> Tensor:
    """A sum over the tensor group's tokens, by the number of those that count; over all sequence ranks alike.

    Args:
        total: The sum over the tokens of the tensor group.
        target: Its whole targets.
        rules: How the mode cuts and multiplies.
        grid: This rank's place.
        options: What is ignored, and whether the result is a mean.
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
    """The sum over the tokens of the tensor group, in fp32 at least.

    A bf16 sum would lose whole tokens, and an fp16 loss would overflow when it is scaled.
    """
    cut = logits.shape[-1] < options.classes
    layout = logits_layout(rules, cut=cut)
    mine = cut_tokens(target, layout, grid).flatten()
    flat = logits.reshape(-1, logits.shape[-1])
    if cut:
        losses = losses_of_cut_vocabulary(flat, mine, grid, layout.features, options)
    else:
        losses = functional.cross_entropy(
            flat.to(torch.promote_types(flat.dtype, torch.float32)),
            mine,
            reduction="none",
            ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing,
        )
    return over_tokens(losses.sum(), layout, grid)


def losses_of_cut_vocabulary(logits: Tensor, target: Tensor, grid: Grid, axes: Axes, options: LossOptions) -> Tensor:
    """The loss of every token, 0 for an ignored one, in fp32 at least.

    Args:
        logits: This rank's part [tokens, V/p]; padded logits are -inf.
        target: The tokens' targets [tokens], int64.
        grid: This rank's place.
        axes: The axes over which the vocabulary is cut.
        options: Number of classes, what is ignored, and smoothing.
    """
    first = grid.index(axes) * logits.shape[-1]
    losses: Tensor = _CutVocabulary.apply(logits, target, grid.group(axes), first, options)  # type: ignore[no-untyped-call]
    return losses


def accuracy(logits: Tensor, target: Tensor, rules: ModeRules, grid: Grid, options: LossOptions) -> Tensor:
    """The share of tokens of the tensor group whose largest logit is the target's; ignored ones do not count.

    Of equal logits the first class wins.

    Args:
        logits: [b, ..., classes or less], in the layout that the classifier gave them.
        target: The whole targets [B, ...], int64.
        rules: How the mode cuts and multiplies.
        grid: This rank's place.
        options: Number of classes, and what is ignored.

    Raises:
        ValueError: A target is no class; on an accelerator it is a device-side assertion.
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
        guesses = finish(start_all_reduce(guesses, group, "min"))
    right = ((guesses == mine) & (mine != ignore_index)).sum()
    return _reduced(over_tokens(right, layout, grid), target, rules, grid, options)


def logits_layout(rules: ModeRules, *, cut: bool) -> ActivationLayout:
    """The layout of logits.

    Those of a cut vocabulary come from a column product; whole ones lie as the residual does, the sequence gathered.
    """
    return rules.inner if cut else ActivationLayout(batch=rules.residual.batch)


def over_tokens(value: Tensor, layout: ActivationLayout, grid: Grid) -> Tensor:
    """The sum of a number over the ranks that have different tokens; backward leaves the gradient alone."""
    axes: Axes = grid.larger(layout.tokens)
    return reduce_from(value, grid.group(axes)) if axes else value


def check_targets(target: Tensor, options: LossOptions) -> None:
    """Raises ValueError for a target that is no class; on an accelerator asserts there, without waiting."""
    classes, ignore_index = options.classes, options.ignore_index
    fine = ((target >= 0) & (target < classes)) | (target == ignore_index)
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        if not fine.all():
            wrong = target[~fine][0].item()
            raise ValueError(f"target {wrong} is no class: classes are 0 to {classes - 1}, {ignore_index} is ignored")
    else:
        assert_async(fine.all(), f"a target is no class: classes are 0 to {classes - 1}")


class _OverContext(torch.autograd.Function):
    """Sums over the ranks that a sequence was cut over.

    Backward multiplies by their number: the gradient of the mean over all tokens is then, on each rank, that of its own
    tokens' part times the number of ranks, and the mean of the ranks' gradients is the gradient of one device.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        return finish(start_all_reduce(x, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.ranks, None


class _CutVocabulary(torch.autograd.Function):
    """Cross entropy, token by token, of logits whose last dim is cut over a group; padded logits are -inf.

    Two all-reduces: the largest logit, then the sum of exponentials, the target's logit and, for smoothing, the sum of
    all logits. Saved are the logits and a few numbers for each token; backward makes one tensor of the logits' size,
    the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup, first: int, options: LossOptions
    ) -> Tensor:
        classes, smoothing = options.classes, options.label_smoothing
        real = min(logits.shape[-1], max(classes - first, 0))
        wide = torch.promote_types(logits.dtype, torch.float32)
        highest = logits.amax(-1).to(wide)
        highest = finish(start_all_reduce(highest, group, "max"))
        local = target - first
        elsewhere = (local < 0) | (local >= real)
        local = local.masked_fill(elsewhere, 0)
        exponentials = (logits.to(wide) - highest.unsqueeze(-1)).exp_().sum(-1)
        of_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(wide) - highest
        sums = [exponentials, of_target.masked_fill(elsewhere, 0.0)]
        if smoothing:
            sums.append((logits[..., :real].to(wide) - highest.unsqueeze(-1)).sum(-1))
        exponentials, of_target, *of_all = finish(start_all_reduce(torch.stack(sums), group))
        log_sum = exponentials.log()
        losses = log_sum - of_target
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_sum - of_all[0] / classes)
        ignored = target == options.ignore_index
        ctx.save_for_backward(logits, highest, exponentials, local, elsewhere, ignored)
        ctx.classes, ctx.real, ctx.smoothing = classes, real, smoothing
        counted: Tensor = losses.masked_fill(ignored, 0.0)
        return counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """(Softmax - (1 - smoothing) * one_hot(target) - smoothing / classes) * the token's gradient.

        Nothing is added to the largest logit: with 1e4, its fp32 would swallow the logarithm of the sum.
        """
        logits, highest, exponentials, local, elsewhere, ignored = ctx.saved_tensors
        upstream = gradient.to(highest.dtype).masked_fill(ignored, 0.0)
        result = (logits.to(highest.dtype) - highest.unsqueeze(-1)).exp_()
        result *= (upstream / exponentials).unsqueeze(-1)
        of_target = (-(1 - ctx.smoothing) * upstream).masked_fill(elsewhere, 0.0)
        result.scatter_add_(-1, local.unsqueeze(-1), of_target.unsqueeze(-1))
        if ctx.smoothing:
            result[..., : ctx.real] -= upstream.unsqueeze(-1) * (ctx.smoothing / ctx.classes)
        return result.to(logits.dtype), None, None, None, None
