"""Loading: a folder is found in the tiers, read as one checkpoint, and its state set."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from par_groups import parse_size

from ._agreement import SameOptions, kinds_of, place_of
from ._apply import Into, StateReport, apply_
from ._errors import UNDEFINED, CorruptError, ReplacedError
from ._policies import Format, Path, Tiers, Transfer, check_one_of, check_policy, state_of, timeout_of, urls_of
from ._progress import check_progress
from .state.model import Model, device_for
from .state.targets import Targets
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
class LoadReport(StateReport):
    """Outcome of a load.

    Args:
        step: Value of `step` in `save`.
        path: Folder that was read; with several tiers, the folder in the nearest one.
    """

    step: int | None = None
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

        # Everything that may fail on one rank only happens in here, so that `tell` raises on all ranks.
        def opened() -> tuple[tuple[_LoadPlan, list[Folder], SameOptions], list[int]]:
            check_policy("format", format, Format)
            check_policy("transfer", transfer, Transfer)
            check_policy("tiers", tiers, Tiers)
            check_one_of("verify", verify, ("auto", "full", "off"))
            check_progress((transfer or Transfer()).progress)
            files = format or Format()
            given = state_of(files, model, optimizer, scheduler)
            plan = _LoadPlan(
                into=Into(state=given, strict=strict, device=device, dtype=dtype),
                verify=verify,
                variant=files.variant,
                stem=files.stem,
                transfer=transfer or Transfer(),
            )
            folders = [open_folder(each) for each in urls_of(path, tiers)]
            same = SameOptions(
                {
                    "tiers": None if tiers is None else kinds_of([each.url for each in folders]),
                    "path": place_of(folders[0].url),
                    "strict": strict,
                    "verify": verify,
                    "variant": plan.variant,
                    "stem": plan.stem,
                    "budget": parse_size(plan.transfer.budget),
                }
            )
            return (plan, folders, same), same.words()

        (plan, folders, same), sums = ranks.tell(opened, 8)
        same.check(sums, ranks)
        if tiers is None:
            report, folder = _load_sound(plan, folders[0], session), folders[0]
        else:
            report, folder = _load_nearest(plan, folders, session)
        of_ranks = report.extra_of_ranks
        # No rule maps the extra state of the old ranks to the new ranks, so the caller has to decide.
        if of_ranks is not None and len(of_ranks) != ranks.size:
            warnings.warn(
                f"extra differed between the {len(of_ranks)} ranks that saved {folder.url!r}, and {ranks.size} "
                f"load it: report.extra is that of rank {ranks.rank % len(of_ranks)} here, report.extra_of_ranks has "
                "all",
                stacklevel=3,
            )
        return report


@dataclass(frozen=True, kw_only=True)
class _LoadPlan:
    """The objects that a load fills, the files that it looks for, and how bytes travel from them."""

    into: Into
    verify: str
    variant: str | None
    stem: str
    transfer: Transfer


def _load_nearest(plan: _LoadPlan, folders: Sequence[Folder], session: Session) -> tuple[LoadReport, Folder]:
    """Load from the nearest tier with a complete checkpoint; if it cannot be read, load from the next tier.

    Rank 0 warns about each tier that was skipped.

    Args:
        plan: Objects to fill, and how.
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
            return _load_sound(plan, folder, session), folder
        except ReplacedError:  # of all ranks, like the errors below: what took its place, or is left, is read in full
            # A checkpoint may be replaced while it is read, but a load that is overtaken every time should end.
            if looks == _LOOKS:
                raise
            looks, notes = looks + 1, ()
        except (CorruptError, OSError) as error:
            if not found.further:
                raise
            # The next tier may have the same checkpoint undamaged.
            further, failed, notes = found.further, error, (str(error).replace(UNDEFINED, ""),)


