import threading
from functools import partial

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from par_checkpoint import CheckpointError, Transfer, load, save, verify
from par_checkpoint import _save as saving
from par_checkpoint.transfer import write as writing
from par_checkpoint.transfer.sessions import session_of


def saved(path):
    return safetensors.torch.load_file(path / "model.safetensors")["w"]


@pytest.fixture
def gate(monkeypatch):
    """Holds the background before it writes anything until it is set."""
    opened, write = threading.Event(), saving.write_blocks
    monkeypatch.setattr(saving, "write_blocks", lambda *args: opened.wait(240) and write(*args))
    yield opened
    opened.set()


def test_the_values_are_those_of_the_call(gate, tmp_path):
    model = {"w": torch.arange(3.0 * (1 << 20)), "b": torch.ones(3)}
    expected = model["w"].clone()
    handle = save(tmp_path / "c", model=model, async_=True)
    model["w"].fill_(-1.0)
    assert not handle.done()
    assert not (tmp_path / "c").exists()
    gate.set()
    handle.wait()
    assert handle.done()
    assert torch.equal(saved(tmp_path / "c"), expected)
    assert verify(tmp_path / "c") == []
    assert handle.blocked_seconds > 0
    handle.wait()  # again is harmless


def test_several_in_a_row_use_one_buffer(tmp_path):
    model = {"w": torch.zeros(1000)}
    buffers = set()
    for number in range(5):
        model["w"].fill_(number)
        save(tmp_path / f"{number}", model=model, async_=True).wait()
        buffers.add(session_of(None)._memory.memory[0].data_ptr())
    save(tmp_path / "last", model=model).wait()
    assert len(buffers) == 1
    assert [float(saved(tmp_path / f"{number}")[0]) for number in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_second_save_raises_where_asked(gate, tmp_path):
    model = {"w": torch.ones(3)}
    handle = save(tmp_path / "a", model=model, async_=True)
    with pytest.raises(CheckpointError, match="an earlier save is still being written and pending is 'raise'"):
        save(tmp_path / "b", model=model, async_=True, transfer=Transfer(pending="raise"))
    gate.set()
    handle.wait()
    save(tmp_path / "b", model=model, async_=True, transfer=Transfer(pending="raise")).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_second_save_waits(gate, tmp_path):
    model = {"w": torch.ones(3)}
    first = save(tmp_path / "a", model=model, async_=True)
    threading.Timer(0.2, gate.set).start()
    save(tmp_path / "b", model=model)
    assert first.done()
    assert saved(tmp_path / "a").sum() == saved(tmp_path / "b").sum() == 3


def test_a_load_waits_for_what_is_being_written(gate, tmp_path):
    model = {"w": torch.ones(3)}
    save(tmp_path / "a", model=model, async_=True)
    model["w"].zero_()
    threading.Timer(0.2, gate.set).start()
    load(tmp_path / "a", model=model)
    assert model["w"].sum() == 3


@pytest.mark.parametrize("where", ["wait", "save"])
def test_an_error_in_the_background_surfaces(where, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    model = {"w": torch.ones(3)}
    save(tmp_path / "c", model=model)
    monkeypatch.setattr(writing, "crc32c", full)
    handle = save(tmp_path / "c", model={"w": torch.zeros(3)}, async_=True, overwrite=True)
    while not handle.done():
        pass
    monkeypatch.undo()
    act = handle.wait if where == "wait" else partial(save, tmp_path / "d", model=model)
    with pytest.raises(OSError, match="No space left"):
        act()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert saved(tmp_path / "c").sum() == 3
    save(tmp_path / "d", model=model)  # told once
    assert saved(tmp_path / "d").sum() == 3


@pytest.mark.ranks(2)
def test_an_error_on_one_rank_is_everyones(tmp_path):
    model = {"w": torch.ones(3 << 20)}
    crc = writing.crc32c

    def broken(*args):
        if dist.get_rank() == 1:
            raise OSError(5, "the disk is on fire")
        return crc(*args)

    writing.crc32c = broken
    handle = save(tmp_path / "c", model=model, async_=True)
    with pytest.raises(OSError, match="the disk is on fire"):
        handle.wait()
    writing.crc32c = crc
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "c", model=model, async_=True).wait()
    assert saved(tmp_path / "c").sum() == 3 << 20


@pytest.mark.ranks(2)
@pytest.mark.parametrize("heard", [0, 1])
def test_an_error_that_one_rank_has_heard_alone_is_raised_on_all_by_the_next_save(tmp_path, heard):
    """Else that rank would go on into a collective, and wait there for those that raise."""
    model, crc = {"w": torch.ones(3 << 20)}, writing.crc32c

    def broken(*_):
        raise OSError(28, "No space left on device")

    writing.crc32c = broken
    handle = save(tmp_path / "c", model=model, async_=True)
    if dist.get_rank() == heard:
        with pytest.raises(OSError, match="No space left"):
            handle.wait()
    while not handle.done():
        pass
    writing.crc32c = crc
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$") as raised:
        save(tmp_path / "d", model=model)
    assert raised.value.errno == 28
    assert not (tmp_path / "d").exists()
    save(tmp_path / "d", model=model)
    assert saved(tmp_path / "d").sum() == 3 << 20


@pytest.mark.ranks(2)
def test_an_error_that_all_ranks_have_heard_is_not_raised_again(tmp_path):
    model, crc = {"w": torch.ones(3 << 20)}, writing.crc32c

    def broken(*_):
        raise OSError(28, "No space left on device")

    writing.crc32c = broken
    handle = save(tmp_path / "c", model=model, async_=True)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            handle.wait()
    writing.crc32c = crc
    load_from = save(tmp_path / "d", model=model).path
    load(load_from, model=model)
