"""Who reads which rows under trainers: data ranks share an epoch, ranks of a replica have the same batches."""

import multiprocessing
import random
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SubsetRandomSampler

from par_testing import for_each, storm

from .alone import make_model

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
ParTrainer = pytest.importorskip("par_train.adapters.transformers").ParTrainer
ParAccelerator = pytest.importorskip("par_train.adapters.accelerate").ParAccelerator
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

ROWS = 16
TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
PIPELINE = {"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}}


def dataset():
    return [{"input_ids": torch.full((6,), index), "labels": 0, "index": index} for index in range(ROWS)]


class Collate:
    """Draws a shift of all tokens with each of the program's generators, and notes rows and shifts."""

    def __init__(self):
        self.seen = []

    def __call__(self, batch):
        shift = int(torch.randint(4, ())) + random.randrange(4) + int(np.random.randint(4))
        ids = torch.stack([row["input_ids"] for row in batch]) + shift
        self.seen.append(([row["index"] for row in batch], shift))
        return {"input_ids": ids, "labels": ids.clone()}


def trainer_of(folder, strategy, collate, *, steps, rows, **options):
    options = {"save_strategy": "no", **options}
    args = transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=steps, logging_strategy="no",
        per_device_train_batch_size=rows, per_device_eval_batch_size=rows, remove_unused_columns=False, **options,
    )  # fmt: skip
    data = dataset()
    return ParTrainer(
        make_model(), args, train_dataset=data, eval_dataset=data[:8], data_collator=collate, strategy=strategy
    )


def of_both_ranks(value):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize("sampling", ["random", storm("group_by_length")])
def test_trainer_reads_each_row_once_in_any_order_of_calls(tmp_path, sampling):
    for number, calls in enumerate(("train", "evaluate train", "train train", "train evaluate train evaluate")):
        for strategy, data_ranks in (({"zero": 1}, 2), (PIPELINE, 1)):
            collate = Collate()
            folder = tmp_path / f"{number} {data_ranks}"
            trainer = trainer_of(
                folder, strategy, collate, steps=4, rows=4 // data_ranks, train_sampling_strategy=sampling
            )
            for call in calls.split():
                collate.seen.clear()
                getattr(trainer, call)()
                one, other = of_both_ranks(collate.seen)
                if data_ranks == 1:
                    assert one == other, (calls, call)
                rows = sorted(index for batch, _ in (one + other if data_ranks == 2 else one) for index in batch)
                assert rows == list(range(ROWS if call == "train" else 8)), (calls, call)
            trainer.strategy.close()


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize("workers", [storm(0), 1])
def test_trainer_draws_the_same_batches_in_a_replica(tmp_path, workers):
    class Seeing(ParTrainer):
        def training_step(self, model, inputs, *rest, **more):
            seen.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *rest, **more)

    multiprocessing.set_start_method("fork", force=True)  # a worker that starts anew could not import this module
    for name, strategy in (("tensor", TENSOR), ("pipeline", PIPELINE)):
        random.seed(dist.get_rank())  # the Trainer seeds them
        seen = []
        trainer = trainer_of(tmp_path / name, strategy, Collate(), steps=6, rows=4, dataloader_num_workers=workers)
        trainer.__class__ = Seeing
        trainer.train()
        one, other = of_both_ranks(seen)
        assert one == other
        assert len(one) == 6
        trainer.strategy.close()


@pytest.mark.ranks(2, timeout=180)
def test_trainer_whose_tensor_ranks_read_other_rows_raises(tmp_path):
    class Unseeded(Collate):
        def __call__(self, batch):
            given = super().__call__(batch)
            return {**given, "input_ids": given["input_ids"] + dist.get_rank()}

    for name, strategy in (("tensor", TENSOR), ("pipeline", PIPELINE)):
        trainer = trainer_of(tmp_path / name, strategy, Unseeded(), steps=2, rows=4)
        with pytest.raises(ValueError, match=r": ranks \[1\] have another batch than rank 0"):
            trainer.train()
        trainer.strategy.close()


