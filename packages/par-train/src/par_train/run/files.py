"""The files of a run, and writing one so that a crash at any moment leaves the old one or the new one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from par_groups import sync_to_disk


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps what it writes.

    Args:
        folder: The folder of the run.
    """

    folder: Path

    @property
    def checkpoints(self) -> Path:
        """The folder in which `Run` has one folder a checkpoint, `step-00000500` and so on."""
        return self.folder / "checkpoints"

    @property
    def checkpoint(self) -> Path:
        """The one checkpoint of `par-train run`, a folder that each save replaces."""
        return self.folder / "checkpoint"

    @property
    def tiers(self) -> Path:
        """The list of tiers that have the run's checkpoints, where there are some."""
        return self.folder / "tiers.json"

    @property
    def metrics(self) -> Path:
        """One object of JSON a line, with the number of its step."""
        return self.folder / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        """The loss curve as a picture."""
        return self.folder / "loss.png"

    @property
    def load(self) -> Path:
        """The load of experts as a picture, where a model has some."""
        return self.folder / "expert-load.png"

    @property
    def measured(self) -> Path:
        """The last step of a pipeline as a picture, as its ranks have measured it."""
        return self.folder / "pipeline-measured.png"

    @property
    def predicted(self) -> Path:
        """The picture of a pipeline's last step as simulated with the measured costs of its parts."""
        return self.folder / "pipeline-predicted.png"

    @property
    def diagnosis(self) -> Path:
        """The folder of dumps of ranks that hung or failed, which comes when there are some."""
        return self.folder / "diagnosis"

    @property
    def trace(self) -> Path:
        """What `profile` has recorded, for Perfetto."""
        return self.folder / "trace.json"

    @property
    def lock(self) -> Path:
        """The file whose lock keeps two runs apart. It belongs to no run, and stays."""
        return self.folder / ".par-train.lock"

    @property
    def identities(self) -> dict[str, Path]:
        """By the name of a tracker, the file with the id under which its service continues this run."""
        return {name: self.folder / f"{name}-id.txt" for name in ("wandb", "mlflow")}

    def present(self) -> list[Path]:
        """The files and folders that a run has left."""
        pictures = (self.curve, self.load, self.measured, self.predicted)
        every = (self.checkpoints, self.checkpoint, self.metrics, self.tiers, *pictures, self.trace)
        return [path for path in every if path.exists()]

    def saved(self) -> list[str]:
        """The checkpoints that the folder has, by their paths in it."""
        patterns = ("checkpoint", "checkpoints/*", "checkpoints/*/*")  # of several models each has a folder
        found = [path for pattern in patterns for path in self.folder.glob(f"{pattern}/par_checkpoint.json")]
        return sorted(str(path.parent.relative_to(self.folder)) for path in found)

    def clear(self) -> None:
        """Removes the run, the ids that its trackers have noted, and nothing else that lies in the folder."""
        self.clear_records()
        for note in self.identities.values():
            note.unlink(missing_ok=True)

    def clear_records(self) -> None:
        """Removes the run, but not what trackers have noted, which may be a new run's already."""
        for path in self.present():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.forget_dumps()

    def forget_dumps(self) -> None:
        """Removes the dumps of an earlier start, which would be taken for this one's; what was said of them stays."""
        for path in self.diagnosis.glob("rank-*.json"):
            path.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Replaces a file in one move."""
    new = path.with_name(path.name + ".new")
    with writing(path):
        try:
            new.write_bytes(data)
            sync_to_disk(new)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        sync_to_disk(path.parent)


@contextmanager
def writing(path: str | PathLike[str], remedy: str = "") -> Iterator[None]:
    """Adds to an error the name of what could not be written, which the system leaves out when the disk is full.

    Args:
        path: What is written.
        remedy: What can be done where it fails; "": nothing that has to be said.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {fspath(path)!r}: {error}{remedy and '; '}{remedy}") from error
