"""One choice per layer, within a budget of bytes, with the fewest seconds: a multiple-choice knapsack."""

import math
from collections.abc import Sequence

import torch

from par_groups import format_bytes

from .frontier import Choice

GRID = 8192
"""Steps of the dynamic program over bytes. Sizes with a common divisor that divides them into no more are exact."""


def knapsack(frontiers: Sequence[Sequence[Choice]], budget: int) -> list[Choice]:
    """Take one choice of each layer, such that their bytes fit a budget and their seconds are fewest. Pure.

    Every layer first takes its choice with the fewest bytes. A dynamic program then spends the rest of the budget. Its
    step is the sizes' greatest common divisor or 1/8192 of the rest, whichever is larger; with the divisor, the result
    is optimal. A greedy pass spends the bytes that rounding leaves on the layers that gain most.

    Args:
        frontiers: Choices of each layer, as from `frontier`.
        budget: Bytes for all layers together.

    Raises:
        ValueError: A layer has no choice, or the fewest bytes are above the budget.
    """
    for number, choices in enumerate(frontiers):
        if not choices:
            raise ValueError(f"frontiers[{number}] has no choice; give each layer at least one")
    least = [min(choices, key=lambda choice: (choice.bytes, choice.seconds)) for choices in frontiers]
    needed = sum(choice.bytes for choice in least)
    if needed > budget:
        raise ValueError(
            f"the budget is {budget} bytes ({format_bytes(budget)}), and {needed} bytes ({format_bytes(needed)}) are "
            "the least that these layers can keep; give at least that"
        )
    options = [
        [choice for choice in choices if choice.bytes - low.bytes <= budget - needed]
        for choices, low in zip(frontiers, least, strict=True)
    ]
    chosen = _spend(options, least, budget - needed)
    return _upgrade(options, chosen, budget - sum(choice.bytes for choice in chosen))


def _spend(options: Sequence[Sequence[Choice]], least: Sequence[Choice], rest: int) -> list[Choice]:
    """Run the dynamic program: seconds[b] is the minimum for the layers so far, b steps above their fewest bytes."""
    extras = [[choice.bytes - low.bytes for choice in some] for some, low in zip(options, least, strict=True)]
    # With a common divisor as the step, no size is rounded, so the result is optimal.
    divisor = math.gcd(*(extra for some in extras for extra in some))
    step = max(divisor, math.ceil(rest / GRID), 1)
    # More steps than all layers can use together would only make the rows longer.
    width = min(rest // step, sum(max(-(-extra // step) for extra in some) for some in extras)) + 1
    # All places begin at 0, not only the first: place b means at most b steps, so the last place is the best one.
    seconds = torch.zeros(width, dtype=torch.float64)
    taken = []
    for some, own in zip(options, extras, strict=True):
        best, rows = torch.full_like(seconds, math.inf), torch.zeros(width, dtype=torch.int64)
        # The choice with the fewest bytes takes no step, so every place gets a finite sum.
        for row, (choice, extra) in enumerate(zip(some, own, strict=True)):
            steps = -(-extra // step)
            if steps < width:
                sums = seconds[: width - steps] + choice.seconds
                less = sums < best[steps:]
                torch.where(less, sums, best[steps:], out=best[steps:])
                rows[steps:].masked_fill_(less, row)
        seconds = best
        taken.append(rows)
    # The rows say which choice each layer took at each place, so the way back goes from the last layer to the first.
    place = width - 1
    chosen: list[Choice] = []
    for some, own, rows in zip(reversed(options), reversed(extras), reversed(taken), strict=True):
        row = int(rows[place])
        chosen.append(some[row])
        place -= -(-own[row] // step)
    return chosen[::-1]


def _upgrade(options: Sequence[Sequence[Choice]], chosen: list[Choice], left: int) -> list[Choice]:
    """Upgrade the layer that saves the most seconds within the remaining bytes, until no layer can be upgraded."""
    while True:
        better = [
            (mine.seconds - choice.seconds, number, choice)
            for number, (some, mine) in enumerate(zip(options, chosen, strict=True))
            for choice in some
            if choice.seconds < mine.seconds and choice.bytes - mine.bytes <= left
        ]
        if not better:
            return chosen
        _, number, choice = max(better, key=lambda one: (one[0], -one[1]))
        left -= choice.bytes - chosen[number].bytes
        chosen[number] = choice
