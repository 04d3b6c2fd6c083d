import pytest
import torch

from par_layers import select_experts

from ..helpers import numbers


def test_the_best_experts_are_chosen_best_first():
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    assert select_experts(scores, 3).tolist() == [[1, 2, 3]]


def test_a_bias_decides_who_is_chosen():
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    assert select_experts(scores, 2, bias=torch.tensor([0.5, 0.0, 0.0, 0.0])).tolist() == [[0, 1]]


def test_a_choice_has_no_gradient():
    scores = numbers(3, 4).requires_grad_()
    assert not select_experts(scores, 2).requires_grad


def test_groups_are_ranked_by_their_two_best():
    # The best expert of all is in the second group, whose two best are 0.9 + 0.0; the first group's are 0.6 + 0.5.
    scores = torch.tensor([[0.6, 0.5, 0.1, 0.9, 0.0, 0.0]])
    assert select_experts(scores, 2, group_limit=(2, 1)).tolist() == [[0, 1]]
    assert select_experts(scores, 2, group_limit=(2, 2)).tolist() == [[3, 0]]


def test_experts_of_groups_that_are_left_out_are_never_chosen_though_all_others_have_scores_below_zero():
    # Masked with 0, as early DeepSeek-V3 code did, an expert of a group that is left out would beat negative scores.
    scores = torch.zeros(1, 8)
    bias = torch.tensor([-1.0, -1.0, -1.0, -1.0, -2.0, -2.0, -2.0, -2.0])
    assert sorted(select_experts(scores, 4, bias=bias, group_limit=(2, 1))[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("experts", "top_k", "group_limit", "message"),
    [
        (4, 5, None, "top_k is 5, but there are 4 experts"),
        (4, 0, None, "give a number from 1 to 4"),
        (6, 1, (4, 2), "6 experts do not divide into 4 groups"),
        (4, 1, (4, 2), "are fewer than two each"),
        (8, 1, (2, 3), "keeps 3 of 2 groups"),
        (8, 5, (4, 2), "2 kept groups have 4 experts .* keep at least 3 groups"),
    ],
)
def test_what_cannot_be_chosen_is_refused(experts, top_k, group_limit, message):
    with pytest.raises(ValueError, match=message):
        select_experts(torch.zeros(2, experts), top_k, group_limit=group_limit)
