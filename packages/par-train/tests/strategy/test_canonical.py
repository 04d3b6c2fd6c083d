"""Canonical numerics: after each step the weights are those of one device, to the last bit, under every topology."""

import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from par_groups import digest_of, on_grid
from par_precision import ExactSums, convert_to_float8_
from par_precision.exact.squares import exact_squares, squares_of
from par_precision.exact.sums import MARGIN
from par_testing import once, storm
from par_train import Strategy
from par_train.strategy.canonical.environment import warn_of_other_bits
from par_zero import MixedPrecision

LANES, TIME, STEPS, CLIP = 12, 16, 4, 0.5
"""1, 2, 3 and 4 data ranks divide the lanes; the norm is above the clip in each step."""


def llama(**more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **more)).train()


def tied_llama():
    return llama(tie_word_embeddings=True)


def batch_of(step):
    """Rows of which each lane has one, with a different number of labels in each lane."""
    ids = torch.randint(0, 64, (LANES, TIME), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    for row in range(LANES):
        labels[row, : (row + step) % 5] = -100
    return {"input_ids": ids, "labels": labels}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def on_one_device(steps=STEPS):
    """The digest and the last norm of plain torch on one device: one lane after the other, sums in any order."""
    model = llama()
    optimizer, parameters = adamw(model), dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad_dtype = torch.float64
        parameter.register_hook(on_grid)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scale, norm = MARGIN * 2.0 ** round(math.log2(LANES * TIME)), 0.0
    for step in range(steps):
        batch, items = batch_of(step), 0
        for lane in reversed(range(LANES)):
            ids, labels = batch["input_ids"][lane : lane + 1], batch["labels"][lane : lane + 1]
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1).float()
            count = int((labels[:, 1:] != -100).sum())
            mean = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / count
            (mean * torch.tensor(count / scale, dtype=torch.float64).float()).backward()
            items += count
        gradients = [parameter.grad.float() for parameter in parameters.values()]
        top = max(gradient.abs().amax() for gradient in gradients).double()
        divisor = torch.tensor(items / scale, dtype=torch.float64)
        norm = squares_of(exact_squares(gradients, top), top).sqrt() / divisor
        factor = (CLIP / norm).clamp(max=1.0) / divisor
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad, parameter.grad_dtype, parameter.grad = None, None, gradient
        optimizer.grad_scale, optimizer.found_inf = factor.reciprocal().float(), None
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        for parameter in parameters.values():
            parameter.grad_dtype = torch.float64
        scale = MARGIN * 2.0 ** round(math.log2(items))
    return digest_of(parameters.items(), None), float(norm)


def options_of(parallel, stage, schedule=None, **more):
    pipeline = {} if schedule is None else {"pipeline": {"schedule": schedule}}
    return dict(parallel=parallel, zero=stage, clip_norm=CLIP, numerics="canonical", lanes=LANES, **pipeline, **more)


def start(strategy, model=None):
    model = llama() if model is None else model
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return strategy.initialize(model, optimizer, schedule)


def train(strategy, model, optimizer, schedule, steps):
    """The last norm; this rank reads its own rows of each batch."""
    ranks, rank = strategy.groups.size(strategy.data_axes), strategy.groups.rank(strategy.data_axes)
    done = None
    for step in steps:
        own = {name: rows.chunk(ranks)[rank] for name, rows in batch_of(step).items()}
        strategy.execute_pipeline(iter([own]), model, None, optimizer)
        done = optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return float(done.grad_norm)


def digest(parallel, stage, schedule=None, **more):
    with Strategy(**options_of(parallel, stage, schedule, **more)) as strategy:
        model, optimizer, lrs = start(strategy)
        norm = train(strategy, model, optimizer, lrs, range(STEPS))
        return strategy.digest(model), norm


def assert_equal(cells):
    expected, norm = once(on_one_device)
    for cell in cells:
        found = digest(*cell)
        assert found[0].differing(expected) == [], cell
        assert found[1] == norm, cell


@pytest.mark.ranks(1)
def test_one_rank_at_each_stage_has_the_bits_of_one_device():
    assert_equal([({}, 0), ({}, 3)])


@pytest.mark.ranks(2)
def test_two_ranks_have_the_bits_of_one_device():
    assert_equal([({}, 0), ({}, 1), ({}, 2), ({}, 3), ({"pipeline": 2}, 0, "zb_h1"), ({"pipeline": 2}, 1, "1f1b")])


