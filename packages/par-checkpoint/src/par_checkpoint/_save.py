"""Saving: collect, plan, write, commit; in this order on all ranks, or, after the copy, in the background."""

import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from par_groups import Claims, merge_claims, parse_size

from ._agreement import Comparable, SameOptions, SaveSummary, kinds_of, place_of, united_content
from ._copy import copy_checkpoint
from ._finish import Noted, commit, index_from_above, indexes, needed_bytes, place_files, records_of, side_files
from ._handle import Save
from ._policies import Format, Path, Tiers, Transfer, check_policy, state_of, timeout_of, urls_of, whole_number
from ._progress import ProgressBar, check_progress
from ._torch_style import check_loadable, write_objects
from .format.crc import decode_crcs, encode_crcs
from .format.header import DATA_ALIGNMENT, safetensors_name
from .format.manifest import BLOCK
from .plan.claims import claims_of
from .plan.coverage import check_covered
from .plan.files import File, data_areas, lay_out
from .plan.plan import BlockPlanner, Prepared
from .state.beside import files_beside
from .state.collect import Content, collect
from .state.model import Model, check_layout
from .storage.folder import Folder, Staging, open_folder
from .storage.local import LocalFolder
from .storage.sharing import ALIGNMENT, Sharing
from .tiers.copies import copy_on
from .tiers.saving import PartFolder, PartStaging, SavedShards, check_copies, commit_parts, part_folder
from .transfer.exchange import claims_of_all, words_of
from .transfer.memory import LocalState
from .transfer.ranks import Ranks
from .transfer.sessions import Session, session_of
from .transfer.snapshot import Snapshot
from .transfer.workers import Workers
from .transfer.write import WriteContext, write_blocks

Value = TypeVar("Value")


