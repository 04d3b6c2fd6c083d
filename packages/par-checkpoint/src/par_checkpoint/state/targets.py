"""What a load fills: the tensors of the model and the slots of the optimizer, matched with what the files hold."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import Segments, Sharding, whole

from .._options import LoadOptions
from ..plan.entry import Entry, key_of, name_of
from ..storage.directory import Place
from .collect import Model, segments_on_disk, usual_conversion
from .model import copied, local_of, materialise_, model_state, sharding_in, unwrapped
from .names import Names, rename
from .optimizer import MASTER, Naming, Packed, other_kind, other_slots, slot_sharding

Places = Mapping[str, Place]


@dataclass(kw_only=True)
class Targets:
    """What this rank fills.

    Args:
        pending: The tensors to fill.
        missing: Names that the model or the optimizer has and the files have not.
        mismatched: What has another shape or dtype there, in words.
        resized: The names there of what has another shape.
        used: Keys of what is in the files and has a place in the model or the optimizer.
        same: Names in the files that must hold the same values: they are tied in the model.
    """

    pending: list["Target"] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    resized: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    same: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One tensor to fill, before it has memory.

    Args:
        key: Its section and name in the files.
        dtype: In the files.
        sharding: Its boxes in the local tensor.
        tensor: The tensor to fill, perhaps on the meta device.
    """

    key: str
    dtype: torch.dtype
    sharding: Sharding
    tensor: torch.Tensor

    def entry(self, device: torch.device) -> Entry:
        """The same with memory."""
        if self.tensor.is_meta:
            materialise_(self.tensor, device)
        return Entry(key=self.key, dtype=self.dtype, sharding=self.sharding, local=local_of(self.tensor))


def model_targets(model: Model, places: Places, options: LoadOptions, tied: Mapping[str, str]) -> Targets:
    """The tensors of a model.

    Args:
        model: What to fill.
        places: What the files hold.
        options: How.
        tied: What the checkpoint says of names that are not stored.

    Raises:
        ValueError: A tensor that cannot be filled.
    """
    found, targets = model_state(model), Targets()
    inner = unwrapped(model)
    if isinstance(inner, nn.Module) and (copies := copied(inner, found)):
        raise ValueError(
            f"{copies[0]!r} and {len(copies) - 1} more in the module's state dict are copies, made by a hook of it, so "
            "filling them would not change the module; load into a dict of tensors, and call load_state_dict with it"
        )
    layout = options.layout or {}
    every = [*found.tensors, *found.tied]
    names = rename(options.names, every)
    shardings = {name: sharding_in(name, tensor, layout) for name, tensor in found.tensors.items()}
    convert = options.convert or usual_conversion(model, {name: tuple(each.shape) for name, each in shardings.items()})
    aliases: dict[str, list[str]] = {}
    for name, stored_as in found.tied.items():
        aliases.setdefault(stored_as, []).append(name)
    for name, tensor in found.tensors.items():
        in_files = [names[each] for each in (name, *aliases.get(name, ()))]
        stored = [key for key in dict.fromkeys(_stored_as(each, places, tied) for each in in_files) if key in places]
        targets.used.update(key_of("model", key) for key in stored)
        targets.same.extend((stored[0], other) for other in stored[1:])
        chosen = None if stored and options.convert is None else convert  # files may hold it as it is in memory
        for segment in segments_on_disk(name, shardings[name], chosen, stored[0] if stored else in_files[0]):
            _match(targets, places, key_of("model", segment.name), segment.sharding, tensor, options.dtype)
    return targets


def _stored_as(name: str, places: Places, tied: Mapping[str, str]) -> str:
    """A name in the files, or the one it is tied to where it is not there itself."""
    return name if name in places else tied.get(name, name)


def file_names(model: Model, names: Names | None) -> dict[str, str]:
    """From the names in a model to those in the files."""
    found = model_state(model)
    return rename(names, [*found.tensors, *found.tied])


