"""The calls that all ranks make together, as messages name them, and the steps of optimizers among them."""

from collections.abc import Callable

import torch.distributed as dist

from par_groups import CallWatch

STEP = "calls optimizer.step()"
"""The call of an optimizer's step, as messages name it."""

RESET = "calls par_zero.reset"
"""The call that forgets a failed pass, as messages name it."""


class ModuleCalls(CallWatch):
    """The calls of a sharded module since the ranks last agreed, and a watch over the calls of other ranks.

    Args:
        group: Ranks that make the same calls.
        on_parted: Function that lets the module's collectives fail, as for `par_groups.CallWatch`.

    Attributes:
        steps: Number of steps of optimizers that have ended. The object that compares it with other ranks sets it to 0.
        unreduced_steps: Number of those steps since all ranks, replicas too, last reduced gradients together. Replicas
            compare it at stage 3, because each set of shards ends evaluations and first passes by itself.
    """

    def __init__(self, group: dist.ProcessGroup, on_parted: Callable[[CallWatch], None]) -> None:
        super().__init__(group, on_parted, waits_in="par_zero/_collectives.py", resets=RESET)
        self.steps = self.unreduced_steps = 0