def _load_sound(plan: _LoadPlan, folder: Folder, session: Session) -> LoadReport:
    """Load from a folder. Corrupt blocks of hosts' parts are read from their copies.

    Args:
        plan: Objects to fill, and how.
        folder: Folder of the checkpoint.
        session: Ranks that load.
    """
    ranks = session.ranks

    def version() -> str | None:
        if isinstance(folder, KeptFolder):
            ranks.agree(folder.check_there)
        return ranks.on_first(lambda: version_of(folder))

    while True:
        # The load fills this with the corrupt blocks that this rank finds; they are then read from a copy.
        wrong: list[tuple[str, int]] = []
        try:
            return retry_while_replaced(
                version,
                partial(_load, plan, folder, session, wrong),
                version(),
                folder.url,
                checked=lambda outcome: outcome[1],
                settles=lambda: ranks.on_first(lambda: folder.settles),
            )[0]
        except CorruptError as error:
            if not isinstance(folder, KeptFolder):
                raise
            # Copies of a host's part exist on other hosts, so only the corrupt blocks are read from there.
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
    # Number -1 is the header. Blocks are dealt round-robin, so each file is checked by all ranks.
    return lambda _, number: (number + 1) % ranks.size == ranks.rank


@dataclass(kw_only=True)
class _FolderSource:
    """The folder of a checkpoint as the source of a load; see `Source`.

    Args:
        plan: Objects to fill, and how.
        folder: The folder.
        outline: Its content, as the first rank has read it.
        session: Ranks that load.
        wrong: List that receives the file and number of each corrupt block that this rank finds.
    """

    plan: _LoadPlan
    folder: Folder
    outline: Outline
    session: Session
    wrong: list[tuple[str, int]]
    kind: str = "checkpoint"

    @property
    def title(self) -> str:
        """The folder, quoted."""
        return repr(self.folder.url)

    def prepare(self) -> None:
        """Use the outline on this rank, too: the first rank may have seen a replaced folder since this one looked."""
        self.folder.use(self.outline.manifest)

    def check(self, targets: Sequence[Targets], same: set[tuple[str, str]]) -> None:  # noqa: ARG002
        """Compare tensors that a model ties, and with `verify="full"` all files with their checksums."""
        folder, outline, ranks = self.folder, self.outline, self.session.ranks
        if same:
            ranks.on_first(lambda: check_same(folder, outline, same))
        if self.plan.verify == "full":
            threads = self.plan.transfer.threads
            ranks.agree(lambda: check_blocks(folder, outline, threads, _share_of(folder, ranks), self.wrong))
            ranks.on_first(lambda: check_beside(folder, outline))

    def fill_(self, targets: Targets) -> None:
        """Read the tensors from the files."""
        fill_(targets, self._filling)

    @cached_property
    def _filling(self) -> Filling:
        """How tensors are read. The first use is collective."""
        folder, ranks, transfer = self.folder, self.session.ranks, self.plan.transfer
        homes = folder.homes if isinstance(folder, KeptFolder) and not folder.is_everywhere(ranks.size) else None
        return Filling(
            session=self.session,
            # On one host with a page cache, every rank reads what it needs: an exchange would copy the same bytes once
            # more.
            near=folder.cached and homes is None and len(set(ranks.hosts())) == 1,
            homes=homes,
            folder=folder,
            outline=self.outline,
            device=device_for(self.plan.into.device, self.plan.into.state.model),
            verify=self.plan.verify != "off",
            budget=parse_size(transfer.budget),
            threads=transfer.threads,
            progress=transfer.progress,
            wrong=self.wrong,
        )


def _load(plan: _LoadPlan, folder: Folder, session: Session, wrong: list[tuple[str, int]]) -> tuple[LoadReport, bool]:
    """Load the current content of a folder; return the report, and whether all data was compared with checksums.

    Args:
        plan: Objects to fill, and how.
        folder: Folder of the checkpoint.
        session: Ranks that load.
        wrong: List that receives the file and number of each corrupt block that this rank finds.
    """
    state, ranks = plan.into.state, session.ranks
    outline = ranks.on_first(
        lambda: read_outline(
            folder,
            model=state.model is not None,
            optimizer=state.optimizer is not None,
            variant=plan.variant,
            stem=plan.stem,
        )
    )
    source = _FolderSource(plan=plan, folder=folder, outline=outline, session=session, wrong=wrong)
    report = apply_(plan.into, source, ranks)
    step = None if outline.manifest is None else outline.manifest.step
    return LoadReport(**vars(report), step=step, path=folder.url), outline.manifest is not None and plan.verify != "off"
