"""Load balancing of experts: auxiliary losses, the correction bias, and the token counts that both need.

`attach` adds a loss to the main loss: it is an identity on activations whose backward gives the loss the gradient that
the main loss has, `LossScale`. Only first forwards in training count tokens. Evaluation, recomputation and masked
tokens do not count.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..modes.grid import Axes, Grid

_SCOPES = ("sequence", "microbatch", "step")


@dataclass(frozen=True)
class LoadBalancing:
    """Load-balancing options of a mixture of experts.

    Args:
        aux_loss_coef: Coefficient of the auxiliary loss, the sum over experts of f * P: f is the fraction of routed
            tokens that the expert got, times the number of experts, and P the mean of its normalized scores.
        scope: Tokens over which f and P are measured: those of one "sequence" (DeepSeek-V3), of one "microbatch"
            (Switch Transformers), or of all microbatches of all ranks in this "step" so far.
        z_loss_coef: Coefficient of the z loss, the mean of logsumexp(logits)**2, which keeps the logits small.
        bias_update_rate: Step size of `update_correction_bias_`, which changes an expert's correction bias.

    Raises:
        ValueError: A number is negative, or the scope is unknown.
    """

    aux_loss_coef: float = 0.0
    scope: str = "sequence"
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
            value = getattr(self, name)
            if not value >= 0.0:
                raise ValueError(f"{name}={value}: it must not be negative; pass 0 to disable it")
        if self.scope not in _SCOPES:
            raise ValueError(f"scope={self.scope!r}: unknown scope; pass 'sequence', 'microbatch' or 'step'")

    @property
    def has_loss(self) -> bool:
        """Whether the router adds a loss to the main loss."""
        return self.aux_loss_coef > 0.0 or self.z_loss_coef > 0.0


@dataclass(frozen=True, kw_only=True)
class TokenAxes:
    """Axes whose ranks pass different tokens to a router.

    Args:
        context: Axes that split each sequence; gradients are averaged over them.
        partial: Axes that split the tokens of a tensor group; gradients are summed over them.
        replicas: Axes whose ranks have different sequences; gradients are averaged over them.
    """

    context: Axes = ()
    partial: Axes = ()
    replicas: Axes = ()


class LossScale:
    """Factor of a model's main loss, shared by the losses of all its routers."""

    def __init__(self) -> None:
        self.value: Tensor | None = None


@dataclass(frozen=True)
class ExpertLoad:
    """Load of each expert, as the auxiliary loss measures it.

    Args:
        fractions: f, [B, E]: 1 for every expert in perfect balance.
        tokens: Number of tokens of each sequence, summed over the ranks that hold parts of it, [B].
    """

    fractions: Tensor
    tokens: Tensor


