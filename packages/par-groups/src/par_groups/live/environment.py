"""Rank and rendezvous address of this process, read from the variables of torchrun, SLURM or Open MPI without torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

_DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Rank of this process in the world, and the rendezvous address of all ranks.

    Args:
        launcher: Launcher of the ranks: "torchrun", "slurm" or "openmpi"; "explicit" if arguments specify the rank;
            "single" for a world of one process.
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank on this machine; it selects the device.
        local_world_size: Number of ranks on this machine.
        address: Host on which rank 0 listens.
        port: TCP port on which rank 0 listens.
        contradiction: Error message if the variables of two launchers contradict each other, else "". `launch` raises
            this error on every rank, including the ranks whose variables agree.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    contradiction: str = ""

    def __post_init__(self) -> None:
        for what, rank in (("rank", self.rank), ("local rank", self.local_rank)):
            if rank < 0 or (what == "rank" and rank >= self.world_size):
                raise ValueError(f"{what} {rank} does not lie in a world of {self.world_size} ranks ({self.launcher})")


def read_environment(
    variables: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
) -> Launch:
    """Return rank, world size and address: from the arguments, else from torchrun's, Open MPI's or SLURM's variables.

    A launcher may start another launcher: srun may start torchrun on each node, and mpirun may start its daemons by
    srun. This function reads the variables of the launcher that started this process.

    RANK and WORLD_SIZE may also be set without torchrun, for example by a job script. This function uses them if no
    other launcher has started several processes. If Open MPI or SLURM has started several processes, RANK and
    WORLD_SIZE must agree with that launcher. Otherwise `contradiction` of the result describes the difference. Without
    any of these variables, the process is a world of one rank.

    Args:
        variables: Environment variables, such as `os.environ`.
        rank: Global rank. Pass `rank` and `world_size` together; they replace the launcher's variables.
        world_size: Number of ranks.
        local_rank: Rank on this machine. Default: LOCAL_RANK, else 0.
        address: Host on which rank 0 listens. Default: MASTER_ADDR.
        port: TCP port on which rank 0 listens. Default: MASTER_PORT.

    Raises:
        ValueError: Only one of `rank` and `world_size` is passed, or a variable is missing or is not a number. The
            message names it.
    """
    get = _Variables(variables)
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank} and world_size is {world_size}; give both or neither")
    if rank is not None and world_size is not None:
        return _explicit(get, rank, world_size, local_rank, address, port)
    by_variables = "RANK" in variables or "WORLD_SIZE" in variables
    # Only torchrun's agent sets this variable, so it is the launcher even if srun or mpirun has started the agent.
    if by_variables and "TORCHELASTIC_RUN_ID" in variables:
        return _torchrun(get)
    started = _openmpi(get) if "OMPI_COMM_WORLD_RANK" in variables else _slurm(get) if _is_srun(variables) else None
    if by_variables:
        # A single task of srun often is a shell in which a job script sets RANK itself.
        return _torchrun(get) if started is None or started.world_size == 1 else _compared(get, started)
    return started or Launch(
        launcher="single", rank=0, world_size=1, local_rank=0, local_world_size=1, address="127.0.0.1", port=0
    )


def launched_rank(variables: Mapping[str, str]) -> int:
    """Return the rank that a launcher gave this process, even if other variables are missing; 0 without a launcher."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", *(["SLURM_PROCID"] if _is_srun(variables) else []))
    given = next((variables[name] for name in names if name in variables), "0")
    return int(given) if given.isdecimal() else 0


def _is_srun(variables: Mapping[str, str]) -> bool:
    """Return whether srun has started this process; a job script has SLURM_PROCID, too, but no variables of a step."""
    return any(name.startswith(("SLURM_STEP_", "SLURM_SRUN_COMM_")) for name in variables)


