"""Chunk: parameters in one flat buffer, which are reduced and gathered together."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from par_groups import GradientElsewhere, WatchedWeight, attributes

from .._stage import ZeroStage
from .._tiers import Home
from .._torch_private import versions_of
from ..watch.freed import Freed, FreedParameter
from .meter import GRADIENTS, UNITS, Meter
from .plan import ChunkPlan
from .sharers import Groups

_OWN_CLASSES = (nn.Parameter, WatchedWeight, FreedParameter)
"""Classes of parameters that a chunk may exchange for one another."""

# The data of a watched weight would record a write.
_set_data: Callable[[torch.Tensor, torch.Tensor], None] = nn.Parameter.data.__set__  # type: ignore[attr-defined]


@dataclass(eq=False, kw_only=True)
class Slice:
    """Tensor of the optimizer that holds some elements of a chunk.

    Args:
        tensor: Tensor of the optimizer: flat, or in the parameter's shape if its optimizer is atomic.
        group: Number of its param group among those of all optimizers.
        start: First element in the chunk.
        tier: Tier of the optimizer's state of these elements: "device", "host" or "disk".
        in_pieces: Whether the elements are stepped through buffers, because some of their data is on a disk.
    """

    tensor: nn.Parameter
    group: int
    start: int
    tier: str = "device"
    in_pieces: bool = False

    @property
    def stop(self) -> int:
        """Last element in the chunk plus one."""
        return self.start + self.tensor.numel()


class Chunk:
    """Parameters in one flat buffer of `size` elements, of which each rank has a shard by the layout.

    The parameters of a new chunk are views of the buffer, or, at stage 3, views of this rank's shard.

    Args:
        plan: Parameters, and what was known of them before they were packed.
        groups: Communicators of the data-parallel group.
        stage: ZeRO stage.
        packed: (size) Values of the parameters, in the dtype of the optimizer. The chunk reuses its memory or frees it.

    Attributes:
        members: Parameters.
        layout: Positions of the parameters in the buffer.
        flat: (size) All parameters as the module uses them. At stage 3 it has memory only while they are used.
        own: Elements `updated` of `flat`, which this rank's optimizer updates: a view of `flat`, or, at stage 3, memory
            of its own.
        master: Elements `updated` as the optimizer holds them: `own`, or a copy in another dtype. If the end of the
            copy is offloaded, only the elements before it.
        elsewhere: Offloaded elements that the optimizer holds, by their first element in the chunk, in its dtype:
            elements of the copy, or copies on the host of elements of `own` on an accelerator. If parameters without a
            copy are on a disk, the parts of `own` that are stepped separately.
        slices: Tensors of the optimizer that hold `master`.
        wholes: Tensors of the optimizer into which its parameters are assembled.
        number: Index in the order in which gradients are expected; -1 if the chunk gets none.
        home: Tiers of its parameters and reduced gradients between passes, by which bytes are counted.
        meter: Meter of gathered parameters, gradients and buffers: the engine's, once the engine exists.
    """

    def __init__(self, plan: ChunkPlan, groups: Groups, stage: ZeroStage, packed: torch.Tensor) -> None:
        self.plan, self.stage, dtype = plan, stage, plan.dtype_in_use
        self.members, self.layout = plan.members, plan.layout
        self.groups, self.meter, self.home = groups, Meter(), Home()
        self._guards = False
        # Torch counts no writes to tensors that were made in inference mode.
        self._writes = tuple(each for each in self.parameters if not each.is_inference()), 0
        low, high = self.updated
        if stage.shards_parameters:
            # The full buffer loses its memory below, so the shard needs memory of its own.
            self.own = packed[low:high].to(dtype, copy=True)
        else:
            self.flat = packed.to(dtype)
            self.own = self.flat[low:high]
        self.master = self.own
        if dtype != packed.dtype:
            # A view of the shard would keep the full buffer alive.
            self.master = packed if high - low == self.layout.size else packed[low:high].clone()
        if stage.shards_parameters:
            self.flat = packed
            self.show_share()
            if dtype != packed.dtype:
                # The optimizer's copy needs only a shard of `packed`, whose memory goes before the buffer in `dtype`
                # takes its own.
                if self.master is not packed:
                    self.resize_(0)
                self.flat = packed.new_empty(self.layout.size, dtype=dtype)
            self.resize_(0)
        else:
            self.show_whole()
        self.elsewhere: dict[int, torch.Tensor] = {}
        for tensor in (self.flat, self.own):
            attributes.LABEL.set(tensor, self.label)
        self.slices: list[Slice] = []
        self.wholes: list[nn.Parameter] = []
        self.number = -1

    @cached_property
    def share(self) -> tuple[int, int]:
        """First element of this rank's shard, and the last plus one."""
        return self.layout.share(self.groups.rank)

    # Both lists of views are made once, because a step at stage 3 shows them several times. They survive `resize_`,
    # which frees memory within a storage.

    @cached_property
    def whole_views(self) -> list[torch.Tensor]:
        """Views of `flat`: the full values of each parameter, in its shape."""
        return list(self.views(self.flat))

    @cached_property
    def _parts(self) -> list[torch.Tensor]:
        """Views of `own`: the elements of each parameter in this rank's shard, flat; empty if it lies outside."""
        low, high = self.share
        firsts = [min(max(start, low), high) for start, _ in self.layout.slots]
        return [
            self.own[first - low : max(first, min(stop, high)) - low]
            for first, (_, stop) in zip(firsts, self.layout.slots, strict=True)
        ]

    @cached_property
    def updated(self) -> tuple[int, int]:
        """First element that this rank's optimizer updates, and the last plus one."""
        return self.plan.updated(self.groups.rank, self.stage)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the members."""
        return [member.parameter for member in self.members]

    @cached_property
    def name(self) -> str:
        """Name of its first parameter, which programs use as the name of the chunk."""
        return self.plan.name

    @cached_property
    def label(self) -> str:
        """Names of its first and its last parameter, for messages about its collectives."""
        return " to ".join(dict.fromkeys((self.name, self.members[-1].names[0])))

    @cached_property
    def device(self) -> torch.device:
        """Device that computes with the parameters. `own` and `elsewhere` may be on its host."""
        return self.flat.device

    @property
    def is_on_host(self) -> bool:
        """Whether this rank's shard is on the host of an accelerator, from where it is copied before a gather."""
        return self.own.device != self.device

    def move_master_(self, places: Mapping[int, torch.Tensor]) -> None:
        """Move the last elements of what the optimizer holds to other memory, such as a disk.

        Args:
            places: New memory, by its first element in the chunk. Elements behind the first of these that no memory
                covers are padding.
        """
        low, _ = self.updated
        for start, place in places.items():
            place.copy_(self.master[start - low : start - low + place.numel()])
        self.elsewhere = dict(places)
        # The module still computes with `own`, so only a copy gives memory back.
        if places and self.master is not self.own:
            # A view would keep the memory of the moved elements alive.
            self.master = self.master[: min(places) - low].clone()

    def take_own_(self, place: torch.Tensor, parts: Mapping[int, torch.Tensor]) -> None:
        """Move this rank's shard to other memory, such as a disk. Stage 3 only.

        Args:
            place: New memory, which contains the values already.
            parts: Separate tensors in that memory, by their first element in the chunk. The optimizer steps them
                separately and has no copy of them.
        """
        if self.master is self.own:
            # Without a copy of its own, the optimizer steps the moved shard itself.
            self.master, self.elsewhere = place, dict(parts)
        self.own = place
        del self._parts
        attributes.LABEL.set(self.own, self.label)
        self.show_share()

    def share_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a buffer for the full chunk."""
        low, high = self.share
        share = flat[low:high]
        attributes.LABEL.set(share, self.label)
        return share

    def held(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from `start` up to `stop` as the optimizer holds them."""
        low, _ = self.updated
        return self.elsewhere[start] if start in self.elsewhere else self.master[start - low : stop - low]

    @property
    def has_copies(self) -> bool:
        """Whether the optimizer has copies of any parameters."""
        return self.master is not self.own or any(self.is_copied(start) for start in self.elsewhere)

    def is_copied(self, start: int) -> bool:
        """Return whether the optimizer has a copy of the slice that begins at an element."""
        # Without a copy in another dtype, memory of the same device is a part of `own`.
        return self.master is not self.own or (
            start in self.elsewhere and self.elsewhere[start].device != self.own.device
        )

    def copies(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the optimizer's own copies of parameters, such as master weights: (slice of `own`, copy)."""
        if self.master is not self.own:
            yield slice(self.master.numel()), self.master
        low, _ = self.updated
        for part in self.slices:
            if part.start in self.elsewhere and self.is_copied(part.start):
                yield slice(part.start - low, part.stop - low), part.tensor.detach()

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the members' views of a buffer with this layout, in their shapes."""
        for member, (start, stop) in zip(self.members, self.layout.slots, strict=True):
            yield flat[start:stop].view(member.shape)

    def show_whole(self) -> None:
        """Make the parameters views of `flat`, which must have memory."""
        for parameter, view in zip(self.parameters, self.whole_views, strict=True):
            # A freed parameter accepts only this rank's shard as its data, so its class changes first.
            kind: type = type(parameter)
            if kind is FreedParameter:
                parameter.__class__ = WatchedWeight
            _set_data(parameter, view)
        parameters, _ = self._writes
        self._writes = parameters, versions_of(parameters)

    @property
    def may_be_written(self) -> bool:
        """Whether a program may have written the parameters since `show_whole`. Stage 3 only.

        Autograd counts in-place writes. It does not count writes to `data`, so an access to it counts as a write.
        """
        (parameters, versions), alias = self._writes, attributes.HAS_ALIAS.name
        return versions_of(parameters) != versions or any(alias in parameter.__dict__ for parameter in parameters)

    def show_share(self) -> None:
        """Make the parameters flat views of this rank's shard in `own`. Stage 3 only."""
        alias = attributes.HAS_ALIAS.name
        # If a parameter changed its device, torch would replace the node that accumulates its gradient, and the graph
        # of a pass would have several of them. So the parameter stays on its device, and refers to its shard.
        nothing = self.own.new_empty(0, device=self.device) if self.is_on_host else None
        for parameter, part in zip(self.parameters, self._parts, strict=True):
            kind: type = type(parameter)
            if kind is FreedParameter:
                parameter.__class__ = nn.Parameter
            elif kind is WatchedWeight:
                parameter.__dict__.pop(alias, None)
            _set_data(parameter, part if nothing is None else nothing)
            # A subclass of the user's may have operations of its own, so its class does not change.
            if kind in _OWN_CLASSES:
                if self._guards:
                    parameter.par_freed.on_host = None if nothing is None else part  # type: ignore[attr-defined]
                parameter.__class__ = FreedParameter if self._guards else nn.Parameter

    def guard(self, settle: Callable[[], None], written: Callable[[], None]) -> None:
        """Make reads of sharded parameters as if they were full raise an error from now on.

        Args:
            settle: Function that is called before a write to a shard on the host of an accelerator.
            written: Function that is called after a write to a shard.
        """
        low, high = self.share
        for member, (start, stop) in zip(self.members, self.layout.slots, strict=True):
            first = min(max(start, low, start), max(high, start), stop) - start
            freed = Freed(name=member.names[0], shape=member.shape, start=first, settle=settle, written=written)
            member.parameter.par_freed = freed  # type: ignore[attr-defined]  # a tensor takes attributes
        self._guards = True
        self.show_share()

    def resize_(self, count: int) -> None:
        """Free the memory of `flat`, or allocate memory for `count` elements.

        A storage that was exported to NumPy may still be in use, so it keeps its memory.
        """
        storage = self.flat.untyped_storage()
        if storage.resizable():
            before = storage.nbytes()
            storage.resize_(count * self.flat.element_size())
            self.meter.add(UNITS, storage.nbytes() - before)

    def memory(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield the chunk's current memory, except on a disk: its kind, a tensor in it, its tier.

        Several tensors may share memory. The memory of `ChunkGradients` is not included.
        """
        yield ("units", self.flat, "device") if self.stage.shards_parameters else ("parameters", self.flat, "device")
        if self.home.parameters != "disk":
            yield "parameters", self.own, self.home.parameters
        if self.master is not self.own:
            yield "copies", self.master, "device"
        yield from (("copies", whole, "device") for whole in self.wholes)
        for member in self.members:
            if member.parameter.grad is not None and type(member.parameter.grad) is not GradientElsewhere:
                yield GRADIENTS, member.parameter.grad, "device"
