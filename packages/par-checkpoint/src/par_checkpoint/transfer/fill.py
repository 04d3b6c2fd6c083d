"""Filling the tensors that a load has matched: their holders, their blocks, and the reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.autograd.graph import increment_version

from par_groups import Claims, GlobalTensor, merge_claims

from .._errors import UNDEFINED, CheckpointError
from .._progress import ProgressBar
from ..format.bytes import copy_elements_
from ..format.crc import decode_crcs, encode_crcs
from ..format.manifest import BLOCK
from ..plan.claims import LocalTensor, claims_of, name_of, section_of, with_unique_keys
from ..plan.files import File, data_areas, tensor_areas
from ..plan.homes import Homes
from ..plan.plan import BlockPlanner
from ..plan.tasks import RankPlan
from ..state.targets import OptimizerTargets, Targets, set_scalars_
from ..storage.folder import Folder
from ..storage.outline import Outline, tensors_of
from .errors import attempt
from .exchange import claims_of_all, words_of
from .memory import LocalState
from .read import BlockReader, read_blocks, window_of, wrong_join
from .sessions import Session


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Sources, ranks and options for filling tensors.

    Args:
        session: Ranks that read together, with their plans.
        near: Whether the ranks share a machine, and so the page cache of what any of them has read.
        homes: Ranks that can read each block; None: every rank can read all blocks.
        folder: Folder of the checkpoint.
        outline: Content of the checkpoint.
        device: Device for tensors that are on the meta device.
        verify: Whether blocks are compared with their checksums.
        budget: Memory in addition to the state, in bytes.
        threads: Number of threads that read.
        progress: Whether rank 0 shows a bar; None: only if stderr is a terminal.
        wrong: List that receives the file and number of each corrupt block that this rank finds.
    """

    session: Session
    near: bool
    homes: Homes | None
    folder: Folder
    outline: Outline
    device: torch.device
    verify: bool
    budget: int
    threads: int
    progress: bool | None
    wrong: list[tuple[str, int]]


def fill_(targets: Targets, filling: Filling) -> None:
    """Read the tensors of the model or of the optimizer; from here on they change. Collective.

    Raises:
        CheckpointError, OSError: Something cannot be read, or is corrupt; on every rank.
        RuntimeError: Another rank is gone.
    """
    ranks, outline = filling.session.ranks, filling.outline

    def claim() -> tuple[tuple[list[LocalTensor], list[LocalTensor], Claims], list[int]]:
        made = [target.entry(filling.device) for target in targets.pending]
        # torch.load maps the other files as a whole, so no plan has their blocks.
        in_blocks = list(with_unique_keys(entry for entry in made if section_of(entry.key) not in outline.pickled))
        claims = claims_of(in_blocks)
        return (made, in_blocks, claims), words_of(claims, ranks.rank)

    # Equal sums of digests mean that all ranks claim what they claimed in an earlier load, so the plan can be reused.
    (made, in_blocks, claims), digest_of_all = ranks.tell(claim, 8)
    increment_version([entry.local for entry in made])  # bytes go there unseen by autograd, and by a save that copies
    at_once, homes = 0 if filling.folder.cached else filling.folder.in_flight, filling.homes

    def make() -> tuple[list[GlobalTensor], list[File], RankPlan, int]:
        tensors = merge_claims(claims_of_all(ranks, claims))
        files = _files(outline, tensors)
        areas = (tensor_areas if outline.manifest is None else data_areas)(files)
        block = max((file.block for file in files), default=BLOCK)
        total = sum(file.size for file in files)
        window = window_of(total, filling.budget, block, ranks.size, at_once) if at_once else 0
        planner = BlockPlanner(
            tensors,
            areas,
            ranks.rank,
            ranks.size,
            hosts=ranks.hosts(),
            window=window // block,
            homes=homes,
            names=[file.name for file in files],
        )
        return tensors, files, planner.load(near=filling.near), window

    kept = None if homes is None else homes.digest()
    # Everything that the plan depends on is in its key; all ranks compute the same key and so decide identically.
    same = "load", tuple(digest_of_all), outline.digest(), filling.near, at_once and (at_once, filling.budget), kept
    tensors, files, plan, window = filling.session.planned(same, make)
    records = {} if outline.manifest is None or not filling.verify else outline.manifest.files
    reading = BlockReader(
        files=files,
        local=LocalState.of(in_blocks, tensors),
        ranks=ranks,
        folder=filling.folder,
        crcs={name: record.crcs for name, record in records.items()},
        budget=filling.budget,
        threads=max(filling.threads, filling.folder.in_flight),
        window=window,
        wrong=filling.wrong,
    )
    total = sum(file.size for file in files)
    with ProgressBar("load", total, ranks.rank, ranks.size, filling.progress) as bar:
        parts, error = read_blocks(plan, reading, bar.add)
    if error is None:
        _, error = attempt(lambda: _copy_pickled(filling, made))

    def finish() -> tuple[None, list[int]]:
        if error is not None:
            raise _undefined(error)
        return None, [len(parts)]

    # Here all ranks learn whether one has failed, before any of them goes on.
    _, (count,) = ranks.tell(finish, 1)
    # Some blocks were read in parts by several ranks, so only rank 0 can compare their joined checksums.
    if count:
        of_ranks = ranks.to_first(encode_crcs(parts))

        def check_joined() -> None:
            rows = chain.from_iterable(decode_crcs(data).tolist() for data in of_ranks)
            wrong = wrong_join(((file, begin, size, crc) for file, begin, size, crc in rows), reading)
            if wrong is not None:
                raise _undefined(wrong)

        ranks.on_first(check_joined)
    if isinstance(targets, OptimizerTargets):
        scalars = targets.scalars

        def set_() -> None:
            differing = list(set_scalars_(scalars))
            if differing:
                raise _undefined(CheckpointError("; ".join(differing)))

        ranks.agree(set_)


def _undefined(error: BaseException) -> BaseException:
    """Return the error with the note that some tensors may be filled and others not."""
    if isinstance(error, CheckpointError):
        return type(error)(f"{error}{UNDEFINED}")
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"{error.strerror}{UNDEFINED}", error.filename)
    return error


def _files(outline: Outline, tensors: Sequence[GlobalTensor]) -> list[File]:
    """Return the files that hold the tensors."""
    placed: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        section = section_of(tensor.key)
        place = outline.places(section)[name_of(tensor.key)]
        placed.setdefault((section, place.file), []).append((number, place.begin, place.end))
    files = []
    for (section, name), inside in placed.items():
        record = None if outline.manifest is None else outline.manifest.files.get(name)
        if record is None:  # another program wrote it: nothing is compared that begins with the data
            begin, size, block = 0, max(end for _, _, end in inside), BLOCK
        else:
            begin, size, block = record.data_begin, record.size, record.block
        in_order = tuple(sorted(inside, key=lambda tensor: tensor[1:]))
        files.append(
            File(name=name, section=section, packed=b"", data_begin=begin, size=size, placed=in_order, block=block)
        )
    return files


def _copy_pickled(filling: Filling, entries: Iterable[LocalTensor]) -> None:
    """Copy from files of other writers that torch.load maps: every rank takes its boxes."""
    for section, names in filling.outline.pickled.items():
        mine = [entry for entry in entries if section_of(entry.key) == section]
        tensors = tensors_of(filling.folder, names) if mine else {}
        for entry in mine:
            with torch.no_grad():
                for box in entry.sharding.boxes:
                    copy_elements_(box.of(entry.local), tensors[entry.name][box.slices])
