"""The split of a backward: the input gradient now, weight gradients when the schedule says so.

For the time of a step every parameter is replaced by a stand-in, a leaf that shares its memory, so that the first half
of a backward leaves the parameters alone. Linear and convolution layers put off the product that gives their weight's
gradient, as does any layer that calls its `weight_grad_hook`, such as tensor-parallel and float8 ones. Whatever else
has parameters computes their gradients, small ones of norms and biases, in the first half.

Where nobody listens, gradients are added to the stand-in's, which is the parameter's own tensor. Where hooks or a
data-parallel reducer wait for them, those of the first half are kept, and the second brings all to the parameters in
one pass, so that hooks fire once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from par_groups import WeightGradient, add_product

from .._torch_private import is_compiled, is_heard, parameters_of
from .deferred_layers import Product, deferring_forward
from .gradient_sync import FullyShardedModule, is_synchronised


class Later(NamedTuple):
    """What the first half of a backward leaves for the second.

    Args:
        products: The gradients that were put off, in the order in which the first half came to them.
        kept: Gradients that are there already, by stand-in, where somebody listens.
    """

    products: list[Product | WeightGradient]
    kept: list[tuple[Tensor, Tensor]]


class SplitBackward:
    """Splits the backwards of some stages.

    Args:
        modules: The stages of this rank whose backward is split, by number. See `unsplittable`.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.stages = frozenset(modules)
        self._modules = modules
        self._later: dict[tuple[int, int], Later] = {}  # by stage and microbatch
        self._products: list[Product | WeightGradient] | None = None  # of the pass under way
        self._pairs: dict[int, list[tuple[Tensor, nn.Parameter]]] = {}  # by stage: stand-ins and parameters
        self._is_heard = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context for a step, in which parameters are replaced by stand-ins."""
        undo: list[Callable[[], object]] = []
        try:
            self._replace(undo)
            yield
        finally:
            for put_back in reversed(undo):
                put_back()
            self._pairs.clear()
            self._later.clear()
            self._products = None

    def _replace(self, undo: list[Callable[[], object]]) -> None:
        stand_ins: dict[nn.Parameter, Tensor] = {}
        for module in self._modules.values():
            for parameter in module.parameters():
                if isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter not in stand_ins:
                    stand_in = stand_ins[parameter] = parameter.detach().requires_grad_()
                    stand_in.__dict__.update(parameter.__dict__)
        self._is_heard = any(map(is_synchronised, self._modules.values())) or any(map(_must_deliver, stand_ins))
        if not self._is_heard:
            for parameter, stand_in in stand_ins.items():
                stand_in.grad = parameter.grad
        for stage, module in self._modules.items():
            self._pairs[stage] = [(stand_ins[own], own) for own in module.parameters() if own in stand_ins]
        for layer in {layer for module in self._modules.values() for layer in module.modules()}:
            self._replace_in(layer, stand_ins, undo)

    def _replace_in(
        self, layer: nn.Module, stand_ins: Mapping[nn.Parameter, Tensor], undo: list[Callable[[], object]]
    ) -> None:
        own: dict[str, Any] = parameters_of(layer)
        replaced = {name: parameter for name, parameter in own.items() if parameter in stand_ins}
        for name, parameter in replaced.items():
            own[name] = stand_ins[parameter]
            undo.append(partial(_put_back, own, name, stand_ins[parameter], parameter))
        if "weight" not in replaced or replaced["weight"].is_complex():  # whose products need conjugates
            return
        if hasattr(layer, "weight_grad_hook"):
            before = layer.__dict__.get("weight_grad_hook")
            layer.__dict__["weight_grad_hook"] = self._put_off
            undo.append(lambda: _restore(layer, "weight_grad_hook", before))
            return
        forward = deferring_forward(layer, self._put_off)
        if forward is not None:
            layer.__dict__["forward"] = forward
            undo.append(lambda: _restore(layer, "forward", None))

    def _put_off(self, product: Product | WeightGradient) -> None:
        if self._products is None or torch.is_grad_enabled():
            raise RuntimeError(
                "a stage takes gradients itself, such as with torch.autograd.grad, through a layer whose weight's "
                "gradient is put off, so that it would be wrong; use a schedule with whole backwards, such as '1f1b'"
            )
        self._products.append(product)

    def begin(self) -> None:
        """Begins the first half of a backward."""
        self._products = []

    def keep(self, stage: int, microbatch: int) -> None:
        """Ends the first half of a backward: what it has put off waits for `finish`."""
        kept = []
        if self._is_heard:
            kept = [(stand_in, stand_in.grad) for stand_in, _ in self._pairs[stage] if stand_in.grad is not None]
            for stand_in, _ in kept:
                stand_in.grad = None
        self._later[stage, microbatch] = Later(self._products or [], kept)
        self._products = None

    def ends(self, stage: int) -> list[Tensor]:
        """Tensors that every parameter of a stage leads to."""
        with torch.enable_grad():
            return [parameter.flatten()[:1] for _, parameter in self._pairs[stage]]

    def finish(self, stage: int, microbatch: int, *, last: bool = False, every: bool = False) -> None:
        """Runs the second half of a backward.

        Args:
            stage: Number of a stage on this rank.
            microbatch: A microbatch whose first half is done.
            last: Whether the stage's gradients are then complete.
            every: Whether parameters without a gradient get zeros, because a reduction waits for all.
        """
        products, kept = self._later.pop((stage, microbatch))
        with torch.no_grad():
            for stand_in, gradient in kept:
                stand_in.grad = gradient
            for product in products:
                if self._is_heard or not _add_in_place(product):
                    product()
            if self._is_heard:
                self._deliver(stage, every)
            elif last:
                self._hand_over(stage)

    def _hand_over(self, stage: int) -> None:
        """Gives the stand-ins' gradients to the parameters, where nobody listens."""
        for stand_in, parameter in self._pairs[stage]:
            if parameter.grad is None:
                parameter.grad = stand_in.grad
            elif stand_in.grad is not None and stand_in.grad is not parameter.grad:  # used by an unsplit stage, too
                stand_in.grad = parameter.grad.add_(stand_in.grad)

    def _deliver(self, stage: int, every: bool) -> None:
        """Brings the stand-ins' gradients to the parameters in one backward pass, in which hooks fire."""
        parameters, gradients = [], []
        for stand_in, parameter in self._pairs[stage]:
            gradient = torch.zeros_like(stand_in) if every and stand_in.grad is None else stand_in.grad
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)
                stand_in.grad = None
        if parameters:
            torch.autograd.backward(parameters, gradients)


