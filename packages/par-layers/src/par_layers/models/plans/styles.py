"""Styles: how a part of an existing model is cut over the tensor ranks. The strings are transformers' names."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from par_groups import Registry


@dataclass(frozen=True)
class Style:
    """Rule for sharding a linear, an embedding, a module with experts or a single parameter."""


@dataclass(frozen=True)
class ColumnParallel(Style):
    """Linear whose output features are sharded; it begins a sharded region.

    Args:
        blocks: Number or sizes of the parts of the output that are sharded separately, such as q, k and v, or gate and
            up, in one weight.
        unit: Number of features that stay together on a rank; 1 takes the `head_dim` of the module around it, if there
            is one.
        gather: Whether the output is gathered, so that the next module receives it in full. Its features need not
            divide then.
    """

    blocks: int | tuple[int, ...] = 1
    unit: int = 1
    gather: bool = False

    def __post_init__(self) -> None:
        if self.gather and self.blocks != 1:
            raise ValueError(
                f"ColumnParallel(blocks={self.blocks}, gather=True): gathered features would be in another order; use "
                "blocks=1, or leave the output cut and close the pair with a Row"
            )


@dataclass(frozen=True)
class RowParallel(Style):
    """Linear whose input features are sharded, and whose partial sums are all-reduced; it ends a sharded region.

    Args:
        split: Whether the input is full, so that this rank's part is taken from it.
        blocks: Number or sizes of the parts of the input that are sharded separately.
    """

    split: bool = False
    blocks: int | tuple[int, ...] = 1


@dataclass(frozen=True)
class EmbeddingParallel(Style):
    """An embedding.

    Args:
        features: Whether the features of the table are cut, and not its rows.
    """

    features: bool = False


@dataclass(frozen=True)
class ExpertTensorParallel(Style):
    """Module with the weights of all experts, each with a rule of its own.

    The input is replicated, the output is summed.
    """


@dataclass(frozen=True)
class ExpertParallel(Style):
    """Module with the packed weights of all experts, or such a weight, partitioned over the ranks of `expert`.

    A rank holds full experts or, if the topology shards each expert, a part of their features. Tokens are sent to the
    ranks of their experts. On a topology without an axis `expert`, the tensor ranks shard every expert.
    """


@dataclass(frozen=True)
class PartialGradient(Style):
    """A replicated module between a ColumnParallel and a RowParallel linear, whose gradient is a partial sum.

    Args:
        before: Whether the module comes before a ColumnParallel linear, as the low-rank projections of latent attention
            do. Default: False.
    """

    before: bool = False


@dataclass(frozen=True)
class Replicated(Style):
    """A parameter or module that is replicated on every rank.

    On a module that contains ColumnParallel linears, it makes each of them all-reduce its own input gradient.
    """


@dataclass(frozen=True)
class LatentProjection(Style):
    """A projection whose last outputs go around the Column that takes the first ones; their gradient is summed.

    Args:
        around: Number of these last outputs; 0: the `qk_rope_head_dim` of the module around it, or of the config.
    """

    around: int = 0


@dataclass(frozen=True)
class SummedOutput(Style):
    """Module whose output is a partial sum on each rank.

    Args:
        copies: Whether the module has sharded weights itself, so that its input is replicated.
    """

    copies: bool = False


@dataclass(frozen=True)
class IdentityExpert(Style):
    """A module among experts that all ranks compute alike, so that it is divided by their number before the sum."""


StyleFunction = Callable[[nn.Module], Style]

STYLES: Registry[StyleFunction] = Registry("style", "par_layers.styles")


def register_style(name: str) -> Callable[[StyleFunction], StyleFunction]:
    """Register a style for plans, as a decorator on a function from the module that has the rule to its style.

    Another wheel can provide it by an entry point in the group `par_layers.styles`.

    Args:
        name: The name of the style in plans.

    Raises:
        ValueError: The name is taken.

    Example:
        @register_style("fused_gate_up")
        def fused_gate_up(module: nn.Module) -> Style:
            return ColumnParallel(blocks=(module.gate_features, module.up_features))
    """

    def register(function: StyleFunction) -> StyleFunction:
        STYLES.register(name, function)
        return function

    return register


def style_of(rule: object, module: nn.Module, name: str) -> Style:
    """Return the style of a module's rule.

    Args:
        rule: Style, or the name of a style.
        module: Module that has the rule, or that owns the parameter with the rule.
        name: Name of the module or parameter, for messages.

    Raises:
        ValueError: No style has this name, or the style was removed.
        TypeError: The rule is neither a style nor a name.
    """
    if isinstance(rule, Style):
        return rule
    if not isinstance(rule, str):
        raise TypeError(f"the rule of {name!r} is {rule!r}; give a style, such as ColumnParallel(), or the name of one")
    # Named, since a plan from a model's own code may still have them; the next line would call them unknown.
    if rule in _REMOVED:
        raise ValueError(
            f"the rule of {name!r} is {rule!r}, removed by transformers; use ep_dispatch_experts for the module with "
            "all experts and grouped_gemm for its weights, and no rule for the router"
        )
    # Called for each module: a fused weight's parts depend on the module's sizes.
    style = STYLES[rule](module)
    if not isinstance(style, Style):
        raise TypeError(f"the registered style {rule!r} gave {style!r} for {name!r}; let it return a Style")
    return style


_REMOVED = frozenset(
    {
        "ep_router",
        "megamoe_experts",
        "megamoe_dispatch",
        "local",
        "local_colwise",
        "local_rowwise",
        "local_packed_rowwise",
        "gather",
    }
)
"""Names of styles for experts that some releases of transformers had."""


@dataclass(frozen=True)
class _Always:
    """A style that is the same for every module."""

    style: Style

    def __call__(self, module: nn.Module) -> Style:
        del module
        return self.style


_NAMES = {
    "colwise": ColumnParallel(),
    "packed_colwise": ColumnParallel(blocks=2),
    "colwise_gather_output": ColumnParallel(gather=True),
    "colwise_rep": ColumnParallel(gather=True),
    "rowwise": RowParallel(),
    "rowwise_split_input": RowParallel(split=True),
    "rowwise_rep": RowParallel(split=True),
    "packed_rowwise": RowParallel(blocks=2),
    "embedding_rowwise": EmbeddingParallel(),
    "embedding_colwise": EmbeddingParallel(features=True),
    "replicated_with_grad_allreduce": PartialGradient(),
    "sequence_parallel": Replicated(),
    "replicate": Replicated(),
    "local_params": Replicated(),
    "moe_tp_experts": ExpertTensorParallel(),
    "ep_dispatch_experts": ExpertParallel(),
    "grouped_gemm": ExpertParallel(),
    "moe_identity_expert": IdentityExpert(),
    "mla_kv_a_proj": LatentProjection(),
}
for _name, _style in _NAMES.items():
    STYLES.register(_name, _Always(_style))


@register_style("all_reduce")
def _summed(module: nn.Module) -> Style:
    """Return the style of a module that sums the outputs of linears with replicated inputs, or of its own weights."""
    return SummedOutput(copies=next(module.parameters(recurse=False), None) is not None)


def with_unit(style: ColumnParallel, unit: int) -> ColumnParallel:
    """Return the style with another unit if it has the default unit."""
    return replace(style, unit=unit) if style.unit == 1 else style
