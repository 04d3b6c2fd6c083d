"""Split of a backward into two halves: input gradients first, weight gradients when the schedule runs them.

During a step, every parameter is replaced by a stand-in, a leaf that shares its memory. The first half of a backward
therefore does not touch the parameters. Linear and convolution layers defer the matmul of their weight's gradient, like
layers that call their `weight_grad_hook`, such as tensor-parallel and float8 layers. All other layers, such as norms,
compute their parameters' small gradients in the first half.

Both halves accumulate gradients in the stand-in's gradient. Without hooks, this is the parameter's own gradient tensor.
If a data-parallel reducer or a post-accumulate hook waits for the gradient, it is a tensor of the step. The last second
half of the stage then passes it to the parameters in one backward, so that the hooks fire once per step. Tensor hooks
may change a gradient. They therefore receive each microbatch's gradient, as in a complete backward, at the price of a
temporary tensor in each second half.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from par_groups import WeightGradient, add_product, is_compiled

from .._torch_private import has_tensor_hooks, is_heard, parameters_of
from .deferred_layers import Product, deferring_forward, gradient_dtype_of, like_leaf
from .gradient_sync import FullyShardedModule, is_synchronised


class SplitBackward:
    """Split backwards of some stages.

    Args:
        modules: Stages of this rank whose backward is split, by number. See `unsplittable`.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.stages = frozenset(modules)
        self._modules = modules
        self._later: dict[tuple[int, int], list[Product | WeightGradient]] = {}  # by stage and microbatch
        self._products: list[Product | WeightGradient] | None = None  # of the pass under way
        self._pairs: dict[int, list[tuple[Tensor, nn.Parameter]]] = {}  # by stage: stand-ins and parameters
        self._is_heard = False
        self._apart: dict[int, list[tuple[Tensor, nn.Parameter]]] = {}  # those with tensor hooks
        self._kept: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # their gradients of the first half

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace parameters by stand-ins inside the context, for one step."""
        undo: list[Callable[[], object]] = []
        try:
            self._replace(undo)
            yield
        finally:
            for put_back in reversed(undo):
                put_back()
            self._pairs.clear()
            self._later.clear()
            self._apart.clear()
            self._kept.clear()
            self._products = None

    def _replace(self, undo: list[Callable[[], object]]) -> None:
        stand_ins: dict[nn.Parameter, Tensor] = {}
        for module in self._modules.values():
            for parameter in module.parameters():
                if isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter not in stand_ins:
                    stand_in = stand_ins[parameter] = like_leaf(parameter)
                    # Layers and optimizers find attributes such as sharding metadata on the parameter, and the layer
                    # sees the stand-in during the step.
                    stand_in.__dict__.update(parameter.__dict__)
        self._is_heard = any(map(is_synchronised, self._modules.values())) or any(map(is_heard, stand_ins))
        # Without hooks the stand-in accumulates straight into the parameter's gradient tensor. With hooks the parameter
        # must receive its gradient from autograd, so the stand-in accumulates in a tensor of its own.
        if not self._is_heard:
            for parameter, stand_in in stand_ins.items():
                stand_in.grad = parameter.grad
        for stage, module in self._modules.items():
            self._pairs[stage] = [(stand_ins[own], own) for own in module.parameters() if own in stand_ins]
            self._apart[stage] = [pair for pair in self._pairs[stage] if has_tensor_hooks(pair[1])]
        # A set, because stages of one rank may share a layer, whose parameters must be replaced only once.
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
        if replaced and hasattr(layer, "weight_grad_hook"):  # which also has weights of other names
            # Usually only the class has the attribute, and the instance must be without it again.
            before = {name: value for name, value in layer.__dict__.items() if name == "weight_grad_hook"}
            undo.append(partial(_restore, layer, "weight_grad_hook", before))
            layer.__dict__["weight_grad_hook"] = self._put_off
            # A layer with this hook calls it for each of its weights, so its forward stays.
            return
        if "weight" not in replaced or replaced["weight"].is_complex():  # whose products need conjugates
            return
        # All other layers keep their forward: autograd computes their small gradients in the first half.
        forward = deferring_forward(layer, self._put_off)
        if forward is not None:
            undo.append(partial(_restore, layer, "forward", {}))
            layer.__dict__["forward"] = forward

    def _put_off(self, product: Product | WeightGradient) -> None:
        # A backward of the stage runs with gradients disabled and between `begin` and `keep`. In any other backward
        # nobody would compute the deferred product.
        if self._products is None or torch.is_grad_enabled():
            raise RuntimeError(
                "a stage takes gradients itself, such as with torch.autograd.grad, through a layer whose weight's "
                "gradient is put off, so that it would be wrong; use a schedule with whole backwards, such as '1f1b'"
            )
        self._products.append(product)

    def begin(self) -> None:
        """Begin the first half of a backward."""
        self._products = []

    def keep(self, stage: int, microbatch: int) -> None:
        """End the first half of a backward, and store its deferred weight gradients for `finish`."""
        self._later[stage, microbatch] = self._products or []
        self._products = None
        # Tensor hooks must see each microbatch's gradient separately, so these gradients are taken out before the next
        # microbatch adds to them.
        kept = [(stand_in, stand_in.grad) for stand_in, _ in self._apart[stage] if stand_in.grad is not None]
        for stand_in, _ in kept:
            stand_in.grad = None
        self._kept[stage, microbatch] = kept

    def ends(self, stage: int) -> list[Tensor]:
        """Return tensors whose graph contains every parameter of a stage."""
        with torch.enable_grad():
            # DDP walks a graph to find unused parameters. The stage's own graph ends at the stand-ins, so this graph
            # leads to the parameters instead.
            return [parameter.flatten()[:1] for _, parameter in self._pairs[stage]]

    def finish(self, stage: int, microbatch: int, *, last: bool = False, every: bool = False) -> None:
        """Run the second half of a backward.

        Args:
            stage: Number of a stage on this rank.
            microbatch: Microbatch whose first half has finished.
            last: Whether the stage's gradients are then complete. Default: False.
            every: Whether parameters without a gradient receive zeros, because a reduction waits for all parameters.
                Default: False.
        """
        with torch.no_grad():
            for stand_in, gradient in self._kept.pop((stage, microbatch)):
                stand_in.grad = gradient
            # The deferred products hold the activations of the microbatch; removing them from the table frees these at
            # the end of the loop.
            for product in self._later.pop((stage, microbatch)):
                _add(product)
            if self._is_heard:
                # Post-accumulate hooks and reducers must fire once per step. Tensor hooks may change a gradient, so
                # they run for each microbatch.
                self._deliver(self._pairs[stage] if last else self._apart[stage], every and last)
            elif last:
                self._hand_over(stage)

    def _hand_over(self, stage: int) -> None:
        """Set the parameters' gradients to the stand-ins' gradients, if no hooks wait for them."""
        for stand_in, parameter in self._pairs[stage]:
            # After zero_grad the parameter takes over the stand-in's gradient tensor, without a copy.
            if parameter.grad is None:
                parameter.grad = stand_in.grad
            elif stand_in.grad is not None and stand_in.grad is not parameter.grad:  # used by an unsplit stage, too
                stand_in.grad = parameter.grad.add_(stand_in.grad)

    def _deliver(self, pairs: Sequence[tuple[Tensor, nn.Parameter]], every: bool) -> None:
        """Pass the stand-ins' gradients to the parameters in one backward, in which hooks fire."""
        for stand_in, _ in pairs if every else ():
            if stand_in.grad is None:
                # DDP's reducer waits for every parameter, also for one that this step has not used.
                stand_in.grad = torch.zeros_like(stand_in)
        pairs = [pair for pair in pairs if pair[0].grad is not None]
        if pairs:
            stand_ins, parameters = zip(*pairs, strict=True)
            with torch.enable_grad():
                # The gradients are not copied: the function returns them from its backward, and autograd stores them as
                # the parameters' gradients.
                end = _Delivery.apply(stand_ins, *parameters)  # type: ignore[no-untyped-call]
            torch.autograd.backward(end)


