"""Positions of text and images in packed rows."""

import pytest
import torch
from torch import nn

from par_layers.pretrained.images import image_positions


class Seeing(nn.Module):
    """A model that counts text up, and holds the time still inside of an image, as Qwen-VL does."""

    def get_rope_index(self, input_ids, mm_token_type_ids, image_grid_thw=None, attention_mask=None):
        positions = torch.zeros(3, *input_ids.shape, dtype=torch.long)
        grids = iter(image_grid_thw.tolist())
        for row, types in enumerate(mm_token_type_ids.tolist()):
            length = len(types) if attention_mask is None else int(attention_mask[row].sum())
            column = now = 0
            while column < length:
                if not types[column]:
                    positions[:, row, column] = now
                    column, now = column + 1, now + 1
                    continue
                _, height, width = next(grids)
                for place in range(height * width):
                    there = torch.tensor([now, now + place // width, now + place % width])
                    positions[:, row, column + place] = there
                column, now = column + height * width, now + max(height, width)
        return positions, None


def batch():
    """Two rows: an image of 1 x 2 and one of 2 x 2 in documents of a row, and text behind an image of 1 x 1."""
    types = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0, 0]])
    text = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 0, 0, 0, 0]])
    grids = torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 1]])
    pixels = torch.zeros(7, 48)
    return {
        "input_ids": types,
        "mm_token_type_ids": types,
        "image_grid_thw": grids,
        "pixel_values": pixels,
        "position_ids": text,
    }


def test_image_positions_restart_at_each_document():
    found = image_positions(Seeing(), batch(), always=False)
    assert found.tolist() == [
        [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 0, 0, 0, 0]],
        [[0, 1, 1, 3, 0, 1, 1, 1, 1], [0, 1, 2, 0, 1, 0, 0, 0, 0]],
        [[0, 1, 1, 3, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 0, 0, 0, 0]],
        [[0, 1, 2, 3, 0, 1, 2, 1, 2], [0, 1, 2, 0, 1, 0, 0, 0, 0]],
    ]
    # The positions of one row apply to all rows, and rows of one document have images, too.
    rows = batch() | {"position_ids": torch.arange(9)[None]}
    alone = Seeing().get_rope_index(rows["input_ids"], rows["mm_token_type_ids"], rows["image_grid_thw"])[0]
    assert image_positions(Seeing(), rows, always=False)[1:].equal(alone)


def test_image_positions_are_left_to_the_model_unless_asked_for():
    without = {key: x for key, x in batch().items() if key != "position_ids"}
    assert image_positions(Seeing(), without, always=False) is None
    assert image_positions(Seeing(), without, always=True).shape == (3, 2, 9)
    text = {key: batch()[key] for key in ("input_ids", "position_ids")}
    assert image_positions(Seeing(), text, always=True) is text["position_ids"]
    assert image_positions(nn.Linear(1, 1), batch(), always=True).equal(batch()["position_ids"])
    sections = image_positions(Seeing(), batch(), always=False)
    assert image_positions(Seeing(), batch() | {"position_ids": sections}, always=True) is sections


def test_image_positions_that_restart_without_text_raise():
    sections = image_positions(Seeing(), batch(), always=False)[1:]
    for given in (batch(), {key: batch()[key] for key in ("input_ids",)}):
        with pytest.raises(ValueError, match=r"position_ids is \[3, 2, 9\] and restarts in a row: Seeing separates"):
            image_positions(Seeing(), given | {"position_ids": sections}, always=False)
    one = image_positions(Seeing(), batch() | {"position_ids": None}, always=True)  # one document in each row
    assert image_positions(Seeing(), batch() | {"position_ids": one}, always=False) is one
    # Documents of one token have equal times, as the tokens of an image have.
    single = torch.zeros(3, 2, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="restarts in a row"):
        image_positions(Seeing(), batch() | {"position_ids": single}, always=False)


def test_image_positions_that_need_more_than_types_raise():
    without = {key: x for key, x in batch().items() if key != "mm_token_type_ids"}
    with pytest.raises(
        ValueError, match=r"position_ids is \[2, 9\], and the batch has images: Seeing does not compute"
    ):
        image_positions(Seeing(), without, always=False)


def test_image_positions_whose_types_do_not_fit_raise():
    fewer = batch() | {"image_grid_thw": batch()["image_grid_thw"][:2]}
    for given in (fewer, fewer | {"position_ids": None}):
        with pytest.raises(ValueError, match="mm_token_type_ids marks more images or videos than the batch has grids"):
            image_positions(Seeing(), given, always=True)
    with pytest.raises(ValueError, match="mm_token_type_ids is 0 for all tokens, and the batch has images"):
        image_positions(Seeing(), batch() | {"mm_token_type_ids": torch.zeros(2, 9, dtype=torch.long)}, always=True)
