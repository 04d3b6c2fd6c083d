"""Hybrid models on packed rows, over tensor ranks and in a pipeline: every gradient of one process, or a reason.

Beside each of them also over sequence ranks.
"""

import pytest
import torch

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import separate_documents_, verify_plan
from par_testing import keep_fp64
from par_train import Strategy

transformers = pytest.importorskip("transformers", minversion="5.23")
from .atlas import _models  # noqa: E402 - after the skip

EQUAL = 1e-10
DOCUMENTS = [[12], [5, 1, 6]]
TENSOR = ["jamba", "lfm2_moe", "nemotron_h", "qwen3_next"]
MORE_TENSOR = [
    "bailing_hybrid",
    "bamba",
    "gpt_oss",
    "granitemoehybrid",
    "kimi_linear",
    "minimax",
    "olmo_hybrid",
    "qwen3_5_text",
]
PIPELINE = ["bamba", "nemotron_h", "qwen3_next"]
MORE_PIPELINE = [
    "bailing_hybrid",
    "falcon_h1",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "minimax",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
]


def packed():
    """Two rows, of which the second has three documents."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


LAYERS = "model.layers.*"
FALCON_H1 = {
    **{f"{LAYERS}.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
    **{f"{LAYERS}.feed_forward.{name}": "colwise" for name in ("gate_proj", "up_proj")},
    **{f"{LAYERS}.{name}": "rowwise" for name in ("self_attn.o_proj", "feed_forward.down_proj")},
}
"""transformers' own plan shards the embedding and the head alone. The mixers stay on every rank."""


def check_tensor(name, plan="auto"):
    with keep_fp64(), ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)) as groups:
        batch = {**packed(), "use_cache": False}
        compared = verify_plan(lambda: separate_documents_(_models.make(name)), groups, batch, plan)
    wrong = {key: far for key, far in compared.gradients.items() if far > EQUAL}
    assert compared.worst < EQUAL, (name, compared.loss, wrong)


def check_trained(name, parallel, **options):
    batch, reference = packed(), separate_documents_(_models.make(name))
    with keep_fp64(), Strategy(parallel=parallel, **options) as strategy:
        expected = reference(**batch, use_cache=False).loss
        expected.backward()
        gradients = {key: each.grad for key, each in reference.named_parameters() if each.grad is not None}
        model = _models.make(name)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = {key: each.detach().clone() for key, each in model.named_parameters()}
        loss = strategy.execute_pipeline(iter([batch]), model, None, optimizer)
        optimizer.step()  # by the gradient itself
        assert abs(loss.item() - expected.item()) < EQUAL, name
        checked = 0
        for key, parameter in model.named_parameters():
            gradient = gradients.get(key.partition(".")[2] if key[0].isdigit() else key)
            if gradient is not None:
                scale = max(1.0, gradient.abs().max().item())
                change = before[key] - parameter.detach()
                for box in sharding_of(parameter).boxes:
                    far = (box.of(change) - gradient[box.slices]).abs().max().item()
                    assert far / scale < EQUAL, (name, key)
                checked += 1
        assert checked > 5, name


def check_pipeline(name):
    check_trained(name, {"pipeline": 2}, pipeline={"microbatches": 2})


@pytest.mark.ranks(2, timeout=240)
def test_hybrids_over_two_tensor_ranks_equal_one_process():
    for name in TENSOR:
        check_tensor(name)
    for name in ("recurrent_gemma", "zamba2"):
        with pytest.raises(TypeError, match="ForCausalLM has no plan for tensor parallelism; give one"):
            check_tensor(name)
    check_tensor("falcon_h1", FALCON_H1)
    with pytest.warns(UserWarning, match="the plan of FalconH1ForCausalLM shards no layer"):
        check_tensor("falcon_h1")


@pytest.mark.ranks(2, timeout=240)
def test_hybrids_in_two_stages_equal_one_process():
    for name in PIPELINE:
        check_pipeline(name)
    # Its layers take the embedding of the tokens in addition to hidden states.
    with pytest.raises(TypeError, match=r"Zamba2ForCausalLM.* stage, layer 1 receives another 'argument 1'"):
        check_pipeline("zamba2")


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=240)
@pytest.mark.filterwarnings("ignore:.*(Bamba|GptOss)ForCausalLM shards no layer:UserWarning")  # theirs have no rule
@pytest.mark.parametrize("name", MORE_TENSOR)
def test_more_hybrids_over_two_tensor_ranks_equal_one_process(name):
    check_tensor(name)


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("name", MORE_PIPELINE)
def test_more_hybrids_in_two_stages_equal_one_process(name):
    check_pipeline(name)


@pytest.mark.ranks(4, timeout=240)
def test_hybrid_beside_sequence_ranks_equals_one_process():
    check_trained("qwen3_next", {"sequence": {"size": 2, "mode": "gather"}, "tensor": {"size": 2, "mode": "1d"}})


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=240)
@pytest.mark.filterwarnings("ignore:.*(Bamba|FalconH1|Lfm2)ForCausalLM shards no layer:UserWarning")
@pytest.mark.parametrize(
    "name", ["bamba", "nemotron_h", "qwen3_next", *sorted({*MORE_PIPELINE} - {"gpt_oss", "jamba"})]
)
def test_hybrids_beside_sequence_ranks_equal_one_process(name):
    sequence = {"size": 2, "mode": "gather"}
    check_trained(name, {"sequence": sequence, "pipeline": 2}, pipeline={"microbatches": 2})
    check_trained(name, {"sequence": sequence, "tensor": {"size": 2, "mode": "1d"}})
