"""Saving: collect, plan, write, commit; in this order on all ranks, or, after the copy, in the background."""

import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from ._finish import Noted, commit, indexes, needed_bytes, place_files, records_of, side_files
from ._handle import Save
from ._options import SaveOptions, check_style, parse_size, timeout_of, with_keywords
from ._progress import Bar
from ._session import Session, session_of
from ._torch_style import write_objects
from .format.crc import Crc
from .plan.claims import Claims, digest
from .plan.prepare import Prepared, check_replicas, prepare_save
from .state.collect import Content, LayoutNames, Model, check_layout, collect, layout_names
from .state.state import agreed_state, state_digest
from .storage.folder import Folder, Staging, open_folder
from .transfer.pieces import Local
from .transfer.ranks import Ranks
from .transfer.snapshot import Snapshot
from .transfer.workers import Workers
from .transfer.write import Work, write_blocks

Path = str | PathLike[str]
Value = TypeVar("Value")


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
    options: SaveOptions | None = None,
    **keywords: Any,
) -> Save:
    """Saves whole tensors, from however they are cut, into a folder that knows nothing of ranks. Collective.

    The folder appears at once and whole, or not at all. With `overwrite` it takes the place of the one before in the
    same way: whoever reads sees wholly the old or wholly the new.

    Args:
        path: The folder; a URL such as "s3://bucket/run/step-100" goes through fsspec.
        model: A module (wrapped or not, of FSDP2, DTensors, or with `Sharding` records), or a mapping of tensors.
        optimizer: Needs the model beside it for names, or to be made from named parameters.
        scheduler: An lr scheduler, or a list of them; anything with `state_dict()`.
        extra: Anything made of numbers, strings, containers and tensors; the same on every rank.
        style: "huggingface": safetensors that `transformers` opens. "torch": one `torch.load`-able file an object.
        group: The ranks that take part; between them they hold the whole model. Default: the world.
        overwrite: Whether to replace a checkpoint that is there.
        options: How; see `SaveOptions`.
        keywords: Fields of `SaveOptions`, which go before those of `options`.

    Returns:
        A handle; with `async_=True` the save goes on in the background.

    Raises:
        ValueError, TypeError: What the caller gave, on every rank, before anything is written.
        FileExistsError: The path is there, and overwrite is False.
        CheckpointError, OSError: It could not be written; what was there before is still there. On every rank.
    """
    begin = time.perf_counter()
    session = session_of(group, timeout_of(options, keywords))
    ranks = session.ranks

    def look() -> tuple[tuple[SaveOptions, Content, Folder, bytes], _Word]:
        check_style(style)
        chosen = with_keywords(options, SaveOptions, keywords)
        content = collect(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, options=chosen)
        claims = Claims.of(content.entries).encode()
        return (chosen, content, _open(path, chosen.writer), claims), _word(chosen, content, claims, model)

    (chosen, content, folder, claims), every = ranks.share(look)
    session.settle(chosen.pending)
    check_layout([each.layout for each in every])
    limit, by_owner = _limits(chosen, folder, style)
    prepared = prepare_save(session, claims, [each.claims for each in every], limit, by_owner=by_owner)
    check_replicas(ranks, content.samples, [each.samples for each in every])
    job = _Job(
        folder=folder,
        staging=folder.stage(every[0].nonce),
        content=replace(content, state=agreed_state(ranks, content.state, [each.state for each in every])),
        prepared=prepared,
        options=chosen,
        style=style,
        overwrite=overwrite,
    )
    _or_discard(ranks, job.staging, partial(_stage, ranks, job))
    handle = Save(folder.url, session.timeout)
    if chosen.async_ and style == "huggingface":
        snapshot = _or_discard(ranks, job.staging, lambda: ranks.agree(lambda: _snapshot(job, session)))
        session.memory, session.pending = snapshot.memory, handle
        later = partial(_copy_and_write, job, session.background, snapshot, job.workers())
        handle._start(later, copied=chosen.copy == "blocking")
    else:
        with job.workers() as workers:
            _write(job, ranks, None, workers)
    handle.blocked_seconds += time.perf_counter() - begin
    return handle


def _open(path: Path, writer: str) -> Folder:
    folder = open_folder(path)
    if writer == "pwrite" and not folder.positional:
        raise ValueError(
            f"writer is 'pwrite', but files at {folder.url!r} can only be written from beginning to end; use 'owner' "
            "or 'auto'"
        )
    return folder


