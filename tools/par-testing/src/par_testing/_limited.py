"""A backend of somebody else's, that lacks collectives, for tests of what is said where one is missing."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup


def limited_backend(*collectives: str) -> str:
    """Registers a backend on the CPU that can do these collectives, by gloo, and no others; gives back its name.

    Every rank calls it before it makes groups, `dist.new_group(backend=limited_backend("allreduce"))`, and once.

    Args:
        *collectives: Methods of torch's ProcessGroup, such as "allreduce", "allgather" or "_allgather_base". A barrier
            is always there.
    """
    able = type("_Able", (_Limited,), {name: _by_gloo(name) for name in ("barrier", *collectives)})
    dist.Backend.register_backend("limited", lambda options, _: able(options), extended_api=True, devices=["cpu"])
    return "limited"


class _Limited(dist.ProcessGroup):
    """Can do nothing: whatever is not in a class below it fails."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]  # torch's stub lacks this one
        self.gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        backend_class: Any = FakeProcessGroup
        fails = backend_class.Options()
        fails.error_on_collective = True
        backend = backend_class._create_internal(options.group_rank, options.group_size, fails)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name for it
        """The name under which it is registered."""
        return "limited"


def _by_gloo(name: str) -> Callable[..., Any]:
    """A method that leaves a collective to gloo."""

    def collective(group: _Limited, *given: Any, **named: Any) -> Any:
        return getattr(group.gloo, name)(*given, **named)

    return collective
