"""Routing replay: a recomputation uses the experts that its forward selected.

Two scores that nearly tie may swap when a region is recomputed, because a sum may run in another order. The experts
would then get different tokens than in forward, while gradients return for the old ones. So a forward saves its
selection. Each forward draws a key from torch's CPU generator, as Dropout does. A checkpoint restores that generator,
so the recomputation draws the same key, and finds the selection under it.
"""

from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._torch_private import current_graph_task, hooks_of_saved_tensors
from .balance import ExpertLoad


@dataclass(eq=False)
class SavedRouting:
    """Routing of one forward, for its recomputation.

    Args:
        ids: Expert ids of each token, [M, k]; for a block of an existing model, all results of its `topk`, flat.
        gates: Priorities of the routed tokens for the slots of a capacity, [M, k]; None without a capacity.
        load: Load of each expert, which the recomputation must not count again; None without losses.
        twice: Whether another forward drew the same key and selected other experts.
    """

    ids: Tensor
    gates: Tensor | None = None
    load: ExpertLoad | None = None
    twice: bool = False


def in_backward() -> bool:
    """Return whether a backward pass is running; a forward that is called now is then a recomputation."""
    return not torch.compiler.is_compiling() and current_graph_task() != -1


def may_run_again() -> bool:
    """Return whether a forward may be inside a checkpoint: saved-tensor hooks are set, or gradients are off."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return not torch.is_grad_enabled() or hooks_of_saved_tensors(True) is not None


class RoutingReplay:
    """Saved routing of one router, kept as long as a recomputation may need it.

    A saved routing lives as long as the autograd graph of its forward. The forward of a reentrant checkpoint has no
    graph, so its routing stays until the step ends (`clear`), or until the first forward after its recomputation.
    """

    def __init__(self) -> None:
        self._of_graphs: WeakValueDictionary[int, SavedRouting] = WeakValueDictionary()
        self._held: dict[int, SavedRouting] = {}
        self._used: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an empty replay: the copy of a model has run no forward."""
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def __len__(self) -> int:
        """Return the number of saved routings."""
        return len(self._of_graphs) + len(self._held)

    def keep(self, key: int, choice: SavedRouting, graph: Tensor) -> None:
        """Save the routing of a forward.

        Args:
            key: Random key of the forward.
            choice: Routing of the forward.
            graph: Output of the forward. Its autograd graph, if it has one, determines how long the routing lives.
        """
        # A reentrant checkpoint may recompute several times in one backward. Its routing is freed when the next forward
        # shows that the backward is over.
        for used in self._used:
            self._held.pop(used, None)
        self._used.clear()
        before = self._find(key)
        # Equal keys with equal ids are harmless, such as two runs of the same batch after a reseed.
        choice.twice = before is not None and not (
            before.ids.shape == choice.ids.shape and torch.equal(before.ids, choice.ids)
        )
        # Under a reentrant checkpoint the first forward has no graph, so the router itself holds the routing.
        if graph.grad_fn is None:
            self._held[key] = choice
        else:
            node: Any = graph.grad_fn  # torch declares its `metadata`, a dict, as a method
            # The graph owns the routing: it is freed with the graph, even if no backward runs.
            node.metadata["par_layers.experts"] = choice
            self._of_graphs[key] = choice

    def take(self, key: int) -> SavedRouting | None:
        """Return the routing of the forward with this key; None if no forward expects a recomputation.

        Raises:
            ValueError: Routings are saved, but not under this key; or two forwards drew this key.
        """
        choice = self._find(key)
        if choice is None:
            if not len(self):
                return None
            raise ValueError(
                "a router is recomputed in backward, but torch's CPU generator has another state than in forward, so "
                "the selected experts cannot be found; pass preserve_rng_state=True to the checkpoint"
            )
        if choice.twice:
            raise ValueError(
                "two forwards of a router began with the same state of torch's CPU generator, so their recomputations "
                "cannot be distinguished; remove the calls that seed it between microbatches"
            )
        if key in self._held and torch.is_grad_enabled():
            self._used.add(key)
        return choice

    def clear(self) -> None:
        """Delete the routings of reentrant checkpoints at the end of a step."""
        self._held.clear()
        self._used.clear()

    def _find(self, key: int) -> SavedRouting | None:
        return self._of_graphs.get(key) or self._held.get(key)


def narrow(ids: Tensor, experts: int) -> Tensor:
    """Convert expert ids to the smallest integer dtype that holds them, to save memory between forward and backward."""
    return ids.to(torch.int16 if experts <= 1 << 15 else torch.int32)
