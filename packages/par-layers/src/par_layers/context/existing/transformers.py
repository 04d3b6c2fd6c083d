"""Models of transformers over a sequence that is cut, their code unchanged: their attention is a context's.

Transformers dispatches attention by a name to a function, and the making of masks to another one. Both are registered
here: the second gives a `Mask` instead of a tensor, which the model hands through to the first. It asks the model's own
mask function about tokens far from any data, so that the window or chunk that a layer really uses is read, not guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..._torch_private import apart, assert_async
from ..mask import Mask
from ..tokens import Documents, Tokens
from .decoders import check_decoder, check_outputs, fixed
from .recurrent import RecurrentLayer
from .trial import try_tokens

NAME = "par_context"
"""What the attention is called in transformers' registries, and the attribute of modules that has their context."""

PADDING = "attention_mask has padding; documents say it: context.cut makes them of it"

FAR = 10_000_000
"""A token farther from the first than any data of a model reach, around which mask functions are asked."""

STEP = 4096
"""Distances are found in steps of so many tokens, then one by one."""

KNOWN = frozenset({"position_ids", "cache_position", "labels", "shift_labels", "num_items_in_batch"})
"""Tensors that models hand to attention among other keywords, and that are not for it."""


def check(model: nn.Module) -> tuple[list[RecurrentLayer], list[str]]:
    """Return the recurrent layers of a model that a context supports, and the parts that text alone does not reach.

    It changes nothing and does not communicate.

    Args:
        model: A decoder of Hugging Face Transformers.

    Raises:
        ValueError: As `check_decoder` and `try_tokens`.
    """
    check_decoder(model)
    return try_tokens(model, partial(attend, highest=lambda x: x.max()))


def attend(model: nn.Module, context: object, highest: Callable[[Tensor], Tensor]) -> None:
    """Let the attention of a model be computed by a context, in place.

    Args:
        model: A decoder of Hugging Face Transformers that `check` accepts.
        context: The `Context`.
        highest: Function that returns the highest number of a tensor over all ranks of the sequence.

    Raises:
        ValueError: The model does not let its attention be replaced.
    """
    import transformers  # noqa: PLC0415 - slow to import, and needed by nobody else

    decoder: Any = model
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    decoder.set_attn_implementation(NAME)
    if decoder.config._attn_implementation != NAME:
        raise fixed(model)
    model.register_forward_hook(check_outputs)
    for module in model.modules():
        setattr(module, NAME, context)
        if hasattr(type(module), "generate"):
            module.__dict__["generate"] = NoGeneration()
        is_model = isinstance(module, transformers.PreTrainedModel)
        if is_model and {"position_ids", "attention_mask"} <= set(signature(type(module).forward).parameters):
            module.register_forward_pre_hook(partial(_with_places, context, highest), with_kwargs=True)
        if _rotates_by_length(module):
            module.register_forward_pre_hook(partial(_with_last_position, highest), with_kwargs=True)
            module.register_forward_hook(_without_last_position)


