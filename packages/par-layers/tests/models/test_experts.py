"""Experts of transformers' models dealt out over ranks: outputs, losses and gradients are those of one device."""

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import PartialGradientReducer, communication_volumes, parallelization_of, parallelize
from par_testing import assert_equal_to_one_device, count_collectives, for_each, keep_fp64, storm

from .helpers import VOCABULARY, close, make

pytest.importorskip("transformers", minversion="5.4")

FAMILIES = ("mixtral", "qwen3 with experts", "deepseek", "gpt-oss")
TENSOR = {"size": 2, "mode": "1d"}
WAYS = {
    2: {"own axis": {"expert": 2}, "folded": {"expert": {"size": 2, "tensor": 1}, "tensor": TENSOR}},
    4: {
        "each cut": {"expert": 2, "tensor": TENSOR},
        "partly folded": {"expert": {"size": 4, "tensor": 1}, "tensor": TENSOR},
        "copies": {"expert": {"size": 2, "tensor": 1}, "data": 2, "tensor": TENSOR},
    },
}
"""By number of ranks."""
EXACT = 1e-10  # fp64: sums in another order


def live(way, **tensor):
    config = dict(WAYS[dist.get_world_size()][way])
    if "tensor" in config:
        config["tensor"] = {**TENSOR, **tensor}
    return ProcessGroups(Topology.from_config(config, dist.get_world_size()))


def batch(replica, seed, *, lengths=(8, 4, 6, 2)):
    """Ids and labels of the ranks that see the same tokens: each has another number of them."""
    generator = torch.Generator().manual_seed(10 * seed + replica)
    ids = torch.randint(2, VOCABULARY, (1 + replica % 2, lengths[replica]), generator=generator)
    labels = ids.clone()
    labels[0, :2] = -100 if lengths[replica] > 2 else labels[0, :2]
    return ids, labels


def replicas_of(groups):
    """Which tokens this rank sees, and how many kinds of ranks there are that see others."""
    axes = ("data", "sequence", "expert")
    return groups.rank(axes), groups.size(axes)


def sum_gradients_(model, groups):
    """As a trainer does: dense ones over all ranks with other tokens, experts' over those with the same experts."""
    PartialGradientReducer(model, groups).handle_gradient()
    for name, parameter in model.named_parameters():
        axes = ("data", "expert_data") if ".experts." in name else ("data", "sequence", "expert")
        if groups.size(axes) > 1:
            dist.all_reduce(parameter.grad, group=groups[axes])


def check(family, groups, **options):
    whole, cut = make(family, **options), make(family, **options)
    compare_steps(whole, parallelize(cut, groups), groups)
    return cut


def compare_steps(whole, cut, groups):
    known = parallelization_of(cut)
    mine, count = replicas_of(groups)
    for seed in (1, 2):
        for replica in range(count):
            ids, labels = batch(replica, seed)
            expected = whole(input_ids=ids, labels=labels)
            expected.loss.backward()
            if replica != mine:
                continue
            parallel = cut(input_ids=ids, labels=labels)
            close(parallel.loss, expected.loss, EXACT)
            close(known.gather(parallel.logits), expected.logits, EXACT)
            parallel.loss.backward()
    sum_gradients_(cut, groups)
    reason = "fp64 sums in another order"
    assert_equal_to_one_device(cut, whole, gradients=True, rtol=EXACT, atol=EXACT, reason=reason)


@pytest.mark.ranks([storm(2), 4], timeout=240)
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.storm)], ids=["typical", "others"])
def test_dealt_experts_equal_one_device(others):
    """Two backwards, of different numbers of tokens on each rank; with the model's own loss for balance."""
    for way in WAYS[dist.get_world_size()]:
        with live(way) as groups, keep_fp64():
            for family in FAMILIES if dist.get_world_size() == 2 or others else FAMILIES[::3]:
                try:
                    cut = check(family, groups)
                except Exception as error:
                    error.add_note(f"{family}, {way}")
                    raise
                dealt = {
                    n: p for n, p in cut.named_parameters() if n.rpartition(".")[2] == "down_proj" and p.dim() == 3
                }
                assert dealt
                for parameter in dealt.values():
                    assert len(parameter) * groups.size("expert_parallel") == sharding_of(parameter).shape[0]


