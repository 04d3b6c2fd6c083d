"""Starting torch.distributed from what a launcher left in the environment."""

import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .environment import Launch, read_environment


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A rank's place in the running world. As a context manager it ends the world it started.

    Args:
        rank: The global rank.
        world_size: The number of ranks.
        local_rank: The rank on this machine.
        local_world_size: The number of ranks on this machine.
        device: Where this rank computes.
        backend: What torch.distributed runs on, such as "gloo" or "cpu:gloo,cuda:nccl".
        launcher: Who started the ranks: "torchrun", "slurm", "openmpi", "explicit", "single" or "running".
        started: Whether `launch` started torch.distributed, and so whether leaving ends it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    launcher: str
    started: bool

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0, which speaks and writes for all."""
        return self.rank == 0

    def close(self) -> None:
        """Ends torch.distributed if `launch` started it; a second call does nothing."""
        if self.started and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> "Environment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def launch(
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    *,
    device: str | torch.device | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
) -> Environment:
    """Starts torch.distributed, or joins it where it runs already.

    Reads explicit arguments, else torchrun's, SLURM's or Open MPI's variables; without any, a world of one.

    Args:
        backend: Default: gloo for the CPU, and NCCL (or what the accelerator has) beside it.
        timeout: Of a collective, in seconds or as a timedelta; default: torch's.
        device: Default: the accelerator of the local rank, else the CPU.
        rank: With `world_size`, takes the place of what the launcher says.
        world_size: The number of ranks.
        local_rank: The rank on this machine.
        address: Where rank 0 listens.
        port: Its port.

    Raises:
        ValueError: A variable that is missing or malformed, by name, or a local rank that has no device.
    """
    if dist.is_initialized():
        return _running(device)
    place = read_environment(
        os.environ, rank=rank, world_size=world_size, local_rank=local_rank, address=address, port=port
    )
    chosen = _device(device, place.local_rank)
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen)
    backend = backend or default_backend(chosen)
    dist.init_process_group(
        backend,
        rank=place.rank,
        world_size=place.world_size,
        timeout=as_timedelta(timeout),
        device_id=chosen if chosen.type != "cpu" else None,
        **_meeting_point(place),
    )
    return Environment(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        device=chosen,
        backend=backend,
        launcher=place.launcher,
        started=True,
    )


def accelerator_type() -> str | None:
    """The type of this machine's accelerator, such as "cuda", or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def default_backend(device: torch.device) -> str:
    """Gloo for CPU tensors, and the accelerator's own backend for its tensors."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    """Seconds as a timedelta.

    Raises:
        ValueError: A timeout that is not positive.
    """
    if timeout is None:
        return None
    span = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if span <= timedelta():
        raise ValueError(f"timeout is {timeout}; it must be positive (seconds, or a timedelta)")
    return span


def _meeting_point(place: Launch) -> dict[str, Any]:
    """Where the ranks meet, as init_process_group wants it. A world of one needs no port."""
    if place.launcher == "torchrun":
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return {"store": _store_of_agent(place)} if shared else {"init_method": "env://"}
    if place.world_size == 1:
        return {"store": dist.HashStore()}  # type: ignore[attr-defined]  # torch exports it late
    return {"init_method": f"tcp://{place.address}:{place.port}"}


def _store_of_agent(place: Launch) -> Any:
    """The store that torchrun keeps, under a name of this start's own.

    What the ranks of an earlier start left there, such as their addresses, is still in it when they are started again
    (pytorch issue 135712), and machines count starts differently. So rank 0 invents a name, and welcomes each other
    rank by a word that this one has just invented, until it has seen all of them.
    """
    store: Any = dist.TCPStore(place.address, place.port, place.world_size, is_master=False)  # type: ignore[attr-defined]
    name = uuid.uuid4().hex
    if place.rank == 0:
        deadline = time.monotonic() + store.timeout.total_seconds()
        for rank in range(1, place.world_size):
            _welcome(store, rank, name, deadline)
    else:
        store.set(f"par_groups/here/{place.rank}", name)
        name = store.get(f"par_groups/welcome/{name}").decode()
        store.set(f"par_groups/seen/{name}/{place.rank}", "")
    return dist.PrefixStore(f"par_groups/start-{name}", store)  # type: ignore[attr-defined]


def _welcome(store: Any, rank: int, name: str, deadline: float) -> None:
    """Tells a rank the name; the word that it is found under may be that of an earlier start, so again and again."""
    while not store.check([f"par_groups/seen/{name}/{rank}"]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} has not come to the meeting of all ranks; look at its machine's log")
        if store.check([f"par_groups/here/{rank}"]):
            store.set(f"par_groups/welcome/{store.get(f'par_groups/here/{rank}').decode()}", name)
        time.sleep(0.01)


def _device(device: str | torch.device | None, local_rank: int) -> torch.device:
    device = torch.device(device if device is not None else accelerator_type() or "cpu")
    index: int | None = device.index  # torch's stubs leave the None out
    if device.type == "cpu" or index is not None:
        return device
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no device: this machine has {count} of type {device.type}; start fewer ranks "
            "on it, or pass device='cpu'"
        )
    return torch.device(device.type, local_rank)


def _running(device: str | torch.device | None) -> Environment:
    """The environment of a world that somebody else started."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    backend = str(dist.get_backend_config())
    on_cpu = device is None and not set(backend.replace(":", ",").split(",")) & {"nccl", "xccl", "hccl"}
    chosen = torch.device("cpu") if on_cpu else _device(device, local_rank) if device is not None else _running_device()
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen)
    return Environment(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=chosen,
        backend=backend,
        launcher="running",
        started=False,
    )


def _running_device() -> torch.device:
    """The accelerator that a world is bound to; else the one that was chosen; else that of the local rank."""
    world = dist.group.WORLD
    if world is not None and world.bound_device_id is not None:
        return world.bound_device_id
    current, local_rank = torch.accelerator.current_device_index(), int(os.environ.get("LOCAL_RANK", "0"))
    one_of_several = current == 0 and local_rank < torch.accelerator.device_count()
    return torch.device(accelerator_type() or "cpu", local_rank if one_of_several else current)
