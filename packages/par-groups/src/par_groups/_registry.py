"""A registry: a plain dict that a decorator fills, and other wheels through entry points.

A wheel that nobody imported yet can still provide a name: it declares an entry point in the registry's group, and
the first look-up of that name loads it.
"""

import difflib
import sys
from collections.abc import Iterable
from functools import cache, cached_property
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Registry(Generic[T]):
    """Named things of one kind.

    Args:
        kind: What is registered, in words for messages, such as "parallel mode".
        group: The entry-point group in which other wheels declare theirs.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> None:
        """Adds `entry` under `name`.

        Raises:
            ValueError: The name is taken; the message names both owners.
        """
        if name in self._entries:
            raise self._clash(name, owner_of(self._entries[name]), owner_of(entry))
        self._entries[name] = entry

    def names(self) -> tuple[str, ...]:
        """Every known name, sorted; nothing is loaded to find out."""
        return tuple(sorted({*self._entries, *self._points.names}))

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> T:
        """The entry of that name; if a wheel that nobody has imported provides it, the wheel is imported.

        Raises:
            ValueError: Nobody provides the name, or two do.
        """
        for point in self._points.select(name=name):
            self._load(point)
        if name not in self._entries:
            raise ValueError(f"no {self.kind} is called {name!r}; {suggest(name, self.names())}")
        return self._entries[name]

    @cached_property
    def _points(self) -> EntryPoints:
        return _points_on(tuple(sys.path)).select(group=self.group)

    def _load(self, point: EntryPoint) -> None:
        before = self._entries.get(point.name)
        if before is not None and owner_of(before) == point.value.replace(":", "."):
            return
        loaded = point.load()  # the module's own decorator may register it while it is imported
        present = self._entries.setdefault(point.name, loaded)
        if present is not loaded:
            raise self._clash(point.name, owner_of(present), point.value)

    def _clash(self, name: str, first: str, second: str) -> ValueError:
        return ValueError(f"the {self.kind} {name!r} is registered twice, by {first} and by {second}; rename one")


@cache
def _points_on(path: tuple[str, ...]) -> EntryPoints:  # noqa: ARG001 - the cache is for this path
    """All entry points of what is installed on `path`, which is `sys.path`.

    Every registry looks for its own group, and one search serves them all: it reads two files of every installed
    distribution, 25 ms where there are a hundred.
    """
    return cast("EntryPoints", entry_points())  # Python 3.11 has another class for all groups, with the same select


def owner_of(entry: object) -> str:
    """Where an entry was defined, as `module.name`."""
    named = entry if hasattr(entry, "__qualname__") else type(entry)
    return f"{named.__module__}.{named.__qualname__}"


def suggest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: the nearest valid names, or all of them."""
    valid = list(valid)
    near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.6)
    known = ", ".join(map(repr, valid))
    return f"did you mean {near[0]!r}? Known: {known}" if near else f"known: {known}"
