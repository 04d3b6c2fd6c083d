"""Underscore names of torch that this package uses. If a new torch version breaks something, begin here.

`tests/test_torch_private.py` calls every name. Names without a function of their own are called so often that a wrapper
would cost measurable time in a step.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from importlib import import_module
from operator import attrgetter
from traceback import walk_stack
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree

from par_groups import METADATA_OPERATIONS, Box

F = TypeVar("F", bound=Callable[..., Any])

foreach_copy_ = torch._foreach_copy_
"""Copy a list of tensors to another in one call. Since torch 2.0; otherwise every gradient needs a call."""

foreach_add_ = torch._foreach_add_
"""Add a list of tensors to another in one call. Since torch 1.9."""


tree_leaves = _pytree.tree_leaves
"""List the leaves of a container that torch or a package has registered; any other object is its own leaf.

Since torch 2.2. torch.export's public registry has no function that reads containers.
"""


_WITH_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Code object of every `step` that calls hooks."""


def will_get_gradient(parameter: torch.Tensor, *, if_unknown: bool = False) -> bool:
    """Return whether the backward pass under way will leave a gradient in a parameter. Call it in a hook of that pass.

    `torch._C._will_engine_execute_node` exists since torch 2.0; `register_multi_grad_hook` counts with it. It raises an
    error if `torch.autograd.grad` returns the gradient, which it then leaves in no parameter. It also raises an error
    if no pass of autograd's own engine runs. It does not see gradients of passes within that pass, such as in reentrant
    checkpoints.

    Args:
        parameter: Parameter.
        if_unknown: Result if the function raises an error.
    """
    if not parameter.requires_grad:
        return False
    # The call makes a view of the parameter, for which a freed parameter raises an error.
    with without_torch_functions():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return if_unknown


current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of this thread's innermost backward pass; -1 outside of any. In torch 2.11 to 2.13.

No public function distinguishes a pass that has failed from a pass that is still under way.
"""


def is_in_torch_func() -> bool:
    """Return whether a transform of torch.func, such as jvp, grad or vmap, runs on this thread.

    `torch._C._functorch.peek_interpreter_stack` exists since torch 2.0. No public function returns this.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def call_at_end_of_backward(call: Callable[[], None]) -> None:
    """Register a function that autograd calls when the backward pass under way has done everything else.

    `_execution_engine.queue_callback` exists since torch 0.4; DistributedDataParallel and FSDP2 end their reductions
    with it. A hook of a tensor would run before the gradients of other tensors.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def without_new_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to a tensor do not change its version counter.

    `_unsafe_preserve_version_counter` exists since torch 1.13, for tuples of tensors since 2.6. Autograd has saved
    views of gathered parameters. It would fail a backward pass after they were gathered again, although the values are
    the same.
    """
    manager: AbstractContextManager[None] = torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor)
    return manager


def without_torch_functions() -> AbstractContextManager[None]:
    """Return a context in which tensor subclasses behave as plain tensors, without their `__torch_function__`.

    `torch._C.DisableTorchFunctionSubclass` exists since torch 2.0. The public `__torch_function__` of Tensor does the
    same, and then converts all results to the subclass.
    """
    manager: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return manager


_T = torch.Tensor

READS_NO_VALUES: frozenset[Any] = METADATA_OPERATIONS | {
    *(_T.shape.__get__, _T.ndim.__get__, _T.grad.__set__),  # type: ignore[attr-defined, union-attr]
    *(_T.size, _T.dim, _T.numel, _T.stride),
}
"""Operations that do not read a tensor's values, as `__torch_function__` gets them."""


def chunk_of_dcp(box: Box) -> Any:
    """Return torch.distributed.checkpoint's metadata of a box's position in the full tensor.

    Sharded tensors return it from `__create_chunk_list__`, as DTensor does since torch 2.4. There is no public
    interface for other classes of tensors.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415 - it is there if this is called

    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.size))


def item_of_dcp(name: str, box: Box, shape: Sequence[int], part: torch.Tensor) -> Any:
    """Return torch.distributed.checkpoint's write item of a box, for `__create_write_items__`: see `chunk_of_dcp`."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType  # noqa: PLC0415

    properties = TensorProperties.create_from_tensor(part)
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.start)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk_of_dcp(box), properties=properties, size=torch.Size(shape)),
    )


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place, under any of its views. `_version` exists since torch 0.4."""
    return tensor._version


def versions_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the sum of the tensors' `version_of`, without a Python call for each."""
    return sum(map(attrgetter("_version"), tensors))


class _WeakCall(WeakMethod[Callable[[], None]]):
    """A call of a method that does not keep the method's object alive."""

    def __call__(self, *_: Any) -> None:
        if (method := super().__call__()) is not None:
            method()


def call_before_compile(method: Callable[[], None]) -> None:
    """Let torch.compile call a method before it compiles a frame, until the method's object is dropped.

    `torch._dynamo.callback_handler` exists since torch 2.3. No public function does this. `torch.compiler.reset` drops
    the call, so register it again from time to time: a call that is registered already is not registered twice.
    """
    calls = import_module("torch._dynamo").callback_handler.start_callbacks
    if (call := _WeakCall(method, lambda gone: gone in calls and calls.remove(gone))) not in calls:
        calls.append(call)


