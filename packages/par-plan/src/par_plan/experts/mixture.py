"""The sizes of a layer of experts. No torch."""

from dataclasses import dataclass

Load = float | tuple[float, ...]
"""How busy experts are: the rows of the busiest rank by the mean, or the rows of each expert as they were counted."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A layer of experts as the planner sees it; all of a model are alike.

    Args:
        hidden: Features of a token, h.
        intermediate: Features of an expert's activation, f.
        experts: Number of experts, E.
        top_k: Number of experts that a token goes to, k.
        shared: Number of experts that every token goes to as well.
        gated: Whether an expert has three matrices, of which one is a gate; else two.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared: int = 0
    gated: bool = True

    @property
    def expert(self) -> int:
        """Number of elements in the matrices of one expert."""
        return self.hidden * self.intermediate * (3 if self.gated else 2)

    @property
    def router(self) -> int:
        """Number of elements in the router's weight."""
        return self.experts * self.hidden

    @property
    def active(self) -> int:
        """Number of elements that one token is multiplied by."""
        return self.router + (self.top_k + self.shared) * self.expert


def check_load(load: Load) -> None:
    """Raise ValueError if an imbalance is below 1, or if no expert has tokens."""
    if isinstance(load, tuple):
        if min(load, default=-1.0) < 0 or not sum(load):
            raise ValueError(f"imbalance is {load}; pass the token count of each expert, with at least one above 0")
    elif not load >= 1:
        raise ValueError(f"imbalance is {load}; it is relative to the mean; pass 1 or more")


def imbalance_of(load: Load, ranks: int) -> float:
    """Return the tokens of the busiest rank, relative to the mean.

    Args:
        load: Imbalance as given, or token counts of every expert; consecutive experts share a rank.
        ranks: Number of ranks that experts are dealt out over; they divide the experts.
    """
    if not isinstance(load, tuple):
        return min(load, float(ranks))
    own = len(load) // ranks
    busiest = max(sum(load[rank * own : (rank + 1) * own]) for rank in range(ranks))
    return busiest * ranks / sum(load)
