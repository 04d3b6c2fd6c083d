"""The view "experts": who holds what, against a count over all ranks."""

import itertools
import math

import pytest

from par_groups import Channels, Topology


def spread(world, *, experts, cut_over=None, **others):
    """A topology with experts: `cut_over` None gives them an axis of their own."""
    tensor = others.pop("tensor", 1)
    parallel = {"expert": experts if cut_over is None else {"size": experts, "tensor": cut_over}, **others}
    return Topology.from_config(parallel | {"tensor": {"size": tensor, "mode": "1d"}}, world)


def folded_worlds():
    """Every pipeline, sequence, tensor and data size with folded experts, in worlds of up to 64 ranks."""
    for pipeline, sequence, tensor, parts in itertools.product((1, 2), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 6, 8)):
        for cut_over in {1, tensor}:
            stage = math.lcm(sequence * tensor, parts * cut_over)
            for data in (1, 2, 3):
                world = data * pipeline * stage
                if world <= 64:
                    yield world, data, pipeline, sequence, tensor, parts, cut_over


def test_eight_ranks_of_tensor_2_with_four_parts_of_whole_experts():
    topology = spread(8, tensor=2, experts=4, cut_over=1)
    assert topology.axes == {"data": 2, "pipeline": 1, "sequence": 1, "expert": 2, "tensor": 2}
    assert topology.group(("data", "sequence", "expert"), 0) == (0, 2, 4, 6)
    assert topology.group("expert_parallel", 0) == (0, 1, 2, 3)
    assert topology.group(("data", "expert_data"), 0) == (0, 4)
    assert topology.declared == (("data", "expert_data"), ("data", "sequence", "expert"))
    assert topology.channels == (Channels(("expert_parallel",), 1),)


@pytest.mark.parametrize("tensor", [1, 2])
def test_an_int_is_an_axis_whose_experts_are_cut_over_tensor(tensor):
    topology = spread(8 * tensor, sequence=2, tensor=tensor, experts=2)
    sizes = {"data": 2, "pipeline": 1, "expert_data": 2, "expert_parallel": 2, "expert_tensor": tensor}
    assert topology.views["experts"].axes == sizes
    for mine, theirs in {"expert_parallel": "expert", "expert_tensor": "tensor", "expert_data": "sequence"}.items():
        assert topology.blocks(mine) == topology.blocks(theirs)
    assert spread(8 * tensor, sequence=2, tensor=tensor, experts={"size": 2}) == topology


