"""Start of torch.distributed from the environment variables of a launcher."""

import atexit
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .._torch_private import let_gloo_workers_finish
from .backends import accelerator_of
from .environment import Launch, read_environment

_LONGEST = timedelta(minutes=30)
"""Default timeout of the rendezvous; the same as torch's."""

_MISSING = "missing: "
"""Prefix of rank 0's answer after its timeout."""

_REFUSED = "refused: "
"""Prefix of rank 0's answer if the variables of a rank contradict each other."""

_TO_HEAR = timedelta(seconds=2)
"""Time that rank 0 then waits for the present ranks to respond and to read its verdict: it may host the store."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Rank and device of this process in the running world. As a context manager, it ends what `launch` has started.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank on this machine.
        local_world_size: Number of ranks on this machine.
        device: Device on which this rank computes.
        backend: Backend of torch.distributed, such as "gloo" or "cpu:gloo,cuda:nccl".
        launcher: Launcher of the ranks: "torchrun", "slurm", "openmpi", "explicit", "single" or "running".
        started: Whether `launch` started torch.distributed; only then `close` ends it.
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
        """Whether this is rank 0, which prints and writes files for all ranks."""
        return self.rank == 0

    def close(self) -> None:
        """End torch.distributed if `launch` started it. A second call does nothing.

        `launch` registers this call with `atexit`: a program that ends without it would abort now and then, because
        gloo's worker threads outlive the interpreter.
        """
        if self.started and dist.is_initialized():
            dist.destroy_process_group()
            let_gloo_workers_finish()
        atexit.unregister(self.close)

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
    """Start torch.distributed, or use it if it runs already.

    The rank is taken from explicit arguments, else from the variables of torchrun, Open MPI or SLURM. Without any of
    them, the process is a world of one.

    Args:
        backend: Backend of torch.distributed. Default: gloo for CPU tensors, and NCCL (or the accelerator's own
            backend) for tensors on the accelerator.
        timeout: Timeout of a collective and of the rendezvous, in seconds or as a timedelta. Default: torch's default
            for collectives; 30 minutes for the rendezvous, or 5 minutes under torchrun.
        device: Device on which this rank computes. Default: the accelerator of the local rank, else the CPU.
        rank: Global rank; with `world_size`, it replaces the launcher's variables.
        world_size: Number of ranks.
        local_rank: Rank on this machine, which selects the device. Default: from the launcher.
        address: Host on which rank 0 listens. Default: from the launcher.
        port: TCP port on which rank 0 listens. Default: from the launcher.

    Returns:
        Rank and device of this process. As a context manager, it ends torch.distributed if this call has started it.

    Raises:
        ValueError: A variable is missing or malformed (the message names it), the local rank has no device, the backend
            is NCCL on a machine without a GPU, or the address is not a host's. On every rank: the variables of two
            launchers contradict each other on one rank.
        OSError: Rank 0 cannot listen at the port.
        TimeoutError: Some ranks missed the rendezvous. The error of every other rank names them, or rank 0.

    Example:
        with launch() as environment:
            print(environment.rank, environment.world_size, environment.device)
    """
    if dist.is_initialized():
        return _running(device)
    place = read_environment(
        os.environ, rank=rank, world_size=world_size, local_rank=local_rank, address=address, port=port
    )
    chosen = _device(device, place.local_rank)
    if chosen.type != "cpu":
        # Every process begins with device 0. NCCL and all code that names only the kind of device use the current one.
        torch.accelerator.set_device_index(chosen)
    backend = backend or default_backend(chosen)
    check_nccl(backend, chosen, place.rank)
    longest = as_timedelta(timeout)
    dist.init_process_group(
        backend,
        rank=place.rank,
        world_size=place.world_size,
        timeout=longest,
        # With a device NCCL connects here, so that a wrong network shows before the model is made.
        device_id=chosen if chosen.type != "cpu" else None,
        store=meeting_point(place, longest),
    )
    environment = Environment(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        device=chosen,
        backend=backend,
        launcher=place.launcher,
        started=True,
    )
    atexit.register(environment.close)
    return environment


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerator, such as "cuda", or None."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def default_backend(device: torch.device) -> str:
    """Return the default backend: gloo for CPU tensors, and the accelerator's own backend for its tensors."""
    if device.type == "cpu":
        return "gloo"
    # Both: objects and counts on the CPU are then exchanged without a wait for the device.
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    """Return a timeout, in seconds or as a timedelta, as a timedelta.

    Raises:
        ValueError: The timeout is not positive.
    """
    if timeout is None:
        return None
    span = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if span <= timedelta():
        raise ValueError(f"timeout is {timeout}; it must be positive (seconds, or a timedelta)")
    return span


def check_nccl(backend: str, device: torch.device, rank: int) -> None:
    """Raise ValueError if a backend is NCCL and this rank has no GPU, or its tensors are on the CPU."""
    for part in backend.split(","):
        kind, _, name = part.rpartition(":")
        if name != "nccl":
            continue
        if not torch.cuda.is_available():
            raise ValueError(
                f"backend is {backend!r}, but rank {rank} has no GPU that CUDA can use; pass backend='gloo', or start "
                "this rank on a machine with GPUs"
            )
        if not kind and device.type == "cpu":
            raise ValueError(
                f"backend is {backend!r}, which sends tensors on GPUs alone, but the device of rank {rank} is "
                f"{device.type!r}; pass backend='gloo', or device='cuda'"
            )