def sequence_cut(way):
    return "tensor" in WAYS[dist.get_world_size()][way]


@pytest.mark.ranks([storm(2), 4], timeout=240)
def test_sequence_parallel_layers_have_experts_that_see_whole_tokens():
    for way in filter(sequence_cut, WAYS[dist.get_world_size()]):
        with live(way, sequence_parallel=True) as groups, keep_fp64():
            for family in ("mixtral", "deepseek"):
                check(family, groups)


@pytest.mark.ranks(2, timeout=240)
@for_each(case=((True, "own axis"), (False, "folded")))
def test_recomputed_layers_send_the_same_rows(case):
    reentrant, way = case
    with live(way) as groups, keep_fp64():
        whole, cut = make("mixtral"), make("mixtral")
        for model in (whole, cut):  # a reentrant one loses the gradient of the model's own loss of balance
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        parallelize(cut, groups)
        compare_steps(whole, cut, groups)


@pytest.mark.ranks(2)
@for_each(family=FAMILIES, way=WAYS[2])
def test_a_rank_may_have_no_tokens(family, way):
    """Of an empty batch the experts' exchange is left, which the other ranks wait for."""
    with live(way) as groups, keep_fp64():
        whole, cut = make(family), make(family)
        parallelize(cut, groups)
        block, reference = (model.model.layers[1].mlp for model in (cut, whole))
        mine, count = replicas_of(groups)
        generator = torch.Generator().manual_seed(5)
        for replica in range(count):
            x = torch.randn(
                1, 0 if replica == 0 else 5, 32, generator=generator, dtype=torch.float64, requires_grad=True
            )
            here = x.detach().clone().requires_grad_()
            expected = output_of(reference(x)) if x.numel() or family == "deepseek" else output_of(x)
            expected.square().sum().backward()
            if replica == mine:
                y = output_of(block(here))
                close(y, expected, EXACT)
                y.square().sum().backward()
                close(here.grad, x.grad, EXACT)
        for name, parameter in cut.named_parameters():
            if ".experts." in name and "layers.1" in name:
                gradient = whole.get_parameter(name).grad
                for box in sharding_of(parameter).boxes:
                    there = gradient[box.slices] if gradient is not None else torch.zeros(box.size, dtype=torch.float64)
                    close(box.of(parameter.grad), there, EXACT)


def output_of(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.ranks(2)
@for_each(way=WAYS[2])
def test_the_same_tokens_are_generated(way):
    """Every rank takes as many steps, for it computes the others' tokens, too."""
    with live(way) as groups, keep_fp64():
        whole, cut = make("mixtral").eval(), parallelize(make("mixtral"), groups).eval()
        for model in (whole, cut):
            model.config.output_router_logits = False
        prompt, _ = batch(groups.rank(("data", "sequence", "expert")), 1)
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 3, "min_new_tokens": 3}
        expected = whole.generate(prompt, do_sample=False, **options)
        assert torch.equal(cut.generate(prompt, do_sample=False, **options), expected)


@pytest.mark.ranks(4)
@for_each(way=WAYS[4])
def test_what_a_tensor_group_receives_is_what_costs_says(way):
    """Beside the rows that travel: three exchanges a layer in forward, two in backward, over no tensor group."""
    with live(way) as groups, keep_fp64():
        cut = make("mixtral")
        parts = communication_volumes(cut, groups.topology, 16)
        parallelize(cut, groups)
        ids = torch.randint(2, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
        with count_collectives() as counted:
            cut(input_ids=ids, labels=ids).loss.backward()
        layers = cut.config.num_hidden_layers
        assert counted.calls("all_to_all") == 5 * layers
        received = counted.received() - counted.received("all_to_all")
        assert received == sum(part.elements for part in parts.values())
        assert counted.calls() - 5 * layers == sum(part.calls for part in parts.values())
