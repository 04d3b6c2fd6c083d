"""Steps that follow a placement: they gather exactly what `simulate` says, within the budget, with the same numbers."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_groups import part_of
from par_testing import count_collectives, for_each
from par_zero import Offload, no_sync, place, reset, shard, simulate, summon, trace

from ..helpers import assert_same, batch, mlp, policies, sgd, whole

BLOCKS, WIDTH = 6, 16
POLICIES = ("behind", "static", "next_use")


class Model(nn.Module):
    """Blocks of different sizes between an embedding and a head that belong to the root.

    Attributes:
        order: The blocks that run, by number.
        active: What it says of its activations: a number of bytes.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))
            for hidden in range(32, 32 + 16 * BLOCKS, 16)
        )
        self.order = tuple(range(BLOCKS))
        self.active = 0

    def forward(self, x):
        x = self.first(x)
        for number in self.order:
            x = x + self.blocks[number](x)
        return self.last(x)


def sizes_of(module):
    """Bytes of each unit, by name: no two have as many. A rank's share is a multiple of 16 elements."""
    sizes = {f"blocks.{n}": sum(each.numel() for each in block.parameters()) for n, block in enumerate(module.blocks)}
    sizes["the Model"] = sum(each.numel() for each in (*module.first.parameters(), *module.last.parameters()))
    return {name: -(-count // 32) * 32 * 4 for name, count in sizes.items()}


def resident(sizes):
    """Bytes of a rank throughout: its shares, their gradients, and SGD's momentum."""
    return 3 * sum(sizes.values()) // dist.get_world_size()


def sharded(policy=None, room=0, **options):
    """The model, its optimizer, and bytes by unit; with bytes of room for whole units."""
    module = Model()
    sizes = sizes_of(module)
    offload = None
    if policy is not None:
        offload = Offload(budget=resident(sizes) + room, policy=policy, other=lambda: module.active)
    optimizer = sgd(module.parameters())
    shard(module, optimizer, stage=3, group=dist.group.WORLD, offload=offload, **policies(bucket=1, **options))
    return module, optimizer, sizes


def run(module, step, *, microbatches=1, evaluations=0):
    """The passes of a step; the losses of all of them."""
    losses = []
    for number in range(evaluations):
        with torch.no_grad():
            losses.append(module(batch(step, width=WIDTH, micro=90 + number)).square().mean())
    for micro in range(microbatches):
        with nullcontext() if micro == microbatches - 1 else no_sync(module):
            losses.append(module(batch(step, width=WIDTH, micro=micro)).square().mean())
            losses[-1].backward()
    return [loss.detach() for loss in losses]


def finish(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def gathered(counted, sizes):
    """How often each unit was gathered, by name: by an all-gather, or over gloo by a broadcast from each rank."""
    ranks = dist.get_world_size()
    found = [(event.op, event.bytes) for event in counted.events]
    return {
        name: found.count(("all_gather", size)) + found.count(("broadcast", size // ranks)) / ranks
        for name, size in sizes.items()
    }


def expected(module, sizes, room, policy):
    """What the simulator says of the last whole step."""
    found = trace(module)
    ledger = simulate(found, sizes, place(found, sizes, room, policy))
    return {name: ledger.fetched.get(name, 0) for name in sizes}


LOOPS = {"training": {}, "accumulation": {"microbatches": 3}, "evaluation": {"evaluations": 2}}


@pytest.mark.ranks(2)
@for_each(policy=POLICIES)
def test_steps_gather_what_the_simulator_says_and_keep_their_numbers(policy):
    check_loop(policy, microbatches=2, evaluations=1)


@pytest.mark.storm
@pytest.mark.ranks(2)
@for_each(loop=LOOPS, policy=POLICIES)
def test_every_loop_gathers_what_the_simulator_says(loop, policy):
    check_loop(policy, **LOOPS[loop])


def check_loop(policy, **loop):
    """Compares steps of a loop with those without a budget, and what they gather with the simulator."""
    room = 36_000  # of 59,700 for all
    plain, its, _ = sharded()
    module, optimizer, sizes = sharded(policy, room)
    for step in range(3):
        with count_collectives() as counted:
            losses = run(module, step, **loop)
        assert losses == run(plain, step, **loop)
        finish(its)
        finish(optimizer)
        if step:
            assert gathered(counted, sizes) == expected(module, sizes, room, policy)
    assert_same(whole(module), whole(plain))


def watched(module):
    """Has the module note the most bytes of whole parameters beside its activations, in a list of one number."""
    with summon(module):
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in module.parameters()}
    most = [0]

    def look(*_):
        most[0] = max(most[0], sum(storage.nbytes() for storage in storages.values()) + module.active)

    def look_twice(_, __, output):
        look()
        if output.requires_grad:
            output.register_hook(look)

    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(look_twice)
    return most


@pytest.mark.ranks(2)
def test_where_activations_vary_units_stay_in_what_room_they_leave():
    """From the third block to the last activations take what room there is for more than three units."""
    room = 54_000
    fetched = {}
    for policy in POLICIES:
        module, optimizer, sizes = sharded(policy, room)

        def grow(_, __, output, module=module):
            module.active = 18_000
            output.register_hook(lambda _: setattr(module, "active", 0))

        module.blocks[1].register_forward_hook(grow)
        most = watched(module)
        for step in range(4):
            most[0] = 0
            with count_collectives() as counted:
                run(module, step, microbatches=2)
            finish(optimizer)
            if step:
                assert gathered(counted, sizes) == expected(module, sizes, room, policy)
                assert most[0] <= room
        fetched[policy] = sum(count * sizes[name] for name, count in gathered(counted, sizes).items())
        assert {moment.other for moment in trace(module).moments} == {0, 18_000}
    assert fetched["next_use"] < fetched["static"] < fetched["behind"]


@pytest.mark.ranks(2)
def test_looking_ahead_moves_less_with_accumulation_evaluation_and_activations_that_vary():
    """Bytes of all-gathers, counted and simulated, of three microbatches and an evaluation a step."""
    room, moved = 54_000, {}
    for policy in POLICIES:
        module, optimizer, sizes = sharded(policy, room)

        def grow(_, __, output, module=module):
            if output.requires_grad:
                module.active = 18_000
                output.register_hook(lambda _: setattr(module, "active", 0))

        module.blocks[1].register_forward_hook(grow)
        for step in range(3):
            with count_collectives() as counted:
                run(module, step, microbatches=3, evaluations=1)
            finish(optimizer)
        fetched = gathered(counted, sizes)
        assert fetched == expected(module, sizes, room, policy)
        moved[policy] = sum(count * sizes[name] for name, count in fetched.items())
    assert moved["next_use"] < moved["static"] < moved["behind"]


@for_each(inflight=(BLOCKS + 1, 2))
@pytest.mark.ranks(2)
def test_two_orders_in_turn_are_learned_and_followed(inflight):
    """A step in another order runs as without a placement; from the fifth on both are followed."""
    room = 36_000
    # A bound below the number of chunks makes a rank begin some reductions of another order with the gradients of the
    # first microbatch alone. Those of the second are added to the sum, not to the first ones: it has other last bits.
    same = assert_same if inflight > BLOCKS else torch.testing.assert_close
    plain, its, _ = sharded(inflight=inflight)
    module, optimizer, sizes = sharded("next_use", room, inflight=inflight)
    for step in range(9):
        module.order = plain.order = (0, 1, 2, 3, 4, 5) if step % 2 else (5, 3, 1, 0, 2, 4)
        with count_collectives() as counted:
            losses = run(module, step, microbatches=2)
        same(*({"losses": torch.stack(each)} for each in (losses, run(plain, step, microbatches=2))))
        finish(its)
        finish(optimizer)
        if step >= 5:
            assert gathered(counted, sizes) == expected(module, sizes, room, "next_use")
    same(whole(module), whole(plain))


@pytest.mark.ranks(2)
def test_a_rank_that_skips_a_unit_fetches_it_for_the_others():
    room = 36_000
    plain, its, _ = sharded()
    module, optimizer, sizes = sharded("next_use", room)
    first = None
    for step in range(6):
        order = (0, 1, 2, 4, 5) if step in (2, 4) and dist.get_rank() else (0, 1, 2, 3, 4, 5)
        module.order = plain.order = order
        with count_collectives() as counted:
            losses = run(module, step, microbatches=2)
        assert losses == run(plain, step, microbatches=2)
        finish(its)
        finish(optimizer)
        if step in (1, 2, 3, 4):
            first = first or gathered(counted, sizes)
            assert gathered(counted, sizes) == first
    assert_same(whole(module), whole(plain))


@pytest.mark.ranks(2)
def test_a_rank_skips_a_unit_in_a_pass_that_no_placement_has_too():
    """As in a step that begins with an evaluation for the first time."""
    results = []
    for policy in (None, "next_use"):
        module, optimizer, _ = sharded(policy, room=36_000)
        losses = []
        for step in range(4):
            if step == 2:
                losses += run(module, step, microbatches=0, evaluations=1)
                module.order = (0, 1, 3, 4, 5) if dist.get_rank() == 0 else (0, 1, 2, 3, 4, 5)
            losses += run(module, step)
            module.order = (0, 1, 2, 3, 4, 5)
            finish(optimizer)
        results.append({"losses": torch.stack(losses)} | whole(module))
    assert_same(*results)


@for_each(inflight=(None, 1))
@pytest.mark.ranks(2)
def test_ranks_that_need_different_units_all_raise_and_go_on_after_reset(inflight):
    plain, its, _ = sharded(inflight=inflight)
    module, optimizer, sizes = sharded("next_use", 30_000, inflight=inflight)
    for step in range(2):
        for each, step_ in ((module, optimizer), (plain, its)):
            run(each, step)
            finish(step_)
    module.order = (0, 1, 2, 3, 4, 5, 0, 1) if dist.get_rank() else module.order
    with pytest.raises(RuntimeError, match=r"rank 1 runs 'blocks\.\d' where rank 0 ends backward"):
        run(module, 2)
    reset(module)
    optimizer.zero_grad()
    module.order = plain.order
    for step in range(2, 5):
        assert run(module, step) == run(plain, step)
        finish(optimizer)
        finish(its)
    assert gathered_next(module, 5, sizes) == expected(module, sizes, 30_000, "next_use")
    finish(optimizer)
    run(plain, 5)
    finish(its)
    assert_same(whole(module), whole(plain))


def gathered_next(module, step, sizes, **options):
    with count_collectives() as counted:
        run(module, step, **options)
    return gathered(counted, sizes)


@pytest.mark.ranks(2)
def test_what_happens_between_passes_leaves_the_placement_and_no_number():
    """Whole parameters summoned, a state dict, a load, a graph of a graph, recomputed blocks, fewer and more passes."""
    plain, its, _ = sharded()
    module, optimizer, sizes = sharded("next_use", 40_000)

    def between(step, each):
        if step == 3:
            with summon(each), torch.no_grad():
                each.first.bias.add_(0.5)
        if step == 4:
            with summon(each):
                state = {name: value.clone() for name, value in each.state_dict().items()}
            assert all(part_of(value) is not value for value in each.state_dict().values())
            with summon(each):
                each.load_state_dict(state)
        if step == 5:
            each.zero_grad()
            x = batch(step, width=WIDTH).requires_grad_()
            (gradient,) = torch.autograd.grad(each(x).square().mean(), x, create_graph=True)
            gradient.square().mean().backward()
        if step == 7:
            run(each, 70, evaluations=3)

    for step in range(12):
        losses = []
        for each, its_optimizer in ((module, optimizer), (plain, its)):
            microbatches = 3 if step == 9 else 2
            with no_sync(each):
                losses.append(run(each, 100 + step))
            between(step, each)
            losses.append(run(each, step, microbatches=microbatches - 1))
            finish(its_optimizer)
        assert losses[:2] == losses[2:], step
    assert_same(whole(module), whole(plain))
    counted = gathered_next(module, 13, sizes, microbatches=2)
    finish(optimizer)
    assert counted == expected(module, sizes, 40_000, "next_use")


@pytest.mark.ranks(2)
def test_recomputed_blocks_follow_too():
    plain, its, _ = sharded()
    module, optimizer, sizes = sharded("next_use", 36_000)
    for each in (plain, module):
        for block in each.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for step in range(4):
        with count_collectives() as counted:
            losses = run(module, step, microbatches=2)
        assert losses == run(plain, step, microbatches=2)
        finish(its)
        finish(optimizer)
    assert gathered(counted, sizes) == expected(module, sizes, 36_000, "next_use")
    assert_same(whole(module), whole(plain))


REFUSED = {
    "little": (
        {"budget": 100_000},
        3,
        r"the budget of the device is 100 kB, and 1(19|20) kB are the least: parameters 29\.9, the root's unit 2\.2, "
        r"two units 27\.6, gradients 29\.9, optimizer 29\.\d; give more, or make units smaller by",
    ),
    "stage": ({"budget": "1GB"}, 2, r"budget='1GB' needs stage 3, where units .*; this is stage 2: pass stage=3"),
    "policy": ({"budget": "1GB", "policy": "next"}, 3, "no policy is called 'next'; did you mean 'next_use'"),
}


@pytest.mark.ranks(2)
@for_each(what=REFUSED)
def test_budgets_that_are_refused_on_all_ranks_leave_everything_as_it_was(what):
    options, stage, words = REFUSED[what]
    module = Model()
    optimizer = sgd(module.parameters())
    with pytest.raises(ValueError, match=words):
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=Offload(**options), overlap={"bucket": 1})
    assert_same(dict(module.named_parameters()), dict(Model().named_parameters()))
    assert optimizer.param_groups[0]["params"] == list(module.parameters())


@pytest.mark.ranks(2)
def test_activations_that_leave_too_little_are_named_on_all_ranks():
    module, optimizer, _ = sharded("next_use", 30_000)
    module.active = 25_000 if dist.get_rank() else 0
    run(module, 0)
    with pytest.raises(
        ValueError,
        match=r"shares, gradients and state 89\.\d kB, 2 units 17\.0 kB, other 25\.0 kB .moment \d+, .* of 'blocks\.5'",
    ):
        optimizer.step()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"budget": "much"}, ValueError, "budget='much': a size is a number and one of B, KB"),
        ({"budget": {"device": 1, "tape": 2}}, ValueError, "budget has 'tape'; it can have device, host, disk"),
        ({"policy": 3}, TypeError, "policy is 3; give the name of a policy, such as 'next_use'"),
        ({"other": 3}, TypeError, "other is 3; give a function that returns bytes, or None"),
    ],
)
def test_options_that_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        Offload(**given)


@pytest.mark.ranks(2)
def test_a_root_without_parameters_of_its_own_is_no_unit_of_a_trace():
    module = mlp(width=WIDTH)
    optimizer = sgd(module.parameters())
    shard(module, optimizer, stage=3, group=dist.group.WORLD, offload=Offload(budget="1MB"), overlap={"bucket": 1})
    assert trace(module) is None
    for step in range(2):
        run(module, step)
        finish(optimizer)
        assert {unit for moment in trace(module).moments for unit in moment.needs} == {"0", "1", "2"}
