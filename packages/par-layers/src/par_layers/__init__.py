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
from ._cost import Cost, LinearShape, NormShape, TableShape, TransformerShape, cost
from ._initialize import initialize
from ._layer_set import LayerSet, layer_set
from .layers.parameter import constant, normal, uniform
from .layers.partial_gradients import PartialGradients
from .modes.grid import Grid
from .modes.layout import Layout
from .modes.modes import register_layer_set
from .modes.rules import Cut, Product, Rules

__version__ = "0.1.0"

__all__ = [
    "Cost",
    "Cut",
    "Grid",
    "LayerSet",
    "Layout",
    "LinearShape",
    "NormShape",
    "PartialGradients",
    "Product",
    "Rules",
    "TableShape",
    "TransformerShape",
    "all_gather_to",
    "all_to_all",
    "constant",
    "copy_to",
    "cost",
    "exchange",
    "gather_from",
    "initialize",
    "layer_set",
    "normal",
    "reduce_from",
    "reduce_scatter_to",
    "register_layer_set",
    "scatter_to",
    "uniform",
]
