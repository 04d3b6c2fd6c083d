"""Saving: collect, plan, write, commit; in this order on all ranks, or, after the copy, in the background."""

import sys
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from os import PathLike
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from par_groups import Sharding, parse_size

from ._copy import copy_checkpoint
from ._finish import Noted, commit, index_from_above, indexes, needed_bytes, place_files, records_of, side_files
from ._handle import Save
from ._options import (
    Alike,
    SaveOptions,
    check_options,
    check_style,
    kinds_of,
    place_of,
    takes_options,
    usable_timeout,
)
from ._progress import Bar
from ._torch_style import check_loadable, write_objects
from .format.crc import decode_crcs, encode_crcs
from .format.header import DATA_ALIGNMENT
from .format.manifest import BLOCK
from .plan.claims import Claims, check_covered, merge, section_of
from .plan.files import File, Prepared, data_areas, lay_out
from .plan.plan import Planner
from .state.beside import check_config, files_beside
from .state.collect import (
    Content,
    EncodedState,
    Samples,
    StateSummary,
    check_replicas,
    collect,
    extra_differs,
    extra_of,
    summary_of,
    united_state,
    united_ties,
    with_extra_of_ranks,
)
from .state.conversion import Convert
from .state.model import LayoutNames, Model, Names, check_layout, layout_names
from .storage.folder import Folder, Staging, in_tiers, open_folder
from .storage.local import LocalFolder
from .storage.sharing import ALIGNMENT, Sharing
from .tiers.copies import copy_on
from .tiers.saving import PartFolder, PartStaging, Saved, check_copies, commit_parts, part_folder
from .transfer.claims import claims_of_all, words_of
from .transfer.memory import Local
from .transfer.ranks import Ranks, words
from .transfer.sessions import Session, session_of
from .transfer.snapshot import Snapshot
from .transfer.workers import Workers
from .transfer.write import Work, write_blocks

Path = str | PathLike[str]
Value = TypeVar("Value")


