"""The program of a step: what makes it invalid, its bytes, its text and its picture."""

from xml.etree import ElementTree

import pytest
import torch.distributed as dist

from par_testing import for_each
from par_zero import ZeroProgram, draw_program, program, shard
from par_zero.layout.meter import MOST_ACTIONS, Meter
from par_zero.programs.ledger import ChunkBytes, HeldMemory, ProgramEntry

from ..helpers import STAGES, adamw, batch, mlp, policies, train


def made(text, **options):
    chunk = ChunkBytes(unit="u", full=100, gradient=80, shard=40, arriving=72, cast=20, received=80)
    entries = tuple(ProgramEntry(*each.split(":")) for each in text.split())
    return ZeroProgram(
        entries=entries, units={"u": 100}, chunks={"c": chunk}, shards_gradients=True, kept_buffers=2, **options
    )


STEP = "gather:u F:u B:u C:c scatter:c sum:c release free:u E S:0 step:c E"
WRONG = {
    "F:u": r"entry 0, F:u: it is not whole; a bug of par-zero",
    "gather:u gather:u": "entry 1, gather:u: it is whole already",
    "free:u": "it is not whole",
    "scatter:c": "it has no gradients",
    "C:c scatter:c scatter:c": "it is under way already",
    "sum:c": "it is not under way",
    "C:c scatter:c E": "entry 2, E: reductions are under way",
    "C:c scatter:c step:c": "its sum is not there",
    "gather:u step:c F:u": "its parameters are out of date",
    "evict:p": "it is not in memory",
    "step:p": "it is not in memory",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_entry_that_lacks_what_it_needs_is_named(text):
    with pytest.raises(ValueError, match=WRONG[text]):
        list(made(text).walk())


def test_bytes_after_each_entry_are_those_of_units_gradients_and_buffers():
    held = {str(entry): tuple(bytes_.values()) for entry, bytes_ in made(STEP).walk()}
    assert held["F:u"] == (100, 0, 0)
    assert held["C:c"] == (100, 0, 80)
    assert held["scatter:c"] == (100, 40, 160)
    assert held["free:u"] == (0, 40, 160)  # two buffers are kept
    assert made(STEP).peak() == {"units": 100, "gradients": 40, "buffers": 160}
    again = made(STEP, start=HeldMemory(gradients=frozenset("c"), lent=(80,), received=(80,)))
    assert again.peak() == {"units": 100, "gradients": 112, "buffers": 160}  # 72 as they arrive


@for_each(stage=STAGES)
@pytest.mark.ranks(2)
def test_the_program_of_a_step_is_printed_and_drawn(stage):
    module = mlp()
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(bucket=1, inflight=1))
    predicted = program(module)
    for step in range(3):
        train(module, optimizer, [[batch(step, width=8)]])
    found = program(module)
    assert found == predicted
    lines = str(found).splitlines()
    assert sum(line.endswith("E") for line in lines) == 2
    assert ("gather:0 gather:1 F:0" in lines[0]) == (stage == 3)
    assert [entry for entry in " ".join(lines).split() if entry.startswith("S")] == ["S:0"]
    picture = ElementTree.fromstring(draw_program(found))
    labels = {each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"compute", "reduce", "units", "gradients", "buffers"} <= labels
    assert ("all-gather" in labels) == (stage > 0)


def test_no_more_entries_of_a_step_are_kept_than_50_000():
    meter = Meter()
    for number, count in enumerate((MOST_ACTIONS, MOST_ACTIONS + 1, 10**6, 3)):
        for _ in range(count - 1):  # the end of the pass is an entry, too
            meter.note("F", "u")
        assert len(meter._done) <= MOST_ACTIONS + 1
        meter.end_pass(reduced=True)
        meter.end_step()
        assert len(meter.done) == (MOST_ACTIONS, 0, 0, 3)[number]
    for _ in range(MOST_ACTIONS):  # steps without a backward pass
        meter.note("S", "0")
    meter.end_step()
    assert meter.done == []
