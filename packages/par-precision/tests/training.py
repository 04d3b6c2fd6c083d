"""A small model, its optimizers and its training."""

import torch
from torch import nn

ON_CPU = ["fp32", "bf16", "bf16-amp", "fp16-amp", "fp16", "bf16-sr", "fp8"]
"""Every precision but TF32, which only GPUs have."""

MAKERS = {
    "AdamW fused": lambda module: adamw(module, fused=True),
    "AdamW": lambda module: adamw(module, fused=False),
    "SGD fused": lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, fused=True),
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
}


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16), nn.LayerNorm(16))


def adamw(module, *, fused=True, lr=0.01):
    decayed = [each for each in module.parameters() if each.ndim > 1]
    others = [each for each in module.parameters() if each.ndim == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=lr, fused=fused)


def batch(step):
    return torch.randn(14, 16, generator=torch.Generator().manual_seed(step))


def loss_of(module, step):
    x = batch(step)
    return (module(x) - x.flip(1)).square().mean()


def train(module, optimizer, *, steps, first=0):
    """The losses of some steps."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(module, step)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
