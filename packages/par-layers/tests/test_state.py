import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import sharding_of
from par_layers import initialize, layer_set
from par_layers.examples import GPT

from .helpers import FROM_4, filled, integers, modes, whole_state

SQUARES = [{"mode": "2d"}, {"mode": "2.5d", "depth": 1}, {"mode": "2.5d", "depth": 4}]
ONE_D = [{"mode": "1d"}, {"mode": "1d", "sequence_parallel": True}]
OTHERS = {4: ONE_D + SQUARES, 8: [ONE_D[1], {"mode": "2.5d", "depth": 2}, {"mode": "3d"}]}


class Model(nn.Module):
    """A GPT, and the kinds of parameter that it lacks; vocabularies that do not divide."""

    def __init__(self, layers):
        super().__init__()
        self.gpt = GPT(layers, 29, 32, 8, 1, 12)
        self.norm = layers.RMSNorm(32)
        self.patches = layers.PatchEmbedding(2, 3, 32)
        self.head = layers.Classifier(32, 5)
        self.table = layers.VocabEmbedding(13, 32, padding_id=12)


@torch.no_grad()
def load(model, state):
    """Gives every shard its part of whole tensors."""
    for name, parameter in model.named_parameters():
        for box in sharding_of(parameter).boxes:
            box.of(parameter).copy_(state[name][box.slices])


@pytest.mark.ranks(FROM_4)
def test_the_state_of_one_mode_loads_into_the_next():
    configs = OTHERS[dist.get_world_size()]
    one = filled(Model(layer_set(None)), torch.float32)
    ids, target = integers(29, 8, 8), integers(29, 8, 8, seed=8)
    expected = one.gpt.loss(ids, target)
    shapes = {name: tuple(parameter.shape) for name, parameter in one.named_parameters()}
    state = dict(one.named_parameters())
    for mode in modes(configs):  # from one device to the first mode, from there to the second, and so on
        model = Model(mode.layers)
        assert {name: sharding_of(parameter).shape for name, parameter in model.named_parameters()} == shapes
        initialize(model, seed=4)
        load(model, state)
        torch.testing.assert_close(model.gpt.loss(ids, target), expected)
        state = whole_state(model)
        for name, parameter in one.named_parameters():
            assert torch.equal(state[name], parameter), name
