"""The loss of balance that a model of transformers adds to its own, of the tokens of all ranks together."""

import inspect
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups

from ...experts.balance import LoadBalancing
from ...experts.router import Router

M = TypeVar("M", bound=nn.Module)

_AXES = ("data", "sequence", "expert")


def sync_aux_loss_(model: M, groups: ProcessGroups | dist.ProcessGroup) -> M:
    """Make a Transformers model compute its load-balancing loss over the tokens of all ranks, in place.

    With `output_router_logits`, such a model adds E * sum(f * P) to its loss in training: f is the fraction of tokens
    routed to an expert, and P the mean of its scores, over the tokens of all layers in one forward. Each rank computes
    f and P of its own tokens only, and the mean of products is not the product of means. After this call f is the
    fraction over all ranks, by an all-reduce of E + 1 numbers per forward, and P stays the rank's own. The mean over
    ranks, weighted by their tokens, then equals the loss of one device with all tokens in one forward, and so does its
    gradient. In training every rank must run the same number of forwards. In evaluation the loss counts only a rank's
    own tokens.

    Args:
        model: Language model of Hugging Face Transformers with routers, sharded or not, before or after peft adds
            adapters.
        groups: Live groups, whose data, sequence and expert ranks see different tokens; or the group of such ranks.

    Returns:
        The model.

    Raises:
        TypeError: The model adds no load-balancing loss, or the loss is not supported.

    Example:
        model = sync_aux_loss_(MixtralForCausalLM(config), strategy.groups)
    """
    found = [module for module in model.modules() if _factor_of(module) is not None]
    numbers = ("num_experts", "num_experts_per_tok")
    if len(found) != 1 or not all(isinstance(vars(found[0]).get(name), int) for name in numbers):
        who = ", ".join(type(module).__name__ for module in found) or type(model).__name__
        raise TypeError(
            f"{who} does not say, as one language model of transformers with routers does, by router_aux_loss_coef, "
            "num_experts and num_experts_per_tok what loss of balance it adds; for routers of your own use "
            "Router(balance=LoadBalancing(..., scope='step'))"
        )
    owners = [getattr(hook, "__self__", None) for hook in found[0]._forward_hooks.values()]
    if not any(isinstance(owner, _GlobalAuxLoss) for owner in owners):
        found[0].register_forward_hook(_GlobalAuxLoss(found[0], groups).after, with_kwargs=True)
    return model


class _GlobalAuxLoss:
    """Hook that replaces a rank's load-balancing loss by the loss of its tokens with the fractions of all ranks.

    Args:
        model: Model.
        groups: Live groups, or one group.
    """

    def __init__(self, model: nn.Module, groups: ProcessGroups | dist.ProcessGroup) -> None:
        names = [name for name in inspect.signature(inspect.unwrap(type(model).forward)).parameters if name != "self"]
        self.mask_at = names.index("attention_mask")
        self.groups = [groups]
        if isinstance(groups, ProcessGroups):
            # Tensor ranks hold the same tokens, which must not count twice.
            self.groups = [groups[axis] for axis in _AXES if groups.size(axis) > 1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: copies of a model run on the same ranks."""
        return self

    def after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Return the outputs with this loss, and with the model's loss adjusted to it.

        Raises:
            ValueError: They have no names.
        """
        if not module.training or not self.groups:
            return outputs
        if isinstance(outputs, tuple):
            raise ValueError(f"{type(module).__name__} was called with return_dict=False; sync_aux_loss_ needs True")
        own, logits = outputs.aux_loss, outputs.router_logits
        if not isinstance(own, Tensor):
            return outputs
        mask = kwargs.get("attention_mask", args[self.mask_at] if len(args) > self.mask_at else None)
        outputs.aux_loss = self._balance(logits, module.num_experts, module.num_experts_per_tok, mask).to(own)
        if outputs.loss is not None:
            # The model has added its own term already.
            outputs.loss = outputs.loss + _factor_of(module) * (outputs.aux_loss - own).to(outputs.loss.device)
        return outputs

    def _balance(self, layers: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None) -> Tensor:
        """Compute E * sum(f * P) as transformers does, with f over all ranks.

        Args:
            layers: The logits of each layer's router, [M, E].
            experts: Number of experts, E.
            top_k: Number of experts that a token goes to.
            mask: 0 where a token is padding, and does not count, [B, S]; None: all count.
        """
        counted = layers[0].new_ones(len(layers[0])) if mask is None else mask.reshape(-1).to(layers[0])
        counted = counted.to(torch.promote_types(counted.dtype, torch.float32))
        # float64 counts tokens exactly; float32 does so only up to 2^24.
        chosen = counted.new_zeros(experts, dtype=torch.float64)
        scores = counted.new_zeros(experts)
        for logits in layers:
            of_tokens = logits.softmax(-1)
            ids = of_tokens.detach().topk(top_k, -1).indices.flatten()
            chosen.scatter_add_(0, ids, counted.double().repeat_interleave(top_k))
            scores = scores + counted @ of_tokens.to(counted)
        tokens = counted.sum() * len(layers)
        everywhere = torch.cat([chosen, tokens.double().reshape(1)])
        for group in self.groups:
            dist.all_reduce(everywhere, group=group)
        shares = everywhere[:-1] / everywhere[-1].clamp(min=1.0)
        return experts * (shares.to(scores) * scores).sum() / tokens.clamp(min=1.0)


def losses_over_ranks(model: nn.Module) -> list[str]:
    """Return the names of modules with a load-balancing loss of tokens of all ranks, or of earlier microbatches.

    Args:
        model: Any module.
    """
    found = []
    for name, module in model.named_modules():
        owners = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
        balance = module.balance if isinstance(module, Router) else LoadBalancing()
        of_step = balance.aux_loss_coef > 0.0 and balance.scope == "step"
        if of_step or any(isinstance(owner, _GlobalAuxLoss) for owner in owners):
            found.append(name)
    return found


def _factor_of(module: nn.Module) -> float | None:
    """Return the coefficient of a model's load-balancing loss; None for a module without one, such as an adapter."""
    names = ("router_aux_loss_coef", "aux_loss_coef")
    return next((vars(module)[name] for name in names if name in vars(module)), None)
