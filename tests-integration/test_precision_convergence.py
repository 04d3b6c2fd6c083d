"""Every precision trains like fp32, and stochastic rounding is the same under ZeRO: a short form of the benchmark."""

import argparse
import statistics
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_precision import mixed
from par_testing import for_each, storm
from par_zero import shard, summon

CONTEXT, BATCH, STEPS = 16, 16, 60
WITHIN = {"bf16": 0.01, "bf16-amp": 0.01, "fp16": 0.01, "fp16-amp": 0.01, "bf16-sr": 0.01, "fp8": 0.02}


class Tiny(nn.Module):
    """Predicts the next byte from the last ones: embeddings, and an MLP for each place, causal by a running mean."""

    def __init__(self, width=32):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.mix = nn.Linear(2 * width, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 256)

    def forward(self, given):
        hidden = self.tokens(given)
        before = hidden.cumsum(1) / torch.arange(1, given.shape[1] + 1, dtype=hidden.dtype)[:, None]
        return self.head(self.norm(functional.gelu(self.mix(torch.cat([hidden, before], -1)))))


def batches(steps=STEPS):
    """Windows of a source of the standard library."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        places = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        windows = text[places[:, None] + torch.arange(CONTEXT + 1)].long()
        yield windows[:, :-1], windows[:, 1:]


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Tiny().to(dtype)


def trained(module, optimizer, steps=STEPS):
    """Losses, in fp32."""
    losses = []
    for given, wanted in batches(steps):
        loss = functional.cross_entropy(module(given).float().flatten(0, 1), wanted.flatten())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def final_loss(precision):
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, fused=True)
    losses = trained(*mixed(module, optimizer, precision, clip_norm=1.0))
    return losses[0], statistics.mean(losses[-10:])


@pytest.fixture(scope="module")
def fp32():
    """The first loss in fp32, and the mean of the last ten."""
    return final_loss("fp32")


@pytest.mark.parametrize("precision", [storm(each) if each.endswith("amp") else each for each in WITHIN])
def test_a_precision_trains_to_the_loss_of_fp32(precision, fp32):
    start, reference = fp32
    _, found = final_loss(precision)
    assert reference < 0.7 * start
    assert abs(found / reference - 1) < WITHIN[precision]


@for_each(stage=(1, 2, 3))
@pytest.mark.ranks(4, timeout=120)
def test_stochastic_rounding_under_zero_is_that_of_one_device(stage):
    """All ranks have the same data, so the mean of their gradients is exact, and weights agree in every bit."""

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=2e-3, foreach=True)

    alone = model()
    optimizer = adam(alone.parameters())
    trained(*mixed(alone, optimizer, "bf16-sr"), steps=4)

    module = model(torch.bfloat16)
    optimizer = adam(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 5_000})
    module, optimizer = mixed(module, optimizer, "bf16-sr", group=dist.group.WORLD)
    trained(module, optimizer, steps=4)
    assert {tensor.dtype for group in optimizer.param_groups for tensor in group["params"]} == {torch.bfloat16}
    with summon(module):
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, alone.get_parameter(name)), name
