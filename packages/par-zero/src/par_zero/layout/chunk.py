"""A chunk: parameters that lie in one flat buffer, reduced and gathered as one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from par_groups import GradientElsewhere, attributes

from .._stage import ZeroStage
from .._tiers import Home
from ..watch.freed import Freed, FreedParameter
from .meter import GRADIENTS, UNITS, Meter
from .packing import ChunkLayout
from .sharers import Groups


@dataclass(eq=False, kw_only=True)
class Member:
    """A parameter of a chunk.

    Args:
        parameter: The module's parameter.
        names: All its names in the module, of which a tied parameter has several.
        group: Number of its param group among those of all optimizers; -1 where no optimizer has it.
        owner: Number of its optimizer; -1 where none has it.
        atomic: Whether its optimizer must see it as a whole.
        assembled: Whether it is put together for that, from the parts that tensor ranks have, or from several boxes.
        share: Number of the share that it belongs to: 0 for the ranks of `shard(group=...)`, then `others`.
        shape: Shape of the parameter on this rank, before it is cut.
        kept: Whether the module computes with it in its own dtype, whatever `param_dtype` is.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    group: int
    owner: int = -1
    atomic: bool = False
    assembled: bool = False
    share: int = 0
    shape: torch.Size
    kept: bool = False


@dataclass(eq=False, kw_only=True)
class Slice:
    """A tensor of the optimizer, and which elements of a chunk it holds.

    Args:
        tensor: The optimizer's tensor, flat unless parameters are kept whole.
        group: Number of its param group among those of all optimizers.
        start: Its first element in the chunk.
        tier: Where the optimizer's state of it lies: "device", "host" or "disk".
        in_pieces: Whether it is stepped through buffers, as something of it lies on a disk.
    """

    tensor: nn.Parameter
    group: int
    start: int
    tier: str = "device"
    in_pieces: bool = False

    @property
    def stop(self) -> int:
        """One past its last element in the chunk."""
        return self.start + self.tensor.numel()


