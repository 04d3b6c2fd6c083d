"""What a group keeps between calls, what is of one call alone, and calls that threads or ranks make by themselves."""

import logging
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import CheckpointError, Checkpoints, Format, Transfer, latest, load, read_tensor, save, verify
from par_checkpoint import _save as saving
from par_checkpoint.transfer import ranks as transfer
from par_checkpoint.transfer.background import BackgroundTask
from par_checkpoint.transfer.sessions import session_of


@pytest.mark.ranks(2)
def test_calls_with_other_timeouts_use_the_same_communicators_plans_and_memory(tmp_path):
    model = {"w": torch.ones(3 << 20)}
    made, planned = transfer.gloo_among, saving.BlockPlanner
    with (
        mock.patch.object(transfer, "gloo_among", side_effect=made) as communicators,
        mock.patch.object(saving, "BlockPlanner", side_effect=planned) as planners,
    ):
        memories = set()
        for number in range(4):
            timeout = 100.0 + number % 2
            save(tmp_path / f"{number}", model=model, async_=True, transfer=Transfer(timeout=timeout)).wait()
            memories.add(session_of(None)._memory.memory[0].data_ptr())
            load(tmp_path / f"{number}", model=model, transfer=Transfer(timeout=300.0))
    assert communicators.call_count <= 2  # one for the calls, if the world is not of gloo, and one for the background
    assert planners.call_count == 1
    assert len(memories) == 1


@pytest.mark.ranks(2)
def test_a_call_waits_for_its_own_timeout(tmp_path):
    group = dist.new_group(backend="gloo")
    save(tmp_path / "a", model={"w": torch.ones(3)}, group=group, transfer=Transfer(timeout=1800.0))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]ime"):
            save(tmp_path / "b", model={"w": torch.ones(3)}, group=group, transfer=Transfer(timeout=0.3))
    dist.barrier()


