"""From a collected pytest test to the record by which a rank finds and calls it."""

import pickle
from collections.abc import Mapping

import pytest

from .job import Body, Module


def body_of(item: pytest.Function) -> Body:
    """Describes the function of `item` and pickles its arguments.

    Raises:
        TypeError: An argument cannot be pickled; the message names it.
    """
    return Body(
        module=module_of(item),
        qualname=item.originalname if item.cls is None else f"{item.cls.__qualname__}.{item.originalname}",
        arguments=_pickle_each({name: item.funcargs[name] for name in item._fixtureinfo.argnames}),
    )


def module_of(item: pytest.Function) -> Module:
    """Describes the module in which the function of `item` lies."""
    config = item.config
    rewriting = config.getoption("assertmode") == "rewrite"
    return Module(
        path=item.getparent(pytest.Module).path,  # type: ignore[union-attr]  # a function lies in a module
        name=item.module.__name__,
        root=config.rootpath,
        import_mode=str(config.getoption("importmode")),
        namespace_packages=config.getini("consider_namespace_packages"),
        rewrite=tuple(config.getini("python_files")) if rewriting else None,
    )


def warning_filters_of(item: pytest.Function) -> tuple[str, ...]:
    """The warning filters of a test, in the order in which pytest applies them."""
    marks = [filter_ for mark in item.iter_markers("filterwarnings") for filter_ in mark.args]
    on_command_line = item.config.known_args_namespace.pythonwarnings or []
    return (*item.config.getini("filterwarnings"), *on_command_line, *marks)


def _pickle_each(arguments: Mapping[str, object]) -> dict[str, bytes]:
    pickled = {}
    for name, value in arguments.items():
        try:
            pickled[name] = pickle.dumps(value)
        except Exception as error:  # pickling calls __reduce__ of any class, which may raise anything
            raise TypeError(
                f"the argument {name!r} of a rank test cannot be pickled: {type(value).__name__} {value!r:.200} "
                f"({error}); every rank is a process of its own: build it in the test body, or pass plain values"
            ) from error
    return pickled
