"""The formulas of memory. That they hold is measured in test_measured.py."""

import pytest

from par_train.plan.inputs import NUMBERS
from par_train.plan.memory import Memory, Replicas, replicas_of, state_memory
from par_train.plan.shape import Cut, Part, Shape, count


def replicas(zero, ranks, elements=1000, **changes):
    return Replicas(zero=zero, ranks=ranks, elements=elements, chunk=100, chunks=10, gathered=300, stays=100, **changes)


def test_the_zero_papers_figure_comes_out():
    for zero, gigabytes in enumerate((120, 31.4, 16.6, 1.88)):
        state = state_memory(replicas(zero, 64, elements=7_500_000_000), NUMBERS["bf16"]).state
        assert state / 1e9 == pytest.approx(gigabytes, rel=3e-3)


def test_gradients_that_accumulate_are_whole():
    at_once, later = (state_memory(replicas(3, 4, accumulates=one), NUMBERS["bf16"]) for one in (False, True))
    assert at_once.buffers == (2 * 100 / 4 + 2 * 100 + 300) * 2  # received, whole gradients, gathered parameters
    assert later.buffers == (2 * 100 / 4 + 1000 + 1000) * 2


def test_fp32_gradients_take_room_when_activations_are_gone():
    memory = state_memory(replicas(1, 4), NUMBERS["bf16"])
    assert memory.step == 4 * 1000 / 4
    assert memory.total == memory.state + memory.step
    full = Memory(parameters=1, gradients=1, optimizer=1, buffers=2, activations=5, step=3)
    assert full.total == 3 + 7


def test_blocks_are_gathered_together_until_they_fill_a_bucket():
    small, large = (
        replicas_of(
            count(Shape(layers=6, width=width, heads=4, context=16), Cut(), Part(blocks=6, first=True, last=True)),
            NUMBERS["fp32"],
            zero=3,
            ranks=2,
        )
        for width in (64, 512)
    )
    assert small.gathered == small.stays == small.elements  # one unit
    assert large.chunks == 7
    assert large.gathered == large.elements - 4 * large.chunk
