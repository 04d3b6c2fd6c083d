import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_checkpoint import Format, load, save
from par_checkpoint.state.conversion import TensorSlice, parts_cover, split
from par_groups import Box, Sharding, cut, whole


def stacked(shape):
    """One tensor in the files for each index of dim 0."""
    dims = tuple(range(1, len(shape)))
    return [
        TensorSlice(name=f"s{i}", shape=shape[1:], start=(i, *(0 for _ in dims)), dims=dims) for i in range(shape[0])
    ]


def joined(shape, dim, sizes):
    """Tensors in the files that lie one after another along a dim."""
    parts, low = [], 0
    for number, size in enumerate(sizes):
        start = tuple(low if d == dim else 0 for d in range(len(shape)))
        extent = tuple(size if d == dim else n for d, n in enumerate(shape))
        parts.append(TensorSlice(name=f"j{number}", shape=extent, start=start, dims=tuple(range(len(shape)))))
        low += size
    return parts


def permuted(shape, order):
    """One tensor in the files whose dims are in another order."""
    return [TensorSlice(name="p", shape=tuple(shape[d] for d in order), start=(0,) * len(shape), dims=tuple(order))]


def within(shape, offset, after):
    """A rectangle of a larger tensor in the files."""
    larger = tuple(o + n + a for o, n, a in zip(offset, shape, after, strict=True))
    dims = tuple(range(len(shape)))
    return [
        TensorSlice(name="w", shape=larger, start=(0,) * len(shape), dims=dims, offset=tuple(offset), size=tuple(shape))
    ]


def interleaved(shape, dim, ways):
    """As many tensors in the files, whose indices of a dim follow each other in turn."""
    dims = tuple(range(len(shape)))
    extent = tuple(n // ways if d == dim else n for d, n in enumerate(shape))
    step = tuple(ways if d == dim else 1 for d in dims)
    starts = [tuple(way if d == dim else 0 for d in dims) for way in range(ways)]
    return [
        TensorSlice(name=f"i{i}", shape=extent, start=start, dims=dims, step=step) for i, start in enumerate(starts)
    ]


@st.composite
def converted(draw):
    """A shape in memory, and parts of any kind."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    some = st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape))
    dim = draw(st.integers(0, len(shape) - 1))
    edges = [0, *sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2))), shape[dim]]
    kinds = [
        stacked(shape),
        joined(shape, dim, [b - a for a, b in itertools.pairwise(edges)]),
        permuted(shape, draw(st.permutations(range(len(shape))))),
        within(shape, draw(some), draw(some)),
    ]
    ways = draw(st.integers(2, 3))
    even = tuple(n * ways if d == dim else n for d, n in enumerate(shape))
    if draw(st.booleans()):
        return even, interleaved(even, dim, ways)
    return shape, draw(st.sampled_from(kinds))


@st.composite
def shares(draw, shape):
    """A rank's share: a rectangle of the tensor, of which a flat range lies somewhere in a larger buffer."""
    low = [draw(st.integers(0, n - 1)) for n in shape]
    size = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, low, strict=True))
    strides = whole(size, ()).boxes[0].stride
    sharding = Sharding(shape, (Box(tuple(low), size, 0, strides, (3, 5), ("dp",)),))
    start, stop = sorted(draw(st.integers(0, sharding.local_numel)) for _ in range(2))
    return cut(sharding, start, stop, offset=draw(st.integers(0, 3)))


def in_files(parts):
    return {part.name: torch.randn(part.shape) for part in parts}


def composed(shape, parts, files):
    """The tensor in memory by ordinary indexing, as a user would write it."""
    memory = torch.full(shape, torch.nan)
    for part in parts:
        piece = files[part.name]
        for dim, (low, size) in enumerate(zip(part.first, part.extent, strict=True)):
            piece = piece.narrow(dim, low, size)
        piece = piece.permute([part.dims.index(d) for d in sorted(part.dims)])
        index = list(part.start)
        for d, size, step in zip(part.dims, part.extent, part.steps, strict=True):
            index[d] = slice(part.start[d], part.start[d] + step * (size - 1) + 1, step)
        memory[tuple(index)] = piece
    return memory


def filled(numel, sharding, parts, files):
    local = torch.full((numel,), torch.nan)
    for segment in split(sharding, parts):
        for box in segment.sharding.boxes:
            box.of(local).copy_(files[segment.name][box.slices])
    return local


@given(st.data())
def test_a_local_tensor_filled_from_the_files_is_a_slice_of_the_whole(data):
    shape, parts = data.draw(converted())
    parts_cover(shape, parts)
    sharding = data.draw(shares(shape))
    files = in_files(parts)
    memory = composed(shape, parts, files)
    local = filled(sharding.local_numel + 8, sharding, parts, files)
    assert not memory.isnan().any()
    for box in sharding.boxes:
        assert box.of(local).equal(memory[box.slices])
    assert int(local.isnan().sum()) == 8  # and nothing else was touched


@given(st.data())
def test_every_element_goes_to_the_files_once(data):
    shape, parts = data.draw(converted())
    sharding = data.draw(shares(shape))
    segments = split(sharding, parts)
    assert sum(segment.sharding.local_numel for segment in segments) == sharding.local_numel
    assert [segment.name for segment in segments] == [part.name for part in parts]
    for segment in segments:
        for box in segment.sharding.boxes:
            assert (box.copies, box.sum_over) == ((3, 5), ("dp",))


