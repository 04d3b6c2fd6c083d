import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_groups import Topology, axis_size


def digits(groups):
    """Groups of one-digit ranks as the tables write them: "01 23"."""
    return " ".join("".join(map(str, group)) for group in groups)


PP2_TP2 = Topology.from_config({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 8)
PP2_2D = Topology.from_config({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, 8)
DEPTH2 = Topology.from_config({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, 8)
CUBE = Topology.from_config({"tensor": {"size": 8, "mode": "3d"}}, 8)
PP2_2D_DP2 = Topology.from_config({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, 16)
SEQUENCE = Topology.from_config({"pipeline": 2, "sequence": 2}, 8)

LAYOUTS = [
    (PP2_TP2, "data", "04 15 26 37"),
    (PP2_TP2, "model", "0123 4567"),
    (PP2_TP2, "pipeline", "02 13 46 57"),
    (PP2_TP2, "tensor", "01 23 45 67"),
    (PP2_2D, "pipeline", "04 15 26 37"),
    (PP2_2D, "col", "01 23 45 67"),
    (PP2_2D, "row", "02 13 46 57"),
    (DEPTH2, "col", "01 23 45 67"),
    (DEPTH2, "row", "02 13 46 57"),
    (DEPTH2, "depth", "04 15 26 37"),
    (CUBE, "weight", "01 23 45 67"),
    (CUBE, "input", "02 13 46 57"),
    (CUBE, "output", "04 15 26 37"),
    (CUBE, ("input", "weight"), "0123 4567"),
    (CUBE, ("output", "weight"), "0145 2367"),
    (SEQUENCE, ("data", "sequence"), "0145 2367"),
]


@pytest.mark.parametrize(("topology", "axes", "expected"), LAYOUTS)
def test_layout_of_eight_ranks(topology, axes, expected):
    assert digits(topology.groups(axes)) == expected


def test_layout_of_sixteen_ranks():
    assert list(PP2_2D_DP2.groups("data")) == [(rank, rank + 8) for rank in range(8)]
    assert list(PP2_2D_DP2.groups("model")) == [tuple(range(8)), tuple(range(8, 16))]
    first = [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(PP2_2D_DP2.groups("pipeline")) == first + [(a + 8, b + 8) for a, b in first]


def test_rank_formulas():
    for data, stage, row, col in itertools.product(range(2), repeat=4):
        rank = PP2_2D_DP2.rank(data=data, pipeline=stage, row=row, col=col)
        assert rank == data * (2 * 4) + stage * 4 + 2 * row + col
        assert rank == PP2_2D_DP2.rank(data=data, pipeline=stage, tensor=2 * row + col)
        assert rank == PP2_2D_DP2.rank(data=data, model=4 * stage + 2 * row + col)


MEGATRON = [
    ("tp-cp-ep-dp-pp", "tensor", "01 23 45 67"),
    ("tp-cp-ep-dp-pp", "data", "02 13 46 57"),
    ("tp-cp-ep-dp-pp", "pipeline", "04 15 26 37"),
    ("tp-pp-dp", "tensor", "01 23 45 67"),
    ("tp-pp-dp", "pipeline", "02 13 46 57"),
    ("tp-pp-dp", "data", "04 15 26 37"),
]


@pytest.mark.parametrize(("order", "axis", "expected"), MEGATRON)
def test_megatron_orders(order, axis, expected):
    assert digits(Topology.from_order(order, tp=2, dp=2, pp=2).groups(axis)) == expected
    assert digits(Topology.from_order(order, tp=2, pp=2, world_size=8).groups(axis)) == expected


@pytest.mark.parametrize(
    ("order", "sizes", "message"),
    [
        ("tp-xp", {}, "no axis 'xp'"),
        ("tp-dp", {"pp": 2}, "leaves out pp, whose size is 2"),
        ("tp-tp", {}, "given twice"),
    ],
)
def test_a_wrong_order_is_named(order, sizes, message):
    with pytest.raises(ValueError, match=message):
        Topology.from_order(order, **sizes)


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda sizes: math.prod(sizes) <= 600)


def named(sizes):
    return Topology({f"axis{position}": size for position, size in enumerate(sizes)})


@given(shapes, st.data())
def test_groups_partition_the_world(sizes, data):
    topology = named(sizes)
    axes = data.draw(st.lists(st.sampled_from(list(topology.axes)), unique=True))
    groups = list(topology.groups(axes))
    assert sorted(itertools.chain(*groups)) == list(range(topology.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        assert len(group) == topology.size(axes)
        for index, rank in enumerate(group):
            assert topology.group(axes, rank) == group
            assert topology.index(axes, rank) == index


@given(shapes)
def test_groups_of_two_axes_share_at_most_one_rank(sizes):
    topology = named(sizes)
    for one, other in itertools.combinations(topology.axes, 2):
        for rank in range(topology.world_size):
            shared = set(topology.group(one, rank)) & set(topology.group(other, rank))
            assert shared == {rank}


@given(shapes)
def test_coords_and_rank_are_inverse(sizes):
    topology = named(sizes)
    for rank in range(topology.world_size):
        coords = topology.coords(rank)
        assert topology.rank(**coords) == rank
        assert all(0 <= coords[name] < size for name, size in topology.axes.items())


@given(shapes, st.data())
def test_blocks_are_equal_exactly_if_the_groups_are(sizes, data):
    topology = named(sizes)
    subsets = st.lists(st.sampled_from(list(topology.axes)), unique=True)
    one, other = data.draw(subsets), data.draw(subsets)
    same = list(topology.groups(one)) == list(topology.groups(other))
    assert (topology.blocks(one) == topology.blocks(other)) == same


@given(shapes, st.data())
def test_json_gives_an_equal_topology(sizes, data):
    topology = named(sizes)
    axes = data.draw(st.lists(st.sampled_from(list(topology.axes)), unique=True, min_size=1))
    topology = topology.alias("some", axes).declare(axes)
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert hash(again) == hash(topology)
    assert again.declared == topology.declared


def test_json_keeps_modes_and_views():
    again = Topology.from_json(PP2_2D.view("flat", {"all": 8}).to_json())
    assert again.modes["tensor"] == ("2d", {})
    assert again.group("all", 0) == tuple(range(8))
    assert again != PP2_2D


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"axes": 3}', '{"axes": [["a", 0]]}', '{"axes": [["a"]]}'])
def test_json_that_is_no_topology_is_refused(text):
    with pytest.raises(ValueError, match=r"is no topology|must be at least 1|not enough values"):
        Topology.from_json(text)


def test_sizes_are_inferred_and_checked():
    assert Topology([("a", 2), ("b", -1)], world_size=12).axes == {"a": 2, "b": 6}
    wrong = [
        ([("a", -1), ("b", -1)], 8, "only one can be inferred"),
        ([("a", -1)], None, "give the world_size"),
        ([("a", 3), ("b", -1)], 8, "gives 3 ranks, which does not divide the 8"),
        ([("a", 3)], 8, "gives 3 ranks, which is not the 8"),
        ([("a", 2), ("a", 2)], 4, "'a' is given twice"),
        ([("a", 0)], None, "'a' is 0; it must be at least 1"),
        ([("a", -3)], None, "'a' is -3"),
        ([("a", "2")], None, "must be a whole number"),
        ([("", 2)], None, "not empty"),
    ]
    for axes, world, message in wrong:
        with pytest.raises(ValueError, match=message):
            Topology(axes, world)


def test_split_keeps_the_name_as_the_product_of_its_parts():
    topology = Topology({"data": 2, "tensor": 4}).alias("all", ("data", "tensor"))
    split = topology.split("tensor", [("row", 2), ("col", -1)])
    assert split.axes == {"data": 2, "row": 2, "col": 2}
    assert list(split.groups("tensor")) == list(topology.groups("tensor"))
    assert split.leaves("all") == ("data", "row", "col")
    assert topology.axes == {"data": 2, "tensor": 4}
    for axis, parts, message in [
        ("tensr", {"x": 4}, "did you mean 'tensor'"),
        ("tensor", {"x": 3}, "gives 3 ranks, which is not the 4"),
        ("tensor", {"data": 4}, "name is taken"),
        ("all", {"x": 8}, "no unsplit axis"),
    ]:
        with pytest.raises(ValueError, match=message):
            topology.split(axis, parts)


def test_a_view_is_a_second_factorisation_that_shares_axes():
    base = Topology({"pipeline": 2, "data": 4, "tensor": 2})
    topology = base.view("expert", {"pipeline": 2, "expert_data": 2, "expert": -1})
    assert topology.group("expert", 5) == (4, 5, 6, 7)
    assert topology.group(("pipeline", "expert_data"), 0) == (0, 4, 8, 12)
    assert topology.coords(13, view="expert") == {"pipeline": 1, "expert_data": 1, "expert": 1}
    assert topology.coords(13) == base.coords(13)
    assert topology.rank(pipeline=1, expert_data=1, expert=1) == 13
    with pytest.raises(ValueError, match="different factorisations"):
        topology.group(("tensor", "expert"), 0)
    with pytest.raises(ValueError, match=r"'tensor' is 2 ranks 8 apart, but 'tensor' .* is 2 ranks 1 apart"):
        base.view("expert", {"tensor": 2, "expert": 8})
    with pytest.raises(ValueError, match="already"):
        topology.view("expert", {"x": 16})
    with pytest.raises(ValueError, match="gives 8 ranks"):
        base.view("expert", {"x": 8})
    with pytest.raises(ValueError, match="no view 'experts'; did you mean 'expert'"):
        topology.coords(0, view="experts")


def test_a_view_may_share_an_axis_that_is_split_here():
    topology = PP2_2D_DP2.view("expert", {"expert_data": 4, "tensor": 4})
    assert topology.group("expert_data", 1) == (1, 5, 9, 13)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda t: t.group("tenso", 0), "no axis 'tenso'; did you mean 'tensor'"),
        (lambda t: t.size(("row", "tensor")), "name 'row' twice"),
        (lambda t: t.group("row", 8), "rank 8 is out of range"),
        (lambda t: t.coords(-1), "rank -1 is out of range"),
        (lambda t: t.rank(pipeline=2, tensor=0), "pipeline=2 is out of range"),
        (lambda t: t.rank(pipeline=0, row=0), "axis 'col' is missing"),
        (lambda t: t.rank(pipeline=0, tensor=0, row=0), "name 'row' twice"),
        (lambda t: t.alias("model", ("row",)), "'model' is taken"),
    ],
)
def test_a_wrong_question_is_named(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(PP2_2D)


BIG = """
import sys, tracemalloc
from par_groups import Topology, axis_size

def own_groups():
    topology = Topology.from_config({"pipeline": 16, "tensor": {"size": 8, "mode": "3d"}}, 102_400)
    return [topology.group(axes, 77_777) for axes in (*topology.axes, *topology.products)]

calls = []
sys.setprofile(lambda frame, event, function: calls.append(event))
own_groups()
sys.setprofile(None)
tracemalloc.start()
own_groups()
print(len(calls), tracemalloc.get_traced_memory()[1] / 1e6, "torch" in sys.modules)
"""


def test_a_hundred_thousand_ranks_are_little_work_and_small_and_need_no_torch():
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, check=True)
    calls, megabytes, torch = done.stdout.split()
    assert int(calls) < 102_400  # with returns, fewer than there are ranks
    assert float(megabytes) < 50
    assert torch == "False"


def test_a_new_name_must_mean_what_a_view_means_by_it():
    topology = Topology({"data": 4, "tensor": 2}).view("experts", [("expert_data", 4), ("expert", 2)])
    with pytest.raises(ValueError, match="view 'experts': its axis 'expert' is 2 ranks 1 apart, but 'expert' of this"):
        topology.split("data", [("expert", 2), ("rest", 2)])
    with pytest.raises(ValueError, match="view 'experts': its axis 'expert' is"):
        topology.alias("expert", "data")
    assert topology.alias("expert", "tensor").group("expert", 0) == (0, 1)


def test_describe_shows_every_axis_product_and_view():
    text = PP2_2D_DP2.declare(("data", "row")).view("flat", {"all": 16}).describe()
    assert "16 ranks" in text
    assert "tensor = row x col               4       1       4  0 1 2 3" in text
    assert "data x row                       4       -       4  0 2 8 10" in text
    assert "flat: all                       16       1       1  0 1 2 3 4 5 .. 15" in text
    assert "tensor mode: 2d" in text


def test_describe_of_many_ranks_stays_short():
    text = Topology.from_config({"pipeline": 16}, 102_400).describe()
    assert max(map(len, text.splitlines())) < 100
    assert "0 16 32 48 64 80 .. 102384" in text


@pytest.mark.parametrize(("world", "ending"), [(1, "svg"), (16, "png"), (102_400, "svg")])
def test_draw_writes_a_picture(tmp_path, world, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"ranks.{ending}"
    Topology.from_config({}, world).draw(path)
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if ending == "png" else b"<svg" in head or b"<?xml" in head


def test_axis_size_of_axes_products_and_absent_names():
    topology = Topology.from_config({"tensor": {"size": 4, "mode": "2d"}, "data": 3}, 12)
    assert [axis_size(topology, name) for name in ("data", "tensor", "sequence")] == [3, 4, 1]
