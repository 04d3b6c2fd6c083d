"""Trial of a model on packed rows: which of its modules read across documents.

A small copy of the model runs on the CPU on three rows: documents A and B, another document A with the same B, and B
before A. Every output for B must be the same in all rows. The innermost module whose output for B depends on A is the
cause. This module, or else the nearest one around it that can, then computes one document at a time, and the trial runs
again.

A model with images may let the tokens of an image attend to each other, and derive that from the types of tokens. Such
a model runs once more with types.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature, unwrap
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .trial import stand_in

LENGTHS = (37, 36)
"""Tokens of the documents A and B. Their sum, 73, exceeds the blocks in which layers compute, and is a prime."""

TOLERANCE = 1e-4
"""Relative difference that counts as another value. Models that separate documents differed by 1e-6, others by 1e-2."""

ADVICE = "put one document in each row"

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Keywords that mark the tokens of images; 0 for text."""


@dataclass(frozen=True)
class MixingModules:
    """Modules of a model that read across the documents of a packed row.

    Args:
        names: Modules that must compute one document at a time.
        problem: Reason why documents cannot be separated; None if they can.
        typed: Reason why documents with types of tokens cannot be separated; None if they can.
        typed_text: Whether the reason holds for text, too, of which all types are 0.
    """

    names: tuple[str, ...]
    problem: str | None = None
    typed: str | None = None
    typed_text: bool = False


def find_mixing_modules(model: nn.Module, separate: Callable[[nn.Module, tuple[str, ...]], None]) -> MixingModules:
    """Return the modules of a model that read across documents. Changes nothing.

    Args:
        model: A Hugging Face Transformers model, on any device, also meta.
        separate: Function that lets modules of a model, by name, compute one document at a time, in place.
    """
    names: tuple[str, ...] = ()
    kind = type(model).__name__
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        try:
            seen = _run(model, separate, names)
        except Exception as error:  # code of any family
            return MixingModules(
                (),
                f"{kind} fails on {sum(LENGTHS)} tokens of text ({type(error).__name__}: {error}), so it cannot be "
                f"checked whether its packed documents read each other; {ADVICE}",
            )
        while seen.difference > TOLERANCE:
            chain = seen.chain()
            if not chain:
                return MixingModules(
                    (),
                    f"{kind} computes other numbers for a document behind another one in a packed row: its positions "
                    f"do not restart, or it mixes tokens outside of its modules; {ADVICE}",
                )
            for name in chain:
                # All modules of a class at once, so that there is a run for each class, and not for each layer.
                further = _with_kind_of(model, name, names)
                try:
                    tried = _run(model, separate, further)
                except Exception:  # noqa: S112 - it cannot be called so, and the next one around it is tried
                    continue
                # Progress is a leak that is gone, or one that begins at a later module.
                if name not in tried.leaking and tried.chain()[:1] != chain[:1]:
                    names, seen = further, tried
                    break
            else:
                who = f"{chain[0]} ({type(model.get_submodule(chain[0])).__name__})"
                return MixingModules(
                    (),
                    f"{who} of {kind} reads across the documents of a packed row, and neither it nor a module around "
                    f"it can compute one document at a time; {ADVICE}",
                )
        return _with_types(model, separate, names)


def _with_types(
    model: nn.Module, separate: Callable[[nn.Module, tuple[str, ...]], None], names: tuple[str, ...]
) -> MixingModules:
    """Return modules that compute one document at a time, and whether types of tokens still mix documents."""
    takes, kind = signature(unwrap(type(model).forward)).parameters, type(model).__name__
    keys = [name for name in TYPES if name in takes]
    for image in (0, 1) if keys else ():
        try:
            mixes = _run(model, separate, names, dict.fromkeys(keys, image)).difference > TOLERANCE
            reason = "derives from it which later tokens a token attends to, and reads those of other documents"
        except Exception as error:  # code of any family
            mixes, reason = True, f"fails on tokens of type {image} ({type(error).__name__}: {error})"
        if mixes:
            advice = f"{ADVICE}, or pack only documents without images{'' if image else f' and without {keys[0]}'}"
            problem = f"the batch has packed rows and {keys[0]}: {kind} {reason}; {advice}"
            return MixingModules(names, typed=problem, typed_text=not image)
    return MixingModules(names)


@dataclass(frozen=True)
class _PackedResult:
    """Result of a trial.

    Args:
        difference: Largest relative difference of the outputs for document B.
        leaking: Modules that got the same tokens of B in two rows and returned others, in the order of their calls.
    """

    difference: float
    leaking: tuple[str, ...]

    def chain(self) -> list[str]:
        """Return the first innermost leaking module, and the leaking modules around it from the inside."""
        inner = next(
            (name for name in self.leaking if not any(other.startswith(f"{name}.") for other in self.leaking)), None
        )
        if not inner:
            return []
        return sorted((name for name in self.leaking if name and f"{inner}.".startswith(f"{name}.")), key=len)[::-1]


