"""Format of one message: a header, followed by as much of its contents as fits the receiver's buffer.

A receiver posts its buffer before it has the size of the message. If the contents do not fit, the header announces a
second part.

    header   kind, bytes of the description, bytes of the body   (HEADER bytes; a failure takes the rest of them)
    rest     description (a pickled signature, if it is new), body (the tensors), each aligned

The host reads header and description, so that they are always on the CPU: a read from an accelerator would wait for all
its queued work. Tensors of an accelerator stay there and are sent separately, as a third part on other communicators.
The receive of the third part is posted before the header arrives, with the size of the same message in the last step.
The sender therefore always sends this number of bytes. It pads smaller tensors, and it sends larger tensors together
with the description.
"""

import pickle
import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._errors import Failure
from .._program import STATUS, Message, is_sum
from .._structure import ALIGNMENT, Signature, aligned, flatten
from .lanes import APART, FIRST, REST

HEADER = 512  # bytes
NOTHING = flatten(())[1]
"""The signature of a message without contents, such as a status."""

Contents = tuple[Signature, list[Tensor]]
"""Value of a message: its signature and its tensors."""

_FIELDS = struct.Struct("<3q")  # little-endian, so that the kind is in the first byte
_CPU = torch.device("cpu")


class MessageKind(IntEnum):
    """Kind of a message, stored in its first byte."""

    EXPECTED = 0
    """The body follows in the same message, and its signature is the expected one."""
    WHOLE = 1
    """Description and body follow in the same message."""
    FOLLOWED = 2
    """Description and body follow in a second part."""
    FAILED = 3
    """The step has failed on another rank; the cause follows in the header itself."""
    UNWRITTEN = 255
    """No message has arrived yet."""


class Expectations:
    """Signatures of the messages between two ranks in the last step; sender and receiver keep equal records.

    Attributes:
        signatures: Last signature of each message.
    """

    def __init__(self) -> None:
        self.signatures = {STATUS: NOTHING}
        self._unsteady: set[Message] = set()  # messages whose size was another one the last time but one

    def note(self, message: Message, signature: Signature) -> None:
        """Record the signature of a message that has arrived or is sent."""
        before = self.signatures.get(message)
        if before is signature and not self._unsteady:  # as in most steps
            return
        self.signatures[message] = signature
        if before is not None and before.size != signature.size:
            self._unsteady.add(message)
        else:
            self._unsteady.discard(message)

    def room_for(self, message: Message, *, are_apart: bool) -> int:
        """Return the size of the buffer for a message, including its header, in bytes.

        The buffer has no space for gradients of shared parameters, because it would be as large as the parameters
        between steps.

        Args:
            message: Message.
            are_apart: Whether tensors are always sent separately.
        """
        # The buffer has the size of the last message of this kind, because most steps repeat the shapes of the step
        # before.
        signature = self.signatures.get(message)
        return HEADER + (0 if signature is None or are_apart or is_sum(message) else signature.size)

    def bytes_ahead(self, message: Message) -> int | None:
        """Return the bytes of separate tensors that can be received before the header; None if the header is needed.

        The header is needed for the first message, for gradients of shared parameters, and after the size has changed.
        With sequences of different lengths, the size changes all the time.
        """
        signature = self.signatures.get(message)
        return None if signature is None or is_sum(message) or message in self._unsteady else signature.size


Parts = list[tuple[int, Tensor]]
"""Encoded message: number and bytes, [bytes] of uint8, of each of its parts, in the order of sending."""


def encode(signature: Signature, tensors: Sequence[Tensor], expected: Signature | None, room: int) -> Parts:
    """Encode a value as one part or two parts.

    Args:
        signature: Signature of the value.
        tensors: Tensors of the value.
        expected: Signature that the receiver expects; None before the first message.
        room: Size of the receiver's buffer, in bytes.
    """
    parts = _parts(signature, tensors, _CPU)
    # Comparing by identity first is worth it: the signature object of the last step is reused as long as nothing
    # changes.
    as_expected = signature is expected or signature == expected
    if as_expected and HEADER + signature.size <= room:
        return [(FIRST, torch.cat([_nothing_new(), *parts]))]
    description = b"" if as_expected else pickle.dumps(signature)
    if description:
        parts.insert(0, _padded(description))
    # The receive with this buffer is already posted, so what does not fit goes into a second message.
    if HEADER + aligned(len(description)) + signature.size > room:
        return [(FIRST, _header(MessageKind.FOLLOWED, len(description), signature.size)), (REST, torch.cat(parts))]
    return [(FIRST, torch.cat([_header(MessageKind.WHOLE, len(description), signature.size), *parts]))]


