"""Loading: look, match, check, read, set; nothing is changed before everything that can be checked beforehand is."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import parse_size, settle_, written_

from ._agreement import SameOptions, kinds_of, place_of
from ._errors import UNDEFINED, CheckpointError, CorruptError, ReplacedError
from ._policies import Format, Path, Tiers, Transfer, check_one_of, check_policy, timeout_of, urls_of
from ._progress import check_progress
from .format.manifest import STEMS
from .format.pickled import is_extra_state
from .plan.claims import key_of, name_of
from .state.buffers import MetaBuffer, make_buffers_, meta_buffers, tie_
from .state.model import LayoutNames, Model, check_layout, device_for, layout_names, model_state, rename
from .state.optimizer import Naming
from .state.own_loading import ModuleLoading, loads_itself, reload_, takes_entries
from .state.restore import (
    candidates,
    check_schedulers,
    matching_groups,
    set_optimizer_,
    set_scheduler_,
)
from .state.targets import OptimizerTargets, SavedOptimizer, Targets, model_targets, optimizer_targets, ties_of
from .storage.consistent import retry_while_replaced, version_of
from .storage.folder import Folder, open_folder
from .storage.outline import Outline, read_outline
from .storage.verify import check_beside, check_blocks, check_same
from .tiers.kept import KeptFolder
from .tiers.nearest import nearest
from .transfer.fill import Filling, fill_
from .transfer.ranks import Ranks
from .transfer.sessions import Session, session_of

_SHOWN = 50  # lines of an error that lists names
_DEPTH = 8  # calls from a warning of a load over tiers up to whoever called it
_LOOKS = 3  # at the tiers, where what was found there goes while it is read


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Outcome of a load.

    Args:
        missing: Names in the model or optimizer that the checkpoint lacks. Without `strict`, also buffers on the meta
            device that are in no file and that no code computes.
        unexpected: Names in the checkpoint that no model or optimizer on any rank has.
        mismatched: Text for each tensor with another shape or dtype.
        extra: Value of `extra` in `save`. If ranks saved different values, the value of the rank with this number; with
            more ranks than saved, rank r gets the value of rank r modulo their number.
        extra_of_ranks: Values of `extra` by rank, if ranks saved different values; else None.
        step: Value of `step` in `save`.
        recomputed: Buffers that are in no file and were computed, because they were on the meta device.
        path: Folder that was read; with several tiers, the folder in the nearest one.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    extra: Any = None
    step: int | None = None
    recomputed: tuple[str, ...] = ()
    extra_of_ranks: tuple[Any, ...] | None = None
    path: str = ""


def load(
    path: Path,
    *,
    model: Model | None = None,
    optimizer: Optimizer | None = None,
    scheduler: object = None,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    device: str | torch.device | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    verify: str = "auto",
    format: Format | None = None,  # noqa: A002
    transfer: Transfer | None = None,
    tiers: Tiers | None = None,
) -> LoadReport:
    """Fill a model, an optimizer and a scheduler from a checkpoint that any number of ranks wrote. Collective.

    All ranks check existence, names, shapes, dtypes, sizes, headers, index and manifest before anything changes. They
    check each block of data while they read it; `verify` changes this. If a save replaces the checkpoint in the
    meantime, the loaded state is either all from the old checkpoint or all from the new one.

    Args:
        path: Folder of the checkpoint, or its URL. It may be any Hugging Face folder: with one file, with shards and an
            index, or with pytorch_model.bin. With `tiers`, the checkpoint's name in each tier.
        model: Module (plain, wrapped, with FSDP2 or other DTensors, or with `Sharding` metadata), or a mapping of
            tensors. Tensors on the meta device are allocated. This includes buffers that no file holds: Transformers
            models compute theirs, other modules in a method `reset_buffers()`.
        optimizer: Optimizer. It needs `model` for the names of its parameters, unless it was made from named
            parameters. It may be one that has never stepped.
        scheduler: LR scheduler or list of LR schedulers; any object with `load_state_dict()`.
        group: Ranks that take part. One of them reads each byte and sends it to the ranks that need it. Default: all
            ranks.
        strict: Whether to raise one error that lists all missing, unexpected and mismatched names. With False, the
            report lists them.
        device: Device for tensors that are on the meta device. Default: the device of the model's mesh if it has
            DTensors, else the CPU.
        dtype: Dtype, or tuple of dtypes, of floating-point tensors in the model whose values may be cast from another
            dtype in the files. The tensors keep their dtype. None: the dtypes must be equal.
        verify: "auto" checks each block while it is read. "full" checks all files before anything changes. "off" checks
            only sizes and headers.
        format: Map from the model's tensors to the files. Default: `Format()`.
        transfer: Memory, threads and timeout. Default: `Transfer()`.
        tiers: Storage tiers that `save` wrote to. Default: only `path`.

    Returns:
        Missing and unexpected names, and the stored `extra` and `step`.

    Raises:
        ValueError, TypeError: An argument is not valid; on every rank, and nothing has changed.
        ImportError: A package that an argument needs is not installed, such as tqdm or fsspec; on every rank.
        CheckpointError: The checkpoint does not exist or does not fit; on every rank, and nothing has changed.
        CorruptError: The files differ from what was written. Nothing has changed, unless the message says so.
        ReplacedError: Saves replaced the checkpoint repeatedly while it was read. The state of `model`, `optimizer` and
            `scheduler` is undefined.
    """
    with session_of(group).calling(f"load({str(path)!r:.80})", timeout_of(transfer)) as session:
        ranks = session.ranks
        session.settle("wait")

        def opened() -> tuple[tuple[_Into, list[Folder], SameOptions], list[int]]:
            check_policy("format", format, Format)
            check_policy("transfer", transfer, Transfer)
            check_policy("tiers", tiers, Tiers)
            check_one_of("verify", verify, ("auto", "full", "off"))
            check_progress((transfer or Transfer()).progress)
            into = _Into(
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                strict=strict,
                device=device,
                dtype=dtype,
                verify=verify,
                format=format or Format(),
                transfer=transfer or Transfer(),
            )
            folders = [open_folder(each) for each in urls_of(path, tiers)]
            same = SameOptions(
                {
                    "tiers": None if tiers is None else kinds_of([each.url for each in folders]),
                    "path": place_of(folders[0].url),
                    "strict": strict,
                    "verify": verify,
                    "variant": into.format.variant,
                    "stem": into.format.stem,
                    "budget": parse_size(into.transfer.budget),
                }
            )
            return (into, folders, same), same.words()

        (into, folders, same), sums = ranks.tell(opened, 8)
        same.check(sums, ranks)
        if tiers is None:
            report, folder = _load_sound(into, folders[0], session), folders[0]
        else:
            report, folder = _load_nearest(into, folders, session)
        of_ranks = report.extra_of_ranks
        if of_ranks is not None:
            if len(of_ranks) != ranks.size:
                warnings.warn(
                    f"extra differed between the {len(of_ranks)} ranks that saved {folder.url!r}, and {ranks.size} "
                    f"load it: report.extra is that of rank {ranks.rank % len(of_ranks)} here, report.extra_of_ranks "
                    "has all",
                    stacklevel=3,
                )
            report = replace(report, extra=of_ranks[ranks.rank % len(of_ranks)])
        return report


@dataclass(frozen=True, kw_only=True)
class _Into:
    """The objects that a load fills, and how."""

    model: Model | None
    optimizer: Optimizer | None
    scheduler: object
    strict: bool
    device: str | torch.device | None
    dtype: torch.dtype | tuple[torch.dtype, ...] | None
    verify: str
    format: Format
    transfer: Transfer


def _load_nearest(into: _Into, folders: Sequence[Folder], session: Session) -> tuple[LoadReport, Folder]:
    """Load from the nearest tier with a complete checkpoint; if it cannot be read, load from the next tier.

    Rank 0 warns about each tier that was skipped.

    Args:
        into: Objects to fill.
        folders: Folder of the checkpoint in each tier.
        session: Ranks that load.

    Returns:
        The report, and the folder that was loaded.

    Raises:
        CheckpointError, OSError: No tier has a complete, readable checkpoint, or it does not fit; on every rank.
    """
    further: tuple[Folder, ...] = tuple(folders)
    failed: Exception | None = None
    notes: tuple[str, ...] = ()
    looks = 1
    while True:
        found = nearest(further, session.ranks)
        notes += found.passed
        if found.folder is None and failed is not None:
            raise failed
        folder = found.whole(folders)
        if notes:
            _warn(f"{'; '.join(notes)}. What is loaded is in {folder.url!r}", session.ranks)
        try:
            return _load_sound(into, folder, session), folder
        except ReplacedError:  # of all ranks, like the errors below: what took its place, or is left, is read in full
            if looks == _LOOKS:
                raise
            looks, notes = looks + 1, ()
        except (CorruptError, OSError) as error:
            if not found.further:
                raise
            further, failed, notes = found.further, error, (str(error).replace(UNDEFINED, ""),)


def _load_sound(into: _Into, folder: Folder, session: Session) -> LoadReport:
    """Load from a folder. Corrupt blocks of hosts' parts are read from their copies.

    Args:
        into: Objects to fill.
        folder: Folder of the checkpoint.
        session: Ranks that load.
    """
    ranks = session.ranks

    def version() -> str | None:
        if isinstance(folder, KeptFolder):
            ranks.agree(folder.check_there)
        return ranks.on_first(lambda: version_of(folder))

    while True:
        wrong: list[tuple[str, int]] = []
        try:
            return retry_while_replaced(
                version,
                partial(_load, into, folder, session, wrong),
                version(),
                folder.url,
                checked=lambda outcome: outcome[1],
                settles=lambda: ranks.on_first(lambda: folder.settles),
            )[0]
        except CorruptError as error:
            if not isinstance(folder, KeptFolder):
                raise
            moved, lost = folder.avoid(ranks.distinct(sorted(set(wrong))), ranks)
            if lost:
                raise CorruptError(f"{lost[0]}: {error}") from error
            if not moved:
                raise
            more = f"; and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
            _warn("; ".join(moved[:_SHOWN]) + more, ranks)


def _warn(text: str, ranks: Ranks) -> None:
    """Has rank 0 warn. Collective, for a filter may make an error of it: then all ranks raise that."""
    ranks.on_first(lambda: warnings.warn(text, stacklevel=_DEPTH))


def _share_of(folder: Folder, ranks: Ranks) -> Callable[[str, int], bool]:
    """Return the function that selects this rank's blocks when all blocks are compared with their checksums."""
    if isinstance(folder, KeptFolder):  # whose headers and small files the first rank compares when it reads them
        return lambda name, number: (
            number >= 0 and name in folder.homes.parts and folder.reader(name, number) == ranks.rank
        )
    return lambda _, number: (number + 1) % ranks.size == ranks.rank


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


