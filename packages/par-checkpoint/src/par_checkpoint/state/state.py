"""What is not a tensor of a file: param groups, scheduler, extra. Encoded, and the same on every rank."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from crc32c import crc32c

from ..format.bytes import bytes_of
from ..format.tagged import check_round_trip, encode
from ..plan.claims import digest
from ..transfer.ranks import Ranks
from .optimizer import OptimizerState


@dataclass(frozen=True, kw_only=True)
class State:
    """The encoded state.

    Args:
        parts: "model" (extra state of modules), "scheduler" and "extra", encoded; None where there is none.
        groups: By param group: the names of its parameters, and its other options, encoded; None without an optimizer.
        slots: Encoded slots of the optimizer that are no tensors, by "<parameter>.<slot>".
        tensors: The tensors in all of them, by the names that the encoded values refer to.
    """

    parts: Mapping[str, Any]
    groups: Sequence[tuple[Sequence[str], Any]] | None
    slots: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def optimizer(self) -> Any:
        """Param groups and slots as one value; None without an optimizer."""
        if self.groups is None:
            return None
        groups = [{"params": list(names), "options": options} for names, options in self.groups]
        return {"groups": groups, "slots": dict(self.slots)}


@dataclass(kw_only=True)
class _Word:
    """A rank's state as others need it for comparison."""

    parts: dict[str, str]
    groups: list[tuple[tuple[str, ...], str]] | None
    slots: dict[str, str]
    tensors: dict[str, int] = field(default_factory=dict)


def encode_state(
    *, objects: Mapping[str, object], optimizer: OptimizerState | None, scheduler: object | None, extra: object | None
) -> State:
    """Encodes this rank's state, and makes sure that it comes back as it was.

    Raises:
        TypeError: Something that JSON with our tags cannot say; the message names where it is.
    """
    values = {"model": dict(objects) or None, "scheduler": _scheduler_state(scheduler), "extra": extra}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        check_round_trip(value, name)
    parts = {name: None if value is None else encode(value, tensors, name) for name, value in values.items()}
    groups = None
    slots = {}
    if optimizer is not None:
        groups = [
            (group.names, encode(dict(group.options), tensors, f"param_groups[{number}]"))
            for number, group in enumerate(optimizer.groups)
        ]
        slots = {key: encode(value, tensors, key) for key, value in optimizer.objects.items()}
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return State(parts=parts, groups=groups, slots=slots, tensors=copies)


def state_digest(state: State) -> bytes:
    """What stands for a rank's state where only equality counts."""
    return digest(repr(_word(state)).encode())


def agreed_state(ranks: Ranks, mine: State, digests: Sequence[bytes]) -> State:
    """The state of all ranks as one: names and slots joined, everything else the same. Collective where they differ.

    Args:
        ranks: Who saves.
        mine: This rank's state.
        digests: Of the states of all ranks.

    Raises:
        ValueError: What differs between ranks; on every rank.
    """
    if len(set(digests)) == 1:
        return mine
    words = ranks.gather(_word(mine))
    for name in ("scheduler", "extra"):
        _check_same(name, [each.parts[name] for each in words])
    tensors = _joined("tensor", [each.tensors for each in words])
    absent = sorted(set(tensors) - set(words[0].tensors))
    if absent:
        raise ValueError(
            f"state {absent[0]!r} is on another rank than the first, which writes it; give it to all ranks"
        )
    slots = {key: json.loads(each) for key, each in _joined("slot", [each.slots for each in words]).items()}
    modules = _joined("the extra state", [json.loads(each.parts["model"]) or {} for each in words])  # of all stages
    parts = {**mine.parts, "model": modules or None}
    return State(parts=parts, groups=_united(words), slots=slots, tensors=mine.tensors)


def _scheduler_state(scheduler: object | None) -> object | None:
    """A scheduler's state dict; of several, all of theirs."""
    if scheduler is None:
        return None
    if isinstance(scheduler, list | tuple):
        return [_scheduler_state(each) for each in scheduler]
    state_dict = getattr(scheduler, "state_dict", None)
    if state_dict is None:
        raise TypeError(
            f"scheduler is a {type(scheduler).__name__} without state_dict(); pass an lr scheduler or a list"
        )
    state: object = state_dict()
    return state


def _word(state: State) -> _Word:
    return _Word(
        parts={name: json.dumps(part) for name, part in state.parts.items()},
        groups=None if state.groups is None else [(tuple(names), json.dumps(opts)) for names, opts in state.groups],
        slots={key: json.dumps(slot) for key, slot in state.slots.items()},
        tensors={name: crc32c(bytes_of(tensor)) for name, tensor in state.tensors.items()},
    )


def _united(words: Sequence[_Word]) -> list[tuple[list[str], Any]] | None:
    """The param groups of all ranks put together: under pipeline stages or ZeRO a rank has some of the names."""
    counts = [None if each.groups is None else len(each.groups) for each in words]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the ranks' optimizers have {counts} param groups; a rank without parameters for a group keeps it, with "
            "an empty list"
        )
    united = []
    for number, same in enumerate(zip(*[each.groups or [] for each in words], strict=True)):
        _check_same(f"the options of param group {number}", [options for _, options in same])
        names = dict.fromkeys(name for each, _ in same for name in each)
        united.append((list(names), json.loads(same[0][1])))
    return None if counts[0] is None else united


def _joined(what: str, every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for rank, each in enumerate(every):
        for name, value in each.items():
            if joined.setdefault(name, value) != value:
                raise ValueError(f"{what} {name!r} differs between rank {rank} and a lower one; give all the same")
    return joined


def _check_same(what: str, texts: Sequence[str]) -> None:
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"{what} differs between ranks: {texts[0]:.200} on rank 0, {text:.200} on rank {rank}; a checkpoint "
                "knows no ranks: give all ranks the same, or gather what differs into one value"
            )
