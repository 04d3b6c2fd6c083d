"""What this package uses of torch's underscore APIs: the first file to open when torch moves.

Each entry says since which version torch has the API, as far back as this package goes (2.11), and why no public one
does. What runs for every action of a step is the object itself, or a C-level getter, so that it costs no call more.
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

version_of = attrgetter("_version")
"""How often a tensor was written into, in 2.11 already. Autograd compares it for the tensors that it saves itself."""


is_profiled = torch._C._autograd._profiler_enabled
"""Whether torch's profiler records this thread, so that actions get names. In 2.11 already; no public call tells."""


_record_functions = torch._C._autograd._enable_record_function
"""Turns what profilers hear of this thread on or off. In 2.11 already; no public call does."""


@contextmanager
def unheard() -> Iterator[None]:
    """A context in which a profiler that records does not hear of what this thread does.

    A gloo work that is begun while a profiler records writes into the profiler's memory when it ends (torch 2.11 to
    2.13, ProcessGroupGloo's end callback), although the profiler may be gone by then: receives that are posted ahead
    end in a later step, and what they overwrote was somebody else's.
    """
    _record_functions(False)
    try:
        yield
    finally:
        _record_functions(True)


def run_backward(edges: tuple[GradientEdge, ...], gradients: Sequence[Tensor | None]) -> None:
    """What torch.autograd.backward comes to, in 2.11 already; its own checks take longer than a tiny stage does."""
    _engine_run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def are_saved_tensors_hooked() -> bool:
    """Whether somebody, such as activation checkpointing, decides where saved tensors are kept.

    In 2.11 already. The public hooks are a context manager that cannot be asked whether it is active.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_heard(parameter: nn.Parameter) -> bool:
    """Whether hooks wait for a parameter's gradient. In 2.11 already; hooks can be registered, but not asked for."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_tensor_hooks(parameter: nn.Parameter) -> bool:
    """Whether hooks see a parameter's gradient, and may change it, before it is added. In 2.11 already, as above."""
    return bool(parameter._backward_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is under torch.compile, called as a function or as its method.

    In 2.11 already; `torch.compiler` only says whether code is being compiled right now.
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def default_store() -> Any:
    """The store of the running world, in 2.11 already. torch.distributed gives it to nobody."""
    return dist.distributed_c10d._get_default_store()


def gloo_options(timeout: timedelta, interfaces: Sequence[str]) -> Any:
    """Options of gloo communicators that share one thread, which reads and writes for all of them.

    In 2.11 already; `new_group` makes a thread for each group, and takes no device.

    Args:
        timeout: The timeout of every operation.
        interfaces: Names of the network interfaces; none: the default one.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Options of an NCCL communicator. In 2.11 already; the class is public, its timeout is not.

    Args:
        timeout: The timeout of every operation.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options
