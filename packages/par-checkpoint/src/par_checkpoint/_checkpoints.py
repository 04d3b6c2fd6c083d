"""A run's checkpoints: step directories below a root, saved when due, resumed from the latest, old ones removed."""

from os import PathLike, fspath
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ._handle import Save
from ._load import Report, load
from ._options import timeout_of
from ._save import save
from ._session import session_of
from .state.collect import Model
from .storage.steps import latest, newest, prune, step_name, step_of


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: The folder that holds `step-00000100` and so on; a URL goes through fsspec.
        every: Steps between two saves.
        keep_last: How many of the newest to keep; older ones are removed after a save. None: all stay.
        keep_every: Steps that are multiples of this stay for good.
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

    def path(self, step: int) -> str:
        """The folder of a step."""
        return f"{self.root.rstrip('/')}/{step_name(step)}"

    def due(self, step: int) -> bool:
        """Whether `save` saves at this step."""
        return step % self.every == 0

    def latest(self) -> str | None:
        """The folder of the newest whole checkpoint, the same on every rank; None if there is none."""
        return latest(self.root, group=self._group)

    def save(
        self,
        step: int,
        *,
        model: Model | None = None,
        optimizer: Optimizer | None = None,
        force: bool = False,
        **keywords: Any,
    ) -> Save | None:
        """Saves if it is due. Collective. A checkpoint of the same step is replaced.

        A step below the newest is refused: it would be the first to be removed, and the newest is what `load` goes on
        from.

        Args:
            step: Steps done.
            model: As for `save`.
            optimizer: As for `save`.
            force: Save even if it is not due.
            keywords: Of `save`.

        Returns:
            The handle, or None if it was not due.

        Raises:
            ValueError: A whole checkpoint of a later step is there.
            CheckpointError, OSError: As `save`; or an old step could not be removed, but the new one is there whole.
        """
        if not force and not self.due(step):
            return None
        keywords = {"step": step, "overwrite": True, "group": self._group, **keywords}
        ranks = session_of(self._group, timeout_of(keywords.get("options"), keywords)).ranks
        ranks.on_first(lambda: self._check_newest(step))
        handle = save(self.path(step), model=model, optimizer=optimizer, **keywords)
        keep_last = self._keep_last
        if keep_last is not None:
            try:
                ranks.on_first(lambda: prune(self.root, keep_last=keep_last, keep_every=self._keep_every))
            except Exception:
                handle.wait()  # nobody else could: who calls does not get it
                raise
        return handle

    def _check_newest(self, step: int) -> None:
        path = newest(self.root)
        found = None if path is None else step_of(path.rpartition("/")[2])
        if found is not None and found > step:
            raise ValueError(
                f"step {step} comes before step {found}, which is in {self.root!r} and would be gone on from: to go on "
                "from an earlier step, move the later ones away, or use another root"
            )

    def load(self, *, model: Model | None = None, optimizer: Optimizer | None = None, **keywords: Any) -> Report | None:
        """Goes on from the newest whole checkpoint. Collective.

        Args:
            model: As for `load`.
            optimizer: As for `load`.
            keywords: Of `load`.

        Returns:
            The report, whose `step` is that of the checkpoint; None if there is nothing to go on from.
        """
        session_of(self._group, timeout_of(keywords.get("options"), keywords)).settle("wait")  # a save's step counts
        path = self.latest()
        if path is None:
            return None
        return load(path, model=model, optimizer=optimizer, group=self._group, **keywords)
