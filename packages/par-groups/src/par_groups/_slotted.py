"""Attributes that classes keep in `__slots__`, which `vars` of an object does not list. Without torch."""

from collections.abc import Iterator


def slotted_attributes(kind: type) -> Iterator[str]:
    """Yield the names of the attributes that a class and its bases declare in `__slots__`.

    Args:
        kind: Class. Private names such as `__size` are yielded as `getattr` takes them: `_Kind__size`.
    """
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            # Python mangles a private name with the class that declares it, without the leading underscores of the
            # class.
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name
