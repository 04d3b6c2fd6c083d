"""Loading: look, match, check, read; nothing is changed before everything that can be checked beforehand is."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from par_groups import written_

from ._errors import CheckpointError
from ._options import LoadOptions, timeout_of, with_keywords
from ._session import session_of
from .format.index import STEMS
from .format.pickled import is_extra_state
from .plan.entry import key_of, name_of
from .state.collect import LayoutNames, Model, check_layout, layout_names
from .state.model import model_state
from .state.optimizer import Naming
from .state.restore import Restore
from .state.targets import OptimizerTargets, Slots, Targets, file_names, model_targets, optimizer_targets, ties_of
from .storage.consistent import retry_while_replaced, version_of
from .storage.folder import Folder, open_folder
from .storage.outline import Outline, read_outline
from .storage.verify import check_blocks, check_same
from .transfer.fill import Filling, fill_
from .transfer.ranks import Ranks

Path = str | PathLike[str]

_SHOWN = 50  # lines of an error that lists names


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a load has done.

    Args:
        missing: Names that the model or optimizer has, and the checkpoint has not.
        unexpected: Names that it has, and nobody on any rank wants.
        mismatched: What has another shape or dtype, in words.
        extra: What `save` was given as `extra`.
        step: What `save` was given as `step`.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    extra: Any = None
    step: int | None = None


@dataclass(kw_only=True)
class _Wanted:
    """Everything that this rank fills."""

    model: Targets = field(default_factory=Targets)
    optimizer: OptimizerTargets = field(default_factory=OptimizerTargets)
    restore: Restore = field(default_factory=Restore)


@dataclass(frozen=True, kw_only=True)
class _Word:
    """What a rank tells the others, before anything changes.

    Args:
        host: Its machine.
        layout: The names of `layout` that it lacks, and those that it has.
        missing: Names that it wants and the files have not.
        mismatched: What has another shape or dtype there, in words.
        used: Whether it uses each tensor in the files.
        same: Names in the files that are one tensor in its model.
        groups: By param group of its optimizer: the saved groups with names of it; None where it has no names here.
        fills: Whether it fills anything of the model, and of the optimizer.
    """

    host: str
    layout: LayoutNames
    missing: list[str]
    mismatched: list[str]
    used: bytes
    same: list[tuple[str, str]]
    groups: list[list[int] | None]
    fills: tuple[bool, bool]


def load(
    path: Path,
    *,
    model: Model | None = None,
    optimizer: Optimizer | None = None,
    scheduler: object = None,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    options: LoadOptions | None = None,
    **keywords: Any,
) -> Report:
    """Fills a model, an optimizer and a scheduler from a checkpoint of any topology, ours or another's. Collective.

    Existence, names, shapes, dtypes, sizes, headers, index and manifest are checked on all ranks before anything
    changes; every block of data is checked while it is read, unless `verify` says otherwise. Where a save replaces the
    checkpoint meanwhile, what is loaded is wholly the old or wholly the new one.

    Args:
        path: The folder, or a URL. Also any Hugging Face folder: one file, shards with an index, or pytorch_model.bin.
        model: As for `save`. Parameters on the meta device are made while loading.
        optimizer: As for `save`. It need not have stepped: its state is made, not by a step.
        scheduler: As for `save`.
        group: The ranks that take part; default: the world. A byte is read by one of them and handed on.
        strict: Whether missing, unexpected and mismatched names are an error, all in one message, or are reported.
        options: How; see `LoadOptions`.
        keywords: Fields of `LoadOptions`, which go before those of `options`.

    Returns:
        What was missing or left over, and the saved `extra`.

    Raises:
        ValueError, TypeError: What the caller gave; on every rank, nothing has changed.
        CheckpointError: There is no such checkpoint, or it does not fit; on every rank, nothing has changed.
        CorruptError: Bytes are not what was written. If the message does not say otherwise, nothing has changed.
        ReplacedError: It was replaced while it was read, again and again; what was being loaded is undefined.
    """
    session = session_of(group, timeout_of(options, keywords))
    ranks = session.ranks
    session.settle("wait")

    def opened() -> tuple[tuple[LoadOptions, Folder], str | None]:
        chosen, folder = with_keywords(options, LoadOptions, keywords), open_folder(path)
        return (chosen, folder), version_of(folder) if ranks.rank == 0 else None

    (chosen, folder), versions = ranks.share(opened)
    into = _Into(model=model, optimizer=optimizer, scheduler=scheduler, strict=strict)
    report, _ = retry_while_replaced(
        lambda: ranks.on_first(lambda: version_of(folder)),
        lambda: _load(into, folder, ranks, chosen),
        versions[0],
        folder.url,
        checked=lambda outcome: outcome[1],
    )
    return report


@dataclass(frozen=True, kw_only=True)
class _Into:
    """What the caller gave to be filled."""

    model: Model | None
    optimizer: Optimizer | None
    scheduler: object
    strict: bool


def _load(into: _Into, folder: Folder, ranks: Ranks, options: LoadOptions) -> tuple[Report, bool]:
    """Loads what is there now, and tells whether all of it was compared with checksums."""
    model = into.model
    found = ranks.on_first(
        lambda: read_outline(
            folder, model=model is not None, optimizer=into.optimizer is not None, variant=options.variant
        )
    )

    def match() -> tuple[_Wanted, _Word]:
        folder.recover()  # the first rank may have seen it replaced since this one has looked
        wanted = _match(found, options, into)
        return wanted, _word(found, wanted, layout_names(options.layout, model))

    wanted, every = ranks.share(match)
    check_layout([each.layout for each in every])
    report = _report(found, every)
    if into.strict:
        _check_strict(folder, report)
    wanted.restore.match([each.groups for each in every])
    same = {pair for each in every for pair in each.same}
    if same:
        ranks.on_first(lambda: check_same(folder, found, same))
    if options.verify == "full":
        share = (ranks.rank, ranks.size)
        ranks.agree(lambda: check_blocks(folder, found, options.threads, share))
    filling = Filling(
        ranks=ranks, folder=folder, found=found, options=options, near=len({each.host for each in every}) == 1
    )
    if any(each.fills[0] for each in every):
        fill_(wanted.model, filling)
    if model is not None:  # holders of masters take the weights, before the optimizer's own, more exact ones are read
        written_(model.parameters() if isinstance(model, torch.nn.Module) else model.values())
    if any(each.fills[1] for each in every):
        fill_(wanted.optimizer, filling)
    wanted.restore.apply_()
    return report, found.manifest is not None and options.verify != "off"


def _match(found: Outline, options: LoadOptions, into: _Into) -> _Wanted:
    """What this rank fills, and with what."""
    model, optimizer, wanted = into.model, into.optimizer, _Wanted()
    if model is not None:
        wanted.model = model_targets(model, found.places("model"), options, found.tied)
        if found.manifest is not None:  # no other folder has extra state
            own = {name for name in model_state(model).objects if is_extra_state(name)}
            saved = found.objects().keys()
            wanted.model.missing.extend(sorted(own - saved))
            asked = own if isinstance(model, torch.nn.Module) else saved  # a mapping may hold the tensors alone
            wanted.model.used.update(key_of("model", name) for name in asked & saved)
    if optimizer is not None:
        naming = Naming(model, {} if model is None else file_names(model, options.names), options.layout or {})
        slots = Slots(
            places=found.places("optimizer"),
            objects=found.slots(),
            options={name: options for names, options in found.groups() for name in names},
            resized=wanted.model.resized,
            ties=ties_of(model, options.names, found.tied),
            device=torch.device(options.device),
        )
        wanted.optimizer = optimizer_targets(optimizer, naming, slots)
    wanted.restore = Restore.of(
        found, model=model, optimizer=optimizer, scheduler=into.scheduler, targets=wanted.optimizer
    )
    return wanted


def _word(found: Outline, wanted: _Wanted, layout: LayoutNames) -> _Word:
    used = wanted.model.used | wanted.optimizer.used
    return _Word(
        host=socket.gethostname(),
        layout=layout,
        missing=[*wanted.model.missing, *wanted.optimizer.missing],
        mismatched=[*wanted.model.mismatched, *wanted.optimizer.mismatched],
        used=bytes(key in used for key in _stored(found)),
        same=wanted.model.same,
        groups=wanted.restore.candidates(),
        fills=(bool(wanted.model.pending), bool(wanted.optimizer.pending)),
    )


def _stored(found: Outline) -> list[str]:
    """The keys of all tensors in the files, and of the extra state."""
    tensors = [key_of(section, name) for section in STEMS for name in found.places(section)]
    return [*tensors, *(key_of("model", name) for name in found.objects())]


def _report(found: Outline, every: Sequence[_Word]) -> Report:
    """What is missing or too much, of all ranks together."""
    used = zip(*(each.used for each in every), strict=True)
    return Report(
        missing=tuple(dict.fromkeys(name for each in every for name in each.missing)),
        unexpected=tuple(name_of(key) for key, by in zip(_stored(found), used, strict=True) if not any(by)),
        mismatched=tuple(dict.fromkeys(text for each in every for text in each.mismatched)),
        extra=found.part("extra"),
        step=None if found.manifest is None else found.manifest.step,
    )


def _check_strict(folder: Folder, report: Report) -> None:
    """Raises CheckpointError that lists everything that does not fit."""
    lines = [
        *(f"missing in the checkpoint: {name}" for name in report.missing),
        *(f"not wanted by anybody: {name}" for name in report.unexpected),
        *report.mismatched,
    ]
    if lines:
        shown = "\n  ".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
        raise CheckpointError(
            f"{folder.url!r} does not fit; nothing was changed. Rename with `names`, cast with `dtype`, or pass "
            f"strict=False to load what fits:\n  {shown}"
        )
