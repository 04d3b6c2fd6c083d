"""Which modules are layers."""

import pytest
from torch import nn

from par_recompute import checkpoint_layers, saved

from .models import GPT, Block, Llama, ViT


def names(model, layers="auto"):
    checkpoint_layers(model, "layers", layers=layers)
    return [name for name, module in model.named_modules() if "par_recompute_layer" in module.__dict__]


@pytest.mark.parametrize(
    ("model", "expected"), [(GPT, "h.0 h.1 h.2"), (ViT, "blocks.0 blocks.1"), (Llama, "layers.0 layers.1")]
)
def test_items_of_containers_are_layers(model, expected):
    assert names(model()) == expected.split()


def test_containers_in_containers_are_gone_through_and_single_modules_left_out():
    blocks = nn.ModuleList([nn.Sequential(Block(8, 1), Block(8, 1)), Block(8, 1)])
    model = nn.ModuleDict({"embed": nn.Embedding(3, 8), "h": blocks, "norm": nn.LayerNorm(8)})
    assert names(model) == ["h.0", "h.1"]


def test_layers_are_named_by_a_function_or_a_list():
    assert names(GPT(), lambda module: isinstance(module, Block)) == ["h.0", "h.1", "h.2"]
    model = GPT()
    assert names(model, [model.h[2], model.h[0], model.h[0]]) == ["h.0", "h.2"]
    assert saved(model).lines == ()


def test_a_module_that_stands_twice_is_one_layer():
    block = Block(8, 1)
    assert names(nn.Sequential(block, block)) == ["0"]


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ("all", ValueError, "layers is 'all'; give 'auto', a function of a module, or a list of modules"),
        (3, TypeError, "layers is 3; give 'auto', a function of a module, or a list of modules"),
        ([Block()], ValueError, "layers has a Block that is not in the model; give modules of its own"),
        ([], ValueError, "and the GPT has no such module; give a list of the modules"),
        (lambda module: isinstance(module, nn.Linear | Block), ValueError, "'h.0.attn.qkv' lies within layer 'h.0'"),
    ],
)
def test_what_is_no_layer_is_refused(layers, error, message):
    with pytest.raises(error, match=message):
        checkpoint_layers(GPT(), "layers", layers=layers)
