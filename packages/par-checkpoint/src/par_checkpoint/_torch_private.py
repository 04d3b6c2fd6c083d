"""Every underscore API of torch that this package uses, one function each: the first file to open when torch moves."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim import Optimizer

from par_groups import part_of

F = TypeVar("F", bound=Callable[..., object])


def gloo_among(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo communicator of some processes, which meet through a store.

    Two ranks connect at their first message. `send` and `recv` wait for the connection up to five times `timeout`, even
    if the `wait` of the work has a shorter one. If the other rank connects after that, the process that gave up aborts.
    A collective connects in a thread of its own, and destroying the communicator waits for that thread.

    Since torch 2.6. `dist.new_group` also creates a communicator, but all ranks of the world must call it.

    Args:
        store: Store whose keys only this communicator uses.
        rank: This rank's number in the communicator.
        size: Number of ranks.
        timeout: Maximum time that collectives wait for a rank; connecting waits five times as long.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # From about a thousand ranks on, one socket per pair of ranks exceeds the limit on open files of a process.
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def set_timeout_of(gloo: Any, timeout: timedelta) -> None:
    """Set the timeout of the collectives of a communicator from `gloo_among`.

    torch has this private method since 2.5 or earlier. The public function accepts only groups that `torch.distributed`
    has registered.
    """
    gloo._set_default_timeout(timeout)


def store_of_world(prefix: str) -> Any:
    """Return the store of the world's rendezvous, for keys that begin with a prefix.

    Since torch 1.8. The public classes create a new store, and the ranks would have to agree on its address.
    """
    return dist.distributed_c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def gloo_of(group: dist.ProcessGroup) -> Any:
    """Return the gloo communicator that a group has for the CPU, or None.

    Since torch 2.0. No public call lists the backends of a group, and `dist.send` would use the group's default
    backend.
    """
    if "cpu" not in {str(device) for device in group._device_types}:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def all_gather_into(gloo: Any, every: torch.Tensor, mine: torch.Tensor, timeout: timedelta) -> None:
    """Gather the same number of bytes from every rank into one tensor, and wait for the result.

    Since torch 1.8. `dist.all_gather_into_tensor` accepts only groups that `torch.distributed` has registered. The
    private communicator of a background save is not registered.
    """
    gloo._allgather_base(every, mine).wait(timeout)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor or of a freed parameter, or the tensor itself.

    Since torch 2.0. Each call of `DTensor.to_local` creates a new tensor and an autograd node.
    """
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part_of(local)


def version_of(tensor: torch.Tensor) -> int:
    """Return autograd's version counter of a tensor. A DTensor has a counter separate from its local tensor's.

    Since torch 0.4. No public call returns it.
    """
    return tensor._version


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict omits.

    Since torch 1.6. A state dict also shows it, unless a hook changes its names.
    """
    return module._non_persistent_buffers_set


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own dict of buffers, with None for a buffer without a value. A change to it changes the module.

    Since torch 0.1. `named_buffers` omits a buffer that another module has under another name.
    """
    return module._buffers


def pre_load_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks of a module that read a state dict before it is loaded.

    Since torch 1.0. No public call lists them.
    """
    return list(module._load_state_dict_pre_hooks.values())


def post_load_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks of a module that torch calls after it is loaded.

    Since torch 1.13. No public call lists them.
    """
    return list(module._load_state_dict_post_hooks.values())


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """Return the argument of the hooks that torch calls after a module is loaded.

    Since torch 1.1. No public call creates it.
    """
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def load_from_state_dict(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    wrong: tuple[list[str], list[str], list[str]],
) -> None:
    """Load only a module's own values, as `load_state_dict` does for each module.

    Since torch 0.4. The public method also loads the submodules.

    Args:
        module: The module.
        state: Values by name; names begin with `prefix`.
        prefix: The module's name and a dot.
        metadata: The state dict's metadata of the module.
        wrong: Lists that receive missing names, unexpected names and error texts.
    """
    module._load_from_state_dict(state, prefix, metadata, True, *wrong)


def optimizer_state_hooks(optimizer: Optimizer) -> list[Callable[..., object]]:
    """Return the hooks that torch calls before and after an optimizer's `state_dict`.

    Since torch 2.1. No public call lists them.
    """
    hooks: Any = optimizer
    return [*hooks._optimizer_state_dict_pre_hooks.values(), *hooks._optimizer_state_dict_post_hooks.values()]


def optimizer_load_hooks(optimizer: Optimizer) -> tuple[list[Callable[..., object]], list[Callable[..., object]]]:
    """Return the hooks of an optimizer around `load_state_dict`: those before it, and those after it.

    Since torch 2.1. Nothing public lists them.
    """
    hooks: Any = optimizer
    before, after = hooks._optimizer_load_state_dict_pre_hooks, hooks._optimizer_load_state_dict_post_hooks
    return list(before.values()), list(after.values())


def not_compiled(function: F) -> F:
    """Return a function that torch.compile calls without compiling it or any function that it calls.

    Since torch 2.7. `torch.compiler.disable` does the same, but imports the compiler, which takes a second in the first
    save of a program that compiles nothing.
    """
    code: Any = getattr(function, "__code__")  # noqa: B009 - a callable has none for mypy
    skipped = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skipped, skipped))
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010 - a function has no such attribute for mypy
    return function


def checkpoint_offset(tensor: torch.Tensor) -> int:
    """Return the offset in its file of the storage of a tensor that `torch.load` has put on the meta device, in bytes.

    Since torch 2.6. The file's directory tells it too, but not which tensor a record belongs to.
    """
    return cast("int", tensor.untyped_storage()._checkpoint_offset)


def empty_pinned_cache() -> None:
    """Give pinned memory that nobody uses any longer back to the system.

    Since torch 2.7; the public `torch.accelerator.empty_host_cache` came later. Builds without an accelerator lack it,
    and have no pinned memory.
    """
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.accelerator.is_available():
        empty()


def with_parameters(
    module: nn.Module, replaced: Mapping[int, torch.Tensor], made: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Return a module of the same class, names and buffers, with other parameters.

    `_parameters` and `_modules` exist since torch 0.1. `copy.copy` of a module shares both with the original.

    Args:
        module: The module, which does not change.
        replaced: New parameters, by id of the present ones.
        made: Modules that were made already: one that has several names is made once.
    """
    if module not in made:
        copy = made[module] = object.__new__(type(module))
        own = {name: None if each is None else replaced[id(each)] for name, each in module._parameters.items()}
        inner = {
            name: None if each is None else with_parameters(each, replaced, made)
            for name, each in module._modules.items()
        }
        copy.__dict__.update({**module.__dict__, "_parameters": own, "_modules": inner})
    return made[module]
