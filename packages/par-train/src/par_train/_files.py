"""The files of a run, and writing them so that a crash at any moment leaves the old ones or the new ones."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps what it writes.

    Args:
        folder: The output folder.
    """

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """A folder: weights, config, training state."""
        return self.folder / "checkpoint"

    @property
    def metrics(self) -> Path:
        """One line of JSON a step."""
        return self.folder / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        """The loss curve as a picture."""
        return self.folder / "loss.png"

    def present(self) -> list[Path]:
        """Those that exist."""
        return [path for path in (self.checkpoint, self.metrics, self.curve) if path.exists()]

    def clear(self) -> None:
        """Removes the run, and nothing else that lies in the folder."""
        for path in (*self.present(), _old(self.checkpoint), _new(self.checkpoint)):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()


def write_file(path: Path, data: bytes) -> None:
    """Replaces a file in one move."""
    new = _new(path)
    new.write_bytes(data)
    _sync(new)
    new.replace(path)
    _sync(path.parent)


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Replaces a folder of plain files by one that `fill` writes.

    No system call swaps two folders everywhere. So the old one steps aside before the new one takes its place; in the
    moment between, `existing_folder` finds it there.
    """
    new, old = _new(target), _old(target)
    if new.exists():
        shutil.rmtree(new)  # of a run that was killed while it wrote
    new.mkdir(parents=True)
    fill(new)
    for file in new.iterdir():
        _sync(file)
    _sync(new)
    if target.exists():
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    new.rename(target)
    _sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def existing_folder(target: Path) -> Path | None:
    """The last folder that `replace_folder` completed, or None."""
    return next((path for path in (target, _old(target)) if path.is_dir()), None)


def _new(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
