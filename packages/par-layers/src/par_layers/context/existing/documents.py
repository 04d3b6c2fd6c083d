"""Packed rows in one process: modules that read across documents are called once for each document.

Transformers separates the documents of a packed row only in its attention masks, and not in those of every model. Its
recurrent layers and convolutions read on into the next document. `separate_documents_` finds such modules by running a
small copy of the model, and lets each of them compute one document at a time.
"""

from collections.abc import Mapping
from inspect import signature, unwrap
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._torch_private import current_graph_task
from ..tokens import Tokens
from .packed_trial import TYPES, MixingModules, find_mixing_modules
from .recurrent import TokensFromAround, assembled, mapped, sliced
from .states import DocumentPart, document_parts
from .transformers import NAME

M = TypeVar("M", bound=nn.Module)

FOUND = "par_packed_rows"
"""Attribute of a model with the `MixingModules` that were found."""

TOKENS = "par_tokens"


def separate_documents_(model: M) -> M:
    """Let a Hugging Face Transformers model compute each document of a packed row by itself, in place.

    Documents begin where `position_ids` do not continue, as in Transformers' own masks. Call the model without
    attention_mask. Packed rows get `use_cache=False`, because Transformers separates no documents with a cache. Rows of
    one document are computed as before. Call this function before you shard the model. It runs a small copy of the
    model on the CPU and does not communicate.

    Args:
        model: A Hugging Face Transformers model for text, on any device, also meta.

    Returns:
        The model.

    Raises:
        ValueError: A module reads across documents and cannot compute one document at a time, or the model cannot be
            checked.
    """
    prepare_packed_rows_(model)
    check_packed_rows(model)
    for module in _models_in(model):
        if all(hook is not _with_documents for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(_with_documents, with_kwargs=True)
    return model


def check_packed_rows(model: nn.Module) -> None:
    """Raise if a prepared model cannot separate the documents of a packed row. Changes nothing.

    Args:
        model: A model that `prepare_packed_rows_` received, or a pipeline stage of it.

    Raises:
        ValueError: A module reads across documents.
    """
    found: MixingModules | None = getattr(model, FOUND, None)
    if found is not None and found.problem is not None:
        raise ValueError(found.problem)


def prepare_packed_rows_(model: nn.Module) -> None:
    """Do what `separate_documents_` does, but raise its error in the first call with a packed row.

    Args:
        model: A Hugging Face Transformers model. One with the attention of a context stays as it is.
    """
    if hasattr(model, FOUND) or hasattr(model, NAME):
        return
    found = find_mixing_modules(model, separate_modules_)
    separate_modules_(model, found.names)
    model.__dict__[FOUND] = found
    if found.problem is not None or found.typed is not None:
        for module in _models_in(model):
            module.register_forward_pre_hook(_RefusePackedRows(found), with_kwargs=True, prepend=True)


def check_packed_batch(found: MixingModules | None, batch: Mapping[str, Any]) -> None:
    """Raise if a model cannot separate the documents of a batch.

    Args:
        found: Result of the trial of the model; None without a trial.
        batch: Arguments of the model by name.

    Raises:
        ValueError: Positions restart in a row, and a module reads across documents; or the batch also has types of
            tokens, by which the model lets tokens attend across documents.
    """
    if found is None:
        return
    positions = batch.get("position_ids")
    types = [batch[key] for key in TYPES if found.typed is not None and batch.get(key) is not None]
    # With a mask, Transformers takes rows for padded ones.
    if not isinstance(positions, Tensor) or batch.get("attention_mask") is not None:
        return
    # It reads the positions from the device, so it runs for such models only.
    if (found.problem is None and not types) or packed_documents(positions) is None:
        return
    if found.problem is not None:
        raise ValueError(found.problem)
    if found.typed_text or any(bool(each.any()) for each in types):
        raise ValueError(found.typed)


def separate_modules_(model: nn.Module, names: tuple[str, ...]) -> None:
    """Let modules of a model compute each document of a packed row by itself, in place.

    Args:
        model: The model.
        names: Names of the modules; none contains another one.
    """
    # A model without the argument still gets positions from a packing loader; the hook takes them out.
    takes_none = "position_ids" not in _parameters(model)
    for module in _models_in(model) if names or takes_none else ():
        module.register_forward_pre_hook(_with_documents, with_kwargs=True)
    for name in names:
        DocumentwiseForward(model.get_submodule(name), name).replace_forward_(model, name)


class DocumentwiseForward(TokensFromAround):
    """Forward of a module that computes one document of a packed row after the other.

    Args:
        module: The module.
        name: Name of the module, for errors.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self._module, self._name = module, name
        self._was_packed = False

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return the output of the module, [rows, tokens, ...], of which each document is computed by itself.

        Raises:
            ValueError: The rows do not match their documents, or the module got a cache or a mask without numbers.
        """
        # The class's forward: the module's own attribute is this object.
        tokens, forward = self.known(keywords), type(self._module).forward
        if tokens is None:
            if self._was_packed and current_graph_task() != -1:  # -1 outside of backward
                raise ValueError(
                    f"{self._name} is recomputed in backward, and the module that recomputes it gets no documents of "
                    "packed rows; switch activation checkpointing off for this model, or put one document in each row"
                )
            return forward(self._module, *args, **keywords)
        self._was_packed = True
        takes = signature(forward)
        bound = takes.bind(self._module, *args, **keywords)
        given: dict[str, Any] = dict(bound.arguments)
        names = list(given)
        x: Tensor = given[names[1]]  # names[0] is self
        rows, length = x.shape[:2]
        if len(tokens.documents) not in {1, rows} or tokens.length != length:
            raise ValueError(
                f"{self._name} got {rows} rows of {length} tokens, but position_ids describe {len(tokens.documents)} "
                f"rows of {tokens.length}; pass position_ids of the same rows as input_ids"
            )
        # A cache holds the state behind the last token, whichever document that is of.
        for name, value in given.items():
            if value is not None and "Cache" in str(takes.parameters[name].annotation):
                raise ValueError(
                    f"{self._name} got a cache ({name}) with rows of several documents, whose states it would mix; "
                    "pass use_cache=False, or one document in each row"
                )
            if type(value).__name__ == "BlockMask":
                raise ValueError(
                    f"{self._name} got a BlockMask, which cannot be split into documents; make the model with "
                    "attn_implementation='sdpa'"
                )
        pieces: list[tuple[DocumentPart, Any]] = []
        # One call for each document, or for each run of rows whose documents lie alike.
        for span in document_parts(tokens, 0, rows):
            bound.arguments.update(_part_of(given, rows, length, span))
            pieces.append((span, forward(*bound.args, **bound.kwargs)))
        return assembled(pieces)


def _part_of(value: Any, rows: int, length: int, span: DocumentPart) -> Any:
    """Return a nested value with the document's part of each tensor of tokens, and of each mask of pairs of tokens."""

    def part(x: Tensor) -> Tensor:
        # A mask of pairs has tokens in two dims, and both are cut.
        if x.dim() != 4 or x.shape[-2:] != (length, length) or x.shape[0] not in {1, rows}:
            result: Tensor = sliced(x, rows, length, span)
            return result
        here = x[slice(*span.rows)] if x.shape[0] == rows else x  # [rows or 1, heads or 1, tokens, tokens]
        return here[..., span.start : span.stop, span.start : span.stop]

    return mapped(value, part)


def _with_documents(
    module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the documents of packed rows to the keywords of a model. It is a forward pre-hook."""
    takes = _parameters(module)
    positions = _argument("position_ids", takes, args, keywords)
    rest = keywords if "position_ids" in takes else {key: x for key, x in keywords.items() if key != "position_ids"}
    if not isinstance(positions, Tensor) or isinstance(keywords.get(TOKENS), Tokens):
        return (args, rest) if rest is not keywords else None
    # With a mask, Transformers takes rows for padded ones, and positions do not describe documents.
    documents = None if _argument("attention_mask", takes, args, keywords) is not None else packed_documents(positions)
    if documents is None:
        return args, rest
    if _argument("past_key_values", takes, args, keywords) is not None or keywords.get("use_cache"):
        raise ValueError(
            f"use_cache=True: {type(module).__name__} got rows of several documents, which Transformers does not "
            "separate when it has a cache; pass use_cache=False"
        )
    length = sum(documents[0])
    tokens = Tokens(length, length, documents, (((0, length),),))
    return args, {**rest, "use_cache": False, TOKENS: tokens}


def packed_documents(positions: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Return the lengths of the documents of each row, once if all rows are alike; None if each row is one document.

    Args:
        positions: Positions of tokens, int64 [rows, tokens], or [4, rows, tokens] of a model with images, of which the
            first are those of text. Other positions describe no documents.
    """
    here = positions[0] if positions.dim() == 3 and len(positions) == 4 else positions
    if here.dim() != 2 or not here.numel():
        return None
    # Once for a step: layers get the result, and do not wait for the device again.
    here = here.detach().cpu()
    # As Transformers' masks find documents: a position that is not the next one begins a document.
    begins = torch.diff(here, dim=1) != 1
    if not bool(begins.any()):
        return None
    edges = [[0, *(row.nonzero()[:, 0] + 1).tolist(), here.shape[1]] for row in begins]
    documents = tuple(tuple(b - a for a, b in pairwise(row)) for row in edges)
    return documents[:1] if len(set(documents)) == 1 else documents


class _RefusePackedRows:
    """Forward pre-hook that raises an error for packed rows which a model cannot separate.

    Args:
        found: Result of the trial of the model.
    """

    def __init__(self, found: MixingModules) -> None:
        self._found = found

    def __call__(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raise ValueError if positions restart in a row."""
        takes = _parameters(module)
        names = ("position_ids", "attention_mask", *TYPES)
        check_packed_batch(self._found, {name: _argument(name, takes, args, keywords) for name in names})


def _models_in(model: nn.Module) -> list[nn.Module]:
    """Return the Transformers models in a model that take ids or embeddings of text, itself included."""
    return [
        module
        for module in model.modules()
        if module is model or (hasattr(type(module), "config_class") and "inputs_embeds" in _parameters(module))
    ]


def _parameters(module: nn.Module) -> Mapping[str, Any]:
    return signature(unwrap(type(module).forward)).parameters


def _argument(name: str, takes: Mapping[str, Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return an argument of a forward by name, positional or not; None without it."""
    if name in keywords:
        return keywords[name]
    index = list(takes).index(name) - 1 if name in takes else len(args)  # the first parameter is self
    return args[index] if 0 <= index < len(args) else None
