"""Choice of the modules that each layer drops: by the policy only, or by one plan for a budget of all layers."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .._policies import Cheap, Drop, Keep, Layers, Ops
from .._torch_private import tree_leaves
from ..observe.observer import is_plain
from ..plan.frontier import FLOPS_PER_BYTE, Choice, frontier
from ..plan.knapsack import knapsack
from ..plan.table import WHOLE, Table, kept, replay
from .whole import Contexts

RATE = 1e12
"""Operations a second. Only their ratio to bytes a second matters for what is chosen."""


class CallKind(NamedTuple):
    """Kind of a layer's call: two calls of one kind save the same tensors, possibly of other sizes.

    Numbers among the arguments are not part of the kind, because they may be counters.
    """

    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    autocast: tuple[object, ...]
    inputs: tuple[tuple[torch.dtype, int, bool], ...]
    words: tuple[bool | str | None, ...]


@dataclass
class Seen:
    """Observed call of a layer.

    Args:
        sizes: Shapes of the tensor arguments.
        table: Table of the call.
        dropped: Names of the modules that calls of this kind drop; None until planned.
        calls: Number of calls per forward that the plan assumes. Default: 1.
    """

    sizes: tuple[torch.Size, ...]
    table: Table
    dropped: frozenset[str] | None = None
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices of all layers of a model, in saved bytes and seconds of recomputation.

    Args:
        layers: Names of the layers; a layer with several kinds of calls is listed once for each kind.
        frontiers: Choices of each layer, as from `frontier`, summed over its calls in a forward, in measured seconds.
        forwards: Number of forwards in the measured step.
    """

    layers: tuple[str, ...]
    frontiers: tuple[tuple[Choice, ...], ...]
    forwards: int


@dataclass
class Known:
    """Layer with its observed calls and its number of calls per forward.

    Args:
        name: Name of the layer in the model.
        module: Layer.
        number: Index among the layers.
        seen: Largest observed call of each kind.
        current: Kind of the latest call.
        sizes: Shapes of the tensor arguments of the latest call.
        forward: Number of the model's forward that contained the latest call; None if the model was not called.
        calls: Number of calls of each kind in that forward, so far.
        before: Number of calls of each kind in the forward before.
    """

    name: str
    module: nn.Module
    number: int
    seen: dict[CallKind, Seen] = field(default_factory=dict)
    current: CallKind | None = None
    sizes: tuple[torch.Size, ...] = ()
    forward: int | None = None
    calls: Counter[CallKind] = field(default_factory=Counter)
    before: Counter[CallKind] = field(default_factory=Counter)

    def predict(self, kind: CallKind | None, sizes: tuple[torch.Size, ...], dropped: frozenset[str]) -> int | None:
        """Return the bytes that a call saves if it drops these modules; None if no such call was observed."""
        seen = None if kind is None else self.seen.get(kind)
        return kept(seen.table, dropped) if seen is not None and seen.sizes == sizes else None

    def is_in(self, forward: int | None) -> bool:
        """Record a call in a forward of the model, and return whether the layer's previous call was in the same one."""
        same = forward is not None and forward == self.forward
        if not same:
            # Where the model is never called, nothing tells where a forward ends, so no count is carried on to the next
            # one.
            self.before = Counter() if forward is None else self.calls
            self.calls = Counter()
        self.forward = forward
        return same

    def running(self) -> dict[CallKind, int]:
        """Return the number of calls per forward of each kind with the modes and autocast of the latest call."""
        # The forward before this one says how many calls are to come. A call in another mode, such as evaluation, is in
        # another forward.
        now = self.current
        most = self.before | self.calls
        return {kind: count for kind, count in most.items() if now is not None and kind[:3] == now[:3]}


