import pytest
import torch.distributed as dist

from par_groups import Box, Sharding, check_owned, whole


@pytest.mark.ranks(4)
def test_right_records_pass_over_every_covering_group():
    """Two pipeline stages (ranks 01 and 23) with a weight cut in two and a norm on both, and a tied one on all."""
    rank = dist.get_rank()
    stage, half = rank // 2, rank % 2
    pair = (stage * 2, stage * 2 + 1)
    mine = [
        (f"stage{stage}.weight", Sharding((4, 3), (Box((half * 2, 0), (2, 3), 0, (3, 1), (rank,)),))),
        (f"stage{stage}.norm", whole((3,), pair)),
        ("tied", whole((5,), (0, 1, 2, 3))),
        ("empty", whole((0,), (0, 1, 2, 3))),
    ]
    check_owned(mine)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    check_owned(mine, groups[stage])


@pytest.mark.ranks(2)
def test_wrong_copies_and_uncovering_groups_are_errors_on_every_rank():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="own 6 elements of 'norm', which has 3: its boxes' copies are wrong"):
        check_owned([("norm", whole((3,), (rank,)))])
    with pytest.raises(ValueError, match="own 2 elements of 'half', which has 4"):
        check_owned([("half", Sharding((4,), (Box((0,), (2,), 0, (1,), (0, 1)),)))])
    with pytest.raises(ValueError, match="different global shapes"):
        check_owned([("weight", whole((3 + rank,), (0, 1)))])


@pytest.mark.ranks(4)
def test_one_tensor_may_have_another_name_on_each_of_its_ranks():
    """Two pipelines (ranks 02 and 13) of two stages, which tie two tables and a bias."""
    rank = dist.get_rank()
    stage = rank // 2
    names = [("embedding", "in"), ("head", "out")][stage]
    every = (0, 1, 2, 3)
    tied = [*((f"{name}.weight", whole((5, 4), every)) for name in names), (f"{names[0]}.bias", whole((5,), every))]
    check_owned([*tied, (f"norm{stage}", whole((3,), (2 * stage, 2 * stage + 1)))])
    lost = [("lost", whole((5, 4), (0, 1)))] if rank == 1 else []  # rank 0, which would count it, has it under no name
    with pytest.raises(ValueError, match="own 0 elements of 'lost', which has 20"):
        check_owned([*tied, *lost])
