"""Order and deadlock, against a search of all that may happen."""

from hypothesis import given, settings
from hypothesis import strategies as st

from par_testing.strict.operation import Entry, Operation
from par_testing.strict.queues import Fault, Queues, Run
from par_testing.strict.wait_for import VANISHED, deadlock

COMMUNICATORS = {"a": (0, 1), "b": (1, 2), "c": (0, 1, 2)}

programs = st.tuples(*(
    st.lists(st.tuples(st.sampled_from([name for name, members in COMMUNICATORS.items() if rank in members]), st.booleans()), max_size=5)
    for rank in range(3)
))  # fmt: skip
"""Of each rank: on which communicator it issues, and whether it waits for that at once."""


def entry(rank, number, name):
    operation = Operation(name="all_reduce", items=((1, "float32"),))
    return Entry(rank=rank, number=number, communicator=name, members=COMMUNICATORS[name], operation=operation)


def run_by_queues(program, slots, order):
    """How far each rank comes, and what was found; ranks take turns as `order` says."""
    queues, waiting, ended, running = Queues(slots), {}, {}, []
    places, open_ = [0, 0, 0], [set(), set(), set()]

    def take(verdicts):
        for verdict in verdicts:
            assert isinstance(verdict, Run)
            running.extend((each.rank, each.number) for each in verdict.party)

    for turn in [*order, *range(3)] * 30:
        rank = turn % 4
        if rank == 3:
            if running:
                key = running.pop(0)
                open_[key[0]].discard(key[1])
                if key[0] in waiting and waiting[key[0]].number == key[1]:
                    del waiting[key[0]]
                take(queues.done(key))
        elif rank not in waiting and places[rank] < len(program[rank]):
            name, waits = program[rank][places[rank]]
            places[rank] += 1
            issued = entry(rank, places[rank], name)
            open_[rank].add(places[rank])
            take(queues.issue(issued))
            if waits and places[rank] in open_[rank]:
                waiting[rank] = issued
        elif rank not in waiting and rank not in ended:
            ended[rank] = "has ended"
        if rank != 3:
            while running and turn % 2:
                key = running.pop(0)
                open_[key[0]].discard(key[1])
                if key[0] in waiting and waiting[key[0]].number == key[1]:
                    del waiting[key[0]]
                take(queues.done(key))
        found = deadlock(queues, waiting, ended)
        if found:
            return found
    while running:
        key = running.pop(0)
        if key[0] in waiting and waiting[key[0]].number == key[1]:
            del waiting[key[0]]
        take(queues.done(key))
    return deadlock(queues, waiting, ended) or ("stuck" if waiting else "")


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
@given(programs, st.sampled_from([None, 1, 2]), st.lists(st.integers(0, 7), min_size=4, max_size=12))
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
