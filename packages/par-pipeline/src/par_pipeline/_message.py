"""One message: a header, and what it says follows, in as many bytes as the receiver expects.

A receiver posts its buffer before it knows what comes, so a message always has the promised length. What does not fit
is announced by the header, and comes in a second message.

    header   kind, bytes of the description, bytes of the body   (HEADER bytes; a failure takes the rest of them)
    rest     description (a pickled signature, if it is new), body (the tensors), each aligned
"""

import pickle
import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from ._errors import Failure
from ._structure import Signature, aligned

HEADER = 512
_FIELDS = struct.Struct("<3q")  # little-endian, so that the kind is in the first byte


class Kind(IntEnum):
    """What a message is; its first byte."""

    EXPECTED = 0
    """The body follows in the same message, and its signature is what the receiver expects."""
    WHOLE = 1
    """All follows in the same message."""
    FOLLOWED = 2
    """All follows in a second message."""
    FAILED = 3


def promised(signature: Signature | None) -> int:
    """Bytes of a message whose signature is expected to be this; None: not known yet."""
    return HEADER + (0 if signature is None else signature.size)


def encode(
    signature: Signature, tensors: Sequence[Tensor], expected: Signature | None, device: torch.device
) -> list[Tensor]:
    """One message, or two, as uint8 tensors.

    Args:
        signature: Of the value.
        tensors: Its tensors.
        expected: What the receiver expects.
        device: Of the messages.
    """
    if signature is expected or signature == expected:
        return [_joined([_header(Kind.EXPECTED, 0, signature.size), *_parts(tensors)], device)]
    description = pickle.dumps(signature)
    rest = [_padded(description), *_parts(tensors)]
    size = aligned(len(description)) + signature.size
    room = promised(expected) - HEADER - size
    if room >= 0:
        header = _header(Kind.WHOLE, len(description), signature.size)
        return [_joined([header, *rest, torch.zeros(room, dtype=torch.uint8)] if room else [header, *rest], device)]
    header = _header(Kind.FOLLOWED, len(description), signature.size)
    return [
        _joined([header, torch.zeros(promised(expected) - HEADER, dtype=torch.uint8)], device),
        _joined(rest, device),
    ]


def encode_failure(failure: Failure, expected: Signature | None, device: torch.device) -> Tensor:
    """The message that a rank sends for everything it owes, when its step has failed."""
    data = pickle.dumps(tuple(failure))
    header = _header(Kind.FAILED, len(data), 0, data)
    return _joined([header, torch.zeros(promised(expected) - HEADER, dtype=torch.uint8)], device)


class Header:
    """What the header of a message says.

    Args:
        message: As received.
    """

    def __init__(self, message: Tensor) -> None:
        self.kind, self.description, self.body = int(message[0]), 0, 0
        if self.kind != Kind.EXPECTED:  # which is looked at no further: it is the usual case, and reading costs time
            _, self.description, self.body = message[: _FIELDS.size].view(torch.int64).tolist()
        self._message = message

    @property
    def second(self) -> int:
        """Bytes of the message that follows; 0: none does."""
        return aligned(self.description) + self.body if self.kind == Kind.FOLLOWED else 0

    @property
    def failure(self) -> Failure | None:
        """What another rank says went wrong."""
        if self.kind != Kind.FAILED:
            return None
        return Failure(*pickle.loads(_read(self._message, _FIELDS.size, self.description)))  # noqa: S301 - from a rank of ours

    def decode(self, second: Tensor | None, expected: Signature | None) -> tuple[Signature, list[Tensor]]:
        """The signature and the tensors, which are views of the message."""
        rest, start = (self._message, HEADER) if second is None else (second, 0)
        signature: Signature | None = expected
        if self.description:
            signature = pickle.loads(_read(rest, start, self.description))  # noqa: S301 - from a rank of ours
        if signature is None:
            raise RuntimeError("a message of unknown signature came without one; this is a bug of par-pipeline")
        start += aligned(self.description)
        tensors = []
        for spec in signature.specs:
            tensors.append(rest[start : start + spec.bytes].view(spec.dtype).view(spec.shape))
            start += aligned(spec.bytes)
        return signature, tensors


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' bytes, each followed by what aligns the next."""
    parts = []
    for tensor in tensors:
        parts.append(tensor.detach().reshape(-1).view(torch.uint8))
        gap = -tensor.nbytes % aligned(1)
        if gap:
            parts.append(torch.zeros(gap, dtype=torch.uint8, device=tensor.device))
    return parts


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    if any(part.device != device for part in parts):
        parts = [part.to(device) for part in parts]
    return torch.cat(tuple(parts))


@lru_cache(maxsize=128)
def _header(kind: Kind, description: int, body: int, data: bytes = b"") -> Tensor:
    return torch.frombuffer(
        bytearray(_FIELDS.pack(kind, description, body) + data).ljust(HEADER, b"\0"), dtype=torch.uint8
    )


def _padded(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data).ljust(aligned(len(data)), b"\0"), dtype=torch.uint8)


def _read(source: Tensor, start: int, size: int) -> bytes:
    return bytes(source[start : start + size].tolist())