def unsplittable(module: nn.Module) -> str | None:
    """What prevents the split of a stage's backward, in words; None if nothing does."""
    for name, layer in module.named_modules():
        what = f"its layer {name!r}" if name else "it"
        if isinstance(layer, FullyShardedModule):
            return f"{what} is under fully_shard, which replaces its parameters in each pass"
        if is_compiled(layer):
            return f"{what} is under torch.compile, which has its parameters in its code"
        if isinstance(layer, nn.RNNBase):
            return f"{what} is an nn.{type(layer).__name__}, which keeps lists of its parameters"
    return None


def _must_deliver(parameter: nn.Parameter) -> bool:
    """Whether hooks wait for a parameter's gradient, or it has a dtype that a stand-in's cannot have."""
    return is_heard(parameter) or (parameter.grad is not None and parameter.grad.dtype != parameter.dtype)


def _add_in_place(product: Product | WeightGradient) -> bool:
    """Adds a product to the gradient that is there, which saves a temporary and a pass over it, where that is possible.

    Returns:
        Whether it was.
    """
    total = product.weight.grad
    if total is None or product.operands is None or product.operands[0].dtype != total.dtype:
        return False
    left, right = product.operands
    add_product(total, left, right)
    return True


def _put_back(own: dict[str, Any], name: str, stand_in: Tensor, parameter: nn.Parameter) -> None:
    """Puts a parameter back, unless the module has replaced it meanwhile."""
    if own.get(name) is stand_in:
        own[name] = parameter


def _restore(layer: nn.Module, name: str, before: object) -> None:
    if before is None:
        layer.__dict__.pop(name, None)
    else:
        layer.__dict__[name] = before
