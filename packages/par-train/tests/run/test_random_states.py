"""`random` and numpy's generator: a run that is resumed draws what it would have drawn, on every rank."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.random.mtrand import set_bit_generator

from par_data import gather_random_states, restore_random_states
from par_train import LoggingPolicy, MonitoringPolicy, Run, Strategy

DRAWS = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),  # of which every second one is kept from the one before
    "numpy": np.random.rand,
    "normal": np.random.randn,
}


def train(folder, stop, draw, seed, **options):
    """Trains on what the program draws, as a script does that seeds at its start, and gives what it has drawn."""
    random.seed(seed)
    np.random.seed(seed)
    drawn = []
    with Strategy(**options) as strategy:
        model = strategy.layers.Linear(4, 2)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), 0.1))
        logging, monitoring = LoggingPolicy(progress=False), MonitoringPolicy(diagnose=None)
        with Run(folder, strategy, resume="auto", logging=logging, monitoring=monitoring) as run:
            for _ in run.steps([0], until=stop):
                drawn.append(draw())
                strategy.backward(model(torch.full((1, 4), float(np.sum(drawn[-1])))).sum(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
    return drawn


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seeds", [(5, 5), (5, 6)], ids=["alike", "apart"])
def test_resumed_run_draws_what_it_would_have_drawn(tmp_path, seeds):
    def draw():
        return [each() for each in DRAWS.values()]

    seed = seeds[dist.get_rank()]
    whole = train(tmp_path / "whole", 6, draw, seed)
    parts = train(tmp_path / "parts", 3, draw, seed) + train(tmp_path / "parts", 6, draw, seed)
    assert parts == whole


@pytest.mark.ranks(4)
def test_resumed_run_under_another_topology_draws_alike_in_a_replica(tmp_path):
    drawn = train(tmp_path, 2, random.random, dist.get_rank())  # four replicas
    drawn += train(tmp_path, 4, random.random, dist.get_rank(), parallel={"tensor": {"size": 2, "mode": "1d"}})
    every = [None] * 4
    dist.all_gather_object(every, drawn[2:])
    assert every[0] == every[1]
    assert every[2] == every[3]
    assert every[0] != every[2]
    assert every[0][0] not in drawn[:2]


@pytest.mark.ranks(1)
def test_numpy_generator_of_another_kind_is_refused():
    saved = gather_random_states(0)
    set_bit_generator(np.random.PCG64(1))
    with pytest.raises(ValueError, match="bit generator is PCG64, and the checkpoint holds a state of MT19937; call"):
        restore_random_states(saved, 0)
    saved, before = gather_random_states(0), np.random.rand(3)
    restore_random_states(saved, 0)
    assert np.array_equal(np.random.rand(3), before)
    set_bit_generator(np.random.MT19937(1))
