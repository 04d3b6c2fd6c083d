"""fp32 master weights: copies of a module's parameters that the optimizer steps in their place."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import (
    WatchedParameter,
    attributes,
    follow_written_,
    on_settle,
    on_written,
    original_name,
    set_gradient_elsewhere,
    set_sharding,
    sharding_of,
    stand_in_gradient,
    watch_weight_,
)

from ._dtensor import cut_like, gradient_is_in_place, is_dtensor, local_gradient, local_part, local_parts
from ._torch_private import foreach_copy_, version_of
from ._weights import Change, Weights
from .norm.counted import EVERYTHING, Counted
from .norm.norm import CountedGradients
from .norm.ownership import Ownership

_ELSEWHERE = "the optimizer's fp32 master"

_MASTERS_HOOK = "par_precision_masters"
"""The attribute of a parameter that has a master: its `MastersHook`."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Pair:
    """Parameter and the fp32 master of its local part.

    Args:
        name: Name of the parameter in the module.
        parameter: Parameter of the module, possibly a DTensor.
        master: Tensor of the optimizer. It is never a DTensor, because fused optimizers do not mix both kinds.
        counted: Elements of the master that this rank counts in a norm.
        kind: Key that is equal for all masters whose gradients fit into one tensor.
    """

    name: str
    parameter: nn.Parameter
    master: nn.Parameter
    counted: Counted
    kind: str


