"""Models whose layers keep less: the same losses and gradients, bytes as predicted, and what is refused."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from par_recompute import Drop, Keep, Layers, Ops, ToHost, checkpoint_layers, frontier, kept, measure, saved
from par_recompute.plan.frontier import FLOPS_PER_BYTE
from par_recompute.run.planner import RATE

from .models import MODELS, Block
from .training import Living, equal, flops, handed_on, train

POLICIES = {
    "cheap": "cheap",
    "layers": "layers",
    "Layers(2)": Layers(2),
    "Drop": Drop(lambda name, module: True),
    "Keep half": Keep(0.5),
    "Keep bytes": Keep("100KB"),
    "Ops": Ops([torch.ops.aten.mm.default, torch.ops.aten.addmm.default]),
}


@pytest.fixture(scope="module")
def reference():
    return {name: train(*make()) for name, make in MODELS.items()}


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_same_bits(name, policy, example, reference):
    model, inputs = MODELS[name]()
    names, state = list(dict(model.named_modules())), list(model.state_dict())
    assert checkpoint_layers(model, POLICIES[policy], example=inputs if example else None) is model
    assert equal(train(model, inputs), reference[name])
    assert (list(dict(model.named_modules())), list(model.state_dict())) == (names, state)


@pytest.mark.parametrize("policy", ["cheap", "Drop", "Keep half", "Keep bytes"])
@pytest.mark.parametrize("name", MODELS)
def test_what_layers_keep_is_what_was_predicted(name, policy):
    model, inputs = MODELS[name]()
    with handed_on(model) as before:
        model(inputs).sum().backward()
    checkpoint_layers(model, POLICIES[policy], example=inputs)
    assert saved(model).lines == ()
    with handed_on(model) as after:
        loss = model(inputs).sum()
    report = saved(model)
    assert all(line.predicted == line.counted for line in report.lines)
    # Rotary positions are kept by every layer, and counted once.
    assert 0 <= report.predicted - report.counted <= (name == "llama") * 2 * 15 * 8 * 4
    assert report.counted < sum(after.values()) < sum(before.values())
    loss.backward()


def test_without_an_example_the_first_forward_keeps_the_inputs_alone():
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model, "cheap")
    model(inputs).sum().backward()
    first = saved(model)
    model(inputs).sum().backward()
    assert [line.dropped for line in first.lines] == [("",)] * 3
    assert [line.dropped for line in saved(model).lines] == [("act", "ln1", "ln2")] * 3
    h = 2 * 15 * 32 * 4
    assert [line.predicted for line in first.lines] == [line.counted for line in first.lines] == [h] * 3


@pytest.mark.parametrize("share", [0.07, 0.1, *(twentieth / 20 for twentieth in range(3, 21))])
def test_a_budget_is_kept(share):
    model, inputs = MODELS["gpt"]()
    everything = 3 * kept(measure(model.h[0], torch.randn(2, 15, 32, requires_grad=True)), ())
    checkpoint_layers(model, Keep(share), example=inputs)
    model(inputs).sum().backward()
    assert saved(model).counted <= share * everything
    assert saved(model).counted > share * everything - 0.4 * everything


def test_the_least_budget_is_enough_and_a_byte_less_names_it():
    model, inputs = MODELS["gpt"]()
    least = 3 * 2 * 15 * 32 * 4
    message = f"the budget is {least - 1} bytes .*, and {least} bytes .* are the least that these layers can keep"
    with pytest.raises(ValueError, match=message):
        checkpoint_layers(model, Keep(least - 1), example=inputs)
    checkpoint_layers(model, Keep(least), example=inputs)  # nothing was left of the first
    model(inputs).sum().backward()
    assert saved(model).counted == least


def test_within_a_budget_the_seconds_are_the_fewest_of_all_combinations():
    """Four layers of two kinds, which save different things; every choice of each, at 20 budgets."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), *(nn.Sequential(nn.LayerNorm(32), Block(), nn.SiLU()) for _ in "ab"))
    given = torch.randn(2, 15, 32, requires_grad=True)
    looked_at = copy.deepcopy(model)
    checkpoint_layers(looked_at, Keep(1.0), layers=list(looked_at), example=given)
    tables = [next(iter(layer.par_recompute_layer.known.seen.values())).table for layer in looked_at]
    frontiers = [frontier(table, RATE, bandwidth=RATE / FLOPS_PER_BYTE["cpu"]) for table in tables]
    every = [sum(kept(table, ()) for table in tables), sum(kept(table, {""}) for table in tables)]
    combinations = torch.zeros(1), torch.zeros(1)  # bytes and seconds, of all choices so far
    for choices in frontiers:
        sizes, seconds = (torch.tensor([choice[field] for choice in choices]).double() for field in (1, 2))
        combinations = (
            (combinations[0][:, None] + sizes).flatten(),
            (combinations[1][:, None] + seconds).flatten(),
        )
    for twentieth in range(20):
        budget = every[1] + (every[0] - every[1]) * twentieth // 19
        other = copy.deepcopy(model)
        checkpoint_layers(other, Keep(budget), layers=list(other), example=given)
        other(given).sum().backward()
        report = saved(other)
        assert report.counted == report.predicted <= budget
        again = [
            table if name == "" else table.modules[name]
            for line, table in zip(report.lines, tables, strict=True)
            for name in line.dropped
        ]
        seconds = sum((each.flops + each.moved * FLOPS_PER_BYTE["cpu"]) / RATE for each in again)
        best = float(combinations[1][combinations[0] <= budget].min())
        assert seconds == pytest.approx(best, rel=1e-9)  # sums in another order