def _match(
    targets: Targets,
    places: Places,
    key: str,
    sharding: Sharding,
    tensor: torch.Tensor,
    cast_to: torch.dtype | None,
) -> None:
    """Notes one tensor as something to fill, or what is wrong with it."""
    name = name_of(key)
    place = places.get(name)
    if place is None:
        targets.missing.append(name)
        return
    targets.used.add(key)
    may_cast = cast_to == tensor.dtype and tensor.is_floating_point() and place.dtype.is_floating_point
    if tuple(place.shape) != tuple(sharding.shape) or (place.dtype != tensor.dtype and not may_cast):
        targets.mismatched.append(
            f"{name!r} is {place.dtype} {tuple(place.shape)} in the files, {tensor.dtype} {tuple(sharding.shape)} in "
            "the model"
        )
        if tuple(place.shape) != tuple(sharding.shape):
            targets.resized.add(name)
        return
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(f"{name!r} is expanded: its elements share memory and cannot differ; call .contiguous()")
    targets.pending.append(Target(key=key, dtype=place.dtype, sharding=sharding, tensor=tensor))


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A 0-dim slot: each parameter of a flat tensor has it in the files, and all must agree."""

    into: torch.Tensor
    read: tuple[tuple[str, torch.Tensor], ...]


@dataclass(kw_only=True)
class OptimizerTargets(Targets):
    """The same for an optimizer.

    Args:
        state: The new state by tensor; takes the place of the old when everything is read.
        scalars: To be compared and set after reading.
        groups: By param group: its parameters, as the saved optimizer calls them.
    """

    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    scalars: list[Scalar] = field(default_factory=list)
    groups: list[tuple[str, ...]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The optimizer's part of a checkpoint.

    Args:
        places: Tensors in the files, keyed "<parameter>.<slot>".
        objects: Slots that are no tensors, keyed alike.
        options: Those of its param group, by parameter of the optimizer that was saved.
        resized: Names in the files of tensors that have another shape in the model.
        ties: By name in the files: all names of the tensor, where it has several here or there. See `ties_of`.
        device: Where slots of parameters on the meta device go.
    """

    places: Places
    objects: Mapping[str, object]
    options: Mapping[str, Mapping[str, object]]
    resized: Set[str]
    ties: Mapping[str, Sequence[str]]
    device: torch.device

    def known_as(self, name: str) -> list[str]:
        """What the saved optimizer calls a parameter: its name, or those that it is tied to; nothing if it had none."""
        return [each for each in dict.fromkeys((name, *self.ties.get(name, ()))) if each in self.options]

    def saved_as(self, name: str) -> str:
        """The first of them, or the name itself."""
        return next(iter(self.known_as(name)), name)

    def is_resized(self, segments: Segments) -> bool:
        """Whether a parameter that has a tensor for itself was of another shape when it was saved."""
        [name, *more] = segments.names
        return not more and not self.resized.isdisjoint((name, *self.ties.get(name, ())))


