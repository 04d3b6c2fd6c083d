"""Trial of a model on a few tokens: which of its layers read other tokens than through attention.

A small copy of the model runs on the CPU, with attention replaced by a function of each token alone. Then one token is
poisoned with NaN. A module whose output changes at other tokens reads its neighbours in the sequence: it is recurrent,
a convolution or a shift of tokens, whatever its name. It can be split over ranks only if it continues from a cache.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..tokens import Tokens
from .recurrent import RecurrentLayer, TokensFromAround, call, first_tensor, mapped, sliced
from .states import DocumentPart, States

LENGTH = 73
"""Tokens of the trial. More than the blocks of 64 in which layers compute, and a prime, which no other size equals."""

POISONED = (0, LENGTH // 2, LENGTH - 1)
"""Token that is poisoned in each row of the trial but the first, which stays as it is."""

ROWS = len(POISONED) + 1

PIECES = (0, 37, LENGTH)
"""Borders at which a layer must continue from its states."""

SMALL = 1 << 16
"""Numbers of a parameter up to which each is drawn. Larger ones repeat a row, without memory of their own."""

TOLERANCE = 1e-3
"""Relative difference that counts as another value: fp32, whose matmuls may add in another order."""

ADVICE = "use the ranks of 'sequence' for data, tensor or pipeline"


def try_tokens(model: nn.Module, attend: Callable[[nn.Module, object], None]) -> tuple[list[RecurrentLayer], list[str]]:
    """Return the recurrent layers of a decoder, and the names of parts that text alone does not reach. Changes nothing.

    Args:
        model: A decoder of Hugging Face Transformers, on any device, also meta.
        attend: Function that replaces the attention of a model by that of a context, in place.

    Raises:
        ValueError: A module reads other tokens and cannot continue from a state, or the trial failed.
    """
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        trial = _TrialRun(model, attend)
        found: list[RecurrentLayer] = []
        while mixing := trial.run():
            names = {each.name for each in mixing}
            # A module around a recurrent one reads other tokens as well. The innermost is the cause.
            inner = [each for each in mixing if not any(name.startswith(f"{each.name}.") for name in names)]
            for each in inner:
                layer = _continuing(mixing, each)
                found.append(layer)
                trial.silence(layer.name)
        return found, trial.untried()


@dataclass(frozen=True)
class _MixingCall:
    """A call of a module in the trial that reads other tokens.

    Args:
        name: Name of the module.
        module: The module.
        arguments: Arguments of its forward by name, the module itself first.
        output: Return value of the call.
    """

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    output: Any


class _TrialRun:
    """A small copy of a model that runs on a few tokens.

    Args:
        model: The model.
        attend: Function that replaces the model's attention, see `try_tokens`.
    """

    def __init__(self, model: Any, attend: Callable[[nn.Module, object], None]) -> None:
        self._kind = type(model).__name__
        self._model: Any = stand_in(model, _positive)
        # Learned positions end somewhere, in tiny models before the trial does.
        attend(self._model, _TokenByToken(getattr(model.config.get_text_config(), "max_position_embeddings", None)))
        self._calls: list[_MixingCall] = []
        self._called: set[str] = set()
        for name, module in self._model.named_modules():
            module.register_forward_hook(self._watch(name), with_kwargs=True)
        self._model.get_input_embeddings().register_forward_hook(_poison)

    def run(self) -> list[_MixingCall]:
        """Run the copy, and return the calls in which a module read other tokens.

        Raises:
            ValueError: The copy fails, or computes numbers that are not finite.
        """
        self._calls.clear()
        tokens = Tokens(LENGTH, LENGTH, ((LENGTH,),), (((0, LENGTH),),))
        ids = (torch.arange(LENGTH) % 7 + 2).expand(ROWS, LENGTH) % self._model.get_input_embeddings().num_embeddings
        try:
            self._model(input_ids=ids, par_tokens=tokens)
        except _Unclear as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(self._kind) else f"{self._kind}: {text}") from error
        except Exception as error:  # code of any family
            raise ValueError(
                f"{self._kind} fails on {LENGTH} tokens of text ({type(error).__name__}: {error}), so its "
                f"layers cannot be checked for reads of other tokens; {ADVICE}"
            ) from error
        return self._calls

    def untried(self) -> list[str]:
        """Return the parts of the model that text alone does not reach, such as the encoder of images."""
        return [
            name
            for name, module in self._model.named_modules()
            if name not in self._called
            and hasattr(self._model.get_submodule(name.rpartition(".")[0]), "config_class")
            and not isinstance(module, nn.ModuleList | nn.ModuleDict)
            and next(module.parameters(), None) is not None
        ]

    def silence(self, name: str) -> None:
        """Replace a module by a function of each token alone, so that what it hides can be seen."""
        seen = next(each for each in self._calls if each.name == name)
        module = self._model.get_submodule(name)
        like = first_tensor(seen.output)
        width = like.shape[2:]

        def forward(*args: Any, **keywords: Any) -> Any:
            x = next(each for each in (*args, *keywords.values()) if isinstance(each, Tensor))
            out = x.flatten(2).mean(-1)[(..., *(None for _ in width))].expand(*x.shape[:2], *width)
            return mapped(seen.output, lambda each: out if each is like else each)

        module.__dict__["forward"] = forward

    def _watch(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            self._called.add(name)
            read = [_changed(x, name) for x in _tensors((args, keywords)) if _is_of_tokens(x)]
            written = [_changed(x, name) for x in _tensors(output) if _is_of_tokens(x)]
            if not read or not written:
                return
            before, after = torch.stack(read).any(0), torch.stack(written).any(0)
            if bool((after & ~before).any()):
                bound = signature(type(module).forward).bind(module, *args, **keywords)
                self._calls.append(_MixingCall(name, module, dict(bound.arguments), output))

        return hook


class _Unclear(Exception):  # noqa: N818 - it carries the text of a ValueError out of the code of a model
    """The trial gives no numbers to compare."""


class _TokenByToken:
    """Replacement of a context, whose attention computes each token by itself.

    Args:
        positions: Number of positions of the model; None without a limit.
    """

    def __init__(self, positions: int | None) -> None:
        self._last = (positions or LENGTH) - 1

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
        """Return an output [B, s, H, D] for queries, keys and values [B, s, heads, D]."""
        groups = q.shape[2] // v.shape[2] if v.shape[2] <= q.shape[2] else 1
        return v.repeat_interleave(groups, 2) + (q.mean((2, 3)) + k.mean((2, 3)))[:, :, None, None]

    def positions(self, tokens: Tokens) -> Tensor:
        """Return the positions of the tokens, [1, s]; the last position of the model where it has no more."""
        return torch.from_numpy(tokens.positions(0)).clamp(max=self._last)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_TokenByToken":
        return self


def stand_in(model: nn.Module, draw: Callable[[nn.Parameter, torch.Generator], Tensor]) -> Any:
    """Return a copy of a model on the CPU in fp32, without hooks, whose large parameters take no memory.

    Args:
        model: A Hugging Face Transformers model on any device, also meta.
        draw: Function that returns the values of a parameter, expanded or strided to its shape.
    """
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            values = draw(parameter, generator)
        else:
            values = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for buffer in model.buffers():
        dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
        copied_buffer = torch.ones(buffer.shape, dtype=dtype)
        memo[id(buffer)] = copied_buffer if buffer.is_meta else copied_buffer.copy_(buffer)
    # States of an earlier forward, which some modules keep, have a graph and cannot be copied.
    kept = (each for module in model.modules() for each in vars(module).values() if isinstance(each, Tensor))
    memo.update((id(each), each.detach()) for each in kept if not each.is_leaf)
    copied: Any = copy.deepcopy(model, memo)
    for before, module in zip(model.modules(), copied.modules(), strict=True):
        own = [each for each in before.buffers(recurse=False) if each.is_meta]
        if own and next(before.parameters(recurse=False), None) is None:
            copied._init_weights(module)  # which computes buffers from the configuration
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            # A quantized linear computes each token by itself, as any linear does.
            module.__class__ = nn.Linear
            values = torch.rand(module.in_features, generator=generator) * 0.04 + 0.01
            weight = values.expand(module.out_features, module.in_features)
            module.weight = nn.Parameter(weight, requires_grad=False)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        if isinstance(module.__dict__.get("forward"), TokensFromAround):  # of a context that the model has already
            del module.__dict__["forward"]
    copied.config.get_text_config().use_cache = False
    if hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")  # it computes the experts that the few tokens choose, no others
    return copied.eval()


def _positive(parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    """Return small positive values for a parameter: a model may take their root, or their logarithm."""
    drawn = parameter.shape if parameter.numel() <= SMALL else parameter.shape[-1:]
    return (torch.rand(drawn, generator=generator) * 0.04 + 0.01).expand(parameter.shape)


def _poison(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Set the embedding of one token in each row but the first to NaN. It is a forward hook."""
    del module, args
    poisoned = output.clone()
    for row, token in enumerate(POISONED, 1):
        poisoned[row, token] = torch.nan
    return poisoned


