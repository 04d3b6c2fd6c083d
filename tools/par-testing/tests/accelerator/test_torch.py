"""What torch offers on a device works on the strict one, with the CPU's bits."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from par_testing.accelerator.by_default import ByDefault


class Block(nn.Module):
    """A layer of a GPT: attention, a product, a norm."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(-2))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
    "gpt": lambda: nn.Sequential(Block(), Block()),
    "conv": lambda: nn.Sequential(nn.Conv1d(16, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 1)),
}
OPTIMIZERS = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "single": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def trained(model, optimizer, device, dtype=None):
    torch.manual_seed(0)
    module = MODELS[model]().to(device)
    steps, losses = OPTIMIZERS[optimizer](module.parameters()), []
    for seed in range(3):
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(seed)).to(device)
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = module(x).square().mean()
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    return [*losses, *(parameter.detach().cpu() for parameter in module.parameters())]


def same(one, other):
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.accelerator
@pytest.mark.parametrize("model", MODELS)
def test_training_has_the_bits_of_the_cpu(model):
    for optimizer in OPTIMIZERS:
        assert same(trained(model, optimizer, "strict"), trained(model, optimizer, "cpu")), optimizer


@pytest.mark.accelerator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_trains_in_low_precision(dtype):
    low, full = trained("gpt", "fused", "strict", dtype), trained("gpt", "fused", "strict")
    assert low[:3] != full[:3]
    assert low[:3] == pytest.approx(full[:3], rel=0.01)  # losses of some hundred numbers with 8 bits each


@pytest.mark.accelerator
def test_random_numbers_are_those_of_the_seed_and_leave_the_cpu_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drawn = torch.randn(8, device="strict")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn.cpu(), torch.randn(8))


@pytest.mark.accelerator
def test_checkpointed_dropout_recomputes_the_same_mask():
    module, gradients = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to("strict"), []
    for call in (lambda x: checkpoint(module, x, use_reentrant=False), module):
        torch.manual_seed(3)
        x = torch.ones(4, 8, device="strict").requires_grad_()
        call(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.accelerator
def test_modules_move_copy_and_load(tmp_path):
    module = nn.Linear(4, 4)
    weight = module.weight
    module.to("strict")
    assert module.weight is weight
    assert weight.device.type == "strict"
    torch.save(copy.deepcopy(module).state_dict(), tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)
    assert loaded["weight"].device.type == "strict"
    assert torch.equal(torch.load(tmp_path / "file", map_location="cpu")["weight"], weight.cpu())


@pytest.mark.accelerator
def test_default_device_is_that_of_a_test():
    with ByDefault():
        drawn = torch.randn(8, generator=torch.Generator().manual_seed(1))
        made, named = nn.Linear(4, 4), torch.ones(4, device="cpu")
    assert (drawn.device.type, made.weight.device.type, named.device.type) == ("strict", "strict", "cpu")
    assert torch.equal(drawn.cpu(), torch.randn(8, generator=torch.Generator().manual_seed(1)))
