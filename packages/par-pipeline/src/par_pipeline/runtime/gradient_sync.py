"""Gradient reduction of data-parallel stages: once per step, in each stage's last backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@runtime_checkable
class FullyShardedModule(Protocol):
    """Module under FSDP2's `fully_shard`. A protocol, because an import of its class takes most of a second."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last of a step."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether the next backward reduces gradients."""


def is_synchronised(module: nn.Module) -> bool:
    """Return whether a stage reduces its gradients over other ranks."""
    return isinstance(module, FullyShardedModule) or callable(getattr(module, "no_sync", None))


class GradientSync:
    """Delay of a stage's gradient reduction until its last backward.

    Args:
        module: Stage under DDP, under FSDP2, or with a `no_sync` of its own such as par-zero's. Other modules stay
            unchanged.

    Raises:
        ValueError: The stage is under DDP with a static graph.

    Attributes:
        active: Whether the stage reduces gradients at all.
        waits_for_all: Whether its reduction waits for a gradient of every parameter.
        follows_graph: Whether it looks through the graph for parameters that are not used.
    """

    def __init__(self, module: nn.Module) -> None:
        is_ddp = isinstance(module, DistributedDataParallel)
        if is_ddp and module.static_graph:
            raise ValueError(
                "a stage is under DDP(static_graph=True), which wants a backward after each forward; wrap it without "
                "static_graph"
            )
        self._module = module
        self._undo = ExitStack()
        self.active = is_synchronised(module)
        self.waits_for_all = is_ddp
        # Only DDP looks for unused parameters, and it needs the outputs of the last backward for that.
        self.follows_graph = bool(is_ddp and module.find_unused_parameters)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Defer the reduction until `release`, inside the context."""
        module = self._module
        if isinstance(module, FullyShardedModule):
            # FSDP2 has no `no_sync` context; these two flags have the same effect.
            _set_last(module, last=False)
            self._undo.callback(_set_last, module, last=True)
        elif self.active:
            no_sync: Callable[[], Any] = module.no_sync  # type: ignore[assignment]  # callable, as is asked above
            self._undo.enter_context(no_sync())
        try:
            yield
        finally:
            self._undo.close()

    def release(self, ends: Sequence[Tensor]) -> None:
        """Let the next backward reduce gradients: it is the stage's last.

        Args:
            ends: Tensors at which that backward begins; used if `follows_graph`.
        """
        self._undo.close()
        if isinstance(self._module, DistributedDataParallel):
            # DDP makes ready for a backward in forward, but the last backward is not that of the last forward.
            self._module.require_forward_param_sync = True
            self._module.reducer.prepare_for_backward(list(ends))


def _set_last(module: FullyShardedModule, *, last: bool) -> None:
    module.set_is_last_backward(last)
    module.set_requires_gradient_sync(last)
