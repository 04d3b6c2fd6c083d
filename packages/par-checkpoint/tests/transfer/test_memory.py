import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from par_checkpoint import load, save
from par_checkpoint.plan.claims import LocalTensor, claims_of
from par_checkpoint.plan.tasks import BlockPiece
from par_checkpoint.transfer.memory import LocalBox, LocalState, MemoryPool
from par_groups import Box, Sharding, merge_claims


def local_of(*tensors: tuple[Sharding, torch.Tensor]) -> LocalState:
    """What one rank holds, tensors numbered from 0."""
    entries = [
        LocalTensor(key=f"model:{i}", dtype=torch.float32, sharding=sharding, local=tensor)
        for i, (sharding, tensor) in enumerate(tensors)
    ]
    return LocalState.of(entries, merge_claims([([0], claims_of(entries))]))


def whole(tensor: torch.Tensor) -> tuple[Sharding, torch.Tensor]:
    shape = tuple(tensor.shape)
    return Sharding(shape, (Box((0,) * len(shape), shape, 0, tensor.stride(), (0,)),)), tensor


def piece(tensor: int, start: tuple[int, ...], size: tuple[int, ...], at: int) -> BlockPiece:
    return BlockPiece(tensor=tensor, start=start, size=size, at=at, source=0, to=0)


def test_a_block_lies_directly_where_its_pieces_follow_each_other():
    a, b = torch.arange(12.0).view(3, 4), torch.arange(6.0)
    local = local_of(whole(a), whole(b))
    runs = local.direct([piece(1, (0,), (6,), 32), piece(0, (1, 0), (2, 4), 0)], 56)
    assert runs is not None
    assert torch.equal(torch.cat(runs).view(torch.float32), torch.cat([a[1:].flatten(), b]))
    runs[1].zero_()
    assert not b.any(), "a run is the tensor's own memory"


def test_a_gap_or_a_missing_end_is_not_direct():
    local = local_of(whole(torch.zeros(12)), whole(torch.zeros(6)))
    first, second = piece(0, (0,), (12,), 0), piece(1, (0,), (6,), 52)
    assert local.direct([first, second], 76) is None
    assert local.direct([first], 52) is None
    assert local.direct([second], 76) is None
    assert local.direct([], 4) is None


def test_spare_memory_takes_what_is_not_held():
    a, spare = torch.ones(3), torch.zeros(64, dtype=torch.uint8)
    runs = local_of(whole(a)).direct([piece(0, (0,), (2,), 8), piece(0, (2,), (1,), 24)], 40, spare)
    assert runs is not None
    assert [run.numel() for run in runs] == [8, 8, 8, 4, 12]
    assert [run.data_ptr() == spare.data_ptr() for run in runs] == [True, False, True, False, True]
    assert runs[1].data_ptr() == a.data_ptr()


def test_columns_are_not_direct_although_they_are_contiguous_here():
    columns = Sharding((3, 4), (Box((0, 0), (3, 2), 0, (2, 1), (0,)),))
    local = local_of((columns, torch.zeros(3, 2)))
    assert local.direct([piece(0, (0, 0), (3, 2), 0)], 24) is None
    assert local.direct([piece(0, (0, 0), (1, 2), 0)], 8) is not None


def test_what_is_cast_on_the_way_is_not_direct():
    assert local_of(whole(torch.zeros(4, dtype=torch.bfloat16))).direct([piece(0, (0,), (4,), 0)], 16) is None


def test_a_pool_gives_what_was_given_back_and_else_new_memory():
    pool = MemoryPool(64)
    one, other = pool.take(), pool.take()
    assert one.numel() == other.numel() == 64
    assert one.data_ptr() != other.data_ptr()
    pool.give_back(one)
    assert pool.take() is one


def test_what_is_lent_comes_back_after_an_error():
    pool = MemoryPool(64)
    with pytest.raises(ValueError, match="inside"), pool.lent() as lent:
        raise ValueError("inside")
    assert pool.take() is lent


def test_threads_wait_for_the_callers_stream_of_each_device():
    """Without it they copy what a stream of the trainer's own has not computed yet; see the GPU tests."""
    seen = []

    def stream(device):
        return SimpleNamespace(synchronize=lambda: seen.append(str(device)))

    def on(device):
        local = SimpleNamespace(device=torch.device(device))
        return LocalBox(box=Box((), (), 0, (), (0,)), local=local, flat=None, steady=None)

    local = LocalState(
        tensors=(), parts={0: [on("cuda:1"), on("cpu")], 1: [on("cuda:0")], 2: [on("cuda:1"), on("xpu:0"), on("meta")]}
    )
    with mock.patch.object(torch.accelerator, "current_stream", stream):
        local.wait_for_streams()
    assert seen == ["cuda:0", "cuda:1", "xpu:0"]


@pytest.mark.parametrize("copied", [False, True])
def test_a_save_and_a_load_wait_before_threads_copy(tmp_path, copied):
    """A copy is made by the caller's own thread, in its stream."""
    begun = []

    def waits(_):
        begun.append([each.name for each in threading.enumerate() if each.name.startswith("par-checkpoint-read")])

    model = {"w": torch.ones(3)}
    with mock.patch.object(LocalState, "wait_for_streams", waits):
        save(tmp_path / "c", model=model, async_=copied).wait()
        assert len(begun) == (not copied)
        load(tmp_path / "c", model=model)
    assert begun == [[]] * (1 + (not copied))
