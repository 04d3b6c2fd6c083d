"""The position of a data loader, as a checkpoint stores it."""

from collections.abc import Mapping
from typing import Any


class LoaderPosition:
    """The number of samples that all ranks have consumed, and the epoch of the next one.

    It outlives its loader: a trainer can still checkpoint the position after the loader was closed.

    Attributes:
        samples: Number of samples that all ranks together have consumed since training began.
        epoch: Epoch of the next batch, from 0.
        begin: Number of samples in all earlier epochs. Only used with lanes.
        lanes: Number of lanes in which a stream is read; 1 for any other dataset.
        data: The dataset's `digest`, which differs for different data; "" if it has none.
    """

    samples, epoch, begin, lanes, data = 0, 0, 0, 1, ""

    def next_epoch(self) -> None:
        """Move to the next epoch."""
        self.epoch, self.begin = self.epoch + 1, self.samples

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        state: dict[str, Any] = {"samples": self.samples, **({"data": self.data} if self.data else {})}
        if self.lanes == 1:
            return state  # the epoch follows from the number of samples
        # A lane can end anywhere, so the number of samples does not determine the epoch.
        return {**state, "epoch": self.epoch, "begin": self.begin, "lanes": self.lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: The number of samples is not a non-negative integer.
        """
        samples = state["samples"]
        if not isinstance(samples, int) or samples < 0:
            raise ValueError(
                f"samples={samples!r} in the saved position: it must be a non-negative integer; pass what state_dict() "
                "returned"
            )
        self.samples, self.epoch = samples, state.get("epoch", self.epoch)
        self.begin, self.lanes = state.get("begin", 0), state.get("lanes", 1)
        self.data = state.get("data", self.data)
