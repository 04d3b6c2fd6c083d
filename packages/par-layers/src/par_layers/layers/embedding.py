"""Embeddings: they receive full ids or full images, and return the residual layout."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from par_groups import attributes

from .._collectives import all_gather_to, reduce_from, reduce_scatter_to
from .._torch_private import assert_async
from ..context.tokens import Tokens
from ..modes.grid import Axes, Grid
from ..modes.layout import ActivationLayout, part
from ..modes.product_1d import SEQUENCE
from ..modes.rules import ModeRules
from ..modes.token_parameters import TokenParameters
from .linear import check_divides
from .parallel_layer import ParallelLayer
from .parameter import Bits, ByPlace, Init, Rows, constant, make_parameter, normal, uniform
from .places import Places


class ParallelEmbedding(ParallelLayer):
    """Embedding with a table that is sharded only along its features; for small vocabularies.

    Args:
        vocabulary: Number of ids; they are 0 .. vocabulary - 1.
        features: Number of features of the residual stream.
        rules: Rules of the mode.
        grid: This rank's coordinates.
        init: Initialization of the table; default: normal(1), as in torch.nn.Embedding.
    """

    def __init__(self, vocabulary: int, features: int, rules: ModeRules, grid: Grid, init: Init | None = None) -> None:
        super().__init__()
        check_divides(features, rules.residual.features, grid, "features")
        self.vocabulary = vocabulary
        self._layout, self._grid, self._token_parameters = rules.residual, grid, rules.token_parameters
        others = [(features, rules.residual.features)]
        # Each rank looks up its own tokens, so gradients are partial over the axes that split tokens.
        self.weight = make_parameter(
            [Rows(length=vocabulary)], others, grid, init or normal(1.0), rules.residual.tokens
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Map full ids [B, S] to [B, S, features] in the residual layout.

        Raises:
            ValueError: An id is not in the vocabulary (on an accelerator a device-side assertion), or the batch or the
                sequence does not divide.
        """
        check_ids(ids, self.vocabulary)
        return self._token_parameters.look_up(cut_tokens(ids, self._layout, self._grid), self.weight)


