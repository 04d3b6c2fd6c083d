"""Attention masks. Under each mask a token sees one interval of its sequence."""

import hashlib
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .tokens import Ints, Tokens


@dataclass(frozen=True, kw_only=True, repr=False)
class Mask:
    """Attention mask within a document. Without arguments a token sees all tokens of its document.

    Positions count from the start of a document. The documents belong to the batch (`Tokens`), so layers with different
    masks can use the same batch. For masks without a keyword, use `Mask.from_intervals`.

    Args:
        causal: Whether a token sees only itself and earlier tokens.
        window: Number of latest tokens that a token sees, including itself. Without `causal`, a token sees all tokens
            at a distance below `window`, on both sides.
        prefix: Number of first tokens of a document that every token of the document sees; needs `causal`.
        chunk: Number of positions of a chunk. A token sees only its own chunk: 0 to chunk, chunk to 2 chunk, ...

    Raises:
        ValueError: A number is out of range, or the visible tokens would be no interval.
    """

    causal: bool = False
    window: int | None = None
    prefix: int = 0
    chunk: int | None = None
    _given: tuple[bytes, bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("prefix", 0), ("chunk", 1)):
            value = getattr(self, name)
            if name != "prefix" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(f"{name} must be a number of tokens; it is {value!r}")
            if value < least:
                raise ValueError(f"{name} must be {least} at least; it is {value}")
            object.__setattr__(self, name, int(value))
        if not self.prefix:
            return
        if not self.causal:
            raise ValueError(
                f"prefix={self.prefix} needs causal=True: without it every token sees the document's first "
                f"tokens already{'' if self.window is None else ', those in its window'}"
            )
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"prefix={self.prefix} with {name}={getattr(self, name)} is no mask of intervals: a token would "
                    f"see the prefix and its {name}, with a gap between; leave out one of them"
                )

    def __repr__(self) -> str:
        if self._given is not None:  # what differs reads differently, so that ranks can compare texts
            digest = hashlib.sha256(self._given[0] + self._given[1]).hexdigest()[:16]
            return f"Mask.from_intervals({len(self._given[0]) // 8} tokens, {digest})"
        named = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.init)
        plain = {"causal=False", "window=None", "prefix=0", "chunk=None"}
        return f"Mask({', '.join(text for text in named if text not in plain)})"

    @classmethod
    def from_intervals(cls, first: Any, last: Any) -> "Mask":
        """Return the mask under which token t of a sequence sees tokens first[t] to last[t] (exclusive).

        Documents limit this mask like any other. A token sees nothing if last[t] equals first[t].

        Args:
            first: Index of the first token that each token sees, int64 [S], counted in the full sequence; an array, a
                tensor on the CPU or a Python sequence.
            last: One more than the index of the last token that each token sees, int64 [S].

        Raises:
            ValueError: The values are not intervals of a sequence of S tokens.
        """
        arrays = []
        for name, given in (("first", first), ("last", last)):
            array = np.asarray(given)
            if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
                raise ValueError(
                    f"{name} must be integers, one for each token of a row, [S]; it is {array.dtype} "
                    f"{list(array.shape)}. Masks of pairs, [S, S], are not supported"
                )
            arrays.append(np.ascontiguousarray(array, np.int64))
        begin, end = arrays
        if len(begin) != len(end):
            raise ValueError(f"first has {len(begin)} tokens and last has {len(end)}; they must have equally many")
        wrong = np.flatnonzero((begin < 0) | (end > len(begin)) | (begin > end))
        if len(wrong):
            t = int(wrong[0])
            raise ValueError(
                f"token {t} cannot see tokens {begin[t]} to {end[t]} of a row of {len(begin)}; "
                f"0 <= first <= last <= {len(begin)} must hold"
            )
        mask = cls()
        # Bytes instead of arrays, because a mask must be hashable: plans are cached by mask and tokens.
        object.__setattr__(mask, "_given", (begin.tobytes(), end.tobytes()))
        return mask

    def intervals(self, tokens: Tokens) -> tuple[Ints, Ints]:
        """Return the interval that each token sees: first[row, t] to last[row, t] (exclusive) of the same sequence.

        Args:
            tokens: Split of the batch, with its documents.

        Returns:
            first and last, int64 [rows, padded] each; rows is 1 if all sequences of the batch have the same documents.
            A token sees nothing if both are equal, for example padding.

        Raises:
            ValueError: The mask was created from intervals for a sequence of another length.
        """
        start, stop = tokens.bounds()
        place = np.arange(tokens.padded)
        if self._given is not None:
            first, last = (np.frombuffer(each, np.int64) for each in self._given)
            if len(first) != tokens.length:
                raise ValueError(
                    f"the mask has intervals for {len(first)} tokens, but the row has {tokens.length}; "
                    "make a mask for each length"
                )
            first = np.maximum(np.concatenate([first, place[tokens.length :]]), start)
            last = np.minimum(np.concatenate([last, place[tokens.length :]]), stop)
            # An interval of another document becomes empty instead of negative.
            return first, np.maximum(first, last)
        first, last = start, np.minimum(stop, place + 1) if self.causal else stop
        if self.window is not None:
            first = np.maximum(first, place - self.window + 1)
            last = last if self.causal else np.minimum(last, place + self.window)
        if self.chunk is not None:
            # Chunks are counted from the beginning of the document, not of the row.
            chunk = place - (place - start) % self.chunk
            first, last = np.maximum(first, chunk), np.minimum(last, chunk + self.chunk)
        if self.prefix:
            last = np.maximum(last, np.minimum(stop, start + self.prefix))
        return first, last
