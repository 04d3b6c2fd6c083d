import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_groups import Segment, Segments, cut, segments_of, set_segments, set_slots, sharding_of, slots_of, whole


def packed(shapes, start, stop):
    """Elements start .. stop - 1 of several tensors that lie one after another: one ZeRO rank's flat buffer."""
    segments, begin = [], 0
    for number, shape in enumerate(shapes):
        tensor = whole(shape, (0,))
        low, high = max(start - begin, 0), min(max(stop - begin, 0), tensor.numel)
        if low < high:
            segments.append(Segment(f"p{number}", cut(tensor, low, high, offset=begin + low - start)))
        begin += tensor.numel
    return Segments(segments)


shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4)


@given(shapes, st.data())
def test_a_flat_buffer_gives_its_ranges_back_by_name(shapes, data):
    tensors = [torch.randn(shape) for shape in shapes]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=3)))
    restored = {f"p{number}": torch.full(shape, torch.nan) for number, shape in enumerate(shapes)}
    for start, stop in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
        buffer = flat[start:stop].clone()
        set_segments(buffer, packed(shapes, start, stop))
        for name, box, view in segments_of(buffer).views(buffer):
            restored[name][box.slices] = view
    for number, tensor in enumerate(tensors):
        assert restored[f"p{number}"].equal(tensor)


def test_an_ordinary_tensor_packs_itself():
    tensor = torch.randn(2, 3)
    segments = segments_of(tensor, "weight")
    assert segments.names == ("weight",)
    ((name, box, view),) = segments.views(tensor)
    assert name == "weight"
    assert box.size == (2, 3)
    assert view.data_ptr() == tensor.data_ptr()


def test_a_flat_tensor_has_no_single_sharding():
    flat = torch.zeros(4)
    set_segments(flat, packed([(2,), (2,)], 0, 4))
    with pytest.raises(ValueError, match=r"packs \('p0', 'p1'\); use segments_of"):
        sharding_of(flat)


def test_names_find_their_sharding():
    segments = packed([(2, 2), (3,)], 1, 6)
    assert len(segments) == 2
    assert segments["p1"].boxes[0].size == (2,)
    assert segments == packed([(2, 2), (3,)], 1, 6)
    assert segments != packed([(2, 2), (3,)], 1, 5)


def test_what_repeats_parameters_says_so():
    packed_again = Segments(packed([(2, 2)], 0, 4), derived=True)
    assert packed_again.derived
    assert "derived=True" in repr(packed_again)
    assert packed_again != packed([(2, 2)], 0, 4)
    assert packed_again == Segments(packed([(2, 2)], 0, 4), derived=True)


def test_wrong_segments_are_refused():
    with pytest.raises(ValueError, match="'a' is packed twice"):
        Segments([Segment("a", whole((2,), (0,)))] * 2)
    with pytest.raises(ValueError, match="ends at 3, but the tensor has 3"):
        set_segments(torch.zeros(3), Segments([Segment("a", whole((4,), (0,)))]))
    with pytest.raises(ValueError, match="hold 6 elements, but the tensor has 3"):
        set_segments(torch.zeros(3), Segments([Segment(name, whole((3,), (0,))) for name in "ab"]))


def test_memory_that_is_ready_for_state_is_known_by_the_name_of_the_slot():
    tensor, ready = torch.zeros(3), torch.zeros(3)
    assert not slots_of(tensor)
    set_slots(tensor, {"exp_avg": ready})
    assert slots_of(tensor)["exp_avg"] is ready
