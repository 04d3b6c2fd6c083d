"""A reader who follows a call opens few modules: what docs/rooms.md promises, and draws."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

DOCS = Path(__file__).parent.parent / "docs"

# Modules that a tensor passes through, and modules that have a part in the call at all.
MOST = {
    # Of these: turns of threads, the roll of ranks, what is no tensor, quantised weights, the rotation over ranks.
    # Who holds which box is told in par-groups, so that others can move state by it too. The state checks its types.
    "save": (12, 50),
    # One declares the attributes that packages set on tensors, one removes the names of wrappers, one is for moves too,
    # and one finds elements of a target that share memory, which is for moves too.
    "load": (12, 53),
    # Six of them reduce: the reducer, a pass, its order, its gradients and their use; one records the program, and one
    # has what happens around a step of an optimizer. Another one records the calls that all ranks must make.
    "zero-step": (25, 25),
    "pipeline-step": (17, 17),
    "strategy-step": (52, 52),  # two of them pass the loss factor to routers; one seeds the next step
}


@pytest.mark.ranks(2)
def test_a_tensor_passes_through_few_modules(tmp_path):
    sys.path.insert(0, str(DOCS))
    import ways

    world = dist.group.WORLD
    taken = {
        **ways.files(str(tmp_path)),
        "zero-step": ways.zero_step(world),
        "pipeline-step": ways.pipeline_step(world),
        "strategy-step": ways.strategy_step(),
    }
    assert taken.keys() == MOST.keys() == ways.TITLES.keys()
    if dist.get_rank() != 0:  # the pictures show the first rank
        return
    for name, (called, handed) in taken.items():
        assert 0 < len(handed) <= MOST[name][0], (name, handed)
        assert len(called) <= MOST[name][1], (name, called)
