import pytest
import torch

from par_layers import select_experts

from ..helpers import numbers


def test_select_experts_returns_the_best_first():
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    assert select_experts(scores, 3).tolist() == [[1, 2, 3]]


def test_select_experts_adds_the_bias_for_the_selection():
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    assert select_experts(scores, 2, bias=torch.tensor([0.5, 0.0, 0.0, 0.0])).tolist() == [[0, 1]]


def test_select_experts_has_no_gradient():
    scores = numbers(3, 4).requires_grad_()
    assert not select_experts(scores, 2).requires_grad


def test_groups_are_ranked_by_their_two_best_scores():
    # The best expert of all is in the second group, whose two best are 0.9 + 0.0; the first group's are 0.6 + 0.5.
    scores = torch.tensor([[0.6, 0.5, 0.1, 0.9, 0.0, 0.0]])
    assert select_experts(scores, 2, n_group=2, topk_group=1).tolist() == [[0, 1]]
    assert select_experts(scores, 2, n_group=2, topk_group=2).tolist() == [[3, 0]]


def test_excluded_groups_lose_against_negative_scores():
    # Masked with 0, as early DeepSeek-V3 code did, an expert of a group that is left out would beat negative scores.
    scores = torch.zeros(1, 8)
    bias = torch.tensor([-1.0, -1.0, -1.0, -1.0, -2.0, -2.0, -2.0, -2.0])
    assert sorted(select_experts(scores, 4, bias=bias, n_group=2, topk_group=1)[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "message"),
    [
        (4, 5, (1, 1), "top_k=5: there are 4 experts; pass 1 to 4"),
        (4, 0, (1, 1), "top_k=0: there are 4 experts"),
        (6, 1, (4, 2), "6 experts do not divide into 4 groups"),
        (4, 1, (4, 2), "groups need two experts each"),
        (8, 1, (2, 3), "topk_group=3: out of range with n_group=2; pass 1 to 2"),
        (8, 5, (4, 2), "topk_group=2 groups have 4 experts; pass topk_group of at least 3"),
    ],
)
def test_select_experts_rejects_impossible_numbers(experts, top_k, groups, message):
    n_group, topk_group = groups
    with pytest.raises(ValueError, match=message):
        select_experts(torch.zeros(2, experts), top_k, n_group=n_group, topk_group=topk_group)
