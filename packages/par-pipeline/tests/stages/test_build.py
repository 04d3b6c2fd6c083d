"""Stages out of lists, configs and models: the same layers, under the same names, on the rank that runs them."""

import pytest
import torch
from torch import nn

from par_pipeline import Lazy, build_stage, schedule

WIDTH = 6


class Noted(nn.Linear):
    """Counts how many are made."""

    made = 0

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        Noted.made += 1


def stages_of(layers, name="1f1b", ranks=2, **options):
    """All stages, in order."""
    plan = schedule(name, ranks, 2)
    built = {}
    for rank in range(ranks):
        built.update(zip(plan.stage_of(rank), build_stage(layers, plan, rank, **options), strict=True))
    return [built[number] for number in range(plan.stages)]


def chained(stages, x):
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 2), ("1f1b", 3), ("interleaved", 2), ("zb_v", 2)])
def test_a_sequential_is_cut_without_new_names_or_parameters(name, ranks):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    stages = stages_of(model, name, ranks)
    x = torch.randn(3, WIDTH)
    assert torch.equal(chained(stages, x), model(x))
    found = {key: value for stage in stages for key, value in stage.named_parameters()}
    assert found == dict(model.named_parameters())


def test_a_layer_that_comes_again_runs_again():
    bend, mix = nn.GELU(), nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), bend, mix, bend, mix)
    x = torch.randn(3, WIDTH)
    for ranks in (1, 2, 3):
        stages = stages_of(model, ranks=ranks)
        assert [name for stage in stages for name, _ in stage._modules.items()] == ["0", "1", "2", "3", "4"]
        assert torch.equal(chained(stages, x), model(x))


def test_lazy_layers_are_built_on_their_rank_alone():
    layers = [Lazy(Noted, WIDTH, WIDTH) for _ in range(4)]
    Noted.made = 0
    (stage,) = build_stage(layers, schedule("1f1b", 4, 2), 2)
    assert Noted.made == 1
    assert list(dict(stage.named_parameters())) == ["2.weight", "2.bias"]


def weights(stages):
    return {key: value for stage in stages for key, value in stage.state_dict().items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_seed_gives_the_same_weights_however_the_layers_are_cut(ranks):
    layers = [Lazy(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    before = torch.get_rng_state()
    found = {
        key: value for stage in stages_of(layers, ranks=ranks, seed=3) for key, value in stage.state_dict().items()
    }
    assert torch.equal(before, torch.get_rng_state()), "torch's own generator is left alone"
    expected = weights(stages_of(layers, ranks=1, seed=3))
    assert all(torch.equal(found[key], each) for key, each in expected.items())
    assert not torch.equal(found["0.weight"], found["1.weight"])


def test_a_config_names_classes_of_torch_or_of_the_caller():
    config = [{"type": "Linear", "in_features": WIDTH, "out_features": 4}, {"type": nn.GELU}, {"type": "Mine", "n": 4}]
    stages = stages_of(config, types={"Mine": Scale})
    assert [type(layer).__name__ for stage in stages for layer in stage] == ["Linear", "GELU", "Scale"]
    assert chained(stages, torch.ones(2, WIDTH)).shape == (2, 4)


class Scale(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def forward(self, x):
        return self.n * x


def test_lazy_layers_are_balanced_by_their_parameters_without_memory():
    layers = [Lazy(nn.Linear, 4, 100), *(Lazy(nn.Linear, 4, 4) for _ in range(3))]
    plan = schedule("1f1b", 2, 2)
    sizes = [len(build_stage(layers, plan, rank, method="parameter")[0]) for rank in range(2)]
    assert sizes == [1, 3]
    huge = Lazy(nn.Linear, 1 << 20, 1 << 20)  # 4 TiB, were it there
    assert sum(each.numel() for each in huge.parameters()) == (1 << 40) + (1 << 20)


def test_whoever_counts_a_lazy_layer_s_parameters_makes_tensors_where_they_did():
    parameters = Lazy(nn.Linear, 2, 3).parameters()
    assert next(parameters).is_meta
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        ([{"type": "Liner2"}], ValueError, "layer 0 has type 'Liner2', which is none of torch.nn's"),
        ([{"type": "Module2", "n": 1}], ValueError, "give the class itself"),
        ([3], TypeError, "layer 0 is a int; give a module, a Lazy"),
        ([nn.Linear(1, 1)], ValueError, "1 layers cannot be cut into 2 parts"),
        (nn.Linear(1, 1), TypeError, "Linear has no _pp_plan and no nn.ModuleList"),
        ([Lazy(dict), Lazy(dict)], TypeError, "gives a dict; a layer is an nn.Module"),
    ],
)
def test_what_is_no_layer_is_named(layers, error, text):
    with pytest.raises(error, match=text):
        stages_of(layers)


def test_a_lazy_layer_says_what_it_would_be():
    assert repr(Lazy(nn.Linear, 2, out_features=3)) == "Lazy(Linear, 2, out_features=3)"
    with pytest.raises(TypeError, match="which cannot be called"):
        Lazy("Linear")
