"""The table that `saved` prints."""

import torch

from par_recompute import Drop, checkpoint_layers, measure, saved

from .models import Block


def test_a_report_is_a_table():
    layers = torch.nn.Sequential(Block(), Block())
    checkpoint_layers(layers, Drop(lambda name, module: name == "0.act"))
    for _ in range(2):
        layers(torch.randn(2, 15, 32, requires_grad=True)).sum().backward()
    assert str(saved(layers)).splitlines() == [
        "layer  predicted  counted  again",
        "0      47.0 kB    47.0 kB  act",
        "1      62.4 kB    62.4 kB  nothing",
        "all    109 kB     109 kB",
    ]


def test_a_table_says_what_is_saved_and_what_can_be_made_again():
    lines = str(measure(Block(), torch.randn(2, 15, 32, requires_grad=True))).splitlines()
    assert lines[0].split() == ["module", "GFLOPs", "saves", "again?"]
    assert lines[1].split() == ["(layer)", "0.001", "58.6", "kB", "yes"]
    assert ["act", "0.000", "15.4", "kB", "yes"] in [line.split() for line in lines]
    assert lines[-1] == "all together 62.4 kB"
