"""The files of a run, and writing one so that a crash at any moment leaves the old one or the new one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from par_groups import sync_to_disk


class _Inside:
    """The path of a file or folder in the folder of a run.

    Args:
        name: Name of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, files: "RunFiles", _: type) -> Path:
        return files.folder / self._name


@dataclass(frozen=True)
class RunFiles:
    """Paths of the files that a run writes.

    Args:
        folder: Folder of the run.
    """

    folder: Path

    checkpoints = _Inside("checkpoints")
    """The folder with one folder for each checkpoint, `step-00000500` and so on."""

    tiers = _Inside("tiers.json")
    """The list of tiers that have the run's checkpoints; a run without tiers has none."""

    metrics = _Inside("metrics.jsonl")
    """The file of metrics: one JSON object per line, with the number of its step."""

    curve = _Inside("loss.png")
    """The picture of the loss curve."""

    load = _Inside("expert-load.png")
    """The picture of the load of experts, for a model with experts."""

    measured = _Inside("pipeline-measured.png")
    """The picture of a pipeline's last step, with the times that its ranks measured."""

    predicted = _Inside("pipeline-predicted.png")
    """The picture of a pipeline's last step, simulated with the measured costs of its stages."""

    diagnosis = _Inside("diagnosis")
    """The folder of dumps of ranks that hung or failed; the first dump creates it."""

    trace = _Inside("trace.json")
    """The recorded trace, for Perfetto."""

    lock = _Inside(".par-train.lock")
    """The lock file that keeps a second run out of the folder. It belongs to no run, and `clear` keeps it."""

    @property
    def identities(self) -> dict[str, Path]:
        """The files with the ids under which services continue this run, by name of the tracker."""
        return {name: self.folder / f"{name}-id.txt" for name in ("wandb", "mlflow")}

    def present(self) -> list[Path]:
        """Return the files and folders that a run has written."""
        pictures = (self.curve, self.load, self.measured, self.predicted)
        every = (self.checkpoints, self.metrics, self.tiers, *pictures, self.trace)
        return [path for path in every if path.exists()]

    def saved(self) -> list[str]:
        """Return the paths of all checkpoints, relative to the folder."""
        patterns = ("checkpoints/*", "checkpoints/*/*")  # each of several models has a folder
        found = [path for pattern in patterns for path in self.folder.glob(f"{pattern}/par_checkpoint.json")]
        return sorted(str(path.parent.relative_to(self.folder)) for path in found)

    def clear(self) -> None:
        """Remove the run and the ids of its trackers. Other files in the folder stay."""
        self.clear_records()
        for note in self.identities.values():
            note.unlink(missing_ok=True)

    def clear_records(self) -> None:
        """Remove the run. The ids of trackers stay, because they may belong to a new run already."""
        for path in self.present():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.forget_dumps()

    def forget_dumps(self) -> None:
        """Remove the ranks' dumps of an earlier start, so that nobody mistakes them for dumps of this start."""
        for path in self.diagnosis.glob("rank-*.json"):
            path.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    new = path.with_name(path.name + ".new")
    with writing(path):
        try:
            new.write_bytes(data)
            # The bytes must be on the disk before the name points to them, and the name before the caller relies on the
            # file.
            sync_to_disk(new)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        sync_to_disk(path.parent)


@contextmanager
def writing(path: str | PathLike[str], remedy: str = "") -> Iterator[None]:
    """Add the path to an OSError, because the system omits it when the disk is full.

    Args:
        path: File or folder that the block writes.
        remedy: Fix to append to the message; "" appends nothing.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {fspath(path)!r}: {error}{remedy and '; '}{remedy}") from error
