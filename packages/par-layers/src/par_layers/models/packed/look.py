"""Conversion of a module with packed expert weights to this package's experts, with this rank's shapes."""

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from par_groups import LaneCounts

from ...experts.experts import Experts
from ...experts.lanes import LaneExperts
from ...experts.products import Activation
from ...experts.selection import ExpertConfig
from ...modes.grid import Grid

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
"""Attributes by which Hugging Face Transformers describes a module of packed experts."""


def experts_like(module: nn.Module, grid: Grid, name: str, *, lanes: LaneCounts | None = None) -> Experts:
    """Return `Experts` equivalent to a module's packed experts, with this rank's shapes on the meta device.

    Args:
        module: Packed experts of Transformers 5: all experts, or this rank's experts after sharding.
        grid: This rank's coordinates, in the view "experts".
        name: Name of the module, for messages.
        lanes: Numbers of lanes over all ranks, if they compute the rows of each lane alone; else None.

    Raises:
        TypeError: The module has no packed experts of Transformers 5.
        ValueError: The experts or features do not divide by the ranks.
    """
    inside: Any = module
    who = type(module).__name__
    if isinstance(module, nn.ModuleList):
        kinds = ", ".join(dict.fromkeys(type(expert).__name__ for expert in module)) or "nothing"
        raise TypeError(
            f"{name!r} is a {who} of {kinds}, one module an expert, and the rule 'ep_dispatch_experts' is for one with "
            "the packed weights of all: call pack_experts_(module, gate, up, down) first, and the block around it must "
            "call it with (tokens, ids, weights)"
        )
    if missing := _missing_flags(module):
        raise TypeError(
            f"{name!r} is a {who} without the attributes {', '.join(missing)} of packed experts, which the "
            "rule 'ep_dispatch_experts' reads; for experts of your own use TokenDispatcher and Experts"
        )
    first, known, own = _names(module)
    if own != known:
        raise TypeError(
            f"{name!r} has the parameters {own}, but its attributes describe {known}; "
            "use TokenDispatcher and Experts for experts of your own"
        )
    if inside.has_post_expert_norm and grid.size(("expert_tensor",)) > 1:
        raise ValueError(
            f"{name!r} has a norm after each expert, which needs full outputs: an expert cannot be sharded over "
            f"{grid.size(('expert_tensor',))} ranks; use expert=dict(size=..., tensor=1)"
        )
    if lanes is not None and inside.has_post_expert_norm and grid.size(("expert_parallel",)) > 1:
        raise ValueError(
            f"{name!r} has a norm after each expert, whose gradient is a sum over the rows of several lanes; use "
            "expert=1 with numerics='canonical'"
        )
    experts, *features = getattr(inside, first).shape
    # A transposed weight is [E, in, out]; torch's own layout is [E, out, in].
    hidden, wide = features if inside.is_transposed else reversed(features)
    make = Experts if lanes is None else partial(LaneExperts, lanes=lanes)
    try:
        return make(
            experts,
            hidden,
            wide // 2 if inside.has_gate else wide,
            config=ExpertConfig(
                activation=activation_like(module),
                bias=inside.has_bias,
                interleaved=inside.has_gate and not inside.is_concatenated,
                transposed=inside.is_transposed,
            ),
            grid=grid,
        )
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def is_packed(module: nn.Module) -> bool:
    """Return whether a module describes the layout of all its weights, and has no norm after each expert."""
    if _missing_flags(module) or module.has_post_expert_norm:
        return False
    _, known, own = _names(module)
    return own == known


def _missing_flags(module: nn.Module) -> list[str]:
    """Return the attributes of `FLAGS` that a module lacks."""
    return [flag for flag in FLAGS if not isinstance(getattr(module, flag, None), bool)]


def _names(module: Any) -> tuple[str, list[str], list[str]]:
    """Return the first weight's name, the parameter names according to the module's flags, and the actual names."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weights = (first, "down_proj")
    known = sorted({*weights, *(f"{weight}_bias" for weight in weights if module.has_bias)})
    return first, known, sorted(path for path, _ in module.named_parameters() if "post_expert_norm." not in path)


def activation_like(module: nn.Module) -> str | Activation:
    """Return the activation between the two matmuls of a module's experts.

    Args:
        module: Packed experts.
    """
    inside: Any = module
    if not inside.has_gate:
        return Activation(inside.act_fn, gated=False)
    # A class may override the gate. Only the usual one with SiLU, gate before up, is what the fused product computes.
    usual = (apply_gate, getattr(sys.modules.get("transformers.integrations.moe"), "_default_apply_gate", apply_gate))
    is_silu = getattr(inside, "act_fn", None) is functional.silu or type(getattr(inside, "act_fn", None)) is nn.SiLU
    if getattr(type(module), "_apply_gate", None) in usual and is_silu and inside.is_concatenated:
        return "swiglu"
    return Activation(inside._apply_gate)


def apply_gate(module: Any, gate_up: Tensor) -> Tensor:
    """Compute the default activation of packed experts, act(gate) * up: [R, f] from [R, 2 f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated: Tensor = module.act_fn(gate) * up
    return activated
