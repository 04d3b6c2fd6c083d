import pytest

from par_pipeline import Costs, one_f_one_b, simulate, zb_h1, zb_h2

from ..schedule_helpers import longest_span, most_idle, peaks, text

FIRST = "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
LAST = "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"

# Zero Bubble Pipeline Parallelism, table 5: ranks, microbatches, F, B, W, communication; bubbles of 1F1B, ZB-H1, ZB-H2.
TABLE_5 = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), "0.2431 0.1585 0.1083"),
    (8, 32, (18.513, 18.086, 9.331, 0.626), "0.1985 0.1242 0.0837"),
    (8, 64, (18.546, 18.097, 9.321, 0.762), "0.1240 0.0674 0.0444"),
    (8, 24, (29.718, 29.444, 19.927, 0.527), "0.2347 0.1323 0.0698"),
    (16, 48, (11.347, 11.248, 8.132, 0.377), "0.2552 0.1397 0.0672"),
    (32, 96, (10.419, 10.207, 7.715, 0.408), "0.2646 0.1421 0.0641"),
    (32, 256, (10.402, 10.248, 7.698, 0.460), "0.1352 0.0594 0.0257"),
]


def test_the_order_of_h1_on_four_ranks_with_eight_microbatches():
    schedule = zb_h1(4, 8)
    assert text(schedule.ranks[0], stage=False) == FIRST
    assert text(schedule.ranks[3], stage=False) == LAST
    timeline = simulate(schedule)
    assert timeline.makespan == 27
    assert most_idle(timeline) == 3
    assert peaks(timeline) == [4, 4, 4, 4]


def test_h2_waits_nowhere_between_its_first_and_last_action():
    timeline = simulate(zb_h2(4, 8))
    assert timeline.makespan == 27
    assert [timeline.span(rank) for rank in range(4)] == [24, 24, 24, 24]
    assert timeline.bubble == 0
    assert peaks(timeline) == [7, 7, 7, 7]


@pytest.mark.parametrize(("ranks", "microbatches", "costs", "bubbles"), TABLE_5)
def test_bubbles_are_those_of_the_paper(ranks, microbatches, costs, bubbles):
    timelines = [simulate(made(ranks, microbatches), Costs(*costs)) for made in (one_f_one_b, zb_h1, zb_h2)]
    assert " ".join(f"{timeline.bubble:.4f}" for timeline in timelines) == bubbles


@pytest.mark.parametrize("weight_grad", [1, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_idle_time_follows_the_formulas(ranks, weight_grad):
    forward, input_grad, microbatches = 4, 4, 4 * ranks
    costs = Costs(forward, input_grad, weight_grad)
    idle = [most_idle(simulate(made(ranks, microbatches), costs)) for made in (one_f_one_b, zb_h1, zb_h2)]
    one, two = forward + input_grad - weight_grad, forward + input_grad - 2 * weight_grad
    assert idle == [(ranks - 1) * each for each in (forward + input_grad + weight_grad, one, two)]


def test_fewer_microbatches_than_ranks_still_save_the_weight_gradient():
    before, after = (longest_span(simulate(made(8, 3))) for made in (one_f_one_b, zb_h1))
    assert after < before
