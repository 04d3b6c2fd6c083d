"""One call of a layer that keeps its inputs alone: torch's non-reentrant checkpoint, in hooks.

The state of random numbers is preserved. So are buffers that the layer writes into, such as the statistics of a batch
norm: it runs again with their values of then, and they keep those that they have now.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import FakeTensor, checkpointed, identity_of, tree_leaves
from ..observe.observer import is_plain
from .then import Then

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Written:
    """Which buffers a layer writes into, as its calls have shown: the others need not be copied."""

    def __init__(self) -> None:
        self._numbers: dict[bool, set[int]] = {}  # in training and not

    def before(self, module: nn.Module) -> list[tuple[int, Tensor, Tensor]]:
        """Number, buffer and a copy of each buffer that is written into, as far as that is known; else of each one."""
        known = self._numbers.get(module.training)
        return [
            (number, buffer, buffer.clone())
            for number, buffer in enumerate(module.buffers())
            if known is None or number in known
        ]

    def after(self, module: nn.Module, before: list[tuple[int, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Those that were written into since, each with its copy.

        The first call of each mode tells, by the values: batch norm writes its statistics without a new version.
        """
        if any(isinstance(buffer, FakeTensor) for _, buffer, _ in before):
            return []  # it will not run again
        if module.training not in self._numbers:
            before = [each for each in before if not torch.equal(each[1], each[2])]
            self._numbers[module.training] = {number for number, *_ in before}
        return [(buffer, copy) for _, buffer, copy in before]


class Whole:
    """One call of a layer, between `open` and `close`.

    Args:
        module: The layer.
        written: What is known of its buffers.
        run: Runs the layer again, with the same arguments.
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
        contexts: Makes a context for the forward and one for when it runs again, for selective checkpointing; or None.
    """

    def __init__(
        self,
        module: nn.Module,
        written: Written,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        contexts: Contexts | None = None,
    ) -> None:
        self._module, self._written, self._run = module, written, run
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._generator: Generator[None, None, None] = checkpointed(self._again, contexts, args, kwargs)
        self._inputs = {
            identity_of(storage): storage.nbytes()
            for leaf in tree_leaves((args, kwargs))
            if is_plain(leaf)
            for storage in (leaf.untyped_storage(),)
        }

    def open(self) -> None:
        """Begins to drop what autograd saves."""
        with torch.no_grad():
            self._before = self._written.before(self._module)
        next(self._generator)

    def close(self) -> dict[int, int]:
        """Ends it: bytes of each storage that is kept, by its identity."""
        next(self._generator, None)
        with torch.no_grad():
            self._buffers = self._written.after(self._module, self._before)
        self._then = Then(self._module)
        del self._before
        return self._inputs

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        # `.data` has a version of its own: to autograd, the buffers are not written into.
        now = [buffer.clone() for buffer, _ in self._buffers]
        for buffer, then in self._buffers:
            buffer.data.copy_(then)
        try:
            with self._then.restored():
                return self._run(*args, **kwargs)
        finally:
            for (buffer, _), value in zip(self._buffers, now, strict=True):
                buffer.data.copy_(value)
