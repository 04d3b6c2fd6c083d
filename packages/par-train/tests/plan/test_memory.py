"""The formulas of memory. That they hold is measured in test_plan_measured.py."""

import pytest

from par_train.plan.inputs import NUMBERS
from par_train.plan.memory import Chunks, Memory, Sharing, chunks_of, state_memory
from par_train.plan.shape import Cut, Part, Shape, count


def chunks(total=1000, chunk=100):
    return Chunks(total=total, chunk=chunk, chunks=10, gathered=300, stays=100)


def test_the_zero_papers_figure_comes_out():
    for zero, gigabytes in enumerate((120, 31.4, 16.6, 1.88)):
        sharing = Sharing(zero=zero, ranks=64)
        assert state_memory(chunks(7_500_000_000), NUMBERS["bf16"], sharing).state / 1e9 == pytest.approx(
            gigabytes, rel=3e-3
        )


def test_gradients_that_are_held_back_are_whole():
    kept, held = (
        state_memory(chunks(), NUMBERS["bf16"], Sharing(zero=3, ranks=4, held=held)) for held in (False, True)
    )
    assert kept.buffers == (2 * 100 / 4 + 2 * 100 + 300) * 2  # received, whole gradients, gathered parameters
    assert held.buffers == (2 * 100 / 4 + 1000 + 1000) * 2


def test_fp32_gradients_take_room_when_activations_are_gone():
    memory = state_memory(chunks(), NUMBERS["bf16"], Sharing(zero=1, ranks=4))
    assert memory.step == 4 * 1000 / 4
    assert memory.total == memory.state + memory.step
    full = Memory(parameters=1, gradients=1, optimizer=1, buffers=2, activations=5, step=3)
    assert full.total == 3 + 7


def test_blocks_are_gathered_together_until_they_fill_a_bucket():
    small, large = (
        chunks_of(
            count(Shape(layers=6, width=width, heads=4, context=16), Cut(), Part(blocks=6, first=True, last=True)),
            NUMBERS["fp32"],
            3,
        )
        for width in (64, 512)
    )
    assert small.gathered == small.stays == small.total  # one unit
    assert large.chunks == 7
    assert large.gathered == large.total - 4 * large.chunk
