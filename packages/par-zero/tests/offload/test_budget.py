"""Options that are "auto": data stays within every budget, with the same bits, or `shard` raises."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each, storm
from par_zero import Offload, predict_step, residency, shard

from ..helpers import assert_same, batch, policies, whole
from .cases import BF16, moments, small

pytestmark = pytest.mark.cpu(reason="offload from a CPU: that from a device has tests of its own")

WIDTH, BLOCKS = 64, 4
BLOCK = WIDTH * WIDTH * 4  # bytes of a layer in fp32, of which nothing is rounded up


class Model(nn.Module):
    """Layers of equal sizes, a norm that is uneven, a frozen table, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH - 3)
        self.table = nn.Parameter(torch.ones(50), requires_grad=False)
        self.register_buffer("mean", torch.zeros(100))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.norm(x[:, 3:]) * self.table[0] + self.mean[0].to(x.dtype)


def trained(stage, offload, make=small, **options):
    """The module after three steps, all that it has learned, and the fullest that was seen of each tier."""
    module = Model()
    optimizer = make([each for each in module.parameters() if each.requires_grad])
    shard(
        module,
        optimizer,
        stage=stage,
        group=dist.group.WORLD,
        offload=offload,
        **policies(bucket=1, inflight=2, **options),
    )
    losses, most = [], dict.fromkeys(("device", "host", "disk"), 0)
    for step in range(3):
        loss = module(batch(step, width=WIDTH).to(options.get("param_dtype"))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        held = residency(module)
        most = {tier: max(size, held.total(tier), held.total(tier, fullest=True)) for tier, size in most.items()}
    return {"loss": torch.stack(losses)} | whole(module) | moments(optimizer), most, module


ALL = ("optimizer", "gradients", "parameters")
WITHIN = {
    "0, host": (0, {}, {"host": "1MB"}, 30_000),
    "1, disk": (1, {}, {"disk": "1MB"}, 30_000),
    "2, both, copies": (2, BF16, {"host": 40_000, "disk": "1MB"}, 50_000),
    "3, disk": (3, {}, {"disk": "1MB"}, 110_000),
    "3, both, copies": (3, BF16, {"host": 60_000, "disk": "1MB"}, 60_000),
}


@pytest.mark.ranks(2)
@for_each(case=WITHIN)
def test_auto_fits_every_tier_and_changes_no_number(case, tmp_path):
    stage, dtypes, rooms, less = WITHIN[case]
    plain, most, _ = trained(stage, None, **dtypes)
    # A budget counts the buffers into which gloo reduce-scatters the two chunks in flight. Other backends need none,
    # and at stage 0 two ranks need them only if they add to the gradients of an earlier pass.
    itemsize = dtypes.get("param_dtype", torch.float32).itemsize
    received = 0 if stage and dist.get_backend() == "gloo" else 2 * WIDTH * WIDTH * itemsize
    budget = {"device": most["device"] + received - less, **rooms}
    auto = dict.fromkeys(ALL if stage == 3 else ALL[:1], "auto")
    offload = Offload(**auto, path=tmp_path, piece=2048, ahead=2, budget=budget)
    found, most, module = trained(stage, offload, **dtypes)
    assert_same(found, plain)
    sizes = Offload(budget=budget).budgets
    held = residency(module)
    assert all(most[tier] <= sizes.get(tier, most[tier]) for tier in most), (sizes, most, str(held))
    assert all(most[tier] for tier in rooms), (sizes, most, str(held))
    # Beyond the least there is one chunk at most: gradients that arrive, which are cast later, or one that is not cut.
    assert sizes["device"] - most["device"] <= received + 2 * BLOCK, (sizes, most, str(held))


@pytest.mark.ranks(2)
def test_auto_within_budget_stays_on_the_device(tmp_path):
    offload = Offload(optimizer="auto", path=tmp_path, budget={"device": "1MB", "disk": "1MB"})
    found, most, _ = trained(2, offload)
    assert_same(found, trained(2, None)[0])
    assert most["host"] == most["disk"] == 0


AUTO = {"optimizer": "auto"}
REFUSED = {
    "alone": (
        1,
        AUTO | {"budget": "100KB"},
        r"the budget of the device is 100 kB, and 24\d kB are the least: parameters 66\.6, gradients 82\.4, "
        r"optimizer 66\.1, buffers 32\.8; raise it, or give bytes of a host or a disk, where the optimizer's state may",
    ),
    "device": (
        3,
        AUTO | {"budget": {"device": "100KB", "host": "1MB"}},
        r"the budget of the device is 100 kB, and 182 kB are the least: parameters 33\.6, gradients 49\.4, "
        r"units 33\.5, buffers 65\.5, with all that is 'auto' elsewhere; raise it",
    ),
    "host": (
        1,
        AUTO | {"budget": {"device": "200KB", "host": "1KB"}},
        r"the budget of the host is 1\.0 kB, and 4\d\.\d kB are the least: optimizer 4\d\.\d, for which the device",
    ),
    "disk": (
        1,
        AUTO | {"budget": {"device": "200KB", "host": "20KB", "disk": "2KB"}, "piece": 2048, "ahead": 1},
        r"the budget of the disk is 2\.0 kB, and \d+\.\d kB are the least: optimizer \d+\.\d, for which the device",
    ),
    "given": (
        1,
        {"optimizer": "host", "budget": {"host": "10KB"}},
        r"the budget of the host is 10\.0 kB, and 66\.0 kB are the least: optimizer 66\.0; raise it, or let less lie",
    ),
    "stage": (2, AUTO | {"parameters": "auto", "budget": "1MB"}, "parameters='auto' needs stage 3, where units are"),
}


@pytest.mark.ranks(2)
@for_each(what=REFUSED)
def test_budget_too_small_raises_on_all_ranks_before_a_change(what, tmp_path):
    stage, options, words = REFUSED[what]
    module = Model()
    optimizer = small([each for each in module.parameters() if each.requires_grad])
    before = [id(each) for each in optimizer.param_groups[0]["params"]]
    offload = Offload(path=tmp_path, **options)
    with pytest.raises(ValueError, match=words):
        shard(
            module,
            optimizer,
            stage=stage,
            group=dist.group.WORLD,
            offload=offload,
            overlap={"bucket": 1, "inflight": 2},
        )
    assert_same(dict(module.named_parameters()), dict(Model().named_parameters()))
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (AUTO, "optimizer is 'auto', as little as the budget of the device asks for, and budget is None; give that"),
        (AUTO | {"budget": {"host": "1GB"}}, "and budget is {'host': '1GB'}; give that of the device"),
        (AUTO | {"budget": {"device": "1GB", "disk": "1GB"}}, "the disk needs a path; give a folder on a local disk"),
        ({"budget": {"host": "much"}}, r"budget\['host'\]='much': a size is a number and one of B, KB"),
    ],
)
def test_offload_invalid_budget_raises(options, words):
    with pytest.raises(ValueError, match=words):
        Offload(**options)