def test_every_folding_deals_the_ranks_of_a_stage_out_by_counting_them():
    worlds = 0
    for world, data, pipeline, sequence, tensor, parts, cut_over in folded_worlds():
        options = {"pipeline": pipeline, "sequence": sequence, "tensor": tensor}
        topology = spread(world, experts=parts, cut_over=cut_over, **options)
        stage = world // data // pipeline
        assert topology.size("data") == data
        assert topology.size(("sequence", "expert", "tensor")) == stage
        for rank in range(world):
            first, place = rank - rank % stage, rank % stage
            part, slice_ = place // cut_over % parts, place % cut_over
            same_stage = [other for other in range(world) if other // stage % pipeline == rank // stage % pipeline]
            alike = [
                other
                for other in same_stage
                if (other % stage) // cut_over % parts == part and other % stage % cut_over == slice_
            ]
            begin = first + place - place % (parts * cut_over)
            assert topology.coords(rank, view="experts") == {
                "data": rank // stage // pipeline,
                "pipeline": rank // stage % pipeline,
                "expert_data": place // (parts * cut_over),
                "expert_parallel": part,
                "expert_tensor": slice_,
            }
            assert topology.group(("data", "expert_data"), rank) == tuple(alike)
            assert topology.group("expert_parallel", rank) == tuple(
                begin + other * cut_over + slice_ for other in range(parts)
            )
            dense = tuple(other for other in same_stage if other % tensor == rank % tensor)
            assert topology.group(("data", "sequence", "expert"), rank) == dense
            if cut_over > 1:
                assert topology.group("expert_tensor", rank) == topology.group("tensor", rank)
        worlds += 1
    assert worlds > 400


def test_the_axis_of_their_own_has_no_more_ranks_than_needed():
    """A smaller one leaves a stage that the experts' parts do not divide."""
    for _, _, _, sequence, tensor, parts, cut_over in folded_worlds():
        stage = math.lcm(sequence * tensor, parts * cut_over)
        own = spread(stage, sequence=sequence, tensor=tensor, experts=parts, cut_over=cut_over).size("expert")
        assert all(sequence * tensor * fewer % (parts * cut_over) for fewer in range(1, own))
        assert sequence * tensor * own % (parts * cut_over) == 0


@pytest.mark.parametrize("sequence", [4, {"size": 4, "mode": "2d", "ulysses": 2}])
def test_json_keeps_the_view_and_what_it_declares(sequence):
    topology = spread(16, tensor=2, sequence=sequence, experts=4, cut_over=1)
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert again.digest() == topology.digest()
    assert again.channels == topology.channels
    assert again.group("expert_parallel", 9) == topology.group("expert_parallel", 9) == (8, 9, 10, 11)
    assert topology.digest() != spread(16, tensor=2, sequence=sequence, experts=2, cut_over=1).digest()


def test_without_experts_there_is_no_view():
    assert Topology.from_config({"expert": 1, "sequence": 2}, 4) == Topology.from_config({"sequence": 2}, 4)
    assert not Topology.from_config({}, 4).views
    one = spread(4, tensor=2, experts=1, cut_over=1)
    assert one.views["experts"].axes["expert_data"] == 2
    assert one.channels == ()


def test_describe_and_draw_show_the_view(tmp_path):
    pytest.importorskip("matplotlib")
    topology = spread(8, tensor=2, experts=4, cut_over=1)
    text = topology.describe()
    assert "experts: expert_parallel      4       1       2  0 1 2 3" in text
    assert "data x expert_data            2       4       4  0 4" in text
    assert "1 private communicator over expert_parallel" in text
    topology.draw(tmp_path / "ranks.svg")
    assert "experts: expert_parallel: 2 groups of 4" in (tmp_path / "ranks.svg").read_text()


WRONG = [
    ({"expert": {"tensor": 1}}, "'expert'.* without a size: expert=dict"),
    ({"expert": {"size": 4, "tensr": 1}}, "unknown key 'tensr'; it takes a size, and tensor"),
    ({"expert": {"size": 4, "mode": "1d"}}, "unknown key 'mode'; it takes a size, and tensor"),
    ({"expert": {"size": 4, "tensor": 2}}, "expert.tensor is 2; an expert can be cut over 1, as the tensor axis has"),
    ({"expert": {"size": 2, "tensor": 2}, "tensor": {"size": 4, "mode": "1d"}}, "is 2; .* cut over 1 or 4, the size"),
    ({"expert": {"size": 4, "tensor": None}}, "expert.tensor is None"),
    ({"expert": {"size": 4, "tensor": True}}, "expert.tensor is True"),
    ({"expert": {"size": 0, "tensor": 1}}, "expert.size is 0; it must be at least 1"),
    ({"expert": {"size": -1, "tensor": 1}, "data": 1}, "parallel expert has size -1, but where experts are folded"),
    ({"expert": {"size": 2, "tensor": 1}, "data": 1, "sequence": -1}, "give the size of sequence"),
    ({"expert": 2, "tensor": {"size": 4, "mode": "2d"}}, "experts need tensor mode '1d' or none, the config has '2d'"),
    ({"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 4, "mode": "2d"}}, "'1d' or none, the config has '2d'"),
    ({"expert": {"size": 3, "tensor": 1}}, "8 ranks is not a multiple of expert 3 = 3"),
    ({"expert": {"size": 2, "tensor": 1}, "tensor": 4}, "size 4 but no mode"),
]


@pytest.mark.parametrize(("parallel", "message"), WRONG)
def test_a_wrong_config_of_experts_is_named(parallel, message):
    with pytest.raises(ValueError, match=message):
        Topology.from_config(parallel, 8)
