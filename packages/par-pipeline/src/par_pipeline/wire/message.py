"""One message: a header, and what it says follows, as far as there is room.

A receiver posts its buffer before it knows what comes. What does not fit is announced by the header, and comes in a
second part.

    header   kind, bytes of the description, bytes of the body   (HEADER bytes; a failure takes the rest of them)
    rest     description (a pickled signature, if it is new), body (the tensors), each aligned

Header and description are read by the host, so they are always on the CPU: a host that had to read from an accelerator
would wait for all that it has been given to do. Tensors of an accelerator stay there, and come apart, in a third part
on communicators of their own. Its receive is posted before the header comes, for as many bytes as the message had the
last time, so that many bytes are sent whatever it has now: less is filled up, and more comes with the description.
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
from .._structure import ALIGNMENT, Signature, TensorSpec, aligned, flatten
from .lanes import APART, FIRST, REST

HEADER = 512  # bytes
NOTHING = flatten(())[1]
"""The signature of a message without contents, such as a status."""

Contents = tuple[Signature, list[Tensor]]
"""A value that is sent: its signature, and its tensors."""

_FIELDS = struct.Struct("<3q")  # little-endian, so that the kind is in the first byte
_CPU = torch.device("cpu")


class Kind(IntEnum):
    """What a message is: its first byte."""

    EXPECTED = 0
    """The body follows in the same message, and its signature is what the receiver expects."""
    WHOLE = 1
    """Description and body follow in the same message."""
    FOLLOWED = 2
    """Description and body follow in a second part."""
    FAILED = 3
    """The step has failed on another rank; the cause follows in the header itself."""
    UNWRITTEN = 255
    """Nothing has come yet."""


class Expectations:
    """What each message between two ranks was the last time; the rank that sends keeps the same as the other.

    Attributes:
        signatures: The signature that each message had.
    """

    def __init__(self) -> None:
        self.signatures = {STATUS: NOTHING}
        self._unsteady: set[Message] = set()  # messages whose size was another one the last time but one

    def note(self, message: Message, signature: Signature) -> None:
        """A message has come, or is sent."""
        before = self.signatures.get(message)
        if before is signature and not self._unsteady:  # as in most steps
            return
        self.signatures[message] = signature
        if before is not None and before.size != signature.size:
            self._unsteady.add(message)
        else:
            self._unsteady.discard(message)

    def room_for(self, message: Message, *, are_apart: bool) -> int:
        """Bytes of the buffer for a message, its header included.

        Gradients of shared parameters get none from one step to the next: it would be as large as the parameters.

        Args:
            message: Which message it is.
            are_apart: Whether tensors always come apart.
        """
        signature = self.signatures.get(message)
        return HEADER + (0 if signature is None or are_apart or is_sum(message) else signature.size)

    def bytes_ahead(self, message: Message) -> int | None:
        """Bytes of tensors that come apart whatever the header will say, so that their receive can be posted before.

        None: the header says it. It does where nothing is known yet, for gradients of shared parameters, and where the
        size has just changed, as it does all the time where sequences have lengths of their own.
        """
        signature = self.signatures.get(message)
        return None if signature is None or is_sum(message) or message in self._unsteady else signature.size


Parts = list[tuple[int, Tensor]]
"""A message as it is sent: number and bytes of each part that it has, [bytes] of uint8, in the order of sending."""


def encode(signature: Signature, tensors: Sequence[Tensor], expected: Signature | None, room: int) -> Parts:
    """Writes a value as one part, or two.

    Args:
        signature: The signature of the value.
        tensors: The tensors of the value.
        expected: The signature that the receiver expects; None: it expects nothing yet.
        room: Bytes of the receiver's buffer.
    """
    parts = _parts(signature, tensors, _CPU)
    as_expected = signature is expected or signature == expected
    if as_expected and HEADER + signature.size <= room:
        return [(FIRST, torch.cat([_nothing_new(), *parts]))]
    description = b"" if as_expected else pickle.dumps(signature)
    if description:
        parts.insert(0, _padded(description))
    if HEADER + aligned(len(description)) + signature.size > room:
        return [(FIRST, _header(Kind.FOLLOWED, len(description), signature.size)), (REST, torch.cat(parts))]
    return [(FIRST, torch.cat([_header(Kind.WHOLE, len(description), signature.size), *parts]))]


def encode_apart(
    signature: Signature,
    tensors: Sequence[Tensor],
    expected: Signature | None,
    ahead: int | None,
    device: torch.device,
) -> Parts:
    """Writes a value whose tensors come apart.

    Args:
        signature: The signature of the value.
        tensors: The tensors of the value.
        expected: The signature that the receiver expects; None: it expects nothing yet.
        ahead: Bytes of tensors for which the receive may be posted already; None: it is not.
        device: Where tensors are sent from.
    """
    as_expected = signature is expected or signature == expected
    size = signature.size if ahead is None else ahead
    fits = signature.size <= size
    body = _parts(signature, tensors, device if fits else _CPU)
    behind = [] if fits else body  # the description
    unused = torch.zeros(size - signature.size if fits else size, dtype=torch.uint8, device=device)
    apart = [(APART, torch.cat([*(body if fits else []), unused]))] if size else []
    if as_expected:
        return [(FIRST, _nothing_new()), *apart]
    description = pickle.dumps(signature)
    header = _header(Kind.FOLLOWED, len(description), signature.size)
    return [(FIRST, header), (REST, torch.cat([_padded(description), *behind])), *apart]


def encode_failure(failure: Failure) -> Tensor:
    """The message that a rank sends in place of all that it owes when its step has failed; it fits any buffer."""
    data = pickle.dumps(tuple(failure))
    return _header(Kind.FAILED, len(data), 0, data)


class Header:
    """What the header of a message says.

    Args:
        message: The first part as received, [bytes] of uint8.
        kind: Its first byte.

    Attributes:
        follows: Whether description and body come in other parts.
        description: Bytes of the description, aligned; 0: the signature is the expected one.
        body: Bytes of the tensors; 0 where the header does not say it, as it is what is expected.
        failure: What went wrong on another rank; None: nothing did.
    """

    def __init__(self, message: Tensor, kind: float) -> None:
        self._message = message
        self.follows, self.description, self.body = False, 0, 0
        self.failure: Failure | None = None
        if kind:  # EXPECTED is 0, and looked at no further: it is the usual case, and reading costs time
            _, size, self.body = message[: _FIELDS.size].view(torch.int64).tolist()
            self.follows, self.description = kind == Kind.FOLLOWED, aligned(size)
            if kind == Kind.FAILED:
                self.failure = Failure(*_unpickled(message, _FIELDS.size, size))

    def decode(
        self, expected: Signature | None, rest: Tensor | None = None, apart: Tensor | None = None
    ) -> tuple[Signature, list[Tensor]]:
        """Reads the signature and the tensors, which share the message's memory if they were sent in their own dtype.

        Args:
            expected: The signature that was expected.
            rest: What follows on the CPU, if anything does.
            apart: The tensors' bytes, if they are not behind the description.
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
            part = _tensor_at(source, start, spec)
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


def _padded(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data).ljust(aligned(len(data)), b"\0"), dtype=torch.uint8)


def _unpickled(source: Tensor, start: int, size: int) -> Any:
    """What a rank of ours has pickled; what fills it up to a multiple of the alignment is not read."""
    return pickle.loads(bytes(source[start : start + size].tolist()))  # noqa: S301
