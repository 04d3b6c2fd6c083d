"""Models without a plan: their stages are found by running them, or they are refused with the reason."""

import copy

import pytest
import torch
from torch import nn

from par_pipeline import build_model_stages, build_stage, schedule
from par_pipeline.stages.twins import EMBEDS, TOWER, split
from par_testing import for_each

WIDTH, WORDS = 6, 11


class Layer(nn.Linear):
    kind = "full"

    def forward(self, hidden_states, mask, ids=None):
        del ids
        return super().forward(hidden_states).tanh() * mask


class Decoder(nn.Module):
    """With learned positions, a shared mask, and names of its own. Subclasses change one thing each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(4))
        self.last_norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids=None, inputs_embeds=None):
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        x = start = x + self.places(torch.arange(x.shape[1]))
        masks = {"full": torch.ones(x.shape[1], 1) / 2}
        for number, block in enumerate(self.blocks):
            x = self.step(block, x, masks[block.kind], input_ids, number)
        return (self.finish(self.last_norm(x), start, input_ids),)

    def step(self, block, x, mask, ids, number):
        del ids, number
        return block(x, mask)

    def finish(self, x, start, ids):
        del start, ids
        return self.out(x)


class Pairs(Decoder):
    """The layers return a tuple of two, and the model uses the first."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, output: (output, None))

    def step(self, block, x, mask, ids, number):
        return super().step(block, x, mask, ids, number)[0]


class HandsOn(Decoder):
    def __init__(self):
        super().__init__()
        self.before = None

    def step(self, block, x, mask, ids, number):
        x, self.before = block(x, mask, self.before if number else None)
        return x


class ReadsIds(Decoder):
    def step(self, block, x, mask, ids, number):
        return block(x, mask, ids)


class Scales(Decoder):
    def step(self, block, x, mask, ids, number):
        return block(x * 2, mask)


class Backwards(Decoder):
    def step(self, block, x, mask, ids, number):
        return super().step(self.blocks[3 - number], x, mask, ids, number)


class NormsEach(Decoder):
    def step(self, block, x, mask, ids, number):
        self.last_norm(x)
        return block(x, mask)


class Skips(Decoder):
    def finish(self, x, start, ids):
        return self.out(x + start)


class ReadsMask(Decoder):
    """The mask comes from the ids, as it does if padding is read from them."""

    def step(self, block, x, mask, ids, number):
        return block(x, mask if ids is None else mask * (ids != 0)[..., None])


class TakesIds(Decoder):
    def forward(self, input_ids=None, **_):
        return super().forward(input_ids, self.words(input_ids) * (1 + 0 * input_ids.shape[0]))


class NoLayers(nn.Linear):
    pass


REFUSED = {
    HandsOn: "a layer receives more than hidden states from the layer before",
    ReadsIds: "on the middle stage, layer 1 receives another 'argument 2'",
    ReadsMask: "on the middle stage, layer 1 receives another 'argument 1'",
    Scales: "the model changes hidden states between them",
    Backwards: "they do not run once each, in their order",
    NormsEach: "'last_norm' runs between them, or before and after them",
    Skips: "the last stage returns other values than the full model",
}


def stages_of(model, ranks):
    return [build_stage(model, schedule("1f1b", ranks, ranks), rank)[0] for rank in range(ranks)]


@for_each(kind=[Decoder, Pairs], ranks=[1, 2, 4])
def test_stages_of_a_model_without_a_plan_equal_the_model(kind, ranks):
    model = kind()
    whole, ids = copy.deepcopy(model), torch.randint(WORDS, (3, 5))
    x = ids
    for stage in stages_of(model, ranks):
        x = stage(x)
    expected = whole(ids)[0]
    assert torch.equal(x, expected)
    x.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_stages_of_a_model_without_a_plan_split_its_parameters():
    names = [{name for name, _ in stage.named_parameters()} for stage in stages_of(Decoder().to("meta"), 2)]
    assert names[0] & names[1] == set()
    assert {name.partition(".")[0] for name in names[0]} == {"words", "places", "blocks"}
    assert {name.partition(".")[0] for name in names[1]} == {"blocks", "last_norm", "out"}


