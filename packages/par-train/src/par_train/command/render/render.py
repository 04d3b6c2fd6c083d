"""The sub-command `par-train render`: it checks the options, and writes the file of one scheduler."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..._errors import UserError
from ...jobs.options import Options, RenderOptions
from .kubernetes import kubernetes
from .place import Place, place
from .ray import ray
from .slurm import slurm

_RENDER: Mapping[str, Callable[[Place, RenderOptions], str]] = {
    "slurm": slurm,
    "ray": ray,
    "kubernetes": kubernetes,
}


def render(
    scheduler: str,
    options: Options,
    render_options: RenderOptions,
    *,
    command: str,
    config: Path | None,
    flags: Sequence[str],
) -> int:
    """Write the file that starts the run on a cluster. Nothing is started.

    Args:
        scheduler: "slurm", "ray" or "kubernetes".
        options: Options of the run, from its config and flags.
        render_options: World, nodes and output file.
        command: Command line of the user, for the file's header.
        config: Path of the config file; None without one.
        flags: Flags of the run, which the file repeats.

    Returns:
        The exit code of the process.

    Raises:
        UserError: The options do not fit this world, or the file cannot be written.
    """
    if render_options.warning >= 60 * render_options.minutes:
        raise UserError(
            f"--warning is {render_options.warning} seconds, but a job has {render_options.minutes} minutes; give less"
        )
    where = place(options, render_options, command=command, config=config, flags=flags, environment=os.environ)
    text = _RENDER[scheduler](where, render_options)
    if not render_options.file:
        print(text, end="")
        return 0
    try:
        Path(render_options.file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {render_options.file}: {error.strerror}; name another file with --file"
        ) from None
    return 0
