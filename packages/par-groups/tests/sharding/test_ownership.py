import pytest
import torch.distributed as dist

from par_groups import Box, Sharding, check_owned, whole
from par_testing import count_collectives


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


@pytest.mark.ranks([1, 4])
def test_right_records_cost_two_numbers():
    rank, size = dist.get_rank(), dist.get_world_size()
    cut = [(f"{n}.weight", Sharding((size, 3), (Box((rank, 0), (1, 3), 0, (3, 1), (rank,)),))) for n in range(50)]
    with count_collectives() as counted:
        check_owned([*cut, ("norm", whole((3,), range(size)))])
    assert counted.calls() == counted.calls("all_reduce") == 1
    assert counted.bytes() == 16


@pytest.mark.ranks(4)
def test_ranks_with_other_names_send_numbers_and_no_names(monkeypatch):
    """Slices, as ZeRO deals them out: each rank has its own, and "shared" lies on two of them."""
    rank = dist.get_rank()
    monkeypatch.setattr(dist, "all_gather_object", None)  # whoever calls it fails
    mine = [(f"{rank}.weight", whole((7,), (rank,)))] * (rank % 2)  # ranks 0 and 2 have none
    start = 2 * (rank // 2)
    half = Sharding((4,), (Box((start,), (2,), 0, (1,), (start, start + 1)),))
    check_owned([*mine, (f"stage{rank // 2}", whole((2,), (start, start + 1))), ("shared", half)])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="own 10 elements of 'twice', which has 5"):
        check_owned([*mine, *([("twice", whole((5,), (rank,)))] if rank in (0, 3) else [])])
    with pytest.raises(ValueError, match="own 2 elements of 'shared', which has 4"):
        check_owned([*mine, *([("shared", half)] if rank < 2 else [])])


@pytest.mark.ranks(2)
def test_shapes_that_differ_are_named_where_nobody_counts_anything_twice():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="'weight' has different global shapes"):
        check_owned([("weight", whole((2, 3) if rank else (3, 2), (rank,)))])
    with pytest.raises(ValueError, match="'weight' has different global shapes"):  # on one rank already
        check_owned([("weight", whole((3,), (0, 1))), ("weight", whole((4,), (0, 1)))])


@pytest.mark.ranks(2)
def test_parts_of_one_tensor_may_come_one_by_one():
    rank = dist.get_rank()
    parts = [Sharding((4,), (Box((2 * rank + n,), (1,), 0, (1,), (rank,)),)) for n in range(2)]
    check_owned([("weight", part) for part in parts])