class LoadCounter:
    """Token counts of one router since the step began, and the losses that follow from them.

    Args:
        num_experts: Number of experts, E.
        top_k: Number of experts per token, k.
        balance: Load-balancing options.
        axes: Axes whose ranks pass different tokens to the router.
        grid: Coordinates of this rank.

    Attributes:
        counts: This rank's tokens of each expert since the step began, int64 [E]; None before the first forward.
        latest: Tokens of all ranks in the last finished step, int64 [E].
        total: Tokens of all ranks in the finished steps since `RouterLosses.take` was last called, int64 [E].
        losses: Losses that were added to the main loss, by name, summed over microbatches.
        microbatches: Number of first forwards in `losses`.
        dropped: This rank's routed tokens that a capacity dropped; None without a capacity.
        scale: Factor of the main loss; all routers of a model share the object.
    """

    def __init__(self, num_experts: int, top_k: int, balance: LoadBalancing, axes: TokenAxes, grid: Grid) -> None:
        self.num_experts, self.top_k, self.balance, self.axes, self.grid = num_experts, top_k, balance, axes, grid
        self.counts: Tensor | None = None
        self.latest: Tensor | None = None
        self.total: Tensor | None = None
        self.losses: dict[str, Tensor] = {}
        self.microbatches = 0
        self.dropped: Tensor | None = None
        # Each counter has its own scale until `RouterLosses` makes all counters of a model share one.
        self.scale = LossScale()
        self._so_far: Tensor | None = (
            None  # routed tokens of each expert, and tokens, of all ranks in this step, [E + 1]
        )

    def __reduce__(self) -> tuple[type["LoadCounter"], tuple[int, int, LoadBalancing, TokenAxes, Grid]]:
        """Return the arguments of a copy or pickle, which starts without counts."""
        return LoadCounter, (self.num_experts, self.top_k, self.balance, self.axes, self.grid)

    def count(self, ids: Tensor, mask: Tensor | None) -> None:
        """Count the tokens of each expert.

        Args:
            ids: Expert ids of each token, int64 [M, k].
            mask: Mask of the tokens that count, bool [M]; None counts all.
        """
        flat = ids.flatten()
        if mask is None and flat.device.type == "cpu":
            # On an accelerator, `bincount` would synchronize with the host to learn the largest id.
            counts = torch.bincount(flat, minlength=self.num_experts)
        else:
            ones = torch.ones_like(ids) if mask is None else mask.to(ids.dtype).unsqueeze(-1).expand_as(ids)
            # Masked tokens add 0, so the shapes do not depend on the mask and the device need not be read.
            counts = ids.new_zeros(self.num_experts).scatter_add_(0, flat, ones.flatten())
        self.counts = counts if self.counts is None else self.counts + counts

    def end_step(self, counts: Tensor) -> None:
        """End a step.

        Args:
            counts: Tokens of all ranks that each expert got in this step, int64 [E].
        """
        self.latest = counts
        self.total = counts if self.total is None else self.total + counts
        self.counts = self._so_far = None

    def weights(self, tokens: int, mask: Tensor | None, sequences: Tensor | int | None, like: Tensor) -> Tensor:
        """Return the weight of each token in each sequence, [B, M]: 1 if the token belongs to it and counts, else 0.

        B is 1 unless the scope is "sequence".

        Args:
            tokens: Number of tokens, M.
            mask: Mask of the tokens that count, bool [M]; None counts all.
            sequences: Number of sequences, if they are consecutive and equally long; or bool [B, M], True where token m
                belongs to sequence b.
            like: Tensor that determines dtype and device of the result.

        Raises:
            ValueError: The scope is "sequence", and `sequences` is missing or does not divide the tokens.
        """
        weights: Tensor
        if self.balance.aux_loss_coef == 0.0 or self.balance.scope != "sequence":
            weights = like.new_ones(1, tokens)
        elif sequences is None:
            raise ValueError(
                "scope='sequence': tokens [M, h] have no sequence boundaries; pass activations [B, S, h] to the layer, "
                "pass `sequences` to the router, or use LoadBalancing(scope='microbatch')"
            )
        elif isinstance(sequences, Tensor):
            if sequences.dim() != 2 or sequences.shape[1] != tokens:
                raise ValueError(
                    f"sequences has shape {list(sequences.shape)}: there are {tokens} tokens; pass bool [B, {tokens}]"
                )
            weights = sequences.to(like.dtype)
        else:
            if sequences < 1 or tokens % sequences:
                raise ValueError(
                    f"sequences={sequences}: {tokens} tokens do not divide into sequences of equal length; pass bool "
                    f"[B, {tokens}]"
                )
            # Equal lengths mean that token t belongs to sequence t // length; the comparison makes the rows of a
            # one-hot matrix.
            numbers = torch.arange(sequences, device=like.device)
            weights = (numbers.repeat_interleave(tokens // sequences) == numbers.unsqueeze(-1)).to(like.dtype)
        return weights if mask is None else weights * mask.to(like.dtype)

    @torch.no_grad()
    def measure(self, ids: Tensor, scores: Tensor, logits: Tensor, weights: Tensor) -> ExpertLoad:
        """Measure the load of each expert and record the losses.

        This is a collective over the ranks that hold parts of the same sequences, and over all ranks with different
        tokens if the scope is "step".

        Args:
            ids: Expert ids of each token, int64 [M, k].
            scores: Normalized scores of each token, [M, E].
            logits: Logits of each token, [M, E].
            weights: Weight of each token in each sequence, [B, M].
        """
        sequences, experts = len(weights), self.num_experts
        if self.balance.aux_loss_coef and self.balance.scope == "sequence":
            self._check_sequences(sequences, ids.device)
        # Sequences and experts form one flat index, so one scatter counts all of them.
        places = torch.arange(sequences, device=ids.device).view(-1, 1, 1) * experts + ids  # [B, M, k]
        chosen = weights.new_zeros(sequences * experts)
        chosen.scatter_add_(0, places.flatten(), weights.unsqueeze(-1).expand_as(places).flatten())
        has_z = self.balance.z_loss_coef > 0.0
        square = (weights @ logits.logsumexp(-1).square()).sum(0, True) if has_z else weights.new_zeros(1)
        # All sums travel in one fp64 all-reduce per group: token counts stay exact integers, and one launch is cheaper
        # than four. It needs no backward: f is a constant of the loss, and each rank adds its own part of P.
        flat = torch.cat([chosen, (weights @ scores).flatten(), weights.sum(1), square]).double()
        for axes in (self.axes.context, self.axes.partial):
            self._sum_(flat, axes)
        chosen, means, counted, square = flat.split([sequences * experts, sequences * experts, sequences, 1])
        chosen, means, of_tokens = chosen.view(sequences, experts), means.view(sequences, experts), counted
        if self.balance.aux_loss_coef and self.balance.scope == "step":
            so_far = torch.cat([chosen.flatten(), counted])
            # One all-reduce per axis, because the product of these axes need not have a process group.
            for axis in self.axes.replicas:
                self._sum_(so_far, (axis,))
            self._so_far = so_far if self._so_far is None else self._so_far + so_far
            chosen, of_tokens = self._so_far[:-1].unsqueeze(0), self._so_far[-1:]
        # If no token counts, every numerator is zero, so a denominator of 1 gives zero instead of NaN.
        fractions = chosen * (experts / self.top_k) / of_tokens.clamp(min=1.0).unsqueeze(-1)
        # Losses for metrics only; the loss that has a gradient is computed by `loss` from this rank's tokens.
        losses = {
            "aux": self.balance.aux_loss_coef * ((fractions * means).sum(1) / counted.clamp(min=1.0)).mean(),
            "z": self.balance.z_loss_coef * square.squeeze() / counted.sum().clamp(min=1.0),
        }
        for name, coefficient in (("aux", self.balance.aux_loss_coef), ("z", self.balance.z_loss_coef)):
            if coefficient:
                before = self.losses.get(name)
                self.losses[name] = losses[name] if before is None else before + losses[name]
        self.microbatches += 1
        return ExpertLoad(fractions.to(scores.dtype), counted.to(scores.dtype))

    def loss(self, scores: Tensor, logits: Tensor, weights: Tensor, load: ExpertLoad) -> Tensor:
        """Return the loss of this rank's tokens; gradient reduction over the ranks gives the full loss.

        Args:
            scores: Normalized scores of each token, [M, E].
            logits: Logits of each token, [M, E].
            weights: Weight of each token in each sequence, [B, M].
            load: Load of each expert.
        """
        total = scores.new_zeros(())
        if self.balance.aux_loss_coef:
            means = (weights / load.tokens.clamp(min=1.0).unsqueeze(-1)) @ scores  # this rank's part of P, [B, E]
            # Only P carries a gradient; f is a count, which has none.
            total = total + self.balance.aux_loss_coef * (load.fractions * means).sum(1).mean()
        if self.balance.z_loss_coef:
            of_token = weights.sum(0) / load.tokens.sum().clamp(min=1.0)
            total = total + self.balance.z_loss_coef * (of_token * logits.logsumexp(-1).square()).sum()
        # Each rank has only its part of the loss, but data parallelism averages gradients over the context ranks.
        return total * self.grid.size(self.axes.context)

    def _check_sequences(self, number: int, device: torch.device) -> None:
        """Raise ValueError on all ranks of a context group unless each holds parts of the same number of sequences."""
        larger = self.grid.larger(self.axes.context)
        # Only on the CPU: gloo aborts the process when sizes differ, and reading one number costs little there.
        if not larger or device.type != "cpu":
            return
        ends = torch.tensor([number, -number], device="cpu")
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.grid.group(larger))
        most, fewest = ends[0].item(), -ends[1].item()
        if most != fewest:
            raise ValueError(
                f"ranks of {' and '.join(map(repr, larger))} hold parts of {fewest} to {most} sequences, which must be "
                "the same number; split one batch over them with Context.cut"
            )

    def _sum_(self, flat: Tensor, axes: Axes) -> None:
        larger = self.grid.larger(axes)
        if larger:
            dist.all_reduce(flat, group=self.grid.group(larger))


def attach(y: Tensor, loss: Tensor, counter: LoadCounter | None = None) -> Tensor:
    """Return `y` unchanged, and differentiate `loss` in its backward, as if `loss` were a summand of the main loss.

    Args:
        y: Activation that the main loss depends on.
        loss: Loss, one element.
        counter: Counter whose `scale` is the factor of the main loss, read in backward; None for a factor of 1.
    """
    attached: Tensor = _Attach.apply(y, loss, counter)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    """Identity on y; in backward the gradient of the loss is the scale."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, counter: LoadCounter | None) -> Tensor:
        ctx.counter, ctx.like = counter, (loss.dtype, loss.device, loss.shape)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device, shape = ctx.like
        value = None if ctx.counter is None else ctx.counter.scale.value
        # The main loss has no scale factor, so the added loss counts fully.
        if value is None:
            return gradient, torch.ones(shape, dtype=dtype, device=device), None
        return gradient, value.to(device, dtype).expand(shape), None
