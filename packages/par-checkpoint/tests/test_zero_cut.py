"""Flat tensors that hold parts of several parameters, cut anywhere."""

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import CheckpointError, Format, load, save
from par_groups import Box, Segment, Segments, Sharding, cut, on_written, segments_of, set_segments, set_sharding, whole

from .helpers import SHAPES, flat_segments, make_model, rectangle, solo

WORLD = range(4)


class Masters:
    """A bfloat16 model on every rank, and an optimizer over flat fp32 parts of it."""

    def __init__(self, seed, bounds):
        self.model = make_model(seed, torch.bfloat16)
        self.segments = flat_segments(bounds, dist.get_rank(), SHAPES, len(WORLD))
        self.flat = torch.zeros(bounds[dist.get_rank() + 1] - bounds[dist.get_rank()])
        set_segments(self.flat, self.segments)
        self.optimizer = torch.optim.AdamW([self.flat], lr=0.01)
        self.registration = on_written(self.model.parameters(), lambda _: self.from_model())
        self.from_model()

    def from_model(self):
        weights = dict(self.model.named_parameters())
        for name, box, view in self.segments.views(self.flat):
            view.copy_(weights[name].detach()[box.slices])

    def step(self):
        self.flat.grad = torch.full_like(self.flat, 0.3)
        self.optimizer.step()


@pytest.mark.ranks(4)
def test_masters_are_more_exact_than_the_weights_and_come_back_to_the_bit(tmp_path):
    run = Masters(0, [0, 38, 76, 114, 152])
    run.step()
    save(tmp_path / "c", model=run.model, optimizer=run.optimizer)
    other = Masters(1, [0, 38, 76, 114, 152])
    load(tmp_path / "c", model=other.model, optimizer=other.optimizer)
    assert torch.equal(other.flat[:35], run.flat[:35])  # the last 3 elements of the last rank are padding
    assert not torch.equal(run.flat.bfloat16().float(), run.flat)
    stored = safetensors.torch.load_file(tmp_path / "c" / "optimizer" / "optimizer-00001-of-00001.safetensors")
    assert stored["0.weight.master"].dtype == torch.float32


TENSOR_SHAPES = {"w": (6, 8), "b": (5,)}


def whole_values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in TENSOR_SHAPES.items()}


def flat_on_tensor_shard(values, cut_at):
    """ZeRO over ranks {t, t + 2} of the tensor-parallel shard t: w by columns, b whole, then 1 element of padding."""
    rank = dist.get_rank()
    tensor, data = rank % 2, rank // 2
    holders = (tensor, tensor + 2)
    begin, end = ((0, cut_at), (cut_at, 30))[data]
    w = Sharding((6, 8), (Box((0, 4 * tensor), (6, 4), 0, (4, 1), holders),))
    segments = []
    for name, record, first, last in (("w", w, 0, 24), ("b", whole((5,), WORLD), 24, 29)):
        low, high = max(first, begin), min(last, end)
        if low < high:
            part = cut(record, low - first, high - first, offset=low - begin, holders=(rank, rank ^ 1))
            segments.append(Segment(name, part))
    flat = torch.full((end - begin,), 9.0)
    set_segments(flat, Segments(segments))
    for name, box, view in segments_of(flat).views(flat):
        view.copy_(values[name][box.slices])
    return flat


