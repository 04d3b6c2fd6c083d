"""Sequences cut over ranks, and ZeRO over data and sequence: two ranks cut a row, two such pairs share the data."""

import pytest
import torch
import torch.distributed as dist

import par_checkpoint
from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_layers.examples import GPT
from par_precision import clip_grad_norm_
from par_testing import assert_equal_to_one_device
from par_zero import shard

pytest.importorskip("safetensors")

DOCUMENTS = [[5, 2, 9], [16], [3, 13], [1, 15]]
"""Of the four rows: equally many targets in each half, so that the mean over the halves is that over all."""


def gpt(layers, seed=0):
    model = GPT(layers, 29, 16, 4, 1, 16, tied=True)
    initialize(model, seed=seed, dtype=torch.float64)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model, optimizer, rows, documents, group=None):
    """The gradients' norms before clipping, of some steps."""
    norms = []
    for step in range(2):
        ids = torch.randint(29, (4, 16), generator=torch.Generator().manual_seed(step))[rows]
        batch, tokens = model.layers.context.cut(
            {"ids": ids, "targets": ids}, documents=documents[rows], shift=("targets",)
        )
        optimizer.zero_grad()
        model.loss(batch["ids"], batch["targets"], tokens=tokens).backward()
        norms.append(clip_grad_norm_(optimizer, 0.1, group))
        optimizer.step()
    return torch.stack(norms)


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.storm)], ids=str)
@pytest.mark.ranks(4)
def test_a_sequence_that_is_cut_and_zero_train_as_on_one_device(stages, tmp_path):
    whole = gpt(layer_set(None))
    expected = trained(whole, sgd(whole), slice(None), DOCUMENTS)
    with ProcessGroups(Topology.from_config({"sequence": 2}, 4)) as groups:
        for stage in stages:
            model, optimizer = check_a_stage(stage, groups, whole, expected)
        check_a_checkpoint_goes_on_where_nothing_is_cut(model, optimizer, groups, tmp_path / "c")


def check_a_stage(stage, groups, whole, expected):
    group = groups["data", "sequence"]
    model = gpt(layer_set("auto", groups))
    optimizer = sgd(model)
    shard(model, optimizer, stage=stage, group=group, overlap={"bucket": 20_000})
    replica = groups.rank("data")
    norms = trained(model, optimizer, slice(2 * replica, 2 * replica + 2), DOCUMENTS, group)
    # fp64 sums in another order, over two steps
    torch.testing.assert_close(norms, expected, rtol=1e-10, atol=0)
    assert_equal_to_one_device(model, whole, rtol=1e-9, atol=1e-12, reason="fp64 sums in another order")
    return model, optimizer


def check_a_checkpoint_goes_on_where_nothing_is_cut(model, optimizer, groups, path):
    """Saved with sequence 2 and data 2, resumed with one rank: weights and momentum."""
    par_checkpoint.save(path, model=model, optimizer=optimizer, step=2).wait()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    whole = gpt(layer_set(None), seed=1)
    resumed = sgd(whole)
    assert par_checkpoint.load(path, model=whole, optimizer=resumed, group=alone).step == 2
    replica = groups.rank("data")
    trained(model, optimizer, slice(2 * replica, 2 * replica + 2), DOCUMENTS, groups["data", "sequence"])
    trained(whole, resumed, slice(None), DOCUMENTS)
    assert_equal_to_one_device(model, whole, rtol=1e-9, atol=1e-12, reason="fp64 sums in another order")