def encode_apart(
    signature: Signature,
    tensors: Sequence[Tensor],
    expected: Signature | None,
    ahead: int | None,
    device: torch.device,
) -> Parts:
    """Encode a value whose tensors are sent separately.

    Args:
        signature: Signature of the value.
        tensors: Tensors of the value.
        expected: Signature that the receiver expects; None before the first message.
        ahead: Size of the receive that may be posted already, in bytes; None if it is not posted.
        device: Device of the sent tensors.
    """
    as_expected = signature is expected or signature == expected
    size = signature.size if ahead is None else ahead
    fits = signature.size <= size
    body = _parts(signature, tensors, device if fits else _CPU)
    # The posted receive has a fixed size. Tensors that outgrew it travel on the CPU behind the description, and the
    # posted receive is filled with zeros.
    behind = [] if fits else body  # the description
    # NCCL transfers exactly the number of bytes that the receiver has posted.
    unused = torch.zeros(size - signature.size if fits else size, dtype=torch.uint8, device=device)
    apart = [(APART, torch.cat([*(body if fits else []), unused]))] if size else []
    if as_expected:
        return [(FIRST, _nothing_new()), *apart]
    description = pickle.dumps(signature)
    header = _header(MessageKind.FOLLOWED, len(description), signature.size)
    return [(FIRST, header), (REST, torch.cat([_padded(description), *behind])), *apart]


def encode_failure(failure: Failure) -> Tensor:
    """Encode the message that replaces all remaining messages of a failed step; it fits any buffer."""
    data = pickle.dumps(tuple(failure))
    return _header(MessageKind.FAILED, len(data), 0, data)


class Header:
    """Header of a received message.

    Args:
        message: First part as received, [bytes] of uint8.
        kind: First byte of the message.

    Attributes:
        follows: Whether description and body are in other parts.
        description: Size of the description, aligned, in bytes; 0 if the signature is the expected one.
        body: Size of the tensors, in bytes; 0 if the signature is the expected one.
        failure: Failure of another rank, or None.
    """

    def __init__(self, message: Tensor, kind: float) -> None:
        self._message = message
        self.follows, self.description, self.body = False, 0, 0
        self.failure: Failure | None = None
        if kind:  # EXPECTED is 0, and looked at no further: it is the usual case, and reading costs time
            _, size, self.body = message[: _FIELDS.size].view(torch.int64).tolist()
            self.follows, self.description = kind == MessageKind.FOLLOWED, aligned(size)
            if kind == MessageKind.FAILED:
                self.failure = Failure(*_unpickled(message, _FIELDS.size, size))

    def decode(
        self, expected: Signature | None, rest: Tensor | None = None, apart: Tensor | None = None
    ) -> tuple[Signature, list[Tensor]]:
        """Read the signature and the tensors, which share the message's memory if they were sent in their own dtype.

        Args:
            expected: Expected signature.
            rest: Second part, on the CPU, or None.
            apart: Bytes of separate tensors; None if the tensors follow the description.
        """
        source, start = (self._message, HEADER) if rest is None else (rest, 0)
        signature: Signature | None = expected
        if self.description:
            signature = _unpickled(source, start, self.description)
        if signature is None:
            raise RuntimeError("a message of unknown signature came without one; this is a bug of par-pipeline")
        source, start = (source, start + self.description) if apart is None else (apart, 0)
        tensors = []
        for spec in signature.specs:
            # No view for autograd: a stage may write into one tensor of a message while autograd saves another. A slice
            # and a view would also take three times as long, which matters for tiny stages.
            made = torch.empty(0, dtype=spec.sent, device=source.device)
            offset = start // spec.sent.itemsize
            part = made.set_(source.untyped_storage(), offset, spec.shape, ())  # () is contiguous
            tensors.append(part if spec.sent is spec.dtype else part.to(spec.dtype))
            start += aligned(spec.bytes)
        return signature, tensors


def _parts(signature: Signature, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors' bytes, each followed by padding that aligns the next tensor."""
    parts = []
    for tensor, spec in zip(tensors, signature.specs, strict=True):
        part = tensor.detach().resolve_conj().resolve_neg()  # its bytes are then its elements
        if spec.sent is not spec.dtype or spec.device != device.type:
            part = part.to(device, spec.sent)
        parts.append(part.reshape(-1).view(torch.uint8))
        # An unaligned tensor could not be viewed in its dtype on the other side.
        gap = -spec.bytes % ALIGNMENT
        if gap:
            parts.append(torch.zeros(gap, dtype=torch.uint8, device=device))
    return parts


@cache
def _nothing_new() -> Tensor:
    return _header(MessageKind.EXPECTED, 0, 0)


def _header(kind: MessageKind, description: int, body: int, data: bytes = b"") -> Tensor:
    data = (_FIELDS.pack(kind, description, body) + data).ljust(HEADER, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data).ljust(aligned(len(data)), b"\0"), dtype=torch.uint8)


def _unpickled(source: Tensor, start: int, size: int) -> Any:
    """Load pickled data from another rank of the pipeline, without the padding behind it."""
    return pickle.loads(bytes(source[start : start + size].tolist()))  # noqa: S301
