"""Errors of files. Errors of arguments are `ValueError` and `TypeError`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

UNDEFINED = ". What was being loaded is now undefined: load it again, or another checkpoint, before going on"
"""How the text of an error ends after which some tensors are filled and others not."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or read. The message names the file, what is wrong, and the remedy."""


class CorruptError(CheckpointError):
    """Bytes on disk are not what was written: a truncated file, a flipped bit, a header or manifest that lies."""


class ReplacedError(CheckpointError):
    """A checkpoint was replaced while it was read, again and again, or removed."""


class UnansweredError(CheckpointError):
    """A rank of the call does not answer."""


class StoreError(CheckpointError):
    """A store of objects refuses or fails: credentials, a missing bucket, an outage. No checkpoint is lost by it."""


def corrupt(where: str, what: str) -> CorruptError:
    """Return the error for a file that differs from what was written."""
    return CorruptError(f"{where}: {what}. Copy or download the file again, or use another checkpoint")


def corrupt_block(file: str, number: int, begin: int, tensors: Sequence[str]) -> str:
    """Return the error text for a block that differs from what was written."""
    text = f"block {number} of {file!r} (from byte {begin}) is corrupt: its checksum is wrong"
    if not tensors:
        return text
    named = ", ".join(repr(name) for name in tensors[:4])
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    return f"{text}. It holds parts of {named}{more}"


@contextmanager
def taken(what: str) -> Iterator[None]:
    """Raise CheckpointError if something does not take the state that was saved of it."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what} does not take its saved state ({type(error).__name__}: {error}); use the class that was saved, or "
            f"load without it{UNDEFINED}"
        ) from error
