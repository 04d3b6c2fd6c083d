"""Every configuration with canonical numerics has the bits of one device: one fingerprint instead of tolerances."""

import pytest

from ._canonical import PRECISIONS, canonical, fingerprint, must_run, one_device
from ._cases import case, every_cell
from ._results import note
from ._training import Run, strategy_of
from .test_curves import in_a_world_of_its_size

COVER = [
    *((case(), each) for each in PRECISIONS),
    *((case(2, zero=3), each) for each in PRECISIONS),
    (case(2, "zb_v", zero=1), "fp32"),
    (case(pipeline="1f1b", tied=True), "fp32"),
    (case(2, "1f1b", zero=1, tied=True, model="Llama"), "bf16"),
    (case(model="Packed"), "fp32"),
    (case(2, zero=3, recompute="layers"), "fp32"),
]


def cells():
    """Every cell of the matrix in the precisions that have exact sums, but for those with a memory budget."""
    return [
        (case, precision)
        for case, precision in every_cell()
        if precision in PRECISIONS and not case.muon and case.options["memory"] is None
    ]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        chosen = cells() if metafunc.config.getoption("--matrix") == "full" else COVER
        metafunc.parametrize(("case", "precision"), [in_a_world_of_its_size(*each) for each in chosen])


def test_a_configuration_has_the_bits_of_one_device(case, precision, extent, device, results):
    steps, blocks, kind = extent.steps, extent.blocks, {"tied": case.tied, "model": case.model}
    try:
        strategy = strategy_of(canonical(case), precision, device)
    except ValueError as error:
        if must_run(case) or "numerics='canonical'" not in str(error):
            raise
        pytest.skip(str(error))  # the cell joins as soon as a strategy accepts its axes
    with strategy:
        run = Run(strategy, blocks, **kind)
        curve = run.train(steps)
        digest = strategy.digest(run.model)
    expected, alone = one_device(precision, steps, blocks, device, **kind)
    model = case.model + ", tied" * case.tied
    note(results, kind="bits", case=case.name, precision=precision, model=model, bits=fingerprint(digest, curve))
    assert digest.differing(expected) == []
    assert curve.norms == alone.norms