class Stages(nn.ModuleList):
    """Layers of two stages, of which one call runs one."""

    def forward(self, ids):
        return self[0](ids) if ids.dtype == torch.int64 else self[2](self[1](ids))


@pytest.mark.parametrize("kind", [nn.ModuleList, Stages])
def test_a_part_is_shared_out_when_all_layers_have_run(kind):
    """As on a rank of a pipeline that takes two microbatches through its first stage before its second one runs."""
    torch.manual_seed(0)
    embedding = nn.Sequential(nn.Embedding(20, 8), nn.Embedding(1, 1))  # keeps its input alone, so half is too little
    embedding.forward = embedding[0].forward
    model = kind([embedding, *(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in "ab")])
    checkpoint_layers(model, Keep(0.7), layers=list(model))
    ids = torch.arange(20)
    stages = [model, model] if kind is Stages else [model[0], lambda x: model[2](model[1](x))]
    for rounds in (2, 1):
        given = [stages[0](ids) for _ in range(rounds)]
        sum(stages[1](each).sum() for each in given).backward()
    assert saved(model).counted <= 0.7 * (20 * 8 + 2 * 20 * 8 * 4 * 3)
    assert {line.dropped for line in saved(model).lines} != {("",)}


def test_larger_inputs_than_were_looked_at_get_a_plan_of_their_own():
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model, Keep("100KB"), example=inputs[:1])
    dropped = []
    for ids in (inputs[:1], inputs, inputs, inputs[:1]):
        model(ids).sum().backward()
        dropped.append({line.dropped for line in saved(model).lines})
        assert saved(model).counted <= 100_000
    assert dropped[1] == {("",)}
    assert dropped[0] != dropped[2] == dropped[3]
    assert saved(model).predicted is None  # sizes that this plan was not made for


def test_modes_are_looked_at_apart():
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5)) for _ in "ab")
    )
    plain = copy.deepcopy(layers)
    checkpoint_layers(layers, Drop(lambda name, module: not isinstance(module, nn.Tanh)))
    given = torch.randn(4, 8, requires_grad=True)
    for training in (True, True, False, False, True):
        torch.manual_seed(1)
        expected = torch.autograd.grad(plain.train(training)(given).sum(), given)
        torch.manual_seed(1)
        assert torch.equal(torch.autograd.grad(layers.train(training)(given).sum(), given)[0], expected[0])
        again = {line.dropped for line in saved(layers).lines}
    assert again == {("0",)}  # the norm writes its statistics and dropout draws
    assert equal([list(plain.buffers())], [list(layers.buffers())])