def save(
    path: Path,
    *,
    model: Model | None = None,
    optimizer: Optimizer | None = None,
    scheduler: object = None,
    extra: object = None,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
    async_: bool = False,
    format: Format | None = None,  # noqa: A002
    transfer: Transfer | None = None,
    tiers: Tiers | None = None,
) -> Save:
    """Save full tensors to a folder that any number of ranks can load, however they shard the tensors. Collective.

    The folder appears in one step and complete, or not at all. With `overwrite` it replaces the earlier checkpoint in
    one step, too: a reader gets either all of the old checkpoint or all of the new one.

    Args:
        path: Folder of the checkpoint. A URL such as "s3://bucket/run/step-100" is opened with fsspec. With `tiers`,
            the checkpoint's name in each tier.
        model: Module (plain, wrapped, with FSDP2 or other DTensors, or with `Sharding` metadata), or a mapping of
            tensors.
        optimizer: Optimizer. It needs `model` for the names of its parameters, unless it was made from named
            parameters.
        scheduler: LR scheduler or list of LR schedulers; any object with `state_dict()`.
        extra: Numbers, strings, containers and tensors to store. If ranks pass different values, such as random states,
            a load on the same number of ranks returns each rank its own value.
        step: Number of training steps done, stored in the checkpoint.
        group: Ranks that take part. Together they hold the full model. Default: all ranks.
        overwrite: Whether to replace an existing checkpoint.
        async_: Whether to return as soon as the state of this rank is copied, and write in the background.
        format: Files to write, and how tensors map to them. Default: `Format()`, safetensors that `transformers` opens.
        transfer: Memory, threads, timeout and writers. Default: `Transfer()`.
        tiers: Storage tiers that each keep the checkpoint. Default: only `path`.

    Returns:
        A handle. Its `wait` returns when a background save is complete.

    Raises:
        ValueError, TypeError: An argument is not valid; on every rank, before anything is written.
        FileExistsError: The path exists, and `overwrite` is False; on every rank.
        ImportError: A package that an argument needs is not installed, such as tqdm or fsspec; on every rank.
        CheckpointError, OSError: Writing failed; on every rank. An earlier checkpoint at the path is unchanged.
    """
    begin = time.perf_counter()
    with session_of(group).calling(f"save({str(path)!r:.80})", timeout_of(transfer)) as session:
        ranks = session.ranks

        def look() -> tuple[_Planned, list[int]]:
            check_policy("format", format, Format)
            check_policy("transfer", transfer, Transfer)
            check_policy("tiers", tiers, Tiers)
            files, how = format or Format(), transfer or Transfer()
            copies = None if tiers is None else tiers.copies
            check_progress(how.progress)
            number = None if step is None else whole_number("step", step)
            given = state_of(files, model, optimizer, scheduler, extra)
            content = collect(given, dtype=files.dtype, stem=files.stem)
            for entry in content.entries:
                safetensors_name(entry.dtype, entry.name)  # raises if files cannot hold it
            if files.style == "torch":
                check_loadable(content)
            # Rank 0 writes these files for all, so no other rank needs to read them.
            if ranks.rank == 0:
                beside = files_beside(
                    model,
                    config=files.config,
                    assets=files.assets or (),
                    stem=files.stem,
                    style=files.style,
                    dtype=files.dtype,
                )
                content = replace(content, beside=beside)
            folders = [open_folder(each) for each in urls_of(path, tiers)]
            folder = folders[0]
            for each in folders:
                if isinstance(each, LocalFolder):
                    each.check_replaceable_here()
            if copies is not None:
                check_copies(copies, folder, files.style)
            if how.writer == "pwrite" and not folder.positional:
                raise ValueError(
                    f"writer is 'pwrite', but files at {folder.url!r} can only be written from beginning to end; use "
                    "'owner' or 'auto'"
                )
            planned = _Planned(
                format=files,
                transfer=how,
                step=number,
                content=content,
                folders=folders,
                claims=claims_of(content.entries),
                same=Comparable.of(content, files.layout, model),
                options=SameOptions(
                    {
                        "tiers": None if tiers is None else kinds_of([each.url for each in folders]),
                        "path": place_of(folder.url),
                        "copies": copies,
                        "style": files.style,
                        "overwrite": overwrite,
                        "async_": async_,
                        "pending": how.pending,
                        "writer": how.writer,
                        "stem": files.stem,
                        "dtype": files.dtype,
                        "step": number,
                        "max_shard_size": parse_size(files.max_shard_size),
                        "budget": parse_size(how.budget),
                    }
                ),
            )
            summary = SaveSummary(
                # The other ranks add zero, so all ranks receive the number of rank 0.
                nonce=[uuid.uuid4().int >> 80 if ranks.rank == 0 else 0],
                sharing=[int(folder.sharing == kind) for kind in Sharing],
                claims=words_of(planned.claims, ranks.rank),
                options=planned.options.words(),
                **planned.same.digests(),
            )
            return planned, summary.integers()

        # One message carries all that ranks must know of each other before they plan, and whether one of them failed.
        planned, integers = ranks.tell(look, SaveSummary.COUNT)
        sums = SaveSummary.from_integers(integers)
        planned.options.check(sums.options, ranks)
        files, how, content, same = planned.format, planned.transfer, planned.content, planned.same
        folder, *further = planned.folders
        # An earlier save in the background must have ended, because both would use the same memory and communicator.
        session.settle(how.pending)
        copies = None if tiers is None else tiers.copies
        # With copies, each host stores only its own part of the nearest tier, and neighbours keep a copy of it.
        if copies is not None and isinstance(folder, LocalFolder):
            folder = part_folder(folder, copies, ranks)
        nonce = f"{sums.nonce[0]:012x}"
        # Ranks may see one path on several file systems. The strictest of these kinds holds for all.
        sharing = max(kind for kind, count in zip(Sharing, sums.sharing, strict=True) if count)
        differs = same.differences(vars(sums), ranks.size)
        # Without a difference, the layout of one rank stands for all.
        layouts = ranks.distinct(same.layout) if "layout" in differs else [((0,), same.layout)]
        check_layout([names for _, names in layouts])
        prepared = _prepare(session, planned, sums.claims, folder, sharing)
        content = united_content(content, same, differs, ranks, prepared.tensors)

        if isinstance(folder, PartFolder):
            staging: Staging = folder.stage_part(nonce, prepared, copies=copies or 1, overwrite=overwrite)
        else:
            staging = folder.stage(nonce, by_owner=prepared.owners is not None)
        job = _Job(folder, staging, content, prepared, files, how, planned.step, overwrite)
        job.stage(ranks)
        # From here on, an error belongs to this save, so a handle exists that can report it.
        handle = Save(folder.url, session.timeout)
        if async_:
            snapshot = job.snapshot(session)
            later = partial(job.copy_and_write, session, session.background, snapshot, job.workers())
            session.begin(handle._write(later, copied=how.copy == "blocking"))
        else:
            with job.workers() as workers:
                job.write(ranks, None, workers)
        if further or isinstance(folder, PartFolder):
            handle._missing = tuple(each.url for each in further)
            copy_further = _copies(session.beside, [folder, *further], nonce, job, handle)
            session.copies(partial(handle._copy_on, copy_further))
        handle.blocked_seconds += time.perf_counter() - begin
        return handle


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """Content and target of a save on this rank, before the ranks have communicated.

    Args:
        format: Format of the files.
        transfer: Options for the transfer.
        step: Number of training steps done.
        content: Tensors and state of this rank.
        folders: Folder of the checkpoint in each tier.
        claims: Elements of tensors that this rank holds.
        same: State that is usually the same on every rank.
        options: Options that must be the same on every rank.
    """

    format: Format
    transfer: Transfer
    step: int | None
    content: Content
    folders: Sequence[Folder]
    claims: Claims
    same: Comparable
    options: SameOptions


