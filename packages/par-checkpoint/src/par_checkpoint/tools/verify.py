"""`verify`: a checkpoint, or the parts of one, compared with the checksums in its manifest."""

from collections.abc import Sequence
from os import PathLike

from ..storage.consistent import read_consistently
from ..storage.verify import VerifyReport, faults_of
from ..tiers.gathered import GatheredFolder, faults_of_parts, open_checkpoint


def verify(path: str | PathLike[str] | Sequence[str | PathLike[str]], deep: bool = True) -> VerifyReport:
    """Compare a checkpoint with the checksums in its manifest. No process group is needed.

    Args:
        path: Folder of the checkpoint, or its URL; or one or several folders of hosts with its parts (see `copies` of
            `save`), of which every copy is checked.
        deep: Whether to read all data. False checks only sizes, headers, index and manifest. Default: True.

    Returns:
        One sentence for each fault; empty for a complete checkpoint. Its `lost` lists the faults for which no copy of a
        part is available: if `lost` is empty, the checkpoint can be loaded.

    Raises:
        ValueError: None of several folders contains parts.
        ReplacedError: Saves replaced the checkpoint repeatedly while it was read.
    """
    folder = open_checkpoint(path)
    if isinstance(folder, GatheredFolder):
        return read_consistently(folder, lambda: faults_of_parts(folder, deep=deep))
    return read_consistently(folder, lambda: faults_of(folder, deep=deep))
