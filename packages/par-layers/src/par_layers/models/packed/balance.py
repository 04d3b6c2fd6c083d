"""The loss of balance that a model of transformers adds to its own, of the tokens of all ranks together."""

import inspect
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups

M = TypeVar("M", bound=nn.Module)

_AXES = ("data", "sequence", "expert")


def sync_aux_loss_(model: M, groups: ProcessGroups | dist.ProcessGroup) -> M:
    """Makes the loss of balance that a model of transformers adds in training that of all ranks' tokens, in place.

    With `output_router_logits` such a model adds E * sum(f * P) to its loss: f is the share of choices that fell on an
    expert, and P the mean of its scores, over the tokens of all layers of one forward. Each rank knows f and P of its
    own tokens alone, and the mean of those products is not the product of the means. From now on f is that of all
    ranks, by one sum of E + 1 numbers a forward, and P a rank's own; so the mean over ranks, weighed by their tokens,
    is what one device adds that has all tokens in one forward, and so is its gradient. In training every rank must run
    as many forwards as the others; in evaluation the loss stays that of a rank's own tokens.

    Args:
        model: A language model of transformers with routers, cut or not, before or after adapters of peft are put on.
        groups: The live groups: ranks of data, sequence and expert see other tokens. Or the group of such ranks.

    Returns:
        The model.

    Raises:
        TypeError: The model adds no loss of balance, or none that is known.

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
    if not any(isinstance(hook, _GlobalAuxLoss) for hook in map(_owner, found[0]._forward_hooks.values())):
        found[0].register_forward_hook(_GlobalAuxLoss(found[0], groups).after, with_kwargs=True)
    return model


class _GlobalAuxLoss:
    """In the place of a rank's own loss of balance, that of its tokens by the shares of all ranks.

    Args:
        model: The model.
        groups: The live groups, or one of them.
    """

    def __init__(self, model: nn.Module, groups: ProcessGroups | dist.ProcessGroup) -> None:
        names = [name for name in inspect.signature(inspect.unwrap(type(model).forward)).parameters if name != "self"]
        self.mask_at = names.index("attention_mask")
        self.groups = [groups]
        if isinstance(groups, ProcessGroups):
            self.groups = [groups[axis] for axis in _AXES if groups.size(axis) > 1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a model work on the same ranks."""
        return self

    def after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """The outputs, with this loss and what the model's own loss becomes by it.

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
            outputs.loss = outputs.loss + _factor_of(module) * (outputs.aux_loss - own).to(outputs.loss.device)
        return outputs

    def _balance(self, layers: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None) -> Tensor:
        """E * sum(f * P), as transformers computes it, with the f of all ranks.

        Args:
            layers: The logits of each layer's router, [M, E].
            experts: Number of experts, E.
            top_k: Number of experts that a token goes to.
            mask: 0 where a token is padding, and does not count, [B, S]; None: all count.
        """
        counted = layers[0].new_ones(len(layers[0])) if mask is None else mask.reshape(-1).to(layers[0])
        counted = counted.to(torch.promote_types(counted.dtype, torch.float32))
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


def _factor_of(module: nn.Module) -> float | None:
    """What a model multiplies its loss of balance by; None for one that has none itself, as adapters around one."""
    names = ("router_aux_loss_coef", "aux_loss_coef")
    return next((vars(module)[name] for name in names if name in vars(module)), None)


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", None)