class Masters(Weights):
    """fp32 copies that take the parameters' places in the optimizer, and carry their names and records.

    Parameters of whole numbers, which nothing trains, have none, and keep their places. The parameters do not keep the
    masters alive, which go with the optimizer.

    A master shows the gradient of its parameter, which still has the parameter's dtype: `gradients(optimizer)` finds
    it, and it takes no memory. It becomes fp32 when the optimizer steps, for a bucket of parameters at a time.

    Args:
        module: The module whose parameters are copied. It is cast afterwards, so that copies have all digits.
        optimizer: The optimizer of these parameters.
        ownership: Elements that this rank counts in a norm.
        accumulate: Whether gradients are accumulated in fp32, in the masters, after each backward.
        bucket: Size of the fp32 gradients that exist at the same time, in bytes.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, ownership: Ownership, *, accumulate: bool, bucket: int
    ) -> None:
        self._optimizer, self._accumulate = optimizer, accumulate
        self._pairs: list[Pair] = []
        self._versions: list[int] = []
        self._master_versions: list[int] = []
        self._stand_ins: dict[Pair, Tensor] = {}  # made once for each parameter
        self._shown: set[Pair] = set()  # those whose parameter was given its stand-in
        names = {parameter: original_name(name) for name, parameter in module.named_parameters()}
        for group in optimizer.param_groups:
            parameters = group["params"]
            group["param_names"] = [names[parameter] for parameter in parameters]
            group["params"] = stepped = []
            for parameter in parameters:
                if parameter.is_floating_point():
                    self._pairs.append(_pair(names[parameter], parameter, ownership))
                    stepped.append(self._pairs[-1].master)
                else:
                    stepped.append(parameter)
        for pair in self._pairs:
            # The state moves with its parameter, or the optimizer would begin anew for the master.
            if pair.parameter in optimizer.state:  # Adagrad's constructor fills it
                state = optimizer.state.pop(pair.parameter)
                optimizer.state[pair.master] = {k: v.float() if isinstance(v, Tensor) else v for k, v in state.items()}
        # Tensors compare by element, so a dict is keyed by identity.
        self._by_id = {id(pair.parameter): pair for pair in self._pairs}
        # Accumulated gradients are in fp32 already, so smaller buckets would save no memory.
        buckets = [self._pairs] if accumulate else list(_buckets(self._pairs, bucket))
        self._buckets: list[tuple[list[Pair], list[list[Pair]]]] = []
        for pairs in buckets:
            kinds: dict[str, list[Pair]] = {}
            for pair in pairs:
                kinds.setdefault(pair.kind, []).append(pair)
            self._buckets.append((pairs, list(kinds.values())))

    def watch(self, module: nn.Module) -> None:
        """Follow gradients, and what is written to the parameters from outside. To be called after the cast.

        Args:
            module: The module, which is to keep these parameters.
        """
        link = MastersHook(self)
        self._note_versions()
        module.register_load_state_dict_post_hook(MastersHook(self, "check_kept"))
        for pair in self._pairs:
            watch_weight_(pair.parameter)
            pair.parameter.__dict__[_MASTERS_HOOK] = link
            _on_gradient(pair.parameter, partial(_arrived, weakref.ref(self), id(pair.parameter)))
            if self._accumulate:
                set_gradient_elsewhere(pair.parameter, _ELSEWHERE)
        on_written([pair.parameter for pair in self._pairs], link)
        on_settle([pair.master for pair in self._pairs], MastersHook(self, "settle"))
        module.register_state_dict_pre_hook(MastersHook(self, "publish_written"))

    @torch.no_grad()
    def gradients(self) -> CountedGradients:
        """Return the existing gradients, in their own dtype or accumulated in fp32; in fp32 if one bucket holds all."""
        # One bucket that holds everything is widened now. Several are widened one by one in the step, to save memory.
        if len(self._buckets) == 1 and not self._accumulate:
            return _widen(self._buckets[0][1])
        if self._accumulate:
            self.take_stand_ins()
        for pair in self._pairs:
            if not self._accumulate or pair.parameter.grad is not None:
                self._take(pair)
        if self._accumulate:
            self.take_stand_ins()  # those of gradients that waited for this step
        return [(pair.counted, gradient) for pair in self._pairs if (gradient := pair.master.grad) is not None]

    def step(self, change: Change, number: int) -> None:  # noqa: ARG002
        """Step bucket by bucket; an optimizer skips masters without a gradient."""
        self.settle()
        for pair in self._pairs:  # fused kernels accept no subclass
            pair.master.__class__ = nn.Parameter
        several = len(self._buckets) > 1
        # Masters outside the current bucket must have no gradient, because the optimizer steps every tensor that has
        # one.
        if several:
            _hide(self._pairs)
        for bucket, kinds in self._buckets:
            if several:
                _widen(kinds)
            stepped = [pair for pair in bucket if pair.master.grad is not None]
            if stepped:
                change.apply_([pair.master for pair in stepped])
                self._optimizer.step()
                # The fp32 gradients of this bucket are freed before the next bucket makes its own.
                _hide(stepped)
                _round(stepped)
        self._note_versions()

    def take_stand_ins(self, *_: object) -> None:
        """Remove stand-ins for gradients, before a backward pass or a step, and drop the sums of those that are gone.

        A program removes a stand-in by `parameter.grad = None` or replaces it by a gradient of its own. That gradient
        then replaces the sum, as on any parameter.
        """
        for pair in self._shown:
            # The stand-in is still in place, so the program has neither dropped nor replaced the gradient.
            if pair.parameter.grad is self._stand_ins[pair]:
                pair.parameter.grad = None
            else:
                pair.master.grad = None
        self._shown.clear()

    def forget(self) -> None:
        """Drop the masters' gradients, which would spoil the next ones that are added."""
        _hide(self._pairs)

    def zero_grad(self) -> None:
        """Drop the parameters' gradients; the optimizer drops the masters'."""
        self.publish_written()  # most loops come here between a step and a forward, which is blind if it is compiled
        for pair in self._pairs:
            pair.parameter.grad = None

    def masters(self) -> list[Tensor]:
        """Return the fp32 copies, in the order of their parameters.

        They are DTensors if those are, so that a save knows how they are sharded.
        """
        self.settle()
        return [cut_like(pair.master.detach(), pair.parameter) for pair in self._pairs]

    def shown(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the state of the masters, with DTensors for parameters that are DTensors.

        torch.distributed.checkpoint takes tensors of one name for replicas, unless they say that they are parts.
        """
        pairs = {id(pair.master): pair for pair in self._pairs}
        stepped = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        shown: dict[int, dict[str, Any]] = {}
        for number, slots in state.items():
            pair = pairs.get(id(stepped[number]))
            shown[number] = {
                name: value if pair is None or not isinstance(value, Tensor) else cut_like(value, pair.parameter)
                for name, value in slots.items()
            }
        return shown

    def taken(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the parts that this rank holds of a state from `shown`."""
        return {
            number: {name: local_part(value) if isinstance(value, Tensor) else value for name, value in slots.items()}
            for number, slots in state.items()
        }

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to the parameters."""
        _round(self._pairs)
        self._note_versions()

    def publish_written(self, *_: object) -> None:
        """Round the masters to the parameters if a program, such as a Lookahead, has written masters after a step.

        Raises:
            RuntimeError: The program has also written the parameters since the last step.
        """
        # Comparing version counters costs no read of the weights, so this can run before every forward.
        if self._master_versions == [version_of(pair.master) for pair in self._pairs]:
            return
        versions = zip(self._pairs, self._versions, self._current_versions(), strict=True)
        if written := [pair.name for pair, before, now in versions if before != now]:
            raise RuntimeError(
                f"{written[0]!r} was written in the module, and master weights in the "
                f"{type(self._optimizer).__name__}, since the last step, and only one of the two can count; write only "
                "the optimizer's tensors, or the module's parameters before the step"
            )
        self.publish()

    @torch.no_grad()
    def settle(self, *_: object) -> None:
        """Bring what a program has written since the last step, to masters or to parameters, to the other of the two.

        Raises:
            RuntimeError: The program has written both.
        """
        # A program that has written masters is served first; what it has written to parameters follows below.
        self.publish_written()
        for pair, before, now in zip(self._pairs, self._versions, self._current_versions(), strict=True):
            if before != now or attributes.HAS_ALIAS.of(pair.parameter):
                follow_written_(pair.master, local_part(pair.parameter))
        self._note_versions()

    def check_kept(self, module: nn.Module, _: object) -> None:
        """Raise if a module has lost parameters that have masters, after a state dict was loaded."""
        kept = {id(parameter) for parameter in module.parameters()}
        for pair in self._pairs:
            if id(pair.parameter) not in kept:
                raise RuntimeError(
                    f"{pair.name!r} was replaced by load_state_dict(assign=True), so the optimizer would not reach it; "
                    "load without assign=True, or before mixed()"
                )

    def _note_versions(self) -> None:
        """Record that masters and parameters agree, and count what a program writes to either of them from now on."""
        self._versions = self._current_versions()
        for pair in self._pairs:
            # A write through `data` of an ordinary parameter would not raise the version counter.
            pair.master.__class__ = WatchedParameter
        self._master_versions = [version_of(pair.master) for pair in self._pairs]

    def _current_versions(self) -> list[int]:
        """Return the version counter of each parameter, which autograd raises at every write."""
        return [version_of(local_part(pair.parameter)) for pair in self._pairs]

    @torch.no_grad()
    def refresh(self, written: Sequence[Tensor]) -> None:
        """Copy values to masters that a program has written to parameters."""
        pairs = [self._by_id[id(parameter)] for parameter in written]
        _copy_([pair.master for pair in pairs], [local_part(pair.parameter) for pair in pairs])
        self._note_versions()

    @torch.no_grad()
    def arrived(self, parameter: int) -> None:
        """Take the gradient of a backward pass. One that communication must first bring into place waits for the step.

        Args:
            parameter: The `id` of the parameter.
        """
        pair = self._by_id[parameter]
        if self._accumulate or gradient_is_in_place(pair.parameter):
            self._take(pair)

    def _take(self, pair: Pair) -> None:
        gradient = local_gradient(pair.parameter)
        if not self._accumulate or gradient is None:
            pair.master.grad = gradient
            return
        if pair.master.grad is None:
            pair.master.grad = gradient.float()
        else:
            pair.master.grad.add_(gradient)
        pair.parameter.grad = None
        if not is_dtensor(pair.parameter):  # FSDP2 adds to what it finds there, and needs a DTensor
            if pair not in self._stand_ins:
                self._stand_ins[pair] = stand_in_gradient(pair.name, pair.parameter, _ELSEWHERE)
            pair.parameter.grad = self._stand_ins[pair]
            self._shown.add(pair)


class MastersHook:
    """Weak reference from a parameter to the optimizer's masters, called when the parameter was written.

    A master also has one, called before it is read from outside. The module has some that are called before a forward,
    before its state dict is made and after a load.
    Copies of a parameter, and parameters loaded from a file, have an empty one, because they have no master.

    Args:
        masters: Masters of an optimizer; None for an empty reference.
        method: Name of the method of `Masters` to call. Default: "refresh".
    """

    def __init__(self, masters: Masters | None = None, method: str = "refresh") -> None:
        self.masters = None if masters is None else weakref.ref(masters)
        self._method = method

    def __call__(self, *args: object) -> None:
        masters = None if self.masters is None else self.masters()
        if masters is not None:
            getattr(masters, self._method)(*args)

    def __reduce__(self) -> tuple[type["MastersHook"], tuple[()]]:  # how copy and pickle make another
        return MastersHook, ()


def has_master(tensor: Tensor) -> bool:
    """Return whether an optimizer has an fp32 master of a parameter, even if that optimizer was freed."""
    link: MastersHook | None = tensor.__dict__.get(_MASTERS_HOOK)
    return link is not None and link.masters is not None


def _pair(name: str, parameter: nn.Parameter, ownership: Ownership) -> Pair:
    local = local_part(parameter)
    master = nn.Parameter(local.detach().to(torch.float32, copy=True), requires_grad=parameter.requires_grad)
    master.grad_dtype = None  # it shows gradients of the parameter's dtype
    if is_dtensor(parameter) or attributes.SHARDING.is_on(parameter):
        set_sharding(master, sharding_of(parameter))
    counted = ownership.of(parameter)
    kind = repr((master.shape, master.stride(), master.device, counted is EVERYTHING))
    return Pair(name=name, parameter=parameter, master=master, counted=counted, kind=kind)


def _arrived(masters: "weakref.ref[Masters]", number: int, parameter: Tensor) -> None:  # noqa: ARG001
    """Notify the masters that a parameter has its gradient.

    The hook holds a weak reference, because the garbage collector cannot free a cycle through a hook.
    """
    alive = masters()
    if alive is not None:
        alive.arrived(number)


def _on_gradient(parameter: nn.Parameter, call: Callable[[Tensor], None]) -> None:
    """Call back for each gradient, also of a parameter that is frozen now and trained later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks for no others, but keeps them through a change
    parameter.register_post_accumulate_grad_hook(call)
    if frozen:
        parameter.requires_grad_(False)


def _buckets(pairs: Sequence[Pair], limit: int) -> Iterator[list[Pair]]:
    """Yield buckets of pairs whose fp32 gradients fit into a number of bytes; a larger pair is a bucket of its own."""
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


def _widen(kinds: Iterable[Sequence[Pair]]) -> CountedGradients:
    """Set the masters' gradients in fp32, with the layout of the masters.

    All gradients of one kind share one tensor, so that one allocation and one sum handle all of them.
    """
    counted_gradients: CountedGradients = []
    for pairs in kinds:
        gradients: list[Tensor] = []
        alike: list[Pair] = []
        for pair in pairs:
            gradient = local_gradient(pair.parameter)
            if gradient is None:
                pair.master.grad = None
            else:
                gradients.append(gradient)
                alike.append(pair)
        if not alike:
            continue
        master, counted = alike[0].master, alike[0].counted
        # Each view has the strides of its master, so that the optimizer finds both in one memory order.
        size, stride = (len(alike), *master.shape), (master.numel(), *master.stride())
        wide = torch.empty_strided(size, stride, dtype=torch.float32, device=master.device)
        views = wide.unbind()
        _copy_(views, gradients)
        for pair, view in zip(alike, views, strict=True):
            pair.master.grad = view
        # The norm takes one tensor of many gradients faster than many tensors.
        if counted is EVERYTHING:
            counted_gradients.append((EVERYTHING, wide))
        else:
            counted_gradients += [(pair.counted, view) for pair, view in zip(alike, views, strict=True)]
    return counted_gradients


def _hide(pairs: Iterable[Pair]) -> None:
    for pair in pairs:
        pair.master.grad = None


def _round(pairs: Sequence[Pair]) -> None:
    _copy_(local_parts(pair.parameter for pair in pairs), [pair.master for pair in pairs])


def _copy_(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if into:
        foreach_copy_(list(into), list(given))