@pytest.mark.ranks(2, timeout=180)
def test_trainer_resumes_in_the_order_of_the_later_epoch(tmp_path):
    """In the middle of the second epoch, with draws of a sampler that knows no epochs, and of the collate function."""
    options = {"rows": 2, "train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 6}
    whole, resumed = Collate(), Collate()
    trainer = trainer_of(tmp_path, {"zero": 1}, whole, steps=8, **options)
    trainer.train()
    trainer.strategy.close()
    again = trainer_of(tmp_path, {"zero": 1}, resumed, steps=8, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    again.strategy.close()
    assert [rows for rows, _ in resumed.seen] == [rows for rows, _ in whole.seen[6:]]
    one, other = of_both_ranks([index for rows, _ in whole.seen[4:] for index in rows])
    assert sorted(one + other) == list(range(ROWS))


class Shuffled(Sampler):
    """Draws from one of the program's generators."""

    def __len__(self):
        return ROWS

    def __iter__(self):
        order = torch.randperm(ROWS).tolist()
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())


class Own(Shuffled):
    """Draws from a generator of its own."""

    def __init__(self, seed):
        self.own = np.random.default_rng(seed)

    def __iter__(self):
        return iter(self.own.permutation(ROWS).tolist())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm(ROWS).tolist())


LOADERS = {
    "shuffle": lambda: DataLoader(range(ROWS), batch_size=2, shuffle=True),
    "subset": lambda: DataLoader(range(ROWS), batch_size=2, sampler=SubsetRandomSampler(range(ROWS))),
    "own sampler": lambda: DataLoader(range(ROWS), batch_size=2, sampler=Shuffled()),
    "own generator": lambda: DataLoader(range(ROWS), batch_size=2, sampler=Own(3)),
    "no batches": lambda: DataLoader(
        torch.arange(ROWS), batch_size=None, sampler=BatchSampler(Shuffled(), 2, drop_last=False)
    ),
    "worker": lambda: DataLoader(
        range(ROWS), batch_size=2, sampler=Shuffled(), num_workers=1, multiprocessing_context="fork"
    ),
}


def seed_alike():
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)


def initialized(prepare):
    model = torch.nn.Linear(1, 1)
    return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def read(data):
    """Two epochs, with draws of the program between batches, on the second rank more than on the first."""
    epochs = []
    for _ in range(2):
        epochs.append([])
        for batch in data:
            epochs[-1] += batch.tolist()
            torch.rand(dist.get_rank() + 1)
    return epochs


def assert_shared(found):
    for one, other in zip(*of_both_ranks(found), strict=True):
        assert sorted(one + other) == list(range(ROWS))
    assert found[0] != found[1]


@pytest.mark.ranks(2, timeout=120)
@for_each(name=[*LOADERS, "stream"])
@pytest.mark.parametrize("seedable", [False, True])
def test_accelerate_shares_each_epoch_over_data_ranks(name, seedable):
    seed_alike()
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = ParAccelerator(strategy={"zero": 1}, cpu=True, dataloader_config=config)
    initialized(accelerator.prepare)  # from here on torch is seeded by the rank
    make = {**LOADERS, "stream": lambda: DataLoader(Stream(), batch_size=2)}[name]
    assert_shared(read(accelerator.prepare(make())))
    accelerator.strategy.close()


