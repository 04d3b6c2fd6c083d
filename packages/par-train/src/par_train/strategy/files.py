"""What a strategy writes and reads: single objects, and everything that training needs to go on."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from par_checkpoint import Checkpoints, Save, load, save
from par_groups import agree, check_alike, together
from par_precision import MixedOptimizer

from .existing import PathLike
from .pairs import Pair
from .pretrained.adapters import has_adapters
from .pretrained.files import load_adapters, save_adapters, save_merged

PLANS = ("huggingface", "torch", "peft", "merged")
"""What `save` can write."""


def save_object(
    pairs: Sequence[Pair], obj: Any, path: PathLike, plan: str, gigabytes: float, device: torch.device
) -> None:
    """Writes one object; see `Strategy.save`."""
    kind, keywords = _described(pairs, obj, plan)
    size = round(gigabytes * 1e9)
    if plan == "huggingface":
        with together("save", None):
            if kind == "model" and has_adapters(obj):
                raise ValueError(
                    f"this {type(obj).__name__} has adapters, for which transformers' own folders have no place; give "
                    "plan='peft' to write these alone, 'merged' for a model that they are part of; checkpoint() "
                    "writes what training needs to go on"
                )
        save(_folder(path, kind), **keywords, overwrite=True, max_shard_size=size)
        return
    if plan == "peft":
        save_adapters(obj, path)
        return
    if plan == "merged":
        save_merged(obj, path, size, device)
        return
    staging = f"{os.fspath(path)}.saving"
    save(staging, **keywords, style="torch", overwrite=True)
    with together(kind, None):  # the file is there when any rank returns
        if dist.get_rank() == 0:
            try:
                sums = Path(f"{os.fspath(path)}.json")
                sums.unlink(missing_ok=True)  # a file without sums can be read, one with those of another one cannot
                Path(staging, f"{kind}.pt").replace(path)
                Path(staging, "par_checkpoint.json").replace(sums)
            finally:
                shutil.rmtree(staging, ignore_errors=True)


def load_object(pairs: Sequence[Pair], obj: Any, path: PathLike, plan: str) -> None:
    """Reads one object; see `Strategy.load`."""
    kind, keywords = _described(pairs, obj, plan)
    if plan == "peft":
        load_adapters(obj, path)
        return
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
    *,
    step: int,
    keep_last: int | Sequence[int | None] | None,
    tiers: Sequence[PathLike] | None,
    copies: int | None,
    keywords: Mapping[str, Any],
) -> list[Save]:
    """Writes everything; see `Strategy.checkpoint`."""
    handles = []
    for pair, folder in _folders(pairs, root, keep_last, tiers, copies):
        # copy="background" is how `async_` copies
        handle = folder.save(step, force=True, extra=dict(state), copy="background", **_parts(pair), **keywords)
        handles.extend([] if handle is None else [handle])
    return handles


def newest_step(pairs: Sequence[Pair], root: PathLike, tiers: Sequence[PathLike] | None) -> int | None:
    """The newest step that all models have whole; see `Strategy.newest_step`."""
    newest = [folder.latest() for _, folder in _folders(pairs, root, None, tiers)]
    steps = [int(path.rpartition("-")[2]) for path in newest if path is not None]
    return min(steps) if len(steps) == len(newest) else None


def load_run(
    pairs: Sequence[Pair], loaders: int, root: PathLike, step: int, tiers: Sequence[PathLike] | None
) -> Mapping[str, Any]:
    """Reads everything, and gives the state that `save_run` was given; see `Strategy.resume`."""
    folders = _folders(pairs, root, None, tiers)
    saved = len(load(folders[0][1].name(step), strict=False, tiers=tiers).extra["loaders"])  # fills nothing yet
    if saved != loaders:
        raise ValueError(f"step {step} was saved with {saved} data loaders, and here are {loaders}; initialize as many")
    state: Mapping[str, Any] = {}
    for pair, folder in folders:
        state = load(folder.name(step), tiers=tiers, **_parts(pair)).extra
    return state


def _folders(
    pairs: Sequence[Pair],
    root: PathLike,
    keep_last: int | Sequence[int | None] | None,
    tiers: Sequence[PathLike] | None = None,
    copies: int | None = None,
) -> list[tuple[Pair, Checkpoints]]:
    """Each optimizer's checkpoints; one has the root for itself."""
    if not pairs:
        raise ValueError("there is no model to save or to resume; call initialize() first")
    roots = [os.fspath(root)] if len(pairs) == 1 else [f"{os.fspath(root)}/{n}" for n in range(len(pairs))]
    return [
        (pair, Checkpoints(path, keep_last=keep_last, tiers=tiers, copies=copies))
        for pair, path in zip(pairs, roots, strict=True)
    ]


def _parts(pair: Pair) -> dict[str, Any]:
    """Lists what is saved of a pair."""
    scaling = [pair.optimizer.scaling] if isinstance(pair.optimizer, MixedOptimizer) else []
    return {"model": pair.module, "optimizer": pair.optimizer, "scheduler": [*scaling, *pair.schedulers] or None}


def _described(pairs: Sequence[Pair], obj: Any, plan: str) -> tuple[str, dict[str, Any]]:
    """The kind of an object, and the keyword that par-checkpoint takes it by; agreed on by all ranks."""
    pairs_of = (
        ("model", lambda pair: pair.models),
        ("optimizer", lambda pair: [pair.optimizer]),
        ("scheduler", lambda pair: pair.schedulers),
    )
    kinds = [kind for kind, of in pairs_of if any(obj is one for pair in pairs for one in of(pair))]
    problem = None
    if plan not in PLANS:
        problem = ValueError(f"plan is {plan!r}; it can be one of {', '.join(PLANS)}")
    elif not kinds or obj is None:
        problem = ValueError(f"this {type(obj).__name__} is not from initialize(); give what that returned")
    elif plan in ("peft", "merged") and not (kinds[0] == "model" and has_adapters(obj)):
        problem = ValueError(f"plan is {plan!r}, but this {type(obj).__name__} has no adapters; use 'huggingface'")
    check_alike(agree(problem, f"{kinds} {plan}", None), "objects and plans")
    return kinds[0], {kinds[0]: obj}


def _folder(path: PathLike, kind: str) -> str:
    return os.fspath(path) if kind == "model" else f"{os.fspath(path)}/{kind}"


@contextmanager
def _as_folder(path: PathLike, kind: str) -> Iterator[str]:
    """A torch file, and its checksums if it has some, as the folder that par-checkpoint reads. Collective."""
    folder = f"{os.fspath(path)}.loading"
    with together(kind, None):
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
            _stand_in(Path(path), Path(folder, f"{kind}.pt"))
            sums = Path(f"{os.fspath(path)}.json")
            if sums.exists():
                _stand_in(sums, Path(folder, "par_checkpoint.json"))
    try:
        yield folder
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


def _stand_in(path: Path, name: Path) -> None:
    """Makes a file to be found under another name, too: a link; or a copy where the file system has no links."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}; give one that torch.save or Strategy.save wrote")
    try:
        name.symlink_to(path.absolute())
    except OSError:
        shutil.copyfile(path, name)
