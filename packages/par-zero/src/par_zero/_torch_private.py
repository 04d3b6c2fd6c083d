"""The underscore names of torch that this package uses: the first file to open when a new torch breaks something.

`tests/test_torch_private.py` calls every one of them. What is bound without a function of its own is called so often
that a wrapper would show in a step.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree

from par_groups import Box

foreach_copy_ = torch._foreach_copy_
"""Copies a list of tensors to another in one call. Since torch 2.0; without it every gradient is a call of its own."""

foreach_add_ = torch._foreach_add_
"""Adds a list of tensors to another in one call. Since torch 1.9."""


tree_leaves = _pytree.tree_leaves
"""Lists what a container holds that torch or a package has registered; any other object is its own leaf.

Since torch 2.2. torch.export's public registry has no function that reads containers.
"""


_WITH_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__
"""The code of every `step` that calls hooks."""


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread.

    `torch._C._current_graph_task_id` is there since torch 2.0. No public function tells a pass that has failed from one
    that is still under way.
    """
    return torch._C._current_graph_task_id() != -1


def will_get_gradient(parameter: torch.Tensor, *, if_unknown: bool = False) -> bool:
    """Whether the backward pass under way will leave a gradient in a parameter, asked in a hook of that pass.

    `torch._C._will_engine_execute_node` is there since torch 2.0; `register_multi_grad_hook` counts with it. It raises
    where the gradient is what `torch.autograd.grad` gives back, which leaves none, and where no pass of autograd's own
    engine runs. It does not see the gradients of passes within that pass, such as those of reentrant checkpoints.

    Args:
        parameter: The parameter.
        if_unknown: What is returned where it raises.
    """
    if not parameter.requires_grad:
        return False
    with without_torch_functions():  # it makes a view of the parameter, which a freed one refuses
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return if_unknown


current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread, the innermost; -1 outside of any. In torch 2.11 to 2.13."""


def is_in_torch_func() -> bool:
    """Whether a transform of torch.func, such as jvp, grad or vmap, runs on this thread.

    `torch._C._functorch.peek_interpreter_stack` is there since torch 2.0. Nothing public tells.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def call_at_end_of_backward(call: Callable[[], None]) -> None:
    """Has autograd call a function when the backward pass under way has done everything else.

    `_execution_engine.queue_callback` is there since torch 0.4; DistributedDataParallel and FSDP2 end their reductions
    with it. A hook of a tensor would come before the gradients of other tensors.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def without_new_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Inside, what is written to a tensor is not counted as a change.

    `_unsafe_preserve_version_counter` is there since torch 1.13, with tuples of tensors since 2.6. Autograd has saved
    views of gathered parameters, and would refuse a backward pass after they were gathered again, with the same values.
    """
    manager: AbstractContextManager[None] = torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor)
    return manager


def without_torch_functions() -> AbstractContextManager[None]:
    """Inside, operations on a tensor of a subclass are done as on any other, without its `__torch_function__`.

    `torch._C.DisableTorchFunctionSubclass` is there since torch 2.0. The public `__torch_function__` of Tensor does the
    same and then goes through what the operation has returned, to make it of the subclass too.
    """
    manager: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return manager


def chunk_of_dcp(box: Box) -> Any:
    """What torch.distributed.checkpoint calls the place of a box in the whole tensor.

    Tensors that are cut tell it by `__create_chunk_list__`, as DTensor does since torch 2.4. Nothing public says so of
    tensors of another kind.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415 - it is there if this is called

    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.size))


def item_of_dcp(name: str, box: Box, shape: Sequence[int], part: torch.Tensor) -> Any:
    """What torch.distributed.checkpoint is to write of a box of a tensor, by `__create_write_items__`: see above."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType  # noqa: PLC0415

    properties = TensorProperties.create_from_tensor(part)
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.start)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk_of_dcp(box), properties=properties, size=torch.Size(shape)),
    )


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place, under any of its views. `_version` is there since torch 0.4."""
    return tensor._version


def has_compiled() -> bool:
    """Whether anything in this process was given to torch.compile, since the last `torch.compiler.reset`.

    `torch._dynamo.eval_frame.cached_backends` is there since torch 2.0. Nothing public tells.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(map(callable, dynamo.cached_backends.values()))  # None is what compiles nothing


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary in which a module itself keeps its parameters, without those of its children.

    `_parameters` is there since the first torch. `named_parameters()` copies it, and is too slow for every step.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dictionary in which a module itself keeps its buffers. `_buffers` is there since the first torch."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary in which a module keeps its children.

    `_modules` is there since the first torch. No public function takes a child out of a container and puts it back in
    its place.
    """
    return module._modules


def unsaved_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The buffers of a module and its children that its state dict leaves out.

    `_non_persistent_buffers_set` is there since torch 1.6. A state dict itself may be changed by hooks.
    """
    return [
        buffer
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name in part._non_persistent_buffers_set
    ]


