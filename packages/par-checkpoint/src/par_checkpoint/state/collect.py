"""The content that this rank adds to a save: tensors of model and optimizer, and encoded state.

Only small state is copied. State without tensors (param groups, schedulers) must be the same on every rank, because a
checkpoint does not depend on the number of ranks; only the names of parameters are merged. `extra` may differ between
ranks, as random states do: then a checkpoint contains the values of all ranks.
"""

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from crc32c import crc32c
from torch import nn

from par_groups import attributes, bytes_of, settle_

from ..format.tagged import check_round_trip, decode, encode, join_ranks
from ..plan.claims import LocalTensor, key_of, name_of
from .conversion import checked
from .model import local_of, model_state, rename, segments_on_disk, sharding_in
from .optimizer import Naming, OptimizerState, optimizer_state
from .quantised import check_cast
from .state import State
from .transformers import conversion_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # what torch's BatchNorm calls its buffers
_SAMPLE = 256  # elements of a tensor that are compared between replicas without a record

_EXTRA = "extra"  # what names of the tensors in it begin with

Tensors = TypeVar("Tensors")

Samples = list[tuple[str, int]]
"""Key of a tensor and checksum of its first elements."""


@dataclass(frozen=True, kw_only=True)
class EncodedState:
    """Encoded state that is not a tensor of a file.

    Args:
        parts: Encoded "model" (extra state of modules), "scheduler" and "extra"; None for a missing part.
        groups: Names of the parameters and encoded other options of each param group; None without an optimizer.
        slots: Encoded slots of the optimizer that are not tensors, by "<parameter>.<slot>".
        own: Encoded entries of each optimizer's state dict other than state and param groups; None without such
            entries.
        tensors: Tensors in the encoded values, by the names that these refer to.
    """

    parts: Mapping[str, Any]
    groups: Sequence[tuple[Sequence[str], Any]] | None
    slots: Mapping[str, Any]
    own: Any
    tensors: Mapping[str, torch.Tensor]

    @property
    def optimizer(self) -> Any:
        """Param groups and slots as one value; None without an optimizer."""
        if self.groups is None:
            return None
        groups = [{"params": list(names), "options": options} for names, options in self.groups]
        own = {} if self.own is None else {"own": self.own}
        return {"groups": groups, "slots": dict(self.slots), **own}


@dataclass(frozen=True, kw_only=True)
class Content:
    """Content that this rank adds to a save.

    Args:
        entries: Tensors for safetensors files.
        tied: Name of the stored tensor, by name in the files of a tensor that is not stored.
        state: State that is not a tensor.
        samples: First elements of the tensors without sharding metadata, to be compared between ranks.
        beside: Bytes of further files such as config.json, by name; only on rank 0.
    """

    entries: list[LocalTensor]
    tied: Mapping[str, str]
    state: EncodedState
    samples: Samples
    beside: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StateSummary:
    """A rank's encoded state as others need it for comparison: texts of JSON, and checksums of tensors."""

    parts: dict[str, str]
    groups: list[tuple[tuple[str, ...], str]] | None
    slots: dict[str, str]
    own: str
    tensors: dict[str, int]


