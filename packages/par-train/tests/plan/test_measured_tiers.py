"""Bytes of each tier of running trainers are what was predicted: what is computed again, and what lies elsewhere.

Activations and what the device keeps within 5 %: statistics of norms are counted as a GPU's, and a counter of steps
lies with each piece. Files to the rounding of each slot to 4096.
"""

from pathlib import Path

import pytest
import torch.distributed as dist

from par_plan.costs.memory import saved_block, saved_ends
from par_plan.inputs import NUMBER_WIDTHS
from par_plan.shape import Shape, TensorSplit
from par_train.jobs.options import ModelOptions

from .measured_runs import SavedPeak, running

CLOSE = 0.05
PAGE = 4096
MODEL = ModelOptions(width=128, layers=4, heads=4, context=32)
SHAPE = Shape(width=128, layers=4, heads=4, context=32)


def scratch_bytes(folder):
    """Bytes of this process's files in a folder that have no name; each may be open twice."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and str(path.readlink()).startswith(str(folder)):
            found[path.stat().st_ino] = path.stat().st_size
    return sum(found.values())


def assert_activations(run, recompute, case):
    """Of a layer that runs again in backward torch keeps what it saves to itself: that is left out of both."""
    activations = run.predicted.memory.activations
    if recompute == "layers":
        tokens = 4 * MODEL.context  # of a rank's rows
        whole = saved_block(SHAPE, TensorSplit(), NUMBER_WIDTHS["fp32"], tokens) - tokens * MODEL.width * 4
        last = saved_ends(SHAPE, TensorSplit(), NUMBER_WIDTHS["fp32"], tokens, last=True)
        activations -= max(0, whole - last)
    with SavedPeak(run.trainer.model.parameters()) as saved:
        run.trainer.advance(next(iter(run.trainer.loader)))
    peak = saved.peak
    assert activations == pytest.approx(peak, rel=CLOSE), case


def assert_tiers(recompute, parts, folder, zero=1):
    offload = {"optimizer": parts, "path": str(folder)}
    with running({"data": 2}, model=MODEL, zero=zero, recompute=recompute, offload=offload) as run:
        memory, case = run.predicted.memory, (recompute, parts, zero)
        on_disk = scratch_bytes(folder)
        slots = 2 * 4  # of a few pieces, one for each chunk and param group
        assert memory.disk <= on_disk <= memory.disk + slots * PAGE, case
        # On a CPU the device and its host are one memory; what lies in the file is mapped into it.
        expected = memory.state + memory.buffers + memory.host + on_disk
        low, high = (1 - CLOSE) * expected, (1 + CLOSE) * expected + (on_disk and 2 * memory.disk)  # and its buffers
        assert low < run.wait_for_bytes(low, high) < high, case
        state = sum(
            each.nbytes for one in run.trainer.optimizer.state.values() for each in one.values() if each.numel() > 1
        )
        assert memory.optimizer + memory.host + memory.disk == pytest.approx(state, rel=CLOSE), case
        assert_activations(run, recompute, case)


DISK, HOST = {"disk": 1.0}, {"host": 0.5}
TYPICAL = [("", HOST), ("cheap", DISK), ("layers", HOST)]
ALL = [(recompute, parts) for recompute in ("", "cheap", "layers") for parts in (DISK, HOST)]


@pytest.mark.parametrize("cases", [TYPICAL, pytest.param(ALL, marks=pytest.mark.storm)], ids=["typical", "all"])
@pytest.mark.ranks(2, timeout=120, backend="gloo")
def test_each_tier_has_what_was_predicted(cases, tmp_path):
    for recompute, parts in cases:
        assert_tiers(recompute, parts, tmp_path)


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
def test_activations_that_are_computed_again_on_tensor_ranks_and_in_a_pipeline():
    for parallel in ({"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, {"pipeline": 2}):
        for precision in ("fp32", "bf16", "bf16-amp"):
            with running(parallel, model=MODEL, precision=precision, recompute="cheap") as run:
                assert_activations(run, "cheap", (parallel, precision, dist.get_rank()))
