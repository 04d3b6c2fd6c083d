"""Step directories below a root: `step-00000100`, the latest of them, and which to keep."""

import os
import re
from collections.abc import Iterator
from functools import partial

from .._errors import CheckpointError, CorruptError
from ..format.manifest import MANIFEST, Manifest, decode_manifest
from .consistent import read_consistently
from .folder import Folder, open_folder
from .outline import check_sizes
from .owned import remnant_of


def step_name(step: int) -> str:
    """Return the name of a step's directory.

    Raises:
        ValueError: A negative step.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative: count from 0")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a directory's name; None for any other name."""
    # A name with more zeros than `step_name` writes is none: two names would be one step.
    match = re.fullmatch(r"step-([0-9]{8,})", name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


class Pruned(list[str]):
    """Paths that `prune` removed, or would remove.

    Attributes:
        kept: Reason for each step that stays although neither `keep_last` nor `keep_every` keeps it, by path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, str] = {}


def prune(
    root: str | os.PathLike[str], *, keep_last: int = 3, keep_every: int | None = None, dry_run: bool = False
) -> Pruned:
    """Remove old steps, and files that dead saves left next to them. Call it on one rank.

    It removes only directories with the name of a step and our manifest that contain only our files and standard
    Hugging Face files. Other directories and symbolic links stay, and the result names the reason.

    Args:
        root: Directory that contains the step directories, or its URL.
        keep_last: Number of the newest complete steps to keep, at least 1. Default: 3.
        keep_every: Multiples of this step are kept, too. Default: none.
        dry_run: Whether to remove nothing, and only list what would be removed. Default: False.

    Returns:
        The paths that were removed, or would be; its `kept` has the reason for other directories.

    Raises:
        ValueError: A count is below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} would remove the newest step: keep at least 1")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every={keep_every} divides nothing: give at least 1, or None")
    return remove_steps(root, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)


def remove_steps(
    root: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int | None,
    dry_run: bool = False,
    upto: int | None = None,
) -> Pruned:
    """Prune the steps up to one of them, like `prune`.

    Args:
        root: Directory that contains the step directories, or its URL.
        keep_last: Number of the newest complete steps to keep; 0: none.
        keep_every: Multiples of this step are kept, too; None: no others.
        dry_run: Whether to remove nothing, and only list what would be removed. Default: False.
        upto: Last step to consider; later steps stay and do not count. Default: all steps count.
    """
    kept, removed = 0, Pruned()
    for step, folder, littered in _steps(open_folder(root)):
        if upto is not None and step > upto:
            continue
        if not dry_run:
            # A save that died between its two renames left a complete step under another name. It must be found, or an
            # older step would be kept in its place.
            folder.repair()
        if kept and littered:  # beside the newest whole step and above it, a save may be under way
            removed.extend(folder.sweep(dry_run=dry_run))
        # A step that stays in any case needs no check, which would read its manifest and the sizes of its files.
        if kept >= keep_last and keep_every is not None and step % keep_every == 0:
            continue
        if (broken := _broken(folder)) is not None:
            if folder.exists():  # else it was a name of what a dead save has left, and is gone
                removed.kept[folder.url] = broken
            continue
        if kept < keep_last:
            kept += 1
            continue
        try:
            folder.check_target(overwrite=True)
        except CheckpointError as error:  # it holds files that are not ours
            removed.kept[folder.url] = str(error)
            continue
        removed.append(folder.url)
        if not dry_run:
            folder.remove()
    return removed


def read_manifest(folder: Folder) -> Manifest | None:
    """Return the manifest of a folder; None if it is missing or corrupt, or if files do not have their recorded sizes.

    Raises:
        CheckpointError: A newer version wrote it.
    """
    try:
        return _sound_manifest(folder)
    except CorruptError:
        return None


def _sound_manifest(folder: Folder) -> Manifest:
    """Return the manifest of a folder; raise CorruptError if files do not have their recorded sizes."""
    manifest = decode_manifest(folder.read(MANIFEST))
    check_sizes(folder, manifest, folder.sizes())
    return manifest


def _broken(folder: Folder) -> str | None:
    """Describe why a folder is not a complete checkpoint of ours; return None if it is one."""
    try:
        _sound_manifest(folder)
    except CorruptError as error:
        return f"it is not a whole checkpoint, so nobody knows what may go with it: {error}"
    return None


def newest(root: str | os.PathLike[str]) -> str | None:
    """Return the path of the highest complete step below `root` that this process sees, or None."""
    for _, folder, _ in _steps(open_folder(root)):
        manifest = read_consistently(
            folder, partial(read_manifest, folder), checked=lambda manifest: manifest is not None
        )
        if manifest is not None:
            return folder.url
    return None


def _steps(root: Folder) -> Iterator[tuple[int, Folder, bool]]:
    """Yield all steps, the highest first: number, folder, and whether a save may have left files there."""
    names = root.folders()
    littered = {remnant.target for name in names if (remnant := remnant_of(name))}
    steps = {name: step for name in littered.union(names) if (step := step_of(name)) is not None}
    for name, step in sorted(steps.items(), key=lambda item: -item[1]):
        yield step, root.child(name), name in littered or not root.stages_beside
