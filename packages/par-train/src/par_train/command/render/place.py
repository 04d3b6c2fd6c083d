"""The parts of a job file that all schedulers share: nodes, ranks, resources, and the command of a rank."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from par_groups import format_bytes

from ..._errors import UserError
from ...jobs.checks import check_config
from ...jobs.options import Options, RenderOptions

_HANDED_ON = ("GLOO_", "NCCL_", "TORCH_NCCL_")
"""Prefixes of the network variables that are copied from the shell to the file."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The nodes and resources of a job, and the command of its ranks.

    Args:
        command: Command that writes this file, for its header.
        name: Name of the job: lower-case letters, digits and hyphens.
        nodes: Number of nodes.
        ranks: Number of ranks on each node.
        gpus: Number of GPUs on each node; 0 computes on the CPU.
        cores: Processor cores for each rank.
        memory: Host memory of a node in bytes; 0: all of it.
        variables: Environment variables of every rank.
        config: Path of the config file; None without one.
        flags: Flags of `par-train run` after the config.
    """

    command: str
    name: str
    nodes: int
    ranks: int
    gpus: int
    cores: int
    memory: float
    variables: Mapping[str, str]
    config: Path | None
    flags: Sequence[str]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks

    @property
    def summary(self) -> str:
        """Ranks and nodes in words."""
        return f"{self.world} rank{'s' * (self.world > 1)} on {self.nodes} node{'s' * (self.nodes > 1)}"

    @property
    def header(self) -> list[str]:
        """Comments for the beginning of the file: ranks and nodes, and the command that writes it."""
        # An argument may have several lines, such as a prompt, and a line that is no comment would be run.
        return [f"# {self.summary}, written by", *(f"#   {line}" for line in self.command.splitlines())]

    def run(self, config: str | None = None) -> list[str]:
        """Return the words of the command that each rank runs.

        Args:
            config: Path of the config file for the ranks; default: the path of the options.
        """
        given = config or (None if self.config is None else str(self.config))
        return ["par-train", "run", *([] if given is None else [given]), *self.flags]


def place(
    options: Options,
    render_options: RenderOptions,
    *,
    command: str,
    config: Path | None,
    flags: Sequence[str],
    environment: Mapping[str, str],
) -> Place:
    """Divide the world into nodes, and check that the config can train on it.

    Args:
        options: Options of the run.
        render_options: World and nodes.
        command: Command line of the user.
        config: Path of the config file; None without one.
        flags: Flags of the run from the command line.
        environment: Environment variables; those of the network are copied.

    Raises:
        UserError: The options do not fit the world, or the nodes do not divide it or are too small.
    """
    chosen = render_options
    world, ranks = chosen.world, min(chosen.world, chosen.devices_per_node)
    if world % ranks:
        raise UserError(
            f"--world={world}: {chosen.devices_per_node} ranks a node do not divide it; pass a multiple, or another "
            "--devices-per-node"
        )
    if options.ranks not in ("auto", world):
        raise UserError(f"ranks is {options.ranks}, but the file will start {world}; remove ranks")
    # The file adds --resume auto, so a job that is requeued continues.
    check_config(replace(options, resume="auto"), world)
    needed = options.memory.host * ranks
    if chosen.host_memory and needed > chosen.host_memory:
        raise UserError(
            f"memory.host is {format_bytes(options.memory.host)} a rank, {format_bytes(needed)} a node, but "
            f"--host-memory is {format_bytes(chosen.host_memory)}; pass more, or lower memory.host"
        )
    gpus = 0 if options.device == "cpu" else ranks
    # SLURM and Kubernetes allow few characters in a name.
    usual = re.sub(r"[^a-z0-9]+", "-", Path(options.output_folder).name.lower()).strip("-")[:40]
    return Place(
        command=command,
        name=chosen.name or usual or "par",
        nodes=world // ranks,
        ranks=ranks,
        gpus=gpus,
        cores=chosen.cores,
        memory=chosen.host_memory,
        variables=_variables(environment, chosen.interface, gpus=gpus > 0),
        config=config,
        flags=[*flags, "--resume", "auto"],
    )


def _variables(environment: Mapping[str, str], interface: str, *, gpus: bool) -> dict[str, str]:
    """Return the network variables of ranks, from the shell and from the interface's name."""
    taken = {name: value for name, value in environment.items() if name.startswith(_HANDED_ON)}
    if interface:
        taken["GLOO_SOCKET_IFNAME"] = interface
        if gpus:
            taken["NCCL_SOCKET_IFNAME"] = interface
    if gpus:
        taken.setdefault("NCCL_DEBUG", "WARN")
    return dict(sorted(taken.items()))
