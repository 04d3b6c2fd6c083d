"""The effect of a plan on a model, computed before anything changes. Pure, and the same on the meta device.

A **region** is a module with a Column (a column-wise sharded linear) as a direct child, such as an attention or an MLP.
A region is **closed** if it owns no parameter, has at most one Row (a row-wise sharded linear), and each child with
parameters has the rule Column, Row or Partial. A closed region copies its input once for all Columns: every gradient
inside is partial, and the Columns need no collective of their own. In an open region each Column copies its own input,
so that the gradient of everything before the Column is full.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from par_groups import LaneCounts, Topology, axis_size

from ...experts.experts import Experts
from ...modes.grid import EXPERTS, Axes, Grid
from ..adapters import Wrapper, wrapper_around, wrappers_of
from ..cutting import ParameterShard, PlannedGrid
from ..packed.look import experts_like, is_packed
from ..plans.plans import Plan, Resolved, name_of, names_around, output_embedding, resolve, warn_if_layers_stay_full
from ..plans.styles import (
    ColumnParallel,
    EmbeddingParallel,
    ExpertParallel,
    ExpertTensorParallel,
    IdentityExpert,
    PartialGradient,
    Replicated,
    RowParallel,
    Style,
    with_unit,
)
from .kinds import check_embedding, computed_arguments, features_of, is_by_token, join, parent
from .parameters import ParameterShards

WHOLE = frozenset({"per_layer_input", "input_ids"})
"""Arguments of layers with one value for every token, in addition to activations: Gemma 3n and 4, DeepSeek V4."""


@dataclass(frozen=True)
class RegionPlan:
    """Plan of a region, a module with Columns as direct children.

    Args:
        closed: Whether the region is closed: one entry, and at most one Row.
        columns: Names of its Columns.
        counts: Attributes of the module that count heads or features, with this rank's numbers.
        config: Entries of the module's config that count heads, with this rank's numbers.
        heads: Whether the module is an attention, whose Columns are sharded by heads.
        partial: Whether it has a Partial or an adapter around a Column. Their gradients are partial in a closed region.
    """

    closed: bool
    columns: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)
    config: dict[str, int] = field(default_factory=dict)
    heads: bool = False
    partial: bool = False

    @property
    def enters(self) -> bool:
        """Whether the region copies its input once for all Columns."""
        # A single Column copies the input itself: it overlaps the all-reduce of backward with its weight gradient.
        return self.closed and (len(self.columns) > 1 or self.partial)


@dataclass(frozen=True)
class Survey:
    """Everything that `parallelize` will do to a model.

    Args:
        resolved: Style of each module and parameter, by name.
        rules: The same styles, with a style for each part of an adapter.
        wrappers: Linears with adapters around them, by name.
        parts: This rank's shard of each parameter, by the parameter's first name.
        regions: Regions, by the name of the module.
        layers: Name of the list of layers whose activations are split along the sequence; None without such a list.
        head: Name of the output embedding; None if the model has no output embedding, or no rule for it.
        blocks: Names of the modules that run on full sequences, as without sequence parallelism: the parents of
            experts, open regions with Rows, and other modules in the layers that may mix tokens.
        experts: This rank's experts for each module with packed experts, by the module's name. The module has the rule
            ExpertParallel, or has the rule ExpertTensorParallel and declares the layout of its weights.
    """

    resolved: Resolved
    rules: dict[str, Style]
    wrappers: dict[str, Wrapper]
    parts: dict[str, ParameterShard]
    regions: dict[str, RegionPlan]
    layers: str | None
    head: str | None
    blocks: tuple[str, ...]
    experts: dict[str, Experts]

    def region_around(self, name: str) -> str:
        """Return the name of the parent of a linear, or of the adapter wrapper around the linear."""
        return parent(wrapper_around(name, self.wrappers) or name)

    def is_cut_along_sequence(self, name: str) -> bool:
        """Return whether activations around a module are split along the sequence: in the layers, outside of blocks."""
        if self.layers is None or not name.startswith(f"{self.layers}."):
            return False
        return not any(name == block or name.startswith(f"{block}.") for block in self.blocks)

    def has_entry(self, name: str) -> bool:
        """Return whether a region copies its input, or gathers it along the sequence, once for all of its Columns."""
        region = self.regions[name]
        return region.enters or (region.closed and self.is_cut_along_sequence(name))


def tensor_axes(grid: Grid) -> Axes:
    """Return the axes of the tensor group; () if the group has one rank."""
    topology = grid.topology
    if topology is None or axis_size(topology, "tensor") == 1:
        return ()
    return grid.tensor_axes


def deals_experts(grid: Grid) -> bool:
    """Return whether the topology specifies how experts are distributed over ranks."""
    return grid.topology is not None and EXPERTS in grid.topology.views


def survey_planned(model: nn.Module, topology: Topology, rank: int, plan: str | Plan) -> Survey:
    """Return the effect of a plan on a model, for one rank of a topology and without live groups.

    Args:
        model: The unsharded model.
        topology: The topology, whose tensor mode is 1d.
        rank: Global rank.
        plan: "auto", or rules by pattern.

    Raises:
        ValueError: A rule is wrong, a size does not divide, or the mode is not 1d.
        TypeError: The model has no plan, a rule does not fit its module, or the sequence cannot be split.
    """
    mode, options = topology.modes.get("tensor", (None, {}))
    if mode not in (None, "1d"):
        raise ValueError(f"mode {mode!r} splits activations that this model's code needs in full; use mode='1d'")
    return survey(model, plan, PlannedGrid(topology, rank), sequence=bool(options.get("sequence_parallel", False)))


def survey(
    model: nn.Module,
    plan: str | Plan,
    grid: Grid,
    *,
    sequence: bool,
    shares_inputs: bool = True,
    expert_lanes: LaneCounts | None = None,
) -> Survey:
    """Return the effect of a plan on a model.

    Args:
        model: The unsharded model.
        plan: "auto", or rules by pattern.
        grid: This rank's coordinates.
        sequence: Whether activations between the layers are split along the sequence.
        shares_inputs: Whether the Columns of a region share one sum of their input gradients.
        expert_lanes: Numbers of lanes, if experts compute the rows of each lane alone, also on one rank; else None.

    Raises:
        ValueError: A rule is wrong, or a size does not divide.
        TypeError: The model has no plan, a rule does not fit its module, or the sequence cannot be split.
    """
    resolved = resolve(model, plan, experts=deals_experts(grid) or expert_lanes is not None)
    if isinstance(plan, str) and tensor_axes(grid):
        warn_if_layers_stay_full(model, resolved)
    more: dict[str, Any] = {"shares_inputs": shares_inputs, "expert_lanes": expert_lanes}
    return _Surveyor(model, resolved, grid, sequence=sequence, **more).survey()


class _Surveyor:
    """Builder of the survey of one model.

    Args:
        model: The model.
        resolved: Style of each module and parameter, by name.
        grid: This rank's coordinates.
        sequence: Whether activations between the layers are split along the sequence.
        shares_inputs: Whether the Columns of a region share one sum of their input gradients.
        expert_lanes: Numbers of lanes, if experts compute the rows of each lane alone; else None.
    """

    def __init__(
        self,
        model: nn.Module,
        resolved: Resolved,
        grid: Grid,
        *,
        sequence: bool,
        shares_inputs: bool = True,
        expert_lanes: LaneCounts | None = None,
    ) -> None:
        self.model, self.rules, self.resolved = model, dict(resolved.rules), resolved
        self.grid, self.axes, self.sequence = grid, tensor_axes(grid), sequence
        self.shares_inputs = shares_inputs
        # A shared module has several names, and a rule may use any of them.
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.wrappers = wrappers_of(self.modules, self.rules)
        self.experts = {
            name: experts_like(self.modules[name], grid.seen_as(EXPERTS), name, lanes=expert_lanes)
            for name, style in self.rules.items()
            if name in self.modules and (isinstance(style, ExpertParallel) or self._is_like_dealt(name, style))
        }

    def survey(self) -> Survey:
        ranks = self.grid.seen_as(EXPERTS).size(("expert_parallel",))
        if ranks > 1 and not self.experts:
            raise ValueError(
                f"the topology deals experts out over {ranks} ranks, but no module of {type(self.model).__name__} has "
                "the rule 'ep_dispatch_experts'; give these ranks to data, tensor or pipeline"
            )
        for name, style in self.rules.items():
            if isinstance(style, IdentityExpert) and any(owner in self.experts for owner in names_around(name)):
                raise TypeError(
                    f"{name!r} has the rule 'moe_identity_expert', and is among experts whose rows travel, which leave "
                    "it out; experts without weights cannot be dealt out: use tensor ranks alone"
                )
            if name in self.modules and isinstance(style, (ColumnParallel, RowParallel)):
                # Only for their errors: each rule must fit its module before anything is planned.
                features_of(self._linear(name), name)
            if name in self.modules and isinstance(style, EmbeddingParallel):
                check_embedding(self.modules[name], name)
            if name in self.modules and isinstance(style, ExpertTensorParallel) and name not in self.experts:
                self._check_cut(name)
        regions = {name: self._region(name) for name in self._region_names()}
        blocks = self._blocks(regions)
        layers = self._layers(regions, blocks) if self.sequence and self.axes else None
        if layers is not None:
            blocks += self._unknown(layers, regions, blocks)
        head = output_embedding(self.model)
        head_name = None if head is None else name_of(head, self.model)
        if head_name is not None and not isinstance(self.rules.get(head_name), ColumnParallel):
            head_name = None
        for name, wrapper in self.wrappers.items():
            style = self.rules[name]
            if isinstance(style, ColumnParallel):
                style = with_unit(style, self._unit(name))
            region = regions.get(parent(name))
            enters = self.shares_inputs and region is not None and region.enters
            self.rules.update(wrapper.rules(style, enters=enters))
        shards = ParameterShards(self.model, self.rules, self.experts, self.grid, self.axes, self._unit)
        parts = shards.shards(regions, blocks, layers)
        return Survey(self.resolved, self.rules, self.wrappers, parts, regions, layers, head_name, blocks, self.experts)

    def _is_like_dealt(self, name: str, style: Style) -> bool:
        """Return whether sharded packed experts can run as this package's experts.

        Their module must declare the layout of its weights, and the topology must not distribute experts.

        Raises:
            ValueError: A norm follows each expert. It would see partial sums.
        """
        if not isinstance(style, ExpertTensorParallel) or not self.axes or deals_experts(self.grid):
            return False
        ranks = self.grid.size(self.axes)
        if ranks > 1 and getattr(self.modules[name], "has_post_expert_norm", False) is True:
            raise ValueError(
                f"{name!r} has a norm after each expert, which needs full outputs: an expert cannot be sharded over "
                f"{ranks} ranks; give it the rule 'ep_dispatch_experts' and the config expert=dict(size=..., tensor=1)"
            )
        return is_packed(self.modules[name])

    def _check_cut(self, name: str) -> None:
        """Raise unless the plan shards a weight inside experts whose outputs are summed over the ranks.

        Raises:
            TypeError: No rule of the plan shards a weight there, for example because a parametrization renamed it.
        """
        inside = f"{name}."
        if not any(
            isinstance(rule, (ColumnParallel, RowParallel))
            for path, rule in self.rules.items()
            if path.startswith(inside)
        ):
            raise TypeError(
                f"{name!r} has the rule 'moe_tp_experts', but no rule cuts a weight inside it, so that the sum over "
                "the ranks would count each output several times; remove what renames its weights, such as a "
                "parametrization, or pass rules for them"
            )

    def _linear(self, name: str) -> nn.Module:
        """Return the linear of a name; for an adapter wrapper, the linear inside it."""
        linear: nn.Module = self.modules[self.wrappers[name].base if name in self.wrappers else name]
        return linear

    # Regions

    def _region_names(self) -> list[str]:
        parents = [
            parent(name)
            for name, style in self.rules.items()
            if isinstance(style, ColumnParallel) and not style.gather and name in self.modules
        ]
        return list(dict.fromkeys(parents))

    def _region(self, name: str) -> RegionPlan:
        module = self.modules[name]
        columns, rows, partial = [], 0, False
        closed = not isinstance(self.rules.get(name), Replicated) or name == ""
        # A region is closed if rules cover everything in it that has parameters. Only then is it known what happens to
        # the shards between its Columns and its Row.
        closed = closed and all(join(name, own) in self.rules for own, _ in module.named_parameters(recurse=False))
        for child_name, child in module.named_children():
            path = join(name, child_name)
            style = self.rules.get(path)
            if isinstance(style, ColumnParallel):
                columns.append(path)
                partial = partial or path in self.wrappers
                closed = closed and not style.gather
            elif isinstance(style, RowParallel):
                rows += 1
                closed = closed and not style.split
            elif isinstance(style, PartialGradient):
                partial = True
            elif next(child.parameters(), None) is not None:
                closed = False
        for path, style in self.rules.items():
            if (
                parent(path) == name
                and isinstance(style, PartialGradient)
                and style.before
                and not (closed and rows <= 1)
            ):
                raise ValueError(
                    f"the rule of {path!r} is {style}, but {name!r} is an open region: it owns a parameter, has "
                    "several Rows, or has a child with parameters without a rule; give all of them rules"
                )
        counts, config, heads = self._local_counts(module, columns)
        return RegionPlan(
            closed=closed and rows <= 1,
            columns=tuple(columns),
            counts=counts,
            config=config,
            heads=heads,
            partial=partial,
        )

    def _local_counts(self, module: nn.Module, columns: list[str]) -> tuple[dict[str, int], dict[str, int], bool]:
        """Return a module's numbers of heads and features on this rank.

        Returns:
            New values of the module's attributes, new values of its config's entries, and whether it is an attention.
        """
        units = [unit for path in columns if (unit := self._unit(path)) > 1]
        if not units or not self.axes:
            return {}, {}, bool(units)
        ranks = self.grid.size(self.axes)
        config = _config_of(module)
        heads = _first_count(module, config, "num_heads", "num_attention_heads")
        keys = _first_count(module, None, "num_key_value_heads")
        groups = _first_count(module, None, "num_key_value_groups")
        if keys is None and heads and groups:  # layers of one model may differ, and the config counts one kind
            keys = heads // groups
        keys = keys or _first_count(module, config, "num_key_value_heads") or heads
        known: dict[str, int] = {}
        if heads is not None and keys is not None:
            # With fewer key heads than ranks, each rank has a copy of one key head.
            local, local_keys = heads // ranks, max(keys // ranks, 1)
            known = {
                "num_heads": local,
                "num_attention_heads": local,
                "num_key_value_heads": local_keys,
                "num_key_value_groups": local // local_keys,
            }
        for size in ("all_head_size", "split_size"):
            if isinstance(whole := getattr(module, size, None), int):
                known[size] = whole // ranks
        counts = {key: number for key, number in known.items() if isinstance(getattr(module, key, None), int)}
        # Some attentions read these numbers from the config in their forward, so they get a config with local numbers.
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        read = {*getattr(code, "co_names", ())} & {"num_attention_heads", "num_key_value_heads"}
        through_config = {key: known[key] for key in read - set(counts) if key in known}
        return counts, through_config, True

    def _unit(self, path: str) -> int:
        """Return the number of features that must stay on one rank: the head size if the parent has it, else 1."""
        style = self.rules[path]
        assert isinstance(style, ColumnParallel)  # noqa: S101 - for the type checker; only Columns come here
        if style.unit > 1:
            return style.unit
        module = self.modules.get(parent(path))
        head = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
        if isinstance(getattr(module, "kv_lora_rank", None), int):  # latent attention: heads of two sizes
            heads = _first_count(module, None, "num_heads", "num_attention_heads")
            features = features_of(self._linear(path))[0]
            return features // heads if heads and features % heads == 0 else 1
        if head is None:
            heads = _first_count(module, None, "num_heads", "num_attention_heads")
            width = getattr(module, "hidden_size", None)
            head = width // heads if heads and isinstance(width, int) else None
        if not isinstance(head, int) or head < 1:
            return 1
        features = features_of(self._linear(path))[0] if path in self.modules else 0
        blocks = [features // style.blocks] if isinstance(style.blocks, int) else style.blocks
        # Features that do not divide into heads are no heads, so any rank may have any of them.
        return head if features and not any(block % head for block in blocks) else 1

    # The sequence

    def _blocks(self, regions: dict[str, RegionPlan]) -> tuple[str, ...]:
        """Return the outermost modules that run on full sequences, as without sequence parallelism."""
        of_experts = (ExpertTensorParallel, ExpertParallel)
        found = [
            parent(name) for name, style in self.rules.items() if isinstance(style, of_experts) and name in self.modules
        ]
        rows = [name for name, style in self.rules.items() if isinstance(style, RowParallel)]
        for name, region in regions.items():
            if not region.closed and any(name in names_around(row) for row in rows):
                found.append(name)
        outermost = [name for name in found if not any(other in found for other in names_around(name))]
        return tuple(dict.fromkeys(outermost))

    def _unknown(self, layers: str, regions: dict[str, RegionPlan], blocks: tuple[str, ...]) -> tuple[str, ...]:
        """Return the outermost modules of the layers that may mix tokens and so need full sequences.

        - A module without a rule inside may mix tokens, unless its type processes each token separately.
        - A parent of gathered Columns or split Rows needs full sequences: with a part of the sequence on each rank, it
          would join features of different tokens.
        """
        known = {*blocks, *regions, *(path for path, rule in self.rules.items() if isinstance(rule, RowParallel))}
        around = {owner for path in known for owner in names_around(path)}
        found: list[str] = []
        waiting = [join(layers, name) for name, _ in self.modules[layers].named_children()]
        while waiting:
            name = waiting.pop()
            if name in known or is_by_token(self.modules[name]):
                continue
            children = [join(name, child) for child, _ in self.modules[name].named_children()]
            rules = [self.rules.get(child) for child in children]
            puts_together = any(getattr(rule, "gather", False) or getattr(rule, "split", False) for rule in rules)
            # Nobody calls a container, so a hook on it would never run.
            is_container = isinstance(self.modules[name], (nn.ModuleList, nn.ModuleDict))
            if not is_container and (puts_together or name not in around):
                found.append(name)
            else:
                waiting += children
        return tuple(found)

    def _layers(self, regions: dict[str, RegionPlan], blocks: tuple[str, ...]) -> str:
        """Return the name of the only list of layers that contains all regions.

        Raises:
            TypeError: The model has an encoder and a decoder, has no such list, or its layers need other inputs per
                token than activations.
        """
        config = getattr(self.model, "config", None)
        who = type(self.model).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise TypeError(
                f"{who} has an encoder and a decoder, whose sequences differ in length; use sequence_parallel=False"
            )
        found = {self._list_around(name) for name in (*regions, *blocks)}
        if len(found) != 1 or None in found:
            raise TypeError(
                f"{who} has no single nn.ModuleList with all sharded layers, so activations between them cannot be "
                "split along the sequence; use sequence_parallel=False"
            )
        (name,) = found
        for layer in self.modules[str(name)].children():
            taken = set(inspect.signature(type(layer).forward).parameters)
            read = (WHOLE & taken) | computed_arguments(type(layer))
            for own in sorted(read if getattr(layer, "hidden_size_per_layer_input", True) else read - WHOLE):
                raise TypeError(
                    f"the layers of {who} take {own!r} of all tokens, but under sequence parallelism a rank has the "
                    "activations of some tokens only; use sequence_parallel=False"
                )
        return str(name)

    def _list_around(self, name: str) -> str | None:
        pieces = name.split(".")
        for length in range(len(pieces)):
            path = ".".join(pieces[:length])
            if isinstance(self.modules.get(path), nn.ModuleList):
                return path
        return None


def _config_of(module: nn.Module) -> Any:
    """Return the config that a module's code reads; that of its layer, if layers of the model differ."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    if getattr(config, "is_heterogeneous", False) is True and isinstance(layer, int):
        return config.per_layer_config[layer]
    return config


def _first_count(module: object, config: object, *names: str) -> int | None:
    """Return the first integer among attributes of the module, or else of its config."""
    for holder in (module, config):
        for name in names:
            if isinstance(number := getattr(holder, name, None), int):
                return number
    return None