def in_threads(act, values):
    """Calls something with each value, in a thread of its own; what each returns or raises."""
    found = dict.fromkeys(values)

    def run(value):
        try:
            found[value] = act(value)
        except Exception as error:
            found[value] = error

    threads = [threading.Thread(target=run, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("copy", ["blocking", "background"])
def test_saves_of_threads_each_hold_their_own_values(tmp_path, copy):
    def saves(value):
        model = {"w": torch.full((1 << 18,), float(value))}
        for turn in range(6):
            path = tmp_path / f"{value}-{turn}"
            save(path, model=model, async_=True, transfer=Transfer(copy=copy)).wait()
            assert verify(path) == []
            assert read_tensor(path, "w").unique().tolist() == [value]
        return "whole"

    assert in_threads(saves, (1, 2, 3)) == {1: "whole", 2: "whole", 3: "whole"}


def test_save_of_a_thread_waits_for_writes_that_have_started(monkeypatch, tmp_path):
    start = BackgroundTask.start

    def start_late(task, work):
        found = in_threads(lambda name: save(tmp_path / name, model={"w": torch.ones(3)}).done(), ("other",))
        assert found == {"other": True}
        start(task, work)

    monkeypatch.setattr(BackgroundTask, "start", start_late)
    save(tmp_path / "late", model={"w": torch.ones(3)}, async_=True).wait()
    assert verify(tmp_path / "late") == verify(tmp_path / "other") == []


def test_threads_share_a_plan_whose_tensors_are_many(tmp_path):
    def saves(value):
        model = {f"{number}": torch.full((number + 1, 3), float(value)) for number in range(100)}
        save(tmp_path / f"{value}", model=model, format=Format(max_shard_size=2000))
        report = load(tmp_path / f"{value}", model=model)
        return report.missing, all(tensor.eq(value).all() for tensor in model.values())

    assert in_threads(saves, range(4)) == dict.fromkeys(range(4), ((), True))


def test_a_failed_save_of_a_thread_is_raised_in_that_thread(tmp_path):
    began, saved = threading.Event(), threading.Event()

    def saves(value):
        if value:
            began.wait(60)
            save(tmp_path / "sound", model={"w": torch.ones(3)})
            saved.set()
            return "saved"
        with mock.patch.object(saving, "commit", side_effect=OSError("no disk")):
            handle = save(tmp_path / "fails", model={"w": torch.ones(3)}, async_=True)
            handle._tasks[0].join()
        began.set()
        saved.wait(60)
        return handle.wait()

    found = in_threads(saves, (0, 1))
    assert found[1] == "saved"
    assert "no disk" in str(found[0])
    save(tmp_path / "next", model={"w": torch.ones(3)})  # it was heard


@pytest.mark.ranks(2)
def test_threads_of_ranks_take_turns_or_name_the_paths(tmp_path):
    group = dist.new_group()

    def saves(name):
        try:
            model = {"w": torch.full((1 << 12,), float(ord(name)))}
            save(tmp_path / name, model=model, group=group)
        except ValueError as error:
            return f"{error}"
        return "saved"

    for name, outcome in in_threads(saves, "ab").items():
        if outcome == "saved":
            assert read_tensor(tmp_path / name, "w").unique().tolist() == [ord(name)]
        else:  # the ranks have begun them in a different order
            assert 'path is "a local folder named' in outcome


@pytest.mark.ranks(2)
def test_ranks_that_save_to_other_names_are_refused(tmp_path):
    name = "ab"[dist.get_rank()]
    text = r"""path is "a local folder named 'a'" on rank 0, and "a local folder named 'b'" on rank 1; give the same"""
    with pytest.raises(ValueError, match=text):
        save(tmp_path / name, model={"w": torch.ones(2)})
    with pytest.raises(ValueError, match=text):
        load(tmp_path / name, model={"w": torch.ones(2)})


@pytest.mark.ranks(3)
def test_a_call_on_some_ranks_names_the_absent_rank(tmp_path):
    model = {"w": torch.ones(2)}
    calls = {
        r"save\('.*x'\)": lambda: save(tmp_path / "x", model=model, transfer=Transfer(timeout=0.5)),
        r"load\('.*x'\)": lambda: load(tmp_path / "x", model=model, transfer=Transfer(timeout=0.5)),
        r"latest\('.*'\)": lambda: latest(tmp_path, timeout=0.5),
        r"Checkpoints\('.*r'\).save\(\)": lambda: Checkpoints(tmp_path / "r").save(
            1, model=model, transfer=Transfer(timeout=0.5)
        ),
    }
    if dist.get_rank() != 2:
        for name, call in calls.items():
            text = rf"timeout=0.5: {name} waits for all 3 ranks of its group, and rank 2 has not called it; remove"
            with pytest.raises(CheckpointError, match=text):
                call()
    dist.barrier()  # of the trainer, whose communicator a save leaves alone
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(3)
def test_rank_after_one_that_gave_up_names_the_absent_rank(tmp_path):
    both = dist.new_group([0, 1])

    def call(absent):
        with pytest.raises(CheckpointError, match=f"waits for all 3 ranks of its group, and {absent} not called it"):
            save(tmp_path / "x", model={"w": torch.ones(2)}, transfer=Transfer(timeout=0.5))

    if dist.get_rank() == 0:
        call("ranks 1, 2 have")
    if dist.get_rank() != 2:
        dist.barrier(both)  # rank 0 has closed its side by now, so that rank 1 cannot connect with it
    if dist.get_rank() == 1:
        call("rank 2 has")
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_comes_late_is_named_and_waited_for(tmp_path, monkeypatch):
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("par_checkpoint").addHandler(handler)
    monkeypatch.setattr(transfer, "_NOTICE", timedelta(seconds=0.3))
    for number in range(2):  # the first call connects, too
        if dist.get_rank() == 1:
            time.sleep(1.0)
        save(tmp_path / f"{number}", model={"w": torch.ones(2)})
    calls = [f"save('{tmp_path / str(number)}')" for number in range(2)]
    texts = [f"{call} has waited 0.3 s for rank 1, which has not called it" for call in calls]
    assert [line.partition(";")[0] for line in said] == (texts if dist.get_rank() == 0 else [])


@pytest.mark.ranks(2)
def test_a_call_inside_a_call_is_refused(tmp_path):
    def saves_again(name):
        save(tmp_path / "in", model={"w": torch.ones(2)})
        return name

    with pytest.raises(CheckpointError, match=r"save\('.*in'\) was called while save\('.*out'\) runs in this thread"):
        save(tmp_path / "out", model={"w": torch.ones(2)}, format=Format(names=saves_again))
    save(tmp_path / "out", model={"w": torch.ones(2)})


def fail_to_connect(*_):
    raise dist.DistNetworkError("Broken pipe")


@pytest.mark.ranks(2, backend="gloo")
def test_save_without_a_store_uses_the_group(tmp_path, monkeypatch):
    """A torchrun that was killed took the store with it; its ranks are to save, and to leave."""
    monkeypatch.setattr(dist.PrefixStore, "set", fail_to_connect)
    model = torch.nn.Linear(3, 2)
    save(tmp_path / "c", model=model)
    assert verify(tmp_path / "c") == []
    with pytest.raises(CheckpointError, match=r"the store of torch\.distributed is gone"):
        save(tmp_path / "d", model=model, async_=True).wait()
