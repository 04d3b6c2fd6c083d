"""One call of a layer that saves only its inputs: torch's non-reentrant checkpoint, in hooks.

The recomputation uses the random number state of the forward. It also uses the earlier values of buffers that the layer
writes into, such as the statistics of a batch norm. Afterwards these buffers have their present values again.
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
    """Record of the buffers that a layer writes into, as its calls have shown; only these buffers are copied."""

    def __init__(self) -> None:
        self._numbers: dict[bool, set[int]] = {}  # in training and not

    def before(self, module: nn.Module) -> list[tuple[int, Tensor, Tensor]]:
        """Return number, buffer and copy of each buffer that the layer writes into; of all buffers in a first call."""
        known = self._numbers.get(module.training)
        return [
            (number, buffer, buffer.clone())
            for number, buffer in enumerate(module.buffers())
            if known is None or number in known
        ]

    def after(self, module: nn.Module, before: list[tuple[int, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return the buffers that were written into since `before`, each with its copy.

        The first call of each mode compares values, because batch norm writes its statistics without a new version.
        """
        if any(isinstance(buffer, FakeTensor) for _, buffer, _ in before):
            return []  # it will not run again
        if module.training not in self._numbers:
            # Only the first call of a mode pays for copies of all buffers. Later calls copy what it has written.
            before = [each for each in before if not torch.equal(each[1], each[2])]
            self._numbers[module.training] = {number for number, *_ in before}
        return [(buffer, copy) for _, buffer, copy in before]


class Whole:
    """One call of a layer that saves only its inputs, between `open` and `close`.

    Args:
        module: Layer.
        written: Record of the buffers that the layer writes into.
        run: Function that runs the layer again, with the same arguments.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        contexts: Factory of one context for the forward and one for the recomputation, for selective checkpointing;
            None if the policy is not Ops.
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
        """Begin to drop the tensors that autograd saves."""
        with torch.no_grad():
            self._before = self._written.before(self._module)
        # The forward runs between the two steps of the generator, the second of which ends it.
        next(self._generator)

    def close(self) -> dict[int, int]:
        """End the call and return the bytes of each saved storage, by the storage's identity."""
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
