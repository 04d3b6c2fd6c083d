"""Images and videos of a batch: whether they fit the placeholders in its tokens."""

import inspect
from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..context.existing.packed_trial import TYPES

_INPUTS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Keys of the pixels and of their grid, as processors of Hugging Face Transformers return them."""

_INSTEAD = ("inputs_embeds", "mm_encoder_outputs", "image_embeds", "image_hidden_states")
"""Keys of what a caller may pass in place of pixels."""

_RULE = "each placeholder stands for a part of an image or video; pass all keys that the processor returned"


def check_images(config: Any, takes: Collection[str], batch: Mapping[str, Any]) -> None:
    """Check that a batch has the pixels of its placeholders, and the placeholders of its pixels.

    Without pixels, Hugging Face Transformers embeds placeholders as if they were text, and computes another loss
    without an error.

    Args:
        config: Configuration of the model.
        takes: Names of the arguments of the model's forward.
        batch: `input_ids`, [rows, time], and the other keys that the processor returned.

    Raises:
        ValueError: A key is missing, or the numbers differ.
    """
    tokens = {kind: _placeholder(config, kind) for kind, (key, _) in _INPUTS.items() if key in takes}
    if all(token is None for token in tokens.values()) or any(batch.get(key) is not None for key in _INSTEAD):
        return
    # A caller that passes pixels of one kind leaves out the keys of the other, or passes None.
    given = [kind for kind in tokens if batch.get(_INPUTS[kind][0]) is not None]
    # It reads a number from the device, as the model's forward does for the same comparison.
    found = {kind: int((batch["input_ids"] == token).sum()) for kind, token in tokens.items() if token is not None}
    # Some processors write the placeholders of an image for a video, too, so kinds are compared only if one is there.
    if not given and any(found.values()):
        kind = max(found, key=lambda each: found[each])
        raise ValueError(
            f"input_ids has {found[kind]} {kind} placeholders (id {tokens[kind]}), and {_INPUTS[kind][0]!r} is "
            f"missing: {_RULE}"
        )
    for kind in given:
        key, grid_key = _INPUTS[kind]
        if not any(found.values()):
            shape = list(batch[key].shape)
            raise ValueError(f"{key} is {shape}, and input_ids has no {kind} placeholder (id {tokens[kind]}): {_RULE}")
        # Without the types of tokens, some models attend to an image as to text, and raise no error.
        missing = [each for each in (grid_key, *TYPES) if each in takes and batch.get(each) is None]
        if missing:
            raise ValueError(f"the batch has {key!r}, and {missing[0]!r} is missing: {_RULE}")
    if given == ["image"] and "image" in found:
        pixels = batch["pixel_values"]
        sizes = _sizes_of(config, found["image"], pixels, batch.get("image_grid_thw"))
        if sum(sizes) != found["image"]:
            raise ValueError(
                f"input_ids has {found['image']} image placeholders (id {tokens['image']}), and the images in "
                f"pixel_values of shape {list(pixels.shape)} need {sizes}: {_RULE}, and do not truncate a row inside "
                "of an image"
            )


def split_images(config: Any, batch: Mapping[str, Any], parts: int) -> dict[str, list[Any]]:
    """Split the pixels and grids of a batch among microbatches: each gets the images of its rows.

    Args:
        config: Configuration of the model.
        batch: A batch that `check_images` accepts.
        parts: Number of microbatches. Their rows are those of `torch.tensor_split`.

    Returns:
        Entries of the microbatches by key; None for a microbatch without images. Without images it is empty.

    Raises:
        ValueError: The numbers of placeholders do not show which row an image belongs to.
    """
    split: dict[str, list[Any]] = {}
    for kind, (key, grid_key) in _INPUTS.items():
        pixels, grid = batch.get(key), batch.get(grid_key)
        if pixels is None:
            continue
        # All images belong to the only microbatch, whatever their number is.
        if parts == 1:
            split |= {name: [batch[name]] for name in (key, grid_key) if batch.get(name) is not None}
            continue
        of_rows = (batch["input_ids"] == _placeholder(config, kind)).sum(1)
        # One read from the device for all microbatches.
        tokens: list[int] = torch.stack([rows.sum() for rows in of_rows.tensor_split(parts)]).tolist()
        sizes = _sizes_of(config, sum(tokens), pixels, grid)
        # Images are in the order of their placeholders, so the ends of both must meet where a microbatch ends.
        ends = {0: 0, **{end: number for number, end in enumerate(accumulate(sizes), 1)}}
        images = [ends.get(until, -1) for until in (0, *accumulate(tokens))]
        if -1 in images or images[-1] != len(sizes):
            raise ValueError(
                f"the rows of {parts} microbatches have {tokens} {kind} placeholders, and images of {sizes} do not fit "
                "into them in this order; pass pipeline=dict(split=...) with a function that splits such a batch, or "
                "microbatches=1"
            )
        # The pixels of a grid are patches, those of one image after those of the image before.
        patches = [1] * len(sizes) if grid is None else grid.prod(-1).tolist()
        starts = [0, *accumulate(patches)]
        split[key] = [pixels[starts[a] : starts[b]] if b > a else None for a, b in pairwise(images)]
        if grid is not None:
            split[grid_key] = [grid[a:b] if b > a else None for a, b in pairwise(images)]
    return split


def _placeholder(config: Any, kind: str) -> Any:
    """Return the id of the placeholders of images or videos; None without one."""
    # Older configurations call it an index.
    return getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))


def _sizes_of(config: Any, found: int, pixels: Tensor, grid: Tensor | None) -> list[int]:
    """Return how many placeholders each image needs, as far as the configuration specifies it."""
    # Patches are merged in squares before they become tokens.
    if grid is not None:
        merge: int = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
        sizes: list[int] = (grid.prod(-1) // merge**2).tolist()
        return sizes
    # Without a number in the configuration all images have as many, which the model's forward compares once more.
    each: int = getattr(config, "mm_tokens_per_image", found // len(pixels))
    return [each] * len(pixels)


def image_positions(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the positions of text and images in a batch, [sections, rows, time].

    Pipeline stages without token ids need them. It is None for a model that does not compute positions from the grids
    of images, and for a batch that has positions already, or no grids.

    Args:
        model: Model of Hugging Face Transformers.
        batch: The batch.
    """
    if batch.get("position_ids") is not None or all(batch.get(grid) is None for _, grid in _INPUTS.values()):
        return None
    # The model within a model with a head has the method.
    rope: Any = next((each.get_rope_index for each in model.modules() if hasattr(each, "get_rope_index")), None)
    if rope is None:
        return None
    names = [name for name in inspect.signature(rope).parameters if batch.get(name) is not None]
    positions: Tensor = rope(**{name: batch[name] for name in names})[0]
    return positions
