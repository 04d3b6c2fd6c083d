"""Files of torch.save, never with more trust than `weights_only` needs."""

import pickle
import zipfile
from pathlib import Path

import torch

from ._errors import CheckpointError
from ._header import corrupt

_ZIP = b"PK\x03\x04"


def load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's file; those of a zip file stay on disk until they are touched.

    The extra state of modules, which may be anything, is left out.

    Args:
        path: A file of torch.save, whole or legacy.

    Raises:
        CheckpointError: Something else than a flat dict of tensors, what weights_only refuses, or deflated data.
        CorruptError: A broken file.
    """
    found = load_object(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a dict of tensors; save model.state_dict()")
    found = {name: each for name, each in found.items() if not str(name).endswith("_extra_state")}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} holds a {type(value).__name__} under {name!r:.80}, not a tensor under a name; load it with "
                "torch.load and save the state dict alone"
            )
    return found


def load_object(path: Path) -> object:
    """Anything that torch.save wrote and weights_only permits.

    Raises:
        CheckpointError: What weights_only refuses, or deflated data.
        CorruptError: A broken file.
    """
    with path.open("rb") as file:
        zipped = file.read(len(_ZIP)) == _ZIP
    if zipped:
        _check_stored(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is broken, or would run code when loaded, which is refused; where you trust it, load it with "
            f"torch.load(weights_only=False) and save its tensors anew"
        ) from error
    except Exception as error:  # a broken pickle can fail in any way
        raise corrupt(str(path), f"cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def _check_stored(path: Path) -> None:
    """Refuses what would be more in memory than on disk."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise corrupt(str(path), f"is a broken zip file ({error})") from error
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(
                f"{path}: entry {entry.filename!r} is compressed, {entry.file_size} bytes in {entry.compress_size}, "
                "which torch.save never does; save it anew with torch.save where you trust it"
            )
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise CheckpointError(f"{path}: its entries overlap, which torch.save never does; do not trust it")
