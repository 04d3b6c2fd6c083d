"""How much data a collective moves, by the textbook. Pure arithmetic, without torch.distributed."""

from fractions import Fraction


def received_per_rank(op: str, elements: int, ranks: int) -> Fraction:
    """Elements that one rank receives, averaged over the ranks of the group.

    An all-reduce is a reduce-scatter and then an all-gather. Of the operations with a root, the average over all
    choices of the root is given, so that what a rank is charged does not depend on the luck of being one.

    Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience"
    (2007), the lower bounds of the bandwidth term.

    Args:
        op: The plain name, such as "all_reduce".
        elements: The size n of the full tensor of the operation.
        ranks: The size g of the group.

    Raises:
        ValueError: An operation without a convention.
    """
    share = Fraction(ranks - 1, ranks)
    factors = {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,
        "broadcast": share,
        "reduce": share,
        "gather": share / ranks,
        "scatter": share / ranks,
        "send": Fraction(0),
        "recv": Fraction(1),
        "barrier": Fraction(0),
    }
    if op not in factors:
        raise ValueError(f"no convention says what {op!r} moves; known are {', '.join(factors)}")
    return factors[op] * elements
