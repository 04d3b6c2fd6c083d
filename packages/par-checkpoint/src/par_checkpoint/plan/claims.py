"""This rank's tensors in a checkpoint, by their keys, and the claims that describe them to other ranks.

The key of a tensor consists of its section and its name: "model:embed.weight".
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from par_groups import Claims, Sharding

_AGAIN = "\0again "


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """This rank's elements of one tensor in the checkpoint. A save reads them, and a load fills them.

    Args:
        key: Section and name, such as "model:embed.weight" or "optimizer:embed.weight.exp_avg".
        dtype: The dtype on disk.
        sharding: The global shape, and the boxes of `local` that hold parts of it.
        local: The local tensor, on any device. With a cast, its dtype differs from the dtype on disk.
        steady: The trainer's tensor if only optimizer steps change it; else None.
        may_differ: Whether the replicas may differ. The replica of the first rank is then saved.
    """

    key: str
    dtype: torch.dtype
    sharding: Sharding
    local: torch.Tensor
    steady: torch.Tensor | None = None
    may_differ: bool = False

    @property
    def name(self) -> str:
        """The tensor's name in the files."""
        return name_of(self.key)


def key_of(section: str, name: str) -> str:
    """Return the key of a tensor with a section and a name."""
    return f"{section}:{name}"


def section_of(key: str) -> str:
    """Return the section in a key: "model" or "optimizer"."""
    return key.partition(":")[0]


def name_of(key: str) -> str:
    """Return the tensor's name in a key."""
    return key.partition(":")[2].partition(_AGAIN)[0]


def with_unique_keys(entries: Iterable[LocalTensor]) -> Iterator[LocalTensor]:
    """Yield the entries with unique keys, even if several entries are filled from one tensor in the files.

    For example, the files may tie a model's head to its embedding while the model in memory does not.
    """
    # Ranks with the same key send each other the boxes that they have loaded. A rank that casts has a key of its own,
    # because a replica of another dtype must not receive its rounded values.
    seen: Counter[str] = Counter()
    for entry in entries:
        seen[entry.key] += 1
        count, dtype = seen[entry.key], entry.local.dtype
        kind = f"{count}" if dtype == entry.dtype else f"{count} as {dtype}"
        yield entry if kind == "1" else replace(entry, key=f"{entry.key}{_AGAIN}{kind}")


def claims_of(entries: Iterable[LocalTensor]) -> Claims:
    """Return the claims of a rank with these entries."""
    entries = list(entries)
    return Claims.of(
        ((entry.key, entry.dtype, entry.sharding) for entry in entries),
        may_differ=tuple(entry.key for entry in entries if entry.may_differ),
    )