@takes_options(SaveOptions)
def save(
    path: Path,
    *,
    model: Model | None = None,
    optimizer: Optimizer | None = None,
    scheduler: object = None,
    extra: object = None,
    style: str = "huggingface",
    group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
    max_shard_size: str | int = "5GB",
    async_: bool = False,
    copy: str = "blocking",
    pending: str = "wait",
    writer: str = "auto",
    layout: Mapping[str, Sharding] | None = None,
    names: Names | None = None,
    convert: Convert | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    assets: Sequence[str | PathLike[str]] | None = None,
    stem: str = "model",
    budget: str | int = "256MB",
    threads: int = 2,
    timeout: float = 1800.0,
    progress: bool | None = None,
    step: int | None = None,
    tiers: Sequence[Path] | None = None,
    copies: int | None = None,
    options: SaveOptions | None = None,
) -> Save:
    """Saves whole tensors, from however they are cut, into a folder that knows nothing of ranks. Collective.

    The folder appears at once and whole, or not at all. With `overwrite` it takes the place of the one before in the
    same way: whoever reads sees wholly the old or wholly the new.

    Args:
        path: The folder; a URL such as "s3://bucket/run/step-100" goes through fsspec.
        model: A module (wrapped or not, of FSDP2, DTensors, or with `Sharding` records), or a mapping of tensors.
        optimizer: An optimizer. It needs the model beside it for names, or to be made from named parameters.
        scheduler: An lr scheduler, or a list of them; anything with `state_dict()`.
        extra: Anything made of numbers, strings, containers and tensors. If it differs between ranks, as random states
            do, each rank gets its own again from a load on as many ranks.
        style: "huggingface": safetensors that `transformers` opens. "torch": one file for each of model, optimizer,
            scheduler and extra, which `torch.load` opens.
        group: The ranks that take part; between them they hold the whole model. Default: the world.
        overwrite: Whether to replace a checkpoint that is there.
        max_shard_size: Bytes of tensors in a file, such as "5GB" (decimal), "5GiB" or a number; a larger tensor gets a
            file of its own.
        async_: Whether to copy what this rank gives, return, and write in the background.
        copy: When a save with `async_` copies. "blocking": before `save` returns. "background": while the next forward
            and backward pass run; every torch optimizer waits for the copy before it steps. See `SaveOptions`.
        pending: What to do when an earlier save in the background is not done: "wait" for it, or "raise".
        writer: Which ranks write a file. "pwrite": several write their ranges of common files, on S3 their parts.
            "owner": one rank writes a file from beginning to end. "auto": "pwrite" on a local disk, on Lustre and GPFS,
            and on S3; "owner" on NFS, SMB, FUSE and what is not known, and on other stores.
        layout: By name of a tensor: how the local tensor is cut out of the global one, where no record says it.
        names: From a tensor's name in the model to its name in the files: a dict, pairs of (pattern, replacement), or a
            function.
        convert: From a tensor's name in the model and its global shape to the tensors on disk that make it up, or None
            where it is there as it is. Default: what transformers does to its own models.
        dtype: Floating-point tensors of the model are cast to this dtype on their way to the files; None: none are.
        config: What is written as config.json: a mapping, or an object with `to_dict`, such as a transformers config.
            None: what `save_pretrained` would write if `model` is one of transformers, else nothing.
        assets: Paths of further files, which are copied as they are, such as a tokenizer's; a folder stands for the
            files of its tokenizer and processor. Rank 0 reads them before anything is written.
        stem: What the names of the model's files begin with: "model", or "adapter_model" for the tensors of a peft
            adapter. See `SaveOptions`.
        budget: Bytes that a rank may hold beside its own state, such as "256MB". The copy of `async_` is extra.
        threads: Number of threads of a rank that checksum and write.
        timeout: Seconds to wait for a rank that does not answer.
        progress: Whether rank 0 shows a bar (needs tqdm); None: where stderr is a terminal.
        step: The training step, which is noted in the checkpoint.
        tiers: Folders or URLs, the nearest first, such as "/dev/shm/run", "/nvme/run", "s3://bucket/run": `path` is
            then the name of the checkpoint in each of them. The save is over when the first has it; the next ones are
            copied to in the background, each from the one before it, and each is whole by itself. Neither a step nor
            the next save waits for them.
        copies: Where the first tier is local to each host, as "/dev/shm" is: on how many hosts each host's part is kept
            there. 2: on its own, and, copied in the background, on the next one, so that `load` needs no other tier
            when a host is lost. None: all ranks see the first tier, like the others.
        options: An object with values for the keywords from `max_shard_size` to `step`; a keyword goes before it.

    Returns:
        A handle; with `async_=True` the save goes on in the background.

    Raises:
        ValueError, TypeError: What the caller gave, on every rank, before anything is written.
        FileExistsError: The path is there, and overwrite is False.
        CheckpointError, OSError: It could not be written; what was there before is still there. On every rank.
    """
    begin = time.perf_counter()
    with session_of(group).calling(f"save({str(path)!r:.80})", usable_timeout(timeout)) as session:
        ranks = session.ranks

        def look() -> tuple[tuple[SaveOptions, Content, list[Folder], Claims, _Compared, Alike], list[int]]:
            check_style(style)
            check_options(options, SaveOptions)
            check_config(config)
            chosen = SaveOptions(
                max_shard_size=max_shard_size,
                async_=async_,
                copy=copy,
                pending=pending,
                writer=writer,
                layout=layout,
                names=names,
                convert=convert,
                dtype=dtype,
                config=config,
                assets=assets,
                stem=stem,
                budget=budget,
                threads=threads,
                timeout=timeout,
                progress=progress,
                step=step,
            )
            content = collect(
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                extra=extra,
                layout=layout,
                names=names,
                convert=convert,
                dtype=dtype,
                stem=stem,
            )
            if style == "torch":
                check_loadable(content)
            if ranks.rank == 0:
                beside = files_beside(model, config=config, assets=assets or (), stem=stem, style=style, dtype=dtype)
                content = replace(content, beside=beside)
            claims = Claims.of(content.entries)
            folders = [open_folder(each) for each in in_tiers(path, tiers)]
            folder = folders[0]
            for each in folders:
                if isinstance(each, LocalFolder):
                    each.check_replaceable_here()
            if copies is not None:
                check_copies(copies, tiers, folder, style)
            if writer == "pwrite" and not folder.positional:
                raise ValueError(
                    f"writer is 'pwrite', but files at {folder.url!r} can only be written from beginning to end; use "
                    "'owner' or 'auto'"
                )
            compared = _Compared(
                layout=layout_names(layout, model),
                samples=content.samples,
                state=summary_of(content.state),
                tied=sorted(content.tied.items()),
            )
            kinds = kinds_of([each.url for each in folders])
            alike = Alike(
                {
                    "tiers": None if tiers is None else kinds,
                    "path": place_of(folders[0].url),
                    "copies": copies,
                    "style": style,
                    "overwrite": overwrite,
                    "async_": async_,
                    "pending": pending,
                    "writer": writer,
                    "stem": stem,
                    "dtype": dtype,
                    "step": chosen.step,
                    "max_shard_size": parse_size(max_shard_size),
                    "budget": parse_size(budget),
                }
            )
            nonce = uuid.uuid4().int >> 80 if ranks.rank == 0 else 0
            told = [
                nonce,
                *(folder.sharing == kind for kind in Sharing),
                *words_of(claims, ranks.rank),
                *compared.words(),
                *alike.words(),
            ]
            return (chosen, content, folders, claims, compared, alike), told

        (chosen, content, folders, claims, compared, alike), sums = ranks.tell(look, 1 + len(Sharing) + 6 * 8)
        alike.check(sums[-8:], ranks)
        folder, *further = folders
        session.settle(chosen.pending)
        if copies is not None and isinstance(folder, LocalFolder):
            folder = part_folder(folder, copies, ranks)
        nonce, digest_of_all = f"{sums[0]:012x}", tuple(sums[4:12])
        sharing = max(kind for kind, count in zip(Sharing, sums[1:4], strict=True) if count)
        layout_differs, samples_differ, state_differs, ties_differ = compared.differences(sums[12:-8], ranks.size)
        check_layout([names for _, names in ranks.distinct(compared.layout)] if layout_differs else [compared.layout])
        prepared = _prepare(session, claims, digest_of_all, chosen, folder, sharing=sharing, style=style)
        if samples_differ:
            check_replicas([(holders[0], samples) for holders, samples in ranks.distinct(compared.samples)])
        if state_differs:
            content = replace(content, state=_united(content.state, compared.state, ranks, prepared))
        if ties_differ:
            stored = {tensor.name for tensor in prepared.tensors if section_of(tensor.key) == "model"}
            content = replace(content, tied=united_ties(ranks.distinct(compared.tied), stored))

        if isinstance(folder, PartFolder):
            staging: Staging = folder.stage_part(nonce, prepared, copies=copies or 1, overwrite=overwrite)
        else:
            staging = folder.stage(nonce, by_owner=prepared.owners is not None)
        job = _Job(folder, staging, content, prepared, chosen, style, overwrite)
        job.stage(ranks)
        handle = Save(folder.url, session.timeout)
        if chosen.async_:
            snapshot = job.snapshot(session)
            session.begin(handle)
            later = partial(job.copy_and_write, session, session.background, snapshot, job.workers())
            handle._start(later, copied=chosen.copy == "blocking")
        else:
            with job.workers() as workers:
                job.write(ranks, None, workers)
        if further or isinstance(folder, PartFolder):
            handle._missing = tuple(each.url for each in further)
            copy_further = _copies(
                session.beside, [folder, *further], nonce, chosen, overwrite=overwrite, saved=job.saved, handle=handle
            )
            session.copies(handle, partial(handle._copy_on, copy_further))
        handle.blocked_seconds += time.perf_counter() - begin
        return handle


