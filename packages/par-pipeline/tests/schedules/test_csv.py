import csv

import pytest
from torch.distributed.pipelining.schedules import _Action

from par_pipeline import Schedule, interleaved, one_f_one_b, schedule
from par_pipeline.schedules.registry import SCHEDULES

from ..schedule_helpers import text, torch_actions


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_schedule_is_read_as_it_was_written(tmp_path, name):
    made = schedule(name, 3, 7)
    made.to_csv(tmp_path / "step.csv")
    again = Schedule.from_csv(tmp_path / "step.csv")
    assert [text(actions) for actions in again.ranks] == [text(actions) for actions in made.ranks]
    assert (again.stages, again.microbatches) == (made.stages, made.microbatches)


def test_torch_reads_what_we_write(tmp_path):
    interleaved(2, 4).to_csv(tmp_path / "step.csv")
    with (tmp_path / "step.csv").open(newline="") as file:
        rows = [[_Action.from_str(cell) for cell in row] for row in csv.reader(file)]
    expected = [torch_actions("ScheduleInterleaved1F1B", rank, 2, 4) for rank in range(2)]
    assert [" ".join(map(str, row)) for row in rows] == expected


def test_we_read_what_torch_writes_with_waits_and_overlapped_pairs(tmp_path):
    path = tmp_path / "step.csv"
    path.write_text("0F0,0F1,,0B0,0B1\r\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\r\n\r\n")
    read = Schedule.from_csv(path)
    assert [text(actions) for actions in read.ranks] == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


@pytest.mark.parametrize("cell", ["1X0", "F0", "1SEND_F0", "1F", "1F0 1B0", "(1F1;1Q0)OVERLAP_F_B", "rank 1"])
def test_a_cell_that_is_no_action_is_named_with_line_and_column(tmp_path, cell):
    path = tmp_path / "step.csv"
    path.write_text(f"0F0,0B0\n1F0,,{cell}\n")
    with pytest.raises(ValueError, match="is no action; write stage") as error:
        Schedule.from_csv(path)
    assert f"{path}, line 2, column 3: cell {cell!r}: " in str(error.value)


def test_a_file_that_is_no_training_step_is_refused(tmp_path):
    path = tmp_path / "step.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(ValueError, match="rank 1, position 0: 1B0 comes before its forward"):
        Schedule.from_csv(path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "step.csv").write_text("")
    with pytest.raises(ValueError, match="needs the actions of at least one rank"):
        Schedule.from_csv(tmp_path / "step.csv")


def test_a_line_is_a_rank_and_a_cell_an_action(tmp_path):
    one_f_one_b(2, 2).to_csv(tmp_path / "step.csv")
    assert (tmp_path / "step.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