class Chunk:
    """Parameters in one flat buffer of `size` elements, which the layout deals out to the ranks in shares.

    A new chunk's parameters are views of it: whole ones, or this rank's share where parameters are sharded.

    Args:
        members: The parameters.
        layout: Where they lie in the buffer.
        groups: The ranks that share it.
        stage: The ZeRO stage: of what this rank keeps its share alone.
        packed: (size) The parameters' values, in the dtype of the optimizer. The chunk takes its memory, or gives it
            back.
        dtype: Dtype of the parameters in use.
        reduce_dtype: Dtype of gradients while they are summed.
        items: Numbers of the called modules that have its parameters.

    Attributes:
        flat: (size) All parameters as the module uses them. Where parameters are sharded, its memory is there only
            while they are used.
        own: The parameters that this rank's optimizer updates, elements `updated` of `flat`: a view of it, or, where
            parameters are sharded, memory of their own.
        master: The elements as the optimizer holds them: `own` itself, or a copy in another dtype; the first of them
            where the copy of the others lies elsewhere.
        elsewhere: That of the others, by the first element in the chunk: tensors in the dtype of the copy. Where
            parameters without a copy lie on a disk, the parts of `own` that are stepped one by one.
        slices: The tensors of the optimizer that hold `master`.
        wholes: The tensors of the optimizer that parameters of it are put together in, where they are assembled.
        number: Its place in the order in which gradients are expected; -1 if it gets none.
        home: Where its parameters and its reduced gradients lie between passes, as bytes are counted.
        meter: Counts the bytes of what comes and goes; that of the engine, when it has one.
    """

    def __init__(
        self,
        members: Sequence[Member],
        layout: ChunkLayout,
        groups: Groups,
        *,
        stage: ZeroStage,
        packed: torch.Tensor,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        items: tuple[int, ...],
    ) -> None:
        self.members, self.layout, self.stage = tuple(members), layout, stage
        self.groups, self.meter, self.home = groups, Meter(), Home()
        self._guards = False
        low, high = self.updated
        if stage.shards_parameters:
            self.own = packed[low:high].to(dtype, copy=True)
        else:
            self.flat = packed.to(dtype)
            self.own = self.flat[low:high]
        self.master = self.own
        if dtype != packed.dtype:
            self.master = packed if high - low == layout.size else packed[low:high].clone()
        if stage.shards_parameters:
            self.show_share()
            self.flat = packed
            if dtype != packed.dtype:
                if self.master is not packed:
                    self.resize_(0)  # before there is more
                self.flat = packed.new_empty(layout.size, dtype=dtype)
            self.resize_(0)
        else:
            self.show_whole()
        self.elsewhere: dict[int, torch.Tensor] = {}
        for tensor in (self.flat, self.own):
            attributes.LABEL.set(tensor, self.label)
        self.reduce_dtype, self.items = reduce_dtype, items
        self.slices: list[Slice] = []
        self.wholes: list[nn.Parameter] = []
        self.number = -1

    @cached_property
    def share(self) -> tuple[int, int]:
        """The first element of this rank's share, and one past its last."""
        return self.layout.share(self.groups.rank)

    @cached_property
    def updated(self) -> tuple[int, int]:
        """The first element that this rank's optimizer updates, and one past its last."""
        return self.share if self.stage.shards_state else (0, self.layout.size)

    @cached_property
    def name(self) -> str:
        """The name of its first parameter, by which programs call it."""
        return self.members[0].names[0]

    @cached_property
    def arriving(self) -> int:
        """Bytes of its members' gradients as autograd makes them."""
        return sum(member.shape.numel() for member in self.members) * self.flat.element_size()

    @cached_property
    def label(self) -> str:
        """Its first and its last parameter, for messages about its collectives."""
        return " to ".join(dict.fromkeys((self.name, self.members[-1].names[0])))

    @property
    def owner(self) -> int:
        """Number of the optimizer that has its parameters, all of them; -1 where none has them."""
        return self.members[0].owner

    @property
    def assembled(self) -> bool:
        """Whether its optimizer has none of it as it lies here: see `par_zero.optimizer.assembly`."""
        return self.members[0].assembled

    @property
    def trained(self) -> bool:
        """Whether its parameters get gradients: an optimizer has them, or none has and they ask for gradients."""
        return any(member.group >= 0 or member.parameter.requires_grad for member in self.members)

    def move_master_(self, places: Mapping[int, torch.Tensor]) -> None:
        """Moves the last elements of the optimizer's own copy into other memory, such as on a disk.

        Args:
            places: The memory, by the first element in the chunk. What lies behind the first of these, and in none, is
                padding.
        """
        low, _ = self.updated
        for start, place in places.items():
            place.copy_(self.master[start - low : start - low + place.numel()])
        self.elsewhere = dict(places)
        if places:
            self.master = self.master[: min(places) - low].clone()

    def take_own_(self, place: torch.Tensor, parts: Mapping[int, torch.Tensor]) -> None:
        """Has this rank's share lie in other memory, such as on a disk, where parameters are sharded.

        Args:
            place: The memory, with the values in it.
            parts: Tensors of their own in that memory, by the first element in the chunk, for what is stepped one by
                one where the optimizer has no copy of it.
        """
        if self.master is self.own:
            self.master, self.elsewhere = place, dict(parts)
        self.own = place
        attributes.LABEL.set(self.own, self.label)
        self.show_share()

    def share_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's share in a buffer for the whole chunk."""
        low, high = self.share
        share = flat[low:high]
        attributes.LABEL.set(share, self.label)
        return share

    def held(self, start: int, stop: int) -> torch.Tensor:
        """Elements start to stop - 1 as the optimizer holds them."""
        low, _ = self.updated
        return self.elsewhere[start] if start in self.elsewhere else self.master[start - low : stop - low]

    def copies(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the optimizer's own copies of parameters, such as master weights: (slice of `own`, copy)."""
        if self.master is not self.own:
            yield slice(self.master.numel()), self.master
            low, _ = self.updated
            for part in self.slices:
                if part.start in self.elsewhere:
                    yield slice(part.start - low, part.stop - low), part.tensor.detach()

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The members' places in a buffer of this layout, in their shapes."""
        for member, (start, stop) in zip(self.members, self.layout.slots, strict=True):
            yield flat[start:stop].view(member.shape)

    def show_whole(self) -> None:
        """The parameters become views of `flat`, which has its memory."""
        for member, view in zip(self.members, self.views(self.flat), strict=True):
            parameter = member.parameter
            if type(parameter) is FreedParameter:
                object.__setattr__(parameter, "__class__", nn.Parameter)
            parameter.data = view

    def show_share(self) -> None:
        """The parameters become views of this rank's share in `own`, flat, where parameters are sharded."""
        low, high = self.share
        for member, (start, stop) in zip(self.members, self.layout.slots, strict=True):
            first, parameter = min(max(start, low), high), member.parameter
            if type(parameter) is FreedParameter:
                object.__setattr__(parameter, "__class__", nn.Parameter)
            parameter.data = self.own[first - low : max(first, min(stop, high)) - low]
            if self._guards and type(parameter) is nn.Parameter:  # a subclass may have operations of its own
                parameter.__class__ = FreedParameter

    def guard(self, written: Callable[[], None]) -> None:
        """From now on parameters that show this rank's share refuse to be read as if they were whole.

        Args:
            written: Is called when a share was written.
        """
        low, high = self.share
        for member, (start, stop) in zip(self.members, self.layout.slots, strict=True):
            first = min(max(start, low, start), max(high, start), stop) - start
            freed = Freed(name=member.names[0], shape=member.shape, start=first, written=written)
            member.parameter.par_freed = freed  # type: ignore[attr-defined]  # a tensor takes attributes
        self._guards = True
        self.show_share()

    def resize_(self, count: int) -> None:
        """Gives the memory of `flat` back, or takes it, for that many elements.

        What NumPy has seen of it may still be in use, and stays as it is.
        """
        storage = self.flat.untyped_storage()
        if storage.resizable():
            before = storage.nbytes()
            storage.resize_(count * self.flat.element_size())
            self.meter.add(UNITS, storage.nbytes() - before)

    def memory(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield the memory that it has now, but for a disk: its kind, a tensor in it, its tier.

        Several tensors may be in the same memory. What `ChunkGradients` holds is not among them.
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