def _load(into: _Into, folder: Folder, session: Session, wrong: list[tuple[str, int]]) -> tuple[LoadReport, bool]:
    """Load the current content of a folder; return the report, and whether all data was compared with checksums.

    Args:
        into: Objects to fill.
        folder: Folder of the checkpoint.
        session: Ranks that load.
        wrong: List that receives the file and number of each corrupt block that this rank finds.
    """
    model, optimizer, ranks = into.model, into.optimizer, session.ranks
    outline = ranks.on_first(
        lambda: read_outline(
            folder,
            model=model is not None,
            optimizer=optimizer is not None,
            variant=into.format.variant,
            stem=into.format.stem,
        )
    )
    stored = [key_of(section, name) for section in STEMS for name in outline.places(section)]
    objects = outline.objects()
    stored += [key_of("model", name) for name in objects]
    own_of_optimizer = outline.own() if optimizer is not None else []
    stored += [_own_key(number, name) for number, entries in enumerate(own_of_optimizer) for name in entries]
    loading = ModuleLoading(model)
    scheduler_state = outline.part("scheduler") if into.scheduler is not None else None

    def match() -> tuple[tuple[Targets, OptimizerTargets, list[MetaBuffer], _Announced], list[int]]:
        folder.use(outline.manifest)  # the first rank may have seen it replaced since this one has looked
        tie_(model)
        without_file = meta_buffers(model)
        buffers = [buffer for buffer in without_file if buffer.can_be_made]
        loading.check()
        of_model, of_optimizer = _match(outline, into, loading)
        check_schedulers(into.scheduler, scheduler_state)
        used = of_model.used | of_optimizer.used
        announced = _Announced(
            layout=layout_names(into.format.layout, model),
            missing=[*of_model.missing, *of_optimizer.missing],
            buffers=[buffer.name for buffer in buffers],
            unmade={buffer.name: buffer.text() for buffer in without_file if not buffer.can_be_made},
            mismatched=[*of_model.mismatched, *of_optimizer.mismatched],
            same=of_model.same,
            groups=candidates(of_optimizer.groups, outline.groups()),
            loads_itself=bool(loading) or loads_itself(optimizer) or bool(objects),
            fills_model=bool(of_model.pending),
            fills_optimizer=bool(of_optimizer.pending),
            sets_more=into.scheduler is not None,
        )
        return (of_model, of_optimizer, buffers, announced), [key in used for key in stored]

    (of_model, of_optimizer, buffers, mine), users = ranks.tell(match, len(stored))
    announced = [of_rank for _, of_rank in ranks.distinct(mine)]
    check_layout([of_rank.layout for of_rank in announced])
    report = replace(_report(outline, dict(zip(stored, users, strict=True)), announced), path=folder.url)
    unmade = {name: text for of_rank in announced for name, text in of_rank.unmade.items()}
    if into.strict:
        _check_strict(folder, report, unmade.values())
    report = replace(report, missing=(*report.missing, *unmade))
    matches = matching_groups([of_rank.groups for of_rank in announced], len(outline.groups()))
    same = {pair for of_rank in announced for pair in of_rank.same}
    if same:
        ranks.on_first(lambda: check_same(folder, outline, same))
    if into.verify == "full":
        ranks.agree(lambda: check_blocks(folder, outline, into.transfer.threads, _share_of(folder, ranks), wrong))
        ranks.on_first(lambda: check_beside(folder, outline))

    homes = folder.homes if isinstance(folder, KeptFolder) and not folder.is_everywhere(ranks.size) else None
    filling = Filling(
        session=session,
        near=folder.cached and homes is None and len(set(ranks.hosts())) == 1,
        homes=homes,
        folder=folder,
        outline=outline,
        device=device_for(into.device, model),
        verify=into.verify != "off",
        budget=parse_size(into.transfer.budget),
        threads=into.transfer.threads,
        progress=into.transfer.progress,
        wrong=wrong,
    )
    if any(of_rank.fills_model for of_rank in announced):
        fill_(of_model, filling)
    if report.recomputed:
        ranks.agree(lambda: make_buffers_(model, buffers, filling.device))
    has_own_code = any(of_rank.loads_itself for of_rank in announced)
    _run(partial(loading.run_, objects, strict=into.strict), ranks, together=has_own_code)
    if model is not None:  # holders of masters take the weights, before the optimizer's own, more exact ones are read
        written_(_tensors_of(model))
    if any(of_rank.fills_optimizer for of_rank in announced):
        fill_(of_optimizer, filling)
    if optimizer is not None:
        # Master weights and their parameters come from one checkpoint: nothing is left to bring from one to the other.
        parameters = set() if model is None else {id(each) for each in _tensors_of(model)}
        tensors = [each for group in optimizer.param_groups for each in group["params"]]
        written_([each for each in tensors if id(each) not in parameters])
        set_optimizer_(optimizer, outline.groups(), matches, of_optimizer.state, outline.slots())
        _run(partial(reload_, optimizer, own_of_optimizer), ranks, together=has_own_code)
    if any(of_rank.sets_more for of_rank in announced):  # by code of the caller's, which may fail on one rank alone
        ranks.agree(lambda: set_scheduler_(into.scheduler, scheduler_state))
    return report, outline.manifest is not None and into.verify != "off"


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

    if together:
        ranks.agree(run)
    else:
        act()


