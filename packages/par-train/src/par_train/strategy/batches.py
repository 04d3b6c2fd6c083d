"""The batches of a training step: read from any source, and compared over the ranks that must read the same rows."""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from par_data import ShardedDataLoader, move_to_device
from par_groups import agree
from par_layers import parallelization_of

from .._torch_private import tree_leaves
from .plugins import DevicePlugin
from .pretrained.sequence import cut_dict
from .randomness import StepRandomness
from .setup import Setup


class BatchComparison:
    """A comparison of the batches that the tensor and pipeline ranks of a replica read, in calls 1, 2, 4, 8, ...

    Ranks that read other rows train on inputs and targets that do not belong together, and no rank can see it alone. A
    run of n steps compares log2(n) batches. Each rank counts its own calls, so none waits for a rank that does not
    compare.

    Args:
        setup: The strategy, whose groups are compared over.
    """

    def __init__(self, setup: Setup) -> None:
        groups = setup.groups
        self._groups = [groups[axis] for axis in ("tensor", "pipeline") if groups.size(axis) > 1]
        self._setup = setup
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
        return bool(self._groups) and calls & (calls - 1) == 0

    def compared(self, next_batch: Callable[[], Any], name: str) -> Callable[[], Any]:
        """Read a batch and compare it. Collective over the tensor and pipeline ranks.

        Args:
            next_batch: A function that returns the batch or raises.
            name: The source of the batch, for the message, such as "data_iter=DataLoader".

        Returns:
            A function that returns the batch. If `next_batch` has raised, the function raises that error: the pipeline
            reports it to its other ranks.

        Raises:
            ValueError: The batches differ; on every rank.
        """
        batch, again = read_once(next_batch)
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        digests = (_digest(batch[0]), _digest(batch[1])) if is_pair else (_digest(batch), "")
        _check(agree(None, digests, *self._groups), name)
        return again

    def watch(self, model: nn.Module) -> "torch.utils.hooks.RemovableHandle | None":
        """Compare the inputs with which a loop of the user's own calls a model.

        Args:
            model: The model that `initialize` returns.

        Returns:
            The handle that removes the comparison; None if the ranks may call this model with different inputs. That
            is the case if its layers take each rank's part of an activation, and if it is a stage of a pipeline.
        """
        if not self._groups or self._setup.schedule is not None:
            return None
        residual = self._setup.layers.rules.residual
        if (residual.tokens or residual.features) and parallelization_of(model) is None:
            return None
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


class BatchReader:
    """The iterators of data sources, and the random numbers with which they read.

    Args:
        setup: The strategy.
        randomness: The random numbers of its steps.
        comparison: The comparison of batches over the ranks of a replica.
    """

    def __init__(self, setup: Setup, randomness: StepRandomness, comparison: BatchComparison) -> None:
        self._setup, self._randomness, self._comparison = setup, randomness, comparison
        # Weak, so that a loader of one evaluation, and its workers, end when the program drops it.
        self._iterators: WeakKeyDictionary[Any, Iterator[Any]] = WeakKeyDictionary()
        self._brings_to_device = any(isinstance(plugin, DevicePlugin) for plugin in setup.plugins)

    def reader(self, source: Any, kind: Hashable, *, cuts_dicts: bool) -> Callable[[], Any]:
        """Return a function that returns the next batch of a source, on the device. Collective if a comparison is due.

        Args:
            source: An iterator or a data loader.
            kind: The kind of call, for `BatchComparison.is_due`.
            cuts_dicts: Whether batches that are dicts are split along the sequence.
        """
        read: Callable[[], Any] = partial(self._next_of, source)
        # Batches that one rank has broadcast are the same on all ranks of the replica.
        is_broadcast = isinstance(source, ShardedDataLoader) and self._setup.options.broadcast_batches
        if not is_broadcast and self._comparison.is_due(kind):
            read = self._comparison.compared(read, f"data_iter={type(source).__name__}")

        def next_batch() -> Any:
            batch = read()
            if cuts_dicts and isinstance(batch, Mapping):
                batch = cut_dict(batch, self._setup.context, compare=True)
            return move_to_device(batch, self._setup.device) if self._brings_to_device else batch

        return next_batch

    def _next_of(self, source: Any) -> Any:
        if isinstance(source, ShardedDataLoader):
            return next(iter(source))  # it continues where it stopped, also in a new iterator
        # Stages have different seeds and must read the same rows. A seed that the program has set stays in force.
        shares_draws = self._setup.schedule is not None and not self._randomness.is_seeded_by_program
        with self._randomness.draws_of_batches().entered() if shares_draws else nullcontext():
            if isinstance(source, Iterator):
                return next(source)
            if source not in self._iterators:
                if isinstance(source, DataLoader):
                    self._setup.check_last_batch(source)
                self._iterators[source] = iter(source)
            try:
                return next(self._iterators[source])
            except StopIteration:
                self._iterators[source] = iter(source)
                return next(self._iterators[source])

    def clear(self) -> None:
        """Drop all iterators."""
        self._iterators.clear()


def read_once(next_batch: Callable[[], Any]) -> tuple[Any, Callable[[], Any]]:
    """Read a batch, and return it with a function that returns it again.

    If reading raises, the batch is None and the function raises that error.
    """
    batch, problem = None, None
    try:
        batch = next_batch()
    except Exception as error:  # of any kind: the pipeline reports it to its other ranks
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
                "pass the data loader to Strategy.initialize()"
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