def _with_kind_of(model: nn.Module, name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names with all modules of the same class as one of them, without modules inside of others."""
    kind = type(model.get_submodule(name))
    every = {*names, *(each for each, module in model.named_modules() if type(module) is kind)}
    return tuple(each for each in sorted(every) if not any(each.startswith(f"{other}.") for other in every))


def _run(
    model: nn.Module,
    separate: Callable[[nn.Module, tuple[str, ...]], None],
    names: tuple[str, ...],
    images: Mapping[str, int] = MappingProxyType({}),
) -> _PackedResult:
    """Run a small copy of a model on packed rows, of which some modules compute one document at a time.

    Args:
        model: The model.
        separate: See `find_mixing_modules`.
        names: Names of these modules.
        images: Type of the tokens of images by keyword, see `TYPES`.
    """
    copied: Any = stand_in(model, _draw)
    if getattr(copied.config, "_attn_implementation", "eager") not in {"eager", "sdpa"}:
        copied.set_attn_implementation("eager")  # the others do not run on a CPU
    separate(copied, names)
    # Learned positions end somewhere, and the copy's may end early.
    limit = getattr(copied.config.get_text_config(), "max_position_embeddings", None) or sum(LENGTHS)
    first, second = (min(each, limit // 2) for each in LENGTHS)
    generator = torch.Generator().manual_seed(1)
    drawn: dict[int, Tensor] = {}

    def embed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # The copy repeats numbers of a large embedding, so tokens get features of their own.
        del module, args
        width = output.shape[-1]
        if width not in drawn:
            drawn[width] = torch.randn(2 * first + second, width, generator=generator)
        a, other, b = drawn[width].split([first, first, second])
        return torch.stack([torch.cat([a, b]), torch.cat([other, b]), torch.cat([b, a])]).to(output.dtype)

    copied.get_input_embeddings().register_forward_hook(embed)
    leaking: list[str] = []
    shape = (3, first + second)

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            del module
            read = [_leak(x, first) for x in _of_tokens((args, keywords), shape)]
            written = [_leak(x, first) for x in _of_tokens(output, shape)]
            # A module that received other tokens of B already is not the one that mixed them.
            if read and max(read) <= TOLERANCE < max(written, default=0.0):
                leaking.append(name)

        return hook

    for name, module in copied.named_modules():
        module.register_forward_hook(watch(name), with_kwargs=True)
    # Rows AB, A'B and BA: B must be alike in all, whatever lies before it.
    ab, ba = [*range(first), *range(second)], [*range(second), *range(first)]
    ids = torch.full(shape, 3 % copied.get_input_embeddings().num_embeddings)
    # Each document has two images. One in A is at the border to B, and one in B at the border to A.
    a, b = (torch.arange(length) * 4 // length % 2 for length in (first, second))
    has_image = torch.stack([torch.cat([a, 1 - b]), torch.cat([0 * a, 1 - b]), torch.cat([1 - b, a])])
    types = {name: has_image * image for name, image in images.items()}
    output = copied(input_ids=ids, position_ids=torch.tensor([ab, ab, ba]), **types)
    result = next(_of_tokens(output, shape))
    scale = float(result[0].abs().amax())
    behind = float((result[0, first:] - result[2, :second]).abs().amax())
    return _PackedResult(max(_leak(result, first), behind / scale), tuple(leaking))


def _draw(parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    """Return values for a parameter that let every input count, in memory of its longest side."""
    if parameter.dim() < 2:  # positive: a model may take their root, or their logarithm
        return torch.rand(parameter.shape, generator=generator) + 0.5
    # A Hankel matrix: all rows differ, and a large embedding takes no memory of its own.
    needed = sum(parameter.shape) - parameter.dim() + 1
    numbers = torch.randn(needed, generator=generator) * parameter.shape[-1] ** -0.5
    values: Tensor = numbers.as_strided(parameter.shape, (1,) * parameter.dim())
    return values


def _leak(x: Tensor, first: int) -> float:
    """Return the largest difference of the second document between the first two rows, relative."""
    return float((x[0, first:] - x[1, first:]).abs().amax() / x[0].abs().amax().clamp_min(1e-30))


def _of_tokens(value: Any, shape: tuple[int, int]) -> Iterator[Tensor]:
    """Yield the tensors of floats [3, tokens, ...] in a nested value."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.shape[:2] == shape and value.numel():
            yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _of_tokens(each, shape)
