"""Canonical numerics over tensor ranks: one digest for every number of ranks that divides the lanes."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from par_groups import on_grid
from par_layers.examples.gpt import GPT
from par_layers.modes.chunks import ChunkSums
from par_testing import storm
from par_train import Strategy

LANES, TIME = {"data": 4, "tensor": 4}, 16
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "num_attention_heads": 4}
TENSOR = {size: {"tensor": {"size": size, "mode": "1d"}} for size in (2, 4)}
SEQUENCE = {size: {"tensor": {"size": size, "mode": "1d", "sequence_parallel": True}} for size in (2, 4)}


def llama(_):
    config = LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=4)
    return LlamaForCausalLM(config).train()


def qwen(_):
    config = Qwen3Config(**SIZES, intermediate_size=128, num_key_value_heads=4)
    return Qwen3ForCausalLM(config).train()


def gpt2(_):
    dropped = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(vocab_size=128, n_embd=128, n_layer=2, n_head=4, n_positions=TIME, **dropped)
    return GPT2LMHeadModel(config).train()


def gpt(strategy):
    return GPT(strategy.layers, vocabulary=128, width=128, heads=4, depth=2, length=TIME, tied=True)


def dropping_gpt(strategy):
    return GPT(strategy.layers, vocabulary=128, width=128, heads=4, depth=2, length=TIME, dropout=0.1)


def dropping_gpt2(_):
    dropped = {"embd_pdrop": 0.1, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(vocab_size=128, n_embd=128, n_layer=2, n_head=4, n_positions=TIME, **dropped)
    return GPT2LMHeadModel(config).train()


def batch_of(step):
    """Rows of which each lane has one, with a different number of labels in each lane."""
    ids = torch.randint(0, 128, (LANES["data"], TIME), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    for row in range(len(ids)):
        labels[row, : (row + step) % 5] = -100
    return ids, labels


def digest(
    parallel,
    make=llama,
    *,
    zero=0,
    schedule=None,
    precision="fp32",
    lanes=LANES,
    steps=3,
    resume_from=None,
    save_to=None,
):
    """The digest after some steps, with a checkpoint before the first or after the last of them."""
    pipeline = {} if schedule is None else {"pipeline": {"schedule": schedule}}
    options = {"clip_norm": 0.5, "precision": precision, "numerics": "canonical", **pipeline}
    with Strategy(parallel=parallel, zero=zero, lanes=lanes, **options) as strategy:
        torch.manual_seed(0)
        model = make(strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer, lrs = strategy.initialize(
            model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        )
        ranks, rank = strategy.groups.size(strategy.data_axes), strategy.groups.rank(strategy.data_axes)
        first = 0 if resume_from is None else strategy.checkpoints(resume_from).resume()
        for step in range(first, steps):
            ids, labels = (rows.chunk(ranks)[rank] for rows in batch_of(step))
            if make in (gpt, dropping_gpt):
                counts = (labels != -100).sum(1)  # of full rows, which the loss covers
                loss = lambda logits, target: (  # noqa: E731
                    strategy.layers.cross_entropy(logits, target[0], classes=128, reduction="sum"),
                    target[1].sum(),
                )
                (ids, labels), _ = strategy.context.cut((ids, labels))
                strategy.execute_pipeline(iter([(ids, (labels, counts))]), model, loss, optimizer)
            else:
                batch = {"input_ids": ids, "labels": labels}
                strategy.execute_pipeline(iter([batch]), model, None, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            lrs.step()
        if save_to is not None:
            strategy.checkpoints(save_to).save(steps)
        return str(strategy.digest(model))


def assert_one_digest(cells, *arguments, **more):
    found = {
        str(cell): digest(parallel, *arguments, **options, **more) for cell in cells for parallel, options in [cell]
    }
    assert len(set(found.values())) == 1, found


TWO = [({}, {}), (TENSOR[2], {}), (TENSOR[2], {"zero": 3}), (SEQUENCE[2], {}), (SEQUENCE[2], {"zero": 2})]
FOUR = [
    ({}, {}),
    (TENSOR[4], {}),
    (TENSOR[2], {"zero": 2}),
    ({**TENSOR[2], "pipeline": 2}, {"schedule": "zb_h1"}),
    (SEQUENCE[4], {}),
    (SEQUENCE[2], {"zero": 3}),
    ({**SEQUENCE[2], "pipeline": 2}, {"schedule": "zb_h1", "zero": 1}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (qwen, "bf16"),
        *(storm(make, each) for make in (llama, gpt2) for each in ("fp32", "bf16")),
        *(storm(*case) for case in ((qwen, "fp32"), (gpt, "fp32"), (gpt, "bf16"))),
    ],
)
def test_two_tensor_ranks_have_the_bits_of_data_ranks(make, precision):
    assert_one_digest(TWO, make, precision=precision)


@pytest.mark.storm
@pytest.mark.ranks(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_ranks_have_one_digest(precision):
    assert_one_digest(FOUR, precision=precision)


@pytest.mark.storm
@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [dropping_gpt, dropping_gpt2])
def test_dropout_over_tensor_ranks_has_one_digest(make):
    assert_one_digest(TWO, make)


@pytest.mark.ranks(2)
def test_adapters_over_tensor_ranks_have_one_digest(tmp_path):
    peft = pytest.importorskip("peft")
    if torch.distributed.get_rank() == 0:
        llama(None).save_pretrained(tmp_path)
    torch.distributed.barrier()
    found = set()
    for parallel in ({}, TENSOR[2]):
        with Strategy(parallel=parallel, numerics="canonical", lanes=LANES, clip_norm=0.5) as strategy:
            adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
            model = strategy.from_pretrained(tmp_path, adapter=adapter)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            model, optimizer = strategy.initialize(model, torch.optim.AdamW(trained, lr=1e-2))
            model.train()
            ranks, rank = strategy.groups.size(strategy.data_axes), strategy.groups.rank(strategy.data_axes)
            for step in range(2):
                ids, labels = (rows.chunk(ranks)[rank] for rows in batch_of(step))
                strategy.execute_pipeline(iter([{"input_ids": ids, "labels": labels}]), model, None, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.add(str(strategy.digest(model)))
    assert len(found) == 1


@pytest.mark.ranks(2)
def test_run_that_resumes_on_other_tensor_ranks_has_the_same_bits(tmp_path):
    expected = digest({}, steps=4)
    digest(TENSOR[2], zero=1, steps=2, save_to=tmp_path / "run")
    assert digest(SEQUENCE[2], zero=3, steps=4, resume_from=tmp_path / "run") == expected


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [llama, qwen])
def test_long_runs_have_one_digest(make, precision):
    more = [
        (TENSOR[2], {"zero": 1}),
        (TENSOR[2], {"zero": 3}),
        ({**TENSOR[2], "pipeline": 2}, {"schedule": "1f1b", "zero": 1}),
    ]
    assert_one_digest([*FOUR, *more], make, precision=precision, steps=20)


@pytest.mark.ranks(1)
def test_other_tensor_lanes_have_other_bits():
    """So the tests of this module can fail: without blocks of one shape the bits are others."""
    assert len({digest({}, lanes={"data": 4, "tensor": lanes}, steps=1) for lanes in (1, 2, 4)}) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"size": 2, "mode": "1d"}, "'model.layers.0.self_attn.k_proj' is 64, which does not divide into 4 lanes"),
    ],
)
def test_models_without_a_form_in_lanes_are_refused(tensor, message):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=2))
    options = {"numerics": "canonical", "lanes": LANES}
    with Strategy(parallel={"tensor": tensor}, **options) as strategy, pytest.raises(ValueError, match=message):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(2)
def test_norms_with_several_uses_are_refused_under_sequence_parallelism():
    model = llama(None)
    model.model.layers[0].input_layernorm = model.model.layers[1].input_layernorm
    options = {"numerics": "canonical", "lanes": LANES}
    with Strategy(parallel=SEQUENCE[2], **options) as strategy, pytest.raises(ValueError, match="round the gradient"):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(2)
def test_modules_without_a_rule_are_refused_by_name_under_sequence_parallelism():
    model = llama(None)
    model.model.layers[1].extra = nn.Linear(64, 64)
    message = "'model.layers.1.extra.weight' has a gradient that is a sum over each rank's tokens, .* a Linear"
    options = {"numerics": "canonical", "lanes": LANES}
    with Strategy(parallel=SEQUENCE[2], **options) as strategy, pytest.raises(ValueError, match=message):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(2)
def test_offloaded_partial_gradients_are_refused():
    model, options = llama(None), {"numerics": "canonical", "lanes": LANES, "zero": {"stage": 1, "offload": "cpu"}}
    with Strategy(parallel=SEQUENCE[2], **options) as strategy, pytest.raises(ValueError, match="is a sum over tensor"):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(2)
def test_sums_over_all_tokens_of_a_rank_have_other_bits(monkeypatch):
    """So the tests of sequence parallelism can fail: with chunks as long as a rank's part, the bits are others."""
    monkeypatch.setattr(ChunkSums, "of_tokens", lambda _, x: on_grid(x.float().flatten(0, -2).sum(0)))
    assert digest({}, gpt, steps=1) != digest(SEQUENCE[2], gpt, steps=1)


@pytest.mark.ranks(1)
def test_dropout_in_tensor_lanes_is_refused():
    config = LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=4, attention_dropout=0.1)
    model = LlamaForCausalLM(config)
    options = {"numerics": "canonical", "lanes": LANES}
    with Strategy(**options) as strategy, pytest.raises(ValueError, match="ranks draw for their own"):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
