"""The command `par-checkpoint`: ls, verify, diff, convert, prune."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from par_groups import Box

from .._errors import CheckpointError, ReplacedError
from ..format.bytes import as_integers
from ..storage.consistent import version_of
from ..storage.folder import open_folder
from ..storage.outline import read_outline
from ..storage.steps import prune, read_manifest, step_of
from ..storage.verify import check_blocks
from ..tiers.gathered import GatheredFolder, HostShard, open_checkpoint, part_folders
from .convert import FORMATS, convert_checkpoint
from .inspect import CheckpointInfo, inspect
from .read import reader_of
from .verify import verify

_SHOWN = 4  # rectangles of a tensor in a line
_LISTED = 20  # names of what was not converted


_TOGETHER = "several folders of hosts with parts of one checkpoint are looked at together"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Default: the process's own.

    Returns:
        0: all is well; 1: something is wrong with a checkpoint, or two differ; 2: the arguments make no sense; 130: it
        was interrupted.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        code: int = given.run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # of `par-checkpoint ls ... | head`
        # Python flushes the output once more when it ends, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        sys.stderr.write(f"par-checkpoint {given.command}: interrupted\n")
        return 130
    except (CheckpointError, OSError, ValueError, TypeError, ImportError) as error:
        sys.stderr.write(f"par-checkpoint {given.command}: {error}\n")
        # 2 is what argparse returns for wrong arguments.
        return 1 if isinstance(error, CheckpointError | OSError) else 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="par-checkpoint", description="Looks after checkpoints, ours and others'.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    ls = commands.add_parser("ls", help="what a checkpoint holds, or which checkpoints a folder holds")
    ls.add_argument("path", nargs="+", help=f"a checkpoint, a folder of step directories, or a URL; {_TOGETHER}")
    ls.add_argument("--tensors", action="store_true", help="list every tensor")
    ls.set_defaults(run=_ls)

    check = commands.add_parser("verify", help="compare files with their checksums")
    check.add_argument("path", nargs="+", help=f"a checkpoint; {_TOGETHER}, and all is well if it can be loaded")
    check.add_argument("--shallow", action="store_true", help="sizes, headers, index and manifest alone")
    check.set_defaults(run=_verify)

    diff = commands.add_parser("diff", help="compare two checkpoints tensor by tensor")
    diff.add_argument("a", help="a checkpoint")
    diff.add_argument("b", help="another")
    diff.add_argument("--optimizer", action="store_true", help="compare the optimizers' tensors as well")
    diff.set_defaults(run=_diff)

    convert = commands.add_parser("convert", help="write a checkpoint in another format")
    convert.add_argument(
        "source", help="a Hugging Face folder, one of ours in either style, a .pt file, or a DCP folder"
    )
    convert.add_argument("target", help="the folder to write; it must not exist")
    convert.add_argument("--to", choices=FORMATS, default="huggingface", help="the format (default: %(default)s)")
    convert.add_argument("--dtype", help="cast floating-point tensors, for example bfloat16")
    convert.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default: %(default)s)")
    convert.set_defaults(run=_convert)

    prune_ = commands.add_parser("prune", help="remove old steps")
    prune_.add_argument("root", help="the folder of step directories")
    prune_.add_argument("--keep-last", type=int, default=3, metavar="N", help="the newest (default: %(default)s)")
    prune_.add_argument("--keep-every", type=int, metavar="N", help="multiples of this step stay")
    prune_.add_argument("--dry-run", action="store_true", help="say what would be removed")
    prune_.set_defaults(run=_prune)
    return parser


def _ls(given: argparse.Namespace) -> int:
    roots = [open_folder(path) for path in given.path]
    steps = {(step, name) for root in roots for name in root.folders() if (step := step_of(name)) is not None}
    for step, name in sorted(steps):
        folders = [root.child(name) for root in roots if name in root.folders()]
        of_parts = [folder.url for folder in folders if part_folders(folder.url)]
        if of_parts:
            _say(f"{name}  step {step}  {_summary_of_parts(of_parts)}")
        for folder in folders:
            if folder.url not in of_parts:
                whole = read_manifest(folder) is not None
                size = sum(folder.sizes().values())
                _say(f"{name}  step {step}  {_size(size)}{'' if whole else '  not whole: no sound manifest'}")
    for path in [] if steps else _together(given.path):
        contents = inspect(path)
        _say(f"{contents.path}: {_summary(contents)}")
        for part in contents.parts:
            _say(f"  {_about(part)}")
        if given.tensors:
            _list_tensors(contents)
    return 0


def _together(paths: Sequence[str]) -> list[str | list[str]]:
    """Group the paths: each checkpoint separately, and all folders of hosts' parts in one group."""
    parts = [path for path in paths if part_folders(path)]
    if not parts:
        return list(paths)
    empty = [path for path in paths if path not in parts and not open_folder(path).exists()]  # a host has lost its own
    return [parts + empty, *(path for path in paths if path not in parts + empty)]


def _list_tensors(contents: CheckpointInfo) -> None:
    for places in (contents.tensors, contents.optimizer):
        width = max((len(name) for name in places), default=0)
        for name, place in places.items():
            dtype = str(place.dtype).removeprefix("torch.")
            there = f"  {_there(place.shape, contents.boxes[name])}" if contents.parts else ""
            _say(f"  {name:{width}}  {dtype:9} {list(place.shape)!s:20} {place.file}{there}")
    for name, stored in contents.tied.items():
        _say(f"  {name}  is {stored}")


