"""The memory that a budget leaves for gathered units."""

from collections.abc import Callable, Mapping

from .._tiers import least_in_words
from .ledger import Placement, Sizes
from .moments import Trace
from .place import check_least, place


class Room:
    """The memory for gathered units: the device's budget, less the bytes that stay on the device throughout.

    Args:
        budget: Bytes of the device.
        resident: Bytes that stay on the device throughout, by kind, such as "parameters".
        sizes: Bytes of each gathered unit, by number; 0 is the root's unit. They are equal on all ranks.
        policy: Name of the placement policy.
        other: Function that returns the bytes of all other memory on the device. None: other memory is not counted.

    Attributes:
        resident: Bytes that stay on the device throughout, by kind.
        sizes: Bytes of each gathered unit, by number.
        other: Function that returns the bytes of all other memory on the device. None: other memory is not counted.

    Raises:
        ValueError: The running unit and the next unit do not fit at the same time.
    """

    def __init__(
        self,
        budget: int,
        resident: Mapping[str, int],
        sizes: Mapping[int, int],
        policy: str,
        other: Callable[[], int] | None,
    ) -> None:
        # The root, a running unit and the next one are gathered at a time. Any two units may follow each other, so the
        # two largest are the bound.
        largest = sorted((size for number, size in sizes.items() if number), reverse=True)[:2]
        parts = {
            "parameters": resident["parameters"],
            "the root's unit": sizes.get(0, 0),
            "two units" if len(largest) > 1 else "one unit": sum(largest),
            **{name: size for name, size in resident.items() if name != "parameters"},
        }
        if sum(parts.values()) > budget:
            words = least_in_words("device", budget, parts)
            raise ValueError(f"{words}; give more, or make units smaller by units=")
        self.resident, self.sizes = dict(resident), dict(sizes)
        self.other = other
        self._budget, self._policy = budget, policy

    def place(self, sizes: Sizes, trace: Trace, resident: int) -> Placement:
        """Return a placement of a step.

        Args:
            sizes: Bytes of each gathered unit, by name.
            trace: Trace of the step.
            resident: Bytes that stay on the device throughout, the maximum over all ranks.

        Raises:
            ValueError: The budget is too small.
        """
        # Separately from `place`, so that the message also lists the resident bytes.
        check_least(trace, sizes, self._budget, resident)
        return place(trace, sizes, self._budget - resident, self._policy)
