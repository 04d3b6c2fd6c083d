"""Images and videos of a batch: whether they fit the placeholders in its tokens."""

import inspect
from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..context.existing.documents import packed_documents
from ..context.existing.packed_trial import TYPES
from .placeholder_trial import PlaceholderTrial

_INPUTS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Keys of the pixels and of their grid, as processors of Hugging Face Transformers return them."""

_INSTEAD = ("inputs_embeds", "mm_encoder_outputs", "image_embeds", "image_hidden_states")
"""Keys of what a caller may pass in place of pixels."""

_OF_TEXT = ("attention_mask", "position_ids", "input_ids", *TYPES)
"""Keys that have rows or sections of tokens, whatever the shape of a tensor is."""

_RULE = "each placeholder stands for a part of an image or video; pass all keys that the processor returned"


def check_images(config: Any, takes: Collection[str], batch: Mapping[str, Any], trial: PlaceholderTrial) -> None:
    """Check that a batch has the pixels of its placeholders, and the placeholders of its pixels.

    Without pixels, Hugging Face Transformers embeds placeholders as if they were text, and computes another loss
    without an error.

    Args:
        config: Configuration of the model.
        takes: Names of the arguments of the model's forward.
        batch: `input_ids`, [rows, time], and the other keys that the processor returned.
        trial: Trial of the model, for images without a grid.

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
        pixels, grid = batch["pixel_values"], batch.get("image_grid_thw")
        described = batch.get("image_sizes") if "image_sizes" in takes else None
        if not len(pixels):
            problem: str | None = "none"
        elif grid is None and described is not None and len(described) < len(pixels):
            # Models that read the sizes leave out the last images, without an error.
            problem = f"image_sizes has {len(described)} entries"
        elif grid is None:
            problem = trial.problem(_keywords(takes, batch), found["image"])
        else:
            sizes = _sizes_of(config, found["image"], pixels, grid)
            problem = None if sum(sizes) == found["image"] else f"they need {sizes}"
        if problem is not None:
            raise ValueError(
                f"input_ids has {found['image']} image placeholders (id {tokens['image']}), which do not fit the "
                f"images in pixel_values of shape {list(pixels.shape)} ({problem}): {_RULE}, and do not truncate a row "
                "inside of an image"
            )


def split_images(
    config: Any, takes: Collection[str], batch: Mapping[str, Any], parts: int, trial: PlaceholderTrial
) -> dict[str, list[Any]]:
    """Split the pixels of a batch, and what describes them, among microbatches: each gets the images of its rows.

    Args:
        config: Configuration of the model.
        takes: Names of the arguments of the model's forward.
        batch: A batch that `check_images` accepts.
        parts: Number of microbatches. Their rows are those of `torch.tensor_split`.
        trial: Trial of the model, for images without a grid.

    Returns:
        Entries of the microbatches by key; None for a microbatch without images. Without images it is empty.

    Raises:
        ValueError: The numbers of placeholders do not show which row an image belongs to.
    """
    split: dict[str, list[Any]] = {}
    ids = batch["input_ids"]
    keywords = _keywords(takes, batch)
    given = {name: x for name, x in keywords.items() if isinstance(x, Tensor) and x.dim() and name not in _OF_TEXT}
    # Everything belongs to the only microbatch, whatever the number of images is.
    if parts == 1:
        return {name: [x] for name, x in given.items() if x.shape[:2] != ids.shape}
    for kind, (key, grid_key) in _INPUTS.items():
        pixels, grid = batch.get(key), batch.get(grid_key)
        if pixels is None:
            continue
        of_rows = (ids == _placeholder(config, kind)).sum(1)
        # One read from the device for all microbatches.
        tokens: list[int] = torch.stack([rows.sum() for rows in of_rows.tensor_split(parts)]).tolist()
        count = len(pixels) if grid is None else len(grid)
        names = [
            name
            for name, x in given.items()
            if name != key and len(x) == count and x.shape[:2] != ids.shape and ("video" in name) == (kind == "video")
        ]
        # Images that have only pixels are of one size, unless pixels has rows of several images.
        differ = kind == "image" and grid is None and (bool(names) or pixels.dim() > 4)
        sizes = trial.sizes(keywords, [key, *names]) if differ else None
        if sizes is None:
            sizes = _sizes_of(config, sum(tokens), pixels, grid)
        # Images are in the order of their placeholders, so the ends of both must meet where a microbatch ends.
        ends = {0: 0, **{end: number for number, end in enumerate(accumulate(sizes), 1)}}
        images = [ends.get(until, -1) for until in (0, *accumulate(tokens))]
        if -1 in images or sum(sizes) != sum(tokens):
            raise ValueError(
                f"the rows of {parts} microbatches have {tokens} {kind} placeholders, and images of {sizes} do not fit "
                "into them in this order; pass pipeline=dict(split=...) with a function that splits such a batch, or "
                "microbatches=1"
            )
        # The pixels of a grid are patches, those of one image after those of the image before.
        patches = [1] * len(sizes) if grid is None else grid.prod(-1).tolist()
        starts = [0, *accumulate(patches)]
        split[key] = [pixels[starts[a] : starts[b]] if b > a else None for a, b in pairwise(images)]
        split |= {name: [given[name][a:b] if b > a else None for a, b in pairwise(images)] for name in names}
    for name, x in given.items() if split else ():
        if name not in split and len(x) != len(ids):
            raise ValueError(
                f"{name} is {list(x.shape)}: it has an entry neither for each image nor for each of {len(ids)} rows, "
                f"so {parts} microbatches cannot share it; pass pipeline=dict(split=...) with a function that splits "
                "such a batch, or microbatches=1"
            )
    return split