def _own_key(number: int, name: str) -> str:
    """Return the key of an entry in an optimizer's state dict other than state and param groups."""
    return key_of("optimizer", f"{name} (in the state dict of optimizer {number})")


def _match(outline: Outline, into: _Into, loading: ModuleLoading) -> tuple[Targets, OptimizerTargets]:
    """Match the tensors of this rank's model and optimizer with the files."""
    model, layout, names = into.model, into.format.layout or {}, into.format.names
    of_model, of_optimizer = Targets(), OptimizerTargets()
    if model is not None:
        of_model = model_targets(
            model,
            outline.places("model"),
            outline.tied,
            layout=layout,
            names=names,
            convert=into.format.convert,
            dtype=into.dtype,
        )
        if outline.manifest is not None:  # no other folder has extra state
            own, saved = set(model_state(model).objects), outline.objects().keys()
            of_model.missing.extend(sorted(own - saved))
            if isinstance(model, nn.Module):
                asked = {name for name in saved if (name in own if is_extra_state(name) else loading.takes(name))}
            else:  # a mapping may hold the tensors alone
                asked = {name for name in saved if name in own or is_extra_state(name)}
            of_model.used.update(key_of("model", name) for name in asked)
    if into.optimizer is not None:
        in_files = {} if model is None else rename(names, model_state(model).names)
        saved_optimizer = SavedOptimizer(
            places=outline.places("optimizer"),
            objects=outline.slots(),
            options={member: saved for members, saved in outline.groups() for member in members},
            resized=of_model.resized,
            ties=ties_of(model, names, outline.tied),
            device=device_for(into.device, model),
        )
        settle_(tensor for group in into.optimizer.param_groups for tensor in group["params"])
        of_optimizer = optimizer_targets(into.optimizer, Naming(model, in_files, layout), saved_optimizer)
        own_of_optimizer = outline.own()
        for number, taken in enumerate(takes_entries(into.optimizer, own_of_optimizer)):
            of_optimizer.used.update(_own_key(number, name) for name in (own_of_optimizer[number] if taken else ()))
    return of_model, of_optimizer


