"""Copies of a neighbour's shard, so that the state of a sharded run survives the loss of a rank.

Under ZeRO a rank holds parts of the weights and of the optimizer's state that no other rank holds. With a `Shadow`,
rank r also holds the part of rank r - 1. Both ranks make the same step on it, so a step sends a gradient of the part
(4 bytes per element in fp32) instead of weights and moments (12 bytes with Adam):

    rank       0        1        2        3
    own      w0 m0    w1 m1    w2 m2    w3 m3
    copy     w3 m3    w0 m0    w1 m1    w2 m2        rank 2 is lost: rank 3 has w2 m2
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import (
    Box,
    Segments,
    Sharding,
    draws_numbers,
    segments_of,
    set_segments,
    set_sharding,
    settle_,
    sharding_of,
)
from par_groups.optimizers.clone import clone_of, step_others_

from .._torch_private import local_of, with_parameters
from ..state.model import named_parameters
from ..state.state import State

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of gradients, to which the flags of a step refer by position."""

_NO_GRADIENT, _SPLIT, _FIRST_DTYPE = 0, 1, 2
"""Flags of a tensor in a step: it has no gradient; the optimizer steps parts of it; or the number of a dtype."""


class _Described(NamedTuple):
    """One tensor of an optimizer, as the ranks exchange it before its elements.

    Args:
        segments: Parameters in it.
        shape: Local shape.
        dtype: Dtype.
        slots: Shape and dtype of each tensor of its state that has one number per element.
        rest: Other entries of its state.
    """

    segments: Segments
    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: Mapping[str, torch.dtype]
    rest: Mapping[str, Any]


