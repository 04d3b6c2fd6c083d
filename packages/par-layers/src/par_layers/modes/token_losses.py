"""The loss of each token, from logits over a full or a sharded vocabulary."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .._collectives import finish, start_all_reduce
from .grid import Axes, Grid


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of a cross entropy.

    Args:
        classes: Number of classes of the full vocabulary. Fewer logits than classes are sharded logits.
        ignore_index: Target of tokens that do not count.
        label_smoothing: Weight of the uniform distribution over all classes, 0 to 1.
        reduction: "mean" or "sum" over the tokens that count.

    Raises:
        ValueError: The smoothing is out of range, or the reduction is unknown.
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


class TokenLosses(Protocol):
    """A function from logits to the loss of each token."""

    def __call__(self, logits: Tensor, target: Tensor, grid: Grid, axes: Axes, options: LossOptions) -> Tensor:
        """Return the loss of each token, 0 for an ignored token, fp32 or fp64. Collective if the logits are sharded.

        Args:
            logits: Full logits [tokens, V], or this rank's shard [tokens, V/p]; padded logits are -inf.
            target: Targets [tokens], int64.
            grid: This rank's coordinates.
            axes: Axes that shard the vocabulary, if it is sharded.
            options: Number of classes, ignored target and smoothing.
        """
        ...


class VocabularySums(Protocol):
    """The reductions over a vocabulary that a cross entropy consists of."""

    def maximum(self, highest: Tensor) -> Tensor:
        """Return the maximum over the ranks, of one number per token."""
        ...

    def of_rows(self, x: Tensor) -> Tensor:
        """Return the sum of each row of this rank's shard."""
        ...

    def over_ranks(self, partial: Tensor) -> Tensor:
        """Return the sum over the ranks, of a few numbers per token."""
        ...


def token_losses(logits: Tensor, target: Tensor, grid: Grid, axes: Axes, options: LossOptions) -> Tensor:
    """Return the losses of tokens whose logits are full or sharded; see `TokenLosses`."""
    if logits.shape[-1] < options.classes:
        return losses_of_cut_vocabulary(logits, target, RankSums(grid.group(axes)), grid.index(axes), options)
    return functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        target,
        reduction="none",
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
    )


@dataclass(frozen=True)
class RankSums:
    """Reductions by torch's row sum and an all-reduce.

    Args:
        group: The ranks that shard the vocabulary.
    """

    group: dist.ProcessGroup

    def maximum(self, highest: Tensor) -> Tensor:
        """All-reduce the maximum."""
        return finish(start_all_reduce(highest, self.group, "max"))

    def of_rows(self, x: Tensor) -> Tensor:
        """Sum over the last dim."""
        return x.sum(-1)

    def over_ranks(self, partial: Tensor) -> Tensor:
        """All-reduce the sum."""
        return finish(start_all_reduce(partial, self.group))


def losses_of_cut_vocabulary(
    logits: Tensor, target: Tensor, sums: VocabularySums, rank: int, options: LossOptions
) -> Tensor:
    """Return the loss of each token from sharded logits, 0 for an ignored token, fp32 or fp64.

    Args:
        logits: This rank's shard [tokens, V/p]; padded logits are -inf.
        target: Targets [tokens], int64.
        sums: The reductions over the vocabulary.
        rank: Index of this rank among those that shard the vocabulary.
        options: Number of classes, ignored target and smoothing.
    """
    first = rank * logits.shape[-1]
    losses: Tensor = _CutVocabulary.apply(logits, target, sums, first, options)  # type: ignore[no-untyped-call]
    return losses


class _CutVocabulary(torch.autograd.Function):
    """Cross entropy of each token, for logits whose last dim may be sharded over a group; padded logits are -inf.

    Forward needs two all-reduces. The first returns the largest logit. The second returns the sum of exponentials, the
    target's logit and, for smoothing, the sum of all logits. Forward saves the logits and a few numbers per token, and
    backward needs no collective. It allocates one tensor of the logits' size, the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, sums: VocabularySums, first: int, options: LossOptions
    ) -> Tensor:
        classes, smoothing = options.classes, options.label_smoothing
        # The last ranks may hold padding, which is no class and must not count in the smoothing.
        real = min(logits.shape[-1], max(classes - first, 0))
        wide = torch.promote_types(logits.dtype, torch.float32)
        # All ranks must subtract the same maximum, or their sums of exponentials could not be added.
        highest = sums.maximum(logits.amax(-1).to(wide))
        local = target - first
        elsewhere = (local < 0) | (local >= real)
        # The lookup below needs a valid index everywhere; what it finds for targets of other ranks is masked.
        local = local.masked_fill(elsewhere, 0)
        exponentials = sums.of_rows((logits.to(wide) - highest.unsqueeze(-1)).exp_())
        of_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(wide) - highest
        partial = [exponentials, of_target.masked_fill(elsewhere, 0.0)]
        if smoothing:
            partial.append(sums.of_rows(logits[..., :real].to(wide) - highest.unsqueeze(-1)))
        exponentials, of_target, *of_all = sums.over_ranks(torch.stack(partial))
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
        """Return (softmax - (1 - smoothing) * one_hot(target) - smoothing / classes) * the token's gradient."""
        # The softmax divides by the sum of exponentials and does not subtract max + log(sum): at a maximum of 1e4, the
        # fp32 sum of both would round the logarithm off.
        logits, highest, exponentials, local, elsewhere, ignored = ctx.saved_tensors
        upstream = gradient.to(highest.dtype).masked_fill(ignored, 0.0)
        result = (logits.to(highest.dtype) - highest.unsqueeze(-1)).exp_()
        result *= (upstream / exponentials).unsqueeze(-1)
        of_target = (-(1 - ctx.smoothing) * upstream).masked_fill(elsewhere, 0.0)
        result.scatter_add_(-1, local.unsqueeze(-1), of_target.unsqueeze(-1))
        if ctx.smoothing:
            result[..., : ctx.real] -= upstream.unsqueeze(-1) * (ctx.smoothing / ctx.classes)
        return result.to(logits.dtype), None, None, None, None
