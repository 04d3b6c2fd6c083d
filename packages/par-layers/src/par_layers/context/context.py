"""Context parallelism: an object that splits batches along the sequence, and computes attention over all ranks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from par_groups import LaneCounts, ProcessGroups

from .._tensor_cache import TensorCache
from .._torch_private import disable_dynamo, is_any_autocast_enabled
from .arguments import (
    TARGETS,
    agree_on_batch,
    check_heads,
    in_autocast,
    next_tokens,
    own_tokens,
    row_size,
    token_dims,
)
from .balance import CAUSAL, SPLITS, cut_tokens
from .exchange import all_highest, all_sum, all_tokens
from .existing.handover import StateLink
from .existing.recurrent import RecurrentLayer, carry, stop_at
from .existing.transformers import attend, check, local_batch, whole_batch
from .kernels.choose import check_kernel
from .mask import Mask
from .modes.attention import PLANS, SequenceAttention, name_of
from .modes.lanes import LaneAttention
from .tokens import Documents, Tokens

MODES = ("gather", "ring", "ulysses", "2d")

M = TypeVar("M", bound=nn.Module)
Batch = TypeVar("Batch", bound=Mapping[str, Any] | Sequence[Any])


class Context:
    """Context parallelism over the ranks of one axis. Its attention equals attention on one device.

    The object stores how ranks communicate and how sequences are split. It stores no batch: `Tokens` describe how one
    batch is split, and you pass them with the batch.

    Args:
        groups: The live groups; None for one device.
        axis: The axis of the topology whose ranks hold parts of the sequence.
        mode: Mode in which attention reaches the keys of other ranks. "gather": one exchange brings the keys that a
            rank's queries see. "ring": keys travel from rank to rank. "ulysses": ranks exchange tokens for heads. "2d":
            ulysses between neighbours, and ring or gather (as the topology specifies) between groups of neighbours.
            Default: the mode of the topology.
        split: Assignment of tokens to ranks: "contiguous", "zigzag", "balanced", or "auto" for the fastest of the
            three. Default: the topology's option.
        kernel: "auto", or "math" for attention by plain matmuls.
        block: Maximum number of queries of a piece with a mask, and minimum number of tokens of a chunk.
        multiple: Divisor of the number of tokens of a rank, for layers that split them further. A layer set passes the
            number of its sequence-parallel ranks.
        lanes: Numbers of lanes, for attention whose bits do not depend on the number of ranks. It gathers keys, ranks
            have contiguous tokens, and `multiple` follows from the lanes. Default: ordinary attention.

    Attributes:
        is_split: Whether attention consists of parts, of several ranks or lanes.

    Raises:
        ValueError: The mode or split is unknown, `block` or `multiple` is no positive number, or the topology has no
            such axis, or not the axes of the mode.

    Example:
        context = Context(groups)
        batch, tokens = context.cut({"ids": ids, "targets": ids}, shift=("targets",))
        out = context.attention(q, k, v, tokens, mask=Mask(causal=True, window=1024))
    """

    def __init__(
        self,
        groups: ProcessGroups | None,
        *,
        axis: str = "sequence",
        mode: str | None = None,
        split: str | None = None,
        kernel: str = "auto",
        block: int = 512,
        multiple: int = 1,
        lanes: LaneCounts | None = None,
    ) -> None:
        check_kernel(kernel)
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"multiple is {multiple!r}; it must be a number of tokens, 1 at least")
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"block is {block!r}; it must be a number of tokens, 1 at least")
        named, options = ("gather", {}) if groups is None else groups.topology.modes.get(axis, ("gather", {}))
        self.mode = named if mode is None else mode
        # The topology's options belong to the mode that it names.
        options = options if self.mode == named else {}
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; it must be one of {', '.join(map(repr, MODES))}")
        self.how = options.get("split", "auto") if split is None else split
        if self.how not in SPLITS:
            raise ValueError(f"split is {self.how!r}; it must be one of {', '.join(map(repr, SPLITS))}")
        self.axis, self.block, self.multiple = axis, block, multiple
        self.device = torch.device("cpu") if groups is None else groups.device
        self.ranks = 1 if groups is None else groups.size(axis)
        self.rank = 0 if groups is None else groups.rank(axis)
        self._groups = groups
        self._attend: SequenceAttention | LaneAttention
        if lanes is None:
            self._attend = SequenceAttention(groups, axis, self.mode, options, kernel=kernel, block=block)
        else:
            # A rank may split its tokens further among tensor ranks; rows are padded alike with and without these.
            self.how, self.multiple = "contiguous", lanes.sequence // self.ranks * lanes.tensor
            self._attend = LaneAttention(groups, axis, lanes, kernel=kernel, block=block)
        # In lanes one rank computes as several do, so that the results have the same bits.
        self.is_split = self.ranks > 1 or lanes is not None
        if self.mode == "ulysses" and self.how not in {"auto", "contiguous"}:
            raise ValueError(
                f"split is {self.how!r}, but with mode 'ulysses' ranks have equal work when tokens are contiguous; "
                "remove split"
            )
        self._tensor = TensorCache(self._make_tensor, PLANS)

    # Cutting a batch

    def tokens(
        self,
        length: int,
        *,
        documents: Documents | None = None,
        masks: Sequence[Mask] = CAUSAL,
        multiple: int | None = None,
        pad: bool = False,
    ) -> Tokens:
        """Return how sequences of one length are split. Pure, cached, identical on all ranks; no communication.

        Args:
            length: Number of tokens of a sequence.
            documents: Lengths of the documents of all sequences, or of each sequence; default: one document.
            masks: Masks of the model's layers, each as often as it occurs. They determine the balanced split.
            multiple: Divisor of the length of each chunk of a rank's tokens. By default chunks have any length, and
                only the total of a rank's tokens is a multiple of the context's own `multiple`.
            pad: Whether to pad sequences whose length does not divide, with tokens of no document.

        Raises:
            ValueError: The length does not divide by ranks, chunks and `multiple` and `pad` is not set, or documents do
                not fill a row.
        """
        cut = partial(
            cut_tokens,
            length,
            self.ranks,
            self.how,
            documents=documents,
            masks=masks,
            pad=pad,
            inner=self._attend.inner_ranks,
            block=self.block,
        )
        if multiple is not None:
            return cut(multiple=multiple)
        tokens = cut()
        if tokens.local % self.multiple == 0:
            return tokens
        if not pad:
            step = self.ranks * self.multiple
            raise ValueError(
                f"length {length} does not divide by {self.ranks} ranks x {self.multiple} tensor ranks, which cut a "
                f"rank's tokens further; use {-(-length // step) * step}, or pad=True and give tokens to the layers"
            )
        # Padding every chunk to a multiple makes a rank's total divisible, too.
        return cut(multiple=self.multiple)

    def static(self, local: int) -> Tokens:
        """Return the split of sequences of one document. Layers use it when they receive no `tokens`.

        Args:
            local: Number of tokens of each rank.
        """
        return self.tokens(local * self.ranks, multiple=1)

    def cut(
        self,
        batch: Batch,
        *,
        documents: Documents | None = None,
        masks: Sequence[Mask] = CAUSAL,
        dims: Mapping[Any, int | None] | None = None,
        shift: Sequence[Any] = (),
        multiple: int | None = None,
        pad: bool = False,
        compare: bool = True,
    ) -> tuple[Batch, Tokens]:
        """Return this rank's tokens of a batch that every rank of the sequence holds. Collective over these ranks.

        A mapping with input_ids is the batch of a Hugging Face Transformers model. Without `shift`, the result also has
        position_ids and an attention_mask of ones. If the batch has labels or shift_labels, the result has shift_labels
        and num_items_in_batch, the number of targets of the full sequences. The losses of the ranks then add up to the
        mean loss (see `sum`). Without `documents`, the boundaries are read from position_ids that restart, or from an
        attention_mask with padding on the right.

        Args:
            batch: A mapping or a tuple. Its tensors have the full sequences, [B, length, ...]; other values are kept.
            documents: Lengths of the documents of all sequences, or of each sequence; default: one document.
            masks: Masks of the model's layers, each as often as it occurs.
            dims: Token dim of each tensor, by its name (in a tuple: its index); default 1. None does not split the
                tensor.
            shift: Names of tensors that become targets: each token gets the value of the next token of its document,
                and the last token of a document gets -100.
            multiple: Divisor of the length of each chunk of a rank's tokens; default: as in `tokens`.
            pad: Whether to pad sequences whose length does not divide. The padding is 0. It is -100 in tensors named
                "targets", "labels" or "shift_labels", and in all tensors of a tuple except the first.
            compare: Whether to verify that all ranks split the same batch in the same way, by an all-reduce of five
                numbers (one is the sum of the batch's integers). False sends nothing; use it if the batches are equal
                by construction.

        Returns:
            The batch with tensors [B, s, ...], and its tokens, which you pass to attention and layers.

        Raises:
            ValueError: Tensors have different lengths, the batch cannot be split (see `tokens`), or ranks passed
                different lengths, documents, masks or integers. Every rank raises.
        """
        of_transformers = isinstance(batch, Mapping) and "input_ids" in batch and not shift
        given: Any = batch
        names: list[Any] = []
        problem: Exception | None = None
        tokens: Tokens | None = None
        along: dict[Any, int] = {}
        said = ""
        try:
            if of_transformers:
                given, documents, shift = whole_batch(given, documents)
            names = list(given) if isinstance(given, Mapping) else list(range(len(given)))
            along = token_dims(given, names, dims or {}, shift)
            length, rows = row_size(given, along)
            tokens = self.tokens(length, documents=documents, masks=masks, multiple=multiple, pad=pad)
            if len(tokens.documents) not in {1, rows}:
                raise ValueError(f"documents are of {len(tokens.documents)} rows, but the batch has {rows}")
            said = f"{rows} rows, {tokens}, masks {tuple(masks)}"
        except (ValueError, TypeError) as error:  # raised when all ranks know of it
            problem = error
        # All ranks compare before any raises. Otherwise the ranks without an error would wait in the first collective
        # of attention.
        if compare:
            group = None if self._groups is None or self.ranks == 1 else self._groups[self.axis]
            agree_on_batch(problem, said, [given[name] for name in along], group, self.device)
        elif problem is not None:
            raise problem
        if tokens is None:
            raise RuntimeError("cut() has no tokens and no error; this is a bug in par-layers, please report it")
        cut: dict[Any, Any] = {name: given[name] for name in names}
        targets_of_tuple = frozenset() if isinstance(batch, Mapping) else frozenset(names[1:])
        for name, dim in along.items():
            full = given[name]
            if name in shift:
                cut[name] = next_tokens(full, self._tensor("following", tokens, full.device), dim)
            else:
                is_target = name in TARGETS or name in targets_of_tuple
                index = self._tensor("index", tokens, full.device)
                cut[name] = own_tokens(full, index, dim, tokens, fill=-100 if is_target else 0)
        if of_transformers:
            cut = local_batch(cut, self.positions(tokens))
            if "shift_labels" in cut:
                targets = given["shift_labels"]
                # The number of targets must be that of the full sequence, so the shift is computed once more for all
                # tokens, without a split.
                if "shift_labels" in shift:
                    alone = Tokens(tokens.length, tokens.length, tokens.documents, (((0, tokens.length),),))
                    targets = next_tokens(targets, torch.from_numpy(alone.following(0)).to(targets.device), 1)
                cut["num_items_in_batch"] = (targets != -100).sum()
        if isinstance(batch, Mapping):
            return cut, tokens  # type: ignore[return-value]
        return type(batch)(cut[name] for name in names), tokens  # type: ignore[call-arg]

    def refuse(self, problem: Exception) -> NoReturn:
        """Raise an error of this rank on all ranks of the sequence, which may be in `cut`. Collective."""
        group = None if self._groups is None or self.ranks == 1 else self._groups[self.axis]
        agree_on_batch(problem, "", (), group, self.device)
        raise problem

    def positions(self, tokens: Tokens) -> Tensor:
        """Return the position of each of this rank's tokens in its document, int64 [B or 1, s], for rotary embeddings.

        Args:
            tokens: Split of the batch.
        """
        return self._tensor("positions", tokens, self.device)

    # What layers do

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Tokens | None = None,
        *,
        mask: Mask = CAUSAL[0],
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of this rank's queries to the keys of all ranks. Collective over the sequence's ranks.

        Args:
            q: Queries [B, s, H, D], after the position embedding.
            k: Keys [B, s, Hk, D]; H is a multiple of Hk.
            v: Values [B, s, Hk, D].
            tokens: Split of the batch; default: sequences of one document, split as `static` returns it.
            mask: Tokens of its document that a token sees.
            scale: Factor of the scores of queries and keys; default: 1 / sqrt(D).
            sinks: Logarithm of one more term in each head's sum of exponentials, [H].

        Returns:
            Output [B, s, H, D]; zero for tokens that see nothing, such as padding.

        Raises:
            ValueError: The tensors do not match each other, the tokens or the mode. Every rank raises before anything
                is sent.
        """
        # Dynamo cannot trace the planning, which is numpy code with caches.
        attention = self._apart if torch.compiler.is_compiling() else self._attention
        return attention(q, k, v, tokens, mask=mask, scale=scale, sinks=sinks)

    def gather(self, x: Tensor, tokens: Tokens, dim: int = 1) -> Tensor:
        """All-gather full sequences, in order and without padding. Collective over the sequence's ranks.

        The backward sums the gradients of all ranks, so that the *mean* of the parameters' gradients over the ranks
        equals one device's gradient, as with `sum`.

        Args:
            x: This rank's tokens.
            tokens: Split of the batch.
            dim: Dim of the tokens.

        Returns:
            x with `tokens.length` tokens along `dim`.
        """
        dim %= x.dim()
        self._check_cut(tokens)
        if x.shape[dim] != tokens.local:
            raise ValueError(f"tokens are {tokens.local} a rank, x has {x.shape[dim]} along dim {dim}")
        home = self._tensor("home", tokens, x.device)
        if self.ranks == 1:
            return x.index_select(dim, home)
        return all_tokens(x, home, dim, name_of(self._groups, self.axis))

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce a sum over the sequence's ranks. Collective over these ranks.

        The backward sums the gradients as well. If all ranks have the same gradient, the sum is that gradient times the
        number of ranks. The *mean* of the parameters' gradients over data and sequence ranks then equals one device's
        gradient.

        Args:
            x: This rank's part of the sum.
        """
        return x if self.ranks == 1 else all_sum(x, name_of(self._groups, self.axis))

    def transformers_(self, model: M) -> M:
        """Replace the attention of a Hugging Face Transformers model by this context's, in place; no communication.

        Call the model as `model(**batch, par_tokens=tokens)` with the result of `cut`. Each rank returns its part of
        the loss: `sum` of the parts is the loss of the full sequences.

        Args:
            model: A decoder of Hugging Face Transformers with attention dropout 0.

        Returns:
            The model.

        Raises:
            ValueError: The model is no such decoder. Or its attention cannot be replaced or caps its scores (Gemma 2),
                or it adds a loss of its routers. Or a layer reads other tokens and cannot continue from a state, or the
                split gives a recurrent layer tokens that are not consecutive. A later call raises for masks that depend
                on data, tokens in a cache, dropout, tensors that this attention would ignore, and parts of the model
                that text alone does not reach.
        """
        recurrent, untried = self._check_transformers(model)
        if recurrent:
            self.how = "contiguous"
        attend(model, self, self._highest)
        carry(model, recurrent, self.state_link)
        stop_at(model, untried)
        return model

    def check_transformers(self, model: nn.Module) -> None:
        """Raise if `transformers_` does not support a model. Changes nothing; no communication.

        Args:
            model: A decoder of Hugging Face Transformers.

        Raises:
            ValueError: The model is not supported, as in `transformers_`.
        """
        self._check_transformers(model)

    def _check_transformers(self, model: nn.Module) -> tuple[list[RecurrentLayer], list[str]]:
        """Return what `check` returns, after a check of the split."""
        recurrent, untried = check(model)
        if recurrent and self.how not in {"auto", "contiguous"}:
            raise ValueError(
                f"split={self.how!r}: {recurrent[0].name} passes its state from each rank to the next, so each rank "
                "must hold consecutive tokens; use split='contiguous'"
            )
        return recurrent, untried

    def state_link(self) -> StateLink:
        """Return a connection over which a recurrent layer passes its states."""
        return StateLink(name_of(self._groups, self.axis), self.rank)

    def check_heads(self, heads: int) -> None:
        """Raise if this mode cannot compute attention with a number of heads; no communication.

        Args:
            heads: Number of query heads of each rank before ranks exchange tokens for heads.

        Raises:
            ValueError: The heads do not divide by the ranks that exchange tokens for heads.
        """
        if heads % self._attend.inner_ranks:
            divisors = [n for n in range(2, self._attend.inner_ranks) if self.ranks % n == 0 and heads % n == 0]
            hybrid = f", or '2d' with ulysses={divisors[-1]}" if divisors else ""
            raise ValueError(
                f"heads {heads} do not divide by {self._attend.inner_ranks} ranks of ulysses; use mode 'ring' or "
                f"'gather'{hybrid}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Context":
        """Return the context itself: process groups cannot be copied."""
        return self

    # Inside

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Tokens | None,
        *,
        mask: Mask,
        scale: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if is_any_autocast_enabled():
            q, k, v = in_autocast(q, k, v)
        check_heads(q, k, v, sinks)
        if scale is not None and not scale > 0:
            raise ValueError(f"scale is {scale!r}; it must be a positive number")
        # The static split depends on the length only, so layers without `tokens` agree without communication.
        tokens = self.static(q.shape[1]) if tokens is None else tokens
        self._check(q, tokens, mask)
        return self._attend(q, k, v, sinks, tokens=tokens, mask=mask, scale=scale)

    @disable_dynamo
    def _apart(self, *tensors: Any, **options: Any) -> Tensor:
        """Compute attention between two graphs of torch.compile, because a graph cannot hold the plans."""
        return self._attention(*tensors, **options)

    def _highest(self, x: Tensor) -> Tensor:
        """Return the maximum over all elements and all ranks of the sequence, a scalar. Collective over these ranks."""
        return x.max() if self.ranks == 1 else all_highest(x.max(), name_of(self._groups, self.axis))

    def _make_tensor(self, what: str, tokens: Tokens, device: torch.device | None) -> Tensor:
        """Return an index array of `tokens` (home, index, positions or following) for this rank, on a device."""
        array = tokens.home() if what == "home" else getattr(tokens, what)(self.rank)
        return torch.from_numpy(array).to(device)

    def _check_cut(self, tokens: Tokens) -> None:
        if not isinstance(tokens, Tokens):
            raise ValueError(f"tokens must be Tokens, as `cut` gives them; they are {type(tokens).__name__}")
        if tokens.ranks != self.ranks:
            raise ValueError(
                f"tokens are cut over {tokens.ranks} ranks, but the context has {self.ranks}; use one context for both"
            )

    def _check(self, q: Tensor, tokens: Tokens, mask: Mask) -> None:
        """Raise ValueError if queries do not match the tokens or the mode."""
        if not isinstance(mask, Mask):
            raise ValueError(
                f"mask must be a par_layers Mask, it is {type(mask).__name__}; masks of pairs are not supported, "
                "Mask.from_intervals takes any that shows each query one interval"
            )
        self._check_cut(tokens)
        if tokens.local != q.shape[1]:
            raise ValueError(
                f"tokens are {tokens.local} a rank, q has {q.shape[1]}; cut the batch with the same tokens"
            )
        if len(tokens.documents) not in {1, q.shape[0]}:
            raise ValueError(
                f"tokens have documents for {len(tokens.documents)} rows, q has {q.shape[0]}; take a part of them by "
                "tokens.rows"
            )
        self.check_heads(q.shape[2])
