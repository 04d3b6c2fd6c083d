import pytest

from par_groups import Channels, Split, Topology, register_mode


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


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (4, ("gather", {})),
        ({"size": 4}, ("gather", {})),
        ({"size": 4, "split": "zigzag"}, ("gather", {"split": "zigzag"})),
        ({"size": 4, "mode": "gather", "parts": 2, "keep": True}, ("gather", {"parts": 2, "keep": True})),
        ({"size": 4, "mode": "ring", "split": "balanced"}, ("ring", {"split": "balanced"})),
        ({"size": 4, "mode": "ulysses", "split": "contiguous"}, ("ulysses", {"split": "contiguous"})),
    ],
)
def test_sequence_modes_leave_the_axis_whole_and_keep_their_options(config, mode):
    topology = Topology.from_config({"sequence": config}, 8)
    assert topology.leaves("sequence") == ("sequence",)
    assert topology.modes["sequence"] == mode
    assert topology.declared == (("data", "sequence"),)
    assert topology.channels == ((Channels(("sequence",), 2),) if mode[0] == "ring" else ())
    assert Topology.from_json(topology.to_json()) == topology


def test_a_sequence_of_one_rank_has_the_mode_that_it_names_alone():
    assert "sequence" not in Topology.from_config({}, 2).modes
    assert "sequence" not in Topology.from_config({"sequence": 1}, 2).modes
    topology = Topology.from_config({"sequence": {"size": 1, "mode": "ring"}}, 2)
    assert (topology.modes["sequence"], topology.declared, topology.channels) == (("ring", {}), (), ())


def test_the_2d_sequence_mode_has_ulysses_inside():
    config = {"size": 8, "mode": "2d", "ulysses": 2, "split": "zigzag"}
    topology = Topology.from_config({"sequence": config, "tensor": {"size": 2, "mode": "1d"}}, 32)
    assert topology.axes == {"data": 2, "pipeline": 1, "ring": 4, "ulysses": 2, "expert": 1, "tensor": 2}
    assert topology.group("ulysses", 1) == (1, 3)
    assert topology.group("ring", 1) == (1, 5, 9, 13)
    assert topology.group("sequence", 1) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert topology.modes["sequence"] == ("2d", {"ulysses": 2, "split": "zigzag"})
    assert topology.declared == (("data", "ring", "ulysses"),)
    assert topology.channels == (Channels(("ring",), 2),)
    assert Topology.from_json(topology.to_json()) == topology
    text = topology.describe()
    assert "2 private communicators over ring" in text
    assert "sequence mode: 2d {'ulysses': 2, 'split': 'zigzag'}" in text


def test_the_2d_sequence_mode_has_pairs_inside_where_nobody_says():
    for size in (2, 4):
        topology = Topology.from_config({"sequence": {"size": size, "mode": "2d"}}, size)
        assert (topology.axes["ring"], topology.axes["ulysses"]) == (size // 2, 2)


def test_the_2d_sequence_mode_may_gather_between_its_groups():
    config = {"size": 4, "mode": "2d", "ulysses": 4, "outer": "gather", "parts": 2, "keep": True}
    topology = Topology.from_config({"sequence": config}, 4)
    assert (topology.axes["ring"], topology.axes["ulysses"], topology.channels) == (1, 4, ())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mode": "rings"}, "no sequence mode is called 'rings'; did you mean 'ring'"),
        ({"split": "zig-zag"}, "mode 'gather': split is 'zig-zag'; did you mean 'zigzag'"),
        ({"split": 2}, "mode 'gather': split is 2; known: 'auto', 'contiguous', 'zigzag', 'balanced'"),
        ({"parts": 0}, "parts is 0; it must be a whole number of at least 1"),
        ({"parts": True}, "parts is True; it must be a whole number"),
        ({"keep": 1}, "keep is 1; it must be True or False"),
        ({"mode": "ring", "keep": True}, r"mode 'ring' takes no option 'keep' \(sequence\); known: 'split'"),
        (
            {"mode": "ulysses", "split": "zigzag"},
            "mode 'ulysses': split is 'zigzag', .*remove split, or use mode 'gather'",
        ),
        ({"mode": "2d", "ulysses": 3}, "ulysses=3 does not divide the 4 ranks; use one of 1, 2, 4"),
        ({"mode": "2d", "ulysses": 0}, "ulysses is 0; it must be a whole number of at least 1"),
        ({"mode": "2d", "ulysses": 2, "outer": "rings"}, "outer is 'rings'; did you mean 'ring'"),
        ({"mode": "2d", "ulysses": 2, "keep": True}, "parts and keep are of outer='gather', but outer is 'ring'"),
        ({"mode": "2d", "ulysses": 2, "parts": 2}, "parts and keep are of outer='gather', but outer is 'ring'"),
    ],
)
def test_a_wrong_sequence_mode_or_option_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        Topology.from_config({"sequence": {"size": 4, **config}}, 8)
