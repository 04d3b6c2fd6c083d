"""The policies of `save` and `load`: how files look, how bytes travel to them, and in which tiers they are kept."""

import contextlib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from os.path import realpath
from typing import Any

import torch
from torch.optim import Optimizer

from par_groups import Sharding, parse_size

from .format.manifest import is_base_name
from .state.conversion import Conversion
from .state.model import Model, Names
from .state.state import State

Path = str | PathLike[str]

TIMEOUT = 1800.0

_STEM = re.compile("[0-9A-Za-z_]+")


@dataclass(frozen=True, kw_only=True)
class Format:
    """The format of a checkpoint's files, and how the model's tensors map to the tensors in them.

    Pass the same format to `save` and `load`. Each of them ignores the fields that only the other one needs.

    Args:
        style: "huggingface" for safetensors that `transformers` opens. "torch" for one file each for the model, the
            optimizer, the scheduler and `extra`, which `torch.load` opens. `load` detects the style.
        dtype: Dtype to which `save` casts the model's floating-point tensors, such as `torch.bfloat16`. None: each
            tensor keeps its dtype.
        max_shard_size: Largest size of one safetensors file, such as "5GB" (decimal), "5GiB" or a number of bytes. A
            larger tensor gets a file of its own. Only `save` uses it.
        stem: First part of the names of the model's files. "adapter_model" is for the tensors of a PEFT adapter.
            Another stem than "model" disables the conversion and the config files of Transformers models. `load` needs
            it only for folders that another program wrote.
        variant: Variant of files that another program wrote: "fp16" loads `model.fp16.safetensors`. Only `load` uses
            it.
        layout: `Sharding` of local tensors by name, for tensors without sharding metadata of their own.
        names: Map from a tensor's name in the model to its name in the files: a dict, pairs of (pattern, replacement),
            or a function.
        convert: Function from a tensor's name in the model and its global shape to the slices of tensors in the files
            that make it up, or to None if the files hold the tensor unchanged. Default: the conversion that
            Transformers applies to its own models.
        config: Content of `config.json`: a mapping, or an object with `to_dict`, such as a Transformers config. None:
            what `save_pretrained` writes for a Transformers model, and no file for other models. Only `save` uses it.
        assets: Paths of further files that rank 0 copies, such as a tokenizer's. A folder stands for the tokenizer and
            processor files in it. Only `save` uses them.

    Raises:
        ValueError, TypeError: A field has a value that is not allowed.
    """

    style: str = "huggingface"
    dtype: torch.dtype | None = None
    max_shard_size: str | int = "5GB"
    stem: str = "model"
    variant: str | None = None
    layout: Mapping[str, Sharding] | None = None
    names: Names | None = None
    convert: Conversion | None = None
    config: Any = None
    assets: Sequence[Path] | None = None

    def __post_init__(self) -> None:
        check_one_of("style", self.style, ("huggingface", "torch"))
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(
                f"dtype is {self.dtype!r}; give a floating-point torch.dtype, or None to keep each tensor's"
            )
        parse_size(self.max_shard_size, name="max_shard_size", least=1)
        if not isinstance(self.stem, str) or _STEM.fullmatch(self.stem) is None or self.stem == "par_checkpoint":
            raise ValueError(
                f"stem is {self.stem!r}; give letters, digits and underscores, such as 'adapter_model', and not the "
                "name of the manifest"
            )
        for name, record in (self.layout or {}).items():
            if not isinstance(record, Sharding):
                raise TypeError(f"layout maps names to par_groups.Sharding records, but {name!r} to {record!r:.80}")
        if self.config is not None and not isinstance(self.config, Mapping) and not hasattr(self.config, "to_dict"):
            raise TypeError(f"config is {self.config!r:.80}; give a mapping, or an object with to_dict()")
        if self.assets is not None:
            # A single path is iterable too, and would be taken for a list of one-letter files.
            if not isinstance(self.assets, Sequence) or isinstance(self.assets, str | bytes):
                raise TypeError(f"assets is {self.assets!r}; give a list of paths of files or folders")
            wrong = [path for path in self.assets if not isinstance(path, str | PathLike)]
            if wrong:
                raise TypeError(f"assets has {wrong[0]!r}; each item is the path of a file or a folder")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Options for moving bytes between a rank's tensors and the files.

    Args:
        budget: Host memory that a rank may use in addition to its own state, such as "256MB". The copy that a
            background save makes comes on top of it.
        threads: Number of threads per rank that read, write and compute checksums.
        timeout: Seconds to wait for a rank that does not answer.
        progress: Whether rank 0 shows a progress bar, which needs tqdm. None: only if stderr is a terminal.
        copy: When `save(async_=True)` copies the state of this rank. "blocking": before `save` returns. "background":
            during the next forward and backward pass, because an optimizer changes trained parameters and its state
            only in its step. Each torch optimizer waits for the copy before it steps. Code that changes these tensors
            in another way must call `Save.wait_for_copy` first. `save` still copies buffers and frozen parameters
            before it returns.
        pending: Behaviour of `save` while an earlier background save is running: "wait" for it, or "raise".
        writer: Assignment of files to writers. "pwrite": several ranks write their ranges of the same file, on S3 their
            parts. "owner": one rank writes a file from beginning to end. "auto": "pwrite" on local disks, Lustre, GPFS
            and S3; "owner" on NFS, SMB, FUSE, unknown file systems and other object stores.

    Raises:
        ValueError: A field has a value that is not allowed.
    """

    budget: str | int = "256MB"
    threads: int = 2
    timeout: float = TIMEOUT
    progress: bool | None = None
    copy: str = "blocking"
    pending: str = "wait"
    writer: str = "auto"

    def __post_init__(self) -> None:
        parse_size(self.budget, name="budget", least=1)
        if not isinstance(self.threads, int) or self.threads < 1:
            raise ValueError(f"threads is {self.threads!r}; give 1 or more")
        check_timeout(self.timeout)
        check_one_of("copy", self.copy, ("blocking", "background"))
        check_one_of("pending", self.pending, ("wait", "raise"))
        check_one_of("writer", self.writer, ("auto", "pwrite", "owner"))


@dataclass(frozen=True)
class Tiers:
    """Storage tiers that each keep a full checkpoint, such as host memory, a local disk and an object store.

    With tiers, the path of a checkpoint is its name in each of them. `save` waits until the first tier has the
    checkpoint. In the background it then copies the checkpoint from each tier to the next one. Neither the training
    step nor the next save waits for these copies. `load` takes the first tier in which all ranks see the same full
    checkpoint.

    Args:
        folders: Folders or URLs, the nearest first, such as "/dev/shm/run", "/nvme/run" and "s3://bucket/run".
        copies: Number of hosts that keep each host's shard of a checkpoint, if the first tier is local to each host as
            "/dev/shm" is. With 2, the next host keeps a replica, so that `load` needs no slower tier after one host is
            lost. None: all ranks share the first tier. `load` finds the shards without it.

    Raises:
        TypeError: `folders` is not a list of paths, or `copies` is not a whole number.
        ValueError: `folders` is empty, or `copies` is less than 1.
    """

    folders: Sequence[Path]
    copies: int | None = None

    def __post_init__(self) -> None:
        folders = self.folders
        # A single path is iterable too, and would be taken for a list of one-letter folders.
        if not isinstance(folders, Sequence) or isinstance(folders, str | bytes):
            raise TypeError(f"tiers is {folders!r}; give a list of folders or URLs, the nearest first")
        wrong = [folder for folder in folders if not isinstance(folder, str | PathLike)]
        if wrong:
            raise TypeError(f"tiers has {wrong[0]!r}; each item is a folder or a URL")
        if not folders:
            raise ValueError("tiers is []; give one or more folders or URLs, the nearest first")
        object.__setattr__(self, "folders", tuple(folders))  # so that equal tiers are equal keys
        if self.copies is None:
            return
        if isinstance(self.copies, bool) or not isinstance(self.copies, int):
            raise TypeError(
                f"copies is {self.copies!r}; give on how many hosts each host's shard is to be, such as 2, or None"
            )
        if self.copies < 1:
            raise ValueError(
                f"copies is {self.copies}; give 1 to keep a host's shard on that host only, 2 for a replica on the next"
            )


def state_of(
    files: Format, model: Model | None, optimizer: Optimizer | None, scheduler: object, extra: object = None
) -> State:
    """Return the objects of a run, with the names and the layout that their tensors have in the files."""
    layout, names, convert = files.layout, files.names, files.convert
    return State(
        model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, layout=layout, names=names, convert=convert
    )


def urls_of(path: Path, tiers: Tiers | None) -> list[str]:
    """Return the folders of a checkpoint: its path, or with tiers a folder of that name in each of them.

    Args:
        path: The path, or the name in the tiers.
        tiers: The tiers.

    Raises:
        ValueError: Two tiers are equal or nested, or `path` is not a plain name.
    """
    if tiers is None:
        return [fspath(path)]
    name, roots = fspath(path), [fspath(tier).rstrip("/") for tier in tiers.folders]
    if not isinstance(name, str) or not all(is_base_name(part) for part in name.split("/")):
        raise ValueError(f"path is {name!r}; with tiers it is the checkpoint's name in each of them, such as 'step-1'")
    if len(set(roots)) < len(roots):
        raise ValueError(f"tiers is {list(tiers.folders)!r}; give folders or URLs that are all different")
    # Links may lead from one tier to another. A save would then copy a checkpoint onto itself.
    seen = [root if "://" in root else realpath(root) for root in roots]
    for number, inner in enumerate(seen):
        for outer in seen[:number] + seen[number + 1 :]:
            if f"{inner}/".startswith(f"{outer}/"):
                raise ValueError(
                    f"tiers is {list(tiers.folders)!r}, of which {roots[number]!r} is another one, or lies in it; give "
                    "folders that do not hold each other"
                )
    return [f"{root}/{name}" for root in roots]


def check_policy(name: str, given: object, kind: type) -> None:
    """Raise TypeError unless a policy is of its class, or None."""
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"{name} is {given!r:.80}; give a par_checkpoint.{kind.__name__}, or None for the defaults")


def timeout_of(transfer: object) -> float:
    """Return the timeout of a policy. Ranks must first find each other before one of them can refuse another object."""
    return transfer.timeout if isinstance(transfer, Transfer) else TIMEOUT


def is_timeout(timeout: object) -> bool:
    """Return whether a timeout is a positive number of seconds."""
    return isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0


def check_timeout(timeout: object) -> None:
    """Raise ValueError unless a timeout is a positive number of seconds."""
    if not is_timeout(timeout):
        raise ValueError(f"timeout is {timeout!r} seconds; give a positive number")


def whole_number(name: str, value: object) -> int:
    """Convert a whole number, such as one of NumPy or a tensor of one element, to Python's int.

    Raises:
        TypeError: Anything else, truth values and floats included.
    """
    of_truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool"
    with contextlib.suppress(TypeError, ValueError):  # torch raises the second for a tensor of several elements
        if not of_truth:
            return operator.index(value)  # type: ignore[arg-type]
    raise TypeError(f"{name}={value!r:.80}: a {type(value).__name__} is no whole number; pass an int")


def check_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless a value is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it can be {', '.join(map(repr, allowed))}")
