"""The router of a mixture of experts: it scores all experts for each token, and selects a few."""

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
from .balance import ExpertLoad, LoadBalancing, LoadCounter, TokenAxes, attach
from .replay import RoutingReplay, SavedRouting, in_backward, may_run_again, narrow
from .selection import RouterConfig, check_selection, select_experts


@dataclass(frozen=True)
class Routing:
    """Result of a router: the experts of each token and their weights.

    Args:
        ids: Expert ids of each token, best first, int64 [M, k]. A token with NaN scores gets the id E, which is out of
            range, so that `TokenDispatcher.dispatch` raises on every rank without an extra device synchronization.
        gates: Weights of the experts' outputs, fp32 [M, k] (fp64 for fp64 activations).
        scores: Scores of all experts, [M, E], in the dtype of the gates.
        logits: Logits before the scoring function, [M, E].
        priorities: Priorities of the routed tokens for the slots of a capacity, [M, k]: the gates without a gradient.
            A recomputation gets the priorities of its forward.
    """

    ids: Tensor
    gates: Tensor
    scores: Tensor
    logits: Tensor
    priorities: Tensor


class Router(ParallelLayer):
    """Module that scores all experts for each token and selects a few. Its weight is replicated on all ranks.

    It computes logits and scores in fp32 (fp64 for fp64 activations) outside autocast, in whatever dtype the weight is.
    The load-balancing losses are attached to the gates, so backward through the gates includes them.

    Args:
        hidden_size: Features of a token, h.
        num_experts: Number of experts, E.
        top_k: Number of experts per token, k.
        config: Scoring and selection options; default: Mixtral's, `RouterConfig()`.
        balance: Load balancing; default: none.
        grid: Coordinates of this rank. With a grid, parameters stay on the meta device until `initialize` fills them.
            Without one, torch's generator fills them now, and they have no sharding metadata.
        token_axes: Axes whose ranks pass different tokens to this router; default: none.
        init: Init rule of the weight; default: uniform in +-1/sqrt(hidden_size).

    Raises:
        ValueError: The numbers do not fit together, or `balance` updates a correction bias that `config` does not have.

    Example:
        routing = Router(64, num_experts=8, top_k=2)(torch.randn(10, 64))
    """

    e_score_correction_bias: Tensor | None
    weight: nn.Parameter
    bias: nn.Parameter | None

    name: str = ""
    """Name in the model, for error messages. `initialize` and `RouterLosses` set it."""

    par_keep_dtype = ("e_score_correction_bias",)
    """Names of buffers that keep their dtype when a model is cast. A bf16 bias would lose updates of 1e-3."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        config: RouterConfig | None = None,
        balance: LoadBalancing | None = None,
        grid: Grid | None = None,
        token_axes: TokenAxes | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        self.config = RouterConfig() if config is None else config
        check_selection(num_experts, top_k, self.config.n_group, self.config.topk_group)
        self.balance = LoadBalancing() if balance is None else balance
        if self.balance.bias_update_rate and not self.config.correction_bias:
            raise ValueError(
                f"bias_update_rate={self.balance.bias_update_rate}: the router has no bias to update; pass "
                "RouterConfig(correction_bias=True)"
            )
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        axes = TokenAxes() if token_axes is None else token_axes
        self.load = LoadCounter(num_experts, top_k, self.balance, axes, Grid(None) if grid is None else grid)
        self.replay = RoutingReplay()
        fill = uniform(1 / math.sqrt(hidden_size)) if init is None else init
        bias = self.config.bias
        if grid is None:
            self.records = ()
            self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
            self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
            if not self.weight.is_meta:
                with torch.no_grad():
                    fill(self.weight, torch.Generator(self.weight.device).manual_seed(int(draw_key()) >> 1))
        else:
            rows, partial = [Rows(length=num_experts)], axes.partial
            self.weight = make_parameter(rows, [(hidden_size, ())], grid, fill, partial)
            self.bias = make_parameter(rows, [], grid, uniform(1 / math.sqrt(hidden_size)), partial) if bias else None
        zeros = torch.zeros(num_experts, dtype=torch.float32, device="cpu") if self.config.correction_bias else None
        self.register_buffer("e_score_correction_bias", zeros)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, sequences: Tensor | int | None = None) -> Routing:
        """Select experts for tokens.

        Args:
            x: Activations, [M, h].
            mask: Mask of the tokens, bool [M], False for padding. Padding is routed, but load balancing does not count
                it. None counts every token.
            sequences: Sequences of the tokens, needed by `LoadBalancing(scope="sequence")`: their number, if they are
                consecutive and equally long; or bool [B, M], True where token m belongs to sequence b.

        Raises:
            ValueError: A shape does not fit, or `sequences` is missing.
        """
        if x.dim() != 2 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {list(x.shape)}: this router needs tokens; pass [M, {self.hidden_size}]")
        if mask is not None and mask.shape != x.shape[:1]:
            raise ValueError(f"mask has shape {list(mask.shape)}: x has {len(x)} tokens; pass [{len(x)}]")
        with _without_autocast(x.device.type):
            # torch's own function gives logits in the dtype of its arguments, so it serves only fp32 and fp64.
            is_wide = x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64)
            linear = functional.linear if is_wide else _RouterLogits.apply
            logits: Tensor = linear(x, self.weight, self.bias)
            scores = logits.softmax(-1) if self.config.scoring_func == "softmax" else logits.sigmoid()
            # The key comes from torch's CPU generator, which a checkpoint restores: so a recomputation draws the same
            # key as its forward and finds the ids that the forward selected. Near ties could flip otherwise.
            drawn = draw_key() if self.training and not torch.compiler.is_compiling() else None
            key = int(drawn) if drawn is not None and has_numbers(drawn) else None
            choice = self.replay.take(key) if key is not None and in_backward() else None
            if choice is None:
                ids = select_experts(
                    scores,
                    self.top_k,
                    bias=self.e_score_correction_bias,
                    n_group=self.config.n_group,
                    topk_group=self.config.topk_group,
                )
            else:
                # The ids were stored in a narrow dtype to save memory.
                ids = choice.ids.long()
            gates = scores.gather(1, ids)
            if self.config.norm_topk_prob:
                gates = gates / self._total(gates)
            if self.config.routed_scaling_factor != 1.0:
                gates = gates * self.config.routed_scaling_factor
            priorities = gates.detach() if choice is None or choice.gates is None else choice.gates
            if self.training:
                gates = self._balanced(Routing(ids, gates, scores, logits, priorities), mask, sequences, key, choice)
            # A NaN score would route its token to an arbitrary expert; an id out of range makes every rank raise
            # instead.
            ids = ids.masked_fill(gates.detach().isnan(), self.num_experts)
        return Routing(ids, gates, scores, logits, priorities)

    @property
    def title(self) -> str:
        """Name of the router in error messages."""
        return f"router {self.name!r}" if self.name else f"a router of {self.num_experts} experts"

    def count_dropped(self, rows: Tensor) -> None:
        """Count routed tokens that a capacity dropped. Evaluation and recomputation do not count.

        Args:
            rows: Number of dropped routed tokens, an integer tensor of one element.
        """
        if self.training and not in_backward():
            self.load.dropped = rows.detach() if self.load.dropped is None else self.load.dropped + rows.detach()

    def extra_repr(self) -> str:
        """Return the sizes and options."""
        return f"{self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}, config={self.config}"

    def _total(self, scores: Tensor) -> Tensor:
        """Sum of the scores of each token, which is never zero."""
        total = scores.sum(-1, keepdim=True)
        return total if self.config.scoring_func == "softmax" else total + _TINY

    def _balanced(
        self,
        routing: Routing,
        mask: Tensor | None,
        sequences: Tensor | int | None,
        key: int | None,
        again: SavedRouting | None,
    ) -> Tensor:
        """Return the gates with the losses attached; a first forward also counts and saves its routing.

        Args:
            routing: Result of the router.
            mask: Mask of the tokens that count, or None.
            sequences: Sequences of the tokens, as in `forward`.
            key: Random key of the forward; None under torch.compile and for tensors without data.
            again: Routing that the first forward saved, if this is a recomputation.
        """
        choice = SavedRouting(routing.ids, routing.priorities) if again is None else again
        is_real = has_numbers(routing.ids)
        # A recomputation has counted its tokens in its first run.
        first = again is None and is_real and not in_backward()
        if first:
            self.load.count(routing.ids, mask)
        gates = routing.gates
        if self.balance.has_loss:
            scores, logits = routing.scores, routing.logits
            if self.config.scoring_func == "sigmoid":
                scores = scores / self._total(scores)
            weights = self.load.weights(len(gates), mask, sequences, scores)
            if choice.load is None and is_real:
                choice.load = self.load.measure(routing.ids, scores, logits, weights)
            # Fake tensors only need shapes, and must not reach the all-reduce.
            elif choice.load is None:
                choice.load = ExpertLoad(
                    weights.new_empty(len(weights), self.num_experts), weights.new_empty(len(weights))
                )
            gates = attach(gates, self.load.loss(scores, logits, weights, choice.load), self.load)
        if first and key is not None and may_run_again():
            choice.ids = narrow(choice.ids, self.num_experts)
            self.replay.keep(key, choice, routing.scores)
        return gates

    # Copies and conversions

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a conversion such as `to`; the correction bias changes its device, but keeps its dtype."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        # `model.to(bfloat16)` casts every floating-point buffer; the old values are moved instead.
        if before is not None and after is not None and after.dtype != before.dtype:
            self.e_score_correction_bias = before.to(after.device)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        loaded = self.e_score_correction_bias
        if loaded is not None and loaded.dtype != torch.float32:  # with assign=True
            self.e_score_correction_bias = loaded.float()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the module without its token counts and saved routing."""
        made = super().__deepcopy__(memo)
        made.load, made.replay = copy(self.load), RoutingReplay()
        return made


_TINY = 1e-20
"""Addend of a sum of sigmoids, which may all be zero; DeepSeek-V3 uses the same number."""


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor has data. Fake tensors and meta tensors, which measure models, have none."""
    return type(x) is Tensor and not x.is_meta


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context without autocast; it is empty when autocast is off, since entering one costs microseconds."""
    return torch.autocast(device_type, enabled=False) if is_any_autocast_enabled() else nullcontext()


class _RouterLogits(torch.autograd.Function):
    """x @ weight.T + bias in at least fp32. It saves x and the weight in their own, perhaps smaller, dtypes."""

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
