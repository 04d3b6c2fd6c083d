"""One message: a header, and what it says follows, as far as there is room.

A receiver posts its buffer before it knows what comes. What does not fit is announced by the header, and comes in a
second message.

    header   kind, bytes of the description, bytes of the body   (HEADER bytes; a failure takes the rest of them)
    rest     description (a pickled signature, if it is new), body (the tensors), each aligned

A header is read by the host, so it is always on the CPU. Tensors of an accelerator stay there, and always come in a
second message: a host that had to read from the accelerator would wait for all that it has been given to do.
"""

import pickle
import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from .._errors import Failure
from .._program import Message, is_sum
from .._structure import ALIGNMENT, Signature, TensorSpec, aligned, flatten

HEADER = 512  # bytes
NOTHING = flatten(())[1]
"""The signature of a message without contents, such as a status."""

Contents = tuple[Signature, list[Tensor]]
"""A value that is sent: its signature, and its tensors."""

_FIELDS = struct.Struct("<3q")  # little-endian, so that the kind is in the first byte


class Kind(IntEnum):
    """What a message is: its first byte."""

    EXPECTED = 0
    """The body follows in the same message, and its signature is what the receiver expects."""
    WHOLE = 1
    """Description and body follow in the same message."""
    FOLLOWED = 2
    """Description and body follow in a second message."""
    FAILED = 3
    """The step has failed on another rank; the cause follows in the header itself."""
    UNWRITTEN = 255
    """Nothing has come yet."""


def room_for(message: Message, signature: Signature | None, *, are_apart: bool) -> int:
    """Bytes of the buffer for a message.

    Gradients of shared parameters get none from one step to the next: it would be as large as the parameters.

    Args:
        message: Which message it is.
        signature: What the message is expected to have; None: nothing is known yet.
        are_apart: Whether tensors always come in messages of their own.
    """
    return HEADER + (0 if signature is None or are_apart or is_sum(message) else signature.size)


def encode(
    signature: Signature,
    tensors: Sequence[Tensor],
    expected: Signature | None,
    room: int,
    device: torch.device,
    *,
    are_apart: bool,
) -> list[Tensor]:
    """Writes a value as one message, or two: uint8 tensors, the first of them on the CPU.

    Args:
        signature: The signature of the value.
        tensors: The tensors of the value.
        expected: The signature that the receiver expects; None: it expects nothing yet.
        room: Bytes of the receiver's buffer.
        device: Where the bytes of tensors are sent from.
        are_apart: Whether tensors always come in messages of their own.
    """
    parts = _parts(signature, tensors, device)
    as_expected = signature is expected or signature == expected
    if as_expected and not are_apart and HEADER + signature.size <= room:
        return [torch.cat([_nothing_new(), *parts])]
    description = b"" if as_expected else pickle.dumps(signature)
    if description:
        parts.insert(0, _padded(description, device))
    if HEADER + aligned(len(description)) + signature.size > room:
        return [_header(Kind.FOLLOWED, len(description), signature.size), torch.cat(parts)]
    header = _header(Kind.WHOLE, len(description), signature.size)
    return [torch.cat([header, *(part.cpu() for part in parts)])]


def encode_failure(failure: Failure) -> Tensor:
    """The message that a rank sends in place of all that it owes when its step has failed; it fits any buffer."""
    data = pickle.dumps(tuple(failure))
    return _header(Kind.FAILED, len(data), 0, data)


class Header:
    """What the header of a message says.

    Args:
        message: The message as received, [bytes] of uint8.
        kind: Its first byte.

    Attributes:
        second: Bytes of the second message that follows; 0: none follows.
        failure: What went wrong on another rank; None: nothing did.
    """

    def __init__(self, message: Tensor, kind: float) -> None:
        self._message, self._description = message, 0
        self.second = 0
        self.failure: Failure | None = None
        if kind:  # EXPECTED is 0, and looked at no further: it is the usual case, and reading costs time
            self._read_fields(kind)

    def _read_fields(self, kind: float) -> None:
        _, self._description, body = self._message[: _FIELDS.size].view(torch.int64).tolist()
        if kind == Kind.FOLLOWED:
            self.second = aligned(self._description) + body
        elif kind == Kind.FAILED:
            self.failure = Failure(*pickle.loads(_read(self._message, _FIELDS.size, self._description)))  # noqa: S301 - from a rank of ours

    def decode(self, second: Tensor | None, expected: Signature | None) -> tuple[Signature, list[Tensor]]:
        """Reads the signature and the tensors, which share the message's memory if they were sent in their own dtype.

        Args:
            second: The second message, where one follows.
            expected: The signature that was expected.
        """
        rest, start = (self._message, HEADER) if second is None else (second, 0)
        signature: Signature | None = expected
        if self._description:
            signature = pickle.loads(_read(rest, start, self._description))  # noqa: S301 - from a rank of ours
        if signature is None:
            raise RuntimeError("a message of unknown signature came without one; this is a bug of par-pipeline")
        start += aligned(self._description)
        tensors = []
        for spec in signature.specs:
            part = _tensor_at(rest, start, spec)
            tensors.append(part if spec.sent is spec.dtype else part.to(spec.dtype))
            start += aligned(spec.bytes)
        return signature, tensors


def _tensor_at(message: Tensor, start: int, spec: TensorSpec) -> Tensor:
    """A tensor in the memory of a message, from a byte on.

    It is no view to autograd: a stage may write into one tensor of a message and have another saved. Slicing and
    viewing would also take three times as long, which counts where stages are tiny.
    """
    made = torch.empty(0, dtype=spec.sent, device=message.device)
    return made.set_(message.untyped_storage(), start // spec.sent.itemsize, spec.shape, ())  # () is contiguous


def _parts(signature: Signature, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors' bytes, each followed by what aligns the next."""
    parts = []
    for tensor, spec in zip(tensors, signature.specs, strict=True):
        part = tensor.detach().resolve_conj().resolve_neg()  # its bytes are then its elements
        if spec.sent is not spec.dtype or spec.device != device.type:
            part = part.to(device, spec.sent)
        parts.append(part.reshape(-1).view(torch.uint8))
        gap = -spec.bytes % ALIGNMENT
        if gap:
            parts.append(torch.zeros(gap, dtype=torch.uint8, device=device))
    return parts


@cache
def _nothing_new() -> Tensor:
    return _header(Kind.EXPECTED, 0, 0)


def _header(kind: Kind, description: int, body: int, data: bytes = b"") -> Tensor:
    data = (_FIELDS.pack(kind, description, body) + data).ljust(HEADER, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data).ljust(aligned(len(data)), b"\0"), dtype=torch.uint8).to(device)


def _read(source: Tensor, start: int, size: int) -> bytes:
    return bytes(source[start : start + size].tolist())