@pytest.mark.storm  # two and four ranks have as many stages
@pytest.mark.ranks(3)
def test_three_ranks_have_the_bits_of_one_device():
    assert_equal([({}, 2)])


@pytest.mark.storm
@pytest.mark.ranks(4)
def test_four_ranks_have_the_bits_of_one_device():
    assert_equal([({}, 3), ({"pipeline": 2}, 2, "zb_h1"), ({"pipeline": 4}, 0, "1f1b")])


@pytest.mark.storm
@pytest.mark.ranks(4)
def test_every_schedule_has_the_bits_of_one_device():
    assert_equal([({"pipeline": 2}, stage, name) for stage in (0, 1) for name in ("gpipe", "1f1b", "zb_h1", "zb_v")])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [{"precision": "bf16"}, storm({"recompute": "layers"})], ids=str)
def test_topologies_have_one_digest_with(more):
    found = {str(digest(*cell, **more)[0]) for cell in [({}, 0), ({}, 3), ({"pipeline": 2}, 0, "zb_h1")]}
    assert len(found) == 1


@pytest.mark.ranks(2)
def test_ordinary_numerics_have_other_bits():
    """So the tests of this module can fail."""
    found = set()
    for parallel in ({}, {"pipeline": 2}):
        ranks = 1 if parallel else 2
        pipeline = {"microbatches": LANES // ranks}
        with Strategy(parallel=parallel, zero=0, clip_norm=CLIP, pipeline=pipeline) as strategy:
            model, optimizer, lrs = start(strategy)
            train(strategy, model, optimizer, lrs, range(STEPS))
            found.add(str(strategy.digest(model)))
    assert len(found) == 2


@pytest.mark.ranks(2)
def test_a_run_that_resumes_elsewhere_has_the_bits_of_one_that_does_not(tmp_path):
    with Strategy(**options_of({}, 2)) as strategy:
        model, optimizer, lrs = start(strategy)
        train(strategy, model, optimizer, lrs, range(2))
        strategy.checkpoints(tmp_path / "run").save(2)
    with Strategy(**options_of({"pipeline": 2}, 0, "1f1b")) as strategy:
        model, optimizer, lrs = start(strategy)
        assert strategy.checkpoints(tmp_path / "run").resume() == 2
        train(strategy, model, optimizer, lrs, range(2, STEPS))
        assert strategy.digest(model).differing(on_one_device()[0]) == []


@pytest.mark.ranks(2)
def test_a_loop_of_ones_own_has_one_digest_at_each_stage():
    found = set()
    for stage in range(4):
        with Strategy(**options_of({}, stage)) as strategy:
            model, optimizer, _ = start(strategy)
            rank = strategy.groups.rank("data")
            for step in range(2):
                rows = batch_of(step)["input_ids"].chunk(2)[rank]
                for row in rows.flip(0) if stage % 2 else rows:  # the order of lanes does not matter
                    strategy.backward(model(input_ids=row[None], labels=row[None]).loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.add(str(strategy.digest(model)))
    assert len(found) == 1


def double_a_gradient(strategy):
    model = tied_llama()
    if strategy.groups.rank("data"):
        model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)
    return model


def lose_a_tie(_):
    """The classifier's gradient does not reach the weight that it shares with the embedding."""
    model = tied_llama()
    model.lm_head.forward = lambda x: nn.functional.linear(x, model.lm_head.weight.detach())
    return model


def swap_rows(_):
    """As a shard on the wrong rank: the halves of a weight are swapped."""
    model = tied_llama()
    with torch.no_grad():
        weight = model.model.layers[2].mlp.gate_proj.weight
        weight.copy_(weight.roll(len(weight) // 2, 0))
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("fault", "steps", "names"),
    [
        (double_a_gradient, 1, ["model.layers.1.mlp.up_proj.weight"]),
        (lose_a_tie, 1, ["model.embed_tokens.weight"]),
        (swap_rows, 0, ["model.layers.2.mlp.gate_proj.weight"]),
    ],
)
def test_a_fault_is_found_in_the_first_step_by_name(fault, steps, names):
    digests = []
    for make in (lambda _: tied_llama(), fault):
        # Clipping would spread the difference to all weights by the norm.
        with Strategy(**{**options_of({}, 1), "clip_norm": None}) as strategy:
            model, optimizer, lrs = start(strategy, make(strategy))
            if steps:
                train(strategy, model, optimizer, lrs, range(steps))
            digests.append(strategy.digest(model))
    assert digests[0].differing(digests[1]) == names


# Dropout


def dropping():
    """A seed of its own: the strategy has seeded the generator by the rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(Dropping(8) for _ in range(4)))


def digest_of_dropping(options, *, steps=3, drops=True):
    """The digest of a model with dropout, and the masks of its first layer in the last step, by lane."""
    with Strategy(numerics="canonical", lanes=4, **options) as strategy:
        model = dropping() if drops else dropping().eval()
        model, optimizer = strategy.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        model.train(drops)
        for step in range(steps):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            ranks = strategy.groups.size("data")
            mine = rows.chunk(ranks)[strategy.groups.rank("data")]
            strategy.execute_pipeline(iter([(mine, mine)]), model, nn.functional.mse_loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return str(strategy.digest(model))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [None, "layers"])
def test_dropout_drops_the_same_elements_under_every_topology(recompute):
    pipelines = [{"parallel": {"pipeline": 2}, "pipeline": {"schedule": name}} for name in ("1f1b", "zb_v")]
    options = [{"zero": 3}, {"zero": 0}, *pipelines]
    found = {digest_of_dropping({**each, "recompute": recompute}) for each in options}
    assert len(found) == 1
    assert found != {digest_of_dropping({}, drops=False)}


@pytest.mark.storm
@pytest.mark.ranks(2)
def test_dropout_of_attention_and_of_adapters_has_one_digest(tmp_path):
    peft = pytest.importorskip("peft")
    if torch.distributed.get_rank() == 0:
        llama(attention_dropout=0.1).save_pretrained(tmp_path)
    torch.distributed.barrier()
    adapters = [None, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)]
    for adapter in adapters:
        found = set()
        for cell in [({}, 0), ({}, 3), ({"pipeline": 2}, 1, "1f1b")]:
            with Strategy(**options_of(*cell)) as strategy:
                model = strategy.from_pretrained(tmp_path, adapter=adapter)
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                model, optimizer = strategy.initialize(model, torch.optim.AdamW(trained, lr=1e-2))
                model.train()
                train(strategy, model, optimizer, None, range(2))
                found.add(str(strategy.digest(model)))
        assert len(found) == 1, adapter


@pytest.mark.ranks(1)
def test_lanes_layers_and_steps_drop_different_elements():
    seen = []
    with Strategy(numerics="canonical", lanes=2) as strategy:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Dropout(0.5)) for _ in range(2)))
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for block in model:
            block[1].register_forward_hook(lambda _, args, out: seen.append(tuple((out != 0).flatten().tolist())))
        for _ in range(2):
            for _ in range(2):
                before = torch.get_rng_state()
                strategy.backward(model(torch.ones(1, 64)).mean(), optimizer)
                assert torch.equal(torch.get_rng_state(), before)
            optimizer.step()
            optimizer.zero_grad()
    assert len(set(seen)) == len(seen) == 8


# What is refused


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": "exact"}, "it is unknown; pass 'ordinary' or 'canonical'"),
        ({"lanes": 4}, "ordinary numerics have no lanes"),
        ({"numerics": "canonical"}, "need a number of lanes"),
        ({"numerics": "canonical", "lanes": 3}, "do not divide among 2 data ranks"),
        ({"numerics": "canonical", "lanes": 4, "precision": "fp16"}, "only 'fp32' and 'bf16' have exact sums"),
        ({"numerics": "canonical", "lanes": 4, "pipeline": {"microbatches": 4}}, "choose `microbatches`"),
        (
            {"numerics": "canonical", "lanes": 4, "parallel": {"tensor": {"size": 2, "mode": "1d"}}},
            "tensor=1 must be a power of two times the 2 tensor ranks",
        ),
        (
            {"numerics": "canonical", "lanes": 4, "parallel": {"sequence": 2}},
            "sequence=1 must be a power of two times the 2 sequence ranks",
        ),
        ({"numerics": "canonical", "lanes": {"data": 4, "tensors": 2}}, "unexpected keyword argument 'tensors'"),
        (
            {"numerics": "canonical", "lanes": {"data": 4, "tensor": 0}},
            "lanes: tensor=0 must be a positive integer",
        ),
        *(
            (
                {"numerics": "canonical", "lanes": 4, "zero": {"stage": 1, "precision": given}},
                "gradients are summed by par-zero in fp64",
            )
            for given in ({"reduce_dtype": torch.float32}, MixedPrecision(reduce_dtype=torch.float32))
        ),
    ],
)
def test_options_without_exact_sums_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Strategy(**options)


class Dropping(nn.Module):
    """A layer that calls its dropout twice."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(self.drop(self.up(x).relu())))


@pytest.mark.ranks(2)
def test_batch_norm_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with Strategy(numerics="canonical", lanes=2) as strategy, pytest.raises(ValueError, match="running statistics"):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(1)
def test_compiled_models_are_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    with Strategy(numerics="canonical", lanes=2) as strategy, pytest.raises(ValueError, match="'0' is compiled"):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_fp64_weights_are_refused():
    with Strategy(device="cpu", numerics="canonical", lanes=2) as strategy:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1).double())
        with pytest.raises(ValueError, match=r"'1.weight' is torch.float64, .*; call float\(\) of the model"):
            strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(2)
