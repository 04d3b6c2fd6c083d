"""The forward of a block that routes tokens to packed experts, such that it chooses once even where it runs twice."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...experts.replay import RoutingReplay, SavedRouting, in_backward, may_run_again, narrow
from ...experts.router import has_numbers
from ...layers.dropout import draw_key


class RoutedForward:
    """What a block computes; where a checkpoint runs it again in backward, experts are those that its forward chose.

    The routers of transformers choose by `torch.topk`, whatever else they compute. Within a checkpoint what topk gives
    is kept, and given again in the recompute, with the values that stand at these places then. Of a router that chooses
    in another way the experts of each token are kept, and a recompute that would take others is noticed.

    Args:
        module: The block, which calls the experts.
        name: Its name in the model, for messages.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name, self.replay = module, name, RoutingReplay()
        self._own = vars(module).get("forward")
        self._run: _WatchedRun | None = None  # within a forward that may run again, or does

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block is called.

        Raises:
            ValueError: It runs again, and what its forward chose cannot be found.
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
            graph = next((y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if _has_graph(y)), None)
            if graph is not None or not torch.is_grad_enabled():
                flat = torch.cat([ids.flatten() for ids in run.found])
                choice = SavedRouting(narrow(flat, run.largest))
                self.replay.keep(run.key, choice, run.found[0] if graph is None else graph)
        return outputs

    def confirmed(self, ids: Tensor) -> Tensor:
        """The experts of each token, as the block gives them to the experts; -1 where its forward chose another one.

        Args:
            ids: The experts of each token, int64 [M, k].
        """
        return ids if self._run is None else self._run.confirmed(ids)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            return self._own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _begun(self) -> "_WatchedRun | None":
        """A run whose choices are kept, or given again; None where a forward runs once."""
        if torch.compiler.is_compiling() or not self.module.training:
            return None
        again = in_backward()
        if not (again or may_run_again()):
            return None
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
    """One run of a block: a first one, of which is kept what topk gives, or a recompute, which is given that.

    Args:
        key: What the forward has drawn.
        kept: The places that its first run found, one after another; None if this is the first run.
    """

    def __init__(self, key: int, kept: Tensor | None) -> None:
        super().__init__()
        self.key, self.kept = key, kept
        self.found: list[Tensor] = []
        self.largest = 0  # number of those from which was chosen
        self._taken = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch.topk, whose gradient goes through a gather, so that a recompute saves the same; all else as it is."""
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
        """The experts of each token; -1 where there was no topk that could be replayed, and they are other ones."""
        if self.kept is None and not self.found:
            self.found.append(ids)
            self.largest = torch.iinfo(torch.int32).max
        elif self.kept is not None and not self._taken:
            return ids.masked_fill(self._next(ids.shape) != ids, -1)
        return ids

    def _next(self, shape: torch.Size) -> Tensor:
        """What was found in the first run at this place of the code.

        Raises:
            RuntimeError: The block takes another way than in its forward.
        """
        begin, self._taken = self._taken, self._taken + shape.numel()
        kept = self.kept
        if kept is None or self._taken > len(kept):
            raise RuntimeError(
                f"a block with experts that runs again in backward comes to choice {self._taken} of its torch.topk, "
                f"its forward kept {0 if kept is None else len(kept)}; it must take the same way both times"
            )
        return kept[begin : self._taken].view(shape).long()


def _has_graph(y: Any) -> bool:
    return isinstance(y, Tensor) and y.grad_fn is not None
