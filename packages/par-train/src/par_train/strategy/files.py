"""What a strategy writes and reads: single objects, and everything that training needs to go on."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from par_checkpoint import Checkpoints, Save, inspect, load, save
from par_groups import agree, check_alike, together
from par_precision import MixedOptimizer

from .pairs import Pair

PLANS = ("huggingface", "torch")

PathLike = str | os.PathLike[str]


def save_object(pairs: Sequence[Pair], obj: Any, path: PathLike, plan: str, gigabytes: float) -> None:
    """Writes one object; see `Strategy.save`."""
    kind, keywords = _described(pairs, obj, plan)
    if plan == "huggingface":
        save(_folder(path, kind), **keywords, overwrite=True, max_shard_size=round(gigabytes * 1e9))
        return
    staging = f"{os.fspath(path)}.saving"
    save(staging, **keywords, style="torch", overwrite=True)
    with together(kind, None):  # the file is there when any rank returns
        if dist.get_rank() == 0:
            _put_in_place(staging, kind, path)


def _put_in_place(staging: str, kind: str, path: PathLike) -> None:
    """Moves a torch file and its checksums out of the folder that they were written into."""
    try:
        Path(_sums(path)).unlink(missing_ok=True)  # a file without sums can be read, one with others' cannot
        os.replace(f"{staging}/{kind}.pt", path)  # noqa: PTH105
        os.replace(f"{staging}/par_checkpoint.json", _sums(path))  # noqa: PTH105
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_object(pairs: Sequence[Pair], obj: Any, path: PathLike, plan: str) -> None:
    """Reads one object; see `Strategy.load`."""
    kind, keywords = _described(pairs, obj, plan)
    if plan == "torch":
        with _as_folder(path, kind) as folder:
            load(folder, **keywords)
        return
    own = _folder(path, kind)
    load(own if Path(own, "par_checkpoint.json").exists() else path, **keywords)


def save_run(
    pairs: Sequence[Pair],
    state: Mapping[str, Any],
    root: PathLike,
    step: int,
    keep_last: int | None,
    keywords: Mapping[str, Any],
) -> list[Save]:
    """Writes everything; see `Strategy.checkpoint`."""
    handles = []
    for each, folder in _folders(pairs, root, keep_last):
        told = {"copy": "background", **_parts(each), **keywords}  # for `async_`, of which it is a part
        handle = folder.save(step, force=True, extra=dict(state), **told)
        handles.extend([] if handle is None else [handle])
    return handles


def newest_step(pairs: Sequence[Pair], root: PathLike) -> int | None:
    """The newest step that all models have whole; see `Strategy.newest_step`."""
    newest = [folder.latest() for _, folder in _folders(pairs, root, None)]
    steps = [int(path.rpartition("-")[2]) for path in newest if path is not None]
    return min(steps) if len(steps) == len(newest) else None


def load_run(pairs: Sequence[Pair], loaders: int, root: PathLike, step: int) -> Mapping[str, Any]:
    """Reads everything, and gives the state that `save_run` was given; see `Strategy.resume`."""
    folders = _folders(pairs, root, None)
    saved = len(inspect(folders[0][1].path(step)).extra["loaders"])
    if saved != loaders:
        raise ValueError(f"step {step} was saved with {saved} data loaders, and here are {loaders}; initialize as many")
    state: Mapping[str, Any] = {}
    for each, folder in folders:
        state = load(folder.path(step), **_parts(each)).extra
    return state


def _folders(pairs: Sequence[Pair], root: PathLike, keep_last: int | None) -> list[tuple[Pair, Checkpoints]]:
    """Each optimizer's checkpoints; one has the root for itself."""
    if not pairs:
        raise ValueError("there is no model to save or to resume; call initialize() first")
    roots = [os.fspath(root)] if len(pairs) == 1 else [f"{os.fspath(root)}/{n}" for n in range(len(pairs))]
    return [(each, Checkpoints(path, keep_last=keep_last)) for each, path in zip(pairs, roots, strict=True)]


def _parts(each: Pair) -> dict[str, Any]:
    """What is saved of a pair."""
    scaling = [each.optimizer.scaling] if isinstance(each.optimizer, MixedOptimizer) else []
    schedulers = [*scaling, *each.schedulers]
    return {"model": each.module, "optimizer": each.optimizer, "scheduler": schedulers or None}


def _described(pairs: Sequence[Pair], obj: Any, plan: str) -> tuple[str, dict[str, Any]]:
    """What kind of object it is, and how par-checkpoint is told of it."""
    problem, kind = None, ""
    keywords: dict[str, Any] = {}
    try:
        if plan not in PLANS:
            raise ValueError(f"plan is {plan!r}; it can be 'huggingface' or 'torch'")
        kind, keywords = _kind_of(pairs, obj)
    except ValueError as error:
        problem = error
    check_alike(agree(problem, f"{kind} {plan}", None), "objects and plans")
    return kind, keywords


def _kind_of(pairs: Sequence[Pair], obj: Any) -> tuple[str, dict[str, Any]]:
    for each in pairs:
        if any(obj is model for model in each.models):
            return "model", {"model": obj}
        if obj is each.optimizer:
            return "optimizer", {"optimizer": obj}
        if any(obj is scheduler for scheduler in each.schedulers):
            return "scheduler", {"scheduler": obj}
    raise ValueError(f"this {type(obj).__name__} is not from initialize(); give what that returned")


def _folder(path: PathLike, kind: str) -> str:
    return os.fspath(path) if kind == "model" else f"{os.fspath(path)}/{kind}"


def _sums(path: PathLike) -> str:
    """The checksums of a torch file."""
    return f"{os.fspath(path)}.json"


@contextmanager
def _as_folder(path: PathLike, kind: str) -> Iterator[str]:
    """A torch file, and its checksums if it has some, as the folder that par-checkpoint reads. Collective."""
    folder = f"{os.fspath(path)}.loading"
    with together(kind, None):
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
            os.link(path, f"{folder}/{kind}.pt")
            if Path(_sums(path)).exists():
                os.link(_sums(path), f"{folder}/par_checkpoint.json")
    try:
        yield folder
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