def test_float8_layers_are_refused():
    for make in (lambda _: nn.Sequential(nn.Linear(16, 16)), lambda layers: nn.Sequential(layers.Linear(16, 16))):
        with Strategy(numerics="canonical", lanes=2) as strategy:
            model = convert_to_float8_(make(strategy.layers))
            with pytest.raises(ValueError, match=r"'0' multiplies in float8, .*; remove convert_to_float8_"):
                strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(4)
def test_other_tensor_modes_are_refused():
    tensor = {"size": 4, "mode": "2d"}
    with pytest.raises(ValueError, match=r"tensor mode '2d' with lanes: .* use tensor=dict\(size=4, mode='1d'\)"):
        Strategy(parallel={"tensor": tensor}, numerics="canonical", lanes={"data": 4, "tensor": 4})


@pytest.mark.ranks(1)
def test_kernels_with_other_bits_are_refused_by_name(monkeypatch):
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim: softmax(x - x.mean(0), dim))
    model, options = nn.Linear(4, 4), {"numerics": "canonical", "lanes": {"data": 2, "tensor": 2}}
    with Strategy(**options) as strategy, pytest.raises(ValueError, match="other bits for a softmax or norm of a row"):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(2)
def test_too_few_losses_raise_on_every_rank():
    model = nn.Linear(4, 4)
    with Strategy(numerics="canonical", lanes=4) as strategy:
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        strategy.backward(model(torch.ones(2, 4)).mean(), optimizer)
        with pytest.raises(ValueError, match="this step had 2 losses, and canonical sums are scaled for 4"):
            optimizer.step()