def collect(state: State, *, dtype: torch.dtype | None = None, stem: str = "model") -> Content:
    """Return what a rank's model, optimizer and the rest hold, without a copy of tensors.

    Args:
        state: The objects.
        dtype: Dtype to which the model's floating-point tensors are cast; None: each keeps its dtype.
        stem: First part of the names of the model's files. Under another stem than "model" tensors are not converted.

    Raises:
        ValueError, TypeError: A tensor or value cannot be saved; the message names it.
    """
    state.check_types()
    model, optimizer = state.model, state.optimizer
    found = model_state({} if model is None else model)
    layout = state.layout or {}
    names_on_disk = rename(state.names, found.names)
    shardings = {name: sharding_in(name, tensor, layout) for name, tensor in found.tensors.items()}
    shapes = {name: tuple(sharding.shape) for name, sharding in shardings.items()}
    convert = None
    if state.convert is not None:
        convert = checked(state.convert)
    elif stem == "model":  # under another name the files hold something else, such as an adapter, named as it is
        convert = conversion_of(model, shapes)

    if dtype is not None:
        dtypes = {names_on_disk[name]: tensor.dtype for name, tensor in found.tensors.items()}
        check_cast(dtypes, list(names_on_disk.values()), dtype)
    entries: list[LocalTensor] = []
    samples: Samples = []
    for name, tensor in found.tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values to save; materialise the model first")
        # A tensor says itself how it is cut, or else is held to be whole. Then ranks that should be replicas are
        # compared, but for buffers: nothing keeps those alike on all ranks.
        has_record = attributes.SHARDING.is_on(tensor) or hasattr(tensor, "placements")
        if isinstance(model, nn.Module):
            is_buffer = not isinstance(tensor, nn.Parameter)
        else:
            is_buffer = name.rpartition(".")[2] in _STATISTICS
        if name not in layout and not has_record and not is_buffer:
            samples.append((key_of("model", name), _checksum_of_beginning(tensor)))
        for segment in segments_on_disk(name, shardings[name], convert, names_on_disk[name]):
            entries.append(
                LocalTensor(
                    key=key_of("model", segment.name),
                    dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
                    sharding=segment.sharding,
                    local=local_of(tensor),
                    steady=tensor if tensor.requires_grad else None,  # a forward pass may change a buffer
                    may_differ=is_buffer and not has_record,
                )
            )
    of_optimizer = None
    if optimizer is not None:
        # Masters and parameters may differ until the next step, and a save must contain what the program wrote last.
        settle_(tensor for group in optimizer.param_groups for tensor in group["params"])
        of_optimizer = optimizer_state(optimizer, Naming(model, names_on_disk, layout))
        entries += of_optimizer.entries
    # Without tensors and without this, a model would be taken for one that was not saved.
    objects = found.objects if found.objects or (model is not None and not found.tensors) else None
    tied = {names_on_disk[name]: names_on_disk[stored] for name, stored in found.tied.items()}
    return Content(
        entries=entries,
        tied={name: stored for name, stored in tied.items() if name != stored},
        state=_encoded(objects=objects, optimizer=of_optimizer, scheduler=state.scheduler, extra=state.extra),
        samples=samples,
    )