def _with_places(
    context: Any,
    highest: Callable[[Tensor], Tensor],
    module: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a model the positions and the mask that follow from how its tokens are cut, where the caller gives none.

    Without a mask, transformers looks whether positions jump, and takes each jump for the begin of a document. Without
    positions, it counts from 0 on each rank. Positions jump on some ranks alone, so ranks would go different ways.
    """
    tokens = keywords.get("par_tokens")
    mask = keywords.get("attention_mask") if len(arguments) < 2 else arguments[1]
    # The mask that `cut` makes says by itself that there is no padding. One on a device is looked at in `_mask`,
    # without a wait.
    is_checked = mask is not None and (not _is_of_padding(mask) or _is_one_number(mask))
    is_complete = is_checked and (keywords.get("position_ids") is not None or len(arguments) > 2)
    if is_complete or not isinstance(tokens, Tokens):
        return None
    return apart(_completed, context, highest, module, arguments, keywords)


def _completed(
    context: Any,
    highest: Callable[[Tensor], Tensor],
    module: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model, all by name, with positions and a mask."""
    names = list(signature(type(module).forward).parameters)[1:]
    given: dict[str, Any] = {**dict(zip(names, arguments, strict=False)), **keywords}
    here = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    if here is None:
        return arguments, keywords
    mask = given.get("attention_mask")
    if mask is None or _is_of_padding(mask):
        if mask is not None:  # a batch that another hand has cut: padding may be on one rank alone
            assert_async(highest((mask == 0).any().int()) == 0, PADDING)
        given["attention_mask"] = _ones(here)
    if given.get("position_ids") is None:
        given["position_ids"] = context.positions(given["par_tokens"]).to(here.device).expand(here.shape[:2])
    return (), given


def _is_of_padding(mask: object) -> bool:
    """Return whether a mask says which tokens are padding, on a CPU: a device would wait for the ranks to compare."""
    return isinstance(mask, Tensor) and mask.dim() == 2 and mask.is_cpu


def _ones(tokens: Tensor) -> Tensor:
    """Return a mask without padding for tokens: one number in memory, as `_is_one_number` finds it."""
    return torch.ones((), dtype=torch.int64, device=tokens.device).expand(tokens.shape)


def _is_one_number(mask: Tensor) -> bool:
    """Return whether a mask is a single 1 that is expanded. Slices, such as microbatches, are so too.

    The ranks need not compare such a mask in every step: `Context.cut` makes it.
    """
    return not any(mask.stride()) and mask.numel() > 0 and bool(mask[0, 0])


def _rotates_by_length(module: nn.Module) -> bool:
    """Return whether a module's rotary angles depend on the last position of the batch."""
    kinds = getattr(module, "rope_type", "")
    kinds = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)


