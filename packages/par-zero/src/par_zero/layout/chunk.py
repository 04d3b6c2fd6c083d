"""A chunk: parameters that lie in one flat buffer, with their gradients, reduced and gathered as one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from par_groups import GradientElsewhere, attributes

from .._stage import ZeroStage
from .._tiers import Home
from .._torch_private import foreach_add_, foreach_copy_, without_torch_functions
from ..watch.freed import Freed, FreedParameter
from .buffers import Buffers
from .meter import BUFFERS, GRADIENTS, UNITS, Meter
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


class GradientStore(Protocol):
    """Keeps this rank's sums of gradients elsewhere than in a chunk."""

    def add_earlier_(self, chunk: "Chunk", total: torch.Tensor) -> None:
        """Adds the gradients that the optimizer holds of a chunk to this rank's share of the sum."""

    def write(self, chunk: "Chunk", total: torch.Tensor) -> None:
        """Begins to write what this rank has of a chunk's sum, which is free for other use when this returns."""

    def bind(self, chunk: "Chunk") -> None:
        """Shows the optimizer its gradients, when they are written."""


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
        gradient: (size) The gradients of this rank; where gradients are sharded, from the first one to their reduction.
        slices: The tensors of the optimizer that hold `master`.
        wholes: The tensors of the optimizer that parameters of it are put together in, where they are assembled.
        name: The name of its first parameter, by which programs call it.
        number: Its place in the order in which gradients are expected; -1 if it gets none.
        home: Where its parameters and its reduced gradients lie between passes, as bytes are counted.
        sums: Keeps its reduced gradients, where they lie on a disk; None: they are in memory.
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
        self.groups, self.share = groups, layout.share(groups.rank)
        self.updated = self.share if stage.shards_state else (0, layout.size)
        self.meter, self.home = Meter(), Home()
        self._guards = False
        self.sums: GradientStore | None = None
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
        names = [member.names[0] for member in members]
        self._label = " to ".join(dict.fromkeys((names[0], names[-1])))
        self.name = names[0]
        for tensor in (self.flat, self.own):
            attributes.LABEL.set(tensor, self._label)
        self.reduce_dtype, self.items = reduce_dtype, items
        self.slices: list[Slice] = []
        self.wholes: list[nn.Parameter] = []
        self.number = -1
        self.gradient: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []  # of the members in the last `gradient`, which may come again
        self._filled = False  # whether `gradient` holds sums of this rank that are not reduced yet
        self._adds = False  # whether there are such that lie elsewhere
        self._earlier: torch.Tensor | None = None  # this rank's share of what earlier reductions have given
        self._share_of_sum: torch.Tensor | None = None  # memory for it, where it does not lie in `gradient`
        self._reduced: torch.Tensor | None = None  # elements `updated` of the sum, until the optimizer has them
        self._is_away = False  # whether the latest sum lies elsewhere, and the optimizer does not have it yet
        self._arriving = (
            sum(member.shape.numel() for member in members) * dtype.itemsize
        )  # bytes of autograd's gradients
        self._cast = 0  # bytes of gradients in the optimizer's dtype

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
        attributes.LABEL.set(self.own, self._label)
        self.show_share()

    def share_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's share in a buffer for the whole chunk."""
        low, high = self.share
        share = flat[low:high]
        attributes.LABEL.set(share, self._label)
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

    @property
    def holds_gradients(self) -> bool:
        """Whether it has memory for its gradients between passes: all of them, or its shard of their sum."""
        return (self._share_of_sum if self.stage.shards_gradients else self.gradient) is not None

    @property
    def borrowed(self) -> int:
        """Bytes of the buffer that it has borrowed for its gradients, where these are sharded."""
        if self.gradient is None or not self.stage.shards_gradients:
            return 0
        return self.gradient.untyped_storage().nbytes()

    @property
    def holds_cast(self) -> bool:
        """Whether the optimizer has its gradients in another dtype."""
        return self._cast > 0

    @property
    def arriving(self) -> int:
        """Bytes of its members' gradients as autograd makes them."""
        return self._arriving

    def memory(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """What it has memory for now: of which kind, a tensor in that memory, which may be the same for several; tier.

        What lies on a disk is left out.
        """
        yield ("units", self.flat, "device") if self.stage.shards_parameters else ("parameters", self.flat, "device")
        if self.home.parameters != "disk":
            yield "parameters", self.own, self.home.parameters
        if self.master is not self.own:
            yield "copies", self.master, "device"
        yield from (("copies", whole, "device") for whole in self.wholes)
        if self.gradient is not None:
            yield (BUFFERS if self.stage.shards_gradients else GRADIENTS), self.gradient, "device"
        for member in self.members:
            if member.parameter.grad is not None and type(member.parameter.grad) is not GradientElsewhere:
                yield GRADIENTS, member.parameter.grad, "device"
        given = [tensor.grad for tensor in (*(part.tensor for part in self.slices), *self.wholes)]
        kept = [self._share_of_sum, self._earlier, self._reduced]
        if self.sums is None:
            yield from ((GRADIENTS, tensor, self.home.gradients) for tensor in (*given, *kept) if tensor is not None)

    # The way of a gradient: autograd leaves it in the parameter, `take_gradients` moves it into the buffer, its sum
    # over the ranks is made in `place_of_sum` and kept by `take_sum`, and `bind_gradients` shows it to the optimizer.

    def take_gradients(self, buffers: Buffers) -> list[int]:
        """Moves the members' gradients into `gradient`: by copy the first time, then by addition.

        Args:
            buffers: Lends `gradient`, where gradients are sharded; else the chunk keeps one.

        Returns:
            1 for each member that had a gradient, else 0.
        """
        buffer = self._buffer(buffers)
        if not self._filled and self.sums is None:
            self._earlier = self._reduced_earlier()
        elif not self._filled:
            self._adds = any(part.tensor.grad is not None for part in self.slices)
        with without_torch_functions():  # quicker, where parameters are freed
            gradients = [member.parameter.grad for member in self.members]
        pairs = [
            (place, gradient) for place, gradient in zip(self._places, gradients, strict=True) if gradient is not None
        ]
        self.meter.note("C" if pairs else "zero", self.name)
        if pairs:
            self.meter.touch(GRADIENTS, self._arriving)
        into, given = [place for place, _ in pairs], [gradient for _, gradient in pairs]
        if not self._filled and len(pairs) < len(gradients):
            buffer.zero_()
        if given:
            (foreach_add_ if self._filled else foreach_copy_)(into, given)
        self._filled = True
        with without_torch_functions():
            for member in self.members:
                member.parameter.grad = None
        return [int(gradient is not None) for gradient in gradients]

    def without_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros in place of its gradients, for the sum that other ranks wait for, and where this rank's share goes."""
        low, high = self.share
        flat = torch.zeros(self.layout.size, dtype=self.reduce_dtype, device=self.own.device)
        share = torch.empty(high - low, dtype=self.reduce_dtype, device=self.own.device)
        for tensor in (flat, share):
            attributes.LABEL.set(tensor, self._label)
        return flat, share

    @property
    def waits_for_sum(self) -> bool:
        """Whether there are gradients of this rank that are not summed over the ranks yet."""
        return self._filled

    @property
    def has_no_gradient(self) -> bool:
        """Whether there are neither gradients of this rank, nor any that the optimizer holds."""
        return not self._filled and all(tensor.grad is None for tensor in self._stepped)

    @property
    def is_stepped_here(self) -> bool:
        """Whether an optimizer of this rank holds any part of it; a small chunk is padding on some ranks."""
        return bool(self._stepped)

    @property
    def _stepped(self) -> list[nn.Parameter]:
        """What the optimizer holds of it."""
        return [*(part.tensor for part in self.slices), *self.wholes]

    def drop_reduced(self) -> None:
        """Drops the gradients that the optimizer holds."""
        for tensor in self._stepped:
            tensor.grad = None
        self._count_cast(0)

    def drop_members(self, members: Iterable[int]) -> None:
        """Drops the gradients of some members that the optimizer holds.

        Raises:
            RuntimeError: They lie with those of others elsewhere than in memory, or on other ranks.
        """
        for index in members:
            if self.sums is not None or self.assembled:
                raise RuntimeError(
                    f"the gradient of {self.members[index].names[0]!r} was set to None, and those of other parameters "
                    "that travel with it were not; set all to None, or use optimizer.zero_grad()"
                )
            start, stop = self.layout.slots[index]
            for part in self.slices:
                low, high = max(start, part.start), min(stop, part.stop)
                if part.tensor.grad is None or low >= high:
                    continue
                if self.layout.atomic:
                    part.tensor.grad = None
                else:
                    part.tensor.grad[low - part.start : high - part.start].zero_()

    def _buffer(self, buffers: Buffers) -> torch.Tensor:
        """The buffer of gradients, with zeros in its padding."""
        if self.gradient is None:
            size, device = self.layout.size, self.own.device
            if self.stage.shards_gradients:
                self.gradient = buffers.take(size, self.reduce_dtype, device)
            else:
                self.gradient = torch.empty(size, dtype=self.reduce_dtype, device=device)
                self.meter.add(GRADIENTS, self.gradient.nbytes)
            attributes.LABEL.set(self.gradient, self._label)
            for start, stop in self.layout.gaps:  # padding is summed with the rest, whatever was there before
                self.gradient[start:stop].zero_()
            if not self._places or self._places[0].untyped_storage().data_ptr() != self.gradient.data_ptr():
                self._places = list(self.views(self.gradient))
        return self.gradient

    def _reduced_earlier(self) -> torch.Tensor | None:
        """A copy of what the optimizer still holds of earlier reductions, as far as it is this rank's share."""
        if all(part.tensor.grad is None for part in self.slices):
            return None
        low, high = self.share
        earlier = torch.zeros(high - low, dtype=self.reduce_dtype, device=self.own.device)
        for part in self.slices:
            start, stop = max(part.start, low), min(part.stop, high)
            if part.tensor.grad is not None and start < stop:
                earlier[start - low : stop - low] = part.tensor.grad.view(-1)[start - part.start : stop - part.start]
        return earlier

    def place_of_sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Where this rank's share of the sum over the ranks goes.

        Args:
            gradient: (size) The whole buffer. The share stays there in its place, unless gradients are sharded.
        """
        if not self.stage.shards_gradients:
            return self.share_in(gradient)
        if self._share_of_sum is None:
            low, high = self.share
            self._share_of_sum = torch.empty(high - low, dtype=self.reduce_dtype, device=self.own.device)
            attributes.LABEL.set(self._share_of_sum, self._label)
            if self.home.gradients != "host":
                self.meter.add(GRADIENTS, self._share_of_sum.nbytes)
        return self._share_of_sum

    @property
    def has_earlier(self) -> bool:
        """Whether the results of earlier reductions are still to be added to the sum."""
        return self._earlier is not None

    def add_earlier_(self, share: torch.Tensor) -> None:
        """Adds this rank's share of the results of earlier reductions to its share of the sum."""
        if self._earlier is not None:
            share.add_(self._earlier)
            self._earlier = None
        if self.sums is not None and self._adds:
            self.sums.add_earlier_(self, share)

    def send_away(self) -> None:
        """Begins to bring the sum to where it lies, if that is elsewhere, and gives its memory back."""
        if self.sums is not None and self._share_of_sum is not None:
            self.sums.write(self, self._share_of_sum)
            self.meter.add(GRADIENTS, -self._share_of_sum.nbytes)
            self.meter.note("send", self.name)
            self._share_of_sum = self._reduced = None
            self._is_away = True

    def keep_sums_in_memory(self) -> None:
        """What would keep its reduced gradients elsewhere cannot: they stay in memory from the next pass on."""
        self.sums, self.home = None, replace(self.home, gradients="device")

    def take_sum(self, share: torch.Tensor, buffers: Buffers) -> None:
        """Keeps the sum for the optimizer, and gives the whole buffer back where gradients are sharded.

        Args:
            share: This rank's share of the sum, in `place_of_sum`.
            buffers: Where `gradient` came from.
        """
        self._reduced = share if self.stage.shards_state else self.gradient
        self._filled = False
        if self.stage.shards_gradients and self.gradient is not None:
            buffers.give_back(self.gradient)
            self.gradient = None

    def bind_gradients(self) -> None:
        """Shows the optimizer its gradients, in its own dtype."""
        if self.sums is not None and self._is_away:
            self._is_away = False
            self.sums.bind(self)
            return
        if self._reduced is None or self.assembled:
            return
        origin, _ = self.updated
        for part in self.slices:
            view = self._reduced[part.start - origin : part.stop - origin].view(part.tensor.shape)
            part.tensor.grad = view if view.dtype == part.tensor.dtype else view.to(part.tensor.dtype)
        if self.reduce_dtype != self.master.dtype:
            self._count_cast(sum(part.tensor.nbytes for part in self.slices))
        self._reduced = None  # the optimizer's now, for it to drop

    def drop_sum(self) -> torch.Tensor:
        """Elements `updated` of the sum over the ranks, which the chunk no longer keeps.

        Raises:
            RuntimeError: There is none, for no reduction was made since the last call.
        """
        if self._reduced is None:
            raise RuntimeError(f"chunk {self.number} has no sum of gradients to put together; a bug of par-zero")
        total, self._reduced = self._reduced, None
        return total

    def _count_cast(self, size: int) -> None:
        """Gradients in the optimizer's dtype have that many bytes from now on."""
        if self.home.gradients == "device" and size != self._cast:
            self.meter.add(GRADIENTS, size - self._cast)
            self.meter.note("cast" if size else "drop", self.name)
        self._cast = size

    def forget_buffer(self) -> None:
        """Lets go of the memory that was lent for its gradients last, and given back."""
        if self.gradient is None:
            self._places = []

    def forget_gradients(self) -> None:
        """Drops gradients that are not reduced."""
        self._filled, self._earlier, self._adds, self._is_away = False, None, False, False
        self._count_cast(0)
        for member in self.members:
            member.parameter.grad = None
