import gc

import pytest
import torch
from torch import nn

from par_testing import live_bytes, peak_bytes, saved_bytes


@pytest.fixture(autouse=True)
def few_objects():
    """Leaves out of every count, as ranks do, what other tests have made."""
    gc.collect()
    gc.freeze()  # for good: to unfreeze would return all that the session has imported, which takes a second to search


def test_each_storage_is_counted_once_and_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(16, 4, requires_grad=True)
    # The input, and the ReLU's output, which the ReLU and the second linear both save.
    assert saved_bytes(lambda: model(x), model.parameters()) == 4 * (16 * 4 + 16 * 8)


def test_what_is_not_saved_does_not_count():
    x = torch.randn(5, requires_grad=True)
    assert saved_bytes(lambda: x + 1) == 0
    with torch.no_grad():
        assert saved_bytes(lambda: x * x) == 0
    assert saved_bytes(lambda: x * x) == 20


def test_live_bytes_count_each_storage_once():
    sparse = torch.ones(2, 2).to_sparse()  # which has no storage to ask for
    before = live_bytes()
    kept = [torch.zeros(100)]
    kept.append(kept[0][10:])
    assert live_bytes() - before == 400
    del sparse


def test_tensors_on_meta_have_no_bytes():
    before = live_bytes()
    on_meta = torch.empty(100, device="meta")
    assert live_bytes() == before
    del on_meta


def test_peak_bytes_are_those_of_the_fullest_moment():
    kept = [torch.zeros(1000)]
    before = live_bytes()

    def run():
        kept.append(kept[0].clone())  # 1000 elements more
        kept[0] = kept[1][10:]  # views take nothing, and the first 1000 are gone
        kept.append(torch.zeros(500))
        del kept[:]
        kept.append(torch.zeros(1200))

    assert peak_bytes(run, least=1000) - before == 4000
    assert live_bytes() - before == 800


def test_peak_bytes_pass_over_small_tensors():
    before = live_bytes()
    assert peak_bytes(lambda: [torch.zeros(10) for _ in range(4)], least=100) == 0
    assert peak_bytes(lambda: [torch.zeros(10) for _ in range(4)], least=40) - before == 160


def test_live_bytes_are_counted_again_until_they_are_as_expected():
    before, late, counts = live_bytes(), [torch.zeros(100)], []

    def expected(total):
        counts.append(total - before)
        if len(counts) == 3:  # as if another thread had its turn at last
            late.clear()
        return total == before

    assert live_bytes(expected) == before
    assert counts == [400, 400, 400, 0]


def test_live_bytes_of_what_leaks_are_returned_when_patience_ends():
    before = live_bytes()
    leaked = torch.zeros(100)
    assert live_bytes(lambda total: total == before, patience=0.05) - before == leaked.nbytes
