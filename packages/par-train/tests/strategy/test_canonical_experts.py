"""Canonical numerics of mixtures of experts: one digest for every number of ranks that hold the experts."""

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from par_layers import LoadBalancing, RouterConfig, pack_experts_, sync_aux_loss_
from par_layers.experts import lanes
from par_testing import storm
from par_train import Strategy

from .test_canonical import STEPS, options_of, start, train
from .test_canonical_tensor import LANES as TENSOR_LANES
from .test_canonical_tensor import SEQUENCE, TENSOR, assert_one_digest, digest
from .test_canonical_tensor import SIZES as WIDE

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
TWO = [({}, 0), ({"expert": 2}, 0), ({"expert": 2}, 3), ({"pipeline": 2}, 1, "1f1b")]
FURTHER = [({}, 2), ({}, 3), ({"expert": 2}, 1), ({"expert": 2}, 2), ({"pipeline": 2}, 0, "zb_h1")]
FOUR = [
    ({"expert": 4}, 2),
    ({"expert": 2}, 3),
    ({"expert": 2, "pipeline": 2}, 0, "zb_h1"),
    ({"expert": 2, "pipeline": 2}, 1, "1f1b"),
]

WHOLE = {size: {"expert": {"size": size, "tensor": 1}} for size in (2, 4)}
"""Each expert on one rank. Else the tensor ranks shard each of them."""

TENSOR_TWO = [
    ({}, {}),
    (TENSOR[2], {}),
    (TENSOR[2] | WHOLE[2], {"zero": 3}),
    (SEQUENCE[2] | WHOLE[2], {}),
    (SEQUENCE[2], {"zero": 2}),
    ({"expert": 2}, {"zero": 1}),
]
TENSOR_FOUR = [
    ({}, {}),
    (TENSOR[4], {"zero": 1}),
    (TENSOR[2] | {"expert": 2}, {"zero": 2}),
    (SEQUENCE[2] | {"expert": 2}, {"zero": 3}),
    (SEQUENCE[2] | WHOLE[4], {}),
    (SEQUENCE[4] | WHOLE[4], {}),
    (TENSOR[2] | WHOLE[2] | {"pipeline": 2}, {"schedule": "zb_h1", "zero": 1}),
    ({"expert": 4}, {"zero": 2}),
]


def qwen(**more):
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    config = Qwen3MoeConfig(**SIZES, **experts, num_key_value_heads=2, intermediate_size=64, **more)
    return Qwen3MoeForCausalLM(config).train()


def wide_qwen(_):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**WIDE, **experts, num_key_value_heads=4, intermediate_size=128)).train()


