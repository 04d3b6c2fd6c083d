"""Canonical numerics over ranks that split sequences: one digest for every number of ranks that divides the lanes."""

import pytest
import torch
from torch import nn

from par_layers.modes.lanes import SequenceLanes
from par_testing import storm
from par_train import Strategy

from .test_canonical_tensor import SEQUENCE, TENSOR, assert_one_digest, digest, gpt, gpt2, llama, qwen

LANES = {"data": 4, "tensor": 2, "sequence": 4}
GATHER = {size: {"sequence": {"size": size, "mode": "gather"}} for size in (2, 4)}
TWO = [({}, {}), (GATHER[2], {}), (GATHER[2], {"zero": 3}), ({"pipeline": 2}, {"schedule": "zb_h1"}), (SEQUENCE[2], {})]
FOUR = [
    ({}, {}),
    (GATHER[4], {}),
    (GATHER[2], {"zero": 2}),
    ({**GATHER[2], **TENSOR[2]}, {}),
    ({**GATHER[2], **SEQUENCE[2]}, {"zero": 1}),
    ({**GATHER[2], "pipeline": 2}, {"schedule": "zb_h1", "zero": 1}),
]


def cells_of(make, cells):
    """The cells that can train a model: the example's GPT is no sequence of layers."""
    return [cell for cell in cells if make is not gpt or "pipeline" not in cell[0]]


@pytest.mark.ranks(2)
def test_sequence_ranks_have_the_bits_of_data_ranks():
    assert_one_digest([({}, {}), (GATHER[2], {"zero": 2})], llama, lanes=LANES, steps=2)


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [llama, qwen, gpt])
def test_two_sequence_ranks_have_the_bits_of_every_model(make, precision):
    assert_one_digest(cells_of(make, TWO), make, precision=precision, lanes=LANES)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [llama, qwen, gpt])
def test_four_ranks_with_sequence_lanes_have_one_digest(make, precision):
    assert_one_digest(cells_of(make, FOUR), make, precision=precision, lanes=LANES, steps=20)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [gpt, storm(llama)])
def test_run_that_resumes_on_other_sequence_ranks_has_the_same_bits(make, tmp_path):
    """The scale of losses is saved: it may not depend on the number of ranks that return a criterion's result."""
    expected = digest({}, make, lanes=LANES, steps=3)
    for number, (first, then) in enumerate([({}, GATHER[2]), (GATHER[2], {})]):
        digest(first, make, lanes=LANES, steps=2, save_to=tmp_path / str(number))
        assert digest(then, make, lanes=LANES, steps=3, resume_from=tmp_path / str(number)) == expected


@pytest.mark.storm
@pytest.mark.ranks(2)
def test_sums_over_the_tokens_of_a_rank_have_other_bits(monkeypatch):
    """So the tests of this module can fail."""
    monkeypatch.setattr(SequenceLanes, "blocks", lambda _, x: [x.reshape(-1, x.shape[-1])])
    monkeypatch.setattr(SequenceLanes, "join", lambda _, blocks, like: blocks[0].view(*like.shape[:-1], -1))
    assert digest({}, lanes=LANES, steps=1) != digest(GATHER[2], lanes=LANES, steps=1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("parallel", "lanes", "message"),
    [
        ({"sequence": {"size": 2, "mode": "ring"}}, LANES, "sequence mode 'ring'"),
        ({"sequence": {"size": 2, "mode": "ulysses"}}, LANES, "sequence mode 'ulysses'"),
        ({"sequence": 2}, 4, "sequence=1 must be a power of two times the 2 sequence ranks"),
    ],
)
def test_sequence_modes_without_lanes_are_refused(parallel, lanes, message):
    with pytest.raises(ValueError, match=message):
        Strategy(parallel=parallel, numerics="canonical", lanes=lanes)


def with_prelu(_):
    model = llama(None)
    model.model.layers[0].mlp.act_fn = nn.PReLU()
    return model


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("make", "kind"), [(with_prelu, "PReLU"), (gpt2, "Conv1D")])
def test_modules_with_sums_over_tokens_are_refused(make, kind):
    model = make(None)
    with (
        Strategy(numerics="canonical", lanes=LANES) as strategy,
        pytest.raises(ValueError, match=f"a {kind}, has 'weight', whose gradient is a sum over the tokens"),
    ):
        strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
