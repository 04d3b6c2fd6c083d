"""All private names of torch that this package uses: the first file to open after a new torch release.

Each entry lists since when torch has the name, as far back as this package supports (2.11), and why no public name
replaces it.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    _DEFAULT_DETERMINISM_MODE,
    _checkpoint_without_reentrant_generator,
    noop_context_fn,
)
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "checkpointed",
    "compiles_frames",
    "flops_of",
    "identity_of",
    "in_checkpoint",
    "in_transform",
    "negated",
    "outer_hooks",
    "tree_leaves",
    "tree_map",
    "version_of",
]

# FakeTensor and FakeTensorMode, in 2.11 already: tensors with shapes, dtypes and devices alone. torch.compile and
# torch.export are made of them, and neither says what autograd saves.
#
# StorageWeakRef, in 2.11 already: knows a storage without keeping it. While one is there, the storage's number is given
# to no other, though its memory may be.
#
# TorchDispatchMode, in 2.11 already, documented, in a module with an underscore: sees every operation below autograd.
#
# tree_leaves and tree_map, in 2.11 already. torch registers its own containers, and users register theirs, with this
# module alone.

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written into, in 2.11 already. Autograd compares it for the tensors that it saves itself."""

identity_of: Callable[[Any], int] = attrgetter("_cdata")
"""A number that tells storages apart, those of fake tensors too, whose address is always 0. In 2.11 already."""

negated: Callable[[Tensor], Tensor] = torch._neg_view
"""A view whose elements are read with the other sign, as of the imaginary part of a conjugate. In 2.11 already."""

compiles_frames: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""A function if what is called now is under torch.compile, though it runs as Python, after a break of the graph say.

In 2.11 already; `torch.compiler` only says whether code is being traced right now. No function of ours, which would be
compiled itself.
"""

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def outer_hooks() -> Hooks | None:
    """Return the active functions that pack and unpack saved tensors; None if autograd stores the tensors directly.

    In 2.11 already. Only the innermost of nested `saved_tensors_hooks` are called, and nothing public names them.
    """
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def in_checkpoint() -> bool:
    """Return whether a non-reentrant checkpoint of torch is active, in its forward or in its recomputation.

    In 2.11 already: its hooks are functions of that module. It has no way to ask.
    """
    hooks = outer_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == noop_context_fn.__module__


def in_transform() -> bool:
    """Return whether a transform of torch.func runs, such as grad, vmap or jvp.

    In 2.11 already. Tensors within it have no storage, and nothing public says that it runs.
    """
    return torch._C._functorch.maybe_current_level() is not None


def checkpointed(
    function: Callable[..., Any],
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Generator[None, None, None]:
    """Return torch's non-reentrant checkpoint as a generator; the forward runs between its first and second `next`.

    In 2.11 already. The public function calls the forward itself, which a hook cannot let it do.

    Args:
        function: Function that runs the forward again, with the same arguments.
        contexts: Factory of one context for the forward and one for the recomputation, as for selective checkpointing.
        args: Positional arguments of the forward.
        kwargs: Keyword arguments of the forward.
    """
    preserve_random_state, debug, early_stop = True, False, True
    generator: Generator[None, None, None] = _checkpoint_without_reentrant_generator(
        function,
        preserve_random_state,
        contexts or noop_context_fn,
        _DEFAULT_DETERMINISM_MODE,
        debug,
        early_stop,
        *args,
        **kwargs,
    )
    return generator


def flops_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return the floating-point operations of a matmul, convolution or attention; 0 for all other operations.

    In 2.11 already. The public FlopCounterMode only returns sums over modules that it finds itself, and its table has
    no entry for attention on CPUs.
    """
    packet = operation._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=output))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))
    return 0