def test_prediction_of_auto_raises():
    with pytest.raises(ValueError, match=r"optimizer is 'auto', which becomes parts of tiers in shard\(\); give parts"):
        predict_step(nn.Linear(8, 8), stage=1, ranks=2, offload=Offload(**AUTO, budget="1MB"))


def hybrid():
    """The groups of two ranks that share, and of the two that keep the same share as this one."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return next(each for each in halves[:2] if dist.get_rank() in dist.get_process_group_ranks(each)), next(
        each for each in halves[2:] if dist.get_rank() in dist.get_process_group_ranks(each)
    )


def two_optimizers(parameters):
    """One with two slots and groups of its own, and one with a single slot."""
    first, *others = parameters
    matrices, rest = [first], others
    return [
        small([{"params": matrices}, {"params": rest[:2], "lr": 1e-3}]),
        torch.optim.SGD(rest[2:], 0.1, momentum=0.9),
    ]


@pytest.mark.ranks(4)
@for_each(case=((1, False), storm((3, False)), (3, True)), several=(False, True))
def test_auto_with_replicas_and_two_optimizers_fits(case, several, tmp_path):
    (stage, overlap), (group, replicas) = case, hybrid()

    def run(offload):
        module = Model()
        trained_ones = [each for each in module.parameters() if each.requires_grad]
        optimizer = two_optimizers(trained_ones) if several else small(trained_ones)
        optimizers = optimizer if several else [optimizer]
        shard(
            module,
            optimizer,
            stage=stage,
            group=group,
            replicas=replicas,
            offload=offload,
            overlap={"bucket": 1, "inflight": 2},
        )
        most = dict.fromkeys(("device", "host", "disk"), 0)
        for step in range(3):
            module(batch(step, width=WIDTH)).square().mean().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            held = residency(module)
            most = {tier: max(size, held.total(tier), held.total(tier, fullest=True)) for tier, size in most.items()}
        found = whole(module)
        for number, each in enumerate(optimizers):
            found |= {f"{number} {name}": value for name, value in moments(each).items()}
        return found, most

    plain, most = run(None)
    budget = {"device": most["device"] - 20_000, "disk": "1MB"}
    auto = dict.fromkeys(("optimizer", "parameters") if stage == 3 else ("optimizer",), "auto")
    found, most = run(Offload(**auto, path=tmp_path, piece=2048, ahead=2, budget=budget, overlap=overlap))
    assert_same(found, plain)
    assert most["device"] <= budget["device"]
    assert most["disk"]
