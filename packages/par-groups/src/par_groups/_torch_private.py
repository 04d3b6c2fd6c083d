"""All private names of torch that this package uses: the first file to open after a new torch release."""

import inspect
import os
import pickle
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def can_split(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's backend for a kind of device can split a communicator, as NCCL can.

    `ProcessGroup._get_backend` and `supports_splitting`, in torch 2.11 to 2.13. `split_group` itself is public, but
    raises an error if the backend cannot split.
    """
    return bool(group._get_backend(device).supports_splitting)


def timeout_of(group: dist.ProcessGroup, device: torch.device | None = None) -> timedelta | None:
    """Return the timeout of a group's collectives; None if its backend for a kind of device has no such option.

    Without a device, the first one of the group's backends counts.

    `ProcessGroup._get_backend` and its `options._timeout`, in torch 2.11 to 2.13. `new_group` uses torch's default
    timeout, not the world's.
    """
    device = device or torch.device(str(dist.get_backend_config(group)).partition(":")[0])
    timeout: timedelta | None = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return timeout


def reset_group_names() -> None:
    """Give the next world of this process the name that it has in a new process. There must be no world.

    `_world.group_count`, in torch 2.11 to 2.13. A name is a part of the keys under which ranks meet in the store. torch
    resets the count in `destroy_process_group` only, and a start that has failed cannot be destroyed.
    """
    torch.distributed.distributed_c10d._world.group_count = 0


def hooks_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes in which an optimizer stores its registered hooks, by name.

    `_optimizer_step_pre_hooks` and similar names exist since torch 2.0. No public function removes hooks from a copy.
    """
    return {
        name: hooks
        for name, hooks in vars(optimizer).items()
        if name.startswith("_optimizer_") and isinstance(hooks, dict)
    }


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Return the `step` of an optimizer's class, without the hooks that torch has wrapped around it.

    The wrapper's attribute `hooked` exists since torch 2.0. There is no public access to a step without hooks. The
    wrapper also calls the hooks of all optimizers, which must run once per step.
    """
    function: Any = type(optimizer).step
    bare: Callable[[Optimizer], object] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return bare


def default_store() -> Any:
    """Return the key-value store of the default process group's rendezvous.

    `distributed_c10d._get_default_store`, in torch 2.11 to 2.13. No public function returns this store.
    """
    return dist.distributed_c10d._get_default_store()


def number_of_groups() -> int:
    """Return the number of groups that this process has made and not destroyed.

    `distributed_c10d._world.pg_names`, in torch 2.11 to 2.13. torch derives the rendezvous key of a split group from
    this number, so that ranks with different numbers would wait for each other for ever.
    """
    return len(dist.distributed_c10d._world.pg_names)


def let_gloo_workers_finish(timeout: float = 1.0) -> None:
    """Wait until gloo's worker threads have released the tensors of their last collectives.

    In torch 2.13 `Work.wait()` returns before the worker thread releases the tensors, and the release needs the GIL. A
    worker that requests the GIL while the interpreter finalizes ends the process with "terminate called without an
    active exception", exit code -6. A process group that any object still references keeps its workers, so
    `destroy_process_group` does not end them. torch offers nothing to wait for: the kernel's state of the threads,
    which are called "pt_gloo_runloop", is read instead.

    Args:
        timeout: Seconds after which this returns although a worker still runs, such as one whose peer has died.
    """
    tasks, end, asleep = Path("/proc/self/task"), time.monotonic() + timeout, 0
    while asleep < 2 and time.monotonic() < end:
        time.sleep(0.001)  # without the GIL, which a worker may be waiting for
        if not tasks.exists():
            return
        # A worker that was seen asleep may have been about to wake up, so all must sleep at two looks in a row.
        asleep = asleep + 1 if all(map(_sleeps, tasks.glob("*/stat"))) else 0


def _sleeps(path: Path) -> bool:
    """Return whether a thread is none of gloo's workers, or sleeps, or has ended."""
    try:
        text = path.read_text()
    except OSError:
        return True
    # The name of a thread is in parentheses and may contain parentheses itself, so the last one ends it.
    name, _, state = text.partition("(")[2].rpartition(") ")
    return not name.startswith("pt_gloo") or state.startswith("S")


def gloo_sockets() -> dict[int, int]:
    """Return the connected sockets of all gloo groups of this process: the inode of each descriptor.

    torch cannot end a gloo collective: in torch 2.13 `ProcessGroup.abort` returns and frees no rank. A socket that is
    shut down ends it with an error, so the sockets have to be found. The listening sockets are left out, because gloo
    aborts the process if one of them fails.
    """
    return {number: inode for _, connected in _gloo_loops() for number, inode in connected.items()}


def end_gloo_connects(size: int) -> None:
    """End the waits of all gloo groups of this process for peers that have not connected yet.

    Of each pair of ranks, one listens. If the other one dies before it connects, the first one waits until its timeout,
    and there is no socket that could be shut down. So this connects in the place of each peer, and closes at once.
    A gloo peer first sends the number of the pair, 8 bytes; a listening socket numbers its pairs from 0 (torch 2.11 to
    2.13). gloo keeps connections of pairs that do not wait, which end when they begin to.

    Args:
        size: Number of ranks of the largest group.
    """
    for listening, _ in _gloo_loops():
        with suppress(OSError), socket.socket(fileno=os.dup(listening)) as copy:
            address = copy.getsockname()[:2]
            for pair in range(size):
                with socket.create_connection(address, timeout=1) as peer:
                    peer.sendall(struct.pack("=q", pair))


def _gloo_loops() -> Iterator[tuple[int, dict[int, int]]]:
    """Yield the listening socket of each gloo group, and its connected sockets: the inode of each descriptor.

    Each gloo group has one epoll descriptor, and the kernel lists what it watches: one pipe, one listening TCP socket,
    and one TCP socket for each peer. Other loops differ: asyncio wakes itself by a pair of Unix sockets, libuv by an
    eventfd.
    """
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # a descriptor may be closed at any time, also the one of this listing
            if str(each.readlink()) != "anon_inode:[eventpoll]":
                continue
            lines = Path(f"/proc/self/fdinfo/{each.name}").read_text().splitlines()
            watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
            # A group whose peer has just died closes that socket now. Its other sockets must be found nevertheless.
            kinds = {number: kind for number in watched if (kind := _kind_of(number)) is not None}
            listening = [number for number, (kind, _) in kinds.items() if kind == "listening"]
            connected = {number: inode for number, (kind, inode) in kinds.items() if kind == "connected"}
            pipes = [kind for kind, _ in kinds.values()].count("pipe")
            if pipes == len(listening) == 1 and len(kinds) == 2 + len(connected):
                yield listening[0], connected


def is_message(work: Any) -> bool:
    """Return whether a work sends to one rank or receives from one, and is no collective.

    `Work._get_op_type` and the numbers of SEND, RECV and RECVANYSOURCE, in torch 2.11 to 2.13.
    """
    return work._get_op_type() in (12, 13, 14)


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error says that a connection of gloo or of a store has ended; gloo has no class for it."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def tcp_sockets() -> dict[int, int]:
    """Return the connected TCP sockets of this process: the inode of each descriptor.

    The difference between two calls is the socket of a `TCPStore` that was made in between, which torch does not show.
    """
    kinds = {int(each.name): _kind_of(int(each.name)) for each in Path("/proc/self/fd").iterdir()}
    return {number: kind[1] for number, kind in kinds.items() if kind is not None and kind[0] == "connected"}


def shut_down_sockets(sockets: dict[int, int]) -> None:
    """Shut down connected sockets of this process, so that both ends receive an error at once.

    Args:
        sockets: The inode of each descriptor. A descriptor that has another inode by now is left alone: its socket was
            closed, and the kernel has given the number to another file.
    """
    for descriptor, inode in sockets.items():
        # The check and the shutdown use a duplicate: the original number may be given to another file between them.
        # Closing the duplicate leaves gloo's descriptor open, which gloo closes itself.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if os.fstat(copy.fileno()).st_ino == inode:
                copy.shutdown(socket.SHUT_RDWR)


def _kind_of(descriptor: int) -> tuple[Literal["pipe", "listening", "connected", "other"], int] | None:
    """Return what a descriptor is, and its inode; None once it is closed."""
    try:
        state = os.fstat(descriptor)
        if stat.S_ISFIFO(state.st_mode):
            return "pipe", state.st_ino
        if not stat.S_ISSOCK(state.st_mode):
            return "other", state.st_ino
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                return "other", state.st_ino
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return "listening" if listens else "connected", state.st_ino
    except OSError:
        return None


@contextmanager
def group_called(name: str) -> Iterator[None]:
    """Set the name of the group that `new_group(use_local_synchronization=True)` makes inside the context.

    torch derives the name of such a group from its ranks and the number of existing groups. That number falls when a
    group is destroyed, so that a name may be repeated while a group with this name still exists. It also differs
    between ranks that have made different numbers of groups. The given name must be new in the world.
    `_process_group_name(ranks, use_hashed_name)` in torch 2.11 to 2.13; no public function accepts a name.
    """
    module: Any = dist.distributed_c10d
    known = module._process_group_name
    module._process_group_name = lambda _ranks, use_hashed_name: name  # noqa: ARG005 - torch gives it by its name
    try:
        yield
    finally:
        module._process_group_name = known


def groups_by_name() -> dict[str, dist.ProcessGroup]:
    """Return all process groups of this process by torch's name of each.

    `distributed_c10d._world.pg_names`, in torch 2.11 to 2.13. No public function lists the groups that a program has.
    """
    return {str(name): group for group, name in list(dist.distributed_c10d._world.pg_names.items())}


def flight_trace() -> dict[str, Any]:
    """Return the trace of torch's flight recorder: "entries" has one item for each collective of gloo and NCCL.

    `_distributed_c10d._dump_fr_trace`, in torch 2.11 to 2.13. No public function returns it; torch pickles it in C++.
    """
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]  # noqa: PLC0415 - no stub

    trace: dict[str, Any] = pickle.loads(_dump_fr_trace())  # noqa: S301 - this process has just written it
    return trace


