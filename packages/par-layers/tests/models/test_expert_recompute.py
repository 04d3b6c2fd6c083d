"""Routers of transformers' models that run again in backward: experts get the rows that they had in forward."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology
from par_layers import pack_experts_, parallelize
from par_testing import for_each, keep_fp64

from .helpers import VOCABULARY, close, make

pytest.importorskip("transformers", minversion="5.4")

TENSOR = {"size": 2, "mode": "1d"}
WAYS = {
    "own axis": {"expert": 2},
    "folded": {"expert": {"size": 2, "tensor": 1}, "tensor": TENSOR},
    "each cut": {"tensor": TENSOR},
}
FAMILIES = {
    "mixtral": {},
    "qwen3 with experts": {"mlp_only_layers": []},
    "deepseek": {"n_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 0},
    "gpt-oss": {},
}
"""By name what is other than in the models that these tests share; all layers have experts."""
CASES = [("mixtral", "own axis", False), ("gpt-oss", "own axis", True), ("deepseek", "folded", False)]
OTHERS = [
    *((family, "own axis", reentrant) for family in FAMILIES for reentrant in (False, True)),
    *((family, way, True) for family in ("mixtral", "deepseek") for way in ("folded", "each cut")),
]
NOISE = 1e-8
NEARLY = 1e-5  # a thousand times the noise: gradients of this model are that much larger


def live(way):
    return ProcessGroups(Topology.from_config(WAYS[way], dist.get_world_size()))


def routers_of(model):
    blocks = [module for module in model.modules() if hasattr(module, "experts")]
    return [block.router if hasattr(block, "router") else block.gate for block in blocks]


def tied(family):
    """A model whose scores nearly tie, but for the last expert: what is chosen of the others is up to rounding."""
    model = make(family, output_router_logits=False, **FAMILIES[family])
    for router in routers_of(model):
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            almost = NOISE / 10 * torch.randn(router.weight[:-1].shape, generator=generator, dtype=torch.float64)
            router.weight[:-1] = router.weight[0] + almost
            for bias in (getattr(router, "bias", None), getattr(router, "e_score_correction_bias", None)):
                if bias is not None:
                    bias.zero_()
    return model


def batch(groups):
    generator = torch.Generator().manual_seed(groups.rank(("data", "sequence", "expert")))
    return torch.randint(2, VOCABULARY, (2, 6), generator=generator)


def recompute_(model, **options):
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(options)


def disturb(model):
    """Changes what routers multiply with a little, and says nothing of that to autograd."""
    for number, router in enumerate(routers_of(model)):
        generator = torch.Generator().manual_seed(number)
        router.weight.data += NOISE * torch.randn(router.weight.shape, generator=generator, dtype=torch.float64)


@contextmanager
def choices_of(model):
    """A context in which is written down, in a list for each module, what experts are chosen."""
    seen: dict[int, list[torch.Tensor]] = {}
    handles = []
    for number, module in enumerate(each.experts for each in model.modules() if hasattr(each, "experts")):

        def note(module, args, number=number):
            seen.setdefault(number, []).append(args[1].clone())

        handles.append(module.register_forward_pre_hook(note))
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("cases", [CASES, pytest.param(OTHERS, marks=pytest.mark.storm)], ids=["typical", "others"])
def test_a_recompute_takes_the_choice_of_its_forward(cases):
    """Two graphs wait; between forward and backward everything changes a little, and near ties would swap."""
    for case in cases:
        try:
            check(*case)
        except Exception as error:
            error.add_note(str(case))
            raise


def check(family, way, reentrant):
    with live(way) as groups, keep_fp64():
        plain, again = (parallelize(tied(family), groups) for _ in range(2))
        recompute_(again, use_reentrant=reentrant)
        again.enable_input_require_grads()
        ids = batch(groups)
        for model in (plain, again):
            with choices_of(model) as seen:
                losses = [model(input_ids=each, labels=each).loss for each in (ids, ids.flip(0, 1))]
                disturb(model)
                torch.stack(losses).sum().backward()
                if model is plain:
                    model(input_ids=ids)
        assert len(seen) == 2
        for first, second, *backward in seen.values():
            assert sorted(each.tolist() for each in backward) == sorted([first.tolist(), second.tolist()])
        for name, parameter in plain.named_parameters():
            close(again.get_parameter(name).grad, parameter.grad, NEARLY)


@pytest.mark.ranks(2)
def test_this_noise_does_change_choices():
    with live("own axis") as groups, keep_fp64():
        for family in FAMILIES:
            model, ids = parallelize(tied(family), groups), batch(groups)
            with choices_of(model) as seen, torch.no_grad():
                model(input_ids=ids)
                disturb(model)
                model(input_ids=ids)
            assert not all(torch.equal(*both) for both in seen.values()), family


@pytest.mark.ranks(2)
def test_a_generator_that_is_not_restored_is_refused():
    with live("own axis") as groups, keep_fp64():
        model = parallelize(tied("mixtral"), groups)
        recompute_(model, use_reentrant=False, preserve_rng_state=False)
        ids = batch(groups)
        loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(
            ValueError, match=r"'model.layers.1.mlp': a router is recomputed .* preserve_rng_state=True"
        ):
            loss.backward()


class Sorted(nn.Module):
    """A block of one's own, whose router does not choose by topk."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(nn.ModuleDict({n: nn.Linear(6, 6) for n in "ud"}) for _ in range(4))
        pack_experts_(self.experts, None, "u", "d")
        self.shift = 0

    def forward(self, x):
        scores, ids = self.gate(x).softmax(-1).sort(-1, descending=True)
        shift, self.shift = self.shift, self.shift + (dist.get_rank() == 1)
        return self.experts(x, (ids[:, :2] + shift) % 4, scores[:, :2])


@pytest.mark.ranks(2)
def test_every_rank_hears_of_another_choice_that_cannot_be_replayed():
    """Here the second rank's router chooses anew."""
    words = r"'1.experts': ids of rank 1 are out of range 0 .. 3.* not those of its forward; choose by torch.topk"
    with live("own axis") as groups:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Sorted()).double()
        parallelize(model, groups, {"1.experts": "ep_dispatch_experts"})
        x = torch.randn(5, 6, dtype=torch.float64)
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        with pytest.raises(ValueError, match=words):
            y.sum().backward()


@pytest.mark.ranks(2)
@for_each(family=FAMILIES)
def test_every_rank_hears_which_router_has_scores_that_are_no_numbers(family):
    for way, ranks in (("own axis", "1"), ("folded", "0, 1")):
        with live(way) as groups, keep_fp64():
            model = parallelize(make(family, output_router_logits=False, **FAMILIES[family]), groups)
            if way == "folded" or dist.get_rank() == 1:
                with torch.no_grad():
                    routers_of(model)[1].weight[2, 3] = torch.nan
            words = rf"'model.layers.1.mlp.experts': ids of rank {ranks} are out of range .* NaN scores"
            with pytest.raises(ValueError, match=words):
                model(input_ids=batch(groups))
