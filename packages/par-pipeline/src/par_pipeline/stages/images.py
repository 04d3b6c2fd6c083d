"""A trial of the stages of a model that reads images: do its layers receive the same arguments on every stage?

The first stage has the encoder of images, and later stages receive hidden states. So a model can be split only if
nothing else depends on the images, such as a mask or positions that its code computes from pixels or token ids.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .trial import CallRecorder, kinds_of_stages, line_of, small_copy
from .twins import EMBEDS, TOWER, Absent, StagePlan, split


def problem_of_images(model: nn.Module, plan: StagePlan, layers: str) -> str:
    """Run a small copy of a model with an image, as a whole and as its stages.

    Args:
        model: A Hugging Face Transformers model on any device, also meta. It does not change.
        plan: Plan of its stages, with the encoder of images.
        layers: Name of its list of layers.

    Returns:
        The difference between the stages and the full model; empty if there is none.
    """
    try:
        with torch.no_grad():
            return _ImageTrial(model, plan, layers).problem()
    except Exception as error:  # the code of a model may raise anything
        return f"its code refuses the image of the trial ({line_of(error, model)} raises {type(error).__name__})"


class _ImageTrial:
    """A small copy of a model with identities in place of all layers, and an image for it.

    Args:
        model: The model.
        plan: Plan of its stages.
        layers: Name of its list of layers.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, layers: str) -> None:
        self._plan, self._layers = plan, layers
        self._seen = CallRecorder()
        own = self._seen.in_place_of(model.get_submodule(layers), len(plan[layers][1]))
        self._copy: Any = small_copy(model, layers, own)
        for name, (takes, gives) in plan.items():
            if takes == TOWER:  # the features may have any values, since only what else reaches the layers is compared
                _skip_blocks(self._copy.get_submodule(name))
            elif name != layers and gives != [EMBEDS]:  # logits over a large vocabulary would take gigabytes
                parent, _, child = name.rpartition(".")
                setattr(self._copy.get_submodule(parent), child, Absent())
        self._ids, self._keywords = _example(self._copy)

    def problem(self) -> str:
        """Return what differs; empty if nothing does."""
        self._copy(input_ids=self._ids, use_cache=False, **self._keywords)
        whole = self._seen.calls
        # What par-train passes to every stage of such a model.
        keywords = {**self._keywords, **_positions(self._copy, self._ids, self._keywords)}
        for name, run in kinds_of_stages(self._seen.count):
            self._seen.calls = []
            (stage,) = split(self._copy, self._plan, self._layers, [run])
            stage(self._ids if name == "first" else self._seen.hidden, **keywords)
            if difference := self._seen.difference(whole[run.start : run.stop]):
                return f"on the {name} stage, with an image, {difference}"
        return ""


def _skip_blocks(tower: nn.Module) -> None:
    """Replace the largest list of layers in an encoder by identities: at real sizes they would compute for minutes."""
    lists = [each for each in tower.modules() if isinstance(each, nn.ModuleList)]
    if lists:
        blocks = max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))
        for block in blocks.children():
            # The same objects: transformers collects hidden states behind modules of their class.
            block.__dict__["forward"] = lambda hidden_states, *_, **__: hidden_states


def image_inputs(
    model: Any, count: int, size: tuple[int, int] | None = None, device: str | None = None
) -> dict[str, Tensor]:
    """Return pixels of images, with random values, and their grid, as the processor of a model returns them.

    Args:
        model: A Hugging Face Transformers model with `get_image_features`.
        count: Number of images.
        size: Height and width of an image in pixels, after the processor has resized it. Default: the size in the
            model's configuration, or the smallest that is merged to 2 x 2 tokens if the model takes any size.
        device: Device of the pixels. Default: torch's.

    Raises:
        AttributeError: The configuration lacks a size.
        ValueError: The size is not a multiple of the patches, or the model takes another size only.
    """
    vision: Any = model.config.vision_config
    channels: int = vision.num_channels if hasattr(vision, "num_channels") else getattr(vision, "in_channels", 3)
    if "image_grid_thw" not in inspect.signature(model.forward).parameters:
        own: Any = vision.image_size
        fixed = (own, own) if isinstance(own, int) else tuple(own)
        if size is not None and size != fixed:
            raise ValueError(
                f"image_size={size}: the encoder of {type(model).__name__} takes images of {fixed} only; leave "
                "image_size out"
            )
        return {"pixel_values": torch.rand(count, channels, *fixed, device=device)}
    # The pixels are patches, and the grid has their numbers in time, height and width.
    patch, merge = vision.patch_size, vision.spatial_merge_size
    height, width = (2 * merge * patch,) * 2 if size is None else size
    if height % (merge * patch) or width % (merge * patch) or min(height, width) < 1:
        raise ValueError(
            f"image_size={size}: {type(model).__name__} merges patches of {patch} pixels by {merge} x {merge}; pass "
            f"multiples of {merge * patch} pixels"
        )
    grid = [1, height // patch, width // patch]
    features = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
    pixels = torch.rand(count * grid[1] * grid[2], features, device=device)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid] * count)}


def _example(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return token ids [2, time] with the placeholders of one image, and the other arguments of a forward.

    Raises:
        AttributeError: The configuration lacks a size.
    """
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    given = image_inputs(model, 1)
    if "image_grid_thw" in given:
        count = 4
    else:
        # The number of placeholders depends on the projector, so it is counted.
        features = model.get_image_features(**given, return_dict=True).pooler_output
        parts = [features] if isinstance(features, Tensor) else list(features)
        count = sum(each.numel() // each.shape[-1] for each in parts)
    # Older configurations name the id of a placeholder an index.
    token = getattr(config, "image_token_id", None)
    ids = torch.full((2, count + 3), min(2, token or 2) - 1)
    ids[0, 1 : count + 1] = config.image_token_index if token is None else token
    types = torch.zeros_like(ids)
    types[0, 1 : count + 1] = 1
    given.update({name: types for name in ("token_type_ids", "mm_token_type_ids") if name in takes})
    return ids, given


def _positions(model: nn.Module, ids: Tensor, keywords: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the positions of tokens and images, which only a stage with token ids could compute."""
    for module in model.modules():
        rope: Any = getattr(module, "get_rope_index", None)
        if rope is not None:
            given = {"input_ids": ids, **keywords}
            names = [name for name in inspect.signature(rope).parameters if name in given]
            return {"position_ids": rope(**{name: given[name] for name in names})[0]}
    return {}
