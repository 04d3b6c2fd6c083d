import pytest

from par_groups import Topology

OK = [
    ({"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "2d"}}, 8, {"pipeline": 2, "tensor": 4, "data": 1}),
    ({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, 8, {"pipeline": 2, "tensor": 4, "data": 1}),
    ({"pipeline": 2}, 8, {"pipeline": 2, "tensor": 1, "data": 4}),
    ({"tensor": {"size": 4, "mode": "2d"}}, 8, {"pipeline": 1, "tensor": 4, "data": 2}),
    ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, 8, {"depth": 2, "row": 2, "col": 2}),
    ({"tensor": {"size": 8, "mode": "3d"}}, 8, {"output": 2, "input": 2, "weight": 2}),
    ({"tensor": {"size": 4, "mode": "1d"}}, 4, {"tensor": 4}),
    ({"tensor": 1}, 3, {"data": 3, "tensor": 1}),
    ({"tensor": {"size": 1}}, 3, {"data": 3, "tensor": 1}),
    ({"tensor": {"size": 1, "mode": "2d"}}, 3, {"data": 3, "row": 1, "col": 1, "tensor": 1}),
    ({"data": 4}, 4, {"data": 4}),
    ({"data": {"size": 4}}, 4, {"data": 4}),
    ({"data": -1, "pipeline": 2}, 8, {"data": 4}),
    ({"data": 2, "pipeline": -1}, 8, {"pipeline": 4}),
    ({"tensor": {"size": 4, "mode": "1d", "sequence_parallel": True}}, 4, {"tensor": 4}),
    ({"sequence": {"size": 2, "mode": "ring"}}, 4, {"sequence": 2, "data": 2}),
    ({"sequence": {"size": 2, "mode": "ulysses"}}, 4, {"sequence": 2, "data": 2}),
    ({"expert": 2}, 4, {"expert": 2, "data": 2}),
    ({}, 5, {"data": 5, "model": 1}),
    (None, 5, {"data": 5, "model": 1}),
]

WRONG = [
    ({"pipeline": 2, "tensor": 4}, 8, r"size 4 but no mode.*'1d', '2\.5d', '2d', '3d'"),
    ({"tensor": {"size": 4}}, 8, "size 4 but no mode"),
    ({"tensor": {"mode": "1d"}}, 8, "without a size"),
    ({"pipelin": 2}, 8, "unknown key 'pipelin'; did you mean 'pipeline'"),
    ({"pipeline": {"size": 2, "mode": "1d"}}, 8, "unknown key 'mode'"),
    ({"pipeline": {"size": 2, "stages": 4}}, 8, "unknown key 'stages'"),
    ({"tensor": {"size": 2, "sequence_parallel": True}}, 8, "no mode that takes them"),
    ({"pipeline": 3}, 8, r"8 ranks is not a multiple of pipeline 3 = 3; start 3 ranks or a multiple"),
    ({"pipeline": 16}, 8, "not a multiple of pipeline 16 = 16"),
    ({"data": 3}, 8, "8 ranks is not data 3 = 3; start 3 ranks, or leave data out"),
    ({"tensor": {"size": 8, "mode": "2d"}}, 8, "needs q[*]q ranks"),
    ({"tensor": {"size": 12, "mode": "2.5d", "depth": 2}}, 12, "needs q[*]q[*]depth"),
    ({"tensor": {"size": 9, "mode": "3d"}}, 9, "needs q[*]q[*]q"),
    ({"pipeline": -1}, 8, "data and pipeline cannot both be inferred"),
    ({"data": -1, "pipeline": -1}, 8, "cannot both be inferred"),
    ({"pipeline": 0}, 8, "parallel pipeline is 0; it must be at least 1"),
    ({"pipeline": -2}, 8, "is -2; it must be at least 1"),
    ({"pipeline": 2.0}, 8, "is 2.0; it must be a whole number"),
    ({"pipeline": True}, 8, "is True; it must be a whole number"),
    ({"pipeline": "2"}, 8, "is '2'; it must be a whole number"),
    ({"pipeline": None}, 8, "is None; it must be a whole number"),
    ([("pipeline", 2)], 8, "must be a dict"),
    ({}, 0, "world_size is 0"),
]


@pytest.mark.parametrize(("parallel", "world", "sizes"), OK)
def test_a_good_config(parallel, world, sizes):
    topology = Topology.from_config(parallel, world)
    assert {axes: topology.size(axes) for axes in sizes} == sizes
    assert topology.world_size == world


@pytest.mark.parametrize(("parallel", "world", "message"), WRONG)
def test_a_wrong_config_names_the_value_the_rule_and_a_remedy(parallel, world, message):
    with pytest.raises(ValueError, match=message):
        Topology.from_config(parallel, world)


def test_options_of_the_mode_are_kept():
    topology = Topology.from_config({"tensor": {"size": 4, "mode": "1d", "sequence_parallel": True}}, 4)
    assert topology.modes["tensor"] == ("1d", {"sequence_parallel": True})


def test_every_axis_is_there_even_when_the_config_is_empty():
    assert list(Topology.from_config({}, 2).axes) == ["data", "pipeline", "sequence", "expert", "tensor"]
