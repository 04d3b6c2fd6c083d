"""Every configuration with canonical numerics has the bits of one device: one fingerprint instead of tolerances."""

import pytest

from ._canonical import (
    IN_THREES,
    LANES,
    LAYER_LANES,
    PRECISIONS,
    canonical,
    fingerprint,
    lanes_of,
    must_run,
    one_device,
)
from ._cases import case, every_cell
from ._results import note
from ._training import Curve, Run, strategy_of
from .test_curves import in_a_world_of_its_size

COVER = [
    (case(2, zero=3), "bf16"),
    (case(model="Packed"), "fp32"),
    (case(tensor="SP2"), "bf16"),
    (case(2, "1f1b", "TP2", zero=1, recompute="layers:2"), "fp32"),
    (case(sequence="Gather2"), "fp32"),
    (case(tensor="SP2", expert="EP2 folded", zero=1, model="Mixture"), "fp32"),
]
FURTHER = [
    *(case(4, zero=stage) for stage in (0, 1, 2, 3)),
    *(case(3), case(3, zero=2), case(3, zero=3), case(3, "zb_h1", zero=1)),
    *(case(pipeline="zb_v", tensor=name, sequence="Gather2") for name in ("TP2", "SP2")),
    *(case(2, "zb_h1", name, zero=1) for name in ("TP2", "SP2")),
    case(2, "1f1b", sequence="Gather4", zero=2),
    *(case(model="Qwen3"), case(2, zero=3, model="Qwen3"), case(pipeline="zb_h1", model="Qwen3")),
    *(case(tensor=name, model="Qwen3") for name in ("TP4", "SP4")),
    *(case(sequence="Gather4", model="Qwen3"), case(2, "1f1b", "SP2", zero=1, model="Qwen3")),
    *(case(tensor=name) for name in ("TP4", "SP4")),
    *(case(sequence="Gather4", model=model) for model in ("GPT", "Llama", "Packed")),
    case(2, "1f1b", sequence="Gather2", zero=1),
    *(case(tied=True), case(2, zero=3, tied=True), case(2, "zb_v", zero=1, tied=True)),
    *(case(2, zero=2, model="Packed"), case(pipeline="zb_h1", model="Packed")),
    *(case(model="Llama"), case(2, zero=3, model="Llama"), case(pipeline="zb_h1", model="Llama")),
    *(case(tensor=name, model="Llama") for name in ("TP4", "SP4")),
    *(case(expert=name, zero=zero, model="Mixture") for name in ("EP2", "EP4") for zero in (0, 2)),
    *(case(tensor="TP2", expert=name, zero=3, model="Mixture") for name in ("EP2", "EP2 folded")),
    *(case(tensor="SP4", expert="EP4 folded", model="Mixture"), case(tensor="TP2", model="Mixture")),
    case(pipeline="zb_h1", tensor="TP2", expert="EP2", model="Mixture"),
    *(case(tied=True, model="Llama"), case(pipeline="zb_v", tied=True, model="Llama")),
]
"""Configurations that need no row with tolerances, because others have the same sums in the same order."""


CHAIN = [
    case(2, "zb_h1", zero=1),
    case(tensor="TP4"),
    case(tensor="SP2", sequence="Gather2"),
    case(4, zero=3),
    case(pipeline="1f1b", sequence="Gather2"),
    case(2, tensor="SP2", zero=2),
]
"""A run is saved under each of them and resumes under the next."""


def cells():
    """Every cell of the matrix in the precisions that have exact sums, but for those with a memory budget."""
    exact = [
        (case, precision)
        for case, precision in every_cell()
        if precision in PRECISIONS and not case.muon and case.options["memory"] is None
    ]
    return dict.fromkeys([*exact, *((case, precision) for case in FURTHER for precision in PRECISIONS)])


PLAIN = [(case(), "fp32"), (case(2, zero=3), "bf16"), (case(pipeline="zb_v", tied=True), "fp32")]
"""Cells that run without tensor lanes, too: their reference is a loop whose model is in plain torch."""


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        in_full = metafunc.config.getoption("--matrix") == "full"
        chosen = cells() if in_full else COVER
        if metafunc.function is test_one_tensor_lane_has_the_bits_of_plain_torch:
            chosen = PLAIN
        metafunc.parametrize(("case", "precision"), [in_a_world_of_its_size(*each) for each in chosen])


@pytest.fixture
def lanes(case, request):
    """The lanes of a cell."""
    return LANES if request.function is test_one_tensor_lane_has_the_bits_of_plain_torch else lanes_of(case)


@pytest.fixture
def expected(case, lanes, precision, extent, device):
    """The digest and the curve of one device, which the parent process computes once for all cells of a model."""
    return one_device(precision, extent.steps, extent.blocks, device, tied=case.tied, model=case.model, lanes=lanes)


def test_a_configuration_has_the_bits_of_one_device(  # noqa: PLR0917 - fixtures
    case, lanes, precision, extent, device, results, expected
):
    try:
        found = trained(case, lanes, precision, extent, device)
    except ValueError as error:
        if must_run(case) or not any(words in str(error) for words in ("numerics='canonical'", "lanes")):
            raise
        pytest.skip(str(error))  # the cell joins as soon as a strategy accepts its axes
    model = case.model + ", tied" * case.tied + ", 12 lanes" * (lanes == IN_THREES)
    note(results, kind="bits", case=case.name, precision=precision, model=model, bits=fingerprint(*found))
    assert_equal(found, expected)


def test_one_tensor_lane_has_the_bits_of_plain_torch(case, lanes, precision, extent, device, expected):
    assert_equal(trained(case, lanes, precision, extent, device), expected)


@pytest.fixture
def undisturbed(precision, extent, device):
    """The digest and the curve of one device for as many steps as all configurations of `CHAIN` together."""
    steps = len(CHAIN) * extent.part
    return one_device(precision, steps, extent.blocks, device, tied=False, lanes=LAYER_LANES)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_resumes_elsewhere_each_time_has_the_bits_of_one_device(
    precision, extent, device, results, undisturbed, tmp_path
):
    norms = []
    for number, each in enumerate(CHAIN):
        with strategy_of(canonical(each, LAYER_LANES), precision, device) as strategy:
            run = Run(strategy, extent.blocks)
            assert strategy.checkpoints(tmp_path / "run").resume() == (number * extent.part or None)
            norms += run.train(extent.part).norms
            strategy.checkpoints(tmp_path / "run").save((number + 1) * extent.part)
            digest = strategy.digest(run.model)
    found = digest, Curve([], norms)
    name = ", then ".join(each.name for each in CHAIN)
    note(results, kind="bits", case=name, precision=precision, model="GPT, resumed", bits=fingerprint(*found))
    assert_equal(found, undisturbed)


def trained(case, lanes, precision, extent, device):
    """The digest of the weights after the last step, and the curve."""
    with strategy_of(canonical(case, lanes), precision, device) as strategy:
        run = Run(strategy, extent.blocks, tied=case.tied, model=case.model)
        curve = run.train(extent.steps)
        return strategy.digest(run.model), curve


def assert_equal(found, expected):
    assert found[0].differing(expected[0]) == []
    assert found[1].norms == expected[1].norms
