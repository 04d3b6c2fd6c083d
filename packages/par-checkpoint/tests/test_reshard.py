"""What was trained in one topology goes on in every other as if nothing had happened."""

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import load, save, verify
from par_testing import for_each

from .helpers import RUNS, Run

BEFORE, AFTER = range(2), range(2, 4)


def assert_equal_losses(losses, expected, *, exact):
    if exact:
        assert losses == expected
    else:  # a real world sums in another order than one process; these are float64
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-12, atol=0)


@for_each(source=RUNS)  # in one world: what DTensor works out for one source, it knows for the next
@pytest.mark.parametrize("pairs", ["some", pytest.param("all", marks=pytest.mark.storm)])
@pytest.mark.ranks(4)
def test_every_topology_goes_on_from(source, pairs, tmp_path):
    """By default each in two others: files know nothing of who wrote them."""
    tmp_path = tmp_path / source
    run, reference = RUNS[source](), Run()
    assert_equal_losses(run.steps(BEFORE), reference.steps(BEFORE), exact=source != "strided")
    save(tmp_path / str(run.ranks[0]), model=run.model, optimizer=run.optimizer, group=run.group)
    before = run.whole()
    expected = run.steps(AFTER)
    assert_equal_losses(expected, reference.steps(AFTER), exact=source != "strided")
    dist.barrier()
    assert verify(tmp_path / "0") == []
    for distance, (name, kind) in enumerate(RUNS.items(), list(RUNS).index(source)):
        if pairs == "some" and distance % 4 != 1:
            continue
        other = kind(seed=7)
        load(tmp_path / "0", model=other.model, optimizer=other.optimizer, group=other.group)
        for key, value in other.whole().items():
            assert torch.equal(value, before[key]), f"{source} to {name}: {key}"
        assert {float(state["step"]) for state in other.optimizer.state.values()} <= {2.0}
        assert_equal_losses(other.steps(AFTER), expected, exact="strided" not in (source, name))
