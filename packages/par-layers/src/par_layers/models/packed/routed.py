"""The forward of a block that routes tokens to packed experts. A recomputed forward repeats the first routing."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...experts.replay import RoutingReplay, SavedRouting, in_backward, may_run_again, narrow
from ...experts.router import has_numbers
from ...layers.dropout import draw_key


class RoutedForward:
    """Forward of a block whose recomputation in a checkpoint uses the experts that its first run selected.

    Routers of transformers select experts by `torch.topk`. Within a checkpoint the first run stores the indices from
    topk, and the recomputation uses these indices with the values that it computes at them. If a router selects
    experts in another way, the experts of each token are stored, and a recomputation with different experts raises.

    Args:
        module: Block that calls the experts.
        name: Name of the block in the model, for messages.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name, self.replay = module, name, RoutingReplay()
        # Another tool may have replaced the forward on the instance.
        self._own = vars(module).get("forward")
        self._run: _WatchedRun | None = None  # within a forward that may run again, or does

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block with its own arguments.

        Raises:
            ValueError: The call is a recomputation, and the routing of its forward is not stored.
        """
        run = self._begun()
        if run is None:
            return self._forward(*args, **kwargs)
        self._run = run
        try:
            with run:
                outputs = self._forward(*args, **kwargs)
        finally:
            self._run = None
        if run.kept is None and run.found:
            every = outputs if isinstance(outputs, tuple) else (outputs,)
            graph = next((y for y in every if isinstance(y, Tensor) and y.grad_fn is not None), None)
            # Without a graph, and with gradients enabled, no backward can run this forward again.
            if graph is not None or not torch.is_grad_enabled():
                flat = torch.cat([ids.flatten() for ids in run.found])
                choice = SavedRouting(narrow(flat, run.largest))
                self.replay.keep(run.key, choice, run.found[0] if graph is None else graph)
        return outputs

    def confirmed(self, ids: Tensor) -> Tensor:
        """Return the experts of each token as the block passes them on; -1 if the first run selected different ones.

        Args:
            ids: The experts of each token, int64 [M, k].
        """
        return ids if self._run is None else self._run.confirmed(ids)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            return self._own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _begun(self) -> "_WatchedRun | None":
        """Return a run that stores or replays routing decisions; None if the forward runs only once."""
        if torch.compiler.is_compiling() or not self.module.training:
            return None
        again = in_backward()
        if not (again or may_run_again()):
            return None
        # A checkpoint restores the random state, so a recomputation draws the key of its first run.
        drawn = draw_key()
        if not has_numbers(drawn):
            return None
        key = int(drawn)
        try:
            choice = self.replay.take(key) if again else None
        except ValueError as error:
            raise ValueError(f"{self.name or type(self.module).__name__!r}: {error}") from None
        return None if again and choice is None else _WatchedRun(key, None if choice is None else choice.ids)


class _WatchedRun(TorchFunctionMode):
    """Run of a block: a first run, which stores the results of topk, or a recomputation, which uses them.

    Args:
        key: Random key that the forward has drawn.
        kept: Indices that the first run selected, concatenated; None for the first run.
    """

    def __init__(self, key: int, kept: Tensor | None) -> None:
        super().__init__()
        self.key, self.kept = key, kept
        self.found: list[Tensor] = []
        self.largest = 0  # number of those from which was chosen
        self._taken = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace torch.topk by a version whose gradient uses a gather, so a recomputation saves the same.

        Pass on all else.
        """
        if func is not torch.topk and func is not Tensor.topk:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | (kwargs or {})
        x: Tensor = given["input"]
        dim = given.get("dim", -1)
        if self.kept is None:
            ids = torch.topk(**{**given, "input": x.detach()}).indices
            self.found.append(ids)
            self.largest = max(self.largest, x.shape[dim])
        else:
            shape = list(x.shape)
            shape[dim] = given["k"]
            ids = self._next(torch.Size(shape))
        return torch.return_types.topk((x.gather(dim, ids), ids))

    def confirmed(self, ids: Tensor) -> Tensor:
        """Return the experts of each token; -1 if there was no topk to replay, and they differ from the first run's."""
        if self.kept is None and not self.found:
            self.found.append(ids)
            self.largest = torch.iinfo(torch.int32).max
        elif self.kept is not None and not self._taken:
            return ids.masked_fill(self._next(ids.shape) != ids, -1)
        return ids

    def _next(self, shape: torch.Size) -> Tensor:
        """Return the next indices that the first run selected.

        Raises:
            RuntimeError: The block makes other calls of topk than in its forward.
        """
        begin, self._taken = self._taken, self._taken + shape.numel()
        kept = self.kept
        if kept is None or self._taken > len(kept):
            raise RuntimeError(
                f"a block with experts that runs again in backward comes to choice {self._taken} of its torch.topk, "
                f"its forward kept {0 if kept is None else len(kept)}; it must take the same way both times"
            )
        return kept[begin : self._taken].view(shape).long()
