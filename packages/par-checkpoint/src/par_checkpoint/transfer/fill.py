"""Filling what a load has matched: who holds what, which blocks have it, and reading them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from .._errors import CheckpointError
from .._progress import Bar
from ..format.bytes import copy_elements_
from ..format.crc import Crc
from ..format.manifest import BLOCK
from ..plan.claims import Claims, Entry, GlobalTensor, digest, merge, section_of, with_unique_keys
from ..plan.files import File, data_blocks, tensor_blocks
from ..plan.plan import Planner
from ..state.targets import OptimizerTargets, Targets, set_scalars_
from ..storage.folder import Folder
from ..storage.outline import Outline, tensors_of
from .memory import Local
from .ranks import Ranks, attempt
from .read import Reading, read_blocks, window_of, wrong_join


@dataclass(frozen=True, kw_only=True)
class Filling:
    """From where, with whom and how to fill.

    Args:
        ranks: The ranks that read together.
        near: Whether they share a machine, and what any of them has read of the files.
        folder: The checkpoint's folder.
        outline: What it holds.
        device: The device on which tensors of the meta device are made.
        verify: Whether blocks are compared with their checksums.
        budget: Bytes that may be held beside the state.
        threads: Number of threads that read.
        progress: Whether rank 0 shows a bar; None: where stderr is a terminal.
    """

    ranks: Ranks
    near: bool
    folder: Folder
    outline: Outline
    device: torch.device
    verify: bool
    budget: int
    threads: int
    progress: bool | None


def fill_(targets: Targets, filling: Filling) -> None:
    """Reads the tensors of the model or of the optimizer; from here on they change. Collective.

    Raises:
        CheckpointError, OSError: Something cannot be read, or is corrupt; on every rank.
        RuntimeError: Another rank is gone.
    """
    ranks, outline = filling.ranks, filling.outline

    def claim() -> tuple[tuple[list[Entry], list[Entry], bytes], bytes]:
        made = [target.entry(filling.device) for target in targets.pending]
        in_blocks = list(with_unique_keys(entry for entry in made if section_of(entry.key) not in outline.pickled))
        claims = Claims.of(in_blocks).encode()
        return (made, in_blocks, claims), digest(claims)

    (made, in_blocks, claims), digests = ranks.share(claim)
    tensors = merge([(holders, Claims.decode(data)) for holders, data in ranks.gather_distinct(claims, digests)])
    increment_version([entry.local for entry in made])  # bytes go there unseen by autograd, and by a save that copies
    files = _files(outline, tensors)
    blocks = (tensor_blocks if outline.manifest is None else data_blocks)(files, tensors)
    total, block = sum(file.size for file in files), max((file.block for file in files), default=BLOCK)
    window = 0 if filling.folder.cached else window_of(total, filling.budget, block, ranks.size)
    plan = Planner(tensors, ranks.rank, ranks.size, window=window).load(blocks, near=filling.near)
    records = {} if outline.manifest is None or not filling.verify else outline.manifest.files
    reading = Reading(
        files=files,
        local=Local.of(in_blocks, tensors),
        ranks=ranks,
        folder=filling.folder,
        crcs={name: record.crcs for name, record in records.items()},
        budget=filling.budget,
        threads=max(filling.threads, filling.folder.in_flight),
        window=window,
    )
    with Bar("load", total, ranks.rank, ranks.size, filling.progress) as bar:
        parts, error = read_blocks(plan, reading, bar.add)
    if error is None:
        _, error = attempt(lambda: _copy_pickled(filling, made))

    def finish() -> tuple[None, list[Crc]]:
        if error is not None:
            raise _undefined(error)
        return None, parts

    _, of_ranks = ranks.share(finish)
    wrong = wrong_join([part for of_rank in of_ranks for part in of_rank], reading)
    if wrong is not None:
        raise _undefined(wrong)
    if isinstance(targets, OptimizerTargets):
        scalars = targets.scalars

        def set_() -> None:
            differing = list(set_scalars_(scalars))
            if differing:
                raise _undefined(CheckpointError("; ".join(differing)))

        ranks.agree(set_)


def _undefined(error: BaseException) -> BaseException:
    """The error, saying what it leaves behind."""
    if not isinstance(error, CheckpointError):
        return error
    return type(error)(f"{error}. What was being loaded is now undefined: load another checkpoint before going on")


def _files(outline: Outline, tensors: Sequence[GlobalTensor]) -> list[File]:
    """The files that hold the tensors."""
    placed: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        section = section_of(tensor.key)
        place = outline.places(section)[tensor.name]
        placed.setdefault((section, place.file), []).append((number, place.begin, place.end))
    files = []
    for (section, name), inside in placed.items():
        if outline.manifest is None:  # nothing is compared that begins with the data
            begin, size, block = 0, max(end for _, _, end in inside), BLOCK
        else:
            record = outline.manifest.files[name]
            begin, size, block = record.data_begin, record.size, record.block
        in_order = tuple(sorted(inside, key=lambda tensor: tensor[1:]))
        files.append(
            File(name=name, section=section, header=b"", data_begin=begin, size=size, placed=in_order, block=block)
        )
    return files


def _copy_pickled(filling: Filling, entries: Iterable[Entry]) -> None:
    """Copies from files of other writers that torch.load maps: every rank takes its boxes."""
    for section, names in filling.outline.pickled.items():
        mine = [entry for entry in entries if section_of(entry.key) == section]
        tensors = tensors_of(filling.folder, names) if mine else {}
        for entry in mine:
            with torch.no_grad():
                for box in entry.sharding.boxes:
                    copy_elements_(box.of(entry.local), tensors[entry.name][box.slices])
