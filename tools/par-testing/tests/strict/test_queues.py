"""Order and deadlock, against a search of all that may happen."""

import gc
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from par_testing.strict.operation import Entry, Operation, Part
from par_testing.strict.queues import Fault, Queues, Run
from par_testing.strict.wait_for import VANISHED, deadlock

COMMUNICATORS = {"a": (0, 1), "b": (1, 2), "c": (0, 1, 2)}


def program_of(rank):
    mine = [name for name, members in COMMUNICATORS.items() if rank in members]
    return st.lists(st.tuples(st.sampled_from(mine), st.booleans()), max_size=5)


programs = st.tuples(*map(program_of, range(3)))
"""Of each rank: on which communicator it issues, and whether it waits for that at once."""


def entry(rank, number, name):
    operation = Operation(name="all_reduce", items=((1, "float32"),))
    return Entry(rank=rank, number=number, communicator=name, members=COMMUNICATORS[name], operation=operation)


class Game:
    """Three ranks that follow their programs, and what the queues make of it."""

    def __init__(self, program, slots):
        self.program, self.queues = program, Queues(slots)
        self.waiting, self.ended, self.running = {}, {}, []
        self.places = [0, 0, 0]

    def take(self, verdicts):
        for verdict in verdicts:
            assert isinstance(verdict, Run)
            self.running.extend((each.rank, each.number) for each in verdict.party)

    def end_one(self):
        """One rank says that it is done with what runs."""
        rank, number = self.running.pop(0)
        if rank in self.waiting and self.waiting[rank].number == number:
            del self.waiting[rank]
        self.take(self.queues.done((rank, number)))

    def go_on(self, rank):
        """A rank does the next thing in its program, unless it waits."""
        if rank in self.waiting:
            return
        if self.places[rank] == len(self.program[rank]):
            self.ended[rank] = "has ended"
            return
        name, waits = self.program[rank][self.places[rank]]
        self.places[rank] += 1
        issued = entry(rank, self.places[rank], name)
        self.take(self.queues.issue(issued))
        if waits:
            self.waiting[rank] = issued

    def found(self):
        return deadlock(self.queues, self.waiting, self.ended)


def run_by_queues(program, slots, order):
    """What is found when ranks take turns as `order` says; 3 lets an operation end."""
    game = Game(program, slots)
    for turn in [*order, 0, 1, 2, 3, 3] * 30:
        if turn < 3:
            game.go_on(turn)
        elif game.running:
            game.end_one()
        if game.found():
            return game.found()
    while game.running:
        game.end_one()
    return game.found() or ("stuck, and not found" if game.waiting else "")


def can_end(program, slots):
    """Whether all ranks come to their end: nothing is lost by running whatever can, so one order tells for all."""
    places, issued, done = [0, 0, 0], [[], [], []], [set(), set(), set()]
    blocked = [None, None, None]
    while True:
        moved = False
        for rank in range(3):
            if blocked[rank] in done[rank]:
                blocked[rank] = None
            if blocked[rank] is None and places[rank] < len(program[rank]):
                name, waits = program[rank][places[rank]]
                issued[rank].append(name)
                blocked[rank] = places[rank] if waits else None
                places[rank] += 1
                moved = True
        heads = []
        for rank in range(3):
            first = {}
            for number, name in enumerate(issued[rank]):
                if number not in done[rank]:
                    first.setdefault(name, number)
            heads.append(dict(sorted(first.items(), key=lambda item: item[1])[: slots or None]))
        for name, members in COMMUNICATORS.items():
            turns = {sum(1 for n in done[rank] if issued[rank][n] == name) for rank in members}
            if len(turns) == 1 and all(name in heads[rank] for rank in members):
                for rank in members:
                    done[rank].add(heads[rank][name])
                moved = True
        if not moved:
            return all(each is None for each in blocked)


@settings(max_examples=150)
@given(programs, st.sampled_from([None, 1, 2]), st.lists(st.integers(0, 3), min_size=4, max_size=12))
def test_a_deadlock_is_found_where_there_is_one_and_nowhere_else(program, slots, order):
    found = run_by_queues(program, slots, order)
    assert (found == "") == can_end(program, slots), found


def test_the_first_difference_is_a_fault():
    queues = Queues()
    assert queues.issue(entry(0, 1, "a")) == []
    other = Entry(rank=1, number=1, communicator="a", members=(0, 1), operation=Operation(name="barrier"))
    (fault,) = queues.issue(other)
    assert isinstance(fault, Fault)
    assert fault.words.startswith("operation 1 of communicator a: rank 0 issued all_reduce(1 float32) at ")


def test_a_rank_that_vanishes_while_an_operation_runs_never_ends_it():
    queues = Queues()
    queues.issue(entry(0, 1, "a"))
    (run,) = queues.issue(entry(1, 1, "a"))
    assert [each.rank for each in run.party] == [0, 1]
    queues.done((0, 1))
    queues.issue(second := entry(0, 2, "a"))
    queues.issue(entry(1, 2, "a"))
    assert deadlock(queues, {0: second}, {}) is None
    assert "rank 1 has vanished" in deadlock(queues, {0: second}, {1: VANISHED})


def batch_of(rank, number, *parts):
    made = tuple(Part(kind=kind, peer=1 - rank, elements=1, dtype="float32", tag=0) for kind in parts)
    operation = Operation(name="batch", parts=made)
    return Entry(rank=rank, number=number, communicator="a", members=(0, 1), operation=operation)


def test_messages_that_are_done_at_both_ends_are_forgotten():
    queues, kept = Queues(), []
    for number in range(1, 4):
        ends = [batch_of(0, number, "send", "recv"), batch_of(1, number, "recv", "send", *["send"] * (number == 3))]
        kept += [weakref.ref(each) for each in ends]
        assert queues.issue(ends[0]) == []
        verdicts = queues.issue(ends[1])
        if number < 3:
            (run,) = verdicts
            assert [each.rank for each in run.party] == [0, 1]
            assert [queues.done((rank, number)) for rank in (0, 1)] == [[], []]
    del ends, run, verdicts
    gc.collect()
    assert [reference() is None for reference in kept] == [True] * 4 + [False] * 2  # the last has one message too many


def test_a_message_that_differs_is_numbered_from_the_first_one_of_its_way():
    queues = Queues()
    for number in (1, 2):
        queues.issue(batch_of(0, number, "send"))
        queues.issue(batch_of(1, number, "recv"))
        for rank in (0, 1):
            queues.done((rank, number))
    queues.issue(batch_of(0, 3, "send"))
    part = Part(kind="recv", peer=0, elements=2, dtype="float32", tag=0)
    operation = Operation(name="batch", parts=(part,))
    (fault,) = queues.issue(Entry(rank=1, number=3, communicator="a", members=(0, 1), operation=operation))
    assert fault.words.startswith("message 3 from rank 0 to rank 1 of a: rank 0 issued send(1 float32")