def _report(outline: Outline, users: Mapping[str, int], announced: Sequence[_Announced]) -> LoadReport:
    """Return the missing and unexpected names of all ranks.

    Args:
        outline: Content of the checkpoint.
        users: Number of ranks that use each part of the checkpoint, by key.
        announced: Announcements of all ranks, equal ones once.
    """
    return LoadReport(
        missing=tuple(dict.fromkeys(name for of_rank in announced for name in of_rank.missing)),
        unexpected=tuple(name_of(key) for key, count in users.items() if count == 0),
        mismatched=tuple(dict.fromkeys(text for of_rank in announced for text in of_rank.mismatched)),
        extra=outline.part("extra"),
        extra_of_ranks=outline.extra_of_ranks(),
        step=None if outline.manifest is None else outline.manifest.step,
        recomputed=tuple(dict.fromkeys(name for of_rank in announced for name in of_rank.buffers)),
    )


def _check_strict(folder: Folder, report: LoadReport, unmade: Iterable[str]) -> None:
    """Raise CheckpointError that lists everything that does not fit.

    Args:
        folder: The checkpoint's folder.
        report: Missing and unexpected names.
        unmade: Texts about buffers that have no values.
    """
    lines = [
        *report.mismatched,  # first, since a router of another size says why a thousand weights of experts are missing
        *(f"missing in the checkpoint: {name}" for name in report.missing),
        *(f"not wanted by anybody: {name}" for name in report.unexpected),
        *unmade,
    ]
    if lines:
        shown = "\n  ".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
        raise CheckpointError(
            f"{folder.url!r} does not fit; nothing was changed. Rename with `names`, cast with `dtype`, or pass "
            f"strict=False to load what fits:\n  {shown}"
        )
