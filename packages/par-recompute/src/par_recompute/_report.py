"""What the layers of a model keep after a forward: as predicted, and as counted."""

from dataclasses import dataclass

from torch import nn

from .observe.measure import ATTRIBUTE
from .plan.sizes import readable
from .plan.table import WHOLE
from .run.layer import Layer


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one layer keeps.

    Args:
        layer: Its name in the model.
        dropped: Names of the modules that are called again, relative to the layer; "" is the whole layer.
        predicted: Bytes that the plan says; None if no call of these sizes was looked at, as under Layers and Ops.
        counted: Bytes that the latest forward kept for its backward; None under Ops, which keeps results unseen.
    """

    layer: str
    dropped: tuple[str, ...]
    predicted: int | None
    counted: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the layers of a model keep; printed, a table.

    Args:
        lines: A line for each layer that has run with gradients.
        counted: Bytes of all layers; None under Ops. A tensor that several of them keep counts once here, and in each
            of their lines.
    """

    lines: tuple[Line, ...]
    counted: int | None

    @property
    def predicted(self) -> int | None:
        """The sum of what is predicted for the layers; None if nothing is for one of them."""
        known = [line.predicted for line in self.lines if line.predicted is not None]
        return sum(known) if len(known) == len(self.lines) else None

    def __str__(self) -> str:
        """A table of the layers, and the sum."""
        rows = [("layer", "predicted", "counted", "again")]
        rows += [
            (line.layer or "(model)", _text(line.predicted), _text(line.counted), _names(line.dropped))
            for line in self.lines
        ]
        rows.append(("all", _text(self.predicted), _text(self.counted), ""))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def saved(model: nn.Module) -> Report:
    """What the layers of a model kept in their latest forward: the bytes predicted, and those counted.

    Args:
        model: A model after `checkpoint_layers`.

    Raises:
        ValueError: No layer of it drops activations.
    """
    layers = [module.__dict__[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in module.__dict__]
    if not layers:
        raise ValueError(f"no layer of this {type(model).__name__} drops activations; call checkpoint_layers first")
    lines = tuple(_line(layer) for layer in layers if layer.dropped is not None)
    if any(line.counted is None for line in lines):
        return Report(lines=lines, counted=None)
    together: dict[int, int] = {}
    for layer in layers:
        together.update(layer.counted or {})
    return Report(lines=lines, counted=sum(together.values()))


def _line(layer: Layer) -> Line:
    dropped = layer.dropped or frozenset()
    return Line(
        layer=layer.known.name,
        dropped=tuple(sorted(dropped)),
        predicted=layer.known.predict(dropped),
        counted=None if layer.counted is None else sum(layer.counted.values()),
    )


def _text(size: int | None) -> str:
    return "-" if size is None else readable(size)


def _names(dropped: tuple[str, ...]) -> str:
    return "the layer" if WHOLE in dropped else ", ".join(dropped) or "nothing"
