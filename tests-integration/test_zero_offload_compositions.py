"""State on a disk beside everything else that trains: the same bits as in memory, in the same files."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_groups import slots_of
from par_layers import initialize
from par_layers.examples import GPT
from par_train import Strategy
from par_zero import Offload, summon

pytest.importorskip("safetensors")

VOCABULARY, STEPS = 29, 2


def gpt(layers):
    """A GPT as layers one after the other, as a pipeline takes it."""
    parts = GPT(layers, VOCABULARY, 32, 4, 2, 12, tied=False)
    initialize(parts, seed=0)
    first, last = nn.Sequential(parts.tokens, parts.positions), nn.Sequential(parts.norm, parts.head)
    return nn.Sequential(first, *parts.blocks, last)


def adapted(_):
    """Frozen layers, with peft's adapters of low rank in them."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, 24), *blocks, nn.Linear(24, VOCABULARY))
    config = peft.LoraConfig(r=4, target_modules=[f"{number}.0" for number in (1, 2, 3)])
    return peft.inject_adapter_in_model(config, model)


def adamw(model):
    """Matrices decay, other parameters do not; what is frozen is not among them."""
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True)


def sgd_and_adamw(model):
    """Two optimizers of one model."""
    parameters = list(model.parameters())
    return [
        torch.optim.SGD([each for each in parameters if each.ndim == 2], lr=0.05, momentum=0.9),
        torch.optim.AdamW([each for each in parameters if each.ndim != 2], lr=1e-2, eps=1e-3),
    ]


TENSOR = {"data": 2, "tensor": {"size": 2, "mode": "1d"}}
PIPELINE = {"data": 2, "pipeline": 2}
ZB_H1 = {"schedule": "zb_h1", "microbatches": 2}
CASES = {
    "tensor x data": (gpt, adamw, {"parallel": TENSOR, "zero": 3, "precision": "bf16"}),
    "zb_h1 x data": (gpt, sgd_and_adamw, {"parallel": PIPELINE, "pipeline": ZB_H1, "zero": 1, "precision": "fp16"}),
    "adapters": (adapted, adamw, {"zero": 3}),
    "two optimizers": (gpt, sgd_and_adamw, {"zero": 2}),
}
MORE = {
    f"{name}, stage {stage}, {precision}": (model, optimizer, {**options, "zero": stage, "precision": precision})
    for name, (model, optimizer, options) in CASES.items()
    for stage in ((0, 1, 2) if "pipeline" in options else (0, 1, 2, 3))
    for precision in ("fp32", "bf16", "fp16")
}


def criterion(logits, target):
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def made(case, path, parts, **others):
    """A strategy, its model, its optimizer and its schedule of rates."""
    random.seed(0)  # a checkpoint has the states of these generators, too
    np.random.seed(0)
    make, optimizer, options = case
    options = {**options, **others}
    zero = {"stage": options.pop("zero"), "overlap": {"bucket": 20_000}}
    if parts is not None:
        late = zero["stage"] == 3 or "auto"
        units = {"parameters": {"disk": 0.7}, "gradients": {"host": 0.3, "disk": 0.5}} if zero["stage"] == 3 else {}
        zero["offload"] = Offload(optimizer=parts, path=path, piece=4096, ahead=3, overlap=late, **units)
    strategy = Strategy(clip_norm=0.3, zero=zero, **options)
    model = make(strategy.layers)
    if "tensor" in options.get("parallel", {}):  # logits of a part of the vocabulary
        strategy.criterion = lambda logits, target: strategy.layers.cross_entropy(logits, target, classes=VOCABULARY)
    else:
        strategy.criterion = criterion
    stepped = optimizer(model)
    first = stepped[0] if isinstance(stepped, list) else stepped
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda step: 1 / (1 + step))
    return strategy, *strategy.initialize(model, stepped), schedule


def train(strategy, model, optimizer, schedule, steps):
    """Losses of some steps."""
    rank, ranks = strategy.groups.rank("data"), strategy.groups.size("data")
    losses = []
    for step in steps:
        rows = torch.randint(VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        batch = iter([(rows[:, :-1], rows[:, 1:])])
        losses.append(strategy.execute_pipeline(batch, model, strategy.criterion, optimizer))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [loss.item() if loss is not None else None for loss in losses]


def whole(model, optimizer):
    """This rank's parameters, and all state of the optimizer, put together by param group and slot."""
    with summon(model):
        found = {name: each.detach().clone() for name, each in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        slots = {name for each in group["params"] for name, value in optimizer.inner.state[each].items() if value.dim()}
        for slot in slots:
            parts = [optimizer.inner.state[each][slot] for each in group["params"]]
            found[f"{number}.{slot}"] = torch.cat([part.detach().reshape(-1) for part in parts])
    return found


def files(folder):
    """What lies in a checkpoint, byte by byte; other files have times in them."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*.safetensors"))}


def compare(case, path, *, saved):
    """Trains a case with and without state on a disk; where saved, both go on without pipelines and tensor ranks."""
    results = []
    for parts in (None, {"host": 0.2, "disk": 0.7}):
        folder = path / str(parts is None)
        strategy, *training = made(case, path, parts)
        with strategy:
            tensors = [each for group in training[1].param_groups for each in group["params"]]
            assert any(slots_of(each) for each in tensors) == (parts is not None)
            losses = train(strategy, *training, range(STEPS))
            if saved:
                strategy.checkpoint(folder, step=STEPS)
            results.append([losses, whole(*training[:2])])
        if saved:
            other = {"parallel": {}, "pipeline": {}, "zero": 2 - case[2]["zero"] // 2}
            strategy, *training = made(case, path, "disk" if parts is None else None, **other)
            with strategy:
                assert strategy.resume(folder) == STEPS
                losses += train(strategy, *training, [STEPS])
                results[-1] += [whole(*training[:2]), files(folder)]
                dist.barrier()
    (losses, *expected), (same, *found) = results
    assert same == losses
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert torch.equal(one[name], value) if isinstance(value, torch.Tensor) else one[name] == value, name


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
def test_state_on_a_disk_changes_no_bit_of_what_a_strategy_trains(tmp_path):
    compare(CASES["zb_h1 x data"], tmp_path, saved=False)
    compare(CASES["tensor x data"], tmp_path, saved=True)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
def test_state_on_a_disk_of_adapters_changes_no_bit(tmp_path):
    compare(CASES["adapters"], tmp_path, saved=True)


@pytest.mark.storm
@pytest.mark.parametrize("name", [*CASES, *MORE])
@pytest.mark.ranks(4, timeout=120)
def test_state_on_a_disk_changes_no_bit_in_any_precision_at_any_stage(name, tmp_path):
    compare((CASES | MORE)[name], tmp_path, saved=True)