class Planner:
    """Planner of the modules that the layers of one model drop.

    Args:
        policy: Policy; None: no module is dropped.
        layers: Layers by name.
    """

    def __init__(self, policy: Cheap | Layers | Drop | Keep | Ops | None, layers: dict[str, nn.Module]) -> None:
        self.policy = policy
        self.layers = [Known(name, module, number) for number, (name, module) in enumerate(layers.items())]
        self.fake = False
        self.ran_again: list[tuple[Known, float]] = []  # whole layers and seconds, while a budget is to be said
        self.in_backward = False  # a layer has run again: all that run in a forward have run
        self._forwards = self._depth = 0  # of the model
        self._looked_in: int | None = None  # the forward in which a layer was looked at last

    def enter(self) -> None:
        """Begin a forward of the model."""
        # A model that calls itself has one forward, the outermost; budgets are for all that runs in it.
        self._forwards += self._depth == 0
        self._depth += 1

    def leave(self) -> None:
        """End a forward of the model."""
        self._depth = max(self._depth - 1, 0)

    @property
    def forward(self) -> int | None:
        """Number of the model's running forward; None if the layers are called without the model."""
        return self._forwards if self._depth else None

    @property
    def is_table(self) -> bool:
        """Whether the choice for a call depends on tables of earlier calls."""
        return isinstance(self.policy, Cheap | Drop | Keep)

    def choose(self, layer: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str] | None:
        """Return the names of the modules that a call drops; None if the call must be observed.

        The name "" is the complete layer. A call is observed if no call of its kind was. Within a budget, it is also
        observed if it is larger than the observed calls of its kind. A layer with collectives is not observed again
        for its size, because the other ranks would not repeat these collectives. A budget is divided among the layers
        after all layers, or the first backward, have run, because only then the number of calls is certain: stages of
        a pipeline may run several microbatches first. If the model is called itself, this waits for its next forward.

        Raises:
            ValueError: The budget is too small, or the policy has no module that can be called again.
        """
        if self.policy is None:
            return frozenset()
        if isinstance(self.policy, Ops):
            return frozenset({WHOLE})
        if isinstance(self.policy, Layers):
            return frozenset({WHOLE}) if layer.number % self.policy.every == 0 else frozenset()
        layer.current, layer.sizes = kind_of(layer.module, args, kwargs)
        layer.calls[layer.current] += 1
        seen = layer.seen.get(layer.current)
        if seen is None or self.fake:
            return None
        if isinstance(self.policy, Keep):
            alone = not seen.table.modules[WHOLE].communicates
            # Saved bytes grow with the call, so a plan from a smaller call would exceed the budget.
            if alone and _elements(layer.sizes) > _elements(seen.sizes):
                return None
            if self.measures:
                return frozenset({WHOLE})
            dropped = seen.dropped
            # The budget was divided among fewer calls than this forward makes, so the plan cannot hold from here on.
            if dropped is not None and layer.calls[layer.current] > seen.calls:
                self._undecide()
                return frozenset({WHOLE}) if alone else dropped
            # A dropped layer keeps only its inputs, so the calls before the plan leave the most room.
            if dropped is None and not self._have_all_run():
                return frozenset({WHOLE})
        if seen.dropped is None:
            self.plan()
        return seen.dropped

    def _have_all_run(self) -> bool:
        """Return whether the number of calls per forward is certain for all layers.

        Layers that have not run yet may follow: a model may contain several pipeline stages that run in sequence.
        """
        # A plan in the forward that discarded the previous plan would count only the calls so far.
        is_new = self.forward is None or self.forward != self._looked_in
        return is_new and (self.in_backward or all(each.seen for each in self.layers))

    def _undecide(self) -> None:
        """Discard the plan, so that the next forward divides the budget again."""
        self._looked_in = self.forward
        for layer in self.layers:
            for seen in layer.seen.values():
                seen.dropped = None

    def record(self, layer: Known, args: tuple[Any, ...], kwargs: dict[str, Any], table: Table) -> None:
        """Record the table of an observed call; the next call of a layer plans with it."""
        kind, sizes = kind_of(layer.module, args, kwargs)
        layer.seen[kind] = Seen(sizes, table)
        if isinstance(self.policy, Keep):
            self._undecide()

    @property
    def measures(self) -> bool:
        """Whether the time of recomputation is measured, under `Keep(None)`."""
        return isinstance(self.policy, Keep) and self.policy.budget is None

    def set_budget(self, budget: float | str) -> None:
        """Set the budget of all layers; see `set_budget`.

        Raises:
            ValueError: The policy is not Keep.
        """
        if not isinstance(self.policy, Keep):
            raise ValueError(f"policy is {self.policy!r}, which has no budget; use Keep")
        self.policy = Keep(budget)
        self.ran_again.clear()
        self._undecide()

    def choices(self) -> "Choices":
        """Return the choices of all layers in measured seconds; see `choices`."""
        calls = self._calls()
        ratios = []
        for layer, seconds in self.ran_again:
            table = None if layer.current is None else layer.seen[layer.current].table
            if table is not None and (assumed := table.flops / RATE + table.moved / _bandwidth(layer)):
                ratios.append(seconds / assumed)
        # The median is robust against the first recomputations, in which kernels and allocators warm up.
        slower = statistics.median(ratios) if ratios else 1.0
        return Choices(
            layers=tuple(layer.name for layer, _ in calls),
            frontiers=tuple(
                tuple(each._replace(seconds=each.seconds * slower) for each in one) for one in self._frontiers(calls)
            ),
            # Without a budget every call is dropped completely, so each forward recomputes every call once.
            forwards=max(1, round(len(self.ran_again) / max(1, sum(each.calls for _, each in calls)))),
        )

    def plan(self) -> None:
        """Choose the dropped modules for all kinds of calls of one forward.

        Raises:
            ValueError: The budget is too small, or the policy has no module that can be called again.
        """
        if self.measures:  # there is no budget yet
            return
        calls = self._calls()
        if isinstance(self.policy, Keep):
            # A budget in percent refers to the bytes that are saved if nothing is dropped.
            budget = self.policy.bytes_of(sum(each.calls * kept(each.table, ()) for _, each in calls))
            # One choice for each layer and kind of call: all calls of the kind in a forward drop the same modules.
            for (_, each), choice in zip(calls, knapsack(self._frontiers(calls), budget), strict=True):
                each.dropped = choice.dropped
            return
        named = False
        for layer, each in calls:
            names = self._named(layer, each.table)
            named = named or bool(names)
            # Backward does not call every named module again; the other ones need no hook.
            again = replay(each.table, names).again
            each.dropped = frozenset(each.table.events[number][0] for number in again)  # type: ignore[misc]
        if calls and not named:
            raise ValueError(self._none(calls))

    def _calls(self) -> list[tuple[Known, Seen]]:
        """Return each layer with each observed kind of its calls in one forward."""
        found = []
        for layer in self.layers:
            for kind, number in layer.running().items():
                if kind in layer.seen:
                    layer.seen[kind].calls = number
                    found.append((layer, layer.seen[kind]))
        return found

    def contexts(self) -> Contexts | None:
        """Return a factory of the contexts for selective checkpointing; None if the policy is not Ops."""
        if not isinstance(self.policy, Ops):
            return None
        save: Any = self.policy.save if callable(self.policy.save) else list(self.policy.save)
        return lambda: create_selective_checkpoint_contexts(save)

    @staticmethod
    def _frontiers(calls: Sequence[tuple[Known, Seen]]) -> list[list[Choice]]:
        """Return the frontiers of layers over all their calls; layers with equal tables share one computation."""
        frontiers: dict[tuple[Any, ...], list[Choice]] = {}
        of_layer = []
        for layer, each in calls:
            key = (each.table.sizes, each.table.inputs, each.table.events)
            if key not in frontiers:
                # Ranks plan by themselves, and a rank that recomputed a layer with collectives alone would hang.
                whole = not each.table.modules[WHOLE].communicates
                frontiers[key] = frontier(each.table, RATE, bandwidth=_bandwidth(layer), whole=whole)
            of_layer.append([Choice(one[0], each.calls * one[1], each.calls * one[2]) for one in frontiers[key]])
        return of_layer

    def _named(self, layer: Known, table: Table) -> list[str]:
        """Return the candidates of a layer that the policy selects."""
        if isinstance(self.policy, Cheap):
            return [name for name in table.candidates if table.modules[name].flops == 0]
        assert isinstance(self.policy, Drop)  # noqa: S101 - the other policies need no table
        which = self.policy.which
        return [name for name in table.candidates if which(joined(layer.name, name), layer.module.get_submodule(name))]

    def _none(self, calls: Sequence[tuple[Known, Seen]]) -> str:
        """Return the error message for a policy whose modules cannot be called again, with one module's obstacle."""
        if isinstance(self.policy, Drop):
            for layer, each in calls:
                for name, module in each.table.modules.items():
                    full = joined(layer.name, name)
                    if name != WHOLE and self.policy.which(full, layer.module.get_submodule(name)):
                        return (
                            f"policy Drop names no module that can be called again: {full!r} {module.obstacle}; name "
                            "modules that take one tensor and give one, or use 'layers'"
                        )
        return (
            f"policy {self.policy!r} finds no module that can be called again in {calls[0][0].name!r}; use 'layers', "
            "or see what measure(layer, ...) prints"
        )


