"""The router of a mixture of experts: it scores all experts for each token, and chooses a few."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .._torch_private import is_any_autocast_enabled
from ..layers.dropout import draw_key
from ..layers.parallel_layer import ParallelLayer
from ..layers.parameter import Init, Rows, make_parameter, uniform
from ..modes.grid import Grid
from .balance import LoadBalancing, Shares, Tally, TokenAxes, attach
from .replay import Choice, Replay, in_backward, may_run_again, narrow
from .selection import check_choice, select_experts


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Args:
        ids: The experts of each token, best first, int64 [M, k]. Where scores are NaN, the number of experts, which is
            out of range: a Dispatch raises on all ranks that it connects, without a look of its own at the device.
        gates: What their outputs are multiplied by, fp32 [M, k] (fp64 for fp64 activations).
        scores: The scores of all experts, [M, E], in the dtype of the gates.
        logits: What the scores were made of, [M, E].
        priorities: By what rows compete for the slots of a capacity, [M, k]: the gates, without gradient; in a
            recompute those of its forward.
    """

    ids: Tensor
    gates: Tensor
    scores: Tensor
    logits: Tensor
    priorities: Tensor


class Router(ParallelLayer):
    """Scores all experts for each token, and chooses a few. Its weight is the same on all ranks.

    Logits and scores are computed in fp32 outside autocast, whatever the dtype of the weight; in fp64 for fp64
    activations. Losses of balance hang on the gates: whoever uses these has them in backward.

    Args:
        hidden: Features of a token.
        experts: Number of experts.
        top_k: Number of experts that a token goes to.
        score: How logits become scores, "softmax" over all experts or "sigmoid" of each.
        normalise: Whether the gates of a token are divided by their sum.
        scale: What gates are multiplied by in the end.
        group_limit: (groups, kept): a token may go to experts of the `kept` best groups alone.
        bias: Whether logits have a bias.
        choice_bias: Whether there is a bias of the choice, the buffer `e_score_correction_bias`: it decides who is
            chosen, and is no part of the gates. It stays in fp32, whatever the model is cast to.
        balance: What keeps the experts equally busy.
        grid: This rank's place. With it, parameters wait on the meta device for `initialize`; None: they are filled
            now, by torch's generator, and say nothing of ranks.
        tokens: The axes whose ranks give it other tokens.
        init: How the weight is filled; default: uniform in +-1/sqrt(hidden).

    Raises:
        ValueError: A number that makes no sense, or a rate for a bias that there is not.

    Example:
        routing = Router(64, experts=8, top_k=2)(torch.randn(10, 64))
    """

    e_score_correction_bias: Tensor | None
    weight: nn.Parameter
    bias: nn.Parameter | None

    name: str = ""
    """Its name in the model, for errors; whoever goes through the model's modules first says it."""

    par_keep_dtype = ("e_score_correction_bias",)
    """Names of buffers that casts of a model leave alone: in bf16 a bias would lose steps of 1e-3."""

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        group_limit: tuple[int, int] | None = None,
        bias: bool = False,
        choice_bias: bool = False,
        balance: LoadBalancing | None = None,
        grid: Grid | None = None,
        tokens: TokenAxes | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        check_choice(experts, top_k, group_limit)
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score is {score!r}; logits become scores by 'softmax' or 'sigmoid'")
        self.balance = LoadBalancing() if balance is None else balance
        if self.balance.bias_rate and not choice_bias:
            raise ValueError(f"bias_rate is {self.balance.bias_rate}, but there is no bias; give choice_bias=True")
        self.hidden, self.experts, self.top_k, self.group_limit = hidden, experts, top_k, group_limit
        self.score, self.normalise, self.scale = score, normalise, scale
        tokens = TokenAxes() if tokens is None else tokens
        self.tally = Tally(experts, top_k, self.balance, tokens, Grid(None) if grid is None else grid)
        self.replay = Replay()
        fill = uniform(1 / math.sqrt(hidden)) if init is None else init
        if grid is None:
            self.records = ()
            self.weight = nn.Parameter(torch.empty(experts, hidden))
            self.bias = nn.Parameter(torch.zeros(experts)) if bias else None
            if not self.weight.is_meta:
                with torch.no_grad():
                    fill(self.weight, torch.Generator(self.weight.device).manual_seed(int(draw_key()) >> 1))
        else:
            rows, partial = [Rows(length=experts)], tokens.partial
            self.weight = make_parameter(rows, [(hidden, ())], grid, fill, partial)
            self.bias = make_parameter(rows, [], grid, uniform(1 / math.sqrt(hidden)), partial) if bias else None
        zeros = torch.zeros(experts, dtype=torch.float32, device="cpu") if choice_bias else None
        self.register_buffer("e_score_correction_bias", zeros)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, sequences: Tensor | int | None = None) -> Routing:
        """Chooses experts for tokens.

        Args:
            x: Activations [M, hidden].
            mask: False where a token is padding: it is routed like the others, but counts in no balance, bool [M].
            sequences: For balance over a sequence: their number, all of equal length and one after another; or one row
                for each, with True where a token is of it, bool [B, M].

        Raises:
            ValueError: An activation or mask of another shape, or nobody says which tokens are a sequence.
        """
        if x.dim() != 2 or x.shape[-1] != self.hidden:
            raise ValueError(
                f"a router of {self.hidden} features was given {list(x.shape)}; give tokens [M, {self.hidden}]"
            )
        if mask is not None and mask.shape != x.shape[:1]:
            raise ValueError(f"the mask is {list(mask.shape)}, but there are {len(x)} tokens; give one value for each")
        with _without_autocast(x.device.type):
            logits = _logits(x, self.weight, self.bias)
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            drawn = draw_key() if self.training and not torch.compiler.is_compiling() else None
            key = int(drawn) if drawn is not None and has_numbers(drawn) else None
            choice = self.replay.take(key) if key is not None and in_backward() else None
            if choice is None:
                bias = self.e_score_correction_bias
                ids = select_experts(scores, self.top_k, bias=bias, group_limit=self.group_limit)
            else:
                ids = choice.ids.long()
            gates = scores.gather(1, ids)
            if self.normalise:
                gates = gates / self._total(gates)
            if self.scale != 1.0:
                gates = gates * self.scale
            priorities = gates.detach() if choice is None or choice.gates is None else choice.gates
            if self.training:
                gates = self._balanced(Routing(ids, gates, scores, logits, priorities), mask, sequences, key, choice)
            ids = ids.masked_fill(gates.detach().isnan(), self.experts)
        return Routing(ids, gates, scores, logits, priorities)

    @property
    def title(self) -> str:
        """What an error calls it."""
        return f"router {self.name!r}" if self.name else f"a router of {self.experts} experts"

    def count_dropped(self, rows: Tensor) -> None:
        """Takes down how many rows of these tokens exceeded an expert's capacity; only in first forwards of training.

        Args:
            rows: Their number, an integer tensor of one element.
        """
        if self.training and not in_backward():
            self.tally.dropped = rows.detach() if self.tally.dropped is None else self.tally.dropped + rows.detach()

    def extra_repr(self) -> str:
        """Sizes, and how it chooses."""
        groups = "" if self.group_limit is None else f", group_limit={self.group_limit}"
        return f"hidden={self.hidden}, experts={self.experts}, top_k={self.top_k}, score={self.score!r}{groups}"

    def _total(self, scores: Tensor) -> Tensor:
        """What scores of a token are divided by, so that they add up to 1; no sum of sigmoids is 0."""
        total = scores.sum(-1, keepdim=True)
        return total if self.score == "softmax" else total + _TINY

    def _balanced(
        self,
        routing: Routing,
        mask: Tensor | None,
        sequences: Tensor | int | None,
        key: int | None,
        again: Choice | None,
    ) -> Tensor:
        """The gates, with the losses on them. A first forward also counts, and keeps its choice for a recompute.

        Args:
            routing: What was chosen.
            mask: Whether each token counts.
            sequences: Which tokens are a sequence.
            key: What the forward has drawn; None under torch.compile, and on tensors without numbers.
            again: What its first forward has decided, if this is a recompute.
        """
        choice = Choice(routing.ids, routing.priorities) if again is None else again
        is_real = has_numbers(routing.ids)
        first = again is None and is_real and not in_backward()
        if first:
            self.tally.count(routing.ids, mask)
        gates = routing.gates
        if self.balance.has_loss:
            scores, logits = routing.scores, routing.logits
            if self.score == "sigmoid":
                scores = scores / self._total(scores)
            weights = self.tally.weights(len(gates), mask, sequences, scores)
            if choice.shares is None and is_real:
                choice.shares = self.tally.shares(routing.ids, scores, logits, weights)
            elif choice.shares is None:
                choice.shares = Shares(weights.new_empty(len(weights), self.experts), weights.new_empty(len(weights)))
            gates = attach(gates, self.tally.loss(scores, logits, weights, choice.shares), self.tally)
        if first and key is not None and may_run_again():
            choice.ids = narrow(choice.ids, self.experts)
            self.replay.keep(key, choice, routing.scores)
        return gates

    # Copies and conversions

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to` and the like call: the bias of the choice moves, and keeps its dtype."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.e_score_correction_bias = before.to(after.device)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        loaded = self.e_score_correction_bias
        if loaded is not None and loaded.dtype != torch.float32:  # with assign=True
            self.e_score_correction_bias = loaded.float()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that has seen no tokens."""
        made = super().__deepcopy__(memo)
        made.tally, made.replay = copy(self.tally), Replay()
        return made


_TINY = 1e-20
"""Added to sums of sigmoids, which may all be 0, as DeepSeek-V3 does."""


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor has elements; fake ones and those of the meta device, on which models are measured, do not."""
    return type(x) is Tensor and not x.is_meta


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context without autocast; entering one costs microseconds, so there is none where it is off anyway."""
    return torch.autocast(device_type, enabled=False) if is_any_autocast_enabled() else nullcontext()


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product x @ weight.T + bias, in fp32 at least."""
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return functional.linear(x, weight, bias)
    logits: Tensor = _Logits.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return logits


class _Logits(torch.autograd.Function):
    """x @ weight.T + bias in fp32 at least; saved are x and the weight in their own dtypes, as others save them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        with _without_autocast(x.device.type):
            of_x = (gradient @ weight.to(gradient.dtype)).to(x.dtype) if need_x else None
            of_weight = (gradient.T @ x.to(gradient.dtype)).to(weight.dtype) if need_weight else None
            of_bias = gradient.sum(0).to(ctx.bias_dtype) if need_bias else None
        return of_x, of_weight, of_bias
