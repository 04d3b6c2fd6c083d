import subprocess
import sys

import pytest

import par_pipeline
from par_pipeline import Action, Schedule, interleaved, register_schedule, schedule
from par_pipeline.schedules.registry import SCHEDULES

BUILT_IN = ("1f1b", "dualpipe_v", "gpipe", "interleaved", "looped_bfs", "v_half", "v_min", "zb_h1", "zb_h2", "zb_v")


def test_built_in_schedules_are_found_by_name_with_their_options():
    assert set(BUILT_IN) <= set(SCHEDULES.names())
    found = schedule("interleaved", 2, 5, chunks=3)
    assert [list(each) for each in found.ranks] == [list(each) for each in interleaved(2, 5, 3).ranks]


def test_a_function_that_returns_lists_is_a_schedule():
    @register_schedule("one_at_a_time")
    def one_at_a_time(ranks, microbatches):
        order = [(op, k) for k in range(microbatches) for op in "FB"]
        return [[Action(op, rank, k) for op, k in order] for rank in range(ranks)]

    made = schedule("one_at_a_time", 3, 4)
    made.validate()
    assert isinstance(made, Schedule)
    assert (len(made.ranks), made.stages, made.microbatches) == (3, 3, 4)


def test_an_unknown_name_gets_the_nearest_and_all_known_ones():
    with pytest.raises(ValueError, match=r"no schedule is called '1f2b'; did you mean '1f1b'\? Known: ") as error:
        schedule("1f2b", 2, 2)
    assert all(repr(name) in str(error.value) for name in BUILT_IN)


def test_a_name_that_is_taken_is_refused_with_both_owners():
    with pytest.raises(
        ValueError, match=r"'gpipe' is registered twice, by par_pipeline.schedules.gpipe.gpipe and by .*copy"
    ):

        @register_schedule("gpipe")
        def copy(ranks, microbatches):
            return []


def test_an_option_that_a_schedule_does_not_take_is_refused():
    with pytest.raises(TypeError, match="chunks"):
        schedule("1f1b", 2, 2, chunks=2)
    with pytest.raises(TypeError, match="group_size"):
        schedule("interleaved", 2, 2, group_size=2)


@pytest.mark.parametrize("name", BUILT_IN)
def test_sizes_must_be_whole_numbers_of_at_least_one(name):
    for sizes, wrong in [((0, 4), "ranks is 0"), ((2, 0), "microbatches is 0"), ((2, -1), "microbatches is -1")]:
        with pytest.raises(ValueError, match=f"{wrong}, it must be at least 1"):
            schedule(name, *sizes)
    for sizes, wrong in [((2.0, 4), r"ranks is 2\.0"), ((2, "8"), "microbatches is '8'"), ((True, 4), "ranks is True")]:
        with pytest.raises(TypeError, match=f"{wrong}, it must be a whole number"):
            schedule(name, *sizes)


@pytest.mark.parametrize("function", [par_pipeline.interleaved, par_pipeline.looped_bfs])
def test_a_rank_needs_at_least_one_chunk(function):
    with pytest.raises(ValueError, match="chunks is 0, it must be at least 1"):
        function(2, 4, chunks=0)


WHEEL = """
from par_pipeline import one_f_one_b
def mine(ranks, microbatches):
    return one_f_one_b(ranks, microbatches)
"""


def test_another_wheel_provides_a_schedule_that_nobody_imported(tmp_path):
    info = tmp_path / "wheel_module-1.0.dist-info"
    info.mkdir()
    (tmp_path / "wheel_module.py").write_text(WHEEL)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wheel-module\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[par_pipeline.schedules]\nfrom_a_wheel = wheel_module:mine\n")
    code = "from par_pipeline import schedule; print(schedule('from_a_wheel', 2, 3))"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "Schedule(2 ranks, 2 stages, 3 microbatches)", done.stderr


def test_schedules_and_the_simulator_need_no_torch():
    code = """
import sys
from par_pipeline import one_f_one_b, simulate
simulate(one_f_one_b(4, 8))
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
