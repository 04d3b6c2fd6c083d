"""Precision and ZeRO: masters on the flat shard, one norm from flat slices, skips that all ranks make."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import segments_of
from par_precision import DynamicScale, clip_grad_norm_, grad_norm, mixed
from par_testing import count_collectives, for_each, storm
from par_zero import Offload, shard, summon

STAGES = (0, 1, 2, 3)
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
DISTANCE = {"fp32": 1e-5, "bf16-amp": 0.02, "fp16-amp": 0.005, "bf16": 0.03, "fp16": 0.005}
"""Sums in another order; and a unit in the last place of half-precision gradients, which are summed by ranks."""


def model(seed=0):
    """37 and 13: no world divides them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(37, 13), nn.Tanh(), nn.Sequential(nn.Linear(13, 37), nn.LayerNorm(37)))


def adamw(module, *, fused=True):
    decayed = [each for each in module.parameters() if each.ndim > 1]
    others = [each for each in module.parameters() if each.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=fused)


def made(precision, stage, *, fused=True, offload=None, **options):
    """A module sharded first, then mixed."""
    module = model()
    optimizer = adamw(module, fused=fused)
    world = dist.group.WORLD
    shard(
        module,
        optimizer,
        stage=stage,
        group=world,
        offload=offload,
        overlap={"bucket": 1000},
        precision={"param_dtype": WEIGHTS.get(precision)},
    )
    return mixed(module, optimizer, precision, group=world, clip_norm=0.5, **options)


def rows(step, ranks=1, rank=0):
    return torch.randn(8, 37, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def train(module, optimizer, steps, *, ranks=1, rank=0):
    """Norms and losses of this rank's rows."""
    norms, losses = [], []
    for step in steps:
        x = rows(step, ranks, rank)
        loss = (module(x) - x.flip(1)).square().mean()
        optimizer.backward(loss)
        norms.append(optimizer.step().grad_norm.item())
        optimizer.zero_grad()
        losses.append(loss.item())
    return norms, losses


@for_each(stage=(0, storm(1), storm(2), 3), precision=DISTANCE)
@pytest.mark.ranks(2, timeout=120)
def test_training_under_zero_follows_one_device(stage, precision):
    fused = (stage + list(DISTANCE).index(precision)) % 2 == 0  # each of both at every stage and in every precision
    reference = model()
    its, _ = train(*mixed(reference, adamw(reference, fused=fused), precision, clip_norm=0.5), range(5))
    module, optimizer = made(precision, stage, fused=fused)
    if stage == 3 and precision.endswith("-amp"):  # the casts of all weights would be kept until backward
        with pytest.raises(ValueError, match=r"pass precision=MixedPrecision\(param_dtype=torch.b?float16\) to shard"):
            train(module, optimizer, range(1), ranks=2, rank=dist.get_rank())
        return
    norms, _ = train(module, optimizer, range(5), ranks=2, rank=dist.get_rank())
    assert norms == pytest.approx(its, rel=DISTANCE[precision])
    digits = torch.finfo(WEIGHTS[precision]).eps if precision in WEIGHTS else 0  # of a weight that rounds otherwise
    with summon(module):
        for name, parameter in module.named_parameters():
            expected = reference.get_parameter(name).detach()
            assert parameter.dtype == expected.dtype
            torch.testing.assert_close(
                parameter.detach(), expected, rtol=digits, atol=1e-5 + 0.05 * DISTANCE[precision]
            )


@for_each(stage=STAGES)
@pytest.mark.ranks(2)
def test_the_masters_are_zeros_own_fp32_slices(stage):
    module, optimizer = made("bf16", stage)
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    assert {tensor.dtype for tensor in held} == {torch.float32}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {name for tensor in held for name in segments_of(tensor).names} <= dict(module.named_parameters()).keys()
    assert optimizer.state_dict()["par_precision"]["masters"] == []


@for_each(stage=STAGES)
@pytest.mark.ranks(3)
def test_the_norm_of_flat_slices_is_exact_and_one_all_reduce(stage):
    """Of three uneven shares with padding, against the same gradients in one piece."""
    module = model()
    optimizer = adamw(module)
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 1000})
    module(rows(0)).square().sum().backward()  # equal on all ranks, so the mean is exact up to its last digit
    whole = model()
    whole(rows(0)).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in whole.parameters()]).double()
    for order in (1.0, 2.0, math.inf):
        with count_collectives() as counted:
            norm = grad_norm(optimizer, dist.group.WORLD, norm_type=order)
        assert (counted.calls(), counted.elements(), counted.bytes()) == (1, 1, 8)
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(expected, order).item(), rel=1e-6)  # fp32 mean
    clip_grad_norm_(optimizer, 0.25, dist.group.WORLD)
    assert grad_norm(optimizer, dist.group.WORLD).item() == pytest.approx(0.25, rel=1e-6)  # fp32 gradients


