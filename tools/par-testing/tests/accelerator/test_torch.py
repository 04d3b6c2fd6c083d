"""What torch offers on a device works on the strict one, with the CPU's bits."""

import copy
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from par_testing import Accelerator, pageable_seen
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


class LlamaBlock(nn.Module):
    """A layer of a Llama: rotary positions, fewer key heads than query heads, a gated MLP, norms without a mean."""

    def __init__(self, width=32, heads=4, keys=2):
        super().__init__()
        self.size = width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * keys * self.size, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def turned(self, x):
        angles = torch.outer(torch.arange(x.shape[2]), 100.0 ** -torch.linspace(0, 1, self.size // 2)).to(x.device)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def forward(self, x):
        normed = self.norms[0](x)
        k, v = self.kv(normed).chunk(2, -1)
        q, k, v = self.turned(self.heads(self.q(normed))), self.turned(self.heads(k)), self.heads(v)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attended.transpose(1, 2).flatten(-2)
        normed = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
    "gpt": lambda: nn.Sequential(Block(), Block()),
    "llama": lambda: nn.Sequential(LlamaBlock(), LlamaBlock()),
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
            out = module(x)
        loss = out.float().square().mean()
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_linear_layers_have_the_bits_of_the_cpu(dtype):
    # Of a GPT they differ: the lists of autocast for a GPU keep the norm's sums in full precision.
    assert same(trained("mlp", "fused", "strict", dtype), trained("mlp", "fused", "cpu", dtype))


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


@pytest.mark.accelerator
def test_fake_tensors_take_no_memory_of_the_device():
    with FakeTensorMode():
        module = nn.Linear(1 << 15, 1 << 15, device="strict")
        out = module(torch.empty(2, 1 << 15, device="strict"))
        out.sum().backward()
    assert (out.device.type, module.weight.grad.device.type) == ("strict", "strict")
    assert torch.accelerator.memory_allocated() == 0


@pytest.mark.accelerator
def test_meta_module_is_filled_on_the_device():
    module = nn.Linear(4, 4, device="meta").to_empty(device="strict")
    assert module.weight.isnan().all()
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(module.weight.cpu(), nn.Linear(4, 4).weight)


@pytest.mark.accelerator
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_of_a_loader_arrive(workers):
    loader = DataLoader(torch.arange(64.0), batch_size=8, pin_memory=True, num_workers=workers)
    batches = []
    for batch in loader:
        assert batch.is_pinned()
        batches.append(batch.to("strict", non_blocking=True))
    assert torch.equal(torch.cat(batches).cpu(), torch.arange(64.0))
    assert not pageable_seen()


@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_distributed_linear_layers_have_the_bits_of_the_cpu():
    def gradients(device):
        torch.manual_seed(0)
        mesh, module = (
            init_device_mesh(device, (dist.get_world_size(),)),
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        )
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        module = parallelize_module(module.to(device), mesh, plan)
        module(torch.ones(4, 8, device=device)).square().sum().backward()
        return [parameter.grad.full_tensor().cpu() for parameter in module.parameters()]

    assert same(gradients("strict"), gradients("cpu"))


@pytest.mark.accelerator
def test_compiled_module_has_the_bits_of_the_eager_one():
    for model in ("mlp", "gpt", "llama"):
        torch.manual_seed(0)
        module = MODELS[model]().to("strict")
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        x, gradients = torch.randn(2, 16, 32, device="strict"), []
        for call in (module, compiled):
            call(x).square().mean().backward()
            gradients.append([parameter.grad for parameter in module.parameters()])
            module.zero_grad()
        assert same(*gradients), model


@pytest.mark.accelerator
def test_transforms_of_torch_func_have_the_values_of_the_cpu():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(3, 8)
    transforms = (
        lambda module, x: torch.func.jvp(module, (x,), (torch.ones_like(x),))[1],
        lambda module, x: torch.func.grad(lambda given: module(given).sum())(x),
        lambda module, x: torch.func.vmap(module)(x),
    )
    wanted = [transform(module, x) for transform in transforms]
    module.to("strict")
    torch.testing.assert_close([transform(module, x.to("strict")).cpu() for transform in transforms], wanted)


@pytest.mark.accelerator
@torch.no_grad()
def test_writes_to_lists_are_counted_by_version_counters():
    tensors = [torch.ones(3, device="strict"), nn.Parameter(torch.ones(2, device="strict"))]
    before = [tensor._version for tensor in tensors]
    torch._foreach_mul_(tensors, 0.5)
    assert [tensor._version for tensor in tensors] == [version + 1 for version in before]
    torch._foreach_add(tensors, 1.0)
    assert [tensor._version for tensor in tensors] == [version + 1 for version in before]
