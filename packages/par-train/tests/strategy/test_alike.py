"""Who reads which rows: stages the same, whatever draws them; and last batches with few rows."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from par_testing import for_each
from par_train import Strategy

PIPELINE = {"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}}
TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}


class Noisy(Dataset):
    """Draws its rows with each of the program's generators."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.rand(1) + torch.tensor([random.random()]) + torch.from_numpy(np.random.rand(1)).float()
        return x, 3 * x


def line(count=16):
    x = torch.linspace(-1, 1, count)[:, None]
    return TensorDataset(x, 3 * x)


def drawn():
    while True:
        x = torch.rand(8, 1) + random.random() + float(np.random.rand())
        yield x, 3 * x


def summed(outputs, target):
    """Half the sum of the targets of both microbatches: each counts once."""
    return outputs.sum() * 0 + target.sum(), 1


SOURCES = {
    "shuffled": lambda: DataLoader(line(), batch_size=8, shuffle=True),
    "rows": lambda: DataLoader(Noisy(), batch_size=8),
    "worker": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1, multiprocessing_context="fork"),
    "generator": drawn,
    "iterator": lambda: (pair for _ in range(20) for pair in DataLoader(line(), batch_size=8, shuffle=True)),
}


def initialized(strategy, *more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    return strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.02), *more)


def digest_of(seen):
    def criterion(outputs, target):
        seen.append(target.flatten().tolist())
        return functional.mse_loss(outputs, target)

    return criterion


@for_each(name=SOURCES)
@pytest.mark.ranks(2, timeout=120)
def test_stages_read_the_same_rows_of_another_loader(name):
    """Inputs that belong to other targets have an error that never goes away; these have y = 3 x."""
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    with Strategy(**PIPELINE) as strategy:
        model, optimizer = initialized(strategy)
        source, batches = SOURCES[name](), []
        module = next(iter(model.parts.values()))
        module.register_forward_pre_hook(lambda _, args: batches.append(args[0].detach().flatten()))
        for _ in range(4):
            first = strategy.execute_pipeline(source, model, summed, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        inputs = [torch.cat(batches[i : i + 2]).sum() * 3 for i in range(0, 8, 2)]
        said = torch.stack([inputs[-1], 2 * first.float()]) if strategy.groups.rank("pipeline") == 0 else torch.zeros(2)
        dist.all_reduce(said)
        assert said[0].item() == pytest.approx(said[1].item(), rel=1e-5, abs=1e-5)  # fp32 sums in another order


@pytest.mark.ranks(2)
def test_stages_with_other_rows_are_refused_at_once():
    with Strategy(**PIPELINE) as strategy:
        model, optimizer = initialized(strategy)
        mine = torch.full((8, 1), float(dist.get_rank()))
        same = torch.ones(8, 1)
        rule = r"data_iter=list_iterator: ranks \[1\] have another batch than rank 0, and all ranks of a replica"
        for wrong in ([(mine, same)], [(same, mine)], [{"x": mine}], [(same, [1, dist.get_rank()])]):
            strategy.comparison.restart()
            with pytest.raises(ValueError, match=rule):
                strategy.execute_pipeline(iter(wrong), model, functional.mse_loss, optimizer)
        strategy.comparison.restart()
        given = iter([(same, same), (mine, same)])
        strategy.execute_pipeline(given, model, functional.mse_loss, optimizer)  # needs no reset()
        with pytest.raises(ValueError, match="data_iter=list_iterator"):
            strategy.execute_pipeline(given, model, functional.mse_loss, optimizer)
        own = (same, None) if strategy.pipeline(model).is_first else (None, same)  # what each stage needs
        strategy.comparison.restart()
        strategy.execute_pipeline(iter([own]), model, functional.mse_loss, optimizer)


@pytest.mark.ranks(2)
def test_loader_that_every_rank_reads_is_compared():
    with Strategy(**PIPELINE, broadcast_batches=False) as strategy:
        data = TensorDataset(torch.full((8, 1), float(dist.get_rank())), torch.ones(8, 1))
        model, optimizer, loader = initialized(strategy, DataLoader(data, batch_size=4))
        with pytest.raises(ValueError, match="data_iter=ShardedDataLoader: ranks"):
            strategy.execute_pipeline(loader, model, functional.mse_loss, optimizer)


@pytest.mark.ranks(2)
def test_data_that_ends_or_raises_on_one_rank_ends_on_all():
    def broken():
        raise OSError("no such file")
        yield

    with Strategy(**PIPELINE) as strategy:
        model, optimizer = initialized(strategy)
        with pytest.raises(StopIteration):
            strategy.execute_pipeline(iter([]), model, functional.mse_loss, optimizer)
        for source in (iter([]), broken()):
            strategy.comparison.restart()
            given = source if dist.get_rank() else iter([(torch.ones(8, 1), torch.ones(8, 1))])
            with pytest.raises(Exception, match=r"data of ranks \[1\] of the pipeline|no such file"):
                strategy.execute_pipeline(given, model, functional.mse_loss, optimizer)
            strategy.pipeline(model).reset()


@pytest.mark.ranks(2)
def test_seed_that_the_program_sets_is_what_batches_draw_with():
    with Strategy(**PIPELINE) as strategy:
        model, optimizer = initialized(strategy)
        torch.manual_seed(3)
        expected = torch.rand(8, 1)
        torch.manual_seed(3)
        seen = []
        strategy.execute_pipeline(((torch.rand(8, 1),) * 2 for _ in range(1)), model, digest_of(seen), optimizer)
        if strategy.pipeline(model).is_last:
            assert torch.equal(torch.tensor(seen).flatten(), expected.flatten())


@pytest.mark.ranks(2)
def test_last_batch_too_small_for_microbatches_is_refused_before_training():
    rule = r"batch_size={}: the last batch of an epoch has {} samples, and the microbatches of all ranks need {}"
    small = DataLoader(line(22), batch_size=4)
    with Strategy(parallel={"pipeline": 2}, pipeline={"microbatches": 4}) as strategy:
        with pytest.raises(ValueError, match=rule.format(4, 2, 4)):
            initialized(strategy, small)
        model, optimizer = initialized(strategy)
        with pytest.raises(ValueError, match=rule.format(4, 2, 4)):
            strategy.execute_pipeline(small, model, functional.mse_loss, optimizer)
        initialized(strategy, DataLoader(line(22), batch_size=4, drop_last=True))
        initialized(strategy, DataLoader(line(22), batch_size=2))  # of no pipeline
    with Strategy(pipeline={"microbatches": 4}) as strategy, pytest.raises(ValueError, match=rule.format(8, 6, 8)):
        initialized(strategy, DataLoader(line(22), batch_size=8))


def test_last_batch_of_one_rank_is_trained_on():
    """It weighs its rows: the gradient is that of their mean."""
    x, y = line(6).tensors
    alone = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    with Strategy(pipeline={"microbatches": 4}) as strategy:
        data = DataLoader(line(6), batch_size=4, sampler=range(6))
        model, optimizer, loader = initialized(strategy, data)
        alone.load_state_dict(model.state_dict())
        sgd = torch.optim.SGD(alone.parameters(), lr=0.02)
        for rows in (slice(0, 4), slice(4, 6), slice(0, 4), slice(4, 6)):
            expected = functional.mse_loss(alone(x[rows]), y[rows])
            expected.backward()
            sgd.step()
            sgd.zero_grad()
            loss = strategy.execute_pipeline(loader, model, functional.mse_loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)  # fp32: a sum of microbatches
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), other.detach())


