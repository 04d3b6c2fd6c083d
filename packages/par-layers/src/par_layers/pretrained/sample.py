"""Text from a model in training, one token at a time, each from the full prefix, identical on every rank.

One rank chooses each token and broadcasts it. Logits of two ranks may differ in the last bit, so ranks that chose for
themselves could continue from different prefixes.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from .._initialize import seed_of
from ..context.context import Context
from .causal import TOKENS, logits_of, parallelization_around, pretrained_of
from .sequence import cut_dict

Ends = int | Sequence[int] | Literal["auto"] | None
"""Tokens that end a text: one, several, those in the config of a transformers model, or none."""

Run = Callable[..., Any]
"""A function from ids [rows, time] and keywords to a model's outputs; None on ranks that do not have them."""

Prompts = TypeVar("Prompts", Tensor, list[Tensor])
"""Ids of prompts of one length, [rows, time], or of several lengths, a list of [time]; results have the same form."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts, and the options of their continuation.

    Args:
        prompts: The ids of each prompt, [time], int64, on the CPU.
        tokens: Largest number of new tokens of a prompt.
        temperature: The divisor of the logits before a token is drawn; 0 takes the most likely token.
        seed: Seed of the draws.
        ends: The tokens after which a text is over.
    """

    prompts: list[Tensor]
    tokens: int
    temperature: float
    seed: int
    ends: tuple[int, ...]

    def digest(self) -> str:
        """Return a digest that must be identical on all ranks."""
        prompts = [prompt.tolist() for prompt in self.prompts]
        text = repr((prompts, self.tokens, self.temperature, self.seed, self.ends))
        return hashlib.sha256(text.encode()).hexdigest()


def read_request(
    model: nn.Module, ids: Prompts, *, tokens: int, temperature: float, seed: int, ends: Ends, ranks: int
) -> Request:
    """Check what a model is to continue, and how, before anything runs.

    Args:
        model: The model, or this rank's part of it.
        ids: Prompts.
        tokens: Largest number of new tokens of a prompt.
        temperature: The divisor of the logits before a token is drawn; 0 takes the most likely token.
        seed: Seed of the draws.
        ends: Tokens that end a text.
        ranks: Number of tensor ranks.

    Raises:
        TypeError: The ids are no integer tensors, or the model is made of layers that may return sharded logits.
        ValueError: A prompt is empty or too long, an id is outside of the vocabulary, or an option has a wrong value.
    """
    if parallelization_around(model) is None and ranks > 1:
        raise TypeError(
            f"this {type(model).__name__} is made of layers that may return sharded logits, and sample() needs full "
            "logits; pass a model that par_layers.parallelize has sharded, such as a transformers model"
        )
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens is {tokens!r}; give the number of new tokens, at least 1")
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; give 0, which takes the most likely token, or more")
    prompts = list(ids)
    if not prompts or not all(isinstance(prompt, Tensor) for prompt in prompts):
        raise TypeError(f"sample() was given a {type(ids).__name__} of no tensors; give ids [rows, time], or a list")
    for row, prompt in enumerate(prompts):
        if prompt.dim() != 1 or prompt.is_floating_point() or not len(prompt):
            raise ValueError(
                f"prompt {row} has shape {list(prompt.shape)} and dtype {prompt.dtype}; give whole numbers [time] for "
                "each prompt, at least one"
            )
    prompts = [prompt.detach().to("cpu", torch.int64) for prompt in prompts]
    pretrained: Any = pretrained_of(model)
    config = None if pretrained is None else pretrained.config.get_text_config()
    words = getattr(config, "vocab_size", None)
    low, high = min(int(prompt.min()) for prompt in prompts), max(int(prompt.max()) for prompt in prompts)
    if low < 0 or (words is not None and high >= words):
        what = "negative" if low < 0 else f"beyond the {words} words of the model"
        raise ValueError(f"the prompts hold the id {low if low < 0 else high}, which is {what}; use its tokenizer")
    context, longest = getattr(config, "max_position_embeddings", None), max(map(len, prompts))
    if context is not None and longest + tokens > context:
        raise ValueError(
            f"a prompt of {longest} tokens and {tokens} new ones are more than the model's context of {context}; give "
            "a shorter prompt, or fewer tokens"
        )
    if ends == "auto":
        ends = getattr(getattr(pretrained, "generation_config", None), "eos_token_id", None)
        ends = getattr(config, "eos_token_id", None) if ends is None else ends
    after = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    return Request(prompts=prompts, tokens=tokens, temperature=temperature, seed=seed, ends=after)


