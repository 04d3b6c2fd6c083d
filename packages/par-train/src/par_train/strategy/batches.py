"""The batches of a training step, read from any source."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from par_data import BatchComparison, ShardedDataLoader, StepRandomness, move_to_device
from par_layers.pretrained import cut_dict

from .plugins import DevicePlugin
from .setup import Setup


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
            # The order matters: ranks compare full batches, then take their parts, and copy only these to the device.
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
            # A loader starts its next epoch; an iterator, above, ends.
            except StopIteration:
                self._iterators[source] = iter(source)
                return next(self._iterators[source])

    def clear(self) -> None:
        """Drop all iterators."""
        self._iterators.clear()
