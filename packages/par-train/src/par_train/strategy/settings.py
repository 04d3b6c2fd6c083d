"""Settings that a file or a flag can hold, checked without torch: pipeline schedule, recomputation, profiled steps."""

import re
from typing import TYPE_CHECKING, TypeAlias

from par_groups import parse_size
from par_pipeline import Schedule, schedule

from .._errors import UserError

if TYPE_CHECKING:
    from par_recompute import Drop, Keep, Layers, Ops

    Policy: TypeAlias = Drop | Keep | Layers | Ops | str

FORMS = "'cheap', 'layers', 'layers:2' for every second layer, 'keep:0.4' for a part, or 'keep:6GB' for a size"
"""The forms of a text, for messages."""

_COUNT = re.compile(r"[0-9]+")
_PART = re.compile(r"[0-9]*\.?[0-9]+")
_STEPS = re.compile(r"steps=(\d+):(\d+)")


def read_recompute(text: str) -> tuple[str, float]:
    """Parse a text into a word and its number. Imports no torch.

    Args:
        text: One of the forms in `FORMS`.

    Returns:
        ("cheap", 0), ("layers", every), ("part", from 0 to 1) or ("bytes", size).

    Raises:
        ValueError: The text has none of these forms.
    """
    word, colon, value = text.partition(":")
    if not colon and word in ("cheap", "layers"):
        return word, float(word == "layers")
    if word == "layers" and _COUNT.fullmatch(value) and int(value) > 0:
        return "layers", int(value)
    if word == "keep" and _PART.fullmatch(value):
        if float(value) <= 1:
            return "part", float(value)
    elif word == "keep" and value:
        try:
            return "bytes", parse_size(value, example="6GB")
        except ValueError as error:
            raise ValueError(f"recompute={text!r}: {error}; pass {FORMS}") from None
    raise ValueError(f"recompute={text!r}: the text has an unknown form; pass {FORMS}")


def policy_of(given: object) -> "Policy | None":
    """Return a policy as `par_recompute.checkpoint_layers` takes it.

    Args:
        given: A policy of par-recompute, or a text in one of `FORMS`; None or an empty text for no policy.

    Raises:
        ValueError: The value is neither.
    """
    from par_recompute import Drop, Keep, Layers, Ops  # noqa: PLC0415 - it imports torch, and texts are read without

    if given is None or given == "":
        return None
    if isinstance(given, Drop | Keep | Layers | Ops):
        return given
    if not isinstance(given, str):
        raise ValueError(
            f"recompute={given!r}: it must be a text or a policy; pass None, {FORMS}, or a policy of par-recompute"
        )
    word, number = read_recompute(given)
    if word == "cheap":
        return "cheap"
    return Layers(int(number)) if word == "layers" else Keep(number if word == "part" else int(number))


def make_schedule(name: str, ranks: int, microbatches: int, *, zero: int) -> Schedule:
    """Make a pipeline schedule that fits the ZeRO stage.

    Args:
        name: The name of a schedule of par-pipeline or of an installed package.
        ranks: The number of ranks of the pipeline.
        microbatches: The number of microbatches in a batch.
        zero: The ZeRO stage.

    Raises:
        ValueError: No schedule has this name, or it does not fit these numbers or this stage.
    """
    found = schedule(name, ranks, microbatches)
    # W is the separate computation of weight gradients in zero-bubble schedules.
    if zero == 3 and any(action.op == "W" for actions in found.ranks for action in actions):
        raise ValueError(
            f"zero=3 with schedule={name!r}: stage 3 frees weights after each backward, and this schedule computes "
            "weight gradients later; use zero=2, or a schedule such as '1f1b'"
        )
    return found


def check_autocast(stage: int, precision: str) -> None:
    """Raise ValueError if autocast would keep what a ZeRO stage frees.

    Args:
        stage: The ZeRO stage.
        precision: The name of the precision, such as "bf16-amp".
    """
    if stage == 3 and precision.endswith("-amp"):
        raise ValueError(
            f"zero=3 with precision={precision!r}: autocast would keep a cast copy of every weight until backward; use "
            f"precision={precision.removesuffix('-amp')!r}, which gathers weights in 16 bits, or zero=2"
        )


def microbatches_of(given: int, ranks: int) -> int:
    """Return the number of microbatches: `given` if not 0, else two per pipeline rank, one without a pipeline."""
    # With two per rank, the bubble of 1f1b is below a third of a step.
    return given or (2 * ranks if ranks > 1 else 1)


def read_steps(text: str) -> range:
    """Return the steps that a text such as "steps=10:15" names; it excludes 15.

    Raises:
        UserError: The text has another form, or its range is empty.
    """
    match = _STEPS.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"profile={text!r}: it must be the first step and the step after the last, such as steps=10:15")
    return range(int(match[1]), int(match[2]))
