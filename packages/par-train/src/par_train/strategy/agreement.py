"""What only one rank may see, told to all: every rank raises, or none does."""

from collections.abc import Iterator
from contextlib import contextmanager

from par_groups import agree


def check_alike(problem: Exception | None, text: str, what: str) -> None:
    """Raises on every rank if any has a problem, or if they are about to do different things.

    All-gather of a short text over the world.

    Args:
        problem: Of this rank.
        text: What all ranks must have alike.
        what: That text is, for the message.

    Raises:
        ValueError: Another rank's problem, or a difference. A rank's own problem is raised as it is.
    """
    every = agree(problem, text, None)
    for rank, each in every.items():
        if each != every[0]:
            raise ValueError(f"rank {rank} has {what} {each}, and rank 0 {every[0]}; give all ranks the same")


@contextmanager
def together(what: str) -> Iterator[None]:
    """What is done inside is done on all ranks, or raises on all. All-gather of a short text over the world at its end.

    Args:
        what: Is done.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # raised when all ranks know
        problem = error
    check_alike(problem, what, "before it")
