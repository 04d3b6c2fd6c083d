"""What ranks must agree on: one operation of one rank, in plain numbers and words."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from par_groups import attributes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """One message of a batch.

    Args:
        kind: "send" or "recv".
        peer: The other rank, by its number in the world.
        elements: The elements of its tensor.
        dtype: Their type.
        tag: The message's tag.
    """

    kind: str
    peer: int
    elements: int
    dtype: str
    tag: int

    def fits(self, other: "Part") -> bool:
        """Whether the two are the ends of one message; that their ranks are, is known."""
        alike = (self.elements, self.dtype, self.tag) == (other.elements, other.dtype, other.tag)
        return alike and self.kind != other.kind

    def __str__(self) -> str:
        way = "to" if self.kind == "send" else "from"
        tag = f" tag {self.tag}" if self.tag else ""
        return f"{self.kind}({self.elements} {self.dtype} {way} {self.peer}{tag})"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What one rank asks for, as far as others must agree.

    Args:
        name: Such as "all_reduce"; "send" and "recv"; "batch" for messages that are one operation.
        items: Elements and dtype of each tensor, as this rank gives it; of what is gathered or scattered, its share.
        reduction: Such as "sum", for what reduces.
        root: The rank of the world that sends or collects, for what has one.
        sends: Elements that go to each member, of an all_to_all.
        expects: Elements that come from each member, of an all_to_all.
        label: What the tensor is, if the program says so by `par_label`.
        parts: The messages of a batch, or of a send or recv.
        sites: The calls that led here, innermost first, as "file.py:12".
    """

    name: str
    items: tuple[tuple[int, str], ...] = ()
    reduction: str = ""
    root: int | None = None
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()
    label: str = ""
    parts: tuple[Part, ...] = ()
    sites: tuple[str, ...] = ()

    def agrees(self, other: "Operation") -> bool:
        """Whether both can be one operation of two ranks."""
        if self.parts or other.parts:
            return len(self.parts) == len(other.parts) == 1 and self.parts[0].fits(other.parts[0])
        return self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        items = () if self.sends or self.expects else self.items
        return self.name, items, self.reduction, self.root, self.label

    def __str__(self) -> str:
        words = [str(part) for part in self.parts] if self.parts else [f"{self.name}({self._arguments()})"]
        return f"{' + '.join(words)} at {' < '.join(self.sites) or 'an unknown place'}"

    def _arguments(self) -> str:
        words = [", ".join(f"{elements} {dtype}" for elements, dtype in self.items)]
        words += [repr(self.label)] if self.label else []
        words += [self.reduction] if self.reduction else []
        words += [f"root {self.root}"] if self.root is not None else []
        words += [f"to members {list(self.sends)}, from members {list(self.expects)}"] if self.sends else []
        return " ".join(word for word in words if word)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An operation in a rank's queue.

    Args:
        rank: The rank of the world that issued it.
        number: Its place among all operations of that rank.
        communicator: The name of the communicator.
        members: The ranks of the world that the communicator joins and that have a process.
        operation: What is asked for.
        time: When it was issued, in virtual time.
        joined: All ranks that the communicator joins, in its order; empty if all of them have a process.
    """

    rank: int
    number: int
    communicator: str
    members: tuple[int, ...]
    operation: Operation
    time: float = 0.0
    joined: tuple[int, ...] = ()


def label(tensor: "Tensor", name: str) -> "Tensor":
    """Says what a tensor is, so that a strict group compares that, too.

    Args:
        tensor: What will be communicated; it gets an attribute `par_label`.
        name: Such as "blocks.1", equal on all ranks.

    Returns:
        The tensor.
    """
    attributes.LABEL.set(tensor, name)
    return tensor
