"""Targets of a load: the tensors of the model and the slots of the optimizer, matched with what the files hold.

Nothing is changed here. Slots that the optimizer lacks get memory of their own, which the optimizer is given when
everything is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import SCALARS, Segments, Sharding, slots_of, whole

from ..plan.claims import LocalTensor, key_of, name_of, section_of
from ..storage.directory import StoredTensor
from .conversion import Conversion, checked
from .model import (
    Model,
    Names,
    copied,
    local_of,
    materialise_,
    model_state,
    rename,
    segments_on_disk,
    sharding_in,
    unwrapped,
)
from .optimizer import MASTER, Naming, PackedSlots, other_kind, other_slots, slot_sharding
from .overlap import MemoryRegion, check_separate, regions_of
from .quantised import Scales, is_float8, quantised
from .transformers import conversion_of

Places = Mapping[str, StoredTensor]


@dataclass(frozen=True, kw_only=True)
class FillTarget:
    """One tensor to fill, before it has memory.

    Args:
        key: Section and name in the files.
        dtype: The dtype in the files.
        sharding: The global shape, and the boxes of the local tensor that hold parts of it.
        tensor: The tensor to fill, perhaps on the meta device.
    """

    key: str
    dtype: torch.dtype
    sharding: Sharding
    tensor: torch.Tensor

    def regions(self) -> Iterator[MemoryRegion]:
        """Yield the memory that is filled; see `regions_of`."""
        yield from regions_of(name_of(self.key), self.sharding, local_of(self.tensor))

    def entry(self, device: torch.device) -> LocalTensor:
        """Return the target as an entry; a tensor on the meta device gets memory on `device`."""
        if self.tensor.is_meta:
            materialise_(self.tensor, device)
            if self.sharding.local_numel < self.tensor.numel():  # padding, where a NaN would spread
                self.tensor.detach().zero_()
        return LocalTensor(key=self.key, dtype=self.dtype, sharding=self.sharding, local=local_of(self.tensor))


@dataclass(kw_only=True)
class Targets:
    """Tensors of the model or the optimizer that this rank fills.

    Args:
        pending: The tensors to fill.
        missing: Names that the model or the optimizer has and the files have not.
        mismatched: Text for each tensor with another shape or dtype in the files.
        resized: Names in the files of what has another shape.
        used: Keys of what is in the files and has a place in the model or the optimizer.
        same: Pairs of names in the files that must hold the same values: they are one tensor in the model.
        kind: Noun in errors for what the tensors are filled from.
    """

    pending: list[FillTarget] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    resized: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    same: list[tuple[str, str]] = field(default_factory=list)
    kind: str = "checkpoint"
    _scales: Scales | None = None

    def match(
        self,
        places: Places,
        key: str,
        sharding: Sharding,
        tensor: torch.Tensor,
        cast_to: torch.dtype | tuple[torch.dtype, ...] | None = None,
    ) -> None:
        """Record a tensor to fill, or what is wrong with it.

        Args:
            places: Location of each tensor in the files.
            key: Section and name of the tensor in the files.
            sharding: Sharding of the tensor.
            tensor: The tensor to fill.
            cast_to: dtypes of tensors that may be filled from another floating-point dtype. Default: none.

        Raises:
            ValueError: The elements of the tensor share memory.
        """
        name = name_of(key)
        place = places.get(name)
        if place is None:
            # transformers stores MXFP4 weights as two tensors with these suffixes.
            stored = [f"{name}_{part}" for part in ("blocks", "scales") if f"{name}_{part}" in places]
            if stored:
                self.used.update(key_of(section_of(key), part) for part in stored)
                self.mismatched.append(
                    f"{name!r} is quantised in the files, as {' and '.join(map(repr, stored))}; load it with "
                    "transformers and Mxfp4Config(dequantize=True), and save it again with save_pretrained"
                )
            else:
                self.missing.append(name)
            return
        self.used.add(key)
        # A float8 weight without its scales would be loaded as wrong values, although a cast is possible.
        if is_float8(place.dtype) and place.dtype != tensor.dtype:
            self._scales = self._scales or Scales(places)
            if scales := self._scales.of(name):
                self.used.update(key_of(section_of(key), scale) for scale in scales)
                self.mismatched.append(quantised(name, scales))
                return
        casts = cast_to if isinstance(cast_to, tuple) else (cast_to,)
        may_cast = tensor.dtype in casts and tensor.is_floating_point() and place.dtype.is_floating_point
        # Shapes must match exactly. Dtypes may differ if the caller allows the cast.
        has_shape = tuple(place.shape) == tuple(sharding.shape)
        if not has_shape or (place.dtype != tensor.dtype and not may_cast):
            self.mismatched.append(
                f"{name!r} is {place.dtype} {tuple(place.shape)} in the {self.kind}, {tensor.dtype} "
                f"{tuple(sharding.shape)} in the model"
            )
            if not has_shape:
                self.resized.add(name)
            return
        target = FillTarget(key=key, dtype=place.dtype, sharding=sharding, tensor=tensor)
        check_separate(target.regions())
        self.pending.append(target)


def model_targets(
    model: Model,
    places: Places,
    tied: Mapping[str, str],
    *,
    layout: Mapping[str, Sharding] | None,
    names: Names | None,
    convert: Conversion | None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None,
    kind: str,
) -> Targets:
    """Return the tensors of a model, matched with the content of the files.

    Args:
        model: Model to fill.
        places: Location of each tensor in the files.
        tied: Stored name of each name that the checkpoint does not store, because it is tied.
        layout: `Sharding` of local tensors by name, for tensors without sharding metadata of their own.
        names: Map from a tensor's name in the model to its name in the files.
        convert: Function from a tensor's name and global shape to the tensors on disk that make it up. None: the
            conversion of transformers for its own models, if the files lack a tensor of the name.
        dtype: dtype, or dtypes, of tensors that may be filled from another floating-point dtype.
        kind: Noun in errors for what the tensors are filled from.

    Raises:
        ValueError: A tensor cannot be filled.
    """
    found, targets = model_state(model), Targets(kind=kind)
    inner = unwrapped(model)
    # Loading writes into the tensors of the state dict, which works only if they share memory with the module.
    if isinstance(inner, nn.Module) and (copies := copied(inner, found)):
        raise ValueError(
            f"{copies[0]!r} and {len(copies) - 1} more in the module's state dict are copies, made by a hook of it, so "
            "filling them would not change the module; load into a dict of tensors, and call load_state_dict with it"
        )
    names_on_disk = rename(names, found.names)
    shardings = {name: sharding_in(name, tensor, layout or {}) for name, tensor in found.tensors.items()}
    shapes = {name: tuple(sharding.shape) for name, sharding in shardings.items()}
    # The rules of Transformers match names without wrappers; `names` removes them.
    usual = None
    if convert is None:
        usual = conversion_of(model, {names_on_disk[name]: shape for name, shape in shapes.items()})
    own = None if convert is None else checked(convert)
    aliases: dict[str, list[str]] = {}
    for name, kept in found.tied.items():
        aliases.setdefault(kept, []).append(name)
    for name, tensor in found.tensors.items():
        in_files = [names_on_disk[alias] for alias in (name, *aliases.get(name, ()))]
        # A name that is not stored counts as the one that it is tied to in the checkpoint.
        keys = dict.fromkeys(key if key in places else tied.get(key, key) for key in in_files)
        stored = [key for key in keys if key in places]
        targets.used.update(key_of("model", key) for key in stored)
        targets.same.extend((stored[0], other) for other in stored[1:])
        # The files may hold a Transformers model in the layout that it has in memory. Then nothing is converted.
        chosen = own or (None if stored else usual)
        of_model = names_on_disk[name] if own is None else name
        for segment in segments_on_disk(of_model, shardings[name], chosen, stored[0] if stored else in_files[0]):
            targets.match(places, key_of("model", segment.name), segment.sharding, tensor, dtype)
    return targets


def ties_of(model: Model | None, names: Names | None, tied: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return all names of each tensor with several names in the model or in the checkpoint, by name in the files.

    Args:
        model: Model whose ties count.
        names: Map from its names to the names in the files.
        tied: Stored names of tied names.
    """
    found = model_state({} if model is None else model)
    on_disk = rename(names, found.names)
    ties: dict[str, tuple[str, ...]] = {}
    for pair in (*((on_disk[a], on_disk[b]) for a, b in found.tied.items()), *tied.items()):
        # Ties are transitive: a pair may join two groups of names that were separate so far.
        joined = tuple(dict.fromkeys(name for one in pair for name in ties.get(one, (one,))))
        ties.update(dict.fromkeys(joined, joined))
    return ties


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """0-dim slots of a tensor; in the files, each parameter in the tensor has slots of its own.

    Args:
        state: New state of the tensor, which has the slots.
        read: Name in the files and target tensor of each parameter, by slot.
        names: Names of these parameters in the tensor's metadata.
        apart: Per-parameter values of the optimizer that may differ, by these names; None: all values must agree.
        without: Elements of slots that belong to parameters without state.
    """

    state: dict[str, Any]
    read: Mapping[str, Sequence[tuple[str, torch.Tensor]]]
    names: Sequence[str]
    apart: Mapping[str, dict[str, Any]] | None
    without: Sequence[torch.Tensor]


