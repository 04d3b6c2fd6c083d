"""Elements of a tensor that this rank counts, from the tensor's sharding metadata."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import Segments, attributes, segments_of

from .._dtensor import is_dtensor
from .._torch_private import spec_of
from .counted import EVERYTHING, NOTHING, Counted, counted

Parameters = Tensor | Iterable[Tensor] | nn.Module | torch.optim.Optimizer
"""Whose gradients are meant."""

_NOTE = "par_counted"
"""The attribute in which a tensor keeps the last answer: its record, who summed, and what counted then."""


class Ownership:
    """Elements of tensors that this rank counts when a group sums.

    Args:
        group: Ranks that sum. None: only this rank.
        replicas: Ranks on which tensors without sharding metadata are replicas. None: only this rank has them.
    """

    def __init__(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None = None) -> None:
        self._alone = group is None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = frozenset([self.rank] if group is None else dist.get_process_group_ranks(group))
        copies = {self.rank} if replicas is None else set(dist.get_process_group_ranks(replicas))
        # Of the replicas that take part in the sum, the lowest rank counts the elements for all.
        self._plain = EVERYTHING if self.rank == min(copies & self.ranks, default=self.rank) else NOTHING
        self._placed: list[tuple[Any, Any, Counted]] = []  # by mesh and placements, of which a model has few

    def of(self, tensor: Tensor) -> Counted:
        """Return the counted elements of a parameter's local tensor, or of its gradient's local tensor.

        Raises:
            ValueError: The tensor is sharded over ranks, and there is no group.
        """
        if is_dtensor(tensor):
            return self._of_dtensor(tensor)
        record = attributes.SHARDING.of(tensor) or attributes.SEGMENTS.of(tensor)
        return self._plain if record is None else self._of_recorded(tensor, record)

    def _of_dtensor(self, tensor: Tensor) -> Counted:
        spec = spec_of(tensor)
        mesh, placements = spec.mesh, spec.placements
        for known_mesh, known_placements, answer in self._placed:
            if known_mesh is mesh and placements == known_placements:
                return answer
        answer = self._of_recorded(tensor, spec)
        self._placed.append((mesh, placements, answer))
        return answer

    def _of_recorded(self, tensor: Tensor, record: object) -> Counted:
        """Return the answer cached on the tensor if it is for this record and these ranks; else compute a new one."""
        note = tensor.__dict__.get(_NOTE)
        if note is None or note[0] is not record or note[1:3] != (self.ranks, self._alone):
            note = tensor.__dict__[_NOTE] = (record, self.ranks, self._alone, self._computed(tensor))
        answer: Counted = note[3]
        return answer

    def _computed(self, tensor: Tensor) -> Counted:
        segments = segments_of(tensor)
        if self._alone:
            _check_uncut(segments)
        if not is_dtensor(tensor):
            return counted(segments, tensor.numel(), self.rank, self.ranks)
        # The boxes of a DTensor have the same copies, so a rank owns all of them or none.
        owned = any(box.owns(self.rank, self.ranks) for segment in segments for box in segment.sharding.boxes)
        return EVERYTHING if owned else NOTHING


def _check_uncut(segments: Segments) -> None:
    for segment in segments:
        if segment.sharding.local_numel != segment.sharding.numel:
            raise ValueError(
                f"a parameter of shape {segment.sharding.shape} is cut over ranks, of which this one holds "
                f"{segment.sharding.local_numel} elements; pass the group of all ranks that hold it"
            )


def tensors_in(parameters: Parameters) -> Iterator[Tensor]:
    """Yield the tensors whose gradients belong to an argument: a tensor, several tensors, a module or an optimizer.

    Raises:
        RuntimeError: A module's parameter whose gradient lives elsewhere.
    """
    if isinstance(parameters, Tensor):
        yield parameters
    elif isinstance(parameters, nn.Module):
        for name, parameter in parameters.named_parameters():
            if (where := attributes.GRADIENT_ELSEWHERE.of(parameter)) is not None:
                raise RuntimeError(f"the gradient of {name!r} lives in {where}; pass that")
            yield parameter
    elif isinstance(parameters, torch.optim.Optimizer):
        for group in parameters.param_groups:
            yield from group["params"]
    else:
        yield from parameters