@for_each(name=LOADERS)
@pytest.mark.ranks(2, timeout=120)
def test_fabric_shares_each_epoch_over_data_ranks(name):
    fabric_of = pytest.importorskip("lightning.fabric")
    strategy = pytest.importorskip("par_train.adapters.fabric").ParStrategy
    fabric = fabric_of.Fabric(accelerator="cpu", devices=2, strategy=strategy(zero=1))
    fabric.launch()
    seed_alike()
    initialized(fabric.setup)
    assert_shared(read(fabric.setup_dataloaders(LOADERS[name]())))
    with pytest.raises(ValueError, match=r"sampler=Own: ranks \[1\] would draw another order than rank 0"):
        fabric.setup_dataloaders(DataLoader(range(ROWS), batch_size=2, sampler=Own(dist.get_rank())))
    other = DistributedSampler(range(ROWS), num_replicas=2, rank=dist.get_rank(), seed=dist.get_rank())
    with pytest.raises(ValueError, match=r"sampler=DistributedSampler: ranks \[1\] would draw another order"):
        fabric.setup_dataloaders(DataLoader(range(ROWS), batch_size=2, sampler=other))
    mine = SubsetRandomSampler(range(dist.get_rank(), ROWS, 2))  # shared by the program
    data = DataLoader(range(ROWS), batch_size=2, sampler=mine)
    assert_shared(read(fabric.setup_dataloaders(data, use_distributed_sampler=False)))
    fabric.strategy.strategy.close()


@pytest.mark.ranks(2, timeout=120)
def test_accelerate_reads_the_same_rows_on_tensor_ranks():
    def collate(rows):
        return torch.tensor(rows) + 100 * random.randrange(9) + 1000 * int(torch.randint(9, ()))

    accelerator = ParAccelerator(strategy=TENSOR, cpu=True)
    with pytest.raises(ValueError, match=r"sampler=Own: ranks \[1\] would draw another order than rank 0"):
        accelerator.prepare(DataLoader(range(ROWS), batch_size=2, sampler=Own(dist.get_rank())))
    random.seed(dist.get_rank())  # nobody has seeded it alike
    data = accelerator.prepare(DataLoader(range(ROWS), batch_size=2, shuffle=True, collate_fn=collate))
    skipped = accelerator.skip_first_batches(data, 3)
    for each, count in ((data, 8), (skipped, 5)):
        found = [batch.tolist() for batch in each]
        one, other = of_both_ranks(found)
        assert one == other
        assert len(one) == count
    accelerator.strategy.close()


RESUMED = {name: LOADERS[name] for name in ("shuffle", "own sampler", "own generator")}
RESUMED_DAILY = [("shuffle", True), ("own sampler", False)]
"""A loader of torch's own sampler, which is seeded by the epoch, and one of the program's."""


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    ("name", "seedable"),
    [each if each in RESUMED_DAILY else storm(*each) for each in product(RESUMED, (False, True))],
)
def test_accelerate_resumes_in_the_order_of_the_later_epoch(tmp_path, name, seedable):
    """Saved in the middle of the second epoch of four, and again in the third, by a script that sets no epoch."""

    def begin():
        seed_alike()
        config = accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = ParAccelerator(strategy={"zero": 1}, cpu=True, dataloader_config=config)
        initialized(accelerator.prepare)
        return accelerator, accelerator.prepare(RESUMED[name]())

    def epochs_from(accelerator, data, first, skipped, saves):
        found = []
        for epoch in range(first, 4):
            begun = skipped if epoch == first else 0
            for batch, rows in enumerate(accelerator.skip_first_batches(data, begun) if begun else data, begun):
                found += rows.tolist()
                if (epoch, batch) in saves:
                    accelerator.save_state(tmp_path / f"{saves[epoch, batch]}")
        accelerator.strategy.close()
        return found

    expected = epochs_from(*begin(), 0, 0, {(1, 1): "second"})
    each = ROWS // 2
    assert expected[:each] != expected[each : 2 * each] != expected[2 * each : 3 * each]
    for folder, epoch, saves in (("second", 1, {(2, 1): "third"}), ("third", 2, {})):
        accelerator, data = begin()
        accelerator.load_state(tmp_path / folder)
        found = epochs_from(accelerator, data, epoch, 2, saves)
        assert found == expected[epoch * each + 4 :], folder
