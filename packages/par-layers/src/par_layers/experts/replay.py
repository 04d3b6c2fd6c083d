"""A recompute is given the choice of its forward.

Two scores that nearly tie may swap when a region runs again, since sums may be in another order, and then experts would
get other rows than those whose gradients come back. So the choice is kept, and not made again. Each forward draws a key
from torch's generator of the CPU, as Dropout does; a checkpoint restores that generator, so that the recompute draws
the same key, and finds under it what was chosen.
"""

from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._torch_private import current_graph_task, hooks_of_saved_tensors
from .balance import Shares


@dataclass(eq=False)
class Choice:
    """What a forward has decided, that its recompute must not decide again.

    Args:
        ids: The experts of each token, [M, k]; of a block that is not ours, all that its topk found, flat.
        gates: By what rows compete for the slots of a capacity, [M, k]; None where there is no capacity.
        shares: How busy each expert was, which recompute must not count again; None without losses.
        twice: Whether another forward drew the same key and chose otherwise.
    """

    ids: Tensor
    gates: Tensor | None = None
    shares: Shares | None = None
    twice: bool = False


def in_backward() -> bool:
    """Whether a backward runs, so that a forward that is called now is a recompute."""
    return not torch.compiler.is_compiling() and current_graph_task() != -1


def may_run_again() -> bool:
    """Whether a forward that is called now may be within a checkpoint: what it saves is replaced, or nothing is."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return not torch.is_grad_enabled() or hooks_of_saved_tensors(True) is not None


class Replay:
    """The choices of one router, each kept as long as a recompute may ask for it.

    A choice lives as long as the graph of the forward that made it. A reentrant checkpoint, whose forward has no graph,
    leaves it here until the step ends (`clear`), or until a recompute has used it and another forward comes.
    """

    def __init__(self) -> None:
        self._of_graphs: WeakValueDictionary[int, Choice] = WeakValueDictionary()
        self._held: dict[int, Choice] = {}
        self._used: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A new one: a copy of a model has run no forward."""
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def __len__(self) -> int:
        """The number of choices that are kept."""
        return len(self._of_graphs) + len(self._held)

    def keep(self, key: int, choice: Choice, graph: Tensor) -> None:
        """Keeps a choice.

        Args:
            key: What the forward has drawn.
            choice: What it has decided.
            graph: A result of it; the choice lives as long as the graph that it hangs on, if there is one.
        """
        for used in self._used:
            self._held.pop(used, None)
        self._used.clear()
        before = self._find(key)
        choice.twice = before is not None and not (
            before.ids.shape == choice.ids.shape and torch.equal(before.ids, choice.ids)
        )
        if graph.grad_fn is None:
            self._held[key] = choice
        else:
            node: Any = graph.grad_fn  # torch declares its `metadata`, a dict, as a method
            node.metadata["par_layers.experts"] = choice
            self._of_graphs[key] = choice

    def take(self, key: int) -> Choice | None:
        """What the forward with this key has decided; None if no forward waits for a recompute.

        Raises:
            ValueError: Forwards wait, but none with this key; or two of them drew it.
        """
        choice = self._find(key)
        if choice is None:
            if not len(self):
                return None
            raise ValueError(
                "a router runs again in backward, but torch's generator of the CPU is not as it was in forward, so it "
                "cannot find which experts were chosen; call the checkpoint with preserve_rng_state=True"
            )
        if choice.twice:
            raise ValueError(
                "two forwards of a router that wait for their recompute began with the same state of torch's generator "
                "of the CPU, so it cannot tell their choices apart; do not seed it anew between microbatches"
            )
        if key in self._held and torch.is_grad_enabled():
            self._used.add(key)
        return choice

    def clear(self) -> None:
        """Forgets what a reentrant checkpoint left here: the step is over."""
        self._held.clear()
        self._used.clear()

    def _find(self, key: int) -> Choice | None:
        return self._of_graphs.get(key) or self._held.get(key)


def narrow(ids: Tensor, experts: int) -> Tensor:
    """Numbers of experts in 16 bits where they fit, for as long as they are kept."""
    return ids.to(torch.int16 if experts <= 1 << 15 else torch.int32)
