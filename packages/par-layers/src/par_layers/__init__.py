"""Layers whose weights live on several ranks: a model is written once and runs in 1D, 2D, 2.5D, 3D or on one device."""

from ._collectives import (
    all_gather_to,
    all_to_all,
    copy_to,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from ._cost import Cost, LinearShape, ModelShape, NormShape, TableShape, TransformerShape, cost
from ._initialize import initialize
from ._layer_set import LayerSet, layer_set
from .context.balance import assign
from .context.context import Context, context_attention
from .context.cost import AttentionMemory, AttentionShape, fetch_parts, memory, work
from .context.mask import Mask
from .context.tokens import Tokens
from .experts.balance import Balance, TokenAxes
from .experts.choose import choose
from .experts.cost import ExpertSplit, MoECost, MoEShape, moe_cost
from .experts.dispatch import Dispatch, Sent
from .experts.experts import Experts
from .experts.moe import MoE
from .experts.products import Activation, grouped_linear, grouped_weight_gradient
from .experts.router import Router, Routing
from .experts.step import RouterLosses, update_choice_bias_
from .layers.parameter import constant, normal, uniform
from .layers.partial_gradients import PartialGradients
from .models.compare import Comparison, compare
from .models.costs import Traffic, costs
from .models.packed.balance import balance_over_
from .models.packed.found import experts_in
from .models.packed.pack import PackedExperts, pack_
from .models.parallel import Parallel, parallel_of
from .models.parallelize import cuts, parallelize
from .models.plans.plans import register_plan
from .models.plans.styles import (
    Column,
    DealtExperts,
    Partial,
    Row,
    SplitExperts,
    Style,
    Vocabulary,
    Whole,
    register_style,
)
from .modes.grid import Grid
from .modes.layout import Layout
from .modes.modes import register_layer_set
from .modes.rules import Cut, Product, Rules

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "AttentionMemory",
    "AttentionShape",
    "Balance",
    "Column",
    "Comparison",
    "Context",
    "Cost",
    "Cut",
    "DealtExperts",
    "Dispatch",
    "ExpertSplit",
    "Experts",
    "Grid",
    "LayerSet",
    "Layout",
    "LinearShape",
    "Mask",
    "MoE",
    "MoECost",
    "MoEShape",
    "ModelShape",
    "NormShape",
    "PackedExperts",
    "Parallel",
    "Partial",
    "PartialGradients",
    "Product",
    "Router",
    "RouterLosses",
    "Routing",
    "Row",
    "Rules",
    "Sent",
    "SplitExperts",
    "Style",
    "TableShape",
    "TokenAxes",
    "Tokens",
    "Traffic",
    "TransformerShape",
    "Vocabulary",
    "Whole",
    "all_gather_to",
    "all_to_all",
    "assign",
    "balance_over_",
    "choose",
    "compare",
    "constant",
    "context_attention",
    "copy_to",
    "cost",
    "costs",
    "cuts",
    "exchange",
    "experts_in",
    "fetch_parts",
    "gather_from",
    "grouped_linear",
    "grouped_weight_gradient",
    "initialize",
    "layer_set",
    "memory",
    "moe_cost",
    "normal",
    "pack_",
    "parallel_of",
    "parallelize",
    "reduce_from",
    "reduce_scatter_to",
    "register_layer_set",
    "register_plan",
    "register_style",
    "scatter_to",
    "uniform",
    "update_choice_bias_",
    "work",
]