def _copies(
    ranks: Ranks,
    folders: Sequence[Folder],
    nonce: str,
    job: "_Job",
    handle: Save,
) -> Callable[[], None]:
    """Return the function that copies a checkpoint from tier to tier, and records on the handle which tiers have it."""
    overwrite, threads = job.overwrite, job.transfer.threads

    def copy() -> None:
        if job.saved:
            next_tier = folders[1] if len(folders) > 1 else None
            if not copy_on(job.saved[0], next_tier, ranks, nonce, overwrite=overwrite, threads=threads):
                return  # a later save has taken its place, and is copied next
            # Tiers are filled in order, so the first one of the list is complete now.
            handle._missing = handle._missing[1:]
        for source, target in pairwise(folders[1:] if job.saved else folders):
            # The version is read once, so all ranks copy one checkpoint even if a later save replaces it in the
            # meantime.
            of = ranks.on_first(source.version)
            if not copy_checkpoint(source, target, ranks, nonce, overwrite=overwrite, threads=threads, of=of):
                return  # a later save has taken its place, and is copied next
            handle._missing = handle._missing[1:]

    return copy


def _prepare(session: Session, planned: _Planned, digest: Sequence[int], folder: Folder, sharing: Sharing) -> Prepared:
    """Plan the files of a save, or return the plan of an earlier save of the same tensors. Collective if it is new.

    Args:
        session: Ranks that save, with their plans.
        planned: Content of this rank.
        digest: Sum over all ranks of the digests of their claims.
        folder: Folder to save to.
        sharing: Ways in which several ranks may write one file of this folder.

    Raises:
        ValueError: Ranks disagree about a tensor, or no rank holds some of its elements; on every rank.
    """
    ranks, apart = session.ranks, isinstance(folder, PartFolder)
    limit, stem, writer = parse_size(planned.format.max_shard_size), planned.format.stem, planned.transfer.writer
    by_owner = writer == "owner" or (writer == "auto" and sharing is Sharing.FILES)
    if planned.format.style == "torch":  # one file for each object, from one rank
        limit, by_owner = sys.maxsize, True

    def make() -> Prepared:
        tensors = merge_claims(claims_of_all(ranks, planned.claims))
        check_covered(tensors)
        # Two hosts that write one page of a network file lose each other's bytes, unless tensors start on page
        # boundaries.
        is_shared = not apart and not by_owner and sharing is not Sharing.RANGES and len(set(ranks.hosts())) > 1
        alignment = ALIGNMENT[sharing] if is_shared else DATA_ALIGNMENT
        files = lay_out(tensors, limit, stem, None if by_owner else folder.block, alignment)
        owners = _owners(files, ranks.size) if by_owner else None
        planner = BlockPlanner(
            tensors,
            data_areas(files),
            ranks.rank,
            ranks.size,
            owners=owners,
            hosts=ranks.hosts(),
            alone=is_shared or not folder.cached,
            apart=apart,
        )
        writers = planner.writers() if apart else None
        return Prepared(tensors=tensors, files=files, plan=planner.save(), owners=owners, writers=writers)

    # The key has everything that the plan depends on. A later save of the same tensors then needs no planning.
    key = "save", tuple(digest), limit, by_owner, sharing, stem, folder.block(1), folder.cached, apart
    return session.planned(key, make)


def _owners(files: Sequence[File], size: int) -> list[int]:
    """Return the rank that writes each file: largest file first, to the rank with the fewest bytes so far."""
    load, owners = [0] * size, [0] * len(files)
    # Largest first: small files can then fill the differences between the ranks.
    for number in sorted(range(len(files)), key=lambda n: -files[n].size):
        owners[number] = load.index(min(load))
        load[owners[number]] += files[number].size
    return owners