def unsplittable(module: nn.Module) -> str | None:
    """Return the obstacle to a split of a stage's backward, in words; None if the backward can be split."""
    for name, layer in module.named_modules():
        what = f"its layer {name!r}" if name else "it"
        if isinstance(layer, FullyShardedModule):
            return f"{what} is under fully_shard, which replaces its parameters in each pass"
        if is_compiled(layer):
            return f"{what} is under torch.compile, which has its parameters in its code"
        if isinstance(layer, nn.RNNBase):
            return f"{what} is an nn.{type(layer).__name__}, which keeps lists of its parameters"
    return None


class _Delivery(torch.autograd.Function):
    """Autograd function that passes the gradients of leaves to parameters, without copies."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[Tensor], *_: nn.Parameter) -> Tensor:
        """Return a scalar whose backward passes the gradients on."""
        ctx.leaves = leaves
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients and drop all other references to them, so that autograd need not copy them."""
        gradients: list[Tensor | None] = [None]
        for leaf in ctx.leaves:
            # Autograd takes over a gradient without a copy only if no other reference to it exists.
            gradients.append(leaf.grad)
            leaf.grad = None
        return tuple(gradients)


def _add(product: Product | WeightGradient) -> None:
    """Add a matmul to the stand-in's gradient, in place and without a temporary tensor if possible."""
    weight = product.weight
    if weight.grad is None:
        weight.grad = product.compute().to(gradient_dtype_of(weight))
    # A matmul that accumulates into the gradient needs no temporary tensor of the weight's size.
    elif product.operands is not None and product.operands[0].dtype == weight.grad.dtype:
        add_product(weight.grad, *product.operands)
    else:
        weight.grad.add_(product.compute())


def _put_back(own: dict[str, Any], name: str, stand_in: Tensor, parameter: nn.Parameter) -> None:
    """Restore a parameter, unless the module has replaced it in the meantime."""
    # A user's hook may have assigned a new parameter during the step, which must not be overwritten.
    if own.get(name) is stand_in:
        own[name] = parameter


def _restore(layer: nn.Module, name: str, before: dict[str, Any]) -> None:
    layer.__dict__.pop(name, None)
    layer.__dict__.update(before)
