"""Optimizer of a sharded module, with all objects that its steps use."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from ..layout.chunk import Chunk
from .apart import SliceSplitter
from .assembly import Assembly
from .written import Watch


@dataclass(frozen=True, kw_only=True, eq=False)
class SteppedOptimizer:
    """Optimizer and the chunks that it steps.

    Args:
        number: Number of the optimizer.
        optimizer: Optimizer.
        chunks: Chunks that hold its parameters.
        splitter: Splitter that steps parameters separately if their gradients or states differ.
        assembly: Assembly of its full tensors from shards; None: it steps no such tensors.
        watch: Detector of writes to its tensors between two steps.
        all_see: Whether each rank detects what any rank writes, if all ranks run the same code.
    """

    number: int
    optimizer: Optimizer
    chunks: Sequence[Chunk]
    splitter: SliceSplitter
    assembly: Assembly | None
    watch: Watch
    all_see: bool
