"""Sequences that are cut over ranks: which models know of it, and how the pairs of a data loader are cut."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from par_layers import Context, LayerSet

from .existing import pretrained_of


def check_attention(model: nn.Module, ranks: int) -> None:
    """Checks that a model is of a kind that can know of a sequence that is cut.

    Args:
        model: A model that `initialize` is given.
        ranks: Number of ranks of the axis `sequence`.

    Raises:
        ValueError: It is a model of transformers, whose attention would see the tokens of one rank alone.
    """
    pretrained = pretrained_of(model)
    if ranks > 1 and pretrained is not None:
        raise ValueError(
            f"sequence={ranks} with a {type(pretrained).__name__} of transformers, whose attention would see the "
            "tokens of one sequence rank alone; give these ranks to data, tensor or pipeline, or write the model with "
            "Strategy.layers"
        )


def reaches_other_tokens(model: nn.Module) -> bool:
    """Whether a module of the model has what reaches the tokens of other ranks: a layer set over them, or a context."""
    return any(_is_over_ranks(value) for module in model.modules() for value in vars(module).values())


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
    """What cuts the batches of a data loader over sequence ranks, where they are pairs of [B, S] integers.

    Rows are taken for one document each, so that a model needs no more than its tokens. No communication: the ranks of
    a sequence have the same samples.

    Args:
        context: What says which tokens this rank has.
    """

    def cut(batch: Any) -> Any:
        are_two = isinstance(batch, tuple | list) and len(batch) == 2 and not hasattr(batch, "_fields")
        if not are_two or not all(_is_tokens(one) for one in batch) or batch[0].shape != batch[1].shape:
            raise TypeError(
                f"the data loader gives {_described(batch)}, and over sequence={context.ranks} pairs of [B, S] "
                "integers alone are cut here; set dataloader.cut to a function of the batch that calls "
                "Strategy.context.cut and gives what the model is called with, or to None and cut the batches yourself"
            )
        tokens = context.tokens(batch[0].shape[1])
        mine = torch.from_numpy(tokens.index(context.rank)).to(batch[0].device)
        return type(batch)(one.index_select(1, mine) for one in batch)

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
