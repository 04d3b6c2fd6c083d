"""Models of transformers, as they are: what they compute, train and generate on several ranks is one device's."""

import pytest
import torch

from par_layers import communication_volumes, parallelize, verify_plan
from par_testing import count_collectives, for_each, keep_fp64, once, storm

from .helpers import FAMILIES, FURTHER, MIXED, assert_steps_equal, labels, live, make, tokens

transformers = pytest.importorskip("transformers", minversion="5.4")


APART = ("llama", "tied llama with biases", "gpt2", "phi3", "mixtral", "deepseek")
"""Shared heads, biases, one weight for query, key and value, with shared heads too, experts, latent attention."""
OTHERS = tuple(family for family in FAMILIES if family not in APART)


@pytest.mark.parametrize(
    ("families", "sequence"),
    [
        pytest.param(APART[1:], False, marks=pytest.mark.ranks(2, timeout=240), id="2 ranks, whole sequence"),
        pytest.param(OTHERS, True, marks=pytest.mark.ranks(2, timeout=240), id="2 ranks, sequence parallel"),
        pytest.param(
            APART, True, marks=[pytest.mark.storm, pytest.mark.ranks(4, timeout=240)], id="4 ranks, sequence parallel"
        ),
    ],
)
def test_families_equal_one_device(families, sequence):
    """Each somewhere, and on 4 ranks, where heads of keys are copied, those that differ."""
    check_families(check, families, sequence)


@pytest.mark.storm
@pytest.mark.ranks([2, 4], timeout=240)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "sequence parallel"])
def test_every_family_equals_one_device(sequence):
    check_families(check, FAMILIES, sequence)


def check_families(check_one, families, sequence):
    with live(sequence_parallel=sequence) as groups, keep_fp64():
        for family in families:
            try:
                check_one(family, groups)
            except Exception as error:
                error.add_note(f"in the family {family}")
                raise


def check(family, groups):
    whole, cut = make(family), make(family)
    assert parallelize(cut, groups) is cut
    assert_steps_equal(whole, cut, groups)
    if family == "bert":
        return
    for model in (whole.eval(), cut.eval()):
        if hasattr(model.config, "output_router_logits"):
            model.config.output_router_logits = False  # which transformers 5.4 cannot do while it generates
    prompt, attended = tokens(length=5), torch.ones(2, 5, dtype=torch.int64)
    caches = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    for cache in caches if family in {"llama", "gemma3"} else caches[:1]:
        options = {"attention_mask": attended, "max_new_tokens": 3, "do_sample": False, **cache}
        assert torch.equal(cut.generate(prompt, **options), once(whole.generate, prompt, **options)), cache


@pytest.mark.ranks(2, timeout=120)
def test_parts_of_layers_that_are_not_cut_see_the_whole_sequence():
    """Recurrent layers, gathered attention, rows of experts, statistics of an MLP's features, lists of norms."""
    whole, split = ("olmo2", "inkling", "gemma 3n", "mimo v2"), ("olmo2", "llama 4", "qwen3 next", "longcat", "hy v4")
    for sequence, families in {False: whole, True: split}.items():
        known = [family for family in families if hasattr(transformers, f"{MIXED[family][0]}ForCausalLM")]
        check_families(check_costs, known, sequence)  # others are not in an older release


def check_costs(family, groups):
    whole, cut = make(family), make(family)
    parts = communication_volumes(cut, groups.topology, tokens().numel())
    parallelize(cut, groups)
    with count_collectives() as counted:
        cut(input_ids=tokens(), labels=labels(2), use_cache=False).loss.backward()
    if family not in ("llama 4", "hy v4"):  # a copy of every token for each expert; several streams for each token
        assert counted.received() == sum(part.elements for part in parts.values())
    cut.zero_grad()
    assert_steps_equal(whole, cut, groups, use_cache=False)


@for_each(sequence=(storm(False), True))
@pytest.mark.ranks(4)
def test_plans_of_further_families_are_proven(sequence):
    """Of one whose loss is ours, and of one that computes its loss itself, of whole logits."""
    batch = {"input_ids": tokens(), "labels": labels(2)}
    with live(sequence_parallel=sequence) as groups, keep_fp64():
        for family in FURTHER:
            compared = verify_plan(lambda family=family: make(family), groups, batch)
            assert compared.worst < 1e-10, (family, compared)  # fp64 sums in another order
