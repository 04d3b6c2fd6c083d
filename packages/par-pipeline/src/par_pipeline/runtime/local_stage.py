"""One stage's forwards and backwards, with autograd cut off at its borders."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from .._structure import Signature

Gradients = tuple[Tensor | None, ...]
"""Of those tensors of a value that want one, in order."""


class Saved(NamedTuple):
    """What a microbatch leaves for its backward.

    Outputs are kept as edges of the graph alone, so their memory is free once they are sent, unless autograd needs it.

    Args:
        inputs: Those that want a gradient.
        edges: Of the outputs that have one, or of the loss.
        outputs: Those outputs themselves, where they are needed.
    """

    inputs: list[Tensor]
    edges: list[GradientEdge]
    outputs: list[Tensor]


class Stage:
    """A part of the model that this rank runs.

    Args:
        module: The part.
        keeps_outputs: Whether outputs are kept for the backward.
    """

    def __init__(self, module: nn.Module, *, keeps_outputs: bool = False) -> None:
        self.module, self._keeps_outputs = module, keeps_outputs
        self.writes = _begins_in_place(module)
        self.output: Signature | None = None  # of the last microbatch's output, and ...
        self.gradient: Signature | None = None  # ... of its inputs' gradients: the next one's may be the same
        self._saved: dict[int, Saved] = {}

    def keep(self, microbatch: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Notes what the backward will need."""
        wanted = [each for each in outputs if each.requires_grad]
        edges = [get_gradient_edge(each) for each in wanted]
        leaves = [each for each in inputs if each.requires_grad]
        self._saved[microbatch] = Saved(leaves, edges, wanted if self._keeps_outputs else [])

    def outputs(self, microbatch: int) -> list[Tensor]:
        """What is kept of a microbatch's outputs."""
        return self._saved[microbatch].outputs

    def has_outputs(self, microbatch: int) -> bool:
        """Whether any output, or the loss, has a gradient."""
        return bool(self._saved[microbatch].edges)

    def backward(
        self, microbatch: int, gradients: Gradients, ready: Callable[[Gradients], None] | None = None
    ) -> Gradients:
        """From gradients of the outputs to those of the inputs; parameters' are added up.

        Args:
            microbatch: That ran forward.
            gradients: Of the outputs that want one, None where the next stage does not use it.
            ready: Called with the inputs' gradients as soon as they are there, while the pass still goes on.
        """
        inputs, edges, _ = self._saved.pop(microbatch)
        used = [(edge, each) for edge, each in zip(edges, gradients, strict=True) if each is not None]
        if ready is not None:
            _when_ready(inputs, ready)
        if used:
            _run_backward(tuple(edge for edge, _ in used), tuple(each for _, each in used))
        return tuple(each.grad for each in inputs)

    def reset(self) -> None:
        """Forgets all microbatches."""
        self._saved.clear()


def arguments(value: Any) -> tuple[Any, ...]:
    """How a stage is called with what the one before gave: a plain tuple is several arguments."""
    return value if type(value) is tuple else (value,)


def border(signature: Signature, tensors: Sequence[Tensor], *, copied: bool = False) -> tuple[Any, list[Tensor]]:
    """A value on the other side of a border between stages, and its tensors, which become leaves there.

    Args:
        signature: Of the value.
        tensors: Its tensors.
        copied: Whether the value has copies of the leaves, which may be written into.
    """
    leaves = []
    for tensor, spec in zip(tensors, signature.specs, strict=True):
        leaf = tensor if tensor.device.type == spec.device else tensor.to(spec.device)  # gloo's are on the CPU
        leaves.append(leaf.requires_grad_() if spec.requires_grad else leaf)
    return signature.build([each.clone() for each in leaves] if copied else leaves), leaves


def _begins_in_place(module: nn.Module) -> bool:
    """Whether the first layer writes into its input, which autograd refuses if that is a leaf."""
    first = next((each for each in module.modules() if not each._modules), module)
    return bool(getattr(first, "inplace", False))


def _run_backward(edges: tuple[GradientEdge, ...], gradients: Gradients) -> None:
    """What torch.autograd.backward comes to; its own checks take longer than a tiny stage does."""
    _engine_run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _when_ready(inputs: Sequence[Tensor], ready: Callable[[Gradients], None]) -> None:
    waiting = len(inputs)

    def arrived(_: Tensor) -> None:
        nonlocal waiting
        waiting -= 1
        if waiting == 0:
            ready(tuple(each.grad for each in inputs))

    for each in inputs:
        each.register_post_accumulate_grad_hook(arrived)
