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
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from par_groups import add_product

from .deferred_layers import deferring_forward
from .gradient_sync import FullyShardedModule, is_synchronised


class WeightGradient(Protocol):
    """What a layer puts off; par-layers and par-precision hand over the same to a layer's `weight_grad_hook`.

    Args:
        weight: The stand-in.
        operands: (left, right) where the gradient is left.T @ right, else None.
    """

    @property
    def weight(self) -> Tensor:
        """The stand-in that the layer multiplied with."""

    @property
    def operands(self) -> tuple[Tensor, Tensor] | None:
        """(left, right) where the gradient is left.T @ right, else None."""

    def __call__(self) -> None:
        """Adds the gradient to the weight's."""


class Later(NamedTuple):
    """What the first half of a backward leaves for the second.

    Args:
        products: In the order in which the first half came to them.
        kept: Gradients that are there already, by stand-in, where somebody listens.
    """

    products: list[WeightGradient]
    kept: list[tuple[Tensor, Tensor]]


class SplitBackward:
    """Splits the backwards of some modules.

    Args:
        modules: Stages of this rank, by number. See `can_split`.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.stages = frozenset(modules)
        self._modules = modules
        self._later: dict[tuple[int, int], Later] = {}  # by stage and microbatch
        self._products: list[WeightGradient] | None = None  # of the pass under way
        self._pairs: dict[int, list[tuple[Tensor, nn.Parameter]]] = {}  # by stage: stand-ins and parameters
        self._heard = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Parameters are replaced inside."""
        undo: list[Callable[[], object]] = []
        try:
            self._replace(undo)
            yield
        finally:
            for each in reversed(undo):
                each()
            self._pairs.clear()
            self._later.clear()
            self._products = None

    def _replace(self, undo: list[Callable[[], object]]) -> None:
        stand_ins = {
            each: _stand_in(each)
            for module in self._modules.values()
            for each in module.parameters()
            if isinstance(each, nn.Parameter) and each.requires_grad
        }
        self._heard = any(map(is_synchronised, self._modules.values())) or any(map(_is_heard, stand_ins))
        if not self._heard:
            for parameter, stand_in in stand_ins.items():
                stand_in.grad = parameter.grad
        for stage, module in self._modules.items():
            self._pairs[stage] = [(stand_ins[each], each) for each in module.parameters() if each in stand_ins]
        for each in {each for module in self._modules.values() for each in module.modules()}:
            self._replace_in(each, stand_ins, undo)

    def _replace_in(
        self, module: nn.Module, stand_ins: Mapping[nn.Parameter, Tensor], undo: list[Callable[[], object]]
    ) -> None:
        own: dict[str, Any] = module._parameters
        replaced = {name: parameter for name, parameter in own.items() if parameter in stand_ins}
        for name, parameter in replaced.items():
            own[name] = stand_ins[parameter]
            undo.append(partial(_put_back, own, name, stand_ins[parameter], parameter))
        if "weight" not in replaced or replaced["weight"].is_complex():  # whose products need conjugates
            return
        if hasattr(module, "weight_grad_hook"):
            before = module.__dict__.get("weight_grad_hook")
            module.__dict__["weight_grad_hook"] = self._put_off
            undo.append(lambda: _restore(module, "weight_grad_hook", before))
            return
        forward = deferring_forward(module, self._put_off)
        if forward is not None:
            module.__dict__["forward"] = forward
            undo.append(lambda: _restore(module, "forward", None))

    def _put_off(self, product: WeightGradient) -> None:
        if self._products is None or torch.is_grad_enabled():
            raise RuntimeError(
                "a stage takes gradients itself, such as with torch.autograd.grad, through a layer whose weight's "
                "gradient is put off, so that it would be wrong; use a schedule with whole backwards, such as '1f1b'"
            )
        self._products.append(product)

    def begin(self) -> None:
        """Before the first half of a backward."""
        self._products = []

    def keep(self, stage: int, microbatch: int) -> None:
        """After the first half of a backward."""
        kept = []
        if self._heard:
            kept = [(each, each.grad) for each, _ in self._pairs[stage] if each.grad is not None]
            for stand_in, _ in kept:
                stand_in.grad = None
        self._later[stage, microbatch] = Later(self._products or [], kept)
        self._products = None

    def ends(self, stage: int) -> list[Tensor]:
        """Tensors that every parameter of a stage leads to."""
        with torch.enable_grad():
            return [parameter.flatten()[:1] for _, parameter in self._pairs[stage]]

    def finish(self, stage: int, microbatch: int, *, last: bool = False, every: bool = False) -> None:
        """The second half of a backward.

        Args:
            stage: On this rank.
            microbatch: Whose first half is done.
            last: Whether the stage's gradients are then complete.
            every: Whether parameters without a gradient get zeros, because a reduction waits for all.
        """
        products, kept = self._later.pop((stage, microbatch))
        with torch.no_grad():
            for stand_in, gradient in kept:
                stand_in.grad = gradient
            for product in products:
                if self._heard or not _add_in_place(product):
                    product()
            if self._heard:
                self._deliver(stage, every)
            elif last:
                self._hand_over(stage)

    def _hand_over(self, stage: int) -> None:
        for stand_in, parameter in self._pairs[stage]:
            if parameter.grad is None:
                parameter.grad = stand_in.grad
            elif stand_in.grad is not None and stand_in.grad is not parameter.grad:  # used by an unsplit stage, too
                stand_in.grad = parameter.grad.add_(stand_in.grad)

    def _deliver(self, stage: int, every: bool) -> None:
        parameters, gradients = [], []
        for stand_in, parameter in self._pairs[stage]:
            gradient = torch.zeros_like(stand_in) if every and stand_in.grad is None else stand_in.grad
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)
                stand_in.grad = None
        if parameters:
            torch.autograd.backward(parameters, gradients)


def can_split(module: nn.Module) -> bool:
    """Whether a stage's backward can be split. FSDP2, torch.compile and torch's RNNs keep parameters of their own."""
    return not any(
        isinstance(each, (FullyShardedModule, nn.RNNBase)) or _is_compiled(each) for each in module.modules()
    )


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, or by `module.compile()`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _stand_in(parameter: nn.Parameter) -> Tensor:
    stand_in = parameter.detach().requires_grad_()
    stand_in.__dict__.update(parameter.__dict__)
    return stand_in


def _is_heard(parameter: nn.Parameter) -> bool:
    """Whether hooks wait for a gradient, or it has a dtype that a stand-in's cannot have."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return True
    return parameter.grad is not None and parameter.grad.dtype != parameter.dtype


def _add_in_place(product: WeightGradient) -> bool:
    """Saves a temporary and a pass over it."""
    total = product.weight.grad
    if total is None or product.operands is None or product.operands[0].dtype != total.dtype:
        return False
    left, right = product.operands
    add_product(total, left, right)
    return True


def _put_back(own: dict[str, Any], name: str, stand_in: Tensor, parameter: nn.Parameter) -> None:
    """Unless the module has replaced it meanwhile."""
    if own.get(name) is stand_in:
        own[name] = parameter


def _restore(module: nn.Module, name: str, before: object) -> None:
    if before is None:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = before
