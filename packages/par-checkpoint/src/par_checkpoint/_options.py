"""How to save and load, apart from what and where: the keywords of `save` and `load` as objects that check them."""

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ParamSpec, TypeVar

import torch

from par_groups import Sharding, parse_size

from ._progress import check_progress
from .state.conversion import Convert
from .state.model import Names
from .transfer.ranks import Ranks, words
from .transfer.roll import named_ranks

STYLES = ("huggingface", "torch")
_WRITERS = ("auto", "pwrite", "owner")
_COPY = ("blocking", "background")
_PENDING = ("wait", "raise")
_VERIFY = ("auto", "full", "off")


_STEM = re.compile("[0-9A-Za-z_]+")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save: the keywords of `save` that can be kept in an object and given as `options`.

    Args:
        max_shard_size: Bytes of tensors in a file, such as "5GB" (decimal), "5GiB" or a number; a larger tensor gets a
            file of its own.
        async_: Whether to copy what this rank gives, return, and write in the background.
        copy: When a save with `async_` copies. "blocking": before `save` returns. "background": while the next forward
            and backward pass run, as trained parameters and the optimizer's state change only in its step; every torch
            optimizer waits for the copy before it steps. Whoever changes them in another way must call the handle's
            `wait_for_copy` first. Buffers and frozen parameters are still copied before `save` returns.
        pending: What to do when an earlier save in the background is not done: "wait" for it, or "raise".
        writer: Which ranks write a file. "pwrite": several write their ranges of common files, on S3 their parts.
            "owner": one rank writes a file from beginning to end. "auto": "pwrite" on a local disk, on Lustre and GPFS,
            and on S3; "owner" on NFS, SMB, FUSE and what is not known, and on other stores.
        layout: By name of a tensor: how the local tensor is cut out of the global one, where no record says it.
        names: From a tensor's name in the model to its name in the files: a dict, pairs of (pattern, replacement), or a
            function.
        convert: From a tensor's name in the model and its global shape to the tensors on disk that make it up, or None
            where it is there as it is. Default: what transformers does to its own models.
        dtype: Floating-point tensors of the model are cast to this dtype on their way to the files; None: none are.
        config: What is written as config.json: a mapping, or an object with `to_dict`, such as a transformers config.
            None: what `save_pretrained` would write if `model` is one of transformers, else nothing.
        assets: Paths of further files, which are copied as they are, such as a tokenizer's; a folder stands for the
            files of its tokenizer and processor. Rank 0 reads them before anything is written.
        stem: What the names of the model's files begin with. Other stems than "model" leave a model of transformers
            unconverted and without its config files: "adapter_model" is for the tensors of a peft adapter.
        budget: Bytes that a rank may hold beside its own state, such as "256MB". The copy of `async_` is extra.
        threads: Number of threads of a rank that checksum and write.
        timeout: Seconds to wait for a rank that does not answer.
        progress: Whether rank 0 shows a bar (needs tqdm); None: where stderr is a terminal.
        step: The training step, which is noted in the checkpoint.

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
    assets: Sequence[str | PathLike[str]] | None = None
    stem: str = "model"
    budget: str | int = "256MB"
    threads: int = 2
    timeout: float = 1800.0
    progress: bool | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        _one_of("copy", self.copy, _COPY)
        _one_of("pending", self.pending, _PENDING)
        _one_of("writer", self.writer, _WRITERS)
        if self.step is not None:
            object.__setattr__(self, "step", whole_number("step", self.step))
        parse_size(self.max_shard_size, name="max_shard_size", least=1)
        _check_common(self)
        _check_assets(self.assets)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(
                f"dtype is {self.dtype!r}; give a floating-point torch.dtype, or None to keep each tensor's"
            )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load: the keywords of `load` that can be kept in an object and given as `options`.

    Args:
        layout: By name of a tensor: how the local tensor is cut out of the global one, where no record says it.
        names: From a tensor's name in the model to its name in the files: a dict, pairs of (pattern, replacement), or a
            function.
        convert: From a tensor's name in the model and its global shape to the tensors on disk that make it up, or None
            where it is there as it is. Default: what transformers does to its own models.
        dtype: Which tensors of the model may be filled from files of another dtype: its floating-point tensors of this
            dtype, or of a tuple of these. Their values are cast on the way; no tensor of the model changes its own
            dtype. None: the dtypes in the files and in the model must agree.
        verify: "auto" checks every block that is read, while it is read; "full" checks all files before anything is
            changed; "off" checks sizes and headers alone.
        variant: Which files of other writers to read: "fp16" reads model.fp16.safetensors.
        stem: What the names of other writers' files begin with: "adapter_model" reads an adapter of peft. What was
            saved here is known by its manifest.
        device: The device on which tensors of the meta device are made. None: that of the model's device mesh, if it
            has DTensors, else the CPU.
        budget: Bytes that a rank may hold beside its own state, such as "256MB".
        threads: Number of threads of a rank that read and checksum.
        timeout: Seconds to wait for a rank that does not answer.
        progress: Whether rank 0 shows a bar (needs tqdm); None: where stderr is a terminal.

    Raises:
        ValueError: A value that is none of these.
        ImportError: progress=True without tqdm.
    """

    layout: Mapping[str, Sharding] | None = None
    names: Names | None = None
    convert: Convert | None = None
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None
    verify: str = "auto"
    variant: str | None = None
    stem: str = "model"
    device: str | torch.device | None = None
    budget: str | int = "256MB"
    threads: int = 2
    timeout: float = 1800.0
    progress: bool | None = None

    def __post_init__(self) -> None:
        _one_of("verify", self.verify, _VERIFY)
        _check_common(self)


@dataclass(frozen=True)
class Alike:
    """What every rank must give alike: options of which each rank having its own would end in a hang, or in nonsense.

    It is compared by words that go with integers which ranks add up anyway, so it costs no message.

    Args:
        values: By name of an option: its value, whose text tells it from every other value.
    """

    values: Mapping[str, object]

    def words(self) -> list[int]:
        """Integers that stand for all of it."""
        return words(repr(self.values).encode())

    def check(self, sums: Sequence[int], ranks: Ranks) -> None:
        """Compares; collective where ranks differ.

        Args:
            sums: The sums of `words` over all ranks.
            ranks: The ranks.

        Raises:
            ValueError: An option that differs, with its values and their ranks; on every rank.
        """
        if list(sums) == [ranks.size * word for word in self.words()]:
            return
        of_ranks = ranks.distinct(self.values)
        for name in self.values:
            given: dict[str, list[int]] = {}
            for holders, values in of_ranks:
                given.setdefault(repr(values[name]), []).extend(holders)
            if len(given) > 1:
                each = [f"{value} on {named_ranks(holders)}" for value, holders in given.items()]
                raise ValueError(f"{name} is {', and '.join(each)}; give the same on all ranks")


def kinds_of(urls: Sequence[str]) -> list[str]:
    """What kind of place each folder or URL is; on ranks that save or load together the same, whatever their paths."""
    return [f"{url.partition('://')[0]}://..." if "://" in url else "a local folder" for url in urls]


def place_of(url: str) -> str:
    """What ranks compare of the folder that they save to or load: its kind and its name.

    Where it lies may differ between machines. A different name is a different checkpoint, as of two threads that save
    at once, and whose saves ranks have begun in a different order.
    """
    return f"{kinds_of([url])[0]} named {url.rstrip('/').rpartition('/')[2]!r}"


def takes_options(kind: type) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Lets a function with a keyword for each field of an options class take such an object, too, as `options`.

    What is given as a keyword goes before the field of the object. The function gets every field as a keyword.

    Args:
        kind: `SaveOptions` or `LoadOptions`.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        parameters = inspect.signature(function).parameters
        known = list(parameters)
        fields = (field.name for field in dataclasses.fields(kind))
        names = [name for name in fields if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]

        @functools.wraps(function)
        def call(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            options = keywords.get("options")
            if isinstance(options, kind):  # else the function says what is wrong with it, on all ranks
                keywords.update({name: getattr(options, name) for name in names if name not in keywords})
            unknown = sorted(keywords.keys() - known)
            if unknown:  # which is said in the same way
                keywords = {name: value for name, value in keywords.items() if name in known}  # type: ignore[assignment]
                keywords["options"] = _Unknown(unknown[0], known)
            return function(*args, **keywords)

        return call

    return decorate


@dataclass(frozen=True)
class _Unknown:
    """A keyword that a function does not have, in place of its options, and the keywords that it has."""

    keyword: str
    known: list[str]


def check_options(options: object, kind: type) -> None:
    """Raises TypeError unless `options` is of its class, or None, and all keywords were known."""
    if isinstance(options, _Unknown):
        raise TypeError(f"unknown keyword {options.keyword!r}; there are {', '.join(options.known)}")
    if options is not None and not isinstance(options, kind):
        raise TypeError(f"options is {options!r}; give a {kind.__name__}")


def usable_timeout(timeout: object) -> float:
    """The seconds that were asked for; the usual ones in place of what is no such number, which is refused later."""
    usable = isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0
    return float(timeout) if usable else LoadOptions.timeout  # type: ignore[arg-type]


def whole_number(name: str, value: object) -> int:
    """A whole number as Python's int, such as one of NumPy or a tensor of one element.

    Raises:
        TypeError: Anything else, truth values and floats included.
    """
    of_truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool"
    with contextlib.suppress(TypeError, ValueError):  # torch raises the second for a tensor of several elements
        if not of_truth:
            return operator.index(value)  # type: ignore[arg-type]
    raise TypeError(f"{name}={value!r:.80}: a {type(value).__name__} is no whole number; pass an int")


def check_style(style: str) -> None:
    """Raises ValueError unless it is one of the styles of files."""
    _one_of("style", style, STYLES)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless a value is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it can be {', '.join(map(repr, allowed))}")


def _check_assets(assets: object) -> None:
    """Raises TypeError unless these are paths; one path alone is iterable too, but no list of them."""
    if assets is None:
        return
    if not isinstance(assets, Sequence) or isinstance(assets, str | bytes):
        raise TypeError(f"assets is {assets!r}; give a list of paths of files or folders")
    wrong = [path for path in assets if not isinstance(path, str | PathLike)]
    if wrong:
        raise TypeError(f"assets has {wrong[0]!r}; each item is the path of a file or a folder")


def _check_common(options: "SaveOptions | LoadOptions") -> None:
    """Checks the fields that both kinds of options have."""
    if not isinstance(options.stem, str) or _STEM.fullmatch(options.stem) is None or options.stem == "par_checkpoint":
        raise ValueError(
            f"stem is {options.stem!r}; give letters, digits and underscores, such as 'adapter_model', and not the "
            "name of the manifest"
        )
    parse_size(options.budget, name="budget", least=1)
    check_progress(options.progress)
    if not isinstance(options.threads, int) or options.threads < 1:
        raise ValueError(f"threads is {options.threads!r}; give 1 or more")
    if not (isinstance(options.timeout, int | float) and math.isfinite(options.timeout) and options.timeout > 0):
        raise ValueError(f"timeout is {options.timeout!r} seconds; give a positive number")
    for name, record in (options.layout or {}).items():
        if not isinstance(record, Sharding):
            raise TypeError(f"layout maps names to par_groups.Sharding records, but {name!r} to {record!r:.80}")
