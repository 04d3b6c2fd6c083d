"""Does once, in the process that ranks are forked from, what torch makes when something is first used."""

import torch
from torch import nn

# torch lets the `step` of a class run hooks once the class has an instance. Were that torch's own class, the hooks of a
# subclass that calls `super().step()` would run twice in every rank.


class _SGD(torch.optim.SGD):
    pass


class _AdamW(torch.optim.AdamW):
    pass


def use_what_tests_use() -> None:
    """Runs a forward, two optimizers, a comparison and a print of tiny tensors: a rank is then spared 7 ms of a core.

    No backward: it would start autograd's threads for the devices that exist here, which a fork does not inherit, and
    those for a device that a rank adds would be missing.
    """
    with torch.random.fork_rng(devices=[]):  # ranks that set no seed draw what they would have drawn
        model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.LayerNorm(2))
        model(torch.randn(2, 2))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in (_SGD(model.parameters(), momentum=0.9), _AdamW(model.parameters())):
            optimizer.step()
        torch.testing.assert_close(torch.ones(2), torch.ones(2))
        str(torch.ones(2))
