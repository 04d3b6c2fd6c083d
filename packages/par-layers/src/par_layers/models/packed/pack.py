"""A list of experts, one module each, that becomes one module with the packed weights of all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from par_groups import attributes

from ...modes.grid import Grid
from .forward import DealtForward, deal_
from .look import apply_gate, experts_like


class PackedExperts(nn.Module):
    """Experts with packed weights, as transformers 5 has them; `pack_experts_` makes them of a list.

    The parameters are `gate_up_proj` [E, 2 f, h], gate before up (`up_proj` [E, f, h] without a gate), `down_proj`
    [E, h, f], and perhaps their biases, `gate_up_proj_bias` and `down_proj_bias`. It is called with tokens [M, h], the
    experts of each, int64 [M, k], and their weights [M, k], and gives the weighted sums of outputs, [M, h].
    """

    has_bias: bool
    has_gate: bool
    is_transposed = False
    is_concatenated = True
    has_post_expert_norm = False
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate = apply_gate


def pack_experts_(
    module: nn.Module,
    gate: str | None,
    up: str,
    down: str,
    *,
    activation: Callable[[Tensor], Tensor] = nn.functional.silu,
) -> PackedExperts:
    """Replace a list of experts by one module with packed weights, in place; it can then be partitioned over ranks.

    The list object itself becomes the packed experts, with new parameters, so make the optimizer afterwards. The block
    around the list must call the packed experts with (tokens, ids, weights), see `PackedExperts`, instead of looping
    over the list. An expert computes down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    Args:
        module: nn.ModuleList of experts with equal linears.
        gate: Name of the linear in each expert whose output passes the activation; None: no gate.
        up: Name of the linear that is multiplied with it.
        down: Name of the linear that projects to the hidden size.
        activation: Activation of the gate, a function or a module without parameters. Default: silu.

    Returns:
        The packed experts, the same object as `module`.

    Raises:
        TypeError: The module is not a list of such experts.
        ValueError: Experts differ in shapes, have gradients, or are sharded.

    Example:
        pack_experts_(block.experts, gate="w1", up="w3", down="w2")
        parallelize(model, groups, {"layers.*.experts": "ep_dispatch_experts"})
    """
    if not isinstance(module, nn.ModuleList) or not len(module):
        raise TypeError(f"pack_experts_ is for an nn.ModuleList of experts, and this is a {type(module).__name__}")
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        raise TypeError(f"the activation {type(activation).__name__} has parameters, of which each expert had its own")
    linears = [[_linear(expert, name) for expert in module] for name in (gate, up, down) if name is not None]
    for name, of_experts in zip([name for name in (gate, up, down) if name is not None], linears, strict=True):
        shapes = {(tuple(linear.weight.shape), linear.bias is not None) for linear in of_experts}
        if len(shapes) > 1:
            raise ValueError(f"the experts' {name!r} differ in shapes or biases: {sorted(shapes)}; pack those alike")
    named = {parameter: name for name, parameter in module.named_parameters()}
    for parameter in (each for of_experts in linears for linear in of_experts for each in linear.parameters()):
        own = named.pop(parameter, None)
        if own is None:
            raise ValueError(
                f"some experts share a parameter of {gate!r}, {up!r} or {down!r}, and packed experts have one each; "
                "give each expert linears of its own"
            )
        if parameter.grad is not None or attributes.SHARDING.is_on(parameter):
            raise ValueError(f"{own!r} has a gradient, or was cut; pack experts before training and before parallelize")
    if named:
        raise TypeError(f"experts have parameters beside {gate!r}, {up!r} and {down!r}: {sorted(named.values())}")
    has_bias = {linear.bias is not None for of_experts in linears for linear in of_experts}
    if len(has_bias) > 1:
        raise ValueError("some of the experts' linears have a bias and some have none; give all bias=True, with zeros")

    inside: Any = module
    # The class changes in place, so that every reference to the list is one to the packed experts.
    inside._modules.clear()
    inside.__class__ = PackedExperts
    inside.has_gate, inside.has_bias, inside.act_fn = gate is not None, has_bias == {True}, activation
    first = "gate_up_proj" if inside.has_gate else "up_proj"
    for name, of_name in ((first, linears[:-1]), ("down_proj", linears[-1:])):
        for end, own in (("", "weight"), ("_bias", "bias")):
            if own == "weight" or inside.has_bias:
                stacked = [torch.stack([getattr(linear, own).detach() for linear in each]) for each in of_name]
                requires = getattr(of_name[0][0], own).requires_grad
                inside.register_parameter(name + end, nn.Parameter(torch.cat(stacked, 1), requires_grad=requires))
        for linear in (linear for each in of_name for linear in each):  # nobody needs memory twice for all experts
            linear._parameters.clear()
    grid = Grid(None)
    deal_(DealtForward(inside, experts_like(inside, grid, "experts"), grid, ()))
    packed: PackedExperts = inside
    return packed


def _linear(expert: nn.Module, name: str) -> nn.Linear:
    """Return the linear with a name in an expert.

    Raises:
        TypeError: There is none.
    """
    linear = getattr(expert, name, None)
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        linears = [own for own, child in expert.named_modules() if isinstance(child, nn.Linear)]
        raise TypeError(f"{name!r} of a {type(expert).__name__} is no nn.Linear; its linears are {linears}")
    return linear
