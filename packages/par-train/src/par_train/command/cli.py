"""The `par-train` command: its flags, and its exit codes.

0: done, or saved and left on SIGTERM, SIGUSR1 or SIGHUP. 1: a rank failed, or the loss is not finite. 2: a mistake in
the input. 130: left on Ctrl-C. Nothing here imports torch: `--help` and mistakes are answered at once.
"""

import argparse
import dataclasses
import difflib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from par_groups import format_bytes

from .. import __version__
from .._errors import UserError
from ..config.kinds import BOOL, BYTES
from ..config.settings import load, settings, unknown_key
from ..jobs.options import Options, PlanOptions, RenderOptions

_CONFIG = (
    "tables [data], [model], [adapter], [train], [sample], [pipeline], [memory], [parallel]; or a .py file with these "
    "names"
)

_OWN: Mapping[str, type] = {"plan": PlanOptions, "render": RenderOptions}
"""Options of a sub-command in addition to the options of a run."""

OwnOptions = TypeVar("OwnOptions", PlanOptions, RenderOptions)

_EPILOG = """parallel:
  --parallel.AXIS N, --parallel.AXIS.KEY VALUE
                        sizes of the axes of par_groups.Topology, such as --parallel.data 2;
                        --parallel.tensor.mode 1d (2d, 2.5d, 3d) cuts the layers over the ranks that
                        are left, or over --parallel.tensor.size of them;
                        --parallel.sequence.size 4 cuts each window, or row, over 4 ranks, with
                        --parallel.sequence.mode gather, ring, ulysses or 2d

exit codes:
  0 done, or saved and left on SIGTERM, SIGUSR1 or SIGHUP; 1 a rank failed, or the loss is not finite;
  2 a mistake in the input; 130 saved and left on Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code.

    Args:
        arguments: Words after `par-train`. Default: the arguments of this process.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        from ..jobs.rank import print_error  # noqa: PLC0415 - `--help` is quicker without

        print_error(error)
        return 2


def _run(arguments: Sequence[str]) -> int:
    rest, parallel = _split_parallel(arguments)
    given, unknown = _parser().parse_known_args(rest)
    command, path, flags = given.command, getattr(given, "config", None), vars(given)
    # argparse ends the positional words at the first flag.
    if path is None and unknown and not unknown[0].startswith("-"):
        path = unknown.pop(0)
    if unknown:
        raise _unknown_argument(unknown[0], command)
    if command is None:
        raise UserError("no command is given; start with: par-train run, or see par-train --help")
    run_flags = {key: flags[key] for key in settings(Options) if key in flags}
    # The options of a run are read for every sub-command, so that a mistake in the config is found by `plan` and
    # `render`, too.
    options = load(Options, None if path is None else Path(path), {**run_flags, **parallel})
    if command == "run":
        from ..jobs.start import run  # noqa: PLC0415 - `--help` is quicker without

        return run(options)
    if command == "render":
        from .render import render  # noqa: PLC0415 - as above

        # The file repeats the flags, so that they override its config on the cluster, too.
        words: list[str] = []
        for key, value in run_flags.items():
            words += [f"--{'' if value else 'no-'}{key}"] if isinstance(value, bool) else [f"--{key}", value]
        for key, text in parallel.items():
            words += [f"--{key}", text]
        return render(
            given.scheduler,
            options,
            _own_options(RenderOptions, command, flags),
            command=shlex.join(["par-train", *arguments]),
            config=None if path is None else Path(path),
            flags=words,
        )
    plan_options = _own_options(PlanOptions, command, flags)
    from .plan import plan  # noqa: PLC0415 - the formulas need torch

    return plan(options, plan_options)


def _own_options(kind: type[OwnOptions], command: str, flags: Mapping[str, Any]) -> OwnOptions:
    """Return the options that only a sub-command has, from its flags."""
    for key, setting in settings(kind).items():
        if setting.default is dataclasses.MISSING and key not in flags:
            raise UserError(f"{setting.flag} is missing: {setting.help}; see par-train {command} --help")
    return load(kind, None, {key: flags[key] for key in settings(kind) if key in flags})


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError, so that a mistake is printed as one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="par-train", description="Parallel training in PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"par-train {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="train a byte-level GPT on a folder of text, or a model of transformers on a file of text",
        description="Trains a byte-level GPT on a folder of text, or, where --model.path names its folder, a model of "
        "transformers on the file --data.path. Flags win over the config file.",
    )
    plan = commands.add_parser(
        "plan",
        help="predict memory, traffic and time on any number of devices, and rank the configurations that fit",
        description="Predicts what the config takes of memory, traffic and time on many devices, and ranks the "
        "configurations that fit. Nothing is started, and no device is needed.",
    )
    render = commands.add_parser(
        "render",
        help="write the file that starts a run on SLURM, Ray or Kubernetes",
        description="Writes the file with which SLURM, Ray or Kubernetes runs the config on many nodes, and goes on "
        "from its last checkpoint when time is up or ranks are lost. Nothing is started.",
    )
    render.add_argument("scheduler", choices=["slurm", "ray", "kubernetes"], help="whose file it is")
    for command, kinds in ((run, [Options]), (plan, [PlanOptions, Options]), (render, [RenderOptions, Options])):
        # A flag has no default in argparse: one that is not given must not hide the value of the config file.
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.epilog, command.allow_abbrev, command.argument_default = _EPILOG, False, argparse.SUPPRESS
        command.add_argument("config", nargs="?", metavar="CONFIG.toml", help=_CONFIG)
        for kind in kinds:
            _add_flags(command, kind)
    return parser


def _add_flags(command: argparse.ArgumentParser, options: type) -> None:
    """Add one flag for each setting, in one group for each table of the config file."""
    groups = {}
    for key, setting in settings(options).items():
        title = key.rpartition(".")[0] or next((name for name, own in _OWN.items() if own is options), "run")
        if title not in groups:
            groups[title] = command.add_argument_group(title)
        default = setting.default
        is_none = default is dataclasses.MISSING or default is False or default in ("", ())
        shown = "" if is_none else format_bytes(default) if setting.kinds == (BYTES,) else str(default)
        text = setting.help.replace("%", "%%") + (f" (default: {shown})" if shown else "")
        if setting.kinds == (BOOL,):
            groups[title].add_argument(setting.flag, dest=key, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "|".join(kind.metavar for kind in setting.kinds)
            groups[title].add_argument(setting.flag, dest=key, metavar=metavar, help=text)


def _split_parallel(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate flags such as `--parallel.tensor.size 2`, whose names argparse cannot know."""
    rest: list[str] = []
    parallel: dict[str, str] = {}
    words = iter(arguments)
    for argument in words:
        if not argument.startswith("--parallel."):
            rest.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        text = value if equals else next(words, None)
        if text is None or flag == "--parallel.":
            raise UserError(f"{argument} needs an axis and a value, such as --parallel.data 2")
        parallel[flag.removeprefix("--")] = text
    return rest, parallel


def _unknown_argument(argument: str, command: str | None) -> UserError:
    """Return the error for an unknown argument, with the nearest flag."""
    name = argument.partition("=")[0]
    if not name.startswith("--"):
        return UserError(f"unexpected argument {argument!r}; give one config file, and flags as --train.steps 100")
    if command is not None and command in _OWN:
        own = [setting.flag for setting in settings(_OWN[command]).values()]
        near = difflib.get_close_matches(name, [*own, *(setting.flag for setting in settings(Options).values())], n=1)
        if near and near[0] in own:
            return UserError(f"unknown flag {name}; did you mean {near[0]}?")
    return unknown_key(Options, name.removeprefix("--"))
