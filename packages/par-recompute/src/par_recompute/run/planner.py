"""What each layer drops: by its policy alone, or, within a budget for all of them, by one plan."""

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


class Kind(NamedTuple):
    """What two calls of a layer have in common that save the same tensors, of other sizes perhaps.

    Numbers among the arguments, which may count something, are left out.
    """

    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    autocast: tuple[object, ...]
    inputs: tuple[tuple[torch.dtype, int, bool], ...]
    words: tuple[bool | str | None, ...]


@dataclass
class Seen:
    """A call that was looked at.

    Args:
        sizes: Shapes of the tensors that the layer was called with.
        table: What the call saves.
        dropped: What calls of its kind drop; None until that is decided.
        calls: How many calls in one forward that was decided for.
    """

    sizes: tuple[torch.Size, ...]
    table: Table
    dropped: frozenset[str] | None = None
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the layers of a model may keep, and what the rest takes.

    Args:
        layers: Their names; one that is called in several ways has one for each.
        frontiers: The choices of each of them, as from `frontier`, of all its calls in a forward, with seconds as
            measured.
        forwards: How many forwards there were in the measured step.
    """

    layers: tuple[str, ...]
    frontiers: tuple[tuple[Choice, ...], ...]
    forwards: int


@dataclass
class Known:
    """What is known of one layer.

    Args:
        name: Its name in the model.
        module: The layer.
        number: Its place among the layers.
        seen: By kind of call, the largest that was looked at.
        current: The kind of the latest call.
        sizes: Shapes of the tensors of the latest call.
        forward: The forward of the model that the latest call was in; None if the model itself was not called.
        calls: How many calls of each kind there were in that forward, so far.
        before: How many there were in the forward before.
    """

    name: str
    module: nn.Module
    number: int
    seen: dict[Kind, Seen] = field(default_factory=dict)
    current: Kind | None = None
    sizes: tuple[torch.Size, ...] = ()
    forward: int | None = None
    calls: Counter[Kind] = field(default_factory=Counter)
    before: Counter[Kind] = field(default_factory=Counter)

    def predict(self, kind: Kind | None, sizes: tuple[torch.Size, ...], dropped: frozenset[str]) -> int | None:
        """Bytes that a call keeps which drops this; None if no call of its kind and sizes was looked at."""
        seen = None if kind is None else self.seen.get(kind)
        return kept(seen.table, dropped) if seen is not None and seen.sizes == sizes else None

    def is_in(self, forward: int | None) -> bool:
        """Takes note of a call in a forward of the model: whether the call before was in the same one."""
        same = forward is not None and forward == self.forward
        if not same:
            self.before = Counter() if forward is None else self.calls
            self.calls = Counter()
        self.forward = forward
        return same

    def running(self) -> dict[Kind, int]:
        """The kinds of the calls in one forward, as far as they are like the latest call, and how many of each."""
        now = self.current
        most = self.before | self.calls
        return {kind: count for kind, count in most.items() if now is not None and kind[:3] == now[:3]}


class Planner:
    """Decides what the layers of one model drop.

    Args:
        policy: The policy; None: nothing is dropped.
        layers: The layers by name.
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
        """A forward of the model begins."""
        self._forwards += self._depth == 0
        self._depth += 1

    def leave(self) -> None:
        """A forward of the model ends."""
        self._depth = max(self._depth - 1, 0)

    @property
    def forward(self) -> int | None:
        """The forward of the model that runs; None if its layers are called by somebody else."""
        return self._forwards if self._depth else None

    @property
    def is_table(self) -> bool:
        """Whether what a call drops depends on what was seen of others."""
        return isinstance(self.policy, Cheap | Drop | Keep)

    def choose(self, layer: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str] | None:
        """Names of the modules that a call drops, "" for the whole layer; None: the call is to be looked at.

        A call is looked at if none of its kind was, and, within a budget, if none as large was; but not for its size if
        the layer calls collectives, which other ranks would not call again with it. A budget is shared out when all
        layers, or the first backward, have run, and as often as they do: not before the next forward begins, if it is
        known when that is. Stages of a pipeline may take several microbatches before.

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
            if alone and _elements(layer.sizes) > _elements(seen.sizes):
                return None
            if self.measures:
                return frozenset({WHOLE})
            dropped = seen.dropped
            if dropped is not None and layer.calls[layer.current] > seen.calls:
                self._undecide()
                return frozenset({WHOLE}) if alone else dropped
            if dropped is None and not self._have_all_run():
                return frozenset({WHOLE})
        if seen.dropped is None:
            self.plan()
        return seen.dropped

    def _have_all_run(self) -> bool:
        """Whether it is known how often layers run in a forward.

        A model may be one stage of several, of which others come later.
        """
        is_new = self.forward is None or self.forward != self._looked_in
        return is_new and (self.in_backward or all(each.seen for each in self.layers))

    def _undecide(self) -> None:
        """Lets the next forward share out the budget anew."""
        self._looked_in = self.forward
        for layer in self.layers:
            for seen in layer.seen.values():
                seen.dropped = None

    def record(self, layer: Known, args: tuple[Any, ...], kwargs: dict[str, Any], table: Table) -> None:
        """Takes over what a call of a layer saves; what layers drop is decided when the next call comes."""
        kind, sizes = kind_of(layer.module, args, kwargs)
        layer.seen[kind] = Seen(sizes, table)
        if isinstance(self.policy, Keep):
            self._undecide()

    @property
    def measures(self) -> bool:
        """Whether it is measured how long layers take to run again, as a budget is to be said."""
        return isinstance(self.policy, Keep) and self.policy.budget is None

    def set_budget(self, budget: float | str) -> None:
        """From now on layers keep as much as this allows; see `set_budget`.

        Raises:
            ValueError: They drop by another policy than Keep.
        """
        if not isinstance(self.policy, Keep):
            raise ValueError(f"policy is {self.policy!r}, which has no budget; use Keep")
        self.policy = Keep(budget)
        self.ran_again.clear()
        self._undecide()

    def choices(self) -> "Choices":
        """See `choices`."""
        calls = self._calls()
        ratios = []
        for layer, seconds in self.ran_again:
            table = None if layer.current is None else layer.seen[layer.current].table
            if table is not None and (assumed := _seconds(layer, table)):
                ratios.append(seconds / assumed)
        slower = statistics.median(ratios) if ratios else 1.0
        return Choices(
            layers=tuple(layer.name for layer, _ in calls),
            frontiers=tuple(
                tuple(each._replace(seconds=each.seconds * slower) for each in one) for one in self._frontiers(calls)
            ),
            forwards=max(1, round(len(self.ran_again) / max(1, sum(each.calls for _, each in calls)))),
        )

    def plan(self) -> None:
        """Decides what calls drop that are of the kinds of one forward.

        Raises:
            ValueError: The budget is too small, or the policy has no module that can be called again.
        """
        if self.measures:  # there is no budget yet
            return
        calls = self._calls()
        if isinstance(self.policy, Keep):
            self._within(self.policy, calls)
            return
        named = False
        for layer, each in calls:
            names = self._named(layer, each.table)
            named = named or bool(names)
            each.dropped = _useful(each.table, names)
        if calls and not named:
            raise ValueError(self._none(calls))

    def _calls(self) -> list[tuple[Known, Seen]]:
        """The layers as they are called in one forward, each kind of call by itself, as far as it was looked at."""
        found = []
        for layer in self.layers:
            for kind, number in layer.running().items():
                if kind in layer.seen:
                    layer.seen[kind].calls = number
                    found.append((layer, layer.seen[kind]))
        return found

    def contexts(self) -> Contexts | None:
        """What makes the contexts of selective checkpointing; None under another policy than Ops."""
        if not isinstance(self.policy, Ops):
            return None
        save: Any = self.policy.save if callable(self.policy.save) else list(self.policy.save)
        return lambda: create_selective_checkpoint_contexts(save)

    def _within(self, policy: Keep, calls: Sequence[tuple[Known, Seen]]) -> None:
        """One choice a layer within the budget; a layer that is called several times makes the same one each time."""
        budget = policy.bytes_of(sum(each.calls * kept(each.table, ()) for _, each in calls))
        for (_, each), choice in zip(calls, knapsack(self._frontiers(calls), budget), strict=True):
            each.dropped = choice.dropped

    @staticmethod
    def _frontiers(calls: Sequence[tuple[Known, Seen]]) -> list[list[Choice]]:
        """The frontiers of layers, of all their calls; those that save the same have the same one, made once."""
        frontiers: dict[tuple[Any, ...], list[Choice]] = {}
        of_layer = []
        for layer, each in calls:
            key = (each.table.sizes, each.table.inputs, each.table.events)
            if key not in frontiers:
                whole = not each.table.modules[WHOLE].communicates
                frontiers[key] = frontier(each.table, RATE, bandwidth=_bandwidth(layer), whole=whole)
            of_layer.append([Choice(one[0], each.calls * one[1], each.calls * one[2]) for one in frontiers[key]])
        return of_layer

    def _named(self, layer: Known, table: Table) -> list[str]:
        """The candidates of a layer that the policy names."""
        if isinstance(self.policy, Cheap):
            return [name for name in table.candidates if table.modules[name].flops == 0]
        assert isinstance(self.policy, Drop)  # noqa: S101 - the other policies need no table
        which = self.policy.which
        return [name for name in table.candidates if which(joined(layer.name, name), layer.module.get_submodule(name))]

    def _none(self, calls: Sequence[tuple[Known, Seen]]) -> str:
        """Says that a policy has no module that can be called again, and why those that it names cannot."""
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


def kind_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, tuple[torch.Size, ...]]:
    """The kind of a call, and the shapes of its tensors."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if is_plain(leaf)]
    types = {tensor.device.type for tensor in tensors} | {"cpu"}
    autocast = [
        (each, torch.is_autocast_enabled(each) and torch.get_autocast_dtype(each))
        for each in sorted(types)
        if torch.amp.is_autocast_available(each)
    ]
    kind = Kind(
        tuple(each.training for each in module.modules()),
        tuple(parameter.requires_grad for parameter in module.parameters()),
        tuple(autocast),
        tuple((tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors),
        tuple(leaf for leaf in leaves if isinstance(leaf, bool | str | None)),
    )
    return kind, tuple(tensor.shape for tensor in tensors)


def _useful(table: Table, names: Sequence[str]) -> frozenset[str]:
    """Those of the dropped modules that are called again at all; the others need no hook."""
    again = replay(table, names).again
    return frozenset(table.events[number][0] for number in again)  # type: ignore[misc]


def _bandwidth(layer: Known) -> float:
    """Bytes a second, if `RATE` were operations a second."""
    device = next((parameter.device.type for parameter in layer.module.parameters()), "cpu")
    return RATE / FLOPS_PER_BYTE.get(device, 100.0)


def _seconds(layer: Known, table: Table) -> float:
    """What running a layer again would take at that rate."""
    return table.flops / RATE + table.moved / _bandwidth(layer)


def _elements(sizes: Sequence[torch.Size]) -> int:
    return sum(size.numel() for size in sizes)


def joined(layer: str, name: str) -> str:
    """The name in the model of a module of a layer; a layer that is the model has none itself."""
    return f"{layer}.{name}" if layer else name
