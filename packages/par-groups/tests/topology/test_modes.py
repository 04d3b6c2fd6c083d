import pytest

from par_groups import Split, Topology, register_mode


@register_mode("ladder")
def ladder(size: int, *, rungs: int = 2) -> Split:
    return Split(axes=(("rail", size // rungs), ("rung", rungs)), declare=(("data", "rung"),))


@register_mode("careless")
def careless(size: int) -> Split:
    return Split(axes=(("left", size), ("right", 2)))


def test_a_mode_of_our_own_cuts_the_tensor_group():
    topology = Topology.from_config({"tensor": {"size": 6, "mode": "ladder", "rungs": 3}}, 12)
    assert topology.axes == {"data": 2, "pipeline": 1, "sequence": 1, "expert": 1, "rail": 2, "rung": 3}
    assert topology.group("rung", 0) == (0, 1, 2)
    assert topology.group("rail", 1) == (1, 4)
    assert topology.declared == (("data", "rung"),)
    assert topology.modes["tensor"] == ("ladder", {"rungs": 3})


def test_the_error_that_lists_modes_lists_ours():
    with pytest.raises(ValueError, match="'ladder'"):
        Topology.from_config({"tensor": 4}, 4)


def test_a_taken_name_is_refused_and_names_both_owners():
    with pytest.raises(ValueError, match=r"registered twice, by par_groups\.topology\.modes\._two_d and by .*another"):

        @register_mode("2d")
        def another(size: int) -> Split:
            return Split()


def test_only_axes_with_modes_take_one():
    with pytest.raises(ValueError, match="did you mean 'tensor'"):
        register_mode("ladder", axis="tensors")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"size": 6, "mode": "ladder", "rung": 3}, "takes no option 'rung'.*did you mean 'rungs'"),
        ({"size": 4, "mode": "1d", "depth": 2}, "takes no option 'depth'"),
        ({"size": 8, "mode": "1d", "kv_heads": 3}, "kv_heads=3 does not divide the 8 ranks"),
        ({"size": 8, "mode": "1d", "kv_heads": 0}, "kv_heads is 0"),
        ({"size": 8, "mode": "1d", "kv_heads": True}, "kv_heads is True"),
        ({"size": 8, "mode": "2.5d"}, "needs the option 'depth'"),
        ({"size": 8, "mode": "2.5d", "depth": 0}, "depth is 0"),
        (
            {"size": 8, "mode": "2.5d", "depth": 3},
            "needs q[*]q[*]depth with depth=3 ranks, but the size is 8; use 3 or 12",
        ),
        ({"size": 8, "mode": "2d"}, "needs q[*]q ranks, but the size is 8; use 4 or 9"),
        ({"size": 4, "mode": "3d"}, "needs q[*]q[*]q ranks, but the size is 4; use 1 or 8"),
        ({"size": 4, "mode": "4d"}, "no tensor mode is called '4d'"),
        ({"size": 4, "mode": 2}, "has mode=2"),
        ({"size": 4, "mode": "careless"}, "which is 8"),
    ],
)
def test_a_wrong_mode_or_option_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        Topology.from_config({"tensor": config}, 72)


def test_fewer_key_and_value_heads_than_ranks_are_copied_over_neighbours():
    topology = Topology.from_config({"tensor": {"size": 4, "mode": "1d", "kv_heads": 2}}, 8)
    assert topology.axes == {"data": 2, "pipeline": 1, "sequence": 1, "expert": 1, "kv_head": 2, "kv_copy": 2}
    assert topology.leaves("tensor") == ("kv_head", "kv_copy")
    assert topology.group("kv_copy", 5) == (4, 5)
    assert topology.modes["tensor"] == ("1d", {"kv_heads": 2})


@pytest.mark.parametrize("kv_heads", [None, 4, 8])
def test_enough_key_and_value_heads_leave_the_tensor_axis_whole(kv_heads):
    topology = Topology.from_config({"tensor": {"size": 4, "mode": "1d", "kv_heads": kv_heads}}, 4)
    assert topology.leaves("tensor") == ("tensor",)


def test_sequence_modes_leave_the_axis_whole():
    topology = Topology.from_config({"sequence": {"size": 2, "mode": "ring"}}, 2)
    assert topology.size("sequence") == 2
    assert topology.modes["sequence"] == ("ring", {})
    with pytest.raises(ValueError, match="no sequence mode is called '2d'"):
        Topology.from_config({"sequence": {"size": 4, "mode": "2d"}}, 4)
