"""The schedule of a pipeline, and what it does not go with. Imports no torch."""

from par_pipeline import Schedule, schedule


def make_schedule(name: str, ranks: int, microbatches: int, *, zero: int) -> Schedule:
    """A schedule by its name.

    Args:
        name: That par-pipeline, or a wheel, knows.
        ranks: Number of ranks of the pipeline.
        microbatches: Number of microbatches in a batch.
        zero: The ZeRO stage.

    Raises:
        ValueError: There is none of that name, or not for these numbers, or not at this stage.
    """
    found = schedule(name, ranks, microbatches)
    if zero == 3 and any(action.op == "W" for actions in found.ranks for action in actions):
        raise ValueError(
            f"zero is 3, which frees weights after each backward, but the schedule {name!r} needs them again for "
            "weight gradients; use zero 2, or a schedule such as '1f1b'"
        )
    return found


def microbatches_of(given: int, ranks: int) -> int:
    """The number of microbatches: as it was given, else two for each pipeline rank, and one without a pipeline."""
    return given or (2 * ranks if ranks > 1 else 1)
