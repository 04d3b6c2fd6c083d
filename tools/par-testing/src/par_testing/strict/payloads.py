"""Between the tensors of an operation and the bytes that travel: one tensor's bytes after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .operation import Entry, Operation

Share = tuple[Entry, bytes]
"""What a member issued, and its payload."""


def tensor_of(payload: bytes, dtype: torch.dtype) -> Tensor:
    """The elements that lie in bytes, flat."""
    return torch.frombuffer(bytearray(payload), dtype=dtype) if payload else torch.empty(0, dtype=dtype)


def cut(payload: bytes, like: Sequence[Tensor]) -> list[bytes]:
    """Bytes of several tensors, one by one."""
    pieces, begin = [], 0
    for tensor in like:
        pieces.append(payload[begin : begin + tensor.nbytes])
        begin += tensor.nbytes
    return pieces


def by_tensor(shares: Sequence[Share], like: Sequence[Tensor]) -> list[list[Tensor]]:
    """Sorts what the members have by tensor: for each one, a flat tensor of each member."""
    members = [cut(payload, like) for _, payload in shares]
    return [[tensor_of(pieces[each], tensor.dtype) for pieces in members] for each, tensor in enumerate(like)]


def bytes_of(tensor: Tensor) -> bytes:
    """The elements of a tensor as they lie in memory."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def messages_to(rank: int, batch: Operation, payload: bytes) -> list[bytes]:
    """What a batch sends to a rank, message by message."""
    found, begin = [], 0
    for part in batch.parts:
        if part.kind == "send":
            size = part.elements * itemsize(part.dtype)
            found += [payload[begin : begin + size]] if part.peer == rank else []
            begin += size
    return found


def itemsize(dtype: str) -> int:
    """The bytes of an element, by the name of its dtype."""
    size: int = getattr(torch, dtype).itemsize
    return size
