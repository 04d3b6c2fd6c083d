"""Survey of an existing model whose weights are in lanes."""

from dataclasses import replace

from torch import nn

from par_groups import LaneCounts

from ...modes.lanes import check_head, check_lanes
from ..adapters import base_model
from ..cutting import is_packed_4bit
from ..plans.plans import Plan, resolve
from ..plans.styles import ColumnParallel, EmbeddingParallel, ExpertParallel, PartialGradient, Replicated, RowParallel
from ..survey.kinds import features_of, is_conv1d, is_norm, parent
from ..survey.survey import RegionPlan, Survey


def in_lanes(found: Survey, modules: dict[str, nn.Module], lanes: LaneCounts) -> Survey:
    """Return the survey of a model whose weights are in lanes.

    Each Column copies its input, because the sum over lanes is the outermost one of each.

    Args:
        found: The survey without lanes.
        modules: The modules of the model, by name.
        lanes: Numbers of lanes over all ranks.

    Raises:
        ValueError: A rule or a module has no form in lanes, or a size does not divide into them.
    """
    if found.experts and lanes.sequence > 1:
        raise ValueError(
            f"{next(iter(found.experts))!r} has experts, which have no products in sequence lanes; use one sequence "
            "lane with numerics='canonical'"
        )
    for name, style in found.rules.items():
        if name in found.wrappers:  # the linear inside and those of the adapters have rules of their own
            continue
        if isinstance(style, ExpertParallel) and (name in found.experts or parent(name) in found.experts):
            continue
        known = isinstance(style, (ColumnParallel, RowParallel, Replicated, PartialGradient, EmbeddingParallel))
        if not known or name not in modules or (isinstance(style, EmbeddingParallel) and style.features):
            raise ValueError(
                f"the rule of {name!r} is {style}, which has no form in lanes; use one tensor lane with "
                "numerics='canonical'"
            )
        if isinstance(style, (ColumnParallel, RowParallel)):
            _check_linear(found, modules, name, style, lanes)
        elif isinstance(style, PartialGradient):
            _check_partial(found, modules, name, style, lanes.tensor)
    for name, part in found.parts.items():
        owner = parent(name)
        known = is_norm(modules[owner]) or isinstance(found.rules.get(owner), RowParallel)
        if any(box.sum_over for box in part.sharding.boxes) and not known:
            raise ValueError(
                f"{name!r} has a gradient that is a sum over each rank's tokens, and belongs to a "
                f"{type(modules[owner]).__name__}, which is no norm; use sequence_parallel=False with "
                "numerics='canonical'"
            )
    if lanes.sequence > 1:
        _check_sums_over_tokens(found, modules)
    regions = {name: replace(region, closed=False) for name, region in found.regions.items()}
    return replace(found, regions=regions)


def deals_packed_experts(model: nn.Module, plan: str | Plan = "auto") -> bool:
    """Return whether a plan distributes packed experts of a model, if the topology says over which ranks.

    Args:
        model: A model that is not sharded yet.
        plan: Rules by pattern, or "auto".
    """
    inner = base_model(model)
    if isinstance(plan, str) and not getattr(inner, "ep_plan", None):
        return False
    return any(isinstance(style, ExpertParallel) for style in resolve(inner, plan, experts=True).rules.values())


def _check_sums_over_tokens(found: Survey, modules: dict[str, nn.Module]) -> None:
    """Check that every sum over the tokens of a rank is one that consists of lanes."""
    for name, module in modules.items():
        trained = [own for own, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
        style = found.rules.get(name)
        # Autograd rounds the gradient of a transposed weight, as Conv1D has it, to the weight's dtype.
        is_linear = isinstance(style, (ColumnParallel, RowParallel)) and not is_conv1d(module)
        known = is_linear or is_norm(module) or is_look_up(module)
        if trained and not known:
            raise ValueError(
                f"{name!r}, a {type(module).__name__}, has {trained[0]!r}, whose gradient is a sum over the tokens of "
                "a rank that has no form in lanes; use one sequence lane with numerics='canonical'"
            )


def is_look_up(module: nn.Module) -> bool:
    """Return whether a module returns rows of a table and does nothing else with it."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    return not module.sparse and not module.scale_grad_by_freq and module.max_norm is None


def _check_linear(
    found: Survey, modules: dict[str, nn.Module], name: str, style: ColumnParallel | RowParallel, lanes: LaneCounts
) -> None:
    outputs, inputs = features_of(modules[name])
    if is_packed_4bit(modules[name].weight):
        raise ValueError(
            f"{name!r} has a weight that bitsandbytes has packed, whose matmul has no form in lanes; leave numerics as "
            "it is, or load the model without quantization"
        )
    length = outputs if isinstance(style, ColumnParallel) else inputs
    if style.blocks != 1 and isinstance(style, RowParallel):
        raise ValueError(f"the rule of {name!r} is {style}, which has no form in lanes; use blocks=1")
    blocks = [length // style.blocks] * style.blocks if isinstance(style.blocks, int) else style.blocks
    for block in blocks:
        check_lanes(block, lanes, f"a block of {name!r}" if len(blocks) > 1 else f"{name!r}")
    head = getattr(modules[parent(name)], "head_dim", None)
    region: RegionPlan | None = found.regions.get(parent(name))
    if isinstance(head, int) and region is not None and region.heads:
        check_head(head, lanes)


def _check_partial(found: Survey, modules: dict[str, nn.Module], name: str, style: PartialGradient, lanes: int) -> None:
    module, region = modules[name], found.regions.get(parent(name))
    fused = isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm))
    sizes = {tuple(each.shape) for each in module.parameters()}
    if style.before or region is None or fused or len(sizes) != 1 or len(next(iter(sizes))) != 1:
        raise ValueError(
            f"the rule of {name!r}, a {type(module).__name__}, is {style}, which has a form in lanes only for a norm "
            "of heads whose code multiplies by its weight; use one tensor lane with numerics='canonical'"
        )
    ((head,),) = sizes
    for column in region.columns:
        length = features_of(modules[column])[0]
        if length % (lanes * head):
            raise ValueError(
                f"{column!r} has {length // head} heads of {head} features, which do not divide into {lanes} lanes, "
                f"and {name!r} is a norm of heads; use fewer tensor lanes"
            )