def _is_of_tokens(x: Tensor) -> bool:
    # Tensors [ROWS x LENGTH, ...] are no use: inside experts, tokens are in the order of their experts.
    return x.is_floating_point() and x.shape[:2] == (ROWS, LENGTH) and x.numel() > 0


def _changed(x: Tensor, name: str) -> Tensor:
    """Return which tokens of each poisoned row differ from the first row, bool [ROWS - 1, LENGTH].

    Args:
        x: A tensor [ROWS, LENGTH, ...].
        name: Name of the module, for an error.
    """
    table = x.reshape(ROWS, LENGTH, -1)
    if not bool(table[0].isfinite().all()):
        raise _Unclear(
            f"{name} computes numbers that are not finite on {LENGTH} tokens of text, so it cannot be checked for "
            f"reads of other tokens; {ADVICE}"
        )
    limit = TOLERANCE * table[0].abs().amax()
    return ~((table[1:] - table[0]).abs() <= limit).all(-1)  # NaN compares as False


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors, value))


def _continuing(calls: list[_MixingCall], cause: _MixingCall) -> RecurrentLayer:
    """Return the module that continues from states: the cause, or the nearest module around it that takes a cache.

    Raises:
        ValueError: There is none, or it computes something else from a state than in one call.
    """
    around = [each for each in calls if each.name == cause.name or cause.name.startswith(f"{each.name}.")]
    of_cache = {
        each.name: name
        for each in around
        for name, parameter in signature(type(each.module).forward).parameters.items()
        if each.name and "Cache" in str(parameter.annotation)
    }
    call_of = {each.name: each for each in around}
    who = f"{cause.name or 'the model'} is {type(cause.module).__name__}, which reads other tokens than attention does"
    if not of_cache:
        raise ValueError(f"{who}, and takes no cache with the state of earlier tokens; {ADVICE}")
    name = max(of_cache, key=len)
    try:
        numbers = _tried(call_of[name], of_cache[name])
    except Exception as error:  # code of any family
        raise ValueError(
            f"{who}, and cannot continue from a state of earlier tokens ({type(error).__name__}: {error}); {ADVICE}"
        ) from error
    if numbers is None:
        raise ValueError(
            f"{who}, and computes other numbers when it continues from the state of earlier tokens; {ADVICE}"
        )
    return RecurrentLayer(name, of_cache[name], numbers)


def _tried(seen: _MixingCall, cache: str) -> int | None:
    """Compute a module in pieces, each from the states of the piece before.

    Returns:
        Numbers in the states of a row; None if the pieces differ from one call.
    """
    arguments = {name: value for name, value in seen.arguments.items() if name != cache}
    states: States = {}
    outputs = []
    for start, stop in pairwise(PIECES):
        span = DocumentPart((0, 1), start, stop, continues=start > 0, goes_on=True)
        output, states = call(seen.module, sliced(arguments, ROWS, LENGTH, span), cache, states)
        outputs.append(first_tensor(output))
    whole = first_tensor(seen.output)[:1]
    joined = torch.cat(outputs, 1)
    equal = joined.shape == whole.shape and bool(((joined - whole).abs() <= TOLERANCE * whole.abs().amax()).all())
    return sum(state[0].numel() for state in states.values()) if equal and states else None
