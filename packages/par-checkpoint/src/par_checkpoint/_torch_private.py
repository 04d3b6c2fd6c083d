"""Every underscore API of torch that this package uses, one function each: the first file to open when torch moves."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim import Optimizer

from par_groups import part_of

F = TypeVar("F", bound=Callable[..., object])


def gloo_among(nonce: str, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo communicator of some ranks of the world, which find each other through its store by a name.

    Two ranks connect when they first send each other something: a socket for every pair would be more than a process
    may open, from a thousand ranks on. `send` and `recv` wait for that, on one of the two sides until the other one has
    called something, for five times `timeout`, whatever the work's `wait` is told; and who gave up dies when the other
    one comes after all. So does the thread of a collective, and the communicator's end waits for it.

    Since torch 2.6. `dist.new_group` makes a communicator too, but has to be called by all ranks of the world.

    Args:
        nonce: The name, the same on all these ranks and used by no other communicator.
        rank: This rank's number among them.
        size: The number of them.
        timeout: How long collectives wait for one that does not answer, and a fifth of how long connecting does.
    """
    store = dist.distributed_c10d.PrefixStore(nonce, dist.distributed_c10d._get_default_store())
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def set_timeout_of(gloo: Any, timeout: timedelta) -> None:
    """Sets how long the collectives of a communicator that `gloo_among` has made wait for a rank.

    Since torch 2.5 or before. What is public sets it for groups that `torch.distributed` has registered.
    """
    gloo._set_default_timeout(timeout)


def store_of_world(prefix: str) -> Any:
    """The store through which the ranks of the world have found each other, for keys that begin with a prefix.

    Since torch 1.8. What is public makes a store of one's own, for which the ranks would have to agree on an address.
    """
    return dist.distributed_c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def gloo_of(group: dist.ProcessGroup) -> Any:
    """The gloo communicator that a group has for the CPU, or None.

    Since torch 2.0. No public call tells the backends of a group, and `dist.send` would take a group's usual one.
    """
    if "cpu" not in {str(device) for device in group._device_types}:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def all_gather_into(gloo: Any, every: torch.Tensor, mine: torch.Tensor, timeout: timedelta) -> None:
    """Gathers equal numbers of bytes of all ranks into one tensor, and waits for it.

    Since torch 1.8. `dist.all_gather_into_tensor` takes groups that `torch.distributed` has registered, which the
    private communicator of a save in the background is not.
    """
    gloo._allgather_base(every, mine).wait(timeout)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor or a freed parameter keeps on this rank, or the tensor itself.

    Since torch 2.0. `DTensor.to_local` makes a new tensor and a step of autograd each time.
    """
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part_of(local)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was changed, as autograd counts; a DTensor counts for itself.

    Since torch 0.4. Nothing public tells it.
    """
    return tensor._version


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its state dict leaves out.

    Since torch 1.6. A state dict tells it too, unless a hook changes its names.
    """
    return module._non_persistent_buffers_set


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers by name, None where one was registered without a value; changing it changes the module.

    Since torch 0.1. `named_buffers` leaves out what another module has under another name.
    """
    return module._buffers


def pre_load_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """The hooks of a module that read a state dict before it is loaded.

    Since torch 1.0. Nothing public lists them.
    """
    return list(module._load_state_dict_pre_hooks.values())


def post_load_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """The hooks of a module that torch calls when it is loaded.

    Since torch 1.13. Nothing public lists them.
    """
    return list(module._load_state_dict_post_hooks.values())


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """What hooks get that torch calls when a module is loaded.

    Since torch 1.1. Nothing public makes it.
    """
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def load_from_state_dict(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    wrong: tuple[list[str], list[str], list[str]],
) -> None:
    """Loads a module's own values, and no other module's, as `load_state_dict` does for each module in turn.

    Since torch 0.4. What is public loads the modules in it, too.

    Args:
        module: The module.
        state: The values, by names that begin with `prefix`.
        prefix: The module's name and a dot.
        metadata: What the state dict says of the module.
        wrong: Takes names that are not there, names that nobody takes, and what else is wrong, in words.
    """
    module._load_from_state_dict(state, prefix, metadata, True, *wrong)


def optimizer_state_hooks(optimizer: Optimizer) -> list[Callable[..., object]]:
    """The hooks of an optimizer that torch calls in `state_dict`, before and after.

    Since torch 2.1. Nothing public lists them.
    """
    hooks: Any = optimizer
    return [*hooks._optimizer_state_dict_pre_hooks.values(), *hooks._optimizer_state_dict_post_hooks.values()]


def optimizer_load_hooks(optimizer: Optimizer) -> tuple[list[Callable[..., object]], list[Callable[..., object]]]:
    """The hooks of an optimizer that torch calls in `load_state_dict`: those before it, and those after it.

    Since torch 2.1. Nothing public lists them.
    """
    hooks: Any = optimizer
    before, after = hooks._optimizer_load_state_dict_pre_hooks, hooks._optimizer_load_state_dict_post_hooks
    return list(before.values()), list(after.values())


def not_compiled(function: F) -> F:
    """A function that torch.compile calls as it is, with all that it calls.

    Since torch 2.7. `torch.compiler.disable` does the same, but imports the compiler, which takes a second in the first
    save of a program that compiles nothing.
    """
    code: Any = getattr(function, "__code__")  # noqa: B009 - a callable has none for mypy
    skipped = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skipped, skipped))
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010 - a function has no such attribute for mypy
    return function


def checkpoint_offset(tensor: torch.Tensor) -> int:
    """The byte of its file where the storage of a tensor begins that `torch.load` has put on the meta device.

    Since torch 2.6. The file's directory tells it too, but not which tensor a record belongs to.
    """
    return cast("int", tensor.untyped_storage()._checkpoint_offset)


def empty_pinned_cache() -> None:
    """Gives pinned memory that nobody uses any longer back to the system.

    Since torch 2.7; the public `torch.accelerator.empty_host_cache` came later. Builds without an accelerator lack it,
    and have no pinned memory.
    """
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.accelerator.is_available():
        empty()
