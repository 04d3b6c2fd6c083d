"""Ranks agree, or all of them raise."""

import pickle
import re

import pytest
import torch.distributed as dist

from par_groups import agree, check_alike, together


def test_a_rank_alone_needs_no_group():
    assert agree(None, "mine") == {0: "mine"}
    with pytest.raises(TypeError, match=r"^a text$"):
        agree(TypeError("a text"), "mine")


@pytest.mark.ranks(4)
def test_all_ranks_know_what_each_says_also_over_rows_and_columns():
    rank = dist.get_rank()
    assert agree(None, rank * rank, None) == {0: 0, 1: 1, 2: 4, 3: 9}
    row, column = (
        next(
            group
            for group, ranks in [(dist.new_group(ranks), ranks) for ranks in groups]  # every rank makes every group
            if rank in ranks
        )
        for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    )
    assert list(agree(None, (), row)) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert agree(None, str(rank), row, column) == {0: "0", 1: "1", 2: "2", 3: "3"}
    for own in range(4):
        problem = KeyError("here") if rank == own else None
        with pytest.raises(KeyError if problem else ValueError, match="here" if problem else f"rank {own}: KeyError: "):
            agree(problem, "", row, column)


@pytest.mark.ranks(3)
def test_the_lowest_rank_s_problem_is_told_where_several_have_one():
    problem = {1: ValueError("first"), 2: TypeError("second")}.get(dist.get_rank())
    words = "^rank 1: ValueError: first$" if problem is None else f"^{problem}$"
    with pytest.raises(ValueError if problem is None else type(problem), match=words):
        agree(problem, "", None)


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_pickle_is_everybodys_problem():
    with pytest.raises((AttributeError, pickle.PicklingError, ValueError), match="pickle"):
        agree(None, (lambda: None) if dist.get_rank() else 0, None)


def test_ranks_that_said_the_same_are_alike():
    check_alike({3: (1, "a"), 5: (1, "a")}, "options")


@pytest.mark.parametrize(
    ("said", "options", "message"),
    [
        (
            {2: "x", 3: "x", 5: "y"},
            {},
            "rank 5 has other plans than rank 2 (rank 5: y; rank 2: x); give all ranks the same",
        ),
        (
            {0: 1, 1: 2, 2: 2},
            {},
            "ranks [1, 2] have other plans than rank 0 (rank 1: 2; rank 0: 1); give all ranks the same",
        ),
        ({0: 1, 1: 2}, {"show": False, "remedy": "wait"}, "rank 1 has other plans than rank 0; wait"),
    ],
)
def test_a_difference_names_the_ranks_the_values_and_the_remedy(said, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_alike(said, "plans", **options)


@pytest.mark.ranks(2)
def test_a_block_ends_well_on_all_ranks_or_raises_on_all():
    rank, done = dist.get_rank(), []

    def act(step, *groups, fails):
        with together(step, *groups):
            if fails:
                raise KeyError("here")
            done.append(step)

    act("both", None, fails=False)
    with pytest.raises(KeyError if rank else ValueError, match="here" if rank else "^rank 1: KeyError: 'here'$"):
        act("rank 0", None, fails=rank == 1)
    assert done == (["both"] if rank else ["both", "rank 0"])
    with pytest.raises(ValueError, match=r"^rank 1 has other steps than rank 0 \(rank 1: step 1; rank 0: step 0\)"):
        act(f"step {rank}", None, fails=False)
    if rank:
        with pytest.raises(KeyError, match="here"):
            act("alone", fails=True)


class Unreadable(Exception):
    """An error whose own code fails."""

    def __str__(self):
        raise OSError("no text")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["lone surrogate", "no text", "letters"])
def test_a_text_that_cannot_be_encoded_reaches_all_ranks(kind):
    problem, words = {
        "lone surrogate": (FileNotFoundError("weights-\udcff.bin"), r"FileNotFoundError: weights-\\udcff\.bin"),
        "no text": (Unreadable(), r"Unreadable: its text cannot be read \(OSError\)"),
        "letters": (OSError("\u00fc\u6587"), "OSError: \u00fc\u6587"),
    }[kind]
    if dist.get_rank():
        with pytest.raises(type(problem)) as caught:
            agree(problem, None, None)
        assert caught.value is problem
    else:
        with pytest.raises(ValueError, match=f"^rank 1: {words}$") as caught:
            agree(None, None, None)
        assert str(caught.value).encode()
