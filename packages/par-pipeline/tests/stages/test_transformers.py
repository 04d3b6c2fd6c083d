"""A model that says how it may be cut, and does more than its layers do."""

import copy
import weakref

import pytest
import torch
from torch import nn

from par_pipeline import build_stage, schedule

WIDTH, WORDS, LAYERS = 6, 11, 4


class Layer(nn.Linear):
    def forward(self, hidden_states, position=None):
        return super().forward(hidden_states).tanh() + position


class Inner(nn.Module):
    """As some models do: scales the embeddings, and drops some of them."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids=None, inputs_embeds=None):
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = nn.functional.dropout(embedded * 12.0, 0.5, training=self.training)
        position = torch.arange(embedded.shape[1])[:, None] / 8
        for layer in self.layers:
            hidden_states = layer(hidden_states, position=position)
        return self.norm(hidden_states)


class Scaling(nn.Module):
    """As some models do: scales and bends the logits."""

    _pp_plan = {  # noqa: RUF012 - as transformers has it
        "model.embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "model.layers": (["hidden_states"], ["hidden_states"]),
        "model.norm": (["hidden_states"], ["hidden_states"]),
        "lm_head": (["hidden_states"], ["logits"]),
    }

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = Inner()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.double()

    def forward(self, input_ids=None, inputs_embeds=None, *, use_cache=True):
        assert not use_cache
        return ((self.lm_head(self.model(input_ids, inputs_embeds)) / 3).tanh() * 3,)


def stages_of(model, ranks):
    return [build_stage(model, schedule("1f1b", ranks, 2), rank)[0] for rank in range(ranks)]


def chained(stages, x):
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_a_model_does_around_its_layers_is_done_once(ranks):
    model = Scaling()
    whole = copy.deepcopy(model)
    tokens = torch.randint(WORDS, (3, 5))
    stages = stages_of(model, ranks)
    torch.manual_seed(1)
    found = chained(stages, tokens)
    torch.manual_seed(1)
    expected = whole(tokens, use_cache=False)[0]
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert chained([each.eval() for each in stages], tokens).equal(whole.eval()(tokens, use_cache=False)[0])


def test_names_are_those_of_the_whole_and_a_copy_is_one_of_its_own():
    model = Scaling()
    stages = stages_of(model, 3)
    names = [set(dict(stage.named_parameters())) for stage in stages]
    assert set.union(*names) == set(dict(model.named_parameters()))
    assert sum(map(len, names)) == len(set.union(*names))
    tokens = torch.randint(WORDS, (3, 5))
    expected = chained([each.eval() for each in stages], tokens)
    again = copy.deepcopy(stages)
    for each in model.parameters():
        each.data.zero_()
    assert torch.equal(chained(again, tokens), expected)


def test_a_head_that_only_the_class_has_a_plan_for_is_on_the_last_stage_alone():
    """As transformers 5.4 has it: the plan of an instance is that of the model inside."""
    model = Scaling()
    model._pp_plan = {name: plan for name, plan in Scaling._pp_plan.items() if name != "lm_head"}
    heads = [[name for name, _ in stage.named_parameters() if "lm_head" in name] for stage in stages_of(model, 3)]
    assert heads == [[], [], ["lm_head.weight"]]


class Pair(Layer):
    def forward(self, hidden_states, position=None):
        return super().forward(hidden_states, position), position


def test_cut_layers_that_return_two_values_are_refused():
    model = Scaling()
    model.model.layers[1] = Pair(WIDTH, WIDTH)
    with pytest.raises(TypeError, match="Pair of Scaling returns more than hidden states to the next layer"):
        stages_of(model, 2)


def test_cut_plan_that_names_an_absent_module_finds_another():
    model = Scaling()
    model._pp_plan = {"model.towers": (["hidden_states"], ["hidden_states"])}
    assert len(stages_of(model, 2)) == 2
    assert model._pp_plan.keys() == Scaling._pp_plan.keys()


def test_a_stage_keeps_nothing_of_what_went_through_it_even_if_it_raises():
    first, second, _ = stages_of(Scaling(), 3)
    given = torch.ones(2, 5, WIDTH, dtype=torch.float64)
    for stage, x in ((first, torch.zeros(2, 5, dtype=torch.int64)), (second, given)):
        kept = weakref.ref(stage(x))
        assert kept() is None
    second.model.layers[1].weight.data = torch.ones(1, 1)
    kept, has_raised = weakref.ref(given), False
    try:
        second(given)
    except RuntimeError:
        has_raised = True
    del given, x
    assert has_raised
    assert kept() is None


class Towered(Scaling):
    """With a head of its own beside what the plan names, or with a tower inside the named part."""

    def __init__(self, where):
        super().__init__()
        if where == "score":
            self.score = nn.Sequential(nn.Linear(WIDTH, 2))
        elif where == "model.tower":
            self.model.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        else:
            self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("where", ["score", "model.tower", ""])
def test_parameters_that_the_plan_does_not_name_are_refused(where):
    model = Towered(where)
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(TypeError, match=f"has parameters in '{where}' .* no stage would run it"):
        stages_of(model, 2)
    assert [name for name, _ in model.named_modules()] == names
