"""What the layers of a model keep after a forward: as predicted, and as counted."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from par_groups import format_bytes

from .observe.measure import ATTRIBUTE
from .plan.table import WHOLE
from .run.layer import Layer
from .run.planner import Choices, Planner


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one layer keeps; of a layer that runs several times in a forward, what all these calls do.

    Args:
        layer: Its name in the model.
        dropped: Names of the modules that are called again, relative to the layer; "" is the whole layer.
        predicted: Bytes that the plan says; None if no call of these sizes was looked at, as under Layers and Ops.
        counted: Bytes that the latest forward kept for its backward; None under Ops, which keeps results unseen.
        on_host: Bytes of these that it has put away into host memory.
        calls: How many calls of the layer these are.
    """

    layer: str
    dropped: tuple[str, ...]
    predicted: int | None
    counted: int | None
    on_host: int = 0
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the layers of a model keep; printed, a table.

    Args:
        lines: A line for each layer that has run with gradients.
        counted: Bytes of all layers; None under Ops. A tensor that several of them keep counts once here, and in each
            of their lines.
        on_host: Bytes that they have put away into host memory, counted once alike.
    """

    lines: tuple[Line, ...]
    counted: int | None
    on_host: int = 0

    @property
    def predicted(self) -> int | None:
        """The sum of what is predicted for the layers; None if nothing is for one of them."""
        known = [line.predicted for line in self.lines if line.predicted is not None]
        return sum(known) if len(known) == len(self.lines) else None

    def __str__(self) -> str:
        """A table of the layers, and the sum."""
        rows: list[tuple[str, ...]] = [("layer", "predicted", "counted", "on host", "again")]
        rows += [
            (line.layer or "(model)", *map(_text, (line.predicted, line.counted, line.on_host)), _names(line.dropped))
            for line in self.lines
        ]
        rows.append(("all", *map(_text, (self.predicted, self.counted, self.on_host)), ""))
        if not self.on_host:
            rows = [(*row[:3], row[4]) for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def saved(model: nn.Module) -> Report:
    """What the layers of a model kept in its latest forward: the bytes predicted, and those counted.

    Where the model itself is not called, but its layers are, by a pipeline say, it is the latest call of each layer.

    Args:
        model: A model after `checkpoint_layers`.

    Raises:
        ValueError: No layer of it drops activations.
    """
    layers = _layers(model)
    lines = tuple(_line(layer) for layer in layers if layer.ran)
    ran = [each for layer in layers for each in layer.ran]
    on_host = _together(each.on_host for each in ran) or 0
    return Report(lines=lines, counted=_together(each.counted for each in ran), on_host=on_host)


def choices(model: nn.Module) -> tuple[Choices, ...]:
    """What the layers of a model may keep, with seconds measured in the steps since its budget is to be said.

    Whole layers have run again in these, and were timed; what modules take is their part of it.

    Args:
        model: A model after `checkpoint_layers(model, Keep(None))`, or several in one, and a backward.

    Returns:
        Those of each of the models in it.

    Raises:
        ValueError: No layer of it drops activations.
    """
    return tuple(planner.choices() for planner in _planners(model))


def set_budget(model: nn.Module, *budgets: float | str) -> None:
    """Says what the layers of a model may keep from its next forward on.

    Args:
        model: A model after `checkpoint_layers(model, Keep(...))`, or several in one.
        *budgets: A budget as `Keep` takes it for each model in it, in the order of `choices`.

    Raises:
        ValueError: No layer of it drops activations, it does so by another policy, or there are more or fewer models.
    """
    planners = _planners(model)
    if len(planners) != len(budgets):
        raise ValueError(f"{len(budgets)} budgets were given for {len(planners)} models; give one for each")
    for planner, budget in zip(planners, budgets, strict=True):
        planner.set_budget(budget)


def _planners(model: nn.Module) -> list[Planner]:
    """Those of the models in a model."""
    return list(dict.fromkeys(layer.planner for layer in _layers(model)))


def _layers(model: nn.Module) -> list[Layer]:
    layers = [module.__dict__[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in module.__dict__]
    if not layers:
        raise ValueError(f"no layer of this {type(model).__name__} drops activations; call checkpoint_layers first")
    return layers


def _together(calls: Iterable[dict[int, int] | None]) -> int | None:
    """The sum over storages, those that several calls have counted once; None if that of a call is not known."""
    together: dict[int, int] = {}
    for sizes in calls:
        if sizes is None:
            return None
        together |= sizes
    return sum(together.values())


def _line(layer: Layer) -> Line:
    predicted = [layer.known.predict(each.kind, each.sizes, each.dropped) for each in layer.ran]
    known = [size for size in predicted if size is not None]
    return Line(
        layer=layer.known.name,
        dropped=tuple(sorted(frozenset[str]().union(*(each.dropped for each in layer.ran)))),
        predicted=sum(known) if len(known) == len(predicted) else None,
        counted=_together(each.counted for each in layer.ran),
        on_host=_together(each.on_host for each in layer.ran) or 0,
        calls=len(layer.ran),
    )


def _text(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def _names(dropped: tuple[str, ...]) -> str:
    return "the layer" if WHOLE in dropped else ", ".join(dropped) or "nothing"
