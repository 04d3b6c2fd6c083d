"""What a strategy writes and reads: single objects, and everything that training needs to go on."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from par_checkpoint import Checkpoints, Report, Save, load, save
from par_groups import agree, check_alike, together
from par_precision import MixedOptimizer

from .existing import PathLike
from .pairs import Pair
from .pretrained.adapters import has_adapters
from .pretrained.files import load_adapters, save_adapters, save_merged

PLANS = ("huggingface", "torch", "peft", "merged")
"""What `save` can write."""


def save_object(
    pairs: Sequence[Pair],
    obj: Any,
    path: PathLike,
    plan: str,
    gigabytes: float,
    device: torch.device,
    *,
    tiers: Sequence[PathLike] | None = None,
    copies: int | None = None,
) -> Save | None:
    """Writes one object; see `Strategy.save`."""
    kind, keywords = _described(pairs, obj, plan, tiered=tiers is not None or copies is not None)
    size = round(gigabytes * 1e9)
    if plan == "huggingface":
        with together("save", None):
            if kind == "model" and has_adapters(obj):
                raise ValueError(
                    f"this {type(obj).__name__} has adapters, for which transformers' own folders have no place; give "
                    "plan='peft' to write these alone, 'merged' for a model that they are part of; checkpoint() "
                    "writes what training needs to go on"
                )
        return save(_folder(path, kind), **keywords, overwrite=True, max_shard_size=size, tiers=tiers, copies=copies)
    if plan == "peft":
        save_adapters(obj, path)
        return None
    if plan == "merged":
        save_merged(obj, path, size, device)
        return None
    with together("save", None):
        if "://" in os.fspath(path):
            raise ValueError(
                f"path={os.fspath(path)!r}: a single file of torch.save is written to local disks; pass a local path, "
                "or plan='huggingface'"
            )
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
    return None


def load_object(
    pairs: Sequence[Pair], obj: Any, path: PathLike, plan: str, *, tiers: Sequence[PathLike] | None = None
) -> None:
    """Reads one object; see `Strategy.load`."""
    kind, keywords = _described(pairs, obj, plan, tiered=tiers is not None)
    if plan == "peft":
        load_adapters(obj, path)
        return
    if plan == "torch":
        with _as_folder(path, kind) as folder:
            load(folder, **keywords)
        return
    own = _folder(path, kind)
    if tiers is not None:
        load(own, **keywords, tiers=tiers)
        return
    load(own if Path(own, "par_checkpoint.json").exists() else path, **keywords)


@dataclass(frozen=True)
class Root:
    """Where checkpoints of everything are, by what tells one such place from another.

    Args:
        path: Their folder; with tiers, its name in each of them.
        tiers: Folders or URLs, the nearest first; None: there is that folder alone.
        copies: On how many hosts each host's part of the first tier is kept; None: all ranks share that tier.
        keep_last: Number of the newest that stay, or of each tier; None: all do.
    """

    path: str
    tiers: tuple[str, ...] | None = None
    copies: int | None = None
    keep_last: int | tuple[int | None, ...] | None = None

    @classmethod
    def of(
        cls,
        path: PathLike,
        tiers: Sequence[PathLike] | None,
        copies: int | None = None,
        keep_last: int | Sequence[int | None] | None = None,
    ) -> "Root":
        """The place, as the methods of `Strategy` are told it."""
        if tiers is not None and (isinstance(tiers, str | bytes) or not isinstance(tiers, Sequence)):
            raise TypeError(f"tiers is {tiers!r}; give a list of folders or URLs, the nearest first")
        return cls(
            path=os.fspath(path),
            tiers=None if tiers is None else tuple(os.fspath(tier) for tier in tiers),
            copies=copies,
            keep_last=tuple(keep_last) if isinstance(keep_last, Sequence) else keep_last,
        )

    def checkpoints(self, pairs: Sequence[Pair]) -> list[tuple[Pair, Checkpoints]]:
        """Each optimizer's checkpoints; one has the root for itself."""
        if not pairs:
            raise ValueError("there is no model to save or to resume; call initialize() first")
        roots = [self.path] if len(pairs) == 1 else [f"{self.path}/{number}" for number in range(len(pairs))]
        return [
            (pair, Checkpoints(path, keep_last=self.keep_last, tiers=self.tiers, copies=self.copies))
            for pair, path in zip(pairs, roots, strict=True)
        ]


def save_run(
    folders: Sequence[tuple[Pair, Checkpoints]], state: Mapping[str, Any], step: int, keywords: Mapping[str, Any]
) -> list[Save]:
    """Writes everything; see `Strategy.checkpoint`."""
    handles = []
    for pair, folder in folders:
        # copy="background" is how `async_` copies
        handle = folder.save(step, force=True, extra=dict(state), copy="background", **_parts(pair), **keywords)
        handles.extend([] if handle is None else [handle])
    return handles


def newest_step(folders: Sequence[tuple[Pair, Checkpoints]]) -> int | None:
    """The newest step that all models have whole; see `Strategy.newest_step`."""
    newest = [folder.latest() for _, folder in folders]
    steps = [int(path.rpartition("-")[2]) for path in newest if path is not None]
    return min(steps) if len(steps) == len(newest) else None


def load_run(folders: Sequence[tuple[Pair, Checkpoints]], loaders: int, step: int) -> Report:
    """Reads everything, and gives what `save_run` was given and where it was; see `Strategy.resume`."""
    tiers = folders[0][1].tiers
    first = load(folders[0][1].name(step), strict=False, tiers=tiers)  # fills nothing yet
    saved = len(first.extra["loaders"])
    if saved != loaders:
        raise ValueError(f"step {step} was saved with {saved} data loaders, and here are {loaders}; initialize as many")
    report = first
    for pair, folder in folders:
        report = load(folder.name(step), tiers=tiers, **_parts(pair))
    return report


def _parts(pair: Pair) -> dict[str, Any]:
    """Lists what is saved of a pair."""
    scaling = [pair.optimizer.scaling] if isinstance(pair.optimizer, MixedOptimizer) else []
    return {"model": pair.module, "optimizer": pair.optimizer, "scheduler": [*scaling, *pair.schedulers] or None}


def _described(pairs: Sequence[Pair], obj: Any, plan: str, *, tiered: bool = False) -> tuple[str, dict[str, Any]]:
    """The kind of an object, and the keyword that par-checkpoint takes it by; agreed on by all ranks.

    Args:
        pairs: What has been initialized.
        obj: One of these objects.
        plan: What is written or read.
        tiered: Whether that is in tiers.
    """
    pairs_of = (
        ("model", lambda pair: pair.models),
        ("optimizer", lambda pair: [pair.optimizer]),
        ("scheduler", lambda pair: pair.schedulers),
    )
    kinds = [kind for kind, of in pairs_of if any(obj is one for pair in pairs for one in of(pair))]
    problem = None
    if plan not in PLANS:
        problem = ValueError(f"plan is {plan!r}; it can be one of {', '.join(PLANS)}")
    elif tiered and plan != "huggingface":
        problem = ValueError(
            f"plan is {plan!r}, whose files one rank writes to one place, but tiers or copies are given; use "
            "plan='huggingface', or leave them out"
        )
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