def _limits(options: SaveOptions, folder: Folder, style: str) -> tuple[int, bool]:
    """Bytes of tensors in a file, and whether one rank writes a whole one."""
    if style == "torch":  # one object, from one rank
        return sys.maxsize, True
    by_owner = options.writer == "owner" or (options.writer == "auto" and not folder.positional)
    return parse_size(options.max_shard_size), by_owner


@dataclass(frozen=True, kw_only=True)
class _Word:
    """What a rank tells the others, before anything is written.

    Args:
        nonce: Rank 0's is the save's.
        layout: The names of `layout` that it lacks, and those that it has.
        samples: Stands for the beginnings of tensors without a record.
        state: Stands for what is no tensor of a file.
        claims: Stands for what it holds.
    """

    nonce: str
    layout: LayoutNames
    samples: bytes
    state: bytes
    claims: bytes


def _word(options: SaveOptions, content: Content, claims: bytes, model: Model | None) -> _Word:
    return _Word(
        nonce=uuid.uuid4().hex[:12],
        layout=layout_names(options.layout, model),
        samples=digest(repr(content.samples).encode()),
        state=state_digest(content.state),
        claims=digest(claims),
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A save that is planned."""

    folder: Folder
    staging: Staging
    content: Content
    prepared: Prepared
    options: SaveOptions
    style: str
    overwrite: bool

    @cached_property
    def local(self) -> Local:
        """What this rank holds."""
        return Local.of(self.content.entries, self.prepared.tensors)

    def workers(self) -> Workers:
        """Who write it; one alone where a stream is written in order."""
        return Workers(self.options.threads if self.staging.positional else 1, "par-checkpoint-write")


def _stage(ranks: Ranks, job: _Job) -> None:
    """Makes the staging folder on rank 0, unless the path is taken; all see it."""

    def make() -> None:
        job.folder.recover()
        job.folder.check_target(overwrite=job.overwrite)
        files = () if job.style == "torch" else job.prepared.files
        job.staging.create([file.name for file in files], needed_bytes(job.prepared, job.content))
        place_files(job.staging, files)

    ranks.on_first(make)
    ranks.agree(job.staging.attach)


def _snapshot(job: _Job, session: Session) -> Snapshot:
    late = job.options.copy == "background"
    rank, threads = session.ranks.rank, job.options.threads
    return Snapshot(job.prepared.plan, job.local, rank, session.memory, late=late, threads=threads)


def _copy_and_write(job: _Job, ranks: Ranks, snapshot: Snapshot, workers: Workers, copied: threading.Event) -> None:
    """What goes on in the background."""

    def copy() -> None:
        try:
            snapshot.finish()
        finally:
            copied.set()  # before others are asked: whoever waits for this waits for this rank alone

    with workers:
        _or_discard(ranks, job.staging, lambda: ranks.agree(copy))
        _write(job, ranks, snapshot, workers)


def _write(job: _Job, ranks: Ranks, snapshot: Snapshot | None, workers: Workers) -> None:
    """Writes and commits, on this rank's part of a communicator."""
    with Bar("save", sum(file.size for file in job.prepared.files), ranks, job.options.progress) as bar:
        work = Work(
            files=job.prepared.files,
            local=job.local,
            ranks=ranks,
            staging=job.staging,
            budget=parse_size(job.options.budget),
            workers=workers,
            progress=bar.add,
        )
        _or_discard(ranks, job.staging, lambda: _write_and_commit(job, work, snapshot))
    job.staging.close()


def _write_and_commit(job: _Job, work: Work, snapshot: Snapshot | None) -> None:
    ranks, prepared, content = work.ranks, job.prepared, job.content
    noted = Noted(style=job.style, step=job.options.step, overwrite=job.overwrite)
    if job.style == "torch":
        files = write_objects(prepared, work, content)
        ranks.on_first(lambda: commit(job.staging, content, files, side_files(content), noted))
        return
    crcs, error = write_blocks(prepared.plan, work, snapshot)

    def written() -> tuple[None, list[Crc]]:
        if error is not None:
            raise error
        return None, crcs

    _, every = ranks.share(written)

    def finish() -> None:
        files = records_of(prepared.files, (each for part in every for each in part))
        commit(job.staging, content, files, {**indexes(prepared), **side_files(content)}, noted)

    ranks.on_first(finish)


def _or_discard(ranks: Ranks, staging: Staging, act: Callable[[], Value]) -> Value:
    """Does something; if it fails, the staging folder goes."""
    try:
        return act()
    except BaseException:
        if ranks.rank == 0:
            staging.discard()
        staging.close()
        raise
