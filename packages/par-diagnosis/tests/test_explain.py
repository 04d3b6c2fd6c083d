"""The line about dumps of several ranks, made here as records."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from par_diagnosis.__main__ import main
from par_diagnosis._divergence import find_divergence
from par_diagnosis._dump import Dump, StackFrame, from_json, read_folder
from par_diagnosis._explain import explain
from par_groups import Communicator, Operation


def operation(number, name="all_reduce", site="train.py:10", *, ended=True, elements=6, began=None):
    return Operation(
        number=number,
        name=name,
        shapes=((elements,),),
        dtypes=("Float",),
        ended=ended,
        began=float(number if began is None else began),
        sites=(site, "main.py:1"),
    )


def dump(rank, world, groups=(), **fields):
    """A dump with communicators given as label, ranks, operations."""
    communicators = {
        label: Communicator(label=label, ranks=ranks, operations=tuple(done)) for label, ranks, done in groups
    }
    return Dump(rank=rank, world=world, communicators=communicators, **fields)


def steps(count, *, left_out=(), more=()):
    """Steps of three operations; the last one has not ended."""
    names = [("all_gather", "linear.py:88"), ("all_reduce", "norm.py:5"), ("reduce_scatter", "linear.py:99")]
    calls = [call for number in range(count) for index, call in enumerate(names) if (number, index) not in left_out]
    calls += more
    done = [operation(number, name, site) for number, (name, site) in enumerate(calls, 1)]
    return [*done[:-1], replace(done[-1], ended=False)]


def test_explain_rank_that_skips_a_call_is_named():
    ranks = (4, 5, 6, 7)
    went_on = [*(replace(one, ended=True) for one in steps(4)[:-2]), replace(steps(4)[-2], ended=False)]
    dumps = {rank: dump(rank, 8, [("tensor", ranks, went_on)]) for rank in ranks}
    dumps[5] = dump(5, 8, [("tensor", ranks, steps(3, left_out=[(2, 1)]))])
    dumps |= {rank: dump(rank, 8, [("tensor", (0, 1, 2, 3), steps(3)[:-1])]) for rank in (0, 1, 2, 3)}
    assert explain(dumps, 8).line == (
        "rank 5 is in reduce_scatter of [6] of the tensor group [4..7] at linear.py:99, but ranks [4, 6, 7] called "
        "all_reduce at norm.py:5 first (3 operations ago), as rank 5 did until now: rank 5 "
        "skipped that call, or calls in a different order"
    )


A, B, C = ("a", 1), ("b", 2), ("c", 3)


@pytest.mark.parametrize(
    ("own", "kind", "is_sure"),
    [
        ([A, B, A, B, A, B], None, None),
        ([A, B, A, B, B], "order", True),  # it never went from B to B before
        ([A, B, A, B, C], "operation", True),
        ([A, C], "operation", False),  # nobody has a past that would tell
    ],
)
def test_find_divergence_of_two_ranks_uses_their_past(own, kind, is_sure):
    usual = [A, B, A, B, A, B]

    def done(calls):
        return [operation(number, name, f"x.py:{line}") for number, (name, line) in enumerate(calls, 1)]

    divergence = find_divergence({0: done(usual), 1: done(own)})
    assert (None if divergence is None else divergence.kind) == kind
    if divergence is not None:
        assert (divergence.rank, divergence.is_sure) == (1, is_sure)


def test_find_divergence_skipped_call_is_found_by_call_sites():
    usual = steps(4)
    calls = [("all_reduce", "x.py:1"), ("all_reduce", "x.py:2")]
    many = [operation(n, *calls[(n - 1) % 2]) for n in range(1, 9)]
    less = [operation(n, *calls[(n - 1) % 2 if n < 5 else n % 2]) for n in range(1, 8)]
    divergence = find_divergence({0: many, 1: many, 2: less})
    assert (divergence.rank, divergence.kind, divergence.own.number) == (2, "skipped", 5)
    assert divergence.other.sites[0] == "x.py:1"
    assert find_divergence({0: usual, 1: usual[:-2]}) is None  # it is only behind


def test_find_divergence_other_lines_by_design_is_none():
    sender = [operation(n, "broadcast", "send.py:1") for n in range(1, 6)]
    receiver = [operation(n, "broadcast", "receive.py:9") for n in range(1, 6)]
    assert find_divergence({0: sender, 1: receiver, 2: receiver}) is None


def test_find_divergence_allows_uneven_all_to_all():
    uneven = {rank: [operation(1, "all_to_all", elements=rank)] for rank in range(3)}
    assert find_divergence(uneven) is None
    assert find_divergence({rank: [operation(1, elements=6 + rank // 2)] for rank in range(3)}).rank == 2


def test_explain_two_groups_in_different_orders():
    both = (0, 1)
    done = [operation(n, site=f"x.py:{n % 2}", began=n) for n in range(1, 5)]
    first = dump(0, 2, [("data", both, [*done, operation(5, began=9, ended=False)]), ("tensor", both, done)])
    second = dump(1, 2, [("data", both, done), ("tensor", both, [*done, operation(5, began=9, ended=False)])])
    line = explain({0: first, 1: second}, 2).line
    assert "rank 0 is in all_reduce of the data group [0, 1]" in line
    assert "rank 1 is in all_reduce of the tensor group [0, 1]" in line
    assert "they call in different orders" in line


def test_explain_follows_waits_to_the_rank_that_reads():
    """Rank 3 waits for 2 in one group, rank 2 for 1 in another, and rank 1 for nobody: it reads."""
    frames = (
        StackFrame(site="threading.py:5", function="wait", is_library=True),
        StackFrame(site="reader.py:7", function="read", code="queue.get()"),
        StackFrame(site="train.py:3", function="main"),
    )
    dumps = {
        1: dump(1, 4, [("b", (1, 2), [])], frames=frames, phase="data", seconds=12.0, step=6),
        2: dump(2, 4, [("a", (2, 3), []), ("b", (1, 2), [operation(1, ended=False)])]),
        3: dump(3, 4, [("a", (2, 3), [operation(1, "broadcast", ended=False)])]),
        0: dump(0, 4, []),
    }
    line = explain(dumps, 4).line
    assert line.startswith("rank 1 is waiting for its data for 12 s, at reader.py:7 `queue.get()` in read() (step 7)")
    assert "has not called all_reduce number 1 of the b group [1, 2], in which rank 2 waits at train.py:10" in line


def test_explain_missing_message_names_its_sender():
    dumps = {
        0: dump(0, 2, [], frames=(StackFrame(site="model.py:4", function="forward", code="loop()"),)),
        1: dump(1, 2, [], doing="in F of stage 1, microbatch 0", waits_for=(0,)),
    }
    assert explain(dumps, 2).line == (
        "rank 0 is at model.py:4 `loop()` in forward(); rank 1 waits for its message (in F of stage 1, microbatch 0)"
    )


def test_explain_stages_that_wait_for_each_other():
    dumps = {rank: dump(rank, 2, [], doing=f"in F of stage {rank}", waits_for=(1 - rank,)) for rank in (0, 1)}
    line = explain(dumps, 2).line
    assert "rank 0 is in F of stage 0, at an unknown place and waits for a message of rank 1; rank 1 is in F" in line
    assert "they call in different orders" in line


def test_explain_failed_rank_before_errors_it_has_caused():
    both = (0, 1)
    lost = dump(0, 2, [("data", both, [operation(1)])], error="RuntimeError: Connection closed by peer", time=1.0)
    failed = dump(1, 2, error="OSError: No space left", error_sites=("save.py:2",), step=4, time=2.0)
    found = explain({0: lost, 1: failed}, 2)
    assert found.line == (
        "rank 1 failed (step 5) at save.py:2: OSError: No space left; rank 0 waits in all_reduce of the data "
        "group [0, 1] at train.py:10"
    )
    alike = {rank: replace(failed, rank=rank) for rank in (0, 1)}
    assert explain(alike, 2).line.startswith("ranks [0, 1] failed with the same error (step 5) at save.py:2: OSError")


def test_explain_long_facts_are_shortened():
    facts = {rank: {"options": f"Options({'x' * 200}, rows={4 + (rank == 2)}, {'y' * 200})"} for rank in range(3)}
    line = explain({rank: dump(rank, 3, [], facts=facts[rank]) for rank in range(3)}, 3).line
    assert "rank 2 has options ...xxx" in line
    assert "rows=5, yyy" in line
    assert ", ranks [0, 1] have ...xxx" in line
    assert len(line) < 400


def test_explain_all_ranks_in_one_operation_blames_no_rank():
    dumps = {rank: dump(rank, 2, [("world", (0, 1), [operation(1, ended=False)])]) for rank in (0, 1)}
    assert "the network or a device is slow or stuck" in explain(dumps, 2).line


def test_explain_one_late_rank_of_a_thousand():
    ranks = tuple(range(1000))
    waiting = {rank: dump(rank, 1000, [("world", ranks, steps(60))]) for rank in ranks}
    waiting[613] = dump(613, 1000, [("world", ranks, [replace(one, ended=True) for one in steps(60)[:-1]])])
    line = explain(waiting, 1000).line
    assert line.startswith("rank 613 ")
    assert "ranks [0..612, 614..999] wait" in line


def test_from_json_returns_the_written_dump(tmp_path):
    written = dump(
        1,
        2,
        [("data", (0, 1), steps(2))],
        frames=(StackFrame(site="a.py:1", function="f"),),
        facts={"x": "1"},
        waits_for=(0,),
    )
    assert from_json(written.to_json()) == written
    assert len(written.shortened(2).communicators["data"].operations) == 2
    for text in ("{}", "[]", '{"format": 99}', '{"format": 1}'):
        with pytest.raises(ValueError, match=r"format|dump"):
            from_json(text)
    folder = tmp_path / "diagnosis"
    folder.mkdir()
    (folder / "rank-1.json").write_text(written.to_json())
    (folder / "rank-0.json").write_text("{")
    found = read_folder(tmp_path)
    assert list(found.dumps) == [1]
    assert found.unreadable[0].startswith("rank-0.json: ")


def test_main_reads_dumps_of_torch_for_other_ranks(tmp_path, capsys):
    def entry(number, state):
        return {
            "process_group": ("0", "default_pg"), "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
            "profiling_name": "nccl:all_reduce", "input_sizes": [[4]], "input_dtypes": ["Float"],
            "retired": state == "completed", "state": state, "time_created_ns": number,
            "frames": [{"filename": "/x/train.py", "line": 3, "name": "f"}],
        }  # fmt: skip

    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    behind = {"entries": [entry(1, "completed")], "pg_config": config}
    waiting = {"entries": [entry(1, "completed"), entry(2, "scheduled")], "pg_config": config}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(waiting))
    (tmp_path / "nccl_trace_rank_1").write_text(json.dumps(behind))
    (tmp_path / "nccl_trace_rank_2").write_bytes(pickle.dumps(StackFrame))  # a class is never made of somebody's file
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rank 1 is at an unknown place and has not called all_reduce number 2" in out
    assert "rank 0 waits at /x/train.py:3" in out
    assert "nccl_trace_rank_2: not a dump of torch's flight recorder" in out


@pytest.mark.parametrize(("name", "words"), [("none", "does not exist"), ("", "contains no dump")])
def test_main_folder_without_dumps_exits_with_2(tmp_path, capsys, name, words):
    assert main([str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


def test_main_names_the_place_of_a_fatal_signal(tmp_path, capsys):
    text = 'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "/x/train.py", line 3 in step\n'
    (tmp_path / "rank-1.fatal").write_text(text)
    waiting = dump(0, 2, [("world", (0, 1), [operation(1, ended=False)])])
    (tmp_path / "rank-0.json").write_text(waiting.to_json())
    assert main([str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(
        "rank 1 was killed by a signal (Aborted) at /x/train.py:3: gloo aborts a rank whose tensor is smaller"
    )
    assert "; rank 0 waits in all_reduce of the world group [0, 1] at train.py:10" in line


def test_main_needs_no_torch(tmp_path):
    (tmp_path / "rank-0.json").write_text(dump(0, 1).to_json())
    call = f"from par_diagnosis.__main__ import main; main([{str(tmp_path)!r}])"
    code = f"import sys; {call}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
