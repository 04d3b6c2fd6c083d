import math

import pytest
import torch

from par_train import GPT
from par_train.jobs.options import ModelOptions, TrainOptions
from par_train.jobs.trainer import make_optimizer

SMALL = ModelOptions(width=16, layers=2, heads=2, context=8)


def test_it_starts_out_uniform():
    torch.manual_seed(0)
    logits = GPT(SMALL)(torch.randint(256, (4, 8)))
    assert logits.shape == (4, 8, 256)
    loss = torch.nn.functional.cross_entropy(logits.view(-1, 256), torch.randint(256, (32,)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)  # logits of about 0.02 * sqrt(16)


def test_a_byte_does_not_see_those_behind_it():
    torch.manual_seed(0)
    model, inputs = GPT(SMALL), torch.randint(256, (1, 8))
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    same = (model(inputs) == model(changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_matrices_alone_decay():
    optimizer = make_optimizer(GPT(SMALL), TrainOptions(weight_decay=0.3))
    decay = {
        parameter.dim(): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert decay == {2: 0.3, 1: 0.0}