def _copies(
    ranks: Ranks,
    folders: Sequence[Folder],
    nonce: str,
    options: SaveOptions,
    *,
    overwrite: bool,
    saved: Sequence[Saved],
    handle: Save,
) -> Callable[[], None]:
    """What copies a checkpoint from each folder to the next, when the first has it, and notes on the handle who has."""

    def copy() -> None:
        if saved:
            next_tier = folders[1] if len(folders) > 1 else None
            if not copy_on(saved[0], next_tier, ranks, nonce, overwrite=overwrite, threads=options.threads):
                return  # a later save has taken its place, and is copied next
            handle._missing = handle._missing[1:]
        for source, target in pairwise(folders[1:] if saved else folders):
            of = ranks.on_first(source.version)
            if not copy_checkpoint(source, target, ranks, nonce, overwrite=overwrite, threads=options.threads, of=of):
                return  # a later save has taken its place, and is copied next
            handle._missing = handle._missing[1:]

    return copy


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """What is usually the same on every rank, so that ranks compare 32 bytes of it before they tell it each other.

    Args:
        layout: The names of `layout` that the rank lacks, and those that it has.
        samples: The beginnings of tensors without a record.
        state: What is no tensor of a file.
        tied: Pairs of a name that is not stored and the one that is.
    """

    layout: LayoutNames
    samples: Samples
    state: StateSummary
    tied: Sequence[tuple[str, str]]

    def words(self) -> list[int]:
        """Integers that stand for each of them."""
        compared = (self.layout, self.samples, self.state, self.tied)
        return [word for value in compared for word in words(repr(value).encode())]

    def differences(self, sums: Sequence[int], size: int) -> list[bool]:
        """Whether ranks differ in each of them.

        Args:
            sums: The sums of `words` over all ranks.
            size: The number of ranks.
        """
        same = [size * word == total for word, total in zip(self.words(), sums, strict=True)]
        return [not all(same[begin : begin + 8]) for begin in range(0, len(same), 8)]


