"""How to save and load, apart from what and where."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from par_groups import Sharding

from ._progress import check_progress
from .state.conversion import Convert
from .state.names import Names

STYLES = ("huggingface", "torch")
_WRITERS = ("auto", "pwrite", "owner")
_COPY = ("blocking", "background")
_PENDING = ("wait", "raise")
_VERIFY = ("auto", "full", "off")

_UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")

Options = TypeVar("Options", "SaveOptions", "LoadOptions")


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save. Each field may be given to `save` as a keyword.

    Args:
        max_shard_size: Bytes of tensors in a file, as "5GB" (decimal) or "5GiB"; a larger tensor gets its own file.
        async_: Copy what this rank gives, return, and write in the background.
        copy: With `async_`. "blocking": `save` returns when the copy is made. "background": it is made, too, while the
            next forward and backward pass run, as trained parameters and the optimizer's state change only in its step;
            every torch optimizer waits for it before it steps. Who changes them in another way must call the handle's
            `wait_for_copy` first. Buffers and frozen parameters are still copied before `save` returns.
        pending: What to do when an earlier save in the background is not done: "wait" for it, or "raise".
        writer: "pwrite": every rank writes its ranges of common files, on one node or a coherent file system. "owner":
            one rank writes a file from beginning to end, for NFS and object stores. "auto": "owner" where the path is
            remote, else "pwrite".
        layout: By name: how a local tensor without a record is cut out of the whole one.
        names: From a model's key to the key in the files: a dict, pairs of (pattern, replacement), or a function.
        convert: From a model's key and global shape to the tensors on disk that make it up, or None. Default: what
            transformers does to its own models.
        dtype: Casts floating-point tensors of the model on the way.
        config: Written as config.json: a mapping, or an object with `to_dict`, such as a transformers config.
        budget: Bytes that a rank may hold beside its own state, as for `max_shard_size`. A copy of `async_` is extra.
        threads: How many threads of a rank checksum and write.
        timeout: Seconds to wait for a rank that does not answer.
        progress: Whether rank 0 shows a bar (needs tqdm); None: where stderr is a terminal.
        step: Is noted in the checkpoint.

    Raises:
        ValueError: A value that is none of these.
        ImportError: progress=True without tqdm.
    """

    max_shard_size: str | int = "5GB"
    async_: bool = False
    copy: str = "blocking"
    pending: str = "wait"
    writer: str = "auto"
    layout: Mapping[str, Sharding] | None = None
    names: Names | None = None
    convert: Convert | None = None
    dtype: torch.dtype | None = None
    config: Any = None
    budget: str | int = "256MB"
    threads: int = 2
    timeout: float = 1800.0
    progress: bool | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        _one_of("copy", self.copy, _COPY)
        _one_of("pending", self.pending, _PENDING)
        _one_of("writer", self.writer, _WRITERS)
        parse_size(self.max_shard_size)
        _check_common(self)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(
                f"dtype is {self.dtype!r}; give a floating-point torch.dtype, or None to keep each tensor's"
            )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load. Each field may be given to `load` as a keyword.

    Args:
        layout: By name: how a local tensor without a record is cut out of the whole one.
        names: From a model's key to the key in the files: a dict, pairs of (pattern, replacement), or a function.
        convert: From a model's key and global shape to the tensors on disk that make it up, or None. Default: what
            transformers itself does for the model, if it is one of its.
        dtype: Floating-point tensors of the model with this dtype may be filled from files of another; None: dtypes
            must agree.
        verify: "auto" checks every block that is read, while it is read; "full" checks all files before anything is
            changed; "off" checks sizes and headers alone.
        variant: Of the files of others: "fp16" reads model.fp16.safetensors.
        device: Where tensors on the meta device are made; default: the CPU.
        budget: Bytes that a rank may hold beside its own state.
        threads: How many threads of a rank read and checksum.
        timeout: Seconds to wait for a rank that does not answer.
        progress: Whether rank 0 shows a bar (needs tqdm); None: where stderr is a terminal.

    Raises:
        ValueError: A value that is none of these.
        ImportError: progress=True without tqdm.
    """

    layout: Mapping[str, Sharding] | None = None
    names: Names | None = None
    convert: Convert | None = None
    dtype: torch.dtype | None = None
    verify: str = "auto"
    variant: str | None = None
    device: str | torch.device = "cpu"
    budget: str | int = "256MB"
    threads: int = 2
    timeout: float = 1800.0
    progress: bool | None = None

    def __post_init__(self) -> None:
        _one_of("verify", self.verify, _VERIFY)
        _check_common(self)


def with_keywords(options: Options | None, kind: type[Options], keywords: Mapping[str, Any]) -> Options:
    """Options with some fields replaced.

    Raises:
        TypeError: A keyword that is no field, with those there are.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(keywords) - set(known))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; there are {', '.join(known)}")
    if options is not None and not isinstance(options, kind):
        raise TypeError(f"options is {options!r}; give a {kind.__name__}")
    return dataclasses.replace(options or kind(), **keywords)


def timeout_of(options: object, keywords: Mapping[str, Any]) -> float:
    """The seconds that were asked for, or the usual ones in place of what is no such number; that is told later."""
    timeout = keywords.get("timeout", getattr(options, "timeout", None))
    usable = isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0
    return float(timeout) if usable else LoadOptions.timeout


def parse_size(size: str | int) -> int:
    """A size in bytes.

    Args:
        size: Bytes, or a text such as "5GB" (decimal) or "5GiB" (binary).

    Raises:
        ValueError: Another text, or nothing above 0.
        TypeError: Neither a text nor a whole number.
    """
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise TypeError(f"size {size!r} is neither a text nor bytes; write it as '5GB' or 5_000_000_000")
    count = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"size {size!r} is not a number and one of {', '.join(_UNITS)}; write it as '5GB'")
        number, unit = match[1], _UNITS[match[2]]
        count = int(float(number) * unit) if "." in number else int(number) * unit
    if int(count) < 1:
        raise ValueError(f"size {size!r} is less than a byte; give at least 1")
    return int(count)


def check_style(style: str) -> None:
    """Raises ValueError unless it is one of the two."""
    _one_of("style", style, STYLES)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it can be {', '.join(map(repr, allowed))}")


def _check_common(options: "SaveOptions | LoadOptions") -> None:
    parse_size(options.budget)
    check_progress(options.progress)
    if not isinstance(options.threads, int) or options.threads < 1:
        raise ValueError(f"threads is {options.threads!r}; give 1 or more")
    if not (isinstance(options.timeout, int | float) and math.isfinite(options.timeout) and options.timeout > 0):
        raise ValueError(f"timeout is {options.timeout!r} seconds; give a positive number")
    for name, record in (options.layout or {}).items():
        if not isinstance(record, Sharding):
            raise TypeError(f"layout maps names to par_groups.Sharding records, but {name!r} to {record!r:.80}")
