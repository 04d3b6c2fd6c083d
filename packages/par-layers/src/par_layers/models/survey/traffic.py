"""Communication of each module of a sharded model, computed exactly from the survey. Pure.

The unit is elements that a rank receives, as in `par_layers.layer_cost`. Over p ranks, an all-reduce of n elements
counts 2(p-1)/p n, and an all-gather or reduce-scatter counts (p-1)/p of the full size.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from torch import nn

from par_groups import Topology

from ...modes.grid import EXPERTS
from ..cutting import PlannedGrid
from ..plans.plans import Plan
from ..plans.styles import (
    ColumnParallel,
    EmbeddingParallel,
    ExpertParallel,
    ExpertTensorParallel,
    LatentProjection,
    PartialGradient,
    RowParallel,
    Style,
    SummedOutput,
)
from .kinds import features_of
from .survey import RegionPlan, Survey, survey_planned, tensor_axes


@dataclass(frozen=True)
class CommunicationVolume:
    """Communication of one module with its tensor group in each forward and backward pass.

    Args:
        elements: Number of elements that a rank receives.
        calls: Number of collectives.
    """

    elements: Fraction = Fraction(0)
    calls: int = 0

    def __add__(self, other: "CommunicationVolume") -> "CommunicationVolume":
        return CommunicationVolume(self.elements + other.elements, self.calls + other.calls)


def communication_volumes(
    model: nn.Module,
    topology: Topology,
    tokens: int,
    plan: str | Plan = "auto",
    *,
    logits: Literal["sharded", "full"] = "sharded",
    experts_per_token: int | None = None,
) -> dict[str, CommunicationVolume]:
    """Return the communication of each module after `parallelize` in mode 1d. Pure, without live groups.

    The sum over all modules is the communication of a forward, its loss and its backward if every parameter is trained.
    Two things are not included. The sums of partial gradients are reduced once a step; `plan_shardings` lists them. The
    routed tokens of expert parallelism travel over other ranks, and their number depends on the routers.

    Args:
        model: The model, which may be on the meta device.
        topology: The topology, whose tensor mode is 1d.
        tokens: Number of tokens, batch x sequence.
        plan: Rules by pattern, or "auto".
        logits: "sharded" computes the loss from sharded logits, as models do in training; "full" gathers the logits.
        experts_per_token: Number of experts per token; None uses `num_experts_per_tok` of the model's config.

    Returns:
        Communication by name of the module. The gathers around all layers, under sequence parallelism, count for the
        first and the last layer. "" is the loss over sharded logits, whose elements are fp32.

    Raises:
        TypeError: The model has no plan, a rule does not fit its module, or the sequence cannot be split.
        ValueError: A rule of the plan is wrong, a size does not divide by the ranks, or the mode is not 1d. Or the
            model has experts, and the number of experts per token is unknown.
    """
    found, grid = survey_planned(model, topology, 0, plan), PlannedGrid(topology, 0)
    if not tensor_axes(grid):
        return {}
    are_whole = grid.seen_as(EXPERTS).size(("expert_tensor",)) == 1
    made = _TrafficCounter(model, found, grid.size(tensor_axes(grid)), tokens, experts_per_token, are_whole=are_whole)
    return made.all(is_cut=logits == "sharded")


class _TrafficCounter:
    """Counter of a model's communication, module by module.

    Args:
        model: The model.
        found: Survey of the model.
        ranks: Number of ranks of a tensor group.
        tokens: Number of tokens.
        chosen: Number of experts per token; None uses the config's number.
        are_whole: Whether each distributed expert is stored on one rank, and not sharded over the tensor group.
    """

    def __init__(
        self, model: nn.Module, found: Survey, ranks: int, tokens: int, chosen: int | None, *, are_whole: bool
    ) -> None:
        self.are_whole = are_whole
        self.model, self.found, self.tokens, self.chosen = model, found, tokens, chosen
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.one = Fraction(ranks - 1, ranks)  # of what is gathered, or scattered
        self.volumes: dict[str, CommunicationVolume] = {}

    def all(self, *, is_cut: bool) -> dict[str, CommunicationVolume]:
        """Return the costs by name of the module. `is_cut`: whether the loss is computed from sharded logits."""
        known: set[int] = set()
        for name, style in self.found.rules.items():
            module = self.modules.get(name)
            if module is not None and id(module) not in known and name not in self.found.wrappers:
                known.add(id(module))
                self._module(name, module, style, gathers=not (is_cut and name == self.found.head))
        for name, wrapper in self.found.wrappers.items():
            if isinstance(self.found.rules[name], RowParallel):  # DoRA sums the squares of each output's weights
                outputs = features_of(self.modules[wrapper.base])[0]
                self._add(name, len(wrapper.magnitudes) * 2 * self.one * outputs, len(wrapper.magnitudes))
        for name, region in self.found.regions.items():
            self._entry(name, region)
        if self.found.layers is not None:
            self._ends_of_layers(self.found.layers)
        if self.found.head is not None and is_cut:
            self._add("", 2 * self.one * 3 * self.tokens, 2)  # the largest logit; the sum and the target's
        return self.volumes

    def _add(self, name: str, elements: Fraction, calls: int = 1) -> None:
        self.volumes[name] = self.volumes.get(name, CommunicationVolume()) + CommunicationVolume(elements, calls)

    def _module(self, name: str, module: nn.Module, style: Style, *, gathers: bool) -> None:
        activations = self.one * self.tokens
        if isinstance(style, ColumnParallel):
            out, inner = features_of(module)
            # A Column at its region's entry receives a gathered input, so it has no collective of its own.
            around = self.found.region_around(name)
            if not (around in self.found.regions and self.found.has_entry(around)):
                self._add(name, 2 * activations * inner)  # backward sums the gradient of the input
            if style.gather and gathers:
                self._add(name, activations * out)
        elif isinstance(style, RowParallel):
            out, inner = features_of(module)
            # An all-reduce in forward, or a reduce-scatter in forward and an all-gather in backward: the same
            # elements.
            self._add(name, 2 * activations * out, 2 if self.found.is_cut_along_sequence(name) else 1)
            if style.split:
                self._add(name, activations * inner)
        elif isinstance(style, EmbeddingParallel):
            features: int = module.weight.shape[1]  # type: ignore[index,assignment]
            # Cut features are gathered; rows of a cut vocabulary are summed, since the other ranks have zeros.
            self._add(name, (1 if style.features else 2) * activations * features)
        elif isinstance(style, ExpertParallel) and self.are_whole:  # each rank sends its share
            self._add(name, 2 * activations * self._width() + activations * self._experts_per_token(), 3)
        elif isinstance(
            style, (ExpertTensorParallel, ExpertParallel)
        ):  # input and weights are copied in, the output is summed
            self._add(name, 4 * activations * self._width() + 2 * activations * self._experts_per_token(), 3)
        elif isinstance(style, SummedOutput):
            self._add(name, 2 * activations * self._width())
            if style.copies:  # activations and what each of the experts in it is multiplied by
                experts = next(module.parameters(recurse=False)).shape[0]
                self._add(name, 2 * activations * (self._width() + experts), 2)
        elif isinstance(style, LatentProjection):
            self._add(name, 2 * activations * style.around)

    def _entry(self, name: str, region: RegionPlan) -> None:
        """Count the collectives at a region's entry, which serve all of its Columns."""
        sequence = self.found.is_cut_along_sequence(name)
        activations = self.one * self.tokens * self._entering(name, region)
        if not self.found.has_entry(name):
            if sequence:
                self._add(name, activations)  # gathered; the gradient that comes back is whole
        elif not sequence:
            self._add(name, 2 * activations)
        else:  # a gather, a reduce-scatter, and one more gather for the backward of the Columns that take it
            takes_it = any(self._inner(column) == self._entering(name, region) for column in region.columns)
            self._add(name, (3 if takes_it else 2) * activations, 3 if takes_it else 2)

    def _ends_of_layers(self, layers: str) -> None:
        """Count the collectives that split the sequence before the layers, and gather it after them and in blocks."""
        names = list(self.modules[layers]._modules)  # not all numbers, where a planner has left out layers alike
        width = self.one * self.tokens * self._width()
        self._add(f"{layers}.{names[0]}", width)  # backward gathers
        self._add(f"{layers}.{names[-1]}", width)
        for block in self.found.blocks:
            self._add(block, 2 * self.one * self.tokens * self._width(), 2)

    def _entering(self, name: str, region: RegionPlan) -> int:
        """Return the number of input features of a region: those of linears before its Columns, or of a Column."""
        before = [
            path
            for path, style in self.found.rules.items()
            if isinstance(style, PartialGradient) and style.before and path.rpartition(".")[0] == name
        ]
        linears = [path for path in before if isinstance(self.modules.get(path), nn.Linear)]
        return self._inner((linears or region.columns)[0])

    def _inner(self, name: str) -> int:
        wrapper = self.found.wrappers.get(name)
        return features_of(self.modules[name if wrapper is None else wrapper.base])[1]

    def _width(self) -> int:
        """Return the width of the residual stream: the output features of a Row, or else the config's hidden_size."""
        rows = [
            name for name, style in self.found.rules.items() if isinstance(style, RowParallel) and name in self.modules
        ]
        for name in rows:
            if name not in self.found.wrappers and ".lora_" not in name:
                return features_of(self.modules[name])[0]
        config: Any = getattr(self.model, "config", None)
        if not isinstance(getattr(config, "hidden_size", None), int):
            raise ValueError(
                f"the plan of {type(self.model).__name__} has no Row, and its config no hidden_size, so nobody knows "
                "how wide its activations are; give the linears that close its regions the rule 'rowwise'"
            )
        return int(config.hidden_size)

    def _experts_per_token(self) -> int:
        chosen = self.chosen or getattr(getattr(self.model, "config", None), "num_experts_per_tok", None)
        if not isinstance(chosen, int):
            raise ValueError(
                f"{type(self.model).__name__} has experts, and its config no num_experts_per_tok; say how many a token "
                "goes to with experts_per_token="
            )
        return chosen
