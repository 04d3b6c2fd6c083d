"""The loss of balance of transformers' models over ranks with other tokens: that of one device with all of them."""

import copy

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import parallelize, sync_aux_loss_
from par_testing import for_each, keep_fp64

from .helpers import VOCABULARY, close, make

pytest.importorskip("transformers", minversion="5.4")

TENSOR = {"size": 2, "mode": "1d"}
WAYS = {"experts": {"expert": 2}, "data": {"data": 2}}
FAMILIES = ("mixtral", "qwen3 with experts", "gpt-oss")
EXACT = 1e-6  # in fp64, but transformers computes this loss in fp32


def live(way):
    return ProcessGroups(Topology.from_config(WAYS[way], dist.get_world_size()))


def batch():
    """Of both ranks, rows one after another: each has its own two, and padding of its own length."""
    ids = torch.randint(2, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[2, 1:] = 0
    return ids, mask


def summed(parameter):
    """This rank's gradient and those of others: of an expert that is dealt out, its copies alone."""
    if sharding_of(parameter).shape == tuple(parameter.shape):
        dist.all_reduce(parameter.grad)
    return parameter.grad


@pytest.mark.ranks(2)
@for_each(family=FAMILIES, way=WAYS)
def test_the_mean_over_ranks_is_what_one_device_adds(family, way):
    """Gradients of the whole loss; without the call they differ, since choices are not balanced alike on the ranks."""
    ids, _ = batch()
    with live(way) as groups, keep_fp64():
        whole = make(family)
        apart, cut = (parallelize(make(family), groups) for _ in range(2))
        assert sync_aux_loss_(sync_aux_loss_(cut, groups), groups) is cut
        cut = copy.deepcopy(cut)
        expected = whole(input_ids=ids, labels=ids)
        expected.loss.backward()
        part = ids.chunk(2)[dist.get_rank()]
        differs = False
        for model in (apart, cut):
            outputs = model(input_ids=part, labels=part)
            (outputs.loss / 2).backward()
            mean = torch.stack([outputs.aux_loss, outputs.loss]).detach() / 2
            dist.all_reduce(mean)
            gradients = {name: summed(parameter) for name, parameter in model.named_parameters()}
            if model is apart:
                differs = not torch.allclose(mean[0], expected.aux_loss, rtol=EXACT)
                continue
            close(mean, torch.stack([expected.aux_loss, expected.loss]), EXACT)
            for name, gradient in gradients.items():
                for box in sharding_of(cut.get_parameter(name)).boxes:
                    close(box.of(gradient), whole.get_parameter(name).grad[box.slices], EXACT)
        assert differs


@pytest.mark.ranks(2)
@for_each(way=WAYS)
def test_ranks_with_padding_weigh_what_their_tokens_weigh(way):
    ids, mask = batch()
    with live(way) as groups, keep_fp64():
        whole, cut = make("mixtral"), sync_aux_loss_(parallelize(make("mixtral"), groups), groups)
        expected = whole(input_ids=ids, attention_mask=mask).aux_loss
        expected.backward()
        part, counts = ids.chunk(2)[dist.get_rank()], mask.chunk(2)[dist.get_rank()]
        found = cut(part, counts).aux_loss * counts.sum() / mask.sum()
        found.backward()
        total = found.detach()
        dist.all_reduce(total)
        close(total, expected, EXACT)
        for here, there in zip(cut.model.layers, whole.model.layers, strict=True):
            close(summed(here.mlp.gate.weight), there.mlp.gate.weight.grad, EXACT)


@pytest.mark.ranks(2)
def test_evaluation_is_a_matter_of_one_rank():
    with live("data") as groups:
        model = sync_aux_loss_(make("mixtral"), groups).eval()
        ids, _ = batch()
        if dist.get_rank() == 0:  # which would wait for the other one
            with torch.no_grad():
                assert model(input_ids=ids).aux_loss > 0


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # peft asks by the older name
@pytest.mark.ranks(2)
def test_adapters_may_be_around_the_model():
    peft = pytest.importorskip("peft", minversion="0.21")
    with live("data") as groups:
        ids, _ = batch()
        inside = make("mixtral", dtype=torch.float32)
        whole = inside(input_ids=ids).aux_loss.detach()
        model = peft.get_peft_model(inside, peft.LoraConfig(target_modules=["q_proj"]))
        found = sync_aux_loss_(model, groups)(input_ids=ids.chunk(2)[dist.get_rank()]).aux_loss.detach() / 2
        dist.all_reduce(found)
        close(found, whole, EXACT)


@pytest.mark.ranks(2)
def test_what_adds_no_such_loss_is_refused():
    with live("data") as groups:
        for family in ("llama", "deepseek"):
            with pytest.raises(TypeError, match=r"does not say, .* what loss of balance it adds"):
                sync_aux_loss_(make(family), groups)
        model = sync_aux_loss_(make("mixtral"), groups)
        with pytest.raises(ValueError, match="return_dict=False; sync_aux_loss_ needs True"):
            model(input_ids=batch()[0], return_dict=False)
