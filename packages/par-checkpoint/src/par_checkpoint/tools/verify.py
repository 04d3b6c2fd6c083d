"""`verify`: a checkpoint, or the parts of one, compared with the checksums in its manifest."""

from collections.abc import Sequence
from os import PathLike

from ..storage.consistent import read_consistently
from ..storage.verify import VerifyReport, faults_of
from ..tiers.gathered import GatheredFolder, faults_of_parts, open_checkpoint


def verify(path: str | PathLike[str] | Sequence[str | PathLike[str]], deep: bool = True) -> VerifyReport:
    """Compares a checkpoint with the checksums in its manifest. No process group is needed.

    Args:
        path: The checkpoint's folder, or its URL; or the folders of hosts that hold its parts (see `copies` of `save`),
            one or several. Of parts every copy is looked at.
        deep: Whether to read all data. False looks at sizes, headers, index and manifest alone.

    Returns:
        What is wrong, one sentence for each fault: empty for a checkpoint that is whole. Its `lost` has those for which
        no copy of a part stands in: where that is empty, the checkpoint can be loaded.

    Raises:
        ValueError: Several folders of which none holds parts.
        ReplacedError: Other checkpoints took its place again and again while it was read.
    """
    folder = open_checkpoint(path)
    if isinstance(folder, GatheredFolder):
        return read_consistently(folder, lambda: faults_of_parts(folder, deep=deep))
    return read_consistently(folder, lambda: faults_of(folder, deep=deep))