def test_what_a_rank_lacks_has_no_boxes():
    first, second = split(cut(whole((2, 3), (0,)), 3, 6), stacked((2, 3)))
    assert first.sharding == Sharding((3,), ())
    assert second.sharding == whole((3,), (0,))


def test_two_parts_of_one_tensor_make_one_segment():
    halves = [
        TensorSlice(name="t", shape=(4,), start=(0, 0), dims=(1,), offset=(2,)),
        TensorSlice(name="t", shape=(4,), start=(1, 0), dims=(1,), size=(2,)),
    ]
    parts_cover((2, 2), halves)
    (segment,) = split(whole((2, 2), (0,)), halves)
    assert [(box.start, box.offset) for box in segment.sharding.boxes] == [((2,), 0), ((0,), 2)]


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_scalars_and_empty_tensors_convert_too(shape):
    part = TensorSlice(name="t", shape=shape, start=(0,) * len(shape), dims=tuple(range(len(shape))))
    parts_cover(shape, [part])
    (segment,) = split(whole(shape, (0,)), [part])
    assert segment.sharding == whole(shape, (0,))


def test_nothing_covers_only_what_is_empty():
    parts_cover((0, 3), [])
    with pytest.raises(ValueError, match=r"the parts \(none\) hold 0 elements"):
        parts_cover((), [])


@pytest.mark.parametrize(
    "parts",
    [
        stacked((3, 4))[:2],
        [*stacked((3, 4)), stacked((3, 4))[0]],
        [stacked((3, 4))[i] for i in (0, 0, 2)],  # as many elements as there are, but not each once
    ],
)
def test_a_gap_or_an_overlap_is_refused(parts):
    with pytest.raises(ValueError, match=r"must hold each of the 12 of shape \(3, 4\) exactly once"):
        parts_cover((3, 4), parts)


def test_parts_of_several_steps_cover_together():
    """Indices 0, 2, 4, ... and 1, 5, 9 and 3, 7, 11."""
    evens = TensorSlice(name="evens", shape=(6,), start=(0,), dims=(0,), step=(2,))
    fourths = [TensorSlice(name=f"f{i}", shape=(3,), start=(i,), dims=(0,), step=(4,)) for i in (1, 3)]
    parts_cover((12,), [evens, *fourths])
    with pytest.raises(ValueError, match=r"must hold each of the 12 of shape \(12,\) exactly once"):
        parts_cover((12,), [evens, fourths[0], fourths[0]])
    with pytest.raises(ValueError, match=r"steps of 2 along dim 0 of shape \(11,\), which must divide it"):
        parts_cover((11,), [evens])


def test_a_part_that_leaves_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"part 't', \(1, 4\) at \(3, 0\), leaves \(3, 4\)"):
        parts_cover((3, 4), [TensorSlice(name="t", shape=(4,), start=(3, 0), dims=(1,))])
    with pytest.raises(ValueError, match=r"start of 1 dims, but the shape is \(3, 4\)"):
        parts_cover((3, 4), [TensorSlice(name="t", shape=(4,), start=(0,), dims=(0,))])


def test_a_name_has_one_shape():
    parts = [
        TensorSlice(name="t", shape=(2,), start=(0,), dims=(0,)),
        TensorSlice(name="t", shape=(1,), start=(2,), dims=(0,)),
    ]
    with pytest.raises(ValueError, match=r"give 't' the shapes \(2,\) and \(1,\)"):
        parts_cover((3,), parts)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dims": (0,)}, "one number for each dim"),
        ({"dims": (0, 0)}, "different ones of the 2 dims"),
        ({"dims": (0, 2)}, "different ones of the 2 dims"),
        ({"offset": (0, 4)}, "leave the shape"),
        ({"offset": (1, 0), "size": (2, 3)}, "leave the shape"),
        ({"offset": (-1, 0)}, "leave the shape"),
        ({"size": (2,)}, "one number for each dim"),
        ({"step": (2,)}, "one number for each dim"),
        ({"step": (1, 0)}, "step must be 1 or more"),
    ],
)
def test_a_part_must_fit_its_file(wrong, words):
    with pytest.raises(ValueError, match=words):
        TensorSlice(**{"name": "t", "shape": (2, 3), "start": (0, 0), "dims": (0, 1), **wrong})


def test_a_conversion_of_the_caller_that_leaves_elements_out_is_refused(tmp_path):
    def top_half(name, shape):
        return [TensorSlice(name="top", shape=(2, 3), start=(0, 0), dims=(0, 1))]

    with pytest.raises(ValueError, match=r"convert\('w', \(4, 3\)\): the parts .top. hold 6 elements, .* of the 12"):
        save(tmp_path / "c", model={"w": torch.ones(4, 3)}, format=Format(convert=top_half))
    assert not (tmp_path / "c").exists()
    save(tmp_path / "c", model={"top": torch.ones(2, 3)})
    with pytest.raises(ValueError, match=r"convert\('w', \(4, 3\)\): the parts 'top' hold 6"):
        load(tmp_path / "c", model={"w": torch.zeros(4, 3)}, format=Format(convert=top_half))
