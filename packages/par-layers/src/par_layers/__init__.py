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
from ._cost import EmbeddingShape, LayerCost, LinearShape, ModelShape, NormShape, TransformerShape, layer_cost
from ._initialize import initialize
from ._initialize_existing import fill_shard_, initialize_transformers_
from ._layer_set import LayerSet, layer_set
from .context.balance import balance_chunks
from .context.context import Context
from .context.cost import AttentionMemory, AttentionShape, attention_memory, attention_pairs, num_gather_parts
from .context.existing.documents import separate_documents_
from .context.function import context_attention
from .context.mask import Mask
from .context.tokens import Tokens
from .experts.balance import LoadBalancing, TokenAxes
from .experts.cost import ExpertSplit, MoECost, MoEShape, moe_cost
from .experts.dispatch import DispatchHandle, TokenDispatcher
from .experts.experts import Experts
from .experts.moe import MoE
from .experts.products import Activation, grouped_linear, grouped_weight_gradient
from .experts.router import Router, Routing
from .experts.selection import ExpertConfig, RouterConfig, select_experts
from .experts.step import LossFactor, RouterLosses, adds_losses, update_correction_bias_
from .layers.dropout import active_dropouts
from .layers.parameter import constant, normal, uniform
from .layers.partial_gradients import PartialGradientReducer
from .models.compare import PlanComparison, verify_plan
from .models.lanes.plan import deals_packed_experts
from .models.packed.balance import losses_over_ranks, sync_aux_loss_
from .models.packed.found import expert_modules
from .models.packed.pack import PackedExperts, pack_experts_
from .models.parallel import Parallelization, parallelization_of
from .models.parallelize import parallelize, plan_shardings
from .models.plans.plans import register_plan
from .models.plans.styles import (
    ColumnParallel,
    EmbeddingParallel,
    ExpertParallel,
    ExpertTensorParallel,
    PartialGradient,
    Replicated,
    RowParallel,
    Style,
    register_style,
)
from .models.survey.traffic import CommunicationVolume, communication_volumes
from .modes.grid import Grid
from .modes.layout import ActivationLayout
from .modes.modes import register_layer_set
from .modes.probe import unstable_kernels
from .modes.rules import ModeRules, ParallelMatmul, WeightSharding

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ActivationLayout",
    "AttentionMemory",
    "AttentionShape",
    "ColumnParallel",
    "CommunicationVolume",
    "Context",
    "DispatchHandle",
    "EmbeddingParallel",
    "EmbeddingShape",
    "ExpertConfig",
    "ExpertParallel",
    "ExpertSplit",
    "ExpertTensorParallel",
    "Experts",
    "Grid",
    "LayerCost",
    "LayerSet",
    "LinearShape",
    "LoadBalancing",
    "LossFactor",
    "Mask",
    "MoE",
    "MoECost",
    "MoEShape",
    "ModeRules",
    "ModelShape",
    "NormShape",
    "PackedExperts",
    "ParallelMatmul",
    "Parallelization",
    "PartialGradient",
    "PartialGradientReducer",
    "PlanComparison",
    "Replicated",
    "Router",
    "RouterConfig",
    "RouterLosses",
    "Routing",
    "RowParallel",
    "Style",
    "TokenAxes",
    "TokenDispatcher",
    "Tokens",
    "TransformerShape",
    "WeightSharding",
    "active_dropouts",
    "adds_losses",
    "all_gather_to",
    "all_to_all",
    "attention_memory",
    "attention_pairs",
    "balance_chunks",
    "communication_volumes",
    "constant",
    "context_attention",
    "copy_to",
    "deals_packed_experts",
    "exchange",
    "expert_modules",
    "fill_shard_",
    "gather_from",
    "grouped_linear",
    "grouped_weight_gradient",
    "initialize",
    "initialize_transformers_",
    "layer_cost",
    "layer_set",
    "losses_over_ranks",
    "moe_cost",
    "normal",
    "num_gather_parts",
    "pack_experts_",
    "parallelization_of",
    "parallelize",
    "plan_shardings",
    "reduce_from",
    "reduce_scatter_to",
    "register_layer_set",
    "register_plan",
    "register_style",
    "scatter_to",
    "select_experts",
    "separate_documents_",
    "sync_aux_loss_",
    "uniform",
    "unstable_kernels",
    "update_correction_bias_",
    "verify_plan",
]
