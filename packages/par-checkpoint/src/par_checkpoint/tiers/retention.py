"""Removal of old steps from each tier."""

import sys
from contextlib import suppress
from pathlib import Path

from .._errors import CheckpointError
from ..storage.commit import scan
from ..storage.folder import open_folder
from ..storage.local import LocalFolder
from ..storage.owned import remnant_of
from ..storage.steps import Pruned, remove_steps, step_of
from ..transfer.ranks import Ranks
from .part import part_of, read_part
from .saving import hosts_of


def prune_tier(root: str, ranks: Ranks, *, in_parts: bool, keep_last: int, keep_every: int | None, upto: int) -> Pruned:
    """Remove old steps from a tier. Collective.

    Args:
        root: The folder of the steps in the tier.
        ranks: The ranks that save.
        in_parts: Whether the tier contains one part per host.
        keep_last: Number of the highest complete steps to keep.
        keep_every: Interval of steps that are also kept; None: no interval.
        upto: Last step that may be removed. Later steps stay, because they are still being copied.

    Returns:
        The removed paths, and the reason for each path that stays. Without parts all ranks return the same; with parts
        the first rank of each host returns the paths of its host.
    """
    if not in_parts:
        return ranks.on_first(lambda: remove_steps(root, keep_last=keep_last, keep_every=keep_every, upto=upto))
    tier = open_folder(root)

    leads = hosts_of(ranks).leads

    def remove() -> Pruned:
        if not leads or not isinstance(tier, LocalFolder):
            return Pruned()
        return _prune_parts(tier, keep_last, keep_every, upto)

    return ranks.agree(remove)


def clear_tier(root: str, ranks: Ranks, *, local: bool) -> Pruned:
    """Remove all steps from a tier. Collective.

    Args:
        root: The folder of the steps in the tier.
        ranks: The ranks that save.
        local: Whether the tier may be local to each host, and contain parts of checkpoints.

    Returns:
        The removed paths and the reasons for the remaining paths, like `prune_tier`.
    """
    parts = Pruned()
    if local:
        parts = prune_tier(root, ranks, in_parts=True, keep_last=0, keep_every=None, upto=sys.maxsize)
    removed = prune_tier(root, ranks, in_parts=False, keep_last=0, keep_every=None, upto=sys.maxsize)
    removed.kept.update(parts.kept)
    return removed


def _prune_parts(tier: LocalFolder, keep_last: int, keep_every: int | None, upto: int) -> Pruned:
    """Remove old steps of which this host has parts."""
    kept, removed = 0, Pruned()
    steps = {step: name for name in tier.folders() if (step := step_of(name)) is not None and step <= upto}
    for step, name in sorted(steps.items(), reverse=True):
        folder = tier.path / name
        names = [entry.name for entry in scan(folder)]
        parts = [name for name in names if part_of(name) is not None]
        # Until a complete step was found, this step may still be written. Its hidden folders then belong to a save that
        # is running.
        if kept:
            for remnant in filter(None, map(remnant_of, names)):
                tier.child(name).child(remnant.target).sweep()
        if kept >= keep_last and keep_every is not None and step % keep_every == 0:
            continue
        if any(_is_whole(folder / part) for part in parts):
            if kept < keep_last:
                kept += 1
                continue
        elif parts:
            removed.kept[str(folder)] = "it has no complete part of a checkpoint, so its files cannot be identified"
            continue
        for part in parts:
            tier.child(name).child(part).remove()
        with suppress(OSError):  # files that are no part of a checkpoint stay, and keep the folder
            folder.rmdir()
        if not folder.exists():
            removed.append(str(folder))
        elif kept:
            removed.kept[str(folder)] = "it contains files that are no part of a checkpoint"
    return removed


def _is_whole(part: Path) -> bool:
    try:
        read_part(part)
    except CheckpointError:
        return False
    return True
