"""The choice of the tier that a checkpoint is loaded from, and of the newest step that any tier has."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from .._errors import CheckpointError
from ..format.manifest import encode_manifest
from ..storage.folder import Folder, open_folder
from ..storage.local import LocalFolder
from ..storage.steps import read_manifest, step_name, step_of
from ..transfer.ranks import Ranks, words
from .kept import find_kept


@dataclass(frozen=True)
class Nearest:
    """The nearest tier that has a complete checkpoint.

    Args:
        folder: The checkpoint; None: no tier has it.
        passed: Texts about missing parts in nearer tiers, and about faulty parts in this tier that a copy replaces.
        further: The checkpoint's folders in the tiers after this one.
    """

    folder: Folder | None
    passed: tuple[str, ...]
    further: tuple[Folder, ...] = ()

    def whole(self, folders: Sequence[Folder]) -> Folder:
        """Return the folder of the checkpoint.

        Args:
            folders: Searched folders, for the message.

        Raises:
            CheckpointError: No tier has a complete checkpoint.
        """
        if self.folder is not None:
            return self.folder
        raise CheckpointError(
            "none of the tiers has a whole checkpoint that all ranks see: "
            f"{', '.join(folder.url for folder in folders)}; {''.join(f'{text}; ' for text in self.passed)}look at "
            "them with `par-checkpoint ls`, or load another one"
        )


def nearest(folders: Sequence[Folder], ranks: Ranks) -> Nearest:
    """Return the first tier with a complete checkpoint: the same one on all ranks, or all parts on the hosts.

    Collective.

    Args:
        folders: The checkpoint's folder in each tier.
        ranks: The ranks that load.
    """

    def seen(folder: Folder) -> tuple[list[int], list[int]]:
        folder.recover()
        manifest = read_manifest(folder)
        found = [0] * 8 if manifest is None else words(encode_manifest(manifest))
        return found, found

    passed: list[str] = []
    for number, folder in enumerate(folders, 1):
        mine, sums = ranks.tell(partial(seen, folder), 8)
        # A rank without a manifest adds zeros, so the sums differ from those of a rank that has one.
        if any(sums) and sums == [ranks.size * word for word in mine]:
            return Nearest(folder, tuple(passed), tuple(folders[number:]))
        kept, missing = find_kept(folder, ranks) if isinstance(folder, LocalFolder) else (None, None)
        if kept is not None:
            return Nearest(kept, (*passed, *kept.notes), tuple(folders[number:]))
        if missing is not None:
            passed.append(f"{folder.url!r} has not all parts of a checkpoint: {missing}")
    return Nearest(None, tuple(passed))


def newest_step(roots: Sequence[str], ranks: Ranks) -> tuple[int | None, str | None, tuple[str, ...]]:
    """Find the newest complete step in any tier. Collective.

    Args:
        roots: The folder of the steps in each tier.
        ranks: The ranks that load.

    Returns:
        The step, its folder in the nearest tier that has it, and texts about incomplete later steps.
    """
    tiers = [open_folder(root) for root in roots]

    def steps() -> set[int]:
        # All hosts share a store, so one rank lists it. Folders of the same path may differ between hosts.
        mine = [tier for tier in tiers if ranks.rank == 0 or isinstance(tier, LocalFolder)]
        return {step for tier in mine for name in tier.folders() if (step := step_of(name)) is not None}

    every = {step for _, of_ranks in ranks.distinct(sorted(ranks.agree(steps))) for step in of_ranks}
    passed: list[str] = []
    for step in sorted(every, reverse=True):
        found = nearest([tier.child(step_name(step)) for tier in tiers], ranks)
        if found.folder is not None:
            return step, found.folder.url, tuple(passed)
        passed.extend(found.passed)
    return None, None, tuple(passed)