def meeting_point(place: Launch, timeout: timedelta | None) -> Any:
    """Return the store for the rendezvous after all ranks have joined. A world of one needs no port.

    An early rank may connect to the store of an earlier start, which ends while the rank waits. The rank then tries to
    find rank 0 again, until the timeout.
    """
    # A single process must also start where no port may be opened, and several of them must not collide at one port.
    if place.world_size == 1 and place.launcher != "torchrun":
        return dist.HashStore()  # type: ignore[attr-defined]  # torch exports it late
    keeps_one = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun, which has met by itself
    longest = timeout or (timedelta(minutes=5) if keeps_one else _LONGEST)
    deadline = time.monotonic() + longest.total_seconds()
    while True:
        store = _connected(place, longest, listens=place.rank == 0 and not keeps_one)
        try:
            prefix = _prefix_of_start(store, place.rank, place.world_size, place.contradiction)
        except dist.DistNetworkError as error:
            # All tries together must not exceed the timeout, so the next try gets only the rest of it.
            longest = timedelta(seconds=deadline - time.monotonic())
            # Rank 0 has the store itself, and torchrun's does not belong to a start.
            if place.rank == 0 or keeps_one:
                raise
            if longest <= timedelta():
                raise TimeoutError(
                    f"rank {place.rank} of {place.world_size} has found only the end of an earlier start at "
                    f"{place.address}:{place.port}, where rank 0 should listen; look at its log"
                ) from error
            continue
        return dist.PrefixStore(f"par_groups/start-{prefix}", store)  # type: ignore[attr-defined]


def _connected(place: Launch, timeout: timedelta, *, listens: bool) -> Any:
    """Return the store at the address of rank 0.

    Args:
        place: Rank of this process, and the rendezvous address.
        timeout: Timeout for the connection to the store, and for keys that other ranks set.
        listens: Whether this rank hosts the store.

    Raises:
        ValueError: The address is not a host's.
        OSError: This rank hosts the store, and another process uses the port.
        TimeoutError: No process answers at the address.
    """
    where = f"{place.address}:{place.port}"
    try:
        socket.getaddrinfo(place.address, place.port)  # torch would try again until the timeout
    except OSError as error:
        raise ValueError(
            f"rank {place.rank} cannot find the host {place.address!r} ({error}); set MASTER_ADDR to a name or an "
            "address of the machine of rank 0 that all machines know"
        ) from None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it late
            place.address, place.port, place.world_size, is_master=listens, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        if listens:
            raise OSError(
                f"rank {place.rank} cannot listen at port {place.port}, where all ranks should meet ({error}); set "
                "MASTER_PORT on every rank to a port that nobody uses on the machine of rank 0, best one below those "
                "that the kernel gives away by itself (net.ipv4.ip_local_port_range)"
            ) from error
        raise TimeoutError(
            f"rank {place.rank} of {place.world_size} has found nobody at {where} within {timeout.total_seconds():g} "
            "s, where rank 0 should listen; look at its log, or set MASTER_ADDR and MASTER_PORT"
        ) from error


