"""Recurrent layers over a split sequence, their code unchanged.

A recurrent layer of Hugging Face Transformers continues from the states in its cache. Here the cache of a layer is
filled with the states of the rank on the left, and its new states go to the rank on the right. Documents that begin on
a rank begin with empty states, so that nothing leaks between packed documents.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..tokens import Tokens
from .handover import StateLink
from .states import DocumentPart, StateCache, States, document_parts


@dataclass(frozen=True)
class RecurrentLayer:
    """A module that continues from the states of earlier tokens.

    Args:
        name: Name of the module in the model.
        cache: Name of the argument of its forward that takes a cache.
        numbers: Numbers in the states of a row, which each rank sends to the next.
    """

    name: str
    cache: str
    numbers: int


def carry(model: nn.Module, layers: Iterable[RecurrentLayer], link: Callable[[], StateLink]) -> None:
    """Let the recurrent layers of a model receive states from the left, and send theirs to the right, in place.

    Args:
        model: The model.
        layers: Recurrent layers of the model.
        link: Function that returns the connection of a layer.
    """
    for layer in layers:
        forward = CarriedForward(model.get_submodule(layer.name), layer, link())
        forward.replace_forward_(model, layer.name)


def stop_at(model: nn.Module, parts: Iterable[str]) -> None:
    """Let parts of a model raise an error when they are called, because nobody checked which tokens they read.

    Args:
        model: The model.
        parts: Names of its modules.
    """

    def stop(part: nn.Module, *_: Any, name: str) -> None:
        raise ValueError(
            f"{name} ({type(part).__name__}) does not run for text alone, so it was not checked for reads of other "
            "tokens; use the ranks of 'sequence' for data, tensor or pipeline if batches need it"
        )

    for name in parts:
        model.get_submodule(name).register_forward_pre_hook(partial(stop, name=name))


class TokensFromAround:
    """Forward of a module that needs the split of its tokens, also if the code around it passes no keywords on.

    Attributes:
        tokens: Splits that the modules around it received in the calls under way, innermost last.
    """

    def __init__(self) -> None:
        self.tokens: list[Tokens | None] = []

    def replace_forward_(self, model: nn.Module, name: str) -> None:
        """Become the forward of a module of a model, in place.

        Args:
            model: The model.
            name: Name of the module.
        """
        model.get_submodule(name).__dict__["forward"] = self
        # The modules around it get the split. Recomputation calls one of them again, in backward.
        path = name.split(".")
        for around in (model.get_submodule(".".join(path[:depth])) for depth in range(len(path))):
            around.register_forward_pre_hook(self.enter, with_kwargs=True)
            around.register_forward_hook(self.leave, always_call=True)

    def known(self, keywords: dict[str, Any]) -> Tokens | None:
        """Return the split in the keywords of the module, or of the nearest module around it; None without one."""
        given = [keywords.get("par_tokens"), *reversed(self.tokens)]
        return next((each for each in given if isinstance(each, Tokens)), None)

    def enter(self, module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        """Store the split of the tokens that a module around this one receives. It is a forward pre-hook."""
        del module, args
        tokens = keywords.get("par_tokens")
        outer = self.tokens[-1] if self.tokens else None
        self.tokens.append(tokens if isinstance(tokens, Tokens) else outer)

    def leave(self, *_: Any) -> None:
        """Drop the split that `enter` stored. It is a forward hook, and runs also if a hook before `enter` raised."""
        del self.tokens[-1:]


class CarriedForward(TokensFromAround):
    """Forward of a recurrent module over a split sequence.

    Args:
        module: The module.
        layer: Name, cache and states of the module.
        link: Connection to the neighbouring ranks.
    """

    def __init__(self, module: nn.Module, layer: RecurrentLayer, link: StateLink) -> None:
        super().__init__()
        self._module, self._layer, self._link = module, layer, link

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Compute the parts of documents on this rank, one after the other.

        Raises:
            ValueError: The split of the tokens is missing or does not match, or ranks do not hold consecutive tokens.
        """
        tokens = self.known(keywords)
        if tokens is None:
            raise ValueError(
                f"{self._layer.name} needs the split of its tokens; call model(**batch, par_tokens=tokens)"
            )
        bound = signature(type(self._module).forward).bind(self._module, *args, **keywords)
        bound.arguments.pop(self._layer.cache, None)
        names = list(bound.arguments)
        x: Tensor = bound.arguments[names[1]]  # names[0] is self
        rows, local = x.shape[:2]
        if local != tokens.local or len(tokens.documents) not in {1, rows}:
            raise ValueError(
                f"{self._layer.name} got {rows} rows of {local} tokens, but par_tokens split {len(tokens.documents)} "
                f"rows into {tokens.local} tokens a rank; pass the split that cut() returned with this batch"
            )
        if local == 1 < tokens.ranks:
            raise ValueError(
                f"{self._layer.name} passes a state from each rank to the next, and needs 2 tokens a rank; it got 1: "
                "use longer rows or fewer ranks of 'sequence'"
            )
        is_trained = torch.is_grad_enabled() and (
            x.requires_grad or any(parameter.requires_grad for parameter in self._module.parameters())
        )
        pieces: list[tuple[DocumentPart, Any]] = []
        for span in document_parts(tokens, self._link.rank, rows):
            before: States = {}
            # For a single token after others, layers run code for generation, which changes states in place. With the
            # next token, of another document, they run the code of training; its output is dropped.
            is_single = span.continues and span.stop == 1
            part = sliced(bound.arguments, rows, local, replace(span, stop=2) if is_single else span)
            if span.continues:
                part[names[1]], before = self._link.receive(part[names[1]], with_gradient=is_trained)
            output, states = call(self._module, part, self._layer.cache, before)
            if is_single:
                output = mapped(output, lambda each: each[:, :1])
            if span.goes_on:
                sent = self._link.send(part[names[1]], first_tensor(output), states, with_gradient=is_trained)
                output = sent if isinstance(output, Tensor) else (sent, *output[1:])
            pieces.append((span, output))
        return assembled(pieces)


