"""The strategy against plain torch on one device: the same losses and weights, however the work is cut."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from par_layers import initialize
from par_testing import count_collectives, for_each, live_bytes, peak_bytes
from par_train import Strategy
from par_zero import summon

STEPS = 5
TOLERANCE = 1e-5  # relative, fp32: sums over ranks and microbatches in another order


def samples(count=24):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 15, generator=generator)
    return inputs, inputs @ torch.randn(15, 7, generator=generator)


def loader(batch_size=8, **keywords):
    return DataLoader(TensorDataset(*samples()), batch_size=batch_size, **keywords)


def make_model(width=17):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(15, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 7))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_device(steps=STEPS, clip_norm=1.0):
    """Losses and the model after some steps, in plain torch."""
    model = make_model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    while len(losses) < steps:
        for inputs, targets in loader():
            if len(losses) == steps:
                break
            loss = functional.mse_loss(model(inputs), targets)
            loss.backward()
            if clip_norm is not None:
                clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


def mean_over_data(strategy, loss):
    total = torch.as_tensor(loss.detach(), dtype=torch.float64).clone()
    dist.all_reduce(total, group=strategy.groups["data"])
    return float(total) / strategy.groups.size("data")


def train(strategy, steps=STEPS):
    """The loop of the README."""
    model, optimizer = make_model(), None
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, dataloader, scheduler = strategy.initialize(model, optimizer, loader(), scheduler)
    losses = []
    while len(losses) < steps:
        for inputs, targets in dataloader:
            if len(losses) == steps:
                break
            loss = functional.mse_loss(model(inputs), targets)
            strategy.backward(loss, optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(mean_over_data(strategy, loss))
    return losses, model


def train_pipeline(strategy, steps=STEPS):
    """The loop with `execute_pipeline`."""
    model = make_model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, dataloader, scheduler = strategy.initialize(model, optimizer, loader(), scheduler)
    losses = []
    for _ in range(steps):
        loss = strategy.execute_pipeline(dataloader, model, functional.mse_loss, optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(mean_over_data(strategy, loss))
    return losses, model


def assert_same(found, expected):
    losses, model = found
    assert losses == pytest.approx(expected[0], rel=TOLERANCE)
    whole = dict(expected[1].named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, whole[name], rtol=1e-4, atol=1e-5)


@for_each(zero=range(4))
@pytest.mark.ranks([1, 2])
def test_replicas_train_as_one_device_does(zero):
    with Strategy(zero=zero, clip_norm=1.0) as strategy:
        losses, model = train(strategy)
        assert losses == pytest.approx(one_device()[0], rel=TOLERANCE)
        if zero < 3:
            assert_same((losses, model), one_device())


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.storm), "zb_v", "interleaved"])
@pytest.mark.ranks(4)
def test_pipelines_of_replicas_train_as_one_device_does(schedule):
    parallel, pipeline = {"pipeline": 2}, {"schedule": schedule, "microbatches": 2}
    with Strategy(parallel=parallel, pipeline=pipeline, clip_norm=1.0, zero=1) as strategy:
        assert_same(train_pipeline(strategy), one_device())


@pytest.mark.ranks([1, 2])
def test_execute_pipeline_needs_no_pipeline():
    with Strategy(clip_norm=1.0, pipeline={"microbatches": 3}) as strategy:
        assert_same(train_pipeline(strategy), one_device())


@pytest.mark.ranks(2)
def test_gradients_add_up_without_sync():
    expected = make_model()
    optimizer = adamw(expected)
    for inputs, targets in loader(batch_size=4):
        (functional.mse_loss(expected(inputs), targets) / 6).backward()
    optimizer.step()
    for stage, keep in ((2, True), (3, True), (3, False)):
        with Strategy(zero=stage) as strategy:
            model = make_model()
            model, optimizer, dataloader = strategy.initialize(model, adamw(model), loader(batch_size=4))
            batches = list(dataloader)
            calls = []
            with strategy.no_sync(model, keep=keep):
                for inputs, targets in batches[:-1]:
                    with count_collectives() as counted:
                        strategy.backward(functional.mse_loss(model(inputs), targets) / 6, optimizer)
                    calls.append(counted.calls())
            assert keep == (calls[-1] == 0)  # at stage 3 parameters stay gathered, or are gathered in every pass
            strategy.backward(functional.mse_loss(model(batches[-1][0]), batches[-1][1]) / 6, optimizer)
            optimizer.step()
            with summon(model):
                assert_same(([], model), ([], expected))


class Mlp(nn.Module):
    """Written once against a layer set."""

    def __init__(self, layers, width=16):
        super().__init__()
        self.layers = layers
        self.tokens = layers.VocabEmbedding(23, width)
        self.norm = layers.LayerNorm(width)
        self.expand = layers.ColumnLinear(width, 4 * width)
        self.contract = layers.RowLinear(4 * width, width)
        self.head = layers.VocabClassifier(width, 23)

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        hidden = hidden + self.contract(functional.gelu(self.expand(self.norm(hidden))))
        return self.head(hidden)

    def loss(self, logits, targets):
        return self.layers.cross_entropy(logits, targets, classes=23)


def tokens_loader():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 23, (24, 9), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :8], tokens[:, 1:]), batch_size=8)


def train_tokens(strategy, steps=STEPS):
    model = Mlp(strategy.layers)
    model, optimizer, dataloader = strategy.initialize(model, adamw(model), tokens_loader())
    losses = []
    for _ in range(steps):
        losses.append(mean_over_data(strategy, strategy.execute_pipeline(dataloader, model, model.loss, optimizer)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


TENSOR = [
    {"tensor": {"size": 2, "mode": "1d"}},
    {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}},
    {"tensor": {"size": 4, "mode": "2d"}},
]


@pytest.mark.ranks(4)
def test_tensor_modes_train_alike_from_the_same_seed():
    """No parameter is on a device before `initialize`, which fills it as the seed and its name say."""
    with Strategy(parallel={"data": 4}, clip_norm=1.0) as strategy:
        expected = train_tokens(strategy)
    one_d, by_sequence, two_d = TENSOR
    for parallel, zero in ((one_d, 0), (by_sequence, 2), (two_d, 0)):  # of 2d there are no replicas
        with Strategy(parallel=parallel, zero=zero, clip_norm=1.0) as strategy:
            assert train_tokens(strategy) == pytest.approx(expected, rel=TOLERANCE), parallel


def losses_of(strategies, names, steps=4):
    """Steps of models that take turns, each with its strategy."""
    made, losses = {}, {name: [] for name in names}
    for name in names:
        model = Mlp(strategies[name].layers, width=16 if name == "actor" else 32)
        made[name] = strategies[name].initialize(model, adamw(model), tokens_loader())
    batches = {name: iter(made[name][2]) for name in names}
    for _ in range(steps - 1):
        for name in names:
            model, optimizer, _ = made[name]
            inputs, targets = next(batches[name])
            loss = model.loss(model(inputs), targets)
            strategies[name].backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    return losses, {name: [each.clone() for each in made[name][0].parameters()] for name in names}


@pytest.mark.ranks(4)
def test_actor_and_critic_with_other_parallelism_each_do_not_know_of_each_other():
    def strategies():
        return {
            "actor": Strategy(parallel={"tensor": {"size": 4, "mode": "2d"}}, clip_norm=1.0),
            "critic": Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}, zero=2),
        }

    together = losses_of(strategies(), ["actor", "critic"])
    for name in ("actor", "critic"):
        alone = losses_of(strategies(), [name])
        assert alone[0][name] == together[0][name]
        assert all(torch.equal(*each) for each in zip(alone[1][name], together[1][name], strict=True))


@pytest.mark.ranks(1)
def test_strategies_of_different_seeds_draw_different_numbers():
    """A step of one after a step of the other; with the same seed they would draw the same numbers."""
    drawn = {}
    for seed in (3, 4, 3.0):
        with Strategy(seed=int(seed)) as strategy:
            model = make_model()
            model, optimizer = strategy.initialize(model, adamw(model))
            first = torch.rand(3)
            strategy.backward(model(samples()[0]).sum(), optimizer)
            optimizer.step()
            drawn[repr(seed)] = torch.stack([first, torch.rand(3)])
    assert torch.equal(drawn.pop("3.0"), drawn["3"])
    assert len(torch.cat([*drawn.values()]).unique()) == 2 * 2 * 3


@pytest.mark.ranks(2)
def test_models_of_one_strategy_may_share_an_optimizer_or_have_one_each():
    inputs, targets = samples(8)
    expected = make_model(), make_model(width=13)
    for model in expected:
        optimizer = adamw(model)
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    for shared in (True, False):
        with Strategy(zero=1) as strategy:
            rows = slice(strategy.groups.rank("data") * 4, strategy.groups.rank("data") * 4 + 4)
            actor, critic = make_model(), make_model(width=13)
            if shared:
                both = torch.optim.AdamW([*actor.parameters(), *critic.parameters()], lr=1e-2)
                actor, critic, both = strategy.initialize(actor, critic, both)
                optimizers = [both, both]
            else:
                actor, first, critic, second = strategy.initialize(actor, adamw(actor), critic, adamw(critic))
                optimizers = [first, second]
            for model, optimizer in zip((actor, critic), optimizers, strict=True):
                strategy.backward(functional.mse_loss(model(inputs[rows]), targets[rows]), optimizer)
            for optimizer in dict.fromkeys(optimizers):
                optimizer.step()
            for model, whole in zip((actor, critic), expected, strict=True):
                assert_same(([], model), ([], whole))


def counted_mse(outputs, targets):
    """A sum over rows with an even first target, and how many these are."""
    kept = (targets[:, :1] > 0).to(outputs.dtype)
    return ((outputs - targets) ** 2 * kept).sum(), kept.sum()


def expected_counted():
    model, (inputs, targets) = make_model(), samples(8)
    total, count = counted_mse(model(inputs), targets)
    optimizer = adamw(model)
    (total / count).backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (total / count).item(), norm.item(), model


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.ranks(4)
def test_the_mean_is_over_what_is_counted_on_all_ranks_and_in_all_microbatches(pipeline):
    _loss, norm, whole = expected_counted()
    options = {"schedule": "zb_h1", "microbatches": 2}
    with Strategy(parallel={"pipeline": pipeline}, pipeline=options, clip_norm=1.0) as strategy:
        model = make_model()
        batches = DataLoader(TensorDataset(*samples(8)), batch_size=8)
        model, optimizer, dataloader = strategy.initialize(model, adamw(model), batches)
        strategy.execute_pipeline(dataloader, model, counted_mse, optimizer)
        assert optimizer.step().grad_norm.item() == pytest.approx(norm, rel=TOLERANCE)
        assert_same(([], model), ([], whole))


@pytest.mark.ranks(2)
def test_backward_takes_a_weight():
    _loss, norm, whole = expected_counted()
    with Strategy(clip_norm=1.0) as strategy:
        model = make_model()
        batches = DataLoader(TensorDataset(*samples(8)), batch_size=8)
        model, optimizer, dataloader = strategy.initialize(model, adamw(model), batches)
        for inputs, targets in dataloader:
            total, count = counted_mse(model(inputs), targets)
            strategy.backward(total / count, optimizer, weight=count)
        assert optimizer.step().grad_norm.item() == pytest.approx(norm, rel=TOLERANCE)
        assert_same(([], model), ([], whole))


@pytest.mark.ranks(2)
def test_losses_outputs_and_evaluation_of_a_pipeline():
    inputs, targets = samples(8)
    whole = make_model()
    with Strategy(parallel={"pipeline": 2}) as strategy:
        model = make_model()
        model, optimizer = strategy.initialize(model, adamw(model))
        for forward_only in (True, False):
            loss, outputs = strategy.execute_pipeline(
                iter([(inputs, targets)]),
                model,
                functional.mse_loss,
                optimizer,
                return_outputs=True,
                forward_only=forward_only,
            )
            assert loss.item() == pytest.approx(functional.mse_loss(whole(inputs), targets).item(), rel=TOLERANCE)
            if strategy.pipeline(model).is_last:
                torch.testing.assert_close(outputs, whole(inputs).detach())
            else:
                assert outputs is None


@pytest.mark.ranks(2)
def test_layers_that_are_only_described_are_built_where_they_run():
    from par_pipeline import Lazy

    layers = [Lazy(nn.Linear, 15, 17), Lazy(nn.GELU), {"type": "Linear", "in_features": 17, "out_features": 7}]
    found = {}
    for ranks in (1, 2):
        with Strategy(parallel={"pipeline": ranks}, seed=5) as strategy:
            model = strategy.build(layers)
            model, optimizer = strategy.initialize(model, adamw(model))
            loss = strategy.execute_pipeline(iter([samples(8)]), model, functional.mse_loss, optimizer)
            found[ranks] = loss.item()
            assert len(list(model.parameters())) == (4 if ranks == 1 else 2)
    assert found[1] == pytest.approx(found[2], rel=TOLERANCE)


@pytest.mark.ranks(2)
def test_the_stages_of_other_ranks_never_get_memory():
    """A model on the meta device: what is drawn is the same as without a pipeline, a tied weight included."""
    found = {}
    for ranks in (1, 2):
        with Strategy(parallel={"pipeline": ranks}, seed=5) as strategy:
            with torch.device("meta"):
                first, last = strategy.layers.Linear(15, 17, bias=False), strategy.layers.Linear(15, 17, bias=False)
                last.weight = first.weight
                whole = nn.Sequential(first, strategy.layers.Linear(17, 15), nn.GELU(), last)
            model, optimizer = strategy.initialize(whole, adamw(whole))
            assert whole[1].weight.is_meta == (strategy.groups.rank("pipeline") == 1)
            assert not first.weight.is_meta
            loss = strategy.execute_pipeline(
                iter([(samples(8)[0], torch.zeros(8, 17))]), model, functional.mse_loss, optimizer
            )
            found[ranks] = loss.item()
    assert found[1] == pytest.approx(found[2], rel=TOLERANCE)


@pytest.mark.ranks(2)
def test_an_embedding_that_the_last_stage_uses_too_stays_one():
    def tied():
        torch.manual_seed(0)
        first, last = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        last.weight = first.weight
        return nn.Sequential(first, nn.Linear(8, 8), nn.Tanh(), last)

    def loss(outputs, targets):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(2))
    whole = tied()
    optimizer = adamw(whole)
    for _ in range(3):
        loss(whole(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    with Strategy(parallel={"pipeline": 2}, pipeline={"microbatches": 2}) as strategy:
        model = tied()
        model, optimizer = strategy.initialize(model, adamw(model))
        for _ in range(3):
            strategy.execute_pipeline(iter([(tokens, tokens)]), model, loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(([], model), ([], whole))


@pytest.mark.ranks(2)
def test_the_plan_is_what_is_there():
    """Bytes of parameters, gradients and optimizer state, and what a step receives over the data axis."""
    from par_testing import count_collectives

    for zero in range(4):
        with Strategy(zero=zero) as strategy:
            model = make_model()
            model, optimizer = strategy.initialize(model, adamw(model))
            plan = strategy.plan()
            strategy.backward(model(samples(4)[0]).sum(), optimizer)  # the ranks compare their units in the first pass
            optimizer.step()
            optimizer.zero_grad()
            with count_collectives() as counted:
                strategy.backward(model(samples(4)[0]).sum(), optimizer)
                held = [each for group in optimizer.param_groups for each in group["params"]]
                gradients = sum(each.grad.untyped_storage().nbytes() for each in held)
                optimizer.step()
            state = sum(value.nbytes for each in optimizer.state.values() for value in each.values())
            moved = counted.received() - 4 * 1  # less the norm's own: four numbers, of which two ranks receive each one
            padding = 64 * len(held)
            assert abs(plan.memory[0].optimizer - state) <= padding
            assert abs(plan.memory[0].gradients - gradients) <= padding
            predicted = sum(move.bytes for move in plan.transfers)
            # At stage 3 the plan says that everything is gathered twice; what backward begins with stays from forward.
            assert 4 * moved <= predicted + padding if zero == 3 else abs(predicted - 4 * moved) <= padding, zero
            assert str(plan).count("\n") >= 2


@pytest.mark.ranks(2)
def test_tied_parameters_of_models_that_share_an_optimizer_stay_one():
    def tied(width):
        torch.manual_seed(0)
        first, last = nn.Linear(width, 8, bias=False), nn.Linear(width, 8, bias=False)
        last.weight = first.weight
        return nn.Sequential(first, nn.Linear(8, width), nn.Tanh(), last)

    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    with Strategy(parallel={"pipeline": 2}) as strategy:
        models = tied(8), tied(8)
        optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
        *models, optimizer = strategy.initialize(*models, optimizer)
        for model in models:
            strategy.execute_pipeline(iter([(inputs, inputs)]), model, functional.mse_loss, optimizer)
        optimizer.step()
        whole = tied(8)
        plain = torch.optim.SGD(whole.parameters(), lr=0.1)
        functional.mse_loss(whole(inputs), inputs).backward()
        plain.step()
        for model in models:
            assert_same(([], model), ([], whole))


@pytest.mark.ranks(2)
def test_a_layer_that_comes_again_on_another_stage_is_tied():
    def twice():
        torch.manual_seed(0)
        again = nn.Linear(8, 8)
        return nn.Sequential(again, nn.Tanh(), nn.Linear(8, 8), again)

    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    with Strategy(parallel={"pipeline": 2}) as strategy:
        model = twice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = strategy.initialize(model, optimizer)
        strategy.execute_pipeline(iter([(inputs, inputs)]), model, functional.mse_loss, optimizer)
        optimizer.step()
        whole = twice()
        plain = torch.optim.SGD(whole.parameters(), lr=0.1)
        functional.mse_loss(whole(inputs), inputs).backward()
        plain.step()
        assert_same(([], model), ([], whole))


def split_columns(value, count):
    """Microbatches along dim 1."""
    if isinstance(value, tuple):
        return list(zip(*(split_columns(each, count) for each in value), strict=True))
    return list(value.chunk(count, dim=1))


@pytest.mark.ranks(2)
def test_microbatches_along_another_dim_weigh_alike_and_counts_below_one_count():
    inputs = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(2))

    def fractions(outputs, targets):
        return ((outputs - targets) ** 2).sum() * 1e-3, outputs.numel() * 1e-3

    whole = nn.Linear(5, 5)
    torch.manual_seed(0)
    nn.init.normal_(whole.weight)
    before = whole.weight.detach().clone()
    functional.mse_loss(whole(inputs), inputs).backward()
    for criterion in (functional.mse_loss, fractions):
        with Strategy(pipeline={"microbatches": 4, "split": split_columns}) as strategy:
            model = nn.Linear(5, 5)
            model.load_state_dict({"weight": before, "bias": whole.bias.detach()})
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
            strategy.execute_pipeline(iter([(inputs, inputs)]), model, criterion, optimizer)
            optimizer.step()
            torch.testing.assert_close(model.weight.detach(), before - whole.weight.grad)


FROZEN_IN = [*itertools.product(["fp32", "bf16", "fp16", "bf16-sr"], [0, 2, 3]), ("bf16-amp", 0), ("bf16-amp", 2)]
"""Precisions and stages; stage 3 refuses autocast."""


@for_each(case=FROZEN_IN)
@pytest.mark.ranks(2)
def test_frozen_parts_and_frozen_models(case):
    precision, zero = case
    with Strategy(precision=precision, zero=zero) as strategy:
        model, teacher = make_model(), make_model().requires_grad_(False)
        model[0].requires_grad_(False)
        trained = [each for each in model.parameters() if each.requires_grad]
        model, optimizer, teacher = strategy.initialize(model, torch.optim.AdamW(trained, lr=1e-2), teacher)
        inputs, _ = samples(8)
        losses = []
        for _ in range(3):
            loss = functional.mse_loss(model(inputs).float(), teacher(inputs) + 1)
            strategy.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


@pytest.mark.ranks(2)
def test_a_head_alone_is_trained_in_a_pipeline():
    whole = make_model()
    for layer in whole[:4]:
        layer.requires_grad_(False)
    inputs, targets = samples(8)
    functional.mse_loss(whole(inputs), targets).backward()
    plain = torch.optim.AdamW(whole[4].parameters(), lr=1e-2)
    plain.step()
    with Strategy(parallel={"pipeline": 2}) as strategy:
        model = make_model()
        for layer in model[:4]:
            layer.requires_grad_(False)
        model, optimizer = strategy.initialize(model, torch.optim.AdamW(model[4].parameters(), lr=1e-2))
        strategy.execute_pipeline(iter([(inputs, targets)]), model, functional.mse_loss, optimizer)
        optimizer.step()
        assert_same(([], model), ([], whole))


UNITS, WIDTH = 24, 512
UNIT = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(each, marks=pytest.mark.storm) for each in ("fp32", "bf16-sr"))]
)
@pytest.mark.ranks(2, backend="gloo")
def test_at_stage_3_a_model_on_meta_is_never_there_as_a_whole(precision):
    with Strategy(zero={"stage": 3, "overlap": {"bucket": UNIT}}, precision=precision, seed=5) as strategy:
        before = live_bytes()
        model = nn.Sequential(*(strategy.layers.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters)
        drawing = 2.5 * 2**20  # what `initialize` draws in
        # Half of a unit on each rank, and where there are masters, half of its weights too; then two units.
        expected = UNITS * UNIT * {"fp32": 0.5, "bf16": 0.75, "bf16-sr": 0.25}[precision] + 2 * UNIT + drawing
        wired = []
        peak = peak_bytes(lambda: wired.append(strategy.initialize(model, optimizer)), before + expected) - before
        assert UNITS * UNIT / 4 < peak < expected
        assert expected < UNITS * UNIT
        assert all(mine is one for mine, one in zip(model.parameters(), parameters, strict=True))
        whole = nn.Sequential(*(strategy.layers.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
        initialize(whole, 5)
        with summon(model):
            for mine, one in zip(model.parameters(), whole.parameters(), strict=True):
                assert torch.equal(mine, one.to(mine.dtype))
