"""fp32 copies of a module's parameters, which the optimizer steps in their place."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import on_written, set_gradient_elsewhere, set_sharding, sharding_of

from ._dtensor import is_in_place, is_placed, local_gradient, local_part, local_parts
from ._weights import Change, Weights
from .norm.counted import EVERYTHING, Counted
from .norm.norm import Held
from .norm.ownership import Ownership


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Pair:
    """A parameter, and the fp32 copy of what this rank holds of it.

    Args:
        parameter: The module's; a DTensor maybe.
        master: The optimizer's, never a DTensor: fused optimizers take it beside others.
        counted: What this rank counts of it.
        kind: The same for all masters whose gradients fit into one tensor.
    """

    parameter: nn.Parameter
    master: nn.Parameter
    counted: Counted
    kind: str


class Masters(Weights):
    """fp32 copies take the parameters' places in the optimizer, and carry their names and records.

    Parameters of whole numbers, which nothing trains, have none, and keep their places. The parameters do not hold the
    masters, which go with the optimizer.

    A master shows the gradient of its parameter, which still has the parameter's dtype: `gradients(optimizer)` finds
    it, and it takes no memory. It becomes fp32 when the optimizer steps, for a bucket of parameters at a time.

    Args:
        module: Whose parameters are copied; cast afterwards.
        optimizer: Of these parameters.
        ownership: Who counts what.
        accumulate: Whether gradients are added up in fp32 instead, in the masters, after each backward pass.
        bucket: Bytes of fp32 gradients that there are at a time.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, ownership: Ownership, *, accumulate: bool, bucket: int
    ) -> None:
        self._optimizer, self._accumulate = optimizer, accumulate
        self._pairs: list[Pair] = []
        names = {parameter: name for name, parameter in module.named_parameters()}
        for group in optimizer.param_groups:
            parameters = group["params"]
            pairs = {each: _pair(each, ownership) for each in parameters if each.is_floating_point()}
            group["param_names"] = [names[each] for each in parameters]
            group["params"] = [pairs[each].master if each in pairs else each for each in parameters]
            self._pairs += pairs.values()
        self._by_id = {id(each.parameter): each for each in self._pairs}
        self._buckets = [self._pairs] if accumulate else list(_buckets(self._pairs, bucket))
        self._alike = [_alike(each) for each in self._buckets]

    def watch(self) -> None:
        """Follows gradients, and what is written to the parameters from outside. After the module was cast."""
        for pair in self._pairs:
            _on_gradient(pair.parameter, partial(_arrived, weakref.ref(self), id(pair.parameter)))
            if self._accumulate:
                set_gradient_elsewhere(pair.parameter, "the optimizer's fp32 master")
        on_written([pair.parameter for pair in self._pairs], _Refresh(self))

    @torch.no_grad()
    def gradients(self) -> Held:
        """Those there are, in their own dtype or added up in fp32; if one bucket holds them all, made fp32 already."""
        if len(self._buckets) == 1 and not self._accumulate:
            return _widen(self._alike[0])
        for pair in self._pairs:
            if not self._accumulate or pair.parameter.grad is not None:
                self._take(pair)
        return [(pair.counted, gradient) for pair in self._pairs if (gradient := pair.master.grad) is not None]

    def step(self, change: Change, number: int) -> None:  # noqa: ARG002
        """Steps bucket by bucket: an optimizer passes over masters without a gradient."""
        several = len(self._buckets) > 1
        if several:
            _hide(self._pairs)
        for bucket, alike in zip(self._buckets, self._alike, strict=True):
            if several:
                _widen(alike)
            stepped = [pair for pair in bucket if pair.master.grad is not None]
            if stepped:
                change.apply_([pair.master for pair in stepped])
                self._optimizer.step()
                _hide(stepped)
                _round(stepped)

    def forget(self) -> None:
        """Drops the masters' gradients, which would spoil the next ones that are added."""
        _hide(self._pairs)

    def zero_grad(self) -> None:
        """Drops the parameters' own."""
        for pair in self._pairs:
            pair.parameter.grad = None

    def masters(self) -> list[Tensor]:
        """In the order of the parameters."""
        return [pair.master.detach() for pair in self._pairs]

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters to the parameters."""
        _round(self._pairs)

    @torch.no_grad()
    def refresh(self, written: Sequence[Tensor]) -> None:
        """Takes over what was written to parameters."""
        pairs = [self._by_id[id(each)] for each in written]
        _copy_([pair.master for pair in pairs], [local_part(pair.parameter) for pair in pairs])

    @torch.no_grad()
    def arrived(self, number: int) -> None:
        """Takes the gradient of a backward pass. What communication must bring into place first waits for the step.

        Args:
            number: The `id` of the parameter.
        """
        pair = self._by_id[number]
        if self._accumulate or is_in_place(pair.parameter):
            self._take(pair)

    def _take(self, pair: Pair) -> None:
        gradient = local_gradient(pair.parameter)
        if not self._accumulate or gradient is None:
            pair.master.grad = gradient
            return
        pair.parameter.grad = None
        if pair.master.grad is None:
            pair.master.grad = gradient.float()
        else:
            pair.master.grad.add_(gradient)


class _Refresh:
    """What is called when parameters were written. A module that is pickled leaves the masters behind.

    Args:
        masters: Of the parameters, which are not kept alive; None: of a module that was loaded.
    """

    def __init__(self, masters: Masters | None = None) -> None:
        self._masters = None if masters is None else weakref.ref(masters)

    def __call__(self, written: Sequence[Tensor]) -> None:
        masters = None if self._masters is None else self._masters()
        if masters is not None:
            masters.refresh(written)

    def __reduce__(self) -> tuple[type["_Refresh"], tuple[()]]:
        return _Refresh, ()


def _pair(parameter: nn.Parameter, ownership: Ownership) -> Pair:
    local = local_part(parameter)
    master = nn.Parameter(local.detach().to(torch.float32, copy=True), requires_grad=parameter.requires_grad)
    master.grad_dtype = None  # it shows gradients of the parameter's dtype
    if is_placed(parameter) or "par_sharding" in parameter.__dict__:
        set_sharding(master, sharding_of(parameter))
    counted = ownership.of(parameter)
    kind = repr((master.shape, master.stride(), master.device, counted is EVERYTHING))
    return Pair(parameter=parameter, master=master, counted=counted, kind=kind)


def _arrived(masters: "weakref.ref[Masters]", number: int, parameter: Tensor) -> None:  # noqa: ARG001
    """A parameter's hook. Python's collector does not look into hooks, so what one holds would never be freed."""
    alive = masters()
    if alive is not None:
        alive.arrived(number)


def _on_gradient(parameter: nn.Parameter, call: Callable[[Tensor], None]) -> None:
    """Calls back for each gradient, also of a parameter that is frozen now and trained later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks for no others, but keeps them through a change
    parameter.register_post_accumulate_grad_hook(call)
    if frozen:
        parameter.requires_grad_(False)