def adam_over(flat):
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    flat.grad = flat.clone()
    optimizer.step()
    return optimizer


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(4)
def test_a_buffer_cut_mid_row_with_padding_on_a_tensor_parallel_shard(tmp_path):
    flat = flat_on_tensor_shard(whole_values(), 13)  # row 3 of the shard of w is cut after 1 of its 4 columns
    optimizer = adam_over(flat)
    save(tmp_path / "c", optimizer=optimizer)
    stored = safetensors.torch.load_file(tmp_path / "c" / "optimizer" / "optimizer-00001-of-00001.safetensors")
    reference = {name: value.clone() for name, value in whole_values().items()}
    for name, value in reference.items():
        expected = adam_over(value)
        assert torch.equal(stored[f"{name}.master"], value)
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(stored[f"{name}.{slot}"], expected.state[value][slot]), (name, slot)
    for cut_at in (13, 3, 29):
        other = flat_on_tensor_shard(whole_values(1), cut_at)
        again = torch.optim.AdamW([other], lr=0.3)
        load(tmp_path / "c", optimizer=again)
        for name, box, view in segments_of(other).views(other):
            assert torch.equal(view, reference[name][box.slices])
        assert again.param_groups[0]["lr"] == 0.1
        if cut_at == 29 and dist.get_rank() > 1:  # padding alone
            assert other not in again.state
            continue
        assert again.state[other]["step"] == 1
        for slot in ("exp_avg", "exp_avg_sq"):
            for name, box, view in segments_of(other).views(again.state[other][slot]):
                assert torch.equal(view, stored[f"{name}.{slot}"][box.slices])


@pytest.mark.ranks(4)
def test_five_rows_over_four_ranks_are_2_2_1_0(tmp_path):
    rank, value = dist.get_rank(), torch.arange(15.0).view(5, 3)
    begin, end = min(5, 2 * rank), min(5, 2 * rank + 2)
    part = value[begin:end].clone()
    set_sharding(part, rectangle((5, 3), 0, begin, end, rank))
    save(tmp_path / "c", model={"w": part})
    alone = {"w": torch.zeros(5, 3)}
    load(tmp_path / "c", model=alone, group=solo())
    assert torch.equal(alone["w"], value)
    expected, part[:] = part.clone(), -1.0
    load(tmp_path / "c", model={"w": part})
    assert torch.equal(part, expected)


def momentum_over_copy(model, *, derived):
    """An optimizer over a copy of the model's weight, after a step that the model does not know of."""
    copy = nn.Parameter(model.weight.detach().clone())
    set_segments(copy, Segments([Segment("weight", whole((2, 3), (0,)))], derived=derived))
    optimizer = torch.optim.SGD([copy], lr=0.1, momentum=0.9)
    copy.grad = torch.ones_like(copy)
    optimizer.step()
    return optimizer, copy


@pytest.mark.parametrize("saved_as_derived", [True, False])
def test_a_copy_that_is_made_anew_from_the_weights_is_not_saved_beside_them(tmp_path, saved_as_derived):
    """Files with such a copy and files without it are read by either kind of optimizer."""
    model = nn.Linear(3, 2, bias=False)
    optimizer, copy = momentum_over_copy(model, derived=saved_as_derived)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    stored = safetensors.torch.load_file(tmp_path / "c" / "optimizer" / "optimizer-00001-of-00001.safetensors")
    assert ("weight.master" in stored) is not saved_as_derived
    for derived in (True, False):
        other = nn.Linear(3, 2, bias=False)
        again, its = momentum_over_copy(other, derived=derived)
        before = its.detach().clone()
        load(tmp_path / "c", model=other, optimizer=again)
        assert torch.equal(other.weight, model.weight)
        assert torch.equal(again.state[its]["momentum_buffer"], optimizer.state[copy]["momentum_buffer"])
        assert torch.equal(its, before if saved_as_derived or derived else copy)


def test_such_a_copy_is_saved_where_no_model_is(tmp_path):
    optimizer, copy = momentum_over_copy(nn.Linear(3, 2, bias=False), derived=True)
    save(tmp_path / "c", optimizer=optimizer)
    stored = safetensors.torch.load_file(tmp_path / "c" / "optimizer" / "optimizer-00001-of-00001.safetensors")
    assert torch.equal(stored["weight.master"], copy)


