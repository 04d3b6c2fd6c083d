"""The `par-train` command: flags, and exit codes.

0: done, or saved and left on SIGTERM or SIGHUP. 1: a rank failed, or the loss is not finite. 2: a mistake in the input.
130: left on Ctrl-C.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from .. import __version__
from .._errors import UserError
from ..jobs.options import SECTIONS
from .config import Setting, alternatives, load_options, settings, unknown_key
from .flags import plan_flags, read_flags

_PARALLEL = "--parallel."
_PLAN = "plan:"  # in front of what the plan alone is told

_EPILOG = """parallel:
  --parallel.AXIS N, --parallel.AXIS.KEY VALUE
                        sizes of the axes of par_groups.Topology, such as --parallel.data 2;
                        --parallel.tensor.mode 1d (2d, 2.5d, 3d) cuts the layers over the ranks that
                        are left, or over --parallel.tensor.size of them

exit codes:
  0 done, or saved and left on SIGTERM or SIGHUP; 1 a rank failed, or the loss is not finite;
  2 a mistake in the input; 130 saved and left on Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        from ..jobs.rank import print_error  # noqa: PLC0415 - `--help` is quicker without

        print_error(error)
        return 2


def _run(arguments: Sequence[str]) -> int:
    rest, parallel = _split_parallel(arguments)
    given, unknown = _parser().parse_known_args(rest)
    if unknown:
        raise _unknown(unknown[0], given.command)
    flags = vars(given)
    command, config = flags.pop("command"), flags.pop("config", None)
    if command is None:
        raise UserError("no command is given; start with: par-train run, or see par-train --help")
    planned = {name.removeprefix(_PLAN): flags.pop(name) for name in list(flags) if name.startswith(_PLAN)}
    options = load_options(None if config is None else Path(config), {**flags, **parallel})
    if command == "plan":
        machine = read_flags(planned)
        from .plan import plan  # noqa: PLC0415 - the formulas need torch

        return plan(options, machine)
    from ..jobs.start import run  # noqa: PLC0415 - `--help` is quicker without

    return run(options)


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="par-train", description="Parallel training in PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"par-train {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = _add_command(
        commands,
        "run",
        "train a byte-level GPT on a folder of text",
        "Trains a byte-level GPT on a folder of text. Flags win over the config file.",
    )
    plan = _add_command(
        commands,
        "plan",
        "predict memory, traffic and time on any number of devices, and rank the configurations that fit",
        "Predicts what the config takes of memory, traffic and time on many devices, and ranks the configurations "
        "that fit. Nothing is started, and no device is needed.",
    )
    for name, each in plan_flags():
        shown = f" (default: {each.metadata['default']})" if each.metadata["default"] else ""
        text = each.metadata["help"] + shown
        plan.add_argument(name, dest=_PLAN + each.name, metavar=each.metadata["kind"], help=text)
    for command in (run, plan):
        groups = {section: command.add_argument_group(section or "run") for section in ("", *SECTIONS)}
        for setting in settings():
            _add_flag(groups[setting.key.rpartition(".")[0]], setting)
    return parser


def _add_command(commands: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    tables = "tables [data], [model], [train], [parallel]; or a .py file with these names"
    command.add_argument("config", nargs="?", metavar="CONFIG.toml", help=tables)
    return command


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
    flag = f"--{setting.key}"
    default = ",".join(setting.default) if isinstance(setting.default, tuple) else setting.default
    shown = "" if default == "" or default is False else f" (default: {default})"
    text = setting.help.replace("%", "%%") + shown
    if setting.kind is bool:
        group.add_argument(flag, dest=setting.key, action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(flag, dest=setting.key, metavar=_metavar(setting.kind), help=text)


def _metavar(kind: Any) -> str:
    """How a value is called in the help."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "A,B"
    return "|".join({int: "N", float: "X", str: "TEXT"}.get(each) or _metavar(each) for each in alternatives(kind))


def _split_parallel(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes `--parallel.tensor.size 2` and `--parallel.tensor.size=2` out, for their keys are not ours."""
    rest: list[str] = []
    parallel: dict[str, str] = {}
    left = iter(arguments)
    for argument in left:
        if not argument.startswith(_PARALLEL):
            rest.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        text = value if equals else next(left, None)
        if text is None or flag == _PARALLEL:
            raise UserError(f"{argument} needs an axis and a value, such as --parallel.data 2")
        parallel[flag.removeprefix("--")] = text
    return rest, parallel


def _unknown(argument: str, command: str | None) -> UserError:
    """The error for an argument that no flag takes."""
    name = argument.partition("=")[0]
    if not name.startswith("--"):
        return UserError(f"unexpected argument {argument!r}; give one config file, and flags as --train.steps 100")
    own = [flag for flag, _ in plan_flags()] if command == "plan" else []
    near = difflib.get_close_matches(name, own, n=1)
    return UserError(f"unknown flag {name}; did you mean {near[0]}?") if near else unknown_key(name.removeprefix("--"))