def _buckets(pairs: Sequence[Pair], limit: int) -> Iterator[list[Pair]]:
    """Pairs with fp32 gradients of so many bytes together, or one pair if it has more."""
    bucket: list[Pair] = []
    size = 0
    for pair in pairs:
        if bucket and size + 4 * pair.master.numel() > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(pair)
        size += 4 * pair.master.numel()
    if bucket:
        yield bucket


def _alike(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Those of each kind."""
    kinds: dict[str, list[Pair]] = {}
    for pair in pairs:
        kinds.setdefault(pair.kind, []).append(pair)
    return list(kinds.values())


def _widen(kinds: Iterable[Sequence[Pair]]) -> Held:
    """Gives masters their gradients in fp32. Those of a kind lie in one tensor, made and summed up at once."""
    return [each for alike in kinds for each in _stack(alike)]


def _stack(alike: Sequence[Pair]) -> Held:
    """Gives masters of one kind their gradients, laid out like the masters, in fp32."""
    found = [local_gradient(pair.parameter) for pair in alike]
    gradients = [each for each in found if each is not None]
    if len(gradients) < len(alike):
        _hide(alike)
        alike = [pair for pair, gradient in zip(alike, found, strict=True) if gradient is not None]
    if not alike:
        return []
    master, counted = alike[0].master, alike[0].counted
    size, stride = (len(alike), *master.shape), (master.numel(), *master.stride())
    wide = torch.empty_strided(size, stride, dtype=torch.float32, device=master.device)
    views = wide.unbind()
    _copy_(views, gradients)
    for pair, view in zip(alike, views, strict=True):
        pair.master.grad = view
    if counted is EVERYTHING:
        return [(EVERYTHING, wide)]
    return [(pair.counted, view) for pair, view in zip(alike, views, strict=True)]


def _hide(pairs: Iterable[Pair]) -> None:
    for pair in pairs:
        pair.master.grad = None


def _round(pairs: Sequence[Pair]) -> None:
    _copy_(local_parts(pair.parameter for pair in pairs), [pair.master for pair in pairs])


def _copy_(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if into:
        torch._foreach_copy_(list(into), list(given))
