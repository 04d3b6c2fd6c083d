"""Copies of a neighbour's shard under ZeRO 1 to 3: the bits of the shard, its bytes, and a move without a rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import Shadow, State, reshard
from par_groups import segments_of
from par_plan import NUMBER_WIDTHS, shadow_memory
from par_zero import MixedPrecision, shard, summon

GROUPS = {"AdamW": torch.optim.AdamW, "SGD": lambda given, lr: torch.optim.SGD(given, lr=lr, momentum=0.9)}


def made(kind="AdamW", *, stage=1, precision=None, frozen=False, seed=0):
    """A model of uneven sizes and its optimizer, sharded."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 11), nn.Tanh(), nn.Linear(11, 3))
    if frozen:
        model[2].requires_grad_(False)
    groups = ([each for each in some.parameters() if each.requires_grad] for some in (model[0], model[2:]))
    optimizer = GROUPS[kind]([{"params": group} for group in groups], lr=0.05)
    return shard(model, optimizer, stage=stage, group=dist.group.WORLD, precision=precision)


def loss_of(model, step):
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    dtype = next(model.parameters()).dtype
    return model(rows.to(dtype)).float().square().mean()


def step_(model, optimizer, shadow, step):
    loss_of(model, step).backward()

    def before_update(*_):
        if shadow is not None:
            assert shadow.exchange_gradients()
            shadow.step()

    # The method of the class registers the hook behind those of the sharded module.
    handle = torch.optim.Optimizer.register_step_pre_hook(optimizer, before_update)
    optimizer.step()
    handle.remove()
    optimizer.zero_grad()


def full(model, stage):
    with summon(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def bits_of(held):
    """Names, weights and state of a shard."""
    found = []
    for tensor in held.tensors:
        state = held.state.get(tensor, {})
        slots = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        found.append((segments_of(tensor).names, tensor.detach().clone(), slots))
    return found, {name: tensor.clone() for name, (tensor, _) in held.frozen.items()}


def check_bytes(model, shadow, stage, kind):
    """Compare the bytes of all copies with those of the plan, which knows neither padding nor counts of steps."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, shadow.nbytes)
    if kind == "AdamW":
        with summon(model):
            elements = sum(each.numel() for each in model.parameters() if each.requires_grad)
        planned = len(every) * shadow_memory(elements, len(every), NUMBER_WIDTHS["fp32"]).state
        # At most a block of 16 elements is padded at each end of a slice, and a frozen layer has 176 elements.
        assert planned <= sum(every) <= planned + len(every) * 3 * 2 * 16 * 16 + 2 * 176


CASES = [
    *((stage, "AdamW", {}) for stage in (1, 2, 3)),
    (1, "SGD", {}),
    (2, "AdamW", {"precision": MixedPrecision(param_dtype=torch.bfloat16)}),
    (3, "AdamW", {"precision": MixedPrecision(param_dtype=torch.bfloat16), "frozen": True}),
]


@pytest.mark.ranks(4, timeout=120)
def test_shadow_has_bits_of_neighbour_and_replaces_a_lost_rank():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for stage, kind, options in CASES:
        model, optimizer = made(kind, stage=stage, **options)
        shadow = Shadow(model, optimizer)
        for step in range(3):
            step_(model, optimizer, shadow, step)
        own, copy = list(shadow.held())
        every = [None] * ranks
        dist.all_gather_object(every, bits_of(own))
        assert str(bits_of(copy)) == str(every[rank - 1])
        for (names, mine, slots), (others, theirs, kept) in zip(bits_of(copy)[0], every[rank - 1][0], strict=True):
            assert names == others
            assert torch.equal(mine, theirs)
            assert slots.keys() == kept.keys()
            assert all(torch.equal(slots[name], kept[name]) for name in slots)

        # A rank holds its neighbour's weights, state and gradient.
        assert shadow.nbytes == copy.nbytes + sum(tensor.nbytes for tensor in copy.tensors)
        check_bytes(model, shadow, stage, kind)

        # Rank 2 has nothing to give, and the others fill all ranks.
        target, other = made(kind, stage=stage, seed=1, **options)
        source = State() if rank == 2 else shadow.held_state()
        reshard(source, State(model=target, optimizer=other))
        expected, found = full(model, stage), full(target, stage)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        shadow = Shadow(target, other)
        for step in range(3, 5):
            step_(model, optimizer, None, step)
            step_(target, other, shadow, step)
        expected, found = full(model, stage), full(target, stage)
        assert all(torch.equal(expected[name], found[name]) for name in expected), (stage, kind)


class Partly(nn.Module):
    """A module that does not use all of its parameters."""

    def __init__(self):
        super().__init__()
        for name in ("used", "idle", "last"):
            self.register_parameter(name, nn.Parameter(torch.ones(9)))

    def forward(self, given):
        return (given * self.used * self.last).sum()


@pytest.mark.ranks(2, timeout=60)
def test_shadow_reports_a_step_that_it_cannot_follow():
    model = Partly()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    shard(model, optimizer, stage=1, group=dist.group.WORLD)
    shadow, followed = Shadow(model, optimizer), []
    torch.optim.Optimizer.register_step_pre_hook(optimizer, lambda *_: followed.append(shadow.exchange_gradients()))
    model(torch.ones(9)).backward()
    optimizer.step()
    assert followed == [False]


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.data += torch.randn_like(tensor)
        return super().step(closure)


@pytest.mark.ranks(2, timeout=60)
def test_shadow_of_optimizer_that_draws_numbers_raises():
    model = nn.Linear(4, 4)
    optimizer = Noisy(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer=Noisy: its step draws random numbers"):
        Shadow(model, optimizer)
