"""One stage's forwards and backwards, with autograd cut off at its borders."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from par_groups import copy_to_device

from .._structure import Signature
from .._torch_private import run_backward

Gradients = tuple[Tensor | None, ...]
"""Gradients of those tensors of a value that want one, in order."""


class PendingBackward(NamedTuple):
    """State of a microbatch between its forward and its backward.

    Outputs are stored only as edges of the graph, so that their memory is free after the send unless autograd needs it.

    Args:
        inputs: Inputs that require a gradient.
        edges: Ends of the graph: an edge for each output that requires a gradient, or for the loss.
        outputs: The same outputs as tensors, if the stage keeps them.
    """

    inputs: list[Tensor]
    edges: list[GradientEdge]
    outputs: list[Tensor]


class LocalStage:
    """A stage on this rank: its module, and the graphs of the microbatches that wait for their backward.

    Args:
        module: The part of the model that the stage runs. It is called as it is, never changed.
        keeps_outputs: Whether outputs are kept for the backward.

    Attributes:
        writes: Whether the module's first layer writes into its input.
        output: The signature of the last microbatch's output: the next one's may be the same.
        gradient: The signature of the last microbatch's input gradients: the next one's may be the same.
    """

    def __init__(self, module: nn.Module, *, keeps_outputs: bool = False) -> None:
        self.module, self._keeps_outputs = module, keeps_outputs
        # Autograd refuses a write into a leaf, so such a layer is given copies.
        first_layer = next((layer for layer in module.modules() if not any(layer.children())), module)
        self.writes = bool(getattr(first_layer, "inplace", False))
        self.output: Signature | None = None
        self.gradient: Signature | None = None
        self._saved: dict[int, PendingBackward] = {}

    def keep(self, microbatch: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Store the state that the backward of a microbatch needs."""
        wanted = [tensor for tensor in outputs if tensor.requires_grad]
        edges = [get_gradient_edge(tensor) for tensor in wanted]
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        self._saved[microbatch] = PendingBackward(leaves, edges, wanted if self._keeps_outputs else [])

    def outputs(self, microbatch: int) -> list[Tensor]:
        """Return the stored outputs of a microbatch."""
        return self._saved[microbatch].outputs

    def has_outputs(self, microbatch: int) -> bool:
        """Return whether an output of a microbatch, or its loss, requires a gradient."""
        return bool(self._saved[microbatch].edges)

    def backward(
        self, microbatch: int, gradients: Gradients, ready: Callable[[Gradients], None] | None = None
    ) -> Gradients:
        """Run the backward: accumulate the parameters' gradients and return the inputs' gradients.

        Args:
            microbatch: Microbatch whose forward has run.
            gradients: Gradient of each output that requires one; None if the next stage does not use the output.
            ready: Function that is called with the inputs' gradients as soon as they are computed, during the pass.
        """
        # Removing the entry first drops the microbatch's state even if the backward raises.
        inputs, edges, _ = self._saved.pop(microbatch)
        # An output that the next stage does not use has no gradient, and autograd rejects None for an edge.
        used = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
        with nullcontext() if ready is None else _when_ready(inputs, ready):
            if used:
                run_backward(tuple(edge for edge, _ in used), tuple(gradient for _, gradient in used))
        return tuple(tensor.grad for tensor in inputs)

    def reset(self) -> None:
        """Discard all microbatches."""
        self._saved.clear()


def as_arguments(value: Any) -> tuple[Any, ...]:
    """Return a stage's arguments from the output of the stage before: a plain tuple is several arguments."""
    return value if type(value) is tuple else (value,)


def across_border(signature: Signature, tensors: Sequence[Tensor], *, copied: bool = False) -> tuple[Any, list[Tensor]]:
    """Build a received value on the other side of a border between stages; its tensors become leaves.

    Args:
        signature: The signature of the value.
        tensors: The tensors of the value.
        copied: Whether the value has copies of the leaves, which may be written into.

    Returns:
        The value, and its leaves.
    """
    leaves = []
    for tensor, spec in zip(tensors, signature.specs, strict=True):
        # gloo delivers CPU tensors.
        leaf = tensor if tensor.device.type == spec.device else copy_to_device(tensor, torch.device(spec.device))
        leaves.append(leaf.requires_grad_() if spec.requires_grad else leaf)
    return signature.build([leaf.clone() for leaf in leaves] if copied else leaves), leaves


@contextmanager
def _when_ready(inputs: Sequence[Tensor], ready: Callable[[Gradients], None]) -> Iterator[None]:
    """Call `ready` when the last of the inputs has its gradient, inside the context.

    The end of the context removes the inputs' hooks: the garbage collector cannot traverse them, and they reference the
    inputs and, through `ready`, the complete step.
    """
    waiting = len(inputs)

    def arrived(_: Tensor) -> None:
        nonlocal waiting
        waiting -= 1
        if waiting == 0:
            ready(tuple(tensor.grad for tensor in inputs))

    handles = [tensor.register_post_accumulate_grad_hook(arrived) for tensor in inputs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