def _keywords(takes: Collection[str], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token ids of a batch, and what else the forward of the model takes."""
    return {name: batch[name] for name in ("input_ids", *takes) if batch.get(name) is not None}


def _placeholder(config: Any, kind: str) -> Any:
    """Return the id of the placeholders of images or videos; None without one."""
    # Older configurations call it an index.
    return getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))


def _sizes_of(config: Any, found: int, pixels: Tensor, grid: Tensor | None) -> list[int]:
    """Return how many placeholders each image needs; images without a grid need the same number."""
    # Patches are merged in squares before they become tokens.
    if grid is not None:
        merge: int = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
        sizes: list[int] = (grid.prod(-1) // merge**2).tolist()
        return sizes
    # Images without a grid have the same size, and `check_images` has compared the sum.
    return [found // max(1, len(pixels))] * len(pixels)


def image_positions(model: nn.Module, batch: Mapping[str, Any], *, always: bool) -> Tensor | None:
    """Return the positions of the text and images of a batch.

    Args:
        model: Model of Hugging Face Transformers.
        batch: `input_ids`, [rows, time], and the other keys that the processor returned. Its `position_ids`, [rows,
            time], are positions of text, which restart at each document.
        always: Whether to compute positions that the model would compute from token ids, which later pipeline stages
            do not have.

    Returns:
        Positions of images, [sections, rows, time], or of text and images, [1 + sections, rows, time], if the batch
        has positions of text. Other `position_ids` are returned as they are. None for a batch without them, unless
        `always` and the model computes positions from images.

    Raises:
        ValueError: Positions of images restart, without positions of text, or documents cannot be separated.
    """
    given: Tensor | None = batch.get("position_ids")
    # The model within a model with a head has the method.
    rope: Any = next((each.get_rope_index for each in model.modules() if hasattr(each, "get_rope_index")), None)
    if rope is None:
        return given
    types, kind = batch.get(TYPES[0]), type(model).__name__
    if given is not None and given.dim() == 3:
        if len(given) == 3 and _restarts(given[0], types):
            raise ValueError(
                f"position_ids is {list(given.shape)} and restarts in a row: {kind} separates documents by positions "
                "of text, which are missing; pass position_ids of the text, [rows, time], or prepend them as the first "
                "of 4 sections"
            )
        return given
    keys = [name for name in inspect.signature(rope).parameters if batch.get(name) is not None]
    has_images = any(batch.get(key) is not None for both in _INPUTS.values() for key in both)
    if not has_images or (given is None and not always):
        return given
    arguments = {name: batch[name] for name in keys}
    if given is None:
        return _sections(rope, arguments)
    if types is None or "attention_mask" not in inspect.signature(rope).parameters:
        raise ValueError(
            f"position_ids is {list(given.shape)}, and the batch has images: {kind} does not compute the positions of "
            "images from mm_token_type_ids; pass position_ids of text and images, [4, rows, time]"
        )
    ids: Tensor = batch["input_ids"]
    text = given.expand(ids.shape)
    documents = packed_documents(text) or ((ids.shape[1],),)
    lengths = [length for row in documents * (len(ids) // len(documents)) for length in row]
    # The model counts from 0 in each row, so each document becomes a row. Documents of text have positions already,
    # and padding may have as many documents as tokens.
    starts = [0, *accumulate(lengths)]
    counts = [0, *types.ne(0).flatten().cumsum(0).tolist()]
    spans = [(a, b) for a, b in pairwise(starts) if counts[b] > counts[a]]
    if not spans:
        raise ValueError(f"{TYPES[0]} is 0 for all tokens, and the batch has images: {_RULE}")
    rows: dict[str, Tensor] = {
        name: pad_sequence([x.flatten()[a:b] for a, b in spans], batch_first=True)
        for name, x in (("input_ids", ids), (TYPES[0], types), ("attention_mask", torch.ones_like(ids)))
    }
    found = _sections(rope, arguments | rows)
    positions = text.flatten().expand(1 + len(found), -1).clone()
    for (start, stop), row in zip(spans, found.unbind(1), strict=True):
        positions[1:, start:stop] = row[:, : stop - start]
    return positions.view(-1, *ids.shape)


def _sections(rope: Any, arguments: dict[str, Any]) -> Tensor:
    """Return the positions [sections, rows, time] that a model computes from the grids of images."""
    try:
        sections: Tensor = rope(**arguments)[0]
    except StopIteration:  # which would end the data of a pipeline without an error
        raise ValueError(f"{TYPES[0]} marks more images or videos than the batch has grids: {_RULE}") from None
    return sections


def _restarts(times: Tensor, types: Tensor | None) -> bool:
    """Return whether positions in time, [rows, time], begin again; those of an image or video never decrease."""
    change = times.diff(dim=1)
    begins = change < 0
    if types is not None:
        begins |= (change == 0) & (types[:, 1:] == 0)  # the tokens of an image share a position
    return bool(begins.any())
