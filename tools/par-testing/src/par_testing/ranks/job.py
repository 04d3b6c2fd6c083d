"""What the pytest process tells a rank to do: plain records that are pickled."""

from dataclasses import dataclass
from pathlib import Path

from ..accelerator.options import Accelerator
from ..strict.options import Strict


@dataclass(frozen=True, kw_only=True)
class Module:
    """Where a rank finds a test module, and how pytest imports it.

    Args:
        path: The test module's file.
        name: The name under which pytest imported it.
        root: pytest's root directory, from which module names are derived.
        import_mode: pytest's `--import-mode`.
        namespace_packages: pytest's `consider_namespace_packages`.
        rewrite: The file patterns whose asserts pytest rewrites; None for `--assert=plain`.
    """

    path: Path
    name: str
    root: Path
    import_mode: str
    namespace_packages: bool
    rewrite: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Body:
    """Where a rank finds the body of the test, and what to call it with.

    Args:
        module: The test module.
        qualname: The test function in that module, such as "test_it" or "TestClass.test_it".
        arguments: Each argument, pickled on its own, by name.
    """

    module: Module
    qualname: str
    arguments: dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one rank.

    Args:
        body: The test body to call.
        rank: This rank, from 0.
        size: The world size.
        backend: The backend of the default process group.
        init: Whether to initialise torch.distributed.
        timeout: Seconds after which a collective of the default process group gives up.
        port: The port of the TCPStore in the pytest process, on 127.0.0.1.
        environment: The whole environment of the rank.
        filters: Warning filters in pytest's notation, each overriding those before it.
        output: The file that becomes stdout and stderr.
        stacks: The file for stack dumps.
        referee: The folder of the referee, if the backend is strict.
        strict: What is enforced then.
        accelerator: The strict device of the rank, if it has one.
        by_default: Whether tensors of the test are made on it if the test names no device.
    """

    body: Body
    rank: int
    size: int
    backend: str
    init: bool
    timeout: float
    port: int
    environment: dict[str, str]
    filters: tuple[str, ...]
    output: Path
    stacks: Path
    referee: Path | None
    strict: Strict | None
    accelerator: Accelerator | None
    by_default: bool


HOST = "127.0.0.1"


def launcher_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for the ranks of one node, whose store is hosted by the launcher itself."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "ROLE_WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "par-testing",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
