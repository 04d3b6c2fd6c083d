"""Names of torch that this package uses and that are not public: the first file to check after an update of torch.

The objects are torch's own and not wrapped, since all of them are on the way of every layer, and torch.compile knows
some of them by identity. The layers also override two methods of nn.Module that begin with an underscore, `_apply` and
`_load_from_state_dict`, which torch keeps for that purpose.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

functional_collectives: Any = torch.ops._c10d_functional
"""Collectives that return a tensor, which `wait_tensor` completes; with the name of a group. In torch 2.11 to 2.13.

torch's own functions around them, in `torch.distributed._functional_collectives`, are private too, and return a
subclass of Tensor, which costs every operation after them.
"""

number_of_dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many TorchDispatchModes are active, such as that of selective activation checkpointing. In torch 2.11 to 2.13."""

current_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of torch.func that runs in this thread, such as grad; None outside of any.

In torch 2.11 to 2.13.
"""

is_of_transform: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform of torch.func, and ends with it. In torch 2.11 to 2.13."""

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
"""Whether torch.autocast is on for some kind of device. In torch 2.11 to 2.13.

To ask the public `torch.is_autocast_enabled` for the right kind takes microseconds more, at every layer.
"""

assert_async = torch._assert_async
"""Raises where a tensor of one element is zero: at once on the CPU, else as a device-side assertion, without a wait.

In torch 2.11 to 2.13. A graph of torch.compile keeps it.
"""

flash_attention_on_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Attention on the CPU that also gives the log-sum-exp of each query. In torch 2.11 to 2.13.

Without keys it ends the process by SIGFPE, and takes query heads that do not divide by the key heads without a word. A
query whose mask hides everything gets zeros, and the log-sum-exp 0.
"""

flash_attention_on_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""Its backward, which takes the output and the log-sum-exp. In torch 2.11 to 2.13."""

flash_attention: Any = torch.ops.aten._flash_attention_forward.default
"""FlashAttention on CUDA, for bfloat16 and float16. In torch 2.11 to 2.13.

With Q queries and K keys, query i is aligned with key i + K - Q: `is_causal` hides those after it, `window_size_left`
and `window_size_right` say how many are seen on either side. With cumulated lengths, int32, tensors are
[tokens, heads, D] and the log-sum-exp [heads, tokens]. The public `torch.nn.attention.varlen` calls the same operator,
but its backward is that of its own output.
"""

flash_attention_backward: Any = torch.ops.aten._flash_attention_backward.default
"""Its backward, which takes the output and the log-sum-exp. In torch 2.11 to 2.13."""

efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
"""Memory-efficient attention on CUDA, with an additive mask, also for float32. In torch 2.11 to 2.13."""

efficient_attention_backward: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
"""Its backward, which takes the output and the log-sum-exp. In torch 2.11 to 2.13."""


def sums_of_bags(rows: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Sums of rows: those at the places from each start to the next. In torch 2.11 to 2.13.

    It is what `torch.nn.functional.embedding_bag` calls, which takes as long to look at its arguments as a sum of few
    rows does. One pass, in the order of places.
    """
    sums: torch.Tensor = torch.embedding_bag(rows, places, starts, False, 0, False, None)[0]
    return sums


silu_backward: Any = torch.ops.aten.silu_backward.grad_input
"""The gradient of silu from that of its result and its input, written to `grad_input`. In torch 2.11 to 2.13."""

gelu_backward: Any = torch.ops.aten.gelu_backward.default
"""The gradient of gelu from that of its result and its input, in one pass. In torch 2.11 to 2.13."""

group_of_name: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
"""The live process group of a name, as functional collectives find it. In torch 2.11 to 2.13.

A graph of autograd keeps the name alone: a graph that holds a group, and is alive when the process ends, aborts it.
"""

disable_dynamo = torch._disable_dynamo  # type: ignore[attr-defined]
"""Leaves a function out of graphs of torch.compile, without importing the compiler before it is called.

In torch 2.11 to 2.13; the public `torch.compiler.disable` imports the compiler at once, which takes a second.
"""

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread; -1 outside of any. In torch 2.11 to 2.13.

A forward within one is a recompute, and nothing public says so.
"""

hooks_of_saved_tensors: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The functions that pack and unpack saved tensors now, or None; called with True. In torch 2.11 to 2.13.

Non-reentrant checkpoints of torch set such hooks, and have no way to ask whether one is active.
"""


def node_class(function: type[torch.autograd.Function]) -> type:
    """Return the class of the nodes that a `torch.autograd.Function` adds to autograd's graph. In torch 2.11 to 2.13.

    The public way is to compare the class's name as text, which misses a renamed function without an error.

    Args:
        function: The function's class.
    """
    node: type = function._backward_cls
    return node


@disable_dynamo
def apart(function: Callable[..., T], *arguments: object) -> T:
    """Call a function between two graphs of torch.compile, which cannot hold what it computes with."""
    return function(*arguments)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place. `Tensor._version` exists since torch 0.4.

    Nothing public tells whether somebody else's function has written values into a tensor.
    """
    version: int = tensor._version
    return version