def _united(state: EncodedState, summary: StateSummary, ranks: Ranks, prepared: Prepared) -> EncodedState:
    """The state of all ranks as one, where ranks have different ones. Collective.

    Args:
        state: This rank's state.
        summary: Its summary.
        ranks: The ranks that save.
        prepared: The tensors of all ranks.
    """
    summaries = [each for _, each in ranks.distinct(summary)]
    if extra_differs(summaries):
        extra = {rank: each for holders, each in ranks.distinct(extra_of(state)) for rank in holders}
        state = with_extra_of_ranks(state, [extra[rank] for rank in range(ranks.size)])
        summaries = [each for _, each in ranks.distinct(summary_of(state))]
    of_model = (tensor.name for tensor in prepared.tensors if section_of(tensor.key) == "model")
    return united_state(state, summaries, {name: place for place, name in enumerate(of_model)})


def _prepare(
    session: Session,
    claims: Claims,
    digest: Hashable,
    options: SaveOptions,
    folder: Folder,
    *,
    sharing: Sharing,
    style: str,
) -> Prepared:
    """The files and the plan of a save, made once for each layout. Collective when they are not known yet.

    Args:
        session: The ranks that save, and the plans that they know.
        claims: What this rank holds.
        digest: What stands for the claims of all ranks.
        options: How to save.
        folder: The folder to save to.
        sharing: How the ranks may write one file together, where they share it.
        style: The style of the files.

    Raises:
        ValueError: Ranks that disagree about a tensor, or elements that no rank holds; on every rank.
    """
    ranks, apart = session.ranks, isinstance(folder, PartFolder)
    limit, by_owner, stem = parse_size(options.max_shard_size), options.writer == "owner", options.stem
    if style == "torch":  # one file for each object, from one rank
        limit, by_owner = sys.maxsize, True
    elif options.writer == "auto":
        by_owner = sharing is Sharing.FILES

    def make() -> Prepared:
        tensors = merge(claims_of_all(ranks, claims))
        check_covered(tensors)
        is_shared = not apart and not by_owner and sharing is not Sharing.RANGES and len(set(ranks.hosts())) > 1
        alignment = ALIGNMENT[sharing] if is_shared else DATA_ALIGNMENT
        files = lay_out(tensors, limit, stem, None if by_owner else folder.block, alignment)
        owners = _owners(files, ranks.size) if by_owner else None
        planner = Planner(
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

    same = "save", digest, limit, by_owner, sharing, stem, folder.block(1), folder.cached, apart
    return session.planned(same, make)


def _owners(files: Sequence[File], size: int) -> list[int]:
    """For each file, the rank that writes it: largest file first, to the rank with the fewest bytes so far."""
    load, owners = [0] * size, [0] * len(files)
    for number in sorted(range(len(files)), key=lambda n: -files[n].size):
        owners[number] = load.index(min(load))
        load[owners[number]] += files[number].size
    return owners


@dataclass(frozen=True)
class _Job:
    """A save that is planned. Whatever fails in it, the staging folder goes."""

    folder: Folder
    staging: Staging
    content: Content
    prepared: Prepared
    options: SaveOptions
    style: str
    overwrite: bool
    saved: list[Saved] = field(default_factory=list)
    """Where each host keeps its part: what was saved, once it is."""

    @cached_property
    def local(self) -> Local:
        """What this rank holds."""
        return Local.of(self.content.entries, self.prepared.tensors)

    def workers(self) -> Workers:
        """The threads that write; one alone where a stream is written in order."""
        most = max((file.block for file in self.prepared.files), default=BLOCK)
        in_flight = min(self.folder.in_flight, parse_size(self.options.budget) // (2 * most))  # each holds a block
        count = max(self.options.threads, in_flight) if self.staging.positional else 1
        return Workers(count, "par-checkpoint-write")

    def stage(self, ranks: Ranks) -> None:
        """Makes the staging folder on rank 0, unless the path is taken; all see it."""

        def make() -> object:
            self.folder.repair()
            self.folder.check_target(overwrite=self.overwrite)
            files = () if self.style == "torch" else self.prepared.files
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
        """A copy of what this rank gives, or the beginning of one that `copy_and_write` completes."""
        late, rank = self.options.copy == "background", session.ranks.rank
        make = partial(
            Snapshot,
            self.prepared.plan,
            self.local,
            rank,
            session.take_memory(),
            late=late,
            threads=self.options.threads,
        )
        return self._or_discard(session.ranks, lambda: session.ranks.agree(make))

    def copy_and_write(
        self, session: Session, ranks: Ranks, snapshot: Snapshot, workers: Workers, copied: threading.Event
    ) -> None:
        """What goes on in the background.

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
                copied.set()  # before others are asked: whoever waits for this waits for this rank alone

        try:
            with workers:
                self._or_discard(ranks, lambda: ranks.agree(copy))
                self.write(ranks, snapshot, workers)
        finally:
            session.keep_memory(snapshot.memory)

    def write(self, ranks: Ranks, snapshot: Snapshot | None, workers: Workers) -> None:
        """Writes this rank's blocks and commits.

        Args:
            ranks: The ranks that save, through a communicator that nothing else uses meanwhile.
            snapshot: The copy to write from; None: straight from the local tensors.
            workers: The threads that write.
        """
        prepared, content = self.prepared, self.content
        total = sum(file.size for file in prepared.files)
        with Bar("save", total, ranks.rank, ranks.size, self.options.progress) as bar:
            work = Work(
                files=prepared.files,
                local=self.local,
                ranks=ranks,
                staging=self.staging,
                budget=parse_size(self.options.budget),
                workers=workers,
                progress=bar.add,
            )

            def write_and_commit() -> None:
                noted = Noted(style=self.style, step=self.options.step, overwrite=self.overwrite)
                if self.style == "torch":
                    files = write_objects(prepared, work, content, snapshot)
                    ranks.on_first(lambda: commit(self.staging, content, files, side_files(content), noted))
                    return
                crcs, error = write_blocks(prepared.plan, work, snapshot)

                ranks.raise_first(error)
                of_ranks = ranks.to_first(encode_crcs(crcs))
                if self.staging.joins:
                    ranks.agree(lambda: self.staging.complete((ranks.rank, ranks.size)))
                stem, generation = self.options.stem, self.staging.generation

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
        """Calls something; if it fails, the staging folder goes."""
        try:
            return act()
        except BaseException:
            if ranks.rank == 0:
                self.staging.discard()
            self.staging.close()
            raise
