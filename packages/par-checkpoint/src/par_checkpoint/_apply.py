"""State of a model, an optimizer and a scheduler set from a source: match, check, fill, set.

The source is a checkpoint's folder or the memory of other ranks. Nothing is changed before everything that can be
checked beforehand is.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from par_groups import settle_, written_

from ._errors import UNDEFINED, CheckpointError
from .format.manifest import STEMS
from .format.pickled import is_extra_state
from .plan.claims import key_of, name_of
from .state.buffers import MetaBuffer, make_buffers_, meta_buffers, tie_
from .state.model import LayoutNames, check_layout, device_for, layout_names, model_state, rename
from .state.optimizer import Naming
from .state.own_loading import ModuleLoading, loads_itself, reload_, takes_entries
from .state.restore import (
    candidates,
    check_schedulers,
    matching_groups,
    set_optimizer_,
    set_scheduler_,
)
from .state.state import State
from .state.targets import OptimizerTargets, SavedOptimizer, Targets, model_targets, optimizer_targets, ties_of
from .storage.outline import Outline
from .transfer.ranks import Ranks, words

_SHOWN = 50  # lines of an error that lists names


@dataclass(frozen=True, kw_only=True)
class StateReport:
    """Names that did not fit when state was set, and the state that its owner sets.

    Args:
        missing: Names in the model or optimizer that the source lacks. Without `strict`, also buffers on the meta
            device that are in no source and that no code computes.
        unexpected: Names in the source that no model or optimizer on any rank has.
        mismatched: Text for each tensor with another shape or dtype.
        extra: Value of `extra` in the source. If its ranks had different values, the value of the rank with this
            number; with more ranks than in the source, rank r gets the value of rank r modulo their number.
        extra_of_ranks: Values of `extra` by rank, if ranks had different values; else None.
        recomputed: Buffers that the source lacks and that were computed, because they were on the meta device.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    extra: Any = None
    extra_of_ranks: tuple[Any, ...] | None = None
    recomputed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Into:
    """The objects to fill, and how.

    Args:
        state: The objects.
        strict: Whether names that do not fit raise.
        dtype: Dtypes of the model's floating-point tensors that may be filled from another floating-point dtype.
        device: Device for tensors on the meta device; None: see `device_for`.
    """

    state: State
    strict: bool
    dtype: torch.dtype | tuple[torch.dtype, ...] | None
    device: str | torch.device | None


class Source(Protocol):
    """A source of tensors: the folder of a checkpoint, or the memory of ranks.

    Attributes:
        outline: Everything but the tensors' data, the same on every rank.
        title: The source in errors, such as "'runs/step-10'".
        kind: Noun for the source in errors, such as "checkpoint".
    """

    @property
    def outline(self) -> Outline: ...
    @property
    def title(self) -> str: ...
    @property
    def kind(self) -> str: ...

    def prepare(self) -> None:
        """Get ready on this rank, without communication."""

    def check(self, targets: Sequence[Targets], same: set[tuple[str, str]]) -> None:
        """Check everything that can be checked before the first tensor changes. Collective.

        Args:
            targets: Tensors that this rank will fill.
            same: Pairs of names in the source that are one tensor in a model.
        """

    def fill_(self, targets: Targets) -> None:
        """Fill tensors; from here on they change. Collective."""


@dataclass(frozen=True, kw_only=True)
class _Announced:
    """Announcement of one rank to the other ranks, before anything changes.

    Args:
        layout: The names of `layout` that the rank lacks, and those that it has.
        missing: Names in its model or optimizer that the files lack.
        buffers: Names of buffers on the meta device that are in no file, and that the rank can compute.
        unmade: Text for each buffer that it cannot compute, by name.
        mismatched: Text for each tensor with another shape or dtype in the files.
        same: Pairs of names in the files that are one tensor in its model.
        groups: Candidates among the saved groups, for each param group of its optimizer.
        loads_itself: Whether its model or optimizer has its own code that torch calls in `load_state_dict`, or its
            modules load objects.
        fills_model: Whether it fills any tensor of the model.
        fills_optimizer: Whether it fills any tensor of the optimizer.
        sets_more: Whether it sets a scheduler.
    """

    layout: LayoutNames
    missing: list[str]
    buffers: list[str]
    unmade: dict[str, str]
    mismatched: list[str]
    same: list[tuple[str, str]]
    groups: list[list[int] | None]
    loads_itself: bool
    fills_model: bool
    fills_optimizer: bool
    sets_more: bool


