"""All underscore APIs of torch that this package uses: the first file to open after a new torch release.

Each entry lists since which version torch has the API, as far back as this package supports (2.11), and why no public
API replaces it. The entries that run for every action of a step are torch's own objects or C-level getters, so that
they add no function call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils import _pytree

# torch.utils._pytree, in 2.11 already. torch registers its own containers, and users register theirs, with this module
# alone; there is no public name for it.
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only

# nn.Module's own tables, as old as torch. The public ways around them search (`module.weight`) or pass over a child
# that comes again (`named_children`), and neither lets a parameter be replaced by a tensor that is none.
parameters_of = attrgetter("_parameters")
children_of = attrgetter("_modules")
buffers_of = attrgetter("_buffers")
unsaved_buffers_of = attrgetter("_non_persistent_buffers_set")
forward_hooks_of = attrgetter("_forward_hooks")
forward_pre_hooks_of = attrgetter("_forward_pre_hooks")

version_of = attrgetter("_version")
"""How often a tensor was written into, in 2.11 already. Autograd compares it for the tensors that it saves itself."""


is_profiled = torch._C._autograd._profiler_enabled
"""Whether torch's profiler records this thread, so that actions get names. In 2.11 already; no public call tells."""


_record_functions = torch._C._autograd._enable_record_function
"""Turns what profilers hear of this thread on or off. In 2.11 already; no public call does."""


@contextmanager
def unheard() -> Iterator[None]:
    """Hide this thread's operations from an active profiler inside the context.

    If a gloo work begins while a profiler records, its end callback writes into the profiler's memory (torch 2.11 to
    2.13, ProcessGroupGloo). Receives that are posted ahead end in a later step, when the profiler may be gone. They
    would then overwrite memory of other objects.
    """
    _record_functions(False)
    try:
        yield
    finally:
        _record_functions(True)


def run_backward(edges: tuple[GradientEdge, ...], gradients: Sequence[Tensor | None]) -> None:
    """Run the engine call of torch.autograd.backward, in 2.11 already. Its checks take longer than a tiny stage."""
    _engine_run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def are_saved_tensors_hooked() -> bool:
    """Return whether saved-tensor hooks are active, such as those of activation checkpointing.

    In 2.11 already. The public hooks are a context manager that cannot be asked whether it is active.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_heard(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has gradient hooks. In 2.11 already; no public API lists registered hooks."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_tensor_hooks(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has hooks that may change its gradient before accumulation. In 2.11 already."""
    return bool(parameter._backward_hooks)


def default_store() -> Any:
    """Return the store of the running world, in 2.11 already. torch.distributed has no public function for it."""
    return dist.distributed_c10d._get_default_store()


def gloo_options(timeout: timedelta, interfaces: Sequence[str]) -> Any:
    """Return options for gloo communicators that share one I/O thread.

    In 2.11 already; `new_group` makes a thread for each group, and accepts no gloo device.

    Args:
        timeout: Timeout of every operation.
        interfaces: Names of the network interfaces; empty for the default interface.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Return options for an NCCL communicator. In 2.11 already; the class is public, its timeout is not.

    Args:
        timeout: Timeout of every operation.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options