def _there(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Describe the existing rectangles of a tensor."""
    if sum(box.numel for box in boxes) == math.prod(shape):
        return "all of it"
    each = [
        f"[{', '.join(f'{start}:{start + size}' for start, size in zip(box.start, box.size, strict=True))}]"
        for box in boxes
    ]
    more = f" and {len(each) - _SHOWN} more" if len(each) > _SHOWN else ""
    return f"{', '.join(each[:_SHOWN])}{more}" if each else "nothing of it"


def _about(part: HostShard) -> str:
    """Describe a part."""
    text = f"{part.path}: part {part.number} of {part.count}"
    if part.fault:
        return f"{text}, not whole: {part.fault}"
    saved = datetime.fromtimestamp(part.saved, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    copy = f", a copy kept by {part.keeper}" if part.keeper != part.host else ""
    return f"{text}, with the data of {part.host}{copy}, whole, {_size(part.bytes)}, saved {saved} UTC"


def _summary_of_parts(paths: Sequence[str]) -> str:
    """Summarize in one line which parts of a checkpoint folders of hosts contain."""
    try:
        folder = GatheredFolder(paths)
    except CheckpointError as error:
        return f"not whole: {error}"
    size, count = sum(part.bytes for part in folder.parts), len(folder.parts)
    state = "; ".join(["not whole", *folder.missing]) if folder.missing else f"all {len(folder.copies)} parts"
    return f"{_size(size)}  {count} part{'s' * (count > 1)} of hosts, {state}"


def _summary(contents: CheckpointInfo) -> str:
    parts = [f"{contents.style} style"]
    if contents.step is not None:
        parts.append(f"step {contents.step}")
    parts.append(f"{len(contents.tensors)} tensors with {contents.parameters:,} elements")
    if contents.groups:
        parts.append(f"optimizer with {len(contents.groups)} groups and {len(contents.optimizer)} tensors")
    if contents.scheduler is not None:
        parts.append("scheduler")
    if contents.extra is not None:
        parts.append("extra")
    parts.append(f"{len(contents.files)} files, {_size(contents.bytes)}")
    return ", ".join(parts)


def _verify(given: argparse.Namespace) -> int:
    code = 0
    for path in _together(given.path):
        faults = verify(path, deep=not given.shallow)
        for fault in faults:
            _say(fault)
        state = f"{len(faults)} wrong" if faults else "whole"
        if faults and not isinstance(path, str):
            left = len(faults.lost)
            state += f", {left} of them in the way of a load" if left else ", but other parts have it: it can be loaded"
        _say(f"{path if isinstance(path, str) else ', '.join(path)}: {state}")
        # A fault that a copy on another host repairs does not prevent a load, so the exit code stays 0.
        code = code or int(bool(faults.lost))
    return code


def _diff(given: argparse.Namespace) -> int:
    folders = open_checkpoint(given.a), open_checkpoint(given.b)
    before = [version_of(folder) for folder in folders]
    outlines = [read_outline(folder) for folder in folders]
    for folder, outline in zip(folders, outlines, strict=True):
        # Else corrupt bytes would be shown as a difference of the two.
        check_blocks(folder, outline)
    reads = [reader_of(folder, outline) for folder, outline in zip(folders, outlines, strict=True)]
    different = 0
    for section in ("model", "optimizer") if given.optimizer else ("model",):
        mine, theirs = (outline.places(section) for outline in outlines)
        for name in dict.fromkeys((*mine, *theirs)):
            if name not in mine or name not in theirs:
                line = f"only in {folders[name not in mine].url}"
            elif (mine[name].shape, mine[name].dtype) != (theirs[name].shape, theirs[name].dtype):
                a, b = mine[name], theirs[name]
                line = f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
            else:
                line = _difference(*(read(name) for read in reads))
            if line:
                _say(f"{name}: {line}")
                different += 1
    # A comparison of two different versions of one checkpoint would mean nothing.
    if before != [version_of(folder) for folder in folders]:
        raise ReplacedError("one of the two was replaced while it was read; compare them when they rest")
    _say(f"{different} tensors differ" if different else "equal, tensor by tensor")
    return int(bool(different))


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Describe how two tensors of one dtype and shape differ; return "" if they do not. A NaN equals a NaN."""
    a, b = _comparable(a), _comparable(b)
    # A NaN differs from itself, but the same NaN in both files is no difference.
    count = int(((a != b) & ~(a.isnan() & b.isnan())).sum())
    if count == 0:
        return ""
    text = f"{count:,} of {a.numel():,} elements differ"
    most = float((a - b).abs().nan_to_num().max()) if a.is_floating_point() or a.is_complex() else 0
    return f"{text}, by {most:.3g} at most" if most else text


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Cast values to a dtype that can be compared."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.is_floating_point():
        return tensor.double()
    return as_integers(tensor).long()  # of uint64 the same bits


def _convert(given: argparse.Namespace) -> int:
    left_out = convert_checkpoint(
        given.source, given.target, to=given.to, dtype=given.dtype, max_shard_size=given.max_shard_size
    )
    _say(f"wrote {given.target}")
    if left_out:
        more = f" and {len(left_out) - _LISTED} more" if len(left_out) > _LISTED else ""
        _say(f"left out: {', '.join(left_out[:_LISTED])}{more}")
    return 0


def _prune(given: argparse.Namespace) -> int:
    if not open_folder(given.root).exists():
        raise FileNotFoundError(f"there is no folder {given.root!r}; give the one that holds the step directories")
    removed = prune(given.root, keep_last=given.keep_last, keep_every=given.keep_every, dry_run=given.dry_run)
    for path in removed:
        _say(f"{'would remove' if given.dry_run else 'removed'} {path}")
    for path, why in removed.kept.items():
        _say(f"kept {path}: {why}")
    if not removed:
        _say("nothing to remove")
    return 0


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _say(line: str) -> None:
    """Print a line; letters that the terminal's encoding lacks, as names of files may have, are written as escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
