"""The split of a backward: the input gradient now, weight gradients when the schedule says so.

For the time of a step every parameter is replaced by a stand-in, a leaf that shares its memory, so that the first half
of a backward leaves the parameters alone. Linear and convolution layers put off the product that gives their weight's
gradient, as does any layer that calls its `weight_grad_hook`. Whatever else has parameters computes their gradients in
the first half, and they are kept: small ones of norms and biases, but also those of a float8 product. The second half
computes what was put off and brings everything to the parameters in one pass, so that their hooks fire once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ._deferred_layers import deferring_forward
from ._gradient_sync import FullyShardedModule, is_synchronised


class WeightGradient(Protocol):
    """What a layer puts off; par-layers hands over the same to a layer's `weight_grad_hook`.

    Args:
        weight: The stand-in.
        operands: (left, right) where the gradient is left.T @ right, else None.
    """

    @property
    def weight(self) -> Tensor: ...
    @property
    def operands(self) -> tuple[Tensor, Tensor] | None: ...
    def __call__(self) -> None:
        """Adds the gradient to the weight's."""


class Later(NamedTuple):
    """What the first half of a backward leaves for the second.

    Args:
        products: In the order in which the first half came to them.
        kept: Gradients that are there already, by stand-in.
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
        self._products: list[WeightGradient] = []
        self._parameters: dict[int, nn.Parameter] = {}  # by the id of a stand-in: hashing tensors takes longer
        self._pairs: dict[int, list[tuple[Tensor, nn.Parameter]]] = {}  # by stage: stand-ins and parameters
        self._heard: set[int] = set()

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
            self._parameters.clear()
            self._pairs.clear()
            self._later.clear()
            self._products = []

    def _replace(self, undo: list[Callable[[], object]]) -> None:
        stand_ins: dict[nn.Parameter, Tensor] = {}
        for stage, module in self._modules.items():
            parameters = [each for each in module.parameters() if isinstance(each, nn.Parameter) and each.requires_grad]
            if is_synchronised(module) or any(map(_has_hooks, parameters)):
                self._heard.add(stage)
            else:
                self._heard.discard(stage)
            for parameter in parameters:
                stand_in = parameter.detach().requires_grad_()
                stand_in.__dict__.update(parameter.__dict__)
                stand_ins.setdefault(parameter, stand_in)
        self._parameters = {id(stand_in): parameter for parameter, stand_in in stand_ins.items()}
        for stage, module in self._modules.items():
            self._pairs[stage] = [(stand_ins[each], each) for each in module.parameters() if each in stand_ins]
        for each in {each for module in self._modules.values() for each in module.modules()}:
            self._replace_in(each, stand_ins, undo)

    def _replace_in(
        self, module: nn.Module, stand_ins: Mapping[nn.Parameter, Tensor], undo: list[Callable[[], object]]
    ) -> None:
        own: dict[str, Any] = module._parameters
        for name, parameter in list(own.items()):
            if parameter in stand_ins:
                own[name] = stand_ins[parameter]
                undo.append(partial(own.__setitem__, name, parameter))
        if id(own.get("weight")) not in self._parameters:
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
        self._products.append(product)

    def keep(self, stage: int, microbatch: int) -> None:
        """After the first half of a backward."""
        kept = [(each, each.grad) for each, _ in self._pairs[stage] if each.grad is not None]
        for stand_in, _ in kept:
            stand_in.grad = None
        self._later[stage, microbatch] = Later(self._products, kept)
        self._products = []

    def ends(self, stage: int) -> list[Tensor]:
        """Tensors that every parameter of a stage leads to."""
        with torch.enable_grad():
            return [parameter.flatten()[:1] for _, parameter in self._pairs[stage]]

    @torch.no_grad()
    def finish(self, stage: int, microbatch: int, *, every: bool = False) -> None:
        """The second half of a backward.

        Args:
            stage: On this rank.
            microbatch: Whose first half is done.
            every: Whether parameters without a gradient get zeros, because a reduction waits for all.
        """
        products, kept = self._later.pop((stage, microbatch))
        heard = stage in self._heard
        for stand_in, gradient in kept:
            stand_in.grad = gradient
        for product in products:
            if heard or not self._add_in_place(product):
                product()
        self._deliver(stage, heard, every)

    def _add_in_place(self, product: WeightGradient) -> bool:
        """Saves a temporary and a pass over it, where nobody waits for the gradient."""
        total = self._parameters[id(product.weight)].grad
        if total is None or product.operands is None or product.operands[0].dtype != total.dtype:
            return False
        left, right = product.operands
        total.addmm_(left.t(), right)
        return True

    def _deliver(self, stage: int, heard: bool, every: bool) -> None:
        parameters, gradients = [], []
        for stand_in, parameter in self._pairs[stage]:
            gradient = torch.zeros_like(stand_in) if every and stand_in.grad is None else stand_in.grad
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)
                stand_in.grad = None
        if heard or any(each.is_sparse for each in gradients):
            if parameters:
                torch.autograd.backward(parameters, gradients)
            return
        _add(parameters, gradients)


def can_split(module: nn.Module) -> bool:
    """Whether a stage's backward can be split. FSDP2, torch.compile and torch's RNNs keep parameters of their own."""
    return not any(
        isinstance(each, (FullyShardedModule, nn.RNNBase)) or _is_compiled(each) for each in module.modules()
    )


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, or by `module.compile()`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    totals, more = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            totals.append(parameter.grad)
            more.append(gradient)
    if totals:
        torch._foreach_add_(totals, more)


def _restore(module: nn.Module, name: str, before: object) -> None:
    if before is None:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = before