@dataclass(frozen=True)
class _Job:
    """A save that is planned. After any error the staging folder is removed."""

    folder: Folder
    staging: Staging
    content: Content
    prepared: Prepared
    format: Format
    transfer: Transfer
    step: int | None
    overwrite: bool
    saved: list[SavedShards] = field(default_factory=list)
    """Where each host keeps its part: what was saved, once it is."""

    @cached_property
    def local(self) -> LocalState:
        """State that this rank holds."""
        return LocalState.of(self.content.entries, self.prepared.tensors)

    def workers(self) -> Workers:
        """Return the threads that write; a single thread if a stream is written in order."""
        most = max((file.block for file in self.prepared.files), default=BLOCK)
        in_flight = min(self.folder.in_flight, parse_size(self.transfer.budget) // (2 * most))  # each holds a block
        # A stream must be written in order, which one thread guarantees.
        count = max(self.transfer.threads, in_flight) if self.staging.positional else 1
        return Workers(count, "par-checkpoint-write")

    def stage(self, ranks: Ranks) -> None:
        """Make the staging folder on rank 0, unless the path is taken; all see it."""

        def make() -> object:
            self.folder.repair()
            self.folder.check_target(overwrite=self.overwrite)
            files = () if self.format.style == "torch" else self.prepared.files
            self.staging.create([file.name for file in files], needed_bytes(self.prepared, self.content))
            place_files(self.staging, files)
            return self.staging.invite()

        def make_and_see() -> None:
            invitation = ranks.on_first(make)
            ranks.agree(lambda: self.staging.attach(invitation))
            if isinstance(self.staging, PartStaging):
                ranks.agree(self.staging.check_local)

        self._or_discard(ranks, make_and_see)

    def snapshot(self, session: Session) -> Snapshot:
        """Return a copy of this rank's state, or the beginning of a copy that `copy_and_write` completes."""
        late, rank = self.transfer.copy == "background", session.ranks.rank
        make = partial(
            Snapshot,
            self.prepared.plan,
            self.local,
            rank,
            session.take_memory(),
            late=late,
            threads=self.transfer.threads,
        )
        return self._or_discard(session.ranks, lambda: session.ranks.agree(make))

    def copy_and_write(
        self, session: Session, ranks: Ranks, snapshot: Snapshot, workers: Workers, copied: threading.Event
    ) -> None:
        """Copy and write in the background.

        Args:
            session: Gets the memory of the copy back when it is written: until then no other save may use it.
            ranks: A communicator that the trainer does not use.
            snapshot: The copy.
            workers: The threads that write.
            copied: Is set when the copy is complete, or has failed.
        """

        def copy() -> None:
            try:
                snapshot.finish()
            finally:
                # The event is set before the ranks agree, so a thread that waits for this copy never waits for another
                # rank.
                copied.set()

        try:
            with workers:
                self._or_discard(ranks, lambda: ranks.agree(copy))
                self.write(ranks, snapshot, workers)
        finally:
            # The next save reuses this memory, and only after the last byte of it has been written.
            session.keep_memory(snapshot.memory)

    def write(self, ranks: Ranks, snapshot: Snapshot | None, workers: Workers) -> None:
        """Write this rank's blocks and commit.

        Args:
            ranks: The ranks that save, through a communicator that nothing else uses meanwhile.
            snapshot: The copy to write from; None: straight from the local tensors.
            workers: The threads that write.
        """
        prepared, content = self.prepared, self.content
        total = sum(file.size for file in prepared.files)
        with ProgressBar("save", total, ranks.rank, ranks.size, self.transfer.progress) as bar:
            work = WriteContext(
                files=prepared.files,
                local=self.local,
                ranks=ranks,
                staging=self.staging,
                budget=parse_size(self.transfer.budget),
                workers=workers,
                progress=bar.add,
            )

            def write_and_commit() -> None:
                noted = Noted(style=self.format.style, step=self.step, overwrite=self.overwrite)
                if self.format.style == "torch":
                    files = write_objects(prepared, work, content, snapshot)
                    ranks.on_first(lambda: commit(self.staging, content, files, side_files(content), noted))
                    return
                crcs, error = write_blocks(prepared.plan, work, snapshot)

                # All ranks must fail together: rank 0 would otherwise commit files with missing blocks.
                ranks.raise_first(error)
                of_ranks = ranks.to_first(encode_crcs(crcs))
                if self.staging.joins:
                    ranks.agree(lambda: self.staging.complete((ranks.rank, ranks.size)))
                stem, generation = self.format.stem, self.staging.generation

                def finish() -> None:
                    files = records_of(prepared.files, map(decode_crcs, of_ranks))
                    commit(
                        self.staging,
                        content,
                        files,
                        {**indexes(prepared, stem), **side_files(content)},
                        noted,
                        index_from_above(prepared, stem, generation),
                    )

                ranks.on_first(finish)
                if isinstance(self.staging, PartStaging):
                    self.saved.append(commit_parts(self.staging, ranks))

            self._or_discard(ranks, write_and_commit)
        self.staging.close()

    def _or_discard(self, ranks: Ranks, act: Callable[[], Value]) -> Value:
        """Call a function, and remove the staging folder if it fails."""
        try:
            return act()
        except BaseException:
            if ranks.rank == 0:
                # One rank removes the folder for all. The other ranks only give up their leases and open files.
                self.staging.discard()
            self.staging.close()
            raise
