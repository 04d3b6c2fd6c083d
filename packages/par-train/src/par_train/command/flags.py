"""The flags of `par-train plan`, beside those of `par-train run`: what they take, and what they mean. No torch."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._errors import UserError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGTP]?)(i?)B?(?:/s)?", re.IGNORECASE)


def flag(default: str | None, kind: str, text: str) -> Any:
    """A field with what the command line shows of it; a default of None: it must be given."""
    return field(metadata={"default": default, "kind": kind, "help": text})


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What `par-train plan` is told of the machine, and of what to print. Sizes are bytes."""

    world: int = flag(None, "N", "devices, such as 1024; needed")
    device_memory: float = flag(None, "SIZE", "memory of a device, such as 80GB or 80GiB; needed")
    top: int = flag("10", "N", "topologies to show, each with its best schedule and stage")
    json: str = flag("", "FILE", "write all figures there, too")
    flops: float | None = flag(
        "auto",
        "X|auto",
        "peak operations a second of a device; auto: an H100's, 989e12, fp32 67e12, tf32 495e12, fp8 1979e12",
    )
    efficiency: float = flag("0.5", "PART", "part of the peak that the model reaches")
    bandwidth: float = flag("400GB", "SIZE", "bytes a second into a device from its node")
    network: float = flag("50GB", "SIZE", "bytes a second into a device from other nodes")
    latency: float = flag("10e-6", "SECONDS", "of each operation, before its first byte")
    devices_per_node: int = flag("8", "N", "ranks that follow one another share a node")


def plan_flags() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """The flags, such as "--device-memory", with their fields."""
    for each in dataclasses.fields(PlanFlags):
        yield f"--{each.name.replace('_', '-')}", each


def read_flags(given: Mapping[str, str]) -> PlanFlags:
    """The flags as values.

    Args:
        given: Texts by field.

    Raises:
        UserError: One that is missing, or no such number.
    """
    values: dict[str, Any] = {}
    for name, each in plan_flags():
        text = given.get(each.name, each.metadata["default"])
        if text is None:
            raise UserError(f"{name} is missing: {each.metadata['help']}; see par-train plan --help")
        values[each.name] = _value(name, each.metadata["kind"], text)
    return PlanFlags(**values)


def _value(name: str, kind: str, text: str) -> Any:
    if kind == "FILE":
        return text
    if kind == "X|auto" and text == "auto":
        return None
    try:
        value = int(text) if kind == "N" else parse_size(text) if kind == "SIZE" else float(text)
    except ValueError:
        raise UserError(f"{name} is {text!r}; it must be {_EXPECTED[kind]}") from None
    if kind == "PART" and value > 1:
        raise UserError(f"{name} is {text}; it must be {_EXPECTED[kind]}")
    if not 0 < value < float("inf"):
        raise UserError(f"{name} is {text}; it must be above 0, and finite")
    return value


_EXPECTED = {
    "N": "a whole number",
    "PART": "a part above 0, of 1 at most, such as 0.4",
    "X|auto": "a number, such as 989e12, or auto",
    "SECONDS": "a number of seconds, such as 10e-6",
    "SIZE": "a size, such as 80GB or 80GiB",
}


def parse_size(text: str) -> float:
    """Bytes: "80GB" is 80e9, "80GiB" is 80 * 2**30.

    Raises:
        ValueError: It is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size")
    number, unit, binary = found.groups()
    if binary and not unit:
        raise ValueError(f"{text!r} is no size")
    return float(number) * (1024.0 if binary else 1000.0) ** _UNITS[(unit or "").upper()]
