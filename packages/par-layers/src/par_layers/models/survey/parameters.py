"""The shard of each parameter that a plan gives to this rank, and the axes over which its gradient is a partial sum."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...experts.experts import Experts
from ...layers.embedding import padded
from ...layers.linear import block_rows
from ...layers.parameter import Rows
from ...modes.grid import Axes, Grid
from ..cutting import ParameterShard, is_packed_4bit, part_along, part_whole, shape_of_codes
from ..plans.plans import names_around
from ..plans.styles import (
    ColumnParallel,
    EmbeddingParallel,
    ExpertParallel,
    PartialGradient,
    Replicated,
    RowParallel,
    Style,
    with_unit,
)
from .kinds import features_of, is_conv1d, join, parent


class ParameterShards:
    """The shard of each parameter of a model on this rank.

    Args:
        model: The unsharded model.
        rules: Style of each module and parameter, by name.
        experts: Experts of this rank for each module with packed experts, by name.
        grid: Coordinates of this rank.
        axes: Axes of the tensor group that have several ranks.
        unit: Function from the name of a column-parallel linear to the features that stay on one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        rules: Mapping[str, Style],
        experts: Mapping[str, Experts],
        grid: Grid,
        axes: Axes,
        unit: Callable[[str], int],
    ) -> None:
        self.model, self.rules, self.experts, self.grid, self.axes, self.unit = model, rules, experts, grid, axes, unit

    def shards(
        self, regions: Collection[str], blocks: Collection[str], layers: str | None
    ) -> dict[str, ParameterShard]:
        """Return the shard of each parameter, by its first name.

        Args:
            regions: Names of the regions.
            blocks: Names of the modules inside which activations are not sharded along the sequence.
            layers: Name of the list of layers whose activations are sharded along the sequence; None for none.

        Raises:
            TypeError: A rule cannot shard the parameter that it is for.
            ValueError: A size does not divide, or a tied parameter has two different rules.
        """
        parts: dict[str, ParameterShard] = {}
        uses: dict[int, list[tuple[str, ParameterShard | None]]] = {}
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for own, parameter in module.named_parameters(recurse=False):
                name = join(path, own)
                first.setdefault(id(parameter), (name, parameter))
                part = self._part(path, module, own, parameter)
                if part is None and not isinstance(module, (nn.Linear, nn.Embedding)):
                    continue  # no rule here; a tied parameter may have one under its other name
                # A tied parameter is used under several names, whose rules must agree.
                uses.setdefault(id(parameter), []).append((name, part))
        for key, (name, parameter) in first.items():
            said = uses.get(key, [])
            for other, part in said[1:]:
                if part != said[0][1]:
                    raise ValueError(
                        f"{said[0][0]!r} and {other!r} are one parameter, but their rules cut it in different ways; "
                        "give both the rules of an embedding and its output: 'embedding_rowwise' and "
                        "'colwise_gather_output'"
                    )
            part = said[0][1] if said else None
            parts[name] = part or part_whole(parameter.shape, self.grid, self._sum_over(name, regions, blocks, layers))
        return parts

    def _part(self, path: str, module: nn.Module, own: str, parameter: Tensor) -> ParameterShard | None:
        """Return this rank's part by the rule of a parameter; None if no rule shards it.

        Raises:
            TypeError: The rule cannot cut what it is on.
            ValueError: A size does not divide.
        """
        name = join(path, own)
        style = self.rules.get(name)
        if path in self.experts:
            dealt: Any = self.experts[path]._parameters[own]
            return ParameterShard(dealt.par_sharding, tuple(dealt.shape))
        try:
            if style is not None:
                return self._bare_part(style, parameter, name)
            style = self.rules.get(path)
            if isinstance(style, ColumnParallel):
                return self._column_part(path, style, module, own, parameter)
            if isinstance(style, RowParallel):
                return self._row_part(path, style, module, own, parameter)
            if isinstance(style, EmbeddingParallel):
                return self._table_part(style, module, parameter)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        return None

    def _column_part(
        self, path: str, style: ColumnParallel, module: nn.Module, own: str, parameter: Tensor
    ) -> ParameterShard:
        features, inner = features_of(module)
        shape = tuple(parameter.shape)
        if is_packed_4bit(parameter):
            shape = shape_of_codes(parameter, inner, join(path, own))
        dim = 0 if own == "bias" or not is_conv1d(module) else 1
        if style.gather:
            # Padding is allowed here, because it is cut off after the gather.
            length = padded(features, self.grid.size(self.axes))
            return part_along(shape, dim, [Rows(length=features, axes=self.axes, padded=length)], self.grid)
        style = with_unit(style, self.unit(path))
        blocks = style.blocks if isinstance(style.blocks, int) else list(style.blocks)
        return part_along(shape, dim, block_rows(features, blocks, style.unit, self.axes, self.grid), self.grid)

    def _row_part(
        self, path: str, style: RowParallel, module: nn.Module, own: str, parameter: Tensor
    ) -> ParameterShard | None:
        _, features = features_of(module)
        # The bias is added once, to the sum over the ranks, so each rank has all of it.
        if own == "bias":
            return None
        runs = self._runs(features, style.blocks)
        if is_packed_4bit(parameter):
            ranks = self.grid.size(self.axes)
            block = math.gcd(*(run.length // ranks for run in runs))
            shape = shape_of_codes(parameter, block, join(path, own))
            each = features // shape[1]  # weights in one element of the codes
            return part_along(shape, 1, [replace(run, length=run.length // each) for run in runs], self.grid)
        dim = 0 if is_conv1d(module) else 1
        return part_along(parameter.shape, dim, runs, self.grid)

    def _table_part(self, style: EmbeddingParallel, module: nn.Module, parameter: Tensor) -> ParameterShard:
        assert isinstance(module, nn.Embedding)  # noqa: S101 - `check_embedding` has checked it
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(
                "an embedding with max_norm, scale_grad_by_freq or sparse=True counts ids that another rank has; leave "
                "it whole, with the rule 'replicate'"
            )
        ids, features = parameter.shape
        if style.features:
            if any(child is not parameter for child in module.parameters()):
                who = type(module).__name__
                raise ValueError(
                    f"a {who} has a norm of its rows, and needs whole ones; use 'embedding_rowwise', or 'replicate'"
                )
            return part_along(parameter.shape, 1, self._runs(features, 1), self.grid)
        rows = Rows(length=ids, axes=self.axes, padded=padded(ids, self.grid.size(self.axes)))
        return part_along(parameter.shape, 0, [rows], self.grid)

    def _bare_part(self, style: Style, parameter: Tensor, name: str) -> ParameterShard | None:
        """Return this rank's part of a parameter with its own rule: experts' weights [E, N, K], or one value a head."""
        dims = parameter.dim()
        if dims == 3 and isinstance(style, (ColumnParallel, RowParallel)) and self.rules.get(parent(name)) is None:
            # Each rank would compute a part of every expert's output, and nothing would add the parts.
            raise TypeError(
                f"{name!r} has the rule {style}, and the module around it not; give {parent(name)!r} the rule "
                "'moe_tp_experts', as newer releases of Transformers do"
            )
        if isinstance(style, ColumnParallel) and dims in (1, 3):
            dim = max(dims - 2, 0)
            runs = self._runs(parameter.shape[dim], style.blocks, style.unit)
            return part_along(parameter.shape, dim, runs, self.grid)
        if isinstance(style, RowParallel) and dims == 3:
            return part_along(parameter.shape, -1, self._runs(parameter.shape[-1], style.blocks), self.grid)
        if isinstance(style, (Replicated, PartialGradient)):
            return None
        if isinstance(style, ExpertParallel):
            raise TypeError(
                f"{name!r} has the rule 'grouped_gemm', and the module around it not; give {parent(name)!r} the rule "
                "'ep_dispatch_experts'"
            )
        raise TypeError(
            f"{name!r}: the rule {style} cannot cut a parameter of shape {tuple(parameter.shape)}: Column cuts one or "
            "three dims, Row three; give the rule to the module instead"
        )

    def _runs(self, length: int, blocks: int | tuple[int, ...], unit: int = 1) -> list[Rows]:
        if not self.axes:
            return [Rows(length=length)]
        return block_rows(length, blocks if isinstance(blocks, int) else list(blocks), unit, self.axes, self.grid)

    def _sum_over(self, name: str, regions: Collection[str], blocks: Collection[str], layers: str | None) -> Axes:
        """Return the axes over which the gradient of a replicated parameter is partial.

        It is partial between a Column and a Row. If layers split activations along the sequence, it is also partial for
        every parameter that reads split activations: parameters outside the regions, and the biases of Rows.
        """
        owners = list(names_around(name))
        # A norm of expert outputs: each tensor rank has the outputs of its own tokens only.
        if any(owner in self.experts for owner in owners):
            return self.axes
        for owner in (name, *owners):
            style = self.rules.get(owner)
            if isinstance(style, PartialGradient):
                return self.axes
            # A norm of embedding rows: each tensor rank has looked up its own rows only.
            if isinstance(style, EmbeddingParallel):
                return self.axes
        # Outside of the layers each rank has all tokens.
        if layers is None or not name.startswith(f"{layers}."):
            return ()
        # Such a block runs on the full sequence.
        if any(owner in blocks for owner in owners):
            return ()
        # The bias of a Row is added behind the reduce-scatter, to this rank's tokens.
        if any(isinstance(self.rules.get(owner), RowParallel) for owner in owners):
            return self.axes
        # The region has gathered the sequence.
        if any(owner in regions for owner in owners):
            return ()
        return self.axes
