import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_layers.examples import GPT


@pytest.mark.ranks(8)
def test_column_after_column_is_caught_in_three_dimensions():
    with ProcessGroups(Topology.from_config({"tensor": {"size": 8, "mode": "3d"}}, 8)) as groups:
        layers = layer_set("3d", groups, debug=True)
        first, second, back = layers.ColumnLinear(8, 8), layers.ColumnLinear(8, 8), layers.RowLinear(8, 8)
        for name, layer in (("first", first), ("second", second), ("back", back)):
            initialize(layer, 0, name)
        x = layers.split(torch.randn(4, 3, 8))
        with pytest.raises(ValueError, match=r"takes activations in Layout\(batch=\('weight', 'input'\)"):
            second(torch.nn.functional.gelu(first(x)))
        with pytest.raises(ValueError, match="mixes activations"):
            x + first(x)
        with pytest.raises(ValueError, match="cross_entropy takes activations"):
            layers.cross_entropy(x, torch.zeros(4, 3, dtype=torch.int64), classes=8)
        assert layers.gather(x + back(first(x))).shape == (4, 3, 8)


@pytest.mark.ranks(4)
def test_a_right_model_runs_as_without_debugging():
    ids = torch.arange(4 * 8).reshape(4, 8) % 30
    for tensor in ({"mode": "1d"}, {"mode": "1d", "sequence_parallel": True}, {"mode": "2d"}):
        topology = Topology.from_config({"tensor": {"size": dist.get_world_size(), **tensor}}, 4)
        with ProcessGroups(topology) as groups:
            losses = []
            for debug in (False, True):
                model = GPT(layer_set("auto", groups, debug=debug), 30, 16, 4, 2, 12, tied=True)
                initialize(model, seed=3)
                loss = model.loss(ids, ids)
                loss.backward()
                losses.append((loss.item(), model.tokens.weight.grad.sum().item()))
            assert losses[0] == losses[1]
