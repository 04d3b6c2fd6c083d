"""What keeps experts equally busy: losses of balance, a bias of the choice, and the counts that both need.

Losses join a model's loss by `attach`: an identity whose backward gives them the gradient that the main loss was given,
`LossScale`. Counts grow in first forwards of training alone: not in evaluation, not where a checkpoint runs a
forward again, and not for masked tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..modes.grid import Axes, Grid

_OVER = ("sequence", "microbatch", "step")


@dataclass(frozen=True)
class LoadBalancing:
    """How a mixture of experts is kept in balance.

    Args:
        aux: Coefficient of the loss of balance, the sum over experts of f * P: f is the share of choices that fell on
            an expert, times the number of experts, and P the mean of its scores, which add up to 1.
        over: The tokens whose shares count together: those of one "sequence" (as in DeepSeek-V3), of a "microbatch" (as
            in Switch Transformers), or of all ranks' microbatches of this "step" so far.
        z: Coefficient of the mean of logsumexp(logits)**2, which keeps logits small.
        bias_rate: What `update_correction_bias_` adds to, or takes from, an expert's bias of the choice each step.

    Raises:
        ValueError: A number below 0, or tokens of another kind.
    """

    aux: float = 0.0
    over: str = "sequence"
    z: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("aux", self.aux), ("z", self.z), ("bias_rate", self.bias_rate)):
            if not value >= 0.0:
                raise ValueError(f"{name} is {value}; give 0, which is none, or a positive number")
        if self.over not in _OVER:
            raise ValueError(f"over is {self.over!r}; balance is over one 'sequence', a 'microbatch' or a 'step'")

    @property
    def has_loss(self) -> bool:
        """Whether anything is added to the loss."""
        return self.aux > 0.0 or self.z > 0.0


@dataclass(frozen=True, kw_only=True)
class TokenAxes:
    """The axes whose ranks give a router other tokens.

    Args:
        context: Those over which sequences are cut, and over which gradients are averaged.
        partial: Those over which tokens are cut within a tensor group, and over which gradients are summed.
        replicas: Those whose ranks have other sequences; gradients are averaged over them.
    """

    context: Axes = ()
    partial: Axes = ()
    replicas: Axes = ()


class LossScale:
    """What the main loss of a model is multiplied by, for the losses of its routers."""

    def __init__(self) -> None:
        self.value: Tensor | None = None


@dataclass(frozen=True)
class Shares:
    """How busy experts were, as a loss of balance counts it.

    Args:
        of_choices: f, [B, E]: 1 for every expert in perfect balance.
        tokens: Number of tokens of each of these sequences, on all ranks that have parts of it, [B].
    """

    of_choices: Tensor
    tokens: Tensor


class Tally:
    """What one router has seen since the step began, and what follows for its loss.

    Args:
        experts: Number of experts, E.
        top_k: Number of experts that a token goes to, k.
        balance: How balance is kept.
        tokens: The axes whose ranks give the router other tokens.
        grid: This rank's place.

    Attributes:
        counts: Tokens of this rank for each expert since the step began, int64 [E]; None before the first.
        latest: Those of all ranks in the step that ended last.
        load: Those of all ranks in the steps that have ended since they were last asked for.
        losses: What was added to the loss, by name: the sum over microbatches.
        microbatches: The number of first forwards that these are of.
        dropped: Rows of this rank beyond an expert's capacity; None if nobody counts them.
        scale: What the main loss is multiplied by; all routers of a model have the same.
    """

    def __init__(self, experts: int, top_k: int, balance: LoadBalancing, tokens: TokenAxes, grid: Grid) -> None:
        self.experts, self.top_k, self.balance, self.tokens, self.grid = experts, top_k, balance, tokens, grid
        self.counts: Tensor | None = None
        self.latest: Tensor | None = None
        self.load: Tensor | None = None
        self.losses: dict[str, Tensor] = {}
        self.microbatches = 0
        self.dropped: Tensor | None = None
        self.scale = LossScale()
        self._so_far: Tensor | None = None  # choices and tokens of all ranks in this step, [E + 1]

    def __reduce__(self) -> tuple[type["Tally"], tuple[int, int, LoadBalancing, TokenAxes, Grid]]:
        """What copies and pickles are made of: they have seen nothing."""
        return Tally, (self.experts, self.top_k, self.balance, self.tokens, self.grid)

    def count(self, ids: Tensor, mask: Tensor | None) -> None:
        """Counts the tokens of each expert.

        Args:
            ids: The experts of each token, int64 [M, k].
            mask: Whether each token counts, bool [M]; None: all do.
        """
        flat = ids.flatten()
        if mask is None and flat.device.type == "cpu":
            counts = torch.bincount(flat, minlength=self.experts)  # elsewhere it waits for the device
        else:
            ones = torch.ones_like(ids) if mask is None else mask.to(ids.dtype).unsqueeze(-1).expand_as(ids)
            counts = ids.new_zeros(self.experts).scatter_add_(0, flat, ones.flatten())
        self.counts = counts if self.counts is None else self.counts + counts

    def end_step(self, counts: Tensor) -> None:
        """Ends the step, in which so many tokens of all ranks went to each expert, int64 [E]."""
        self.latest = counts
        self.load = counts if self.load is None else self.load + counts
        self.counts = self._so_far = None

    def weights(self, tokens: int, mask: Tensor | None, sequences: Tensor | int | None, like: Tensor) -> Tensor:
        """Which tokens count together: 1 where a token is of a sequence and counts, else 0, [B, M].

        B is 1 unless balance is over sequences.

        Args:
            tokens: Number of tokens, M.
            mask: Whether each counts, bool [M]; None: all do.
            sequences: The number of sequences, of equal length and one after another; or one row for each, with True
                where a token is of it, [B, M].
            like: A tensor of the dtype and on the device in which is counted.

        Raises:
            ValueError: Balance is over sequences, and nobody says which; or they do not divide.
        """
        weights: Tensor
        if self.balance.aux == 0.0 or self.balance.over != "sequence":
            weights = like.new_ones(1, tokens)
        elif sequences is None:
            raise ValueError(
                "balance is over a 'sequence', but tokens [M, h] do not say where one begins; give activations "
                "[B, S, h] to the layer, or `sequences` to the router, or use LoadBalancing(over='microbatch')"
            )
        elif isinstance(sequences, Tensor):
            if sequences.dim() != 2 or sequences.shape[1] != tokens:
                raise ValueError(
                    f"sequences is {list(sequences.shape)}, but there are {tokens} tokens; give [B, {tokens}], with "
                    "True where a token is of a sequence"
                )
            weights = sequences.to(like.dtype)
        else:
            if sequences < 1 or tokens % sequences:
                raise ValueError(f"{tokens} tokens do not divide into {sequences} sequences of equal length")
            numbers = torch.arange(sequences, device=like.device)
            weights = (numbers.repeat_interleave(tokens // sequences) == numbers.unsqueeze(-1)).to(like.dtype)
        return weights if mask is None else weights * mask.to(like.dtype)

    @torch.no_grad()
    def shares(self, ids: Tensor, scores: Tensor, logits: Tensor, weights: Tensor) -> Shares:
        """How busy each expert was, over all ranks that have parts of these sequences; takes down what the losses are.

        Collective where sequences are cut, and over a step.

        Args:
            ids: The experts of each token, int64 [M, k].
            scores: The scores of each token, which add up to 1, [M, E].
            logits: What they were made of, [M, E].
            weights: Which tokens count together, [B, M].
        """
        sequences, experts = len(weights), self.experts
        if self.balance.aux and self.balance.over == "sequence":
            self._check_sequences(sequences, ids.device)
        places = torch.arange(sequences, device=ids.device).view(-1, 1, 1) * experts + ids  # [B, M, k]
        chosen = weights.new_zeros(sequences * experts)
        chosen.scatter_add_(0, places.flatten(), weights.unsqueeze(-1).expand_as(places).flatten())
        square = (weights @ logits.logsumexp(-1).square()).sum(0, True) if self.balance.z else weights.new_zeros(1)
        flat = torch.cat([chosen, (weights @ scores).flatten(), weights.sum(1), square]).double()
        for axes in (self.tokens.context, self.tokens.partial):
            self._sum_(flat, axes)
        chosen, means, counted, square = flat.split([sequences * experts, sequences * experts, sequences, 1])
        chosen, means, of_tokens = chosen.view(sequences, experts), means.view(sequences, experts), counted
        if self.balance.aux and self.balance.over == "step":
            so_far = torch.cat([chosen.flatten(), counted])
            for axis in self.tokens.replicas:  # whose product need not have a group of its own
                self._sum_(so_far, (axis,))
            self._so_far = so_far if self._so_far is None else self._so_far + so_far
            chosen, of_tokens = self._so_far[:-1].unsqueeze(0), self._so_far[-1:]
        # Where no token counts, everything that is divided by their number is 0.
        shares = chosen * (experts / self.top_k) / of_tokens.clamp(min=1.0).unsqueeze(-1)
        losses = {
            "aux": self.balance.aux * ((shares * means).sum(1) / counted.clamp(min=1.0)).mean(),
            "z": self.balance.z * square.squeeze() / counted.sum().clamp(min=1.0),
        }
        for name, coefficient in (("aux", self.balance.aux), ("z", self.balance.z)):
            if coefficient:
                before = self.losses.get(name)
                self.losses[name] = losses[name] if before is None else before + losses[name]
        self.microbatches += 1
        return Shares(shares.to(scores.dtype), counted.to(scores.dtype))

    def loss(self, scores: Tensor, logits: Tensor, weights: Tensor, shares: Shares) -> Tensor:
        """What this rank's tokens add to the loss: the whole loss, after the sums and means over ranks of gradients.

        Args:
            scores: The scores of each token, which add up to 1, [M, E].
            logits: What they were made of, [M, E].
            weights: Which tokens count together, [B, M].
            shares: How busy each expert was.
        """
        total = scores.new_zeros(())
        if self.balance.aux:
            means = (weights / shares.tokens.clamp(min=1.0).unsqueeze(-1)) @ scores  # this rank's part of P, [B, E]
            total = total + self.balance.aux * (shares.of_choices * means).sum(1).mean()
        if self.balance.z:
            of_token = weights.sum(0) / shares.tokens.sum().clamp(min=1.0)
            total = total + self.balance.z * (of_token * logits.logsumexp(-1).square()).sum()
        return total * self.grid.size(self.tokens.context)  # over which gradients are averaged

    def _check_sequences(self, number: int, device: torch.device) -> None:
        """Raises ValueError on all ranks that have parts of the same sequences unless these are as many on each.

        Only on the CPU, where a look costs little and sums of other sizes end the process.
        """
        larger = self.grid.larger(self.tokens.context)
        if not larger or device.type != "cpu":
            return
        ends = torch.tensor([number, -number], device="cpu")
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.grid.group(larger))
        most, fewest = ends[0].item(), -ends[1].item()
        if most != fewest:
            raise ValueError(
                f"ranks of {' and '.join(map(repr, larger))} have parts of {fewest} to {most} sequences; cut one batch "
                "over them, so that each has a part of every sequence"
            )

    def _sum_(self, flat: Tensor, axes: Axes) -> None:
        larger = self.grid.larger(axes)
        if larger:
            dist.all_reduce(flat, group=self.grid.group(larger))


def attach(y: Tensor, loss: Tensor, tally: Tally | None = None) -> Tensor:
    """An identity, whose backward gives a loss its gradient: so it joins the main loss without being returned.

    Args:
        y: An activation that the main loss depends on.
        loss: A loss, of one element.
        tally: Knows what the main loss is multiplied by, and is asked in backward; None: nothing.
    """
    attached: Tensor = _Attach.apply(y, loss, tally)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    """Identity of y; backward: the scale is the loss's gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, tally: Tally | None) -> Tensor:
        ctx.tally, ctx.like = tally, (loss.dtype, loss.device, loss.shape)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device, shape = ctx.like
        value = None if ctx.tally is None else ctx.tally.scale.value
        if value is None:
            return gradient, torch.ones(shape, dtype=dtype, device=device), None
        return gradient, value.to(device, dtype).expand(shape), None