def has_compiled() -> bool:
    """Return whether torch.compile was called in this process since the last `torch.compiler.reset`.

    `torch._dynamo.eval_frame.cached_backends` exists since torch 2.0. No public function returns this.
    """
    # The value None stands for a backend that compiles nothing.
    return any(map(callable, import_module("torch._dynamo.eval_frame").cached_backends.values()))


compiles_frames: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Return a function if torch.compile compiles the frames that are called now, although this frame runs as Python.

It exists since torch 2.1; `torch.compiler` only returns whether code is being traced. A wrapper would be compiled.
"""


def skip_frame(function: F) -> F:
    """Keep torch.compile from compiling a function, but not from compiling the functions that it calls. Return it.

    `torch._dynamo.decorators.skip` exists since torch 2.1. Under the public `torch.compiler.disable`, `compiles_frames`
    returns None.
    """
    # A program that does not call `shard` need not wait for the import of the compiler.
    skip: Callable[[F], F] = import_module("torch._dynamo.decorators").skip
    return skip(function)


def uncompiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that torch.compile compiles neither, nor the functions that it calls.

    `torch.compiler.disable` does the same, and costs more than most hooks in a program that compiles nothing.
    """
    disabled = torch.compiler.disable(function)

    def call(*args: Any, **keywords: Any) -> None:
        (function if compiles_frames() is None else disabled)(*args, **keywords)

    return skip_frame(call)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's dictionary of its own parameters, without its children's.

    `_parameters` exists since the first torch. `named_parameters()` copies it, and is too slow for every step.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's dictionary of its own buffers. `_buffers` exists since the first torch."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's dictionary of its children.

    `_modules` exists since the first torch. No public function removes a child from a container and puts it back at its
    position.
    """
    return module._modules


def unsaved_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a module and its children that its state dict omits.

    `_non_persistent_buffers_set` exists since torch 1.6. Hooks may change a state dict, so it is no substitute.
    """
    return [
        buffer
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name in part._non_persistent_buffers_set
    ]


def call_first_after_step(optimizer: Optimizer, hook: Callable[..., None]) -> None:
    """Register a hook that runs after each step, before the hooks that were registered earlier.

    `_optimizer_step_post_hooks` exists since torch 2.0. The public method appends a hook to the existing ones.
    """
    handle = optimizer.register_step_post_hook(torch.compiler.disable(hook))
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)


def call_last_after_step(optimizer: Optimizer, hook: Callable[[bool], None]) -> None:
    """Register a hook that runs after each step and after all hooks of this optimizer, including later ones.

    `_optimizer_step_post_hooks` exists since torch 2.0. The public method appends a hook to the existing ones.

    Args:
        optimizer: Optimizer.
        hook: Hook. Its argument is whether hooks were registered later.
    """
    hooks: Any = optimizer._optimizer_step_post_hooks
    # The number includes the own hook, so that only later hooks are counted as more.
    known = len(hooks) + 1
    own = optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: hook(len(hooks) > known)))
    _keep_last(optimizer, "register_step_post_hook", hooks, own.id)


def call_last_before_step(optimizer: Optimizer, hook: Callable[..., Any]) -> None:
    """Register a hook that runs before each step and after all hooks of this optimizer, including later ones.

    `_optimizer_step_pre_hooks` exists since torch 2.0. The public method appends a hook to the existing ones.
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
        # The registered hook was appended, so the own hook moves behind it again.
        hooks.move_to_end(own)
        return handle

    setattr(optimizer, method, register_before)


def is_within_step(optimizer: Optimizer) -> bool:
    """Return whether a step that another step of the same optimizer has called runs the current hook.

    A subclass's `step` may call its parent's `step`. Hooks then run for both if an optimizer of the parent's class was
    made as well, because torch wraps the `step` of a class when it makes the first optimizer of that class. Since torch
    2.0 that wrapper belongs to `profile_hook_step`, with the optimizer as its `self`. No public function distinguishes
    the calls.
    """
    # Hooks get no information about their caller. Only the call stack shows whether two steps are under way.
    frames = (frame for frame, _ in walk_stack(inspect.currentframe()))
    return sum(frame.f_code is _WITH_HOOKS and frame.f_locals.get("self") is optimizer for frame in frames) > 1


def abort_group(group: dist.ProcessGroup) -> None:
    """Let all collectives of a communicator fail, on this rank and soon on its other ranks.

    `ProcessGroup.abort` exists since torch 2.8, and gloo's does nothing. But a receive that times out makes gloo fail
    everything that is in flight on its communicator.
    """
    if "gloo" not in str(dist.get_backend_config(group)):
        group.abort()
        return
    peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    with suppress(RuntimeError):
        work = dist.irecv(nothing, group=group, group_src=peer, tag=7_213_001)
        if work is not None:
            work.wait(timedelta(milliseconds=1))