def ties_of(model: Model | None, names: Names | None, tied: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """By name in the files: all names of one tensor, in the model or in the checkpoint.

    Args:
        model: Whose ties count.
        names: From its names to those in the files.
        tied: What the checkpoint says.
    """
    found = model_state({} if model is None else model)
    renamed = rename(names, [*found.tensors, *found.tied])
    ties: dict[str, tuple[str, ...]] = {}
    for pair in (*((renamed[a], renamed[b]) for a, b in found.tied.items()), *tied.items()):
        joined = tuple(dict.fromkeys(name for each in pair for name in ties.get(each, (each,))))
        ties.update(dict.fromkeys(joined, joined))
    return ties


def optimizer_targets(optimizer: Optimizer, naming: Naming, saved: Slots) -> OptimizerTargets:
    """The slots of an optimizer, allocated like their parameters where they are not there yet.

    Args:
        optimizer: What to fill.
        naming: What its tensors are called.
        saved: What the checkpoint has.
    """
    targets = OptimizerTargets()
    slots: dict[str, list[str]] = {}
    for key in (*saved.places, *saved.objects):
        name, _, slot = key.rpartition(".")
        slots.setdefault(name, []).append(slot)  # what is of no tensor has no name
    for number, (group, packed) in enumerate(zip(optimizer.param_groups, naming.groups(optimizer), strict=True)):
        on_device = bool(group.get("capturable") or group.get("fused"))
        targets.groups.append(tuple(saved.saved_as(name) for each in packed for name in each.segments.names))
        other = _other_kind(optimizer, number, targets.groups[-1], saved)
        for each in packed:
            known = {name: saved.known_as(name) for name in each.segments.names}
            targets.missing.extend(f"{name} (in the optimizer)" for name, found in known.items() if not found)
            found = dict.fromkeys(slot for of in known.values() for slot in slots.get(next(iter(of), ""), ()))
            old = optimizer.state.get(each.tensor, {})
            wrong = other or other_slots(each.segments.names, old.keys(), found.keys() - {MASTER})
            if wrong is not None:
                targets.mismatched.append(wrong)
                continue  # it stays as it is, and nobody wants what is in the files
            for name in (name for of in known.values() for name in of):  # those of tied ones say the same
                targets.used.update(key_of("optimizer", f"{name}.{slot}") for slot in slots.get(name, ()))
            if not any(known.values()) or saved.is_resized(each.segments):
                continue  # like its weight it stays as it is; that it does not fit is told of the weight
            room = _Room(targets, saved, each, old, on_device=on_device)
            for slot in found:
                room.find(slot)
            targets.state[each.tensor] = room.state
    return targets


def _other_kind(optimizer: Optimizer, number: int, names: Iterable[str], saved: Slots) -> str | None:
    """What shows that a param group was saved by another kind of optimizer, by the first name in it that was saved."""
    options = next((saved.options[name] for name in names if name in saved.options), None)
    wrong = None if options is None else other_kind(optimizer, optimizer.param_groups[number], options)
    return None if wrong is None else f"param group {number} {wrong}"


class _Room:
    """Finds room for the slots of one tensor of an optimizer."""

    def __init__(
        self, targets: OptimizerTargets, saved: Slots, packed: Packed, old: Mapping[str, object], *, on_device: bool
    ) -> None:
        self.state: dict[str, Any] = {}
        self._targets, self._saved, self._packed, self._old = targets, saved, packed, old
        self._device = saved.device if packed.tensor.is_meta else packed.tensor.device
        self._on_device = on_device  # fused kernels want the step there

    def find(self, slot: str) -> None:
        """One slot: a master, an object, a scalar, or a tensor."""
        keys = [f"{self._saved.saved_as(name)}.{slot}" for name in self._packed.segments.names]
        absent = [key for key in keys if key not in self._saved.places and key not in self._saved.objects]
        if slot == MASTER:
            if self._packed.is_master:  # else the weights say the same
                self._tensor(slot, self._packed.tensor)
        elif absent:
            self._targets.missing.extend(absent)
        elif keys[0] in self._saved.objects:
            self.state[slot] = self._saved.objects[keys[0]]
        elif self._saved.places[keys[0]].shape == () and any(each.sharding.shape for each in self._packed.segments):
            self.state[slot] = self._scalar(slot, keys)
        else:
            self.state[slot] = self._tensor(slot, self._like(slot, keys[0]))

    def _scalar(self, slot: str, keys: list[str]) -> torch.Tensor:
        dtype = self._saved.places[keys[0]].dtype
        device = torch.device("cpu") if slot == "step" and not self._on_device else self._device
        read = tuple((key, torch.empty((), dtype=dtype, device="cpu")) for key in keys)
        for key, each in read:
            sharding = whole((), (0,))
            self._targets.pending.append(
                Target(key=key_of("optimizer", key), dtype=dtype, sharding=sharding, tensor=each)
            )
        into = self._reused(slot, torch.empty((), dtype=dtype, device=device))
        self._targets.scalars.append(Scalar(into=into, read=read))
        return into

    def _like(self, slot: str, key: str) -> torch.Tensor:
        """A tensor like the parameter, or of its own shape where it has one in the files."""
        place, tensor = self._saved.places[key], self._packed.tensor
        if len(self._packed.segments) > 1 or tuple(place.shape) == next(iter(self._packed.segments)).sharding.shape:
            return self._reused(slot, torch.zeros_like(tensor, dtype=place.dtype, device=self._device))
        return self._reused(slot, torch.empty(place.shape, dtype=place.dtype, device=self._device))

    def _tensor(self, slot: str, value: torch.Tensor) -> torch.Tensor:
        for segment in self._packed.segments:
            sharding = slot_sharding(self._packed, segment, slot, value)
            key = key_of("optimizer", f"{self._saved.saved_as(segment.name)}.{slot}")
            _match(self._targets, self._saved.places, key, sharding, value, None)
        return value

    def _reused(self, slot: str, fresh: torch.Tensor) -> torch.Tensor:
        """The tensor that is there already, if it fits."""
        old = self._old.get(slot)
        fits = (
            isinstance(old, torch.Tensor)
            and type(old) is type(fresh)
            and (old.shape, old.dtype, old.device) == (fresh.shape, fresh.dtype, fresh.device)
        )
        return old if fits and isinstance(old, torch.Tensor) else fresh


def set_scalars_(scalars: Iterable[Scalar]) -> Iterator[str]:
    """Sets 0-dim slots; yields what is wrong where the parameters of one tensor disagree."""
    for scalar in scalars:
        values = {float(each) for _, each in scalar.read}
        if len(values) > 1:
            names = [key for key, _ in scalar.read]
            yield f"{names[0]!r} and {len(names) - 1} others lie in one flat tensor, but have values {sorted(values)}"
        scalar.into.copy_(scalar.read[0][1])