def test_split_of_ones_own_gets_the_batch_as_it_is():
    def twice(batch, count):
        return [batch] * count

    with Strategy(pipeline={"microbatches": 4, "split": twice}) as strategy:
        model, optimizer = initialized(strategy)
        batch = (torch.ones(2, 1), torch.ones(2, 1))
        assert strategy.execute_pipeline(iter([batch]), model, functional.mse_loss, optimizer) >= 0


class Split(nn.Module):
    """Two layers over tensor ranks, which take and return full activations."""

    def __init__(self, layers):
        super().__init__()
        self.up, self.down = layers.ColumnLinear(4, 8), layers.RowLinear(8, 4)

    def forward(self, x, scale=1.0):
        return self.down(self.up(x)) * scale


@pytest.mark.ranks(2)
def test_model_called_with_differing_inputs_raises_on_all_ranks():
    """In calls 1, 2, 4, 8, ... of training, and counted apart in those of evaluation."""
    with Strategy(**TENSOR) as strategy:
        model = Split(strategy.layers)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        same, mine = torch.ones(3, 4), torch.full((3, 4), float(dist.get_rank()))
        rule = r"the inputs of Split: ranks \[1\] have another batch than rank 0, and all ranks of a replica"
        for inputs, keywords in ((mine, {}), (same, {"scale": 1.0 + dist.get_rank()})):
            strategy.comparison.restart()
            with pytest.raises(ValueError, match=rule):
                model(inputs, **keywords)
        strategy.comparison.restart()
        for inputs in (same, same, mine):  # the third call is not compared
            strategy.backward(model(inputs).sum(), optimizer)
        model.eval()
        for inputs in (same, same, mine):
            model(inputs)
        with pytest.raises(ValueError, match=rule):
            model(mine)
        model.train()
        with pytest.raises(ValueError, match=rule):
            model(mine)


@pytest.mark.ranks(2)
def test_model_of_layers_that_take_parts_may_get_differing_inputs():
    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}) as strategy:
        model = Split(strategy.layers)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        strategy.backward(model(torch.full((1, 3, 4), float(dist.get_rank()))).sum(), optimizer)


@pytest.mark.ranks(2)
def test_microbatches_of_a_compared_batch_are_not_compared():
    with Strategy(**TENSOR, pipeline={"microbatches": 2}) as strategy:
        model = Split(strategy.layers)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        counted = []
        compared = strategy.comparison.compared
        strategy.comparison.compared = lambda read, name: counted.append(name) or compared(read, name)
        for _ in range(3):
            batch = (torch.ones(4, 4), torch.ones(4, 4))
            strategy.execute_pipeline(iter([batch]), model, functional.mse_loss, optimizer)
        assert counted == ["data_iter=list_iterator"] * 2  # calls 1 and 2
