"""Transformers models as training uses them: their causal loss, split batches, LoRA adapters and samples of text.

`make` describes a model on the meta device, `adapters` and `merge` add and remove LoRA, and `causal` turns batches into
arguments, labels and a loss, which `sequence` splits over ranks, and `batches` splits in a data loader. `auxiliary`
weighs the losses of routers in a step of several batches. `sample` continues prompts.
"""

from ..context.existing.documents import check_packed_rows
from ..models.adapters import kind_of
from .adapters import (
    adapter_tensors,
    adapters_in,
    base_name,
    check_adapter,
    check_all_saved,
    draw_adapters_,
    has_adapters,
    inject_adapters_,
    measure_magnitudes_,
    write_config,
)
from .auxiliary import weigh_auxiliary_losses_
from .batches import make_batch_splitter
from .causal import (
    IGNORE_INDEX,
    CausalModel,
    balance_factor,
    causal_lm_loss,
    logits_of,
    next_labels,
    pretrained_in,
    pretrained_of,
    unlike_causal,
)
from .make import check_floating, make_on_meta
from .merge import merged_tensors
from .sample import Ends, Prompts, joined_rows, read_request, write_on
from .sequence import attend_over_, check_pretrained, cut_dict, reaches_other_tokens

__all__ = [
    "IGNORE_INDEX",
    "CausalModel",
    "Ends",
    "Prompts",
    "adapter_tensors",
    "adapters_in",
    "attend_over_",
    "balance_factor",
    "base_name",
    "causal_lm_loss",
    "check_adapter",
    "check_all_saved",
    "check_floating",
    "check_packed_rows",
    "check_pretrained",
    "cut_dict",
    "draw_adapters_",
    "has_adapters",
    "inject_adapters_",
    "joined_rows",
    "kind_of",
    "logits_of",
    "make_batch_splitter",
    "make_on_meta",
    "measure_magnitudes_",
    "merged_tensors",
    "next_labels",
    "pretrained_in",
    "pretrained_of",
    "reaches_other_tokens",
    "read_request",
    "unlike_causal",
    "weigh_auxiliary_losses_",
    "write_config",
    "write_on",
]
