"""Existing models that are cut over tensor ranks and whose sequence is cut too: one device's losses and gradients."""

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import Context, PartialGradientReducer, layer_set, parallelization_of, parallelize
from par_testing import assert_equal_to_one_device, keep_fp64

from .helpers import VOCABULARY, Mlp, close, make

transformers = pytest.importorskip("transformers", minversion="5.4")

EXACT = 1e-10  # fp64: sums in another order
LENGTH = 14
DOCUMENTS = [[LENGTH], [5, 1, LENGTH - 6]]


def batch():
    """Two rows, of which the second one has three documents."""
    ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels, positions = ids.clone(), torch.stack([torch.cat(list(map(torch.arange, row))) for row in DOCUMENTS])
    labels[positions == 0] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def check(family, mode, sequence_parallel, **more):
    options = {"output_router_logits": False} if family == "mixtral" else {}  # whose loss is refused
    whole, cut = make(family, **options), make(family, **options)
    one = whole(**batch(), use_cache=False)
    one.loss.backward()
    tensor = {"size": 2, "mode": "1d", "sequence_parallel": sequence_parallel}
    topology = Topology.from_config({"sequence": {"size": 2, "mode": mode}, "tensor": tensor, **more}, 4)
    with ProcessGroups(topology) as groups:
        context = Context(groups, block=4)
        parallelize(context.transformers_(cut), groups)
        mine, tokens = context.cut(batch(), multiple=2, pad=True)
        parallel = cut(**mine, par_tokens=tokens)
        loss = context.sum(parallel.loss)
        close(loss, one.loss, EXACT)
        close(context.gather(parallelization_of(cut).gather(parallel.logits), tokens), one.logits, EXACT)
        loss.backward()
        PartialGradientReducer(cut, groups).handle_gradient()
        for name, parameter in cut.named_parameters():
            if not (more and ".experts." in name):  # whose gradient is of all tokens already
                dist.all_reduce(parameter.grad, group=groups["sequence"])
            parameter.grad /= 2
        assert_equal_to_one_device(
            cut, whole, gradients=True, rtol=EXACT, atol=EXACT, reason="fp64 sums in another order"
        )


@pytest.mark.ranks(4)
def test_tensor_ranks_cut_the_tokens_of_a_sequence_rank():
    """Norms of queries and keys have partial gradients; 14 tokens are filled up to 16."""
    with keep_fp64():
        check("qwen3", "gather", sequence_parallel=True)
        check("tied llama with biases", "ulysses", sequence_parallel=False)


@pytest.mark.ranks(4)
def test_experts_are_folded_into_the_ranks_of_a_sequence():
    """Four parts of experts, over two tensor ranks of each of two ranks of a sequence."""
    with keep_fp64():
        for sequence_parallel in (False, True):
            check("mixtral", "gather", sequence_parallel, expert={"size": 4, "tensor": 1})


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2", "phi3", "mixtral"])
def test_families_that_are_cut_in_both_ways(family):
    with keep_fp64():
        for mode, sequence_parallel in (("ring", True), ("gather", False), ("ulysses", True)):
            check(family, mode, sequence_parallel)


@pytest.mark.ranks(4)
def test_what_would_see_its_own_tokens_alone_is_refused():
    plan, config = {"up": "colwise", "down": "rowwise"}, {"sequence": 2, "tensor": {"size": 2, "mode": "1d"}}
    with ProcessGroups(Topology.from_config(config, 4)) as groups:
        with pytest.raises(
            ValueError, match=r"would only see a rank's own tokens; call context\.transformers_\(model\)"
        ):
            parallelize(make("llama"), groups)
        with pytest.raises(ValueError, match="or keep the Context as an attribute of the module that attends with it"):
            parallelize(Mlp(), groups, plan)
        own = Mlp()
        own.context = layer_set("auto", groups).context
        assert parallelize(own, groups, plan).up.weight.shape == (8, 8)
        context = Context(groups)
        with pytest.raises(
            ValueError, match=r"'transformer\.drop' drops a part of 0\.1 .* of a sequence .* set it to 0"
        ):
            parallelize(context.transformers_(make("gpt2", embd_pdrop=0.1)), groups)