class _Variables:
    """Look-ups that name the variable when it is missing or malformed."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def text(self, name: str, launcher: str) -> str:
        if name not in self._variables:
            raise ValueError(f"the variable {name} is missing, which {launcher} needs; set it, or start with torchrun")
        return self._variables[name]

    def number(self, name: str, launcher: str, default: int | None = None) -> int:
        if default is not None and name not in self._variables:
            return default
        text = self.text(name, launcher)
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"the variable {name} is {text!r}; it must be a whole number") from None

    def first(self, *names: str) -> str | None:
        return next((self._variables[name] for name in names if name in self._variables), None)


def _explicit(
    get: _Variables, rank: int, world_size: int, local_rank: int | None, address: str | None, port: int | None
) -> Launch:
    # A world of one meets nobody, so it needs no address from outside.
    single = "127.0.0.1" if world_size == 1 else None
    return Launch(
        launcher="explicit",
        rank=rank,
        world_size=world_size,
        local_rank=get.number("LOCAL_RANK", "launch", 0) if local_rank is None else local_rank,
        local_world_size=get.number("LOCAL_WORLD_SIZE", "launch", 1),
        address=address or single or get.text("MASTER_ADDR", "launch(rank=..., world_size=...) without address"),
        port=port if port is not None else get.number("MASTER_PORT", "launch", 0 if single else _DEFAULT_PORT),
    )


def _torchrun(get: _Variables) -> Launch:
    return Launch(
        launcher="torchrun",
        rank=get.number("RANK", "torchrun"),
        world_size=get.number("WORLD_SIZE", "torchrun"),
        local_rank=get.number("LOCAL_RANK", "torchrun", 0),
        local_world_size=get.number("LOCAL_WORLD_SIZE", "torchrun", 1),
        address=get.text("MASTER_ADDR", "torchrun"),
        port=get.number("MASTER_PORT", "torchrun"),
    )


def _compared(get: _Variables, started: Launch) -> Launch:
    """Return the rank from srun or mpirun, with a contradiction if RANK or WORLD_SIZE differ from it."""
    asked = {"RANK": started.rank, "WORLD_SIZE": started.world_size}
    given = {name: get.number(name, "launch", number) for name, number in asked.items()}
    said = " and ".join(f"{name} is {given[name]}" for name, number in asked.items() if given[name] != number)
    starter = {"slurm": "srun", "openmpi": "mpirun"}[started.launcher]
    denied = (
        f"{said}, but {starter} has started this process as rank {started.rank} of {started.world_size}: two launchers "
        f"have left their variables; unset RANK and WORLD_SIZE, or let {starter} start torchrun, once on each machine"
    )
    local_rank = get.number("LOCAL_RANK", "launch", started.local_rank)
    return replace(started, local_rank=local_rank, contradiction=denied if said else "")


def _slurm(get: _Variables) -> Launch:
    """Read the variables that `srun` sets for each task; rank 0 runs on the first host of the step."""
    # The variables of the step come first: a job may run steps on fewer tasks than it has.
    tasks = "SLURM_STEP_NUM_TASKS" if get.first("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    hosts = get.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    address = get.first("MASTER_ADDR") or (first_host(hosts) if hosts else get.text("SLURM_STEP_NODELIST", "srun"))
    # SLURM writes tasks per node as "4(x2),3". The number of the first node stands for all nodes.
    per_node = re.match(r"\d+", get.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "1")
    job = get.number("SLURM_JOB_ID", "srun", 0)
    return Launch(
        launcher="slurm",
        rank=get.number("SLURM_PROCID", "srun"),
        world_size=get.number(tasks, "srun"),
        local_rank=get.number("SLURM_LOCALID", "srun"),
        local_world_size=int(per_node.group()) if per_node else 1,
        address=address,
        port=get.number("MASTER_PORT", "srun", 10_000 + job % 20_000),  # jobs that share a machine do not collide
    )


def _openmpi(get: _Variables) -> Launch:
    world_size = get.number("OMPI_COMM_WORLD_SIZE", "mpirun")
    local_world_size = get.number("OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun", 1)
    # mpirun passes no address of rank 0, and only if all ranks are on this machine is it known.
    local = "127.0.0.1" if local_world_size == world_size else None
    return Launch(
        launcher="openmpi",
        rank=get.number("OMPI_COMM_WORLD_RANK", "mpirun"),
        world_size=world_size,
        local_rank=get.number("OMPI_COMM_WORLD_LOCAL_RANK", "mpirun"),
        local_world_size=local_world_size,
        address=get.first("MASTER_ADDR") or local or get.text("MASTER_ADDR", "mpirun over several machines"),
        port=get.number("MASTER_PORT", "mpirun", _DEFAULT_PORT),
    )


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM node list, "rack[1-2]node[03,07],login1" -> "rack1node03"."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if head is None:
        raise ValueError(f"the node list {hosts!r} names no host; set MASTER_ADDR")
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", head.group())
