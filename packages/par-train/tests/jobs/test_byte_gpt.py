import math

import pytest
import torch

from par_train.jobs.byte_gpt import fill_, make_gpt
from par_train.jobs.options import ModelOptions, TrainOptions
from par_train.jobs.trainer import make_optimizer

SMALL = ModelOptions(width=16, layers=2, heads=2, context=8)


def gpt():
    return fill_(make_gpt(SMALL), 0)


def test_byte_gpt_at_first_is_uniform():
    torch.manual_seed(0)
    logits = gpt()(torch.randint(256, (4, 8)))
    assert logits.shape == (4, 8, 256)
    loss = torch.nn.functional.cross_entropy(logits.view(-1, 256), torch.randint(256, (32,)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)  # logits of about 0.02 * sqrt(16)


def test_byte_gpt_logits_depend_on_no_later_byte():
    torch.manual_seed(0)
    model, inputs = gpt(), torch.randint(256, (1, 8))
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    same = (model(inputs) == model(changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_make_optimizer_decays_matrices_only():
    optimizer = make_optimizer(gpt(), TrainOptions(weight_decay=0.3))
    decay = {
        parameter.dim(): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert decay == {2: 0.3, 1: 0.0}
