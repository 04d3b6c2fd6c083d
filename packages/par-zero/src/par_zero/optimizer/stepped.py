"""Optimizer of a sharded module, with all objects that its steps use."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from ..layout.chunk import Chunk
from .apart import SliceSplitter
from .assembly import Assembly


@dataclass(frozen=True, kw_only=True, eq=False)
class SteppedOptimizer:
    """Optimizer and the chunks that it steps.

    Args:
        optimizer: Optimizer.
        chunks: Chunks that hold its parameters.
        splitter: Splitter that steps parameters separately if their gradients or states differ.
        assembly: Assembly of its full tensors from shards; None: it steps no such tensors.
    """

    optimizer: Optimizer
    chunks: Sequence[Chunk]
    splitter: SliceSplitter
    assembly: Assembly | None
