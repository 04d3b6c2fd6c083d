"""A single file of torch.save for one object, with its checksums in a second file next to it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from par_groups import together

from ._load import load
from ._policies import Format
from ._save import save


def save_torch_file(path: str | os.PathLike[str], **part: Any) -> None:
    """Write a model, an optimizer or a scheduler as one file that `torch.load` opens. Collective.

    The file has full tensors, whatever the topology is. Its checksums are in `path` + ".json".

    Args:
        path: The file, on a disk that all ranks share.
        **part: One of `model`, `optimizer` and `scheduler`, as `save` takes it.

    Raises:
        ValueError: The path is a URL; on every rank.
    """
    ((kind, _),) = part.items()
    target = os.fspath(path)
    with together("save", *_world()):
        if "://" in target:
            raise ValueError(
                f"path={target!r}: a single file of torch.save is written to local disks only; pass a local path, or "
                "write a folder with save()"
            )
    # A folder of its own first: the old file stays until the new one is complete.
    staging = f"{target}.saving"
    save(staging, **part, overwrite=True, format=Format(style="torch"))
    with together(kind, *_world()):  # on each rank, this returns when the file exists
        if _is_first():
            try:
                sums = Path(f"{target}.json")
                sums.unlink(missing_ok=True)  # the old sums would not fit the new file; a file without sums can be read
                Path(staging, f"{kind}.pt").replace(target)
                Path(staging, "par_checkpoint.json").replace(sums)
            finally:
                shutil.rmtree(staging, ignore_errors=True)


def load_torch_file(path: str | os.PathLike[str], **part: Any) -> None:
    """Fill a model, an optimizer or a scheduler from a file of `save_torch_file` or of torch.save. Collective.

    Args:
        path: The file.
        **part: One of `model`, `optimizer` and `scheduler`, as `load` takes it.

    Raises:
        FileNotFoundError: There is no such file; on rank 0.
        ValueError: There is no such file; on the other ranks. The message names rank 0 and its error.
    """
    ((kind, _),) = part.items()
    with _as_folder(os.fspath(path), kind) as folder:
        load(folder, **part)


@contextmanager
def _as_folder(path: str, kind: str) -> Iterator[str]:
    """A context with a folder that `load` reads, made of a torch file and its checksums, if any. Collective."""
    folder = f"{path}.loading"
    with together(kind, *_world()):
        if _is_first():
            if not Path(path).exists():
                raise FileNotFoundError(
                    f"path={path!r}: there is no such file; pass one that torch.save or save_torch_file wrote"
                )
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
            _link(Path(path), Path(folder, f"{kind}.pt"))
            if Path(f"{path}.json").exists():
                _link(Path(f"{path}.json"), Path(folder, "par_checkpoint.json"))
    try:
        yield folder
    finally:
        with together(kind, *_world()):  # a rank that still reads needs the folder
            pass
        if _is_first():
            shutil.rmtree(folder)


def _link(path: Path, name: Path) -> None:
    """Link a file under another name; copy it if the file system has no links."""
    try:
        name.symlink_to(path.absolute())
    except OSError:
        shutil.copyfile(path, name)


def _world() -> tuple[None, ...]:
    """Return the groups for `together`: the world, or no group if torch.distributed does not run."""
    return (None,) if dist.is_initialized() else ()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
