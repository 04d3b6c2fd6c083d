"""Optimizer state by parameter name, and its param groups, whatever its tensors pack."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.optim import Optimizer

from par_groups import SCALARS, Segment, Segments, Sharding, attributes, original_name, segments_of, sharding_of, whole

from ..plan.claims import LocalTensor, key_of
from .model import Model, check_plain, local_of, named_parameters, sharding_in, unwrapped
from .own_loading import own_entries

MASTER = "master"
"""The slot of an optimizer's own copy of a parameter."""


@dataclass(frozen=True, kw_only=True)
class NamedGroup:
    """A param group: the names of its parameters on this rank, and everything else in it."""

    names: tuple[str, ...]
    options: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Part of an optimizer that is saved.

    Args:
        entries: Tensors, named "<parameter>.<slot>".
        objects: Slots that are no tensors, by "<parameter>.<slot>"; and state of the optimizer as a whole, under keys
            without a dot.
        groups: Param groups.
        own: Entries of its state dict other than state and param groups, see `own_entries`.
    """

    entries: list[LocalTensor] = field(default_factory=list)
    objects: dict[str, object] = field(default_factory=dict)
    groups: list[NamedGroup] = field(default_factory=list)
    own: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PackedSlots:
    """One tensor of an optimizer, and the named parameters whose parts it contains.

    Args:
        tensor: The tensor in the param group.
        segments: Names of these parameters, and their boxes in the tensor's local memory.
        is_master: Whether the tensor is the optimizer's own copy of parameters, and must be saved in addition to them.
        recorded: Names in the tensor's sharding metadata, by the parameters' names in the files.
        apart: Whether the scalar state of its parameters may differ.
    """

    tensor: torch.Tensor
    segments: Segments
    is_master: bool
    recorded: Mapping[str, str]
    apart: bool

    def of(self, names: Container[str]) -> "PackedSlots":
        """Return the same tensor with only some of its parameters."""
        return replace(self, segments=Segments(segment for segment in self.segments if segment.name in names))

    def scalars(self, state: Mapping[str, Any]) -> Mapping[str, Mapping[str, object]] | None:
        """Return the scalar state of each parameter by name, or None if all parameters of the tensor share it.

        Args:
            state: The state of the tensor.
        """
        if SCALARS not in state:
            return None
        return {name: state[SCALARS][own] for name, own in self.recorded.items() if own in state[SCALARS]}


class Naming:
    """The names of an optimizer's tensors.

    Args:
        model: The model that owns the parameters; None: the param groups contain the names.
        names: Name in the files of each parameter, by its name in the model.
        layout: Sharding metadata from the caller, by name of a parameter.
    """

    def __init__(self, model: Model | None, names: Mapping[str, str], layout: Mapping[str, Sharding]) -> None:
        pairs = [] if model is None else list(named_parameters(unwrapped(model)))
        self._by_id = {id(tensor): name for name, tensor in pairs}
        # A tensor of the optimizer may be a view of a parameter. It shares its storage, and is no master.
        self._storages = {local_of(tensor).untyped_storage().data_ptr() for _, tensor in pairs if not tensor.is_meta}
        self._names, self._layout = names, layout

    def groups(self, optimizer: Optimizer) -> Iterator[list[PackedSlots]]:
        """Yield the contents of the tensors of each param group.

        Raises:
            ValueError: A tensor without a name.
        """
        for number, group in enumerate(optimizer.param_groups):
            given = group.get("param_names") or [None] * len(group["params"])
            yield [
                self._packed(tensor, name, f"param_groups[{number}].params[{i}]")
                for i, (tensor, name) in enumerate(zip(group["params"], given, strict=True))
            ]

    def in_order(self, tensors: Iterable[PackedSlots]) -> tuple[str, ...]:
        """Return the distinct names of the parameters in a param group, in order."""
        # torch matches the parameters of a saved group with another optimizer's only by their positions. Flat tensors
        # have an order of their own and may share a parameter, so the names follow the order of the model.
        tensors = list(tensors)
        names = dict.fromkeys(name for packed in tensors for name in packed.segments.names)
        if not any(attributes.SEGMENTS.is_on(packed.tensor) for packed in tensors):
            return tuple(names)
        order = {self._names.get(name, name): place for place, name in enumerate(self._by_id.values())}
        return tuple(sorted(names, key=lambda name: order.get(name, len(order))))

    def _packed(self, tensor: torch.Tensor, given: str | None, where: str) -> PackedSlots:
        """Return the parameters that one tensor of the optimizer holds.

        Args:
            tensor: Tensor of the optimizer.
            given: Name of the tensor in the param group, if it has one.
            where: Position of the tensor in the optimizer, for messages.
        """
        name = self._by_id.get(id(tensor), None if given is None else original_name(given))
        flat = segments_of(tensor) if name is None or attributes.SEGMENTS.is_on(tensor) else None
        if flat is not None and flat.names != ("",):
            segments = flat
        elif name is not None:
            segments = Segments([Segment(name, sharding_in(name, tensor, self._layout))])
        else:
            raise ValueError(
                f"{where} of the optimizer, of shape {tuple(tensor.shape)}, has no name; pass the model beside it, or "
                "make the optimizer from model.named_parameters()"
            )
        recorded = {self._names.get(name, name): name for name in segments.names}
        in_files = (Segment(name, segments[own]) for name, own in recorded.items())
        # A derived buffer is computed from parameters of the model, which the same checkpoint contains.
        repeats = segments.derived and bool(self._by_id)
        return PackedSlots(
            tensor=tensor,
            segments=Segments(in_files),
            is_master=not repeats and self._is_master(tensor),
            recorded=recorded,
            apart=segments.apart,
        )

    def _is_master(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the optimizer's own copy, and not a parameter of the model or a view of one."""
        if id(tensor) in self._by_id:
            return False
        # Without a model there is nothing from which the tensor could differ, so it is the weight itself.
        own = not self._by_id and not attributes.SEGMENTS.is_on(tensor)
        return not own and local_of(tensor).untyped_storage().data_ptr() not in self._storages


