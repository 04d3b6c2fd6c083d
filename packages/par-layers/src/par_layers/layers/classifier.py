"""Classifiers: full logits over a few classes, or sharded logits over a vocabulary."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from par_groups import WeightGradHook, attributes, weight_and_hook

from .._collectives import reduce_from
from ..modes.arithmetic import in_autocast_dtype
from ..modes.grid import Grid
from ..modes.layout import check_features
from ..modes.rules import ModeRules
from .embedding import ParallelVocabEmbedding, padded
from .linear import check_divides
from .parallel_layer import ParallelLayer
from .parameter import Init, Rows, make_parameter, uniform


class ParallelClassifier(ParallelLayer):
    """Classifier with full logits of few classes: each rank multiplies its features, and the partial sums are added.

    Args:
        hidden: Features of the residual stream.
        classes: Number of logits.
        bias: Whether the layer has a bias.
        rules: Layouts and matmuls of the mode.
        grid: Coordinates of this rank.
    """

    def __init__(self, hidden: int, classes: int, bias: bool, rules: ModeRules, grid: Grid) -> None:
        super().__init__()
        layout = rules.residual
        check_divides(hidden, layout.features, grid, "hidden")
        bound = 1 / math.sqrt(hidden)
        rows = [Rows(length=classes)]
        # The input is [B, hidden], so only batch axes give ranks different examples and leave gradients partial.
        self.weight = make_parameter(rows, [(hidden, layout.features)], grid, uniform(bound), layout.batch)
        self.bias = make_parameter(rows, [], grid, uniform(bound), layout.batch) if bias else None
        self._layout = layout
        self._group = grid.group(layout.features) if grid.size(layout.features) > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [b, ..., classes] from [b, ..., hidden], identical on ranks with the same tokens."""
        check_features(x, self.weight.shape[1], self._layout, "a classifier")
        x, weight, bias = in_autocast_dtype(x, self.weight, self.bias)
        if self._group is None:
            return functional.linear(x, weight, bias)
        # The bias is added after the sum. In the matmul it would count once per rank.
        logits = reduce_from(functional.linear(x, weight), self._group)
        return logits if bias is None else logits + bias


class ParallelVocabClassifier(ParallelLayer):
    """Classifier over a vocabulary that is sharded like a column layer's features; padded logits are -inf.

    Args:
        hidden: Features of the residual stream.
        vocabulary: Number of classes.
        rules: Layouts and matmuls of the mode.
        grid: Coordinates of this rank.
        tied: Embedding whose table the classifier shares, or None.
        init: Init rule of a weight that is not shared. Default: uniform in +-1/sqrt(hidden).

    Raises:
        ValueError: The shared table has a different shape, or belongs to a different layer set.
    """

    weight_grad_hook: WeightGradHook | None = None
    """Set by those who want to compute weight gradients later; ignored for a shared table, which has two gradients."""

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        rules: ModeRules,
        grid: Grid,
        *,
        tied: ParallelVocabEmbedding | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self._local_hidden = hidden // grid.size(rules.residual.features)
        self._rules, self._tied = rules, tied is not None
        attributes.EXACT_GRADIENTS.set(self, rules.lanes.in_layers)
        axes = rules.column.rows
        if tied is None:
            check_divides(hidden, rules.column.columns, grid, "hidden")
            rows = [Rows(length=vocabulary, axes=axes, padded=padded(vocabulary, grid.size(axes)))]
            fill = init or uniform(1 / math.sqrt(hidden))
            columns = [(hidden, rules.column.columns)]
            self.weight = make_parameter(rows, columns, grid, fill, rules.column.sum_over)
            local = self.weight.shape[0]
        else:
            if tied._rules is not rules:
                raise ValueError("the shared table is of another layer set; make both layers with the same one")
            if (tied.vocabulary, tied.features) != (vocabulary, hidden):
                shape = (tied.vocabulary, tied.features)
                raise ValueError(f"the shared table is {shape}, the classifier {(vocabulary, hidden)}; make them equal")
            self.weight = tied.weight
            # 3D shards the table over "weight", too. `tied_product` gathers that axis, so logits are sharded over
            # `axes` only.
            local = padded(vocabulary, grid.size(rules.vocabulary + rules.vocabulary_gathered)) // grid.size(axes)
        # Only the last ranks hold padding, and such a rank may hold nothing else.
        self._real = min(local, max(vocabulary - grid.index(axes) * local, 0))
        self._local = local

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, ..., hidden] in the residual layout to [b, ..., V] in the inner layout."""
        check_features(x, self._local_hidden, self._rules.residual, "a classifier")
        weight, hook = (self.weight, None) if self._tied else weight_and_hook(self)
        x, weight, _ = in_autocast_dtype(x, weight, None)
        if self._tied:
            logits = self._rules.tied_product(x, self._rules.tied(weight), None, None)
        else:
            logits = self._rules.column_product(x, weight, None, hook)
        if self._real == self._local:
            return logits
        # Padding must neither count in a softmax nor have the largest logit.
        padding = torch.arange(self._local, device=logits.device) >= self._real
        return logits.masked_fill(padding, -torch.inf)

    def extra_repr(self) -> str:
        """Return the vocabulary, and whether the table is shared."""
        return f"vocabulary={self.vocabulary}, tied={self._tied}"
