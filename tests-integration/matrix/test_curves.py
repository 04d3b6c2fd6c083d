"""Every configuration in every precision follows one process: the loss and the gradient norm of each step."""

import time

import pytest

from ._cases import SCHEDULES, case, cover, every_cell, zero_stages
from ._results import note
from ._training import EXISTING, LlamaForCausalLM, Run, one_process, strategy_of, tolerance


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cells = every_cell() if metafunc.config.getoption("--matrix") == "full" else cover()
        metafunc.parametrize(("case", "precision"), [in_a_world_of_its_size(*each) for each in cells])


def in_a_world_of_its_size(case, precision):
    marks = [pytest.mark.ranks(case.ranks, timeout=120)]
    if case.model in EXISTING:
        marks.append(pytest.mark.skipif(LlamaForCausalLM is None, reason="transformers is not installed"))
    return pytest.param(case, precision, id=f"{case.name}, {precision}", marks=marks)


@pytest.fixture
def expected(case, precision, extent, device):
    """The curve of one process in this precision, and in fp32."""
    kind = {"tied": case.tied, "model": case.model, "muon": case.muon}
    return [one_process(each, extent.steps, extent.blocks, device, **kind) for each in (precision, "fp32")]


def test_a_configuration_follows_one_process(case, precision, extent, device, expected, results):
    start = time.perf_counter()
    with strategy_of(case, precision, device) as strategy:
        run = Run(strategy, extent.blocks, tied=case.tied, model=case.model, muon=case.muon)
        curve = run.train(extent.steps)
        seconds = time.perf_counter() - start
        (loss, norm), (loss_fp32, norm_fp32) = (curve.distance(each) for each in expected)
        row = {"loss": loss, "norm": norm, "loss to fp32": loss_fp32, "norm to fp32": norm_fp32, "seconds": seconds}
        note(results, kind="curve", case=case.name, ranks=case.ranks, precision=precision, **row)
    most_loss, most_norm = tolerance(precision, rounding=expected[0].distance(expected[1])[1])
    assert max(loss, loss_fp32) < most_loss
    assert max(norm, norm_fp32) < most_norm


@pytest.mark.ranks(2)
def test_stage_3_of_zero_is_refused_where_a_schedule_wants_freed_weights_again(device):
    for name in SCHEDULES:
        if 3 not in zero_stages(name):
            with pytest.raises(ValueError, match=f"zero=3 with schedule='{name}': .*use zero=2"):
                strategy_of(case(pipeline=name, zero=3), "fp32", device)
