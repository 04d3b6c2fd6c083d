"""Filling the matched tensors of a section: who holds what, which blocks hold it, and reading them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import increment_version

from .._errors import CheckpointError
from .._options import LoadOptions, parse_size
from .._progress import Bar
from ..format.bytes import copy_elements_
from ..format.crc import Crc
from ..format.manifest import BLOCK
from ..plan.claims import Claims, Held, digest, merge
from ..plan.entry import Entry, name_of, section_of, told_apart
from ..plan.files import File, blocks_of, tensor_blocks
from ..plan.plan import Block, Plan, Planner
from ..plan.prepare import all_claims
from ..state.targets import OptimizerTargets, Targets, set_scalars_
from ..storage.folder import Folder
from ..storage.outline import Outline, tensors_of
from .pieces import Local
from .ranks import Ranks, attempt
from .read import Reading, read_blocks, wrong_join


@dataclass(frozen=True, kw_only=True)
class Filling:
    """From where, with whom and how.

    Args:
        ranks: Who reads together.
        near: Whether they share a machine.
        folder: The checkpoint's.
        found: What it holds.
        options: The caller's.
    """

    ranks: Ranks
    near: bool
    folder: Folder
    found: Outline
    options: LoadOptions


def fill_(targets: Targets, filling: Filling) -> None:
    """Reads the tensors of a section; from here on they change. Collective.

    Raises:
        CheckpointError, OSError: Something cannot be read, or is corrupt; on every rank.
        RuntimeError: Another rank is gone.
    """
    ranks = filling.ranks
    made, tensors = _holders(targets, filling)
    increment_version([each.local for each in made])  # bytes go there unseen by autograd, and by a save that copies
    reading, plan = _planned(filling, made, tensors)
    with Bar("load", sum(file.size for file in reading.files), ranks, filling.options.progress) as bar:
        parts, error = read_blocks(plan, reading, bar.add)
    if error is None:
        _, error = attempt(partial(_copy_pickled, filling, made))

    def finish() -> tuple[None, list[Crc]]:
        if error is not None:
            raise _undefined(error)
        return None, parts

    _, every = ranks.share(finish)
    wrong = wrong_join([part for each in every for part in each], reading)
    if wrong is not None:
        raise _undefined(wrong)
    if isinstance(targets, OptimizerTargets):
        ranks.agree(partial(_set_scalars_, targets))


def _holders(targets: Targets, filling: Filling) -> tuple[list[Entry], list[Held]]:
    """This rank's tensors, now with memory, and who fills what of those that are read block by block."""

    def make() -> tuple[tuple[list[Entry], bytes], bytes]:
        made = [each.entry(torch.device(filling.options.device)) for each in targets.pending]
        claims = Claims.of(_in_blocks(made, filling.found)).encode()
        return (made, claims), digest(claims)

    (made, claims), digests = filling.ranks.share(make)
    return made, merge(all_claims(filling.ranks, claims, digests))


def _in_blocks(entries: Iterable[Entry], found: Outline) -> Iterator[Entry]:
    """Those that are read block by block: all but those in files that torch.load opens."""
    return told_apart(each for each in entries if section_of(each.key) not in found.pickled)


def _planned(filling: Filling, made: Iterable[Entry], tensors: Sequence[Held]) -> tuple[Reading, Plan]:
    files, blocks = _blocks(filling.found, tensors)
    reading = Reading(
        files=files,
        local=Local.of(_in_blocks(made, filling.found), tensors),
        ranks=filling.ranks,
        folder=filling.folder,
        crcs=_crcs(filling),
        budget=parse_size(filling.options.budget),
        threads=filling.options.threads,
    )
    return reading, Planner(tensors, filling.ranks.rank, filling.ranks.size).load(blocks, near=filling.near)


def _set_scalars_(targets: OptimizerTargets) -> None:
    wrong = list(set_scalars_(targets.scalars))
    if wrong:
        raise _undefined(CheckpointError("; ".join(wrong)))


def _undefined(error: BaseException) -> BaseException:
    """The error, saying what it leaves behind."""
    if not isinstance(error, CheckpointError):
        return error
    return type(error)(f"{error}. What was being loaded is now undefined: load another checkpoint before going on")


def _blocks(found: Outline, tensors: Sequence[Held]) -> tuple[list[File], list[Block]]:
    """The files to read, and their blocks: those that were checksummed, or, in files of others, tensor by tensor."""
    placed: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for number, held in enumerate(tensors):
        section = section_of(held.key)
        place = found.places(section)[name_of(held.key)]
        placed.setdefault((section, place.file), []).append((number, place.begin, place.end))
    files = [_file(found, section, name, each) for (section, name), each in placed.items()]
    cut = tensor_blocks if found.manifest is None else blocks_of
    return files, list(cut(files, tensors))


def _file(found: Outline, section: str, name: str, placed: Sequence[tuple[int, int, int]]) -> File:
    if found.manifest is None:  # nothing is compared that begins with the data
        begin, size, block = 0, max(end for _, _, end in placed), BLOCK
    else:
        record = found.manifest.files[name]
        begin, size, block = record.data_begin, record.size, record.block
    return File(
        name=name,
        section=section,
        header=b"",
        data_begin=begin,
        size=size,
        placed=tuple(sorted(placed, key=lambda each: each[1:])),
        block=block,
    )


def _crcs(filling: Filling) -> Mapping[str, Sequence[int]]:
    """By file name: the checksums of its blocks; of no file where none are to be compared."""
    manifest = filling.found.manifest
    if manifest is None or filling.options.verify == "off":
        return {}
    return {name: record.crcs for name, record in manifest.files.items()}


def _copy_pickled(filling: Filling, entries: Iterable[Entry]) -> None:
    """Copies from others' files that torch.load maps: every rank takes its boxes."""
    for section, names in filling.found.pickled.items():
        mine = [entry for entry in entries if section_of(entry.key) == section]
        tensors = tensors_of(filling.folder, names) if mine else {}
        for entry in mine:
            with torch.no_grad():
                for box in entry.sharding.boxes:
                    copy_elements_(box.of(entry.local), tensors[entry.name][box.slices])