def hooks_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes in which an optimizer keeps the hooks that were registered with it, by name.

    `_optimizer_step_pre_hooks` and its like are there since torch 2.0. Nothing public removes them from a copy.
    """
    return {
        name: hooks
        for name, hooks in vars(optimizer).items()
        if name.startswith("_optimizer_") and isinstance(hooks, dict)
    }


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The `step` of an optimizer's class, without the hooks that torch has wrapped around it.

    The wrapper's attribute `hooked` is there since torch 2.0. There is no public way to a step without hooks, which are
    those of all optimizers too, and are to run once a step.
    """
    function: Any = type(optimizer).step
    bare: Callable[[Optimizer], object] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return bare


def call_first_after_step(optimizer: Optimizer, hook: Callable[..., None]) -> None:
    """Registers a hook that runs after each step, before those that were registered earlier.

    `_optimizer_step_post_hooks` is there since torch 2.0. The public method puts a hook behind the others.
    """
    handle = optimizer.register_step_post_hook(torch.compiler.disable(hook))
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)


def call_last_after_step(optimizer: Optimizer, hook: Callable[[bool], None]) -> None:
    """Registers a hook that runs after each step, after all others of this optimizer, those too that come later.

    `_optimizer_step_post_hooks` is there since torch 2.0. The public method puts a hook behind those that there are.

    Args:
        optimizer: The optimizer.
        hook: Called with whether hooks were registered later.
    """
    hooks: Any = optimizer._optimizer_step_post_hooks
    known = len(hooks) + 1
    own = optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: hook(len(hooks) > known)))
    _keep_last(optimizer, "register_step_post_hook", hooks, own.id)


def call_last_before_step(optimizer: Optimizer, hook: Callable[..., Any]) -> None:
    """Registers a hook that runs before each step, after all others of this optimizer, those too that come later.

    `_optimizer_step_pre_hooks` is there since torch 2.0. The public method puts a hook behind those that there are.
    """
    own = optimizer.register_step_pre_hook(torch.compiler.disable(hook))
    _keep_last(optimizer, "register_step_pre_hook", optimizer._optimizer_step_pre_hooks, own.id)


def _keep_last(optimizer: Optimizer, method: str, hooks: Any, own: int) -> None:
    """Keep a hook of an optimizer behind the hooks that are registered later.

    Args:
        optimizer: The optimizer.
        method: Name of the method that registers hooks of this kind.
        hooks: The optimizer's hooks of this kind, an OrderedDict by id.
        own: Id of the hook that stays last.
    """
    register = getattr(optimizer, method)

    def register_before(other: Callable[..., Any]) -> Any:
        handle = register(other)
        hooks.move_to_end(own)
        return handle

    setattr(optimizer, method, register_before)


def is_within_step(optimizer: Optimizer) -> bool:
    """Whether a hook of a step is called by a step that another one of the same optimizer has called.

    A subclass whose `step` calls that of its parent has hooks called for both, where an optimizer of the parent's class
    was made too: torch wraps the `step` of a class when the first of its optimizers is made. Since torch 2.0 that
    wrapper is of `profile_hook_step`, with the optimizer as its `self`. Nothing public tells one call from the other.
    """
    frame, calls = inspect.currentframe(), 0
    while frame is not None:
        calls += frame.f_code is _WITH_HOOKS and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return calls > 1


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group may take.

    `_get_backend` and its `options._timeout` are there since torch 2.0. What `new_group` takes by default is torch's
    own timeout, not that of the world.
    """
    device = torch.device(next(iter(str(dist.get_backend_config(group)).split(":"))))
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def default_store() -> Any:
    """Return the key-value store of the default process group's rendezvous.

    `_get_default_store` exists since torch 1.8. torch has no public function that returns this store.
    """
    return dist.distributed_c10d._get_default_store()
