"""The keywords of a transformers model in microbatches."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from par_pipeline import Microbatches

_SHARED = ("cache_position", "logits_to_keep")
"""Keywords of transformers models that index tokens: every row has the same ones."""


def split_keywords(keywords: Mapping[str, Any], rows: int, microbatches: int) -> dict[str, Any]:
    """Split the keywords of a transformers model that have no rows along dim 0; a pipeline splits all others.

    Without this, a pipeline would split any tensor that happens to be as long as the batch has rows.

    Args:
        keywords: The keywords of a batch.
        rows: The number of rows of the batch.
        microbatches: The number of microbatches.

    Returns:
        The keywords, some of them as `Microbatches`.

    Raises:
        ValueError: A keyword has an entry for each image, so the rows to which the entries belong are unknown.
    """
    split: dict[str, Any] = dict(keywords)
    for name, value in keywords.items():
        if not isinstance(value, Tensor) or microbatches == 1:
            continue
        if name in _SHARED:
            split[name] = Microbatches([value] * microbatches)
        elif name == "position_ids" and value.dim() == 3:  # [sections, rows, time] of models with images
            split[name] = Microbatches(value.tensor_split(microbatches, dim=1))
        elif name.endswith("_grid_thw"):
            raise ValueError(
                f"{name} of shape {tuple(value.shape)}: it has an entry for each image, not for each of the {rows} "
                f"rows, and {microbatches} microbatches need rows; pass pipeline=dict(split=...) with a function that "
                "splits such a batch, or microbatches=1"
            )
    return split
