"""What is computed again in backward instead of kept: as a user says it, and as par-recompute takes it."""

import re
from typing import TYPE_CHECKING, TypeAlias

from par_groups import parse_size

if TYPE_CHECKING:
    from par_recompute import Drop, Keep, Layers, Ops

    Policy: TypeAlias = Drop | Keep | Layers | Ops | str

FORMS = "'cheap', 'layers', 'layers:2' for every second layer, 'keep:0.4' for a part, or 'keep:6GB' for a size"
"""What a text can be."""

_COUNT = re.compile(r"[0-9]+")
_PART = re.compile(r"[0-9]*\.?[0-9]+")


def read_recompute(text: str) -> tuple[str, float]:
    """What a text says: a word, and its number. Imports no torch.

    Args:
        text: One of the forms in `FORMS`.

    Returns:
        ("cheap", 0), ("layers", every), ("part", from 0 to 1) or ("bytes", size).

    Raises:
        ValueError: It says something else.
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
            raise ValueError(f"recompute is {text!r}, and {error}; it can be {FORMS}") from None
    raise ValueError(f"recompute is {text!r}; it can be {FORMS}")


def policy_of(given: object) -> "Policy | None":
    """A policy as `par_recompute.checkpoint_layers` takes it.

    Args:
        given: A policy of par-recompute, or a text in one of the forms in `FORMS`; None, or an empty text: none.

    Raises:
        ValueError: It is none of these.
    """
    from par_recompute import Drop, Keep, Layers, Ops  # noqa: PLC0415 - it imports torch, and texts are read without

    if given is None or given == "":
        return None
    if isinstance(given, Drop | Keep | Layers | Ops):
        return given
    if not isinstance(given, str):
        raise ValueError(f"recompute is {given!r}; it can be None, {FORMS}, or a policy of par-recompute")
    word, number = read_recompute(given)
    if word == "cheap":
        return "cheap"
    return Layers(int(number)) if word == "layers" else Keep(number if word == "part" else int(number))
