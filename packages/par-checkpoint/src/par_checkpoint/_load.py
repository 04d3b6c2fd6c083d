"""Loading: look, match, check, read; nothing is changed before everything that can be checked beforehand is."""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from par_groups import written_

from ._bytes import copy_elements_
from ._claims import Claims, Held, digest, merge
from ._collect import Model, check_layout
from ._entry import Entry, key_of, name_of, section_of, told_apart
from ._errors import CheckpointError
from ._files import BLOCK, File, blocks_of, tensor_blocks
from ._found import Found, look, tensors_of
from ._optimizer import Naming
from ._options import LoadOptions, timeout_of, with_keywords
from ._pieces import Local
from ._plan import Block, Planner
from ._prepare import all_claims
from ._progress import Bar
from ._ranks import Ranks, attempt
from ._read import Reading, read_blocks
from ._restore import Restore
from ._session import session_of
from ._shards import parse_size
from ._storage import Folder, open_folder
from ._targets import (
    OptimizerTargets,
    Slots,
    Targets,
    file_names,
    model_targets,
    optimizer_targets,
    set_scalars_,
)
from ._verify import check_blocks, check_file, check_same

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


def load(  # noqa: PLR0913 - what, where, with whom, how
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
    changes; every block of data is checked while it is read, unless `verify` says otherwise.

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
    """
    session = session_of(group, timeout_of(options, keywords))
    ranks = session.ranks
    session.settle("wait")
    chosen = ranks.agree(partial(with_keywords, options, LoadOptions, keywords))
    folder = ranks.agree(partial(open_folder, path))
    found = ranks.on_first(
        lambda: look(folder, model=model is not None, optimizer=optimizer is not None, variant=chosen.variant)
    )
    wanted = ranks.agree(lambda: _match(found, chosen, model=model, optimizer=optimizer, scheduler=scheduler))
    check_layout(ranks, chosen.layout, model)
    sections = [name for name, each in (("model", model), ("optimizer", optimizer)) if each is not None]
    report = _report(ranks, found, wanted, sections)
    if strict:
        _check_strict(folder, report)
    wanted.restore.match(ranks)
    same = ranks.gather(wanted.model.same)
    ranks.on_first(lambda: check_same(folder, found, {pair for each in same for pair in each}))
    if chosen.verify == "full":
        check_blocks(folder, found, ranks, chosen.threads)
    _fill(ranks, folder, found, wanted.model, chosen)
    if model is not None:  # holders of masters take the weights, before the optimizer's own, more exact ones are read
        written_(model.parameters() if isinstance(model, torch.nn.Module) else model.values())
    _fill(ranks, folder, found, wanted.optimizer, chosen)
    wanted.restore.apply_()
    return report


def _match(
    found: Found, options: LoadOptions, *, model: Model | None, optimizer: Optimizer | None, scheduler: object
) -> _Wanted:
    """What this rank fills, and with what."""
    wanted = _Wanted()
    named = None
    if model is not None:
        wanted.model = model_targets(model, found.places("model"), options, found.tied)
    if optimizer is not None:
        naming = Naming(model, {} if model is None else file_names(model, options.names), options.layout or {})
        slots = Slots(
            places=found.places("optimizer"),
            objects=found.slots(),
            parameters=found.parameters(),
            device=torch.device(options.device),
        )
        wanted.optimizer = optimizer_targets(optimizer, naming, slots)
        named = optimizer, naming
    wanted.restore = Restore.of(found, model=model, optimizer=named, scheduler=scheduler, targets=wanted.optimizer)
    return wanted


def _report(ranks: Ranks, found: Found, wanted: _Wanted, sections: Sequence[str]) -> Report:
    """What is missing or too much, of all ranks together."""
    mine = [*wanted.model.missing, *wanted.optimizer.missing], [*wanted.model.mismatched, *wanted.optimizer.mismatched]
    every = ranks.gather((*mine, wanted.model.used | wanted.optimizer.used))
    used = set().union(*(each for _, _, each in every))
    stored = [key_of(section, name) for section in sections for name in found.places(section)]
    return Report(
        missing=tuple(dict.fromkeys(name for each, _, _ in every for name in each)),
        unexpected=tuple(name_of(key) for key in stored if key not in used),
        mismatched=tuple(dict.fromkeys(text for _, each, _ in every for text in each)),
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


def _fill(ranks: Ranks, folder: Folder, found: Found, targets: Targets, options: LoadOptions) -> None:
    """Reads the tensors of a section; from here on they change."""
    device = torch.device(options.device)

    def entries() -> list[Entry]:
        return [each.entry(device) for each in targets.pending]

    made = ranks.agree(entries)
    stored = list(told_apart(each for each in made if section_of(each.key) not in found.pickled))
    tensors = _holders(ranks, stored)
    files, blocks = _blocks(found, tensors)
    near = len(set(ranks.gather(socket.gethostname()))) == 1
    plan = Planner(tensors, ranks.rank, ranks.size).load(blocks, near=near)
    with Bar("load", sum(file.size for file in files), ranks, options.progress) as bar:
        reading = Reading(
            files=files,
            local=Local.of(stored, tensors),
            ranks=ranks,
            folder=folder,
            crcs=_crcs(found) if options.verify != "off" else {},
            budget=parse_size(options.budget),
            threads=options.threads,
            progress=bar.add,
        )
        error = read_blocks(plan, reading)
    if error is None:
        _, error = attempt(partial(_copy_pickled, folder, found, made, verified=options.verify != "off"))
    if error is None and isinstance(targets, OptimizerTargets):
        wrong = list(set_scalars_(targets.scalars))
        error = CheckpointError("; ".join(wrong)) if wrong else None
    ranks.raise_first(_undefined(error))


def _undefined(error: BaseException | None) -> BaseException | None:
    """The error, saying what it leaves behind."""
    if not isinstance(error, CheckpointError):
        return error
    return type(error)(f"{error}. What was being loaded is now undefined: load another checkpoint before going on")


def _holders(ranks: Ranks, entries: Sequence[Entry]) -> list[Held]:
    """Who fills what, on all ranks."""
    mine = Claims.of(entries).encode()
    return merge(all_claims(ranks, mine, ranks.gather(digest(mine))))


def _blocks(found: Found, tensors: Sequence[Held]) -> tuple[list[File], list[Block]]:
    """The files to read, and their blocks: those that were checksummed, or, in files of others, tensor by tensor."""
    placed: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for number, held in enumerate(tensors):
        section = section_of(held.key)
        place = found.places(section)[name_of(held.key)]
        placed.setdefault((section, place.file), []).append((number, place.begin, place.end))
    files = [_file(found, section, name, each) for (section, name), each in placed.items()]
    cut = tensor_blocks if found.manifest is None else blocks_of
    return files, list(cut(files, tensors))


def _file(found: Found, section: str, name: str, placed: Sequence[tuple[int, int, int]]) -> File:
    header = found.directories[section].headers[name]
    record = None if found.manifest is None else found.manifest.files[name]
    return File(
        name=name,
        section=section,
        header=b"",
        data_begin=header.data_begin,
        size=header.data_begin + header.data_size,
        placed=tuple(sorted(placed, key=lambda each: each[1:])),
        block=BLOCK if record is None else record.block,
    )


def _crcs(found: Found) -> dict[str, Sequence[int]]:
    return {} if found.manifest is None else {name: record.crcs for name, record in found.manifest.files.items()}


def _copy_pickled(folder: Folder, found: Found, entries: Iterable[Entry], *, verified: bool) -> None:
    """Copies from files that torch.load maps: every rank takes its boxes."""
    for section, names in found.pickled.items():
        mine = [entry for entry in entries if section_of(entry.key) == section]
        if not mine:
            continue
        if verified and found.manifest is not None:
            for name in names:
                check_file(folder, name, found.manifest.files[name])
        tensors = tensors_of(folder, section, names)
        for entry in mine:
            with torch.no_grad():
                for box in entry.sharding.boxes:
                    copy_elements_(box.of(entry.local), tensors[entry.name][box.slices])