@dataclass(kw_only=True)
class OptimizerTargets(Targets):
    """Tensors of an optimizer that this rank fills, and state that it sets afterwards.

    Args:
        state: New state of each tensor, which replaces the old state after everything is read.
        scalars: 0-dim slots of tensors, to be compared and set after reading.
        groups: Parameters of each param group, by their names in the saved optimizer.
    """

    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    scalars: list[Scalars] = field(default_factory=list)
    groups: list[tuple[str, ...]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SavedOptimizer:
    """Optimizer's part of a checkpoint.

    Args:
        places: Location of slots in the files, by "<parameter>.<slot>".
        objects: Slots that are no tensors, by "<parameter>.<slot>".
        options: Options of the param group of each parameter of the saved optimizer.
        resized: Names in the files of tensors that have another shape in the model.
        ties: All names of each tensor with several names, by name in the files; see `ties_of`.
        device: Device for slots of parameters that are on the meta device.
        kind: Noun in errors for what the optimizer is filled from.
    """

    places: Places
    objects: Mapping[str, object]
    options: Mapping[str, Mapping[str, object]]
    resized: Set[str]
    ties: Mapping[str, Sequence[str]]
    device: torch.device
    kind: str

    def known_as(self, name: str) -> list[str]:
        """Return a parameter's names in the saved optimizer: its name, or names of tied parameters.

        Empty if it had none.
        """
        return [tied for tied in dict.fromkeys((name, *self.ties.get(name, ()))) if tied in self.options]

    def saved_as(self, name: str) -> str:
        """Return the first name of a parameter in the saved optimizer, or its own name."""
        return next(iter(self.known_as(name)), name)

    def is_resized(self, segments: Segments) -> bool:
        """Return whether a parameter with a tensor of its own had another shape when it was saved."""
        [name, *more] = segments.names
        return not more and not self.resized.isdisjoint((name, *self.ties.get(name, ())))


def optimizer_targets(optimizer: Optimizer, naming: Naming, saved: SavedOptimizer) -> OptimizerTargets:
    """Return the slots of an optimizer, matched with the content of the files; missing slots are allocated.

    Args:
        optimizer: Optimizer to fill.
        naming: Names of its tensors.
        saved: Optimizer's part of the checkpoint.
    """
    targets = OptimizerTargets(kind=saved.kind)
    slots_of: dict[str, list[str]] = {}
    for key in (*saved.places, *saved.objects):
        name, _, slot = key.rpartition(".")
        slots_of.setdefault(name, []).append(slot)  # state of the optimizer as a whole has no name
    for number, (group, tensors) in enumerate(zip(optimizer.param_groups, naming.groups(optimizer), strict=True)):
        names = tuple(saved.saved_as(name) for packed in tensors for name in packed.segments.names)
        targets.groups.append(names)
        # Param groups are matched by their parameters, because their order and number may have changed.
        options = next((saved.options[name] for name in names if name in saved.options), None)
        wrong_group = None if options is None else other_kind(optimizer, group, options, saved.kind)
        # Capturable and fused kernels read the step counter on the device.
        on_device = bool(group.get("capturable") or group.get("fused"))
        for packed in tensors:
            known = {name: saved.known_as(name) for name in packed.segments.names}
            targets.missing.extend(f"{name} (in the optimizer)" for name, as_ in known.items() if not as_)
            # Tied names have the same slots, so those of the first name are enough.
            slots = dict.fromkeys(slot for as_ in known.values() if as_ for slot in slots_of.get(as_[0], ()))
            old = optimizer.state.get(packed.tensor, {})
            wrong = (
                other_slots(packed.segments.names, old.keys() - {SCALARS}, slots.keys() - {MASTER}, saved.kind)
                if wrong_group is None
                else f"param group {number} {wrong_group}"
            )
            if wrong is not None:
                targets.mismatched.append(wrong)
                continue  # the tensor's state stays as it is, and nobody wants what is in the files
            for name in (name for as_ in known.values() for name in as_):  # slots of tied names say the same
                targets.used.update(key_of("optimizer", f"{name}.{slot}") for slot in slots_of.get(name, ()))
            if not any(known.values()) or saved.is_resized(packed.segments):
                continue  # like its weight the state stays as it is; that it does not fit is told of the weight
            tensor = _PackedTargets(targets, saved, packed, old, on_device=on_device)
            targets.state[packed.tensor] = tensor.state(slots)
    return targets


class _PackedTargets:
    """Match of the slots of one tensor of an optimizer, which may pack many parameters.

    Args:
        targets: Targets that receive the slots to fill.
        saved: Optimizer's part of the checkpoint.
        packed: Tensor with its packed parameters.
        old: Current state of the tensor.
        on_device: Whether the step counter is on the tensor's device instead of the CPU.
    """

    def __init__(
        self,
        targets: OptimizerTargets,
        saved: SavedOptimizer,
        packed: PackedSlots,
        old: Mapping[str, object],
        *,
        on_device: bool,
    ) -> None:
        self._targets, self._saved, self._packed, self._old = targets, saved, packed, old
        self._device = saved.device if packed.tensor.is_meta else packed.tensor.device
        self._on_device = on_device

    def state(self, slots: Iterable[str]) -> dict[str, Any]:
        """Return the new state of the tensor with some slots: masters, objects, scalars and tensors."""
        state: dict[str, Any] = {}
        packed, places, objects = self._packed, self._saved.places, self._saved.objects
        names = [name for name in packed.segments.names if self._has(name, slots)] if packed.apart else []
        # Parameters without state never had a gradient in any step. They get no slots.
        own = packed.of(names) if names else packed
        apart: dict[str, dict[str, Any]] = {packed.recorded[name]: {} for name in own.segments.names}
        read: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for slot in slots:
            keys = [f"{self._saved.saved_as(name)}.{slot}" for name in own.segments.names]
            absent = [key for key in keys if key not in places and key not in objects]
            if slot == MASTER:
                # Without masters, the weights have the same values, and they are loaded with the model.
                if packed.is_master:
                    self._fill(packed, slot, packed.tensor)
            elif absent:
                self._targets.missing.extend(absent)
            elif keys[0] in objects:
                state[slot] = objects[keys[0]]
                for of_name, key in zip(apart.values(), keys, strict=True):
                    of_name[slot] = objects[key]
            elif self._is_scalar(slot, own.segments, [places[key] for key in keys]):
                state[slot], read[slot] = self._scalar(slot, keys)
            else:
                state[slot] = self._tensor(slot, places[keys[0]])
                self._fill(own, slot, state[slot])
        others = [segment for segment in packed.segments if segment.name not in own.segments.names]
        first = next(iter(apart.values()), {})
        # Only then do the parameters of this tensor need scalars of their own.
        if packed.apart and state and (others or any(of_name != first for of_name in apart.values())):
            state[SCALARS] = apart
        # No file fills the elements of parameters without state, so they are zeroed after the reads.
        without = [
            box.of(local_of(value))
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.shape == packed.tensor.shape
            for segment in others
            for box in segment.sharding.boxes
        ]
        self._targets.scalars.append(
            Scalars(state=state, read=read, names=list(apart), apart=apart if packed.apart else None, without=without)
        )
        return state

    def _has(self, name: str, slots: Iterable[str]) -> bool:
        """Return whether the files have state of a parameter."""
        keys = [f"{self._saved.saved_as(name)}.{slot}" for slot in slots if slot != MASTER]
        return any(key in self._saved.places or key in self._saved.objects for key in keys)

    def _is_scalar(self, slot: str, segments: Segments, places: Sequence[StoredTensor]) -> bool:
        """Return whether a slot holds one number per parameter, such as "step", instead of one number per element."""
        if any(place.shape != () for place in places):
            return False
        return any(segment.sharding.shape for segment in segments) or (slot == "step" and self._packed.tensor.dim() > 0)

    def _scalar(self, slot: str, keys: Sequence[str]) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
        """Return a 0-dim slot, and a tensor for each parameter's value in the files, to compare after reading."""
        dtype = self._saved.places[keys[0]].dtype
        # torch keeps the step counter on the CPU, unless a kernel on the device reads it.
        device = torch.device("cpu") if slot == "step" and not self._on_device else self._device
        read = [(key, torch.empty((), dtype=dtype, device="cpu")) for key in keys]
        for key, value in read:
            target = FillTarget(key=key_of("optimizer", key), dtype=dtype, sharding=whole((), (0,)), tensor=value)
            self._targets.pending.append(target)
        return self._reused(slot, torch.empty((), dtype=dtype, device=device)), read

    def _tensor(self, slot: str, place: StoredTensor) -> torch.Tensor:
        """Allocate a slot: like its parameter, or with the shape in the files if that differs."""
        tensor, segments = self._packed.tensor, self._packed.segments
        if len(segments) > 1 or tuple(place.shape) == next(iter(segments)).sharding.shape:
            # Zeros, because no file fills the padding of a flat tensor.
            return self._reused(slot, torch.zeros_like(tensor, dtype=place.dtype, device=self._device))
        return self._reused(slot, torch.empty(place.shape, dtype=place.dtype, device=self._device))

    def _fill(self, packed: PackedSlots, slot: str, value: torch.Tensor) -> None:
        """Notes a slot as something to fill, parameter by parameter."""
        for segment in packed.segments:
            sharding = slot_sharding(packed, segment, slot, value)
            key = key_of("optimizer", f"{self._saved.saved_as(segment.name)}.{slot}")
            self._targets.match(self._saved.places, key, sharding, value)

    def _reused(self, slot: str, fresh: torch.Tensor) -> torch.Tensor:
        """Return the slot's current tensor, or the one kept for it, if it is like the fresh tensor.

        Else the fresh tensor.
        """
        # The memory of an existing slot is reused, which halves the peak of a load and keeps offloaded memory in its
        # place.
        old = self._old.get(slot, slots_of(self._packed.tensor).get(slot))
        if not isinstance(old, torch.Tensor) or type(old) is not type(fresh):
            return fresh
        fits = (old.shape, old.dtype, old.device) == (fresh.shape, fresh.dtype, fresh.device)
        return old if fits else fresh


def set_scalars_(scalars: Iterable[Scalars]) -> Iterator[str]:
    """Set 0-dim slots; yield what is wrong where the parameters of one tensor disagree, and must not."""
    for one in scalars:
        for slot, read in one.read.items():
            values = {float(value) for _, value in read}
            # An optimizer that keeps one counter per tensor cannot represent parameters with different step counts.
            if len(values) > 1 and one.apart is None:
                keys = [key for key, _ in read]
                yield f"{keys[0]!r} and {len(keys) - 1} others lie in one flat tensor, but have values {sorted(values)}"
            elif len(values) > 1:
                one.state[SCALARS] = one.apart
            one.state[slot].copy_(read[0][1])
        if SCALARS in one.state and one.apart is not None:
            for slot, read in one.read.items():
                made: dict[float, torch.Tensor] = {}
                for name, (_, value) in zip(one.names, read, strict=True):
                    one.apart[name][slot] = made.setdefault(float(value), value.to(one.state[slot].device))
        for elements in one.without:
            elements.zero_()
