"""What every scheduler is told alike: how many nodes of how many ranks, what each takes, and what a rank runs."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from par_groups import format_bytes

from ..._errors import UserError
from ...jobs.checks import check_config
from ...jobs.options import Options, RenderOptions

_HANDED_ON = ("GLOO_", "NCCL_", "TORCH_NCCL_")
"""What a variable's name begins with that is taken from the shell into the file, as it is about the network."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job's ranks run.

    Args:
        command: The command that writes this file, for its header.
        name: The job's name: small letters, digits and hyphens.
        nodes: Number of nodes.
        ranks: Number of ranks on each node.
        gpus: Number of GPUs on each node; 0: the ranks compute on processors.
        cores: Processor cores for each rank.
        memory: Bytes of memory of a node; 0: all of it.
        variables: Environment variables of every rank.
        config: The config file; None: there is none.
        flags: What `par-train run` is given behind the config.
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

    def run(self, config: str | None = None) -> list[str]:
        """The words of the command that each rank runs.

        Args:
            config: Where the config file lies for the ranks; default: as it was given.
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
    """Divides the world into nodes, and checks that the config can be trained on it.

    Args:
        options: The options of the run.
        render_options: The world and its nodes.
        command: The command that was given.
        config: The config file; None: there is none.
        flags: The flags of the run that were given.
        environment: The environment variables, of which those about the network are taken over.

    Raises:
        UserError: The options are not for this world, or the nodes cannot be divided or are too small.
    """
    chosen = render_options
    world, ranks = chosen.world, min(chosen.world, chosen.devices_per_node)
    if world % ranks:
        raise UserError(
            f"--world is {world}, which {chosen.devices_per_node} ranks a node do not divide; give a multiple, or "
            "another --devices-per-node"
        )
    if options.ranks not in ("auto", world):
        raise UserError(f"ranks is {options.ranks}, but the file will start {world}; leave it out")
    check_config(replace(options, resume="auto"), world)
    needed = options.memory.host * ranks
    if chosen.host_memory and needed > chosen.host_memory:
        raise UserError(
            f"memory.host is {format_bytes(options.memory.host)} a rank, {format_bytes(needed)} a node, but "
            f"--host-memory is {format_bytes(chosen.host_memory)}; give more, or lower memory.host"
        )
    gpus = 0 if options.device == "cpu" else ranks
    return Place(
        command=command,
        name=chosen.name or _name_of(options.output_folder),
        nodes=world // ranks,
        ranks=ranks,
        gpus=gpus,
        cores=chosen.cores,
        memory=chosen.host_memory,
        variables=_variables(environment, chosen.interface, gpus=gpus > 0),
        config=config,
        flags=[*flags, "--resume", "auto"],
    )


def quoted(words: Sequence[str]) -> str:
    """Words as a shell reads them."""
    return shlex.join(words)


def _name_of(folder: str) -> str:
    """A job's name from the output folder's: what SLURM and Kubernetes both allow."""
    return re.sub(r"[^a-z0-9]+", "-", Path(folder).name.lower()).strip("-")[:40] or "par"


def _variables(environment: Mapping[str, str], interface: str, *, gpus: bool) -> dict[str, str]:
    """What ranks should know of the network: from the shell that renders, and from the interface's name."""
    taken = {name: value for name, value in environment.items() if name.startswith(_HANDED_ON)}
    if interface:
        taken["GLOO_SOCKET_IFNAME"] = interface
        if gpus:
            taken["NCCL_SOCKET_IFNAME"] = interface
    if gpus:
        taken.setdefault("NCCL_DEBUG", "WARN")
    return dict(sorted(taken.items()))