def write_on(
    request: Request, model: nn.Module, run: Run, context: Context, *, rows: int, chooser: int, device: torch.device
) -> list[Tensor]:
    """Return the prompts with the model's continuations, up to a token that ends them. Collective.

    Prompts of different lengths are padded at the end, to which a causal model does not attend.

    Args:
        request: The prompts, identical on every rank.
        model: The model, or this rank's part of it.
        run: Function that runs the model, such as the model itself, or a pipeline.
        context: The context parallelism, which splits texts over the ranks of an axis `sequence`.
        rows: Smallest number of rows that `run` takes, such as a pipeline's microbatches; rows are repeated up to it.
        chooser: Global rank that chooses the tokens; `run` returns outputs on it.
        device: The device of the model.

    Returns:
        Each prompt's ids, int64 [time], on the CPU.
    """
    texts = [prompt.tolist() for prompt in request.prompts]
    numbers = [_uniform(request, row) for row in range(len(texts))]
    writing, first = list(range(len(texts))), list(map(len, texts))
    logits_after = _logits_after(model, run) if context.ranks == 1 else _over_ranks(model, run, context)
    with _evaluating(model), torch.no_grad():
        for _ in range(request.tokens):
            lengths = [len(texts[row]) for row in writing]
            ids = torch.zeros(len(writing), max(lengths), dtype=torch.int64)
            for place, row in enumerate(writing):
                ids[place, : lengths[place]] = torch.tensor(texts[row])
            # Repeated before they are split over ranks, since a description of the split counts rows, too.
            ids = ids[torch.arange(max(rows, len(ids))) % len(ids)]
            logits = logits_after(ids.to(device), lengths)
            chosen = torch.empty(len(writing), dtype=torch.int64, device=device)
            if logits is not None and dist.get_rank() == chooser:
                # A row's n-th new token takes its n-th number, whatever rows have ended before.
                drawn = torch.stack([numbers[row][len(texts[row]) - first[row]] for row in writing])
                chosen = _chosen(logits, request.temperature, drawn.to(device))
            dist.broadcast(chosen, src=chooser)
            for row, token in zip(writing, chosen.tolist(), strict=True):
                texts[row].append(token)
            writing = [row for row in writing if texts[row][-1] not in request.ends]
            if not writing:
                break
    return [torch.tensor(text) for text in texts]


def joined_rows(texts: Sequence[Tensor]) -> Tensor:
    """Stack texts into a tensor [rows, time]; a shorter text is padded with the token that ended it."""
    longest = max(map(len, texts))
    return torch.stack([torch.cat([text, text[-1:].expand(longest - len(text))]) for text in texts])


def _logits_after(model: nn.Module, run: Run) -> Callable[[Tensor, Sequence[int]], Tensor | None]:
    """Return a function that runs the model on ids [rows, time] and returns the full logits after each row's last id.

    On ranks without the last stage it returns None.
    """
    pretrained, known = pretrained_of(model), parallelization_around(model)
    takes = () if pretrained is None else inspect.signature(inspect.unwrap(type(pretrained).forward)).parameters

    def logits_after(ids: Tensor, lengths: Sequence[int]) -> Tensor | None:
        rows, time = len(lengths), ids.shape[1]
        # Only logits from the end of the shortest text on are read.
        chosen: dict[str, Any] = {"use_cache": False, "logits_to_keep": time - min(lengths) + 1}
        keywords = {name: value for name, value in chosen.items() if name in takes}
        outputs = run(ids, **keywords)
        if outputs is None:
            return None
        last = torch.tensor([length - 1 - time for length in lengths])  # from the end: others may not be kept
        logits = logits_of(outputs)[torch.arange(rows), last]
        return logits if known is None or known.vocabulary is None else known.gather(logits)

    return logits_after


def _over_ranks(model: nn.Module, run: Run, context: Context) -> Callable[[Tensor, Sequence[int]], Tensor | None]:
    """Return a function as `_logits_after` does, for sequences that are split over ranks.

    A transformers model receives a description of the split. Other models receive their part of rows that are padded
    until they divide over the ranks, which needs no description.
    """
    known, is_pretrained = parallelization_around(model), pretrained_of(model) is not None

    def logits_after(ids: Tensor, lengths: Sequence[int]) -> Tensor | None:
        rows = len(lengths)
        tokens = context.tokens(ids.shape[1], pad=True)
        keywords: dict[str, Any] = {}
        if is_pretrained:
            cut = cut_dict({"input_ids": ids}, context, compare=False)
            ids, tokens = cut["input_ids"], cut[TOKENS]
            keywords = {name: cut[name] for name in ("position_ids", "attention_mask", TOKENS)}
            keywords["use_cache"] = False
        else:
            # Layers that get no description of the split take each row for one document of the padded length.
            tokens = context.tokens(tokens.padded)
            places = torch.from_numpy(tokens.index(context.rank)).to(ids.device)
            ids = functional.pad(ids, (0, tokens.padded - ids.shape[1])).index_select(1, places)
        outputs = run(ids, **keywords)
        if outputs is None:
            return None
        owners, places_there = divmod(tokens.home()[[length - 1 for length in lengths]], tokens.local)
        logits = logits_of(outputs)[torch.arange(rows), torch.from_numpy(places_there)]
        elsewhere = torch.from_numpy(owners != context.rank).to(logits.device)
        logits = context.sum(logits.masked_fill(elsewhere.unsqueeze(-1), 0.0))  # of one rank's and zeros: exact
        return logits if known is None or known.vocabulary is None else known.gather(logits)

    return logits_after


def _uniform(request: Request, row: int) -> Tensor:
    """Draw a number in [0, 1), fp64, for each new token of a prompt, from the seed and the number of the prompt."""
    generator = torch.Generator().manual_seed(seed_of(request.seed, str(row)))
    return torch.rand(request.tokens, dtype=torch.float64, generator=generator)


def _chosen(logits: Tensor, temperature: float, numbers: Tensor) -> Tensor:
    """Choose a token for each row of logits [rows, vocabulary] by where its number falls in the cumulative softmax."""
    if temperature == 0.0:
        return logits.argmax(-1)
    # Summed in float64, and scaled below: the last sum of many rounded terms may be a little off 1.
    sums = (logits.double() / temperature).softmax(-1).cumsum(-1)
    found = torch.searchsorted(sums, (numbers * sums[:, -1]).unsqueeze(-1), right=True)
    return found.squeeze(-1).clamp(max=logits.shape[-1] - 1)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in eval mode; afterwards each module returns to its own mode."""
    parts = model.__dict__.get("parts", {}).values()  # of a pipeline stage, which has them not as children
    before = [(module, module.training) for each in (model, *parts) for module in each.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
