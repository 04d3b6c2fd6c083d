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
        with pytest.raises(
            ValueError, match="given an activation of another layout than it takes: cut by batch over weight x input"
        ):
            second(torch.nn.functional.gelu(first(x)))
        with pytest.raises(ValueError, match="given an activation of another layout than it takes"):
            second(x=first(x))
        assert torch.equal(back(x=first(x=x)), back(first(x)))
        with pytest.raises(ValueError, match="mixes activations"):
            x + first(x)
        with pytest.raises(ValueError, match="cross_entropy was given"):
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
                model = GPT(layer_set("auto", groups, debug=debug), 30, 16, 4, 1, 12, tied=True)
                initialize(model, seed=3)
                loss = model.loss(ids, ids)
                loss.backward()
                losses.append((loss.item(), model.tokens.weight.grad.sum().item()))
            assert losses[0] == losses[1]


@pytest.mark.ranks(2)
def test_layers_of_two_sets_are_not_mixed():
    with ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)) as groups:
        one, other = layer_set("auto", groups, debug=True), layer_set("auto", groups, debug=True)
        first, second = one.LayerNorm(4), other.LayerNorm(4)
        for layer in (first, second):
            initialize(layer, 0)
        with pytest.raises(ValueError, match="two layer sets"):
            second(first(torch.randn(2, 3, 4)))
        with pytest.raises(ValueError, match="the shared table is of another layer set"):
            one.VocabClassifier(4, 8, tied=other.VocabEmbedding(8, 4))


@pytest.mark.ranks(4)
def test_an_activation_of_the_wrong_shape_names_the_layout_that_was_expected():
    with ProcessGroups(Topology.from_config({"tensor": {"size": 4, "mode": "2d"}}, 4)) as groups:
        layers = layer_set("auto", groups)
        expected = (
            r"takes activations cut by batch over row, features over col, here \[..., 4\], but was given \[2, 3, 8\]"
        )
        for layer in (
            layers.ColumnLinear(8, 8),
            layers.RowLinear(8, 8),
            layers.LayerNorm(8),
            layers.VocabClassifier(8, 8),
            layers.Classifier(8, 3),
        ):
            with pytest.raises(ValueError, match=expected):
                layer(torch.randn(2, 3, 8))
