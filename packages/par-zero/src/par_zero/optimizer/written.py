"""Detection of a program's writes outside of a step: to an optimizer's tensors, or to parameters with master weights.

`eval()` of a schedule-free optimizer, a hook, or a Lookahead around an optimizer write the optimizer's tensors.

At stages 1 and 2 a step gathers parameters. A later write to a rank's shard would therefore stay on that rank. Torch
counts in-place writes to a tensor, so comparing a few counters finds them. `.data` would return a tensor with a counter
of its own. Between steps the tensors therefore have a class whose `.data` shares the counter.

A step rounds master weights to the module's parameters, and would overwrite a program's writes to these. Each step
therefore first finds the parameters that were written, and copies the written values to the master weights.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from par_groups import WatchedParameter, attributes, follow_written_, watch_weight_

from .._torch_private import version_of, without_torch_functions
from ..layout.chunk import Chunk


class Watch:
    """Detects writes to the tensors of an optimizer between two steps.

    Tensors that are stepped piece by piece keep their class, because a step temporarily gives them other memory.

    Args:
        chunks: Chunks whose slices the optimizer holds.
        late: Whether pieces are stepped during the next forward. They are watched from `settled` on.
    """

    def __init__(self, chunks: Sequence[Chunk], *, late: bool = False) -> None:
        slices = [part for chunk in chunks for part in chunk.slices]
        tensors = [part.tensor for part in slices if not part.in_pieces]
        tensors += [whole for chunk in chunks for whole in chunk.wholes]
        self._tensors = [(tensor, tensor.detach()) for tensor in tensors]
        # Slices of one buffer share a version counter, so one tensor per buffer is enough. The counter is read from a
        # detached view: the tensor itself may be an `ArrivingParameter`, which would wait for its all-gather.
        self._counted = list({place.untyped_storage().data_ptr(): place for _, place in self._tensors}.values())
        self._pieces, self._late = [part.tensor for part in slices if part.in_pieces], late
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.begin()

    def begin(self) -> None:
        """Start to watch: all ranks have the current values of the tensors."""
        self._versions = _versions(self._counted if self._late else [*self._counted, *self._pieces])
        for tensor, _ in self._tensors:
            if type(tensor) is nn.Parameter:  # not one whose all-gather is in flight
                tensor.__class__ = WatchedParameter

    def settled(self, *_: object) -> None:
        """Watch the pieces too, since no step is running any more."""
        known = {tensor for tensor, _ in self._versions}
        self._versions += _versions([tensor for tensor in self._pieces if tensor not in known])

    def end(self) -> None:
        """Stop to watch for a step, whose foreach and fused kernels accept only ordinary parameters.

        `found` is False until `begin`. If a step fails on one rank, that rank must not begin an all-gather, because the
        other ranks would not join it.
        """
        self._versions = []
        for tensor, _ in self._tensors:
            tensor.__class__ = nn.Parameter

    @torch.no_grad()
    def put_back_(self) -> None:
        """Copy tensors that a step has replaced, as `p.data = p.data - update` does, back to their chunk."""
        for tensor, place in self._tensors:
            if tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor.detach())
                tensor.data = place

    @property
    def found(self) -> bool:
        """Whether this rank has written to its tensors since `begin`."""
        return any(version_of(tensor) != version for tensor, version in self._versions)


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return tensors with their version counters, without tensors of inference mode, which have no counter."""
    return [(tensor, version_of(tensor)) for tensor in tensors if not tensor.is_inference()]


class ModuleWrites:
    """Finds the chunks whose parameters a program has written in the module since the last `mark`.

    Each parameter has a version counter of its own, because it became a view of its chunk by an assignment to `data`.
    par-zero writes to the chunk, so only writes of the program count. One integer per parameter is compared per step.

    Args:
        chunks: Chunks at stages 0 to 2, where a parameter is never freed. Chunks without master weights are ignored.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._parameters: dict[Chunk, list[nn.Parameter]] = {}
        for chunk in chunks:
            parameters = chunk.parameters
            # Torch counts no writes to tensors that were made in inference mode.
            if chunk.has_copies and not any(parameter.is_inference() for parameter in parameters):
                self._parameters[chunk] = parameters
                for parameter in parameters:
                    watch_weight_(parameter)
        self._versions: dict[Chunk, list[int]] = {}
        self.mark(self._parameters)

    def mark(self, chunks: Iterable[Chunk]) -> None:
        """Record that the master weights of some chunks have all that was written to their parameters."""
        with without_torch_functions():  # a version is no value, for which a parameter in flight would wait
            for chunk in chunks:
                if chunk in self._parameters:
                    self._versions[chunk] = [version_of(parameter) for parameter in self._parameters[chunk]]

    def find(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return the chunks whose version counters have changed: every rank finds what all ranks wrote."""
        with without_torch_functions():
            return [
                chunk
                for chunk in chunks
                if chunk in self._parameters
                and self._versions[chunk] != [version_of(parameter) for parameter in self._parameters[chunk]]
            ]

    def find_aliased(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return the chunks of which a program may hold `parameter.data`, whose writes are not counted."""
        return [
            chunk
            for chunk in chunks
            if any(attributes.HAS_ALIAS.of(parameter) for parameter in self._parameters.get(chunk, ()))
        ]

    def first_name(self, chunk: Chunk) -> str:
        """Return the name of the first parameter of a chunk that was written."""
        versions = zip(self._versions[chunk], self._parameters[chunk], strict=True)
        changed = [before != version_of(parameter) for before, parameter in versions]
        return chunk.members[changed.index(True)].names[0]

    @torch.no_grad()
    def follow_(self, chunks: Sequence[Chunk]) -> None:
        """Copy what was written to the parameters of some chunks to their master weights.

        Elements that were not written keep all digits of their master weights.
        """
        for chunk in chunks:
            for part, master in chunk.copies():
                follow_written_(master, chunk.own[part].to(master.device))
        self.mark(chunks)


def all_see(chunks: Iterable[Chunk]) -> bool:
    """Return whether every rank holds a tensor of each param group of which any rank holds one.

    Code that runs identically on all ranks then writes to a tensor on all of them, or on no rank.

    Args:
        chunks: Chunks whose slices an optimizer holds.
    """
    of_ranks: dict[int, list[set[int]]] = {}
    for chunk in chunks:
        if chunk.plan.assembled:
            return False
        layout = chunk.layout
        found = of_ranks.setdefault(chunk.plan.share, [set() for _ in range(layout.ranks)])
        for rank, groups in enumerate(found):
            groups.update(part.group for part in layout.slices(*layout.share(rank)))
    every = {group for found in of_ranks.values() for groups in found for group in groups}
    return all(any(all(group in groups for groups in found) for found in of_ranks.values()) for group in every)
