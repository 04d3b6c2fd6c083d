"""One named tensor's share on this rank: what saving reads and loading fills."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from par_groups import Box, Sharding

_AGAIN = "\0again "


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the checkpoint, as far as this rank holds it.

    Args:
        key: Its section and its name there, such as "model:embed.weight" or "optimizer:embed.weight.exp_avg".
        dtype: The dtype on disk.
        sharding: The global shape, and the boxes of `local` that hold parts of it.
        local: The local tensor, on any device; its dtype may differ from the one on disk where a cast was asked for.
        steady: The trainer's tensor, if it changes in an optimizer's steps alone; else None.
        may_differ: Whether its replicas may differ, so that the first rank's is the one that is saved.
    """

    key: str
    dtype: torch.dtype
    sharding: Sharding
    local: torch.Tensor
    steady: torch.Tensor | None = None
    may_differ: bool = False

    @property
    def name(self) -> str:
        """The name in the files."""
        return name_of(self.key)


def key_of(section: str, name: str) -> str:
    """The key of a tensor: names are unique within a section."""
    return f"{section}:{name}"


def section_of(key: str) -> str:
    """`key_of` undone, first half."""
    return key.partition(":")[0]


def name_of(key: str) -> str:
    """`key_of` undone, second half."""
    return key.partition(":")[2].partition(_AGAIN)[0]


def told_apart(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Gives each a key of its own where several tensors here are filled from one in the files, such as an untied head.

    Their names stay.
    """
    seen: Counter[str] = Counter()
    for entry in entries:
        seen[entry.key] += 1
        count = seen[entry.key]
        yield entry if count == 1 else replace(entry, key=f"{entry.key}{_AGAIN}{count}")


def view_of(local: torch.Tensor, box: Box, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    """The part of a box that begins at global index `start`, as a view of the local tensor."""
    view = box.of(local)
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        view = view.narrow(dim, first - box.start[dim], length)
    return view