@pytest.mark.ranks(2)
def test_gradients_beyond_the_exact_range_raise_on_every_rank_by_name():
    model = nn.Linear(4, 4)
    with Strategy(numerics="canonical", lanes=2) as strategy:
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        large = 1e6 if strategy.groups.rank("data") else 1.0
        strategy.backward(model(torch.full((2, 4), large)).mean(), optimizer)
        with pytest.raises(ValueError, match=r"gradients of weight: an element is .* exact sums of 2 losses"):
            optimizer.step()


@pytest.mark.ranks(2)
def test_a_gradient_that_overflows_skips_the_step_on_every_rank():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with Strategy(numerics="canonical", lanes=2) as strategy:
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        factor = math.inf if strategy.groups.rank("data") else 1.0
        strategy.backward(model(torch.ones(2, 4)).mean() * factor, optimizer)
        assert optimizer.step().skipped
        assert torch.equal(model.weight, before)


@pytest.mark.ranks(2)
def test_a_batch_whose_rows_do_not_make_equal_lanes_raises():
    with Strategy(**options_of({}, 0)) as strategy:
        model, optimizer, _ = start(strategy)
        rows = {name: value[:7] for name, value in batch_of(0).items()}
        with pytest.raises(Exception, match="lanes are of equal size"):
            strategy.execute_pipeline(iter([rows]), model, None, optimizer)


def test_losses_that_do_not_divide_among_replicas_are_refused():
    with pytest.raises(ValueError, match="5 losses a step do not divide among 2 data ranks; choose a multiple of 2"):
        ExactSums(losses=5, replicas=2)


def test_another_environment_warns_with_what_has_changed():
    here = {"lanes": 8, "torch": "2.13.0", "hardware": "AVX2"}
    warn_of_other_bits({}, here)
    warn_of_other_bits(here, dict(here))
    with pytest.warns(UserWarning, match=r"torch '2.11.0' became '2.13.0', so the weights from here on may differ"):
        warn_of_other_bits({**here, "torch": "2.11.0"}, here)