def apply_(into: Into, source: Source, ranks: Ranks) -> StateReport:
    """Set the state of this rank's objects from a source. Collective.

    Args:
        into: Objects to fill.
        source: Source of their state.
        ranks: The ranks that fill their objects, or hold parts of the source.

    Raises:
        CheckpointError: Names, shapes or dtypes do not fit, and nothing has changed; or an object does not accept its
            state, and the message says that it is undefined. On every rank.
    """
    state, outline = into.state, source.outline
    model, optimizer = state.model, state.optimizer
    stored = [key_of(section, name) for section in STEMS for name in outline.places(section)]
    objects = outline.objects()
    stored += [key_of("model", name) for name in objects]
    own_of_optimizer = outline.own() if "optimizer" in outline.directories or optimizer is not None else []
    stored += [_own_key(number, name) for number, entries in enumerate(own_of_optimizer) for name in entries]
    loading = ModuleLoading(model)
    scheduler_state = outline.part("scheduler") if state.scheduler is not None else None

    def match() -> tuple[tuple[Targets, OptimizerTargets, list[MetaBuffer], _Announced, list[int]], list[int]]:
        state.check_types()
        for each in into.dtype if isinstance(into.dtype, tuple) else (into.dtype,):
            if each is not None and not (isinstance(each, torch.dtype) and each.is_floating_point):
                raise TypeError(
                    f"dtype={into.dtype!r}: not a floating-point dtype; pass one such as torch.bfloat16, or a tuple"
                )
        source.prepare()
        tie_(model)
        without_file = meta_buffers(model)
        buffers = [buffer for buffer in without_file if buffer.can_be_made]
        loading.check()
        of_model, of_optimizer = _match(source, into, loading)
        check_schedulers(state.scheduler, scheduler_state)
        used = of_model.used | of_optimizer.used
        announced = _Announced(
            layout=layout_names(state.layout, model),
            missing=[*of_model.missing, *of_optimizer.missing],
            buffers=[buffer.name for buffer in buffers],
            unmade={buffer.name: buffer.text() for buffer in without_file if not buffer.can_be_made},
            mismatched=[*of_model.mismatched, *of_optimizer.mismatched],
            same=of_model.same,
            groups=candidates(of_optimizer.groups, outline.groups()),
            loads_itself=bool(loading) or loads_itself(optimizer) or bool(objects),
            fills_model=bool(of_model.pending),
            fills_optimizer=bool(of_optimizer.pending),
            sets_more=state.scheduler is not None,
        )
        digest = words(pickle.dumps(announced))
        # Ranks add these up: a stored name that no rank uses is unexpected.
        return (of_model, of_optimizer, buffers, announced, digest), [*digest, *(key in used for key in stored)]

    # Everything that can fail is checked by now on every rank. From here on, all ranks change their objects or none
    # does.
    (of_model, of_optimizer, buffers, mine, digest), sums = ranks.tell(match, len(words(b"")) + len(stored))
    same, users = sums[: len(digest)] == [ranks.size * word for word in digest], sums[len(digest) :]
    # Announcements travel only if they differ, as between pipeline stages.
    announced = [mine] if same else [of_rank for _, of_rank in ranks.distinct(mine)]
    check_layout([of_rank.layout for of_rank in announced])
    report = _report(outline, dict(zip(stored, users, strict=True)), announced, ranks.rank)
    unmade = {name: text for of_rank in announced for name, text in of_rank.unmade.items()}
    if into.strict:
        _check_strict(source, report, unmade.values())
    report = replace(report, missing=(*report.missing, *unmade))
    matches = matching_groups([of_rank.groups for of_rank in announced], len(outline.groups()))
    # Names that the model ties must hold equal tensors in the source, because one memory receives them.
    source.check([of_model, of_optimizer], {pair for of_rank in announced for pair in of_rank.same})
    # A read is collective, so a rank without tensors of the model takes part in it, too.
    if any(of_rank.fills_model for of_rank in announced):
        source.fill_(of_model)
    # Buffers on the meta device that are not in the source are computed, not read.
    if report.recomputed:
        ranks.agree(lambda: make_buffers_(model, buffers, device_for(into.device, model)))
    has_own_code = any(of_rank.loads_itself for of_rank in announced)
    _run(partial(loading.run_, objects, strict=into.strict), ranks, together=has_own_code)
    # Masters first take the loaded weights. Then the saved masters overwrite them with their exact values.
    if model is not None:
        written_(_tensors_of(model))
    if any(of_rank.fills_optimizer for of_rank in announced):
        source.fill_(of_optimizer)
    if optimizer is not None:
        # Master weights and their parameters come from one checkpoint: nothing is left to bring from one to the other.
        parameters = set() if model is None else {id(each) for each in _tensors_of(model)}
        tensors = [each for group in optimizer.param_groups for each in group["params"]]
        written_([each for each in tensors if id(each) not in parameters])
        set_optimizer_(optimizer, outline.groups(), matches, of_optimizer.state, outline.slots())
        _run(partial(reload_, optimizer, own_of_optimizer), ranks, together=has_own_code)
    # A scheduler runs code of the caller, which may fail on one rank only.
    if any(of_rank.sets_more for of_rank in announced):
        ranks.agree(lambda: set_scheduler_(state.scheduler, scheduler_state))
    return report


