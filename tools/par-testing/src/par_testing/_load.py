"""Import the test module inside a rank as pytest would, with rewritten asserts, and find the test body."""

import pickle
from collections.abc import Callable
from functools import cache
from types import ModuleType

from _pytest.assertion import install_importhook
from _pytest.config import Config, get_config
from _pytest.pathlib import import_path

from ._job import Body


def load(body: Body) -> tuple[Callable[..., object], dict[str, object]]:
    """The test function and its arguments.

    The arguments are unpickled last: their classes may be defined in the test module.
    """
    if body.rewrite is not None:
        _rewrite_asserts(body.module, body.rewrite)
    module = import_path(
        body.path,
        mode=body.import_mode,
        root=body.root,
        consider_namespace_packages=body.namespace_packages,
    )
    function = _find(module, body.qualname)
    return function, {name: pickle.loads(value) for name, value in body.arguments.items()}  # noqa: S301  # our own


def _rewrite_asserts(module: str, patterns: tuple[str, ...]) -> None:
    """Installs pytest's import hook; it finds the rewritten code that the pytest process has cached."""
    hook = install_importhook(pytest_config())
    hook.fnpats = list(patterns)
    hook.mark_rewrite(module)


@cache
def pytest_config() -> Config:
    """A configuration of pytest with the default settings; the import hook does not work without one."""
    return get_config()


def _find(module: ModuleType, qualname: str) -> Callable[..., object]:
    *classes, name = qualname.split(".")
    owner: object = module
    for class_name in classes:
        owner = getattr(owner, class_name)
    if isinstance(owner, type):
        owner = owner()
    function: Callable[..., object] = getattr(owner, name)
    return function
