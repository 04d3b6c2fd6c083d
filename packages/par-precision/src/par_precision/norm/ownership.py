"""Who counts what of a tensor, from what the tensor says of itself."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import Segments, segments_of

from .._dtensor import is_placed
from .counted import EVERYTHING, NOTHING, Counted, counted

Parameters = Tensor | Iterable[Tensor] | nn.Module | torch.optim.Optimizer
"""Whose gradients are meant."""

_NOTE = "par_counted"  # where a tensor keeps what was found last: its record, who sums, and what is counted then


class Ownership:
    """What this rank counts when a group sums.

    Args:
        group: The ranks that sum; None: this one alone.
        replicas: The ranks on which tensors without a record are copies of each other; None: they are this rank's own.
    """

    def __init__(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None = None) -> None:
        self._alone = group is None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = frozenset([self.rank] if group is None else dist.get_process_group_ranks(group))
        copies = {self.rank} if replicas is None else set(dist.get_process_group_ranks(replicas))
        self._plain = EVERYTHING if self.rank == min(copies & self.ranks, default=self.rank) else NOTHING
        self._placed: list[tuple[Any, Any, Counted]] = []  # meshes and placements; there are few

    def of(self, tensor: Tensor) -> Counted:
        """What is counted of a parameter's local tensor, or of its gradient's.

        Raises:
            ValueError: The tensor is cut over ranks, and there is no group.
        """
        if is_placed(tensor):
            return self._of_placed(tensor)
        attributes = tensor.__dict__
        record = attributes.get("par_sharding") or attributes.get("par_segments")
        return self._plain if record is None else self._of_recorded(tensor, record)

    def _of_recorded(self, tensor: Tensor, record: object) -> Counted:
        known = tensor.__dict__.get(_NOTE)
        if known is None or known[0] is not record or known[1:3] != (self.ranks, self._alone):
            known = tensor.__dict__[_NOTE] = (record, self.ranks, self._alone, self._recorded(tensor))
        found: Counted = known[3]
        return found

    def _of_placed(self, tensor: Any) -> Counted:
        spec = tensor._spec
        mesh, placements = spec.mesh, spec.placements
        for known, placed, found in self._placed:  # the same for all that lie so, and it costs time to find
            if known is mesh and placed == placements:
                return found
        found = self._of_recorded(tensor, spec)
        self._placed.append((mesh, placements, found))
        return found

    def _recorded(self, tensor: Tensor) -> Counted:
        segments = segments_of(tensor)
        if self._alone:
            self._check_whole(segments)
        if not is_placed(tensor):
            return counted(segments, tensor.numel(), self.rank, self.ranks)
        owned = any(box.owns(self.rank, self.ranks) for segment in segments for box in segment.sharding.boxes)
        return EVERYTHING if owned else NOTHING

    def _check_whole(self, segments: Segments) -> None:
        for segment in segments:
            if segment.sharding.local_numel != segment.sharding.numel:
                raise ValueError(
                    f"a parameter of shape {segment.sharding.shape} is cut over ranks, of which this one holds "
                    f"{segment.sharding.local_numel} elements; pass the group of all ranks that hold it"
                )


def tensors_in(parameters: Parameters) -> Iterator[Tensor]:
    """The tensors whose gradients are meant.

    Raises:
        RuntimeError: A module's parameter whose gradient lives elsewhere.
    """
    if isinstance(parameters, Tensor):
        yield parameters
    elif isinstance(parameters, nn.Module):
        for name, parameter in parameters.named_parameters():
            if "par_gradient_elsewhere" in parameter.__dict__:
                where = parameter.__dict__["par_gradient_elsewhere"]
                raise RuntimeError(f"the gradient of {name!r} lives in {where}; pass that")
            yield parameter
    elif isinstance(parameters, torch.optim.Optimizer):
        for group in parameters.param_groups:
            yield from group["params"]
    else:
        yield from parameters
