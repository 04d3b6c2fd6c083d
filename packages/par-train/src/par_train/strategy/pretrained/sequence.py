"""Sequences that are cut over ranks: which models know of it, and how batches are cut."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from par_data import IGNORE_INDEX
from par_layers import Context, LayerSet

from ..stages import PipelineStages
from .causal import TOKENS, next_labels, pretrained_in, unlike_causal

_TARGETS = ("labels", "shift_labels", "num_items_in_batch")


def check_pretrained(model: nn.Module, context: Context, *, tensor_ranks: int, trained: bool) -> None:
    """Makes sure that the models of transformers in a module can run over a sequence that is cut. Changes nothing.

    Args:
        model: A model that `initialize` or `from_pretrained` was given.
        context: What attends over the sequence.
        tensor_ranks: Number of ranks that share the heads of each layer.
        trained: Whether it has an optimizer.

    Raises:
        ValueError: Its attention cannot be replaced, its heads cannot be shared out, it drops activations, or its own
            loss is not the causal one.
    """
    for pretrained in pretrained_in(model) if context.ranks > 1 else ():
        context.check_transformers(pretrained)
        heads = getattr(pretrained.config.get_text_config(), "num_attention_heads", None)
        if isinstance(heads, int) and heads % tensor_ranks == 0:  # else cutting it over tensor ranks is refused
            context.check_heads(heads // tensor_ranks)
        takes_labels = "labels" in inspect.signature(inspect.unwrap(type(pretrained).forward)).parameters
        other = unlike_causal(pretrained) if takes_labels else None
        if other is not None:  # its labels would be shifted where its rows are cut
            raise ValueError(
                f"sequence={context.ranks}: batches that are cut have labels of the next token, and {other}; set the "
                "axis to 1, or use a causal model, or one without a head and a loss of your own"
            )
        dropped = _first_dropout(pretrained) if trained else ""
        if dropped:
            raise ValueError(
                f"this {type(pretrained).__name__} has {dropped}, and what is dropped cannot be equal over the "
                f"{context.ranks} ranks of a sequence; set it to 0, in the config that the model is made from"
            )


def _first_dropout(model: nn.Module) -> str:
    """Where a model drops something in training, and how much; empty if nowhere."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0.0:
            return f"the dropout {name!r} of {module.p}"
        for key, rate in vars(module).items():  # such as attention_dropout, which the module's code hands on
            if "dropout" in key and isinstance(rate, float) and rate > 0.0:
                return f"{key}={rate} in {name!r}"
    return ""


def attend_over_(model: nn.Module, context: Context) -> None:
    """Lets a context compute the attention of the models of transformers in a module, in place.

    `PipelineStages` were cut out of a model for which it was done.
    """
    for pretrained in pretrained_in(model) if context.ranks > 1 and not isinstance(model, PipelineStages) else ():
        context.transformers_(pretrained)


def reaches_other_tokens(model: nn.Module) -> bool:
    """Whether a module of the model has what reaches the tokens of other ranks: a layer set over them, or a context.

    A model of transformers is given a context.
    """
    return bool(pretrained_in(model)) or any(
        _is_over_ranks(value) for module in model.modules() for value in vars(module).values()
    )


def _is_over_ranks(value: Any) -> bool:
    if isinstance(value, LayerSet):
        return bool(value.rules.residual.context)
    return isinstance(value, Context) and value.ranks > 1


def no_use(model: nn.Module, ranks: int) -> ValueError:
    """The error for a model whose ranks would all do the same work, or see their own tokens alone."""
    return ValueError(
        f"nothing in this {type(model).__name__} reaches the tokens of the other ranks of sequence={ranks}: no module "
        "of it has a layer set or a par_layers.Context as an attribute; compute attention with context.attention of "
        "Strategy.context, or with Strategy.layers, or give these ranks to data, tensor or pipeline"
    )


def cut_by(context: Context) -> Callable[[Any], Any]:
    """What cuts the batches of a data loader over sequence ranks: pairs of [B, S] integers, and transformers' dicts.

    The ranks of a sequence have the same samples. Of pairs, rows are taken for one document each, so that a model needs
    no more than its tokens; nothing is sent. Of dicts, documents are read too: in the first one, ranks compare them.

    Args:
        context: What says which tokens this rank has.
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
                f"the data loader gives {_described(batch)}, and over sequence={context.ranks} pairs of [B, S] "
                "integers and dicts with input_ids alone are cut here; set dataloader.transform to a function of the "
                "batch that calls Strategy.context.cut and gives what the model is called with, or to None and cut the "
                "batches yourself"
            )
        tokens = context.tokens(batch[0].shape[1])
        mine = torch.from_numpy(tokens.index(context.rank)).to(batch[0].device)
        return type(batch)(one.index_select(1, mine) for one in batch)

    return cut


def cut_dict(batch: Mapping[str, Any], context: Context, *, compare: bool) -> dict[str, Any]:
    """This rank's tokens of a batch for a model of transformers, with `par_tokens`, which say how it was cut.

    Rows whose length does not divide are filled up with tokens of no document.

    Args:
        batch: `input_ids`, [rows, time], and what else a collator gives; whole, or cut before.
        context: What says which tokens this rank has.
        compare: Whether ranks make sure that they cut alike, which is collective over the sequence's ranks.

    Returns:
        The batch's tensors, [rows, s]; `position_ids`, `attention_mask`, `shift_labels`, -100 where none counts, and
        `num_items_in_batch`, the number of targets of the whole rows: the sum of the models' own losses over the ranks
        is their mean. Where it has labels, also `labels`, which are the same as `shift_labels`.

    Raises:
        ValueError: Positions or masks that are no documents, targets in the padding; or what `Context.cut` raises.
    """
    if TOKENS in batch:
        return dict(batch)
    labels, mask = next_labels(batch), batch.get("attention_mask")
    whole = {key: value for key, value in batch.items() if key not in _TARGETS and value is not None}
    cut, tokens = context.cut({**whole, "shift_labels": labels}, pad=True, compare=compare)
    padded = 0 if mask is None else int((labels.masked_fill(mask != 0, IGNORE_INDEX) != IGNORE_INDEX).sum())
    if padded:  # on one device they would see the row's document, and here they see nothing but padding
        raise ValueError(
            f"{padded} tokens have targets, but attention_mask 0; over sequence={context.ranks} padding belongs to no "
            "document: set its labels to -100"
        )
    cut[TOKENS] = tokens
    if any(batch.get(key) is not None for key in ("labels", "shift_labels")):
        cut["labels"] = cut["shift_labels"]
    return cut


def _is_tokens(value: Any) -> bool:
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in kinds


def _described(batch: Any) -> str:
    """A batch in a few words, for a message."""
    if isinstance(batch, Tensor):
        return f"a tensor {list(batch.shape)} of {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {', '.join(map(_described, batch)) or 'nothing'}"
    return f"a {type(batch).__name__}"
