"""A comparison of the batches that the ranks of a replica read, which must be the same rows."""

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from par_groups import agree

from .._torch_private import tree_leaves


class BatchComparison:
    """A comparison of the batches that the ranks of a replica read, in calls 1, 2, 4, 8, ...

    Tensor and pipeline ranks of a replica must read the same rows. Ranks that read other rows train on inputs and
    targets that do not belong together, and no rank can see it alone. A run of n steps compares log2(n) batches. Each
    rank counts its own calls, so none waits for a rank that does not compare.

    Args:
        groups: The groups whose ranks must have identical batches; groups of one rank are skipped. Each rank of the job
            makes the comparison with the same kinds of groups.

    Example:
        comparison = BatchComparison(tensor_group)
        comparison.watch(model)
    """

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        self._groups = [group for group in groups if dist.get_world_size(group) > 1]
        self._calls: dict[Hashable, int] = {}
        self._is_paused = False

    def restart(self) -> None:
        """Count calls from zero, so that the next batch is compared: the source of batches has changed."""
        self._calls.clear()

    def is_due(self, kind: Hashable) -> bool:
        """Count a call, and return whether its batch is to be compared.

        Args:
            kind: The kind of call, such as a model and whether it trains; each kind has a count of its own.
        """
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        # True for powers of two. Every rank counts the same calls, so all of them compare the same batches.
        return bool(self._groups) and calls & (calls - 1) == 0

    def compared(self, next_batch: Callable[[], Any], name: str) -> Callable[[], Any]:
        """Read a batch and compare it. Collective over the groups.

        Args:
            next_batch: A function that returns the batch or raises.
            name: The source of the batch, for the message, such as "data_iter=DataLoader".

        Returns:
            A function that returns the batch. If `next_batch` has raised, the function raises that error, so that a
            pipeline can report it to its other ranks.

        Raises:
            ValueError: The batches differ; on every rank.
        """
        batch, again = read_once(next_batch)
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        digests = (_digest(batch[0]), _digest(batch[1])) if is_pair else (_digest(batch), "")
        _check(agree(None, digests, *self._groups), name)
        return again

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Compare the inputs with which a training loop calls a model.

        Args:
            model: The model, which all ranks of a replica call with the same inputs.

        Returns:
            The handle that removes the comparison.
        """
        return model.register_forward_pre_hook(partial(self._compare_inputs, type(model).__name__), with_kwargs=True)

    def _compare_inputs(self, name: str, model: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # A compiled graph has no place for a comparison, and torch evaluates is_compiling() while it traces.
        if torch.compiler.is_compiling() or self._is_paused:
            return
        kind = (name, model.training, torch.is_grad_enabled())
        if self.is_due(kind):
            self.compared(lambda: {"inputs": args, **keywords}, f"the inputs of {name}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which calls of models are not compared: they run microbatches of a batch that was."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before


def read_once(next_batch: Callable[[], Any]) -> tuple[Any, Callable[[], Any]]:
    """Read a batch, and return it with a function that returns it again.

    If reading raises, the batch is None and the function raises that error.
    """
    batch, problem = None, None
    try:
        batch = next_batch()
    except Exception as error:  # of any kind: the caller of `again` gets it
        problem = error

    def again() -> Any:
        if problem is not None:
            raise problem
        return batch

    return batch, again


def _check(found: dict[int, tuple[str, str]], name: str) -> None:
    """Raise ValueError if ranks have read different rows. A rank that lacks inputs or target has an empty digest."""
    for place in range(2):
        have = {rank: each[place] for rank, each in found.items() if each[place]}
        first = next(iter(have), None)
        differing = [rank for rank, digest in have.items() if digest != have[first]] if first is not None else []
        if differing:
            raise ValueError(
                f"{name}: ranks {differing} have another batch than rank {first}, and all ranks of a replica need the "
                "same batch; set one seed on these ranks for the sampler, the dataset and the collate function, or "
                "let one rank read for all, as ShardedDataLoader(replica_group=...) does"
            )


def _digest(value: Any) -> str:
    """Return a digest of the tensors and numbers in a nested value; empty if it holds none."""
    digest, is_empty = hashlib.blake2b(digest_size=16), True
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if leaf.layout is torch.strided and not leaf.is_meta:
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(leaf, int | float | str | bytes):
            digest.update(repr(leaf).encode())
        else:
            continue
        is_empty = False
    return "" if is_empty else digest.hexdigest()