def optimizer_state(optimizer: Optimizer, naming: Naming) -> OptimizerState:
    """Return the state of an optimizer that is saved, without copying tensors.

    Raises:
        ValueError: A tensor has no name, a slot cannot be sharded like its parameter, or a key of the state is invalid.
    """
    found = OptimizerState(own=own_entries(optimizer))
    for key, value in cast("dict[object, object]", optimizer.state).items():
        if isinstance(key, torch.Tensor):
            continue
        if not isinstance(key, str) or "." in key:
            raise ValueError(f"the optimizer's state has the key {key!r}; give it a str without a dot, or a parameter")
        found.objects[key] = value  # state of the optimizer itself, such as a count of steps
    for group, tensors in zip(optimizer.param_groups, naming.groups(optimizer), strict=True):
        names = naming.in_order(tensors)
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found.groups.append(NamedGroup(names=names, options=options))
        for packed in tensors:
            if packed.is_master:
                found.entries.extend(_cut(packed, MASTER, packed.tensor))
            state = optimizer.state.get(packed.tensor, {})
            scalars = packed.scalars(state)
            if scalars is None:
                _note(found, packed, state)
                continue
            # Parameters in one flat tensor may have stepped differently often, so each of them has its own scalars.
            own = {slot for of_name in scalars.values() for slot in of_name} | {SCALARS}
            _note(found, packed.of(scalars), {slot: value for slot, value in state.items() if slot not in own})
            for name, of_name in scalars.items():
                _note(found, packed.of([name]), of_name)
    return found


def _note(found: OptimizerState, packed: PackedSlots, slots: Mapping[str, object]) -> None:
    """Add slots of a tensor to the state of each of its parameters.

    Raises:
        ValueError: A slot has an unknown name, or cannot be split.
    """
    for slot, value in slots.items():
        if "." in slot:
            raise ValueError(
                f"the optimizer's state has a slot {slot!r}; names with a dot cannot be told from parameters'"
            )
        if isinstance(value, torch.Tensor):
            found.entries.extend(_cut(packed, slot, value))
        else:
            found.objects.update({f"{name}.{slot}": value for name in packed.segments.names})


def _cut(packed: PackedSlots, slot: str, value: torch.Tensor) -> Iterator[LocalTensor]:
    """Yield one slot of a tensor, split into the slots of its parameters."""
    check_plain(f"{packed.segments.names[0]}.{slot}" if packed.segments.names else slot, value)
    local = local_of(value)
    for segment in packed.segments:
        sharding = slot_sharding(packed, segment, slot, value)
        key = key_of("optimizer", f"{segment.name}.{slot}")
        yield LocalTensor(key=key, dtype=value.dtype, sharding=sharding, local=local, steady=value)


def slot_sharding(packed: PackedSlots, segment: Segment, slot: str, value: torch.Tensor) -> Sharding:
    """Return the sharding of a slot of one of the parameters in a tensor.

    A slot with the tensor's shape is sharded like the tensor, and a scalar is replicated. A slot of another shape is
    supported only if its parameter is unsharded.
    """
    if hasattr(value, "placements"):
        return sharding_of(value)
    if tuple(local_of(value).shape) == tuple(local_of(packed.tensor).shape):
        return segment.sharding
    # A slot of another shape, such as the row means of Adafactor, has no rule by which a shard could be split.
    if value.dim() == 0 or (len(packed.segments) == 1 and segment.sharding.local_numel == segment.sharding.numel):
        return whole(tuple(value.shape), (0,))
    raise ValueError(
        f"slot {slot!r} of {segment.name!r} has shape {tuple(value.shape)}, its parameter's part here "
        f"{tuple(packed.tensor.shape)}: it can be saved only where the parameter is whole on one rank"
    )


def other_kind(optimizer: Optimizer, group: Mapping[str, object], saved: Mapping[str, object], kind: str) -> str | None:
    """Describe the sign that another kind of optimizer saved a param group, or return None without a sign.

    Two kinds of optimizers each have numbers that the other kind lacks: SGD has a momentum, and Adam has betas. Flags
    do not count, because versions of torch add some. Numbers on only one side do not count, because schedulers add
    some.

    Args:
        optimizer: Optimizer to fill.
        group: Param group of the optimizer.
        saved: Options of the saved param group.
        kind: Noun for where they were saved.
    """
    own = _numbers(getattr(optimizer, "defaults", {})) - saved.keys()
    others = _numbers(saved) - group.keys()
    # Schedulers and newer versions of torch add options on one side, so only differences on both sides count.
    if not (own and others):
        return None
    return f"has {_listed(others)} in the {kind} and not {_listed(own)}: another kind of optimizer"


def other_slots(names: Sequence[str], own: Set[str], saved: Set[str], kind: str) -> str | None:
    """Describe the sign that another kind of optimizer saved the slots of a tensor, or return None without a sign.

    Slots on only one side do not count, because options such as amsgrad add some.

    Args:
        names: Names of the parameters in the tensor.
        own: Slots of the tensor in the optimizer.
        saved: Slots of the tensor in the checkpoint.
        kind: Noun for where they were saved.
    """
    if own <= saved or saved <= own:
        return None
    return f"{names[0]!r} has slots {_listed(saved)} in the {kind}, {_listed(own)} in the optimizer"


def _numbers(options: Mapping[str, object]) -> set[str]:
    """Return the options of a param group that are set and are no flags."""
    return {key for key, value in options.items() if value is not None and not isinstance(value, bool)}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