def check_replicas(samples: Sequence[tuple[int, Samples]]) -> None:
    """Check that tensors which several ranks call theirs, whole and without a record, begin with the same values.

    A tensor-parallel shard whose record is missing looks just like a replica; saved as one, it would be lost silently.

    Args:
        samples: Ranks, and the samples of the content of each.

    Raises:
        ValueError: Naming tensors that differ.
    """
    # All differences are counted before the error, so that one reads whether a tensor or the model is concerned.
    seen: dict[str, tuple[int, int]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, of_rank in samples:
        for key, crc in of_rank:
            first_rank, first_crc = seen.setdefault(key, (rank, crc))
            if crc != first_crc:
                different.setdefault(key, (first_rank, rank))
    if different:
        key, (a, b) = next(iter(different.items()))
        raise ValueError(
            f"{name_of(key)!r} and {len(different) - 1} more differ between ranks {a} and {b}, although each rank "
            "calls it whole: if they are parts of a larger tensor, say so with layout={name: Sharding(...)}; if they "
            "are buffers, pass the module, of whose buffers the first rank's are saved; else they are replicas that "
            "have diverged, or different tensors of one name"
        )


def summary_of(state: EncodedState) -> StateSummary:
    """Return a summary of a rank's encoded state for comparison on other ranks."""
    groups = state.groups
    return StateSummary(
        parts={name: json.dumps(part) for name, part in state.parts.items()},
        # As text, values compare without a look at what they are, and NaN equals NaN.
        groups=None if groups is None else [(tuple(names), json.dumps(options)) for names, options in groups],
        slots={key: json.dumps(slot) for key, slot in state.slots.items()},
        own=json.dumps(state.own),
        tensors={name: crc32c(bytes_of(tensor)) for name, tensor in state.tensors.items()},
    )


def extra_differs(summaries: Sequence[StateSummary]) -> bool:
    """Return whether ranks passed different values as `extra`."""
    return len({repr((summary.parts["extra"], _of_extra(summary.tensors))) for summary in summaries}) > 1


def extra_of(state: EncodedState) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return this rank's encoded `extra`, and the tensors in it."""
    return state.parts["extra"], _of_extra(state.tensors)


def with_extra_of_ranks(mine: EncodedState, every: Sequence[tuple[Any, Mapping[str, torch.Tensor]]]) -> EncodedState:
    """Return this rank's state with the `extra` of all ranks in place of its own.

    Args:
        mine: State of this rank.
        every: Return value of `extra_of` on each rank.
    """
    extra = _of_extra(mine.tensors)
    tensors = {name: tensor for name, tensor in mine.tensors.items() if name not in extra}
    # The tensors of all ranks have the same names, so each value is encoded again under the name of its rank.
    joined = [
        encode(decode(encoded, its), tensors, f"{_EXTRA} of rank {rank}") for rank, (encoded, its) in enumerate(every)
    ]
    return replace(mine, parts={**mine.parts, "extra": join_ranks(joined)}, tensors=tensors)


def _of_extra(tensors: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return the tensors of a state that belong to `extra`, by name."""
    return {name: each for name, each in tensors.items() if re.match(rf"{_EXTRA}(?:[.#]|$)", name)}


def united_state(mine: EncodedState, summaries: Sequence[StateSummary], order: Mapping[str, int]) -> EncodedState:
    """Merge the state of all ranks: parameter names and slots are united, and everything else must be equal.

    Under pipeline parallelism or ZeRO a rank has only some parameters of a param group.

    Args:
        mine: State of this rank.
        summaries: Summaries of all ranks, equal ones once; the first rank's is the first.
        order: Position of each tensor in all ranks' models, by name in the files. It orders the parameters of a group
            if ranks have different ones.

    Raises:
        ValueError: A value differs between ranks; the message names it.
    """
    _check_same("scheduler", [summary.parts["scheduler"] for summary in summaries])
    _check_same("what state_dict() of the optimizer adds", [summary.own for summary in summaries])
    tensors = _united("tensor", [summary.tensors for summary in summaries])
    # Tensors in encoded values are no entries with owners: the first rank alone writes them.
    absent = sorted(set(tensors) - set(summaries[0].tensors))
    if absent:
        raise ValueError(
            f"state {absent[0]!r} is on another rank than the first, which writes it; give it to all ranks"
        )
    slots = {key: json.loads(slot) for key, slot in _united("slot", [summary.slots for summary in summaries]).items()}
    modules = _united("the extra state", [json.loads(summary.parts["model"]) or {} for summary in summaries])
    counts = [None if summary.groups is None else len(summary.groups) for summary in summaries]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the ranks' optimizers have {counts} param groups; a rank without parameters for a group keeps it, with "
            "an empty list"
        )
    groups: list[tuple[list[str], Any]] = []
    for number, of_ranks in enumerate(zip(*[summary.groups or [] for summary in summaries], strict=True)):
        _check_same(f"the options of param group {number}", [options for _, options in of_ranks])
        names = list(dict.fromkeys(name for some, _ in of_ranks for name in some))
        # Ranks of a pipeline have different parameters, and their order must not depend on the number of ranks.
        if any(some != of_ranks[0][0] for some, _ in of_ranks):
            names.sort(key=lambda name: order.get(name, len(order)))
        groups.append((names, json.loads(of_ranks[0][1])))
    return EncodedState(
        parts={**mine.parts, "model": modules if any(each.parts["model"] != "null" for each in summaries) else None},
        groups=None if counts[0] is None else groups,
        slots=slots,
        own=mine.own,
        tensors=mine.tensors,
    )


def united_ties(
    of_ranks: Sequence[tuple[Sequence[int], Sequence[tuple[str, str]]]], stored: Container[str]
) -> dict[str, str]:
    """Merge the ties of all ranks; each rank knows the ties of its own tensors, such as those of a pipeline stage.

    Args:
        of_ranks: Ranks, and their pairs of a name that is not stored and the one that is.
        stored: The names of all tensors of the model in the files: a name may be tied on one rank, and stored by
            another one that has it alone.

    Raises:
        ValueError: A name that ranks tie to two tensors.
    """
    united: dict[str, tuple[str, int]] = {}
    for ranks, ties in of_ranks:
        for name, kept in ties:
            first, rank = united.setdefault(name, (kept, ranks[0]))
            if first != kept:
                raise ValueError(
                    f"{name!r} shares the memory of {first!r} on rank {rank}, and of {kept!r} on rank {ranks[0]}; tie "
                    "it to the same tensor everywhere"
                )
    # A tied name that is stored after all needs no alias, which would hide its own data on loading.
    return {name: kept for name, (kept, _) in united.items() if name not in stored}


def _united(what: str, of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the mappings of all ranks; no name may have two values."""
    united: dict[str, Any] = {}
    for rank, mapping in enumerate(of_ranks):
        for name, value in mapping.items():
            if united.setdefault(name, value) != value:
                raise ValueError(f"{what} {name!r} differs between rank {rank} and a lower one; give all the same")
    return united


def _check_same(what: str, texts: Sequence[str]) -> None:
    """Raise ValueError unless all ranks have the same text."""
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"{what} differs between ranks: {texts[0]:.200} on rank 0, {text:.200} on rank {rank}; a checkpoint "
                "knows no ranks: give all ranks the same, or gather what differs into one value"
            )


def _encoded(
    *, objects: Mapping[str, object] | None, optimizer: OptimizerState | None, scheduler: object, extra: object
) -> EncodedState:
    """Encodes this rank's state, and makes sure that it comes back as it was.

    Raises:
        TypeError: Something that JSON with our tags cannot say; the message names where it is.
    """
    values = {
        "model": None if objects is None else dict(objects),
        "scheduler": _scheduler_state(scheduler),
        "extra": extra,
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        check_round_trip(value, name)
    parts = {name: None if value is None else encode(value, tensors, name) for name, value in values.items()}
    groups = None
    slots = {}
    own = None
    if optimizer is not None:
        groups = [
            (group.names, encode(dict(group.options), tensors, f"param_groups[{number}]"))
            for number, group in enumerate(optimizer.groups)
        ]
        slots = {key: encode(value, tensors, key) for key, value in optimizer.objects.items()}
        if any(optimizer.own):
            check_round_trip(optimizer.own, "optimizer")
            own = encode(optimizer.own, tensors, "optimizer")
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return EncodedState(parts=parts, groups=groups, slots=slots, own=own, tensors=copies)


def _scheduler_state(scheduler: object) -> object:
    """Return the state dict of a scheduler, or a list of state dicts of several."""
    if scheduler is None:
        return None
    if isinstance(scheduler, list | tuple):
        return [_scheduler_state(one) for one in scheduler]
    state_dict = getattr(scheduler, "state_dict", None)
    if state_dict is None:
        raise TypeError(
            f"scheduler is a {type(scheduler).__name__} without state_dict(); pass an lr scheduler or a list"
        )
    state: object = state_dict()
    return state


def _checksum_of_beginning(tensor: torch.Tensor) -> int:
    """Return the crc32c of a tensor's first elements, at most those of its first row."""
    first = tensor.detach()[(0,) * max(0, tensor.dim() - 1)].reshape(-1)[:_SAMPLE] if tensor.numel() else tensor
    return crc32c(bytes_of(first.cpu().contiguous()))
