import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from par_groups import Channels, ProcessGroups, Split, Topology, launch, register_mode
from par_groups._torch_private import timeout_of
from par_groups.live import process_groups as _process_groups


@register_mode("ladder_of_live_groups")
def ladder(size: int) -> Split:
    return Split(axes=(("rail", size // 2), ("rung", 2)), declare=(("data", "rung"),))


def summed(group):
    """The sum of the global ranks of a group, asked of the group itself."""
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value, group=group)
    return value.item()


CONFIGS = [
    {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
    {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}},
    {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
    {"tensor": {"size": 8, "mode": "3d"}},
    {"tensor": {"size": 4, "mode": "ladder_of_live_groups"}},
    {"sequence": 2, "expert": 2},
    {},
]


@pytest.mark.ranks(8)
def test_every_axis_and_product_has_a_working_group_of_the_right_ranks():
    rank = dist.get_rank()
    for config in CONFIGS:
        topology = Topology.from_config(config, 8)
        with ProcessGroups(topology, declare=[("data", "sequence")]) as groups:
            for axes in (*topology.axes, *topology.products, *topology.declared, ("data", "sequence")):
                expected = topology.group(axes, rank)
                assert tuple(dist.get_process_group_ranks(groups[axes])) == expected == groups.ranks(axes)
                assert dist.get_rank(groups[axes]) == groups.rank(axes)
                assert dist.get_world_size(groups[axes]) == groups.size(axes)
                assert summed(groups[axes]) == sum(expected)


@pytest.mark.ranks(8)
def test_experts_have_the_groups_of_their_view_and_a_communicator_of_their_own():
    parallel = {"tensor": {"size": 2, "mode": "1d"}, "expert": {"size": 4, "tensor": 1}}
    with ProcessGroups(Topology.from_config(parallel, 8)) as groups:
        rank = dist.get_rank()
        assert groups.ranks("expert_parallel") == tuple(range(rank - rank % 4, rank - rank % 4 + 4))
        assert groups.ranks(("data", "expert_data")) == (rank % 4, rank % 4 + 4)
        assert groups.ranks(("data", "sequence", "expert")) == tuple(range(rank % 2, 8, 2))
        for axes in ("expert_parallel", ("data", "expert_data"), ("data", "sequence", "expert")):
            assert summed(groups[axes]) == sum(groups.ranks(axes))
        (private,) = groups.channels("expert_parallel", 1)
        assert summed(private) == sum(groups.ranks("expert_parallel"))
        assert private is not groups["expert_parallel"]
        assert groups["data", "expert_data"] is groups["data"]  # the same ranks, one communicator
    with ProcessGroups(Topology.from_config({"expert": 8}, 8)) as groups:  # all of the data group's ranks
        (private,) = groups.channels("expert_parallel", 1)
        assert private is not groups["data", "sequence", "expert"]
        assert dist.get_world_size(groups["data", "expert_data"]) == 1


@pytest.mark.ranks(4, init=False)
def test_groups_have_the_timeout_of_the_world_or_their_own():
    topology, cpu = Topology.from_config({"pipeline": 2}, 4), torch.device("cpu")
    with launch(timeout=230):
        for given, seconds in ((None, 230), (170, 170)):
            with ProcessGroups(topology, timeout=given) as groups:
                for axes in ("data", "pipeline"):
                    assert timeout_of(groups[axes], cpu).seconds == seconds


@pytest.mark.ranks(4)
def test_equal_rank_sets_share_one_communicator():
    topology = Topology.from_config({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 4)
    with ProcessGroups(topology.alias("stage", "tensor"), declare=[("expert", "tensor")]) as groups:
        assert groups["model"] is dist.group.WORLD
        assert groups["tensor"] is groups["stage"] is groups["expert", "tensor"]
        assert groups["data"] is groups["sequence"]
        assert groups["pipeline"] is not groups["tensor"]
        assert groups["model"] is not groups["tensor"]


@pytest.mark.ranks(4)
def test_five_create_destroy_cycles_leave_the_group_count_unchanged():
    topology = Topology.from_config({"pipeline": 2}, 4)
    before = len(_world.pg_map)
    for _ in range(5):
        with ProcessGroups(topology, declare=[Channels("pipeline", 2)]) as groups:
            assert summed(groups["data"]) == sum(groups.ranks("data"))
            assert summed(groups["tensor"]) == dist.get_rank()
            assert len(_world.pg_map) == before + 5  # data, pipeline, this rank alone, two channels
        groups.destroy()
        assert len(_world.pg_map) == before
    assert summed(None) == 6  # the default group is not ours to end


@pytest.mark.ranks(2)
def test_two_topologies_live_in_one_process():
    with (
        ProcessGroups(Topology({"data": 2, "tensor": 1})) as actor,
        ProcessGroups(Topology({"data": 1, "tensor": 2})) as critic,
    ):
        assert summed(actor["data"]) == summed(critic["tensor"]) == 1
        assert summed(actor["tensor"]) == summed(critic["data"]) == dist.get_rank()


@pytest.mark.ranks(4)
def test_different_topologies_raise_on_all_ranks():
    rank = dist.get_rank()
    axes = {"a": 2, "b": 2} if rank < 3 else {"b": 2, "a": 2}
    with pytest.raises(ValueError, match=r"different topologies.*ranks \[0, 1, 2\]: .*ranks \[3\]: "):
        ProcessGroups(Topology(axes))
    with pytest.raises(ValueError, match=r"ranks \[0\]: .*is of 2 ranks, but 4 run"):
        ProcessGroups(Topology({"a": 4} if rank else {"a": 2}))
    with pytest.raises(ValueError, match="different topologies"):
        ProcessGroups(Topology({"a": 2, "b": 2}), declare=[("a", "b")] if rank else [])
    assert summed(None) == 6


@pytest.mark.ranks(2)
def test_a_wrong_size_or_declaration_raises_on_all_ranks():
    with pytest.raises(ValueError, match=r"Topology\(a=3\) is of 3 ranks, but 2 run; change a size"):
        ProcessGroups(Topology({"a": 3}))
    with pytest.raises(ValueError, match="declare: there is no axis 'b'"):
        ProcessGroups(Topology({"a": 2}), declare=["b"])
    with pytest.raises(ValueError, match="timeout is 0"):
        ProcessGroups(Topology({"a": 2}), timeout=0)


@pytest.mark.ranks(8)
def test_an_undeclared_group_is_an_error_until_all_ranks_add_it():
    with ProcessGroups(Topology({"a": 2, "b": 2, "c": 2})) as groups:
        with pytest.raises(ValueError, match=r"no group over \('a', 'c'\).*declare=\[\('a', 'c'\)\]"):
            groups["a", "c"]
        with pytest.raises(ValueError, match="no axis 'd'"):
            groups["d"]
        with pytest.raises(ValueError, match="0 channels over 'a' were declared, 1 are asked for"):
            groups.channels("a", 1)
        groups.add(("a", "c"))
        assert summed(groups["a", "c"]) == sum(groups.ranks(("a", "c")))
        groups.add(Channels("a", 2))
        assert len(set(groups.channels("a", 2))) == 2


@pytest.mark.ranks(4)
def test_channels_are_private_communicators():
    with ProcessGroups(Topology({"data": 2, "pipeline": 2}), declare=[Channels("pipeline", 2)]) as groups:
        first, second = groups.channels("pipeline", 2)
        assert groups.channels("pipeline", 1) == (first,)
        assert len({first, second, groups["pipeline"]}) == 3
        assert summed(second) == sum(groups.ranks("pipeline"))
    with ProcessGroups(Topology.from_config({"sequence": {"size": 2, "mode": "ring"}}, 4)) as groups:
        first, second = groups.channels("sequence", 2)  # the mode declares them, and the group of all different tokens
        assert len({first, second, groups["sequence"]}) == 3
        assert summed(second) == sum(groups.ranks("sequence"))
        assert groups["data", "sequence"].size() == 4


@pytest.mark.ranks(8)
def test_a_mesh_is_made_from_the_very_same_groups():
    topology = Topology.from_config({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, 8)
    rank = dist.get_rank()
    with ProcessGroups(topology, declare=[("pipeline", "row")]) as groups:
        before = len(_world.pg_map)
        mesh = groups.mesh(("pipeline", "tensor"))
        assert mesh.mesh_dim_names == ("pipeline", "tensor")
        assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert mesh.get_group("tensor") is groups["tensor"]
        assert mesh.get_group("pipeline") is groups["pipeline"]
        assert mesh.get_coordinate() == (rank // 4, rank % 4)
        cut = groups.mesh(("pipeline", "row"))
        assert cut.mesh.flatten().tolist() == list(groups.ranks(("pipeline", "row")))
        line = groups.mesh("col")
        assert line.mesh.tolist() == list(groups.ranks("col"))
        assert len(_world.pg_map) == before
        with pytest.raises(ValueError, match="in the topology's order"):
            groups.mesh(("tensor", "pipeline"))


@pytest.mark.ranks(8)
def test_a_mesh_with_a_product_around_another_axis():
    topology = Topology({"pipeline": 2, "sequence": 2, "tensor": 2}).alias("model", ("pipeline", "tensor"))
    with ProcessGroups(topology, declare=["model"]) as groups, torch.device("meta"):
        mesh = groups.mesh(("model", "sequence"))
        assert mesh.get_coordinate() == (groups.rank("model"), groups.rank("sequence"))
        assert mesh.mesh.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
        assert mesh.mesh[:, groups.rank("sequence")].tolist() == list(groups.ranks("model"))


@pytest.mark.ranks(4)
def test_rank_seeds_differ_exactly_along_the_named_axes():
    with ProcessGroups(Topology({"data": 2, "tensor": 2})) as groups:
        mine = [groups.rank_seed(axes, 7) for axes in ("data", "tensor", ("data", "tensor"), ())]
        every = [None] * 4
        dist.all_gather_object(every, mine)
        by_data, by_tensor, by_both, common = zip(*every, strict=True)
        assert by_data[0] == by_data[1] != by_data[2] == by_data[3]
        assert by_tensor[0] == by_tensor[2] != by_tensor[1] == by_tensor[3]
        assert len(set(by_both)) == 4
        assert len(set(common)) == 1
        assert groups.rank_seed("data", 8) != mine[0]
        assert groups.is_master == (dist.get_rank() == 0)


def test_without_a_running_world_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"call par_groups\.launch"):
        ProcessGroups(Topology({"data": 1}))


@pytest.mark.ranks(1, init=False)
def test_one_rank_of_a_huge_fake_world_makes_its_own_groups_only():
    dist.init_process_group("fake", rank=77_777, world_size=102_400)
    topology = Topology.from_config({"pipeline": 16, "tensor": {"size": 8, "mode": "3d"}}, 102_400)
    start = time.process_time()
    groups = ProcessGroups(topology)
    assert time.process_time() - start < 60  # seconds of this process; 0.05 measured, and hours if it made all groups
    assert groups.size("data") == 800
    # The world; data to weight without those of size 1, tensor, model; two declared.
    assert len(_world.pg_map) == 1 + 7 + 2


@pytest.mark.ranks(2)
def test_groups_are_split_by_name_only_where_all_ranks_have_made_as_many():
    cpu = torch.device("cpu")
    assert _process_groups._is_same_everywhere(_process_groups.number_of_groups(), cpu)
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    assert not _process_groups._is_same_everywhere(_process_groups.number_of_groups(), cpu)
