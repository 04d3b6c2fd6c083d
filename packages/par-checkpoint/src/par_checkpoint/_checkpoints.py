"""A run's checkpoints: step directories below a root, saved when due, resumed from the latest, old ones removed."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from os import fspath

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ._agreement import SameOptions, kinds_of
from ._handle import Save
from ._load import LoadReport, load
from ._policies import (
    TIMEOUT,
    Format,
    Path,
    Tiers,
    Transfer,
    check_policy,
    check_timeout,
    timeout_of,
    urls_of,
    whole_number,
)
from ._save import save
from .state.model import Model
from .storage.steps import Pruned, newest, step_name, step_of
from .tiers.nearest import newest_step
from .tiers.probe import check_tiers
from .tiers.retention import clear_tier, prune_tier
from .transfer.ranks import Ranks
from .transfer.sessions import Session, session_of


def latest(root: Path, *, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> str | None:
    """Return the path of the newest complete step below `root`, or None. Collective over the group.

    The first rank of the group lists the steps and sends the result, so all ranks resume from the same step.

    Args:
        root: Directory that contains the step directories, or its URL; it need not exist.
        group: Ranks that call. Default: all ranks, or only this process if torch.distributed is not initialized.
        timeout: Seconds to wait for a rank that does not call it.

    Raises:
        ValueError: This process is not in the group.
        CheckpointError: A newer version wrote a step, or a rank does not join; on every rank.
        OSError: The root cannot be read; on every rank.
    """
    check_timeout(timeout)
    with session_of(group).calling(f"latest({str(root)!r:.80})", timeout) as session:
        return session.ranks.on_first(lambda: newest(root))


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: The folder that holds `step-00000100` and so on; a URL goes through fsspec. With tiers: its name in each
            of them, such as "gpt".
        every: Number of steps between two saves.
        keep_last: Number of newest checkpoints to keep. Older checkpoints are removed after a newer one is complete (in
            the background, if that save is in the background). With tiers: one number for all tiers, or a list with a
            number per tier; older checkpoints are removed after the newer one is complete in all tiers. None: keep all.
        keep_every: Checkpoints of steps that are multiples of this number are never removed. None: no such exception.
        tiers: Storage tiers that each keep the checkpoints. Default: only `root`.
        group: The ranks that save and load together; default: the world.

    Example:
        checkpoints = Checkpoints("runs/gpt", every=500)
        report = checkpoints.load(model=model, optimizer=optimizer)  # None if there is nothing to resume from
        for step in range(report.step if report else 0, 10_000):
            ...
            checkpoints.save(step + 1, model=model, optimizer=optimizer, async_=True)

    Raises:
        ValueError: A number is not positive, the root is empty, or the tiers contradict each other.
    """

    def __init__(
        self,
        root: Path,
        *,
        every: int = 1,
        keep_last: int | Sequence[int | None] | None = 3,
        keep_every: int | None = None,
        tiers: Tiers | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.root = fspath(root)
        if not self.root:
            raise ValueError("root is an empty path; give a folder, such as 'runs/gpt', or '.' for this one")
        check_policy("tiers", tiers, Tiers)
        self.tiers, self._copies = tiers, None if tiers is None else tiers.copies
        self._roots = urls_of(self.root, tiers)  # the folder of the steps in each tier
        self._keep_last = self._kept_in_each(keep_last)
        for name, value in (("every", every), *(("keep_last", n) for n in self._keep_last), ("keep_every", keep_every)):
            if value is not None and whole_number(name, value) < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")
        self.every = every
        self._keep_every, self._group = keep_every, group
        self._kept: set[str] = set()  # steps that a warning has named
        self._newest: int | None = None  # the newest step that this has saved to tiers
        self._compared = False  # whether ranks have compared what they were given

    def _kept_in_each(self, keep_last: int | Sequence[int | None] | None) -> list[int | None]:
        """Return the number of steps to keep in each tier."""
        if not isinstance(keep_last, Sequence):
            return [keep_last] * len(self._roots)
        if self.tiers is None or len(keep_last) != len(self._roots):
            raise ValueError(
                f"keep_last has {len(keep_last)} numbers, and there are "
                f"{'no' if self.tiers is None else len(self._roots)} tiers; give one number, or one for each tier"
            )
        return list(keep_last)

    def path(self, step: int) -> str:
        """Return the folder of a step, in the first tier if there are several."""
        return self.paths(step)[0]

    def paths(self, step: int) -> list[str]:
        """Return the folders of a step in all tiers, the nearest first; without tiers, its only folder."""
        return [f"{root.rstrip('/')}/{step_name(step)}" for root in self._roots]

    def name(self, step: int) -> str:
        """Return a step's path for `par_checkpoint.save` and `load`: its folder, or its name in the tiers."""
        return self.path(step) if self.tiers is None else f"{self.root.rstrip('/')}/{step_name(step)}"

    def due(self, step: int) -> bool:
        """Return whether `save` writes a checkpoint at this step: the step is a multiple of `every`."""
        return step % self.every == 0

    def latest(self) -> str | None:
        """Return the folder of the newest complete checkpoint, in the nearest tier that has it; None if there is none.

        The result is equal on every rank, except in a tier that is local to each host.
        """
        if self.tiers is None:
            return latest(self.root, group=self._group)
        with self._calling("latest", TIMEOUT) as session:
            return newest_step(self._roots, session.ranks)[1]

    def check(self, *, timeout: float = TIMEOUT) -> None:
        """Check whether steps can be saved to the root, or to each tier, before a run begins. Collective.

        Each host writes a file into each tier, looks for the files of the other hosts, and removes its own. All hosts
        must see a tier. The exception is the first tier if `copies` is set, which must not be larger than the number of
        hosts. Nothing else changes.

        Args:
            timeout: Seconds to wait for a rank that does not answer.

        Raises:
            TypeError, ValueError: An option is wrong; on every rank, with the rule and the fix.
            StoreError: An object store denies the write; on every rank.
        """
        with self._calling("check", timeout) as session:
            check_tiers(self._roots, self._copies, session.ranks)

    def clear(self, *, timeout: float = TIMEOUT) -> None:
        """Remove all checkpoints of the run from all tiers, and warn of what is not ours and stays. Collective.

        Args:
            timeout: Seconds to wait for a rank that does not answer.
        """
        with self._calling("clear", timeout) as session:
            session.settle("wait")
            # All hosts share every tier but the first one, so one rank clears each of those.
            for number, root in enumerate(self._roots):
                pruned = clear_tier(root, session.ranks, local=self.tiers is not None and number == 0)
                if session.ranks.rank == 0:
                    self._tell(pruned)
        self._newest = None

    def save(
        self,
        step: int,
        *,
        model: Model | None = None,
        optimizer: Optimizer | None = None,
        scheduler: object = None,
        extra: object = None,
        force: bool = False,
        overwrite: bool = True,
        async_: bool = False,
        format: Format | None = None,  # noqa: A002
        transfer: Transfer | None = None,
    ) -> Save | None:
        """Save if a save is due at this step. Collective.

        The newest checkpoint is the one that `load` resumes from. So a step below it is refused: that checkpoint would
        be the first to be removed.

        Args:
            step: Number of training steps done. It names the folder, and is stored in the checkpoint.
            model: Module, or mapping of tensors. `par_checkpoint.save` describes this argument and the next ones.
            optimizer: Optimizer.
            scheduler: LR scheduler or list of LR schedulers.
            extra: Numbers, strings, containers and tensors to store; may differ between ranks.
            force: Whether to save even if no save is due.
            overwrite: Whether to replace a checkpoint of the same step.
            async_: Whether to return as soon as the state of this rank is copied, and write in the background.
            format: Files to write, and how tensors map to them. Default: `Format()`.
            transfer: Memory, threads, timeout and writers. Default: `Transfer()`.

        Returns:
            A handle, or None if no save was due.

        Raises:
            ValueError: A complete checkpoint of a later step exists.
            CheckpointError, OSError: Writing failed, or the new checkpoint is complete but an old one could not be
                removed. With `async_`, the handle or the next save raises it.
        """
        step = whole_number("step", step)
        if not force and not self.due(step):
            return None
        with self._calling("save", timeout_of(transfer)) as session:
            self._check_alike(session.ranks)
            self._check_newest(step, session.ranks)
        handle = save(
            self.name(step),
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            extra=extra,
            step=step,
            group=self._group,
            overwrite=overwrite,
            async_=async_,
            format=format,
            transfer=transfer,
            tiers=self.tiers,
        )
        with self._calling("save", timeout_of(transfer)) as session:
            is_copied = self._copies is not None or len(self._roots) > 1
            if is_copied:
                self._newest = step
            if any(count is not None for count in self._keep_last):
                # Old steps go in the thread that ends the save, so that the trainer does not wait for it. Each kind of
                # thread has a communicator of its own, as ranks find each other's messages by their order only.
                if is_copied:
                    among = session.beside
                elif any(session.runs(task) for task in handle._tasks):
                    among = session.background
                else:
                    among = session.ranks
                handle._at_end(partial(self._prune, step, among))
        return handle

    def _calling(self, method: str, timeout: float) -> AbstractContextManager[Session]:
        """Begin a call of all ranks to one of the collective methods, inside the context."""
        check_timeout(timeout)
        return session_of(self._group).calling(f"Checkpoints({self.root!r:.80}).{method}()", timeout)

    def _prune(self, step: int, ranks: Ranks) -> None:
        """Remove old steps from each tier; warn once of each that stays although it should go. Collective.

        Args:
            step: The step that is there by now; later ones may still be on their way from tier to tier.
            ranks: The ranks, through a communicator that nothing else uses meanwhile.
        """
        for number, (root, count) in enumerate(zip(self._roots, self._keep_last, strict=True)):
            if count is not None:
                pruned = prune_tier(
                    root,
                    ranks,
                    in_parts=self._copies is not None and number == 0,
                    keep_last=count,
                    keep_every=self._keep_every,
                    upto=step,
                )
                if ranks.rank == 0:
                    self._tell(pruned)

    def _tell(self, pruned: Pruned) -> None:
        for path, why in pruned.kept.items():
            # Every save finds the same step again, and one warning is enough.
            if path not in self._kept:
                self._kept.add(path)
                warnings.warn(f"{path!r} is not removed, although it is old: {why}", stacklevel=2)

    def _check_alike(self, ranks: Ranks) -> None:
        """Raise ValueError, the first time, unless all ranks were given the same. Collective the first time."""
        # The arguments never change, so the ranks compare them only once.
        if not self._compared:
            same = SameOptions(
                {
                    "tiers": None if self.tiers is None else kinds_of(self._roots),
                    "every": self.every,
                    "keep_last": self._keep_last,
                    "keep_every": self._keep_every,
                    "copies": self._copies,
                }
            )
            same.check(ranks.total(same.words()), ranks)
            self._compared = True

    def _check_newest(self, step: int, ranks: Ranks) -> None:
        """Raise ValueError if a complete checkpoint of a later step exists. Collective."""
        if self.tiers is None:
            path = ranks.on_first(lambda: newest(self.root))
            found = None if path is None else step_of(path.rpartition("/")[2])
        elif self._newest is None:
            found = newest_step(self._roots, ranks)[0]
        else:  # no slower tier is asked, once it is known
            found = self._newest
        if found is not None and found > step:
            raise ValueError(
                f"step {step} comes before step {found}, which is in {self.root!r} and would be gone on from: to go on "
                "from an earlier step, move the later ones away, or use another root"
            )

    def load(
        self,
        *,
        model: Model | None = None,
        optimizer: Optimizer | None = None,
        scheduler: object = None,
        strict: bool = True,
        device: str | torch.device | None = None,
        dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
        verify: str = "auto",
        format: Format | None = None,  # noqa: A002
        transfer: Transfer | None = None,
    ) -> LoadReport | None:
        """Resume from the newest complete checkpoint. Collective.

        Args:
            model: Module, or mapping of tensors. `par_checkpoint.load` describes this argument and the next ones.
            optimizer: Optimizer.
            scheduler: LR scheduler or list of LR schedulers.
            strict: Whether to raise an error for missing, unexpected and mismatched names.
            device: Device for tensors that are on the meta device.
            dtype: Dtype, or tuple of dtypes, of tensors in the model that may be cast from another dtype in the files.
            verify: "auto", "full" or "off".
            format: Map from the model's tensors to the files. Default: `Format()`.
            transfer: Memory, threads and timeout. Default: `Transfer()`.

        Returns:
            The report, whose `step` is the checkpoint's; None if there is no checkpoint.
        """
        with self._calling("load", timeout_of(transfer)) as session:
            self._check_alike(session.ranks)
            # A save in the background may complete a newer step, and the load should find it.
            session.settle("wait")
            passed: Sequence[str] = ()
            if self.tiers is None:
                path = session.ranks.on_first(lambda: newest(self.root))
            else:
                # A nearer tier may have lost the newest step with its host. The slower tiers then decide.
                step, _, passed = newest_step(self._roots, session.ranks)
                path = None if step is None else self.name(step)
            if passed and session.ranks.rank == 0:
                taken = "nothing is" if path is None else f"{path!r} is"
                warnings.warn(f"{'; '.join(passed)}. So {taken} gone on from", stacklevel=2)
        if path is None:
            return None
        return load(
            path,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            group=self._group,
            strict=strict,
            device=device,
            dtype=dtype,
            verify=verify,
            format=format,
            transfer=transfer,
            tiers=self.tiers,
        )
