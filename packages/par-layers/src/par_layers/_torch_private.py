"""What this package uses of torch that has no public name: the first file to look at when torch moves.

The objects are torch's own and not wrapped, since all of them are on the way of every layer, and torch.compile knows
some of them by identity. The layers also override two methods of nn.Module that begin with an underscore, `_apply` and
`_load_from_state_dict`, which torch keeps for that purpose.
"""

from typing import Any

import torch

functional_collectives: Any = torch.ops._c10d_functional
"""Collectives that return a tensor, which `wait_tensor` completes; with the name of a group. In torch 2.11 to 2.13.

torch's own functions around them, in `torch.distributed._functional_collectives`, are private too, and return a
subclass of Tensor, which costs every operation after them.
"""

number_of_dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many TorchDispatchModes are active, such as that of selective activation checkpointing. In torch 2.11 to 2.13."""

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
"""Whether torch.autocast is on for some kind of device. In torch 2.11 to 2.13.

To ask the public `torch.is_autocast_enabled` for the right kind takes microseconds more, at every layer.
"""

assert_async = torch._assert_async
"""Raises where a tensor of one element is zero: at once on the CPU, else as a device-side assertion, without a wait.

In torch 2.11 to 2.13. A graph of torch.compile keeps it.
"""
