"""Lanes: which topologies divide them, and sums of their parts."""

import pytest

from par_groups import LaneCounts, Topology, tree


class Term(str):
    """A text whose sum shows the order of additions."""

    __slots__ = ()

    def __add__(self, other):
        return Term(f"({self}{other})")


def added(text):
    return tree([Term(letter) for letter in text])


def test_tree_adds_neighbours_first():
    assert added("a") == "a"
    assert added("abcd") == "((ab)(cd))"
    assert added("abcdef") == "(((ab)(cd))(ef))"


@pytest.mark.parametrize(("lanes", "ranks"), [(8, 2), (8, 4), (8, 8), (12, 3), (6, 3), (3, 3)])
def test_tree_over_ranks_adds_as_on_one_rank(lanes, ranks):
    letters, each = "abcdefghijkl"[:lanes], lanes // ranks
    assert tree([added(letters[start : start + each]) for start in range(0, lanes, each)]) == added(letters)


@pytest.mark.parametrize(("tensor", "size"), [(8, 4), (12, 3), (6, 1), (1, 1)])
def test_lanes_that_ranks_divide_pass(tensor, size):
    LaneCounts(data=4, tensor=tensor).check(Topology.from_config({"tensor": {"size": size, "mode": "1d"}}, 2 * size))


@pytest.mark.parametrize(("tensor", "size"), [(1, 2), (6, 4), (6, 2), (12, 2)])
def test_lanes_without_one_subtree_a_rank_raise(tensor, size):
    topology = Topology.from_config({"tensor": {"size": size, "mode": "1d"}}, size)
    with pytest.raises(ValueError, match=f"tensor={tensor} must be a power of two times the {size} tensor ranks"):
        LaneCounts(data=4, tensor=tensor).check(topology)


def test_data_lanes_that_do_not_divide_raise():
    with pytest.raises(ValueError, match="lanes=4: they do not divide among 3 data ranks; pass a multiple of 3"):
        LaneCounts(data=4).check(Topology.from_config({}, 3))


@pytest.mark.parametrize(
    "tensor", [{"size": 4, "mode": "2d"}, {"size": 8, "mode": "2.5d", "depth": 2}, {"size": 8, "mode": "3d"}], ids=str
)
def test_tensor_modes_without_lanes_raise(tensor):
    topology = Topology.from_config({"tensor": tensor}, 8)
    with pytest.raises(
        ValueError, match=f"tensor mode '{tensor['mode']}' with lanes: .*size={tensor['size']}, mode='1d'"
    ):
        LaneCounts(data=8, tensor=8).check(topology)


@pytest.mark.parametrize("mode", ["ring", "ulysses", "2d"])
def test_sequence_modes_without_lanes_raise(mode):
    topology = Topology.from_config({"sequence": {"size": 4, "mode": mode}}, 4)
    with pytest.raises(ValueError, match=rf"sequence mode '{mode}' .*; use sequence=dict\(size=4, mode='gather'\)"):
        LaneCounts(data=8, sequence=4).check(topology)


@pytest.mark.parametrize("number", [0, -1, 2.0, True])
def test_lanes_that_are_no_count_raise(number):
    with pytest.raises(ValueError, match=f"sequence={number!r} must be a positive integer"):
        LaneCounts(data=1, sequence=number)