class Embeddings(nn.Module):
    """Words and positions in one module, as BERT has them."""

    def __init__(self, words, places):
        super().__init__()
        self.words, self.places = words, places

    def forward(self, input_ids=None, inputs_embeds=None):
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        return x + self.places(torch.arange(x.shape[1]))


class Tied(Decoder):
    def __init__(self):
        super().__init__()
        self.out.weight = self.words.weight
        self.table = Embeddings(self.words, self.places)
        out = self.out
        del self.words, self.places, self.out
        self.out = out  # behind the table, which then gives the weight its name

    def forward(self, input_ids=None, inputs_embeds=None):
        x = self.table(input_ids=input_ids, inputs_embeds=inputs_embeds)
        for block in self.blocks:
            x = block(x, torch.ones(x.shape[1], 1))
        return (self.out(self.last_norm(x)),)


def test_tied_weight_inside_a_module_of_the_first_stage_has_one_name():
    model = Tied()
    first, last = (build_model_stages(model, schedule("1f1b", 2, 2), rank) for rank in range(2))
    assert "table.words.weight" in dict(first.named_parameters())
    assert dict(last.named_parameters())["table.words.weight"] is model.out.weight
    ids = torch.randint(WORDS, (3, 5))
    (one,), (other,) = first.runners(), last.runners()
    assert torch.equal(other(one(ids)), model(ids)[0])


@for_each(kind=REFUSED)
def test_stages_that_would_compute_other_values_are_refused(kind):
    model = kind()
    before = list(model.named_modules())
    with pytest.raises(
        TypeError, match=rf"{kind.__name__} has no complete _pp_plan.*'blocks' cannot.*: {REFUSED[kind]}"
    ):
        stages_of(model, 2)
    assert list(model.named_modules()) == before
    assert not hasattr(model, "_pp_plan")


def test_stages_of_a_model_without_layers_or_embeds_are_refused():
    with pytest.raises(TypeError, match=r"NoLayers has no _pp_plan and no nn\.ModuleList of layers"):
        stages_of(NoLayers(2, 2), 2)
    with pytest.raises(
        TypeError, match=r"stage, its code lacks values, .* \(test_trial.py:\d+ raises AttributeError\)"
    ):
        stages_of(TakesIds(), 2)


class Deep(nn.Module):
    """It changes hidden states behind each layer if it receives an image, and computes positions of images."""

    def __init__(self):
        super().__init__()
        self.embed, self.tower = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def get_rope_index(self):
        raise AssertionError("a stage without ids cannot")

    def forward(self, input_ids=None, inputs_embeds=None, pixel_values=None, position_ids=None):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x) if pixel_values is None else layer(x) + self.tower(pixel_values)
        return (x,)


def test_stages_of_images_raise_for_what_they_lack():
    plan = {"embed": (["input_ids"], [EMBEDS]), "tower": (TOWER, ["image_features"])}
    plan["layers"] = (["hidden_states"], ["hidden_states"])
    first, last = split(Deep(), plan, "layers", [range(1), range(1, 3)])
    ids, image = torch.ones(2, 5, dtype=torch.int64), torch.ones(4)
    hidden = first(ids)
    with pytest.raises(
        TypeError, match=r"Deep changes hidden states between two layers of a later stage, .* fewer stages"
    ):
        first(ids, pixel_values=image)
    assert "tower.weight" not in dict(last.named_parameters())
    with pytest.raises(ValueError, match=r"pixel_values without position_ids: .* pass the position_ids that get_rope"):
        last(hidden, pixel_values=image)
    assert torch.equal(last(hidden, pixel_values=image, position_ids=ids), last(hidden))