def test_scalars_that_disagree_cannot_become_one(tmp_path):
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(3)})
    optimizer = torch.optim.AdamW(model.parameters())
    for steps, names in ((1, "ab"), (1, "a")):
        for _ in range(steps):
            for name in "ab":
                model[name].grad = torch.ones_like(model[name]) if name in names else None
            optimizer.step()
    save(tmp_path / "c", model=model, optimizer=optimizer)
    flat = torch.zeros(5)
    set_segments(
        flat, Segments([Segment("a", whole((2,), (0,))), Segment("b", cut(whole((3,), (0,)), 0, 3, offset=2))])
    )
    again = torch.optim.AdamW([flat])
    with pytest.raises(CheckpointError, match=r"'a\.step' and 1 others lie in one flat tensor.*\[1\.0, 2\.0\]"):
        load(tmp_path / "c", model={"a": torch.zeros(2), "b": torch.zeros(3)}, optimizer=again)


def test_slots_of_another_shape_need_a_whole_parameter(tmp_path):
    flat = torch.zeros(5)
    set_segments(
        flat, Segments([Segment("a", whole((2,), (0,))), Segment("b", cut(whole((3,), (0,)), 0, 3, offset=2))])
    )
    optimizer = torch.optim.AdamW([flat])
    optimizer.state[flat]["row"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"slot 'row' of 'a' has shape .* only where the parameter is whole"):
        save(tmp_path / "c", optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_an_element_that_nobody_holds_is_an_error(tmp_path):
    part = torch.zeros(4)
    set_sharding(part, rectangle((5,), 0, 0, 4, 0))
    with pytest.raises(ValueError, match=r"no rank of the group holds some elements of 'w' \(5,\) \(4 held\)"):
        save(tmp_path / "c", model={"w": part})
    assert list(tmp_path.iterdir()) == []


def pieces_of(name, shape, first, last, offset):
    """A part of a parameter, row-major elements first .. last - 1, at an offset of a flat tensor."""
    return Segment(name, cut(whole(shape, (0,)), first, last, offset=offset, holders=(0,)))


def test_groups_of_flat_tensors_list_parameters_once_as_torch_would(tmp_path):
    """torch matches the saved group with its own by places alone, and refuses one that is longer."""
    model = make_model(0, torch.float32)
    layout = [
        [("2.bias", 0, 5), ("0.weight", 36, 72)],  # in the order in which backward came to them, and cut into pieces
        [("2.weight", 0, 60), ("0.weight", 0, 36), ("0.bias", 0, 12)],
    ]
    flats, expected = [], {name: torch.zeros(shape).view(-1) for name, shape in SHAPES.items()}
    for number, parts in enumerate(layout):
        segments, offset = [], 0
        for name, first, last in parts:
            segments.append(pieces_of(name, SHAPES[name], first, last, offset))
            expected[name][first:last] = torch.arange(offset, offset + last - first) + 1000 * number
            offset += last - first
        flat = torch.zeros(offset)
        set_segments(flat, Segments(segments))
        flat.grad = torch.arange(offset).float() + 1000 * number
        flats.append(flat)
    optimizer = torch.optim.AdamW(flats, lr=0.01)
    optimizer.step()
    save(tmp_path / "c", model=model, optimizer=optimizer, format=Format(style="torch"))
    saved = torch.load(tmp_path / "c" / "optimizer.pt", weights_only=True)
    assert saved["param_groups"][0]["params"] == list(SHAPES)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain.load_state_dict(saved)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(plain.state[parameter]["exp_avg"].view(-1), 0.1 * expected[name])


@pytest.mark.ranks(2)
def test_groups_of_ranks_list_parameters_as_the_model(tmp_path):
    model, rank = make_model(0, torch.float32), dist.get_rank()
    segments, offset = [], 0
    for name in ("2.bias", "0.weight") if rank == 0 else ("2.weight", "0.bias"):
        numel = torch.Size(SHAPES[name]).numel()
        segments.append(Segment(name, cut(whole(SHAPES[name], (0, 1)), 0, numel, offset=offset, holders=(rank,))))
        offset += numel
    flat = torch.zeros(offset)
    set_segments(flat, Segments(segments))
    save(tmp_path / "c", model=model, optimizer=torch.optim.AdamW([flat], lr=0.01), format=Format(style="torch"))
    saved = torch.load(tmp_path / "c" / "optimizer.pt", weights_only=True)
    assert saved["param_groups"][0]["params"] == list(SHAPES)