def operations_begun(group: dist.ProcessGroup) -> int:
    """Return the number of operations that a group has begun on this rank; 0 if its backend does not count.

    `ProcessGroup._get_sequence_number_for_group`, in torch 2.11 to 2.13; it raises for backends without such a number.
    """
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def split_factor(placement: "Placement") -> int | None:
    """Return the split factor of a strided shard, which takes a chunk of each piece; None for any other placement.

    `placement_types._StridedShard`, in torch 2.11 to 2.13. FSDP2 uses this placement if tensor parallelism also shards
    dim 0 of a parameter. The order of the placements is then not the order in which the dim is sharded.
    """
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415 - the groups need no DTensor

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def is_called_by_state_dict_of_dcp() -> bool:
    """Return whether torch.distributed.checkpoint's functions for optimizer states are on the call stack.

    `_get_optim_state_dict` and `_load_optim_state_dict` exist since torch 2.2. `get_optimizer_state_dict`,
    `set_optimizer_state_dict` and their like call them. They look for an optimizer's tensors among a module's
    parameters and end in a KeyError if it holds other tensors. No public API reports the caller.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if module is None:
        return False
    codes = (module._get_optim_state_dict.__code__, module._load_optim_state_dict.__code__)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


may_share_data = torch._has_compatible_shallow_copy_type
"""Whether a tensor may become the data of another tensor; torch asks when `data` is set. In torch 2.11 to 2.13."""


def tensor_members() -> dict[str, Any]:
    """Return the properties and methods that torch defines for tensors in C++, by name. In torch 2.11 to 2.13."""
    return dict(vars(torch._C.TensorBase))


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out; since torch 1.6."""
    return module._non_persistent_buffers_set


def without_torch_functions() -> AbstractContextManager[None]:
    """Return a context in which operations treat a tensor of a subclass like any other tensor.

    `torch._C.DisableTorchFunctionSubclass`, since torch 2.0. The public `__torch_function__` of Tensor also makes what
    an operation returns of the subclass.
    """
    manager: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return manager


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile wraps a module, or its call by the module's own `compile`.

    `_orig_mod` and `_compiled_call_impl` exist since torch 2.2. No public function returns this: `torch.compiler` says
    whether code is being compiled right now.
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
