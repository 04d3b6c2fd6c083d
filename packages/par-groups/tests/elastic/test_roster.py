"""The roster decides who is in once for each epoch, from what keepers report."""

import json
import time

import torch.distributed as dist

from par_groups.elastic.link import KeeperLink, RankProgress
from par_groups.elastic.roster import RankState, Roster, Verdict, read_ranks, write_ranks


class Hosts:
    """Hosts that renew their leases, and the roster that reads them."""

    def __init__(self, hosts, lease=5.0):
        self.store, self.renewals = dist.HashStore(), 0
        self.roster = Roster(self.store, hosts, lease)

    def renew(self, host, **ranks):
        """`r0=("running", 0)`: rank 0 has arrived at epoch 0; a third item True is a spare."""
        self.renewals += 1
        states = {
            int(name[1:]): RankState(state, bool(spare), RankProgress(epoch, 0))
            for name, (state, epoch, *spare) in ranks.items()
        }
        self.store.set(f"lease/{host}", f"{self.renewals} {write_ranks(states)}")
        self.roster.update()
        return self.roster.verdict

    def members(self, epoch):
        return self.store.get(f"{epoch}/members").decode() if self.store.check([f"{epoch}/members"]) else None


def test_epoch_is_decided_when_all_that_live_have_arrived():
    hosts = Hosts(2)
    assert hosts.renew(0, r0=("running", 0)).epoch == -1  # the second host has not said anything yet
    assert hosts.renew(1, r1=("running", -1)).epoch == -1
    assert hosts.renew(1, r1=("running", 0)).members == (0, 1)
    assert not hosts.renew(0, r0=("running", 0)).broken
    assert hosts.renew(1, r1=("dead", 0)).broken
    verdict = hosts.renew(0, r0=("running", 1))
    assert (verdict.epoch, verdict.members, verdict.broken) == (1, (0,), False)
    assert hosts.members(1) == "0"


def test_decision_of_an_epoch_is_the_first_one():
    hosts = Hosts(1)
    hosts.store.set("0/members", "5,6")
    hosts.renew(0, r0=("running", 0))
    assert hosts.members(0) == "5,6"


def test_spares_join_up_to_the_first_number_of_members():
    hosts = Hosts(1)
    two = {"r2": ("running", 0, True), "r3": ("running", 0, True)}
    verdict = hosts.renew(0, r0=("running", 0), r1=("running", 0), **two)
    assert (verdict.members, verdict.spares) == ((0, 1), 0)
    two = {"r2": ("running", 1, True), "r3": ("running", 1, True)}
    hosts.renew(0, r0=("running", 0), r1=("dead", 0), **two)
    assert hosts.renew(0, r0=("running", 1), r1=("dead", 0), **two).members == (0, 2)


def test_spare_that_waits_for_another_epoch_is_not_taken_in():
    hosts = Hosts(1)
    hosts.renew(0, r0=("running", 0), r1=("running", 0))
    late = {"r2": ("running", 0, True)}  # it has not read yet that epoch 0 was decided
    assert hosts.renew(0, r0=("running", 1), r1=("dead", 0), **late).members == (0,)
    assert hosts.roster.verdict.spares == 1  # the members are asked to form another epoch with it


def test_lost_host_never_returns():
    hosts = Hosts(2, lease=0.2)
    hosts.renew(0, r0=("running", 0))
    assert hosts.renew(1, r1=("running", 0)).members == (0, 1)
    time.sleep(0.3)
    assert hosts.renew(0, r0=("running", 0)).lost == (1,)
    assert hosts.renew(0, r0=("running", 1)).members == (0,)
    assert hosts.renew(1, r1=("running", 1)).lost == (1,)
    assert hosts.roster.verdict.members == (0,)


def test_run_is_over_after_the_first_member_is_done():
    hosts = Hosts(1)
    hosts.renew(0, r0=("running", 0), r1=("running", 0))
    verdict = hosts.renew(0, r0=("done", 0), r1=("running", 1))
    assert (verdict.over, verdict.failed, hosts.members(1)) == (True, False, "over")


def test_run_without_living_members_has_failed():
    hosts = Hosts(1)
    hosts.renew(0, r0=("running", 0))
    verdict = hosts.renew(0, r0=("dead", 0), r1=("running", 1, True))
    assert (verdict.over, verdict.failed, hosts.members(1)) == (True, True, "over")


def test_verdict_and_states_survive_their_text():
    verdict = Verdict(3, (0, 2), True, 1, RankProgress(3, 7), (1,), False, False)
    assert Verdict.of(verdict.text()) == verdict
    states = {4: RankState("running", True, RankProgress(2, 9))}
    assert read_ranks(json.dumps(json.loads(write_ranks(states)))) == states


def test_line_keeps_texts_apart_and_reports_the_end():
    one, other = KeeperLink.pair()
    one.send("a")
    one.send("at 0 1")
    assert [other.receive(0), other.receive(0), other.receive(0)] == ["a", "at 0 1", None]
    one.close()
    assert other.receive(0) == ""
    other.send("nobody reads this")
    other.close()
