"""Mixed precision and gradient clipping that agree on every rank."""

from ._deferred_clip import DeferredClipping
from ._float8 import Float8Linear, convert_to_float8_, is_float8
from ._mixed import MasterWeights, StochasticRounding, mixed
from ._optimizer import MixedOptimizer, Step
from ._precisions import Precision, check_device, precision_of
from .exact.sums import ExactSums, TotalWeights
from .norm.clip import clip_grad_norm_, clip_grad_value_
from .norm.norm import grad_norm
from .rounding.rounding import stochastic_round_
from .scale.scale import DynamicScale

__version__ = "0.1.0"

__all__ = [
    "DeferredClipping",
    "DynamicScale",
    "ExactSums",
    "Float8Linear",
    "MasterWeights",
    "MixedOptimizer",
    "Precision",
    "Step",
    "StochasticRounding",
    "TotalWeights",
    "check_device",
    "clip_grad_norm_",
    "clip_grad_value_",
    "convert_to_float8_",
    "grad_norm",
    "is_float8",
    "mixed",
    "precision_of",
    "stochastic_round_",
]