def test_statistics_of_several_forwards_before_a_backward_are_those_without():
    """As in a pipeline: a layer runs again with the statistics of then, and those of now stay."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 1))
    layers = copy.deepcopy(plain)
    checkpoint_layers(layers, "layers", layers=[layers[0]])
    for model in (plain, layers):
        for _ in range(2):
            torch.manual_seed(1)
            losses = [model(torch.randn(4, 8)).sum() for _ in range(3)]
            for loss in reversed(losses):
                loss.backward()
    assert equal([list(plain.buffers())], [list(layers.buffers())])
    assert equal([[p.grad for p in plain.parameters()]], [[p.grad for p in layers.parameters()]])


def test_every_second_of_an_odd_number_of_layers():
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model, Layers(2))
    model(inputs).sum().backward()
    assert [line.dropped for line in saved(model).lines] == [("",), (), ("",)]


def test_operations_are_kept_as_by_torchs_selective_checkpoint():
    counts = []
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for policy in (None, Ops([*products, attention]), Ops(lambda context, operation, *_, **__: operation in products)):
        model, inputs = MODELS["gpt"]()
        checkpoint_layers(model, policy)
        counts.append(flops(lambda: model(inputs).sum().backward()))  # noqa: B023 - called at once
    assert counts[0] == counts[1] == counts[2]  # the counter does not know attention on a CPU
    assert saved(model).counted is None
    assert "the layer" in str(saved(model))


def test_what_is_kept_of_operations_is_what_torchs_own_keeps():
    block, given = Block(), torch.randn(2, 15, 32, requires_grad=True)
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    with Living() as living:
        held = checkpoint(block, given, use_reentrant=False, context_fn=contexts)
        expected = living.bytes()
    del held
    layers = nn.Sequential(block)
    checkpoint_layers(layers, Ops(products))
    with Living() as living:
        held = layers(given)
        assert living.bytes() == expected
    assert held.shape == given.shape


def test_copies_and_pickles_of_a_model_drop_by_themselves():
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model, "cheap", example=inputs)
    model(inputs).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        before = saved(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        other.zero_grad()
        other(inputs).sum().backward()
        plain = MODELS["gpt"]()[0]
        plain.load_state_dict(other.state_dict())
        plain(inputs).sum().backward()
        assert equal([[p.grad for p in other.parameters()]], [[p.grad for p in plain.parameters()]])
        assert [line.dropped for line in saved(other).lines] == [("act", "ln1", "ln2")] * 3
        assert saved(model) == before


def test_a_layer_that_drops_activations_is_not_measured():
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model, "cheap")
    with pytest.raises(ValueError, match=r"module 'h.0' drops activations, .*; measure before checkpoint_layers"):
        measure(model, inputs)


@pytest.mark.parametrize("policy", ["layers", "cheap"])
def test_a_layer_whose_buffers_are_read_and_written_runs_again_with_their_values(policy):
    def losses(policy):
        torch.manual_seed(0)
        linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        model = nn.Sequential(nn.Sequential(linear, nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 1))
        checkpoint_layers(model, policy)
        return *train(model, torch.randn(4, 8)), list(model.buffers())

    assert equal(losses(policy), losses(None))


def test_no_policy_changes_nothing():
    model, _ = MODELS["gpt"]()
    assert checkpoint_layers(model, None) is model
    with pytest.raises(ValueError, match="no layer of this GPT drops activations; call checkpoint_layers first"):
        saved(model)


def test_what_is_refused_leaves_the_model_as_it_was():
    model, inputs = MODELS["gpt"]()
    with pytest.raises(
        ValueError, match=r"policy is 'dear'; it can be None, 'cheap', 'layers', Layers, Drop, Keep or Ops"
    ):
        checkpoint_layers(model, "dear")
    with pytest.raises(ValueError, match=r"policy Drop names no module .*: 'h.0.attn' draws random numbers; name"):
        checkpoint_layers(model, Drop(lambda name, module: name.endswith(".attn")), example=inputs)
    with pytest.raises(ValueError, match=r"finds no module that can be called again in 'h.0'; use 'layers'"):
        checkpoint_layers(model, Drop(lambda name, module: False), example=inputs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    checkpoint_layers(model, "layers")
    with pytest.raises(ValueError, match=r"layer 'h.0' drops activations already; call checkpoint_layers once"):
        checkpoint_layers(model, "cheap")


def test_without_an_example_a_policy_that_finds_nothing_is_refused_in_the_second_forward():
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model, Drop(lambda name, module: isinstance(module, nn.ReLU)))
    model(inputs).sum().backward()
    with pytest.raises(ValueError, match=r"finds no module that can be called again in 'h.0'"):
        model(inputs)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_compiled_layers_are_refused():
    model, _ = MODELS["gpt"]()
    model.h[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"layer 'h.1' is compiled, and checkpoint_layers is for eager layers"):
        checkpoint_layers(model, "cheap")


def test_layers_in_something_compiled_are_refused():
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.LayerNorm(32))
    model[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"layer '0.0' is compiled, and checkpoint_layers is for eager layers"):
        checkpoint_layers(model, "cheap", layers=list(model[0]))


@pytest.mark.parametrize(("policy", "fullgraph"), [("layers", True), ("cheap", False)])
def test_under_torch_compile_a_layer_says_what_to_use(policy, fullgraph):
    torch.compiler.reset()
    model, given = nn.Sequential(Block(), Block()), torch.randn(1, 2, 32)
    checkpoint_layers(model, policy, example=given)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match="checkpoint_layers is for eager layers"):
        compiled(given)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with torch.no_grad():
        assert torch.equal(compiled(given), model(given))
    model(given).sum().backward()


@pytest.mark.parametrize("policy", ["layers", "cheap", None])
def test_within_torch_func_a_layer_says_what_to_use(policy):
    model, ids = MODELS["gpt"]()
    checkpoint_layers(model, policy, to_host=ToHost())
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (ids,)).sum()

    with pytest.raises(RuntimeError, match=r"layer 'h.0' runs within torch.func, .*; use a model without"):
        torch.func.grad(loss)(parameters)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with torch.no_grad():
        assert torch.func.vmap(model.ln_f)(model.wte.weight).shape == (50, 32)


def test_layers_within_layers_of_another_call_are_refused():
    model, _ = MODELS["gpt"]()
    checkpoint_layers(model, "cheap", layers=[model.h[0]])
    with pytest.raises(ValueError, match=r"layer 'h.0.attn' lies within a layer that drops activations already"):
        checkpoint_layers(model, "layers", layers=[block.attn for block in model.h])
    with pytest.raises(ValueError, match=r"layer 'h' has a layer in it that drops activations already"):
        checkpoint_layers(model, "layers", layers=[model.h])
    checkpoint_layers(model, "layers", layers=[model.h[1]])  # beside it