def kind_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CallKind, tuple[torch.Size, ...]]:
    """Return the kind of a call, and the shapes of its tensor arguments."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if is_plain(leaf)]
    # An operation on CPU tensors may run in any layer, and autocast has one state per device type.
    types = {tensor.device.type for tensor in tensors} | {"cpu"}
    autocast = [
        (each, torch.is_autocast_enabled(each) and torch.get_autocast_dtype(each))
        for each in sorted(types)
        if torch.amp.is_autocast_available(each)
    ]
    kind = CallKind(
        tuple(each.training for each in module.modules()),
        tuple(parameter.requires_grad for parameter in module.parameters()),
        tuple(autocast),
        tuple((tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors),
        tuple(leaf for leaf in leaves if isinstance(leaf, bool | str | None)),
    )
    return kind, tuple(tensor.shape for tensor in tensors)


def _bandwidth(layer: Known) -> float:
    """Return the bytes per second that match `RATE` operations per second."""
    device = next((parameter.device.type for parameter in layer.module.parameters()), "cpu")
    return RATE / FLOPS_PER_BYTE.get(device, 100.0)


def _elements(sizes: Sequence[torch.Size]) -> int:
    return sum(size.numel() for size in sizes)


def joined(layer: str, name: str) -> str:
    """Return the name in the model of a layer's module; the layer's name is "" if the layer is the model."""
    return f"{layer}.{name}" if layer else name
