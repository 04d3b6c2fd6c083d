"""Counts of heads that a module's code reads from its config, with this rank's numbers."""

from typing import Any


class LocalConfig:
    """A view of a config in which some counts are this rank's; everything else is the config's own, in both ways.

    Args:
        config: The config of the model, which all its modules share.
        counts: This rank's numbers, by name.
    """

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        self.__dict__.update(par_config=config, par_counts=counts)

    def __getattr__(self, name: str) -> Any:
        inside = self.__dict__
        if name.startswith("__") or "par_counts" not in inside:  # while it is copied
            raise AttributeError(name)
        counts: dict[str, int] = inside["par_counts"]
        return counts[name] if name in counts else getattr(inside["par_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["par_config"], name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__['par_counts']} of {type(self.__dict__['par_config']).__name__})"