def gpt_oss():
    """Its weights are transposed and have biases, and its gate and up features alternate."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **experts, num_key_value_heads=2)).train()


def digests(cells, make, precision="fp32", steps=STEPS):
    found = {}
    for cell in cells:
        with Strategy(**options_of(*cell, precision=precision)) as strategy:
            model, optimizer, lrs = start(strategy, make())
            train(strategy, model, optimizer, lrs, range(steps))
            found[str(cell)] = str(strategy.digest(model))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("make", "precision"), [(qwen, "fp32"), storm(qwen, "bf16"), storm(gpt_oss, "fp32")])
def test_two_expert_ranks_have_the_bits_of_data_ranks(make, precision):
    found = digests(TWO, make, precision)
    assert len(set(found.values())) == 1, found


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [qwen, gpt_oss])
def test_every_stage_over_expert_ranks_has_one_digest(make, precision):
    found = digests([*TWO, *FURTHER], make, precision, steps=20)
    assert len(set(found.values())) == 1, found


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_ranks_with_experts_have_one_digest(precision):
    found = digests([({}, 0), *FOUR], qwen, precision)
    assert len(set(found.values())) == 1, found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("precision", "steps"), [("bf16", 2), storm("fp32", 20)])
def test_experts_over_two_tensor_ranks_have_one_digest(precision, steps):
    assert_one_digest(TENSOR_TWO, wide_qwen, precision=precision, steps=steps)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_over_four_tensor_ranks_have_one_digest(precision):
    assert_one_digest(TENSOR_FOUR, wide_qwen, precision=precision, steps=20)


@pytest.mark.ranks(2)
def test_lanes_of_experts_that_are_added_one_after_the_other_have_other_bits(monkeypatch):
    """So the tests above can fail: two ranks add the sums of two lanes, and one adds a lane at a time."""
    monkeypatch.setattr(lanes, "tree", sum)
    assert digest(TENSOR[2], wide_qwen, steps=1) != digest({}, wide_qwen, steps=1)


@pytest.mark.ranks(2)
def test_run_that_resumes_on_expert_ranks_has_the_same_bits(tmp_path):
    expected = digests([({}, 0)], qwen)
    with Strategy(**options_of({"expert": 2}, 2)) as strategy:
        model, optimizer, lrs = start(strategy, qwen())
        train(strategy, model, optimizer, lrs, range(2))
        strategy.checkpoints(tmp_path / "run").save(2)
    with Strategy(**options_of({}, 3)) as strategy:
        model, optimizer, lrs = start(strategy, qwen())
        assert strategy.checkpoints(tmp_path / "run").resume() == 2
        train(strategy, model, optimizer, lrs, range(2, STEPS))
        assert [str(strategy.digest(model))] == list(expected.values())


# What is refused


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)


def mixture(strategy, **options):
    return strategy.layers.MoE(8, 8, num_experts=2, top_k=1, **options)


def balanced_over_ranks(strategy):
    return sync_aux_loss_(qwen(output_router_logits=True), strategy.groups)


def beside_own_experts(strategy):
    own = pack_experts_(nn.ModuleList([Expert(), Expert()]), gate=None, up="up", down="down")
    return nn.ModuleList([own, mixture(strategy)])


def of_step(strategy):
    return mixture(strategy, balance=LoadBalancing(aux_loss_coef=0.1, scope="step"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_step, r"has a load-balancing loss of the tokens of all ranks, .* use LoadBalancing\(scope='sequence'\)"),
        (balanced_over_ranks, "and no sync_aux_loss_"),
        (beside_own_experts, "multiplies the rows of all lanes"),
    ],
    ids=["scope of a step", "balance over ranks", "experts of one's own"],
)
def test_sums_over_several_lanes_are_refused(make, message):
    with Strategy(parallel={"expert": 2}, numerics="canonical", lanes=4) as strategy:
        model = make(strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match=message):
            strategy.initialize(model, optimizer)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"data": 4, "tensor": 3}, "experts have 64 intermediate features, .* into 3 tensor lanes; use 66, or fewer"),
        ({"data": 4, "sequence": 2}, "'model.layers.0.mlp.experts' has experts, .* use one sequence lane"),
    ],
)
def test_experts_without_a_form_in_lanes_are_refused(counts, message):
    model = wide_qwen(None)
    with Strategy(numerics="canonical", lanes=counts) as strategy, pytest.raises(ValueError, match=message):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(4)
def test_rows_of_one_lane_on_several_ranks_are_refused():
    parallel = TENSOR[4] | WHOLE[2]
    options = {"numerics": "canonical", "lanes": TENSOR_LANES}
    message = r"expert=2 with tensor=1 and 4 tensor ranks: .* use a multiple of 4 with"
    model = wide_qwen(None)
    with Strategy(parallel=parallel, **options) as strategy, pytest.raises(ValueError, match=message):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ranks(2)
def test_correction_bias_of_a_router_is_that_of_one_rank():
    found = []
    for parallel in ({}, {"expert": 2}):
        with Strategy(parallel=parallel, numerics="canonical", lanes=4) as strategy:
            balance, router = LoadBalancing(bias_update_rate=0.1), RouterConfig(correction_bias=True)
            model = mixture(strategy, balance=balance, router=router)
            model, optimizer = strategy.initialize(model, torch.optim.AdamW(model.parameters()))
            ranks, rank = strategy.groups.size(strategy.data_axes), strategy.groups.rank(strategy.data_axes)
            for step in range(3):
                rows = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
                for row in rows:
                    strategy.backward(model(row[None]).square().mean(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.append((str(strategy.digest(model)), model.gate.e_score_correction_bias.tolist()))
    assert found[0] == found[1]
