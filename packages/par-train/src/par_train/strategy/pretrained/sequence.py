"""Context parallelism of a strategy: checks of models, and batches split along the sequence."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from par_data import IGNORE_INDEX
from par_layers import Context, LayerSet
from par_pipeline import PipelineStages

from .causal import TOKENS, next_labels, pretrained_in, unlike_causal

_TARGETS = ("labels", "shift_labels", "num_items_in_batch")


def check_pretrained(model: nn.Module, context: Context, *, tensor_ranks: int, trained: bool) -> None:
    """Check that the transformers models in a module can run with a split sequence. Changes nothing.

    Args:
        model: The model that `initialize` or `from_pretrained` received.
        context: The context parallelism of the strategy.
        tensor_ranks: The number of ranks over which the heads of each layer are sharded.
        trained: Whether the model has an optimizer.

    Raises:
        ValueError: The attention cannot be replaced, the heads do not divide, the model has dropout, or its loss is
            not the causal one.
    """
    for pretrained in pretrained_in(model) if context.ranks > 1 else ():
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
        dropped = _first_dropout(pretrained) if trained else ""
        if dropped:
            raise ValueError(
                f"this {type(pretrained).__name__} has {dropped}, and the {context.ranks} ranks of a sequence cannot "
                "draw identical dropout masks; set it to 0 in the config from which you make the model"
            )


def _first_dropout(model: nn.Module) -> str:
    """Return the first dropout of a model and its rate, in words; empty if the model has none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0.0:
            return f"the dropout {name!r} of {module.p}"
        for key, rate in vars(module).items():  # such as attention_dropout, which the module's code hands on
            if "dropout" in key and isinstance(rate, float) and rate > 0.0:
                return f"{key}={rate} in {name!r}"
    return ""


def attend_over_(model: nn.Module, context: Context) -> None:
    """Replace the attention of the transformers models in a module by that of a context, in place.

    For `PipelineStages` this has happened before the model was split.
    """
    for pretrained in pretrained_in(model) if context.ranks > 1 and not isinstance(model, PipelineStages) else ():
        context.transformers_(pretrained)


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
    return isinstance(value, Context) and value.ranks > 1


def no_use(model: nn.Module, ranks: int) -> ValueError:
    """Return the error for a model that would ignore the tokens of other ranks."""
    return ValueError(
        f"nothing in this {type(model).__name__} reaches the tokens of the other ranks of sequence={ranks}: no module "
        "of it has a layer set or a par_layers.Context as an attribute; compute attention with context.attention of "
        "Strategy.context, or with Strategy.layers, or give these ranks to data, tensor or pipeline"
    )


def cut_by(context: Context) -> Callable[[Any], Any]:
    """Return a function that splits the batches of a data loader along the sequence.

    It takes pairs of [B, S] integers and transformers' dicts. The ranks of a sequence read the same samples. Each row
    of a pair is one document, so that the ranks need not communicate. Rows of a dict may hold several documents, which
    the ranks compare in the first batch.

    Args:
        context: The context parallelism, which assigns tokens to ranks.
    """
    has_compared = False

    def cut(batch: Any) -> Any:
        nonlocal has_compared
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
            compares, has_compared = not has_compared, True
            return cut_dict(batch, context, compare=compares)
        are_two = isinstance(batch, tuple | list) and len(batch) == 2 and not hasattr(batch, "_fields")
        if not are_two or not all(_is_tokens(one) for one in batch) or batch[0].shape != batch[1].shape:
            raise TypeError(
                f"the data loader returns {_described(batch)}, and sequence={context.ranks} splits only pairs of "
                "[B, S] integers and dicts with input_ids; set dataloader.transform to a function of the "
                "batch that calls Strategy.context.cut and returns the model's arguments, or to None, and split the "
                "batches yourself"
            )
        tokens = context.tokens(batch[0].shape[1])
        mine = torch.from_numpy(tokens.index(context.rank)).to(batch[0].device)
        return type(batch)(one.index_select(1, mine) for one in batch)

    return cut


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
        ValueError: Positions or masks do not describe documents, or the padding has labels; or as `Context.cut`.
    """
    if TOKENS in batch:
        return dict(batch)
    labels, mask = next_labels(batch), batch.get("attention_mask")
    whole = {key: value for key, value in batch.items() if key not in _TARGETS and value is not None}
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


def _is_tokens(value: Any) -> bool:
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in kinds


def _described(batch: Any) -> str:
    """Describe a batch in a few words, for a message."""
    if isinstance(batch, Tensor):
        return f"a tensor {list(batch.shape)} of {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {', '.join(map(_described, batch)) or 'nothing'}"
    return f"a {type(batch).__name__}"
