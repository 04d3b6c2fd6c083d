"""Pipelines of tensor-parallel stages, and embeddings tied over stages under par-zero."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology, check_owned, segments_of, sharding_of
from par_layers import initialize, layer_set
from par_pipeline import Pipeline, Shared, one_f_one_b, zb_h1, zb_v
from par_testing import assert_equal_to_one_device, storm
from par_zero import shard, summon

WIDTH, ROWS, MICROBATCHES = 8, 12, 3


def mse(output, target):
    return (output - target).square().mean()


def mlp(layers, stage):
    module = nn.Sequential(layers.ColumnLinear(WIDTH, 4 * WIDTH), nn.GELU(), layers.RowLinear(4 * WIDTH, WIDTH))
    initialize(module, seed=3, prefix=f"{stage}.", dtype=torch.float64)
    return module


def data(step, width=WIDTH):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, 1, width, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("make", [one_f_one_b, *map(storm, (zb_h1, zb_v))])
@pytest.mark.ranks(4, timeout=90)
def test_tensor_parallel_stages_train_as_on_one_device(make):
    with ProcessGroups(Topology.from_config({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 4)) as groups:
        schedule = make(2, MICROBATCHES)
        numbers = schedule.stage_of(groups.rank("pipeline"))
        modules = [mlp(layer_set("auto", groups), number) for number in numbers]
        run = Pipeline(modules, schedule, groups["pipeline"], loss_fn=mse)
        whole = nn.Sequential(*(mlp(layer_set(None), number) for number in range(schedule.stages)))
        for step in range(2):
            x, y = data(step)
            run.step(x, target=y)
            mse(whole(x), y).backward()
        reason = "sums over ranks and microbatches are in another order"
        for number, module in zip(numbers, modules, strict=True):
            assert_equal_to_one_device(module, whole[number], rtol=1e-10, atol=1e-10, reason=reason, gradients=True)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, WIDTH).double()
        self.inner = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, tokens):
        return self.inner(self.table(tokens)).tanh()


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(WIDTH, WIDTH).double()
        self.head = nn.Linear(WIDTH, 11, bias=False).double()

    def forward(self, x):
        return self.head(self.inner(x).tanh())


@pytest.mark.parametrize("stage", [*map(storm, (0, 1)), 2])
@pytest.mark.ranks(4, timeout=90)
def test_tied_embeddings_under_par_zero_train_as_on_one_device_and_count_once(stage):
    with ProcessGroups(Topology.from_config({"pipeline": 2}, 4)) as groups:  # and two data ranks
        first = groups.rank("pipeline") == 0
        module = First() if first else Last()
        tied = {"table.weight": module.table.weight} if first else {"head.weight": module.head.weight}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        shared = Shared(tied, groups["pipeline"], replicas=groups["data"], optimizer=optimizer)
        shard(module, optimizer, stage=stage, group=groups["data"], overlap={"bucket": 300})
        run = Pipeline(
            module,
            zb_h1(2, MICROBATCHES),
            groups["pipeline"],
            loss_fn=nn.functional.cross_entropy,
            shared=[shared],
        )
        whole = nn.Sequential(First(), Last())
        whole[1].head.weight = whole[0].table.weight
        reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randint(11, (ROWS,), generator=generator) for _ in range(2))
            optimizer.zero_grad()
            run.step(x.chunk(2)[groups.rank("data")], target=y.chunk(2)[groups.rank("data")])
            optimizer.step()
            reference.zero_grad()
            nn.functional.cross_entropy(whole(x), y).backward()
            reference.step()
        with summon(module):
            for one, other in zip(module.parameters(), whole[0 if first else 1].parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
            held = sharding_of(*tied.values())
        assert all(tuple(box.copies) == (0, 1, 2, 3) for box in held.boxes)
        parts = [each for tensor in optimizer.param_groups[0]["params"] for each in segments_of(tensor)]
        check_owned([("embedding", each.sharding) for each in parts if each.name in tied], dist.group.WORLD)