def call(module: nn.Module, arguments: dict[str, Any], cache: str, before: States) -> tuple[Any, States]:
    """Call a recurrent module from given states.

    Args:
        module: The module.
        arguments: Arguments of its forward by name, of which the first is the module itself.
        cache: Name of the argument for the cache.
        before: States of the earlier tokens; empty at the begin of a document.

    Returns:
        The output, and the states after it.
    """
    states = StateCache(before)
    takes = signature(type(module).forward)
    bound = takes.bind_partial()
    bound.arguments.update({**arguments, cache: states})
    # `arguments` of a bound signature must have the order of the parameters.
    bound.arguments = {name: bound.arguments[name] for name in takes.parameters if name in bound.arguments}
    return type(module).forward(*bound.args, **bound.kwargs), states.states()


def sliced(value: Any, rows: int, tokens: int, span: DocumentPart) -> Any:
    """Return a nested value with the span of each tensor [rows or 1, tokens, ...] in it."""

    def part(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != tokens or x.shape[0] not in {1, rows}:
            return x
        here = x[slice(*span.rows)] if x.shape[0] == rows else x
        return here[:, span.start : span.stop]

    return mapped(value, part)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)({key: mapped(each, change) for key, each in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change) for each in value)
    return value


def first_tensor(output: Any) -> Tensor:
    """Return the activations that a module gives: its output, or the first of its outputs."""
    result: Tensor = output if isinstance(output, Tensor) else output[0]
    return result


def assembled(pieces: list[tuple[DocumentPart, Any]]) -> Any:
    """Return the output of all parts together: activations [rows, tokens, ...], and None for other outputs."""
    ordered = sorted(pieces, key=lambda piece: (piece[0].rows, piece[0].start))
    by_rows: dict[tuple[int, int], list[Tensor]] = {}
    for span, output in ordered:
        by_rows.setdefault(span.rows, []).append(first_tensor(output))
    joined = [parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in by_rows.values()]
    whole = joined[0] if len(joined) == 1 else torch.cat(joined)
    _, output = ordered[0]
    if isinstance(output, Tensor):
        return whole
    # A state that a layer returns beside its activations is one of a part of the tokens.
    return (whole, *(None for _ in range(len(output) - 1)))
