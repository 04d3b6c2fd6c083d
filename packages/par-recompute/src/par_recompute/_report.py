"""Reports on the activations that layers save in a forward: predicted bytes and counted bytes."""

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
    """Saved activations of one layer, summed over its calls in one forward.

    Args:
        layer: Name of the layer in the model.
        dropped: Names of the modules that are called again, relative to the layer; "" is the layer itself.
        predicted: Bytes that the plan predicts; None if no call of these sizes was observed, as under Layers and Ops.
        counted: Bytes that the latest forward saved for its backward; None under Ops, which saves results unseen.
        on_host: Offloaded bytes among `counted`. Default: 0.
        calls: Number of calls of the layer. Default: 1.
    """

    layer: str
    dropped: tuple[str, ...]
    predicted: int | None
    counted: int | None
    on_host: int = 0
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """Saved activations of all layers of a model; `str` formats a table.

    Args:
        lines: One line for each layer that ran with gradients.
        counted: Bytes of all layers; None under Ops. A tensor that several layers save counts once here, and once in
            the line of each layer.
        on_host: Bytes offloaded to host memory; a tensor counts once. Default: 0.
    """

    lines: tuple[Line, ...]
    counted: int | None
    on_host: int = 0

    @property
    def predicted(self) -> int | None:
        """Sum of the predicted bytes of all layers; None if a layer has no prediction."""
        known = [line.predicted for line in self.lines if line.predicted is not None]
        return sum(known) if len(known) == len(self.lines) else None

    def __str__(self) -> str:
        """Format a table of the layers, and the sum."""
        rows: list[tuple[str, ...]] = [("layer", "predicted", "counted", "on host", "again")]
        for line in self.lines:
            again = "the layer" if WHOLE in line.dropped else ", ".join(line.dropped) or "nothing"
            sizes = map(_text, (line.predicted, line.counted, line.on_host))
            rows.append((line.layer or "(model)", *sizes, again))
        rows.append(("all", *map(_text, (self.predicted, self.counted, self.on_host)), ""))
        if not self.on_host:
            rows = [(*row[:3], row[4]) for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def saved(model: nn.Module) -> Report:
    """Report the activations that the layers of a model saved in its latest forward: predicted and counted bytes.

    If a caller such as a pipeline calls the layers directly and never the model, the report covers the latest call of
    each layer.

    Args:
        model: Model after `checkpoint_layers`.

    Raises:
        ValueError: No layer of the model drops activations.
    """
    layers = _layers(model)
    lines = tuple(_line(layer) for layer in layers if layer.ran)
    ran = [each for layer in layers for each in layer.ran]
    on_host = _together(each.on_host for each in ran) or 0
    return Report(lines=lines, counted=_together(each.counted for each in ran), on_host=on_host)


def choices(model: nn.Module) -> tuple[Choices, ...]:
    """Return the choices of each layer in bytes and seconds, as measured in the steps under `Keep(None)`.

    Complete layers ran again in these steps, and were timed. The seconds of a module are estimated as its part of the
    layer's time.

    Args:
        model: Model after `checkpoint_layers(model, Keep(None))` and a backward, or a module that contains several such
            models.

    Returns:
        One `Choices` for each model in `model`.

    Raises:
        ValueError: No layer of the model drops activations.
    """
    return tuple(planner.choices() for planner in _planners(model))


def set_budget(model: nn.Module, *budgets: float | str) -> None:
    """Set the budget for saved activations, from the next forward on.

    Args:
        model: Model after `checkpoint_layers(model, Keep(...))`, or a module that contains several such models.
        *budgets: One budget for each model in `model`, in the order of `choices` and in the forms of `Keep`.

    Raises:
        ValueError: No layer of the model drops activations, its policy is not Keep, or the number of budgets differs
            from the number of models.
    """
    planners = _planners(model)
    if len(planners) != len(budgets):
        raise ValueError(f"{len(budgets)} budgets were given for {len(planners)} models; give one for each")
    for planner, budget in zip(planners, budgets, strict=True):
        planner.set_budget(budget)


def _planners(model: nn.Module) -> list[Planner]:
    """Return the planners of the models in a module, each once."""
    return list(dict.fromkeys(layer.planner for layer in _layers(model)))


def _layers(model: nn.Module) -> list[Layer]:
    layers = [module.__dict__[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in module.__dict__]
    if not layers:
        raise ValueError(f"no layer of this {type(model).__name__} drops activations; call checkpoint_layers first")
    return layers


def _together(calls: Iterable[dict[int, int] | None]) -> int | None:
    """Sum the bytes of all storages, each counted once; return None if a call has no count."""
    together: dict[int, int] = {}
    for sizes in calls:
        if sizes is None:
            return None
        # The key is the storage, so one that two calls have saved replaces itself here and is not added twice.
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