def _tensors_of(model: nn.Module | Mapping[str, torch.Tensor]) -> Iterable[torch.Tensor]:
    return chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else model.values()


def _run(act: Callable[[], None], ranks: Ranks, *, together: bool) -> None:
    """Call the load functions of a model or an optimizer, such as their own `load_state_dict`.

    Args:
        act: Function that makes these calls on this rank.
        ranks: The ranks that load.
        together: Whether `act` runs the caller's code on any rank. If so, an error on one rank is raised on all ranks.
    """

    def run() -> None:
        try:
            act()
        except CheckpointError:
            raise
        except Exception as error:
            text = f"load_state_dict of the model or the optimizer raised {type(error).__name__}: {error}{UNDEFINED}"
            raise CheckpointError(text) from error

    # An agreement costs a message, so ranks agree only if code of the caller runs on one of them.
    if together:
        ranks.agree(run)
    else:
        act()


def _own_key(number: int, name: str) -> str:
    """Return the key of an entry in an optimizer's state dict other than state and param groups."""
    return key_of("optimizer", f"{name} (in the state dict of optimizer {number})")


def _match(source: Source, into: Into, loading: ModuleLoading) -> tuple[Targets, OptimizerTargets]:
    """Match the tensors of this rank's model and optimizer with the source."""
    outline, state = source.outline, into.state
    model, layout, names = state.model, state.layout or {}, state.names
    of_model, of_optimizer = Targets(), OptimizerTargets()
    if model is not None:
        of_model = model_targets(
            model,
            outline.places("model"),
            outline.tied,
            layout=layout,
            names=names,
            convert=state.convert,
            dtype=into.dtype,
            kind=source.kind,
        )
        # Only checkpoints of this package contain extra state of modules.
        if outline.manifest is not None:
            own, saved = set(model_state(model).objects), outline.objects().keys()
            of_model.missing.extend(sorted(own - saved))
            if isinstance(model, nn.Module):
                asked = {name for name in saved if (name in own if is_extra_state(name) else loading.takes(name))}
            else:  # a mapping may hold the tensors alone
                asked = {name for name in saved if name in own or is_extra_state(name)}
            of_model.used.update(key_of("model", name) for name in asked)
    if state.optimizer is not None:
        in_files = {} if model is None else rename(names, model_state(model).names)
        saved_optimizer = SavedOptimizer(
            places=outline.places("optimizer"),
            objects=outline.slots(),
            options={member: saved for members, saved in outline.groups() for member in members},
            resized=of_model.resized,
            ties=ties_of(model, names, outline.tied),
            device=device_for(into.device, model),
            kind=source.kind,
        )
        settle_(tensor for group in state.optimizer.param_groups for tensor in group["params"])
        of_optimizer = optimizer_targets(state.optimizer, Naming(model, in_files, layout), saved_optimizer)
        own_of_optimizer = outline.own()
        for number, taken in enumerate(takes_entries(state.optimizer, own_of_optimizer)):
            of_optimizer.used.update(_own_key(number, name) for name in (own_of_optimizer[number] if taken else ()))
    return of_model, of_optimizer


def _report(outline: Outline, users: Mapping[str, int], announced: Sequence[_Announced], rank: int) -> StateReport:
    """Return the missing and unexpected names of all ranks, and the `extra` of one rank.

    Args:
        outline: Content of the checkpoint.
        users: Number of ranks that use each part of the checkpoint, by key.
        announced: Announcements of all ranks, equal ones once.
        rank: The rank.
    """
    of_ranks = outline.extra_of_ranks()
    return StateReport(
        missing=tuple(dict.fromkeys(name for of_rank in announced for name in of_rank.missing)),
        unexpected=tuple(name_of(key) for key, count in users.items() if count == 0),
        mismatched=tuple(dict.fromkeys(text for of_rank in announced for text in of_rank.mismatched)),
        extra=outline.part("extra") if of_ranks is None else of_ranks[rank % len(of_ranks)],
        extra_of_ranks=of_ranks,
        recomputed=tuple(dict.fromkeys(name for of_rank in announced for name in of_rank.buffers)),
    )


def _check_strict(source: Source, report: StateReport, unmade: Iterable[str]) -> None:
    """Raise CheckpointError that lists everything that does not fit.

    Args:
        source: Source of the state.
        report: Missing and unexpected names.
        unmade: Texts about buffers that have no values.
    """
    lines = [
        *report.mismatched,  # first, since a router of another size says why a thousand weights of experts are missing
        *(f"missing in the {source.kind}: {name}" for name in report.missing),
        *(f"not wanted by anybody: {name}" for name in report.unexpected),
        *unmade,
    ]
    if lines:
        shown = "\n  ".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
        raise CheckpointError(
            f"{source.title} does not fit; nothing was changed. Rename with `names`, cast with `dtype`, or pass "
            f"strict=False to load what fits:\n  {shown}"
        )