def _prefix_of_start(store: Any, rank: int, world_size: int, contradiction: str = "") -> str:
    """Return a prefix that all ranks of this start share and that no other start has used.

    The number of round trips does not grow with the number of ranks.

    When torchrun restarts ranks after a failure, its store still contains all keys of the ranks before, such as their
    addresses (pytorch issue 135712). The machines may also count the starts differently. Rank 0 therefore draws a
    random prefix for this start. A fixed key for the prefix could be left from an earlier start, too. Each other rank
    therefore requests the prefix with a random word of its own:

        rank r: set question/r to a new random word. This overwrites the word of an earlier start.

        rank 0: set answer/word to the prefix, for the word in question/r of every rank r.

        rank r: wait for the answer to its own word, then set received/prefix/r.

        rank 0: repeat the answers until every rank has set its key, because a word may be left from an earlier start.

    A rank sends its contradiction together with its word, and rank 0 sends the contradiction with every answer.

    Args:
        store: Store that all ranks share.
        rank: This rank.
        world_size: Number of ranks.
        contradiction: Error message if the variables of this rank contradict each other, else "".

    Raises:
        TimeoutError: Another rank missed the rendezvous. Rank 0 names it and notifies all present ranks.
        ValueError: A rank has a contradiction; every rank raises this error.
    """
    word = uuid.uuid4().hex
    seconds = store.timeout.total_seconds()
    if rank != 0:
        store.set(f"par_groups/question/{rank}", f"{word} {contradiction}")
        try:
            prefix: str = store.get(f"par_groups/answer/{word}").decode()
        except dist.DistNetworkError:  # the store has gone: nobody was waited for
            raise
        except RuntimeError as error:
            raise TimeoutError(
                f"rank {rank} has waited {seconds:g} s for rank 0 to say that all {world_size} ranks have come to the "
                "meeting; look at the log of rank 0, which has not come, or names there who is missing"
            ) from error
        start, _, refusal = prefix.removeprefix(_MISSING).removeprefix(_REFUSED).partition(" ")
        # The confirmation comes before any error here: rank 0 waits for it, and would name this rank as missing.
        store.set(f"par_groups/received/{start}/{rank}", "")
        if prefix.startswith(_REFUSED):
            raise ValueError(refusal)
        if prefix.startswith(_MISSING):
            verdict = f"par_groups/verdict/{start}"
            store.wait([verdict], 2 * _TO_HEAR)  # longer than rank 0 waits for others to say that they are here
            text = store.get(verdict).decode()
            store.set(f"par_groups/heard/{start}/{rank}", "")
            raise TimeoutError(text)
        return prefix
    others = range(1, world_size)
    questions = [f"par_groups/question/{other}" for other in others]
    # The word of rank 0 is the prefix of this start, so a key that an earlier start has left is never taken for a new
    # one.
    received = [f"par_groups/received/{word}/{other}" for other in others]
    answered: set[str] = set()
    deadline = time.monotonic() + 0.9 * seconds  # before those that have come give up by themselves
    # Rank 0 polls: a blocking wait for one rank's key would leave the answers to the other ranks unsent.
    while not store.check(received):
        if time.monotonic() > deadline:
            raise TimeoutError(_name_missing(store, received, word, seconds))
        if store.check(questions):
            asked = [each.decode().partition(" ")[::2] for each in _all_of(store, questions)]
            contradiction = contradiction or next((text for _, text in asked if text), "")
            # Asked again in each round: a late rank replaces the word that an earlier start has left.
            answers = [f"par_groups/answer/{each}" for each, _ in asked if each not in answered]
            _set_all(store, answers, f"{_REFUSED}{word} {contradiction}" if contradiction else word)
            answered.update(each for each, _ in asked)
        time.sleep(0.01)
    if contradiction:
        raise ValueError(contradiction)
    return word


def _name_missing(store: Any, received: list[str], word: str, seconds: float) -> str:
    """Find the ranks that missed the rendezvous, and report them to the present ranks, within a few seconds.

    A question in the store does not prove that its rank is present: it may be left from an earlier start. Rank 0
    therefore answers all questions, and only the present ranks confirm the answer.

    Args:
        store: Store that all ranks share.
        received: Key that each rank but rank 0 sets after its answer.
        word: Rank 0's word for this start.
        seconds: Time waited so far, in seconds.

    Returns:
        Error message for all present ranks.
    """
    key_of = dict(enumerate(received, 1))
    asked = [rank for rank in key_of if store.check([f"par_groups/question/{rank}"])]
    words = _all_of(store, [f"par_groups/question/{rank}" for rank in asked])
    _set_all(store, [f"par_groups/answer/{each.decode().partition(' ')[0]}" for each in words], f"{_MISSING}{word}")
    with suppress(RuntimeError):  # not all will
        store.wait([key_of[rank] for rank in asked], _TO_HEAR)
    here = [key for key in received if store.check([key])]
    missing = [rank for rank, key in key_of.items() if key not in here]
    several = f"ranks {missing[:8]}{' and others' if len(missing) > 8 else ''} have"
    text = (
        f"{several if len(missing) > 1 else f'rank {missing[0]} has'} not come to the meeting of all ranks within "
        f"{seconds:g} s; look at the logs of their machines"
    )
    # Before this rank raises: the store may live in its process, and others still read.
    store.set(f"par_groups/verdict/{word}", text)
    with suppress(RuntimeError):  # the store may go with this rank
        store.wait([key.replace("received", "heard", 1) for key in here], _TO_HEAR)
    return text


def _all_of(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of keys that are set; in one round trip if the store supports it."""
    found: list[bytes] = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    return found


def _set_all(store: Any, keys: list[str], value: str) -> None:
    """Set several keys to a value; in one round trip if the store supports it."""
    if keys and store.has_extended_api():
        store.multi_set(keys, [value] * len(keys))
        return
    for key in keys:
        store.set(key, value)


def _device(device: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the requested device, with the index of the local rank if the device has no index."""
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
    """Return the environment of a world that other code has started."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    backend = str(dist.get_backend_config())
    if device is not None:
        chosen = _device(device, local_rank)
    else:
        chosen = torch.device("cpu") if accelerator_of(None) is None else _running_device()
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
    """Return the accelerator to which the world is bound, else the process's current one, else the local rank's.

    Device 0 does not count as a choice if the local rank has a device, because every process begins with device 0.
    """
    world = dist.group.WORLD
    if world is not None and world.bound_device_id is not None:
        return world.bound_device_id
    index, local_rank = torch.accelerator.current_device_index(), int(os.environ.get("LOCAL_RANK", "0"))
    if index == 0 and local_rank < torch.accelerator.device_count():
        index = local_rank
    return torch.device(accelerator_type() or "cpu", index)