def _with_last_position(
    highest: Callable[[Tensor], Tensor], _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Append the last position over all ranks to this rank's positions, for modules whose angles depend on it."""
    named = "position_ids" in keywords
    positions: Tensor = keywords["position_ids"] if named else arguments[1]
    longer = torch.cat([positions, highest(positions).expand_as(positions[..., :1])], -1)
    if named:
        return arguments, {**keywords, "position_ids": longer}
    return (arguments[0], longer, *arguments[2:]), keywords


def _without_last_position(_: nn.Module, __: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Remove the position that was added: return the cosines and sines [..., s, D] of this rank's tokens."""
    return tuple(each[..., :-1, :] for each in output)


class NoGeneration:
    """Replacement of the method `generate` of a model that uses context parallelism."""

    def __call__(self, *args: Any, **keywords: Any) -> NoReturn:
        """Raise ValueError."""
        del args, keywords
        raise ValueError(
            "generate() reads cached keys of earlier tokens, and a cache is not split over the ranks of a sequence; "
            "save the model, load it with transformers, and generate there"
        )


def whole_batch(
    batch: Mapping[str, Any], documents: Documents | None
) -> tuple[dict[str, Any], Documents | None, tuple[str, ...]]:
    """Prepare a Transformers batch for the split: without padding mask, with documents and targets.

    Args:
        batch: Keyword arguments of the model, with input_ids, [B, length].
        documents: Lengths of documents; None reads them from position_ids that restart, or from an attention_mask with
            padding on the right.

    Returns:
        The batch, its documents, and the names of the tensors that become targets of the next token.

    Raises:
        ValueError: The mask has padding that is not on the right, or positions do not count up in documents.
    """
    result = {name: x for name, x in batch.items() if name not in {"attention_mask", "position_ids"}}
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and mask.shape != batch["input_ids"].shape:
        raise ValueError(
            f"attention_mask is {list(mask.shape)} and input_ids are {list(batch['input_ids'].shape)}; masks of pairs "
            "are not supported, documents= says what is packed"
        )
    if documents is None and positions is not None:
        documents = _documents_by_position(positions, mask)
    elif documents is None and mask is not None:
        documents = _documents_without_padding(mask)
    if batch.get("labels") is None:
        return result, documents, ()
    if mask is not None:
        # The split batch has no padding mask, so the labels say what the loss must not count.
        result["labels"] = batch["labels"].masked_fill(~mask.bool(), -100)
    return {**result, "shift_labels": result["labels"]}, documents, ("shift_labels",)


def local_batch(cut: Mapping[str, Any], positions: Tensor) -> dict[str, Any]:
    """Add positions and a mask without padding to this rank's part of a batch.

    If the caller does not pass them to the model, `_with_places` adds both.

    Args:
        cut: This rank's tokens of the batch.
        positions: Positions of the tokens in their documents, int64 [B or 1, s].
    """
    ones = _ones(cut["input_ids"])
    return {**cut, "position_ids": positions.to(ones.device).expand_as(ones), "attention_mask": ones}


def _documents_without_padding(mask: Tensor) -> list[list[int]]:
    """Return the documents of right-padded sequences. The padding of a sequence is a separate document."""
    numbers, length = mask.bool().sum(1), mask.shape[-1]
    places = torch.arange(length, device=mask.device)
    if not torch.equal(mask.bool(), places < numbers[:, None]):
        raise ValueError("attention_mask must be [B, length], with padding at the right alone; give documents= instead")
    return [[number, length - number] if 0 < number < length else [length] for number in numbers.tolist()]


def _documents_by_position(positions: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the documents of sequences whose positions restart in each document. Padding is a separate document."""
    here = positions.cpu()
    if here.dim() != 2:
        raise ValueError(f"position_ids are {list(here.shape)}; they must be [B, length]")
    begins = here == 0
    if not bool((begins | (here == functional.pad(here[:, :-1] + 1, (1, 0)))).all()):
        raise ValueError("position_ids must count up from 0 in each document; give documents= instead")
    if mask is not None:
        seen = mask.cpu().bool()
        before = functional.pad(seen[:, :-1], (1, 0), value=True)
        if bool((seen & ~before & ~begins).any()):
            raise ValueError(
                "attention_mask has padding before tokens whose position_ids count on; they must begin anew behind "
                "it, or give documents= instead"
            )
        # Where padding begins, a document of its own does.
        begins = begins | (before & ~seen)
    ends = [[*row.nonzero()[:, 0].tolist(), here.shape[1]] for row in begins]
    return [[b - a for a, b in pairwise(row)] for row in ends]


def _attention(  # noqa: PLR0917 - the signature that models call
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute attention in place of Transformers' attention functions, with heads before tokens."""
    context, tokens = getattr(module, NAME, None), keywords.pop("par_tokens", None)
    if context is None:
        raise ValueError(f"{type(module).__name__} has no context; call context.transformers_(model)")
    if not isinstance(tokens, Tokens):
        raise ValueError("attention needs the split of its tokens; call model(**batch, par_tokens=tokens)")
    if isinstance(attention_mask, Unreadable):
        raise ValueError(f"{type(module).__name__}: {attention_mask.why}")
    if not isinstance(attention_mask, Mask):
        raise ValueError(
            f"{type(module).__name__} was given {type(attention_mask).__name__} in the place of a mask of positions; "
            "masks of pairs and attention without a mask function are not supported"
        )
    if dropout > 0:
        raise ValueError(f"attention dropout is {dropout}, which cannot be equal over ranks; set it to 0")
    for name in ("softcap", "position_bias", "output_attentions"):
        if (refused := keywords.pop(name, None)) is not None and refused is not False:
            raise ValueError(f"{type(module).__name__} uses {name}, which attention over ranks does not support")
    window, sinks = keywords.pop("sliding_window", None), keywords.pop("s_aux", None)
    # Where a mask is not causal, some families count the token itself in the number that they give flash attention
    # (ModernBERT), and others do not. What they see with any other attention is their mask function's, which was read.
    windows = (window,) if attention_mask.causal else (window, (window or 0) + 1)
    if window is not None and attention_mask.window not in windows:
        raise ValueError(f"{type(module).__name__} has a window of {window}, but its mask is {attention_mask}")
    for name, value_of in keywords.items():
        if isinstance(value_of, Tensor) and name not in KNOWN:
            raise ValueError(
                f"{type(module).__name__} gives its attention a tensor {name!r}, unknown here, which would be lost"
            )
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        query = _scaled_by_place(module, query, context.positions(tokens))
    # Transformers has the heads before the tokens.
    heads_last = (x.transpose(1, 2) for x in (query, key, value))
    return context.attention(*heads_last, tokens, mask=attention_mask, scale=scaling, sinks=sinks), None


def _scaled_by_place(module: Any, query: Tensor, places: Tensor) -> Tensor:
    """Correct the query scale of Llama 4's layers without rotary embeddings.

    Llama 4 scales by the index on this rank, as if this rank's first token were the first of its document.

    Args:
        module: The layer.
        query: Queries that the layer has scaled, [B, H, s, D].
        places: Positions of the tokens in their documents, [B or 1, s].
    """

    def scale(place: Tensor) -> Tensor:
        result: Tensor = torch.log1p(torch.floor((place.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        return result

    here = torch.arange(query.shape[2], device=query.device)
    ratio = scale(places.to(query.device)) / scale(here)
    return query * ratio[:, None, :, None].to(query.dtype)


def _mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    use_vmap: bool = False,
    **_: Any,
) -> "Mask | Unreadable":
    """Return the mask of a kind of layer, instead of the tensor that Transformers would create."""
    # Models create masks for all kinds of layers, even for kinds that they do not use. An unsupported mask is therefore
    # returned as `Unreadable`, and raises only in a layer that uses it.
    if q_length != kv_length or kv_offset or (not isinstance(q_offset, Tensor) and q_offset):
        raise ValueError(
            "past_key_values have tokens of earlier calls, which are not cut; call model(..., use_cache=False)"
        )
    if attention_mask is not None:
        assert_async(attention_mask.all(), PADDING)
    if use_vmap:
        return Unreadable(
            "the model adds an or_mask_function or and_mask_function, so a token may see keys in several intervals; "
            "call context.attention in its code"
        )
    try:
        return read(mask_function)
    except ValueError as error:
        return Unreadable(str(error))


@dataclass(frozen=True)
class Unreadable:
    """Placeholder of a mask that depends on more than positions.

    Args:
        why: Error message of a layer that uses the mask.
    """

    why: str


def read(function: Callable[..., Tensor]) -> Mask:
    """Return the `Mask` that a mask function of Transformers computes.

    Args:
        function: Function of (row, head, query, key), integer tensors, that returns whether the query sees the key.

    Raises:
        ValueError: The function depends on data, or is not a causal mask, a window or a chunk.
    """

    def sees(query: Tensor | int, key: Tensor | int) -> Tensor:
        q, k = torch.broadcast_tensors(torch.as_tensor(query), torch.as_tensor(key))
        zero = torch.zeros((), dtype=torch.int64)
        try:
            return torch.as_tensor(function(zero, zero, q, k)).expand(q.shape)
        except IndexError as error:
            raise ValueError(
                "the model's mask_function depends on data, such as images; a par_layers.Mask does on positions alone"
            ) from error

    def reach(query: int, sign: int, *, of_key: bool = False) -> int | None:
        """Return the distance of the farthest token that a query sees (of_key: that sees a key); None for no limit."""

        def seen(distance: Tensor) -> Tensor:
            other = query + sign * distance
            return sees(other, query) if of_key else sees(query, other)

        coarse = seen(torch.arange(0, FAR, STEP))
        if bool(coarse.all()):
            return None
        last = (int(coarse.int().argmin()) - 1) * STEP
        return last + int(seen(last + torch.arange(STEP + 1)).int().argmin()) - 1

    # A window reaches equally far back from every token. A chunk reaches back to its begin, from the next token one
    # farther, so the distances of two neighbours tell which it is.
    back, after, ahead = reach(FAR, -1), reach(FAR + 1, -1), reach(FAR, 1)
    mask = Mask(causal=ahead == 0)
    if back is not None and back == after:
        mask = Mask(causal=ahead == 0, window=back + 1)
    elif back is not None:
        # Under a causal mask a query sees nothing ahead, so the end of its chunk is found from the keys' side.
        last = reach(FAR, 1, of_key=True)
        mask = Mask(causal=ahead == 0, chunk=back + 1 + (last or 0))
    # So far the mask is a guess from a few queries. It counts only if the function agrees at all edges, from many
    # queries.
    size = mask.window or mask.chunk or 2
    apart = torch.tensor([0, 1, 2, size - 1, size, size + 1, 2 * size])
    queries = FAR + torch.cat([apart, torch.arange(16)])[:, None]
    keys = queries + torch.cat([apart, -apart])
    if not torch.equal(sees(queries, keys), _expected(mask, queries, keys)):
        raise ValueError(
            "the model's mask_function is none of causal, sliding window and chunk, which alone a par_layers.Mask "
            "is read from"
        )
    return mask


def _expected(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether each query sees each key, according to a mask."""
    seen = keys <= queries if mask.causal else torch.ones_like(keys + queries, dtype=torch.bool)
    if mask.window is not None:
        seen = seen & ((queries - keys).abs() < mask.window)
    if mask.chunk is not None:
        seen = seen & (queries // mask.chunk == keys // mask.chunk)
    return seen
