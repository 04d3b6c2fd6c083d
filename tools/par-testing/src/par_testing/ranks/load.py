"""Import the test module inside a rank as pytest would, with rewritten asserts, and find the test body."""

import pickle
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType

from _pytest.assertion import install_importhook
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.config import get_config
from _pytest.pathlib import import_path

from .job import Body, Module


def load(body: Body) -> tuple[Callable[..., object], dict[str, object]]:
    """The test function and its arguments.

    The arguments are unpickled last: their classes may be defined in the test module.
    """
    function = _find(import_module(body.module), body.qualname)
    return function, {name: pickle.loads(value) for name, value in body.arguments.items()}  # noqa: S301  # our own


def import_module(module: Module) -> ModuleType:
    """The test module; at once if this process, or the one it was forked from, has imported it before.

    pytest would first go through the names of all modules there are, which in a fork copies the pages that they lie on.
    """
    known = sys.modules.get(module.name)
    if known is not None and getattr(known, "__file__", None) == str(module.path):
        return known
    if module.rewrite is not None:
        _rewrite_asserts(module.name, module.rewrite)
    return import_path(
        module.path,
        mode=module.import_mode,
        root=module.root,
        consider_namespace_packages=module.namespace_packages,
    )


def _rewrite_asserts(module: str, patterns: tuple[str, ...]) -> None:
    """Installs pytest's import hook; it finds the rewritten code that the pytest process has cached."""
    hook = _import_hook()
    hook.fnpats = list(patterns)
    hook.mark_rewrite(module)


@cache
def _import_hook() -> AssertionRewritingHook:
    """The hook, which needs a configuration of pytest: the default one, which takes 14 ms."""
    return install_importhook(get_config())


def _find(module: ModuleType, qualname: str) -> Callable[..., object]:
    *classes, name = qualname.split(".")
    owner: object = module
    for class_name in classes:
        owner = getattr(owner, class_name)
    if isinstance(owner, type):
        owner = owner()
    function: Callable[..., object] = getattr(owner, name)
    return function
