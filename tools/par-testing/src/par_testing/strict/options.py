"""How strict: what `@pytest.mark.ranks(n, backend="strict", strict=Strict(...))` says."""

from dataclasses import dataclass
from typing import Literal, get_args

Complete = Literal["late", "early", "drawn"]
Sums = Literal["rank order", "halves"]


@dataclass(frozen=True, kw_only=True)
class Strict:
    """What a strict process group enforces beside the order of operations.

    Args:
        complete: When an operation writes its outputs. "late": when it is waited for, the last moment that is legal;
            "early": as soon as all ranks have issued it; "drawn": one of the two, by numbers drawn from (draw,
            communicator, position), the same in each run.
        draw: The seed of "drawn".
        slots: How many communicators of one rank can make progress at a time, as if kernels of the others found no
            room on the device; None for all.
        sums: The order in which the ranks' numbers are added: "rank order", or "halves", a tree, which shows what
            depends on the order.

    Raises:
        ValueError: A value is out of its range.
    """

    complete: Complete = "late"
    draw: int = 0
    slots: int | None = None
    sums: Sums = "rank order"

    def __post_init__(self) -> None:
        for name, kinds in (("complete", get_args(Complete)), ("sums", get_args(Sums))):
            if (value := getattr(self, name)) not in kinds:
                raise ValueError(f"Strict({name}={value!r}): give one of {', '.join(map(repr, kinds))}")
        if self.draw and self.complete != "drawn":
            raise ValueError(f'Strict(draw={self.draw}) draws nothing with complete="{self.complete}"; give "drawn"')
        if self.slots is not None and self.slots < 1:
            raise ValueError(
                f"Strict(slots={self.slots}): at least 1 communicator must be able to run, or None for all"
            )
