"""Where a unit of stage 3 is: every way from one state to another, those that are refused, and what passes do."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import part_of
from par_testing import for_each
from par_zero import no_sync, reset, residency, summon
from par_zero._unit import Unit, UnitState
from par_zero.layout.meter import Meter

from ..helpers import assert_near, assert_same, batch, copies, joint, loss_of, mlp, sgd, sharded, whole

FREED, ARRIVING, HIDDEN, SHOWN = UnitState

REFUSED = "a bug of par-zero"
ACTIONS = {
    "begin_gathering": (ARRIVING, REFUSED, REFUSED, REFUSED),
    "wait": (FREED, HIDDEN, HIDDEN, SHOWN),
    "gather": (SHOWN, SHOWN, SHOWN, SHOWN),
    "show": (REFUSED, REFUSED, SHOWN, SHOWN),
    "hide": (FREED, ARRIVING, HIDDEN, HIDDEN),
    "free": (FREED, FREED, FREED, FREED),
    "write_back": (REFUSED, REFUSED, HIDDEN, SHOWN),
}
"""What each does in each state: the state that follows."""

WAYS = {FREED: (), ARRIVING: ("begin_gathering",), HIDDEN: ("begin_gathering", "wait"), SHOWN: ("gather",)}


def parts(module):
    """Whether parameters show parts, which are flat; and bytes of memory for whole ones."""
    flat = all(part_of(each) is not each for each in module.parameters())
    return flat, residency(module).now["device"]["units"]


class Chunk:
    """Memory that a unit takes and gives back, and what its parameters show."""

    def __init__(self):
        self.layout, self.share = SimpleNamespace(size=32), (0, 32)
        self.own = torch.arange(32.0)
        self.device, self.is_on_host = self.own.device, False
        self.groups, self.meter = SimpleNamespace(gathers=dist.group.WORLD), Meter()
        self.flat, self.shows_whole, self.may_be_written = torch.empty(32), False, False
        self.resize_(0)

    def share_in(self, flat):
        return flat

    def resize_(self, count):
        self.flat.untyped_storage().resize_(4 * count)

    def show_whole(self):
        self.shows_whole = True

    def show_share(self):
        self.shows_whole = False


@for_each(action=ACTIONS, before=list(UnitState))
@pytest.mark.ranks(1)
def test_every_action_in_every_state(action, before):
    chunk = Chunk()
    unit = Unit(1, "'blocks.0'", [nn.Identity()], [chunk])
    for step in WAYS[before]:
        getattr(unit, step)()
    assert unit.state is before
    after = ACTIONS[action][list(UnitState).index(before)]
    if after is REFUSED:
        with pytest.raises(RuntimeError, match=rf"'blocks\.0' is {before.name} and cannot be .*; a bug of par-zero"):
            getattr(unit, action)()
        after = before
    else:
        getattr(unit, action)()
    assert unit.state is after
    assert chunk.shows_whole == (after is SHOWN)
    assert bool(chunk.flat.untyped_storage().nbytes()) == (after is not FREED)
    assert (unit.freed, unit.gathered) == (after is FREED, after in (HIDDEN, SHOWN))
    if unit.gathered:
        assert torch.equal(chunk.flat, chunk.own)


@pytest.mark.ranks(2)
def test_a_graph_that_is_retained_is_gone_through_again():
    """After its first pass everything is freed; the second gathers it anew, also when more was run in between."""
    module, optimizer = sharded(mlp(), 3, sgd)
    reference = mlp()
    its = sgd(reference.parameters())
    for step in range(2):
        loss, expected = loss_of(module, batch(step, width=8)), loss_of(reference, joint(step, width=8))
        loss.backward(retain_graph=True)
        assert parts(module) == (True, 0)
        with torch.no_grad():
            module(batch(5, width=8))
        loss.backward()
        assert parts(module) == (True, 0)
        (2 * expected).backward()
        for each in (optimizer, its):
            each.step()
            each.zero_grad()
    assert_near(whole(module), copies(reference))


@pytest.mark.ranks(2)
def test_summon_within_no_sync_shows_what_is_kept_and_keeps_it():
    plain, its = sharded(mlp(), 3, sgd)
    module, optimizer = sharded(mlp(), 3, sgd)
    for step in range(2):
        with no_sync(plain):
            loss_of(plain, batch(step, width=8)).backward()
        with no_sync(module):
            loss_of(module, batch(step, width=8)).backward()
            _, kept = parts(module)
            assert kept
            with summon(module):
                assert not parts(module)[0]
                seen = copies(module)
            assert parts(module)[1] == kept
        assert_same(seen, whole(plain))
        for each, stepped in ((plain, its), (module, optimizer)):
            loss_of(each, batch(step, width=8, micro=1)).backward()
            assert parts(each) == (True, 0)
            stepped.step()
            stepped.zero_grad()
    assert_same(whole(module), whole(plain))


@for_each(within=("forward", "no_sync", "evaluation"))
@pytest.mark.ranks(2)
def test_after_an_exception_in_forward_reset_frees_everything(within):
    module, optimizer = sharded(mlp(), 3, sgd)
    plain, its = sharded(mlp(), 3, sgd)

    def stumble(*_):
        raise ArithmeticError("a block stumbles")

    for step in range(2):
        hook = module[1].register_forward_hook(stumble)
        with (
            pytest.raises(ArithmeticError),
            no_sync(module) if within == "no_sync" else torch.set_grad_enabled(within != "evaluation"),
        ):
            module(batch(9, width=8))
        hook.remove()
        reset(module)
        assert parts(module) == (True, 0)
        for each, stepped in ((plain, its), (module, optimizer)):
            loss_of(each, batch(step, width=8)).backward()
            stepped.step()
            stepped.zero_grad()
    assert_same(whole(module), whole(plain))
