"""Registry of named entries: a dict that a decorator fills, and that other wheels extend through entry points.

A wheel can provide a name before any code imports the wheel: it declares an entry point in the registry's group, and
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
    """Named entries of one kind.

    Args:
        kind: Kind of the entries in words, for messages, such as "parallel mode".
        group: Entry-point group in which other wheels declare entries.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> None:
        """Add `entry` under `name`.

        Raises:
            ValueError: The name is taken; the message names both owners.
        """
        if name in self._entries:
            raise self._clash(name, owner_of(self._entries[name]), owner_of(entry))
        self._entries[name] = entry

    def names(self) -> tuple[str, ...]:
        """Return every known name, sorted, without loading an entry point."""
        return tuple(sorted({*self._entries, *self._points.names}))

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> T:
        """Return the entry of a name; import the wheel that provides it, if needed.

        Raises:
            ValueError: The name is unknown, or two wheels provide it.
        """
        # Two wheels may declare one name. Loading each of them lets `_load` report the clash.
        for point in self._points.select(name=name):
            self._load(point)
        if name not in self._entries:
            raise ValueError(f"no {self.kind} is called {name!r}; {suggest(name, self.names())}")
        return self._entries[name]

    @cached_property
    def _points(self) -> EntryPoints:
        return _points_on(tuple(sys.path)).select(group=self.group)

    def _load(self, point: EntryPoint) -> None:
        # If the wheel was imported before this look-up, its decorator has registered the entry already.
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
    """Return all entry points of the distributions installed on `path`, which is `sys.path`.

    One cached search serves all registries. It reads two files of every installed distribution, which takes 25 ms for
    a hundred distributions.
    """
    return cast("EntryPoints", entry_points())  # Python 3.11 has another class for all groups, with the same select


def owner_of(entry: object) -> str:
    """Return the place where an entry was defined, as `module.name`."""
    named = entry if hasattr(entry, "__qualname__") else type(entry)
    return f"{named.__module__}.{named.__qualname__}"


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return the end of an error message: the nearest valid name, and all valid names."""
    valid = list(valid)
    near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.6)
    known = ", ".join(map(repr, valid))
    return f"did you mean {near[0]!r}? Known: {known}" if near else f"known: {known}"