@for_each(stage=STAGES[1:])
@pytest.mark.ranks(2)
def test_an_infinity_in_one_ranks_slice_is_skipped_by_all(stage):
    for precision in ("fp16", "fp16-amp", "bf16"):
        if stage == 3 and precision.endswith("-amp"):
            continue  # refused
        scale = DynamicScale(init=64.0) if precision.startswith("fp16") else None
        module, optimizer = made(precision, stage, scale=scale)
        train(module, optimizer, range(1), ranks=2, rank=dist.get_rank())
        with summon(module):
            before = [p.detach().clone() for p in module.parameters()]
        optimizer.backward(module(rows(1)).square().mean())
        held = [t for group in optimizer.param_groups for t in group["params"] if t.grad is not None]
        if dist.get_rank() == 1:
            segment = next(iter(segments_of(held[0])))
            segment.sharding.boxes[0].of(held[0].grad).view(-1)[0] = math.inf
        assert optimizer.step().skipped
        optimizer.zero_grad()
        with summon(module):
            after = [p.detach().clone() for p in module.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        if scale is not None:
            assert optimizer.scaling.scale.value == 32
        train(module, optimizer, range(2, 3), ranks=2, rank=dist.get_rank())
        assert optimizer.scaling.skipped == 1


@pytest.mark.ranks(2)
def test_rounded_weights_are_the_same_at_every_stage():
    """bf16 weights without masters: random numbers belong to elements, not to who holds them."""
    found = []
    for stage in STAGES:
        module = model().bfloat16()
        optimizer = adamw(module)
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 1000})
        module, optimizer = mixed(module, optimizer, "bf16-sr", group=dist.group.WORLD)
        train(module, optimizer, range(3), ranks=2, rank=dist.get_rank())
        with summon(module):
            found.append([p.detach().clone() for p in module.parameters()])
    for other in found[1:]:
        assert all(torch.equal(one, each) for one, each in zip(found[0], other, strict=True))


@pytest.mark.ranks(2)
def test_mixing_before_sharding_says_what_to_do():
    module = model()
    optimizer = adamw(module)
    shard(module, optimizer, stage=2, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"precision=MixedPrecision\(param_dtype=torch.bfloat16\)"):
        mixed(module, optimizer, "bf16", group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"cut over ranks, .*; pass the group"):
        mixed(module, optimizer, "fp32")


@for_each(case=(("fp16", 1, True), ("fp16", 3, False), ("bf16", 2, True)))
@pytest.mark.ranks(2)
def test_state_on_a_disk_follows_state_in_memory_through_clipping_and_skipped_steps(case, tmp_path):
    precision, stage, fused = case
    results = []
    for offload in (None, Offload(optimizer={"host": 0.2, "disk": 0.7}, path=tmp_path, piece=1024, ahead=2)):
        module, optimizer = made(precision, stage, fused=fused, offload=offload)
        norms, losses = train(module, optimizer, range(2), ranks=2, rank=dist.get_rank())
        before = state_of(optimizer)
        if precision == "fp16":
            loss = module(rows(2)).square().mean()
            optimizer.backward(loss * (math.inf if dist.get_rank() == 1 else 1))
            assert optimizer.step().skipped
            optimizer.zero_grad()
            after = state_of(optimizer)
            assert all(torch.equal(after[name], before[name]) for name in before)
        more = train(module, optimizer, range(3, 5), ranks=2, rank=dist.get_rank())
        with summon(module):
            weights = {name: each.detach().clone() for name, each in module.named_parameters()}
        results.append((norms + more[0], losses + more[1], weights | state_of(optimizer)))
    (norms, losses, expected), (others, same, found) = results
    assert same == losses
    assert others == pytest.approx(norms, rel=1e-12)  # fp64 sums over more tensors
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def state_of(optimizer):
    """The moments, put together by param group and slot."""
    inner = optimizer.inner
    return {
        f"{number}.{slot}": torch.cat([inner.state[each][slot].clone() for each in group["params"]])
        for number, group in enumerate(inner.param_groups)
        if group["params"]  # a rank's share may have none of a group
        for slot in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.ranks(2)
def test_stochastic_rounding_of_state_on_a_disk_is_refused(tmp_path):
    module = model().bfloat16()
    optimizer = adamw(module)
    offload = Offload(optimizer="disk", path=tmp_path)
    shard(module, optimizer, stage=1, group=dist.group.WORLD, offload=offload)
    with pytest.raises(ValueError, match=r"'bf16-sr' rounds the state of the AdamW .* leave offload out"):
        mixed(module, optimizer, "bf16-sr", group=dist.group.WORLD)
