"""A run's checkpoints: step directories below a root, saved when due, resumed from the latest, old ones removed."""

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from par_groups import Sharding

from ._handle import Save
from ._load import Report, load
from ._options import LoadOptions, SaveOptions, takes_options, usable_timeout
from ._save import save
from .state.conversion import Convert
from .state.model import Model, Names
from .storage.steps import latest, newest, prune, step_name, step_of
from .transfer.ranks import session_of


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: The folder that holds `step-00000100` and so on; a URL goes through fsspec.
        every: Number of steps between two saves.
        keep_last: Number of the newest checkpoints to keep; older ones are removed when a later one is there whole, in
            the background if that is saved there. None: all stay.
        keep_every: Checkpoints of steps that are multiples of this number stay for good. None: of no step.
        group: The ranks that save and load together; default: the world.

    Example:
        checkpoints = Checkpoints("runs/gpt", every=500)
        report = checkpoints.load(model=model, optimizer=optimizer)  # None if there is nothing to resume from
        for step in range(report.step if report else 0, 10_000):
            ...
            checkpoints.save(step + 1, model=model, optimizer=optimizer, async_=True)

    Raises:
        ValueError: A number that is not positive, or an empty root.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        *,
        every: int = 1,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")
        self.root = fspath(root)
        if not self.root:
            raise ValueError("root is an empty path; give a folder, such as 'runs/gpt', or '.' for this one")
        self.every = every
        self._keep_last, self._keep_every, self._group = keep_last, keep_every, group
        self._kept: set[str] = set()  # steps that a warning has named

    def path(self, step: int) -> str:
        """The folder of a step."""
        return f"{self.root.rstrip('/')}/{step_name(step)}"

    def due(self, step: int) -> bool:
        """Whether `save` saves at this step."""
        return step % self.every == 0

    def latest(self) -> str | None:
        """The folder of the newest whole checkpoint, the same on every rank; None if there is none."""
        return latest(self.root, group=self._group)

    @takes_options(SaveOptions)
    def save(
        self,
        step: int,
        *,
        model: Model | None = None,
        optimizer: Optimizer | None = None,
        scheduler: object = None,
        extra: object = None,
        force: bool = False,
        style: str = "huggingface",
        overwrite: bool = True,
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
        options: SaveOptions | None = None,
    ) -> Save | None:
        """Saves if it is due. Collective. A checkpoint of the same step is replaced.

        A step below the newest is refused: it would be the first to be removed, and the newest is what `load` goes on
        from.

        Args:
            step: Number of steps done; it names the folder and is noted in the checkpoint.
            model: A module, or a mapping of tensors.
            optimizer: An optimizer; see `par_checkpoint.save`, which tells more of the following keywords, too.
            scheduler: An lr scheduler, or a list of them.
            extra: Anything made of numbers, strings, containers and tensors; it may differ between ranks.
            force: Whether to save even if it is not due.
            style: "huggingface" or "torch".
            overwrite: Whether to replace a checkpoint of the same step.
            max_shard_size: Bytes of tensors in a file, such as "5GB".
            async_: Whether to copy, return, and write in the background.
            copy: When a save with `async_` copies: "blocking" or "background".
            pending: What to do when an earlier save in the background is not done: "wait" for it, or "raise".
            writer: Which ranks write a file: "auto", "pwrite" or "owner".
            layout: By name of a tensor: how the local tensor is cut out of the global one.
            names: From a tensor's name in the model to its name in the files.
            convert: From a tensor's name and global shape to the tensors on disk that make it up.
            dtype: Floating-point tensors of the model are cast to this dtype on their way to the files.
            config: What is written as config.json; None: what transformers would write of its own models.
            assets: Paths of further files, which are copied as they are, such as a tokenizer's, or of its folder.
            stem: What the names of the model's files begin with.
            budget: Bytes that a rank may hold beside its own state, such as "256MB".
            threads: Number of threads of a rank that checksum and write.
            timeout: Seconds to wait for a rank that does not answer.
            progress: Whether rank 0 shows a bar; None: where stderr is a terminal.
            options: An object with values for the keywords from `max_shard_size` on; a keyword goes before it.

        Returns:
            The handle, or None if it was not due.

        Raises:
            ValueError: A whole checkpoint of a later step is there.
            CheckpointError, OSError: It could not be written; or an old step could not be removed, but the new one is
                there whole. With `async_` the handle, or the next save, raises it.
        """
        if not force and not self.due(step):
            return None
        session = session_of(self._group, usable_timeout(timeout))
        session.ranks.on_first(lambda: self._check_newest(step))
        handle = save(
            self.path(step),
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            extra=extra,
            style=style,
            group=self._group,
            overwrite=overwrite,
            step=step,
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
            options=options,
        )
        if self._keep_last is not None:
            # A save in the background removes old steps there, too: the trainer waits for neither.
            among = session.background if session.pending is handle else session.ranks
            handle._at_end(lambda: among.on_first(self._prune))
        return handle

    def _prune(self) -> None:
        """Removes old steps; warns once of each that stays although it should go."""
        pruned = prune(self.root, keep_last=self._keep_last or 1, keep_every=self._keep_every)
        for path, why in pruned.kept.items():
            if path not in self._kept:
                self._kept.add(path)
                warnings.warn(f"{path!r} is not removed, although it is old: {why}", stacklevel=2)

    def _check_newest(self, step: int) -> None:
        """Raises ValueError if a whole checkpoint of a later step is there."""
        path = newest(self.root)
        found = None if path is None else step_of(path.rpartition("/")[2])
        if found is not None and found > step:
            raise ValueError(
                f"step {step} comes before step {found}, which is in {self.root!r} and would be gone on from: to go on "
                "from an earlier step, move the later ones away, or use another root"
            )

    @takes_options(LoadOptions)
    def load(
        self,
        *,
        model: Model | None = None,
        optimizer: Optimizer | None = None,
        scheduler: object = None,
        strict: bool = True,
        layout: Mapping[str, Sharding] | None = None,
        names: Names | None = None,
        convert: Convert | None = None,
        dtype: torch.dtype | None = None,
        verify: str = "auto",
        variant: str | None = None,
        stem: str = "model",
        device: str | torch.device | None = None,
        budget: str | int = "256MB",
        threads: int = 2,
        timeout: float = 1800.0,
        progress: bool | None = None,
        options: LoadOptions | None = None,
    ) -> Report | None:
        """Goes on from the newest whole checkpoint. Collective.

        Args:
            model: A module, or a mapping of tensors.
            optimizer: An optimizer; see `par_checkpoint.load`, which tells more of the following keywords, too.
            scheduler: An lr scheduler, or a list of them.
            strict: Whether names, shapes or dtypes that do not fit are an error, or are reported.
            layout: By name of a tensor: how the local tensor is cut out of the global one.
            names: From a tensor's name in the model to its name in the files.
            convert: From a tensor's name and global shape to the tensors on disk that make it up.
            dtype: Floating-point tensors of the model of this dtype may be filled from files of another one.
            verify: "auto", "full" or "off".
            variant: Which files of other writers to read, such as "fp16".
            stem: What the names of other writers' files begin with.
            device: The device on which tensors of the meta device are made. None: that of the model's device mesh, if
                it has DTensors, else the CPU.
            budget: Bytes that a rank may hold beside its own state, such as "256MB".
            threads: Number of threads of a rank that read and checksum.
            timeout: Seconds to wait for a rank that does not answer.
            progress: Whether rank 0 shows a bar; None: where stderr is a terminal.
            options: An object with values for the keywords from `layout` on; a keyword goes before it.

        Returns:
            The report, whose `step` is that of the checkpoint; None if there is nothing to go on from.
        """
        session_of(self._group, usable_timeout(timeout)).settle("wait")  # the step of a save under way counts
        path = self.latest()
        if path is None:
            return None
        return load(
            path,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            group=self._group,
            strict=strict,
            layout=layout,
            names=names,
            convert=convert,
            dtype=dtype,
            verify=verify,
            variant=variant,
            stem=stem,
            device=device,
            budget=budget,
            threads=threads,
            timeout=timeout,
            progress=progress,
            options=options,
        )