class _Frozen(NamedTuple):
    """A frozen parameter's shard on a rank, as the ranks exchange it before its elements."""

    name: str
    sharding: Sharding
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldShard:
    """The shard of one rank: its own, or a copy.

    Args:
        groups: Tensors of each param group, with their sharding metadata.
        state: Optimizer state of each tensor.
        frozen: Shards of frozen parameters, with their sharding, by name.
    """

    groups: Sequence[Sequence[nn.Parameter]]
    state: Mapping[nn.Parameter, dict[str, Any]]
    frozen: Mapping[str, tuple[torch.Tensor, Sharding]]

    @property
    def tensors(self) -> list[nn.Parameter]:
        """Tensors of all param groups."""
        return [tensor for group in self.groups for tensor in group]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        slots = [slot for each in self.state.values() for slot in each.values() if isinstance(slot, torch.Tensor)]
        frozen = [tensor for tensor, _ in self.frozen.values()]
        every: list[torch.Tensor] = [*self.tensors, *slots, *frozen]
        return sum(each.nbytes for each in every)

    def pieces(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield name, box and elements of each box of a parameter."""
        for tensor in self.tensors:
            yield from segments_of(tensor).views(tensor.detach().view(-1))
        for name, (shard, sharding) in self.frozen.items():
            for box in sharding.boxes:
                yield name, box, box.of(shard)


class Shadow:
    """A rank's shard of a model and its optimizer, and a copy of the previous rank's shard. Collective.

    The ranks of the group form a ring. Make one after the model was sharded, and again after each load. In each step,
    call `exchange_gradients` when gradients are reduced and nothing has changed yet, and `step` before the optimizer's
    own step. If ranks are lost, `held_state` returns the source of a `reshard` from which the others go on. The state
    of the run is complete as long as no two neighbours are lost together.

    Args:
        model: Model whose optimizer holds shards, such as after `par_zero.shard` at stage 1, 2 or 3.
        optimizer: The optimizer, with sharding metadata on its tensors. Its step must not draw random numbers.
        group: Ranks of the ring: those among which state is sharded. Default: all ranks.

    Raises:
        ValueError: The optimizer's step draws random numbers.

    Attributes:
        own: This rank's shard, in the optimizer's memory.
        copy: Copy of the previous rank's shard; None on a single rank.

    Example:
        shadow = Shadow(model, optimizer)
        loss_of(model(batch)).backward()
        shadow.exchange_gradients()
        shadow.step()
        optimizer.step()
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None = None) -> None:
        self._model, self._optimizer, self._group = model, optimizer, group
        self._ranks, self._place = dist.get_world_size(group), dist.get_rank(group)
        settle_(tensor for each in optimizer.param_groups for tensor in each["params"])
        # torch's own optimizers draw no numbers, and a trial of some others takes a moment.
        is_known = type(optimizer).__module__.startswith("torch.optim.")
        if not is_known and any(draws_numbers(optimizer, each) for each in optimizer.param_groups):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: its step draws random numbers, so a copy of a shard would "
                "differ from the shard; use an optimizer without them"
            )
        self._stepped = [list(each["params"]) for each in optimizer.param_groups]
        self._dtypes = {name: local_of(tensor).dtype for name, tensor in named_parameters(model)}
        self._shapes = {name: tuple(sharding_of(tensor).shape) for name, tensor in named_parameters(model)}
        held = {name for tensor in self._all_stepped for name in segments_of(tensor).names}
        described = [[_describe(tensor, optimizer.state.get(tensor, {})) for tensor in some] for some in self._stepped]
        trained = self._gather(sorted(held))
        self._trained = {name for names in trained for name in names}
        self.own = HeldShard(
            groups=[[self._plain(tensor, segments_of(tensor)) for tensor in some] for some in self._stepped],
            state={},
            frozen=dict(self._frozen()),
        )
        self.copy: HeldShard | None = None
        self._received: list[torch.Tensor | None] = []
        if self._ranks > 1:
            frozen = [
                _Frozen(name, sharding, tuple(tensor.shape), tensor.dtype)
                for name, (tensor, sharding) in self.own.frozen.items()
            ]
            self.copy = self._copy(*self._gather((described, frozen))[self._place - 1])
            self._received = [None] * len(self.copy.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds for its neighbour: weights, state and the gradient."""
        gradients = sum(each.nbytes for each in self._received if each is not None)
        return gradients + (0 if self.copy is None else self.copy.nbytes)

    @torch.no_grad()
    def exchange_gradients(self) -> bool:
        """Send the gradients of the own shard to the next rank, and receive those of the copy. Collective.

        Returns:
            False if the optimizer steps parts of a tensor separately, because some of its parameters had no gradient.
            The copy cannot follow such a step.
        """
        if self.copy is None:
            return True
        now = {id(tensor) for each in self._optimizer.param_groups for tensor in each["params"]}
        flags = []
        leaving = []
        for tensor in self._all_stepped:
            gradient = tensor.grad
            if gradient is None:
                flags.append(_NO_GRADIENT)
            elif id(tensor) not in now:
                flags.append(_SPLIT)
            else:
                flags.append(_FIRST_DTYPE + _DTYPES.index(gradient.dtype))
                leaving.append(gradient)
        copies = self.copy.tensors
        arrived = torch.empty(len(copies), dtype=torch.uint8)
        sent = self._send([torch.tensor(flags, dtype=torch.uint8), *leaving])
        self._receive([arrived])
        theirs = arrived.tolist()
        coming = []
        for number, (flag, tensor) in enumerate(zip(theirs, copies, strict=True)):
            buffer = None
            if flag >= _FIRST_DTYPE:
                dtype, before = _DTYPES[flag - _FIRST_DTYPE], self._received[number]
                # The memory of the last step serves again: it is as large as the shard.
                buffer = (
                    before if before is not None and before.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
                )
                coming.append(buffer)
                self._received[number] = buffer
            tensor.grad = buffer
        self._receive(coming)
        _wait(sent)
        return _SPLIT not in flags and _SPLIT not in theirs

    @torch.no_grad()
    def step(self) -> None:
        """Update the copy with the gradients of `exchange_gradients` and the optimizer's current settings."""
        if self.copy is None:
            return
        step_others_(self._optimizer, self.copy.groups, self.copy.state)
        for tensor in self.copy.tensors:
            tensor.grad = None

    def held_state(self, before: "Sequence[Shadow]" = ()) -> State:
        """Return what this rank holds of the run, as the source of `reshard`: its shard and the copy.

        Call it on each rank that is left after some were lost. It does not read the model's gathered parameters, of
        which a step that broke may have updated only some.

        Args:
            before: Shadows of the shardings before this one, while a move to this one may have failed on some rank. All
                must have the values of the same step.

        Returns:
            Model and optimizer with the names and classes of the originals. They work only as a source.
        """
        held = [each for shadow in (self, *before) for each in shadow.held()]
        pieces: dict[str, list[tuple[Box, torch.Tensor]]] = {name: [] for name in self._trained}
        for name, box, values in (piece for each in held for piece in each.pieces()):
            pieces.setdefault(name, []).append((box, values))
        parameters = {name: self._parameter(name, some) for name, some in pieces.items()}
        optimizer = clone_of(self._optimizer, {})
        optimizer.param_groups = [
            {**group, "params": [tensor for each in held for tensor in each.groups[number]]}
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        state = cast("dict[object, object]", optimizer.state)
        # State under a key that is no tensor belongs to all tensors.
        state.update({key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)})
        for each in held:
            for tensor, slots in each.state.items():
                state[tensor] = slots
        replaced = {id(tensor): parameters.get(name, tensor) for name, tensor in named_parameters(self._model)}
        return State(model=with_parameters(self._model, replaced, {}), optimizer=optimizer)

    def held(self) -> Iterator[HeldShard]:
        """Yield the own shard with its current state, and the copy."""
        # A step that ended in an error may have left parts of tensors in the optimizer; settling puts them back.
        settle_(self._all_stepped)
        state = self._optimizer.state
        pairs = zip(self._all_stepped, self.own.tensors, strict=True)
        yield replace(self.own, state={plain: state[tensor] for tensor, plain in pairs if tensor in state})
        if self.copy is not None:
            yield self.copy

    def _parameter(self, name: str, pieces: Sequence[tuple[Box, torch.Tensor]]) -> nn.Parameter:
        """Return the pieces of a parameter as one flat tensor with sharding metadata, in the model's dtype."""
        boxes, start = [], 0
        for box, _ in pieces:
            stride = tuple(math.prod(box.size[dim + 1 :]) for dim in range(len(box.size)))
            boxes.append(replace(box, offset=start, stride=stride))
            start += box.numel
        values = [values.reshape(-1).to(self._dtypes[name]) for _, values in pieces]
        flat = torch.cat(values) if values else torch.empty(0, dtype=self._dtypes[name])
        # A step rounds master weights to parameters in the same way.
        made = nn.Parameter(flat, requires_grad=False)
        set_sharding(made, Sharding(self._shapes[name], tuple(boxes)))
        return made

    def _plain(self, tensor: torch.Tensor, segments: Segments) -> nn.Parameter:
        """Return a parameter in the memory of a tensor, which reads as it is while other ranks are lost."""
        plain = nn.Parameter(tensor.detach())
        # Elements in the model's own dtype are the parameters themselves, which the source has already.
        derived = all(self._dtypes[name] == tensor.dtype for name in segments.names)
        set_segments(plain, Segments(segments, derived=derived, apart=segments.apart))
        return plain

    @property
    def _all_stepped(self) -> list[nn.Parameter]:
        """The optimizer's tensors."""
        return [tensor for some in self._stepped for tensor in some]

    def _frozen(self) -> Iterator[tuple[str, tuple[torch.Tensor, Sharding]]]:
        """Yield the shards of frozen parameters of which this rank has only a part."""
        for name, tensor in named_parameters(self._model):
            if name not in self._trained and (sharding := sharding_of(tensor)).local_numel < sharding.numel:
                yield name, (local_of(tensor).detach(), sharding)

    def _gather(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * self._ranks
        dist.all_gather_object(every, value, group=self._group)
        return every

    def _copy(self, described: Sequence[Sequence[_Described]], frozen: Sequence[_Frozen]) -> HeldShard:
        """Receive the previous rank's shard and send the own one. Collective."""
        groups, state, coming = [], {}, list[torch.Tensor]()
        for some in described:
            group = []
            for each in some:
                values = torch.empty(each.shape, dtype=each.dtype)
                slots = {name: torch.empty(each.shape, dtype=dtype) for name, dtype in each.slots.items()}
                coming += [values, *slots.values()]
                group.append(self._plain(values, each.segments))
                state[group[-1]] = {**each.rest, **slots}
            groups.append(group)
        shards = {each.name: (torch.empty(each.shape, dtype=each.dtype), each.sharding) for each in frozen}
        coming += [tensor for tensor, _ in shards.values()]
        leaving = list[torch.Tensor]()
        for tensor, plain in zip(self._all_stepped, self.own.tensors, strict=True):
            slots = self._optimizer.state.get(tensor, {})
            leaving += [plain.detach(), *(value for value in slots.values() if _is_slot(value, tensor))]
        leaving += [tensor for tensor, _ in self.own.frozen.values()]
        sent = self._send(leaving)
        self._receive(coming)
        _wait(sent)
        return HeldShard(groups=groups, state=state, frozen=shards)

    def _send(self, tensors: Iterable[torch.Tensor]) -> list[dist.Work]:
        to = (self._place + 1) % self._ranks
        return [_work(dist.isend(each, group=self._group, group_dst=to)) for each in _with_elements(tensors)]

    def _receive(self, tensors: Iterable[torch.Tensor]) -> None:
        source = (self._place - 1) % self._ranks
        _wait([_work(dist.irecv(each, group=self._group, group_src=source)) for each in _with_elements(tensors)])


def _describe(tensor: torch.Tensor, state: Mapping[str, Any]) -> _Described:
    slots = {name: value.dtype for name, value in state.items() if _is_slot(value, tensor)}
    rest = {name: value for name, value in state.items() if name not in slots}
    return _Described(segments_of(tensor), tuple(tensor.shape), tensor.dtype, slots, rest)


def _is_slot(value: object, tensor: torch.Tensor) -> bool:
    """Return whether an entry of the state has elements of its own for each element of the tensor."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == tensor.shape


def _with_elements(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in tensors if each.numel()]


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # noqa: S101 - both ranks are in the group
    return work


def _wait(works: Iterable[dist.Work]) -> None:
    for each in works:
        each.wait()
