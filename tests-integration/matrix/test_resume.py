"""A run may stop and go on: under any other configuration nearly, under the same exactly as it would have."""

import shutil
import socket

import pytest
import torch.distributed as dist

from par_checkpoint import Tiers

from ._cases import PRECISIONS, case
from ._results import note
from ._training import Run, one_process, strategy_of, tolerance

STEPS = 3  # before and after the checkpoint of a run that goes on as it was; an epoch has five
CHAINS = [
    [
        case(2, zero=3),
        case(tensor="TP2"),
        case(pipeline="zb_v"),
        case(sequence="Gather2", zero=2),
        case(2),
        case(tensor="SP2"),
        case(2, zero=1),
        case(pipeline="1f1b"),
        case(2, zero=2),
        case(pipeline="interleaved"),
    ],
    [
        case(2, "zb_h1", zero=2),
        case(tensor="2D4"),
        case(2, sequence="Ulysses2", zero=3),
        case(pipeline="1f1b", tensor="SP2"),
        case(2, "interleaved", zero=3),
        case(2, tensor="TP2", zero=1),
        case(2, "dualpipe_v"),
    ],
    [
        case(2, "1f1b", "SP2", zero=2, tied=True),
        case(tensor="2.5D8", tied=True),
        case(2, "zb_v", "TP2", tied=True),
        case(tensor="3D8", tied=True),
        case(2, tensor="2D4", zero=3, tied=True),
        case(2, "gpipe", "SP2", zero=3, tied=True),
    ],
]
COVER = [CHAINS[0][:4], CHAINS[1][:4], CHAINS[2][:1]]
"""Each axis. Of eight ranks one: tied, cut, and shared by data ranks; test_checkpoint_layers.py has 2.5D and 3D."""


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("--matrix") == "full"
    if "undisturbed" in metafunc.fixturenames:
        return
    if "chain" in metafunc.fixturenames:
        metafunc.parametrize("precision", ["fp32", "bf16", "fp16"] if full else ["fp32"])
        chains = [[*chain, chain[0]] for chain in CHAINS] if full else COVER
        rare = [] if full else [pytest.mark.storm]  # two ranks and four stand for eight, whose world is slow to start
        chains = [
            pytest.param(
                each, marks=[pytest.mark.ranks(each[0].ranks, timeout=300), *(rare if each[0].ranks == 8 else [])]
            )
            for each in chains
        ]
        metafunc.parametrize("chain", chains, ids=[f"{each[0].ranks} ranks" for each in CHAINS])
    else:
        storm = pytest.param("bf16", marks=pytest.mark.storm)
        metafunc.parametrize("precision", PRECISIONS if full else [storm, "fp16"])


@pytest.fixture
def expected(chain, precision, extent, device):
    """The curve of one process, in parts: from one checkpoint to the next."""
    parts = len(chain) + 1
    whole = one_process(precision, parts * extent.part, extent.blocks, device, tied=chain[0].tied)
    return [whole.part(number * extent.part, extent.part) for number in range(parts)]


@pytest.fixture
def begun(chain, precision, extent, device, tmp_path):
    """The folder of a run of one process, after its first part."""
    alone = case(tied=chain[0].tied)
    with strategy_of(alone, precision, device) as strategy:
        Run(strategy, extent.blocks, tied=alone.tied).train(extent.part)
        strategy.checkpoint(tmp_path, step=extent.part)
    return tmp_path


def test_a_run_that_goes_on_under_another_configuration_each_time_follows_one_process(
    chain, precision, *, extent, device, begun, expected, results
):
    most_loss, most_norm = tolerance(precision)
    saved, part = "one rank", extent.part
    for done, each in enumerate(chain, 1):
        with strategy_of(each, precision, device) as strategy:
            run = Run(strategy, extent.blocks, tied=each.tied)
            assert strategy.resume(begun) == done * part
            curve = run.train(part)
            strategy.checkpoint(begun, step=(done + 1) * part)
            loss, norm = curve.distance(expected[done])
            note(results, kind="resume", case=each.name, saved=saved, precision=precision, loss=loss, norm=norm)
        assert loss < most_loss, f"{saved} -> {each.name}"
        assert norm < most_norm, f"{saved} -> {each.name}"
        saved = each.name


TIERED = [case(2, zero=3), case(tensor="TP2"), case(pipeline="zb_v"), case(2, zero=1)]


@pytest.fixture
def undisturbed(extent, device):
    """The curve of one process."""
    return one_process("fp32", len(TIERED) * extent.part, extent.blocks, device, tied=False)


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
def test_through_tiers_each_configuration_goes_on_from_the_memory_that_is_left_and_else_from_the_disk(
    extent, device, undisturbed, tmp_path, monkeypatch
):
    """Two hosts, by their names, each with a copy of the other's part. First one loses its memory, and then both."""
    rank, part = dist.get_rank(), extent.part
    monkeypatch.setattr(socket, "gethostname", lambda: f"host{rank}")
    memory, disk = tmp_path / f"memory{rank}", tmp_path / "disk"
    most_loss, most_norm = tolerance("fp32")
    lost, saved = {1: (1,), 2: (0, 1)}, "nothing"
    for done, each in enumerate(TIERED):
        with strategy_of(each, "fp32", device) as strategy:
            run = Run(strategy, extent.blocks)
            checkpoints = strategy.checkpoints("run", tiers=Tiers([memory, disk], copies=2))
            assert checkpoints.resume() == (done * part or None)
            if done:
                place = disk if lost.get(done) == (0, 1) else memory
                assert checkpoints.resumed_from == str(place / "run" / f"step-{done * part:08}")
            curve = run.train(part)
            for handle in checkpoints.save((done + 1) * part):
                handle.wait()
        loss, norm = curve.distance(undisturbed.part(done * part, part))
        assert loss < most_loss, f"{saved} -> {each.name}"
        assert norm < most_norm, f"{saved} -> {each.name}"
        saved = each.name
        dist.barrier()
        if rank in lost.get(done + 1, ()):
            shutil.rmtree(memory)
        dist.barrier()


@pytest.mark.ranks(2, timeout=120)
def test_under_the_same_configuration_it_goes_on_as_if_it_had_never_stopped(precision, extent, device, tmp_path):
    """Masters, moments, loss scale, lr schedule and position: one lost bit would show."""
    for number, each in enumerate([case(2, zero=2), case(2, zero=3), case(tensor="SP2"), case(pipeline="zb_v")]):
        folder = tmp_path / str(number)
        with strategy_of(each, precision, device) as strategy:
            run = Run(strategy, extent.blocks)
            run.train(STEPS)
            strategy.checkpoint(folder, step=STEPS)
            expected = run.train(STEPS)
        with strategy_of(each, precision, device) as strategy:
            run = Run(strategy, extent.blocks)
            strategy.resume(folder)
            assert run.train(STEPS) == expected, each.name
