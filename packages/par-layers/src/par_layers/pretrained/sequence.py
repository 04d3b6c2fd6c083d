"""Context parallelism of transformers models: checks of models, and batches split along the sequence."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from par_groups import attributes

from .._layer_set import LayerSet
from ..context.context import Context
from ..context.existing.documents import prepare_packed_rows_
from ..layers.dropout import active_dropouts
from ..models.parallel import parallelization_of
from .causal import IGNORE_INDEX, TOKENS, next_labels, pretrained_in, unlike_causal

_TARGETS = ("labels", "shift_labels", "num_items_in_batch")


def check_pretrained(model: nn.Module, context: Context, *, tensor_ranks: int, trained: bool) -> None:
    """Check that the transformers models in a module can run with a split sequence. Changes nothing.

    Args:
        model: A transformers model, or a module that contains some.
        context: The context parallelism.
        tensor_ranks: The number of ranks over which the heads of each layer are sharded.
        trained: Whether the model has an optimizer.

    Raises:
        ValueError: The attention cannot be replaced, the heads do not divide, the model has dropout, or its loss is
            not the causal one.
    """
    for pretrained in pretrained_in(model) if context.is_split else ():
        context.check_transformers(pretrained)
        heads = getattr(pretrained.config.get_text_config(), "num_attention_heads", None)
        if isinstance(heads, int) and heads % tensor_ranks == 0:  # otherwise parallelize() raises
            context.check_heads(heads // tensor_ranks)
        takes_labels = "labels" in inspect.signature(inspect.unwrap(type(pretrained).forward)).parameters
        other = unlike_causal(pretrained) if takes_labels else None
        if other is not None:  # labels are shifted when rows are split
            raise ValueError(
                f"sequence={context.ranks}: split batches have labels of the next token, and {other}; set the axis to "
                "1, or use a causal model, or a model without a head and a loss of your own"
            )
        for name, rate in active_dropouts(pretrained).items() if trained else ():
            raise ValueError(
                f"this {type(pretrained).__name__} has {rate} in {name!r}, and the {context.ranks} ranks of a sequence "
                "cannot draw identical dropout masks; set it to 0 in the config from which you make the model"
            )


def attend_over_(model: nn.Module, context: Context) -> None:
    """Replace the attention of the transformers models in a module by that of a context, in place.

    With one rank of the sequence, the models separate the documents of packed rows by themselves from now on, or raise
    an error for packed rows. For a pipeline stage both have happened before the model was split.
    """
    for pretrained in pretrained_in(model) if not attributes.PRETRAINED.is_on(model) else ():
        if context.is_split:
            context.transformers_(pretrained)
        elif parallelization_of(pretrained) is None:  # a copy of a sharded model would communicate
            prepare_packed_rows_(pretrained)


def reaches_other_tokens(model: nn.Module) -> bool:
    """Return whether a module of the model has a layer set or a context that reaches the tokens of other ranks.

    A transformers model always does, since `attend_over_` replaces its attention.
    """
    return bool(pretrained_in(model)) or any(
        _is_over_ranks(value) for module in model.modules() for value in vars(module).values()
    )


def _is_over_ranks(value: Any) -> bool:
    if isinstance(value, LayerSet):
        return bool(value.rules.residual.context)
    return isinstance(value, Context) and value.is_split


def cut_dict(batch: Mapping[str, Any], context: Context, *, compare: bool) -> dict[str, Any]:
    """Split a batch for a transformers model along the sequence, and add `par_tokens`, which describe the split.

    Rows whose length does not divide are padded with tokens that belong to no document.

    Args:
        batch: `input_ids`, [rows, time], and the other entries of a collator's dict; a split batch is returned as is.
        context: The context parallelism, which assigns tokens to ranks.
        compare: Whether the ranks compare their batches, which is collective over the sequence group.

    Returns:
        This rank's part of the tensors, [rows, s]; `position_ids`, `attention_mask`, `shift_labels` with -100 for no
        label, and `num_items_in_batch`, the number of labels of the full rows: the models' losses then sum up to the
        mean over all ranks. If the batch has labels, also `labels`, equal to `shift_labels`.

    Raises:
        ValueError: Positions or masks do not describe documents, the padding has labels, or a tensor has no tokens,
            such as images; or as `Context.cut`.
    """
    if TOKENS in batch:
        return dict(batch)
    mask = batch.get("attention_mask")
    whole = {key: value for key, value in batch.items() if key not in _TARGETS and value is not None}
    try:
        labels = next_labels(batch)
        for key, value in whole.items():
            is_of_tokens = not isinstance(value, Tensor) or value.dim() < 2 or value.shape[:2] == labels.shape
            if not is_of_tokens and key != "position_ids":
                raise ValueError(
                    f"{key} is {list(value.shape)}, but input_ids are {list(labels.shape)}: with "
                    f"sequence={context.ranks} each tensor of a batch is split by its tokens, and images have none; "
                    "use the ranks of 'sequence' for data or tensor"
                )
    except ValueError as error:
        # Another rank, whose batch has no images, waits for this one where the ranks compare their batches.
        if compare:
            context.refuse(error)
        raise
    cut, tokens = context.cut({**whole, "shift_labels": labels}, pad=True, compare=compare)
    padded = 0 if mask is None else int((labels.masked_fill(mask != 0, IGNORE_INDEX) != IGNORE_INDEX).sum())
    if padded:  # on one device they attend to the row, here only to padding
        raise ValueError(
            f"{padded} tokens have labels, but attention_mask 0, and over sequence={context.ranks} padding belongs to "
            "no document; set the labels of padding to -100"
        )
    cut[TOKENS] = tokens
    if any(batch.get(key) is not None for key in ("labels", "shift_labels")):
        cut["labels"] = cut["shift_labels"]
    return cut
