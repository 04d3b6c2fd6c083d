"""An optimizer of a sharded module, with all that its steps need."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from ..layout.chunk import Chunk
from .apart import SliceSplitter
from .assembly import Assembly


@dataclass(frozen=True, kw_only=True, eq=False)
class SteppedOptimizer:
    """An optimizer, and the parameters that it steps.

    Args:
        optimizer: The optimizer.
        chunks: The chunks that hold its parameters.
        splitter: Steps parameters separately whose gradients or states differ.
        assembly: What is put together from parts for it; None: nothing.
    """

    optimizer: Optimizer
    chunks: Sequence[Chunk]
    splitter: SliceSplitter
    assembly: Assembly | None