class ParallelVocabEmbedding(ParallelLayer):
    """Embedding whose table is sharded over the vocabulary, too. A vocabulary that does not divide is padded.

    Each rank looks up the ids of its own rows and returns zeros for all other ids. The partial sums are then added.

    Args:
        vocabulary: Number of ids; they are 0 .. vocabulary - 1.
        features: Features of the residual stream.
        rules: Layouts and matmuls of the mode.
        grid: Coordinates of this rank.
        padding_id: Id whose row starts at zero and gets no gradient from this layer, or None. A classifier that shares
            the table trains the row, as with torch.nn.Embedding's padding_idx.
        init: Init rule of the table. Default: normal(1), like torch.nn.Embedding.
    """

    def __init__(
        self,
        vocabulary: int,
        features: int,
        rules: ModeRules,
        grid: Grid,
        *,
        padding_id: int | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        check_divides(features, rules.residual.features, grid, "features")
        if padding_id is not None and not 0 <= padding_id < vocabulary:
            raise ValueError(f"padding_id is {padding_id}; it must be an id, 0 to {vocabulary - 1}")
        self.vocabulary, self.features, self.padding_id = vocabulary, features, padding_id
        self._rules, self._grid = rules, grid
        attributes.EXACT_GRADIENTS.set(self, rules.lanes.in_layers)
        axes = rules.vocabulary + rules.vocabulary_gathered
        rows = Rows(length=vocabulary, axes=axes, padded=padded(vocabulary, grid.size(axes)))
        # Over an axis that shards the table, the backward of the reduce-scatter gathers the gradients of all tokens.
        # Only the other batch axes leave gradients partial.
        sum_over = tuple(axis for axis in rules.residual.batch if axis not in axes)
        init = init or normal(1.0)
        if padding_id is not None:
            # A rule that draws each element by its position stays one, so a rank still draws only its own rows.
            init = (
                _ByPlaceWithZeroRow(init, padding_id) if isinstance(init, ByPlace) else _WithZeroRow(init, padding_id)
            )
        self.weight = make_parameter([rows], [(features, rules.residual.features)], grid, init, sum_over)

    def forward(self, ids: Tensor) -> Tensor:
        """Map full ids [B, S] to [B, S, features] in the residual layout.

        Raises:
            ValueError: An id is not in the vocabulary, or the batch or the sequence does not divide. On an accelerator
                a wrong id is a device-side assertion instead, because a check on the host would wait for the device.
        """
        # Without this check, an unknown id would match no rank's rows and silently become a vector of zeros.
        check_ids(ids, self.vocabulary)
        rules, grid = self._rules, self._grid
        check_divides(ids.shape[0], rules.residual.batch, grid, "the batch")
        if rules.residual.sequence:
            check_divides(ids.shape[SEQUENCE], rules.residual.sequence, grid, "the sequence")
        table: Tensor = self.weight
        # 3D shards the rows over a second axis. Backward reduce-scatters, so each rank gets the sum for its own rows.
        if grid.size(rules.vocabulary_gathered) > 1:
            table = all_gather_to(table, grid.group(rules.vocabulary_gathered), 0)
        if grid.size(rules.vocabulary) == 1:
            return rules.token_parameters.look_up(cut_tokens(ids, rules.residual, grid), table, self.padding_id)
        # The ids are split over the batch axes that do not shard the table; the look-up's result over the others.
        before = tuple(axis for axis in rules.residual.batch if axis not in rules.vocabulary)
        looked_up = self._look_up(cut_batch(ids, before, grid), table)
        group = grid.group(rules.vocabulary)
        # The ranks that hold other rows of the table also hold other rows of the batch, so each keeps only its batch
        # rows.
        if rules.vocabulary[-1] in rules.residual.batch:
            return reduce_scatter_to(looked_up, group, 0)
        if rules.residual.sequence:
            return reduce_scatter_to(looked_up, group, SEQUENCE)
        return reduce_from(looked_up, group)

    def _look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        """Return the table's rows of the ids in this rank's shard, and zeros for all other ids."""
        length = table.shape[0]
        first = self._grid.index(self._rules.vocabulary) * length
        local = ids - first
        elsewhere = (local < 0) | (local >= length)
        padding = None if self.padding_id is None else self.padding_id - first
        if padding not in range(length):
            padding = None
        # Ids of other ranks look up row 0, because an index must be valid; their result is replaced by zeros.
        rows = self._rules.token_parameters.look_up(local.masked_fill(elsewhere, 0), table, padding)
        # A negative zero: the sum with it preserves a zero of either sign.
        return rows.masked_fill(elsewhere.unsqueeze(-1), -0.0)

    def extra_repr(self) -> str:
        """Return the vocabulary and the features."""
        return f"{self.vocabulary}, {self.features}"


class ParallelPositionEmbedding(ParallelLayer):
    """Position embedding: it adds a learned vector for every position.

    Args:
        length: Maximum sequence length.
        features: Number of features of the residual stream.
        places: Token positions of activations in the residual layout.
        token_parameters: Look-ups of the mode.
        init: Initialization; default: normal(0.02).
    """

    def __init__(
        self,
        length: int,
        features: int,
        places: Places,
        token_parameters: TokenParameters,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        layout, grid = places.layout, places.grid
        check_divides(features, layout.features, grid, "features")
        self.length = length
        self._places, self._token_parameters = places, token_parameters
        others = [(features, layout.features)]
        self.weight = make_parameter([Rows(length=length)], others, grid, init or normal(0.02), layout.tokens)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Add the vectors of the positions.

        Args:
            x: Activation [b, s, features] in the residual layout.
            tokens: Split of its batch along the sequence; positions count within documents. None for sequences of one
                document.

        Raises:
            ValueError: There are more positions than vectors, or the activation's shape does not match the batch.
        """
        if self._places.are_told(tokens):
            positions, length = self._places.in_document(x, tokens, "PositionEmbedding")
            self._check(length)
            return x + self._token_parameters.look_up(positions, self.weight)
        axes, grid = self._places.layout.sequence, self._places.grid
        local_length = x.shape[SEQUENCE]
        self._check(local_length * grid.size(axes))
        first = grid.index(axes) * local_length
        return self._token_parameters.add_positions(x, self.weight, first)

    def _check(self, length: int) -> None:
        if length > self.length:
            raise ValueError(f"the sequence has {length} positions, this embedding {self.length}; shorten it")


class ParallelPatchEmbedding(ParallelLayer):
    """Embedding of images: it splits images into patches, projects them, and prepends a learned class token.

    Args:
        patch: Side length of a patch, in pixels.
        channels: Number of channels of the images.
        features: Features of the residual stream.
        rules: Layouts and matmuls of the mode.
        grid: Coordinates of this rank.
    """

    def __init__(self, patch: int, channels: int, features: int, rules: ModeRules, grid: Grid) -> None:
        super().__init__()
        layout = rules.residual
        check_divides(features, layout.features, grid, "features")
        self.patch = patch
        self._layout, self._grid = layout, grid
        pixels = channels * patch * patch
        rows = [Rows(length=features, axes=layout.features)]
        bound = 1 / math.sqrt(pixels)
        self.weight = make_parameter(rows, [(pixels, ())], grid, uniform(bound), layout.tokens)
        self.bias = make_parameter(rows, [], grid, uniform(bound), layout.tokens)
        self.class_token = make_parameter(rows, [], grid, constant(0.0), layout.tokens)

    def forward(self, images: Tensor) -> Tensor:
        """Map full images [B, C, H, W] to [B, 1 + patches, features] in the residual layout.

        Raises:
            ValueError: A side of the images is no multiple of the patch, or the tokens do not divide over the ranks.
        """
        images = cut_batch(images, self._layout.batch, self._grid)
        batch, _, height, width = images.shape
        if height % self.patch or width % self.patch:
            raise ValueError(f"images of {height} x {width} do not divide into patches of {self.patch} x {self.patch}")
        pixels = functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)  # [B, patches, C * p * p]
        patches = functional.linear(pixels, self.weight, self.bias)
        tokens = torch.cat([self.class_token.expand(batch, 1, -1), patches], dim=1)
        # The split comes after the class token, which is token 0 of the first sequence rank.
        return tokens[:, part(tokens.shape[1], self._layout.sequence, self._grid, "1 + patches")]


def cut_tokens(x: Tensor, layout: ActivationLayout, grid: Grid) -> Tensor:
    """Return this rank's tokens of full ids or targets.

    Args:
        x: Full ids or targets, [B, S, ...] without features, identical on all ranks.
        layout: Layout of the result.
        grid: This rank's coordinates.
    """
    x = cut_batch(x, layout.batch, grid)
    if grid.size(layout.sequence) > 1:
        x = x[:, part(x.shape[SEQUENCE], layout.sequence, grid, "the sequence")]
    return x


def cut_batch(x: Tensor, axes: Axes, grid: Grid) -> Tensor:
    """Return this rank's part of the first dim of a tensor that all ranks hold in full."""
    return x[part(x.shape[0], axes, grid, "the batch")] if grid.size(axes) > 1 else x


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise ValueError for an id that is not in the vocabulary; on an accelerator asserts there, without waiting."""
    fine = (ids >= 0) & (ids < vocabulary)
    # On an accelerator, a look at `fine` on the host would wait for the device, and torch.compile cannot branch on
    # it.
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        if not fine.all():
            raise ValueError(f"id {ids[~fine][0].item()} is outside the vocabulary: ids are 0 to {vocabulary - 1}")
    else:
        assert_async(fine.all(), f"an id is outside the vocabulary of {vocabulary}")


def padded(length: int, parts: int) -> int:
    """Return the next multiple of `parts`."""
    return math.ceil(length / parts) * parts


@dataclass(frozen=True)
class _WithZeroRow:
    """Fills a whole table."""

    init: Init
    row: int

    def __call__(self, whole: Tensor, generator: torch.Generator) -> None:
        self.init(whole, generator)
        whole[self.row] = 0.0


@dataclass(frozen=True)
class _ByPlaceWithZeroRow:
    """Fills a whole table, or a part of one."""

    init: ByPlace
    row: int

    def __call__(self, whole: Tensor, generator: torch.Generator) -> None:
        _WithZeroRow(self.init, self.row)(whole, generator)

    def fill(self, part: Tensor, rows: Tensor, bits: Bits) -> None:
        """Fill a part, and zero the row in the parts that contain it.

        The row draws its bits, too, so other rows keep theirs.
        """
        self.init.fill(part, rows, bits)
        part.masked_fill_(rows == self.row, 0.0)
