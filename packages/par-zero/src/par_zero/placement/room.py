"""The room that a budget leaves for units which are whole."""

from collections.abc import Callable, Mapping

from .._tiers import least_in_words
from .ledger import Placement, Sizes
from .moments import Trace
from .place import check_least, place


def units_at_once(sizes: Mapping[int, int]) -> dict[str, int]:
    """Bytes of the units that are whole at one time at least: the root's, one that runs, and one that comes.

    Args:
        sizes: Bytes of each unit that is whole, by number; 0 is that of the root.
    """
    largest = sorted((size for number, size in sizes.items() if number), reverse=True)[:2]
    return {"the root's unit": sizes.get(0, 0), "two units" if len(largest) > 1 else "one unit": sum(largest)}


class Room:
    """What a budget of the device leaves for whole units, beside what lies there throughout.

    Args:
        budget: Bytes of the device.
        resident: Bytes that lie there throughout, by what they are.
        sizes: Bytes of each unit that is whole, by number; 0 is that of the root. They are alike on all ranks.
        policy: The name of the policy by which units are placed.
        other: Tells how many bytes there are of anything else; None: nobody does.

    Attributes:
        resident: Bytes that lie there throughout, by what they are.
        sizes: Bytes of each unit that is whole, by number.
        other: Tells how many bytes there are of anything else; None: nobody does.

    Raises:
        ValueError: There is no room for two units, one that runs and one that comes.
    """

    def __init__(
        self,
        budget: int,
        resident: Mapping[str, int],
        sizes: Mapping[int, int],
        policy: str,
        other: Callable[[], int] | None,
    ) -> None:
        parts = {
            "parameters": resident["parameters"],
            **units_at_once(sizes),
            **{name: size for name, size in resident.items() if name != "parameters"},
        }
        if sum(parts.values()) > budget:
            words = least_in_words("device", budget, parts)
            raise ValueError(f"{words}; give more, or make units smaller by units=")
        self.resident, self.sizes = dict(resident), dict(sizes)
        self.other = other
        self._budget, self._policy = budget, policy

    def place(self, sizes: Sizes, trace: Trace, resident: int) -> Placement:
        """A placement of what a step needs.

        Args:
            sizes: Bytes of each unit that is whole, by name.
            trace: What the step needs.
            resident: Bytes that lie on the device throughout, of the rank that has most.

        Raises:
            ValueError: There is too little room.
        """
        check_least(trace, sizes, self._budget, resident)
        return place(trace, sizes, self._budget - resident, self._policy)
